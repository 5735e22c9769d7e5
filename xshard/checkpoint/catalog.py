"""Lists the checkpoints in a folder, from their own words. Reads only, and takes no lock."""

import os
from typing import Any, NamedTuple

from xshard.checkpoint import format as format_lib
from xshard.checkpoint import retention, source
from xshard.checkpoint import store as store_lib


class Entry(NamedTuple):
    """One attempt to save a step.

    Attributes:
      step: its step.
      state: 'complete'; 'not finite', which is complete but for its parameters, of which some are infinite or NaN;
        'incomplete', which is being written or was cut off; or 'damaged'.
      folder: its name in the store.
      time: when it was committed, in seconds of the epoch; None if it is not complete.
      nbytes: its size; None if it is not complete.
      metrics: those of the evaluation that was saved with it.
      pinned: whether someone has said that it stays.
      best: its place among those that are kept as the best, from 1; None if it is none of them.
      best_metric: the name of the metric that they are chosen by; empty if it is none of them.
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
      entries: all attempts, the oldest step first.
      written_with: versions, processes and devices of the newest that is complete; empty if none is.
    """

    entries: list[Entry]
    written_with: dict[str, Any]


def read_catalog(folder: str | os.PathLike[str] | store_lib.Store) -> Catalog:
    """Looks at the checkpoints in a folder, while a run may be writing and deleting there.

    Args:
      folder: a path, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER; or a store.

    Raises:
      CheckpointError: if it is no place for checkpoints, a path without a folder, or out of reach.
    """
    store = folder if isinstance(folder, store_lib.Store) else store_lib.Store(folder)
    if store.path is not None and not store.path.is_dir():
        raise format_lib.CheckpointError(f"{store} is no directory.")
    # What each says of itself; nothing if it does not count, or is damaged.
    contents: dict[format_lib.Attempt, dict[str, Any]] = {}
    for attempt in format_lib.attempts(store):
        content = _commit(attempt) if attempt.counts else {}
        # A run that goes on may have deleted it since it was listed.
        if content is not None:
            contents[attempt] = content
    commits = {attempt: content for attempt, content in contents.items() if content}
    meta = _newest_meta(list(commits))
    best = _best(commits, meta)
    entries = [_entry(attempt, content, best) for attempt, content in contents.items()]
    return Catalog(entries, meta.get("written_with", {}))


def newest_metadata(store: store_lib.Store) -> dict[str, Any]:
    """Returns the metadata of the newest checkpoint; nothing if there is none, or it is damaged."""
    return _newest_meta(format_lib.committed(store)).get("metadata", {})


def _entry(
    attempt: format_lib.Attempt,
    commit: dict[str, Any],
    best: dict[format_lib.Attempt, tuple[int, str]],
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


def _commit(attempt: format_lib.Attempt) -> dict[str, Any] | None:
    """Reads a commit; nothing if it is damaged, None if it has been deleted since it was listed."""
    try:
        return source.settled(lambda: source.read_commit(attempt))
    except source.DamagedError:
        is_gone = attempt.store.read(attempt.prefix + format_lib.COMMIT) is None
        return None if is_gone else {}


def _newest_meta(attempts: list[format_lib.Attempt]) -> dict[str, Any]:
    """Reads the description of the last of some attempts; nothing if there is none, or it is damaged."""
    if not attempts:
        return {}
    try:
        return source.settled(lambda: source.read_meta(attempts[-1]))
    except source.DamagedError:
        return {}


def _best(
    commits: dict[format_lib.Attempt, dict[str, Any]], meta: dict[str, Any]
) -> dict[format_lib.Attempt, tuple[int, str]]:
    """The place of each of the best, and the metric's name, by the rule of the newest's config."""
    keep = _rule(meta)
    if keep is None:
        return {}
    attempts = {attempt.step: attempt for attempt in commits}
    saved = []
    for step, attempt in attempts.items():
        saved.append(retention.Saved(step, commits[attempt]["metrics"].get(keep.metric)))
    best = {}
    for place, step in enumerate(keep.best_steps(saved), 1):
        best[attempts[step]] = (place, keep.metric)
    return best


def _rule(meta: dict[str, Any]) -> retention.Keep | None:
    """The rule for the best checkpoints; None if there is none, or none that can be followed."""
    options: Any = meta
    for key in ("metadata", "config", "checkpoint"):
        options = options.get(key)
        if not isinstance(options, dict):
            return None
    name = options.get("best_metric")
    if not options.get("keep_best") or not isinstance(name, str):
        return None
    try:
        return retention.Keep(1, 0, options["keep_best"], name, options.get("best_mode"))
    except format_lib.CheckpointError:
        return None
