"""Writes a trained model to a file, in the format of the file name's suffix."""

import importlib.util
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from xshard import checkpoint, errors
from xshard import mesh as mesh_lib
from xshard import trained as trained_lib
from xshard.base import formatting
from xshard.checkpoint import conversion
from xshard.export import program
from xshard.files import disk, jsonfile, tensors
from xshard.learners import lora as lora_lib
from xshard.run import adaptations
from xshard.training import state as state_lib

PROGRAM = ".stablehlo"


def write(
    trained: trained_lib.Trained,
    to: str | pathlib.Path,
    *,
    batch: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    arguments: bool = False,
    select: str = checkpoint.BY_DEFAULT,
    merge_lora: bool = True,
    overwrite: bool = False,
    raw: bool = False,
    convert: checkpoint.Conversion | None = None,
) -> str:
    """Writes a trained model to a file.

    The write is atomic: on failure an existing file stays unchanged.

    Args:
      trained: the result of `xshard.load`.
      to: the file. With the suffix '.safetensors' it gets the arrays under their paths
        in a checkpoint; `--init_from` accepts it. With '.stablehlo' it gets
        `Experiment.predict`, a function of the batch with the arrays included, for
        `jax.export.deserialize`.
      batch: a batch for `predict`, as arrays or shapes by name; by default the batch
        that `samples` predicts, or training examples. Only arrays that the prediction
        depends on become arguments.
      batch_size: the number of rows of a batch; by default any number, which fails if
        the network depends on it.
      arguments: whether the function takes the arrays of the .safetensors, by path, as
        its first argument.
      select: a regular expression for the paths of these arrays; by default the
        parameters and network state of each learner.
      merge_lora: whether to add the products of low-rank matrices (see `xshard.lora`)
        to the parameters, if there are any. If not, they are arrays of their own.
      overwrite: whether to replace an existing file.
      raw: whether the arrays and the prediction are those of the parameters that
        train, also if the run evaluates others, such as averages.
      convert: the conversion by which the arrays of a .safetensors file get the names
        and forms of another program.

    Returns:
      A description of what was written.

    Raises:
      UserError: if the suffix is unknown, the file exists already or cannot be written,
        the extra is not installed, or the prediction cannot be lowered.
    """
    path = pathlib.Path(disk.expanded(to))
    _check(to, overwrite)
    is_count = type(batch_size) is int and batch_size >= 1
    if batch_size is not None and not is_count:
        raise errors.UserError(f"batch_size={batch_size!r} must be a number of rows.")
    state = trained.for_evaluation()
    whose = ""
    if state is not trained.state:
        whose = "; those that the run evaluates"
        if raw:
            _check_has_one_set(trained)
            state = state_lib.map_learners(
                lambda name, learner: learner.as_it_is(), trained.state
            )
            whose = "; those that train, not those that the run evaluates"
    note = ""
    if merge_lora and trained_lib.has_lora(state):
        state = trained_lib.with_merged_lora(state)
        note = ", low-rank matrices merged"
    is_program = path.suffix == PROGRAM
    if is_program and not arguments and select == checkpoint.BY_DEFAULT:
        # A prediction has what it reads, also where no learner has parameters.
        arrays = _arrays_of_prediction(state)
    else:
        arrays = _arrays(state, select)
    what = f"{path}: step {int(trained.state.step)}{note}{_nonfinite(arrays)}"
    if convert is not None:
        _check_converts(path, trained)
        arrays = conversion.to_hub(arrays, convert)
    if not is_program:
        groups = mesh_lib.num_groups(trained.state.step.sharding.mesh)
        if groups == 1:
            # The arrays then have no dimension of groups.
            groups = 0
        # Programs that read the hub's files ask for the format.
        notes = {"format": "pt"} if convert else {checkpoint.GROUPS: str(groups)}
        lora = adaptations.of(state)
        if lora:
            # Without it the low-rank matrices would not say what they mean.
            notes[lora_lib.METADATA] = jsonfile.dumps(lora)
        tensors.write(path, arrays, notes)
        size = sum(x.nbytes for x in arrays.values())
        return f"{what}, {len(arrays)} arrays, {formatting.scaled(size, 'B')}{whose}"
    arrays_given = arrays if arguments else {}
    chosen = trained._replace(state=state)
    exported, names = program.export(chosen, batch, batch_size, arrays_given)
    content = bytes(exported.serialize())
    with disk.writing(path, tensors.WRITE_ELSEWHERE):
        disk.replace(path, content)
    outputs = ", ".join(str(x) for x in exported.out_avals)
    return (
        f"{what}, predict of {', '.join(names) or 'no array'} -> {outputs}, for "
        f"{', '.join(exported.platforms)}; {formatting.scaled(len(content), 'B')}"
        f"{whose}"
    )


def _check_has_one_set(trained: trained_lib.Trained) -> None:
    """Raises UserError if the parameters that train are several."""
    for learner in state_lib.learners(trained.state).values():
        if learner.meta.outer_module:
            every = trained.experiment.config.outer.every_steps
            raise errors.UserError(
                f"raw: the slices of this run train apart (outer.every_steps={every}), "
                "so the parameters that train are each slice's own, of which no one "
                "model consists. Leave it out, for those of the last exchange; "
                "`xshard.load(run).state` has the arrays of all slices."
            )


def _check(to: str | pathlib.Path, overwrite: bool) -> None:
    """Raises UserError if a file cannot be exported to."""
    if "://" in str(to):
        raise errors.UserError(
            f"--to={to} is a URL, and files are written to local and mounted disks "
            "only: write one there, and copy it."
        )
    path = pathlib.Path(disk.expanded(to))
    if path.suffix not in (tensors.SUFFIX, PROGRAM):
        raise errors.UserError(
            f"--to={path} must end in {tensors.SUFFIX}, for the arrays, or in "
            f"{PROGRAM}, for the prediction."
        )
    if path.suffix == PROGRAM and importlib.util.find_spec("flatbuffers") is None:
        raise errors.UserError(
            "flatbuffers is not installed. jax.export needs it to write a program: pip "
            "install '.[export]', or 'xshard[export]'."
        )
    if not path.parent.is_dir():
        raise errors.UserError(
            f"--to={path}: there is no directory {path.parent}; create it."
        )
    if path.is_dir() or (path.exists() and not overwrite):
        raise errors.UserError(
            f"--to={path} already exists: give another name, delete it, or add "
            "--overwrite."
        )


def _check_converts(path: pathlib.Path, trained: trained_lib.Trained) -> None:
    """Raises UserError if a conversion cannot be used."""
    if path.suffix != tensors.SUFFIX:
        raise errors.UserError(
            f"--convert is for a {tensors.SUFFIX} file, and --to={path} is none."
        )
    groups = mesh_lib.num_groups(trained.state.step.sharding.mesh)
    if groups > 1:
        raise errors.UserError(
            f"--convert is for one model, and this run has {groups} groups: export "
            "without it, and take a group by --init_group in another run."
        )


def _nonfinite(arrays: Mapping[str, np.ndarray]) -> str:
    """Returns a part of the description that names the arrays that are not finite."""
    # A run may keep training on them, but hardly anyone wants to use them.
    paths = [path for path, x in arrays.items() if not checkpoint.is_finite(x)]
    if not paths:
        return ""
    return f", NOT FINITE ({formatting.listed(paths)})"


def _arrays_of_prediction(state: state_lib.TrainState) -> dict[str, np.ndarray]:
    """Returns the arrays of a state that a prediction may read, by path, on the host:
    those of learners, or all but random keys where there is none.
    """
    leaves = checkpoint.flatten(state)
    paths = checkpoint.selected(checkpoint.BY_DEFAULT, leaves, "--select")
    if not paths:
        is_key = lambda x: jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
        paths = [path for path, x in leaves.items() if not is_key(x)]
    return {path: np.asarray(jax.device_get(leaves[path])) for path in paths}


def _arrays(state: state_lib.TrainState, select: str) -> dict[str, np.ndarray]:
    """Returns the selected arrays of a state, by path, on the host."""
    leaves = checkpoint.flatten(state)
    paths = checkpoint.selected(select, leaves, "--select")
    if not paths and select == checkpoint.BY_DEFAULT:
        raise errors.UserError(
            "This run has no learner, whose parameters and network state are exported "
            "by default: choose among its arrays by --select. They are "
            f"{formatting.listed(list(leaves))}."
        )
    if not paths:
        raise errors.UserError(
            f"--select='{select}' matches none of the paths of this run, such as "
            f"{', '.join(list(leaves)[:5])}."
        )
    for path in paths:
        if jax.numpy.issubdtype(leaves[path].dtype, jax.dtypes.prng_key):
            raise errors.UserError(
                f"--select='{select}' matches {path!r}, a JAX random key: narrow it."
            )
    return {path: np.asarray(jax.device_get(leaves[path])) for path in paths}
