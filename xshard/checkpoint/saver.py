"""Saves checkpoints in the background, on all processes together.

The caller waits only for the copy to the host. A thread of each process then writes
that process's share, and process 0 merges the shares and commits the checkpoint.
"""

import atexit
import dataclasses
import json
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from xshard.checkpoint import agreement as agreement_lib
from xshard.checkpoint import budget as budget_lib
from xshard.checkpoint import deletions as deletions_lib
from xshard.checkpoint import finite as finite_lib
from xshard.checkpoint import folder as folder_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import host_copy, ownership, writer
from xshard.checkpoint import leaves as leaves_lib
from xshard.checkpoint import store as store_lib

# Every process receives the reports of all others, so error texts and lists of paths
# are cut to these lengths.
_LONGEST_REASON = 1000
_MOST_PATHS = 8
_SAVERS: "weakref.WeakSet[Saver]" = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class Request:
    """A step to be saved, and the data that is saved beside its arrays.

    Attributes:
      step: the step's number.
      metadata: the run's metadata, JSON-serializable and equal on all processes.
      data: this process's position in the data, JSON-serializable.
      metrics: the metrics by which the best checkpoint can be chosen.
      before_commit: called on process 0 when everything but COMMIT is written; if it
        raises, the save fails.
      begin: the time of the request, in seconds of the monotonic clock.
    """

    step: int
    metadata: dict[str, Any]
    data: Any
    metrics: dict[str, float]
    before_commit: Callable[[], None]
    begin: float = dataclasses.field(default_factory=time.monotonic)


class Committed(NamedTuple):
    """A checkpoint that counts.

    Attributes:
      step: its step.
      folder: the name of its folder in the store.
      nbytes: the size of its arrays, before compression.
      seconds: the time from the call that saves it until it counted.
      nonfinite: paths of checked arrays that are not finite; the list may be
        incomplete.
    """

    step: int
    folder: str
    nbytes: int
    seconds: float
    nonfinite: tuple[str, ...] = ()


class NonfiniteError(store_lib.CheckpointError):
    """An array that must be finite is not, so the checkpoint does not count.

    Attributes:
      step: the step that produced the state.
    """

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class Saver:
    """Saves checkpoints, one at a time."""

    def __init__(
        self,
        folder: folder_lib.Folder,
        agreement: agreement_lib.Agreement,
        deletions: deletions_lib.Deletions,
        *,
        budget_bytes: int,
        finite: str,
        refuse_nonfinite: bool,
        say: Callable[[str], None],
        committed: Callable[[Committed], None],
    ):
        """Creates a saver; nothing is written yet.

        Args:
          folder: the folder to save in.
          agreement: the processes that save together.
          deletions: deletes the checkpoints that no rule keeps, once a new one counts.
          budget_bytes: the most bytes of the state that may be in host memory at a
            time.
          finite: a regular expression for the paths of arrays to check for nonfinite
            values; empty: none.
          refuse_nonfinite: whether a checkpoint in which a checked array is not finite
            fails to count.
          say: called with progress messages.
          committed: called on process 0 when a checkpoint counts, before old ones are
            deleted.
        """
        self._folder = folder
        self._agreement = agreement
        self._deletions = deletions
        self._budget_bytes = budget_bytes
        self._finite = finite
        self._refuse_nonfinite = refuse_nonfinite
        self._say = say
        self._committed = committed
        self._plan: tuple[Any, ownership.Plan] | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        _SAVERS.add(self)

    def start(self, request: Request, state: Any) -> None:
        """Begins to save; returns when the state has been copied to the host and may be
        donated.

        Raises:
          CheckpointError: if the state or its metadata cannot be saved, or if the
            previous save failed. After a failure of the previous save, this save is
            under way nevertheless: the other processes take part in it, and may have
            learned of that failure earlier.
        """
        _check_json(request)
        leaves = leaves_lib.flatten(state)
        plan = self._plan_for(leaves)
        nbytes = sum(plan.arrays[piece.path].chunk_bytes for piece in plan.pieces)
        progress = budget_lib.ProgressReporter(
            f"saving step {request.step}", nbytes, self._say
        )
        copy = host_copy.HostCopy(plan, self._budget_bytes, progress)
        failure = self._join()
        self._ended.clear()
        self._thread = threading.Thread(
            target=self._run, args=(request, plan, copy), name="checkpoint", daemon=True
        )
        self._thread.start()
        copy.make(leaves)
        if failure is not None:
            raise failure

    def check(self) -> None:
        """Raises the error of the last save if it has finished and failed. Does not
        wait.

        A NonfiniteError is left to `start` and `wait`, which raise it on all processes
        at the same step.
        """
        # Called after each step, most of which have no save to ask about.
        if self._thread is None or self._thread.is_alive():
            return
        if not isinstance(self._failure, NonfiniteError):
            self.wait()

    def wait(self) -> None:
        """Waits for the last save to finish.

        Raises:
          CheckpointError: if it failed; earlier checkpoints are unchanged.
        """
        failure = self._join()
        if failure is not None:
            raise failure

    def _join(self) -> BaseException | None:
        """Waits for the last save; returns its error, if any, once only."""
        if self._thread is not None:
            # If Ctrl-C interrupts a join, Python 3.11 takes the thread for ended, and
            # the program would end under it.
            self._ended.wait()
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        return failure

    def _plan_for(self, leaves: dict[str, Any]) -> ownership.Plan:
        # The plan is cached: it is the same for every save of a run, and slow to
        # compute for thousands of arrays.
        key = [
            (path, leaf.shape, leaf.dtype, getattr(leaf, "sharding", None))
            for path, leaf in leaves.items()
        ]
        if self._plan is None or self._plan[0] != key:
            plan = ownership.plan(leaves, self._agreement.index, self._agreement.count)
            self._plan = (key, plan)
        return self._plan[1]

    def _run(
        self, request: Request, plan: ownership.Plan, copy: host_copy.HostCopy
    ) -> None:
        """Saves in the thread, and stores any error for the caller to raise."""
        try:
            self._save(request, plan, copy)
        except NonfiniteError as e:
            self._failure = e
        except Exception as e:
            self._failure = store_lib.CheckpointError(
                f"Step {request.step} could not be saved in {self._folder.store}: {store_lib.reason(e)}. "
                "Earlier checkpoints are unchanged."
            )
            self._failure.__cause__ = e
        finally:
            # A failed save writes nothing more, so a copy that waits for the budget
            # must be released.
            copy.close()
            self._ended.set()

    def _save(
        self, request: Request, plan: ownership.Plan, copy: host_copy.HostCopy
    ) -> None:
        """Saves a step. The order of these calls is the order in which data becomes
        durable.
        """
        folder, step = self._folder, request.step
        nonce = self._agreement.from_first(lambda: folder.begin_attempt(step))
        if not nonce:
            return
        attempt = format_lib.SaveAttempt(folder.store, step, nonce)
        report = self._write_own_blocks(attempt, plan, copy)
        # After this exchange every process has written its part or reported an error. A
        # process whose write failed takes part, too; otherwise the others would wait
        # for it until the deadline.
        reports = self._agreement.gather({**report, "data": request.data})
        errors = _errors(reports)
        nonfinite = _nonfinite(reports)
        # All processes have the same reports, so all of them raise here, or none.
        if nonfinite and self._refuse_nonfinite and not errors:
            self._agreement.from_first(lambda: folder.remove_failed(attempt))
            listed = ", ".join(nonfinite)
            raise NonfiniteError(
                f"step {step}: the resulting state is not finite: {listed}", step
            )

        def complete() -> None:
            nbytes = sum(plan.loads)
            try:
                if errors:
                    raise store_lib.CheckpointError("; ".join(errors))
                writers = [i for i, report in enumerate(reports) if report["keys"]]
                merged = writer.merge(attempt, writers)
                keys = writer.verify(merged, plan.arrays)
                data = [report["data"] for report in reports]
                writer.describe(attempt, plan.arrays, request.metadata, data)
                request.before_commit()
                folder.check_lock()
                looked_at = nonfinite if self._finite else None
                writer.commit(
                    attempt, keys, nbytes, request.metrics, looked_at, folder.owner
                )
            except BaseException:
                folder.remove_failed(attempt)
                raise
            # The checkpoint counts now, whatever fails later. The run records that it
            # reached this step before older checkpoints are deleted.
            seconds = time.monotonic() - request.begin
            self._committed(
                Committed(step, attempt.folder, nbytes, seconds, tuple(nonfinite))
            )
            self._deletions.add(folder.remove_old)

        # Process 0 completes the checkpoint. All processes raise an error of process 0.
        self._agreement.from_first(complete)

    def _write_own_blocks(
        self,
        attempt: format_lib.SaveAttempt,
        plan: ownership.Plan,
        copy: host_copy.HostCopy,
    ) -> dict[str, Any]:
        """Writes the chunks that this process owns.

        Returns:
          A report for process 0: the number of keys written or the error, and the paths
            of nonfinite arrays.
        """
        report: dict[str, Any] = {}
        nonfinite: set[str] = set()
        chunks = copy.chunks()
        if self._finite:
            is_watched = re.compile(self._finite).search
            chunks = finite_lib.recording_nonfinite(chunks, is_watched, nonfinite)
        try:
            index = self._agreement.index
            report["keys"] = writer.write_part(
                attempt, index, plan.arrays, chunks, copy.written
            )
        except Exception as e:
            report["error"] = store_lib.reason(e)[:_LONGEST_REASON]
        report["nonfinite"] = _causes_first(nonfinite)[:_MOST_PATHS]
        return report


@atexit.register
def _wait_at_exit() -> None:
    """Waits for all saves before tensorstore shuts down.

    Exit handlers run in reverse order of registration, and tensorstore was imported
    before this module.
    """
    for saver in list(_SAVERS):
        try:
            saver.wait()
        except store_lib.CheckpointError as e:
            print(f"NOT SAVED: {e}", file=sys.stderr)


def _check_json(request: Request) -> None:
    for name in ("metadata", "data", "metrics"):
        try:
            json.dumps(getattr(request, name))
        except (TypeError, ValueError) as e:
            raise store_lib.CheckpointError(
                f"The {name} of step {request.step} must be JSON-serializable: {e}."
            ) from e


def _errors(reports: list[dict[str, Any]]) -> list[str]:
    """Lists the errors of processes that could not write; with several processes, each
    after its process's index.
    """
    errors = []
    for index, report in enumerate(reports):
        if "error" in report:
            process = f"process {index}: " if len(reports) > 1 else ""
            errors.append(process + report["error"])
    return errors


def _nonfinite(reports: list[dict[str, Any]]) -> list[str]:
    """Lists the arrays that are not finite in some process's part, by path; at most
    `_MOST_PATHS`.
    """
    paths = set().union(*(report["nonfinite"] for report in reports))
    return _causes_first(paths)[:_MOST_PATHS]


def _causes_first(paths: Iterable[str]) -> list[str]:
    """Returns paths in order, but optimizer slots last: they follow from what else is
    not finite, and are many.
    """
    return sorted(paths, key=lambda path: ("opt_state/" in path, path))
