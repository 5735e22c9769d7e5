"""The status of a run's processes, read from the files in its work directory."""

import pathlib
import time
from collections.abc import Sequence
from typing import Any

from launch import engine, sweep
from xshard import errors
from xshard.checkpoint import catalog, place
from xshard.files import jsonfile, results
from xshard.metrics import formatting as formatting_lib
from xshard.pod import attempts
from xshard.pod import status as status_lib


def show(words: Sequence[str], as_json: bool) -> int:
    """Prints the status of a run or of a sweep, or whether two runs are the same so
    far; returns the exit code.

    Args:
      words: one work directory, or two to compare their runs.
      as_json: whether to print JSON.
    """
    if len(words) == 2:
        return _compare(words, as_json)
    if len(words) != 1:
        raise engine.LaunchError(
            "give one work directory, or two to compare their runs: python -m launch status runs/digits."
        )
    directory = pathlib.Path(words[0])
    if (directory / sweep.POINTS_FILE).exists():
        points = sweep.rows(directory)
        print(
            jsonfile.dumps(points, indent=2)
            if as_json
            else formatting_lib.table(points)
        )
        return 0
    processes, latest = rows(directory), latest_checkpoint(directory)
    why = results.nonfinite_reason(directory)
    tries = attempts.read(directory)
    goodput = attempts.goodput(tries)
    if as_json:
        content = {
            "processes": processes,
            "checkpoint": latest,
            "not_finite": why,
            "attempts": [attempt._asdict() for attempt in tries],
            "goodput": goodput._asdict() if goodput else None,
        }
        print(jsonfile.dumps(content, indent=2))
        return 0
    print(formatting_lib.table([_for_people(row) for row in processes]))
    if latest is None:
        print("no checkpoint yet")
    else:
        finite = "" if latest["finite"] else ", NOT FINITE"
        print(
            f"newest checkpoint: step {latest['step']}, {formatting_lib.age(latest['age'])} old{finite}"
        )
    if why:
        print(f"not finite: {why}")
    if goodput:
        print(f"\n{formatting_lib.table([_attempt(attempt) for attempt in tries])}")
        print(_goodput(goodput, len(tries)))
    return 0


def rows(directory: pathlib.Path) -> list[dict[str, Any]]:
    """Returns a row for each process; raises LaunchError if the directory holds no run."""
    try:
        processes = status_lib.read(directory)
    except errors.UserError as e:
        raise engine.LaunchError(
            f"{e} {directory} is not the work directory of a run, or its run has not begun."
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
    from xshard.replay import divergence  # Imported here, since it imports JAX.

    runs = [divergence.read(directory) for directory in directories]
    divergence_found = divergence.find_divergence(*runs)
    logged = [max(run.rows) for run in runs]
    if as_json:
        by_fingerprints = bool(divergence_found.states or divergence_found.same_state)
        found = {**divergence_found._asdict(), "by_fingerprints": by_fingerprints}
        print(jsonfile.dumps({**found, "logged": logged}, indent=2))
    else:
        print(divergence.describe(divergence_found))
        if logged[0] != logged[1]:
            ends = [
                f"{name} to step {step}"
                for name, step in zip(directories, logged, strict=True)
            ]
            print(f"They have logged: {', '.join(ends)}.")
    return 0 if divergence_found.step is None else 1


def _row(index: int, process: dict[str, Any]) -> dict[str, Any]:
    age = time.time() - process["time"]
    step, steps, rate = process["step"], process["steps"], process["rate"]
    # A process that has ended writes no more, so its silence is no sign of trouble.
    is_going_on = not process["doing"].startswith(status_lib.ENDS)
    is_silent = is_going_on and age > status_lib.SILENT_SECONDS
    left = None
    if is_going_on and rate and steps and step is not None:
        left = (steps - step) / rate
    return {
        "process": index,
        "host": process["host"],
        "pid": process["pid"],
        "doing": process["doing"],
        "silent": age if is_silent else None,
        "heard": age,
        "step": step,
        "steps": steps,
        "rate": rate,
        "left": left,
    }


def _attempt(attempt: attempts.Attempt) -> dict[str, Any]:
    steps = ""
    if attempt.first is not None:
        steps = f"{attempt.first} to {attempt.step}"
    spent = {
        name: formatting_lib.duration(x) if x else ""
        for name, x in attempt.seconds.items()
    }
    return {
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.begun)),
        "steps": steps,
        **spent,
        attempts.DOWN: formatting_lib.duration(attempt.down) if attempt.down else "",
        "ended": attempt.end,
    }


def _goodput(goodput: attempts.Goodput, count: int) -> str:
    """Describes which share of the time counted, and where the rest went, the largest
    share first.
    """
    lost = sorted(goodput.lost.items(), key=lambda item: -item[1])
    rest = ", ".join(f"{name} {share:.1%}" for name, share in lost)
    times = "1 attempt" if count == 1 else f"{count} attempts"
    of_time = f"{formatting_lib.duration(goodput.seconds)} in {times}"
    return f"goodput {goodput.share:.1%} of {of_time}; {rest or 'nothing lost'}"


def _for_people(row: dict[str, Any]) -> dict[str, Any]:
    doing = row["doing"]
    if row["silent"]:
        doing = f"gone, or silent; was {doing}"
    return {
        "process": row["process"],
        "host": row["host"],
        "doing": doing,
        "step": "" if row["step"] is None else f"{row['step']}/{row['steps']}",
        "steps/s": "" if row["rate"] is None else f"{row['rate']:.1f}",
        "left": "" if row["left"] is None else formatting_lib.duration(row["left"]),
        "heard": f"{formatting_lib.age(row['heard'])} ago",
    }
