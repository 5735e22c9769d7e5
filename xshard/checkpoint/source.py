"""Reads what a checkpoint says of itself, and names what is damaged."""

import contextlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import schema

# After a read that fails, or gives other bytes than were written: a disk on a network, or a store, may do better the next time.
READ_AGAIN_SECONDS = (0.2, 1.0)
_T = TypeVar("_T")


class DamagedError(format_lib.CheckpointError):
    """A checkpoint that counts but does not hold what was written."""


class UnreadableError(format_lib.CheckpointError):
    """A checkpoint that the disk or the service does not give; it may be whole."""


def settled(read: Callable[[], _T]) -> _T:
    """What a read returns; DamagedError for what comes out wrong each time that it is read."""
    for seconds in READ_AGAIN_SECONDS:
        try:
            return read()
        except DamagedError:
            time.sleep(seconds)
    return read()


def read_meta(attempt: format_lib.Attempt) -> dict[str, Any]:
    """The description of a checkpoint, after its checksums have been verified.

    Raises:
      DamagedError: if a file is missing or not what was written.
      CheckpointError: if it is of a version that this code does not know.
    """
    _, meta = read_both(attempt)
    return meta


def read_array_metas(attempt: format_lib.Attempt) -> arrays_lib.ArrayMetas:
    """Reads how each array of a checkpoint is stored, by path; raises as `read_meta`."""
    return array_metas(read_meta(attempt))


def read_both(attempt: format_lib.Attempt) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads COMMIT and meta.json, as `read_commit` and `read_meta`, each once."""
    commit = read_commit(attempt)
    content = _read_summed(attempt, format_lib.META, commit)
    _read_summed(attempt, format_lib.MANIFEST, commit)
    return commit, _parse(attempt, format_lib.META, content, schema.meta)


def read_commit(attempt: format_lib.Attempt) -> dict[str, Any]:
    """The content of COMMIT, with the metrics of METRICS; DamagedError if it is not this attempt's."""
    content = _read_file(attempt, format_lib.COMMIT)
    commit = _parse(attempt, format_lib.COMMIT, content, schema.commit)
    if (commit["step"], commit["attempt"]) != (attempt.step, attempt.nonce):
        raise DamagedError(f"{attempt}/{format_lib.COMMIT} is another checkpoint's.")
    # The state is whole without them: what is damaged there is as good as absent.
    with contextlib.suppress(DamagedError):
        commit["metrics"] |= settled(lambda: added_metrics(attempt))
    return commit


def added_metrics(attempt: format_lib.Attempt) -> dict[str, float]:
    """The content of METRICS, which need not be there; DamagedError if it is not what was written."""
    if format_lib.METRICS not in attempt.marks:
        return {}
    content = _read_file(attempt, format_lib.METRICS)
    return _parse(attempt, format_lib.METRICS, content, schema.metrics)


def array_metas(meta: dict[str, Any]) -> arrays_lib.ArrayMetas:
    """The arrays of a description, by path."""
    return {path: _array_meta(entry) for path, entry in meta["arrays"].items()}


def _array_meta(entry: dict[str, Any]) -> arrays_lib.ArrayMeta:
    sums = entry.get("sums")
    return arrays_lib.ArrayMeta(
        shape=tuple(entry["shape"]),
        dtype=entry["dtype"],
        chunk_shape=tuple(entry["chunk_shape"]),
        key_impl=entry.get("key_impl"),
        sharding=entry.get("sharding", ""),
        sums=None if sums is None else tuple(sums),
    )


def _read_summed(attempt: format_lib.Attempt, name: str, commit: dict[str, Any]) -> bytes:
    """Reads a file; DamagedError if it has not the checksum that COMMIT has of it."""
    content = _read_file(attempt, name)
    if format_lib.checksum(content) != commit["sha256"].get(name):
        raise DamagedError(f"{attempt}/{name} is not what was written (its checksum differs).")
    return content


def _read_file(attempt: format_lib.Attempt, name: str) -> bytes:
    try:
        content = attempt.store.read(attempt.prefix + name)
    except format_lib.CheckpointError as e:
        raise UnreadableError(f"{attempt}/{name} cannot be read: {e}.") from e
    if content is None:
        raise DamagedError(f"{attempt}/{name} is missing.")
    return content


def _parse(
    attempt: format_lib.Attempt, name: str, content: bytes, parse: Callable[[bytes], Any]
) -> Any:
    try:
        return parse(content)
    except format_lib.CheckpointError as e:
        raise format_lib.CheckpointError(f"{attempt}/{name} {e}") from e
    except ValueError as e:
        raise DamagedError(f"{attempt}/{name} is not what was written: {e}.") from e
