"""Lists the checkpoints in a folder from their COMMIT files. It only reads, and takes
no lock.
"""

import contextlib
import os
from typing import Any, NamedTuple

from xshard.checkpoint import format as format_lib
from xshard.checkpoint import metadata_files, retention
from xshard.checkpoint import store as store_lib


class Entry(NamedTuple):
    """One attempt to save a step.

    Attributes:
      step: its step.
      state: 'complete'; 'not finite', which is complete but has parameters that are
        infinite or NaN; 'incomplete', which is still being written or was interrupted;
        or 'damaged'.
      folder: the name of its folder in the store.
      time: the time of its commit, in seconds since the epoch; None if it is incomplete
        or damaged.
      nbytes: its size in bytes; None if it is incomplete or damaged.
      metrics: the metrics of the evaluation that was saved with it.
      pinned: whether it is pinned.
      best: its rank among the checkpoints that are kept as the best, from 1; None if it
        is not one of them.
      best_metric: the name of the metric by which the best are chosen; empty if it is
        not one of them.
    """

    step: int
    state: str
    folder: str
    time: float | None
    nbytes: int | None
    metrics: dict[str, float]
    pinned: bool
    best: int | None
    best_metric: str


class Catalog(NamedTuple):
    """The checkpoints in a folder.

    Attributes:
      entries: all attempts, oldest step first.
      written_with: the versions, processes and devices of the newest complete
        checkpoint; empty if there is none.
    """

    entries: list[Entry]
    written_with: dict[str, Any]


def read_catalog(folder: str | os.PathLike[str] | store_lib.Store) -> Catalog:
    """Lists the checkpoints in a folder, in which a run may be writing and deleting at
    the same time.

    Args:
      folder: a path, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER; or a store.

    Raises:
      CheckpointError: if the folder is not a valid place for checkpoints, does not
        exist, or cannot be reached.
    """
    store = folder if isinstance(folder, store_lib.Store) else store_lib.Store(folder)
    if store.path is not None and not store.path.is_dir():
        raise format_lib.CheckpointError(f"{store} is not a directory.")
    listed = []
    commits: dict[format_lib.SaveAttempt, format_lib.Commit] = {}
    for attempt in format_lib.attempts(store):
        if attempt.counts:
            try:
                commits[attempt] = _read_commit(attempt)
            except _DeletedError:
                continue
            except metadata_files.DamagedError:
                # It is listed without a COMMIT.
                pass
        listed.append(attempt)

    meta = _newest_meta(list(commits))
    ranks = {}
    written_with = {}
    if meta is not None:
        ranks = _rank(commits, _retention_rule(meta))
        written_with = meta.written_with
    entries = []
    for attempt in listed:
        entry = _entry(attempt, commits.get(attempt))
        if attempt in ranks:
            rank, metric = ranks[attempt]
            entry = entry._replace(best=rank, best_metric=metric)
        entries.append(entry)
    return Catalog(entries, written_with)


def newest_entry(store: store_lib.Store) -> Entry | None:
    """Returns the newest checkpoint that is complete, without its rank, and reads no
    other; None if there is none.
    """
    for attempt in reversed(format_lib.committed(store)):
        with contextlib.suppress(_DeletedError, metadata_files.DamagedError):
            return _entry(attempt, _read_commit(attempt))
    return None


class _DeletedError(Exception):
    """A run deleted the checkpoint after it was listed."""


def _read_commit(attempt: format_lib.SaveAttempt) -> format_lib.Commit:
    """Reads the COMMIT of an attempt that was listed as one that counts.

    Raises:
      DamagedError: if it is not what was written.
      _DeletedError: if it no longer exists.
    """
    try:
        return metadata_files.retry_on_damage(
            lambda: metadata_files.read_commit(attempt)
        )
    except metadata_files.DamagedError as e:
        # A missing COMMIT is damage to its reader, but a deletion removes COMMIT first.
        if attempt.store.read(attempt.prefix + format_lib.COMMIT) is None:
            raise _DeletedError from e
        raise


def _entry(attempt: format_lib.SaveAttempt, commit: format_lib.Commit | None) -> Entry:
    """Describes an attempt; the commit is None if the attempt does not count, or is
    damaged.
    """
    entry = Entry(
        step=attempt.step,
        state="damaged" if format_lib.COMMIT in attempt.marks else "incomplete",
        folder=attempt.folder,
        time=None,
        nbytes=None,
        metrics={},
        pinned=format_lib.PINNED in attempt.marks,
        best=None,
        best_metric="",
    )
    if commit is None:
        return entry
    return entry._replace(
        state="not finite" if commit.nonfinite else "complete",
        time=commit.time,
        nbytes=commit.bytes,
        metrics=commit.metrics,
    )


def _newest_meta(attempts: list[format_lib.SaveAttempt]) -> format_lib.Meta | None:
    """Reads the meta.json of the last of some attempts; returns None if there is none
    or it is damaged.
    """
    if not attempts:
        return None
    try:
        return metadata_files.retry_on_damage(
            lambda: metadata_files.read_meta(attempts[-1])
        )
    except metadata_files.DamagedError:
        return None


def _rank(
    commits: dict[format_lib.SaveAttempt, format_lib.Commit],
    keep: retention.Keep | None,
) -> dict[format_lib.SaveAttempt, tuple[int, str]]:
    """Returns the rank of each of the best checkpoints, from 1, and the metric that
    decides.
    """
    if keep is None:
        return {}
    # Of several attempts to save a step, the last counts.
    attempts = {attempt.step: attempt for attempt in commits}
    saved = []
    for step, attempt in attempts.items():
        metric = commits[attempt].metrics.get(keep.metric)
        saved.append(retention.Saved(step, metric))
    ranks = {}
    for rank, step in enumerate(keep.best_steps(saved), 1):
        ranks[attempts[step]] = (rank, keep.metric)
    return ranks


def _retention_rule(meta: format_lib.Meta) -> retention.Keep | None:
    """Returns the rule for the best checkpoints in the config of the run; None if it
    has none or an invalid one.
    """
    options: Any = meta.metadata
    for key in ("config", "checkpoint"):
        options = options.get(key)
        if not isinstance(options, dict):
            return None
    name = options.get("best_metric")
    if not options.get("keep_best") or not isinstance(name, str):
        return None
    try:
        return retention.Keep(
            last=1,
            every_steps=0,
            best=options["keep_best"],
            metric=name,
            mode=options.get("best_mode"),
        )
    except format_lib.CheckpointError:
        return None
