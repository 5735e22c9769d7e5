"""Losses that jump, to which a run reacts as to those that are not finite."""
