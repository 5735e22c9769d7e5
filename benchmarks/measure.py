"""Times several sides in turn, and turns the results into rows of a table."""

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from xshard.base import formatting as formatting_lib


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement, or the reason why it is missing.

    Attributes:
      what: the name of the measurement.
      against: the peer by whose value this one was divided; empty for an absolute
        figure.
      median: the median of the rounds; None if nothing was measured.
      low: the lower end of the middle half of the rounds.
      high: the upper end of the middle half of the rounds.
      unit: 'x' for a ratio.
      at_most: the target; None if there is none.
      missing: why nothing was measured, and the fix; empty if it was.
    """

    what: str
    against: str = ""
    median: float | None = None
    low: float | None = None
    high: float | None = None
    unit: str = "x"
    at_most: float | None = None
    missing: str = ""


def ratio(
    what: str,
    against: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    at_most: float | None = None,
) -> Row:
    """Returns the row of a ratio: in each round, the value of our side divided by the
    peer's.
    """
    # Ratios within a round, because a machine that is slow for a while slows both sides
    # of the round.
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Row(what, against, *_spread(ratios), at_most=at_most)


def figure(what: str, values: Sequence[float], unit: str) -> Row:
    """Returns the row of an absolute figure, from one value per round.

    Args:
      what: the name of the measurement.
      values: the values; seconds for a unit of time.
      unit: the unit that is shown.
    """
    factor = {"ms": 1e3, "us": 1e6}.get(unit, 1.0)
    return Row(what, "", *_spread([factor * x for x in values]), unit=unit)


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median and the two ends of the middle half."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return statistics.median(ordered), ordered[quarter], ordered[-1 - quarter]


def in_turn(
    sides: Mapping[str, Callable[[], Any]], rounds: int, *, warm_up: bool = True
) -> dict[str, list[Any]]:
    """Returns the results of each side in each round. A first round, to warm up, does
    not count.

    The order of the sides changes from round to round, because each side finds the
    caches and clock rates as the side before it left them.
    """
    names = list(sides)
    results: dict[str, list[Any]] = {name: [] for name in sides}
    for number in range(0 if warm_up else 1, rounds + 1):
        first = number % len(names)
        order = names[first:] + names[:first]
        for name in reversed(order) if number % 2 else order:
            result = sides[name]()
            if number:
                results[name].append(result)
    return results


def emit(rows: Iterable[Row], as_json: bool) -> None:
    """Prints the rows of a part: as tables, or as one line of JSON for
    `benchmarks.run`.
    """
    rows = list(rows)
    print(
        json.dumps([dataclasses.asdict(row) for row in rows]) if as_json else show(rows)
    )


def parse(output: str) -> list[Row]:
    """Returns the rows of a part from its output, which ends with a line of JSON."""
    return [Row(**row) for row in json.loads(output.splitlines()[-1])]


def show(rows: Iterable[Row]) -> str:
    """Returns a table of the ratios with their targets, a table of absolute figures,
    and what was not measured.
    """
    ratios = []
    figures = []
    # The names of what was not measured, by the reason.
    missing: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.median is None:
            missing.setdefault(row.missing, {})[row.what] = None
        if row.against:
            line = {
                "what": row.what,
                "against": row.against,
                "measured": _measured(row),
            }
            ratios.append(line | {"target": _target(row), "met": _met(row)})
        else:
            figures.append({"absolute": row.what, "measured": _measured(row)})
    tables = [formatting_lib.table(lines) for lines in (ratios, figures) if lines]
    reasons = [
        f"not measured: {'; '.join(names)}\n  {why}" for why, names in missing.items()
    ]
    return "\n\n".join(tables + reasons)


def described(row: Row) -> str:
    """Returns what was measured, and whether that met the target."""
    if row.at_most is None:
        return _measured(row)
    return f"{_measured(row)}; {_target(row)}: {_met(row)}"


def _measured(row: Row) -> str:
    if row.median is None:
        return "not measured"
    median, low, high = (
        _number(value, row.unit) for value in (row.median, row.low, row.high)
    )
    return f"{median}{'' if row.unit == 'x' else ' '}{row.unit} ({low} to {high})"


def _number(value: float, unit: str) -> str:
    if unit == "x":
        return f"{value:.3f}"
    if value < 100:
        return f"{value:.3g}"
    return f"{value:.0f}"


def _target(row: Row) -> str:
    return "" if row.at_most is None else f"at most {row.at_most:.3g}x"


def _met(row: Row) -> str:
    if row.at_most is None or row.median is None:
        return ""
    return "yes" if row.median <= row.at_most else "NOT MET"
