"""Tools that trace what a run has logged to its cause."""
