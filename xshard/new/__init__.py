"""A generator of new experiments."""
