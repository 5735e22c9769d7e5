"""Gradients reduced across replicas."""

import enum
from collections.abc import Sequence
from typing import Any

import haiku as hk
import jax
from absl import logging
from jax import lax

from xshard import mesh
from xshard.optimizers import base, trees
from xshard.optimizers import optax as optax_optimizer


class Reduction(enum.StrEnum):
    """How gradients combine across replicas. Source: `tf.compat.v1.losses.Reduction`."""

    SUM = "sum"
    MEAN = "mean"


class CrossShardOptimizer(base.OptimizerWrapper):
    """Sums gradients over the replicas of a group, then lets `opt` update.

    `compute_gradients` leaves the gradients per replica, so that each can be clipped before one bad
    replica hurts the rest; `apply_gradients` sums them. As in TensorFlow, 'mean' puts the factor
    1 / group size into `compute_gradients`, and a clip must reckon with it: a bound of 1 on the norm
    of the mean is a bound of 1 / group size here. The factor is applied in float32, after
    differentiation, so that half precision neither overflows in the sum nor loses small gradients to
    the factor. The value that `compute_gradients` returns is the replica's own loss.

    Call it where `axis_name` is mapped, such as in `jax.shard_map`; while `hk.running_init()` that is
    not needed. Elsewhere there is one replica, which is logged once. Replicas of a group stay equal bit
    by bit. Groups go separate ways, so that their parameters and states must not be returned from
    shard_map as replicated: give them a leading dimension.

    Source: `tf.compat.v1.tpu.CrossShardOptimizer`.

    >>> def step(params, x):
    ...     opt = CrossShardOptimizer(optax.sgd(0.5))
    ...     return opt.minimize(lambda p: jnp.sum(p['linear']['w'] * x), params)
    >>> step = hk.transform_with_state(step)
    >>> params, x = {'linear': {'w': jnp.zeros(())}}, jnp.arange(4.)
    >>> _, state = step.init(None, params, x)
    >>> mesh = jax.sharding.Mesh(jax.devices()[:4], ('replica',))
    >>> @jax.shard_map(mesh=mesh, in_specs=(jax.P(), jax.P(), jax.P('replica')), out_specs=jax.P())
    ... def sharded_step(params, state, x):
    ...     (_, params), state = step.apply({}, state, None, params, x)
    ...     return params, state
    >>> params, state = sharded_step(params, state, x)
    >>> print(params['linear']['w'])
    -0.75
    """

    def __init__(
        self,
        opt: Any,
        reduction: str = Reduction.MEAN,
        name: str = "CrossShardOptimizer",
        group_assignment: Sequence[Sequence[int]] | None = None,
        *,
        axis_name: str = "replica",
    ):
        """Wraps an optimizer.

        Args:
          opt: an `Optimizer` or an optax transformation.
          reduction: 'sum' or 'mean'.
          name: the module's name.
          group_assignment: the replica numbers of each group, such as [[0, 2], [1, 3]]: each replica
            once, groups of one size. All replicas are one group by default.
          axis_name: the mapped axis that the replicas are along.

        Raises:
          ValueError: for a reduction, groups or an opt other than these, or an `opt` that already
            reduces over this axis.
        """
        super().__init__(name=name)
        self.opt = optax_optimizer.as_optimizer(opt)
        self.axis_name: str = axis_name
        if reduction not in tuple(Reduction):
            raise ValueError(f"reduction must be 'sum' or 'mean'; received {reduction!r}.")
        if not isinstance(axis_name, str):
            raise ValueError(f"axis_name must be the name of one axis; received {axis_name!r}.")
        for inner in base.unwrap(self.opt):
            if isinstance(inner, CrossShardOptimizer) and inner.axis_name == axis_name:
                raise ValueError(
                    f"opt already reduces over the axis {axis_name!r} ({inner.name}): the gradients "
                    "would be summed twice. Use one CrossShardOptimizer for each axis."
                )
        self.reduction = Reduction(reduction)
        self.group_assignment = mesh.check_groups(group_assignment)

    @hk.transparent
    def compute_gradients(
        self, loss: Any, params: trees.Params, **kwargs: Any
    ) -> tuple[Any, trees.Gradients]:
        """As `Optimizer.compute_gradients`: per replica, times 1 / group size for 'mean'."""
        group_size = self._group_size()
        value, grads = self.opt.compute_gradients(loss, self._per_replica(params), **kwargs)
        if self.reduction is Reduction.MEAN and group_size > 1:
            grads = jax.tree.map(lambda g: trees.widen(g) / group_size, grads)
        return value, grads

    def aggregate(self, grads: trees.Gradients) -> trees.Gradients:
        """As `Optimizer.aggregate`: sums over the group, in float32 or wider."""
        grads = self.opt.aggregate(grads)
        if self._group_size() == 1:
            return grads
        try:
            return lax.psum(
                jax.tree.map(trees.widen, grads),
                self.axis_name,
                axis_index_groups=self.group_assignment,
            )
        except NotImplementedError as e:
            raise ValueError(
                f"group_assignment={self.group_assignment} needs jax.shard_map(..., check_vma=False): "
                "JAX has no grouped psum where it checks which values vary, nor under vmap."
            ) from e

    def _per_replica(self, params: trees.Params) -> trees.Params:
        # Where JAX tracks which values vary (check_vma=True), the gradient of a parameter that does
        # not vary comes back summed over the axis already, and would then be summed twice.
        if self._num_replicas() == 1:
            return params
        return jax.tree.map(lambda p: _varying(p, self.axis_name), params)

    def _group_size(self) -> int:
        groups = self.group_assignment
        return self._num_replicas() if groups is None or hk.running_init() else len(groups[0])

    def _num_replicas(self) -> int:
        """The size of the mapped axis; 1 outside of it."""
        if hk.running_init():
            return 1
        groups = self.group_assignment
        replicas = self._axis_size()
        if groups is not None and replicas != len(groups) * len(groups[0]):
            raise ValueError(
                f"group_assignment={groups} is for {len(groups) * len(groups[0])} replicas, but the "
                f"axis {self.axis_name!r} has {replicas}; it must hold each replica once."
            )
        return replicas

    def _axis_size(self) -> int:
        try:
            return lax.axis_size(self.axis_name)
        except NameError:
            mapped = jax.sharding.get_abstract_mesh().manual_axes
        if mapped:
            raise ValueError(
                f"CrossShardOptimizer reduces over the axis {self.axis_name!r}, but the mapped axes "
                f"here are {mapped}; pass axis_name=, or map {self.axis_name!r}."
            )
        logging.log_first_n(
            logging.WARNING,
            "CrossShardOptimizer is used where no axis %r is mapped: assuming one replica.",
            1,
            self.axis_name,
        )
        return 1


def _varying(x: Any, axis_name: str) -> Any:
    # Under vmap and pmap there is nothing to mark.
    is_manual = axis_name in jax.sharding.get_abstract_mesh().manual_axes
    if not is_manual or axis_name in jax.typeof(x).manual_axis_type.varying:
        return x
    return lax.pcast(x, axis_name, to="varying")
