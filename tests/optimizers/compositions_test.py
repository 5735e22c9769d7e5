"""Tests that any composition of rules trains sharded as it does replicated.

Or it is refused by name.
"""

import functools
import random

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from tests.optimizers import harness, written
from xshard.optimizers import (
    base,
    cross_shard,
    loss_scale,
    moving_average,
)
from xshard.optimizers import optax as optax_optimizer

# These tests trace many rules. Coverage would double their time, and other tests
# measure it.
pytestmark = pytest.mark.no_cover


def by_optax(transformation, name):
    return optax_optimizer.OptaxOptimizer(transformation, name=name)


class NormalizedDescent(base.Optimizer):
    """Divides each gradient by its norm; has no state."""

    def update(self, grads, params):
        step = lambda p, g: (
            p if g is None else p - 0.1 * g / (jnp.linalg.norm(g) + 1e-6)
        )
        return jax.tree.map(step, params, grads)


class Momentum(base.Optimizer):
    """Keeps a momentum slot and adds noise to each update."""

    def update(self, grads, params):
        def step(path, p, g):
            if g is None:
                return p
            name = f"momentum/{written.path_name(path)}"
            m = hk.get_state(name, p.shape, p.dtype, jnp.zeros)
            if not hk.running_init():
                m = 0.9 * m + g
                hk.set_state(name, m)
            noise = (
                0.0
                if hk.running_init()
                else jax.random.normal(hk.next_rng_key(), p.shape, p.dtype)
            )
            return p - 0.1 * m - 1e-3 * noise

        return jax.tree_util.tree_map_with_path(step, params, grads)


class Clipped(base.OptimizerWrapper):
    """Clips the group's gradients by their global norm."""

    def __init__(self, opt, name):
        super().__init__(name=name)
        self.opt = opt

    def aggregate(self, grads):
        grads = self.opt.aggregate(grads)
        factor = jnp.minimum(1.0, 0.5 / optax.tree.norm(grads))
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)


class LeavesOutLarge(base.OptimizerWrapper):
    """Votes against steps with a large global gradient norm, and counts them."""

    def __init__(self, opt, name):
        super().__init__(name=name)
        self.opt = opt

    def vote(self, grads):
        small = optax.tree.norm(grads) < 3.0
        count = hk.get_state("left_out", [], jnp.int32, jnp.zeros)
        hk.set_state("left_out", count + jnp.where(small, 0, 1))
        vote = self.opt.vote(grads)
        return small if vote is True else small & vote


LEAVES = {
    "adam": lambda name: by_optax(optax.adam(0.1), name),
    "lamb": lambda name: by_optax(optax.lamb(0.1), name),
    "clipped": lambda name: by_optax(
        optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9)), name
    ),
    "several steps": lambda name: by_optax(optax.MultiSteps(optax.adam(0.1), 2), name),
    "masked": lambda name: by_optax(
        optax.chain(
            optax.masked(
                optax.add_decayed_weights(0.1),
                lambda p: jax.tree.map(lambda x: x.ndim > 1, p),
            ),
            optax.lion(0.05),
        ),
        name,
    ),
    "by kind": lambda name: by_optax(
        optax.partition(
            {"matrix": optax.adam(0.1), "vector": optax.sgd(0.1)},
            lambda p: jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", p),
        ),
        name,
    ),
    "normalized": lambda name: NormalizedDescent(name=name),
    "momentum": lambda name: Momentum(name=name),
}


def compose(seed, shard_update):
    """Returns a random composition of rules; equal seeds give equal compositions."""
    draw = random.Random(seed)
    names = (f"rule_{i}" for i in range(99))

    def local(depth):
        kind = (
            draw.choice(["leaf", "leaf", "by layer", "lookahead"]) if depth else "leaf"
        )
        if kind == "by layer":
            return written.ByLayer(local(depth - 1), local(depth - 1), next(names))
        if kind == "lookahead":
            return written.Lookahead(local(depth - 1), next(names))
        return LEAVES[draw.choice(sorted(LEAVES))](next(names))

    rule = local(2)
    reducing = functools.partial(
        cross_shard.CrossShardOptimizer, shard_update=shard_update
    )
    scaling = lambda opt: loss_scale.MixedPrecisionLossScaleOptimizer(opt, "dynamic")
    averaging = lambda opt: moving_average.MovingAverageOptimizer(opt, 0.9, "count")
    looking_ahead = lambda opt: written.Lookahead(opt, "outer")
    wrappers = [reducing, scaling, draw.choice([averaging, looking_ahead])]
    draw.shuffle(wrappers)
    # A rule that reads the group's gradients must be outside the rule that reduces
    # them.
    wrappers += draw.sample(
        [lambda opt: Clipped(opt, "clips"), lambda opt: LeavesOutLarge(opt, "votes")], 1
    )
    for wrap in wrappers:
        rule = wrap(rule)
    return rule


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_any_composition_trains_sharded_as_it_does_replicated(seed):
    # 4 divides a dimension of every array; 8 replicas hold the (3, 4) array whole.
    replicas = 4 if seed % 2 else 8
    with jax.enable_x64(True):
        x = harness.batch(np.float64)
        whole, sharded = (
            written.train(functools.partial(compose, seed, shard), x, replicas)
            for shard in (False, True)
        )
        for wanted, got in zip(whole, sharded, strict=True):
            # Sums are in another order, and the rules divide by norms and by roots of
            # second moments.
            harness.assert_close(got, wanted, rtol=1e-8, atol=1e-10)
        before = sharded[written.BAD_STEP - 1]
        after = sharded[written.BAD_STEP]
        harness.assert_equal(after[:2], before[:2])
        # A voting rule, if there is one, counts the steps that it leaves out.
        kept = {m for m in after[2] if m not in ("votes",) and "scale" not in m}
        harness.assert_equal(
            {m: after[2][m] for m in kept}, {m: before[2][m] for m in kept}
        )
        assert int(after[1]) == int(before[1])


def two_networks(params, x, shard_update):
    """Updates each of two networks once, with one rule; returns their parameters."""
    adam = by_optax(optax.adam(0.1), "adam")
    opt = cross_shard.CrossShardOptimizer(adam, "sum", shard_update=shard_update)
    new = {}
    for module in params:
        loss = lambda p: sum(
            jnp.sum(jnp.mean(x) * leaf**2) for leaf in jax.tree.leaves(p)
        )
        new |= opt.minimize(loss, {module: params[module]})[1]
    return new


def test_one_rule_may_update_two_networks():
    params = harness.params()
    x = harness.batch()
    ends = []
    for shard_update in (False, True):
        step = hk.transform_with_state(
            functools.partial(two_networks, shard_update=shard_update)
        )
        _, state = step.init(None, params, x)
        update = lambda state, x, step=step: step.apply({}, state, None, params, x)[0]
        run = harness.vmapped(update, (jax.P(), jax.P("replica")), jax.P(), 4)
        ends.append(run(harness.placed(state, params, 4), x))
    assert not np.array_equal(ends[0]["mlp/linear_1"]["w"], params["mlp/linear_1"]["w"])
    harness.assert_close(*ends, rtol=1e-5)


def muon_and_adafactor(shard_update):
    """Returns Muon for one layer and Adafactor for the rest, in wrappers."""
    adafactor = optax.adafactor(0.1, min_dim_size_to_factor=2)
    rule = written.ByLayer(
        by_optax(contrib.muon(0.1), "muon"),
        by_optax(adafactor, "adafactor"),
        "by_layer",
    )
    rule = cross_shard.CrossShardOptimizer(
        written.Lookahead(rule, "outer"), shard_update=shard_update
    )
    return loss_scale.MixedPrecisionLossScaleOptimizer(rule, "dynamic")


@pytest.mark.sample(0.4)
def test_rules_that_mix_elements_train_sharded_as_they_do_replicated():
    """Starts replicated, continues with 4 and then 8 shards, and ends replicated.

    Each stage skips a step.
    """
    with jax.enable_x64(True):
        x = harness.batch(np.float64)
        wanted = None
        got = None
        for replicas, shard_update in ((4, False), (4, True), (8, True), (4, False)):
            wanted = written.train(
                lambda: muon_and_adafactor(False), x, 4, wanted and wanted[-1]
            )
            make = functools.partial(muon_and_adafactor, shard_update)
            got = written.train(make, x, replicas, got and got[-1])
            for ends in zip(got, wanted, strict=True):
                # Sums are in another order, and the rules divide by norms and by roots
                # of second moments.
                harness.assert_close(*ends, rtol=1e-8, atol=1e-10)
            for module in ("muon", "adafactor", "outer"):
                harness.assert_equal(
                    got[written.BAD_STEP][2][module],
                    got[written.BAD_STEP - 1][2][module],
                )
            harness.assert_equal(
                got[written.BAD_STEP][:2], got[written.BAD_STEP - 1][:2]
            )


class Holder(base.Optimizer):
    """Holds a rule and forwards only the update to it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = [inner]

    def update(self, grads, params):
        return self.inner[0].update(grads, params)


@pytest.mark.parametrize("shard_update", [False, True])
@pytest.mark.parametrize("phase", ["aggregate", "vote"])
def test_a_held_rule_whose_phase_is_not_called_is_refused(phase, shard_update):
    def make():
        sgd = by_optax(optax.sgd(0.1), "sgd")
        if phase == "aggregate":
            return Holder(
                cross_shard.CrossShardOptimizer(sgd, shard_update=shard_update)
            )
        rule = Holder(loss_scale.MixedPrecisionLossScaleOptimizer(sgd, "dynamic"))
        return cross_shard.CrossShardOptimizer(rule, shard_update=shard_update)

    step = harness.transform_step(make)
    with pytest.raises(
        ValueError,
        match=f"holds .*, but its own {phase} does not call that of .*OptimizerWrapper",
    ):
        step.init(None, harness.params(), harness.batch())


def assert_equal_in_shards(make):
    """Asserts that a rule trains alike in shards and replicated.

    It is made by a function of whether it shards its update.
    """
    with jax.enable_x64(True):
        x = harness.batch(np.float64)
        whole, sharded = (
            written.train(functools.partial(make, shard), x, 4)[: written.BAD_STEP]
            for shard in (False, True)
        )
        harness.assert_close(sharded, whole, rtol=1e-8, atol=1e-10)


def test_state_named_without_its_parameters_path_is_whole_and_right():
    class Nameless(base.Optimizer):
        def update(self, grads, params):
            def step(i, p, g):
                m = hk.get_state(f"m{i}", p.shape, p.dtype, jnp.zeros) + g
                hk.set_state(f"m{i}", m)
                return p - 0.1 * m / jnp.linalg.norm(m)

            leaves, structure = jax.tree.flatten(params)
            results = [
                step(i, p, g)
                for i, (p, g) in enumerate(
                    zip(leaves, jax.tree.leaves(grads), strict=True)
                )
            ]
            return jax.tree.unflatten(structure, results)

    make = lambda shard: cross_shard.CrossShardOptimizer(Nameless(), shard_update=shard)
    assert_equal_in_shards(make)


def test_init_creates_the_state_without_a_loss():
    make = functools.partial(compose, 1, True)
    params = harness.params()
    by_loss = harness.transform_step(make).init(
        jax.random.key(0), params, harness.batch()
    )
    alone = hk.transform_with_state(lambda params: make().init(params)).init(
        jax.random.key(0), params
    )
    harness.assert_equal(alone, by_loss)
    with pytest.raises(ValueError, match="Optimizer.init creates state"):
        hk.transform_with_state(lambda params: make().init(params)).apply(
            {}, alone[1], None, params
        )


def test_only_trained_parameters_get_slots():
    rule = lambda params: by_optax(optax.adam(0.1), "adam").init(
        params, ["mlp/linear_1/w"]
    )
    _, state = hk.transform_with_state(rule).init(None, harness.params())
    assert sorted(state["adam"]) == [
        "0/count",
        "0/mu/mlp/linear_1/w",
        "0/nu/mlp/linear_1/w",
    ]


def run_sharded(make, step_of, params, inputs, replicas=4, key=None):
    """Returns the results of `step_of(rule, params, x)` for each input, and the state.

    The state is None if the rule does not shard its update.
    """
    rules = hk.transform_with_state(lambda params, x: step_of(make(), params, x))
    _, state = rules.init(key, params, inputs[0])
    held = hk.transform(lambda: base.all_rules(make())).apply({}, None)
    if not any(getattr(rule, "shard_update", False) for rule in held):
        return [rules.apply({}, state, key, params, x)[0] for x in inputs], None
    update = lambda state, x: rules.apply({}, state, key, params, x)
    run = harness.vmapped(update, jax.P(), jax.P(), replicas)
    results = []
    state = harness.placed(state, params, replicas)
    for x in inputs:
        out, state = run(state, x)
        results.append(out)
    return results, state


def scaled(opt, shard_update):
    opt = cross_shard.CrossShardOptimizer(opt, shard_update=shard_update)
    return loss_scale.MixedPrecisionLossScaleOptimizer(opt, "dynamic")


PARAMS = {"m": {"w": jnp.arange(8.0).reshape(4, 2)}}


@pytest.mark.parametrize("shard_update", [False, True])
def test_a_skipped_step_restores_state_that_the_loss_wrote(shard_update):
    def step(opt, params, x):
        def loss(p):
            n = hk.get_state("n", [], jnp.int32, jnp.zeros)
            hk.set_state("n", n + 1)
            return jnp.sum(p["m"]["w"]) * x

        opt.minimize(loss, params)
        return hk.get_state("n")

    make = lambda: scaled(by_optax(optax.adam(0.1), "adam"), shard_update)
    rules = hk.transform_with_state(lambda x: step(make(), PARAMS, x))
    _, state = rules.init(None, 1.0)
    run = harness.vmapped(
        lambda state, x: rules.apply({}, state, None, x), jax.P(), jax.P(), 4
    )
    counts = []
    state = harness.placed(state, PARAMS, 4)
    for x in (1.0, np.nan, 1.0):
        n, state = run(state, x)
        counts.append(int(n))
    assert counts == [1, 1, 2]


@pytest.mark.parametrize("x", [1.0, np.nan])
def test_a_sharded_step_draws_the_random_keys_of_a_replicated_one(x):
    def step(opt, params, x):
        _, new = opt.minimize(lambda p: jnp.sum(p["m"]["w"]) * x, params)
        return new, jax.random.normal(hk.next_rng_key())

    key = jax.random.key(3)
    ends = [
        run_sharded(
            lambda shard=shard: scaled(Momentum(name="noisy"), shard),
            step,
            PARAMS,
            [x],
            key=key,
        )[0]
        for shard in (False, True)
    ]
    harness.assert_close(*ends, rtol=1e-6)


def each_leaf(f):
    """Returns a rule without state; `f(parameter, gradient)` is a new parameter."""

    class Each(base.Optimizer):
        def update(self, grads, params):
            return jax.tree.map(f, params, grads)

    return Each(name="each")


SUMS = {
    "beside an array": lambda p, g: p - 0.1 * (g + jnp.sum(g)),
    "beside a whole array": lambda p, g: (
        p * (jnp.arange(8.0).reshape(4, 2) + jnp.sum(g))
    ),
    "of two, with a number": lambda p, g: p * (1.0 + (jnp.sum(g) + jnp.sum(p))),
    "twice": lambda p, g: p * jnp.sum(g) + g / jnp.sum(g),
    "truth": lambda p, g: jnp.where(jnp.isfinite(g) & jnp.all(jnp.isfinite(p)), g, p),
    "in a cond": lambda p, g: jax.lax.cond(
        jnp.sum(g) > 0, lambda: g + jnp.sum(p), lambda: p
    ),
    "complex": lambda p, g: jnp.real(jax.lax.complex(p, g) ** 2),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_combined_with_other_values_match_a_replicated_update(name):
    step = lambda opt, params, x: opt.minimize(
        lambda p: jnp.sum(p["m"]["w"] ** 2) * x, params
    )[1]
    make = lambda shard: cross_shard.CrossShardOptimizer(
        each_leaf(SUMS[name]), shard_update=shard
    )
    ends = [
        run_sharded(lambda shard=shard: make(shard), step, PARAMS, [1.0])[0]
        for shard in (False, True)
    ]
    harness.assert_close(*ends, rtol=1e-5)


def test_a_slot_belongs_to_the_parameter_with_its_shape():
    params = {"mu/linear": {"w": jnp.ones((4, 3))}, "linear": {"w": jnp.ones((8, 2))}}
    step = lambda opt, params, x: opt.minimize(
        lambda p: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p)) * x, params
    )[1]
    make = lambda shard: cross_shard.CrossShardOptimizer(
        by_optax(optax.adam(0.1), "adam"), shard_update=shard
    )
    ends = [
        run_sharded(lambda shard=shard: make(shard), step, params, [1.0])[0]
        for shard in (False, True)
    ]
    harness.assert_close(*ends, rtol=1e-5)


class ByAttribute(base.OptimizerWrapper):
    """Passes a value from one phase to another through an attribute."""

    def __init__(self, opt):
        super().__init__(name="by_attribute")
        self.opt = opt

    def aggregate(self, grads):
        grads = self.opt.aggregate(grads)
        self.norm = optax.tree.norm(grads)
        return grads

    def update(self, grads, params):
        return self.opt.update(jax.tree.map(lambda g: g / self.norm, grads), params)


def test_a_phase_may_store_a_value_in_an_attribute():
    sgd = lambda: by_optax(optax.sgd(0.1), "sgd")
    make = lambda shard: ByAttribute(
        cross_shard.CrossShardOptimizer(sgd(), shard_update=shard)
    )
    assert_equal_in_shards(make)


class Transparent(base.OptimizerWrapper):
    """Has a transparent `aggregate`, which Haiku's interceptors do not see."""

    def __init__(self, opt):
        super().__init__()
        self.opt = opt

    @hk.transparent
    def aggregate(self, grads):
        return self.opt.aggregate(grads)


def test_the_outermost_rule_may_be_transparent():
    make = lambda: Transparent(cross_shard.CrossShardOptimizer(optax.sgd(0.1)))
    harness.transform_step(make).init(None, harness.params(), harness.batch())


class InList(base.Optimizer):
    """Holds itself through a list."""

    def __init__(self):
        super().__init__()
        self.all = [self]
        self.all.append(self.all)


def test_a_rule_that_holds_itself_is_listed_once():
    held = hk.transform(lambda: len(base.all_rules(InList()))).apply({}, None)
    assert held == 1
