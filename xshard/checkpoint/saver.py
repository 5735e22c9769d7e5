"""Saves in the background, all processes together: the caller waits for the copy to the host only."""

import atexit
import dataclasses
import json
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from xshard.checkpoint import agreement as agreement_lib
from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import budget as budget_lib
from xshard.checkpoint import finite as finite_lib
from xshard.checkpoint import folder as folder_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import host_copy, ownership, writer
from xshard.checkpoint import store as store_lib

# What a process says to all others is short.
_LONGEST_REASON = 1000
_MOST_PATHS = 8
_SAVERS: "weakref.WeakSet[Saver]" = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class Request:
    """A step to be saved, and what is saved beside its arrays.

    Attributes:
      step: the step's number.
      metadata: the run's own, as JSON can hold it; equal on all processes.
      data: this process's position in the data, as JSON can hold it.
      metrics: what the best checkpoint can be chosen by.
      before_commit: called on process 0 when all is written; what it raises makes the save fail.
      begin: when the save was asked for, by the clock that never goes back.
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
      folder: its name in the store.
      nbytes: the size of its arrays, before compression.
      seconds: from the call to save it until it counted.
      nonfinite: paths of arrays that are to be finite and are not, not necessarily all.
    """

    step: int
    folder: str
    nbytes: int
    seconds: float
    nonfinite: tuple[str, ...] = ()


class NonfiniteError(store_lib.CheckpointError):
    """A state that is to be finite and is not: its checkpoint does not count.

    Attributes:
      step: the step that leaves it.
    """

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class Saver:
    """One save at a time."""

    def __init__(
        self,
        folder: folder_lib.Folder,
        agreement: agreement_lib.Agreement,
        *,
        budget_bytes: int,
        finite: str,
        refuse_nonfinite: bool,
        say: Callable[[str], None],
        committed: Callable[[Committed], None],
    ):
        """Prepares.

        Args:
          folder: where to.
          agreement: the processes that save together.
          budget_bytes: how much of the state may be in host memory at a time.
          finite: a regular expression of the paths of what is looked at whether it is finite; empty: nothing.
          refuse_nonfinite: whether a checkpoint in which that is not finite does not count.
          say: takes messages on progress.
          committed: called on process 0 when a checkpoint counts, before old ones are deleted.
        """
        self._folder = folder
        self._agreement = agreement
        self._budget_bytes = budget_bytes
        self._finite = finite
        self._refuse_nonfinite = refuse_nonfinite
        self._say = say
        self._committed = committed
        self._plan: tuple[Any, ownership.Plan] | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        _SAVERS.add(self)

    def start(self, request: Request, state: Any) -> None:
        """Begins to save; returns when the state has been copied, and may be donated.

        Raises:
          CheckpointError: if the state or what is saved with it cannot be, or if the save before has
            failed. In that case this one is under way all the same, as it is on all other processes,
            which may have learnt of the failure earlier.
        """
        _check_json(request)
        leaves = arrays_lib.flatten(state)
        plan = self._plan_for(leaves)
        nbytes = sum(plan.arrays[piece.path].chunk_bytes for piece in plan.pieces)
        progress = budget_lib.Progress(f"saving step {request.step}", nbytes, self._say)
        copy = host_copy.HostCopy(plan, self._budget_bytes, progress)
        failure = self._join()
        self._thread = threading.Thread(
            target=self._run, args=(request, plan, copy), name="checkpoint", daemon=True
        )
        self._thread.start()
        copy.make(leaves)
        if failure is not None:
            raise failure

    def check(self) -> None:
        """Raises what has made the last save fail, if it is known by now.

        A NonfiniteError is left to `start` and `wait`, which raise it on all processes at the same step.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        if not isinstance(self._failure, NonfiniteError):
            self.wait()

    def wait(self) -> None:
        """Waits for the end of the last save.

        Raises:
          CheckpointError: if it has failed; earlier checkpoints are as they were.
        """
        failure = self._join()
        if failure is not None:
            raise failure

    def _join(self) -> BaseException | None:
        """Waits for the last save; returns what has made it fail, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        return failure

    def _plan_for(self, leaves: dict[str, Any]) -> ownership.Plan:
        # The same for every save of a run, and not cheap for thousands of arrays.
        key = [
            (path, leaf.shape, leaf.dtype, getattr(leaf, "sharding", None))
            for path, leaf in leaves.items()
        ]
        if self._plan is None or self._plan[0] != key:
            plan = ownership.plan(leaves, self._agreement.index, self._agreement.count)
            self._plan = (key, plan)
        return self._plan[1]

    def _run(self, request: Request, plan: ownership.Plan, copy: host_copy.HostCopy) -> None:
        """Saves, in the thread, and keeps what goes wrong for the caller."""
        try:
            self._save(request, plan, copy)
        except NonfiniteError as e:
            self._failure = e
        except Exception as e:
            self._failure = store_lib.CheckpointError(
                f"Step {request.step} could not be saved in {self._folder.store}: {store_lib.reason(e)}. "
                "Earlier checkpoints are as they were."
            )
            self._failure.__cause__ = e
        finally:
            # Whoever still copies need not wait any more.
            copy.close()

    def _save(self, request: Request, plan: ownership.Plan, copy: host_copy.HostCopy) -> None:
        """Saves a step: the order of these lines is the order in which things come to be on the disk."""
        folder, step = self._folder, request.step
        nonce = self._agreement.from_first(lambda: folder.begin_attempt(step))
        if not nonce:
            return
        attempt = format_lib.Attempt(folder.store, step, nonce)
        report = self._write_own_blocks(attempt, plan, copy)
        # When the meeting ends all processes have written, or have said why not: nobody stays away.
        reports = self._agreement.gather({**report, "data": request.data})
        errors = _errors(reports)
        nonfinite = _nonfinite(reports)
        if nonfinite and self._refuse_nonfinite and not errors:
            self._agreement.from_first(lambda: folder.remove_failed(attempt))
            listed = ", ".join(nonfinite)
            raise NonfiniteError(f"step {step}: what it leaves is not finite: {listed}", step)

        def complete() -> None:
            nbytes = sum(plan.loads)
            try:
                if errors:
                    raise store_lib.CheckpointError("; ".join(errors))
                writers = [i for i, report in enumerate(reports) if report["keys"]]
                merged = writer.merge(attempt, writers)
                keys = writer.verify(merged, plan.arrays)
                arrays = writer.with_sums(attempt, writers, plan.arrays)
                data = [report["data"] for report in reports]
                writer.describe(attempt, arrays, request.metadata, data)
                request.before_commit()
                folder.check_lock()
                looked_at = nonfinite if self._finite else None
                writer.commit(attempt, keys, nbytes, request.metrics, looked_at, folder.owner)
            except BaseException:
                folder.remove_failed(attempt)
                raise
            # From here on it counts, whatever comes; so the run notes how far it has come before old ones go.
            seconds = time.monotonic() - request.begin
            self._committed(Committed(step, attempt.folder, nbytes, seconds, tuple(nonfinite)))
            folder.remove_old()

        # Process 0 completes it; what goes wrong there, all of them raise.
        self._agreement.from_first(complete)

    def _write_own_blocks(
        self, attempt: format_lib.Attempt, plan: ownership.Plan, copy: host_copy.HostCopy
    ) -> dict[str, Any]:
        """Writes what this process owns.

        Returns:
          How many keys that were, or what went wrong; and which arrays are not finite.
        """
        report: dict[str, Any] = {}
        nonfinite: set[str] = set()
        chunks = copy.chunks()
        if self._finite:
            is_watched = re.compile(self._finite).search
            chunks = finite_lib.noting_nonfinite(chunks, is_watched, nonfinite)
        try:
            index = self._agreement.index
            report["keys"] = writer.write_part(attempt, index, plan.arrays, chunks, copy.written)
        except Exception as e:
            report["error"] = store_lib.reason(e)[:_LONGEST_REASON]
        report["nonfinite"] = sorted(nonfinite)[:_MOST_PATHS]
        return report


@atexit.register
def _wait_at_exit() -> None:
    """Before tensorstore, which was imported before this, stops working."""
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
                f"The {name} of step {request.step} must be what JSON can hold: {e}."
            ) from e


def _errors(reports: list[dict[str, Any]]) -> list[str]:
    """The errors of those that could not write; of several processes, after the name of each."""
    errors = []
    for index, report in enumerate(reports):
        if "error" in report:
            process = f"process {index}: " if len(reports) > 1 else ""
            errors.append(process + report["error"])
    return errors


def _nonfinite(reports: list[dict[str, Any]]) -> list[str]:
    """The paths of arrays that are not finite in any process's part; the first of many."""
    paths = {path for report in reports for path in report["nonfinite"]}
    return sorted(paths)[:_MOST_PATHS]
