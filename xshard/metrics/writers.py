"""Writers of a run's rows: how they are opened, and those that write plain files."""

import contextlib
import csv
import heapq
import importlib
import importlib.util
import io
import pathlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, TextIO

from xshard import config as config_lib
from xshard import errors, hooks
from xshard.files import claim as claim_lib
from xshard.files import disk, jsonfile
from xshard.metrics import rows as rows_lib
from xshard.metrics import writer as writer_lib

Row = rows_lib.Row
Writer = writer_lib.Writer
# What there is of writers that wings bring, without wings.
_NO_SERVICES: Mapping[str, Any] = types.MappingProxyType({})


class _Adapted(Writer):
    """A user's writer of another class, which has the methods `write`, `flush` and
    `close`, and those others of `Writer` that it needs.

    Its rows hold numbers alone, without their kind.
    """

    def __init__(self, name: str, writer: Any):
        """Takes the writer.

        Args:
          name: its name in the config.
          writer: what the name's function returned.

        Raises:
          UserError: if it lacks one of the three methods.
        """
        lacking = [x for x in _REQUIRED if not callable(getattr(writer, x, None))]
        if lacking:
            raise errors.UserError(
                f"writers has {name!r}, which opened a {type(writer).__name__} without "
                f"{', '.join(lacking)}: derive its class from "
                "xshard.metrics.writer.Writer, whose methods say what each receives."
            )
        self._write = writer.write
        # What the writer lacks of the others is done as in the base class: not at all.
        for method in _OTHERS:
            own = getattr(writer, method, None)
            if own is not None:
                setattr(self, method, own)

    def write(self, row: Row, /) -> None:
        """Writes the numbers of a row."""
        self._write(rows_lib.numbers(row))


class Part(NamedTuple):
    """One part of a run: from a start of the program to its end.

    Attributes:
      directory: the work directory.
      step: the step that the run resumes from; 0 for a new run.
      config: the run's config, as plain JSON values.
      rows: returns the rows up to that step, including fingerprints.
      samples: returns the rows of samples up to that step.
      norms: returns the rows of the norms of parameters up to that step.
      claim: the claim to the work directory, which another process may take over from
        one that is suspended; None: nobody else writes there.
    """

    directory: pathlib.Path
    step: int
    config: dict[str, Any]
    rows: Callable[[], Iterator[Row]]
    samples: Callable[[], Iterator[Row]] = lambda: iter(())
    norms: Callable[[], Iterator[Row]] = lambda: iter(())
    claim: claim_lib.Claim | None = None

    def history(self) -> Iterator[Row]:
        """Yields the earlier rows without fingerprints.

        It is for a writer that is new to the run, or that rewrites its file.
        """
        return map(rows_lib.without_fingerprints, self.rows())

    def everything(self) -> Iterator[Row]:
        """Yields the earlier rows of numbers, of norms and of samples, in the order of
        steps.
        """
        # Each is sorted by step, so the merge holds only one row of each in memory.
        return heapq.merge(
            self.history(), self.norms(), self.samples(), key=lambda row: row["step"]
        )


class Service(NamedTuple):
    """A writer that a wing brings.

    Attributes:
      open: opens it for a part of a run.
      package: the package that it needs, which is an extra.
    """

    open: Callable[[Part], Writer]
    package: str


def services(wings: Iterable[type[hooks.Wing]]) -> dict[str, Service]:
    """Returns the writers that wings bring, by name."""
    by_name: dict[str, Service] = {}
    for wing in wings:
        by_name |= wing.services
    return by_name


def check(names: Any, services: Mapping[str, Service] = _NO_SERVICES) -> None:
    """Raises UserError unless a config's `writers` names writers, with 'jsonl'.

    A name with a dot is the path of a custom writer, such as 'my_project.writers.Mine':
    a class or function that takes a `Part` and returns a `Writer`, or an object with
    the methods `write`, `flush` and `close`, and those of its others that it needs.

    Args:
      names: the names.
      services: the writers that wings bring.
    """
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    if not is_list or len(set(names)) < len(names):
        raise errors.UserError(
            f"writers={names!r} must be a list of names, each once, as "
            f"{('jsonl', 'csv')} is."
        )
    for name in names:
        _find(name, services)
    if "jsonl" not in names:
        raise errors.UserError(
            f"writers={tuple(names)} must have 'jsonl': a run's status and reports are "
            "read from it."
        )
    for name, (_, package) in services.items():
        if name in names and importlib.util.find_spec(package) is None:
            raise errors.UserError(
                f"writers has {name!r}, whose package is not installed: pip install "
                f"'xshard[{name}]', or pip install {package.replace('_', '-')}."
            )


def open_all(
    names: Sequence[str], part: Part, services: Mapping[str, Service] = _NO_SERVICES
) -> list[Writer]:
    """Opens the writers of these names, or none of them if one raises.

    Args:
      names: the names.
      part: the part of the run.
      services: the writers that wings bring.
    """
    # The others read the file of 'jsonl' through `part.rows`, so it comes first: it
    # drops the rows of the steps that the run repeats.
    ordered = sorted(names, key=lambda name: name != "jsonl")
    opened: list[Writer] = []
    try:
        for name in ordered:
            writer = _find(name, services)(part)
            if not isinstance(writer, Writer):
                writer = _Adapted(name, writer)
            opened.append(writer)
    except BaseException as e:
        # The exception must not be replaced by one from closing a writer.
        with contextlib.suppress(OSError, ValueError):
            close(opened, writer_lib.outcome_of(e))
        raise
    return opened


def write(writers: Sequence[Writer], row: Row) -> None:
    """Writes a row with each writer; only text files receive its fingerprints."""
    without = rows_lib.without_fingerprints(row)
    for writer in writers:
        if isinstance(writer, JsonLines | Csv):
            writer.write(row)
        else:
            writer.write(without)


def close(writers: Sequence[Writer], outcome: writer_lib.Outcome) -> None:
    """Tells each writer the outcome, and closes it.

    All are told and closed, even if one of them fails.
    """
    with contextlib.ExitStack() as stack:
        for writer in reversed(writers):
            stack.callback(writer.close)
            stack.callback(writer.write_outcome, outcome)


def count(writers: Sequence[Writer]) -> int:
    """Returns the number of rows that the writer 'jsonl' began with; 0 without it."""
    for writer in writers:
        if isinstance(writer, JsonLines):
            return writer.count
    return 0


class _File(Writer):
    """A plain file that is opened for each row, so that no row is buffered.

    It needs no outcome: results.json has it.

    Each part of a run replaces the file before it appends to it. A process that was
    suspended while another one took the run over appends at most a late row to the file
    that it has open, which is no longer the one with the name.
    """

    def __init__(self, path: pathlib.Path, claim: claim_lib.Claim | None):
        """Opens nothing yet.

        Args:
          path: the file.
          claim: the claim to the work directory; None: nobody else writes there.
        """
        self._path = path
        self._claim = claim

    def sync(self) -> None:
        """Syncs the file, if it exists, and its directory entry to disk."""
        with disk.writing(self._path):
            if disk.exists(self._path):
                disk.sync(self._path)
                disk.sync(self._path.parent)

    def _replacing(
        self, *, durably: bool
    ) -> contextlib.AbstractContextManager[BinaryIO]:
        """Returns a context with a file that replaces this one at its end."""
        if self._claim is not None:
            return self._claim.replacing(self._path)
        return disk.replacing(self._path, durably=durably)

    def _append(self, line: str) -> None:
        """Appends a line, with its end.

        Raises:
          LostError: if another process has taken the work directory over.
        """
        with self._path.open("ab") as file:
            # Once the file is open: a process that takes the directory over after this
            # check replaces the file, and the line goes to the one that was there.
            if self._claim is not None:
                self._claim.check()
            file.write(line.encode())


class JsonLines(_File):
    """A file with one JSON object per line, each with a 'step'.

    Attributes:
      count: the number of rows that were in the file when it was opened.
      last: the step of the last row; -1 if there is none.
    """

    def __init__(
        self, path: pathlib.Path, step: int, claim: claim_lib.Claim | None = None
    ):
        """Opens the file to append rows after `step`.

        Later rows, from an interrupted part of the run, are dropped, and so are lines
        that hold no row, such as the last one of a process that was killed.

        Args:
          path: the file.
          step: the step.
          claim: the claim to the work directory; None: nobody else writes there.
        """
        super().__init__(path, claim)
        self.last = -1
        kept: list[bytes] = []
        before = disk.read(path)
        for line in (before or b"").splitlines():
            row = rows_lib.parse(line)
            if row is not None and row["step"] <= step:
                kept.append(line + b"\n")
                self.last = row["step"]
        self.count = len(kept)
        content = b"".join(kept)
        # The file is compared as bytes. A last row that lost only its newline would
        # otherwise merge with the next row. Where another process may still have the
        # file open, it is always replaced.
        if content != (before or b"") or (claim is not None and before is not None):
            with disk.writing(path), self._replacing(durably=True) as file:
                file.write(content)

    def write(self, row: Row) -> None:
        """Appends a row."""
        self.last = row["step"]
        with disk.writing(self._path):
            self._append(jsonfile.dumps(row) + "\n")


class Csv(_File):
    """A table for spreadsheets, with a column for each name.

    With several groups there is a column for each group: 'loss/0', 'loss/1'. A cell is
    empty if the row lacks the value or the value is not finite (null in JSON). A name
    that first appears later becomes the last column, and the file is rewritten.
    """

    def __init__(
        self,
        path: pathlib.Path,
        history: Callable[[], Iterator[Row]],
        claim: claim_lib.Claim | None = None,
    ):
        """Rewrites the file with the rows of earlier parts of the run.

        Args:
          path: the file.
          history: returns those rows.
          claim: the claim to the work directory; None: nobody else writes there.
        """
        super().__init__(path, claim)
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
                rows = csv.DictReader(
                    io.StringIO(content.decode("utf-8-sig"), newline="")
                )
                self._replace([*self._columns, *new], rows)
            line = io.StringIO(newline="")
            _table(line, self._columns).writerow(cells)
            self._append(line.getvalue())

    def _replace(self, columns: list[str], rows: Iterable[Row]) -> None:
        with self._replacing(durably=False) as content:
            file = io.TextIOWrapper(content, "utf-8", newline="")
            table = _table(file, columns)
            table.writeheader()
            table.writerows(rows)
            # It flushes, and leaves the file open.
            file.detach()
        self._columns = columns


def _cells(row: Row) -> Row:
    """Returns the cells of a row of a table, by column."""
    return {name: jsonfile.finite(value) for name, value in rows_lib.flat(row).items()}


def _table(file: TextIO, columns: Sequence[str]) -> "csv.DictWriter[str]":
    # A line edited by hand may have more cells than the header has columns.
    return csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")


def _jsonl(part: Part) -> Writer:
    return JsonLines(part.directory / "metrics.jsonl", part.step, part.claim)


def _csv(part: Part) -> Writer:
    return Csv(part.directory / "metrics.csv", part.rows, part.claim)


def _tensorboard(part: Part) -> Writer:
    # Imported here, since it takes half a second.
    from xshard.metrics import event_files

    return event_files.EventFiles(part.directory / "tensorboard", part.everything)


# The methods that a user's writer of another class must have, and all but `write`.
_REQUIRED = ("write", "flush", "close")
_OTHERS = ("flush", "close", "write_samples", "write_norms", "write_outcome", "sync")
# The writers that wings of the same names bring.
_OF_WINGS = ("wandb", "mlflow", "prometheus")
KNOWN: dict[str, Callable[[Part], Writer]] = {
    "jsonl": _jsonl,
    "csv": _csv,
    "tensorboard": _tensorboard,
}


def _find(name: Any, services: Mapping[str, Service]) -> Callable[[Part], Writer]:
    """Returns what opens the writer of a name; raises UserError if there is none."""
    if name in KNOWN:
        return KNOWN[name]
    if name in services:
        return services[name].open
    if name in _OF_WINGS:
        raise config_lib.lacks_wing(f"writers has {name!r}, which", name)
    module, _, attribute = str(name).rpartition(".")
    try:
        writer = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as e:
        reason = f": {e}" if module else ""
        known = ", ".join((*KNOWN, *_OF_WINGS))
        raise errors.UserError(
            f"writers has {name!r}, which is none of {known}, nor the dotted path of a "
            f"class that can be imported from here{reason}."
        ) from e
    if not callable(writer):
        raise errors.UserError(
            f"writers has {name!r}, which is {writer!r}, and cannot be called."
        )
    return writer
