"""An overview for people: the model, how its parameters lie on the devices, and the steps."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_collections

from xshard import mesh as mesh_lib
from xshard.metrics import show

# Of a table that is not to be shown whole.
_LINES = 24


def begin(
    config: ml_collections.ConfigDict,
    mesh: jax.sharding.Mesh,
    params: Mapping[str, jax.Array],
    changes: Sequence[str],
    *,
    whole: bool,
) -> str:
    """Says what begins, or goes on: as `model`, and a line for each of what has changed since it was started."""
    changed = [f"changed since the run was started: {change}" for change in changes]
    return "\n".join([model(config, mesh, params, whole=whole), *changed])


def model(
    config: ml_collections.ConfigDict,
    mesh: jax.sharding.Mesh,
    params: Mapping[str, jax.Array],
    *,
    whole: bool,
) -> str:
    """A line on the run, and a table with a line for each array of the parameters and one for all.

    Args:
      config: the run's config.
      mesh: the run's mesh.
      params: by path; of several groups they have a leading dimension of groups.
      whole: whether all lines are to be shown, or of many the first and the last.
    """
    rows = []
    size = all_bytes = device_bytes = 0
    for path, leaf in params.items():
        rows.append(_row(path, leaf))
        size += leaf.size
        all_bytes += leaf.nbytes
        # Each device holds one shard of each array.
        shard = leaf.sharding.shard_shape(leaf.shape)
        device_bytes += math.prod(shard) * leaf.dtype.itemsize
    place = mesh_lib.describe(mesh)
    title = f"{config.experiment}: {size:,} parameters, {config.precision}, on {place}"
    head, *lines = show.table(rows).splitlines()
    if not whole:
        lines = show.shortened(lines, _LINES)
    everywhere, device = show.scaled(all_bytes, "B"), show.scaled(device_bytes, "B")
    last = f"{size:,} parameters in {len(params)} arrays, {everywhere}; {device} on each device"
    return "\n".join([title, head, *lines, last])


def plan(start: int, steps: int, store: Any, end: str = "") -> str:
    """Says from where, in a store, a run goes on, and which steps are to be made; none if it has ended, for `end`."""
    text = f"all {steps} steps have been made"
    if end:
        text = f"nothing to train: the run has ended at step {start}: {end}"
    elif start < steps:
        text = f"training from step {start} to {steps}; the first step compiles"
    elif start > steps:
        text = f"nothing to train: steps={steps}, and {start} have been made"
    return f"resumed from the checkpoint of step {start} in {store}\n{text}" if start else text


def results(values: Mapping[str, Any]) -> str:
    """Says how a run has ended.

    Args:
      values: as they are in results.json.
    """
    lines = ["\nresults:"]
    for name, value in values["eval"].items():
        lines.append(f"  {name:<20} {show.number(value)}")
    if "ended" in values:
        lines.append(f"  ended at step {values['step']}: {values['ended']}")
    if values["samples"]:
        lines.append(f"\nsamples:\n{values['samples']}\n")
    return "\n".join(lines)


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
    # A sharding names the axes of the first dimensions only, if the others have none.
    names = ["-"] * leaf.ndim
    for dim, axis in enumerate(getattr(leaf.sharding, "spec", ())):
        if axis:
            names[dim] = axis if isinstance(axis, str) else "+".join(axis)
    if set(names) <= {"-"}:
        return "-"
    return ",".join(names)
