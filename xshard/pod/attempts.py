"""The attempts of a run, that is the starts of its program: what their time went into, and what of it has counted.

Rows of steps that are made again are dropped, and a process that is killed says nothing more. So each start keeps what
the process before has said last of itself.
"""

import contextlib
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from xshard.files import disk, jsonfile
from xshard.metrics import clock
from xshard.pod import status

FILE = "attempts.jsonl"
AGAIN, OTHER, DOWN = "made again", "other", "not running"
# What the time of an attempt goes into, in the order in which it is shown.
PARTS = (
    clock.TRAINING,
    AGAIN,
    clock.DATA,
    clock.CHECKPOINT,
    clock.EVALUATION,
    clock.START,
    OTHER,
)


class Attempt(NamedTuple):
    """One attempt, as process 0 has seen it.

    Attributes:
      begun: when it began, in seconds since 1970; `ended`: when it was last heard of.
      first: the step that it went on from; None if it did not come so far. `step`: the last one that it made.
      end: how it ended, or what it was doing when it was last heard of.
      seconds: of each of `PARTS`; steps that a later attempt has made again are not 'training'.
      down: the seconds until the next attempt began; 0 if this one was done, or is the last.
    """

    begun: float
    ended: float
    first: int | None
    step: int | None
    end: str
    seconds: dict[str, float]
    down: float


class Goodput(NamedTuple):
    """The share of the time of all attempts that went into steps that count, and the rest.

    Attributes:
      seconds: from the begin of the first attempt to what was last heard; without the time after one that was done.
      share: of `seconds`, what went into training steps that count.
      lost: the shares of the other `PARTS`, and of the time in which nothing ran.
    """

    seconds: float
    share: float
    lost: dict[str, float]


def keep(directory: pathlib.Path) -> None:
    """Keeps what process 0 of the attempt before has said last; to be called before another one says something.

    What cannot be read or written here is left out: it is no reason for a run to end.
    """
    # Nor is the file made for nothing.
    with contextlib.suppress(OSError, ValueError):
        if rows := _rows(directory):
            lines = [json.dumps(row) + "\n" for row in rows]
            disk.replace(directory / FILE, "".join(lines).encode())


def read(directory: pathlib.Path) -> list[Attempt]:
    """The attempts of a run, the last one too; none of a run of a version that kept none.

    Raises:
      UserError: if a file of the run is damaged.
    """
    attempts = []
    # Whatever a later attempt begins from, no step after it has counted.
    counted = None
    after = None
    for row in reversed(_rows(directory)):
        attempts.append(_attempt(row, counted, after))
        after = row["begun"]
        if row["first"] is not None:
            counted = row["first"] if counted is None else min(counted, row["first"])
    return attempts[::-1]


def goodput(attempts: Sequence[Attempt]) -> Goodput | None:
    """Returns what the time of some attempts went into; None of none."""
    spent = dict.fromkeys((*PARTS, DOWN), 0.0)
    for attempt in attempts:
        for name, seconds in (*attempt.seconds.items(), (DOWN, attempt.down)):
            spent[name] += seconds
    total = sum(spent.values())
    if not total:
        return None
    shares = {name: seconds / total for name, seconds in spent.items()}
    share = shares.pop(clock.TRAINING)
    return Goodput(total, share, {name: lost for name, lost in shares.items() if lost})


def _attempt(row: Mapping[str, Any], counted: int | None, after: float | None) -> Attempt:
    """One attempt.

    Args:
      row: what its process has said last.
      counted: the last of its steps that may count; None: all.
      after: when the next attempt began; None if there is none.
    """
    ended = max(row["time"], row["begun"])
    seconds = dict.fromkeys(PARTS, 0.0) | row["seconds"]
    if row["trained"]:
        last = row["step"] if counted is None else min(row["step"], counted)
        useful = max(0, last - row["first"]) / row["trained"]
        seconds[AGAIN] = (1 - useful) * seconds[clock.TRAINING]
        seconds[clock.TRAINING] *= useful
    rest = max(0.0, ended - row["begun"] - sum(seconds.values()))
    # One that is killed while it starts has not come to say how long that took.
    seconds[OTHER if row["trained"] else clock.START] += rest
    is_done = row["doing"].startswith(status.DONE)
    down = 0.0 if after is None or is_done else max(0.0, after - ended)
    end = row["doing"]
    if not end.startswith(status.ENDS):
        is_running = after is None and time.time() - ended < status.SILENT_SECONDS
        end = end if is_running else f"killed; was {end}"
    return Attempt(row["begun"], ended, row["first"], row["step"], end, seconds, down)


def _rows(directory: pathlib.Path) -> list[dict[str, Any]]:
    """The last words of all attempts, that of the last one from its status; without lines that are damaged."""
    lines = [row for _, row in jsonfile.read_lines(directory / FILE)]
    kept = [row for row in lines if row is not None and "begun" in row and status.is_row(row)]
    last = (status.read_if_exists(directory) or [{}])[0]
    if "begun" not in last:
        return kept
    return [*(row for row in kept if row["begun"] != last["begun"]), last]
