"""Requests to a run while it trains: to save its state, to stop, to trace steps."""

from typing import NamedTuple

from xshard.pod import exit_codes

PROFILE = "profile"
SAVE = "save"
STOP = "stop"
ADMIT = "admit"
# The most urgent first: of several requests this one is acted on first.
BY_URGENCY = (STOP, SAVE, PROFILE, ADMIT)


class Request(NamedTuple):
    """An action that all processes take at the same step.

    Attributes:
      kind: 'save'; 'stop', which saves too; 'profile'; or 'admit', which saves and
        lets processes in.
      why: the reason, for the user.
      code: the exit code of a stop.
      steps: the number of steps that a profile traces.
    """

    kind: str
    why: str
    code: int = exit_codes.PREEMPTED
    steps: int = 0


# Why a run stops whose user has limited its time.
TIME_IS_OVER = "the time of --stop_after has passed"
ARRIVALS = Request(ADMIT, "processes wait for a place")
BY_CLOCK = Request(SAVE, "checkpoint.every_minutes have passed")
