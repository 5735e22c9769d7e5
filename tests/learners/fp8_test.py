"""Tests of networks in float8: their products, their scales, and runs."""

import functools
import re

import haiku as hk
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import xshard
from tests import rows, toy, winged
from tests.optimizers import harness
from xshard import errors, loop
from xshard import experiment as experiment_lib
from xshard.learners import float8, fp8, run_context
from xshard.replay import report
from xshard.run import preflight
from xshard.training import state as state_lib
from xshard.training import step

GROUPS = ((0, 1), (2, 3))
HISTORY = 3
STEPS = 5
MIDDLE = "mlp/~/linear_1"
LIMITS = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
ON = {"fp8.dots": True, "fp8.history_steps": HISTORY}


class Net(toy.Toy):
    """Regression by a network of three layers, the middle one of which is in float8.

    Its inputs grow from step to step, so that some exceed the scales.
    """

    def train_data(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(self.config.examples, 8)).astype(np.float32)
        x *= np.linspace(0.5, 8, len(x), dtype=np.float32)[:, None]
        return {"x": x, "y": x @ np.arange(8, dtype=np.float32) / 8}

    def forward(self, batch, *, is_training):
        del is_training
        return hk.nets.MLP([16, 16, 1])(batch["x"])[:, 0]

    def loss(self, outputs, batch):
        error = jnp.mean((outputs - batch["y"]) ** 2)
        bad = jnp.max(batch["x"]) > self.config.overflow_above
        return jnp.where(bad, jnp.inf, 1.0) * error, {}


class Steady(Net):
    """The same with inputs that do not grow."""

    def train_data(self):
        data = super().train_data()
        data["x"] = data["x"] / np.linspace(0.5, 8, len(data["x"]))[:, None]
        return {**data, "x": data["x"].astype(np.float32)}


class Plain(Net):
    """The same with a plain transformation, which the config makes a rule of."""

    def optimizer(self):
        return optax.adam(1e-2)


def config_of(**changes):
    config = toy.get_config()
    config.experiment = f"tests.learners.fp8_test.{changes.pop('kind', 'Net')}"
    config.examples = 160
    config.overflow_above = 1e9
    config.update_from_flattened_dict({**ON, "batch_size": 16, **changes})
    return config.lock()


def of(forward, base=Steady):
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


def exponent_of(x):
    """Returns the level of an array by float64's own exponent, in NumPy."""
    mantissa, exponent = np.frexp(np.max(np.abs(x)).astype(np.float64))
    level = int(exponent) + (mantissa > 0.875)
    return level - int(np.frexp(1.75 * 2.0**float8._LEAST)[1])


def cast(x, level, format_):
    """Rounds to a format by a level; returns also how many elements were cut."""
    limit = LIMITS[format_]
    scale = limit / (1.75 * 2.0 ** (level + float8._LEAST))
    cut = int(np.sum(np.abs(x) * scale > limit))
    narrow = np.clip(x * scale, -limit, limit).astype(getattr(ml_dtypes, format_))
    return narrow.astype(np.float64) / scale, cut


def model(params, batch, levels, weight):
    """Computes the loss's gradient of a part of a batch in NumPy.

    Returns:
      The levels of the operands of the product in float8, and how many of each were
      cut.
    """
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    layers = [wide[f"mlp/~/linear_{i}"] for i in range(3)]
    x = np.asarray(batch["x"], np.float64)
    first = np.maximum(x @ layers[0]["w"] + layers[0]["b"], 0)
    scale_by = lambda i, a: levels[i] or exponent_of(a)
    narrow_x, cut_x = cast(first, scale_by(0, first), "float8_e4m3fn")
    kernel = layers[1]["w"]
    narrow_w, cut_w = cast(kernel, scale_by(1, kernel), "float8_e4m3fn")
    hidden = narrow_x @ narrow_w + layers[1]["b"]
    second = np.maximum(hidden, 0)
    outputs = (second @ layers[2]["w"] + layers[2]["b"])[:, 0]
    error = outputs - np.asarray(batch["y"], np.float64)
    gradient = 2 * error[:, None] / len(error) * weight
    gradient = gradient * layers[2]["w"][:, 0] * (hidden > 0)
    _, cut_g = cast(gradient, scale_by(2, gradient), "float8_e5m2")
    seen = [exponent_of(a) for a in (first, kernel, gradient)]
    return np.array(seen), np.array([cut_x, cut_w, cut_g])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"micro_batches": 2},
        {"reduction.shard_update": True},
        {"reduction.shard_params": True},
        {"loss_scale.kind": "dynamic", "kind": "Plain"},
        {"fp8.gradient_format": "float8_e5m2", "reduction.reduction": "sum"},
        {"slices": 2},
    ],
    ids=str,
)
def test_the_history_is_that_of_a_model_in_numpy(changes):
    config = config_of(**changes)
    experiment = experiment_lib.load(config.experiment)(config)
    parts = 4 * config.micro_batches
    unscaled = {"current_loss_scale": 1.0}
    history = np.zeros((3, HISTORY), int)
    cuts = []

    def check(before, batch, stepped):
        nonlocal history
        kept = before.opt_state["fp8"]
        np.testing.assert_array_equal(kept[f"{MIDDLE}/levels"], history)
        # What the loss is multiplied by before it is differentiated. The mean over the
        # replicas is taken afterwards.
        scale = before.opt_state.get("dynamic_loss_scale", unscaled)
        weight = float(scale["current_loss_scale"]) / config.micro_batches
        seen = np.zeros(3, int)
        cut = np.zeros(3, int)
        for part in range(parts):
            rows_of = slice(part * 16 // parts, (part + 1) * 16 // parts)
            own = {name: x[rows_of] for name, x in batch.items()}
            found, more = model(before.params, own, history.max(axis=1), weight)
            seen = np.maximum(seen, found)
            cut += more
        history = np.concatenate([seen[:, None], history[:, :-1]], axis=1)
        kept = stepped.state.experiment.opt_state["fp8"]
        np.testing.assert_array_equal(kept[f"{MIDDLE}/levels"], history)
        np.testing.assert_array_equal(kept[f"{MIDDLE}/saturated"], cut)
        assert float(stepped.metrics["fp8/saturated"]) == cut.sum()
        cuts.append(cut.sum())

    state, _ = train(experiment, see=check)
    assert state.experiment.meta.own_products == (MIDDLE,)
    # The first step has no history, so nothing exceeds it.
    assert cuts[0] == 0 and max(cuts) > 0


def test_a_skipped_step_leaves_the_history_as_it_was():
    # The inputs grow, and the loss of steps after the third is infinite.
    inputs = Net(config_of()).train_data()["x"]
    config = config_of(overflow_above=float(np.max(inputs[:48])))
    states = []
    state, metrics = train(
        Net(config), see=lambda before, *_: states.append(before.opt_state)
    )
    states.append(state.experiment.opt_state)
    skipped = [bool(each["skipped"]) for each in metrics]
    assert not any(skipped[:3]) and any(skipped)
    for before, after, was_skipped in zip(states, states[1:], skipped, strict=False):
        if was_skipped:
            harness.assert_equal(after["fp8"], before["fp8"])
        else:
            assert np.any(
                after["fp8"][f"{MIDDLE}/levels"] != before["fp8"][f"{MIDDLE}/levels"]
            )


def test_each_group_has_a_history_of_its_own():
    config = config_of(group_assignment=GROUPS)
    state, metrics = train(Net(config), steps=3)
    levels = np.asarray(state.experiment.opt_state["fp8"][f"{MIDDLE}/levels"])
    assert levels.shape == (2, 3, HISTORY)
    assert np.any(levels[0] != levels[1])
    assert metrics[-1]["fp8/saturated"].shape == (2,)


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


@pytest.mark.parametrize(
    "network, scaling",
    [*((network, "delayed") for network in NETWORKS), (layers, "current")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_any_haiku_network_is_in_float8_unchanged(network, scaling):
    experiment = of(network)(config_of(**{"fp8.edges": True, "fp8.scaling": scaling}))
    seen = []
    state, metrics = train(
        experiment,
        devices=1,
        steps=1,
        see=lambda before, batch, _: seen.append((before.params, batch)),
    )
    state = state.experiment
    ((params, batch),) = seen
    forward = functools.partial(experiment.forward, is_training=True)
    outputs = hk.transform(forward).apply(params, None, batch)
    loss = experiment.loss(outputs, batch)[0]
    # float8 has steps of up to an eighth, and the networks several products.
    np.testing.assert_allclose(metrics[0]["loss"], loss, rtol=0.15)
    assert metrics[0]["loss"] != loss
    # Its products have the paths of the modules of its parameters.
    assert sorted(state.meta.own_products) == sorted(params)
    assert ("fp8" in state.opt_state) == (scaling == fp8.DELAYED)
    if scaling == fp8.DELAYED:
        unused = {"one"} if network is switched else set()
        for path in set(state.meta.own_products) - unused:
            levels = np.asarray(state.opt_state["fp8"][f"{path}/levels"])
            assert np.all(levels[:2, 0] > 0), path


def test_the_first_and_the_last_layer_stay_as_they_are_unless_asked_for():
    network = of(lambda x: hk.nets.MLP([8, 8, 8, 1])(x))
    products = lambda **keys: (
        train(network(config_of(**keys)), steps=1)[0].experiment.meta.own_products
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
    assert state.experiment.meta.own_products == ("linear", "last")


def test_named_products_of_ones_own_are_scaled_like_the_others():
    def network(x):
        x = hk.Linear(8)(x)
        w = hk.get_parameter("w", [8, 8], init=hk.initializers.RandomNormal())
        dims = (((1,), (0,)), ((), ()))
        x = xshard.fp8_dot_general(x, w, dims, name="own")
        return hk.Linear(1)(xshard.fp8_dot_general(x, w, dims))

    state, _ = train(of(network)(config_of()), steps=2)
    assert state.experiment.meta.own_products == ("own",)
    levels = state.experiment.opt_state["fp8"]["own/levels"]
    assert np.all(np.asarray(levels)[:, :2] > 0)


def test_both_orders_of_the_rules_train_alike():
    class Around(Net):
        def optimizer(self):
            scale = xshard.DynamicLossScale(increment_period=2)
            opt = xshard.MixedPrecisionLossScaleOptimizer(optax.adam(1e-2), scale)
            return xshard.CrossShardOptimizer(
                opt, slice_axis_name="slice", **self.config.reduction
            )

    class Within(Net):
        def optimizer(self):
            opt = xshard.CrossShardOptimizer(
                optax.adam(1e-2), slice_axis_name="slice", **self.config.reduction
            )
            scale = xshard.DynamicLossScale(increment_period=2)
            return xshard.MixedPrecisionLossScaleOptimizer(opt, scale)

    config = config_of(precision="params=float32,compute=float16,output=float32")
    found = [train(kind(config)) for kind in (Around, Within)]
    (one, metrics), (other, _) = found
    harness.assert_equal(one.experiment.params, other.experiment.params)
    harness.assert_equal(
        one.experiment.opt_state["fp8"], other.experiment.opt_state["fp8"]
    )
    # Gradients in float16 overflow at first.
    assert metrics[-1]["loss_scale"] < metrics[0]["loss_scale"]


def test_without_the_key_nothing_is_in_float8():
    experiment = Net(config_of(**{"fp8.dots": False}))
    state, metrics = train(experiment, steps=1)
    assert "fp8" not in state.experiment.opt_state
    assert not state.experiment.meta.own_products
    assert "fp8/saturated" not in metrics[0]


@pytest.mark.parametrize("shard_update", [False, True])
def test_the_history_needs_no_collective_of_its_own(shard_update):
    counts = set()
    for changes in ({"fp8.dots": False}, {}, {"fp8.scaling": "current"}):
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


def test_an_evaluation_scales_by_the_history_and_leaves_it():
    experiment = Net(config_of())
    state, _ = train(experiment, devices=1, steps=2)
    state = state.experiment
    examples = experiment.train_data()
    mesh = experiment_lib.mesh_of(experiment.config, jax.devices()[:1])

    def outputs(state, count):
        batch = {name: x[:count] for name, x in examples.items()}
        with run_context.run_on(mesh):
            return experiment.learner.apply(state, None, batch, is_training=False)

    few, new_state = outputs(state, 4)
    many, _ = outputs(state, 64)
    assert jax.tree.structure(new_state) == jax.tree.structure(state.net_state)
    # The large examples do not change what is predicted of the others.
    np.testing.assert_array_equal(many[:4], few)
    # By its own largest number the layer rounds small ones to 0, or otherwise.
    fresh = state.replace(opt_state={})
    assert np.any(
        np.asarray(outputs(fresh, 160)[0]) != np.asarray(outputs(state, 160)[0])
    )


def test_it_resumes_to_the_same_bits(tmp_path, shared_programs):
    config = config_of(steps=12, log_every_steps=2, steps_per_dispatch=1)
    assert winged.run(config, str(tmp_path / "whole"), "") == 0
    run = loop.Run(config, str(tmp_path / "parts"))
    rows.kill_after(run, 9)
    with pytest.raises(rows.Killed), run.opened():
        run.train()
    assert winged.run(config, str(tmp_path / "parts"), "") == 0
    whole, parts = (
        rows.final_state(tmp_path / name, config) for name in ("whole", "parts")
    )
    harness.assert_equal(parts, whole)
    assert rows.same_bits(tmp_path / "parts") == rows.same_bits(tmp_path / "whole")
    levels = whole.experiment.opt_state["fp8"][f"{MIDDLE}/levels"]
    assert np.all(np.asarray(levels) > 0)
    # Predictions of the finished run have its scales.
    loaded = xshard.load(str(tmp_path / "whole"))
    batch = {name: x[:5] for name, x in Net(config).train_data().items()}
    one = {name: x[:1] for name, x in batch.items()}
    predicted = np.asarray(loaded.predict(batch))
    np.testing.assert_array_equal(np.asarray(loaded.predict(one)), predicted[:1])


def test_a_replay_names_what_saturated(tmp_path):
    config = config_of(steps=4, log_every_steps=1)
    assert winged.run(config, str(tmp_path / "run"), "") == 0
    counts = {}
    for row in rows.read(tmp_path / "run"):
        if row["kind"] == "train":
            counts[row["step"]] = row["fp8/saturated"]
    assert counts[1] == 0 and any(counts.values())
    worst = max(counts, key=counts.get)
    for number in (1, worst):
        lines = []
        assert report.replay(str(tmp_path / "run"), number, lines.append)
        found = re.findall(
            rf"^saturated in float8: (\d+) elements of the (\w+) of {MIDDLE}$",
            "\n".join(lines),
            re.MULTILINE,
        )
        assert sum(int(count) for count, _ in found) == counts[number]


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
    assert np.all(np.asarray(one.opt_state["fp8"][f"{MIDDLE}/levels"]) > 0)


class Hides(xshard.OptimizerWrapper):
    """Differentiates the loss by itself."""

    def __init__(self, opt):
        super().__init__()
        self.opt = opt

    def compute_gradients(self, loss, params, **kwargs):
        del kwargs
        return jax.value_and_grad(loss, has_aux=True)(params)


class Hidden(Net):
    def optimizer(self):
        return Hides(super().optimizer().opt)


def complex_network(x):
    x = hk.Linear(8, w_init=jnp.ones)(jax.lax.complex(x, x))
    return hk.Linear(1, w_init=jnp.ones)(x)


def pair():
    init = lambda key, batch, **_: ({"w": jnp.ones((8, 1))}, {})

    def apply(params, state, key, batch, **_):
        return (batch["x"] @ params["w"])[:, 0], state

    return init, apply


class Pair(Plain):
    forward = property(lambda self: pair())


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        (
            Net,
            {"fp8.scaling": "static"},
            "^fp8.scaling='static' must be one of delayed",
        ),
        (
            Net,
            {"fp8.gradient_format": "float8_e4m3fnuz"},
            "^fp8.gradient_format='float8_e4m3fnuz' must be one of float8_e5m2",
        ),
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
        (Hidden, {}, "^fp8.scaling='delayed' needs to know how large gradients are"),
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


def test_a_rule_that_hides_gradients_can_scale_by_the_operands():
    _, metrics = train(Hidden(config_of(**{"fp8.scaling": "current"})), steps=1)
    assert np.isfinite(metrics[0]["loss"])


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
    [("fp8.dots", 3), ("fp8.dots", ()), ("fp8.dots", (1,)), ("fp8.history_steps", 0)],
)
def test_values_of_keys_are_checked_before_a_run(tmp_path, key, value):
    config = config_of(**{key: value})
    with pytest.raises(errors.UserError, match=f"^{key}="):
        winged.run(config, str(tmp_path / "run"), "")
    assert not (tmp_path / "run").exists()
