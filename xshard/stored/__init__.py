"""Fingerprints of a run's state; its per-replica arrays on other replicas."""
