"""Checks that a run keeps its promises about checkpoints, the rows up to them, and the
way it ends.

The checks read the run's files and trust no message. A part that met a fault may end in
one of two ways: as it ends without the fault, or with one message that names what
failed and where. In the second case the earlier files must be intact, so that the same
command can continue.
"""

import contextlib
import csv
import errno
import hashlib
import json
import os
import pathlib
import re

from tensorboard.backend.event_processing import event_accumulator

from xshard.checkpoint import array_reader
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import store as store_lib

# The keys of JSON files whose values are equal in runs with the same bits.
_KEYS = {
    "results": ("step", "global_step", "eval", "samples", "finite", "why"),
    "best": ("metric", "mode", "best", "pinned"),
}


def look(run, checkpoints):
    """Returns the checkpoints and results of a run, as JSON-serializable values.

    The caller runs this function in a forked process, since tensorstore starts threads.

    Args:
      run: the work directory.
      checkpoints: the folder of its checkpoints.
    """
    attempts = format_lib.attempts(store_lib.Store(checkpoints))
    counts = [attempt for attempt in attempts if attempt.counts]
    return {
        "checkpoints": {f"{a.step}.{a.nonce}": _checkpoint(a) for a in counts},
        "uncommitted": [str(a) for a in attempts if format_lib.COMMIT not in a.marks],
        "damaged": [str(a) for a in attempts if format_lib.DAMAGED in a.marks],
        "run": _directory(run),
        "eval": _directory(run / "eval"),
        "unfinished": [str(path) for path in _unfinished(run)],
    }


def broken(before, after, wanted, output):
    """Returns the promises that a part has broken, one text each. They hold however the
    part ends.

    Args:
      before: the result of `look` before the part.
      after: the result of `look` after the part.
      wanted: the result of `look` after an undisturbed run.
      output: what the part printed.
    """
    texts = [f"marked as damaged: {name}" for name in after["damaged"]]
    old, new = before["checkpoints"], after["checkpoints"]
    newest, previous = _newest(new), _newest(old)
    if newest < previous:
        texts.append(f"checkpoints {sorted(old)} counted before, now {sorted(new)}")
    if newest == previous and old.keys() - new.keys():
        texts.append(f"deleted without a newer one: {sorted(old.keys() - new.keys())}")
    reported = max(map(int, re.findall(r"step (\d+): saved", output)), default=0)
    if newest < reported:
        texts.append(
            f"step {reported} was reported as saved, but the newest step that counts "
            f"is {newest}"
        )
    if _best(old) is not None and (_best(new) is None or _best(new) > _best(old)):
        texts.append("the best checkpoint was deleted")
    for name in old.keys() & new.keys():
        if old[name]["state"] != new[name]["state"]:
            texts.append(f"{name} holds other bits")
    for place in ("run", "eval"):
        present = set(after[place]["lines"])
        for line in before[place]["lines"]:
            # Rows are compared byte by byte: if a run repeated a step, its rows would
            # differ only in times.
            if line not in present and _row_step(line) <= newest:
                texts.append(f"{place}: a row of step {_row_step(line)} was replaced")
    # Rows of training exist once their checkpoint counts. The rows of an evaluation may
    # follow later.
    for row in wanted["run"]["rows"]:
        if (
            '"loss"' in row
            and _row_step(row) <= newest
            and row not in after["run"]["rows"]
        ):
            texts.append(
                f"step {newest} counts, and the row of step {_row_step(row)} is lost"
            )
    return texts


def differences(after, wanted):
    """Returns the differences from the end of an undisturbed run, one text each. More
    checkpoints are no difference.

    Args:
      after: the result of `look` after the part.
      wanted: the result of `look` after an undisturbed run.
    """
    got, want = _by_step(after), _by_step(wanted)
    texts = [
        f"no checkpoint of step {step}" for step in sorted(want.keys() - got.keys())
    ]
    for step in sorted(want.keys() & got.keys()):
        if got[step] != want[step]:
            texts.append(f"step {step}: {got[step]} instead of {want[step]}")
    for place in ("run", "eval"):
        for field, content in wanted[place].items():
            if field != "lines" and after[place][field] != content:
                texts.append(
                    f"{place}: {field} differs: {_first(content, after[place][field])}"
                )
    return texts


def left_behind(after):
    """Returns the leftovers that are neither a checkpoint nor a file of the run, one
    text each.
    """
    return [
        f"left behind: {name}" for name in after["uncommitted"] + after["unfinished"]
    ]


def more_checkpoints(after, wanted):
    """Returns the steps whose checkpoints count although the rules would not have kept
    them.
    """
    return sorted(_by_step(after).keys() - _by_step(wanted).keys())


def unclear(ended, names, reasons):
    """Returns what is wrong with the way a part has failed, one text each.

    Args:
      ended: the `scenario.Ended` of the part.
      names: the message must contain one of these names.
      reasons: the message must contain one of these reasons, in upper or lower case.
    """
    reported = ended.output
    if ended.code == 0:
        return ["other results without an error"]
    texts = [] if ended.code == 1 else [f"exit code {ended.code}"]
    texts += ["a traceback"] if "Traceback (most recent call last)" in reported else []
    texts += [] if "error: " in reported else ["no message"]
    texts += (
        [] if any(name in reported for name in names) else [f"does not name {names[0]}"]
    )
    if not any(reason.lower() in reported.lower() for reason in reasons):
        texts.append(f"does not give the reason '{reasons[0]}'")
    return texts


def names_of_file(path):
    """Returns the names that a message may give for a failed call on a path: the file,
    or the folder it belongs to.
    """
    path = pathlib.Path(re.sub(r"/\.([^/]+)\.new$", r"/\1", path))
    whole = ("step_", "checkpoints", "tensorboard", "eval")
    return [
        str(path),
        *(str(item) for item in path.parents if item.name.startswith(whole)),
    ]


def names_of_object(name):
    """Returns the names that a message may give for a failed request for an object in
    the bucket of the stand-ins.
    """
    path = pathlib.Path(name or "run")
    return [f"bucket/{item}" for item in (path, *path.parents[:-1])]


def reason(fault):
    """Returns the reason that a message must give for a fault; empty if its words are
    free.
    """
    # For a missing file or a failed precondition, xshard may use its own words instead
    # of those of the C library or HTTP. The other faults without a reason have no
    # errno.
    if fault in ("ENOENT", "404", "412") or not (
        hasattr(errno, fault) or fault.isdigit()
    ):
        return ""
    return fault if fault.isdigit() else os.strerror(getattr(errno, fault))


def _checkpoint(attempt):
    """Returns a digest of a checkpoint's arrays and position in the data, its metrics,
    and whether it is pinned.
    """
    meta = format_lib.read_meta(attempt)
    digest = hashlib.sha256(json.dumps(meta.data, sort_keys=True).encode())
    for name, value in array_reader.read_arrays(attempt, meta.arrays):
        digest.update(name.encode() + str(value.dtype).encode() + value.tobytes())
    return {
        "state": digest.hexdigest(),
        "metrics": format_lib.metrics_of(attempt, format_lib.read_commit(attempt)),
        "pinned": format_lib.PINNED in attempt.marks,
    }


def _directory(path):
    """Returns the contents of a work directory, without values that differ between runs
    with the same bits.
    """
    contents = {
        "lines": [],
        "rows": [],
        "csv": [],
        "events": {},
        "results": None,
        "best": None,
    }
    if (path / "metrics.jsonl").exists():
        contents["lines"] = (
            (path / "metrics.jsonl").read_text(errors="replace").splitlines()
        )
        contents["rows"] = [row for row in map(_row, contents["lines"]) if row]
    if (path / "metrics.csv").exists():
        contents["csv"] = _table(path / "metrics.csv")
    if (path / "tensorboard").exists():
        contents["events"] = _events(path / "tensorboard")
    for name, keys in _KEYS.items():
        if (path / f"{name}.json").exists():
            with contextlib.suppress(ValueError):
                content = json.loads((path / f"{name}.json").read_bytes())
                contents[name] = {key: content.get(key) for key in keys}
    return contents


def _row(line):
    """Returns a row as text, without values that differ between runs with the same
    bits; None for an incomplete row.
    """
    with contextlib.suppress(ValueError):
        row = json.loads(line)
        return json.dumps({k: v for k, v in row.items() if not k.startswith("perf/")})


def _table(path):
    """Returns the rows of a CSV file in a form that does not depend on the order of its
    columns.
    """
    with path.open(newline="", errors="replace") as file:
        return [
            sorted(
                [name, cell]
                for name, cell in row.items()
                if cell and not name.startswith("perf/")
            )
            for row in csv.DictReader(file)
        ]


def _events(path):
    """Returns the scalars that TensorBoard shows."""
    shown = event_accumulator.EventAccumulator(str(path), size_guidance={"scalars": 0})
    shown.Reload()
    tags = [tag for tag in shown.Tags()["scalars"] if not tag.startswith("perf/")]
    return {
        tag: [[item.step, repr(item.value)] for item in shown.Scalars(tag)]
        for tag in sorted(tags)
    }


def _unfinished(run):
    return sorted(
        path for path in run.rglob("*") if path.name.endswith((".new", "__lock"))
    )


def _by_step(side):
    return {_step(name): content for name, content in side["checkpoints"].items()}


def _newest(checkpoints):
    return max(map(_step, checkpoints), default=0)


def _best(checkpoints):
    """Returns the lowest error, the default metric of the scenario's config; None if no
    checkpoint has metrics.
    """
    errors = [
        item["metrics"]["error"] for item in checkpoints.values() if item["metrics"]
    ]
    return min(errors, default=None)


def _step(name):
    return int(name.partition(".")[0])


def _row_step(line):
    try:
        return json.loads(line)["step"]
    except ValueError:
        # A killed process left an incomplete line. No promise covers it.
        return 1 << 60


def _first(want, got):
    """Describes a difference; for lists, by the first element that each side has and
    the other lacks.
    """
    if not isinstance(want, list) or not isinstance(got, list):
        return f"{str(got)[:150]} instead of {str(want)[:150]}"
    lacking = [row for row in want if row not in got]
    more = [row for row in got if row not in want]
    return (
        f"{len(got)} instead of {len(want)}; missing {str(lacking[:1])[:150]}, "
        f"extra {str(more[:1])[:150]}"
    )
