"""A network with its rule, its state, and what of that differs between replicas."""
