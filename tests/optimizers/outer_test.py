"""Tests of the outer rule: DiLoCo as plain NumPy-like code computes it, in each place
of a chain, with each type, in fragments and with delays.
"""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xshard
from tests.optimizers import harness
from xshard.dryrun import collectives
from xshard.optimizers import axes, outer

SLICES = 4
EVERY = 3
STEPS = 7
RATE = 0.05
NAME = "OuterOptimizer"
W0 = "mlp/linear_0/w"
PLACES = ["outside", "between", "inside"]
DEFAULT = optax.sgd(0.7, momentum=0.9, nesterov=True)


def inner(name="inner"):
    return xshard.OptaxOptimizer(optax.adam(RATE), name=name)


def make_rule(place="outside", shard_update=False, **kwargs):
    """Adam in both rules and an outer rule."""
    wrap = functools.partial(
        xshard.OuterOptimizer, **{"every_steps": EVERY, "axis_name": "group", **kwargs}
    )
    scale = lambda opt: xshard.MixedPrecisionLossScaleOptimizer(opt, "dynamic")
    reduce = functools.partial(xshard.CrossShardOptimizer, shard_update=shard_update)
    if place == "inside":
        return scale(reduce(wrap(inner())))
    if place == "between":
        return scale(wrap(reduce(inner())))
    return wrap(scale(reduce(inner())))


def batches(steps=STEPS):
    rng = np.random.default_rng(0)
    shape = (steps, SLICES, 8, 3)
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def on_slices(make, replicas=1, kind="shard_map"):
    """Returns the first parameters and state of all slices, and a step of them."""
    step = harness.transform_step(make)
    params = harness.params()
    _, state = step.init(None, params, batches()[0, 0])
    devices = np.array(jax.devices()[: SLICES * replicas]).reshape(SLICES, replicas)
    mesh = jax.sharding.Mesh(devices, ("group", "replica"))

    def local(params, state, x):
        params, state = jax.tree.map(lambda a: a[0], (params, state))
        (_, params, _), state = step.apply({}, state, None, params, x[0])
        return jax.tree.map(lambda a: a[None], (params, state))

    own = jax.P("group")
    specs = {
        "in_specs": (own, own, jax.P("group", "replica")),
        "out_specs": (own, own),
    }
    if kind == "vmap_replicas":
        mapped = xshard.vmap_replicas(local, mesh, **specs)
    else:
        mapped = jax.shard_map(local, mesh=mesh, check_vma=kind == "vma", **specs)
    params, state = harness.stack((params, state), SLICES)
    return params, state, jax.jit(mapped)


def follow(make, replicas=1, kind="shard_map", xs=None):
    """Returns the parameters and the state of all slices after each step."""
    params, state, step = on_slices(make, replicas, kind)
    history = []
    for x in batches() if xs is None else xs:
        params, state = step(params, state, x)
        history.append(jax.device_get((params, state)))
    return history


def simulate(xs, outer_rule=DEFAULT, fragments=(None,), delay=0):
    """Trains slices as the papers say, one after the other.

    Args:
      xs: the batches, for each step and slice.
      outer_rule: the outer rule.
      fragments: for each fragment the paths in it; None for all.
      delay: the number of steps after which a result is taken over.

    Returns:
      The parameters of each slice after each step.
    """
    rule = optax.adam(RATE)
    first = harness.params()
    slices = [first] * SLICES
    states = [rule.init(first) for _ in range(SLICES)]
    exchanged = first
    outer_states = [outer_rule.init(first) for _ in fragments]
    history = []
    gradient = jax.jit(jax.grad(harness.loss))

    def in_fragment(fragment, new, old):
        def choose(path, x, y):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return x if fragment is None or name in fragment else y

        return jax.tree_util.tree_map_with_path(choose, new, old)

    # optax mixes counts with floats, which the tests' strict promotion refuses.
    update = jax.numpy_dtype_promotion("standard")(rule.update)
    outer_update = jax.numpy_dtype_promotion("standard")(outer_rule.update)
    for step, x in enumerate(xs, 1):
        for index in range(SLICES):
            updates, states[index] = update(
                gradient(slices[index], x[index]), states[index], slices[index]
            )
            slices[index] = optax.apply_updates(slices[index], updates)
        for number, fragment in enumerate(fragments):
            offset = number * EVERY // len(fragments)
            if (step - offset) % EVERY == 0:
                mean = lambda old, *new: sum(old - x for x in new) / SLICES
                difference = jax.tree.map(mean, exchanged, *slices)
                updates, outer_states[number] = outer_update(
                    difference, outer_states[number], exchanged
                )
                moved = optax.apply_updates(exchanged, updates)
                exchanged = in_fragment(fragment, moved, exchanged)
            taken_after = step - delay
            if taken_after > 0 and (taken_after - offset) % EVERY == 0:
                mix = lambda own, new: new if not delay else 0.5 * own + 0.5 * new
                slices = [
                    in_fragment(fragment, jax.tree.map(mix, own, exchanged), own)
                    for own in slices
                ]
        history.append(list(slices))
    return history


def check(history, wanted):
    for (params, _), slices in zip(history, wanted, strict=True):
        stacked = jax.tree.map(lambda *x: np.stack(x), *slices)
        # float32 sums are in another order in each of a few steps of Adam.
        harness.assert_close(params, stacked, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "place, replicas, kind",
    [
        ("outside", 1, "shard_map"),
        ("between", 2, "vma"),
        ("inside", 2, "shard_map"),
        ("outside", 2, "vmap_replicas"),
    ],
)
def test_slices_train_as_diloco_does(place, replicas, kind):
    make = functools.partial(make_rule, place, kind == "vmap_replicas")
    check(follow(make, replicas, kind), simulate(batches()))


def test_any_transformation_is_an_outer_rule():
    rule = optax.adamw(0.3)
    history = follow(lambda: make_rule(outer=rule))
    check(history, simulate(batches(), outer_rule=rule))


def test_one_slice_takes_lookahead_steps():
    # Its slices all get the same examples, so each of them is like one slice.
    xs = jnp.repeat(batches()[:, :1], SLICES, axis=1)
    step = harness.transform_step(lambda: make_rule(axis_name="slice"))
    params = harness.params()
    _, state = step.init(None, params, xs[0, 0])
    apply = jax.jit(step.apply)
    for x in xs:
        (_, params, _), state = apply({}, state, None, params, x[0])
    harness.assert_close(params, simulate(xs)[-1][0], rtol=2e-5, atol=2e-6)


def fragments_of(count):
    """The paths of each fragment: the largest array first, to the smallest one."""
    assert count == 2
    return [[W0], ["mlp/linear_1/w", "mlp/linear_0/b"]]


@pytest.mark.parametrize("kind", ["shard_map", "vmap_replicas"])
def test_fragments_are_exchanged_in_turn(kind):
    shard_update = kind == "vmap_replicas"
    make = functools.partial(make_rule, "outside", shard_update, fragments=2)
    history = follow(make, 2, kind)
    check(history, simulate(batches(), fragments=fragments_of(2)))


@pytest.mark.parametrize("delay", [1, 2])
def test_slices_take_over_the_result_after_a_delay(delay):
    make = lambda: make_rule(delay_steps=delay, fragments=2)
    # The simulation sends at the end of a step what the rule sends in the next one.
    wanted = simulate(batches(), fragments=fragments_of(2), delay=delay)
    check(follow(make), wanted)


@pytest.mark.parametrize("kind", ["shard_map", "vmap_replicas"])
def test_slices_send_what_they_had_before_the_step_during_which_they_send(kind):
    xs = batches(EVERY + 1)
    poisoned = xs.at[EVERY, 0].set(jnp.inf)
    make = lambda: make_rule(delay_steps=1)
    ends = [follow(make, 1, kind, x)[-1][1][NAME] for x in (xs, poisoned)]
    of_finite, of_poisoned = (state[f"exchanged/{W0}"] for state in ends)
    assert not np.array_equal(of_finite[0], harness.params()["mlp/linear_0"]["w"])
    np.testing.assert_array_equal(of_poisoned, of_finite)


def test_each_axis_that_is_not_mapped_has_a_warning(caplog):
    axes._warn.cache_clear()
    step = harness.transform_step(lambda: make_rule(axis_name="slices"))
    params = harness.params()
    _, state = step.init(None, params, batches()[0, 0])
    apply = lambda x: step.apply({}, state, None, params, x)
    with caplog.at_level("WARNING"):
        for _ in range(2):
            jax.vmap(apply, axis_name="slice")(batches()[0])
    messages = [record.getMessage() for record in caplog.records]
    # The reduction within a slice has no axis, and the outer rule's is misspelled.
    assert sum("CrossShardOptimizer reduces over" in x for x in messages) == 1
    assert sum("OuterOptimizer reduces over the axis 'slices'" in x for x in messages)


def test_slices_with_one_state_are_refused_where_jax_tells():
    step = harness.transform_step(lambda: make_rule(axis_name="slice"))
    params = harness.params()
    _, state = step.init(None, params, batches()[0, 0])
    devices = np.array(jax.devices()[:2]).reshape(2, 1)
    mesh = jax.sharding.Mesh(devices, ("slice", "replica"))
    mapped = jax.shard_map(
        lambda state, x: step.apply({}, state, None, params, x)[1],
        mesh=mesh,
        in_specs=(jax.P(), jax.P("slice")),
        out_specs=jax.P(),
    )
    with pytest.raises(xshard.UserError, match="slices train apart. Give parameters"):
        jax.jit(mapped)(state, batches()[0, 0])


def test_an_overflow_skips_the_step_of_its_slice_alone():
    xs = batches(EVERY)
    # In the very step after which the slices exchange, and in the one before.
    poisoned = xs.at[1, 2].set(jnp.inf).at[2, 2].set(jnp.inf)
    history = follow(make_rule, xs=poisoned)
    scale = "mixed_precision_loss_scale_optimizer/~/dynamic_loss_scale"
    _, state = history[-1]
    scales = state[scale]["current_loss_scale"] / 2.0**15
    harness.assert_close(scales, np.array([1, 1, 0.25, 1]), rtol=0)
    harness.assert_close(state["inner"]["0/count"], np.array([3, 3, 1, 3]), rtol=0)
    # All slices have counted all steps, and so have exchanged after the same one.
    assert list(state[NAME]["steps"]) == [EVERY] * SLICES
    params, _ = history[-1]
    for x in jax.tree.leaves(params):
        assert all(np.array_equal(x[0], of_slice) for of_slice in x)
        assert np.all(np.isfinite(x))


def test_rounding_errors_are_sent_next():
    every = 1
    make = lambda: make_rule(outer=optax.sgd(1.0), every_steps=every, dtype="int8")
    first = harness.params()
    history = follow(make, xs=batches(5))
    # With this outer rule the parameters move by the mean of what was sent. All that
    # slices made of them arrives but for the last errors of rounding.
    _, state = history[-1]
    residual = state[NAME][f"residual/{W0}"]
    assert np.any(residual)
    for _, state in history:
        largest = np.abs(state[NAME][f"residual/{W0}"]).max()
        # At most half a code of the largest difference, which is a few rates.
        assert largest <= 8 * RATE / 127 / 2
    whole = follow(
        lambda: make_rule(outer=optax.sgd(1.0), every_steps=every), xs=batches(5)
    )
    distance = np.abs(
        history[-1][0]["mlp/linear_0"]["w"] - whole[-1][0]["mlp/linear_0"]["w"]
    ).max()
    moved = np.abs(first["mlp/linear_0"]["w"] - whole[-1][0]["mlp/linear_0"]["w"]).max()
    assert distance < moved / 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_slices_are_equal_after_an_exchange_whatever_they_send(dtype):
    make = lambda: make_rule(dtype=dtype)
    # On two replicas, each of which sends a half.
    params, state = follow(make, 2, xs=batches(EVERY))[-1]
    for x in jax.tree.leaves(params):
        assert all(np.array_equal(x[0], of_slice) for of_slice in x)
    alone, _ = follow(make, 1, xs=batches(EVERY))[-1]
    # The gradients of two replicas are summed in another order.
    harness.assert_close(params, alone, rtol=1e-4, atol=1e-5)
    slots = {name.partition("/")[0] for name in state[NAME]}
    of_rounding = {"residual"} if dtype == "int8" else set()
    assert slots == {"exchanged", "steps"} | of_rounding


def test_codes_restore_what_they_can_hold():
    x = jnp.arange(-127, 128, dtype=jnp.float32)
    x = jnp.tile(x, 40).reshape(8, -1)
    codes, scales = outer.quantize(x)
    assert codes.size == -(-x.size // 256) * 256
    restored = outer.dequantize(codes, scales, x.shape)
    np.testing.assert_array_equal(restored, x)


@pytest.mark.parametrize("shard_update", [False, True])
def test_the_exchange_sends_each_part_once_in_its_type(shard_update):
    # Of three arrays, 24 numbers, each of which fills a block of its own.
    blocks = 3
    bytes_of_type = {"float32": 4, "bfloat16": 2, "int8": 1}
    kind = "vmap_replicas" if shard_update else "shard_map"
    for dtype, size in bytes_of_type.items():
        make = functools.partial(make_rule, "outside", shard_update, dtype=dtype)
        params, state, step = on_slices(make, 2, kind)
        compiled = step.lower(params, state, batches()[0]).compile()
        found = [one for one in collectives.of(compiled) if one.is_conditional]
        # Replicas are neighbors, and slices are every second device.
        between = [one for one in found if one.groups == ((0, 2, 4, 6), (1, 3, 5, 7))]
        numbers = blocks * outer.BLOCK
        if not shard_update:
            # Each replica sends a half, in whole blocks.
            numbers = -(-blocks // 2) * outer.BLOCK
        # An all-reduce gives the sum, and a gather what all slices sent.
        slices = 1 if dtype == "float32" else SLICES
        scales = 4 * numbers / outer.BLOCK if "int" in dtype else 0
        sent = sum(one.bytes for one in between)
        assert sent == slices * (numbers * size + scales), (dtype, between)
        assert all(one.times == 1 for one in between)
        others = [one for one in collectives.of(compiled) if one not in found]
        assert all(one.groups != between[0].groups for one in others)


def test_untrained_parameters_are_not_exchanged():
    def step(params, x):
        opt = make_rule()
        loss = lambda p: harness.loss(p, x)
        return opt.minimize(loss, params, var_list=[W0])[1]

    step = hk.transform_with_state(step)
    _, state = step.init(None, harness.params(), batches()[0, 0])
    assert [name for name in state[NAME] if "/" in name] == [f"exchanged/{W0}"]


def test_slots_and_names():
    def step(params, x):
        opt = make_rule(dtype="int8")
        _, params = opt.minimize(lambda p: harness.loss(p, x), params)
        slots = opt.get_slot(W0, "exchanged"), opt.get_slot(W0, "residual")
        names = opt.get_slot_names()
        assert opt.get_slot(W0, "mu") is not None
        assert opt.get_slot("nothing", "exchanged") is None
        return slots, names, list(opt.state_by_name())

    step = hk.transform_with_state(step)
    _, state = step.init(None, harness.params(), batches()[0, 0])
    (slots, names, arrays), _ = step.apply(
        {}, state, None, harness.params(), batches()[0, 0]
    )
    assert [x.shape for x in slots] == [(3, 4), (3, 4)]
    assert {"exchanged", "residual", "mu", "nu"} <= set(names)
    assert f"{NAME}/exchanged/{W0}" in arrays
    assert any("outer/0/trace" in name for name in arrays)


def test_the_parameters_of_the_last_exchange_have_the_types_of_the_parameters():
    params = harness.params(jnp.bfloat16)
    state = {f"exchanged/{W0}": jnp.ones((3, 4), jnp.float32)}
    found = outer.exchanged(state, params)
    assert found["mlp/linear_0"]["w"].dtype == jnp.bfloat16
    harness.assert_equal(found["mlp/linear_1"], params["mlp/linear_1"])


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"every_steps": 0}, "every_steps must be an integer of at least 1"),
        ({"every_steps": True}, "every_steps must be an integer"),
        ({"dtype": "int2"}, "dtype must be one of float32, bfloat16, int8"),
        ({"fragments": 4}, "fragments=4 must be at most every_steps=3"),
        ({"delay_steps": 3}, "delay_steps must be .* below every_steps=3"),
        ({"axis_name": 3}, "axis_name must be the name of one axis"),
        ({"axis_name": "replica"}, "already reduces over the axis 'replica'"),
        ({"outer": 0.7}, "must have init"),
    ],
)
def test_bad_arguments_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        hk.transform(lambda: make_rule(**kwargs)).apply({}, None)


def test_two_outer_rules_are_refused():
    def build():
        return xshard.OuterOptimizer(make_rule(), every_steps=2)

    with pytest.raises(ValueError, match="already has an outer rule"):
        hk.transform(build).apply({}, None)


def test_another_rule_as_the_outer_one_is_refused():
    def build():
        return xshard.OuterOptimizer(inner(), inner("other"), every_steps=2)

    with pytest.raises(ValueError, match="must be an optax transformation"):
        hk.transform(build).apply({}, None)


def test_vmapped_replicas_need_slices_that_are_groups():
    mesh = harness.mesh(4)
    step = harness.transform_step(
        lambda: xshard.OuterOptimizer(inner(), every_steps=2, axis_name="replica")
    )
    params = harness.params()
    _, state = step.init(None, params, batches()[0, 0])
    local = lambda p, s, x: step.apply({}, s, None, p, x)
    mapped = xshard.vmap_replicas(
        local, mesh, in_specs=(jax.P(), jax.P(), jax.P("replica")), out_specs=jax.P()
    )
    with pytest.raises(xshard.UserError, match="only along an axis called 'group'"):
        jax.jit(mapped)(params, state, batches()[0, 0])


def test_a_rule_that_does_not_forward_the_exchange_is_refused():
    class Holder(xshard.Optimizer):
        def __init__(self):
            super().__init__()
            self.opt = xshard.OuterOptimizer(optax.sgd(0.1), every_steps=2)

        def update(self, grads, params):
            return self.opt.update(grads, params)

    step = harness.transform_step(Holder)
    with pytest.raises(ValueError, match="its own exchange does not call that of"):
        step.init(None, harness.params(), batches()[0, 0])
