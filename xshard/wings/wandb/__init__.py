"""Weights & Biases, to which a run sends its rows."""
