"""Inspects and manages checkpoints: `python -m xshard.checkpoint ls
runs/digits/checkpoints`.

DIR is a run's work directory or a folder of checkpoints: a path, gs://BUCKET/FOLDER or
s3://BUCKET/FOLDER. DIR@STEP names one checkpoint, as DIR STEP does; without a step,
show, export and orbax take the newest one.

    ls DIR                   lists the steps: age, size, whether they are complete,
      finite, pinned, or among the best
    show DIR STEP            prints the tree (types, shapes, shardings, the loss scale)
    and the run's metadata verify DIR [STEP]        reads every byte of one step or of
    all; exit code 1 if any is damaged diff DIR STEP STEP       prints the largest
    difference of each array that differs; or diff DIR@STEP DIR@STEP pin DIR STEP
    protects a step from the retention rules; unpin removes the protection rm DIR STEP
    deletes a step, pinned or not; its run may then resume from the step before heal DIR
    STEP            reads every byte of a step that is marked as damaged, and removes
    the mark if it is whole export DIR STEP FILE     writes the arrays to an .npz file;
    types that NumPy lacks become float32. Characters
                             that a file name cannot have are written %XX ('..' is
                             %2E%2E), and a name that is too long becomes % and its
                             SHA-256
    orbax DIR STEP           adds the file by which orbax's StandardCheckpointer opens
    the step import ORBAX DIR         converts an orbax checkpoint that has params, for
    use with --init_from

--json prints the same as JSON.
"""

import argparse
import math
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from xshard import cli, errors
from xshard.checkpoint import (
    array_reader,
    catalog,
    manager,
    npz,
    orbax,
    retention,
    writer,
)
from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import diff as diff_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import metadata_files as metadata_lib
from xshard.checkpoint import place as place_lib
from xshard.checkpoint import store as store_lib
from xshard.files import disk, jsonfile, tensors
from xshard.metrics import formatting as formatting_lib
from xshard.stored import hashing

Rows = list[dict[str, Any]]
# A loss scale has one value per group; at most this many values are shown.
_MOST_SCALES = 1024


def list_steps(store: store_lib.Store) -> Rows:
    """Returns a row for each attempt."""
    rows: Rows = []
    for entry in catalog.read_catalog(store).entries:
        row: dict[str, Any] = {
            "step": entry.step,
            "state": entry.state,
            "age": "",
            "MB": "",
        }
        if entry.time is not None:
            row["age"] = formatting_lib.age(time.time() - entry.time)
        if entry.nbytes is not None:
            row["MB"] = entry.nbytes / 1e6
        row["pinned"] = "pinned" if entry.pinned else ""
        row["best"] = _best(entry)
        row["folder"] = entry.folder
        rows.append(row)
    return rows


def show(store: store_lib.Store, step: int | None) -> Rows:
    """Returns a row for each array, and one for each item of metadata."""
    attempt = format_lib.find(store, step)
    commit, meta = metadata_lib.retry_on_damage(
        lambda: metadata_lib.read_commit_meta(attempt)
    )
    arrays = metadata_lib.array_metas(meta)
    scales = {name: array for name, array in arrays.items() if _is_scale(name, array)}
    values = dict(array_reader.read_arrays(attempt, scales))
    rows = []
    for name, array in arrays.items():
        value = values[name].tolist() if name in values else ""
        kind = array.key_impl or array.dtype
        rows.append(_item(name, value, kind, list(array.shape), array.sharding))
    extra = {
        "step": meta["step"],
        **meta["metadata"],
        "data": meta["data"],
        **meta["written_with"],
    }
    nonfinite = commit.get(format_lib.NONFINITE)
    if nonfinite:
        extra["not finite"] = nonfinite
    return rows + [_item(name, value) for name, value in extra.items()]


def _item(
    path: str, value: Any, kind: str = "", shape: Any = "", sharding: str = ""
) -> dict[str, Any]:
    return {
        "path": path,
        "type": kind,
        "shape": shape,
        "sharding": sharding,
        "value": value,
    }


def verify(store: store_lib.Store, step: int | None) -> Rows:
    """Returns a row for each checkpoint, with its damage."""
    rows: Rows = []
    # Checkpoints that are already marked as damaged are read, too.
    for attempt in format_lib.attempts(store):
        if format_lib.COMMIT in attempt.marks and step in (None, attempt.step):
            whole = (
                "whole"
                if attempt.counts
                else "whole, but marked as damaged: heal removes the mark"
            )
            rows.append({"step": attempt.step, "state": _damage(attempt) or whole})
    if not rows:
        format_lib.find(store, step)
    return rows


def diff(store: str, a: str, b: str | None) -> Rows:
    """Returns a row for each array that differs between two steps of a store, or
    between two places.
    """
    places = (store, a) if b is None else (f"{store}@{a}", f"{store}@{b}")
    first, second = map(place_lib.find, places)
    rows: Rows = []
    for path, left, right in diff_lib.differing_arrays(first, second):
        if left is None or right is None:
            difference: Any = "only in one checkpoint, or of another shape or type"
        else:
            difference = _gap(left, right)
        rows.append({"path": path, "largest difference": difference})
    return rows


def pin(store: store_lib.Store, step: int) -> Rows:
    """Pins a step, so that no retention rule deletes it."""
    format_lib.pin(format_lib.find(store, step))
    return [{"pinned": step}]


def unpin(store: store_lib.Store, step: int) -> Rows:
    """Unpins a step, so that the retention rules apply to it again."""
    format_lib.unpin(format_lib.find(store, step))
    return [{"unpinned": step}]


def remove(store: store_lib.Store, step: int) -> Rows:
    """Deletes a step, and the leftovers of an earlier deletion of it that was
    interrupted.
    """
    there = [attempt for attempt in format_lib.attempts(store) if attempt.step == step]
    chosen = [a for a in there if a.counts or format_lib.is_removed(store, a.folder)]
    for attempt in chosen or [format_lib.find(store, step)]:
        writer.remove(attempt, by_hand=True)
    return [{"deleted": step}]


def heal(store: store_lib.Store, step: int) -> Rows:
    """Removes the DAMAGED marks from a step's checkpoints that are whole."""
    there = [attempt for attempt in format_lib.attempts(store) if attempt.step == step]
    marked = [a for a in there if {format_lib.COMMIT, format_lib.DAMAGED} <= a.marks]
    if not marked:
        raise format_lib.CheckpointError(
            f"No checkpoint of step {step} in {store} is marked as damaged."
        )
    if any(attempt.counts for attempt in there):
        raise format_lib.CheckpointError(
            f"{store} already has a checkpoint of step {step} that counts; there is nothing to heal."
        )
    rows: Rows = []
    for attempt in marked:
        state = _damage(attempt)
        if not state:
            attempt.store.delete(attempt.prefix + format_lib.DAMAGED)
            state = "whole; counts again"
        rows.append({"step": step, "folder": attempt.folder, "state": state})
    return rows


def export(store: store_lib.Store, step: int | None, file: pathlib.Path) -> Rows:
    """Writes the arrays to an .npz file."""
    attempt = format_lib.find(store, step)
    if disk.exists(file):
        raise errors.UserError(
            f"{file} already exists: give another FILE, or delete it."
        )
    # The file gets its name when all arrays are in it: a part of them must not pass for
    # an export.
    with disk.writing(file, tensors.WRITE_ELSEWHERE), disk.replacing(file) as out:
        names = npz.write(out, _read_all(attempt))
    row: dict[str, Any] = {"file": str(file), "arrays": len(names)}
    row["MB"] = file.stat().st_size / 1e6
    renamed = {path: name for path, name in names.items() if name != path}
    if renamed:
        row["renamed"] = renamed
    return [row]


def to_orbax(store: store_lib.Store, step: int | None) -> Rows:
    """Adds the file by which orbax opens a step."""
    attempt = format_lib.find(store, step)
    return [{"orbax": str(attempt), "arrays": orbax.describe(attempt)}]


def from_orbax(source: store_lib.Store, store: store_lib.Store) -> Rows:
    """Converts an orbax checkpoint to a checkpoint of step 0."""
    # What an interrupted import left does not count, and the save removes it.
    if any(
        format_lib.COMMIT in attempt.marks for attempt in format_lib.attempts(store)
    ):
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


@cli.program
def main(argv: Sequence[str]) -> int:
    """Runs a command; returns the exit code."""
    parser = _parser()
    arguments = vars(parser.parse_args(argv))
    command: Callable[..., Rows] = arguments.pop("command")
    as_json, name = arguments.pop("json"), arguments.pop("name")
    if arguments.get("step", 0) is None:
        arguments["store"], arguments["step"] = place_lib.split(arguments["store"])
        if arguments["step"] is None and command in (pin, unpin, remove, heal):
            parser.error(f"{name} needs a step: {name} DIR STEP, or {name} DIR@STEP")
    if command is from_orbax:
        # An import creates the folder that it writes to.
        arguments = {key: store_lib.Store(place) for key, place in arguments.items()}
    elif command is not diff:
        arguments["store"] = _existing(arguments["store"])
    rows = command(**arguments)
    if as_json:
        print(jsonfile.dumps(rows, indent=1))
    elif command is list_steps and not rows:
        print(f"no checkpoints in {arguments['store']}")
    else:
        print(formatting_lib.table(rows))
    if command not in (verify, heal):
        return 0
    return int(any(not row["state"].startswith("whole") for row in rows))


def _existing(directory: str) -> store_lib.Store:
    store = place_lib.open_store(directory)
    if store.path is not None and not store.path.is_dir():
        raise format_lib.CheckpointError(f"{store} is not a directory.")
    return store


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser("checkpoint", __doc__)
    commands = parser.add_subparsers(dest="name", required=True)
    for name, (command, positionals) in _COMMANDS.items():
        sub = commands.add_parser(name)
        sub.set_defaults(command=command)
        sub.add_argument("--json", action="store_true")
        for positional in positionals.split():
            key = positional.rstrip("?")
            kind, metavar = _POSITIONALS[key]
            nargs = "?" if positional != key else None
            sub.add_argument(key, type=kind, nargs=nargs, metavar=metavar)
    return parser


# For each positional argument: its type, and its name in the help.
_POSITIONALS: dict[str, tuple[Any, str]] = {
    "store": (str, "DIR"),
    "source": (str, "ORBAX"),
    "step": (int, "STEP"),
    "a": (str, "STEP"),
    "b": (str, "STEP"),
    "file": (pathlib.Path, "FILE"),
}
# For each command: its function, and its positional arguments; a question mark makes
# one optional.
_COMMANDS: dict[str, tuple[Callable[..., Rows], str]] = {
    "ls": (list_steps, "store"),
    "show": (show, "store step?"),
    "verify": (verify, "store step?"),
    "diff": (diff, "store a b?"),
    "pin": (pin, "store step?"),
    "unpin": (unpin, "store step?"),
    "rm": (remove, "store step?"),
    "heal": (heal, "store step?"),
    "export": (export, "store step? file"),
    "orbax": (to_orbax, "store step?"),
    "import": (from_orbax, "source store"),
}


def _read_all(attempt: format_lib.SaveAttempt) -> Iterator[tuple[str, np.ndarray]]:
    return array_reader.read_arrays(attempt, metadata_lib.read_array_metas(attempt))


def _is_scale(path: str, array: arrays_lib.ArrayMeta) -> bool:
    is_real = array.dtype.startswith(("float", "bfloat"))
    is_small = math.prod(array.shape) <= _MOST_SCALES
    return path.endswith("current_loss_scale") and is_real and is_small


def _damage(attempt: format_lib.SaveAttempt) -> str:
    """Describes damage that persists when a checkpoint is read again; empty if there is
    none.
    """

    def read() -> str:
        saved = metadata_lib.read_meta(attempt)["metadata"].get("fingerprint")
        expected = _totals(saved)
        actual = _fingerprints(_read_all(attempt), len(expected))
        if expected and actual != expected:
            return (
                f"the fingerprint of its arrays is {', '.join(actual)}, but on the "
                f"devices it was {', '.join(expected)}"
            )
        metadata_lib.added_metrics(attempt)
        return ""

    try:
        return metadata_lib.retry_on_damage(read)
    except metadata_lib.UnreadableError:
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
    of_kinds = [x if isinstance(x, list) else [x] for x in saved.values()]
    if len({len(of_kind) for of_kind in of_kinds}) > 1:
        return []
    totals = [hashing.total(of_group) for of_group in zip(*of_kinds, strict=True)]
    known = [total for total in totals if total is not None]
    return known if len(known) == len(totals) else []


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


def _best(entry: catalog.Entry) -> str:
    if entry.best is None:
        return ""
    return f"{entry.best}: {entry.best_metric} {entry.metrics[entry.best_metric]:.4g}"


def _gap(left: np.ndarray, right: np.ndarray) -> float:
    wide = np.complex128 if left.dtype.kind == "c" else np.float64
    return float(np.max(np.abs(left.astype(wide) - right.astype(wide))))


if __name__ == "__main__":
    # Exits silently, without a traceback, when a pager or `head` closes the pipe.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
