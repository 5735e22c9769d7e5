"""Tests of networks in float8: which of their products are, and what they train."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xshard
from tests import toy, winged
from tests.optimizers import harness
from xshard import errors
from xshard import experiment as experiment_lib
from xshard.learners import fp8, run_context
from xshard.run import preflight
from xshard.training import state as state_lib
from xshard.training import step

STEPS = 5
MIDDLE = "mlp/~/linear_1"
RATE = 0.01
# By how much of its norm a gradient in float8 may be off. An operand is off by at most
# 1/16 of each number, a gradient on its way by 1/8; these networks have up to three
# products in a row, whose errors are mostly of random sign.
NEAR = 0.15


class Net(toy.Toy):
    """Regression by a network of three layers, the middle one of which is in float8."""

    def train_data(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(self.config.examples, 8)).astype(np.float32)
        return {"x": x, "y": x @ np.arange(8, dtype=np.float32) / 8}

    def forward(self, batch, *, is_training):
        del is_training
        return hk.nets.MLP([16, 16, 1])(batch["x"])[:, 0]

    def loss(self, outputs, batch):
        return jnp.mean((outputs - batch["y"]) ** 2), {}

    def optimizer(self):
        return optax.sgd(RATE)


def config_of(**changes):
    config = toy.get_config()
    config.experiment = f"tests.learners.fp8_test.{changes.pop('kind', 'Net')}"
    config.examples = 160
    config.update_from_flattened_dict({"fp8.dots": True, "batch_size": 16, **changes})
    return config.lock()


def of(forward, base=Net):
    """Returns the experiment of a network, a Haiku function of inputs of 8 features."""

    class Own(base):
        def forward(self, batch, *, is_training):
            del is_training
            return forward(batch["x"])[:, 0]

    return Own


def train(experiment, devices=4, steps=STEPS, see=lambda before, batch, stepped: None):
    """Trains in the order of the examples; returns the last state and all metrics."""
    config = experiment.config
    mesh = experiment_lib.mesh_of(config, jax.devices()[:devices])
    examples = experiment.train_data()
    size = config.batch_size * max(len(config.group_assignment), 1)
    batch = {name: x[:size] for name, x in examples.items()}
    state = state_lib.init(experiment, mesh, 0, batch)
    apply = jax.jit(step.make_watched_step(experiment, mesh))
    metrics = []
    for i in range(steps):
        batch = {name: x[i * size : (i + 1) * size] for name, x in examples.items()}
        stepped = apply(state, batch)
        see(state.experiment, batch, stepped)
        state = stepped.state
        metrics.append(jax.device_get(stepped.metrics))
    return state, metrics


def moved(kind, **changes):
    """Returns what the first step of an experiment adds to its parameters."""
    states = []
    see = lambda before, _, stepped: states.append((before, stepped.state.experiment))
    train(kind(config_of(**changes)), steps=1, see=see)
    ((before, after),) = states
    subtract = lambda new, old: np.asarray(new, np.float64) - np.asarray(old)
    return jax.tree.map(subtract, after.params, before.params)


def distance(found, expected):
    """Returns how far one tree is from another, in units of the norm of the other."""
    error = jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), found, expected)
    return float(optax.tree.norm(error) / optax.tree.norm(expected))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"micro_batches": 2},
        {"reduction.shard_update": True},
        {"reduction.shard_params": True},
        {"loss_scale.kind": "dynamic"},
        {"fp8.gradient_format": "float8_e4m3fn", "reduction.reduction": "sum"},
        {"fp8.edges": True},
        {"slices": 2},
        {"group_assignment": ((0, 1), (2, 3))},
    ],
    ids=str,
)
def test_gradients_are_those_of_float32_within_rounding(changes):
    found = moved(Net, **changes)
    expected = moved(Net, **{**changes, "fp8.dots": False})
    assert 1e-4 < distance(found, expected) < NEAR


class Target(Net):
    """Beside its outputs uses those of inputs 10,000 times as large, without their
    derivative, as of a target or a teacher.
    """

    def training_loss(self, state, batch, key):
        out, net_state = self.learner.apply(state, key, batch, is_training=True)
        far = {**batch, "x": 1e4 * batch["x"]}
        target, _ = self.learner.apply(state, key, far, is_training=True)
        target = jax.lax.stop_gradient(target)
        error = jnp.mean((out - 1e-4 * target - batch["y"]) ** 2)
        return error, net_state, {"target": jnp.mean(jnp.abs(target))}


@pytest.mark.parametrize("changes", [{}, {"micro_batches": 2}], ids=str)
def test_a_product_that_is_not_differentiated_has_a_scale_of_its_own(changes):
    changes = {"fp8.edges": True, **changes}
    of_float8 = Target(config_of(**changes))
    of_float32 = Target(config_of(**{**changes, "fp8.dots": False}))
    _, found = train(of_float8)
    _, expected = train(of_float32)
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs["target"] > 1000
        np.testing.assert_allclose(ours["target"], theirs["target"], rtol=NEAR)
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=NEAR)


class Gan(xshard.Experiment):
    """Two learners; the loss of the first goes through the network of the second, and
    is much larger there than the second's own.
    """

    def __init__(self, config):
        super().__init__(config)
        # Each step is as large as without the weight.
        rule = optax.sgd(1e-3 / config.weight)
        make = lambda x: hk.nets.MLP([8, 8, 6])(x)
        judge = lambda x: hk.nets.MLP([16, 16, 1])(x)
        self.make = xshard.Learner(make, rule, self.config)
        self.judge = xshard.Learner(judge, rule, self.config)

    def train_data(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(self.config.examples, 6)).astype(np.float32)
        return {"x": x, "noise": x[:, :4] ** 2}

    def eval_data(self):
        return self.train_data()

    def init(self, key, batch):
        return {
            "make": self.make.init(key, batch["noise"]),
            "judge": self.judge.init(key, batch["x"]),
        }

    def train_step(self, state, batch, key):
        def judge_loss(judge, batch, key):
            made, _ = self.make.apply(state["make"], None, batch["noise"])
            real, net_state = self.judge.apply(judge, None, batch["x"])
            false, _ = self.judge.apply(judge, None, made)
            loss = jnp.mean(jax.nn.softplus(-real) + jax.nn.softplus(false))
            return loss, net_state, {}

        def make_loss(make, batch, key):
            made, net_state = self.make.apply(make, None, batch["noise"])
            judged, _ = self.judge.apply(judge, None, made)
            loss = self.config.weight * jnp.mean(jax.nn.softplus(-judged))
            return loss, net_state, {}

        judge, of_judge = self.judge.update(state["judge"], judge_loss, batch, key)
        make, of_make = self.make.update(state["make"], make_loss, batch, key)
        return {"make": make, "judge": judge}, {"make": of_make, "judge": of_judge}

    def eval_step(self, state, batch, key):
        return {"error": batch["x"][:, 0]}


@pytest.mark.parametrize(
    "weight, changes",
    [
        (1.0, {}),
        (100.0, {}),
        (1e6, {}),
        (100.0, {"micro_batches": 2}),
        (1.0, {"loss_scale.kind": "dynamic"}),
    ],
    ids=str,
)
def test_a_loss_that_goes_through_another_learner_has_its_gradients(weight, changes):
    def trained(**more):
        config = config_of(**{"fp8.edges": True, **changes, **more}).unlock()
        config.weight = weight
        return train(Gan(config.lock()), steps=3)[1]

    pairs = zip(trained(), trained(**{"fp8.dots": False}), strict=True)
    for ours, theirs in pairs:
        for name in ("make", "judge"):
            norm = f"{name}/gradient_norm"
            np.testing.assert_allclose(ours[norm], theirs[norm], rtol=NEAR)


class Block(hk.Module):
    def __call__(self, x):
        return x + hk.Linear(8, name="b")(jax.nn.relu(hk.Linear(16, name="a")(x)))


def layers(x):
    x = hk.experimental.layer_stack(3, name="stack")(lambda x: Block()(x))(x)
    x = hk.experimental.layer_stack(2, name="other")(
        hk.remat(lambda x: hk.Linear(8)(x))
    )(x)
    # To Haiku, the network of this stack is as that of the one before.
    x = hk.experimental.layer_stack(2, name="same")(lambda x: hk.Linear(8)(x))(x)

    def nested(x):
        x = Block()(x)
        inner = hk.experimental.layer_stack(2, name="inner")
        x = inner(lambda x: Block(name="within")(x))(x)
        return Block(name="after")(x)

    x = hk.experimental.layer_stack(2, name="outer")(nested)(x)
    return hk.Linear(1)(hk.Linear(8)(x))


def recurrent(x):
    core = hk.VanillaRNN(8)
    out, _ = hk.dynamic_unroll(
        core, x[:, :, None], core.initial_state(len(x)), time_major=False
    )
    return hk.Linear(1)(hk.Linear(4)(out[:, -1]))


def scanned(x):
    block = Block()
    x, _ = hk.scan(lambda x, _: (block(x), None), x, jnp.arange(3))
    return hk.Linear(1)(x)


def switched(x):
    branches = [hk.Linear(8, name="one"), hk.Linear(8, name="two")]
    if hk.running_init():
        x = branches[1](branches[0](x))
    else:
        x = hk.switch(jnp.int32(1), branches, x)
    return hk.Linear(1)(x)


def attention(x):
    x = jnp.stack([x, -x, 2 * x], axis=1)
    init = hk.initializers.VarianceScaling(1.0)
    return hk.Linear(1)(hk.MultiHeadAttention(2, 4, w_init=init)(x, x, x)[:, 0])


def mapped(x):
    return hk.Linear(1)(hk.vmap(lambda x: Block()(x), split_rng=False)(x))


class Uses(hk.Module):
    def __call__(self, x, layer):
        return layer(inputs=layer(x))


def passed(x):
    return hk.Linear(1)(Uses()(x, hk.Linear(8, name="shared")))


NETWORKS = (layers, recurrent, scanned, switched, attention, mapped, passed)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.__name__)
def test_any_haiku_network_is_in_float8_unchanged(network):
    experiment = of(network)(config_of(**{"fp8.edges": True}))
    seen = []
    state, metrics = train(
        experiment,
        devices=1,
        steps=1,
        see=lambda before, batch, _: seen.append((before.params, batch)),
    )
    ((params, batch),) = seen
    forward = functools.partial(experiment.forward, is_training=True)
    outputs = hk.transform(forward).apply(params, None, batch)
    loss = experiment.loss(outputs, batch)[0]
    # float8 has steps of up to an eighth, and the networks several products.
    np.testing.assert_allclose(metrics[0]["loss"], loss, rtol=0.15)
    assert metrics[0]["loss"] != loss
    # Its products have the paths of the modules of its parameters.
    assert sorted(state.experiment.meta.in_float8) == sorted(params)
    # Nothing is kept of them.
    assert not any("fp8" in module for module in state.experiment.opt_state)


def test_the_first_and_the_last_layer_stay_as_they_are_unless_asked_for():
    network = of(lambda x: hk.nets.MLP([8, 8, 8, 1])(x))
    products = lambda **keys: (
        train(network(config_of(**keys)), steps=1)[0].experiment.meta.in_float8
    )
    names = [f"mlp/~/linear_{i}" for i in range(4)]
    assert products() == tuple(names[1:3])
    assert products(**{"fp8.edges": True}) == tuple(names)
    assert products(**{"fp8.dots": (names[3], names[0])}) == (names[0], names[3])


def test_a_call_with_a_precision_and_other_modules_stay_as_they_are():
    class Doubled(hk.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    def network(x):
        x = Doubled(8)(hk.Linear(8)(x))
        x = hk.Linear(8, name="precise")(x, precision=jax.lax.Precision.HIGHEST)
        return hk.Linear(1, name="last")(x)

    state, _ = train(of(network)(config_of(**{"fp8.edges": True})), steps=1)
    assert state.experiment.meta.in_float8 == ("linear", "last")


def test_named_products_of_ones_own_are_among_them():
    def network(x):
        x = hk.Linear(8)(x)
        w = hk.get_parameter("w", [8, 8], init=hk.initializers.RandomNormal())
        dims = (((1,), (0,)), ((), ()))
        x = xshard.fp8_dot_general(x, w, dims, name="own")
        return hk.Linear(1)(xshard.fp8_dot_general(x, w, dims))

    state, _ = train(of(network)(config_of()), steps=1)
    assert state.experiment.meta.in_float8 == ("own",)


def test_both_orders_of_the_rules_train_alike():
    class Around(Net):
        def optimizer(self):
            scale = xshard.DynamicLossScale(2.0**24, increment_period=2)
            opt = xshard.MixedPrecisionLossScaleOptimizer(optax.adam(1e-2), scale)
            return xshard.CrossShardOptimizer(
                opt, slice_axis_name="slice", **self.config.reduction
            )

    class Within(Net):
        def optimizer(self):
            opt = xshard.CrossShardOptimizer(
                optax.adam(1e-2), slice_axis_name="slice", **self.config.reduction
            )
            scale = xshard.DynamicLossScale(2.0**24, increment_period=2)
            return xshard.MixedPrecisionLossScaleOptimizer(opt, scale)

    config = config_of(precision="params=float32,compute=float16,output=float32")
    found = [train(kind(config)) for kind in (Around, Within)]
    (one, metrics), (other, _) = found
    harness.assert_equal(one.experiment.params, other.experiment.params)
    # Gradients in float16 overflow at first.
    assert metrics[-1]["loss_scale"] < metrics[0]["loss_scale"]


def test_without_the_key_nothing_is_in_float8():
    experiment = Net(config_of(**{"fp8.dots": False}))
    state, _ = train(experiment, steps=1)
    assert not state.experiment.meta.in_float8


@pytest.mark.parametrize("shard_update", [False, True])
def test_it_needs_no_collective(shard_update):
    counts = set()
    for changes in ({"fp8.dots": False}, {"fp8.edges": True}):
        experiment = Net(
            config_of(**changes, **{"reduction.shard_update": shard_update})
        )
        mesh = experiment_lib.mesh_of(experiment.config, jax.devices()[:4])
        batch = {name: x[:16] for name, x in experiment.train_data().items()}
        state = state_lib.init(experiment, mesh, 0, batch)
        apply = jax.jit(step.make_watched_step(experiment, mesh))
        program = apply.lower(state, batch).compile().as_text()
        kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
        counts.add(tuple(program.count(f" {kind}(") for kind in kinds))
    assert len(counts) == 1 and any(*counts)


def test_exact_sums_have_the_same_bits_on_any_number_of_devices():
    config = config_of(logical_replicas=8, **{"reduction.arithmetic": "exact"})
    experiment = Net(config)
    states = []
    for devices in (1, 4):
        mesh = experiment_lib.mesh_of(config, jax.devices()[:devices])
        batches = preflight.train_batches(experiment, mesh)
        apply = preflight.jitted_step(experiment, mesh)
        state = state_lib.init(experiment, mesh, 0, batches.example)
        for _ in range(3):
            state = apply(state, next(batches)).state
        states.append(jax.device_get(state.experiment))
    one, other = states
    harness.assert_equal(one.params, other.params)
    harness.assert_equal(one.opt_state, other.opt_state)
    assert one.meta.in_float8 == (MIDDLE,)


def complex_network(x):
    x = hk.Linear(8, w_init=jnp.ones)(jax.lax.complex(x, x))
    return hk.Linear(1, w_init=jnp.ones)(x)


def pair():
    init = lambda key, batch, **_: ({"w": jnp.ones((8, 1))}, {})

    def apply(params, state, key, batch, **_):
        return (batch["x"] @ params["w"])[:, 0], state

    return init, apply


class Pair(Net):
    forward = property(lambda self: pair())


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        (
            Net,
            {"fp8.dots": ("mlp/linear_1",)},
            "^fp8.dots names 'mlp/linear_1', which is no hk.Linear of the network; "
            "near it: .*mlp/~/linear_1",
        ),
        (
            of(lambda x: hk.Linear(1)(hk.Linear(8)(x))),
            {},
            "^fp8.dots=True finds no product to compute in float8",
        ),
        (Pair, {}, "in a pair of functions, call xshard.fp8_dot_general"),
        (
            of(complex_network),
            {"fp8.edges": True},
            "The input of a product in float8 is complex64",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value))[:40],
)
def test_what_does_not_fit_is_refused_by_name(kind, changes, message):
    with pytest.raises(errors.UserError, match=message):
        train(kind(config_of(**changes)), steps=1)


def test_chips_without_float8_are_refused_by_name(monkeypatch):
    class Device:
        platform = "gpu"
        device_kind = "NVIDIA A100-SXM4-40GB"
        compute_capability = "8.0"

    mesh = experiment_lib.mesh_of(config_of(), jax.devices()[:1])
    monkeypatch.setattr(run_context, "current_mesh", lambda: mesh)
    fp8._check_chips()

    class Mesh(jax.sharding.Mesh):
        devices = np.array([Device()])

    old = object.__new__(Mesh)
    monkeypatch.setattr(run_context, "current_mesh", lambda: old)
    with pytest.raises(
        errors.UserError, match=r"A100.* has the compute capability 8.0"
    ):
        fp8._check_chips()
    Device.compute_capability = "8.9"
    fp8._check_chips()


@pytest.mark.parametrize(
    "key, value",
    [
        ("fp8.dots", 3),
        ("fp8.dots", ()),
        ("fp8.dots", (1,)),
        ("fp8.gradient_format", "float8_e4m3fnuz"),
    ],
)
def test_values_of_keys_are_checked_before_a_run(tmp_path, key, value):
    config = config_of(**{key: value})
    with pytest.raises(errors.UserError, match=f"^{key}="):
        winged.run(config, str(tmp_path / "run"), "")
    assert not (tmp_path / "run").exists()
