"""A run around its steps: what is checked before them, how it begins, is saved and goes on."""
