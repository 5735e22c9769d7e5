"""Starts runs: here, on a cluster, on a cloud. `python -m launch --help` shows how."""
