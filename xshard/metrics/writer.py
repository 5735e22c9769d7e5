"""The interface of a writer, which receives a run's rows, and how a run ended."""

import signal
import traceback
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from xshard.metrics import rows

Row = rows.Row

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


class Writer:
    """The base of writers, which receive a run's rows in the order of their steps.

    Only process 0 has writers. A row maps names to numbers, or to lists of numbers with
    several groups. Every row has 'step', the number of completed steps, and 'kind', as
    `xshard.metrics.rows` says. A row of training has 'loss' and the other metrics of a
    step; a row of an evaluation has 'eval/...'. Values under 'perf/' may differ between
    runs with the same bits. A row arrives when its numbers have reached the host, some
    steps after they were computed.

    A resumed run starts from a checkpoint and repeats the steps after it. So a writer
    begins by dropping the rows of later steps, as far as its destination supports that.

    Any method may raise ValueError or OSError. The run then ends, and its checkpoints
    remain valid. A failing writer must not lose anything that was written before.

    A process that is killed tells its writers nothing. The next one opens them again.
    """

    def write(self, row: Row, /) -> None:
        """Writes a row; it must not modify the row."""
        raise NotImplementedError

    def write_samples(self, row: Row, /) -> None:
        """Writes a row of samples, in the format of `xshard.samples`."""

    def write_norms(self, row: Row, /) -> None:
        """Writes a row of norms, in the format of `xshard.metrics.norms`."""

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
