"""Conversions of a run's state between training steps, checkpoints and other numbers of
devices; fingerprints of it.
"""
