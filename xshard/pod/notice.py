"""Notices that a run is given while it trains, and the exit codes that say how it has ended."""

from typing import NamedTuple

# 42 and 130 have saved; 42 asks to be started again, 130 comes of a person's Ctrl-C. 3 would come again: the
# same steps are not finite the next time.
DONE, FAILED, NONFINITE, PREEMPTED, INTERRUPTED = 0, 1, 3, 42, 130
# What is said of a process that ends with a code; of all others that they have stopped.
ENDS = {DONE: "done", NONFINITE: "failed: not finite"}
SAVE, STOP = "save", "stop"
# In the work directory, made by a person: the run saves and rests until it is removed.
STOP_FILE = "STOP"


class Notice(NamedTuple):
    """An action that all processes take at the same point.

    Attributes:
      kind: 'save' or 'stop', which saves too.
      why: for people.
      code: the exit code of a stop.
    """

    kind: str
    why: str
    code: int = PREEMPTED


BY_CLOCK = Notice(SAVE, "checkpoint.every_minutes have passed")
