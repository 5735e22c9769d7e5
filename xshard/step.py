"""The steps that advance and judge a state: pure functions, not jitted.

A step runs on every device under `jax.shard_map` over the axes `group`, `slice` and `replica`: the
replica's gradients are computed from its part of the batch, reduced over its group and voted on by the
experiment's optimizer.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xshard import contract, nonfinite
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import model as model_lib
from xshard import state as state_lib

Batch = model_lib.Batch
TrainState = state_lib.TrainState


def make_train_step(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """The function that takes a state and a batch to the next state and metrics.

    Jit it with `donate_argnums=0`. The batch lies along ('group', 'slice', 'replica'). Metrics are float32 and
    int32 scalars, means over the replicas, or one for each of several groups: 'loss', 'skipped' (1 if
    the step was not applied), 'global_step', 'loss_scale' (as the step leaves it) if the optimizer
    scales losses, 'gradient_norm', 'parameter_norm', and the experiment's own.

    The norms are the square roots of the sums of the squares of all elements: of the group's gradients,
    reduced and unscaled, as the rules' update is given them; and of the parameters that the step leaves.
    In a step that was skipped for gradients that are not finite the first is not finite. Where all replicas
    have these arrays whole, no collective is for the norms. Where the update is sharded, each replica's share
    of their squares goes with the other metrics. For what lies along 'model' XLA adds sums over that.

    With the experiment that `Experiment` shows:

    >>> mesh, batch = xshard.make_mesh(devices=jax.devices()[:4]), line.train_data()
    >>> state = xshard.init(line, mesh, 0, batch)
    >>> train_step = jax.jit(xshard.make_train_step(line, mesh), donate_argnums=0)
    >>> for _ in range(50):
    ...     state, metrics = train_step(state, batch)
    >>> print(int(state.step), metrics['loss'] < 1e-3, state.params['linear']['w'].round(1))
    50 True [[3.]]
    """
    watched_step = make_watched_step(experiment, mesh)
    return lambda state, batch: watched_step(state, batch)[:2]


def make_watched_step(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, *, skip_nonfinite: bool = False
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array], nonfinite.Observed]]:
    """Makes what `make_train_step` does; the function also returns whether the step was finite.

    Args:
      experiment: the experiment.
      mesh: a mesh of `xshard.mesh.make_mesh`.
      skip_nonfinite: whether a step with a gradient that is not finite is left out, whatever the rule does.
    """
    grouped = mesh_lib.num_groups(mesh) > 1
    model = model_lib.Model(experiment, mesh, skip_nonfinite=skip_nonfinite)

    def local_step(
        state: TrainState, batch: Batch
    ) -> tuple[TrainState, dict[str, jax.Array], nonfinite.Observed]:
        old = _one_group(state) if grouped else state
        made, opt_state = model.update(
            old.params, old.net_state, old.opt_state, old.global_step, _step_key(old), batch
        )
        applied = made.global_step != old.global_step
        # All in one collective.
        net_state, metrics, shares, bad = _mean_over_replicas(
            (made.net_state, made.metrics, made.shares, made.nonfinite if made.shares else None)
        )
        observed = _observe(applied, metrics["loss"], bad if made.shares else made.nonfinite, made)
        net_state = jax.tree.map(functools.partial(jnp.where, applied), net_state, old.net_state)
        metrics |= {name: _norm(x, shares.get(name)) for name, x in made.squares.items()}
        metrics |= {**made.agreed, "skipped": jnp.int32(~applied), "global_step": made.global_step}
        new = TrainState(old.step + 1, made.global_step, made.params, net_state, opt_state, old.rng)
        if grouped:
            return _with_group(new), _add_dim(metrics), _add_dim(observed)
        return new, metrics, observed

    def train_step(
        state: TrainState, batch: Batch
    ) -> tuple[TrainState, dict[str, jax.Array], nonfinite.Observed]:
        state_spec = state_lib.specs(model, mesh, state, manual=True)
        per_group = jax.P(mesh_lib.GROUP) if grouped else jax.P()
        mapped = _map(
            local_step,
            mesh,
            in_specs=(state_spec, jax.P(mesh_lib.BATCH)),
            out_specs=(state_spec, per_group, per_group),
        )
        return mapped(state, batch)

    return train_step


def make_eval_step(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Callable[[TrainState, Batch], dict[str, jax.Array]]:
    """The function that takes a state and a batch to sums over the batch's examples.

    The batch lies along ('slice', 'replica'), equal for all groups; its rows where '_mask' is False do not count.
    The result has the sum of each value of `experiment.evaluate`, and 'count'; with several groups
    there is one of each per group, and for the outputs of `experiment.ensemble` 'ensemble/<name>'. Where the
    rules keep averages of the parameters, 'average/<name>' is what these give.

    With the experiment that `Experiment` shows, not trained:

    >>> mesh, examples = xshard.make_mesh(devices=jax.devices()[:4]), line.eval_data()
    >>> state = xshard.init(line, mesh, 0, examples)
    >>> mask = np.arange(64) < 60
    >>> sums = jax.jit(xshard.make_eval_step(line, mesh))(state, {**examples, '_mask': mask})
    >>> print(sums['count'], sums['error'] > 10)
    60.0 True
    """
    grouped = mesh_lib.num_groups(mesh) > 1
    model = model_lib.Model(experiment, mesh)

    def local_eval(nets: Any, batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
        params, averages, net_state = jax.tree.map(lambda x: x[0], nets) if grouped else nets
        batch = dict(batch)
        mask = batch.pop("_mask")
        forward = lambda params: model.forward(params, net_state, None, batch, False)[0]
        outputs = forward(params)
        evaluate = lambda outputs: contract.evaluate(experiment, outputs, batch, len(mask))
        values = {**evaluate(outputs), "count": mask}
        if averages is not None:
            of_averages = evaluate(forward(averages))
            values |= {f"average/{name}": value for name, value in of_averages.items()}
        sums = _masked_sums(values, mask)
        if not grouped:
            return sums, {}
        together = experiment.ensemble(lax.all_gather(outputs, mesh_lib.GROUP))
        ensemble = _masked_sums(evaluate(together), mask)
        return _add_dim(sums), {f"ensemble/{name}": value for name, value in ensemble.items()}

    per_group = jax.P(mesh_lib.GROUP) if grouped else jax.P()
    mapped = _map(
        local_eval,
        mesh,
        in_specs=(per_group, jax.P(mesh_lib.REPLICAS)),
        out_specs=(per_group, jax.P()),
    )

    def eval_step(state: TrainState, batch: Batch) -> dict[str, jax.Array]:
        averages = state_lib.averaged(model, mesh, state)
        sums, ensemble = mapped((state.params, averages, state.net_state), batch)
        return {**sums, **ensemble}

    return eval_step


def make_predict(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh
) -> Callable[[TrainState, Batch], Any]:
    """The function that takes a state and a batch to the network's outputs, equal on all devices.

    The batch is equal on all devices, too. With several groups the outputs are those of
    `experiment.ensemble`.
    """
    grouped = mesh_lib.num_groups(mesh) > 1
    model = model_lib.Model(experiment, mesh)

    def local_predict(nets: Any, batch: Batch) -> Any:
        params, net_state = jax.tree.map(lambda x: x[0], nets) if grouped else nets
        outputs, _ = model.forward(params, net_state, None, batch, False)
        return experiment.ensemble(lax.all_gather(outputs, mesh_lib.GROUP)) if grouped else outputs

    per_group = jax.P(mesh_lib.GROUP) if grouped else jax.P()
    mapped = _map(local_predict, mesh, in_specs=(per_group, jax.P()), out_specs=jax.P())
    return lambda state, batch: mapped((state.params, state.net_state), batch)


def _map(f: Callable[..., Any], mesh: jax.sharding.Mesh, **specs: Any) -> Callable[..., Any]:
    # Values that differ between groups are returned with a dimension of groups: nothing for the
    # check of varying values to find, and it knows no sums over groups.
    manual = {mesh_lib.GROUP, *mesh_lib.REPLICAS}
    return jax.shard_map(f, mesh=mesh, axis_names=manual, check_vma=False, **specs)


def _mean_over_replicas(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: lax.pmean(x, mesh_lib.REPLICAS) if jnp.issubdtype(x.dtype, jnp.inexact) else x,
        tree,
    )


def _observe(
    applied: jax.Array, loss: jax.Array, bad: jax.Array, made: model_lib.Update
) -> nonfinite.Observed:
    bad = bad > 0
    trouble = jnp.any(bad) | ~jnp.isfinite(loss)
    of_applied = jnp.where(trouble, nonfinite.TROUBLE, nonfinite.FINE)
    of_skipped = jnp.where(made.lowered, nonfinite.FINE, nonfinite.STUCK)
    verdict = jnp.where(applied, of_applied, of_skipped).astype(jnp.int32)
    return nonfinite.Observed(verdict, loss, bad)


def _norm(square: jax.Array, share: jax.Array | None) -> jax.Array:
    return jnp.sqrt(square if share is None else square + share).astype(jnp.float32)


def _masked_sums(values: Mapping[str, jax.Array], mask: jax.Array) -> dict[str, jax.Array]:
    wide = {name: value.astype(jnp.float32) for name, value in values.items()}
    sums = {name: jnp.sum(jnp.where(mask, value, 0)) for name, value in wide.items()}
    return lax.psum(sums, mesh_lib.REPLICAS)


def _step_key(state: TrainState) -> jax.Array:
    key = jax.random.fold_in(state.rng, state.step)
    for axis in (mesh_lib.GROUP, mesh_lib.REPLICAS):
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
