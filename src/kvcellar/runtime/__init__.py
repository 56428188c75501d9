"""Models, contexts and sequences that run, and what turns text into tokens and back."""
