"""The status of a run's processes, read from the files in its work directory."""

import pathlib
import time
from collections.abc import Sequence
from typing import Any

from launch import engine, sweep
from xshard import errors
from xshard.base import formatting as formatting_lib
from xshard.checkpoint import catalog, place
from xshard.files import disk, jsonfile, results
from xshard.pod import attempts
from xshard.pod import status as status_lib


def show(words: Sequence[str], as_json: bool) -> int:
    """Prints the status of a run or of a sweep, or whether two runs are the same so
    far; returns the exit code.

    Args:
      words: one work directory, or two to compare their runs.
      as_json: whether to print JSON.
    """
    words = [disk.expanded(word) for word in words]
    if len(words) == 2:
        return _compare(words, as_json)
    if len(words) != 1:
        raise engine.LaunchError(
            "give one work directory, or two to compare their runs: python -m launch "
            "status runs/digits."
        )
    directory = pathlib.Path(words[0])
    if (directory / sweep.POINTS_FILE).exists():
        _show_sweep(directory, as_json)
    else:
        _show_run(directory, as_json)
    return 0


def _show_sweep(directory: pathlib.Path, as_json: bool) -> None:
    points = sweep.rows(directory)
    if as_json:
        print(jsonfile.dumps(points, indent=2))
    else:
        print(sweep.table(points))


def _show_run(directory: pathlib.Path, as_json: bool) -> None:
    processes = rows(directory)
    newest = latest_checkpoint(directory)
    why = results.nonfinite_reason(directory)
    all_attempts = attempts.read(directory)
    goodput = attempts.goodput(all_attempts)
    if as_json:
        content = {
            "processes": processes,
            "checkpoint": newest,
            "not_finite": why,
            "attempts": [attempt._asdict() for attempt in all_attempts],
            "goodput": goodput._asdict() if goodput else None,
        }
        print(jsonfile.dumps(content, indent=2))
        return
    print(formatting_lib.table([_shown_row(row) for row in processes]))
    if "generation" in processes[0]:
        print(_shown_standing(processes[0]))
    if newest is None:
        print("no checkpoint yet")
    else:
        text = f"newest checkpoint: step {newest['step']}"
        text += f", {formatting_lib.age(newest['age'])} old"
        if not newest["finite"]:
            text += ", NOT FINITE"
        print(text)
    if why:
        print(f"not finite: {why}")
    if goodput:
        shown = [_shown_attempt(attempt) for attempt in all_attempts]
        print(f"\n{formatting_lib.table(shown)}")
        print(_shown_goodput(goodput, len(all_attempts)))


def rows(directory: pathlib.Path) -> list[dict[str, Any]]:
    """Returns a row for each process; raises LaunchError if there is no run."""
    try:
        processes = status_lib.read(directory)
    except errors.UserError as e:
        raise engine.LaunchError(
            f"{e} {directory} is not the work directory of a run, or its run has not "
            "begun."
        ) from e
    return [_row(index, process) for index, process in enumerate(processes)]


def latest_checkpoint(directory: pathlib.Path) -> dict[str, Any] | None:
    """Returns the newest checkpoint's step, its age in seconds, and 'finite', as far as
    is known; None without one.
    """
    newest = catalog.newest_entry(place.open_store(directory))
    if newest is None or newest.time is None:
        return None
    finite = newest.state != "not finite"
    return {"step": newest.step, "age": time.time() - newest.time, "finite": finite}


def _compare(directories: Sequence[str], as_json: bool) -> int:
    """Prints whether two runs are the same so far, as `xshard.bisect` does; returns 0
    if they are, else 1.
    """
    from xshard.replay import comparison  # Imported here, since it imports JAX.

    runs = [comparison.read(directory) for directory in directories]
    divergence_found = comparison.find_divergence(*runs)
    logged = [max(run.rows) for run in runs]
    if as_json:
        by_fingerprints = bool(divergence_found.states or divergence_found.same_state)
        found = {**divergence_found._asdict(), "by_fingerprints": by_fingerprints}
        print(jsonfile.dumps({**found, "logged": logged}, indent=2))
    else:
        print(comparison.describe(divergence_found))
        if logged[0] != logged[1]:
            ends = [
                f"{name} to step {step}"
                for name, step in zip(directories, logged, strict=True)
            ]
            print(f"They have logged: {', '.join(ends)}.")
    return 1 if divergence_found.states or divergence_found.values else 0


def _row(index: int, process: dict[str, Any]) -> dict[str, Any]:
    """Returns the row of a process, with numbers for programs.

    Args:
      index: the index of the process.
      process: its last status.
    """
    step = process["step"]
    steps = process["steps"]
    rate = process["rate"]
    left = None
    if not status_lib.has_ended(process) and rate and steps and step is not None:
        left = (steps - step) / rate
    shown = {
        "process": index,
        "host": process["host"],
        "pid": process["pid"],
        "doing": process["doing"],
        "silent": status_lib.silent_seconds(process) or None,
        "heard": time.time() - process["time"],
        "step": step,
        "steps": steps,
        "rate": rate,
        "left": left,
    }
    # Only a run that goes on without the members that it loses has these.
    for name in ("generation", "members", "takeovers"):
        if name in process:
            shown[name] = process[name]
    return shown


def _shown_row(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row of a process with texts for people."""
    doing = row["doing"]
    if row["silent"]:
        doing = f"gone, or silent; was {doing}"
    step = ""
    if row["step"] is not None:
        step = f"{row['step']}/{row['steps']}"
    rate = ""
    if row["rate"] is not None:
        rate = f"{row['rate']:.1f}"
    left = ""
    if row["left"] is not None:
        left = formatting_lib.duration(row["left"])
    return {
        "process": row["process"],
        "host": row["host"],
        "doing": doing,
        "step": step,
        "steps/s": rate,
        "left": left,
        "heard": f"{formatting_lib.age(row['heard'])} ago",
    }


def _shown_standing(row: dict[str, Any]) -> str:
    """Describes how the members of a run stand, which goes on without lost ones."""
    members = f"{row['members']} member{'s' if row['members'] != 1 else ''}"
    lost = f"{row['takeovers']} taken over from"
    return f"generation {row['generation']}: {members}, {lost}"


def _shown_attempt(attempt: attempts.Attempt) -> dict[str, Any]:
    """Returns the row of an attempt with texts for people."""
    began = time.localtime(attempt.begun)
    steps = ""
    if attempt.first is not None:
        steps = f"{attempt.first} to {attempt.step}"
    row = {"began": time.strftime("%Y-%m-%d %H:%M:%S", began), "steps": steps}
    spent = {**attempt.seconds, attempts.DOWN: attempt.down}
    for category, seconds in spent.items():
        row[category] = formatting_lib.duration(seconds) if seconds else ""
    row["ended"] = attempt.end
    return row


def _shown_goodput(goodput: attempts.Goodput, count: int) -> str:
    """Describes which share of the time counted, and where the rest went, the largest
    share first.
    """
    lost = sorted(goodput.lost.items(), key=lambda item: -item[1])
    rest = ", ".join(f"{category} {share:.1%}" for category, share in lost)
    times = "1 attempt"
    if count != 1:
        times = f"{count} attempts"
    return (
        f"goodput {goodput.share:.1%} of {formatting_lib.duration(goodput.seconds)} in "
        f"{times}; {rest or 'nothing lost'}"
    )
