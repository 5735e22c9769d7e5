"""Writes one attempt: arrays, merge, description, and COMMIT as the very last thing."""

import dataclasses
import importlib.metadata
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from xshard.checkpoint import format as format_lib

# What is written in one transaction, which holds it in memory until it is committed.
_BATCH_BYTES = 128 << 20


def write(attempt: format_lib.Attempt, state: Any, metadata: dict[str, Any]) -> None:
    """Saves a tree of arrays as an attempt.

    Raises:
      CheckpointError: if it could not; then the attempt does not count.
    """
    if jax.process_count() > 1:
        raise format_lib.CheckpointError(
            f"{jax.process_count()} processes run, but checkpoints are written by one so far."
        )
    leaves = format_lib.flatten(state)
    arrays = {name: format_lib.describe(leaf) for name, leaf in leaves.items()}
    try:
        attempt.path.mkdir(parents=True)
        part = attempt.path / "p0"
        _write_arrays(part, arrays, {name: _to_host(leaf) for name, leaf in leaves.items()})
        _merge(attempt.path, [part], _expected_keys(arrays))
        _describe(attempt, arrays, metadata)
        _commit(attempt, sum(len(meta.keys(name)) for name, meta in arrays.items()))
    except (OSError, ValueError) as e:
        raise format_lib.CheckpointError(
            f"Step {attempt.step} could not be saved in {attempt.root}: {_reason(e)}. Earlier checkpoints "
            "are as they were."
        ) from e


def _to_host(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _write_arrays(
    part: pathlib.Path, arrays: dict[str, format_lib.ArrayMeta], values: dict[str, np.ndarray]
) -> None:
    context, database = format_lib.context(), format_lib.database(part)
    for batch in _batches(values):
        transaction = ts.Transaction(atomic=True)
        futures = [
            ts.open(
                arrays[name].spec(database, name),
                create=True,
                context=context,
                transaction=transaction,
            )
            for name in batch
        ]
        for name, future in zip(batch, futures, strict=True):
            # The write's own future resolves only when the transaction is committed.
            future.result().write(values[name]).copy.result()
        transaction.commit_async().result()


def _batches(values: dict[str, np.ndarray]) -> list[list[str]]:
    batches: list[list[str]] = []
    size = _BATCH_BYTES
    for name, value in values.items():
        size += value.nbytes
        if size > _BATCH_BYTES:
            batches.append([])
            size = value.nbytes
        batches[-1].append(name)
    return batches


def _expected_keys(arrays: dict[str, format_lib.ArrayMeta]) -> set[bytes]:
    return {key.encode() for name, meta in arrays.items() for key in meta.keys(name)}


def _merge(root: pathlib.Path, parts: list[pathlib.Path], expected: set[bytes]) -> None:
    """Makes one database of the parts; their data stays where it is."""
    context = format_lib.context()
    merged = ts.KvStore.open(format_lib.database(root), context=context).result()
    transaction = ts.Transaction(atomic=True)
    for part in parts:
        source = ts.KvStore.open(format_lib.database(part), context=context).result()
        source.experimental_copy_range_to(merged.with_transaction(transaction)).result()
    transaction.commit_async().result()
    found = set(merged.list().result())
    if found != expected:
        raise format_lib.CheckpointError(
            f"{len(expected - found)} keys are missing and {len(found - expected)} are too many, "
            f"such as {sorted(found ^ expected)[0].decode()}"
        )


def _describe(
    attempt: format_lib.Attempt,
    arrays: dict[str, format_lib.ArrayMeta],
    metadata: dict[str, Any],
) -> None:
    meta = {
        "version": format_lib.VERSION,
        "step": attempt.step,
        "processes": 1,
        "arrays": {name: dataclasses.asdict(meta) for name, meta in arrays.items()},
        "metadata": metadata,
        "written_with": {
            "jax": jax.__version__,
            "tensorstore": importlib.metadata.version("tensorstore"),
        },
    }
    _write_file(attempt.path / format_lib.META, format_lib.to_json(meta))


def _commit(attempt: format_lib.Attempt, keys: int) -> None:
    # All directories must be on the disk before the file that says so.
    for directory in [path for path in attempt.path.rglob("*") if path.is_dir()]:
        _sync_directory(directory)
    commit = {
        "step": attempt.step,
        "attempt": attempt.nonce,
        "keys": keys,
        "sha256": {
            name: format_lib.checksum(attempt.path / name)
            for name in (format_lib.META, format_lib.MANIFEST)
        },
    }
    _sync_directory(attempt.path)
    _sync_directory(attempt.root)
    _write_file(attempt.path / format_lib.COMMIT, format_lib.to_json(commit))


def _write_file(path: pathlib.Path, content: bytes) -> None:
    """Creates a file, whole or not at all, and fails if it is there."""
    kv = ts.KvStore.open({"driver": "file", "path": f"{path.parent}/"}).result()
    absent = kv.read(path.name).result().stamp.generation
    written = kv.write(path.name, content, if_equal=absent).result()
    if written.generation == b"" and path.read_bytes() != content:
        raise format_lib.CheckpointError(f"{path} appeared while this process wrote it")


def _sync_directory(path: pathlib.Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _reason(e: Exception) -> str:
    if isinstance(e, OSError):
        return f"{e.strerror or e} ({e.filename})" if e.filename else str(e.strerror or e)
    return str(e).split(" [source locations")[0].rstrip(".")
