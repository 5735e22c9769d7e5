"""The checkpoints of one run.

Checkpoints are saved in the background and deleted by retention rules. All processes
agree on which one to restore.
"""

import atexit
import concurrent.futures
import contextlib
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from absl import logging

from xshard.base import spans
from xshard.checkpoint import (
    agreement,
    host_copy,
    progress,
    reader,
    retention,
)
from xshard.checkpoint import finite as finite_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import janitor as janitor_lib
from xshard.checkpoint import leaves as leaves_lib
from xshard.checkpoint import listing as listing_lib
from xshard.checkpoint import lock as lock_lib
from xshard.checkpoint import saver as saver_lib
from xshard.checkpoint import store as store_lib
from xshard.pod import host_collectives
from xshard.pod import members as members_lib

_MANAGERS: "weakref.WeakSet[Manager]" = weakref.WeakSet()


class NonfiniteError(store_lib.CheckpointError):
    """An array that must be finite is not, so the checkpoint does not count.

    Attributes:
      step: the step that produced the state.
    """

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class _Saving(NamedTuple):
    """A save in the background, under way or ended.

    Attributes:
      step: the step.
      end: the result of `Saver.write_and_commit`, once it has ended.
      thread: the thread that runs it; it is not started while another member leads.
    """

    step: int
    end: concurrent.futures.Future[list[str]]
    thread: threading.Thread


class Manager(listing_lib.Listing):
    """The checkpoints in one folder, which all processes save and restore together.

    Every process creates a manager and makes the same calls in the same order. What a
    manager lists is what its own process sees.

    As a context, it waits for the last save and releases the folder at the end.

    >>> import tempfile
    >>> from xshard import checkpoint
    >>> tree = {"w": np.arange(3.0), "epoch": np.int32(7)}
    >>> with checkpoint.Manager(tempfile.mkdtemp(), checkpoint.Keep(last=2)) as manager:
    ...     manager.save(100, tree)
    >>> manager.restore(tree).state
    {'epoch': np.int32(7), 'w': array([0., 1., 2.])}
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: retention.Keep,
        *,
        budget_bytes: int = 4 << 30,
        finite: str | Sequence[str] = "",
        refuse_nonfinite: bool = False,
        owner: format_lib.Owner | None = None,
        deadline_seconds: float = 1800.0,
        log: Callable[[str], None] = logging.info,
        committed: Callable[[saver_lib.Committed], None] = lambda committed: None,
        members: members_lib.Members | None = None,
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
            in which all of them are finite is never deleted. Of several expressions,
            the arrays that match the first are named first.
          refuse_nonfinite: whether a checkpoint in which a matching array is not finite
            fails to count.
          owner: the run, which refuses the checkpoints of other runs; None accepts
            those of any run.
          deadline_seconds: how long processes wait for one another.
          log: called with progress messages.
          committed: called on process 0, from another thread, once a checkpoint counts.
          members: the members of the run; by default the processes that JAX has joined.

        Raises:
          CheckpointError: if the folder is not a valid place for checkpoints.
        """
        super().__init__(folder)
        self._budget_bytes = budget_bytes
        self._owner = owner
        self._log = log
        self._members = members or members_lib.Members()
        what = f"checkpoints in {self.store}"
        self._channel = self._members.channel(what, deadline_seconds)
        # A save uses it in the background. Between processes that JAX has joined no
        # other thread may gather meanwhile.
        self._writing = self._channel
        if self._members.exchange is not None:
            self._writing = host_collectives.Channel(what, deadline_seconds)
        patterns = [finite] if isinstance(finite, str) else finite
        finite_arrays = finite_lib.Finite(patterns, refuse=refuse_nonfinite)
        self._janitor = janitor_lib.Janitor(self, keep, owner, log)
        self._saver = saver_lib.Saver(
            channel=self._writing,
            listing=self,
            janitor=self._janitor,
            finite=finite_arrays,
            owner=owner,
            committed=committed,
        )
        # The plan of the last save, and what it depends on.
        self._plan: tuple[Any, leaves_lib.Plan] | None = None
        self._saving: _Saving | None = None
        _MANAGERS.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del kind, error, trace
        self.close()

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
        return agreement.on_process_0(self._channel, action)

    def agreed_latest_step(self) -> int | None:
        """Returns the newest step with a checkpoint that counts, on all processes.

        Returns None if no process sees a checkpoint.

        Raises:
          CheckpointError: if a process does not see the checkpoints that process 0
            sees, for example because a disk is not mounted on its host.
        """
        newest = self._choose(lambda: self.committed()[-1:])
        return newest[0].step if newest else None

    def acquire(self) -> None:
        """Locks the folder for this run until `close`. A save does so too.

        Raises:
          CheckpointError: if another run holds the lock, if the folder holds another
            run's checkpoints, if it cannot be written, or if a process does not see it,
            for example because a disk is not mounted on its host.
        """
        self.wait()

        def lock() -> None:
            self._janitor.locked()

        self.on_process_0(lock)
        # Process 0 wrote RUN into the folder. A process that cannot read it sees
        # another folder.
        if self._owner is not None:
            agreement.check_owner(self._channel, self.store, self._owner, self._log)

    def save(
        self,
        step: int,
        state: Any,
        metadata: dict[str, Any] | None = None,
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
          step: the step's number, an integer of at least 0.
          state: any pytree of arrays, of JAX's or NumPy's; it may contain typed PRNG
            keys. Arrays that do not span all processes must be equal on all of them.
          metadata: JSON values by name, equal on all processes. Tuples become lists;
            numbers may be infinite or NaN.
          data: this process's position in the data, a JSON value.
          metrics: the metrics by which the best checkpoint can be chosen, by name.
          before_commit: called on process 0, from another thread, before the checkpoint
            counts. It makes durable what the checkpoint relies on but does not contain,
            such as logged rows. If it raises, the save fails.

        Raises:
          CheckpointError: if the step, the state or its metadata cannot be saved, or if
            the previous save failed. After a failure of the previous save, this save is
            under way nevertheless: the other processes take part in it, and may have
            learned of that failure earlier.
        """
        step = format_lib.check_step(step)
        format_lib.check(f"metadata of step {step}", metadata or {}, dict[str, Any])
        format_lib.check(f"data of step {step}", data)
        format_lib.check(f"metrics of step {step}", metrics or {}, dict[str, float])
        leaves = leaves_lib.of(state)
        copies: dict[str, int] = {}
        if self._writing.count > 1:
            copies = leaves_lib.checksums(leaves)
        request = saver_lib.Request(
            step=step,
            metadata=metadata or {},
            data=data,
            metrics=metrics or {},
            before_commit=before_commit,
            copies=copies,
            begin=time.monotonic(),
        )
        plan = self._plan_for(leaves)
        nbytes = sum(plan.arrays[chunk.path].chunk_bytes for chunk in plan.chunks)
        reporter = progress.ProgressReporter(f"saving step {step}", nbytes, self._log)
        # One save at a time, since the processes gather in one order.
        previous_failure = None
        try:
            self._join_save()
        except store_lib.CheckpointError as e:
            # Raised once this save is under way, in which the others take part.
            previous_failure = e
        # This member may lead since that wait. If it does not, its copy is kept whole.
        leads = self._members.leads or self._members.exchange is None
        budget_bytes = self._budget_bytes if leads else sys.maxsize
        copy = host_copy.HostCopy(plan, budget_bytes, reporter)
        end: concurrent.futures.Future[list[str]] = concurrent.futures.Future()
        thread = threading.Thread(
            target=self._save_in_background,
            args=(end, request, plan, copy),
            name=spans.BACKGROUND,
            daemon=True,
        )
        self._saving = _Saving(step, end, thread)
        if leads:
            thread.start()
        copy.make(leaves)
        if previous_failure is not None:
            raise previous_failure

    def _save_in_background(
        self,
        end: concurrent.futures.Future[list[str]],
        request: saver_lib.Request,
        plan: leaves_lib.Plan,
        copy: host_copy.HostCopy,
    ) -> None:
        """Runs `Saver.write_and_commit`, and leaves its end to `_join_save`."""
        try:
            with spans.Span(spans.WRITE):
                nonfinite = self._saver.write_and_commit(request, plan, copy)
            end.set_result(nonfinite)
        except BaseException as e:
            end.set_exception(e)
        finally:
            # A save that has ended writes nothing more, so a caller whose copy waits
            # for the budget must be released.
            copy.close()

    def _plan_for(self, leaves: dict[str, leaves_lib.Leaf]) -> leaves_lib.Plan:
        """Plans which process writes what.

        The plan is cached: it is the same for every save of a run, and slow to compute
        for thousands of arrays.
        """
        key = []
        for path, leaf in leaves.items():
            x = leaf.value
            key.append((path, x.shape, x.dtype, getattr(x, "sharding", None)))
        if self._plan is None or self._plan[0] != key:
            plan = leaves_lib.plan(leaves, self._writing.index, self._writing.count)
            self._plan = (key, plan)
        return self._plan[1]

    def check(self) -> None:
        """Raises CheckpointError if the last save has finished and failed, or another
        run is known to have the lock of the folder.

        Does not wait. It leaves a NonfiniteError to `save` and `wait`, which raise it
        on all processes at the same step.
        """
        self._janitor.check_noticed()
        # Called after each step, most of which have no save to ask about. Members that
        # exchange words learn of it together, in `save` and `wait`.
        if self._saving is None or not self._saving.end.done():
            return
        if self._members.exchange is not None:
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
        self._janitor.wait()
        self._janitor.check_noticed()

    def _join_save(self) -> None:
        """Waits for the last save; raises its error, if any, once only.

        The error is made here, so that it is raised in the thread of the caller.
        """
        if self._saving is None:
            return
        saving = self._saving
        # If Ctrl-C interrupts this wait, the save is still known, and the next call
        # waits for it.
        with spans.Span(spans.SAVE):
            lost, why, nonfinite = self._members.by_leader(
                f"the end of a save in {self.store}", lambda: _end(saving)
            )
        self._saving = None
        if why:
            kind = lock_lib.LostError if lost else store_lib.CheckpointError
            # Only the member that saved has the error itself.
            error = saving.end.exception() if saving.end.done() else None
            raise kind(
                f"Step {saving.step} could not be saved in {self.store}: {why}. "
                "Earlier checkpoints are unchanged."
            ) from error
        if nonfinite:
            listed = ", ".join(nonfinite)
            raise NonfiniteError(
                f"step {saving.step}: the resulting state is not finite: {listed}",
                saving.step,
            )

    def close(self) -> None:
        """Waits for the last save, then releases the lock on the folder.

        Waits for no slow deletion.
        """
        try:
            self._finish_save()
            self._janitor.wait()
        finally:
            self._janitor.close()

    @contextlib.contextmanager
    def succeeding(self) -> Iterator[None]:
        """Takes over what the leader of a run held that is lost.

        That is the lock of the folder, and a save that may not have been made.
        """
        self._janitor.locked()
        if self._saving is not None and self._saving.thread.ident is None:
            self._saving.thread.start()
        yield

    def _finish_save(self) -> None:
        """Waits for the last save as `_join_save` does, but for no other member."""
        if self._members.exchange is None:
            self._join_save()
        elif self._saving is not None and self._saving.thread.ident is not None:
            self._saving.thread.join()

    # Changing checkpoints.

    def add_metrics(
        self,
        step: int,
        metrics: dict[str, float],
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Adds metrics to a step that was saved without them.

        The best checkpoint is chosen by them. A program that evaluates checkpoints may
        add them too: it needs no lock.

        Args:
          step: the step.
          metrics: the metrics by name.
          before: called on process 0 before the metrics are written.

        Raises:
          CheckpointError: on all processes, if the step has no checkpoint, or the
            metrics cannot be written.
        """
        format_lib.check(f"metrics of step {step}", metrics, dict[str, float])
        # The step may be the one whose save is still under way.
        self.wait()

        def add() -> None:
            before()
            format_lib.add_metrics(format_lib.find(self.store, step), metrics)

        self.on_process_0(add)

    def give_up(self, folders: Sequence[str]) -> None:
        """Deletes checkpoints, pinned or not, that the run discarded as it rolled back.

        Call it on process 0.

        Each is recorded like a checkpoint that a person deleted, so that the run may
        resume from an earlier one. Folders that no longer exist are skipped: an earlier
        call deleted them.
        """
        self._janitor.give_up(folders)

    def clean(self) -> None:
        """Deletes old checkpoints, and the leftovers of attempts that do not count.

        A run that was killed during a save or a deletion leaves such folders. Waits for
        the last save, and a moment for these deletions; what takes longer goes on
        beside the caller, who must not save before `close`.
        """
        self.wait()
        self._janitor.clean()

    # Restoring.

    def restore(
        self,
        target: Any,
        step: int | None = None,
        *,
        any_groups: bool = False,
    ) -> reader.Restored:
        """Restores a checkpoint.

        All processes read the same one, and each reads its own shards.

        Args:
          target: a tree like the one that was saved, of arrays or of
            `jax.ShapeDtypeStruct`; or a function from the stored shapes by path to such
            a tree. Each leaf is restored with its sharding, if it has one: NumPy's
            arrays to the host's memory, a `ShapeDtypeStruct` without a sharding to the
            process's first device.
          step: the step; by default the newest checkpoint that is not damaged.
          any_groups: whether the checkpoint may have another number of groups, whose
            first becomes each group of the target. If not, they must be equal, as any
            other dimension.

        Raises:
          CheckpointError: if there is no checkpoint, if all are damaged, or if the
            checkpoint does not fit the target: the message names each array that is
            missing, or has another shape or type.
        """
        self.wait()
        damages = []
        for attempt in self._choose(
            lambda: format_lib.choose(self.store, self.committed(), step)
        ):
            read_once = functools.partial(
                reader.restore,
                attempt,
                target,
                self._owner,
                self._budget_bytes,
                self._log,
                any_groups=any_groups,
            )
            restored, damage = agreement.read(self._channel, attempt, read_once)
            if restored is not None:
                return restored
            # All processes have the same verdict here, so all of them go on to the same
            # next checkpoint.
            damages.append(damage)
            logging.error("DAMAGED CHECKPOINT: %s Trying the previous one.", damage)
            self._janitor.mark_damaged(attempt, damage)
        raise store_lib.CheckpointError(
            f"All checkpoints in {self.store} are damaged: {' '.join(damages)}"
        )

    def _choose(
        self, on_0: Callable[[], list[format_lib.SaveAttempt]]
    ) -> list[format_lib.SaveAttempt]:
        """Returns the checkpoints that process 0 chooses, on all processes."""
        return agreement.choose(self._channel, self.store, on_0, self._log)


def _end(saving: _Saving) -> tuple[bool, str, list[str]]:
    """Waits until a save has ended, on the member that leads.

    Returns:
      Whether another run has the lock; the reason why it failed, empty if it did not;
      and the paths for which it was refused.
    """
    error = saving.end.exception()
    if error is not None:
        return isinstance(error, lock_lib.LostError), store_lib.reason(error), []
    return False, "", saving.end.result()


@atexit.register
def _wait_at_exit() -> None:
    """Waits for all saves before tensorstore shuts down.

    Exit handlers run in reverse order of registration, and tensorstore was imported
    before this module.
    """
    for manager in list(_MANAGERS):
        try:
            manager._finish_save()
        except store_lib.CheckpointError as e:
            print(f"NOT SAVED: {e}", file=sys.stderr)
