"""Tests of shard_params: networks train as they do replicated, and hold and send the
expected arrays.
"""

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
from xshard import errors, mesh
from xshard.data import batches
from xshard.dryrun import collectives
from xshard.optimizers import base
from xshard.training import fingerprint, step
from xshard.training import state as state_lib

HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))
DOUBLE = "params=float64,compute=float64,output=float64"
WIDTH = 32


class Network(toy.Wide):
    """A network of the configured kind, with a clip by the global norm and averages in
    its rule.
    """

    def forward(self, batch, *, is_training):
        x = hk.Linear(WIDTH, name="inputs")(batch["x"])
        x = x + KINDS[self.config.kind](x)
        return hk.Linear(1, name="outputs")(x)[:, 0]

    def optimizer(self):
        rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
        opt = xshard.OptaxOptimizer(rule, name="adamw")
        opt = xshard.CrossShardOptimizer(
            opt, slice_axis_name="slice", **self.config.reduction
        )
        opt = xshard.MovingAverageOptimizer(opt, 0.5)
        return xshard.MixedPrecisionLossScaleOptimizer(opt, "dynamic")


class WithHalvedLoss(Network):
    """Adds the loss at halved parameters to the loss."""

    def training_loss(self, state, batch, key):
        halved = state.replace(params=jax.tree.map(lambda w: 0.5 * w, state.params))
        halved_value, *_ = super().training_loss(halved, batch, key)
        value, *rest = super().training_loss(state, batch, key)
        return value + halved_value, *rest


class MuonAndAdafactor(Network):
    """Uses rules that need whole matrices or rows: Muon for the wide matrices,
    Adafactor for the rest.
    """

    def optimizer(self):
        kind = lambda path, w: (
            "muon" if path[0].key.endswith("linear_0") and w.ndim > 1 else "rest"
        )
        rules = {
            "muon": contrib.scale_by_muon(
                weight_dimension_numbers=lambda p: jax.tree.map(
                    lambda w: contrib.MuonDimensionNumbers(w.ndim - 2, w.ndim - 1), p
                )
            ),
            "rest": optax.adafactor(1e-2, min_dim_size_to_factor=8),
        }
        rule = optax.partition(
            rules, lambda p: jax.tree_util.tree_map_with_path(kind, p)
        )
        opt = xshard.OptaxOptimizer(
            optax.chain(rule, optax.scale(-1e-2)), name="by_rows"
        )
        opt = xshard.CrossShardOptimizer(
            opt, slice_axis_name="slice", **self.config.reduction
        )
        return xshard.MixedPrecisionLossScaleOptimizer(opt, "dynamic")


class DividedNetwork(Network):
    """Also splits the weights of each layer along the model axis."""

    def sharding_rules(self):
        return (
            ("/linear_0/w$", jax.P(None, None, "model")),
            ("/linear_0/b$", jax.P(None, "model")),
            ("/linear_1/w$", jax.P(None, "model", None)),
        )


class Divided(DividedNetwork, MuonAndAdafactor):
    """Does so with rules that need whole matrices or rows."""


def block(x):
    # Eight replicas hold the weights in shards. The biases are too small for that and
    # stay whole.
    w = hk.get_parameter("scale", (), init=jnp.ones)
    # An array without elements is whole too.
    w = w + jnp.sum(hk.get_parameter("nothing", (0, WIDTH), init=jnp.ones))
    return x + w * jnp.tanh(hk.nets.MLP([2 * WIDTH, WIDTH], name="mlp")(x))


def partly(x):
    wide = hk.remat(lambda x: jnp.tanh(hk.Linear(2 * WIDTH, name="wide")(x)))(x)
    return x + jnp.tanh(hk.Linear(WIDTH, name="narrow")(wide))


def stacked(layer, count=8):
    # By default there are as many layers as replicas, so the dimension of layers could
    # be sharded too.
    return lambda x: hk.layer_stack(count, name="layers")(layer)(x)


def recurrent(x):
    core = hk.LSTM(WIDTH)
    state = core.initial_state(len(x))
    inputs = jnp.stack([x, -x, 0.5 * x])
    return hk.dynamic_unroll(
        core, inputs, jax.tree.map(lambda s: s.astype(x.dtype), state)
    )[0][-1]


def branching(x):
    left = hk.Linear(WIDTH, name="left")
    right = hk.Linear(WIDTH, name="right")
    if hk.running_init():
        return left(x) + right(x)
    # Replicas may take different branches, so no branch may contain a collective.
    return hk.cond(jnp.sum(x) > 0, left, right, x)


def tied(x):
    linear = hk.Linear(WIDTH, name="tied")
    return linear(jnp.tanh(linear(x)))


def unused(x):
    first = hk.Linear(WIDTH, name="used")(x)
    return first + jax.lax.stop_gradient(hk.Linear(WIDTH, name="unused")(x))


def normalized(x):
    def divide(next_getter, value, context):
        value = next_getter(value)
        return value / (1 + jnp.linalg.norm(value))

    with hk.custom_getter(divide):
        return hk.nets.MLP([2 * WIDTH, WIDTH], name="normalized")(x)


def complexes(x):
    init = hk.initializers.RandomNormal(1 / WIDTH**0.5)
    parts = [
        hk.get_parameter(name, (WIDTH, WIDTH), init=init)
        for name in ("real", "imaginary")
    ]
    return x + jnp.real(jnp.sin(x @ jax.lax.complex(*parts)))


def many(x):
    # More than ten parameters of one shape. By name w_10 comes before w_2, but each
    # must be gathered in its place.
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
    "normalized": normalized,
    "complexes": complexes,
    "unused": unused,
    "unused in remat": lambda x: hk.remat(unused)(x),
    "many in remat": lambda x: hk.remat(many)(x),
    "penalty": lambda x: (
        x * sum(map(jnp.sum, _linear(x).params_dict().values())).astype(x.dtype)
    ),
}


def _linear(x):
    module = hk.Linear(WIDTH, name="penalised")
    module(x)
    return module


def make(kind="block", sharded=True, cls=Network, **changes):
    config = toy.get_config()
    config.kind = kind
    for key in ("reduce_dtype", "slice_dtype"):
        if key in changes:
            config.reduction[key] = changes.pop(key)
    config.reduction.shard_params = sharded
    config.update({"fingerprint_every_steps": 0, **changes})
    the_mesh = mesh.make_mesh(
        config.group_assignment or None,
        slices=config.slices,
        model=config.model_parallel,
    )
    return cls(config.lock()), the_mesh


def begin(experiment, the_mesh):
    config = experiment.config
    train = batches.TrainBatches(
        experiment.train_batches,
        the_mesh,
        batch_size=config.batch_size,
        seed=0,
        micro_batches=config.micro_batches,
    )
    return state_lib.init(experiment, the_mesh, 0, train.example), train


def trained(steps=4, **changes):
    """Returns the experiment, its mesh, its state after some steps, and the last
    metrics.
    """
    experiment, the_mesh = make(**changes)
    state, train = begin(experiment, the_mesh)
    apply = jax.jit(step.make_train_step(experiment, the_mesh), donate_argnums=0)
    for _ in range(steps):
        state, metrics = apply(state, next(train))
    return experiment, the_mesh, state, jax.device_get(metrics)


def on_host(experiment, the_mesh, state):
    return jax.device_get(dataclasses.replace(state, rng=None))


SHAPES = [
    *({"kind": kind} for kind in KINDS if kind not in ("penalty", "few layers")),
    {"kind": "stack", "micro_batches": 2, "group_assignment": HALVES},
    {"kind": "block", "slices": 2},
    {"kind": "block", "overflow_above": 2.0},
    {"kind": "stack", "cls": MuonAndAdafactor},
    {"kind": "few layers", "cls": MuonAndAdafactor, "slices": 2},
    {
        "kind": "stack",
        "cls": Divided,
        "model_parallel": 2,
        "group_assignment": ((0, 1), (2, 3)),
    },
    {
        "kind": "remat",
        "cls": Divided,
        "model_parallel": 2,
        "micro_batches": 2,
        "slices": 2,
    },
    {
        "kind": "remat",
        "cls": WithHalvedLoss,
        "micro_batches": 2,
        "gather_once": True,
        "slices": 2,
    },
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_network_trains_as_it_does_replicated(shape):
    ends = []
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for sharded in (True, False):
            *run, metrics = trained(sharded=sharded, precision=DOUBLE, **shape)
            ends.append(({"state": on_host(*run)}, metrics))
    (sharded, sharded_metrics), (whole, wanted) = ends
    harness.assert_close(sharded, whole, rtol=1e-8, atol=1e-8)
    # Metrics are float32.
    harness.assert_close(sharded_metrics, wanted, rtol=1e-5, atol=1e-8)


def test_the_norm_of_parameters_counts_those_that_are_not_trained():
    norms = []
    for sharded in (True, False):
        _, _, state, metrics = trained(kind="unused", sharded=sharded, steps=1)
        norms.append(float(metrics["parameter_norm"]))
        leaves = jax.tree.leaves(jax.device_get(state.experiment.params))
        expected = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in leaves))
        # float32 sums in another order.
        assert norms[-1] == pytest.approx(expected, rel=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def bytes_per_device(tree):
    device = jax.devices()[0]
    leaves = jax.tree.leaves(tree)
    return sum(
        s.data.nbytes
        for x in leaves
        for s in x.addressable_shards
        if s.device == device
    )


def test_sharded_parameters_and_slots_take_one_nth_of_the_memory():
    """The stack has eight layers, so eight replicas would divide the dimension of
    layers too.
    """
    sharded, whole = (
        begin(*make("stack", sharded))[0].experiment for sharded in (True, False)
    )
    layer = sharded.params["layers/mlp/~/linear_0"]
    assert layer["w"].sharding.spec == jax.P(None, "replica", None)
    assert layer["b"].sharding.is_fully_replicated
    weights = 4 * 8 * 2 * WIDTH * 2 * WIDTH
    for part, copies in (("params", 1), ("opt_state", 3)):
        saved = bytes_per_device(getattr(whole, part)) - bytes_per_device(
            getattr(sharded, part)
        )
        # Slots of whole parameters are sharded too, so the slots may save more.
        assert copies * weights * 7 / 8 <= saved
    assert (
        bytes_per_device(sharded.params)
        == bytes_per_device(whole.params) - weights * 7 // 8
    )


@pytest.mark.sample(0.4)
def test_a_parameter_is_sharded_over_the_model_axis_and_replicas():
    changes = {"cls": Divided, "model_parallel": 2}
    sharded, whole = (
        begin(*make("stack", sharded, **changes))[0].experiment
        for sharded in (True, False)
    )
    weights = sharded.params["layers/mlp/~/linear_0"]["w"]
    assert weights.sharding.spec == jax.P(None, "replica", "model")
    saved = bytes_per_device(whole.params) - bytes_per_device(sharded.params)
    # The model axis halves two stacks of weights, and each of four replicas holds a
    # quarter of a half.
    assert saved >= 2 * 4 * 8 * WIDTH * 2 * WIDTH / 2 * 3 / 4


def sent(kind, **changes):
    """Returns the lowered step in float16, and the number of its collectives by kind
    and types.
    """
    half = "params=float32,compute=float16,output=float32"
    experiment, the_mesh = make(kind, precision=half, **changes)
    state, train = begin(experiment, the_mesh)
    lowered = jax.jit(step.make_train_step(experiment, the_mesh)).lower(
        state, next(train)
    )
    counts = collections.Counter()
    for collective in collectives.of(lowered.compile()):
        counts[collective.kind, collective.dtypes] += collective.times
    return lowered, counts


def test_parameters_of_a_loop_over_time_are_gathered_before_it():
    _, counts = sent("recurrent")
    # There are three time steps. The weights are gathered once forward and once
    # backward, which the compiler may merge, and each array is summed once.
    assert 1 <= counts["all-gather", ("f16",)] <= 2
    assert counts["reduce-scatter", ("f32",)] == 5


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["stack", "remat", "partly"])
def test_layers_are_gathered_one_at_a_time_and_again_in_the_backward_pass(kind):
    lowered, counts = sent(kind)
    # Two arrays of each of eight layers are gathered forward and backward. Their
    # gradients are summed in float32.
    assert counts["all-gather", ("f16",)] == 2 * 2 * 8
    assert counts["reduce-scatter", ("f16",)] == 0
    assert counts["reduce-scatter", ("f32",)] >= 2 * 8
    # The backward pass still recomputes what hk.remat covers. Besides that it repeats
    # only the gathers.
    assert (
        lowered.as_text().count("stablehlo.tanh")
        == {"stack": 1, "remat": 2, "partly": 3}[kind]
    )


@pytest.mark.parametrize("kind, times", [("stack", 1), ("branching", 2)])
def test_only_a_network_that_gathers_early_is_traced_again(kind, times, monkeypatch):
    experiment, the_mesh = make(kind)
    state, train = begin(experiment, the_mesh)
    network = KINDS[kind]
    calls = []

    def counting(x):
        calls.append(x.shape)
        return network(x)

    monkeypatch.setitem(KINDS, kind, counting)
    jax.eval_shape(step.make_train_step(experiment, the_mesh), state, next(train))
    assert len(calls) == times


@pytest.mark.sample(0.4)
def test_model_parallel_parameters_are_gathered_only_over_replicas():
    # Muon would gather matrices for its products, too.
    experiment, the_mesh = make("stack", cls=DividedNetwork, model_parallel=2)
    state, train = begin(experiment, the_mesh)
    lowered = jax.jit(step.make_train_step(experiment, the_mesh)).lower(
        state, next(train)
    )
    rows = collectives.rows(the_mesh, collectives.of(lowered.compile()))
    assert {row["kind"] for row in rows if "model" in row["over"]} == {"all-reduce"}
    (gathers,) = [row for row in rows if row["kind"] == "all-gather"]
    # Half of each layer's two arrays is gathered forward and backward. All other
    # gathers together add less than a tenth.
    half = 4 * WIDTH * 2 * WIDTH // 2
    assert 2 * 2 * 8 * half <= gathers["bytes"] < 2.2 * 2 * 8 * half


@pytest.mark.sample(0.4)
def test_each_replica_computes_a_part_of_the_products_of_matrices():
    flops = []
    for sharded in (True, False):
        experiment, the_mesh = make("stack", sharded, MuonAndAdafactor)
        state, train = begin(experiment, the_mesh)
        lowered = jax.jit(step.make_train_step(experiment, the_mesh)).lower(
            state, next(train)
        )
        flops.append(lowered.compile().cost_analysis()["flops"])
    assert flops[0] < flops[1] / 4


def test_gather_once_gathers_once_for_all_micro_batches():
    _, counts = sent("stack", micro_batches=2, gather_once=True)
    # Two stacks of arrays are gathered whole. Their gradients are summed after each
    # micro-batch.
    assert counts["all-gather", ("f16",)] == 2
    assert counts["reduce-scatter", ("f32",)] >= 2 * 2


def test_evaluation_prediction_and_fingerprint_match_whole_parameters():
    outcomes = []
    experiment, the_mesh, whole, _ = trained(kind="recurrent", steps=2)
    for sharded in (True, False):
        experiment, the_mesh = make("recurrent", sharded)
        shapes = state_lib.abstract_state(
            experiment, the_mesh, 0, experiment.train_data()
        )
        state = jax.tree.map(
            lambda x, like: jax.device_put(x, like.sharding), whole, shapes
        )
        # The tree structure of a state records how its parameters are sharded.
        state = jax.tree.unflatten(jax.tree.structure(shapes), jax.tree.leaves(state))
        batch = {name: x[:16] for name, x in experiment.train_data().items()}
        mask = np.arange(16) < 13
        sums = jax.jit(step.make_eval_step(experiment, the_mesh))(
            state, {**batch, "_mask": mask}
        )
        outputs = jax.jit(step.make_predict(experiment, the_mesh))(state, batch)
        values = jax.jit(fingerprint.program(experiment, the_mesh))(state)
        assert not values.diverged
        outcomes.append(
            (jax.device_get((sums, outputs)), jax.device_get(values.values))
        )
    (close, bits), (wanted, wanted_bits) = outcomes
    assert "raw/error" in wanted[0]
    harness.assert_close(close, wanted, rtol=1e-5)
    harness.assert_equal(bits, wanted_bits)


class Clips(Network):
    def clip_gradients(self, grads):
        return jax.tree.map(lambda g: jnp.clip(g, -1, 1), grads)


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


class SharpnessAware(base.OptimizerWrapper):
    """Differentiates where a step against the gradient, of fixed length, leads."""

    def __init__(self, opt):
        super().__init__()
        self.opt = opt

    def compute_gradients(self, loss, params, **kwargs):
        _, grads = self.opt.compute_gradients(loss, params, **kwargs)
        length = 0.1 / optax.global_norm(grads)
        there = jax.tree.map(lambda w, g: w + length * g, params, grads)
        return self.opt.compute_gradients(loss, there, **kwargs)


class PerturbsInRule(Network):
    def optimizer(self):
        return SharpnessAware(super().optimizer())


@pytest.mark.parametrize(
    "changes, match",
    [
        (
            {"cls": Clips},
            "shard_params=True cannot be used with clip_gradients: no replica has its "
            "own gradients",
        ),
        (
            {"cls": AppliesItself},
            "cannot be used with Own, which overrides apply_gradients",
        ),
        (
            {"cls": PerturbsInRule},
            "cannot be used with SharpnessAware, which overrides compute_gradients",
        ),
        (
            {"cls": ClipsInRule},
            "cannot be used with ClipsOwn, which overrides aggregate",
        ),
        (
            {"kind": "penalty"},
            "uses the parameter 'penalised/w' without asking hk.get_parameter",
        ),
    ],
    ids=str,
)
def test_code_that_needs_whole_parameters_or_own_gradients_is_refused(changes, match):
    experiment, the_mesh = make(**changes)
    with pytest.raises(ValueError, match=match):
        state = state_lib.abstract_state(
            experiment, the_mesh, 0, experiment.train_data()
        )
        batch = {name: x[:16] for name, x in experiment.train_data().items()}
        jax.eval_shape(step.make_train_step(experiment, the_mesh), state, batch)


def test_shard_params_outside_a_run_is_refused():
    params = {"m": {"w": jnp.ones((8, 8))}}
    rule = hk.transform_with_state(
        lambda: xshard.CrossShardOptimizer(optax.sgd(1.0), shard_params=True).init(
            params
        )
    )
    with pytest.raises(ValueError, match="shard_params needs a run"):
        rule.init(None)
    with pytest.raises(
        errors.UserError, match="shard_params must be True or False; received 1"
    ):
        hk.transform(
            lambda: xshard.CrossShardOptimizer(optax.sgd(1.0), shard_params=1)
        ).apply({}, None)
