"""Writers of a run's rows: their interface, the built-in ones, and the two that write
plain files.
"""

import csv
import heapq
import importlib
import importlib.util
import io
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TextIO

from xshard import errors
from xshard.files import disk, jsonfile
from xshard.metrics import rows as rows_lib

Row = rows_lib.Row


class Writer(Protocol):
    """The interface of writers, which receive the rows of a run, on process 0, in the
    order of their steps.

    A row maps names to numbers, or to lists of numbers with several groups. Every row
    has 'step', the number of completed steps. A row of training has 'loss' and the
    other metrics of a step; a row of an evaluation has 'eval/...'. Values under 'perf/'
    may differ between runs with the same bits. A row arrives when its numbers have
    reached the host, some steps after they were computed.

    A resumed run starts from a checkpoint and repeats the steps after it. So a writer
    begins by dropping the rows of later steps, as far as its destination supports that.

    Any method may raise ValueError or OSError. The run then ends, and its checkpoints
    remain valid. A failing writer must not lose anything that was written before.
    """

    def write(self, row: Row, /) -> None:
        """Writes a row; it must not modify the row."""

    def flush(self) -> None:
        """Hands all rows to the destination, so that a committed checkpoint has its
        rows.

        A writer may also have a method `sync`, which makes the flushed rows durable. It
        is called from another thread, before the checkpoint is committed. It may have a
        method `write_samples`, which receives a row of samples in the format of
        `xshard.samples`.
        """

    def close(self) -> None:
        """Closes the writer; also called after one of the methods has raised."""


class Part(NamedTuple):
    """One part of a run: from a start of the program to its end.

    Attributes:
      directory: the work directory.
      step: the step that the run resumes from; 0 for a new run.
      config: the run's config, as plain JSON values.
      rows: returns the rows up to that step, including fingerprints.
      samples: returns the rows of samples up to that step.
    """

    directory: pathlib.Path
    step: int
    config: dict[str, Any]
    rows: Callable[[], Iterator[Row]]
    samples: Callable[[], Iterator[Row]] = lambda: iter(())

    def history(self) -> Iterator[Row]:
        """Yields the earlier rows without fingerprints, for a writer that is new to the
        run or rewrites its file.
        """
        return map(rows_lib.numbers, self.rows())

    def everything(self) -> Iterator[Row]:
        """Yields earlier rows of numbers and of samples in the order of their steps,
        without rows that lack a step.
        """
        # Both are sorted by step, so the merge holds only one row of each in memory.
        rows, samples = _with_step(self.history()), _with_step(self.samples())
        return heapq.merge(rows, samples, key=lambda row: row["step"])


def check(names: Any) -> None:
    """Raises ValueError unless a config's `writers` is a list of valid writers that
    includes 'jsonl'.

    A name with a dot is the path of a custom writer, such as 'my_project.writers.Mine':
    a class or function that takes a `Part` and returns a `Writer`.
    """
    if (
        not isinstance(names, Sequence)
        or isinstance(names, str)
        or len(set(names)) < len(names)
    ):
        raise errors.UserError(
            f"writers={names!r} must be a list of names, each once, as {('jsonl', 'csv')} is."
        )
    for name in names:
        _find(name)
    if "jsonl" not in names:
        raise errors.UserError(
            f"writers={tuple(names)} must have 'jsonl': a run's status and reports are read from it."
        )
    if "wandb" in names and importlib.util.find_spec("wandb") is None:
        raise errors.UserError(
            "writers has 'wandb', which is not installed: pip install 'xshard[wandb]', or pip install wandb."
        )


def open_all(names: Sequence[str], part: Part) -> list[Writer]:
    """Opens the writers of these names, 'jsonl' first, since the others read its file
    through `part.rows`.
    """
    return [
        _find(name)(part) for name in sorted(names, key=lambda name: name != "jsonl")
    ]


def write(writers: Sequence[Writer], row: Row) -> None:
    """Writes a row with each writer: with fingerprints to text files, without to the
    others.
    """
    numbers = rows_lib.numbers(row)
    for writer in writers:
        writer.write(row if isinstance(writer, JsonLines | Csv) else numbers)


class _File:
    """A plain file that is opened for each row, so that no row is buffered."""

    def __init__(self, path: pathlib.Path):
        self._path = path

    def flush(self) -> None:
        """Does nothing: no row is buffered."""

    def sync(self) -> None:
        """Syncs the file, if it exists, and its directory entry to disk."""
        with disk.writing(self._path):
            if disk.exists(self._path):
                disk.sync(self._path)
                disk.sync(self._path.parent)

    def close(self) -> None:
        """Does nothing: the file is open only while it is written to."""


class JsonLines(_File):
    """A file with one JSON object per line, each with a 'step'."""

    def __init__(self, path: pathlib.Path, step: int):
        """Opens the file to append rows after `step`; later rows, from an interrupted
        part of the run, are dropped.
        """
        super().__init__(path)
        before = disk.read(path) or b""
        kept = [line for line in before.splitlines() if _is_row_until(line, step)]
        self.count = len(kept)
        self.last = json.loads(kept[-1])["step"] if kept else -1
        # The file is compared as bytes. A last row that lost only its newline would
        # otherwise merge with the next row.
        content = b"".join(line + b"\n" for line in kept)
        if content != before:
            with disk.writing(path):
                disk.replace(path, content)

    def write(self, row: Row) -> None:
        """Appends a row."""
        self.last = row["step"]
        with disk.writing(self._path), self._path.open("a") as file:
            file.write(jsonfile.dumps(row) + "\n")


class Csv(_File):
    """A table for spreadsheets: a column for each name, with several groups one per
    group: 'loss/0', 'loss/1'.

    A cell is empty if the row lacks the value or the value is not finite (null in
    JSON). A name that first appears later becomes the last column, and the file is
    rewritten.
    """

    def __init__(self, path: pathlib.Path, history: Callable[[], Iterator[Row]]):
        """Rewrites the file with the rows of earlier parts of the run."""
        super().__init__(path)
        # The rows are read twice, so that only one row of a long run is in memory.
        columns: dict[str, None] = {}
        for row in history():
            columns |= dict.fromkeys(rows_lib.flat(row))
        self._columns = list(columns)
        with disk.writing(path):
            if columns:
                self._replace(self._columns, map(_cells, history()))
            else:
                path.unlink(missing_ok=True)

    def write(self, row: Row) -> None:
        """Appends a row."""
        cells = _cells(row)
        new = [name for name in cells if name not in self._columns]
        with disk.writing(self._path):
            # The header is the first line, so a new column rewrites the file.
            if new:
                content = disk.read(self._path) or b""
                rows = csv.DictReader(io.StringIO(content.decode(), newline=""))
                self._replace([*self._columns, *new], rows)
            with self._path.open("a", newline="") as file:
                _table(file, self._columns).writerow(cells)

    def _replace(self, columns: list[str], rows: Iterable[Row]) -> None:
        temporary = self._path.with_name(f".{self._path.name}.new")
        with temporary.open("w", newline="") as file:
            table = _table(file, columns)
            table.writeheader()
            table.writerows(rows)
        os.replace(temporary, self._path)
        self._columns = columns


def _cells(row: Row) -> Row:
    return {name: jsonfile.finite(value) for name, value in rows_lib.flat(row).items()}


def _table(file: TextIO, columns: Sequence[str]) -> "csv.DictWriter[str]":
    # A line edited by hand may have more cells than the header has columns.
    return csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")


def read(path: pathlib.Path) -> Iterator[Row]:
    """Yields the rows of a file of JSON lines; none if the file does not exist. Invalid
    lines are skipped.
    """
    return (row for _, row in jsonfile.read_lines(path) if row is not None)


def read_steps(path: pathlib.Path) -> Iterator[Row]:
    """Yields the rows of a file like `read`, without rows that lack a step, as after
    editing by hand.
    """
    return _with_step(read(path))


def _with_step(rows: Iterable[Row]) -> Iterator[Row]:
    for row in rows:
        if type(row.get("step")) is int and jsonfile.is_number(row["step"]):
            yield row


def by_step(path: pathlib.Path) -> tuple[dict[int, Row], dict[int, Row]]:
    """Returns the rows of training, and those of evaluations, without values that may
    differ between runs with the same bits.
    """
    training: dict[int, Row] = {}
    evaluated: dict[int, Row] = {}
    for row in read_steps(path):
        if rows_lib.is_of_training(row):
            training[row["step"]] = rows_lib.reproducible(row)
        elif any(name.startswith("eval/") for name in row):
            evaluated[row["step"]] = rows_lib.reproducible(row)
    return dict(sorted(training.items())), evaluated


def count(writers: Sequence[Writer]) -> int:
    """Returns the number of rows in the file of JSON lines, if these writers include
    it; else 0.
    """
    return sum(writer.count for writer in writers if isinstance(writer, JsonLines))


def evaluations(path: pathlib.Path, last: int) -> Iterator[Row]:
    """Yields the evaluations up to a step from a file of JSON lines: 'step' and the
    metrics by name.
    """
    prefix = "eval/"
    for row in read_steps(path):
        names = [name for name in row if name.startswith(prefix)]
        if names and row["step"] <= last:
            values = {name.removeprefix(prefix): _not_null(row[name]) for name in names}
            yield {"step": row["step"], **values}


def evaluation(path: pathlib.Path, step: int) -> dict[str, Any] | None:
    """Returns the metrics of the evaluation at a step, from a file of JSON lines; None
    if there is none.
    """
    for row in evaluations(path, step):
        if row.pop("step") == step:
            return row
    return None


def _not_null(value: Any) -> Any:
    """Returns a number of a row; null stands for a value that is not finite, and
    becomes NaN.
    """
    if isinstance(value, list):
        return [_not_null(number) for number in value]
    if value is None:
        return math.nan
    return value


def _tensorboard(part: Part) -> Writer:
    # Imported here, since it takes half a second.
    from xshard.metrics import event_files

    return event_files.EventFiles(part.directory / "tensorboard", part.everything)


def _wandb(part: Part) -> Writer:
    from xshard.metrics import wandb_run

    return wandb_run.WandbRun(part.directory, part.config, part.everything)


KNOWN: dict[str, Callable[[Part], Writer]] = {
    "jsonl": lambda part: JsonLines(part.directory / "metrics.jsonl", part.step),
    "csv": lambda part: Csv(part.directory / "metrics.csv", part.rows),
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}


def _find(name: Any) -> Callable[[Part], Writer]:
    if name in KNOWN:
        return KNOWN[name]
    module, _, attribute = str(name).rpartition(".")
    try:
        writer = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as e:
        reason = f": {e}" if module else ""
        raise errors.UserError(
            f"writers has {name!r}, which is none of {', '.join(KNOWN)}, nor the dotted path of a class that "
            f"can be imported from here{reason}."
        ) from e
    if not callable(writer):
        raise errors.UserError(
            f"writers has {name!r}, which is {writer!r}, and cannot be called."
        )
    return writer


def _is_row_until(line: bytes, step: int) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False  # The last line of a process that was killed in the middle of it.
