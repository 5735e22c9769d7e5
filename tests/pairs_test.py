"""Tests of networks that are a pair of pure functions, of any library."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xshard
from tests import rows, toy
from tests.optimizers import harness
from xshard import checkpoint, errors, export, loop
from xshard.learners import run_context

HALF = "params=float32,compute=bfloat16,output=float32"


class Function(toy.Toy):
    """The toy's network, state and keys, with a hidden layer."""

    def _network(self, batch, *, is_training):
        hidden = hk.Linear(self.config.hidden, name="hidden")(batch["x"])
        return super().forward({"x": jnp.tanh(hidden)}, is_training=is_training)

    def forward(self, batch, *, is_training):
        return self._network(batch, is_training=is_training)


class Pair(Function):
    """The same network as a pair."""

    @property
    def forward(self):
        return hk.transform_with_state(self._network)


def config(experiment, **changes):
    config_of_run = toy.get_config()
    config_of_run.experiment = f"tests.pairs_test.{experiment}"
    changes = {"steps": 4, "hidden": 64, "checkpoint.every_steps": 2, **changes}
    config_of_run.update_from_flattened_dict(changes)
    return config_of_run.lock()


VARIANTS = [
    {"precision": HALF, "micro_batches": 2, "slices": 2},
    {
        "group_assignment": ((0, 1, 2, 3), (4, 5, 6, 7)),
        "reduction.shard_update": True,
    },
    {"reduction.shard_params": True, "hidden": 1024},
    {"reduction.arithmetic": "exact", "logical_replicas": 8},
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_a_pair_trains_as_the_haiku_function_that_it_was_made_of(tmp_path, changes):
    ends = []
    for experiment in ("Function", "Pair"):
        config_of_run = config(experiment, **changes)
        directory = tmp_path / experiment
        # A resume in between.
        first = config(experiment, **{**changes, "steps": 2})
        assert loop.run(first, str(directory), "") == 0
        assert loop.run(config_of_run, str(directory), "") == 0
        ends.append(rows.final_state(directory, config_of_run))
    if "reduction.shard_params" in changes:
        # A Haiku function gathers each array as it asks for it, so that XLA may compile
        # other sums.
        ends = [checkpoint.flatten(end.experiment) for end in ends]
        for path, x in ends[0].items():
            np.testing.assert_allclose(x, ends[1][path], rtol=1e-5, atol=1e-6)
    else:
        harness.assert_equal(*ends)


class Flax(toy.Toy):
    """A network of flax.linen with a batch norm and dropout."""

    @property
    def forward(self):
        from flax import linen

        class Net(linen.Module):
            hidden: int

            @linen.compact
            def __call__(self, x, is_training):
                x = linen.Dense(self.hidden)(x)
                x = linen.BatchNorm(use_running_average=not is_training)(x)
                x = linen.Dropout(0.1, deterministic=not is_training)(x)
                return linen.Dense(1)(x)[:, 0]

        net = Net(self.config.hidden)

        def init(key, batch, is_training):
            del is_training
            state = dict(net.init(key, batch["x"], is_training=False))
            return state.pop("params"), state

        def apply(params, state, key, batch, is_training):
            return net.apply(
                {"params": params, **state},
                batch["x"],
                is_training,
                mutable=list(state),
                rngs={} if key is None else {"dropout": key},
            )

        return init, apply


class Equinox(toy.Toy):
    """A network of equinox."""

    @property
    def forward(self):
        import equinox

        def make(key):
            model = equinox.nn.MLP(3, 1, self.config.hidden, 2, key=key)
            return equinox.partition(model, equinox.is_inexact_array)

        _, static = equinox.filter_eval_shape(make, jax.random.key(0))

        def init(key, batch, is_training):
            del batch, is_training
            params, _ = make(key)
            return params, {}

        def apply(params, state, key, batch, is_training):
            del key, is_training
            model = equinox.combine(params, static)
            return jax.vmap(model)(batch["x"])[:, 0], state

        return init, apply


PATHS = {
    "Flax": {
        "params/Dense_0/kernel",
        "params/Dense_1/bias",
        "params/BatchNorm_0/scale",
        "net_state/batch_stats/BatchNorm_0/mean",
    },
    "Equinox": {"params/layers/0/weight", "params/layers/2/bias"},
}


@pytest.mark.parametrize("library", PATHS)
def test_a_network_of_another_library_trains_resumes_and_is_exported(tmp_path, library):
    package = library.lower()
    pytest.importorskip(package, reason=f"{package} is not installed")
    # Their layers promote types.
    with jax.numpy_dtype_promotion("standard"):
        _check(tmp_path, library)


def _check(tmp_path, library):
    changes = {
        "precision": HALF,
        "reduction.shard_params": True,
        "hidden": 256,
        "batch_size": 32,
        "micro_batches": 2,
        "loss_scale.kind": "dynamic",
    }
    config_of_run = config(library, **changes)
    for steps in (2, 4):
        assert (
            loop.run(
                config(library, **{**changes, "steps": steps}), str(tmp_path / "a"), ""
            )
            == 0
        )
    assert loop.run(config_of_run, str(tmp_path / "b"), "") == 0
    states = [rows.final_state(tmp_path / name, config_of_run) for name in "ab"]
    harness.assert_equal(*states)
    leaves = checkpoint.flatten(states[0])
    assert PATHS[library] <= leaves.keys()
    start = config(library, **{**changes, "steps": 1})
    run = loop.Run(start, str(tmp_path / "start"))
    first = run.checkpoints.init_state(run.batches.example)
    moved = checkpoint.flatten(first)
    for path in PATHS[library]:
        assert not np.array_equal(leaves[path], moved[path]), path
    trained = xshard.load(tmp_path / "a")
    batch = trained.experiment.eval_data()
    assert trained.predict(batch).shape == batch["y"].shape
    exported = export.write(trained, tmp_path / "net.stablehlo")
    assert "predict of x" in exported


def _mistakes():
    array = jnp.ones(2)
    good = lambda params, state, key, x: (x, state)
    return [
        ((lambda key, x: {}, good), "returned a dict.*return parameters, state"),
        ((lambda key, x: ({}, {}), good), "made no parameters"),
        ((lambda key, x: (array, {}), good), "by itself; put it under a name"),
        ((lambda key, x: ({"w": jnp.tanh}, {}), good), "'w', which is no array"),
        ((lambda key, x: ({"n": jnp.arange(2)}, {}), good), "int32 as the .* '~/n'"),
        (
            (lambda key, x: ({"a/b": array, "a": {"b": array}}, {}), good),
            "two arrays with the path 'a/b'",
        ),
        (
            (lambda key, x: ({"w": array}, {}), lambda params, state, key, x: x),
            "return outputs, state",
        ),
        (
            (
                lambda key, x: ({"w": array}, {"n": array}),
                lambda params, state, key, x: (x, {}),
            ),
            r"given \['~/n'\]: return the same ones",
        ),
        ((good, good, good), "a tuple of 3"),
        ("net", "is of type str"),
        (jax.tree_util.Partial(jnp.dot, jnp.ones(2)), "as docs/.* flax and equinox"),
    ]


@pytest.mark.parametrize(("network", "message"), _mistakes())
def test_a_wrong_pair_is_refused_by_name(network, message):
    mesh = xshard.make_mesh()

    def optimizer():
        return xshard.CrossShardOptimizer(optax.sgd(0.1))

    @jax.jit
    def call(x):
        learner = xshard.Learner(network, optimizer, toy.get_config().lock())
        state = learner.init(jax.random.key(0), x)
        return learner.apply(state, None, x)

    def mapped(x):
        return jax.shard_map(
            call, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
        )(x)

    with run_context.run_on(mesh), pytest.raises(errors.UserError, match=message):
        mapped(jnp.ones((1, 2)))


def test_a_pair_is_applied_to_a_state_that_another_process_made():
    """The names of a tree's arrays are found without a call of `init` before."""
    mesh = xshard.make_mesh(devices=jax.devices()[:1])

    def init(key, x):
        del key
        return {"layers": [jnp.ones(x.shape[1:]), jnp.zeros(x.shape[1:])]}, {}

    def apply(params, state, key, x):
        del key
        return x * params["layers"][0] + params["layers"][1], state

    def learner():
        optimizer = lambda: xshard.CrossShardOptimizer(optax.sgd(0.1))
        return xshard.Learner((init, apply), optimizer, toy.get_config().lock())

    def call(x):
        state = learner().init(jax.random.key(0), x)
        assert state.params.keys() == {"layers"}
        assert state.params["layers"].keys() == {"0", "1"}
        outputs, _ = learner().apply(state, None, x)
        return outputs

    x = jnp.arange(6.0).reshape(2, 3)
    with run_context.run_on(mesh):
        mapped = jax.shard_map(
            call, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
        )
        np.testing.assert_array_equal(mapped(x), x)
