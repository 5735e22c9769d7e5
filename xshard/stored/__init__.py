"""A state as checkpoints have it, and as other numbers of devices take it."""
