"""The modes of the program besides training: judging the checkpoints of a run, and tracing some of its steps."""
