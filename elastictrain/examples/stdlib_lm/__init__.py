"""A byte-level GPT on the source of the Python standard library."""
