"""What the program does besides training: judging the checkpoints of a run, and tracing some of its steps."""
