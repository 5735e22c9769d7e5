"""The exit codes that report how a run ended."""

DONE = 0
FAILED = 1
# Another start would not help, because the same steps would not be finite again.
NONFINITE = 3
# The state is saved, and the run is to be started again.
PREEMPTED = 42
# The state is saved, and a user asked for the end, by Ctrl-C.
INTERRUPTED = 130
