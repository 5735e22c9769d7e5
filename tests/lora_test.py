"""Tests of low-rank adaptation."""

import functools

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
from xshard.files import tensors
from xshard.learners import networks
from xshard.optimizers import gathering, trees

RANK = 2
BASE = "mlp/~/linear_0"


class Adapted(toy.Averaged):
    """Adapts the layers that the config selects."""

    def lora(self):
        return xshard.lora(RANK, alpha=8.0, select=self.config.select)

    def optimizer(self):
        opt = xshard.OptaxOptimizer(optax.adam(0.05), name="adam")
        return xshard.MovingAverageOptimizer(
            xshard.CrossShardOptimizer(opt, **self.config.reduction), 0.5
        )


def config(experiment="tests.lora_test.Adapted", **changes):
    config_of_run = toy.get_config()
    config_of_run.experiment = experiment
    config_of_run.select = "linear_0/"
    config_of_run.kept = ""
    changes = {"steps": 4, "hidden": 64, "checkpoint.every_steps": 2, **changes}
    config_of_run.update_from_flattened_dict(changes)
    return config_of_run.lock()


def stacked(x):
    """A network of layers that are scanned, between two that are not."""
    x = hk.Linear(8, name="first")(x)
    layer = lambda x: x + jnp.tanh(hk.Linear(8, name="inner")(x))
    x = hk.layer_stack(3, name="layers")(hk.remat(layer))(x)
    kernel = hk.get_parameter("kernel", (8, 2, 3), jnp.float32, jnp.ones)
    return jnp.einsum("bi,ijk->bjk", x, kernel)


def drawn(params):
    """Replaces the second matrices, which begin at zero, by random numbers."""
    new = {}
    for path, x in trees.leaves_by_path(params).items():
        if path.endswith("_lora_b"):
            new[path] = jax.random.normal(jax.random.key(len(path)), x.shape)
    return trees.replace(params, new)


@pytest.mark.parametrize("select", ["", "layers/", "^layers/inner/w$|kernel"])
def test_a_network_adds_the_products_that_a_merge_adds(select):
    adaptation = xshard.lora(RANK, alpha=3.0, select=select)
    x = jax.random.normal(jax.random.key(1), (4, 5))
    key = jax.random.key(0)
    base, net_state, requested = gathering.init_network(stacked, key, x)
    params, shapes = adaptation.extend(key, base, requested)
    adapted = hk.transform_with_state(adaptation.around(stacked)).apply
    plain = hk.transform_with_state(stacked).apply

    # At first the network is what it was, bit by bit.
    want, _ = plain(base, net_state, None, x)
    got, _ = jax.jit(adapted)(params, net_state, None, x)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for path, value in trees.leaves_by_path(base).items():
        np.testing.assert_array_equal(value, trees.leaves_by_path(params)[path])

    params = drawn(params)
    merged = adaptation.merge(params)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    got, _ = adapted(params, net_state, None, x)
    want, _ = plain(merged, net_state, None, x)
    # The two compute the same sums, compiled differently.
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert not np.allclose(want, plain(base, net_state, None, x)[0])
    # A merged tree needs no more adaptation.
    np.testing.assert_array_equal(adapted(merged, net_state, None, x)[0], want)

    for path in adaptation.trained(params):
        name = path.removesuffix("_lora_a").removesuffix("_lora_b")
        assert shapes[path][path.endswith("b")] in shapes[name] or "kernel" in path
    if select != "":
        assert "first/w_lora_a" not in trees.leaves_by_path(params)
    if "layers/" in select:
        assert params["layers/inner"]["w_lora_a"].shape == (3, 8, RANK)


def test_a_pair_of_functions_adds_the_same_products():
    adaptation = xshard.lora(RANK, alpha=3.0, select="first/|kernel")
    x = jax.random.normal(jax.random.key(1), (4, 5))
    pair = networks.of(hk.transform_with_state(stacked), adaptation)
    base, net_state, requested = pair.init(jax.random.key(0), x)
    params, _ = adaptation.extend(jax.random.key(0), base, requested)
    params = drawn(params)
    got, _ = pair.apply(params, net_state, None, x)
    want, _ = networks.of(stacked, adaptation).apply(params, net_state, None, x)
    # The two compute the same sums, compiled differently.
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_network_s_own_getter_sees_whole_adapted_arrays():
    seen = {}

    def normalized(x):
        def getter(next_getter, value, context):
            seen[context.full_name] = value
            return next_getter(value / jnp.linalg.norm(value))

        with hk.custom_getter(getter):
            return hk.Linear(4, with_bias=False, name="linear")(x)

    adaptation = xshard.lora(RANK, alpha=2.0, select="")
    x = jnp.ones((1, 4))
    base, net_state, requested = gathering.init_network(
        normalized, jax.random.key(0), x
    )
    params, _ = adaptation.extend(jax.random.key(0), base, requested)
    params = drawn(params)
    seen.clear()
    hk.transform_with_state(adaptation.around(normalized)).apply(
        params, net_state, None, x
    )
    merged = adaptation.merge(params)
    assert seen.keys() == {"linear/w"}
    np.testing.assert_array_equal(seen["linear/w"], merged["linear"]["w"])


VARIANTS = [
    {},
    {"group_assignment": ((0, 1, 2, 3), (4, 5, 6, 7)), "micro_batches": 2},
    {
        "reduction.shard_update": True,
        "precision": "params=float32,compute=bfloat16,output=float32",
    },
    {"reduction.shard_params": True, "hidden": 1024},
    {"reduction.arithmetic": "exact", "logical_replicas": 8},
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_only_the_matrices_are_trained_and_a_run_resumes_to_the_same_bits(
    tmp_path, changes
):
    config_of_run = config(**changes)
    run = loop.Run(config_of_run, str(tmp_path / "run"))
    first = run.checkpoints.init_state(run.batches.example).experiment
    for steps in (2, 4):
        assert (
            loop.run(config(**{**changes, "steps": steps}), str(tmp_path / "run"), "")
            == 0
        )
    state = rows.final_state(tmp_path / "run", config_of_run).experiment
    before = trees.leaves_by_path(first.params)
    trained = set()
    for path, x in trees.leaves_by_path(state.params).items():
        if not np.array_equal(x, before[path]):
            trained.add(path)
    assert trained == {f"{BASE}/w_lora_a", f"{BASE}/w_lora_b"}
    slots = [path for path in checkpoint.flatten(state.opt_state) if "linear" in path]
    assert slots
    assert all("_lora_" in path for path in slots)
    assert loop.run(config_of_run, str(tmp_path / "whole"), "") == 0
    whole = rows.final_state(tmp_path / "whole", config_of_run).experiment
    harness.assert_equal(state, whole)


def test_the_base_of_another_run_is_adapted_and_merged(tmp_path, capsys):
    base = config("tests.toy.Averaged")
    assert loop.run(base, str(tmp_path / "base"), "") == 0
    source = checkpoint.Source(str(tmp_path / "base"))
    tuned = config(steps=6)
    assert loop.run(tuned, str(tmp_path / "tuned"), "", init=source) == 0
    said = capsys.readouterr()
    assert f"initial values: params/{BASE}/w_lora_a, params/{BASE}/w_lora_b" in (
        said.out + said.err
    )
    start = rows.final_state(tmp_path / "base", base).experiment.params
    trained = xshard.load(tmp_path / "tuned")
    for module, arrays in start.items():
        for name, x in arrays.items():
            np.testing.assert_array_equal(trained.params[module][name], x)

    merged = xshard.load(tmp_path / "tuned", merge_lora=True)
    assert jax.tree.structure(merged.params) == jax.tree.structure(start)
    batch = trained.experiment.eval_data()
    # The products are added inside one program and outside of it.
    np.testing.assert_allclose(
        merged.predict(batch), trained.predict(batch), rtol=1e-5, atol=1e-5
    )
    file = tmp_path / "tuned.safetensors"
    assert "low-rank matrices merged" in export.write(trained, file)
    arrays = tensors.File(str(file))
    assert not [path for path in arrays.shapes if "_lora_" in path]
    np.testing.assert_array_equal(
        arrays.read(f"params/{BASE}/w", (slice(None), slice(None))),
        merged.params[BASE]["w"],
    )
    separate = tmp_path / "separate.safetensors"
    assert "merged" not in export.write(trained, separate, merge_lora=False)
    assert f"params/{BASE}/w_lora_a" in tensors.File(str(separate)).shapes

    # A network without the matrices begins with the merged arrays, never without what
    # was trained.
    again = functools.partial(loop.run, config("tests.toy.Averaged", steps=1))
    assert again(str(tmp_path / "on"), "", init=checkpoint.Source(str(file))) == 0
    unmerged = checkpoint.Source(str(tmp_path / "tuned"))
    with pytest.raises(checkpoint.CheckpointError, match=r"has low-rank matrices for"):
        again(str(tmp_path / "lost"), "", init=unmerged)
    with pytest.raises(errors.UserError, match="nothing to merge"):
        xshard.load(tmp_path / "base", merge_lora=True)


@pytest.mark.parametrize(
    ("select", "message"),
    [
        ("linera_0/w", r"matches no parameter's path; near it: .*mlp/~/linear_0/w"),
        ("/b$", "fewer than two dimensions, such as 'mlp/~/linear_0/b'"),
        ("linear_1", r"'mlp/~/linear_1/w' .* a matrix of 64 x 1, whose rank .* most 1"),
    ],
)
def test_a_wrong_selection_is_refused_before_a_run_begins(tmp_path, select, message):
    with pytest.raises(errors.UserError, match=message):
        loop.run(config(select=select), str(tmp_path), "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank=0"),
        ({"alpha": 0.0}, "alpha=0.0"),
        ({"select": "("}, r"select='\('.* not a regular expression"),
        ({"train": "["}, r"train='\['"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(errors.UserError, match=message):
        xshard.lora(**{"rank": 1, "alpha": 1.0, "select": "", **arguments})


def test_a_new_output_layer_is_trained_as_it_is():
    adaptation = xshard.lora(RANK, 2.0, select="", train="^linear/")

    def network(x):
        return hk.Linear(4, name="linear")(hk.Linear(4, name="body")(x))

    params, _, requested = gathering.init_network(
        network, jax.random.key(0), jnp.ones((1, 4))
    )
    extended, _ = adaptation.extend(jax.random.key(0), params, requested)
    trained = {"body/w_lora_a", "body/w_lora_b", "linear/b", "linear/w"}
    assert set(adaptation.trained(extended)) == trained
    with pytest.raises(errors.UserError, match="near it"):
        xshard.lora(RANK, 2.0, select="", train="haed").trained(extended)


def test_what_is_no_adaptation_is_refused():
    with pytest.raises(errors.UserError, match=r"lora is 3: give .* xshard\.lora"):
        xshard.Learner(stacked, None, config(), lora=3)
