"""A prompt computed once: blocks of texts found again in a store, restored, explained."""
