"""A network with its update rule: its state, its updates, and the run around them."""
