"""Tests that attention by a kernel computes what XLA's attention does, and that XLA's
is used where no kernel fits.
"""

import functools
import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export as jax_export
from jax._src.cudnn import fused_attention_stablehlo as cudnn

import xshard
from configs import lm_tiny
from experiments.lm import attention, experiment, model
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard.data import batches
from xshard.training import state as state_lib
from xshard.training import step
from xshard.wings.utilisation import model_flops

# The TPU's kernel in interpret mode, which runs on any machine, but slowly.
INTERPRETED = {"cpu": functools.partial(attention._splash, interpret=True)}


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(attention, "kernels_for", lambda *_: INTERPRETED)


def arrays(dtype, length=384, size=64):
    """Returns query, key, value and the gradient with respect to the result."""
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (2, length, 2, size), dtype) for key in keys]


def shape(length, size, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((2, length, 4, size), dtype)


def on_replicas_of_a_run(f, inputs, devices=1, model=1):
    """Returns a function mapped over replicas as in a run, for `inputs` arrays whose
    rows are split over them.
    """
    mesh = mesh_lib.make_mesh(model=model, devices=jax.devices()[:devices])
    split = jax.P(mesh_lib.REPLICAS)
    return jax.jit(
        mesh_lib.on_replicas(f, mesh, in_specs=(split,) * inputs, out_specs=split)
    )


def both(kind, segments=None):
    """Returns a function of query, key, value and a gradient: the result, and the
    gradients of the first three.
    """

    def result_and_gradients(query, key, value, grad):
        attend = functools.partial(attention.attend, segments=segments, kind=kind)
        mixed, pull = jax.vjp(attend, query, key, value)
        return mixed, *pull(grad)

    return result_and_gradients


def check_close(ours, theirs, tolerance):
    """Compares arrays, with a tolerance relative to the largest element of each."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype and mine.shape == other.shape
        mine, other = (np.asarray(x, np.float32) for x in (mine, other))
        np.testing.assert_allclose(mine, other, atol=tolerance * np.abs(other).max())
        assert np.abs(other).max() > 0.1


# In float32, sums of a few hundred products are computed in another order. In bfloat16,
# the result and XLA's probabilities are rounded a few times.
TOLERANCES = {jnp.float32: 2e-6, jnp.bfloat16: 4 * 2**-8}


@pytest.mark.parametrize(
    "dtype, has_segments", [(jnp.float32, False), (jnp.bfloat16, True)]
)
def test_the_kernel_computes_the_results_of_xla(interpreted, dtype, has_segments):
    inputs = arrays(dtype)
    # Segments of 100 positions do not end where the kernel's blocks of 128 do.
    segments = jnp.tile(jnp.arange(384) // 100, (2, 1)) if has_segments else None
    by = [
        on_replicas_of_a_run(both(kind, segments), 4)(*inputs)
        for kind in attention.KINDS
    ]
    check_close(*by, TOLERANCES[dtype])


def test_each_device_of_a_model_axis_computes_its_own_heads(interpreted):
    mapped = lambda kind: on_replicas_of_a_run(both(kind), 4, devices=4, model=2)
    mesh = mesh_lib.make_mesh(model=2, devices=jax.devices()[:4])
    sharding = mesh_lib.sharding(mesh, mesh_lib.REPLICAS, None, mesh_lib.MODEL)
    inputs = [
        jax.device_put(x, sharding) for x in arrays(jnp.float32, length=128, size=16)
    ]
    compiled = mapped(attention.AUTO).lower(*inputs).compile()
    check_close(
        compiled(*inputs), mapped(attention.XLA)(*inputs), TOLERANCES[jnp.float32]
    )
    for sent in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert sent not in compiled.as_text()


def test_no_scores_are_kept_for_the_backward_pass():
    sizes = {"layers": 3, "width": 256, "heads": 2, "feed_forward": 32, "remat": False}
    network = hk.without_apply_rng(
        hk.transform(lambda x: model.Transformer(**sizes)(x))
    )
    tokens = jnp.zeros((5, 384), jnp.uint8)
    params = jax.eval_shape(network.init, jax.random.key(0), tokens)
    loss = lambda params: jnp.mean(network.apply(params, tokens))
    mesh = mesh_lib.make_mesh(devices=jax.devices()[:1])
    whole = {"in_specs": jax.P(), "out_specs": jax.P()}
    mapped = mesh_lib.on_replicas(jax.grad(loss), mesh, **whole)
    (program,) = (eqn.params["jaxpr"] for eqn in jax.make_jaxpr(mapped)(params).eqns)
    forward = next(eqn for eqn in program.eqns if eqn.primitive.name == "scan")
    kept = [x.aval.shape[1:] for x in forward.outvars if x.aval.shape[:1] == (3,)]
    assert not [x for x in kept if x[-2:] == (384, 384)]
    # The traced program keeps what any backend needs. JAX 0.12 traces the scaled query
    # of the TPU's kernel as an array of its own. A backend's compiler leaves out what
    # it does not read: here query, key and value are left.
    compiled = jax.jit(mapped).lower(params).compile().as_text()
    loops = re.findall(r"= (\(.*\)) while\(", compiled)
    # The loops of the forward and of the backward pass.
    over_layers = [x for x in loops if "f32[3,5,384,256]" in x]
    assert [x.count("f32[3,5,2,384,128]") for x in over_layers] == [3, 3]
    assert not [x for x in over_layers if re.search(r"\[3,[\d,]*384,384\]", x)]


def test_which_kernels_take_a_shape(monkeypatch):
    for length, size in ((128, 64), (384, 128), (4096, 256)):
        assert list(attention.kernels_for(shape(length, size), None)) == ["tpu"]
    for length, size in ((127, 64), (64, 64), (128, 63), (256, 512)):
        assert not attention.kernels_for(shape(length, size), None)
    with monkeypatch.context() as there:
        there.setattr(cudnn, "check_cudnn_version", lambda: 91200)
        for length, size, dtype, segments, found in (
            (128, 64, jnp.float16, None, ["tpu", "cuda"]),
            (100, 80, jnp.bfloat16, None, ["cuda"]),
            # JAX's own check of cuDNN's limits refuses the next two shapes.
            (100, 80, jnp.float32, None, []),
            (100, 81, jnp.bfloat16, None, []),
            (128, 64, jnp.float16, jnp.zeros((2, 128)), ["tpu"]),
        ):
            assert (
                list(attention.kernels_for(shape(length, size, dtype), segments))
                == found
            )


def lowered(attend, platform, length=256):
    inputs_like = [shape(length, 64)] * 3
    loss = lambda *inputs: jnp.sum(attend(*inputs).astype(jnp.float32))
    traced = on_replicas_of_a_run(jax.grad(loss, argnums=(0, 1, 2)), 3).trace(
        *inputs_like
    )
    return traced.lower(lowering_platforms=(platform,)).as_text()


def test_each_backend_lowers_to_its_own_kernel(monkeypatch):
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91200)
    scores = "tensor<2x4x256x256xf32>"
    text = lowered(attention.attend, "tpu")
    assert text.count("@tpu_custom_call") == 3 and scores not in text
    text = lowered(attention.attend, "cuda")
    for call in ("@__cudnn$fmhaSoftmax(", "@__cudnn$fmhaSoftmaxBackward("):
        assert text.count(call) == 1
    assert "tpu_custom_call" not in text and scores not in text
    by_xla = functools.partial(attention.attend, kind=attention.XLA)
    for attend, platform, length in (
        (attention.attend, "cpu", 256),
        (by_xla, "tpu", 256),
        (by_xla, "cuda", 256),
        (attention.attend, "tpu", 100),
    ):
        text = lowered(attend, platform, length)
        assert "custom_call" not in text and f"x{length}x{length}xf32>" in text


def test_a_program_outside_a_run_is_exported_for_all_backends():
    inputs_like, platforms = [shape(256, 64)] * 3, ("cpu", "cuda", "tpu")
    exported = jax_export.export(jax.jit(attention.attend), platforms=platforms)(
        *inputs_like
    )
    assert (
        exported.platforms == platforms and "custom_call" not in exported.mlir_module()
    )


def test_model_flops_do_not_depend_on_the_kind(folder):
    mesh, counts = mesh_lib.make_mesh(model=2, devices=jax.devices()[:4]), []
    batch = {"text": jax.ShapeDtypeStruct((8, 129), np.uint8)}
    for kind in attention.KINDS:
        config = config_of(folder, kind, **{"model.width": 128, "model_parallel": 2})
        model = experiment.LanguageModel(config)
        counts.append(model_flops.of_step(model, mesh, batch))
    assert counts[0] == counts[1] > 3 * 2 * 8 * 2 * 2 * 128 * 128 * 128


@pytest.fixture
def folder(tmp_path):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text("one two three four five six seven. " * 12)
    return tmp_path


class Plain(experiment.LanguageModel):
    """A model with a loss scale and an optimizer whose step equals the gradient."""

    def optimizer(self):
        rule = xshard.OptaxOptimizer(optax.sgd(1.0), name="sgd")
        opt = xshard.CrossShardOptimizer(
            rule, slice_axis_name="slice", **self.config.reduction
        )
        return xshard.MixedPrecisionLossScaleOptimizer(
            opt, xshard.DynamicLossScale(2.0**10)
        )


def config_of(folder, kind, **changes):
    config = lm_tiny.get_config()
    config.model.update({"layers": 2, "width": 16, "heads": 2, "feed_forward": 32})
    config.text.update({"files": (str(folder),), "held_out": 0.2, "length": 128})
    config.update({"batch_size": 8, "steps": 2, "eval_batch_size": 8})
    config.update_from_flattened_dict(
        {"model.attention": kind, "model.remat": True, **changes}
    )
    return config.lock()


def first_step(config):
    """Returns the loss and the gradients of one step on four devices."""
    plain = Plain(config)
    mesh = experiment_lib.mesh_of(config, jax.devices()[:4])
    sizes = {key: config[key] for key in ("batch_size", "seed", "micro_batches")}
    train = batches.TrainBatches(plain.train_batches, mesh, **sizes)
    state = state_lib.init(plain, mesh, 0, train.example)
    # The head is initialized to zero, which would make all other gradients zero.
    head = state.experiment.params["transformer"]["head"]
    values = 0.1 * jax.random.normal(jax.random.key(7), head.shape)
    state.experiment.params["transformer"]["head"] = jax.device_put(
        values, head.sharding
    )
    new, metrics = jax.jit(step.make_train_step(plain, mesh))(state, next(train))
    assert not np.any(metrics["skipped"])
    subtract = lambda a, b: np.asarray(a) - np.asarray(b)
    grads = jax.tree.map(subtract, state.experiment.params, new.experiment.params)
    return np.asarray(metrics["loss"]), jax.tree.leaves(grads)


@pytest.mark.sample(0.4)
@pytest.mark.parametrize(
    "precision, changes",
    [
        (
            "float32",
            {"model_parallel": 2, "micro_batches": 2, "reduction.shard_update": True},
        ),
        (
            "float16",
            {"reduction.shard_params": True, "group_assignment": ((0, 1), (2, 3))},
        ),
    ],
    ids=["model axis", "shards of parameters"],
)
def test_a_step_with_the_kernel_equals_one_with_xla(
    folder, interpreted, precision, changes
):
    changes = {
        "precision": f"params=float32,compute={precision},output=float32",
        **changes,
    }
    steps = [first_step(config_of(folder, kind, **changes)) for kind in attention.KINDS]
    (loss, grads), (other_loss, other_grads) = steps
    # The kernel sums in another order. In float16, numbers are also rounded at each
    # layer.
    tolerance = 1e-5 if precision == "float32" else 1e-2
    np.testing.assert_allclose(loss, other_loss, rtol=tolerance)
    scale = max(np.abs(g).max() for g in other_grads)
    for mine, other in zip(grads, other_grads, strict=True):
        np.testing.assert_allclose(mine, other, atol=tolerance * scale)
        assert np.abs(mine).max() > 1e-3 * scale


def test_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="model.attention='flash' must be one of auto, xla"
    ):
        experiment.LanguageModel(config_of(tmp_path, "flash"))
