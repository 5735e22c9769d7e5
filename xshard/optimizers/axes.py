"""The mapped axes around the call of a rule: sizes, and which arrays vary over them.

An axis may be mapped by `jax.shard_map`, with or without check_vma, by `jax.vmap` or by
`jax.pmap`. Only with check_vma=True does JAX track which arrays vary over it.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from absl import logging
from jax import lax

from xshard import errors
from xshard.base.jax_internals import tracing
from xshard.optimizers import trees


def size(axis_name: str, rule: str = "CrossShardOptimizer") -> int:
    """Returns the number of replicas along an axis.

    It is 1 while state is created, and where no axis is mapped.

    Args:
      axis_name: the axis.
      rule: the name of the rule that reduces over it, for messages.

    Raises:
      ValueError: if axes of devices are mapped, but not this one.
    """
    if hk.running_init():
        return 1
    try:
        return lax.axis_size(axis_name)
    except NameError:
        # JAX's error for a name that is not mapped.
        pass
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual:
        raise ValueError(
            f"{rule} reduces over the axis {axis_name!r}, but the mapped axes here are "
            f"{manual}; pass axis_name=, or map {axis_name!r}."
        )
    # JAX has no public function that lists the axes that vmap or pmap map.
    names = tracing.mapped_axis_names()
    if names:
        # A warning, not an error: a vmap may train one replica for each of several
        # seeds.
        _warn(
            f"{rule} reduces over the axis {axis_name!r}, which is not mapped here: "
            f"assuming one replica. These axes are mapped: {names}. If the replicas "
            "are along one of them, pass axis_name=, or nothing is reduced over them."
        )
    else:
        _warn(
            f"{rule} is used where no axis {axis_name!r} is mapped: assuming one "
            "replica."
        )
    return 1


@functools.cache
def _warn(message: str) -> None:
    """Logs a warning once: a chain may have rules over several axes."""
    logging.warning(message)


def group_size(axis_name: str, groups: Sequence[Sequence[int]] | None) -> int:
    """Returns the number of replicas in a group along an axis.

    It is 1 while state is created, and where no axis is mapped.

    Args:
      axis_name: the axis.
      groups: the replica numbers of each group along it; None if all replicas are one
        group.

    Raises:
      ValueError: if the groups are not for this number of replicas.
    """
    replicas = size(axis_name)
    if groups is None or hk.running_init():
        return replicas
    grouped = len(groups) * len(groups[0])
    if replicas != grouped:
        raise ValueError(
            f"group_assignment={groups} is for {grouped} replicas, but the axis "
            f"{axis_name!r} has {replicas}; it must hold each replica once."
        )
    return len(groups[0])


def is_tracked(axis_name: str) -> bool:
    """Returns whether JAX tracks which arrays vary over an axis.

    `jax.shard_map` with check_vma=True does.
    """
    # The replica's number varies wherever JAX tracks that.
    return axis_name in _varies_over(lax.axis_index(axis_name))


def mark_varying(tree: Any, axis_name: str) -> Any:
    """Returns the same arrays, marked for JAX as varying over an axis.

    `jax.grad` sums the gradient of an unmarked parameter over the axis.

    Args:
      tree: arrays.
      axis_name: the axis. If it is not mapped, nothing is marked.
    """
    # Under vmap and pmap JAX does not track varying arrays, so there is nothing to
    # mark.
    if axis_name not in jax.sharding.get_abstract_mesh().manual_axes:
        return tree

    def mark(x: Any) -> Any:
        if axis_name in _varies_over(x):
            return x
        return lax.pcast(jnp.asarray(x), axis_name, to="varying")

    return jax.tree.map(mark, tree)


def check_varying(grads: trees.Gradients, axis_name: str) -> None:
    """Raises ValueError if a gradient does not vary over an axis.

    A sum over the axis would count it once for each replica.
    """
    if not is_tracked(axis_name):
        return
    for path, grad in trees.present(grads).items():
        if axis_name in _varies_over(grad):
            continue
        raise ValueError(
            f"The gradient of '{path}' does not vary over the axis {axis_name!r}, so "
            "it is not a replica's own, and a sum over the replicas would count it "
            "once for each. With check_vma=True jax.grad has already summed it, if the "
            "parameters do not vary. Take the gradients from compute_gradients, or "
            "differentiate with respect to jax.lax.pcast(params, "
            f"{axis_name!r}, to='varying')."
        )


def check_own(state: Mapping[str, Any], axis_name: str, rule: str) -> None:
    """Raises UserError if JAX tracks that state is equal along an axis of slices.

    Args:
      state: the arrays of a rule whose state differs by slice.
      axis_name: the axis.
      rule: the name of the rule, for messages.
    """
    mapped = jax.sharding.get_abstract_mesh().manual_axes
    if axis_name not in mapped or not is_tracked(axis_name):
        return
    for name, x in state.items():
        if axis_name not in _varies_over(x):
            raise errors.UserError(
                f"{rule}: the state {name!r} is equal along the axis {axis_name!r}, "
                "along which slices train apart. Give parameters and state a leading "
                f"dimension, one entry for each slice, with jax.P({axis_name!r}) in "
                "in_specs and out_specs of jax.shard_map."
            )


def _varies_over(x: Any) -> frozenset[str]:
    return frozenset(jax.typeof(jnp.asarray(x)).manual_axis_type.varying)
