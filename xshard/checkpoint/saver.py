"""One attempt to save a step, which all processes make together: each writes the chunks
that it owns, and process 0 the rest, with COMMIT last.

What makes an attempt durable and whole, in this order:

1. Each process writes its chunks and syncs them (`writer.write_part`).
2. Process 0 merges the databases, and verifies that the result has every key of every
   array and no other.
3. It writes meta.json, and reads the manifest and meta.json back for their checksums.
4. It syncs all folders, and creates COMMIT, if absent. Before this the attempt does not
   count, and a kill or a power loss leaves nothing but a folder that the next save
   removes.
"""

import platform
import secrets
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import tensorstore as ts

from xshard.base import formatting
from xshard.checkpoint import agreement, host_copy, writer
from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import finite as finite_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import janitor as janitor_lib
from xshard.checkpoint import leaves as leaves_lib
from xshard.checkpoint import listing as listing_lib
from xshard.checkpoint import lock as lock_lib
from xshard.checkpoint import store as store_lib
from xshard.files import provenance as provenance_lib
from xshard.pod import host_collectives

# Every process receives the reports of all others, so error texts are cut.
_LONGEST_REASON = 1000


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


class Request(NamedTuple):
    """A step to be saved, and what is saved beside its arrays.

    The attributes are the arguments of `Manager.save`, but for the last two.

    Attributes:
      step: the step's number.
      metadata: the run's metadata, equal on all processes.
      data: this process's position in the data.
      metrics: the metrics by which the best checkpoint can be chosen.
      before_commit: called on process 0 when everything but COMMIT is written.
      copies: checksums of the arrays of which each process has a copy, by path.
      begin: the time of the request, in seconds of the monotonic clock.
    """

    step: int
    metadata: dict[str, Any]
    data: Any
    metrics: dict[str, float]
    before_commit: Callable[[], None]
    copies: dict[str, int]
    begin: float


class Saver:
    """Saves steps: all processes together write one and make it count."""

    def __init__(
        self,
        channel: host_collectives.Channel,
        listing: listing_lib.Listing,
        janitor: janitor_lib.Janitor,
        finite: finite_lib.Finite,
        owner: format_lib.Owner | None,
        committed: Callable[[Committed], None],
    ):
        """Writes nothing yet.

        Args:
          channel: connects the processes. A save uses it in the background, so no
            other thread may meanwhile.
          listing: the checkpoints that are there.
          janitor: holds the lock of the folder, and deletes what failed or is old.
          finite: the arrays that must be finite.
          owner: the run, which is recorded in each COMMIT; None: it is not.
          committed: called on process 0 once a checkpoint counts.
        """
        self._channel = channel
        self._listing = listing
        self._store = listing.store
        self._janitor = janitor
        self._finite = finite
        self._owner = owner
        self._on_committed = committed

    def write_and_commit(
        self, request: Request, plan: leaves_lib.Plan, copy: host_copy.HostCopy
    ) -> list[str]:
        """Writes a step and makes it count, on all processes together.

        It runs in the background. The order of these calls is the order in which data
        becomes durable. All processes make the same gathers, whatever fails on one of
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
        nonce = agreement.on_process_0(
            self._channel, lambda: self._begin_attempt(request.step)
        )
        if not nonce:
            return []
        attempt = format_lib.SaveAttempt(self._store, request.step, nonce)

        # 2. Every process writes its chunks, which are durable when it reports. A
        # process that failed reports that instead of raising it; otherwise the others
        # would wait for its report until the deadline.
        report = self._write_chunks(attempt, plan, copy)
        report["data"] = request.data
        report["tree"] = plan.digest
        report["copies"] = request.copies
        reports = self._channel.gather(report)

        # 3. All processes have the same reports, so all of them decide alike, and all
        # of them raise, or none.
        failures = _failures(reports)
        paths: set[str] = set()
        for each in reports:
            paths.update(each["nonfinite"])
        nonfinite = self._finite.first(paths)
        is_refused = bool(nonfinite) and self._finite.refuse
        if failures or is_refused:
            agreement.on_process_0(
                self._channel, lambda: self._janitor.remove_failed(attempt)
            )
            if failures:
                raise store_lib.CheckpointError("; ".join(failures))
            return nonfinite

        # 4. Process 0 completes the checkpoint. All processes raise its error.
        agreement.on_process_0(
            self._channel,
            lambda: self._commit(attempt, request, plan, reports, nonfinite),
        )
        return []

    def _begin_attempt(self, step: int) -> str:
        """Deletes what failed attempts left, and names a new one; on process 0.

        Returns:
          The nonce of the attempt; empty if the step already has a checkpoint that
          counts.
        """
        for attempt in self._janitor.make_room():
            if attempt.step == step and self._listing.counts(attempt):
                return ""
        return secrets.token_hex(4)

    def _write_chunks(
        self,
        attempt: format_lib.SaveAttempt,
        plan: leaves_lib.Plan,
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
        chunks = self._finite.note(copy.chunks(), nonfinite)
        try:
            report["keys"] = writer.write_part(
                attempt, self._channel.index, plan.arrays, chunks, copy.written
            )
        except Exception as e:
            report["error"] = store_lib.reason(e)[:_LONGEST_REASON]
        report["nonfinite"] = self._finite.first(nonfinite)
        return report

    def _commit(
        self,
        attempt: format_lib.SaveAttempt,
        request: Request,
        plan: leaves_lib.Plan,
        reports: list[dict[str, Any]],
        nonfinite: list[str],
    ) -> None:
        """Makes an attempt count that all processes have written; on process 0.

        Args:
          attempt: the attempt.
          request: the step.
          plan: how the arrays are stored.
          reports: what each process returned from `_write_chunks`, and its "data".
          nonfinite: the paths of checked arrays that are not finite.
        """
        nbytes = sum(plan.loads)
        lock = self._janitor.locked()
        try:
            # Merge: the chunks stay where they are, and one database refers to them.
            # No chunk may be missing, whatever the processes reported.
            writers = [i for i, report in enumerate(reports) if report["keys"]]
            num_keys = _merge(attempt, writers, plan.arrays)

            # Describe the arrays and the run.
            meta = format_lib.Meta(
                version=format_lib.VERSION,
                step=attempt.step,
                arrays=plan.arrays,
                metadata=request.metadata,
                data=[report["data"] for report in reports],
                written_with={
                    "processes": len(reports),
                    "devices": jax.device_count(),
                    "python": platform.python_version(),
                    **provenance_lib.library_versions(),
                },
            )
            content = format_lib.serialize_meta(meta)
            self._store.create(attempt.prefix + format_lib.META, content)

            # Commit. What the checkpoint relies on, such as logged rows, is durable
            # before COMMIT exists. The lock creates it: if another run has taken the
            # folder over, this checkpoint must not count.
            request.before_commit()
            lock.check()
            run = None
            if self._owner is not None:
                run = provenance_lib.Identity(self._owner.id, self._owner.fingerprint)
            commit = format_lib.Commit(
                step=attempt.step,
                attempt=attempt.nonce,
                keys=num_keys,
                bytes=nbytes,
                time=time.time(),
                sha256=_checksums(attempt),
                metrics=request.metrics,
                nonfinite=nonfinite if self._finite.patterns else None,
                run=run,
            )
            # Every folder must be durable before COMMIT exists: a power loss must not
            # leave COMMIT without its data.
            self._store.sync(attempt.prefix)
            # `create` is atomic and does not overwrite, so that COMMIT exists as a
            # whole or not at all.
            content = format_lib.serialize_commit(commit)
            lock.create(attempt.prefix + format_lib.COMMIT, content)
        except lock_lib.LostError:
            # The attempt is for the run that has the lock now.
            raise
        except BaseException:
            self._janitor.remove_failed(attempt)
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
        self._janitor.begin_to_remove_old()


def _merge(
    attempt: format_lib.SaveAttempt, processes: list[int], arrays: arrays_lib.ArrayMetas
) -> int:
    """Merges the databases of some processes into one that refers to their data in
    place.

    Returns:
      The number of its keys.

    Raises:
      CheckpointError: if a key of the arrays is missing, or there is an unexpected one.
    """
    # Tensorstore copies entries by reference only between databases that share one
    # context and are opened alike.
    context = store_lib.make_context()
    merged = attempt.store.database(attempt.prefix, context, is_written=True)
    transaction = ts.Transaction(atomic=True)
    for process in processes:
        prefix = attempt.part(process)
        part = attempt.store.database(prefix, context, is_written=True)
        part.experimental_copy_range_to(merged.with_transaction(transaction)).result()
    transaction.commit_async().result()

    expected: set[bytes] = set()
    for path, meta in arrays.items():
        expected.update(key.encode() for key in meta.keys(path))
    listed = set(merged.list().result())
    if listed != expected:
        raise store_lib.CheckpointError(
            f"{len(expected - listed)} keys are missing and {len(listed - expected)} "
            f"are unexpected, such as {sorted(listed ^ expected)[0].decode()}"
        )
    return len(expected)


def _checksums(attempt: format_lib.SaveAttempt) -> dict[str, str]:
    """Returns the checksums of what COMMIT vouches for, as the store returns it, not as
    it was sent to it.
    """
    checksums = {}
    for name in (format_lib.META, format_lib.MANIFEST):
        content = attempt.store.read(attempt.prefix + name)
        if content is None:
            raise store_lib.CheckpointError(f"{attempt}/{name} is missing")
        checksums[name] = format_lib.checksum(content)
    return checksums


def _failures(reports: list[dict[str, Any]]) -> list[str]:
    """Lists why processes could not write.

    With several processes, each reason follows its process's index.
    """
    failures = []
    first = reports[0]
    for index, report in enumerate(reports):
        # Each array is stored once, so that a copy which differs would be lost.
        others = []
        for path, checksum in report["copies"].items():
            if checksum != first["copies"].get(path):
                others.append(f"'{path}'")
        if report["tree"] != first["tree"]:
            failures.append(
                f"process {index} saves another tree than process 0: give all the same "
                "paths, shapes, types and shardings"
            )
        elif others:
            failures.append(
                f"process {index} has other values than process 0 of "
                f"{formatting.listed(others)}, of which a checkpoint holds one copy: "
                "make them equal, or each an array over all processes"
            )
        if "error" in report:
            process = f"process {index}: " if len(reports) > 1 else ""
            failures.append(process + report["error"])
    return failures
