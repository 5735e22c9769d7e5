"""The recovery of a run from a bad step, from an earlier checkpoint."""
