"""Lists the checkpoints in a folder from their COMMIT files. It only reads, and takes
no lock.
"""

import contextlib
import os
from typing import Any, NamedTuple

from xshard.checkpoint import format as format_lib
from xshard.checkpoint import retention
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
    entries = []
    newest = None
    for attempt in format_lib.attempts(store):
        entry = _entry(attempt)
        if entry is not None:
            entries.append(entry)
            if entry.time is not None:
                newest = attempt
    meta = None
    if newest is not None:
        with contextlib.suppress(format_lib.DamagedError):
            meta = format_lib.retry_on_damage(lambda: format_lib.read_meta(newest))
    if meta is None:
        return Catalog(entries, {})
    keep = _retention_rule(meta)
    if keep is not None:
        _rank(entries, keep)
    return Catalog(entries, meta.written_with)


def newest_entry(store: store_lib.Store) -> Entry | None:
    """Returns the newest checkpoint that is complete, without its rank, and reads no
    other; None if there is none.
    """
    for attempt in reversed(format_lib.committed(store)):
        entry = _entry(attempt)
        if entry is not None and entry.time is not None:
            return entry
    return None


def _entry(attempt: format_lib.SaveAttempt) -> Entry | None:
    """Describes an attempt; None if a run deleted it after it was listed."""
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
    if not attempt.counts:
        return entry
    try:
        commit = format_lib.retry_on_damage(lambda: format_lib.read_commit(attempt))
    except format_lib.DamagedError:
        # A missing COMMIT is damage to its reader, but a deletion removes COMMIT first.
        content = attempt.store.read(attempt.prefix + format_lib.COMMIT)
        return None if content is None else entry
    return entry._replace(
        state="not finite" if commit.nonfinite else "complete",
        time=commit.time,
        nbytes=commit.bytes,
        metrics=format_lib.metrics_of(attempt, commit),
    )


def _rank(entries: list[Entry], keep: retention.Keep) -> None:
    """Ranks the best checkpoints, from 1."""
    # Of several attempts to save a step, the last counts.
    places = {
        entry.step: i for i, entry in enumerate(entries) if entry.time is not None
    }
    saved = []
    for step, i in places.items():
        saved.append(retention.Saved(step, entries[i].metrics.get(keep.metric)))
    for rank, step in enumerate(keep.best_steps(saved), 1):
        i = places[step]
        entries[i] = entries[i]._replace(best=rank, best_metric=keep.metric)


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
