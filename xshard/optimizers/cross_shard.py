"""The rule that reduces gradients across replicas."""

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import haiku as hk
import jax
from jax import lax

from xshard import errors
from xshard.base import arguments, mesh_axes
from xshard.optimizers import (
    axes,
    base,
    layouts,
    replica_calls,
    shards,
    trees,
)
from xshard.optimizers import optax as optax_optimizer

_DTYPES = ("float32", "bfloat16")
_ARITHMETIC = ("float", "exact")


class Reduction(enum.StrEnum):
    """How gradients are combined across replicas.

    Source: `tf.compat.v1.losses.Reduction`.
    """

    SUM = "sum"
    MEAN = "mean"


# The values of TensorFlow's constants of these names.
_OF_TENSORFLOW = {"weighted_sum": Reduction.SUM, "weighted_mean": Reduction.MEAN}


class CrossShardOptimizer(base.OptimizerWrapper):
    """Sums gradients over the replicas of a group, then lets `opt` update.

    `compute_gradients` returns each replica's gradients, so you can clip them before
    one bad replica affects the others; `apply_gradients` sums them. As in TensorFlow,
    'mean' multiplies by 1 / group size in `compute_gradients`. To bound the norm of the
    mean by 1, clip each replica's gradients to 1 / group size. The factor is applied in
    float32 after differentiation, so half precision neither overflows in the sum nor
    loses small gradients. The returned value is the replica's loss, without the factor.

    Gradients from another source must also be each replica's. Under
    `jax.shard_map(check_vma=True)`, `jax.grad` sums the gradients of parameters that do
    not vary over the axis, and this rule rejects them. With check_vma=False `jax.grad`
    does not sum them, and the rule cannot detect an earlier sum.

    Call it where `axis_name` is mapped, such as in `jax.shard_map`. Only
    `hk.running_init()` needs no mapped axis. Elsewhere it assumes one replica, and logs
    that once with the mapped axes. Replicas of a group stay equal, bit by bit. Groups
    diverge, so do not return their parameters and state from shard_map as replicated:
    give them a leading dimension.

    A run can shard the update over the replicas (ZeRO-1), and the parameters between
    steps (FSDP, ZeRO-3). It sums within a slice before it sends between slices (DCN).

    Source: `tf.compat.v1.tpu.CrossShardOptimizer`.

    >>> def step(params, x):
    ...     opt = CrossShardOptimizer(optax.sgd(0.5))
    ...     return opt.minimize(lambda p: jnp.sum(p['linear']['w'] * x), params)
    >>> step = hk.transform_with_state(step)
    >>> params, x = {'linear': {'w': jnp.zeros(())}}, jnp.arange(4.)
    >>> _, state = step.init(None, params, x)
    >>> mesh = jax.sharding.Mesh(jax.devices()[:4], ('replica',))
    >>> in_specs = jax.P(), jax.P(), jax.P('replica')
    >>> @jax.shard_map(mesh=mesh, in_specs=in_specs, out_specs=jax.P())
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
        reduction: str = "mean",
        name: str = "CrossShardOptimizer",
        group_assignment: Sequence[Sequence[int]] | None = None,
        *,
        axis_name: str = "replica",
        slice_axis_name: str | None = None,
        reduce_dtype: str = "float32",
        slice_dtype: str = "float32",
        arithmetic: str = "float",
        shard_update: bool = False,
        shard_params: bool = False,
        scatter_steps: Sequence[int] = (),
        gather_steps: Sequence[int] = (),
        sharding_rules: mesh_axes.ShardingRules = (),
    ):
        """Wraps an optimizer.

        Args:
          opt: an `Optimizer` or an optax transformation.
          reduction: 'sum' or 'mean'; or TensorFlow's 'weighted_sum' or 'weighted_mean',
            which are the same.
          name: the module's name.
          group_assignment: the replica numbers of each group, such as [[0, 2], [1, 3]].
            Each replica appears once, and all groups have one size. All replicas are
            one group by default.
          axis_name: the mapped axis of the replicas.
          slice_axis_name: the mapped axis of the slices of a pod, which a slower
            network connects. Each replica then sends only its shard of a sum to the
            other slices.
          reduce_dtype: the type in which gradients are summed over `axis_name`:
            'float32' (or wider, if a gradient is) or 'bfloat16', which halves the
            bytes.
          slice_dtype: the same for `slice_axis_name`.
          arithmetic: 'float'; or 'exact', which only a run with
            `config.logical_replicas` supports.
          shard_update: whether each replica updates only its shard of each array, holds
            only that shard's slots, and then gathers the shards of the new parameters.
            In a custom step this needs `xshard.vmap_replicas`.
          shard_params: whether each replica also holds only its shard of the parameters
            between steps, and a network gathers each parameter where it asks for it.
            Implies `shard_update`. Only a run's `Learner` supports it.
          scatter_steps: sizes whose product is the number of replicas. Sums are
            scattered in one step for each size, as along the axes of a torus. A run
            sets them from `xshard.mesh.torus_steps`.
          gather_steps: the same, to gather shards.
          sharding_rules: the parameters that lie along other mesh axes, as
            `xshard.mesh.tree_shardings` takes them. Those dimensions are not sharded
            again. A run passes the experiment's rules.

        Raises:
          ValueError: for an invalid argument, or an `opt` that already reduces over
            this axis.
        """
        super().__init__(name=name)
        self.opt = optax_optimizer.as_optimizer(opt)
        self.axis_name: str = axis_name
        self.slice_axis_name = slice_axis_name
        for argument, value in (
            ("shard_update", shard_update),
            ("shard_params", shard_params),
        ):
            is_good = isinstance(value, bool)
            arguments.check(argument, value, is_good, "True or False")
        self.shard_update = shard_update or shard_params
        self.shard_params = shard_params
        # How arrays lie in a step of one's own.
        self._own_placement = layouts.Placement(
            sharding_rules, scatter_steps, gather_steps
        )
        known = _OF_TENSORFLOW.get(reduction, reduction)
        known = arguments.one_of("reduction", known, tuple(Reduction))
        self.reduction = Reduction(known)
        self.reduce_dtype = arguments.one_of("reduce_dtype", reduce_dtype, _DTYPES)
        self.slice_dtype = arguments.one_of("slice_dtype", slice_dtype, _DTYPES)
        self.arithmetic = arguments.one_of("arithmetic", arithmetic, _ARITHMETIC)
        self.group_assignment = mesh_axes.check_groups(group_assignment)
        self._check_axes()

    def place(self, placement: layouts.Placement) -> None:
        """Implements `Optimizer.place`.

        Raises:
          UserError: if logical replicas cannot shard the update.
        """
        if self.shard_update and placement.is_logical:
            raise errors.UserError(
                f"{self.name} shards its update, which logical replicas cannot: they "
                "share devices, and make the same update on each of these. Set "
                "shard_update and shard_params to False, or config.logical_replicas to "
                "0."
            )
        if self.axis_name != mesh_axes.REPLICA:
            # The run's steps are those along the axis of its replicas.
            placement = dataclasses.replace(
                placement,
                scatter_steps=self._own_placement.scatter_steps,
                gather_steps=self._own_placement.gather_steps,
            )
        super().place(placement)

    def _check_axes(self) -> None:
        has_axis = isinstance(self.axis_name, str)
        if not has_axis or not isinstance(self.slice_axis_name, str | None):
            raise errors.UserError(
                "axis_name must be the name of one axis, and slice_axis_name another "
                f"or None; received {self.axis_name!r} and {self.slice_axis_name!r}."
            )
        if self.slice_axis_name == self.axis_name:
            raise errors.UserError(
                "axis_name and slice_axis_name must be two different axes; received "
                f"{self.axis_name!r} twice."
            )
        if self.slice_axis_name is None and self.slice_dtype != "float32":
            raise errors.UserError(
                f"slice_dtype={self.slice_dtype!r} is for sums over slices; give "
                "slice_axis_name too."
            )
        if self.slice_axis_name is not None and self.group_assignment is not None:
            raise errors.UserError(
                "group_assignment and slice_axis_name exclude each other: give groups "
                "a mapped axis of their own."
            )
        for inner in base.rules_of_type(self.opt, CrossShardOptimizer):
            if inner.axis_name in (self.axis_name, self.slice_axis_name):
                raise ValueError(
                    f"opt already reduces over the axis {inner.axis_name!r} "
                    f"({inner.name}): the gradients would be summed twice. Use one "
                    "CrossShardOptimizer for each axis."
                )
            if inner._may_scatter() and self._may_scatter():
                raise ValueError(
                    f"opt already scatters gradients ({inner.name}); set shard_update "
                    "and slice_axis_name on one CrossShardOptimizer."
                )

    def _may_scatter(self) -> bool:
        return self.shard_update or self.slice_axis_name is not None

    def compute_gradients(
        self, loss: Any, params: trees.Params, **kwargs: Any
    ) -> tuple[Any, trees.Gradients]:
        """Implements `Optimizer.compute_gradients`.

        The gradients are each replica's, times 1 / group size for 'mean', in float32 or
        wider then.
        """
        for axis in self._mapped_axes():
            # Otherwise jax.grad would sum the gradients over the axis, and `aggregate`
            # would sum them again.
            params = axes.mark_varying(params, axis)
        value, grads = self.opt.compute_gradients(loss, params, **kwargs)
        # An update that needs the loss must get the same one on all replicas.
        reduce_loss = replica_calls.on_each_replica(self._reduce_loss)
        for rule in base.rules_of_type(self.opt, optax_optimizer.OptaxOptimizer):
            rule.reduce_loss(reduce_loss)
        # Here rather than in `aggregate`, as TensorFlow does.
        count = self._num_summands()
        if self.reduction is Reduction.MEAN and count > 1:
            grads = jax.tree.map(lambda g: trees.widen(g) / count, grads)
        return value, grads

    def _reduce_loss(self, loss: jax.Array) -> jax.Array:
        """Returns the loss whose gradients `aggregate` returns.

        The mean over the group and all slices, or the sum.
        """
        mapped = self._mapped_axes()
        if not mapped:
            return loss
        with self._explaining_groups():
            total = lax.psum(
                trees.widen(loss),
                axis_name=tuple(mapped),
                axis_index_groups=self.group_assignment,
            )
        if self.reduction is Reduction.MEAN:
            return total / self._num_summands()
        return total

    def aggregate(self, grads: trees.Gradients) -> trees.Gradients:
        """Implements `Optimizer.aggregate`: sums over the group and all slices.

        The sums are float32 or wider, whatever type they are sent in. With a sharded
        update they are global arrays, of which each replica holds a shard.

        Raises:
          ValueError: for a gradient that is summed already, or complex in a type of
            real numbers; for an exact arithmetic outside a run; and for groups that do
            not fit the axis, or that JAX cannot sum over here.
        """
        grads = jax.tree.map(trees.widen, self.opt.aggregate(grads))
        if self.arithmetic != "float" and self._placement is None:
            raise ValueError(
                "An exact arithmetic needs a run with logical_replicas, which splits "
                "its step at the sums. In a custom step use 'float'."
            )
        if {self.reduce_dtype, self.slice_dtype} != {"float32"}:
            shards.check_real(grads, self.reduce_dtype, self.slice_dtype)
        with self._explaining_groups():
            if replica_calls.is_current():
                return self._reduce_mapped(grads)
            return self._reduce(grads)

    @contextlib.contextmanager
    def _explaining_groups(self) -> Iterator[None]:
        """Raises ValueError with a remedy if JAX cannot sum over the groups."""
        try:
            yield
        except NotImplementedError as e:
            raise ValueError(
                f"group_assignment={self.group_assignment} needs jax.shard_map(..., "
                "check_vma=False): JAX has no sums over groups where it checks which "
                "values vary, nor under vmap."
            ) from e

    def _reduce_mapped(self, grads: trees.Gradients) -> trees.Gradients:
        """Calls `_reduce` on each replica, where `vmap_replicas` maps them.

        The sums are global arrays: in shards on the replicas with `shard_update`, and
        whole otherwise.
        """
        partition = self._make_partition(grads)
        summands = trees.present(grads)
        summand_specs = {}
        shard_specs = {}
        for path in summands:
            layout = partition.layouts[path]
            shard_specs[path] = partition.spec(layout, manual=True)
            # The gradient of a parameter that is held in shards lies in shards already:
            # it is summed over `axis_name`. Any other is a replica's.
            summand_specs[path] = jax.P()
            if layout.shards_param:
                summand_specs[path] = shard_specs[path]
        keeps_shards = self.shard_update and partition.count > 1
        call = replica_calls.on_each_replica(
            functools.partial(self._reduce, keeps_shards=keeps_shards),
            in_specs=(summand_specs,),
            out_specs=shard_specs if keeps_shards else jax.P(),
        )
        return trees.replace(grads, call(summands))

    def _reduce(
        self, grads: trees.Gradients, *, keeps_shards: bool = False
    ) -> trees.Gradients:
        """Sums gradients over the group and all slices, on one replica.

        Args:
          grads: the replica's gradients.
          keeps_shards: whether to return only the replica's shards of the sums.
        """
        for axis in self._mapped_axes():
            axes.check_varying(grads, axis)
        slice_axis = self.slice_axis_name if self._num_slices() > 1 else None
        if slice_axis is None and not keeps_shards:
            if self._group_size() == 1:
                return grads
            psum = functools.partial(
                lax.psum,
                axis_name=self.axis_name,
                axis_index_groups=self.group_assignment,
            )
            if self.reduce_dtype == "float32":
                # One psum of the whole tree, so that XLA needs one collective for all
                # gradients.
                return psum(grads)
            return jax.tree.map(
                lambda x: shards.summed(psum, x, self.reduce_dtype), grads
            )

        # Within a slice each replica receives its shard of the sums, and sends only
        # that to the other slices.
        partition = self._make_partition(grads)
        scatter = lambda layout, x: partition.scatter(layout, x, self.reduce_dtype)
        sums = partition.map(scatter, grads)
        if slice_axis is not None:
            psum = functools.partial(lax.psum, axis_name=slice_axis)
            over_slices = lambda x: shards.summed(psum, x, self.slice_dtype)
            sums = jax.tree.map(over_slices, sums)
        if keeps_shards:
            return sums
        gather = lambda layout, x: partition.gather(layout, x, self.reduce_dtype)
        # The program does not show that what is gathered in steps is equal.
        return replica_calls.equal_on_replicas(partition.map(gather, sums))

    def partition(self, params: trees.Params) -> shards.Partition | None:
        """Implements `Optimizer.partition`.

        Parameters and slots are in shards with `shard_update` and more than one
        replica.

        Raises:
          ValueError: if the update is sharded where nothing can gather it: parameters
            in shards outside a run, groups, or replicas that `xshard.vmap_replicas`
            does not map.
        """
        if not self.shard_update:
            return None
        if self.shard_params and self._placement is None:
            raise ValueError(
                "shard_params needs a run, whose Learner gathers the parameters. In a "
                "custom step use shard_update."
            )
        if hk.running_init() or self._group_size() == 1:
            return None
        if self.group_assignment is not None:
            raise ValueError(
                "shard_update and group_assignment exclude each other: give groups a "
                "mapped axis of their own."
            )
        if replica_calls.is_current():
            return self._make_partition(params)
        # A run's step under `jax.shard_map` is only analyzed, or repeated to observe
        # its values.
        if self._placement is None:
            raise ValueError(
                "shard_update needs the replicas to be mapped by xshard.vmap_replicas, "
                "so that XLA can partition the update. Something else maps them here, "
                "as jax.shard_map does: use xshard.vmap_replicas with the same specs, "
                "or set shard_update=False."
            )
        return None

    def _make_partition(self, tree: Any) -> shards.Partition:
        """Returns how a tree like the parameters is sharded over a slice."""
        if axes.is_tracked(self.axis_name):
            raise ValueError(
                "shard_update and slice_axis_name need jax.shard_map(..., "
                "check_vma=False): gathered arrays are equal on all replicas, but "
                "JAX's check cannot infer that."
            )
        count = self._group_size()
        placement = self._placement or self._own_placement
        param_layouts = placement.layouts
        if not param_layouts:
            param_layouts = layouts.of_params(tree, count, placement.sharding_rules)
        return shards.Partition(
            param_layouts,
            count,
            self.axis_name,
            scatter_steps=placement.scatter_steps,
            gather_steps=placement.gather_steps,
        )

    def _mapped_axes(self) -> list[str]:
        """Returns the axes to sum over that have more than one replica or slice."""
        names = (self.axis_name, self.slice_axis_name)
        return [name for name in names if name is not None and axes.size(name) > 1]

    def _num_summands(self) -> int:
        """Returns the number of replicas whose gradients are summed."""
        return self._group_size() * self._num_slices()

    def _group_size(self) -> int:
        """Returns the number of replicas in a group, of one slice."""
        return axes.group_size(self.axis_name, self.group_assignment)

    def _num_slices(self) -> int:
        if self.slice_axis_name is None:
            return 1
        return axes.size(self.slice_axis_name)
