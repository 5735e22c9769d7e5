"""Looks at checkpoints: `python -m xshard.checkpoint ls runs/digits/checkpoints`.

    ls DIR                   the steps: when, how large, whether they count
    show DIR STEP            the tree: shapes and types, the loss scale, the run's metadata
    verify DIR [STEP]        reads every byte of one step or of all; exit code 1 if any is damaged
    diff DIR STEP STEP       the largest difference of each array
    rm DIR STEP              deletes a step
    export DIR STEP FILE     writes the arrays to an .npz file; types that NumPy lacks become float32

--json prints the same for machines.
"""

import argparse
import json
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from xshard.checkpoint import format as format_lib
from xshard.checkpoint import manager, reader

Rows = list[dict[str, Any]]


def list_steps(directory: pathlib.Path) -> Rows:
    """A row for each attempt."""
    return [
        {
            "step": attempt.step,
            "counts": "yes" if attempt.is_committed else "no",
            "written": time.strftime(
                "%Y-%m-%d %H:%M:%S", time.localtime(attempt.path.stat().st_mtime)
            ),
            "MB": _size(attempt.path) / 1e6,
            "directory": attempt.path.name,
        }
        for attempt in format_lib.attempts(directory)
    ]


def show(directory: pathlib.Path, step: int) -> Rows:
    """A row for each array, and one for each item of metadata."""
    attempt = find(directory, step)
    meta = reader.read_meta(attempt)
    arrays = reader.array_metas(meta)
    scales = {name: array for name, array in arrays.items() if name.endswith("current_loss_scale")}
    values = dict(reader.read_arrays(attempt, scales))
    rows: Rows = [
        {
            "path": name,
            "type": array.key_impl or array.dtype,
            "shape": list(array.shape),
            "value": values[name].tolist() if name in values else "",
        }
        for name, array in arrays.items()
    ]
    extra = {"step": meta["step"], **meta["metadata"], **meta["written_with"]}
    return rows + [{"path": key, "type": "", "shape": "", "value": v} for key, v in extra.items()]


def verify(directory: pathlib.Path, step: int | None) -> Rows:
    """A row for each checkpoint, with what is damaged."""
    attempts = format_lib.committed(directory)
    chosen = attempts if step is None else [find(directory, step)]
    return [{"step": attempt.step, "state": _damage(attempt) or "whole"} for attempt in chosen]


def diff(directory: pathlib.Path, a: int, b: int) -> Rows:
    """A row for each array that differs."""
    arrays = [dict(_read_all(find(directory, step))) for step in (a, b)]
    rows: Rows = []
    for name in sorted(arrays[0].keys() | arrays[1].keys()):
        left, right = (side.get(name) for side in arrays)
        if left is None or right is None or left.shape != right.shape:
            rows.append({"path": name, "largest difference": "only in one, or of another shape"})
        elif left.tobytes() != right.tobytes():
            gap = np.abs(left.astype(np.float64) - right.astype(np.float64))
            rows.append({"path": name, "largest difference": float(np.max(gap))})
    return rows


def remove(directory: pathlib.Path, step: int) -> Rows:
    """Deletes a step."""
    manager.remove(find(directory, step))
    return [{"deleted": step}]


def export(directory: pathlib.Path, step: int, file: pathlib.Path) -> Rows:
    """Writes the arrays to an .npz file."""
    arrays = dict(_read_all(find(directory, step)))
    plain = {
        name: value if value.dtype.kind in "biufc" and value.dtype.isbuiltin else value.astype("f4")
        for name, value in arrays.items()
    }
    with file.open("xb") as out:
        np.savez(out, **plain)  # type: ignore[arg-type]
    return [{"file": str(file), "arrays": len(plain), "MB": file.stat().st_size / 1e6}]


def find(directory: pathlib.Path, step: int) -> format_lib.Attempt:
    """The checkpoint of a step; CheckpointError if there is none."""
    committed = format_lib.committed(directory)
    for attempt in committed:
        if attempt.step == step:
            return attempt
    steps = [attempt.step for attempt in committed]
    raise format_lib.CheckpointError(
        f"There is no checkpoint of step {step} in {directory}; steps there: {steps or 'none'}."
    )


def main(argv: Sequence[str]) -> int:
    """Runs a command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    command: Callable[..., Rows] = arguments.command
    skip = ("command", "json", "name")
    try:
        if not arguments.directory.is_dir():
            raise format_lib.CheckpointError(f"{arguments.directory} is no directory.")
        rows = command(**{k: v for k, v in vars(arguments).items() if k not in skip})
    except (format_lib.CheckpointError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(json.dumps(rows, indent=1) if arguments.json else _table(rows))
    return int(command is verify and any(row["state"] != "whole" for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m xshard.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="name", required=True)
    specs: dict[str, tuple[Callable[..., Rows], list[str]]] = {
        "ls": (list_steps, []),
        "show": (show, ["step"]),
        "verify": (verify, ["step?"]),
        "diff": (diff, ["a", "b"]),
        "rm": (remove, ["step"]),
        "export": (export, ["step", "file"]),
    }
    for name, (command, positionals) in specs.items():
        sub = commands.add_parser(name)
        sub.set_defaults(command=command)
        sub.add_argument("--json", action="store_true")
        sub.add_argument("directory", type=lambda path: pathlib.Path(path).absolute())
        for positional in positionals:
            kind: Any = pathlib.Path if positional == "file" else int
            sub.add_argument(
                positional.rstrip("?"), type=kind, nargs="?" if "?" in positional else None
            )
    return parser


def _read_all(attempt: format_lib.Attempt) -> Iterator[tuple[str, np.ndarray]]:
    return reader.read_arrays(attempt, reader.array_metas(reader.read_meta(attempt)))


def _damage(attempt: format_lib.Attempt) -> str:
    try:
        for _ in _read_all(attempt):
            pass
    except format_lib.CheckpointError as e:
        return str(e)
    return ""


def _size(path: pathlib.Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _table(rows: Rows) -> str:
    if not rows:
        return "nothing"
    lines = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    # Quiet when a pager or `head` has seen enough.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
