"""What a run has promised, and whether it was kept: the checkpoints, the rows up to them, and the end.

It looks at files, and believes no message. A part that met a fault may do one of two things: end as an undisturbed
one does, or say in one message what failed where, and leave what was there, so that the same command goes on.
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

from xshard.checkpoint import format as format_lib
from xshard.checkpoint import source
from xshard.checkpoint import store as store_lib

_BUDGET_BYTES = 1 << 30


def look(run, checkpoints):
    """What is there, as JSON can hold it; in a process of its own, since tensorstore has threads.

    Args:
      run: the work directory.
      checkpoints: where its checkpoints are.
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
    """The promises that are broken, one text each, in whatever way a part has ended.

    Args:
      before: what was there when it began.
      after: what is there now.
      wanted: what is there at the end of an undisturbed run.
      output: what the part has printed.
    """
    texts = [f"marked as damaged: {name}" for name in after["damaged"]]
    old, new = before["checkpoints"], after["checkpoints"]
    newest = max(map(_step, new), default=0)
    if newest < max(map(_step, old), default=0):
        texts.append(f"checkpoints {sorted(old)} counted, now {sorted(new)}")
    said = max(map(int, re.findall(r"step (\d+): saved", output)), default=0)
    if newest < said:
        texts.append(f"step {said} was said to be saved, and the newest that counts is {newest}")
    if newest == max(map(_step, old), default=0) and old.keys() - new.keys():
        texts.append(f"deleted without a newer one: {sorted(old.keys() - new.keys())}")
    best = [min((c["metrics"]["error"] for c in side.values() if c["metrics"]), default=None) for side in (old, new)]  # fmt: skip
    if best[0] is not None and (best[1] is None or best[1] > best[0]):
        texts.append("the best checkpoint was deleted")
    texts += [f"{name} holds other bits" for name in old.keys() & new.keys() if old[name]["state"] != new[name]["state"]]  # fmt: skip
    for place in ("run", "eval"):
        texts += _lost_lines(place, before, after, newest)
    # Training's rows are there when their checkpoint counts; an evaluation may still be to come.
    due = [row for row in wanted["run"]["rows"] if '"loss"' in row and _row_step(row) <= newest]
    missing = [row for row in due if row not in after["run"]["rows"]]
    if missing:
        texts.append(
            f"a checkpoint of step {newest} counts; {len(missing)} rows before it are not there"
        )
    return texts


def differences(after, wanted, *, clean=True):
    """What differs from the end of an undisturbed run, one text each.

    Args:
      after: what is there now.
      wanted: what is there at the end of an undisturbed run.
      clean: whether there may be nothing beside it.
    """
    got, want = (
        {_step(name): content for name, content in side["checkpoints"].items()}
        for side in (after, wanted)
    )
    texts = [f"no checkpoint of step {step}" for step in sorted(want.keys() - got.keys())]
    texts += [f"step {step} differs" for step in sorted(want) if step in got and got[step] != want[step]]  # fmt: skip
    for place in ("run", "eval"):
        for what, content in wanted[place].items():
            if what != "lines" and after[place][what] != content:
                texts.append(f"{place}: {what} differs: {_first(content, after[place][what])}")
    if clean:
        texts += [f"too many: step {step}" for step in sorted(got.keys() - want.keys())]
        texts += [f"left behind: {name}" for name in left_behind(after)]
    return texts


def left_behind(after):
    """What is neither a checkpoint nor a file of the run."""
    return after["uncommitted"] + after["unfinished"]


def unclear(ended, names, reason):
    """What is wrong with the end of a part that has failed, one text each.

    Args:
      ended: how it has ended.
      names: one of these it must name.
      reason: what it must say of why, in whatever case.
    """
    said = ended.output
    if ended.code == 0:
        return ["another outcome, without an error"]
    texts = [] if ended.code == 1 else [f"exit code {ended.code}"]
    texts += ["a traceback"] if "Traceback (most recent call last)" in said else []
    texts += [] if "error: " in said else ["no message"]
    texts += [] if any(name in said for name in names) else [f"does not name {names[0]}"]
    texts += [] if reason.lower() in said.lower() else [f"does not say '{reason}'"]
    return texts


def names_of_file(path):
    """What a message may name when a call on a path has failed: the file, or the folder of what it is part of."""
    path = pathlib.Path(re.sub(r"/\.([^/]+)\.new$", r"/\1", path))
    whole = ("step_", "checkpoints", "tensorboard", "eval")
    return [str(path), *(str(one) for one in path.parents if one.name.startswith(whole))]


def names_of_object(name):
    """The same for a request for an object of the stand-ins' bucket."""
    return [f"bucket/{one}" for one in (name, *map(str, pathlib.Path(name).parents[:-1]))]


def reason(fault):
    """What a message must say of a fault."""
    # What is not there, or is otherwise, need not be said in the words of the C library or of HTTP.
    if fault in ("ENOENT", "404", "412") or not (hasattr(errno, fault) or fault.isdigit()):
        return ""
    return fault if fault.isdigit() else os.strerror(getattr(errno, fault))


def _checkpoint(attempt):
    """The bits of a checkpoint, its position in the data, and its metrics."""
    meta = source.read_meta(attempt)
    digest = hashlib.sha256(json.dumps(meta["data"], sort_keys=True).encode())
    for name, value in source.read_arrays(attempt, source.array_metas(meta), _BUDGET_BYTES):
        digest.update(name.encode() + str(value.dtype).encode() + value.tobytes())
    return {"state": digest.hexdigest(), "metrics": source.read_commit(attempt)["metrics"]}


def _directory(path):
    """What a work directory holds, but for what differs between runs of the same bits."""
    found = {"lines": [], "rows": [], "csv": [], "events": {}, "results": None, "best": None}
    if (path / "metrics.jsonl").exists():
        found["lines"] = (path / "metrics.jsonl").read_text(errors="replace").splitlines()
        found["rows"] = [row for row in map(_row, found["lines"]) if row]
    if (path / "metrics.csv").exists():
        found["csv"] = _table(path / "metrics.csv")
    if (path / "tensorboard").exists():
        found["events"] = _events(path / "tensorboard")
    for name in ("results", "best"):
        if (path / f"{name}.json").exists():
            found[name] = (path / f"{name}.json").read_text(errors="replace")
    return found


def _row(line):
    """A row as text, but for what differs between runs of the same bits; None of half a row."""
    with contextlib.suppress(ValueError):
        row = json.loads(line)
        return json.dumps({k: v for k, v in row.items() if not k.startswith("perf/")})


def _table(path):
    """The rows of a table, whatever the order of its columns."""
    with path.open(newline="", errors="replace") as file:
        return [
            sorted(
                [name, cell] for name, cell in row.items() if cell and not name.startswith("perf/")
            )
            for row in csv.DictReader(file)
        ]


def _events(path):
    """What TensorBoard shows of scalars."""
    shown = event_accumulator.EventAccumulator(str(path), size_guidance={"scalars": 0})
    shown.Reload()
    tags = [tag for tag in shown.Tags()["scalars"] if not tag.startswith("perf/")]
    return {
        tag: [[one.step, repr(one.value)] for one in shown.Scalars(tag)] for tag in sorted(tags)
    }


def _unfinished(run):
    return sorted(path for path in run.rglob("*") if path.name.endswith((".new", "__lock")))


def _lost_lines(place, before, after, newest):
    """The lines that were there of steps that a checkpoint covers are there still, byte by byte."""
    there = set(after[place]["lines"])
    lost = [
        line for line in before[place]["lines"] if line not in there and _row_step(line) <= newest
    ]
    return (
        [f"{place}: rows of steps {[_row_step(line) for line in lost]} were replaced"]
        if lost
        else []
    )


def _step(name):
    return int(name.partition(".")[0])


def _row_step(line):
    try:
        return json.loads(line)["step"]
    except ValueError:
        # Half a line, of a process that was killed: no promise was made of it.
        return 1 << 60


def _first(want, got):
    if not isinstance(want, list) or not isinstance(got, list):
        return f"{str(got)[:150]} for {str(want)[:150]}"
    lacking = [row for row in want if row not in got]
    more = [row for row in got if row not in want]
    return f"{len(got)} for {len(want)}; missing {str(lacking[:1])[:150]}, too many {str(more[:1])[:150]}"
