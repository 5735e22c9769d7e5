"""The modes of the program besides training: evaluating the checkpoints of a run, and
profiling some of its steps.
"""
