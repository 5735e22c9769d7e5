"""A new experiment, to begin with."""
