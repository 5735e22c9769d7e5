"""Formats numbers, times and tables as text for people."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

# Control characters, which may move the cursor or change colors.
_UNPRINTABLE = dict.fromkeys((*range(32), *range(127, 160)), "\ufffd")
# The largest comes first.
_PREFIXES = {
    1e15: "P",
    1e12: "T",
    1e9: "G",
    1e6: "M",
    1e3: "k",
    1: "",
    1e-3: "m",
    1e-6: "u",
    1e-9: "n",
}


def number(value: Any) -> str:
    """Formats a number, or the numbers of several groups."""
    if isinstance(value, list):
        return "[" + " ".join(map(number, value)) + "]"
    if abs(value) < 1e4:
        return f"{value:.4g}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Formats a time span, such as 1:02:03."""
    if not math.isfinite(seconds):
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{seconds:02}"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def age(seconds: float) -> str:
    """Formats an age in the largest unit of which it has at least two."""
    for name, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{max(seconds, 0):.0f} s"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats rows as aligned columns, with all of their keys as headers."""
    if not rows:
        return "nothing"
    # A dict keeps the order in which the keys first appear.
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row)
    lines = [list(names)]
    for row in rows:
        lines.append([_cell(row.get(name, "")) for name in names])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = []
    for line in lines:
        shown.append("  ".join(map(str.ljust, line, widths)).rstrip())
    return "\n".join(shown)


def scaled(value: float, unit: str) -> str:
    """Formats a number with a decimal prefix before its unit."""
    for scale, prefix in _PREFIXES.items():
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}".rstrip()
    return f"0 {unit}".rstrip()


def shortened(lines: Sequence[str], most: int) -> list[str]:
    """Returns the lines, without those in the middle if there are more than `most`."""
    if len(lines) <= most:
        return list(lines)
    half = most // 2
    left_out = len(lines) - 2 * half
    return [*lines[:half], f"... {left_out} more; --verbose shows all", *lines[-half:]]


def listed(texts: Sequence[str], most: int = 8, link: str = ", ") -> str:
    """Joins texts; of more than `most`, the first ones and the number of the others."""
    shown = list(texts[:most])
    if len(texts) > most:
        shown.append(f"and {len(texts) - most} more")
    return link.join(shown)


def printable(text: str) -> str:
    """Replaces the characters of a text that a terminal or a page cannot show.

    The text may come from a file that anyone can write.
    """
    return text.encode("utf-8", "replace").decode().translate(_UNPRINTABLE)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return printable(str(value))
