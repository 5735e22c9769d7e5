"""The interface of a writer of a run's rows, a plain file, and how a run ended."""

import heapq
import pathlib
import signal
import traceback
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from xshard.files import claim as claim_lib
from xshard.files import disk
from xshard.metrics import rows as rows_lib

Row = rows_lib.Row

# How the part of a run that a writer belongs to ended.
DONE = "done"
STOPPED = "stopped"
INTERRUPTED = "interrupted"
NOT_FINITE = "not_finite"
FAILED = "failed"
ROLLED_BACK = "rolled_back"
# The ends after which a run is meant to go on.
_GO_ON = (STOPPED, ROLLED_BACK)
# The longest reason, in characters.
_LONGEST_REASON = 1000


class Outcome(NamedTuple):
    """How a part of a run ended.

    Attributes:
      kind: 'done'; 'stopped', its state saved, to go on when the same command runs
        again; 'interrupted', by Ctrl-C; 'not_finite'; 'failed', by an exception; or
        'rolled_back', if the same process goes on from an earlier step.
      why: the reason; empty for 'done', unless a callback ended the run. For an
        exception it is its last line.
      code: the exit code of the process; None if it goes on.
      results: the content of results.json; empty if the run is not over.
    """

    kind: str
    why: str = ""
    code: int | None = None
    results: Mapping[str, Any] = types.MappingProxyType({})

    @property
    def goes_on(self) -> bool:
        """Whether the run is meant to go on after this."""
        return self.kind in _GO_ON

    def in_words(self) -> str:
        """Describes the outcome in a line: 'failed: OSError: no space'."""
        return f"{self.kind}: {self.why}" if self.why else self.kind


def outcome_of(e: BaseException) -> Outcome:
    """Returns the outcome of a run that an exception ends."""
    # The codes are those with which Python ends a program then.
    if isinstance(e, KeyboardInterrupt):
        return Outcome(INTERRUPTED, "KeyboardInterrupt", 128 + signal.SIGINT)
    lines = "".join(traceback.format_exception_only(e)).strip().splitlines()
    return Outcome(FAILED, lines[-1][:_LONGEST_REASON], 1)


class Part(NamedTuple):
    """One part of a run: from a start of the program to its end.

    Attributes:
      directory: the work directory.
      step: the step that the run resumes from; 0 for a new run.
      config: the run's config, as plain JSON values.
      claim: the claim to the work directory, which another process may take over from
        one that is suspended; None: nobody else writes there.
    """

    directory: pathlib.Path
    step: int
    config: dict[str, Any]
    claim: claim_lib.Claim | None = None

    def rows(self) -> Iterator[Row]:
        """Yields the rows of numbers up to that step, including fingerprints.

        It is for a writer that is new to the run, or that rewrites its file.
        """
        return rows_lib.read(self.directory / rows_lib.NUMBERS)

    def everything(self) -> Iterator[Row]:
        """Yields the rows of numbers, of norms and of samples, in their order."""
        files = [self.rows()]
        for name in rows_lib.FILES.values():
            files.append(rows_lib.read(self.directory / name))
        # Each is sorted, so the merge holds only one row of each in memory.
        return heapq.merge(*files, key=rows_lib.place)


class Writer:
    """The base of writers, which receive a run's rows in the order of their steps.

    Only process 0 has writers. A row maps names to numbers, or to lists of numbers with
    several groups. Every row has 'step', the number of completed steps, and 'kind', as
    `xshard.metrics.rows` says. A row of training has 'loss' and the other metrics of a
    step; a row of an evaluation has 'eval/...'. Rows of samples and of norms are as in
    `xshard.samples` and `xshard.metrics.norms`. Values under 'perf/' may differ between
    runs with the same bits. A row arrives when its numbers have reached the host, some
    steps after they were computed.

    A resumed run starts from a checkpoint and repeats the steps after it. So a writer
    begins by dropping the rows of later steps, as far as its destination supports that.

    A writer is made of a `Part`. What it raises then ends the run. If a method raises
    later, a line says so, the writer is closed with the others and gets no more rows,
    and the run goes on; the next part opens it again.

    A process that is killed tells its writers nothing. The next one opens them again.

    Attributes:
      package: the package that it needs, if that is an extra of its name.
    """

    package: ClassVar[str] = ""

    def write(self, row: Row, /) -> None:
        """Writes a row of any kind; it must not modify the row."""
        raise NotImplementedError

    def write_outcome(self, outcome: Outcome, /) -> None:
        """Writes how this part of the run ended; called once, before `close`."""

    def flush(self) -> None:
        """Hands all rows to the destination, since a checkpoint must have its rows."""

    def sync(self) -> None:
        """Makes the flushed rows durable.

        It is called from another thread, before the checkpoint is committed.
        """

    def close(self) -> None:
        """Closes the writer; also called after one of the methods has raised."""


class PlainFile(Writer):
    """A plain file that is opened for each row, so that no row is buffered.

    Each part of a run replaces the file, or begins another one, before it appends to
    it. A process that was suspended while another one took the run over appends at most
    a late row to the file that it has open, which is no longer the newest.
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

    def _replace(self, lines: Iterable[bytes], *, durably: bool) -> None:
        """Replaces the file by one with these lines."""
        if self._claim is not None:
            self._claim.check()
        replacing = disk.replacing(self._path, durably=durably)
        with disk.writing(self._path), replacing as file:
            file.writelines(lines)

    def _append(self, line: bytes) -> None:
        """Appends a line, with its end.

        Raises:
          LostError: if another process has taken the work directory over.
        """
        with disk.writing(self._path), self._path.open("ab") as file:
            # Once the file is open: a process that takes the directory over after this
            # check replaces the file, and the line goes to the one that was there.
            if self._claim is not None:
                self._claim.check()
            file.write(line)
