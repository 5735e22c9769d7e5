"""Tests of what a rule's phases may return."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest

import xshard
from xshard import errors

PARAMS = {"m": {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}}


class Returning(xshard.OptaxOptimizer):
    """A rule with any update and vote.

    The update returns what `change` makes of the new parameters.
    """

    def __init__(self, change=lambda params: params, decision=True):
        super().__init__(optax.sgd(0.1), name="returning")
        self._change = change
        self._decision = decision

    def update(self, grads, params):
        return self._change(super().update(grads, params))

    def vote(self, grads):
        return self._decision


def step(**options):
    def minimize(params):
        rule = Returning(**options)
        return rule.minimize(
            lambda p: jnp.sum(p["m"]["w"]) + jnp.sum(p["m"]["b"]), params
        )[1]

    transformed = hk.transform_with_state(minimize)
    _, state = transformed.init(None, PARAMS)
    return transformed.apply({}, state, None, PARAMS)[0]


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda p: {"m": {"w": p["m"]["w"]}}, "lacks 'm/b'"),
        (lambda p: None, "lacks"),
        (lambda p: {**p, "n": {"x": p["m"]["b"]}}, "has 'n/x', which is no parameter"),
        (
            lambda p: jax.tree.map(jnp.transpose, p),
            r"'m/w' as float32 of shape \(2, 3\)",
        ),
        (lambda p: jax.tree.map(jnp.sum, p), r"'m/b' as float32 of shape \(\)"),
        (
            lambda p: jax.tree.map(lambda x: x.astype(jnp.bfloat16), p),
            r"'m/b' as bfloat16 of shape \(2,\), but the parameter is float32",
        ),
    ],
)
def test_an_update_that_cannot_replace_the_parameters_is_refused(change, problem):
    with pytest.raises(
        errors.UserError, match=f"update of returning must return.*{problem}"
    ):
        step(change=change)


@pytest.mark.parametrize("decision", [None, 1, jnp.ones(2, bool), jnp.float32(1)])
def test_a_vote_that_is_no_boolean_is_refused(decision):
    with pytest.raises(
        errors.UserError, match="The vote of returning is .* must be True"
    ):
        step(decision=decision)


@pytest.mark.parametrize("decision", [True, jnp.asarray(True), jnp.asarray(False)])
def test_a_vote_decides(decision):
    moved = step(decision=decision)["m"]["b"] != PARAMS["m"]["b"]
    assert bool(moved.all()) == bool(decision)


def test_a_rule_s_state_may_hold_none():
    def init(params):
        return {"count": jnp.zeros(()), "nothing": None}

    def update(updates, state, params=None):
        return updates, {"count": state["count"] + 1, "nothing": None}

    rule = optax.chain(optax.GradientTransformation(init, update), optax.sgd(0.1))

    def minimize(params):
        return xshard.OptaxOptimizer(rule, name="r").minimize(
            lambda p: jnp.sum(p["m"]["w"]), params
        )[1]

    transformed = hk.transform_with_state(minimize)
    _, state = transformed.init(None, PARAMS)
    for count in (1, 2):
        _, state = transformed.apply({}, state, None, PARAMS)
        assert state["r"] == {"0/count": count}


@pytest.mark.parametrize(
    "name, same", [("weighted_mean", "mean"), ("weighted_sum", "sum")]
)
def test_the_values_of_tensorflow_s_constants_are_taken(name, same):
    def reduction(params):
        return xshard.CrossShardOptimizer(optax.sgd(0.1), name).reduction

    assert hk.transform_with_state(reduction).apply({}, {}, None, PARAMS)[0] == same


@pytest.mark.parametrize("grads", [[], [None]])
def test_no_gradients_are_finite(grads):
    def update(params):
        return xshard.DynamicLossScale(increment_period=1).update(grads)

    transformed = hk.transform_with_state(update)
    applied, _ = transformed.apply({}, transformed.init(None, PARAMS)[1], None, PARAMS)
    assert applied
