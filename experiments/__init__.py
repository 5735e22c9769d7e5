"""The example experiments, one folder each."""
