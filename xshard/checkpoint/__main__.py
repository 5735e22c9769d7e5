"""Inspects and manages checkpoints: `python -m xshard.checkpoint ls
runs/digits/checkpoints`.

DIR is a run's work directory or a folder of checkpoints: a path, gs://BUCKET/FOLDER or
s3://BUCKET/FOLDER. DIR@STEP names one checkpoint, as DIR STEP does; without a step,
show and orbax take the newest one.

    ls DIR                lists the steps: age, size, whether they are complete, finite,
                          pinned, or among the best
    show DIR STEP         prints the tree (types, shapes, shardings, the loss scale) and
                          the run's metadata
    verify DIR [STEP]     reads every byte of one step or of all; exit code 1 if any is
                          damaged
    diff DIR STEP STEP    prints the largest difference of each array that differs; or
                          diff DIR@STEP DIR@STEP
    pin DIR STEP          protects a step from the retention rules; unpin removes the
                          protection
    rm DIR STEP           deletes a step, pinned or not; its run may then resume from
                          the step before
    heal DIR STEP         reads every byte of a step that is marked as damaged, and
                          removes the mark if it is whole
    orbax DIR STEP        adds the file by which orbax's StandardCheckpointer opens the
                          step
    import ORBAX DIR      converts an orbax checkpoint that has params, for use with
                          --init_from

--json prints the same as JSON.
"""

import argparse
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from xshard import cli
from xshard.base import formatting, hashing
from xshard.checkpoint import (
    array_reader,
    catalog,
    janitor,
    manager,
    orbax,
    retention,
)
from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import diff as diff_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import place as place_lib
from xshard.checkpoint import store as store_lib
from xshard.files import jsonfile

Rows = list[dict[str, Any]]
# A loss scale has one value per group; at most this many values are shown.
_MOST_SCALES = 1024
_WHOLE = "whole"


@cli.program
def main(argv: Sequence[str]) -> int:
    """Runs a command; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    name = options.command
    function, arguments = _COMMANDS[name]
    if "STEP" in arguments and options.STEP is None:
        # Instead of a STEP, DIR may end with @STEP.
        options.DIR, options.STEP = place_lib.split(options.DIR)
        # The other commands change a checkpoint, so they take none by default.
        if options.STEP is None and name not in ("show", "verify", "orbax"):
            parser.error(f"{name} needs a step: {name} DIR STEP, or {name} DIR@STEP")
    rows = function(*[getattr(options, argument) for argument in arguments])
    if options.json:
        print(jsonfile.dumps(rows, indent=1))
    elif name == "ls" and not rows:
        print(f"no checkpoints in {_open(options.DIR)}")
    else:
        print(formatting.table(rows))
    if name in ("verify", "heal"):
        return int(any(not row["state"].startswith(_WHOLE) for row in rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    """Returns the parser, with a parser of its own for each command."""
    parser = cli.parser("checkpoint", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, arguments) in _COMMANDS.items():
        command = commands.add_parser(name)
        command.add_argument("--json", action="store_true")
        for argument in arguments:
            command.add_argument(argument, **_FORMS.get(argument, {}))
    return parser


def _open(directory: str) -> store_lib.Store:
    """Opens an existing folder of checkpoints."""
    store = place_lib.open_store(directory)
    if store.path is not None and not store.path.is_dir():
        raise format_lib.CheckpointError(f"{store} is not a directory.")
    return store


def list_steps(directory: str) -> Rows:
    """Returns a row for each attempt."""
    rows: Rows = []
    for entry in catalog.read_catalog(_open(directory)).entries:
        age: Any = ""
        if entry.time is not None:
            age = formatting.age(time.time() - entry.time)
        best = ""
        if entry.best is not None:
            metric = entry.metrics[entry.best_metric]
            best = f"{entry.best}: {entry.best_metric} {metric:.4g}"
        rows.append(
            {
                "step": entry.step,
                "state": entry.state,
                "age": age,
                "MB": "" if entry.nbytes is None else entry.nbytes / 1e6,
                "pinned": "pinned" if entry.pinned else "",
                "best": best,
                "folder": entry.folder,
            }
        )
    return rows


def show(directory: str, step: int | None) -> Rows:
    """Returns a row for each array, and one for each item of metadata."""
    attempt = format_lib.find(_open(directory), step)
    commit, meta = format_lib.retry_on_damage(
        lambda: format_lib.read_commit_meta(attempt)
    )
    scales = {}
    for path, array in meta.arrays.items():
        if _is_loss_scale(path, array):
            scales[path] = array
    values = dict(array_reader.read_arrays(attempt, scales))
    rows: Rows = []
    for path, array in meta.arrays.items():
        value = values[path].tolist() if path in values else ""
        rows.append(
            {
                "path": path,
                "type": array.key_impl or array.dtype,
                "shape": list(array.shape),
                "sharding": array.sharding,
                "value": value,
            }
        )
    metadata = {"step": meta.step, **meta.metadata, "data": meta.data}
    metadata |= meta.written_with
    if commit.nonfinite:
        metadata["not finite"] = commit.nonfinite
    for name, value in metadata.items():
        rows.append(
            {"path": name, "type": "", "shape": "", "sharding": "", "value": value}
        )
    return rows


def _is_loss_scale(path: str, array: arrays_lib.ArrayMeta) -> bool:
    is_real = array.dtype.startswith(("float", "bfloat"))
    # A forged array may have any shape.
    is_small = math.prod(array.shape) <= _MOST_SCALES
    return path.endswith("current_loss_scale") and is_real and is_small


def verify(directory: str, step: int | None) -> Rows:
    """Returns a row for each checkpoint, with its damage."""
    store = _open(directory)
    rows: Rows = []
    # Checkpoints that are already marked as damaged are read, too.
    for attempt in format_lib.attempts(store):
        if format_lib.COMMIT not in attempt.marks or step not in (None, attempt.step):
            continue
        state = _damage(attempt)
        if not state:
            state = _WHOLE
            if not attempt.counts:
                state += ", but marked as damaged: heal removes the mark"
        rows.append({"step": attempt.step, "state": state})
    if not rows:
        # Raises the error that no such checkpoint exists.
        format_lib.find(store, step)
    return rows


def diff(directory: str, first: str, second: str | None) -> Rows:
    """Returns a row for each array that differs, in any bit, between two steps of a
    directory, or between two places as DIR@STEP.
    """
    places = [directory, first]
    if second is not None:
        places = [f"{directory}@{first}", f"{directory}@{second}"]
    one, other = [place_lib.find(place) for place in places]
    rows: Rows = []
    for path, left, right in diff_lib.differing_arrays(one, other):
        difference: Any = "only in one checkpoint, or of another shape or type"
        if left is not None and right is not None:
            wide = np.complex128 if left.dtype.kind == "c" else np.float64
            gaps = np.abs(left.astype(wide) - right.astype(wide))
            difference = float(np.max(gaps))
        rows.append({"path": path, "largest difference": difference})
    return rows


def pin(directory: str, step: int) -> Rows:
    """Pins a step, so that no retention rule deletes it."""
    attempt = format_lib.find(_open(directory), step)
    if format_lib.PINNED not in attempt.marks:
        attempt.store.create(attempt.prefix + format_lib.PINNED, b"")
    return [{"pinned": step}]


def unpin(directory: str, step: int) -> Rows:
    """Unpins a step, so that the retention rules apply to it again."""
    attempt = format_lib.find(_open(directory), step)
    attempt.store.delete(attempt.prefix + format_lib.PINNED)
    return [{"unpinned": step}]


def remove(directory: str, step: int) -> Rows:
    """Deletes a step, and the leftovers of an earlier deletion of it that was
    interrupted.
    """
    store = _open(directory)
    chosen = []
    for attempt in _attempts_of(store, step):
        if attempt.counts or format_lib.is_removed(store, attempt.folder):
            chosen.append(attempt)
    if not chosen:
        # Raises the error that no such checkpoint exists.
        format_lib.find(store, step)
    for attempt in chosen:
        janitor.remove(attempt, by_hand=True)
    return [{"deleted": step}]


def heal(directory: str, step: int) -> Rows:
    """Removes the DAMAGED marks from a step's checkpoints that are whole."""
    store = _open(directory)
    there = _attempts_of(store, step)
    marked = []
    for attempt in there:
        if {format_lib.COMMIT, format_lib.DAMAGED} <= attempt.marks:
            marked.append(attempt)
    if not marked:
        raise format_lib.CheckpointError(
            f"No checkpoint of step {step} in {store} is marked as damaged."
        )
    if any(attempt.counts for attempt in there):
        raise format_lib.CheckpointError(
            f"{store} already has a checkpoint of step {step} that counts; there is "
            "nothing to heal."
        )
    rows: Rows = []
    for attempt in marked:
        state = _damage(attempt)
        if not state:
            attempt.store.delete(attempt.prefix + format_lib.DAMAGED)
            state = f"{_WHOLE}; counts again"
        rows.append({"step": step, "folder": attempt.folder, "state": state})
    return rows


def to_orbax(directory: str, step: int | None) -> Rows:
    """Adds the file by which orbax opens a step."""
    attempt = format_lib.find(_open(directory), step)
    return [{"orbax": str(attempt), "arrays": orbax.describe(attempt)}]


def from_orbax(orbax_directory: str, directory: str) -> Rows:
    """Converts an orbax checkpoint to a checkpoint of step 0."""
    source = store_lib.Store(orbax_directory)
    # It is created, so it need not exist.
    store = store_lib.Store(directory)
    for attempt in format_lib.attempts(store):
        # What an interrupted import left has no COMMIT, and the save removes it.
        if format_lib.COMMIT in attempt.marks:
            raise format_lib.CheckpointError(
                f"{store} already holds checkpoints; give another place."
            )
    arrays = orbax.read(source)
    if not any(path.startswith("params/") for path in arrays):
        arrays = {f"params/{path}": value for path, value in arrays.items()}
    target = manager.Manager(store.url, retention.Keep(last=1))
    target.save(0, arrays, {"imported from": source.url})
    target.close()
    return [{"imported": source.url, "arrays": len(arrays), "to": store.url}]


def _attempts_of(store: store_lib.Store, step: int) -> list[format_lib.SaveAttempt]:
    return [attempt for attempt in format_lib.attempts(store) if attempt.step == step]


def _read_all(attempt: format_lib.SaveAttempt) -> Iterator[tuple[str, np.ndarray]]:
    arrays = format_lib.read_array_metas(attempt)
    return array_reader.read_arrays(attempt, arrays)


def _damage(attempt: format_lib.SaveAttempt) -> str:
    """Describes damage that persists when a checkpoint is read again; empty if there is
    none.
    """

    def read() -> str:
        saved = format_lib.read_meta(attempt).metadata.get("fingerprint")
        expected = _totals(saved)
        actual = _fingerprints(_read_all(attempt), len(expected))
        if expected and actual != expected:
            return (
                f"the fingerprint of its arrays is {', '.join(actual)}, but on the "
                f"devices it was {', '.join(expected)}"
            )
        format_lib.added_metrics(attempt)
        return ""

    try:
        return format_lib.retry_on_damage(read)
    except format_lib.UnreadableError:
        # A read error is not damage: the stored bytes may be whole.
        raise
    except format_lib.CheckpointError as e:
        return str(e)


def _totals(saved: Any) -> list[str]:
    """Returns the fingerprint of each group of a state, over all kinds of arrays.

    Args:
      saved: the fingerprints by kind, as a checkpoint's metadata have them: a text, or
        a list with a text for each group. Without valid fingerprints, nothing is
        returned.
    """
    if not isinstance(saved, dict) or not saved:
        return []
    kinds = [x if isinstance(x, list) else [x] for x in saved.values()]
    if len({len(kind) for kind in kinds}) > 1:
        return []
    totals = []
    for of_group in zip(*kinds, strict=True):
        total = hashing.total(of_group)
        if total is None:
            return []
        totals.append(total)
    return totals


def _fingerprints(
    arrays: Iterator[tuple[str, np.ndarray]], num_groups: int
) -> list[str]:
    """Reads arrays, and returns the fingerprint of each group; of the whole state, if
    it has no groups.
    """
    if num_groups <= 1:
        return [hashing.of_arrays(arrays)]
    texts: list[list[str]] = [[] for _ in range(num_groups)]
    for path, x in arrays:
        for group, of_group in enumerate(texts):
            # Groups share the step and the key. Every other array has a leading
            # dimension of groups.
            value = x if path in ("step", "rng") else x[group]
            of_group.append(hashing.of_arrays([(path, value)]))
    return [hashing.total(of_group) or "" for of_group in texts]


# Each command's function, and the names of its arguments.
_COMMANDS: dict[str, tuple[Callable[..., Rows], tuple[str, ...]]] = {
    "ls": (list_steps, ("DIR",)),
    "show": (show, ("DIR", "STEP")),
    "verify": (verify, ("DIR", "STEP")),
    "diff": (diff, ("DIR", "FIRST", "SECOND")),
    "pin": (pin, ("DIR", "STEP")),
    "unpin": (unpin, ("DIR", "STEP")),
    "rm": (remove, ("DIR", "STEP")),
    "heal": (heal, ("DIR", "STEP")),
    "orbax": (to_orbax, ("DIR", "STEP")),
    "import": (from_orbax, ("ORBAX", "DIR")),
}
_FORMS: dict[str, dict[str, Any]] = {
    "STEP": {"type": int, "nargs": "?"},
    "SECOND": {"nargs": "?"},
}


if __name__ == "__main__":
    # Exits silently, without a traceback, when a pager or `head` closes the pipe.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
