"""Tests of faults that were found in the numbers of a step: of values that are not
finite, of narrow types, and of what is equal on all replicas.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xshard
from tests import toy
from xshard import errors
from xshard import experiment as experiment_lib
from xshard.optimizers import gathering, primitives, trees
from xshard.run import preflight

# Divisible by 1, 2, 3, 4, 6 and 8 replicas, each with 1, 2 or 3 micro-batches.
NUMERICS_ROWS = 144


class NumericsNormalized(toy.Normalized):
    """Has a batch norm, and a rule whose steps are skipped if they are not finite."""

    def optimizer(self):
        reduction = self.config.reduction
        if self.config.rule == "averages":
            rule = xshard.CrossShardOptimizer(optax.adam(0.1), **reduction)
            return xshard.MovingAverageOptimizer(rule, 0.5)
        if self.config.rule == "free":
            rule = optax.contrib.schedule_free_sgd(0.1)
            return xshard.CrossShardOptimizer(rule, **reduction)
        rule = xshard.CrossShardOptimizer(optax.adam(0.1), **reduction)
        rule = xshard.MovingAverageOptimizer(rule, 0.5)
        return xshard.MixedPrecisionLossScaleOptimizer(rule, "dynamic")


def _numerics_config(**changes):
    config = toy.get_config()
    config.batch_size = NUMERICS_ROWS
    config.reduction.update(changes.pop("reduction", {}))
    with config.unlocked():
        config.update(changes)
    return config.lock()


def _numerics_batch():
    x = np.random.default_rng(0).normal(size=(NUMERICS_ROWS, 3)).astype(np.float32)
    return {"x": x, "y": x.sum(1)}


class _NumericsSteps:
    """Makes steps of an experiment on some devices.

    Attributes:
      state: the state after the last step.
    """

    def __init__(self, kind, devices, groups=None, **changes):
        experiment = kind(_numerics_config(**changes))
        mesh = xshard.make_mesh(groups, devices=jax.devices()[:devices])
        self.state = xshard.init(experiment, mesh, 0, _numerics_batch())
        self._step = jax.jit(xshard.make_train_step(experiment, mesh))

    def __call__(self, batch=None):
        """Makes a step; returns its metrics on the host."""
        batch = _numerics_batch() if batch is None else batch
        self.state, metrics = self._step(self.state, batch)
        return jax.device_get(metrics)

    def leaves(self):
        """Returns the arrays of the state on the host, by path."""
        return _numerics_leaves(self.state)


def _numerics_leaves(state):
    leaves = trees.present(state.experiment)
    return {path: np.asarray(x) for path, x in leaves.items()}


def _numerics_bits(x):
    return np.ascontiguousarray(x).view(np.uint8).tolist()


@pytest.mark.parametrize(
    "rule, devices, changes",
    [
        ("averages", 4, {"reduction": {"shard_update": True}}),
        ("free", 2, {}),
        ("scaled", 2, {"reduction": {"shard_params": True}}),
    ],
)
def test_01_a_skipped_step_leaves_statistics_for_evaluation(rule, devices, changes):
    changes = {"estimate_statistics": True, "on_nonfinite": "skip", **changes}
    steps = _NumericsSteps(NumericsNormalized, devices, rule=rule, **changes)
    steps()
    for bad in (np.nan, np.inf):
        before = steps.leaves()
        batch = _numerics_batch()
        batch["x"][-1, 0] = bad
        assert steps(batch)["skipped"] == 1
        after = steps.leaves()
        statistics = [path for path in after if "/statistics/" in path]
        assert len(statistics) == 4
        for path, x in after.items():
            # A skipped step changes the state of a loss scale alone.
            if not path.endswith(("current_loss_scale", "good_steps")):
                assert _numerics_bits(x) == _numerics_bits(before[path]), path
    assert steps()["skipped"] == 0
    moved = steps.leaves()
    for path in statistics:
        assert np.all(np.isfinite(moved[path]))
        assert not np.array_equal(moved[path], after[path])


class NumericsConstant(toy.Toy):
    """Has a gradient that is a constant of the config, in each element."""

    def forward(self, batch, *, is_training):
        del is_training
        dtype = batch["x"].dtype
        return hk.get_parameter("w", (252, 8), dtype, hk.initializers.Constant(0.0))

    def loss(self, outputs, batch):
        del batch
        return jnp.sum(outputs.astype(jnp.float32)) * self.config.slope, {}

    def optimizer(self):
        return xshard.CrossShardOptimizer(
            optax.sgd(2.0**-10), slice_axis_name="slice", **self.config.reduction
        )


@pytest.mark.parametrize("dtype, devices", [("float16", 4), ("bfloat16", 3)])
@pytest.mark.parametrize(
    "changes",
    [{}, {"micro_batches": 3, "gather_once": True}],
    ids=str,
)
def test_02_a_mean_of_narrow_gradients_in_shards_is_exact(dtype, devices, changes):
    # Twice it overflows float16, and three times it needs more bits than bfloat16 has.
    slope = 41216.0
    precision = f"params={dtype},compute={dtype},output={dtype}"
    steps = _NumericsSteps(
        NumericsConstant,
        devices,
        slope=slope,
        precision=precision,
        reduction={"shard_params": True},
        **changes,
    )
    metrics = steps()
    (w,) = (x for path, x in steps.leaves().items() if path.endswith("/w"))
    np.testing.assert_array_equal(w.astype(np.float32), -slope * 2.0**-10)
    # A gradient of the mean of three parts is rounded in the narrow type.
    np.testing.assert_allclose(
        metrics["gradient_norm"], slope * np.sqrt(w.size), rtol=2e-3
    )


def _numerics_exchange(slopes, skips, mixing, first=None, **options):
    """Returns the parameters of slices after an exchange, and those before it.

    Args:
      slopes: the gradient of each slice.
      skips: for each slice, whether it skips its steps.
      mixing: as of `OuterOptimizer`.
      first: what all parameters of the first slice are before the steps, if anything.
      **options: further options of `OuterOptimizer`.
    """

    class Skipping(xshard.OptimizerWrapper):
        def __init__(self, opt, skips):
            super().__init__()
            self.opt = opt
            self.skips = skips

        def vote(self, grads):
            return ~self.skips

    def step(params, slope, skips):
        rule = Skipping(xshard.OptaxOptimizer(optax.sgd(1.0)), skips)
        rule = xshard.OuterOptimizer(
            rule, optax.sgd(1.0), every_steps=2, delay_steps=1, mixing=mixing, **options
        )
        return rule.apply_gradients({"m": {"w": jnp.full(100, slope)}}, params)

    step = hk.transform_with_state(step)
    w = np.random.default_rng(0).normal(size=100).astype(np.float32)
    params = {"m": {"w": jnp.asarray(w)}}
    _, state = step.init(None, params, 0.0, jnp.bool_(False))
    apply = lambda params, state, slope, skips: step.apply(
        {}, state, None, params, slope, skips
    )
    apply = jax.jit(jax.vmap(apply, axis_name="slice"))
    stack = lambda x: jnp.stack([x] * len(slopes))
    params, state = jax.tree.map(stack, (params, state))
    if first is not None:
        params = jax.tree.map(lambda x: x.at[0].set(first), params)
    for _ in range(3):
        params, state = apply(params, state, jnp.array(slopes), jnp.array(skips))
    return np.asarray(params["m"]["w"]), w


def test_01_a_slice_without_weight_does_not_count_in_an_exchange():
    after, before = _numerics_exchange(
        [1.0, 1.0],
        [True, False],
        mixing=0.0,
        first=np.inf,
        weights="applied_steps",
    )
    # Both take over what the second slice has sent after two steps.
    np.testing.assert_allclose(after, np.stack([before - 2] * 2), rtol=1e-6)


def test_31_parameters_that_an_exchange_leaves_alone_stay_as_they_are():
    after, before = _numerics_exchange([0.0] * 3, [False] * 3, mixing=0.3)
    for of_slice in after:
        np.testing.assert_array_equal(of_slice, before)


class NumericsGiving(xshard.OptimizerWrapper):
    """Gives each parameter without a gradient one of 3."""

    def __init__(self, opt):
        super().__init__()
        self.opt = opt

    def aggregate(self, grads):
        grads = trees.leaves_by_path(self.opt.aggregate(grads))
        if grads["~/unused"] is None:
            grads["~/unused"] = jnp.full((48, 16), 3.0)
        return {"~": {name.removeprefix("~/"): x for name, x in grads.items()}}


class NumericsUnused(toy.Toy):
    """Has a parameter that the loss does not depend on."""

    def forward(self, batch, *, is_training):
        del is_training
        hk.get_parameter("unused", (48, 16), init=jnp.zeros)
        used = hk.get_parameter("used", (48, 16), init=jnp.zeros)
        return batch["x"][:, 0] + jnp.sum(used)

    def optimizer(self):
        rule = xshard.OptaxOptimizer(optax.sgd(0.5, momentum=0.5))
        if self.config.gives_within:
            rule = NumericsGiving(rule)
        rule = xshard.CrossShardOptimizer(rule, **self.config.reduction)
        if not self.config.gives_within:
            rule = NumericsGiving(rule)
        return rule


@pytest.mark.parametrize("shard_update", [False, True])
@pytest.mark.parametrize("gives_within", [False, True])
def test_05_a_gradient_that_aggregate_gives_moves_its_parameter(
    shard_update, gives_within
):
    reduction = {"shard_update": shard_update}
    steps = _NumericsSteps(
        NumericsUnused, 3, gives_within=gives_within, reduction=reduction
    )
    steps()
    steps()
    leaves = steps.leaves()
    # Within the reduction the gradients of all replicas are summed.
    slope = 9.0 if gives_within else 3.0
    (trace,) = (x for path, x in leaves.items() if path.endswith("trace/~/unused"))
    np.testing.assert_array_equal(trace, 1.5 * slope)
    np.testing.assert_array_equal(leaves["params/~/unused"], -0.5 * 2.5 * slope)
    assert np.all(leaves["params/~/used"] != 0)


def _numerics_regions(jaxpr):
    """Yields `prevent_cse` of the `jax.checkpoint` regions that apply tanh."""
    for eqn in primitives.all_equations(jaxpr):
        if eqn.primitive.name == "remat2":
            inner = primitives.all_equations(eqn.params["jaxpr"])
            if any(x.primitive.name == "tanh" for x in inner):
                yield eqn.params["prevent_cse"]


@pytest.mark.parametrize("scans", [False, True])
@pytest.mark.parametrize("prevent_cse", [False, True, (False, True)], ids=str)
def test_11_a_rematerialization_keeps_whether_it_prevents_cse(prevent_cse, scans):
    def layer(x, w):
        return jnp.tanh(x * w), None

    layer = jax.checkpoint(layer, prevent_cse=prevent_cse)

    def network(x):
        ws = hk.get_parameter("ws", (2, 512), init=jnp.ones)
        if scans:
            return hk.scan(layer, x, ws)[0]
        return layer(x, ws[0])[0]

    def loss_gradients(apply):
        loss = lambda params, x: jnp.sum(apply(params, {}, None, x)[0])
        return jax.grad(loss, argnums=(0, 1))

    mesh = xshard.make_mesh(devices=jax.devices()[:1])
    x = jnp.ones(512)
    transformed = hk.transform_with_state(network)
    params, _ = transformed.init(None, x)
    gatherer = gathering.Gatherer(mesh, {})
    apply = gatherer.apply(network, jnp.float32)
    expected = jax.make_jaxpr(loss_gradients(transformed.apply))(params, x)
    found = jax.make_jaxpr(loss_gradients(apply))(params, x)
    # The region around the whole network prevents it, and its own do as they are told.
    outer, *inner = _numerics_regions(found.jaxpr)
    assert outer is True
    assert inner == list(_numerics_regions(expected.jaxpr))
    np.testing.assert_array_equal(
        *(jax.jit(loss_gradients(f))(params, x)[1] for f in (transformed.apply, apply))
    )


class NumericsFixed(toy.Toy):
    """Has network state that nothing sets, or that no replica's data changes; and a
    mean of its data.
    """

    def forward(self, batch, *, is_training):
        dtype = jnp.dtype(self.config.state_dtype)
        draw = hk.initializers.RandomNormal()
        largest = hk.initializers.Constant(float(jnp.finfo(dtype).max))
        hk.get_state("table", (1000,), dtype, draw)
        hk.get_state("largest", (), dtype, largest)
        hk.get_state("masked", (2,), dtype, lambda *_: jnp.array([-jnp.inf, -0.0]))
        cooled = hk.get_state("cooled", (), dtype, jnp.ones)
        seen = hk.get_state("seen", (5,), dtype, jnp.zeros)
        if is_training:
            hk.set_state("cooled", cooled * jnp.asarray(0.9, dtype))
            hk.set_state("seen", seen + jnp.mean(batch["x"]).astype(dtype))
        return hk.Linear(1)(batch["x"])[:, 0]

    def optimizer(self):
        rule = xshard.CrossShardOptimizer(
            optax.sgd(0.1), slice_axis_name="slice", **self.config.reduction
        )
        return xshard.MovingAverageOptimizer(rule, 0.3)


def _numerics_check_fixed(before, after, steps):
    """Checks the state of `NumericsFixed` before and after some steps."""
    names = [path for path in after if path.endswith(("table", "largest", "masked"))]
    # The network's state, and its averages for evaluation.
    assert len(names) == 6
    for path in names:
        assert _numerics_bits(after[path]) == _numerics_bits(before[path]), path
    (cooled,) = (x for path, x in after.items() if path.endswith("net_state/~/cooled"))
    expected = np.ones((), cooled.dtype)
    for _ in range(steps):
        expected *= np.asarray(0.9, cooled.dtype)
    assert np.all(cooled == expected)
    (seen,) = (x for path, x in after.items() if path.endswith("net_state/~/seen"))
    # Sums in another order, and of numbers that cancel, differ by some last bits.
    mean = np.mean(_numerics_batch()["x"], dtype=np.float64)
    rtol = 1e-2 if seen.dtype == np.float16 else 1e-4
    np.testing.assert_allclose(seen.astype(np.float32), steps * mean, rtol=rtol)


@pytest.mark.parametrize(
    "devices, changes",
    [
        (3, {}),
        (6, {"reduction": {"shard_update": True}}),
        (3, {"reduction": {"shard_params": True}, "micro_batches": 3}),
        (8, {"state_dtype": "float16"}),
    ],
    ids=str,
)
def test_31_state_that_replicas_hold_alike_stays_as_it_is(devices, changes):
    steps = _NumericsSteps(
        NumericsFixed, devices, **{"state_dtype": "float32", **changes}
    )
    before = steps.leaves()
    for _ in range(3):
        steps()
    _numerics_check_fixed(before, steps.leaves(), steps=3)


def test_31_state_that_groups_hold_alike_stays_as_it_is():
    groups = ((0, 1, 2), (3, 4, 5))
    steps = _NumericsSteps(NumericsFixed, 6, groups, state_dtype="float32")
    before = steps.leaves()
    for _ in range(3):
        steps()
    for path, x in steps.leaves().items():
        if path.endswith(("table", "largest", "masked")):
            assert _numerics_bits(x) == _numerics_bits(before[path]), path


def test_31_state_that_logical_replicas_hold_alike_stays_as_it_is():
    """An exact sum rounds small elements beside large ones, on one device too."""
    config = _numerics_config(
        state_dtype="float32",
        logical_replicas=3,
        reduction={"arithmetic": "exact"},
        examples=NUMERICS_ROWS,
    )
    final = []
    for devices in (1, 3):
        experiment = NumericsFixed(config)
        mesh = experiment_lib.mesh_of(config, jax.devices()[:devices])
        batch = _numerics_batch()
        state = xshard.init(experiment, mesh, 0, batch)
        before = _numerics_leaves(state)
        step = preflight.jitted_step(experiment, mesh)
        for _ in range(3):
            state = step(state, batch).state
        final.append(_numerics_leaves(state))
        _numerics_check_fixed(before, final[-1], steps=3)
    for path, x in final[0].items():
        assert _numerics_bits(x) == _numerics_bits(final[1][path]), path


class NumericsEmpty(toy.Toy):
    """Has two trained arrays without elements."""

    def forward(self, batch, *, is_training):
        del is_training
        w = hk.get_parameter("w", (3,), init=jnp.zeros)
        empty = hk.get_parameter("none", (0,), init=jnp.zeros)
        empty_too = hk.get_parameter("nothing", (0, 4), init=jnp.zeros)
        return batch["x"] @ w + jnp.sum(empty) + jnp.sum(empty_too)

    def optimizer(self):
        rule = optax.sgd(0.1, momentum=0.9)
        return xshard.CrossShardOptimizer(rule, **self.config.reduction)


def test_21_arrays_without_elements_are_fragments_of_their_own():
    trained = []
    for fragments in (1, 3):
        outer = {"every_steps": 3, "dtype": "int4", "fragments": fragments}
        config = _numerics_config(slices=2)
        with config.unlocked():
            config.outer.update(outer)
        mesh = experiment_lib.mesh_of(config, jax.devices()[:4])
        experiment = NumericsEmpty(config)
        state = xshard.init(experiment, mesh, 0, _numerics_batch())
        step = jax.jit(xshard.make_train_step(experiment, mesh))
        for _ in range(4):
            state, _ = step(state, _numerics_batch())
        trained.append(_numerics_leaves(state)["params/~/w"])
    # The array with elements is in the first fragment.
    assert np.all(trained[0] != 0)
    np.testing.assert_array_equal(trained[1], trained[0])


class NumericsCounting(toy.Toy):
    """Logs integers, of which some are equal on all replicas."""

    def forward(self, batch, *, is_training):
        del is_training
        return hk.Linear(1)(batch["x"])[:, 0]

    def loss(self, outputs, batch):
        rows = jnp.int32(len(outputs))
        mapped = ("slice", "replica")
        index = jax.lax.axis_index(mapped)
        return jnp.mean(outputs**2), {
            "constant": jnp.int32(2**24 + 1),
            "python": -(2**31),
            "narrow": jnp.uint8(200),
            "flag": jnp.bool_(True),
            "total": jax.lax.psum(rows, mapped) + 2**24 + 1,
            "index": index.astype(jnp.int32),
            "drawn": jax.random.randint(hk.next_rng_key(), (), 0, 2**20),
            "positive": jnp.sum(batch["x"] > 0).astype(jnp.int32),
        }

    def optimizer(self):
        return xshard.CrossShardOptimizer(
            optax.sgd(0.1), slice_axis_name="slice", **self.config.reduction
        )


@pytest.mark.parametrize(
    "devices, changes",
    [
        (3, {}),
        (2, {"reduction": {"shard_params": True}, "micro_batches": 2}),
    ],
    ids=str,
)
def test_09_integers_beside_a_loss_are_kept_if_no_replica_has_its_own(devices, changes):
    steps = _NumericsSteps(NumericsCounting, devices, **changes)
    metrics = steps()
    parts = changes.get("micro_batches", 1)
    rows = NUMERICS_ROWS // parts
    kept = {
        "constant": 2**24 + 1,
        "python": -(2**31),
        "narrow": 200,
        "total": 2**24 + 1 + rows,
    }
    for name, expected in kept.items():
        assert metrics[name].dtype == np.int32 and metrics[name] == expected, name
    assert metrics["flag"].dtype == np.float32 and metrics["flag"] == 1
    # What may differ is averaged.
    for name in ("index", "drawn", "positive"):
        assert metrics[name].dtype == np.float32, name
    assert metrics["index"] == (devices - 1) / 2
    positive = np.sum(_numerics_batch()["x"] > 0)
    np.testing.assert_allclose(metrics["positive"], positive / devices / parts)


@pytest.mark.parametrize(
    "value, of_step",
    [(2**31, False), (np.int64(-(2**31) - 1), True), ("uint32", False)],
    ids=str,
)
def test_09_an_integer_that_a_row_would_round_is_refused(value, of_step):
    class Refused(toy.Toy):
        def loss(self, outputs, batch):
            return jnp.mean(outputs**2), {} if of_step else {"big": value}

        def train_step(self, state, batch, key):
            state, outcome = super().train_step(state, batch, key)
            return state, {"": outcome, "big": value} if of_step else outcome

    if value == "uint32":
        value = jnp.uint32(7)
    steps = _NumericsSteps(Refused, 1)
    with pytest.raises(
        errors.UserError, match="'big' as .*, which .*fit int32, and fl"
    ):
        steps()


class NumericsWeighted(NumericsCounting):
    """Weighs each part by the number of its rows that count, and divides by it."""

    def weight(self, batch):
        return jnp.sum(batch["counts"])

    def loss(self, outputs, batch):
        counts = batch["counts"]
        error = jnp.sum(counts * outputs**2)
        count = jnp.sum(counts)
        scalars = {
            "error": error / count,
            "constant": jnp.int32(2**24 + 1),
            "number": count.astype(jnp.int32),
        }
        return error / jnp.maximum(count, 1), scalars


def test_01_scalars_of_a_part_without_weight_do_not_count():
    batch = _numerics_batch()
    metrics = []
    for devices, parts in ((1, 1), (4, 2)):
        # On several replicas some parts have no rows that count, so no mean.
        batch["counts"] = np.arange(NUMERICS_ROWS) < NUMERICS_ROWS // 3
        batch["counts"] = batch["counts"].astype(np.float32)
        steps = _NumericsSteps(NumericsWeighted, devices, micro_batches=parts)
        metrics.append(steps(batch))
    whole, divided = metrics
    # Sums in another order.
    for name in ("loss", "error", "gradient_norm"):
        np.testing.assert_allclose(divided[name], whole[name], rtol=1e-5)
    # Averaged by weights: parts of 18 rows, two of which count wholly, and one by 12.
    assert whole["number"] == 48
    np.testing.assert_allclose(divided["number"], (18 * 18 * 2 + 12 * 12) / 48)
    assert whole["constant"] == divided["constant"] == 2**24 + 1
