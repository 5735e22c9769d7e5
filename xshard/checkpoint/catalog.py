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
    attempts, commits = [], {}
    for attempt in format_lib.attempts(store):
        commit: dict[str, Any] | None = {}
        if attempt.counts:
            commit = _commit(attempt)
        if commit is None:
            continue
        attempts.append(attempt)
        if commit:
            commits[attempt] = commit
    meta = _newest_meta(commits)
    best = _best(commits, meta)
    entries = [_entry(attempt, commits.get(attempt, {}), best) for attempt in attempts]
    return Catalog(entries, meta.get("written_with", {}))


def newest_metadata(store: store_lib.Store) -> dict[str, Any]:
    """Returns the metadata of the newest checkpoint; nothing if there is none, or it is damaged."""
    there = format_lib.committed(store)
    return {} if not there else _newest_meta({there[-1]: {}}).get("metadata", {})


def _entry(
    attempt: format_lib.Attempt,
    commit: dict[str, Any],
    best: dict[format_lib.Attempt, tuple[int, str]],
) -> Entry:
    state = "complete" if commit else "incomplete"
    if format_lib.COMMIT in attempt.marks and not commit:
        state = "damaged"
    if commit.get(format_lib.NONFINITE):
        state = "not finite"
    place, metric = best.get(attempt, (None, ""))
    return Entry(
        attempt.step,
        state,
        attempt.folder,
        commit.get("time"),
        commit.get("bytes"),
        commit.get("metrics", {}),
        format_lib.PINNED in attempt.marks,
        place,
        metric,
    )


def _commit(attempt: format_lib.Attempt) -> dict[str, Any] | None:
    """Reads a commit; nothing if it is damaged, None if it has been deleted since it was listed."""
    try:
        return source.read_commit(attempt)
    except source.DamagedError:
        return None if attempt.store.read(attempt.prefix + format_lib.COMMIT) is None else {}


def _newest_meta(commits: dict[format_lib.Attempt, dict[str, Any]]) -> dict[str, Any]:
    if not commits:
        return {}
    try:
        return source.read_meta(max(commits, key=lambda attempt: attempt.step))
    except source.DamagedError:
        return {}


def _best(
    commits: dict[format_lib.Attempt, dict[str, Any]], meta: dict[str, Any]
) -> dict[format_lib.Attempt, tuple[int, str]]:
    """The place of each of the best, and the metric's name, by the rule of the newest's config."""
    keep = _rule(meta)
    if keep is None:
        return {}
    saved = {a.step: (a, commit["metrics"].get(keep.metric)) for a, commit in commits.items()}
    steps = keep.best_steps([retention.Saved(step, m) for step, (_, m) in saved.items()])
    return {saved[step][0]: (place, keep.metric) for place, step in enumerate(steps, 1)}


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
