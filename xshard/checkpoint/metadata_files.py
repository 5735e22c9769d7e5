"""Reads a checkpoint's description (COMMIT, meta.json and METRICS), and reports damage
in it.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import schema

# The delays before a failed or damaged read is repeated: a network disk or an object
# store may recover.
READ_AGAIN_SECONDS = (0.2, 1.0)
_T = TypeVar("_T")


class DamagedError(format_lib.CheckpointError):
    """A checkpoint counts but does not hold what was written."""


class UnreadableError(format_lib.CheckpointError):
    """The disk or the service failed to read a checkpoint, which may be whole."""


def retry_on_damage(read: Callable[[], _T]) -> _T:
    """Calls a read, again after damage, and returns its result; raises DamagedError if
    every try finds damage.
    """
    for seconds in READ_AGAIN_SECONDS:
        try:
            return read()
        except DamagedError:
            time.sleep(seconds)
    return read()


def read_meta(attempt: format_lib.SaveAttempt) -> dict[str, Any]:
    """Reads the content of meta.json, and verifies the checksums of it, COMMIT and the
    manifest.

    Raises:
      DamagedError: if a file is missing or not what was written.
      CheckpointError: if the checkpoint has an unknown format version.
    """
    _, meta = read_commit_meta(attempt)
    return meta


def read_array_metas(attempt: format_lib.SaveAttempt) -> arrays_lib.ArrayMetas:
    """Reads how each array of a checkpoint is stored, by path; raises the errors of
    `read_meta`.
    """
    return array_metas(read_meta(attempt))


def read_commit_meta(
    attempt: format_lib.SaveAttempt,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the content of COMMIT and meta.json, as `read_commit` and `read_meta` do,
    and reads each file once.
    """
    commit = read_commit(attempt)
    sums = commit["sha256"]
    _read_file(attempt, format_lib.MANIFEST, sums)
    return commit, _read_parsed(attempt, format_lib.META, schema.meta, sums)


def read_commit(attempt: format_lib.SaveAttempt) -> dict[str, Any]:
    """Returns the content of COMMIT, with the metrics of METRICS; raises DamagedError
    if it is another attempt's.
    """
    commit = _read_parsed(attempt, format_lib.COMMIT, schema.commit)
    if (commit["step"], commit["attempt"]) != (attempt.step, attempt.nonce):
        raise DamagedError(
            f"{attempt}/{format_lib.COMMIT} belongs to another checkpoint."
        )
    # The state does not depend on METRICS, so a damaged METRICS is treated as absent.
    with contextlib.suppress(DamagedError):
        commit["metrics"] |= retry_on_damage(lambda: added_metrics(attempt))
    return commit


def added_metrics(attempt: format_lib.SaveAttempt) -> dict[str, float]:
    """Returns the content of METRICS, empty if there is none; raises DamagedError if it
    is not what was written.
    """
    if format_lib.METRICS not in attempt.marks:
        return {}
    return _read_parsed(attempt, format_lib.METRICS, schema.metrics)


def array_metas(meta: dict[str, Any]) -> arrays_lib.ArrayMetas:
    """Returns the arrays in the content of meta.json, by path."""
    arrays = {}
    for path, entry in meta["arrays"].items():
        arrays[path] = arrays_lib.ArrayMeta(
            shape=tuple(entry["shape"]),
            dtype=entry["dtype"],
            chunk_shape=tuple(entry["chunk_shape"]),
            key_impl=entry.get("key_impl"),
            sharding=entry.get("sharding", ""),
        )
    return arrays


def _read_file(
    attempt: format_lib.SaveAttempt, name: str, sums: Mapping[str, str] | None = None
) -> bytes:
    """Reads a file; raises DamagedError if it is missing, or differs from its checksum
    in `sums`, those of COMMIT.
    """
    try:
        content = attempt.store.read(attempt.prefix + name)
    except format_lib.CheckpointError as e:
        raise UnreadableError(f"{attempt}/{name} cannot be read: {e}.") from e
    if content is None:
        raise DamagedError(f"{attempt}/{name} is missing.")
    if sums is not None and format_lib.checksum(content) != sums.get(name):
        raise DamagedError(
            f"{attempt}/{name} is not what was written (its checksum differs)."
        )
    return content


def _read_parsed(
    attempt: format_lib.SaveAttempt,
    name: str,
    parse: Callable[[bytes], Any],
    sums: Mapping[str, str] | None = None,
) -> Any:
    """Reads a file as `_read_file` does, and parses it."""
    content = _read_file(attempt, name, sums)
    try:
        return parse(content)
    except format_lib.CheckpointError as e:
        raise format_lib.CheckpointError(f"{attempt}/{name} {e}") from e
    except ValueError as e:
        raise DamagedError(f"{attempt}/{name} is not what was written: {e}.") from e
