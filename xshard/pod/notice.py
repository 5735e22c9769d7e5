"""The earlier name of `exit_codes` and `request`, until all callers have switched."""

from xshard.pod.exit_codes import (
    DONE,
    FAILED,
    INTERRUPTED,
    NONFINITE,
    PREEMPTED,
)
from xshard.pod.exit_codes import LAST_PHASES as ENDS
from xshard.pod.request import BY_CLOCK, SAVE, STOP, STOP_FILE
from xshard.pod.request import Request as Notice

__all__ = [
    "BY_CLOCK",
    "DONE",
    "ENDS",
    "FAILED",
    "INTERRUPTED",
    "NONFINITE",
    "PREEMPTED",
    "SAVE",
    "STOP",
    "STOP_FILE",
    "Notice",
]
