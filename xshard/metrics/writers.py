"""Writers of a run's rows: what one is, which are known, and the two that write plain files."""

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
    """Takes the rows of a run, on process 0, in the order of their steps.

    A row is a mapping of names to numbers, or to lists of numbers where there are several groups. All have
    'step', the number of steps made. A row of training has 'loss' and what else a step measures; one of an
    evaluation has 'eval/...'; what differs from run to run of the same bits is under 'perf/'. Rows come
    when their numbers have come to the host, some steps later than they were made.

    A run goes on from the checkpoint of some step, and makes the steps after it again: a writer begins by
    dropping the rows of later steps, as far as what it writes to can drop them.

    Any method may raise ValueError or OSError: the run then ends, and what it has saved counts. Nothing that
    was written before may be lost by it.
    """

    def write(self, row: Row, /) -> None:
        """Takes a row; it must not change it."""

    def flush(self) -> None:
        """Hands over what has been taken: a checkpoint that counts is to have its rows beside it.

        A writer may have a method `sync`, too, which makes durable what has been handed over: it is called from
        another thread, before the checkpoint counts. And it may have a method `write_samples`, which takes a row of
        samples, as `xshard.samples` has it.
        """

    def close(self) -> None:
        """Ends; also after one of the methods has raised."""


class Part(NamedTuple):
    """A part of a run: from one start of the program to its end.

    Attributes:
      directory: the work directory.
      step: the step that the run goes on from; 0: it is new.
      config: the run's config, as JSON can hold it.
      rows: the rows until then, those with fingerprints too.
      samples: the rows of samples until then.
    """

    directory: pathlib.Path
    step: int
    config: dict[str, Any]
    rows: Callable[[], Iterator[Row]]
    samples: Callable[[], Iterator[Row]] = lambda: iter(())

    def history(self) -> Iterator[Row]:
        """The rows until then, of numbers, for a writer that is new to the run, or writes its file anew."""
        return map(rows_lib.numbers, self.rows())

    def everything(self) -> Iterator[Row]:
        """The rows of both kinds in the order of their steps; none that was edited so that it has no step."""
        rows, samples = _with_step(self.history()), _with_step(self.samples())
        return heapq.merge(rows, samples, key=lambda row: row["step"])


def check(names: Any) -> None:
    """Raises ValueError unless a config's `writers` names writers, and 'jsonl' among them.

    A name with a dot is the path of a writer of the user's own, such as 'my_project.writers.Mine': a class,
    or a function, that is called with a `Part` and returns a `Writer`.
    """
    if not isinstance(names, Sequence) or isinstance(names, str) or len(set(names)) < len(names):
        raise errors.UserError(
            f"writers={names!r} must be a list of names, each once, as {('jsonl', 'csv')} is."
        )
    for name in names:
        _find(name)
    if "jsonl" not in names:
        raise errors.UserError(
            f"writers={tuple(names)} must have 'jsonl': a run's status and reports are made of it."
        )
    if "wandb" in names and importlib.util.find_spec("wandb") is None:
        raise errors.UserError(
            "writers has 'wandb', which is not installed: pip install 'xshard[wandb]', or pip install wandb."
        )


def open_all(names: Sequence[str], part: Part) -> list[Writer]:
    """The writers of these names, that of 'jsonl' first: it is what `part.rows` reads."""
    return [_find(name)(part) for name in sorted(names, key=lambda name: name != "jsonl")]


def write(writers: Sequence[Writer], row: Row) -> None:
    """Has each of some writers take a row: files of texts with fingerprints, others without."""
    numbers = rows_lib.numbers(row)
    for writer in writers:
        writer.write(row if isinstance(writer, JsonLines | Csv) else numbers)


class _File:
    """A plain file, in which each row is as soon as it is written."""

    def __init__(self, path: pathlib.Path):
        self._path = path

    def flush(self) -> None:
        """Does nothing: no row is held back."""

    def sync(self) -> None:
        """Makes the file durable, if it is there, and its name."""
        with disk.writing(self._path):
            if disk.exists(self._path):
                disk.sync(self._path)
                disk.sync(self._path.parent)

    def close(self) -> None:
        """Does nothing: the file is open only while it is written to."""


class JsonLines(_File):
    """A file of one JSON object a line, each with a 'step'."""

    def __init__(self, path: pathlib.Path, step: int):
        """Opens the file to go on after `step`: later rows, of a run that was cut off, are dropped."""
        super().__init__(path)
        before = disk.read(path) or b""
        kept = [line for line in before.splitlines() if _is_row_until(line, step)]
        self.count = len(kept)
        self.last = json.loads(kept[-1])["step"] if kept else -1
        # Bytes, and whole: a row that lost no more than its newline would swallow the next one.
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
    """A table, for spreadsheets: a column for each name, for each of its groups as 'loss/0', 'loss/1'.

    What a row does not have is empty, and so is what is not finite, as it is null in JSON. A column that
    appears later is the last one from there on; the file is then written anew.
    """

    def __init__(self, path: pathlib.Path, history: Callable[[], Iterator[Row]]):
        """Writes what the file is to hold of earlier parts of the run, in place of what is there."""
        super().__init__(path)
        # The rows are read twice, so that of a long run no more than one is in memory.
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
    # A line that somebody has made longer than the header has cells that are of no column.
    return csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")


def read(path: pathlib.Path) -> Iterator[Row]:
    """The rows of a file of JSON lines; none if there is no file. A line that is none is left out."""
    return (row for _, row in jsonfile.read_lines(path) if row is not None)


def read_steps(path: pathlib.Path) -> Iterator[Row]:
    """The rows of a file, as `read`, without those that were edited so that they have no step."""
    return _with_step(read(path))


def _with_step(rows: Iterable[Row]) -> Iterator[Row]:
    for row in rows:
        if type(row.get("step")) is int and jsonfile.is_number(row["step"]):
            yield row


def of_training(path: pathlib.Path) -> dict[int, Row]:
    """The rows of training by step, without what differs between runs of the same bits."""
    rows = {}
    for row in read_steps(path):
        if rows_lib.is_of_training(row):
            rows[row["step"]] = rows_lib.reproducible(row)
    return dict(sorted(rows.items()))


def count(writers: Sequence[Writer]) -> int:
    """Counts the rows in the file of JSON lines, if it is among these."""
    return sum(writer.count for writer in writers if isinstance(writer, JsonLines))


def evaluations(path: pathlib.Path, last: int) -> Iterator[Row]:
    """The evaluations until a step, from a file of JSON lines: 'step', and their numbers by name."""
    prefix = "eval/"
    for row in read_steps(path):
        names = [name for name in row if name.startswith(prefix)]
        if names and row["step"] <= last:
            values = {name.removeprefix(prefix): _not_null(row[name]) for name in names}
            yield {"step": row["step"], **values}


def evaluation(path: pathlib.Path, step: int) -> dict[str, Any] | None:
    """The numbers of an evaluation of a step, from its row in a file of JSON lines; None if there is none."""
    for row in evaluations(path, step):
        if row.pop("step") == step:
            return row
    return None


def _not_null(value: Any) -> Any:
    """A number of a row, in which null is what is not finite."""
    if isinstance(value, list):
        return [_not_null(number) for number in value]
    if value is None:
        return math.nan
    return value


def _tensorboard(part: Part) -> Writer:
    # Half a second of imports, for those who want it.
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
        raise errors.UserError(f"writers has {name!r}, which is {writer!r}, and cannot be called.")
    return writer


def _is_row_until(line: bytes, step: int) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False  # The last line of a process that was killed in the middle of it.
