"""Saves in the background, all processes together: the caller waits for the copy to the host only."""

import atexit
import dataclasses
import json
import queue
import re
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import budget as budget_lib
from xshard.checkpoint import finite as finite_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import ownership, writer
from xshard.checkpoint import store as store_lib
from xshard.pod import processes

# After so long without a chunk, what has been gathered is written: the copy may wait for its bytes.
_IDLE_SECONDS = 0.05
# What a process says to all others is short.
_SHOWN = 1000
_NAMED = 8
_SAVERS: "weakref.WeakSet[Saver]" = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class Extra:
    """The data that is saved with a state.

    Attributes:
      metadata: the run's own, as JSON can hold it; equal on all processes.
      data: this process's position in the data, as JSON can hold it.
      metrics: what the best checkpoint can be chosen by.
    """

    metadata: dict[str, Any]
    data: Any = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


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
    """A state that is to be finite and is not: its checkpoint does not count."""


class Saver:
    """One save at a time."""

    def __init__(
        self,
        store: store_lib.Store,
        exchange: processes.Exchange,
        *,
        budget_bytes: int,
        finite: str,
        refuse_nonfinite: bool,
        owner: format_lib.Owner | None,
        say: Callable[[str], None],
        before: Callable[[int], bool],
        guard: Callable[[], None],
        after: Callable[[Committed], None],
    ):
        """Prepares.

        Args:
          store: where to.
          exchange: how the processes agree.
          budget_bytes: how much of the state may be in host memory at a time.
          finite: a regular expression of the paths of what is looked at whether it is finite; empty: nothing.
          refuse_nonfinite: whether a checkpoint in which that is not finite does not count.
          owner: the run that the checkpoints are of.
          say: takes messages on progress.
          before: called on process 0 with the step, before anything is written; whether to save it.
          guard: called on process 0 when all is written; raises if it may not count.
          after: called on process 0 when a checkpoint counts, with what it is.
        """
        self._store = store
        self._exchange = exchange
        self._budget_bytes = budget_bytes
        self._finite, self._refuse_nonfinite = finite, refuse_nonfinite
        self._owner = owner
        self._say = say
        self._before, self._guard, self._after = before, guard, after
        self._plan: tuple[Any, ownership.Plan] | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        _SAVERS.add(self)

    def start(
        self,
        step: int,
        state: Any,
        extra: Extra,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins to save; returns when the state has been copied, and may be donated.

        `before_commit` is called on process 0 when all is written; what it raises makes the save fail.

        Raises:
          CheckpointError: if the state or what is saved with it cannot be, or if the save before has
            failed. In that case this one is under way all the same, as it is on all other processes,
            which may have learnt of the failure earlier.
        """
        _check_json(step, extra)
        leaves = arrays_lib.flatten(state)
        plan = self._plan_for(leaves)
        job = _Job(step, plan, extra, before_commit, self._budget_bytes, self._say)
        before = self._end()
        self._thread = threading.Thread(
            target=self._run, args=(job,), name="checkpoint", daemon=True
        )
        self._thread.start()
        try:
            writer.copy_to_host(job.plan, leaves, job.budget, job.chunks.put, job.go.set)
            job.chunks.put(None)
        except BaseException as e:
            job.chunks.put(e)
            raise
        finally:
            job.go.set()
        if before is not None:
            raise before

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
        failure = self._end()
        if failure is not None:
            raise failure

    def first(self, action: Callable[[], Any]) -> Any:
        """Returns, on every process, what process 0's action returns; raises CheckpointError if it fails."""
        said: dict[str, Any] = {}
        cause = None
        if self._exchange.index == 0:
            try:
                said = {"value": action()}
            except Exception as e:
                cause, said = e, {"error": store_lib.reason(e)}
        answer = json.loads(self._exchange(json.dumps(said))[0])
        if "error" in answer:
            raise store_lib.CheckpointError(answer["error"]) from cause
        return answer["value"]

    def _end(self) -> BaseException | None:
        """Waits for the last save; what has made it fail, once."""
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
            plan = ownership.plan(leaves, self._exchange.index, self._exchange.count)
            self._plan = (key, plan)
        return self._plan[1]

    def _run(self, job: "_Job") -> None:
        try:
            self._save(job)
        except NonfiniteError as e:
            self._failure = e
        except Exception as e:
            self._failure = store_lib.CheckpointError(
                f"Step {job.step} could not be saved in {self._store}: {store_lib.reason(e)}. Earlier "
                "checkpoints are as they were."
            )
            self._failure.__cause__ = e
        finally:
            # Whoever still copies need not wait any more.
            job.budget.close()

    def _save(self, job: "_Job") -> None:
        nonce = self.first(lambda: secrets.token_hex(4) if self._before(job.step) else "")
        if not nonce:
            return
        attempt = format_lib.Attempt(self._store, job.step, nonce)
        said: dict[str, Any] = {"data": job.extra.data}
        bad: set[str] = set()
        chunks = job.received()
        if self._finite:
            chunks = finite_lib.noting_nonfinite(chunks, re.compile(self._finite).search, bad)
        try:
            said["keys"] = writer.write_part(
                attempt, self._exchange.index, job.plan.arrays, chunks, job.written
            )
        except Exception as e:
            said["error"] = store_lib.reason(e)[:_SHOWN]
        said["nonfinite"] = sorted(bad)[:_NAMED]
        parts = [json.loads(part) for part in self._exchange(json.dumps(said))]
        nonfinite = sorted({path for part in parts for path in part["nonfinite"]})[:_NAMED]
        whole = all("error" not in part for part in parts)
        if nonfinite and whole and self._refuse_nonfinite:
            self.first(lambda: self._remove_failed(attempt))
            raise NonfiniteError(
                f"step {job.step}: what it leaves is not finite: {', '.join(nonfinite)}"
            )
        self.first(lambda: self._finish(attempt, job, parts, nonfinite))

    def _finish(
        self,
        attempt: format_lib.Attempt,
        job: "_Job",
        parts: list[dict[str, Any]],
        nonfinite: list[str],
    ) -> None:
        """Completes a save, on process 0, when all have written."""
        one = len(parts) == 1
        errors = [
            part["error"] if one else f"process {i}: {part['error']}"
            for i, part in enumerate(parts)
            if "error" in part
        ]
        arrays = job.plan.arrays
        try:
            if errors:
                raise store_lib.CheckpointError("; ".join(errors))
            wrote = [i for i, part in enumerate(parts) if part["keys"]]
            arrays = writer.merge(attempt, wrote, arrays)
            keys = sum(len(meta.keys(path)) for path, meta in arrays.items())
            writer.describe(attempt, arrays, job.extra.metadata, [part["data"] for part in parts])
            job.before_commit()
            self._guard()
            looked_at = nonfinite if self._finite else None
            nbytes = sum(job.plan.loads)
            writer.commit(attempt, keys, nbytes, job.extra.metrics, looked_at, self._owner)
        except BaseException:
            self._remove_failed(attempt)
            raise
        seconds = time.monotonic() - job.begin
        self._after(Committed(job.step, attempt.folder, nbytes, seconds, tuple(nonfinite)))

    def _remove_failed(self, attempt: format_lib.Attempt) -> None:
        try:
            writer.remove(attempt)
        except Exception as e:
            self._say(f"{attempt} does not count, but could not be removed: {store_lib.reason(e)}")


@atexit.register
def _wait_at_exit() -> None:
    """Before tensorstore, which was imported before this, stops working."""
    for saver in list(_SAVERS):
        try:
            saver.wait()
        except store_lib.CheckpointError as e:
            print(f"NOT SAVED: {e}", file=sys.stderr)


def _check_json(step: int, extra: Extra) -> None:
    for name, value in vars(extra).items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as e:
            raise store_lib.CheckpointError(
                f"The {name} of step {step} must be what JSON can hold: {e}."
            ) from e


class _Job:
    """A save on its way from the caller to the thread."""

    def __init__(
        self,
        step: int,
        plan: ownership.Plan,
        extra: Extra,
        before_commit: Callable[[], None],
        budget_bytes: int,
        say: Callable[[str], None],
    ):
        self.step, self.plan, self.extra = step, plan, extra
        self.before_commit = before_commit
        self.begin = time.monotonic()
        self.budget = budget_lib.Budget(budget_bytes)
        self.go = threading.Event()
        self.chunks: queue.SimpleQueue[ownership.Chunk | BaseException | None] = queue.SimpleQueue()
        nbytes = sum(plan.arrays[piece.path].chunk_bytes for piece in plan.pieces)
        self._progress = budget_lib.Progress(f"saving step {step}", nbytes, say)

    def received(self) -> Iterator[ownership.Chunk | None]:
        """The chunks, and None where none has come for a while."""
        # To write beside the copy would slow down what the caller waits for.
        self.go.wait()
        while True:
            try:
                chunk = self.chunks.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                yield None
                continue
            if chunk is None:
                return
            if isinstance(chunk, BaseException):
                raise store_lib.CheckpointError(f"copying to the host failed: {chunk}")
            yield chunk

    def written(self, nbytes: int) -> None:
        """Gives back what is on the disk."""
        self.budget.give(nbytes)
        self._progress.add(nbytes)
