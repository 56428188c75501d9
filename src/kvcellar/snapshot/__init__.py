"""Sequences saved and loaded: file formats, stores, and a cache of prompts on top of them."""
