"""Writes what a run has trained to a file, of a kind that the end of its name says."""

import importlib.util
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from xshard import checkpoint, errors
from xshard import mesh as mesh_lib
from xshard import trained as trained_lib
from xshard.export import program
from xshard.files import disk, tensors
from xshard.metrics import show

PROGRAM = ".stablehlo"


def write(
    trained: trained_lib.Trained,
    to: str | pathlib.Path,
    *,
    batch: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    arguments: bool = False,
    select: str = checkpoint.BY_DEFAULT,
    overwrite: bool = False,
) -> str:
    """Writes a trained model to a file: it is whole, or what it was.

    Args:
      trained: what `xshard.load` has returned.
      to: the file. One that ends in '.safetensors' has the arrays by their paths, as a checkpoint has them, and
        `--init_from` takes it. One that ends in '.stablehlo' has `Experiment.predict` as `jax.export.deserialize` reads
        it, a function of the batch, with the arrays in it.
      batch: arrays, or their shapes, by name, of a batch that `predict` takes; by default the one that `samples` asks
        about, or training examples. Of those only what the prediction depends on is an argument.
      batch_size: the rows of a batch; by default any number, which is refused where a network depends on it.
      arguments: whether the function takes the arrays, too, as its first argument: those of the .safetensors by path.
      select: which arrays those are, a regular expression of paths; by default the parameters and the network's state of
        each learner.
      overwrite: whether the file may be there already.

    Returns:
      What was written, in words.

    Raises:
      UserError: if the file's kind is unknown, it is there already or cannot be written, if the extra is not
        installed, or if the prediction does not lower.
    """
    path = pathlib.Path(to)
    _check(path, overwrite)
    arrays = _arrays(trained, select)
    if path.suffix == tensors.SUFFIX:
        groups = mesh_lib.num_groups(trained.state.step.sharding.mesh)
        tensors.write(path, arrays, {checkpoint.GROUPS: str(groups if groups > 1 else 0)})
        size = sum(x.nbytes for x in arrays.values())
        return f"{path}: {len(arrays)} arrays, {show.scaled(size, 'B')}"
    exported, names = program.export(trained, batch, batch_size, arrays if arguments else {})
    content = bytes(exported.serialize())
    with disk.writing(path):
        disk.replace(path, content)
    outputs = ", ".join(str(x) for x in exported.out_avals)
    return (
        f"{path}: predict of {', '.join(names) or 'no array'} -> {outputs}, for {', '.join(exported.platforms)}; "
        f"{show.scaled(len(content), 'B')}"
    )


def _check(path: pathlib.Path, overwrite: bool) -> None:
    if path.suffix not in (tensors.SUFFIX, PROGRAM):
        raise errors.UserError(
            f"--to={path} must end in {tensors.SUFFIX}, for the arrays, or in {PROGRAM}, for the prediction."
        )
    if path.suffix == PROGRAM and importlib.util.find_spec("flatbuffers") is None:
        raise errors.UserError(
            "flatbuffers is not installed, by which jax.export writes a program: pip install '.[export]', or "
            "'xshard[export]'."
        )
    if not path.parent.is_dir():
        raise errors.UserError(f"--to={path}: there is no directory {path.parent}; make it.")
    if path.is_dir() or (path.exists() and not overwrite):
        raise errors.UserError(
            f"--to={path} is there already: give another name, delete it, or say --overwrite."
        )


def _arrays(trained: trained_lib.Trained, select: str) -> dict[str, np.ndarray]:
    """The selected arrays of the state, by path, on the host."""
    leaves = checkpoint.flatten(program.whole(trained))
    paths = checkpoint.selected(select, leaves, "--select")
    if not paths:
        raise errors.UserError(
            f"--select='{select}' matches none of the paths of this run, such as {', '.join(list(leaves)[:5])}."
        )
    keys = [p for p in paths if jax.numpy.issubdtype(leaves[p].dtype, jax.dtypes.prng_key)]
    if keys:
        raise errors.UserError(
            f"--select='{select}' matches {keys[0]!r}, a key of JAX's: narrow it."
        )
    return {path: np.asarray(jax.device_get(leaves[path])) for path in paths}
