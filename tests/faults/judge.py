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
from xshard.checkpoint import parts, source
from xshard.checkpoint import store as store_lib

_BUDGET_BYTES = 1 << 30
# Of files of JSON what is the same in runs of the same bits.
_KEYS = {
    "results": ("step", "global_step", "eval", "samples", "finite", "why"),
    "best": ("metric", "mode", "best", "pinned"),
}


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
    newest, had = _newest(new), _newest(old)
    if newest < had:
        texts.append(f"checkpoints {sorted(old)} counted, now {sorted(new)}")
    if newest == had and old.keys() - new.keys():
        texts.append(f"deleted without a newer one: {sorted(old.keys() - new.keys())}")
    said = max(map(int, re.findall(r"step (\d+): saved", output)), default=0)
    if newest < said:
        texts.append(f"step {said} was said to be saved, and the newest that counts is {newest}")
    if _best(old) is not None and (_best(new) is None or _best(new) > _best(old)):
        texts.append("the best checkpoint was deleted")
    for name in old.keys() & new.keys():
        if old[name]["state"] != new[name]["state"]:
            texts.append(f"{name} holds other bits")
    for place in ("run", "eval"):
        there = set(after[place]["lines"])
        for line in before[place]["lines"]:
            # Byte by byte: of a run that began again only the times would differ.
            if line not in there and _row_step(line) <= newest:
                texts.append(f"{place}: a row of step {_row_step(line)} was replaced")
    # Training's rows are there when their checkpoint counts; an evaluation may still be to come.
    for row in wanted["run"]["rows"]:
        if '"loss"' in row and _row_step(row) <= newest and row not in after["run"]["rows"]:
            texts.append(f"step {newest} counts, and the row of step {_row_step(row)} is lost")
    return texts


def differences(after, wanted):
    """What differs from the end of an undisturbed run, one text each; more checkpoints are no difference.

    Args:
      after: what is there now.
      wanted: what is there at the end of an undisturbed run.
    """
    got, want = _by_step(after), _by_step(wanted)
    texts = [f"no checkpoint of step {step}" for step in sorted(want.keys() - got.keys())]
    for step in sorted(want.keys() & got.keys()):
        if got[step] != want[step]:
            texts.append(f"step {step}: {got[step]} for {want[step]}")
    for place in ("run", "eval"):
        for what, content in wanted[place].items():
            if what != "lines" and after[place][what] != content:
                texts.append(f"{place}: {what} differs: {_first(content, after[place][what])}")
    return texts


def left_behind(after):
    """What is neither a checkpoint nor a file of the run, one text each."""
    return [f"left behind: {name}" for name in after["uncommitted"] + after["unfinished"]]


def more_checkpoints(after, wanted):
    """The steps whose checkpoints count, and that the rules would not have kept."""
    return sorted(_by_step(after).keys() - _by_step(wanted).keys())


def unclear(ended, names, reasons):
    """What is wrong with the end of a part that has failed, one text each.

    Args:
      ended: how it has ended.
      names: one of these it must name.
      reasons: one of these it must say of why, in whatever case.
    """
    said = ended.output
    if ended.code == 0:
        return ["another outcome, without an error"]
    texts = [] if ended.code == 1 else [f"exit code {ended.code}"]
    texts += ["a traceback"] if "Traceback (most recent call last)" in said else []
    texts += [] if "error: " in said else ["no message"]
    texts += [] if any(name in said for name in names) else [f"does not name {names[0]}"]
    if not any(reason.lower() in said.lower() for reason in reasons):
        texts.append(f"does not say '{reasons[0]}'")
    return texts


def names_of_file(path):
    """What a message may name when a call on a path has failed: the file, or the folder of what it is part of."""
    path = pathlib.Path(re.sub(r"/\.([^/]+)\.new$", r"/\1", path))
    whole = ("step_", "checkpoints", "tensorboard", "eval")
    return [str(path), *(str(one) for one in path.parents if one.name.startswith(whole))]


def names_of_object(name):
    """The same for a request for an object of the stand-ins' bucket."""
    path = pathlib.Path(name or "run")
    return [f"bucket/{one}" for one in (path, *path.parents[:-1])]


def reason(fault):
    """What a message must say of a fault."""
    # What is not there, or is otherwise, need not be said in the words of the C library or of HTTP.
    if fault in ("ENOENT", "404", "412") or not (hasattr(errno, fault) or fault.isdigit()):
        return ""
    return fault if fault.isdigit() else os.strerror(getattr(errno, fault))


def _checkpoint(attempt):
    """The bits of a checkpoint, its position in the data, its metrics, and whether it is pinned."""
    meta = source.read_meta(attempt)
    digest = hashlib.sha256(json.dumps(meta["data"], sort_keys=True).encode())
    for name, value in parts.read_arrays(attempt, source.array_metas(meta), _BUDGET_BYTES):
        digest.update(name.encode() + str(value.dtype).encode() + value.tobytes())
    return {
        "state": digest.hexdigest(),
        "metrics": source.read_commit(attempt)["metrics"],
        "pinned": format_lib.PINNED in attempt.marks,
    }


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
    for name, keys in _KEYS.items():
        if (path / f"{name}.json").exists():
            with contextlib.suppress(ValueError):
                content = json.loads((path / f"{name}.json").read_bytes())
                found[name] = {key: content.get(key) for key in keys}
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


def _by_step(side):
    return {_step(name): content for name, content in side["checkpoints"].items()}


def _newest(checkpoints):
    return max(map(_step, checkpoints), default=0)


def _best(checkpoints):
    """The best by the metric that the scenario's config names by default; None if none has one."""
    errors = [one["metrics"]["error"] for one in checkpoints.values() if one["metrics"]]
    return min(errors, default=None)


def _step(name):
    return int(name.partition(".")[0])


def _row_step(line):
    try:
        return json.loads(line)["step"]
    except ValueError:
        # Half a line, of a process that was killed: no promise was made of it.
        return 1 << 60


def _first(want, got):
    """Says what differs, of lists the first of each side that the other lacks."""
    if not isinstance(want, list) or not isinstance(got, list):
        return f"{str(got)[:150]} for {str(want)[:150]}"
    lacking = [row for row in want if row not in got]
    more = [row for row in got if row not in want]
    return f"{len(got)} for {len(want)}; missing {str(lacking[:1])[:150]}, too many {str(more[:1])[:150]}"
