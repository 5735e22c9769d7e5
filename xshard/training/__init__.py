"""The state of a run and its steps, and what its replicas hold of the state."""
