"""Lists the checkpoints in a folder from their COMMIT files. It only reads, and takes
no lock.
"""

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
    # The content of each attempt's COMMIT; empty if the attempt does not count or is
    # damaged.
    contents: dict[format_lib.SaveAttempt, dict[str, Any]] = {}
    for attempt in format_lib.attempts(store):
        content = _commit(attempt) if attempt.counts else {}
        # None: a run deleted the attempt after it was listed.
        if content is not None:
            contents[attempt] = content
    commits = {attempt: content for attempt, content in contents.items() if content}
    meta = _newest_meta(list(commits))
    best = _best(commits, meta)
    entries = [_entry(attempt, content, best) for attempt, content in contents.items()]
    return Catalog(entries, meta.get("written_with", {}))


def newest_entry(store: store_lib.Store) -> Entry | None:
    """Returns the newest checkpoint that is complete, without its rank, and reads no
    other; None if there is none.
    """
    for attempt in reversed(format_lib.committed(store)):
        content = _commit(attempt)
        if content:
            return _entry(attempt, content, best={})
    return None


def newest_metadata(store: store_lib.Store) -> dict[str, Any]:
    """Returns the metadata of the newest checkpoint; empty if there is none or it is
    damaged.
    """
    return _newest_meta(format_lib.committed(store)).get("metadata", {})


def _entry(
    attempt: format_lib.SaveAttempt,
    commit: dict[str, Any],
    best: dict[format_lib.SaveAttempt, tuple[int, str]],
) -> Entry:
    if commit.get(format_lib.NONFINITE):
        state = "not finite"
    elif commit:
        state = "complete"
    elif format_lib.COMMIT in attempt.marks:
        state = "damaged"
    else:
        state = "incomplete"
    place, metric = best.get(attempt, (None, ""))
    return Entry(
        step=attempt.step,
        state=state,
        folder=attempt.folder,
        time=commit.get("time"),
        nbytes=commit.get("bytes"),
        metrics=commit.get("metrics", {}),
        pinned=format_lib.PINNED in attempt.marks,
        best=place,
        best_metric=metric,
    )


def _commit(attempt: format_lib.SaveAttempt) -> dict[str, Any] | None:
    """Reads a COMMIT; returns an empty one if it is damaged, None if it was deleted
    after the listing.
    """
    try:
        return metadata_files.retry_on_damage(
            lambda: metadata_files.read_commit(attempt)
        )
    except metadata_files.DamagedError:
        is_gone = attempt.store.read(attempt.prefix + format_lib.COMMIT) is None
        return None if is_gone else {}


def _newest_meta(attempts: list[format_lib.SaveAttempt]) -> dict[str, Any]:
    """Reads the meta.json of the last of some attempts; returns an empty one if there
    is none or it is damaged.
    """
    if not attempts:
        return {}
    try:
        return metadata_files.retry_on_damage(
            lambda: metadata_files.read_meta(attempts[-1])
        )
    except metadata_files.DamagedError:
        return {}


def _best(
    commits: dict[format_lib.SaveAttempt, dict[str, Any]], meta: dict[str, Any]
) -> dict[format_lib.SaveAttempt, tuple[int, str]]:
    """Ranks the best checkpoints by the rule in the newest checkpoint's config; returns
    each rank and the metric.
    """
    keep = _rule(meta)
    if keep is None:
        return {}
    attempts = {attempt.step: attempt for attempt in commits}
    saved = []
    for step, attempt in attempts.items():
        saved.append(
            retention.Saved(step, commits[attempt]["metrics"].get(keep.metric))
        )
    best = {}
    for place, step in enumerate(keep.best_steps(saved), 1):
        best[attempts[step]] = (place, keep.metric)
    return best


def _rule(meta: dict[str, Any]) -> retention.Keep | None:
    """Returns the rule for the best checkpoints; None if the config has none or an
    invalid one.
    """
    options: Any = meta
    for key in ("metadata", "config", "checkpoint"):
        options = options.get(key)
        if not isinstance(options, dict):
            return None
    name = options.get("best_metric")
    if not options.get("keep_best") or not isinstance(name, str):
        return None
    try:
        return retention.Keep(
            1, 0, options["keep_best"], name, options.get("best_mode")
        )
    except format_lib.CheckpointError:
        return None
