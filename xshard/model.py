"""The pure functions of an experiment: its network, and one update of it by its rules."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import jmp

from xshard import contract, errors
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard.optimizers import (
    base,
    cross_shard,
    gradients,
    loss_scale,
    moving_average,
    phases,
    trees,
)
from xshard.optimizers import layouts as layouts_lib

Batch = Mapping[str, Any]
# Of gradients, and of parameters.
NORMS = ("gradient_norm", "parameter_norm")


class Update(NamedTuple):
    """The result of an update on a replica.

    Attributes:
      params: the new parameters.
      net_state: the new state of the network, the replica's own.
      global_step: the number of updates applied.
      metrics: the replica's own.
      shares: where replicas have shards of the gradients, numbers of the replica's own, of which a norm's
        square is the mean over the replicas and what is in `squares`.
      squares: the squares of norms, or the rest of them; equal on all replicas of a group, as are `agreed`.
      agreed: further metrics.
      nonfinite: for each parameter how many elements of its gradient are not finite; where replicas have shards of
        the gradients, of the replica's own.
      lowered: whether the update has lowered a loss scale.
    """

    params: Any
    net_state: Any
    global_step: Any
    metrics: dict[str, Any]
    shares: dict[str, Any]
    squares: dict[str, Any]
    agreed: dict[str, Any]
    nonfinite: Any
    lowered: Any


class _SkipNonfinite(base.OptimizerWrapper):
    """Leaves out each step with a gradient that is not finite, as a dynamic loss scale does; has no state."""

    def __init__(self, opt: base.Optimizer):
        super().__init__()
        self.opt = opt

    def vote(self, grads: trees.Gradients) -> Any:
        """Implements `Optimizer.vote`."""
        finite, opt_vote = loss_scale.all_finite(grads), self.opt.vote(grads)
        return finite if opt_vote is True else jnp.logical_and(finite, opt_vote)

    def get_name(self) -> str:
        """The wrapped rule's."""
        return self.opt.get_name()


class Model:
    """The computations of a replica, as functions of trees."""

    def __init__(
        self,
        experiment: experiment_lib.Experiment,
        mesh: jax.sharding.Mesh,
        *,
        skip_nonfinite: bool = False,
    ):
        """Keeps what an experiment provides.

        Args:
          experiment: the experiment.
          mesh: a mesh of `xshard.mesh.make_mesh`.
          skip_nonfinite: whether an update leaves out gradients that are not finite, whatever the rule does.
        """
        self.experiment = experiment
        self._mesh = mesh
        self._skip_nonfinite = skip_nonfinite
        self.policy = jmp.get_policy(experiment.config.precision)
        self._micro_batches = experiment.config.micro_batches
        self._method = gradients.method(experiment.config.aggregation_method)
        self._network = hk.transform_with_state(experiment.forward)
        self._rules = hk.transform_with_state(self._update)

    def init(
        self, key: jax.Array, example: Batch, *, all_slots: bool = False
    ) -> tuple[Any, Any, Any]:
        """Parameters, network state, and state of the rules, all whole.

        Args:
          key: the key of all randomness.
          example: an example, of which only names, types and shapes count.
          all_slots: makes slots for what is not trained, too.
        """
        params, net_state = self.init_network(key, example)
        example = self.policy.cast_to_param(example)
        rules = hk.transform_with_state(self._update_all) if all_slots else self._rules
        with contract.rules(self.experiment):
            _, opt_state = rules.init(key, params, net_state, jnp.int32(0), example)
        return params, net_state, opt_state

    def init_network(self, key: jax.Array, example: Batch) -> tuple[Any, Any]:
        """Parameters, and network state."""
        example = self.policy.cast_to_param(example)
        with contract.network(self.experiment, is_training=True):
            params, net_state = self._network.init(key, example, is_training=True)
        contract.parameters(self.experiment, params)
        return self.policy.cast_to_param(params), net_state

    def forward(
        self, params: Any, net_state: Any, key: Any, batch: Batch, is_training: bool
    ) -> tuple[Any, Any]:
        """Outputs in the output type, and the new network state."""
        params, inputs = self.policy.cast_to_compute((params, batch))
        with contract.network(self.experiment, is_training=is_training):
            outputs, new_state = self._network.apply(
                params, net_state, key, inputs, is_training=is_training
            )
        outputs = contract.outputs(self.experiment, outputs)
        contract.network_state(self.experiment, net_state, new_state)
        new_state = jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, net_state)
        return self.policy.cast_to_output(outputs), new_state

    def update(
        self, params: Any, net_state: Any, opt_state: Any, global_step: Any, key: Any, batch: Batch
    ) -> tuple[Update, Any]:
        """One update on a replica's part of the batch: what it makes, and the new state of the rules."""
        with contract.rules(self.experiment):
            return self._rules.apply({}, opt_state, key, params, net_state, global_step, batch)

    def loss(
        self, params: Any, net_state: Any, key: jax.Array, batch: Batch
    ) -> tuple[jax.Array, Any]:
        """The loss of a replica's part of a batch, and the new network state."""
        loss = lambda: self._loss(params, net_state, batch, hk.next_rng_key(), 1)
        value, (new_state, _) = hk.transform(loss).apply({}, key)
        return value, new_state

    def layouts(self, params: Any, opt_state: Any) -> Mapping[str, layouts_lib.Layouts]:
        """Returns how the state of the rules is sharded over replicas: `{module: {name: layout}}`.

        Args:
          params: the parameters of one group, or their shapes.
          opt_state: the state of one group's rules, or its shapes: whole, or as it is stored.
        """
        count = self._mesh.shape[mesh_lib.REPLICA]
        of_params = layouts_lib.of_params(params, count, self.experiment.sharding_rules())
        is_sharded = lambda: any(rule.shard_update for rule in _reducing(self._optimizer()))
        slots = hk.transform(is_sharded).apply({}, None)
        return layouts_lib.of_state(
            of_params, opt_state, mesh_lib.num_slices(self._mesh), slots=slots
        )

    def averaged(self, params: Any, opt_state: Any) -> Any | None:
        """The averages of the parameters, a tree of their structure; None if the rules keep none.

        Args:
          params: the parameters; what is not trained is its own average.
          opt_state: the state of the rules, its arrays whole.
        """
        name = self.averages_module()
        return None if name is None else moving_average.averages(opt_state[name], params)

    def averages_module(self) -> str | None:
        """The name under which the rules keep averages of the parameters; None if they do not."""
        find = lambda: [
            rule.module_name
            for rule in base.held(self._optimizer())
            if isinstance(rule, moving_average.MovingAverageOptimizer)
        ]
        return next(iter(hk.transform(find).apply({}, None)), None)

    def _optimizer(self) -> base.Optimizer:
        opt = contract.optimizer(self.experiment)
        where = contract.method(self.experiment, "optimizer")
        _check_reduces(where, opt, self._mesh)
        for rule in _reducing(opt):
            rule.lie_on(self._mesh, self.experiment.sharding_rules())
        if self._skip_nonfinite:
            _check_skips(opt)
            opt = _SkipNonfinite(opt)
        return opt

    def _update(self, params: Any, net_state: Any, global_step: Any, batch: Batch) -> Update:
        opt = self._optimizer()
        parts = 1 if hk.running_init() else self._micro_batches
        keys = jnp.stack([hk.next_rng_key() for _ in range(parts)])
        value_of = lambda params, x: self._loss(params, net_state, x[0], x[1], parts)
        if parts == 1:
            loss: Any = lambda params: value_of(params, (batch, keys[0]))
        else:
            split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), dict(batch))
            loss = gradients.MicroBatches(value_of, (split, keys))
        (value, aux), grads = opt.compute_gradients(
            loss,
            params,
            gate_gradients=base.Optimizer.GATE_NONE,
            aggregation_method=self._method,
            has_aux=True,
        )
        grads = self.experiment.clip_gradients(grads)
        scales = _loss_scales(opt)
        done = _apply(opt, grads, params, global_step)
        net_state, metrics = aux if parts == 1 else jax.tree.map(_mean_over_parts, aux)
        metrics = {**metrics, "loss": value}
        shares, squares = _norms(done)
        new_scales = _loss_scales(opt)
        agreed = {"loss_scale": new_scales[0]} if new_scales else {}
        lowered = jnp.asarray(False)
        for old, new in zip(scales, new_scales, strict=True):
            lowered |= new < old
        nonfinite = _count_nonfinite(done)
        return Update(
            done.params,
            net_state,
            done.global_step,
            metrics,
            shares,
            squares,
            agreed,
            nonfinite,
            lowered,
        )

    def _update_all(self, *args: Any) -> Update:
        """Does as `_update`, with a gradient for each parameter in the update of each rule."""
        with hk.intercept_methods(_with_all_gradients):
            return self._update(*args)

    def _loss(
        self, params: Any, net_state: Any, batch: Batch, key: jax.Array, parts: int
    ) -> tuple[jax.Array, Any]:
        outputs, new_state = self.forward(params, net_state, key, batch, True)
        value, metrics = contract.loss(self.experiment, outputs, batch)
        return value / parts, (new_state, metrics)


def _with_all_gradients(
    method: Callable[..., Any], args: Any, kwargs: Any, context: hk.MethodContext
) -> Any:
    """Calls a method; for an update, the parameters stand for their gradients: only shapes count."""
    if not isinstance(context.module, base.Optimizer) or context.method_name != "update":
        return method(*args, **kwargs)
    params = kwargs["params"] if "params" in kwargs else args[-1]
    return method(params, params)


def _loss_scales(opt: base.Optimizer) -> list[jax.Array]:
    return [
        rule.loss_scale()
        for rule in base.held(opt)
        if isinstance(rule, loss_scale.MixedPrecisionLossScaleOptimizer)
    ]


def _apply(opt: base.Optimizer, grads: Any, params: Any, global_step: Any) -> phases.Applied:
    if type(opt).apply_gradients is base.Optimizer.apply_gradients:
        return opt.apply(grads, params, global_step)
    # What it has aggregated is its own.
    params, global_step = opt.apply_gradients(grads, params, global_step)
    return phases.Applied(params, None, global_step, None, None, None)


def _reducing(opt: base.Optimizer) -> list[cross_shard.CrossShardOptimizer]:
    return [rule for rule in base.held(opt) if isinstance(rule, cross_shard.CrossShardOptimizer)]


def _count_nonfinite(applied: phases.Applied) -> jax.Array:
    """Counts the elements of each gradient that are not finite, of a parameter without a gradient none, in float32.

    In the type of the norms, which come of the same arrays: what is summed of both goes in one reduction.
    """
    if applied.grads is None:
        return jnp.zeros((0,), jnp.float32)
    grads = trees.leaves_by_path(applied.grads).values()
    none = jnp.zeros((), jnp.float32)
    return jnp.stack([none if grad is None else _number_nonfinite(grad) for grad in grads])


def _number_nonfinite(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(jnp.isfinite(x), jnp.float32(0), jnp.float32(1)))


def _norms(applied: phases.Applied) -> tuple[dict[str, Any], dict[str, Any]]:
    """`shares` and `squares` of the gradients of an update, and of the parameters that it has made."""
    if applied.grads is None:
        return {}, {}
    trees_of = (applied.grads, applied.new_params)
    if applied.partition is None:
        return {}, dict(zip(NORMS, map(trees.sum_of_squares, trees_of), strict=True))
    shares, squares = zip(*map(applied.partition.sums_of_squares, trees_of), strict=True)
    return dict(zip(NORMS, shares, strict=True)), dict(zip(NORMS, squares, strict=True))


def _check_reduces(where: str, opt: base.Optimizer, mesh: jax.sharding.Mesh) -> None:
    reducing = _reducing(opt)
    over = {axis for rule in reducing for axis in (rule.axis_name, rule.slice_axis_name)}
    wanted = {mesh_lib.REPLICA, *([mesh_lib.SLICE] if mesh_lib.num_slices(mesh) > 1 else [])}
    missing = sorted(wanted - over)
    if missing:
        argument = "axis_name" if mesh_lib.REPLICA in missing else "slice_axis_name"
        raise errors.UserError(
            f"{where} returned {' around '.join(rule.name for rule in base.held(opt))}, which does not "
            f"reduce over the axis '{missing[0]}': replicas would drift apart. Wrap it in a "
            f"CrossShardOptimizer with {argument}='{missing[0]}'."
        )
    for rule in reducing:
        if rule.shard_update and rule.axis_name != mesh_lib.REPLICA:
            raise errors.UserError(
                f"{rule.name} shards its update over the axis '{rule.axis_name}'; a run's state is sharded over "
                f"'{mesh_lib.REPLICA}'. Set shard_update on the CrossShardOptimizer over that axis."
            )
        if rule.slice_dtype == "int8" and mesh_lib.num_slices(mesh) == 1:
            raise errors.UserError(cross_shard.NOTHING_BETWEEN_SLICES)


def _check_skips(opt: base.Optimizer) -> None:
    if type(opt).apply_gradients is not base.Optimizer.apply_gradients:
        raise errors.UserError(
            f"on_nonfinite='skip' cannot be used with {type(opt).__name__}, whose apply_gradients is its own and "
            "would not be called: it votes as `Optimizer.apply_gradients` has it. Implement vote and update "
            "instead, or set on_nonfinite to 'stop' or 'warn'."
        )


def _mean_over_parts(x: jax.Array) -> jax.Array:
    """The mean of floating-point values; of others, such as counts, the last."""
    return jnp.mean(x, axis=0) if jnp.issubdtype(x.dtype, jnp.inexact) else x[-1]
