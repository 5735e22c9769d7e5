"""What a run prints about itself: its parameters, its steps and its results."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_collections

from xshard import config as config_lib
from xshard import mesh as mesh_lib
from xshard.base import formatting

# The number of lines of a shortened table.
_LINES = 24


def begin(
    config: ml_collections.ConfigDict,
    mesh: jax.sharding.Mesh,
    params: Mapping[str, jax.Array],
    changes: Sequence[str] = (),
    *,
    whole: bool,
) -> str:
    """Describes a run: a title, a table of its parameters, and a line for each change.

    Args:
      config: the run's config.
      mesh: the run's mesh.
      params: the parameters by path; with several groups they have a leading dimension
        of groups.
      changes: what has changed since the run was started.
      whole: whether to show all lines of a long table, or only the first and the last
        ones.
    """
    rows = []
    size = 0
    all_bytes = 0
    device_bytes = 0
    for path, leaf in params.items():
        row = {
            "parameter": path,
            "shape": "x".join(map(str, leaf.shape)) or "scalar",
            "dtype": str(leaf.dtype),
            "axes": _axes(leaf),
            "size": f"{leaf.size:,}",
        }
        rows.append(row)
        size += leaf.size
        all_bytes += leaf.nbytes
        # Each device holds one shard of each array.
        shard = leaf.sharding.shard_shape(leaf.shape)
        device_bytes += math.prod(shard) * leaf.dtype.itemsize
    place = mesh_lib.describe(mesh)
    title = f"{config.experiment}: {size:,} parameters, {config.precision}, on {place}"
    head, *lines = formatting.table(rows).splitlines()
    if not whole:
        lines = formatting.shortened(lines, _LINES)
    total = (
        f"{size:,} parameters in {len(params)} arrays, "
        f"{formatting.scaled(all_bytes, 'B')}; "
        f"{formatting.scaled(device_bytes, 'B')} on each device"
    )
    outer = []
    if config_lib.separates_slices(config):
        outer.append(
            f"{mesh_lib.num_groups(mesh)} slice(s), each a group of the mesh with "
            "parameters of its own, train one model: they exchange every "
            f"{config.outer.every_steps} steps"
        )
    changed = [f"changed since the run was started: {change}" for change in changes]
    return "\n".join([title, head, *lines, total, *outer, *changed])


def plan(start: int, steps: int, store: Any, end: str = "") -> str:
    """Describes the checkpoint that a run resumes from, and the steps to train.

    Args:
      start: the step that the run starts or resumes from.
      steps: the number of steps of the run.
      store: where its checkpoints are.
      end: the reason why a callback has ended the run already; empty if none has.
    """
    text = f"all {steps} steps have been made"
    if end:
        text = f"nothing to train: the run has ended at step {start}: {end}"
    elif start < steps:
        text = f"training from step {start} to {steps}; the first step compiles"
    elif start > steps:
        text = f"nothing to train: steps={steps}, and the run has already made {start}"
    if not start:
        return text
    return f"resumed from the checkpoint of step {start} in {store}\n{text}"


def results(values: Mapping[str, Any]) -> str:
    """Formats the results of a run.

    Args:
      values: the contents of results.json.
    """
    lines = ["\nresults:"]
    for name, value in values["eval"].items():
        lines.append(f"  {name:<20} {formatting.number(value)}")
    if "ended" in values:
        lines.append(f"  ended at step {values['step']}: {values['ended']}")
    if values["samples"]:
        lines.append(f"\nsamples:\n{values['samples']}\n")
    return "\n".join(lines)


def _axes(leaf: jax.Array) -> str:
    """Returns the mesh axis of each dimension, such as 'group,-,model'.

    It is '-' for a replicated array.
    """
    # A spec may be shorter than the number of dimensions; the others have no axes.
    names = ["-"] * leaf.ndim
    for dim, axis in enumerate(getattr(leaf.sharding, "spec", ())):
        if axis:
            # A tuple of axes shards one dimension.
            names[dim] = axis if isinstance(axis, str) else "+".join(axis)
    if set(names) <= {"-"}:
        return "-"
    return ",".join(names)
