"""Reads a checkpoint that counts, and names what is damaged in one that does not hold what it should."""

import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from xshard.checkpoint import format as format_lib

# As messages of a mismatch name leaves.
_SHOWN = 5


class DamagedError(format_lib.CheckpointError):
    """A checkpoint that counts but does not hold what was written."""


def read_meta(attempt: format_lib.Attempt) -> dict[str, Any]:
    """The description of a checkpoint, after its checksums have been verified.

    Raises:
      DamagedError: if a file is missing or not what was written.
      CheckpointError: if it is of a version that this code does not know.
    """
    try:
        commit = json.loads((attempt.path / format_lib.COMMIT).read_bytes())
        for name, wanted in commit["sha256"].items():
            if format_lib.checksum(attempt.path / name) != wanted:
                raise DamagedError(
                    f"{attempt.path / name} is not what was written (its checksum differs)."
                )
        meta = json.loads((attempt.path / format_lib.META).read_bytes())
        if (commit["step"], commit["attempt"]) != (attempt.step, attempt.nonce):
            raise DamagedError(f"{attempt.path / format_lib.COMMIT} is another checkpoint's.")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        if isinstance(e, DamagedError):
            raise
        raise DamagedError(f"{attempt.path} cannot be read: {type(e).__name__}: {e}.") from e
    if meta["version"] != format_lib.VERSION:
        raise format_lib.CheckpointError(
            f"{attempt.path} has format version {meta['version']}; this code reads {format_lib.VERSION}."
        )
    return meta


def read(attempt: format_lib.Attempt, target: Any) -> tuple[Any, dict[str, Any]]:
    """Reads a checkpoint into the structure, types and shardings of `target`.

    Args:
      attempt: a checkpoint that counts.
      target: a tree of `jax.ShapeDtypeStruct` with shardings, or of arrays.

    Returns:
      The tree, and the metadata that was saved with it.

    Raises:
      DamagedError: if something is not what was written.
      CheckpointError: if the checkpoint has another structure, shape or type than the target.
    """
    meta = read_meta(attempt)
    stored = array_metas(meta)
    wanted = format_lib.flatten(target)
    _check_same(attempt, stored, {name: format_lib.describe(leaf) for name, leaf in wanted.items()})
    values = dict(read_arrays(attempt, {name: stored[name] for name in wanted}))
    leaves = [
        _place(values[name], leaf.sharding, stored[name].key_impl) for name, leaf in wanted.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(target), leaves), meta["metadata"]


def array_metas(meta: dict[str, Any]) -> dict[str, format_lib.ArrayMeta]:
    """The arrays of a description, by path."""
    return {
        name: format_lib.ArrayMeta(tuple(entry["shape"]), entry["dtype"], entry["key_impl"])
        for name, entry in meta["arrays"].items()
    }


def read_arrays(
    attempt: format_lib.Attempt, arrays: dict[str, format_lib.ArrayMeta]
) -> Iterator[tuple[str, np.ndarray]]:
    """Reads arrays, each with its path; PRNG keys as their data.

    Raises:
      DamagedError: at the first that is not what was written.
    """
    context, database = format_lib.context(), format_lib.database(attempt.path)
    futures = {
        name: ts.open(meta.spec(database, name), open=True, context=context)
        for name, meta in arrays.items()
    }
    for name, future in futures.items():
        yield name, _read_array(attempt, name, future)


def _read_array(attempt: format_lib.Attempt, name: str, opening: Any) -> np.ndarray:
    try:
        return np.asarray(opening.result().read().result())
    except (ValueError, OSError) as e:
        reason = str(e).split(" [source locations")[0]
        raise DamagedError(f"'{name}' in {attempt.path} is not what was written: {reason}.") from e


def _place(value: np.ndarray, sharding: Any, key_impl: str | None) -> jax.Array:
    if key_impl:
        key = jax.random.wrap_key_data(jnp.asarray(value), impl=key_impl)
        return jax.device_put(key, sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _check_same(
    attempt: format_lib.Attempt,
    stored: dict[str, format_lib.ArrayMeta],
    wanted: dict[str, format_lib.ArrayMeta],
) -> None:
    problems = [f"'{name}' is missing in it" for name in sorted(wanted.keys() - stored.keys())]
    problems += [f"'{name}' is only in it" for name in sorted(stored.keys() - wanted.keys())]
    problems += [
        f"'{name}' is {_show(stored[name])} in it, {_show(wanted[name])} here"
        for name in sorted(stored.keys() & wanted.keys())
        if stored[name] != wanted[name]
    ]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise format_lib.CheckpointError(
            f"{attempt.path} is of another model or optimizer: {'; '.join(problems[:_SHOWN])}{more}. "
            "Restore it with the config it was saved with, or use a new directory."
        )


def _show(meta: format_lib.ArrayMeta) -> str:
    return f"{meta.key_impl or meta.dtype}{list(meta.shape)}"
