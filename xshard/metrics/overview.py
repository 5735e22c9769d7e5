"""An overview for people: the model, how its parameters lie on the devices, and the steps."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import ml_collections

from xshard import mesh as mesh_lib
from xshard.metrics import show
from xshard.optimizers import trees

# Of a table that is not to be shown whole.
_LINES = 24


def model(
    config: ml_collections.ConfigDict, mesh: jax.sharding.Mesh, params: Any, *, whole: bool
) -> str:
    """A line on the run, and a table with a line for each array of the parameters and one for all.

    Args:
      config: the run's config.
      mesh: the run's mesh.
      params: a tree of arrays, of which those of several groups have a leading dimension of groups.
      whole: whether all lines are to be shown, or of many the first and the last.
    """
    leaves = trees.leaves_by_path(params)
    total = sum(leaf.size for leaf in leaves.values())
    title = f"{config.experiment}: {total:,} parameters, {config.precision}, on "
    head, *lines = show.table([_row(path, leaf) for path, leaf in leaves.items()]).splitlines()
    nbytes = show.scaled(sum(leaf.nbytes for leaf in leaves.values()), "B")
    device = show.scaled(sum(map(_device_bytes, leaves.values())), "B")
    last = f"{total:,} parameters in {len(leaves)} arrays, {nbytes}; {device} on each device"
    shown = lines if whole else show.shortened(lines, _LINES)
    return "\n".join([title + mesh_lib.describe(mesh), head, *shown, last])


def plan(start: int, steps: int) -> str:
    """A line on the steps that are to be made."""
    if start < steps:
        return f"training from step {start} to {steps}; the first step compiles"
    if start > steps:
        return f"nothing to train: steps={steps}, and {start} have been made"
    return f"all {steps} steps have been made"


def results(found: Mapping[str, Any]) -> str:
    """Says how a run has ended.

    Args:
      found: as they are in results.json.
    """
    lines = [f"  {name:<20} {show.number(value)}" for name, value in found["eval"].items()]
    samples = [f"\nsamples:\n{found['samples']}\n"] if found["samples"] else []
    return "\n".join(["\nresults:", *lines, *samples])


def _row(path: str, leaf: jax.Array) -> dict[str, Any]:
    return {
        "parameter": path,
        "shape": "x".join(map(str, leaf.shape)) or "scalar",
        "dtype": str(leaf.dtype),
        "axes": _axes(leaf),
        "size": f"{leaf.size:,}",
    }


def _axes(leaf: jax.Array) -> str:
    """The mesh axis of each dimension, such as 'group,-,model'; an array that is whole on each device: '-'."""
    spec = getattr(leaf.sharding, "spec", ())
    names = ["+".join(axis) if isinstance(axis, tuple) else axis or "-" for axis in spec]
    if all(name == "-" for name in names):
        return "-"
    return ",".join([*names, *("-" for _ in range(leaf.ndim - len(names)))])


def _device_bytes(leaf: jax.Array) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
