"""The modes of the program besides training: evaluating checkpoints, and profiling."""
