"""Tests of the check that rules update with values that are equal on all replicas."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xshard
from tests import toy
from xshard import errors, loop

REPLICAS = ("slice", "replica")
MODES = {
    "replicated": {},
    "shard_update": {"shard_update": True},
    "shard_params": {"shard_params": True},
    "exact": {"arithmetic": "exact"},
}


def per_array(f, grads, *trees):
    """Applies `f` to each array of gradients, with the same entries of other trees."""
    return hk.data_structures.map(
        lambda module, name, grad: f(grad, *(tree[module][name] for tree in trees)),
        grads,
    )


class ByLoss(xshard.Optimizer):
    """Scales the update by what a function makes of the replica's own loss."""

    value = None

    def __init__(self, reduce):
        super().__init__(name="by_loss")
        self._reduce = reduce

    def compute_gradients(self, loss, params, **kwargs):
        out, grads = super().compute_gradients(loss, params, **kwargs)
        self.value = out[0] if kwargs.get("has_aux") else out
        if not hk.running_init():
            self.value = self._reduce(self.value)
        return out, grads

    def update(self, grads, params):
        if self.value is None:
            return params
        return per_array(lambda g, p: p - 0.1 * self.value * g, grads, params)


class VotesByLoss(ByLoss):
    """Skips a step by the replica's own loss."""

    def vote(self, grads):
        return True if self.value is None else self.value < 1e6

    def update(self, grads, params):
        return per_array(lambda g, p: p - 0.1 * g, grads, params)


class Noisy(xshard.OptimizerWrapper):
    """Adds noise from the replica's own keys, before or after the sum of gradients."""

    def __init__(self, opt, after):
        super().__init__(name="noisy")
        self.opt = opt
        self._after = after

    def _add(self, grads):
        if hk.running_init():
            return grads
        return per_array(
            lambda g: g + 0.01 * jax.random.normal(hk.next_rng_key(), g.shape), grads
        )

    def aggregate(self, grads):
        if self._after:
            return self._add(self.opt.aggregate(grads))
        return self.opt.aggregate(self._add(grads))


class NoisyUpdate(xshard.Optimizer):
    """Adds noise in its update, from keys that a run makes equal on all replicas."""

    def update(self, grads, params):
        if hk.running_init():
            return params
        noise = lambda p: 0.01 * jax.random.normal(hk.next_rng_key(), p.shape)
        return per_array(lambda g, p: p - 0.1 * g + noise(p), grads, params)


class ByIndex(xshard.Optimizer):
    """Scales the update by the replica's index, or by what is declared equal."""

    def __init__(self, declare=lambda index: index):
        super().__init__(name="by_index")
        self._declare = declare

    def update(self, grads, params):
        if hk.running_init():
            return params
        index = self._declare(jax.lax.axis_index("replica")).astype(jnp.float32)
        return per_array(lambda g, p: p - 0.01 * index * g, grads, params)


class Feedback(xshard.OptimizerWrapper):
    """Keeps what a replica's own gradients lose in rounding as state of the rule."""

    def __init__(self, opt):
        super().__init__(name="feedback")
        self.opt = opt

    def aggregate(self, grads):
        def send(module, name, grad):
            state = f"error/{module}/{name}"
            wanted = grad + hk.get_state(state, grad.shape, grad.dtype, jnp.zeros)
            sent = jnp.round(wanted * 64) / 64
            hk.set_state(state, wanted - sent)
            return sent

        return self.opt.aggregate(hk.data_structures.map(send, grads))


def own(value):
    return value


def mean(value):
    return jax.lax.pmean(value, REPLICAS)


@xshard.per_replica
def gathered(value):
    return jnp.max(jax.lax.all_gather(value, REPLICAS))


def mean_of_a_slice(value):
    return jax.lax.pmean(value, "replica")


def sgd():
    return xshard.OptaxOptimizer(optax.sgd(0.1), name="sgd")


def reduced(rule, reduction):
    return xshard.CrossShardOptimizer(rule, slice_axis_name="slice", **reduction)


REFUSED = {
    "own loss": lambda reduction: reduced(ByLoss(own), reduction),
    "own vote": lambda reduction: reduced(VotesByLoss(own), reduction),
    "own keys": lambda reduction: Noisy(reduced(sgd(), reduction), after=True),
    "own index": lambda reduction: reduced(ByIndex(), reduction),
}
ACCEPTED = {
    "mean loss": lambda reduction: reduced(ByLoss(mean), reduction),
    "largest loss": lambda reduction: reduced(ByLoss(gathered), reduction),
    "vote by the mean loss": lambda reduction: reduced(VotesByLoss(mean), reduction),
    "noise in the update": lambda reduction: reduced(NoisyUpdate(), reduction),
    "declared equal": lambda reduction: reduced(
        ByIndex(xshard.equal_on_replicas), reduction
    ),
    "plain": lambda reduction: reduced(sgd(), reduction),
}
OTHERS = {
    "mean of a slice": lambda reduction: reduced(ByLoss(mean_of_a_slice), reduction),
    "keys before the sum": lambda reduction: reduced(
        Noisy(sgd(), after=False), reduction
    ),
    "feedback": lambda reduction: reduced(Feedback(sgd()), reduction),
}


class Ruled(toy.Wide):
    """Trains by a rule of the tables above."""

    def optimizer(self):
        return {**REFUSED, **ACCEPTED, **OTHERS}[self.config.rule](
            self.config.reduction
        )


def make_config(rule, mode, **changes):
    config = toy.get_config()
    config.experiment = "tests.run.replica_analysis_test.Ruled"
    config.rule = rule
    config.reduction.update(MODES[mode])
    if "arithmetic" in MODES[mode]:
        config.logical_replicas = 4
    config.update(changes)
    return config.lock()


def start(tmp_path, rule, mode, **changes):
    return loop.Run(make_config(rule, mode, **changes), str(tmp_path / "run"))


# The rules that use no gradient or loss of a replica's own, which there is none of with
# parameters in shards.
OF_THE_SUM = ("own keys", "own index", "noise in the update", "declared equal", "plain")


def modes_of(rules):
    """The pairs of a rule and a mode.

    Rules of one's own gradients are not tried where parameters are in shards.
    """
    pairs = []
    for rule in rules:
        for mode in MODES:
            has_no_own = mode == "shard_params" and rule not in OF_THE_SUM
            # Exact sums take no declaration: the step is divided where values become
            # equal.
            takes_none = mode == "exact" and rule == "declared equal"
            if not has_no_own and not takes_none:
                pairs.append((rule, mode))
    return pairs


@pytest.mark.parametrize("rule, mode", modes_of(REFUSED))
def test_an_update_with_a_replicas_own_value_is_refused(tmp_path, rule, mode):
    # The division of a step at its sums finds some of them before; and with parameters
    # in shards no rule may change what is summed.
    match = (
        "Ruled.optimizer .* a value of a replica's own|differs between the replicas|"
        "shard_params=True cannot be used with Noisy, which overrides aggregate"
    )
    with pytest.raises(errors.UserError, match=match) as e:
        start(tmp_path, rule, mode)
    if "a value of a replica's own" in str(e.value):
        why = {"own keys": "key", "own index": "index"}.get(
            rule, "part of the batch and its key"
        )
        assert f"which depends on its {why}. Each" in str(e.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rule, mode", modes_of(ACCEPTED))
def test_an_update_with_equal_values_is_accepted(tmp_path, rule, mode):
    start(tmp_path, rule, mode)


@pytest.mark.parametrize("mode", ["replicated", "shard_update", "exact"])
def test_own_values_before_the_sum_are_accepted(tmp_path, mode):
    start(tmp_path, "keys before the sum", mode)


@pytest.mark.parametrize("mode", ["replicated", "shard_update"])
def test_state_of_a_replicas_own_gradients_is_refused(tmp_path, mode):
    with pytest.raises(errors.UserError, match="updates 'opt_state/feedback/error/"):
        start(tmp_path, "feedback", mode)


@pytest.mark.parametrize("mode", ["replicated", "shard_update"])
def test_a_mean_over_one_of_two_axes_is_refused(tmp_path, mode):
    start(tmp_path, "mean of a slice", mode)
    with pytest.raises(errors.UserError, match="a value of a replica's own"):
        start(tmp_path / "slices", "mean of a slice", mode, slices=2)


@pytest.mark.parametrize("rule", ["mean loss", "noise in the update"])
def test_the_update_is_the_same_in_shards(tmp_path, rule):
    ends = []
    for mode in ("replicated", "shard_update"):
        directory = str(tmp_path / mode)
        assert loop.run(make_config(rule, mode, steps=3), directory, "") == 0
        ends.append(xshard.load(directory).state.experiment.params)
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        # Sums over replicas are in another order.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
