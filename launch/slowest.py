"""Names the process that the others of a run wait for, and what it is doing meanwhile.

The processes meet in each step, so all of them are as slow as the slowest, and each
waits for it in its own step. What tells it from the others is that it waits least: it
spends more time than they do in some other part, during which its devices are idle.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from xshard.base import clock, formatting, spans

# The parts that are a process's own. In the others it waits, for its devices, for other
# processes, or for its save in the background.
_OWN = (spans.DATA, spans.CHECKPOINT, spans.EVALUATION, spans.TRACE, clock.OTHER)
_WAITS = (spans.STEP, spans.AGREE, spans.SAVE)
# A smaller share of the time is not worth naming.
_LEAST_SHARE = 0.02
# A shorter time says little.
_LEAST_SECONDS = 1.0
_MOST_ROWS = 16
_MEANINGS = {
    spans.DATA: "it waits for its data",
    spans.CHECKPOINT: "it copies the state for a save",
    spans.EVALUATION: "it evaluates: evaluation data, summarize or callbacks",
    spans.TRACE: "it writes a trace",
    clock.OTHER: "its host works between the steps, or has too much else to do",
    spans.WRITE: "it writes its part of a checkpoint, and the next save waits for it",
}


class Slowest(NamedTuple):
    """The process that the others wait for.

    Attributes:
      process: its index.
      part: the part of `xshard.base.spans` that it is slow in, or 'other'.
      share: for which share of the time the others wait for that.
    """

    process: int
    part: str
    share: float


def find(parts: Sequence[Mapping[str, float]], seconds: float) -> Slowest | None:
    """Returns the process that the others wait for; None if none stands out.

    >>> quick = {"step": 9.0, "data": 0.5}
    >>> slow = {"step": 1.0, "data": 8.5}
    >>> find([quick, slow, quick], 10.0)
    Slowest(process=1, part='data', share=0.8)
    >>> find([slow, slow], 10.0)

    Args:
      parts: the seconds of each part, for each process.
      seconds: the seconds in all of them.
    """
    slowest = None
    if len(parts) < 2 or seconds < _LEAST_SECONDS:
        return None
    for process, own in enumerate(parts):
        others = [other for index, other in enumerate(parts) if index != process]
        for part in (*_OWN, spans.WRITE):
            usual = statistics.median(other.get(part, 0.0) for other in others)
            lost = own.get(part, 0.0) - usual
            if part == spans.WRITE:
                # A save in the background delays only what waits for it.
                lost = min(lost, own.get(spans.SAVE, 0.0))
            share = lost / seconds
            if share >= _LEAST_SHARE and (slowest is None or share > slowest.share):
                slowest = Slowest(process, part, share)
    return slowest


def report(processes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what `show` prints, as a JSON value.

    Args:
      processes: the rows of a run's status, as `xshard.pod.status` reads them.
    """
    result: dict[str, Any] = {}
    all_seconds = [sum_of_parts(row.get("parts")) for row in processes]
    recent_seconds = [row.get("recent_seconds") or 0.0 for row in processes]
    for name, key, each in (
        ("recent", "recent_parts", recent_seconds),
        ("since_first_step", "parts", all_seconds),
    ):
        parts = [row.get(key) or {} for row in processes]
        seconds = statistics.median(each)
        slowest = None
        if all(parts):
            slowest = find(parts, seconds)
        result[name] = {
            "seconds": seconds,
            "parts": parts,
            "slowest": slowest._asdict() if slowest else None,
        }
    return result


def sum_of_parts(parts: Mapping[str, float] | None) -> float:
    """Returns the seconds in all parts, which are those since the first step."""
    counted = 0.0
    for name, seconds in (parts or {}).items():
        # The background is beside the other parts.
        if name != spans.WRITE:
            counted += seconds
    return counted


def show(processes: Sequence[Mapping[str, Any]]) -> str:
    """Returns a text about the process that the others wait for."""
    reported = report(processes)
    recent = reported["recent"]
    whole = reported["since_first_step"]
    missing = [
        str(index) for index, row in enumerate(processes) if not row.get("parts")
    ]
    if missing:
        return (
            f"process {', '.join(missing)} has not reported what it spends its time "
            "with: it makes its first step, or runs an earlier version"
        )
    lines = [_table(processes, recent["parts"], recent["seconds"])]
    for when, part in (
        (f"in the last {formatting.age(recent['seconds'])}", recent),
        (f"in the {formatting.age(whole['seconds'])} since the first step", whole),
    ):
        lines.append(f"{when}: {_verdict(processes, part)}")
    return "\n".join(lines)


def _verdict(processes: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> str:
    slowest = found["slowest"]
    seconds = found["seconds"]
    if seconds < _LEAST_SECONDS:
        return "too short to tell"
    if slowest is not None:
        host = processes[slowest["process"]]["host"]
        return (
            f"the others wait for process {slowest['process']} on {host}, "
            f"{slowest['share']:.0%} of the time: {slowest['part']} "
            f"({_MEANINGS[slowest['part']]})"
        )
    text = "no process holds the others up"
    if len(processes) == 1:
        text = "there is one process"
    usual = {}
    for part in _OWN:
        usual[part] = statistics.median(each.get(part, 0) for each in found["parts"])
    part = max(usual, key=lambda name: usual[name])
    share = usual[part] / seconds
    if share >= _LEAST_SHARE:
        return f"{text}; beside the step, {share:.0%} is {part} ({_MEANINGS[part]})"
    return f"{text}; the time goes into the step"


def _table(
    processes: Sequence[Mapping[str, Any]],
    parts: Sequence[Mapping[str, float]],
    seconds: float,
) -> str:
    """Returns the shares of the parts, those of the processes that wait least first."""
    order = sorted(range(len(parts)), key=lambda index: _waited(parts[index]))
    rows = []
    for index in order[:_MOST_ROWS]:
        row = {"process": index, "host": processes[index]["host"]}
        for name in (*_OWN, *_WAITS, spans.WRITE):
            share = parts[index].get(name, 0.0) / max(seconds, 1e-9)
            row[name] = f"{share:.0%}" if share >= 0.005 else ""
        rows.append(row)
    text = formatting.table(rows)
    if len(order) > _MOST_ROWS:
        text += f"\n... and {len(order) - _MOST_ROWS} processes that wait more"
    return text


def _waited(parts: Mapping[str, float]) -> float:
    return sum(parts.get(name, 0.0) for name in _WAITS)
