"""The attempts of a run, one for each start of its program: how they spent their time,
and how much of it counted.

The metrics cannot tell: rows of repeated steps are dropped, and a killed process writes
nothing more. Each start therefore preserves the last status that the process before it
wrote.
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
REPEATED, OTHER, DOWN = "made again", "other", "not running"
# The parts into which the time of an attempt is divided, in the order in which they are
# shown.
TIME_CATEGORIES = (
    clock.TRAINING,
    REPEATED,
    clock.DATA,
    clock.CHECKPOINT,
    clock.EVALUATION,
    clock.START,
    OTHER,
)


class Attempt(NamedTuple):
    """One attempt, as process 0 recorded it.

    Attributes:
      begun: when it began, in seconds since 1970.
      ended: when it last wrote its status, in seconds since 1970.
      first: the step that it started from; None if it did not get that far.
      step: the last step that it made; None if it made none.
      end: how it ended, or its last known phase.
      seconds: the seconds spent in each of `TIME_CATEGORIES`; steps that a later
        attempt repeated are not 'training'.
      down: the seconds until the next attempt began; 0 if this one was done or is the
        last.
    """

    begun: float
    ended: float
    first: int | None
    step: int | None
    end: str
    seconds: dict[str, float]
    down: float


class Goodput(NamedTuple):
    """The share of the time of all attempts that went into steps that count, and the
    shares of the rest.

    Attributes:
      seconds: the time from the start of the first attempt to the last status, without
        the time after a completed one.
      share: the share of `seconds` that went into training steps that count.
      lost: the shares of the other `TIME_CATEGORIES`, and of the time in which nothing
        ran.
    """

    seconds: float
    share: float
    lost: dict[str, float]


def preserve_previous(directory: pathlib.Path) -> None:
    """Preserves the last status of the previous attempt. It must be called before this
    attempt writes its own.

    Errors of reading and writing are ignored, because missing statistics are no reason
    to end a run.
    """
    # Without a previous attempt no file is created.
    with contextlib.suppress(OSError, ValueError):
        if rows := _rows(directory):
            lines = [json.dumps(row) + "\n" for row in rows]
            disk.replace(directory / FILE, "".join(lines).encode())


def read(directory: pathlib.Path) -> list[Attempt]:
    """Returns the attempts of a run, including the last; empty if it has none.

    Raises:
      UserError: if a file of the run is damaged.
    """
    attempts = []
    # Goes backwards in time: if a later attempt started from a step, no earlier work
    # beyond that step counted.
    counted = None
    after = None
    for row in reversed(_rows(directory)):
        attempts.append(_attempt(row, counted, after))
        after = row["begun"]
        if row["first"] is not None:
            counted = row["first"] if counted is None else min(counted, row["first"])
    return attempts[::-1]


def goodput(attempts: Sequence[Attempt]) -> Goodput | None:
    """Returns how some attempts spent their time; None if they spent none."""
    spent = dict.fromkeys((*TIME_CATEGORIES, DOWN), 0.0)
    for attempt in attempts:
        for name, seconds in (*attempt.seconds.items(), (DOWN, attempt.down)):
            spent[name] += seconds
    total = sum(spent.values())
    if not total:
        return None
    shares = {name: seconds / total for name, seconds in spent.items()}
    share = shares.pop(clock.TRAINING)
    return Goodput(total, share, {name: lost for name, lost in shares.items() if lost})


def _attempt(
    row: Mapping[str, Any], counted: int | None, after: float | None
) -> Attempt:
    """Builds an attempt from its last status.

    Args:
      row: the last status of the attempt's process 0.
      counted: the last step that may count; None if all may.
      after: when the next attempt began; None if there is none.
    """
    ended = max(row["time"], row["begun"])
    seconds = dict.fromkeys(TIME_CATEGORIES, 0.0) | row["seconds"]
    if row["trained"]:
        last = row["step"] if counted is None else min(row["step"], counted)
        useful = max(0, last - row["first"]) / row["trained"]
        seconds[REPEATED] = (1 - useful) * seconds[clock.TRAINING]
        seconds[clock.TRAINING] *= useful
    rest = max(0.0, ended - row["begun"] - sum(seconds.values()))
    # An attempt that was killed before its first step reported no start time, so the
    # rest of its time was the start.
    seconds[OTHER if row["trained"] else clock.START] += rest
    is_done = row["doing"].startswith(status.DONE)
    down = 0.0 if after is None or is_done else max(0.0, after - ended)
    end = row["doing"]
    if not end.startswith(status.ENDS):
        is_running = after is None and time.time() - ended < status.SILENT_SECONDS
        end = end if is_running else f"killed; was {end}"
    return Attempt(row["begun"], ended, row["first"], row["step"], end, seconds, down)


def _rows(directory: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the last status of each attempt, without damaged lines. The newest is
    read from the status file.
    """
    kept = []
    for _, row in jsonfile.read_lines(directory / FILE):
        if row is None:
            continue
        with contextlib.suppress(ValueError):
            status.check_row(row)
            kept.append(row)
    rows = status.read_if_exists(directory)
    if rows is None:
        return kept
    last = rows[0]
    return [*(row for row in kept if row["begun"] != last["begun"]), last]
