"""Work directories with invented rows, in the format that a run writes."""

import json
import math
import pathlib
import time

import numpy as np

from xshard.files import jsonfile

CONFIG = {
    "experiment": "tests.toy.Toy",
    "seed": 0,
    "steps": 400,
    "group_assignment": [],
    "optimizer": {"learning_rate": 0.1},
    "checkpoint": {"directory": "", "best_metric": "accuracy", "best_mode": "max"},
}


def rows(steps=400, every=10, groups=1):
    """Returns the rows of a run with a noisy loss, skipped steps, and times that begin
    anew at its restart after step 200.
    """
    rng = np.random.default_rng(0)
    many = lambda value: (
        value if groups == 1 else [value * (1 + 0.1 * g) for g in range(groups)]
    )
    count = lambda value: value if groups == 1 else [value] * groups
    result, skipped, begin, wasted, started = [], 0, 0, 0.0, 1.79e9
    for step in range(every, steps + 1, every):
        if step - every <= 200 < step:
            begin, wasted, started = step - every, 0.0, started + 5000
        skip = step % (13 * every) == 0
        skipped += skip
        wasted += 0.02 * every
        seconds = 12.0 + 0.11 * (step - begin)
        loss = 2.3 * math.exp(-3 * step / steps) + 0.05 + abs(rng.normal(0, 0.04))
        rate = 10 + rng.normal(0, 0.3)
        result.append(
            {
                "step": step,
                "loss": many(loss),
                "accuracy": many(0.9 * (1 - math.exp(-4 * step / steps))),
                "loss_scale": many(2.0 ** (15 + (step // (every * 8)) % 3 - skip)),
                "gradient_norm": many(3 * loss * math.exp(rng.normal(0, 0.2))),
                "parameter_norm": many(40 + 10 * step / steps),
                "global_step": count(step - skipped),
                "skipped": count(skipped),
                "perf/steps_per_second": rate,
                "perf/examples_per_second": 4096 * rate,
                "perf/flops_per_second": 3.1e13 * rate,
                "perf/utilisation": 0.042 * rate,
                "perf/goodput": (0.09 * (step - begin)) / seconds,
                "perf/seconds": seconds,
                "perf/start_seconds": 11.0,
                "perf/data_seconds": 0.3 * wasted,
                "perf/checkpoint_seconds": 0.2 * wasted,
                "perf/evaluation_seconds": 0.4 * wasted,
                "perf/time": started + seconds,
            }
        )
        if step % (5 * every) == 0:
            result.append(evaluation(step, steps, groups, 0.0))
    return result


def evaluation(step, steps=400, groups=1, better=0.0):
    """Returns an evaluation row."""
    accuracy = 0.95 * (1 - math.exp(-4 * step / steps)) + better
    row = {"step": step, "perf/time": 1.79e9 + step}
    for prefix, more in (("eval/", 0.0), ("eval/average/", 0.01)):
        values = [accuracy + more - 0.01 * group for group in range(groups)]
        row[f"{prefix}accuracy"] = values if groups > 1 else values[0]
    if groups > 1:
        row["eval/ensemble/accuracy"] = accuracy + 0.02
    return row


def write_rows(path, logged):
    """Writes a metrics.jsonl."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(jsonfile.dumps(row) + "\n" for row in logged))


def attempt(begun, first, step, doing="training"):
    """Returns the last status of an attempt's process 0.

    The attempt took 12 s, and 0.11 s a step, of which 0.09 s are training.
    """
    steps = step - first
    seconds = {"start": 11.0, "training": 0.09 * steps, "evaluation": 0.01 * steps}
    row = {
        "doing": doing,
        "step": step,
        "steps": 400,
        "rate": 10.0,
        "host": "h0",
        "pid": 1,
    }
    row |= {"begun": begun, "first": first, "trained": steps, "seconds": seconds}
    return row | {"time": begun + 12.0 + 0.11 * steps}


# The first attempt was killed at step 230, after it had saved step 200. The second one
# finished.
ATTEMPTS = (attempt(1e9, 0, 230), attempt(1e9 + 5000, 200, 400, "done"))


def write(
    directory,
    logged=None,
    *,
    job=(),
    doing="done",
    ago=1000.0,
    results=None,
    attempts=(),
    **changes,
):
    """Writes a work directory; returns its path."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True)
    config = {**CONFIG, **changes}
    (directory / "config.json").write_text(json.dumps(config))
    if logged is not None:
        write_rows(directory / "metrics.jsonl", logged)
    if job:
        write_rows(directory / "eval" / "metrics.jsonl", job)
    if results is not None:
        content = {
            "step": config["steps"],
            "global_step": config["steps"],
            "eval": results,
        }
        (directory / "results.json").write_text(json.dumps(content))
    if doing is not None:
        last = logged[-1]["step"] if logged else None
        row = {
            "doing": doing,
            "step": last,
            "steps": config["steps"],
            "rate": 10.0,
            "host": "h0",
        }
        when = time.time() - ago
        row |= {"pid": 1, "time": when, "begun": when}
        row |= {"first": last, "trained": 0, "seconds": {}}
        if attempts:
            row = attempts[-1]
            write_rows(directory / "attempts.jsonl", attempts[:-1])
        (directory / "status.json").write_text(json.dumps([row]))
    return directory
