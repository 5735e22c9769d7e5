"""Numbers from the device to a file and the terminal, without stopping the device."""

import collections
import json
import math
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

Row = dict[str, Any]
_NOT_SHOWN = ("step", "global_step")


class Deferred:
    """Metrics on their way to the host, and a bound on the steps in flight.

    The host asks for the metrics of a step only when some later steps have been dispatched, so that the
    device always has work. The bound is small: host memory holds a batch for each step in flight, and
    XLA's CPU collectives deadlock when many steps compete for few threads.
    """

    def __init__(self, in_flight: int = 2):
        self._in_flight = in_flight
        self._pending: collections.deque[tuple[int, Mapping[str, jax.Array], bool]] = (
            collections.deque()
        )

    def push(self, step: int, metrics: Mapping[str, jax.Array], keep: bool) -> Iterator[Row]:
        """Takes a step's metrics; returns the rows that are due, of those that were to be kept."""
        if keep:
            for value in metrics.values():
                value.copy_to_host_async()
        self._pending.append((step, metrics, keep))
        return self._pop(self._in_flight)

    def flush(self) -> Iterator[Row]:
        """Waits for all steps in flight; returns their rows."""
        return self._pop(0)

    def _pop(self, remain: int) -> Iterator[Row]:
        while len(self._pending) > remain:
            step, metrics, keep = self._pending.popleft()
            jax.block_until_ready(metrics)
            if keep:
                yield {"step": step, **{name: to_number(value) for name, value in metrics.items()}}


class JsonLines:
    """A file of one JSON object a line, each with a 'step'."""

    def __init__(self, path: pathlib.Path, step: int):
        """Opens the file to go on after `step`: later rows, of a run that was cut off, are dropped."""
        self._path = path
        found = path.read_bytes() if path.exists() else b""
        kept = [line for line in found.splitlines() if _is_row_until(line, step)]
        # Bytes, and whole: a row that lost no more than its newline would swallow the next one.
        content = b"".join(line + b"\n" for line in kept)
        if content != found:
            write_atomically(path, content)

    def write(self, row: Row) -> None:
        """Appends a row."""
        with self._path.open("a") as file:
            file.write(to_json(row) + "\n")


class Terminal:
    """A line for each row: step, numbers, steps per second, time left."""

    def __init__(self, steps: int):
        self._steps = steps

    def start(self, step: int) -> None:
        """Counts steps and time from here on."""
        self._last = (step, time.monotonic())

    def write(self, row: Row) -> None:
        """Prints a row of training metrics."""
        (last_step, last_time), now = self._last, time.monotonic()
        self._last = (row["step"], now)
        rate = (row["step"] - last_step) / max(now - last_time, 1e-9)
        left = (self._steps - row["step"]) / rate if rate else float("nan")
        shown = {"loss": row["loss"], **row}
        numbers = "  ".join(f"{k} {show(v)}" for k, v in shown.items() if k not in _NOT_SHOWN)
        width = len(str(self._steps))
        print(
            f"step {row['step']:>{width}}/{self._steps}  {numbers}  {rate:.1f} steps/s  {duration(left)} left",
            flush=True,
        )


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON, in which a number that is not finite is null: JSON has no other way to write it."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def to_number(value: Any) -> Any:
    """A Python number, or a list of them for several groups."""
    return np.asarray(value).tolist()


def show(value: Any) -> str:
    """A number, or the numbers of several groups, for people."""
    if isinstance(value, list):
        return "[" + " ".join(map(show, value)) + "]"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def duration(seconds: float) -> str:
    """A time span for people, such as 1:02:03."""
    if not np.isfinite(seconds):
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def age(seconds: float) -> str:
    """How long ago something was, for people."""
    for name, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{max(seconds, 0):.0f} s"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as aligned columns, under the names of all of their keys."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([_cell(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    return "\n".join(shown) if rows else "nothing"


def write_atomically(path: pathlib.Path, content: bytes, *, sync: bool = True) -> None:
    """Replaces a file: after a crash it is the old one or the new one; of the machine, if `sync`."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    temporary.replace(path)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(v) for name, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_row_until(line: bytes, step: int) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False  # The last line of a process that was killed in the middle of it.
