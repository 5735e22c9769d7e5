"""Requests to a run while it trains: to save its state, and maybe to stop."""

from typing import NamedTuple

from xshard.pod import exit_codes

SAVE = "save"
STOP = "stop"


class Request(NamedTuple):
    """An action that all processes take at the same step.

    Attributes:
      kind: 'save', or 'stop', which saves too.
      why: the reason, for the user.
      code: the exit code of a stop.
    """

    kind: str
    why: str
    code: int = exit_codes.PREEMPTED


BY_CLOCK = Request(SAVE, "checkpoint.every_minutes have passed")
