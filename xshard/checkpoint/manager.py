"""The checkpoints of one run.

Checkpoints are saved in the background and deleted by retention rules. All processes
agree on which one to restore.
"""

import atexit
import concurrent.futures
import contextlib
import functools
import json
import os
import re
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from xshard import errors, spans
from xshard.checkpoint import (
    agreement,
    deletions,
    host_copy,
    metadata_files,
    ownership,
    progress,
    reader,
    retention,
    writer,
)
from xshard.checkpoint import finite as finite_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import leaves as leaves_lib
from xshard.checkpoint import lock as lock_lib
from xshard.checkpoint import store as store_lib
from xshard.pod import host_collectives

# Every process receives the reports of all others, so error texts and lists of paths
# are cut to these lengths.
_LONGEST_REASON = 1000
_MOST_PATHS = 8
_MANAGERS: "weakref.WeakSet[Manager]" = weakref.WeakSet()


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


class _Request(NamedTuple):
    """A step to be saved, and what is saved beside its arrays.

    The attributes are the arguments of `Manager.save`, but for the last.

    Attributes:
      step: the step's number.
      metadata: the run's metadata, equal on all processes.
      data: this process's position in the data.
      metrics: the metrics by which the best checkpoint can be chosen.
      before_commit: called on process 0 when everything but COMMIT is written.
      begin: the time of the request, in seconds of the monotonic clock.
    """

    step: int
    metadata: dict[str, Any]
    data: Any
    metrics: dict[str, float]
    before_commit: Callable[[], None]
    begin: float


class _Saving(NamedTuple):
    """A save in the background, under way or ended.

    Attributes:
      step: the step.
      end: the result of `Manager._write_and_commit`, once it has ended.
    """

    step: int
    end: concurrent.futures.Future[list[str]]


class Manager:
    """The checkpoints in one folder.

    Every process of a run creates a manager and makes the same calls in the same order.
    Methods that return a result "as this process sees it" do not communicate.

    A checkpoint "counts", that is it may be restored, from the moment its COMMIT
    exists. See `xshard/checkpoint/format.py` for the files.

    Attributes:
      store: the store of the checkpoints.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: retention.Keep,
        *,
        budget_bytes: int = 4 << 30,
        finite: str = "",
        refuse_nonfinite: bool = False,
        owner: format_lib.Owner | None = None,
        deadline_seconds: float = 1800.0,
        log: Callable[[str], None] = logging.info,
        committed: Callable[[Committed], None] = lambda committed: None,
    ):
        """Opens a folder, which need not exist; writes nothing.

        Args:
          folder: a path that all processes see, gs://BUCKET/FOLDER or
            s3://BUCKET/FOLDER.
          keep: the retention rules.
          budget_bytes: the most bytes of host memory that a save or a restore holds at
            a time, beyond the state itself.
          finite: a regular expression of paths, such as '^params/'. Each checkpoint
            records which of the matching arrays are not finite. The newest checkpoint
            in which all of them are finite is never deleted.
          refuse_nonfinite: whether a checkpoint in which a matching array is not finite
            fails to count.
          owner: the run, which refuses the checkpoints of other runs; None accepts
            those of any run.
          deadline_seconds: how long processes wait for one another.
          log: called with progress messages.
          committed: called on process 0, from another thread, once a checkpoint counts.

        Raises:
          CheckpointError: if the folder is not a valid place for checkpoints.
        """
        self.store = store_lib.Store(folder)
        self._keep = keep
        self._budget_bytes = budget_bytes
        self._must_be_finite = re.compile(finite) if finite else None
        self._refuse_nonfinite = refuse_nonfinite
        self._owner = owner
        self._log = log
        self._on_committed = committed
        # A save uses it in the background, so no other thread may meanwhile.
        self._exchange = host_collectives.Exchange(
            f"checkpoints in {self.store}", deadline_seconds
        )
        self._lock: lock_lib.Lock | None = None
        self._deletions = deletions.Deletions()
        # The plan of the last save, and what it depends on.
        self._plan: tuple[Any, ownership.Plan] | None = None
        self._saving: _Saving | None = None
        # Attempts that this process found damaged, whether or not the store could be
        # marked.
        self._damaged: set[format_lib.SaveAttempt] = set()
        # Attempts that this process has begun to delete.
        self._deleting: set[format_lib.SaveAttempt] = set()
        # The nonfinite paths from COMMIT never change, so they are cached: an object
        # store takes a request for each.
        self._nonfinite: dict[format_lib.SaveAttempt, list[str]] = {}
        _MANAGERS.add(self)

    # What is in the folder, as this process sees it.

    def all_steps(self) -> list[int]:
        """Lists the steps with a checkpoint that counts, as this process sees them.

        They are in ascending order.
        """
        return sorted({attempt.step for attempt in self._committed()})

    def latest_step(self) -> int | None:
        """Returns the newest step with a checkpoint that counts; None if there is none.

        It is the newest as this process sees it.
        """
        return max(self.all_steps(), default=None)

    def damaged_steps(self) -> list[int]:
        """Lists the steps of checkpoints that are marked as damaged.

        They are in ascending order.
        """
        steps = set()
        for attempt in format_lib.attempts(self.store):
            if format_lib.DAMAGED in attempt.marks:
                steps.add(attempt.step)
        return sorted(steps)

    def finite_steps(self) -> list[int]:
        """Lists the steps with no array known to be nonfinite, in ascending order."""
        return [
            attempt.step
            for attempt in self._committed()
            if not self._nonfinite_paths(attempt)
        ]

    def newest_finite_step(self) -> int | None:
        """Returns the newest of `finite_steps`; None if there is none."""
        return max(self.finite_steps(), default=None)

    def folders_after(self, step: int) -> list[str]:
        """Lists the folders of checkpoints of later steps, as `give_up` takes them."""
        return [attempt.folder for attempt in self._committed() if attempt.step > step]

    def is_given_up(self, folder: str) -> bool:
        """Returns whether a checkpoint that once counted is known not to.

        It was deleted by hand, or is damaged.
        """
        return format_lib.is_given_up(self.store, folder)

    def metrics(self, step: int) -> dict[str, float]:
        """Returns the metrics of a step, as this process sees them.

        They are empty if the step has none or no longer exists.
        """
        for attempt in reversed(self._committed()):
            if attempt.step == step:
                return metadata_files.read_commit(attempt).metrics
        return {}

    def shapes(self, step: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a step's arrays by path, as this process sees them.

        Raises:
          CheckpointError: if the step cannot be read.
        """
        metas = metadata_files.read_array_metas(format_lib.find(self.store, step))
        return {path: meta.shape for path, meta in metas.items()}

    def metadata(self, step: int) -> dict[str, Any]:
        """Returns the metadata that was saved with a step, as this process sees it.

        Raises:
          CheckpointError: if the step cannot be read.
        """
        return metadata_files.read_meta(format_lib.find(self.store, step)).metadata

    def nonfinite(self, step: int) -> list[str]:
        """Lists arrays of a step that should be finite and are not, by path.

        The list is empty if the save did not check. It is also empty if the
        checkpoint's COMMIT is damaged: `restore` names the damage, and takes an older
        checkpoint.

        Raises:
          CheckpointError: if the step has no checkpoint that counts.
        """
        newest, *_ = format_lib.choose(self.store, self._committed(), step)
        try:
            commit = metadata_files.retry_on_damage(
                lambda: metadata_files.read_commit(newest)
            )
        except metadata_files.DamagedError:
            return []
        return commit.nonfinite or []

    def _committed(self) -> list[format_lib.SaveAttempt]:
        """Lists the attempts that count, oldest step first."""
        attempts = format_lib.attempts(self.store)
        return [attempt for attempt in attempts if self._counts(attempt)]

    def _counts(self, attempt: format_lib.SaveAttempt) -> bool:
        return attempt.counts and attempt not in self._damaged

    def _nonfinite_paths(self, attempt: format_lib.SaveAttempt) -> list[str]:
        """Lists the checked arrays of an attempt that are not finite, by path.

        The list is empty if the save checked none.
        """
        if attempt not in self._nonfinite:
            try:
                commit = metadata_files.read_commit(attempt)
            except metadata_files.DamagedError as e:
                # A run must not resume from a damaged checkpoint either, so it is
                # treated as not finite.
                return [str(e)]
            self._nonfinite[attempt] = list(commit.nonfinite or [])
        return self._nonfinite[attempt]

    # What all processes do together.

    def on_process_0(self, action: Callable[[], Any]) -> Any:
        """Runs an action on the folder on process 0.

        No save may be under way.

        Args:
          action: returns a JSON-serializable value.

        Returns:
          The action's result, on all processes.

        Raises:
          CheckpointError: on all processes, if the action fails. A bug in it is raised
            as it is on process 0.
        """

        def action_with_reasons() -> Any:
            try:
                return action()
            except store_lib.CheckpointError:
                raise
            except errors.UserError as e:
                raise store_lib.CheckpointError(str(e)) from e
            except (OSError, ValueError, RuntimeError) as e:
                # tensorstore raises ValueError and RuntimeError for what is wrong with
                # a store.
                raise store_lib.CheckpointError(store_lib.reason(e)) from e

        try:
            return self._exchange.on_process_0(action_with_reasons)
        except store_lib.CheckpointError:
            raise
        except errors.UserError as e:
            # The error of process 0 arrives at the other processes as this type.
            raise store_lib.CheckpointError(str(e)) from e

    def agreed_latest_step(self) -> int | None:
        """Returns the newest step with a checkpoint that counts, on all processes.

        Returns None if no process sees a checkpoint.

        Raises:
          CheckpointError: if a process does not see the checkpoints that process 0
            sees, for example because a disk is not mounted on its host.
        """

        def newest_folder() -> list[str]:
            return [attempt.folder for attempt in self._committed()[-1:]]

        folders = self.on_process_0(newest_folder)
        self._check_seen(folders)
        if not folders:
            return None
        return format_lib.attempt_in(self.store, folders[0]).step

    def acquire(self) -> None:
        """Locks the folder for this run until `close`. A save does so too.

        Raises:
          CheckpointError: if another run holds the lock, if the folder holds another
            run's checkpoints, if it cannot be written, or if a process does not see it,
            for example because a disk is not mounted on its host.
        """
        self.wait()
        self.on_process_0(self._acquire)
        # Process 0 wrote RUN into the folder. A process that cannot read it sees
        # another folder.
        if self._owner is not None:
            self._check_owner(self._owner)

    def _acquire(self) -> None:
        """Locks the folder, and records the run as its owner; on process 0."""
        self._locked()

    def _locked(self) -> lock_lib.Lock:
        """Returns the lock of the folder, which it takes if necessary."""
        lock = self._lock
        if lock is None:
            lock = lock_lib.acquire(self.store, self._log)
            try:
                writer.settle(self.store, lock)
            except BaseException:
                lock.leave()
                raise
            self._lock = lock
        if self._owner is not None:
            format_lib.claim(self.store, self._owner)
        return lock

    def _release(self) -> None:
        lock = self._lock
        self._lock = None
        if lock is not None:
            lock.release()

    def _check_seen(self, folders: list[str]) -> None:
        """Checks that every process sees the given checkpoints.

        If none are given, it checks that no process sees any.

        Args:
          folders: the names of the checkpoints' folders, equal on all processes.

        Raises:
          CheckpointError: on all processes, if the check fails or a process cannot read
            the store.
        """

        def problem() -> str:
            seen = {attempt.folder for attempt in format_lib.committed(self.store)}
            if seen and not folders:
                return (
                    f"sees {len(seen)} checkpoints in {self.store}, but process 0 sees "
                    "none"
                )
            for folder in folders:
                if folder not in seen:
                    return f"does not see {self.store}/{folder}, but process 0 does"
            return ""

        agreement.wait_until_none(self._exchange, problem, self._log)

    def _check_owner(self, owner: format_lib.Owner) -> None:
        """Checks that every process sees the folder that process 0 sees.

        Args:
          owner: the run, which process 0 has recorded in the folder.

        Raises:
          CheckpointError: on all processes, if one of them sees another folder.
        """

        def problem() -> str:
            seen = format_lib.read_owner(self.store)
            if seen is not None and seen.id == owner.id:
                return ""
            whose = "no run" if seen is None else f"run {seen.id} ({seen.workdir})"
            return (
                f"sees that {self.store} belongs to {whose}, but process 0 recorded "
                f"run {owner.id} as its owner"
            )

        agreement.wait_until_none(self._exchange, problem, self._log)

    # Saving.

    def save(
        self,
        step: int,
        state: Any,
        metadata: dict[str, Any],
        *,
        data: Any = None,
        metrics: dict[str, float] | None = None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins to save a step in the background.

        A step that already has a checkpoint that counts is not saved again.

        Returns when the state has been copied to the host and may be donated. The
        budget permitting, that is before the state is written. When the checkpoint
        counts, checkpoints that no rule keeps are deleted.

        Args:
          step: the step's number.
          state: a tree of arrays, global across all processes. It may contain typed
            PRNG keys.
          metadata: JSON-serializable, and equal on all processes.
          data: this process's position in the data, JSON-serializable.
          metrics: the metrics by which the best checkpoint can be chosen, by name.
          before_commit: called on process 0, from another thread, before the checkpoint
            counts. It makes durable what the checkpoint relies on but does not contain,
            such as logged rows. If it raises, the save fails.

        Raises:
          CheckpointError: if the state or its metadata cannot be saved, or if the
            previous save failed. After a failure of the previous save, this save is
            under way nevertheless: the other processes take part in it, and may have
            learned of that failure earlier.
        """
        request = _Request(
            step=step,
            metadata=metadata,
            data=data,
            metrics=metrics or {},
            before_commit=before_commit,
            begin=time.monotonic(),
        )
        _check_json(request)
        leaves = leaves_lib.flatten(state)
        plan = self._plan_for(leaves)
        nbytes = sum(plan.arrays[chunk.path].chunk_bytes for chunk in plan.chunks)
        reporter = progress.ProgressReporter(f"saving step {step}", nbytes, self._log)
        copy = host_copy.HostCopy(plan, self._budget_bytes, reporter)

        # One save at a time, since the processes make their exchanges in one order.
        previous_failure = None
        try:
            self._join_save()
        except store_lib.CheckpointError as e:
            # Raised once this save is under way, in which the others take part.
            previous_failure = e
        saving = _Saving(step, concurrent.futures.Future())
        self._saving = saving
        threading.Thread(
            target=self._save_in_background,
            args=(saving, request, plan, copy),
            name=spans.BACKGROUND,
            daemon=True,
        ).start()
        copy.make(leaves)
        if previous_failure is not None:
            raise previous_failure

    def _save_in_background(
        self,
        saving: _Saving,
        request: _Request,
        plan: ownership.Plan,
        copy: host_copy.HostCopy,
    ) -> None:
        """Runs `_write_and_commit`, and leaves its end to `_join_save`."""
        try:
            with spans.Span(spans.WRITE):
                nonfinite = self._write_and_commit(request, plan, copy)
            saving.end.set_result(nonfinite)
        except BaseException as e:
            saving.end.set_exception(e)
        finally:
            # A save that has ended writes nothing more, so a caller whose copy waits
            # for the budget must be released.
            copy.close()

    def _plan_for(self, leaves: dict[str, Any]) -> ownership.Plan:
        """Plans which process writes what.

        The plan is cached: it is the same for every save of a run, and slow to compute
        for thousands of arrays.
        """
        key = []
        for path, leaf in leaves.items():
            sharding = getattr(leaf, "sharding", None)
            key.append((path, leaf.shape, leaf.dtype, sharding))
        if self._plan is None or self._plan[0] != key:
            plan = ownership.plan(leaves, self._exchange.index, self._exchange.count)
            self._plan = (key, plan)
        return self._plan[1]

    def _write_and_commit(
        self, request: _Request, plan: ownership.Plan, copy: host_copy.HostCopy
    ) -> list[str]:
        """Writes a step and makes it count, on all processes together.

        It runs in the background. The order of these calls is the order in which data
        becomes durable. All processes make the same exchanges, whatever fails on one of
        them.

        Args:
          request: the step.
          plan: which chunks this process writes.
          copy: provides these chunks, as the caller of the save copies them.

        Returns:
          The paths of arrays for which the step was refused, since they are not finite;
          empty if the step has a checkpoint that counts.
        """
        # 1. Process 0 begins an attempt. Its folder is new, so that nothing is ever
        # overwritten.
        nonce = self.on_process_0(lambda: self._begin_attempt(request.step))
        if not nonce:
            return []
        attempt = format_lib.SaveAttempt(self.store, request.step, nonce)

        # 2. Every process writes its chunks, which are durable when it reports. A
        # process that failed reports that instead of raising it; otherwise the others
        # would wait for its report until the deadline.
        report = self._write_chunks(attempt, plan, copy)
        report["data"] = request.data
        reports = self._exchange.gather(report)

        # 3. All processes have the same reports, so all of them decide alike, and all
        # of them raise, or none.
        failures = _failures(reports)
        nonfinite = _nonfinite(reports)
        is_refused = bool(nonfinite) and self._refuse_nonfinite
        if failures or is_refused:
            self.on_process_0(lambda: self._remove_failed(attempt))
            if failures:
                raise store_lib.CheckpointError("; ".join(failures))
            return nonfinite

        # 4. Process 0 completes the checkpoint. All processes raise its error.
        self.on_process_0(lambda: self._commit(attempt, request, plan, reports))
        return []

    def _begin_attempt(self, step: int) -> str:
        """Prepares the folder for an attempt to save a step; on process 0.

        Returns:
          The nonce of the attempt; empty if the step already has a checkpoint that
          counts.
        """
        # Only the process that holds the lock writes and deletes here.
        lock = self._locked()
        attempts = format_lib.attempts(self.store)
        # What is left of an attempt that is being deleted is for the deletion, which
        # may take long.
        self._remove_dead(
            lock, [attempt for attempt in attempts if attempt not in self._deleting]
        )
        for attempt in attempts:
            if attempt.step == step and self._counts(attempt):
                return ""
        return secrets.token_hex(4)

    def _write_chunks(
        self,
        attempt: format_lib.SaveAttempt,
        plan: ownership.Plan,
        copy: host_copy.HostCopy,
    ) -> dict[str, Any]:
        """Writes the chunks that this process owns. It raises no error.

        Returns:
          A report for the other processes: "keys", the number of keys written, or
          "error", the reason why they were not; and "nonfinite", the paths of checked
          arrays that are not finite.
        """
        report: dict[str, Any] = {}
        nonfinite: set[str] = set()
        chunks = copy.chunks()
        if self._must_be_finite is not None:
            chunks = _note_nonfinite(chunks, self._must_be_finite, nonfinite)
        try:
            report["keys"] = writer.write_part(
                attempt, self._exchange.index, plan.arrays, chunks, copy.written
            )
        except Exception as e:
            report["error"] = store_lib.reason(e)[:_LONGEST_REASON]
        report["nonfinite"] = _causes_first(nonfinite)[:_MOST_PATHS]
        return report

    def _commit(
        self,
        attempt: format_lib.SaveAttempt,
        request: _Request,
        plan: ownership.Plan,
        reports: list[dict[str, Any]],
    ) -> None:
        """Makes an attempt count that all processes have written; on process 0.

        Args:
          attempt: the attempt.
          request: the step.
          plan: how the arrays are stored.
          reports: what each process returned from `_write_chunks`, and its "data".
        """
        nonfinite = _nonfinite(reports)
        nbytes = sum(plan.loads)
        lock = self._locked()
        try:
            # Merge: the chunks stay where they are, and one database refers to them.
            writers = [i for i, report in enumerate(reports) if report["keys"]]
            merged = writer.merge(attempt, writers)

            # Verify that no chunk is missing, whatever the processes reported.
            num_keys = writer.verify(merged, plan.arrays)

            # Describe the arrays and the run.
            data = [report["data"] for report in reports]
            writer.describe(attempt, plan.arrays, request.metadata, data)

            # Commit. What the checkpoint relies on, such as logged rows, is durable
            # before COMMIT exists. The lock creates it: if another run has taken the
            # folder over, this checkpoint must not count.
            request.before_commit()
            lock.check()
            writer.commit(
                attempt,
                num_keys,
                nbytes,
                request.metrics,
                nonfinite if self._must_be_finite is not None else None,
                self._owner,
                lock,
            )
        except lock_lib.LostError:
            # The attempt is for the run that has the lock now.
            raise
        except BaseException:
            self._remove_failed(attempt)
            raise

        # The checkpoint counts now, whatever fails later. The run records that it
        # reached this step before older checkpoints are deleted.
        self._on_committed(
            Committed(
                step=request.step,
                folder=attempt.folder,
                nbytes=nbytes,
                seconds=time.monotonic() - request.begin,
                nonfinite=tuple(nonfinite),
            )
        )
        # Clean up, in a thread of its own: the next save need not wait for it.
        self._deletions.add(self._remove_old)

    def check(self) -> None:
        """Raises CheckpointError if the last save has finished and failed, or another
        run is known to have the lock of the folder.

        Does not wait. It leaves a NonfiniteError to `save` and `wait`, which raise it
        on all processes at the same step.
        """
        if self._lock is not None:
            self._lock.check_noticed()
        # Called after each step, most of which have no save to ask about.
        if self._saving is None or not self._saving.end.done():
            return
        end = self._saving.end
        is_refused = end.exception() is None and bool(end.result())
        if is_refused:
            return
        self._join_save()

    def wait(self) -> None:
        """Waits for the last save to finish, and a moment for deletions.

        Raises:
          CheckpointError: if the save failed; earlier checkpoints are unchanged. Or if
            another run is known to have the lock of the folder.
        """
        self._join_save()
        self._deletions.wait()
        if self._lock is not None:
            self._lock.check_noticed()

    def _join_save(self) -> None:
        """Waits for the last save; raises its error, if any, once only.

        The error is made here, so that it is raised in the thread of the caller.
        """
        if self._saving is None:
            return
        step, end = self._saving
        # If Ctrl-C interrupts this wait, the save is still known, and the next call
        # waits for it.
        with spans.Span(spans.SAVE):
            error = end.exception()
        self._saving = None
        if error is not None:
            kind = store_lib.CheckpointError
            if isinstance(error, lock_lib.LostError):
                kind = lock_lib.LostError
            raise kind(
                f"Step {step} could not be saved in {self.store}: "
                f"{store_lib.reason(error)}. Earlier checkpoints are unchanged."
            ) from error
        nonfinite = end.result()
        if nonfinite:
            listed = ", ".join(nonfinite)
            raise NonfiniteError(
                f"step {step}: the resulting state is not finite: {listed}", step
            )

    def close(self) -> None:
        """Waits for the last save, then releases the lock on the folder.

        Waits for no slow deletion.
        """
        try:
            self._join_save()
            self._deletions.wait()
        finally:
            self._deletions.cancel()
            # The lock on an object store is an object, so this is a deletion as well.
            release = deletions.Deletions()
            release.add(self._release)
            release.wait()

    # Changing checkpoints.

    def pin(self, step: int) -> bool:
        """Pins a step, so that no retention rule deletes it until `unpin`.

        Returns:
          Whether the step was not pinned before.

        Raises:
          CheckpointError: if the step has no checkpoint that counts.
        """
        return format_lib.pin(format_lib.find(self.store, step))

    def unpin(self, step: int) -> None:
        """Unpins a step, so that the retention rules apply to it again."""
        format_lib.unpin(format_lib.find(self.store, step))

    def add_metrics(
        self,
        step: int,
        metrics: dict[str, float],
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Adds metrics to a step that was saved without them.

        The best checkpoint is chosen by them.

        Args:
          step: the step.
          metrics: the metrics by name.
          before: called on process 0 before the metrics are written.

        Raises:
          CheckpointError: on all processes, if the step has no checkpoint, or the
            metrics cannot be written.
        """
        # The step may be the one whose save is still under way.
        self.wait()

        def add() -> None:
            before()
            attempt = format_lib.find(self.store, step)
            format_lib.add_metrics(attempt, metrics, self._lock or self.store)

        self.on_process_0(add)

    def give_up(self, folders: Sequence[str]) -> None:
        """Deletes checkpoints, pinned or not, that the run discarded as it rolled back.

        Call it on process 0.

        Each is recorded like a checkpoint that a person deleted, so that the run may
        resume from an earlier one. Folders that no longer exist are skipped: an earlier
        call deleted them.
        """
        if not folders:
            return
        lock = self._locked()
        lock.announce(folders)
        for attempt in format_lib.attempts(self.store):
            if attempt.folder in folders and format_lib.COMMIT in attempt.marks:
                writer.remove(attempt, changes=lock, by_hand=True)

    def clean(self) -> None:
        """Deletes old checkpoints, and the leftovers of attempts that do not count.

        A run that was killed during a save or a deletion leaves such folders. Waits for
        the last save, and a moment for these deletions; what takes longer goes on
        beside the caller, who must not save before `close`.
        """
        self.wait()
        self._deletions.add(self._remove_leftovers)
        self._deletions.wait()

    def _remove_leftovers(self) -> None:
        # Only the process that holds the lock knows that no attempt is under way.
        lock = self._lock
        if lock is None:
            return
        try:
            self._remove_dead(lock, format_lib.attempts(self.store))
        except store_lib.CheckpointError as e:
            self._log(f"leftover folders in {self.store} could not be deleted: {e}")
        self._remove_old()

    def _remove_dead(
        self, lock: lock_lib.Lock, attempts: list[format_lib.SaveAttempt]
    ) -> None:
        """Deletes those of some attempts that have no COMMIT.

        Args:
          lock: the lock of the folder.
          attempts: the attempts, which were listed before this call: if the lock is
            still held now, none of them is that of another run which is under way.
        """
        for attempt in attempts:
            # A damaged attempt has COMMIT, too, and stays in place for inspection. A
            # link was created by a person, and is for that person to delete.
            is_abandoned = format_lib.ABANDONED in attempt.marks
            has_commit = format_lib.COMMIT in attempt.marks and not is_abandoned
            if has_commit or attempt.is_link:
                continue
            # COMMIT is read by name before anything is deleted, since a listing may lag
            # behind.
            commit = self.store.read(attempt.prefix + format_lib.COMMIT)
            if commit is None or is_abandoned:
                lock.check()
                writer.remove(attempt, changes=lock)

    def _remove_failed(self, attempt: format_lib.SaveAttempt) -> None:
        """Deletes an attempt that failed.

        If the deletion fails, a later save deletes it.
        """
        try:
            lock = self._locked()
            lock.announce([attempt.folder])
            writer.remove(attempt, changes=lock)
        except Exception as e:
            self._log(
                f"{attempt} does not count, but could not be deleted: "
                f"{store_lib.reason(e)}"
            )

    def _remove_old(self) -> None:
        """Deletes the checkpoints that no rule keeps.

        A failure is logged and otherwise ignored.
        """
        lock = self._lock
        if lock is None:
            return
        try:
            committed = self._committed()
            kept = self._keep.kept([self._for_rules(attempt) for attempt in committed])
            old = [attempt for attempt in committed if attempt.step not in kept]
            if old:
                lock.announce([attempt.folder for attempt in old])
            for attempt in old:
                self._deleting.add(attempt)
                try:
                    writer.remove(attempt, changes=lock)
                finally:
                    self._deleting.discard(attempt)
        except Exception as e:
            # After `close`, the deletions that are left are for the next run.
            if self._lock is lock:
                self._log(f"old checkpoints in {self.store} could not be deleted: {e}")

    def _for_rules(self, attempt: format_lib.SaveAttempt) -> retention.Saved:
        """Describes a checkpoint for the retention rules."""
        metric = None
        saved_at = None
        if self._keep.best or self._keep.hours:
            # A damaged checkpoint has no metric. One that cannot be read raises, and
            # then nothing is deleted: it may be the best.
            with contextlib.suppress(metadata_files.DamagedError):
                commit = metadata_files.read_commit(attempt)
                metric = commit.metrics.get(self._keep.metric)
                saved_at = commit.time
        is_finite = self._must_be_finite is None or not self._nonfinite_paths(attempt)
        # A link means that a person moved the checkpoint elsewhere, and only that
        # person may delete it.
        is_pinned = format_lib.PINNED in attempt.marks or attempt.is_link
        return retention.Saved(
            step=attempt.step,
            metric=metric,
            pinned=is_pinned,
            finite=is_finite,
            time=saved_at,
        )

    # Restoring.

    def restore(
        self,
        target: Any,
        step: int | None = None,
        *,
        compare_groups: reader.CompareGroups | None = None,
    ) -> reader.Restored:
        """Restores a checkpoint.

        All processes read the same one, and each reads its own shards.

        Args:
          target: a tree of `jax.ShapeDtypeStruct` with shardings, or of arrays; or a
            function from the stored shapes by path to such a tree.
          step: the step; by default the newest checkpoint that is not damaged.
          compare_groups: returns how the groups of the checkpoint become those of the
            target; None: they must be equal, as any other dimension.

        Raises:
          CheckpointError: if there is no checkpoint, if all are damaged, or if the
            checkpoint does not fit the target.
        """
        self.wait()
        damages = []
        for attempt in self._candidates(step):
            read_once = functools.partial(
                reader.restore,
                attempt,
                target,
                self._owner,
                self._budget_bytes,
                self._log,
                compare_groups,
            )
            restored, damage = agreement.read(self._exchange, attempt, read_once)
            if restored is not None:
                return restored
            # All processes have the same verdict here, so all of them go on to the same
            # next checkpoint.
            damages.append(damage)
            logging.error("DAMAGED CHECKPOINT: %s Trying the previous one.", damage)
            self._mark_damaged(attempt, damage)
        raise store_lib.CheckpointError(
            f"All checkpoints in {self.store} are damaged: {' '.join(damages)}"
        )

    def _candidates(self, step: int | None) -> list[format_lib.SaveAttempt]:
        """Lists the checkpoints that may be read, newest first.

        The list is the same on all processes.
        """

        def choose() -> list[str]:
            chosen = format_lib.choose(self.store, self._committed(), step)
            return [attempt.folder for attempt in chosen]

        # Process 0 decides for all, since two listings of a store may differ from one
        # instant to the next.
        folders = self.on_process_0(choose)
        self._check_seen(folders)
        return [format_lib.attempt_in(self.store, folder) for folder in folders]

    def _mark_damaged(self, attempt: format_lib.SaveAttempt, damage: str) -> None:
        """Stops a checkpoint from counting.

        Its step can be saved again, and it no longer takes the place of another
        checkpoint in the retention rules.
        """
        self._damaged.add(attempt)
        # Only the process that holds the lock writes the mark, which other processes
        # see.
        if self._lock is None:
            return
        note = {"damage": damage, "found": time.strftime("%Y-%m-%d %H:%M:%S")}
        try:
            self._lock.create(
                attempt.prefix + format_lib.DAMAGED, format_lib.to_json(note)
            )
        except store_lib.CheckpointError as e:
            logging.error("%s could not be marked as damaged: %s", attempt, e)


@atexit.register
def _wait_at_exit() -> None:
    """Waits for all saves before tensorstore shuts down.

    Exit handlers run in reverse order of registration, and tensorstore was imported
    before this module.
    """
    for manager in list(_MANAGERS):
        try:
            manager._join_save()
        except store_lib.CheckpointError as e:
            print(f"NOT SAVED: {e}", file=sys.stderr)


def _check_json(request: _Request) -> None:
    for name in ("metadata", "data", "metrics"):
        try:
            json.dumps(getattr(request, name))
        except (TypeError, ValueError) as e:
            raise store_lib.CheckpointError(
                f"The {name} of step {request.step} must be JSON-serializable: {e}."
            ) from e


def _note_nonfinite(
    chunks: Iterator[tuple[ownership.Chunk, np.ndarray] | None],
    checked: re.Pattern[str],
    nonfinite: set[str],
) -> Iterator[tuple[ownership.Chunk, np.ndarray] | None]:
    """Passes chunks through, and notes the arrays that are not finite.

    Args:
      chunks: the chunks that a process writes; None is passed through.
      checked: a pattern that is searched for in the paths; others are not checked.
      nonfinite: the set to which paths are added.
    """
    for item in chunks:
        if item is not None:
            chunk, value = item
            is_checked = chunk.path not in nonfinite and checked.search(chunk.path)
            if is_checked and not finite_lib.is_finite(value):
                nonfinite.add(chunk.path)
        yield item


def _failures(reports: list[dict[str, Any]]) -> list[str]:
    """Lists why processes could not write.

    With several processes, each reason follows its process's index.
    """
    failures = []
    for index, report in enumerate(reports):
        if "error" in report:
            process = f"process {index}: " if len(reports) > 1 else ""
            failures.append(process + report["error"])
    return failures


def _nonfinite(reports: list[dict[str, Any]]) -> list[str]:
    """Lists arrays that are not finite in some process's chunks, by path."""
    paths: set[str] = set()
    for report in reports:
        paths.update(report["nonfinite"])
    return _causes_first(paths)[:_MOST_PATHS]


def _causes_first(paths: Iterable[str]) -> list[str]:
    """Returns paths in order, but optimizer slots last.

    The slots follow from what else is not finite, and are many.
    """
    return sorted(paths, key=lambda path: ("opt_state/" in path, path))
