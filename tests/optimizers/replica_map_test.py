"""Tests of functions of one replica that `jax.vmap` maps over the replicas, and of the
parts that each calls by itself.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xshard
from tests.optimizers import harness
from xshard import errors
from xshard.learners import measures
from xshard.optimizers import layouts as layouts_lib
from xshard.optimizers import replica_calls, shards

AXES = ("group", "slice", "replica")
WHOLE = jax.P()
ROWS = jax.P(AXES)
# The sizes of the axes: each of them alone, two, and all three.
SHAPES = [(1, 1, 8), (2, 1, 4), (1, 2, 4), (2, 2, 2), (1, 8, 1), (8, 1, 1), (1, 1, 1)]


def make_mesh(shape):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return jax.sharding.Mesh(devices, AXES)


def both(f, shape, in_specs, out_specs, *args):
    """Returns what `vmap_replicas` and `jax.shard_map` make of a function of one
    replica.
    """
    mesh = make_mesh(shape)
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    mapped = xshard.vmap_replicas(f, mesh, **specs)
    wanted = jax.shard_map(f, mesh=mesh, check_vma=False, **specs)
    return jax.jit(mapped)(*args), jax.jit(wanted)(*args)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_function_sees_its_part_as_under_shard_map(shape):
    def f(w, x):
        total = jax.lax.psum(x @ w, ("slice", "replica"))
        number = jax.lax.axis_index(("slice", "replica"))
        return total[None], x * w[0] + number.astype(x.dtype), jnp.sum(w)

    w = jnp.arange(3.0)
    x = jnp.arange(24.0).reshape(8, 3)[: 8 // (8 // np.prod(shape))]
    out_specs = (jax.P("group"), ROWS, WHOLE)
    got, wanted = both(f, shape, (WHOLE, ROWS), out_specs, w, x)
    harness.assert_equal(got, wanted)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_replica_calls_a_function_by_itself(shape):
    def local(scale, x):
        # Rounds that differ by replica, and collectives that jax.vmap has not.
        rounds = jax.lax.fori_loop(
            0, jax.lax.axis_index(AXES) + 1, lambda _, x: 2 * x, x * scale
        )
        gathered = jax.lax.all_gather(rounds, ("slice", "replica"))
        return gathered, rounds, jnp.int32(3), jax.random.fold_in(jax.random.key(0), 1)

    def f(scale, x):
        gathered, rounds, number, key = xshard.per_replica(local)(scale, x)
        return gathered[None], rounds, number, jax.random.key_data(key)

    x = jnp.arange(16.0).reshape(8, 2)[: np.prod(shape)]
    out_specs = (jax.P("group"), ROWS, WHOLE, WHOLE)
    got, wanted = both(f, shape, (WHOLE, ROWS), out_specs, jnp.float32(3), x)
    harness.assert_equal(got, wanted)


def test_numbers_and_keywords_keep_their_types():
    def local(x, factor, *, shift):
        assert factor.weak_type and shift.dtype == jnp.int32
        return x * factor + shift.astype(x.dtype)

    def f(x):
        return xshard.per_replica(local)(x, 0.5, shift=jax.lax.axis_index("replica"))

    specs = {"in_specs": ROWS, "out_specs": ROWS}
    mapped = xshard.vmap_replicas(f, make_mesh((1, 1, 8)), **specs)
    got = jax.jit(mapped)(jnp.ones(8, jnp.bfloat16))
    harness.assert_equal(got, 0.5 + jnp.arange(8, dtype=jnp.bfloat16))


def test_what_a_function_closes_over_may_be_mapped():
    def f(x):
        mean = jax.lax.pmean(x, "replica")
        return xshard.per_replica(lambda y: x * y + mean)(x + 1)

    got, wanted = both(f, (2, 1, 4), ROWS, ROWS, jnp.arange(8.0))
    harness.assert_equal(got, wanted)


def test_a_loop_may_call_it_in_each_round():
    def f(x):
        def body(total, scale):
            local = lambda x: x * scale + jax.lax.axis_index("replica").astype(x.dtype)
            part = xshard.per_replica(local)(x)
            return total + jax.lax.psum(part, "replica"), part

        return jax.lax.scan(body, jnp.zeros(x.shape), jnp.arange(3.0))

    specs = jax.P("replica"), (WHOLE, jax.P(None, "replica"))
    got, wanted = both(f, (1, 1, 8), *specs, jnp.arange(16.0))
    harness.assert_equal(got, wanted)


@pytest.mark.parametrize("shape", [(2, 1, 4), (1, 2, 4), (2, 2, 2)], ids=str)
def test_whole_arrays_may_lie_in_shards(shape):
    """Scatters sums, updates global arrays and gathers them, in each group."""
    mesh = make_mesh(shape)
    count = shape[2]

    def f(x):
        layout = layouts_lib.layout("w", (8, 3), count)
        partition = shards.Partition({"w": layout}, count, "replica")
        spec = partition.spec(layout)
        total = xshard.per_replica(
            lambda x: partition.scatter(layout, x), out_specs=spec
        )(x[0])
        total = jax.lax.psum(total, "slice")
        norm = jnp.linalg.norm(total)
        (whole,) = partition.gather_global({"w": total / norm}).values()
        share, rest = measures.sums_of_squares(partition, {"w": total})
        return whole[None], (jax.lax.pmean(share, "replica") + rest)[None], norm[None]

    x = jax.random.normal(jax.random.key(0), (8, 8, 3))
    per_group = jax.P("group")
    mapped = xshard.vmap_replicas(f, mesh, in_specs=ROWS, out_specs=per_group)
    whole, squares, norm = jax.jit(mapped)(x)
    sums = x.reshape(shape[0], -1, 8, 3).sum(axis=1)
    norms = jnp.linalg.norm(sums, axis=(1, 2))
    # Sums in another order.
    np.testing.assert_allclose(norm, norms, rtol=1e-6)
    np.testing.assert_allclose(squares, norms**2, rtol=1e-5)
    np.testing.assert_allclose(whole, sums / norms[:, None, None], rtol=1e-5, atol=1e-7)
    # Every device of a group has the group's own array.
    for shard in whole.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])


def test_a_result_that_differs_is_refused():
    mapped = xshard.vmap_replicas(
        lambda x: x, make_mesh((1, 1, 8)), in_specs=ROWS, out_specs=WHOLE
    )
    with pytest.raises(ValueError, match="out_axes is None"):
        jax.eval_shape(mapped, jnp.arange(8.0))


def test_a_declaration_takes_any_copy():
    def f(x):
        seen = jax.lax.all_gather(x, "replica")[0]
        return xshard.equal_on_replicas({"a": seen + 0 * x, "b": jnp.float32(2)})

    mapped = xshard.vmap_replicas(
        f, make_mesh((1, 1, 8)), in_specs=ROWS, out_specs=WHOLE
    )
    got = jax.jit(mapped)(jnp.arange(8.0) + 5)
    harness.assert_equal(got, {"a": jnp.full(1, 5.0), "b": jnp.float32(2)})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_wrong_declaration_leaves_each_device_its_replicas_copy(shape):
    # So that the fingerprints of a run's state show it. The index is also that of axes
    # of size 1, along which JAX maps it, too.
    def f(x):
        index = jax.lax.axis_index(("slice", "replica"))
        return x, xshard.equal_on_replicas(index)[None]

    mapped = xshard.vmap_replicas(
        f, make_mesh(shape), in_specs=ROWS, out_specs=(ROWS, jax.P("group"))
    )
    count = np.prod(shape)
    _, indices = jax.jit(mapped)(jnp.arange(float(count)))
    copies = [int(shard.data[0]) for shard in indices.addressable_shards]
    assert copies == list(range(count // shape[0])) * shape[0]


def test_groups_stay_apart_in_a_declaration():
    f = lambda x: xshard.equal_on_replicas(
        jax.lax.psum(x, ("slice", "replica")) + 0 * x
    )
    mapped = xshard.vmap_replicas(
        f, make_mesh((2, 1, 4)), in_specs=ROWS, out_specs=jax.P("group")
    )
    np.testing.assert_array_equal(jax.jit(mapped)(jnp.arange(8.0)), [6.0, 22.0])


def test_a_replicas_own_value_is_found_and_named():
    def f(x):
        values = {"own": x, "sum": jax.lax.psum(x, "replica"), "number": jnp.float32(1)}
        replica_calls.check_equal(
            values, lambda name: errors.UserError(f"{name} differs")
        )
        return x

    mapped = xshard.vmap_replicas(
        f, make_mesh((2, 1, 4)), in_specs=ROWS, out_specs=ROWS
    )
    with pytest.raises(errors.UserError, match="own differs"):
        jax.eval_shape(mapped, jnp.arange(8.0))


def test_a_collective_that_jax_cannot_map_is_explained():
    f = lambda x: jax.lax.all_gather(x, ("slice", "replica"))
    mapped = xshard.vmap_replicas(
        f, make_mesh((1, 2, 4)), in_specs=ROWS, out_specs=WHOLE
    )
    with pytest.raises((NotImplementedError, AssertionError)) as e:
        jax.eval_shape(mapped, jnp.arange(8.0))
    assert (
        "Wrap the function that calls the collective in xshard.per_replica"
        in "\n".join(e.value.__notes__)
    )


def test_elsewhere_a_function_is_called_as_it_is():
    assert xshard.per_replica(lambda x: x + 1)(2) == 3


def test_a_decorated_function_decides_where_it_is_called():
    calls = []

    @xshard.per_replica
    def f(x):
        calls.append(replica_calls.is_current())
        return x

    mapped = xshard.vmap_replicas(
        f, make_mesh((1, 1, 8)), in_specs=ROWS, out_specs=ROWS
    )
    jax.eval_shape(mapped, jnp.arange(8.0))
    # Within, it is one replica's function under `jax.shard_map`.
    assert calls == [False]


def test_a_jitted_function_is_traced_for_each_way_to_map():
    calls = []

    @jax.jit
    def inner(x):
        calls.append(replica_calls.is_current())
        return xshard.per_replica(lambda x: 2 * x)(x)

    x = jnp.arange(8.0)
    jax.vmap(inner, axis_name="replica")(x[:, None])
    for f in (inner, lambda x: xshard.per_replica(inner)(x)):
        mapped = xshard.vmap_replicas(
            f, make_mesh((1, 1, 8)), in_specs=ROWS, out_specs=ROWS
        )
        np.testing.assert_array_equal(jax.jit(mapped)(x), 2 * x)
    assert calls == [False, True, False]


class Perturbed(xshard.OptimizerWrapper):
    """Keeps values of a step as attributes, draws keys, and differentiates twice."""

    def __init__(self, opt):
        super().__init__(name="perturbed")
        self.opt = opt

    def compute_gradients(self, loss, params, **kwargs):
        _, grads = self.opt.compute_gradients(loss, params, **kwargs)
        if hk.running_init():
            self.seen = {"norm": jnp.float32(0), "name": "norm"}
            return self.opt.compute_gradients(loss, params, **kwargs)
        self.seen = {
            "norm": jax.lax.pmean(optax.tree.norm(grads), "replica"),
            "name": "norm",
        }
        noise = jax.random.normal(hk.next_rng_key(), ())
        moved = jax.tree.map(lambda p, g: p + 0.01 * g + 0.001 * noise, params, grads)
        return self.opt.compute_gradients(loss, moved, **kwargs)

    def update(self, grads, params):
        assert self.seen["name"] == "norm"
        scaled = jax.tree.map(lambda g: g / (1 + self.seen["norm"]), grads)
        return self.opt.update(scaled, params)


def test_differentiation_of_a_rules_own_is_each_replicas():
    ends = []
    for shard_update in (False, True):

        def make(shard_update=shard_update):
            # A gradient near 0 must not become a step of 0.1 by its rounding.
            adam = xshard.OptaxOptimizer(optax.adam(0.1, eps=1e-2), name="adam")
            inner = xshard.CrossShardOptimizer(adam, shard_update=shard_update)
            return xshard.MixedPrecisionLossScaleOptimizer(Perturbed(inner), "dynamic")

        def step(params, x, make=make):
            def loss(p):
                calls = hk.get_state("calls", [], jnp.int32, jnp.zeros)
                hk.set_state("calls", calls + 1)
                noise = jax.random.normal(hk.next_rng_key(), x.shape)
                return harness.loss(p, x + 0.1 * noise)

            new = make().minimize(loss, params)[1]
            return new, hk.get_state("calls"), jax.random.normal(hk.next_rng_key())

        rules = hk.transform_with_state(step)
        params = harness.params()
        x = harness.batch()
        _, state = rules.init(jax.random.key(0), params, x)
        local = lambda s, x, rules=rules: rules.apply(
            {}, s, jax.random.key(1), params, x
        )
        specs = {"in_specs": (WHOLE, jax.P("replica")), "out_specs": WHOLE}
        if shard_update:
            run = xshard.vmap_replicas(local, harness.mesh(4), **specs)
        else:
            run = jax.shard_map(local, mesh=harness.mesh(4), check_vma=False, **specs)
        ends.append(jax.jit(run)(state, x))
    (replicated, _), (sharded, _) = ends
    assert int(replicated[1]) == 2
    # Sums are in another order.
    harness.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)
    harness.assert_equal(sharded[1:], replicated[1:])


class ByLargestLoss(xshard.OptimizerWrapper):
    """Divides by the largest loss of all replicas, which a function gathers."""

    def __init__(self, opt, gather):
        super().__init__(name="by_largest_loss")
        self.opt = opt
        self._gather = gather

    def compute_gradients(self, loss, params, **kwargs):
        value, grads = self.opt.compute_gradients(loss, params, **kwargs)
        if not hk.running_init():
            self._losses = self._gather(value)
        return value, grads

    def update(self, grads, params):
        if not hk.running_init():
            largest = jnp.max(self._losses)
            grads = jax.tree.map(lambda g: g / largest, grads)
        return self.opt.update(grads, params)


def _step_by_largest_loss(gather, *, shard_update):
    """Returns the parameters after a step on two slices of four replicas."""

    def step(params, x):
        sgd = xshard.OptaxOptimizer(optax.sgd(0.1), name="sgd")
        inner = xshard.CrossShardOptimizer(
            sgd, slice_axis_name="slice", shard_update=shard_update
        )
        rule = ByLargestLoss(inner, gather)
        return rule.minimize(lambda p: harness.loss(p, x), params)[1]

    rules = hk.transform_with_state(step)
    params = harness.params()
    x = harness.batch()
    _, state = rules.init(None, params, x)
    local = lambda params, x: rules.apply({}, state, None, params, x)[0]
    specs = {"in_specs": (WHOLE, ROWS), "out_specs": WHOLE}
    mesh = make_mesh((1, 2, 4))
    if shard_update:
        run = xshard.vmap_replicas(local, mesh, **specs)
    else:
        run = jax.shard_map(local, mesh=mesh, check_vma=False, **specs)
    return jax.jit(run)(params, x)


def test_what_jax_cannot_map_beside_a_loss_is_explained_or_wrapped():
    gather = lambda x: jax.lax.all_gather(x, ("slice", "replica"))
    wanted = _step_by_largest_loss(gather, shard_update=False)
    wrapped = xshard.per_replica(gather)
    got = _step_by_largest_loss(wrapped, shard_update=True)
    # Sums in another order.
    harness.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises((NotImplementedError, AssertionError)) as e:
        _step_by_largest_loss(gather, shard_update=True)
    assert "in xshard.per_replica" in "\n".join(e.value.__notes__)
