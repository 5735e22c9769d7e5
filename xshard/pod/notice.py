"""Notices that a run receives while it trains, and the exit codes that report how it
ended.
"""

from typing import NamedTuple

# With 42 and 130 the state is saved. 42 asks to be started again; 130 follows a user's
# Ctrl-C. After 3 a restart does not help, because the same steps would not be finite
# again.
DONE, FAILED, NONFINITE, PREEMPTED, INTERRUPTED = 0, 1, 3, 42, 130
# The status of a process that ended with a code. With any other code it is 'stopped'.
ENDS = {DONE: "done", NONFINITE: "failed: not finite"}
SAVE, STOP = "save", "stop"
# A user creates this file in the work directory: the run saves and stops, and does not
# train until it is removed.
STOP_FILE = "STOP"


class Notice(NamedTuple):
    """An action that all processes take at the same step.

    Attributes:
      kind: 'save', or 'stop', which saves too.
      why: the reason, for the user.
      code: the exit code of a stop.
    """

    kind: str
    why: str
    code: int = PREEMPTED


BY_CLOCK = Notice(SAVE, "checkpoint.every_minutes have passed")
