"""Parameters in shards: networks of every kind train as they do replicated, and hold and send what they should."""

import collections
import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import xshard
from tests import toy
from tests.optimizers import harness
from xshard import errors, mesh, step
from xshard import state as state_lib
from xshard.data import batches
from xshard.dryrun import collectives
from xshard.optimizers import base
from xshard.stored import fingerprint, storage

HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))
DOUBLE = "params=float64,compute=float64,output=float64"
WIDTH = 32


class Network(toy.Wide):
    """A network of the kind that the config says, with a clip of the global norm and averages in its rule."""

    def forward(self, batch, *, is_training):
        x = hk.Linear(WIDTH, name="inputs")(batch["x"])
        x = x + KINDS[self.config.kind](x)
        return hk.Linear(1, name="outputs")(x)[:, 0]

    def optimizer(self):
        rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
        opt = xshard.OptaxOptimizer(rule, name="adamw")
        opt = xshard.CrossShardOptimizer(opt, slice_axis_name="slice", **self.config.reduction)
        opt = xshard.MovingAverageOptimizer(opt, 0.5)
        return xshard.MixedPrecisionLossScaleOptimizer(opt, "dynamic")


class Shaken(Network):
    """With the loss of halved parameters beside that of the parameters."""

    def training_loss(self, state, batch, key):
        halved = state.replace(params=jax.tree.map(lambda w: 0.5 * w, state.params))
        of_halved, *_ = super().training_loss(halved, batch, key)
        value, *rest = super().training_loss(state, batch, key)
        return value + of_halved, *rest


class ByRows(Network):
    """With rules that take matrices whole: Muon for the wide ones, Adafactor for the rest."""

    def optimizer(self):
        kind = lambda path, w: "muon" if path[0].key.endswith("linear_0") and w.ndim > 1 else "rest"
        rules = {
            "muon": contrib.scale_by_muon(
                weight_dimension_numbers=lambda p: jax.tree.map(
                    lambda w: contrib.MuonDimensionNumbers(w.ndim - 2, w.ndim - 1), p
                )
            ),
            "rest": optax.adafactor(1e-2, min_dim_size_to_factor=8),
        }
        rule = optax.partition(rules, lambda p: jax.tree_util.tree_map_with_path(kind, p))
        opt = xshard.OptaxOptimizer(optax.chain(rule, optax.scale(-1e-2)), name="by_rows")
        opt = xshard.CrossShardOptimizer(opt, slice_axis_name="slice", **self.config.reduction)
        return xshard.MixedPrecisionLossScaleOptimizer(opt, "dynamic")


class Divided(ByRows):
    """With the weights of each layer along the model axis, too."""

    def sharding_rules(self):
        return (
            ("/linear_0/w$", jax.P(None, None, "model")),
            ("/linear_0/b$", jax.P(None, "model")),
            ("/linear_1/w$", jax.P(None, "model", None)),
        )


def block(x):
    # Eight replicas hold the weights in shards, and the biases whole.
    w = hk.get_parameter("scale", (), init=jnp.ones)
    return x + w * jnp.tanh(hk.nets.MLP([2 * WIDTH, WIDTH], name="mlp")(x))


def partly(x):
    wide = hk.remat(lambda x: jnp.tanh(hk.Linear(2 * WIDTH, name="wide")(x)))(x)
    return x + jnp.tanh(hk.Linear(WIDTH, name="narrow")(wide))


def stacked(layer, count=8):
    # As many layers as replicas, which could be cut, too.
    return lambda x: hk.layer_stack(count, name="layers")(layer)(x)


def recurrent(x):
    core = hk.LSTM(WIDTH)
    state = core.initial_state(len(x))
    inputs = jnp.stack([x, -x, 0.5 * x])
    return hk.dynamic_unroll(core, inputs, jax.tree.map(lambda s: s.astype(x.dtype), state))[0][-1]


def branching(x):
    left, right = hk.Linear(WIDTH, name="left"), hk.Linear(WIDTH, name="right")
    if hk.running_init():
        return left(x) + right(x)
    # Not the same on all replicas, so that no collective may be in it.
    return hk.cond(jnp.sum(x) > 0, left, right, x)


def tied(x):
    linear = hk.Linear(WIDTH, name="tied")
    return linear(jnp.tanh(linear(x)))


def unused(x):
    first = hk.Linear(WIDTH, name="used")(x)
    return first + jax.lax.stop_gradient(hk.Linear(WIDTH, name="unused")(x))


def many(x):
    # More than ten, of one shape, and each of them has its place.
    init = hk.initializers.RandomNormal(1 / WIDTH**0.5)
    weights = [hk.get_parameter(f"w_{i}", (WIDTH, WIDTH), init=init) for i in range(12)]
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


KINDS = {
    "block": block,
    "stack": stacked(block),
    "few layers": stacked(block, 3),
    "remat": lambda x: stacked(hk.remat(block))(x),
    "partly": stacked(partly),
    "recurrent": recurrent,
    "branching": branching,
    "tied": tied,
    "unused": unused,
    "unused in remat": lambda x: hk.remat(unused)(x),
    "many in remat": lambda x: hk.remat(many)(x),
    "penalty": lambda x: x * sum(map(jnp.sum, _made(x).params_dict().values())).astype(x.dtype),
}


def _made(x):
    module = hk.Linear(WIDTH, name="penalised")
    module(x)
    return module


def make(kind="block", held=True, cls=Network, **changes):
    config = toy.get_config()
    config.kind = kind
    for key in ("reduce_dtype", "slice_dtype"):
        if key in changes:
            config.reduction[key] = changes.pop(key)
    config.reduction.shard_params = held
    config.update({"fingerprint_every_steps": 0, **changes})
    the_mesh = mesh.make_mesh(
        config.group_assignment or None, slices=config.slices, model=config.model_parallel
    )
    return cls(config.lock()), the_mesh


def begin(experiment, the_mesh):
    config = experiment.config
    train = batches.TrainBatches(
        experiment.train_batches, the_mesh, batch_size=config.batch_size, seed=0,
        micro_batches=config.micro_batches,
    )  # fmt: skip
    return state_lib.init(experiment, the_mesh, 0, train.example), train


def trained(steps=4, **changes):
    """The experiment, its mesh, its state after some steps, and the last metrics."""
    experiment, the_mesh = make(**changes)
    state, train = begin(experiment, the_mesh)
    apply = jax.jit(step.make_train_step(experiment, the_mesh), donate_argnums=0)
    for _ in range(steps):
        state, metrics = apply(state, next(train))
    return experiment, the_mesh, state, jax.device_get(metrics)


def on_host(experiment, the_mesh, state):
    whole = storage.Storage(experiment, the_mesh).to_whole(state)
    return jax.device_get(dataclasses.replace(whole, rng=None))


SHAPES = [
    *({"kind": kind} for kind in KINDS if kind not in ("penalty", "few layers")),
    {"kind": "stack", "micro_batches": 2, "group_assignment": HALVES},
    {"kind": "block", "slices": 2},
    {"kind": "block", "overflow_above": 2.0},
    {"kind": "stack", "cls": ByRows},
    {"kind": "few layers", "cls": ByRows, "slices": 2},
    {"kind": "stack", "cls": Divided, "model_parallel": 2, "group_assignment": ((0, 1), (2, 3))},
    {"kind": "remat", "cls": Divided, "model_parallel": 2, "micro_batches": 2, "slices": 2},
    {"kind": "remat", "cls": Shaken, "micro_batches": 2, "gather_once": True, "slices": 2},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_network_trains_as_it_does_replicated(shape):
    ends = []
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for held in (True, False):
            *of_run, metrics = trained(held=held, precision=DOUBLE, **shape)
            ends.append(({"state": on_host(*of_run)}, metrics))
    (held, its_metrics), (whole, wanted) = ends
    harness.assert_close(held, whole, rtol=1e-8, atol=1e-8)
    # What is logged is float32.
    harness.assert_close(its_metrics, wanted, rtol=1e-5, atol=1e-8)


def bytes_a_device(tree):
    device = jax.devices()[0]
    leaves = jax.tree.leaves(tree)
    return sum(s.data.nbytes for x in leaves for s in x.addressable_shards if s.device == device)


def test_parameters_and_slots_take_an_nth_of_the_memory():
    """Of a stack of eight layers, whose first dimension eight would divide, too."""
    held, whole = (begin(*make("stack", held))[0].experiment for held in (True, False))
    layer = held.params["layers/mlp/~/linear_0"]
    assert layer["w"].sharding.spec == jax.P(None, "replica", None)
    assert layer["b"].sharding.is_fully_replicated
    weights = 4 * 8 * 2 * WIDTH * 2 * WIDTH
    for part, copies in (("params", 1), ("opt_state", 3)):
        saved = bytes_a_device(getattr(whole, part)) - bytes_a_device(getattr(held, part))
        # Slots of what is whole are in shards, too.
        assert copies * weights * 7 / 8 <= saved
    assert bytes_a_device(held.params) == bytes_a_device(whole.params) - weights * 7 // 8


def test_a_parameter_lies_along_the_model_axis_and_in_shards():
    changes = {"cls": Divided, "model_parallel": 2}
    held, whole = (begin(*make("stack", held, **changes))[0].experiment for held in (True, False))
    weights = held.params["layers/mlp/~/linear_0"]["w"]
    assert weights.sharding.spec == jax.P(None, "replica", "model")
    saved = bytes_a_device(whole.params) - bytes_a_device(held.params)
    # Of two stacks of weights, halved by the model axis, four replicas hold a quarter each.
    assert saved >= 2 * 4 * 8 * WIDTH * 2 * WIDTH / 2 * 3 / 4


def sent(kind, **changes):
    """The step in float16, lowered, and how often it does each kind of collective in each type."""
    half = "params=float32,compute=float16,output=float32"
    experiment, the_mesh = make(kind, precision=half, **changes)
    state, train = begin(experiment, the_mesh)
    lowered = jax.jit(step.make_train_step(experiment, the_mesh)).lower(state, next(train))
    found = collections.Counter()
    for one in collectives.of(lowered.compile()):
        found[one.kind, one.dtypes] += one.times
    return lowered, found


def test_what_a_loop_over_time_asks_for_is_gathered_before_it():
    _, found = sent("recurrent")
    # Once forward and once backward, of which the compiler may make one; and each array is summed once. There are
    # three steps of time.
    assert 1 <= found["all-gather", ("f16",)] <= 2
    assert found["reduce-scatter", ("f32",)] == 5


@pytest.mark.parametrize("kind", ["stack", "remat", "partly"])
def test_a_layer_at_a_time_is_gathered_and_again_in_the_backward_pass(kind):
    lowered, found = sent(kind)
    # Two arrays of each of eight layers, forward and backward; their gradients are summed in float32.
    assert found["all-gather", ("f16",)] == 2 * 2 * 8
    assert found["reduce-scatter", ("f16",)] == 0
    assert found["reduce-scatter", ("f32",)] >= 2 * 8
    # What hk.remat computes again still is, and nothing else but what is gathered.
    assert lowered.as_text().count("stablehlo.tanh") == {"stack": 1, "remat": 2, "partly": 3}[kind]


def test_what_lies_along_the_model_axis_is_gathered_over_replicas_alone():
    experiment, the_mesh = make("stack", cls=Divided, model_parallel=2)
    state, train = begin(experiment, the_mesh)
    lowered = jax.jit(step.make_train_step(experiment, the_mesh)).lower(state, next(train))
    rows = collectives.rows(the_mesh, collectives.of(lowered.compile()))
    assert {row["kind"] for row in rows if "model" in row["over"]} == {"all-reduce"}
    (gathers,) = [row for row in rows if row["kind"] == "all-gather"]
    # Forward and backward half of each layer's two arrays; of the rest each array once, and once in the update.
    half = 4 * WIDTH * 2 * WIDTH // 2
    assert 2 * 2 * 8 * half <= gathers["bytes"] < 2.2 * 2 * 8 * half


def test_each_replica_computes_the_matrices_of_its_layers():
    flops, kinds = [], []
    for held in (True, False):
        experiment, the_mesh = make("stack", held, ByRows)
        state, train = begin(experiment, the_mesh)
        lowered = jax.jit(step.make_train_step(experiment, the_mesh)).lower(state, next(train))
        compiled = lowered.compile()
        flops.append(compiled.cost_analysis()["flops"])
        kinds.append(collections.Counter(one.kind for one in collectives.of(compiled)))
    assert flops[0] < flops[1] / 4
    # Shards for layers, and back.
    assert kinds[0]["all-to-all"] == 2 and kinds[1]["all-to-all"] == 0


def test_what_is_gathered_once_is_so_for_all_micro_batches():
    _, found = sent("stack", micro_batches=2, gather_once=True)
    # Two stacks of arrays, each whole; their gradients are summed after each micro-batch.
    assert found["all-gather", ("f16",)] == 2
    assert found["reduce-scatter", ("f32",)] >= 2 * 2


def test_evaluations_predictions_and_fingerprints_are_those_of_whole_parameters():
    outcomes = []
    experiment, the_mesh, state, _ = trained(kind="recurrent", steps=2)
    whole = storage.Storage(experiment, the_mesh).to_whole(state)
    for held in (True, False):
        experiment, the_mesh = make("recurrent", held)
        shapes = state_lib.abstract_state(experiment, the_mesh, 0, experiment.train_data())
        state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), whole, shapes)
        # The structure says how it lies.
        state = jax.tree.unflatten(jax.tree.structure(shapes), jax.tree.leaves(state))
        batch = {name: x[:16] for name, x in experiment.train_data().items()}
        mask = np.arange(16) < 13
        sums = jax.jit(step.make_eval_step(experiment, the_mesh))(state, {**batch, "_mask": mask})
        outputs = jax.jit(step.make_predict(experiment, the_mesh))(state, batch)
        values = jax.jit(fingerprint.program(experiment, the_mesh))(state)
        assert not values.parted
        outcomes.append((jax.device_get((sums, outputs)), jax.device_get(values.values)))
    (close, bits), (wanted, wanted_bits) = outcomes
    assert "average/error" in wanted[0]
    harness.assert_close(close, wanted, rtol=1e-5)
    harness.assert_equal(bits, wanted_bits)


class Clips(Network):
    def clip_gradients(self, grads):
        return jax.tree.map(lambda g: jnp.clip(g, -1, 1), grads)


class Penalised(Network):
    def training_loss(self, state, batch, key):
        value, *rest = super().training_loss(state, batch, key)
        return value + sum(jnp.sum(w**2) for w in jax.tree.leaves(state.params)), *rest


class ClipsOwn(base.OptimizerWrapper):
    """Clips each replica's gradients before they are summed."""

    def __init__(self, opt):
        super().__init__()
        self.opt = opt

    def aggregate(self, grads):
        return self.opt.aggregate(jax.tree.map(lambda g: jnp.clip(g, -1, 1), grads))


class ClipsInRule(Network):
    def optimizer(self):
        return ClipsOwn(super().optimizer())


class AppliesItself(Network):
    def optimizer(self):
        class Own(base.OptimizerWrapper):
            def __init__(self, opt):
                super().__init__()
                self.opt = opt

            def apply_gradients(self, grads, params, global_step=None, name=None):
                return self.opt.apply_gradients(grads, params, global_step, name)

        return Own(super().optimizer())


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"cls": Clips}, "shard_params=True cannot be used with clip_gradients: no replica has its own gradients"),
        ({"cls": Penalised}, r"uses 'params/mlp/~/linear_0/w' as if it were whole, by reduce_sum \(\S*gathering_test.py:\d+\)"),
        ({"cls": AppliesItself}, "cannot be used with Own, which overrides apply_gradients"),
        ({"cls": ClipsInRule}, "clips_own cannot be used with shard_params=True: its .* takes a replica's own"),
        ({"kind": "penalty"}, "uses the parameter 'penalised/w' without asking hk.get_parameter"),
    ],
    ids=str,
)  # fmt: skip
def test_what_needs_whole_parameters_or_own_gradients_is_refused(changes, match):
    experiment, the_mesh = make(**changes)
    with pytest.raises(ValueError, match=match):
        state = state_lib.abstract_state(experiment, the_mesh, 0, experiment.train_data())
        batch = {name: x[:16] for name, x in experiment.train_data().items()}
        jax.eval_shape(step.make_train_step(experiment, the_mesh), state, batch)


def test_it_is_for_a_run():
    params = {"m": {"w": jnp.ones((8, 8))}}
    rule = hk.transform_with_state(
        lambda: xshard.CrossShardOptimizer(optax.sgd(1.0), shard_params=True).init(params)
    )
    with pytest.raises(ValueError, match="shard_params needs a run"):
        rule.init(None)
    with pytest.raises(errors.UserError, match="shard_params must be True or False; received 1"):
        hk.transform(lambda: xshard.CrossShardOptimizer(optax.sgd(1.0), shard_params=1)).apply(
            {}, None
        )
