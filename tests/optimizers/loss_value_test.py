"""Tests of optax transformations whose update needs the loss, as `value=`."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from tests.optimizers import harness
from xshard import errors
from xshard.optimizers import base, cross_shard, gradients, loss_scale
from xshard.optimizers import optax as optax_optimizer

STEPS = 4
RULES = {
    "polyak_sgd": lambda: optax.polyak_sgd(max_learning_rate=0.5),
    "momo": lambda: contrib.momo(0.1),
    "momo_adam": lambda: contrib.momo_adam(0.1),
    "reduce_on_plateau": lambda: optax.chain(
        optax.adam(0.1), contrib.reduce_on_plateau(patience=1, cooldown=0, rtol=0.5)
    ),
    "in several steps": lambda: optax.MultiSteps(optax.polyak_sgd(0.5), 2),
}
MODES = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "sharded": {"shard_update": True},
    "half the precision": {"reduce_dtype": "bfloat16"},
}


def both_rules(name, options):
    rule = optax_optimizer.OptaxOptimizer(RULES[name](), name="opt")
    rule = cross_shard.CrossShardOptimizer(rule, **options)
    return loss_scale.MixedPrecisionLossScaleOptimizer(rule, 1024.0)


def on_the_whole_batch(name, weight):
    """Returns the parameters after steps of the transformation alone, in float64."""
    transformation = RULES[name]()
    params = harness.params(np.float64)
    x = harness.batch(np.float64)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(lambda p: weight * harness.loss(p, x))(params)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = transformation.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    with jax.numpy_dtype_promotion("standard"):
        state = transformation.init(params)
    for _ in range(STEPS):
        params, state = step(params, state)
    return params


def assert_follows(make, mode, name):
    """Checks that replicas with a rule train as a transformation on the whole batch."""
    replicas = 4
    with jax.enable_x64(True):
        step = harness.transform_step(make)
        run = harness.sharded(step, make, replicas)
        params = harness.params(np.float64)
        x = harness.batch(np.float64)
        _, state = step.init(None, params, x)
        count = 0
        for _ in range(STEPS):
            (_, params, count), state = run(params, state, x, count)
        expected = on_the_whole_batch(name, replicas if mode == "sum" else 1)
        # float64 has 16 digits, of which sums in another order and some rules lose
        # half; bfloat16 has 2 to 3.
        tolerance = 2e-2 if mode == "half the precision" else 1e-8
        harness.assert_close(params, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RULES)
def test_replicas_follow_the_transformation_on_the_whole_batch(name, mode):
    assert_follows(lambda: both_rules(name, MODES[mode]), mode, name)


class ByLayer(base.Optimizer):
    """A rule of one's own for the weights, and another for the biases."""

    def __init__(self, make):
        super().__init__(name="by_layer")
        self.rules = {name: make(name) for name in ("w", "b")}

    def update(self, grads, params):
        new = params
        for name, rule in self.rules.items():
            of_rule = lambda tree, name=name: {
                module: {key: x if key == name else None for key, x in arrays.items()}
                for module, arrays in tree.items()
            }
            new = rule.update(of_rule(grads), new)
        return new


class OfTheFirst(ByLayer):
    """The same, with the gradients of one of the rules."""

    def compute_gradients(self, loss, params, **kwargs):
        return self.rules["w"].compute_gradients(loss, params, **kwargs)


class ByItself(ByLayer):
    """The same, which differentiates by itself."""

    def compute_gradients(self, loss, params, *, grad_loss, **kwargs):
        value, grads = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda g: g * grad_loss.astype(g.dtype), grads)


class Around(base.OptimizerWrapper):
    """A wrapper of one of the rules that holds the other beside it."""

    def __init__(self, make):
        super().__init__(name="around")
        self.opt = make("w")
        self.other = make("b")
        self.by_layer = ByLayer({"w": self.opt, "b": self.other}.get)

    def update(self, grads, params):
        return self.by_layer.update(grads, params)


@pytest.mark.parametrize(
    "kind, mode",
    [
        *((ByLayer, mode) for mode in MODES),
        (OfTheFirst, "mean"),
        (ByItself, "sharded"),
        (Around, "mean"),
    ],
)
def test_each_rule_that_another_holds_gets_the_loss(kind, mode):
    def make():
        of_layer = lambda name: optax_optimizer.OptaxOptimizer(
            RULES["reduce_on_plateau"](), name=f"of_{name}"
        )
        rule = cross_shard.CrossShardOptimizer(kind(of_layer), **MODES[mode])
        return loss_scale.MixedPrecisionLossScaleOptimizer(rule, 1024.0)

    # Both follow the same loss, so a plateau is one of all parameters.
    assert_follows(make, mode, "reduce_on_plateau")


def test_the_loss_of_micro_batches_is_their_sum():
    params = harness.params()
    x = harness.batch()
    make = lambda: optax_optimizer.OptaxOptimizer(optax.polyak_sgd(0.5))

    def step(p, parts):
        part_loss = lambda p, part: harness.loss(p, part) / len(parts)
        return make().minimize(gradients.MicroBatches(part_loss, parts), p)[1]

    step = hk.transform_with_state(step)
    ends = []
    for count in (1, 4):
        parts = x.reshape(count, -1, x.shape[1])
        _, state = step.init(None, params, parts)
        ends.append(step.apply({}, state, None, params, parts)[0])
    harness.assert_close(*ends, rtol=1e-5, atol=1e-6)


def test_gradients_alone_are_refused():
    params = harness.params()
    step = hk.transform_with_state(
        lambda: optax_optimizer.OptaxOptimizer(
            optax.polyak_sgd(), name="polyak"
        ).apply_gradients(jax.tree.map(jnp.ones_like, params), params)
    )
    _, state = step.init(None)
    with pytest.raises(
        errors.UserError, match="update of polyak needs the loss.*compute_gradients"
    ):
        step.apply({}, state, None)
