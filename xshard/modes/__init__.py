"""The mode of the program besides training: evaluating checkpoints."""
