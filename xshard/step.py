"""The state of a run and the step that advances it: pure functions, not jitted.

A step runs on every device under `jax.shard_map` over the axes `group` and `replica`: the replica's
gradients are computed from its part of the batch, reduced over its group and voted on by the
experiment's optimizer. With several groups all state but `step` and `rng` has a leading dimension of
groups, since groups go separate ways.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
from jax import lax

from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard.optimizers import base, cross_shard, gradients, loss_scale

Batch = Mapping[str, Any]

# The position in the root key's stream that belongs to initialisation; no step has this number.
_INIT = 2**32 - 1


class TrainState(NamedTuple):
    """All that a run needs to go on; what is not here is not resumed.

    Attributes:
      step: the number of steps made, an int32 scalar. It is also the position in the data.
      global_step: the number of updates applied, int32: a skipped step does not advance it.
      params: the network's parameters.
      net_state: the network's Haiku state.
      opt_state: the state of the update rules: slots, counts, loss scale.
      rng: the root key. The keys of a step are folded from it and the step's number.
    """

    step: Any
    global_step: Any
    params: Any
    net_state: Any
    opt_state: Any
    rng: Any


class _Model:
    """The pure functions of an experiment: the network, and one update by its rules."""

    def __init__(self, experiment: experiment_lib.Experiment):
        self.experiment = experiment
        self.policy = jmp.get_policy(experiment.config.precision)
        self.micro_batches = experiment.config.micro_batches
        self.network = hk.transform_with_state(experiment.forward)
        self.rules = hk.transform_with_state(self._update)

    def init(self, key: jax.Array, example: Batch) -> tuple[Any, Any, Any]:
        """Parameters, network state, and state of the rules."""
        example = self.policy.cast_to_param(example)
        params, net_state = self.network.init(key, example, is_training=True)
        params = self.policy.cast_to_param(params)
        _, opt_state = self.rules.init(key, params, net_state, jnp.int32(0), example)
        return params, net_state, opt_state

    def forward(
        self, params: Any, net_state: Any, key: Any, batch: Batch, is_training: bool
    ) -> tuple[Any, Any]:
        """Outputs in the output type, and the new network state."""
        params, inputs = self.policy.cast_to_compute((params, batch))
        outputs, new_state = self.network.apply(
            params, net_state, key, inputs, is_training=is_training
        )
        new_state = jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, net_state)
        return self.policy.cast_to_output(outputs), new_state

    def _update(self, params: Any, net_state: Any, global_step: Any, batch: Batch) -> Any:
        opt = self.experiment.optimizer()
        chain = base.unwrap(opt)
        _check_reduces(chain)
        parts = _split(batch, 1 if hk.running_init() else self.micro_batches)
        losses = [self._loss(net_state, part, len(parts), hk.next_rng_key()) for part in parts]
        # One loss alone is not wrapped: the barriers that order several would cost it fusions.
        one = len(losses) == 1
        (value, aux), grads = opt.compute_gradients(
            losses[0] if one else losses,
            params,
            gate_gradients=base.Optimizer.GATE_NONE,
            aggregation_method=gradients.AggregationMethod.EXPERIMENTAL_ACCUMULATE_N,
            has_aux=True,
        )
        grads = self.experiment.clip_gradients(grads)
        params, new_global_step = opt.apply_gradients(grads, params, global_step)
        net_state, metrics = _mean_over_parts([aux] if one else aux)
        metrics = {**metrics, "loss": value}
        for rule in chain:
            if isinstance(rule, loss_scale.MixedPrecisionLossScaleOptimizer):
                metrics["loss_scale"] = rule.loss_scale()
        return params, net_state, new_global_step, metrics

    def _loss(
        self, net_state: Any, batch: Batch, parts: int, key: jax.Array
    ) -> Callable[[Any], Any]:
        def loss(params: Any) -> tuple[jax.Array, Any]:
            outputs, new_state = self.forward(params, net_state, key, batch, True)
            value, metrics = self.experiment.loss(outputs, batch)
            return value / parts, (new_state, dict(metrics))

        return loss


def init(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, seed: int, example: Batch
) -> TrainState:
    """A run's first state, made where it belongs: no device holds more than its part.

    Args:
      experiment: the experiment.
      mesh: a mesh of `xshard.mesh.make_mesh`.
      seed: the seed of all randomness. Group g of several is initialised as a run of one group is with
        the key that is folded from the seed and g.
      example: a few examples, of which only names, types and the shapes of one count.
    """
    build = functools.partial(_build, _Model(experiment), mesh_lib.num_groups(mesh), seed, example)
    shardings = _shardings(experiment, mesh, jax.eval_shape(build))
    return jax.jit(build, out_shardings=shardings)()


def abstract_state(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, seed: int, example: Batch
) -> TrainState:
    """Shapes, types and shardings of what `init` returns, to restore a checkpoint into."""
    build = functools.partial(_build, _Model(experiment), mesh_lib.num_groups(mesh), seed, example)
    shapes = jax.eval_shape(build)
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        _shardings(experiment, mesh, shapes),
    )


def make_train_step(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """The function that takes a state and a batch to the next state and metrics.

    Jit it with `donate_argnums=0`. The batch lies along ('group', 'replica'). Metrics are float32 and
    int32 scalars, means over the replicas, or one for each of several groups: 'loss', 'skipped' (1 if
    the step was not applied), 'global_step', 'loss_scale' (as the step leaves it) if the optimizer
    scales losses, and the experiment's own.
    """
    grouped = mesh_lib.num_groups(mesh) > 1
    model = _Model(experiment)

    def local_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        old = _one_group(state) if grouped else state
        (params, net_state, global_step, metrics), opt_state = model.rules.apply(
            {}, old.opt_state, _step_key(old), old.params, old.net_state, old.global_step, batch
        )
        applied = global_step != old.global_step
        net_state, metrics = _mean_over_replicas((net_state, metrics))
        net_state = jax.tree.map(functools.partial(jnp.where, applied), net_state, old.net_state)
        metrics = {**metrics, "skipped": jnp.int32(~applied), "global_step": global_step}
        new = TrainState(old.step + 1, global_step, params, net_state, opt_state, old.rng)
        return (_with_group(new), _add_dim(metrics)) if grouped else (new, metrics)

    per_group = jax.P(mesh_lib.GROUP) if grouped else jax.P()
    state_spec = TrainState(jax.P(), *(per_group,) * 4, jax.P())
    return _map(
        local_step,
        mesh,
        in_specs=(state_spec, jax.P((mesh_lib.GROUP, mesh_lib.REPLICA))),
        out_specs=(state_spec, per_group),
    )


def make_eval_step(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Callable[[TrainState, Batch], dict[str, jax.Array]]:
    """The function that takes a state and a batch to sums over the batch's examples.

    The batch lies along 'replica', equal for all groups; its rows where '_mask' is False do not count.
    The result has the sum of each value of `experiment.evaluate`, and 'count'; with several groups
    there is one of each per group, and for the outputs of `experiment.ensemble` 'ensemble/<name>'.
    """
    grouped = mesh_lib.num_groups(mesh) > 1
    model = _Model(experiment)

    def local_eval(state: TrainState, batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
        state = _one_group(state) if grouped else state
        batch = dict(batch)
        mask = batch.pop("_mask")
        outputs, _ = model.forward(state.params, state.net_state, None, batch, False)
        sums = _masked_sums({**experiment.evaluate(outputs, batch), "count": mask}, mask)
        if not grouped:
            return sums, {}
        together = experiment.ensemble(lax.all_gather(outputs, mesh_lib.GROUP))
        ensemble = _masked_sums(experiment.evaluate(together, batch), mask)
        return _add_dim(sums), {f"ensemble/{name}": value for name, value in ensemble.items()}

    per_group = jax.P(mesh_lib.GROUP) if grouped else jax.P()
    mapped = _map(
        local_eval,
        mesh,
        in_specs=(TrainState(jax.P(), *(per_group,) * 4, jax.P()), jax.P(mesh_lib.REPLICA)),
        out_specs=(per_group, jax.P()),
    )
    return lambda state, batch: {k: v for sums in mapped(state, batch) for k, v in sums.items()}


def _map(f: Callable[..., Any], mesh: jax.sharding.Mesh, **specs: Any) -> Callable[..., Any]:
    # Values that differ between groups are returned with a dimension of groups: nothing for the
    # check of varying values to find, and it knows no sums over groups.
    manual = {mesh_lib.GROUP, mesh_lib.REPLICA}
    return jax.shard_map(f, mesh=mesh, axis_names=manual, check_vma=False, **specs)


def _build(model: _Model, groups: int, seed: int, example: Batch) -> TrainState:
    example = {name: jnp.asarray(array[:1]) for name, array in example.items()}
    root = jax.random.key(seed)
    init_key = jax.random.fold_in(root, _INIT)
    keys = jax.vmap(lambda group: jax.random.fold_in(init_key, group))(jnp.arange(groups))
    if groups > 1:
        trees = jax.vmap(lambda key: model.init(key, example))(keys)
        global_step = jnp.zeros((groups,), jnp.int32)
    else:
        trees, global_step = model.init(keys[0], example), jnp.int32(0)
    return TrainState(jnp.int32(0), global_step, *trees, root)


def _shardings(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, shapes: TrainState
) -> TrainState:
    place = functools.partial(mesh_lib.tree_shardings, mesh)
    rules = experiment.sharding_rules()
    everywhere = mesh_lib.sharding(mesh)
    return TrainState(
        everywhere,
        place(shapes.global_step, ()),
        place(shapes.params, rules),
        place(shapes.net_state, rules, slots=True),
        place(shapes.opt_state, rules, slots=True),
        everywhere,
    )


def _check_reduces(chain: list[base.Optimizer]) -> None:
    for rule in chain:
        if isinstance(rule, cross_shard.CrossShardOptimizer) and rule.axis_name == mesh_lib.REPLICA:
            return
    raise ValueError(
        f"The experiment's optimizer is {' around '.join(rule.name for rule in chain)}, which does not "
        f"reduce over the axis '{mesh_lib.REPLICA}': replicas would drift apart. Wrap it in a "
        "CrossShardOptimizer."
    )


def _split(batch: Batch, parts: int) -> list[Batch]:
    return [
        {name: array.reshape(parts, -1, *array.shape[1:])[i] for name, array in batch.items()}
        for i in range(parts)
    ]


def _mean_over_parts(aux: list[Any]) -> Any:
    """The mean of floating-point values; of others, such as counts, the last."""
    return jax.tree.map(
        lambda *xs: sum(xs) / len(xs) if jnp.issubdtype(xs[0].dtype, jnp.inexact) else xs[-1], *aux
    )


def _mean_over_replicas(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: lax.pmean(x, mesh_lib.REPLICA) if jnp.issubdtype(x.dtype, jnp.inexact) else x,
        tree,
    )


def _masked_sums(values: Mapping[str, jax.Array], mask: jax.Array) -> dict[str, jax.Array]:
    wide = {name: value.astype(jnp.float32) for name, value in values.items()}
    sums = {name: jnp.sum(jnp.where(mask, value, 0)) for name, value in wide.items()}
    return lax.psum(sums, mesh_lib.REPLICA)


def _step_key(state: TrainState) -> jax.Array:
    key = jax.random.fold_in(state.rng, state.step)
    for axis in (mesh_lib.GROUP, mesh_lib.REPLICA):
        key = jax.random.fold_in(key, lax.axis_index(axis))
    return key


def _one_group(state: TrainState) -> TrainState:
    return _map_groups(lambda x: x[0], state)


def _with_group(state: TrainState) -> TrainState:
    return _map_groups(lambda x: x[None], state)


def _map_groups(f: Callable[[Any], Any], state: TrainState) -> TrainState:
    mapped = jax.tree.map(f, state._replace(step=None, rng=None))
    return mapped._replace(step=state.step, rng=state.rng)


def _add_dim(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)
