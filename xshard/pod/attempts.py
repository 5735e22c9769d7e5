"""The attempts of a run, one for each start of its program: how they spent their time,
and how much of it counted.

The metrics cannot tell: rows of repeated steps are dropped, and a killed process writes
nothing more. Each start therefore preserves the last status that the process before it
wrote.
"""

import contextlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from xshard.base import clock
from xshard.files import disk, jsonfile
from xshard.pod import status

FILE = "attempts.jsonl"
REPEATED = "made again"
OTHER = "other"
DOWN = "not running"
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
    """One attempt, as process 0 recorded it. The names are keys of `launch status`.

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
    with contextlib.suppress(OSError, ValueError):
        rows = _rows(directory)
        # Without a previous attempt no file is created.
        if rows:
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
    last_that_counts = None
    next_row = None
    for row in reversed(_rows(directory)):
        attempts.append(_attempt(row, last_that_counts, next_row))
        next_row = row
        if row["first"] is not None:
            last_that_counts = _smaller(row["first"], last_that_counts)
    attempts.reverse()
    return attempts


def goodput(attempts: Sequence[Attempt]) -> Goodput | None:
    """Returns how some attempts spent their time; None if they spent none."""
    spent = dict.fromkeys((*TIME_CATEGORIES, DOWN), 0.0)
    for attempt in attempts:
        for category, seconds in attempt.seconds.items():
            spent[category] += seconds
        spent[DOWN] += attempt.down
    total = sum(spent.values())
    if not total:
        return None
    lost = {}
    for category, seconds in spent.items():
        if seconds and category != clock.TRAINING:
            lost[category] = seconds / total
    return Goodput(total, spent[clock.TRAINING] / total, lost)


def _attempt(
    row: Mapping[str, Any],
    last_that_counts: int | None,
    next_row: Mapping[str, Any] | None,
) -> Attempt:
    """Builds an attempt from its last status.

    Args:
      row: the last status of the attempt's process 0.
      last_that_counts: the last step that may count; None if all may.
      next_row: the last status of the next attempt; None if there is none.
    """
    ended = row["begun"] + _running(row)
    seconds = dict.fromkeys(TIME_CATEGORIES, 0.0)
    for category in TIME_CATEGORIES:
        seconds[category] += row["seconds"].get(category, 0.0)
    if row["trained"]:
        last = _smaller(row["step"], last_that_counts)
        useful = max(0, last - row["first"]) / row["trained"]
        seconds[REPEATED] = (1 - useful) * seconds[clock.TRAINING]
        seconds[clock.TRAINING] *= useful
    rest = max(0.0, _running(row) - sum(seconds.values()))
    if row["trained"]:
        seconds[OTHER] += rest
    else:
        # An attempt that was killed before its first step reported no start time, so
        # the rest of its time was the start.
        seconds[clock.START] += rest
    down = 0.0
    if next_row is not None and not row["doing"].startswith(status.DONE):
        down = _seconds_between(row, next_row)
    end = row["doing"]
    is_replaced = next_row is not None and not status.has_ended(row)
    if is_replaced or status.silent_seconds(row):
        end = f"killed; was {end}"
    return Attempt(
        begun=row["begun"],
        ended=ended,
        first=row["first"],
        step=row["step"],
        end=end,
        seconds=seconds,
        down=down,
    )


def _running(row: Mapping[str, Any]) -> float:
    """Returns the seconds from the beginning of an attempt to its last status."""
    running = row.get("running")
    if running is not None:
        return running
    # An earlier version wrote only the times, and the clock may have been set back.
    return max(0.0, row["time"] - row["begun"])


def _seconds_between(row: Mapping[str, Any], next_row: Mapping[str, Any]) -> float:
    """Returns the seconds from the last status of an attempt to the next attempt."""
    if row.get("boot") and row["boot"] == next_row.get("boot"):
        # On one machine, the wall clock need not be asked, which may be a day ahead.
        seconds = next_row["up"] - _running(next_row) - row["up"]
    else:
        seconds = next_row["begun"] - row["begun"] - _running(row)
    return max(0.0, seconds)


def _smaller(step: int, limit: int | None) -> int:
    if limit is None:
        return step
    return min(step, limit)


def _rows(directory: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the last status of each attempt, without damaged lines. The newest is
    read from the status file.
    """
    preserved = []
    for _, row in jsonfile.read_lines(directory / FILE):
        if row is None:
            continue
        with contextlib.suppress(ValueError):
            status.check_row(row)
            preserved.append(row)
    current = status.read_if_exists(directory)
    if current is None:
        return preserved
    newest = current[0]
    # It has been preserved, too, if the program that started next has not written yet.
    earlier = [row for row in preserved if row["begun"] != newest["begun"]]
    return [*earlier, newest]
