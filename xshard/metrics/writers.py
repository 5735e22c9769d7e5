"""Writers of a run's rows: how they are opened, and those that write plain files."""

import csv
import importlib
import importlib.util
import io
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from xshard import config as config_lib
from xshard import errors, hooks
from xshard.files import claim as claim_lib
from xshard.files import disk, jsonfile
from xshard.metrics import rows as rows_lib
from xshard.metrics import writer as writer_lib

Row = rows_lib.Row
Part = writer_lib.Part
Writer = writer_lib.Writer
# A run's wings, or their classes.
_Wings = Iterable[hooks.Wing | type[hooks.Wing]]


class Writers:
    """The writers of a part of a run.

    One that fails gets no more rows, and a line on stderr says so; the run goes on.
    Only a failure of 'jsonl' ends it, since a resumed run, its status and reports read
    those files.

    Attributes:
      files: the writer 'jsonl'.
    """

    files: "JsonFiles"

    def __init__(self, names: Sequence[str], part: Part, wings: _Wings = ()):
        """Opens the writers of these names, or none of them if one raises.

        Args:
          names: the names.
          part: the part of the run.
          wings: the wings, which may bring some of them.
        """
        self._opened: dict[str, Writer] = {}
        self._failed: set[str] = set()
        # The others read the files of 'jsonl', so it comes first: it drops the rows of
        # the steps that the run repeats.
        try:
            for name in sorted(names, key=lambda name: name != "jsonl"):
                writer = _find(name, wings)(part)
                if not isinstance(writer, Writer):
                    raise errors.UserError(
                        f"writers has {name!r}, which opened a "
                        f"{type(writer).__name__}: derive its class from "
                        "xshard.metrics.writer.Writer, whose methods say what each "
                        "receives."
                    )
                self._opened[name] = writer
                if isinstance(writer, JsonFiles):
                    self.files = writer
        except BaseException as e:
            self.close(writer_lib.outcome_of(e))
            raise

    def write(self, row: Row) -> None:
        """Writes a row; only those of plain files receive its fingerprints."""
        without = rows_lib.without_fingerprints(row)
        is_plain = lambda writer: isinstance(writer, JsonFiles | writer_lib.PlainFile)
        self._each(lambda writer: writer.write(row if is_plain(writer) else without))

    def flush(self) -> None:
        """Hands all rows to their destinations."""
        self._each(lambda writer: writer.flush())

    def sync(self) -> None:
        """Makes the flushed rows durable; may be called from any thread.

        Raises:
          OSError: if that fails for 'jsonl'.
        """
        self._each(lambda writer: writer.sync())

    def close(self, outcome: writer_lib.Outcome) -> None:
        """Tells each writer the outcome, and closes it; raises nothing."""
        for name, writer in self._opened.items():
            try:
                if name not in self._failed:
                    writer.write_outcome(outcome)
            except Exception as e:
                self._leave_out(name, e)
            try:
                writer.close()
            except Exception as e:
                self._leave_out(name, e)

    def _each(self, act: Callable[[Writer], None]) -> None:
        for name, writer in self._opened.items():
            if name in self._failed:
                continue
            try:
                act(writer)
            except claim_lib.LostError:
                raise
            except Exception as e:
                if isinstance(writer, JsonFiles):
                    raise
                self._leave_out(name, e)

    def _leave_out(self, name: str, e: Exception) -> None:
        if name not in self._failed:
            self._failed.add(name)
            why = str(e)
            if not isinstance(e, errors.UserError):
                why = f"{type(e).__name__}: {e}"
            text = f"the run goes on without the writer {name!r}, which failed: {why}"
            print(text, file=sys.stderr, flush=True)


def check(names: Any, wings: _Wings = ()) -> None:
    """Raises UserError unless a config's `writers` names writers, with 'jsonl'.

    A name with a dot is the path of a custom writer, such as 'my_project.writers.Mine':
    a class or function that takes a `Part` and returns a `Writer`.

    Args:
      names: the names.
      wings: the wings, which may bring some of them.
    """
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    if not is_list or len(set(names)) < len(names):
        raise errors.UserError(
            f"writers={names!r} must be a list of names, each once, as "
            f"{('jsonl', 'csv')} is."
        )
    found = {name: _find(name, wings) for name in names}
    if "jsonl" not in names:
        raise errors.UserError(
            f"writers={tuple(names)} must have 'jsonl': a run's status and reports are "
            "read from it."
        )
    for name, writer in found.items():
        package = getattr(writer, "package", "")
        if package and importlib.util.find_spec(package) is None:
            raise errors.UserError(
                f"writers has {name!r}, whose package is not installed: pip install "
                f"'xshard[{name}]', or pip install {package.replace('_', '-')}."
            )


class JsonLines(writer_lib.PlainFile):
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
        # The file is compared as bytes. A last row that lost only its newline would
        # otherwise merge with the next row. Where another process may still have the
        # file open, it is always replaced.
        is_same = b"".join(kept) == (before or b"")
        if not is_same or (claim is not None and before is not None):
            self._replace(kept, durably=True)

    def write(self, row: Row) -> None:
        """Appends a row."""
        self.last = row["step"]
        self._append(f"{jsonfile.dumps(row)}\n".encode())


class JsonFiles(Writer):
    """metrics.jsonl, samples.jsonl and norms.jsonl: each kind of row has its file."""

    def __init__(self, part: Part):
        """Drops the rows of the steps that a part of a run repeats."""
        self._files = {}
        for name in (rows_lib.NUMBERS, *rows_lib.FILES.values()):
            path = part.directory / name
            self._files[name] = JsonLines(path, part.step, part.claim)

    @property
    def count(self) -> int:
        """The number of rows of numbers that it began with."""
        return self._files[rows_lib.NUMBERS].count

    def last(self, kind: str) -> int:
        """Returns the step of the last row of a kind that has a file of its own."""
        return self._files[rows_lib.FILES[kind]].last

    def write(self, row: Row) -> None:
        """Appends a row to the file of its kind."""
        name = rows_lib.FILES.get(rows_lib.kind(row), rows_lib.NUMBERS)
        self._files[name].write(row)

    def sync(self) -> None:
        """Syncs the files to disk."""
        for file in self._files.values():
            file.sync()


class Csv(writer_lib.PlainFile):
    """A table for spreadsheets, with a column for each name.

    With several groups there is a column for each group: 'loss/0', 'loss/1'. A cell is
    empty if the row lacks the value or the value is not finite (null in JSON). A name
    that first appears later becomes the last column, and the file is rewritten.
    """

    def __init__(self, part: Part):
        """Rewrites the file with the rows of earlier parts of the run."""
        super().__init__(part.directory / "metrics.csv", part.claim)
        self._rows = part.rows
        self._columns: dict[str, None] = {}
        for row in part.rows():
            self._columns |= dict.fromkeys(rows_lib.flat(row))
        if self._columns:
            self._rewrite()
        else:
            with disk.writing(self._path):
                self._path.unlink(missing_ok=True)

    def write(self, row: Row) -> None:
        """Appends a row of numbers, which is in metrics.jsonl already."""
        if not rows_lib.has_numbers(row):
            return
        cells = rows_lib.flat(row)
        if cells.keys() <= self._columns.keys():
            self._append(self._line(cells))
        else:
            # The header is the first line.
            self._columns |= dict.fromkeys(cells)
            self._rewrite()

    def _rewrite(self) -> None:
        # The rows are read one by one, since those of a long run take much memory.
        lines = map(self._line, map(rows_lib.flat, self._rows()))
        header = self._line({name: name for name in self._columns})
        self._replace(itertools.chain([header], lines), durably=False)

    def _line(self, cells: Row) -> bytes:
        line = io.StringIO(newline="")
        values = [jsonfile.finite(cells.get(name)) for name in self._columns]
        csv.writer(line, lineterminator="\n").writerow(values)
        return line.getvalue().encode()


def _tensorboard(part: Part) -> Writer:
    # Imported here, since it takes half a second.
    from xshard.metrics import event_files

    return event_files.EventFiles(part)


# The writers that wings of the same names bring.
_OF_WINGS = ("wandb", "mlflow", "prometheus")
_KNOWN: dict[str, Callable[[Part], Writer]] = {
    "jsonl": JsonFiles,
    "csv": Csv,
    "tensorboard": _tensorboard,
}


def _find(name: Any, wings: _Wings) -> Callable[[Part], Writer]:
    """Returns what opens the writer of a name; raises UserError if there is none."""
    known = dict(_KNOWN)
    for wing in wings:
        known |= wing.writers
    if name in known:
        return known[name]
    if name in _OF_WINGS:
        raise config_lib.lacks_wing(f"writers has {name!r}, which", name)
    module, _, attribute = str(name).rpartition(".")
    try:
        writer = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as e:
        reason = f": {e}" if module else ""
        names = ", ".join((*_KNOWN, *_OF_WINGS))
        raise errors.UserError(
            f"writers has {name!r}, which is none of {names}, nor the dotted path of a "
            f"class that can be imported from here{reason}."
        ) from e
    if not callable(writer):
        raise errors.UserError(
            f"writers has {name!r}, which is {writer!r}, and cannot be called."
        )
    return writer
