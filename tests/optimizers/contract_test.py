"""Tests that every optimizer of the table, in both rules, keeps the same contract."""

import dataclasses
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optimizers import harness, table
from xshard.optimizers import base
from xshard.optimizers import optax as optax_optimizer

STEPS = 4


@dataclasses.dataclass(frozen=True)
class Run:
    """A few steps in float64 on 8 replicas.

    Attributes:
      step: the transformed step.
      apply: the step on all replicas, jitted.
      inputs: the arguments of each step.
      compile_counts: the number of compilations until after each step.
      outputs: the results of each step.
    """

    step: Any
    apply: Any
    inputs: list[Any]
    compile_counts: list[int]
    outputs: list[Any]


@pytest.fixture(scope="module", params=table.NAMES)
def run(request):
    with jax.enable_x64(True):
        step = table.make_step(request.param)
        params = harness.params(np.float64)
        x = harness.batch(np.float64)
        _, state = step.init(None, params, x)
        apply = jax.jit(harness.replicated(step))
        inputs = []
        outputs = []
        compile_counts = []
        everywhere = jax.NamedSharding(harness.mesh(), jax.P())
        params, state, n, x = jax.device_put(
            (params, state, jnp.int32(0), x), everywhere
        )
        for _ in range(STEPS):
            inputs.append((params, state, x, n))
            (value, params, n), state = apply(params, state, x, n)
            outputs.append(((value, params, n), state))
            compile_counts.append(harness.compile_count())
        yield request.param, Run(step, apply, inputs, compile_counts, outputs)


def test_the_table_is_complete():
    left_out = (
        table.TAKES_THE_LOSS
        | table.TAKES_PER_EXAMPLE_GRADIENTS
        | table.NOT_AN_OPTIMIZER
        | table.DEPRECATED
    )
    listed = table.public_list()
    assert not listed - left_out - table.OPTIMIZERS.keys(), (
        "new in optax: add them to the table"
    )
    assert not left_out - listed, "gone from optax: remove them"


@pytest.mark.sample(9)
def test_eight_replicas_follow_the_bare_optimizer_on_the_whole_batch(run):
    name, run = run
    transformation = table.bare(name)
    params = harness.params(np.float64)
    x = harness.batch(np.float64)

    @jax.jit
    def bare(params, state):
        value, grads = jax.value_and_grad(harness.loss)(params, x)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = transformation.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    with jax.numpy_dtype_promotion("standard"):
        state = transformation.init(params)
    for (value, new, _), _ in run.outputs:
        expected_value, params, state = bare(params, state)
        # float64 keeps 16 digits. The sums of 8 parts differ in the last digits, and a
        # few steps of some rules amplify that.
        np.testing.assert_allclose(value, expected_value, rtol=1e-9)
        harness.assert_close(new, params, rtol=1e-8, atol=1e-10)
    assert int(run.outputs[-1][0][2]) == STEPS
    moved = [
        np.any(a != b)
        for a, b in zip(*map(jax.tree.leaves, (params, run.inputs[0][0])), strict=True)
    ]
    assert any(moved)


@pytest.mark.sample(9)
def test_a_sharded_run_matches_a_replicated_one(run):
    name, run = run
    make = table.make_optimizer(name, shard_update=True)
    step = harness.transform_step(make)
    inputs = jax.device_get(run.inputs[0])
    # 4 divides a dimension of every array. With 8 replicas each of them holds the (3,
    # 4) array and the vector of 4 whole. A few rules are enough to test that.
    also_with_eight = (
        "adafactor",
        "adamw",
        "chain",
        "contrib.muon",
        "contrib.prodigy",
        "lamb",
        "noisy_sgd",
        "novograd",
        *table.WRAPPED,
    )
    for replicas in (4, 8) if name in also_with_eight else (4,):
        sharded = harness.sharded(step, make, replicas)
        params, state, x, n = inputs
        for _ in range(STEPS):
            (value, params, n), state = sharded(params, state, x, n)
        expected = jax.device_get(run.outputs[-1])
        # float64 keeps 16 digits, and norms are summed in another order.
        harness.assert_close(
            ((value, params, n), state), expected, rtol=1e-8, atol=1e-10
        )


@pytest.mark.sample(9)
def test_one_device_without_jit_matches_eight_with_jit(run):
    _, run = run
    eager = harness.one_device(run.step)(
        *jax.device_put(run.inputs[1], jax.devices()[0])
    )
    # Under jit XLA fuses operations, which changes the rounding.
    harness.assert_close(eager, run.outputs[1], rtol=1e-8, atol=1e-10)


def test_no_step_recompiles(run):
    _, run = run
    assert len(set(run.compile_counts)) == 1 and run.compile_counts[0] > 0


def test_abstract_state_and_state_after_a_step_have_the_same_types(run):
    _, run = run
    params, state, x, _ = run.inputs[0]
    _, abstract = jax.eval_shape(run.step.init, None, params, x)
    types = lambda tree: jax.tree.map(
        lambda a: (a.shape, a.dtype, jax.typeof(a).weak_type), tree
    )
    assert types(abstract) == types(state)
    for _, after in run.outputs:
        assert types(after) == types(state)


def through_bytes(a):
    is_key = jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
    plain = np.asarray(jax.random.key_data(a) if is_key else a)
    back = np.frombuffer(plain.tobytes(), plain.dtype).reshape(plain.shape)
    return (
        jax.random.wrap_key_data(back, impl=jax.random.key_impl(a)) if is_key else back
    )


@pytest.mark.sample(9)
def test_the_state_survives_a_round_trip_through_plain_arrays(run):
    _, run = run
    again = run.apply(*jax.tree.map(through_bytes, run.inputs[2]))
    harness.assert_equal(again, run.outputs[2])


def test_a_skipped_step_changes_only_the_loss_scale(run):
    _, run = run
    params, state, x, n = run.inputs[2]
    (_, new, new_n), new_state = run.apply(params, state, x.at[0, 0].set(jnp.nan), n)

    def rest(state):
        kept = {name: x for name, x in state.items() if name != "dynamic_loss_scale"}
        # All slices count all steps, to exchange after the same ones.
        if "OuterOptimizer" in kept:
            slots = dict(kept["OuterOptimizer"])
            slots.pop("steps")
            kept["OuterOptimizer"] = slots
        return kept

    harness.assert_equal((new, new_n, rest(new_state)), (params, n, rest(state)))
    # Two finite steps raised the scale, and this one lowers it.
    scales = [
        float(s["dynamic_loss_scale"]["current_loss_scale"]) for s in (state, new_state)
    ]
    assert scales == [2**16, 2**15]


def averages_of(history):
    """Returns the moving averages of parameters, of which the first are the first."""
    average = history[0]
    for count, params in enumerate(history[1:], start=1):
        rate = max(1 - table.DECAY, 9 / (10 + count))
        average = jax.tree.map(
            lambda a, p, rate=rate: a - rate * (a - p), average, params
        )
    return average


def test_each_rule_has_its_parameters_for_evaluation_and_no_others(run):
    name, run = run
    # Slices have exchanged parameters after the second step, and would after the last.
    steps = 3
    (_, params, _), state = run.outputs[steps - 1]

    def evaluated(params):
        opt = table.make_optimizer(name)()
        defined = [rule.has_evaluation_params(params) for rule in base.all_rules(opt)]
        of_optax, *_ = base.rules_of_type(opt, optax_optimizer.OptaxOptimizer)
        return opt.evaluation_params(params), sum(defined), of_optax.state(params)

    transformed = hk.transform_with_state(evaluated)
    (found, count, inner), _ = transformed.apply({}, state, None, params)
    outputs = run.outputs[:steps]
    history = [run.inputs[0][0], *(output[0][1] for output in outputs)]
    if name.startswith("MovingAverageOptimizer"):
        expected = averages_of(history)
    elif name.startswith("OuterOptimizer"):
        expected = history[steps - 1]
    elif "schedule_free" in name:
        expected = optax.contrib.schedule_free_eval_params(inner, params)
    else:
        assert count == 0
        harness.assert_equal(found, params)
        return
    assert count == 1
    # Under jit XLA fuses operations, which changes the rounding.
    harness.assert_close(found, expected, rtol=1e-10)
    moved = map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(params))
    assert not all(moved)
