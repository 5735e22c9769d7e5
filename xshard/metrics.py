"""Numbers from the device to the host, without stopping the device; and as text."""

import collections
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

Row = dict[str, Any]
# Steps that may have been dispatched and not yet looked at.
IN_FLIGHT = 2
_UNPRINTABLE = {code: "\ufffd" for code in (*range(32), *range(127, 160))}


class Deferred:
    """Metrics on their way to the host, and a bound on the steps in flight.

    The host asks for the metrics of a step only when some later steps have been dispatched, so that the
    device always has work. The bound is small: host memory holds a batch for each step in flight, and
    XLA's CPU collectives deadlock when many steps compete for few threads.
    """

    def __init__(self, in_flight: int = IN_FLIGHT):
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
            # They come together, from one computation.
            next(iter(metrics.values())).block_until_ready()
            if keep:
                yield {"step": step, **{name: to_number(value) for name, value in metrics.items()}}


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON, in which a number that is not finite is null: JSON has no other way to write it."""
    return json.dumps(finite(value), indent=indent, allow_nan=False)


def finite(value: Any) -> Any:
    """The value with None in the place of each number that is not finite."""
    if isinstance(value, Mapping):
        return {name: finite(v) for name, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flat(row: Row) -> Row:
    """A row with a name for each number: of a list they are 'loss/0', 'loss/1'."""
    found: Row = {}
    for name, value in row.items():
        if isinstance(value, list | Mapping):
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            found |= flat({f"{name}/{key}": v for key, v in items})
        else:
            found[name] = value
    return found


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


def scaled(value: float, unit: str) -> str:
    """A number with a decimal prefix before its unit."""
    for scale, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}".rstrip()
    small = next(
        (pair for pair in ((1e-3, "m"), (1e-6, "u"), (1e-9, "n")) if value >= pair[0]), None
    )
    return f"{value / small[0]:.3g} {small[1]}{unit}" if small else f"0 {unit}".rstrip()


def shortened(lines: Sequence[str], most: int) -> list[str]:
    """Lines, of which those in the middle are left out if there are more than `most`."""
    if len(lines) <= most:
        return list(lines)
    half = most // 2
    left_out = len(lines) - 2 * half
    return [*lines[:half], f"... {left_out} more; --verbose shows all", *lines[-half:]]


def printable(text: str) -> str:
    """A text that may come from a file, without what no terminal and no page can show."""
    return text.encode("utf-8", "replace").decode().translate(_UNPRINTABLE)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))
