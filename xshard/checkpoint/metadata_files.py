"""Reads COMMIT, meta.json and METRICS of a checkpoint, and distinguishes damage in them
from errors of the disk.
"""

import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import format as format_lib

# The delays before a failed or damaged read is repeated: a network disk or an object
# store may recover.
READ_AGAIN_SECONDS = (0.2, 1.0)
_T = TypeVar("_T")


class DamagedError(format_lib.CheckpointError):
    """A checkpoint counts but does not hold what was written."""


class UnreadableError(format_lib.CheckpointError):
    """The disk or the service failed to read a checkpoint, which may be whole."""


def retry_on_damage(read: Callable[[], _T]) -> _T:
    """Calls a read, again after damage, and returns its result.

    Raises:
      DamagedError: if every try finds damage.
    """
    for seconds in READ_AGAIN_SECONDS:
        try:
            return read()
        except DamagedError:
            time.sleep(seconds)
    return read()


def read_commit(attempt: format_lib.SaveAttempt) -> format_lib.Commit:
    """Reads COMMIT, and adds the metrics of METRICS to its own.

    Raises:
      DamagedError: if COMMIT is missing, not what was written, or of another attempt.
      UnreadableError: if it cannot be read.
    """
    content = _read(attempt, format_lib.COMMIT)
    commit = _parse(attempt, format_lib.COMMIT, content, format_lib.parse_commit)
    # COMMIT of a copied folder is valid, but not for the folder's name.
    if (commit.step, commit.attempt) != (attempt.step, attempt.nonce):
        raise DamagedError(
            f"{attempt}/{format_lib.COMMIT} belongs to another checkpoint."
        )
    # The state does not depend on METRICS, so a damaged METRICS is treated as absent.
    with contextlib.suppress(DamagedError):
        added = retry_on_damage(lambda: added_metrics(attempt))
        commit = commit._replace(metrics=commit.metrics | added)
    return commit


def read_meta(attempt: format_lib.SaveAttempt) -> format_lib.Meta:
    """Reads meta.json; raises the errors of `read_commit_meta`."""
    _, meta = read_commit_meta(attempt)
    return meta


def read_array_metas(attempt: format_lib.SaveAttempt) -> arrays_lib.ArrayMetas:
    """Reads how each array of a checkpoint is stored, by path; raises the errors of
    `read_commit_meta`.
    """
    return read_meta(attempt).arrays


def read_commit_meta(
    attempt: format_lib.SaveAttempt,
) -> tuple[format_lib.Commit, format_lib.Meta]:
    """Reads COMMIT as `read_commit` does, and meta.json, each file once.

    Raises:
      DamagedError: if one of these files or the manifest is missing or not what was
        written.
      UnreadableError: if one cannot be read.
      CheckpointError: if the checkpoint has an unknown format version.
    """
    commit = read_commit(attempt)
    # The manifest is the root of the database, whose nodes have checksums of their own.
    # Without the checksum in COMMIT, the manifest of an earlier merge would pass.
    _read_unchanged(attempt, format_lib.MANIFEST, commit)
    content = _read_unchanged(attempt, format_lib.META, commit)
    return commit, _parse(attempt, format_lib.META, content, format_lib.parse_meta)


def added_metrics(attempt: format_lib.SaveAttempt) -> dict[str, float]:
    """Reads METRICS; returns no metrics if there is no such file.

    Raises:
      DamagedError: if it is not what was written.
      UnreadableError: if it cannot be read.
    """
    if format_lib.METRICS not in attempt.marks:
        return {}
    content = _read(attempt, format_lib.METRICS)
    return _parse(attempt, format_lib.METRICS, content, format_lib.parse_metrics)


def _read(attempt: format_lib.SaveAttempt, name: str) -> bytes:
    try:
        content = attempt.store.read(attempt.prefix + name)
    except format_lib.CheckpointError as e:
        raise UnreadableError(f"{attempt}/{name} cannot be read: {e}.") from e
    if content is None:
        raise DamagedError(f"{attempt}/{name} is missing.")
    return content


def _read_unchanged(
    attempt: format_lib.SaveAttempt, name: str, commit: format_lib.Commit
) -> bytes:
    """Reads a file whose checksum COMMIT has; raises DamagedError if it differs."""
    content = _read(attempt, name)
    if format_lib.checksum(content) != commit.sha256.get(name):
        raise DamagedError(
            f"{attempt}/{name} is not what was written (its checksum differs)."
        )
    return content


def _parse(
    attempt: format_lib.SaveAttempt,
    name: str,
    content: bytes,
    parse: Callable[[bytes], _T],
) -> _T:
    try:
        return parse(content)
    except format_lib.CheckpointError as e:
        raise format_lib.CheckpointError(f"{attempt}/{name} {e}") from e
    except ValueError as e:
        raise DamagedError(f"{attempt}/{name} is not what was written: {e}.") from e
