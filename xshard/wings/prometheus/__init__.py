"""Prometheus, which scrapes the newest numbers of a run."""
