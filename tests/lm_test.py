"""Tests of the language model at a tiny size, of its text, and of its config files."""

import functools
import math
import os

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xshard
from configs import lm, lm_pod, lm_tiny
from experiments.lm import experiment, model, text
from xshard import config as config_lib
from xshard import mesh as mesh_lib
from xshard.base import primitives
from xshard.base.jax_internals import jaxprs
from xshard.data import batches
from xshard.dryrun import collectives
from xshard.training import state as state_lib
from xshard.training import step

FLOAT32 = "params=float32,compute=float32,output=float32"


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of files that repeat one sentence, which a small model can learn."""
    place = tmp_path_factory.mktemp("text")
    for i in range(40):
        (place / f"{i}.txt").write_text("one two three four five six seven. " * 12)
    return str(place)


def small(folder, get_config=lm_tiny.get_config, **changes):
    config = get_config()
    config.model.update({"layers": 2, "width": 16, "heads": 2, "feed_forward": 32})
    config.text.update(
        {"files": (folder,), "held_out": 0.2, "length": 16, "eval_windows": 16}
    )
    config.sample.update({"prompts": ("one", ""), "length": 12})
    config.update({"steps": 4, "batch_size": 8, "eval_batch_size": 8})
    config.update({"eval_every_steps": 40, "log_every_steps": 4})
    config.update_from_flattened_dict(changes)
    return config.lock()


def transformer(*, remat=False, **sizes):
    sizes = {"layers": 2, "width": 16, "heads": 2, "feed_forward": 32, **sizes}
    language_model = hk.transform(lambda x: model.Transformer(**sizes, remat=remat)(x))
    return hk.without_apply_rng(language_model)


@pytest.fixture(scope="module")
def network():
    """The jitted network, parameters whose head is not zero, and input bytes."""
    language_model = transformer()
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 256).astype(jnp.uint8)
    with jax.numpy_dtype_promotion("standard"):
        params = jax.jit(language_model.init)(jax.random.key(0), tokens)
    params["transformer"]["head"] = jax.random.normal(jax.random.key(2), (16, 256))
    return jax.jit(language_model.apply), params, tokens


def test_a_window_ends_where_the_next_begins():
    whole = np.arange(23, dtype=np.uint8)
    rows = text.windows(whole, 5, "training")
    np.testing.assert_array_equal(rows, [range(i, i + 6) for i in (0, 5, 10, 15)])
    assert np.shares_memory(rows, whole)


def test_a_file_stays_in_its_set_when_files_are_added(tmp_path):
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text(f"<{i}>")
    (tmp_path / ".hidden").write_text("<hidden>")
    train, held = text.read((str(tmp_path),), 0.3)
    sides = [set(bytes(side).split(b"\0")) - {b""} for side in (train, held)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 60
    # The side depends on the file's name alone, so it is the same on every machine.
    # Expected with sha256sum.
    assert len(sides[1]) == 14 and b"<1>" in sides[1] and b"<0>" in sides[0]
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "new.txt").write_text("<new>")
    text.read.cache_clear()
    after = [
        set(bytes(side).split(b"\0")) - {b""}
        for side in text.read((str(tmp_path),), 0.3)
    ]
    assert all(before <= now for before, now in zip(sides, after, strict=True))


def test_the_order_does_not_depend_on_how_files_are_named(tmp_path, monkeypatch):
    for name in ("b/1.txt", "a/2.txt", "a/1.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    read = lambda *entries: [bytes(side) for side in text.read(entries, 0.0)]
    expected = [b"a/1.txt\0a/2.txt\0b/1.txt\0", b""]
    assert read(".") == expected and read("**/*.txt") == expected
    assert read(str(tmp_path)) == read(f"{tmp_path}/*/*.txt") == expected
    assert read("a", "b/1.txt", "**/1.txt")[0].count(b"a/1.txt") == 1


def test_a_single_file_is_split(tmp_path):
    (tmp_path / "book.txt").write_text("x" * 99)
    train, held = text.read((str(tmp_path / "book.txt"),), 0.1)
    assert bytes(train) == b"x" * 90 and bytes(held) == b"x" * 9 + b"\0"


def test_the_default_text_is_the_standard_library():
    train, held = text.read((), 0.05)
    assert len(train) > 20 * len(held) / 2 and len(held) > 100_000
    assert b"class HTTPServer" in bytes(train) + bytes(held)


def folder_of(place, name, content):
    (place / name).mkdir()
    (place / name / "one.txt").write_text(content)
    return place / name


def test_text_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "gone.txt")
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("short")
    for entry, printed in (
        ("*.nothing", "pattern matches no file"),
        ("gone.txt", "file does not exist"),
        ("dangling.txt", "cannot be read .No such file"),
        ("empty", "no file but hidden ones"),
        (
            "short.txt",
            "training text has 5 bytes.*needs at least 17.*give text.files more",
        ),
    ):
        config = small(str(tmp_path / entry))
        with pytest.raises(ValueError, match=printed):
            experiment.LanguageModel(config).train_data()
    # The config may name a link to a folder. Such a link below a named folder is not
    # followed, since its text would have two names. A folder that cannot be listed does
    # not count as an empty one.
    (tmp_path / "link").symlink_to(folder_of(tmp_path, "outer", "x" * 50))
    (tmp_path / "outer" / "again").symlink_to(tmp_path / "outer")
    assert len(text.read((str(tmp_path / "link"),), 0.1)[0]) == 46
    refuse = lambda path: (_ for _ in ()).throw(
        PermissionError(13, "Permission denied", path)
    )
    with (
        monkeypatch.context() as patch,
        pytest.raises(ValueError, match="outer cannot be read"),
    ):
        patch.setattr(os, "scandir", refuse)
        text.read((str(tmp_path / "outer"),), 0.2)
    # This file exists, but not even root can read it.
    with pytest.raises(
        ValueError, match=r"/proc/self/mem cannot be read \(.*leave it out"
    ):
        text.read(("/proc/self/mem",), 0.1)
    with pytest.raises(ValueError, match="must be a tuple of names, as"):
        text.read("book.txt", 0.1)


@pytest.mark.parametrize("count, rows", [(0, 5), (3, 3), (5, 5), (9, 5)])
def test_windows_of_the_held_out_text_are_evenly_spread(tmp_path, count, rows):
    (tmp_path / "text.txt").write_bytes(bytes(range(1, 101)))
    changes = {"text.held_out": 0.85, "text.eval_windows": count}
    held_out_data = experiment.LanguageModel(
        small(str(tmp_path / "text.txt"), **changes)
    ).eval_data()
    firsts = [row[0] for row in held_out_data["text"]]
    assert firsts == {0: [16, 32, 48, 64, 80], 3: [16, 48, 80]}.get(
        count, [16, 32, 48, 64, 80]
    )
    assert len(firsts) == rows


def test_too_little_held_out_text_is_refused(folder):
    language_model = experiment.LanguageModel(small(folder, **{"text.held_out": 1e-6}))
    assert len(language_model.train_data()["text"])
    with pytest.raises(
        ValueError, match=r"held-out text has 0 bytes.*another text.held_out"
    ):
        language_model.eval_data()


@pytest.mark.parametrize(
    "key, value, rule",
    [
        ("text.held_out", 0.0, "between 0 and 1"),
        ("text.held_out", 1.0, "between 0 and 1"),
        ("text.length", 0, "at least 1"),
        ("text.eval_windows", -1, "at least 1, or 0"),
        ("model.layers", 0, "at least 1"),
        ("model.heads", 3, "a divisor of model.width=16"),
        ("model.heads", 16, "even size"),
        ("model_parallel", 4, "a multiple of model_parallel=4"),
        ("model.feed_forward", 33, "a multiple of model_parallel=2"),
        ("optimizer.warmup_fraction", 1.0, "from 0 to below 1"),
        ("optimizer.clip_norm", 0.0, "above 0"),
        ("sample.length", -1, "at least 0"),
        ("sample.prompts", ("a", 1), "a tuple of texts"),
        ("sample.temperature", -0.5, "at least 0"),
    ],
)
def test_values_out_of_range_are_refused(folder, key, value, rule):
    parts = {"model_parallel": 2} if key == "model.feed_forward" else {}
    with pytest.raises(ValueError, match=f"{rule}"):
        experiment.LanguageModel(small(folder, **parts, **{key: value}))


def test_a_later_byte_changes_no_earlier_logits(network):
    apply, params, tokens = network
    before = apply(params, tokens)
    after = apply(params, tokens.at[:, 7].add(1))
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (np.abs(before - after)[:, 7:].max(axis=-1) > 1e-3).all()


def test_rotary_products_depend_on_the_distance_only():
    query, key = jax.random.normal(jax.random.key(0), (2, 8))
    line = lambda x: model.rotary(jnp.broadcast_to(x, (1, 20, 1, 8)))[0, :, 0]
    products = line(query) @ line(key).T
    for distance in (-5, 0, 3):
        same = jnp.diagonal(products, distance)
        # Angles of up to 20 radians are rounded to float32.
        np.testing.assert_allclose(same, same[0], atol=1e-5)
    assert np.ptp(np.asarray(products[0])) > 0.1
    np.testing.assert_array_equal(line(query)[0], query)


def test_the_first_loss_is_log_256(folder):
    language_model, outputs = (
        experiment.LanguageModel(small(folder)),
        jnp.zeros((2, 16, 256)),
    )
    batch = {"text": jnp.arange(34, dtype=jnp.uint8).reshape(2, 17)}
    value, reported = language_model.loss(outputs, batch)
    assert value == pytest.approx(math.log(256)) and reported[
        "bits_per_byte"
    ] == pytest.approx(8)
    # These outputs predict the first row's next bytes with certainty, and know nothing
    # of the second row.
    sure = outputs.at[0, np.arange(16), np.arange(1, 17)].set(100.0)
    by_row = language_model.evaluate(sure, batch)
    np.testing.assert_allclose(by_row["bits_per_byte"], [0, 8], atol=1e-6)
    np.testing.assert_allclose(by_row["loss"], [0, math.log(256)], rtol=1e-6, atol=1e-6)
    # One model is certain and the other knows nothing. The ensemble averages their
    # probabilities.
    together = language_model.ensemble(jnp.stack([sure[:1], outputs[:1]]))
    expected = -math.log((1 + 1 / 256) / 2)
    assert language_model.loss(together, {"text": batch["text"][:1]})[
        0
    ] == pytest.approx(expected)


def test_initial_weights_are_scaled_by_the_number_of_layers(network):
    params = network[1]
    (stacked,) = (p for name, p in params.items() if name.endswith("/layer"))
    for name in ("qkv", "attention_out", "gate_up", "down"):
        inputs = 32 if name == "down" else 16
        additions = 2 * 2 if name in ("attention_out", "down") else 1
        # A normal distribution truncated at two standard deviations has 0.88 of its
        # original standard deviation. Each estimate uses 512 numbers or more.
        expected = 0.88 / math.sqrt(additions * inputs)
        assert np.std(stacked[name]) == pytest.approx(expected, rel=0.15)
    decays = jax.tree_util.tree_leaves_with_path(experiment._decays(params))
    plain = [path for path, on in decays if not on]
    assert len(plain) == 3 and {path[-1].key for path in plain} == {"scale"}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_outputs_are_close_to_float32(network, dtype):
    apply, params, tokens = network
    exact = apply(params, tokens)
    outputs = apply(jax.tree.map(lambda p: p.astype(dtype), params), tokens)
    assert outputs.dtype == jnp.float32
    # The result is rounded some tens of times in this dtype.
    tolerance = 50 * float(jnp.finfo(dtype).eps) * float(jnp.abs(exact).max())
    np.testing.assert_allclose(outputs, exact, atol=tolerance)
    assert not np.array_equal(outputs, exact)


OFFLOAD = "offload_dot_with_no_batch_dims"


@pytest.mark.parametrize(
    "remat",
    [
        True,
        "dots_saveable",
        OFFLOAD,
        "save_only_these_names(attention, gate_up)",
        "save_and_offload_only_these_names(qkv; gate_up)",
    ],
)
def test_remat_computes_the_same_gradients(network, remat):
    _, params, tokens = network
    values = []
    for policy in (False, remat):
        apply = transformer(remat=policy).apply
        loss = lambda p: jnp.mean(jax.nn.logsumexp(apply(p, tokens), -1))
        values.append(jax.jit(jax.value_and_grad(loss))(params))
        assert ("remat" in str(jax.make_jaxpr(loss)(params))) == bool(policy)
    # The float32 sums are the same, but XLA may fuse them differently.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *values
    )


def stacked_bytes(jaxpr):
    """Returns the bytes on the device of the largest stacked outputs of a scan: arrays
    kept for a gradient, or gradients.
    """
    sizes = [0]
    for eqn in primitives.all_equations(jaxpr):
        if eqn.primitive.name != "scan":
            continue
        size = 0
        _, num_carried = jaxprs.scan_counts(eqn)
        for stacked in eqn.outvars[num_carried:]:
            if stacked.aval.memory_space != jax.memory.Space.Host:
                size += stacked.aval.size * stacked.aval.dtype.itemsize
        sizes.append(size)
    return max(sizes)


def test_a_policy_decides_what_a_layer_keeps_and_where(network):
    _, params, tokens = network
    # So many rows that activations are larger than the gradients of a loop.
    tokens = jnp.tile(tokens, (4, 8))
    on_device, on_host = {}, {}
    for remat in (True, "dots_saveable", OFFLOAD, "save_only_these_names(gate_up)"):
        apply = transformer(remat=remat).apply
        loss = lambda p: jnp.mean(jax.nn.logsumexp(apply(p, tokens), -1))
        program = jax.make_jaxpr(jax.grad(loss))(params)
        on_device[remat] = stacked_bytes(program.jaxpr)
        on_host[remat] = str(program).count("f32<host>[")
    # The products have gradients of their own, in which JAX's policies see no dots.
    assert on_device["dots_saveable"] > 2 * on_device[True]
    gate_up = on_device["save_only_these_names(gate_up)"]
    assert on_device[True] < gate_up < on_device["dots_saveable"]
    assert on_device[OFFLOAD] == on_device[True]
    assert on_host[OFFLOAD] and not on_host[True] and not on_host["dots_saveable"]


@pytest.mark.parametrize(
    "remat, rule",
    [
        ("dots", "must be True, False, everything_saveable"),
        ("save_only_these_names(qvk)", "names qvk; the values that the network names"),
        ("save_and_offload_only_these_names(qkv)", "_only_these_names(a; b)"),
        (3, "must be True, False"),
    ],
)
def test_a_wrong_policy_is_refused_by_name(network, remat, rule):
    _, params, tokens = network
    with pytest.raises(xshard.UserError) as e:
        transformer(remat=remat).apply(params, tokens)
    assert f"remat={remat!r}" in str(e.value) and rule in str(e.value)


def test_a_flag_gives_remat_a_boolean_or_a_name():
    config = lm_tiny.get_config()
    assert config.to_dict()["model"]["remat"] is False
    # A boolean's type would refuse a name.
    assert config.model.get_type("remat") is object
    config.model.remat = "dots_saveable"


def test_the_gradient_of_a_product_equals_einsum_s():
    x, w = jnp.ones((2, 3, 4)) * 0.5, jax.random.normal(jax.random.key(0), (4, 2, 5))
    spec, weights = "btd,dhe->bthe", jax.random.normal(jax.random.key(1), (2, 3, 2, 5))
    loss = lambda product: lambda x, w: jnp.sum(weights * product(spec, x, w))
    ours, theirs = (
        jax.grad(loss(product), argnums=(0, 1))(x, w)
        for product in (model._product, jnp.einsum)
    )
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def setup(kind, config, devices):
    return kind(config), mesh_lib.make_mesh(
        model=config.model_parallel, devices=devices
    )


class PlainSteps(experiment.LanguageModel):
    """A model whose optimizer's step is the gradient, clipped at a norm that it does
    not reach.
    """

    def optimizer(self):
        rule = optax.chain(optax.clip_by_global_norm(100.0), optax.sgd(1.0))
        opt = xshard.OptaxOptimizer(rule, name="sgd")
        return xshard.CrossShardOptimizer(
            opt, slice_axis_name="slice", **self.config.reduction
        )


def first_step(config, devices):
    """Returns the loss and the gradients of a step, and the rows of its collectives."""
    # The rule of these steps has no loss scale.
    config.loss_scale.kind = "none"
    language_model, mesh = (
        PlainSteps(config),
        mesh_lib.make_mesh(model=config.model_parallel, devices=devices),
    )
    train = batches.TrainBatches(
        language_model.train_batches, mesh, batch_size=config.batch_size, seed=0
    )
    batch, state = next(train), state_lib.init(language_model, mesh, 0, train.example)
    # The head is initialized to zero, which would make all other gradients zero.
    head = state.experiment.params["transformer"]["head"]
    values = 0.1 * jax.random.normal(jax.random.key(7), head.shape)
    state.experiment.params["transformer"]["head"] = jax.device_put(
        values, head.sharding
    )
    compiled = (
        jax.jit(step.make_train_step(language_model, mesh))
        .lower(state, batch)
        .compile()
    )
    new, metrics = compiled(state, batch)
    grads = jax.tree.map(
        lambda a, b: np.asarray(a) - np.asarray(b),
        state.experiment.params,
        new.experiment.params,
    )
    return (
        float(metrics["loss"]),
        grads,
        collectives.rows(mesh, collectives.of(compiled)),
    )


@pytest.fixture(scope="module")
def alone(folder):
    """The loss and the gradients of a step in float32 on one device."""
    with jax.numpy_dtype_promotion("standard"):
        return first_step(small(folder, precision=FLOAT32), jax.devices()[:1])[:2]


@pytest.mark.sample(0.4)
@pytest.mark.parametrize("sharded", ["shard_update", "shard_params"])
def test_the_model_axis_computes_the_same(folder, alone, sharded):
    changes = {"precision": FLOAT32, "model_parallel": 2, f"reduction.{sharded}": True}
    loss, grads, rows = first_step(small(folder, **changes), jax.devices()[:4])
    # The float32 sums are computed in another order.
    assert loss == pytest.approx(alone[0], rel=1e-5)
    scale = max(np.abs(g).max() for g in jax.tree.leaves(grads))
    for mine, other in zip(*map(jax.tree.leaves, (grads, alone[1])), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5 * scale)
        assert np.abs(mine).max() > 1e-3 * scale
    # Along the model axis there are only all-reduces: no gathers, and no permutes.
    assert {row["kind"] for row in rows if "model" in row["over"]} == {"all-reduce"}


def test_bfloat16_over_the_model_axis(folder, alone):
    precision = "params=float32,compute=bfloat16,output=float32"
    loss, _, rows = first_step(
        small(folder, precision=precision, model_parallel=2), jax.devices()[:4]
    )
    assert loss == pytest.approx(alone[0], rel=0.01)
    # XLA's CPU backend aborts on all-reduces of other types. Sums in float32 also add
    # no rounding beyond one device's.
    assert {row["types"] for row in rows if row["kind"] == "all-reduce"} == {"f32"}


def test_the_model_learns(folder):
    changes = {"steps": 40, "batch_size": 16, "optimizer.learning_rate": 1e-2}
    language_model, mesh = setup(
        experiment.LanguageModel, small(folder, **changes), jax.devices()[:1]
    )
    train = batches.TrainBatches(
        language_model.train_batches, mesh, batch_size=16, seed=0
    )
    state = state_lib.init(language_model, mesh, 0, train.example)
    train_step = jax.jit(step.make_train_step(language_model, mesh))
    for _ in range(40):
        state, metrics = train_step(state, next(train))
    (batch,) = batches.EvalBatches(language_model.eval_data(), mesh, 16)
    sums = jax.jit(step.make_eval_step(language_model, mesh))(state, batch)
    held_out = float(sums["bits_per_byte"] / sums["count"])
    # The untrained model needs 8 bits per byte, and a model of the letters' frequencies
    # 4. The text repeats one sentence, so a model that learns needs less.
    assert (
        held_out < 3 and metrics["loss_scale"] >= 2**15 and metrics["global_step"] == 40
    )


def test_samples_depend_on_the_key_alone(folder, network):
    config = small(folder, **{"sample.length": 24})
    language_model, (apply, params, _) = experiment.LanguageModel(config), network
    shapes = set()

    def predict(batch):
        shapes.add((batch["text"].shape, batch["text"].dtype))
        return apply(params, batch["text"][:, :-1])

    first, again = (
        language_model.samples(predict, jax.random.key(3)) for _ in range(2)
    )
    assert first == again != language_model.samples(predict, jax.random.key(4))
    # All calls have one shape, so predict compiles once, although the sample is longer
    # than a window.
    assert shapes == {((2, config.text.length + 1), np.dtype(np.uint8))}


def test_a_temperature_of_zero_takes_the_most_likely_byte(folder):
    config = small(folder, **{"sample.temperature": 0.0})
    # This network predicts that each byte is followed by the next larger one.
    predict = lambda batch: (
        5 * np.eye(256)[(batch["text"][:, :-1].astype(int) + 1) % 256]
    )
    printed = experiment.LanguageModel(config).samples(predict, jax.random.key(0))
    # Characters that would move a terminal's cursor are replaced.
    assert printed.startswith("--- 'one'\nonefghijklmnopq\n--- ''\n\ufffd\ufffd")
    assert "\t\n" in printed


@pytest.mark.parametrize(
    "kind, skips", [("dynamic", True), ("fixed", False), ("none", False)]
)
def test_kinds_of_loss_scale(folder, kind, skips):
    config = small(folder, **{"loss_scale.kind": kind})
    language_model = experiment.LanguageModel(config)
    params = {"layer": {"weights": jnp.ones((2, 2)), "scale": jnp.ones(2)}}

    def update(params):
        opt = language_model.optimizer()
        grads = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params)
        return opt.apply_gradients(grads, params)

    rules = hk.transform_with_state(update)
    _, state = rules.init(None, params)
    new, _ = rules.apply({}, state, None, params)
    assert bool(jnp.isfinite(new["layer"]["weights"]).all()) == skips


@pytest.mark.parametrize(
    "get_config", [lm.get_config, lm_tiny.get_config, lm_pod.get_config]
)
def test_the_config_files_are_valid(get_config):
    config = get_config().lock()
    config_lib.check(config)
    language_model = experiment.LanguageModel(config)
    assert language_model.train_data()["text"].shape[1] == config.text.length + 1
    assert len(language_model.eval_data()["text"])


def test_windows_are_views_of_the_text(folder):
    examples = experiment.LanguageModel(small(folder)).train_data()["text"]
    assert (
        examples.base is not None
        and not examples.flags.owndata
        and os.path.isdir(folder)
    )


def test_float16_gradients_of_a_large_batch_s_mean_need_a_loss_scale(network):
    apply, params = transformer().apply, dict(network[1])
    # The head is scaled to its size after a few training steps.
    params["transformer"] = {
        **params["transformer"],
        "head": params["transformer"]["head"] / 20,
    }
    rows = jax.random.randint(jax.random.key(5), (128, 17), 0, 256).astype(jnp.uint8)
    # The rows are the first of this many micro-batches, of 2,048 bytes each.
    parts = 32

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def grads(dtype, scale):
        def loss(params):
            outputs = apply(
                jax.tree.map(lambda p: p.astype(dtype), params), rows[:, :-1]
            )
            return scale * jnp.mean(experiment._losses(outputs, {"text": rows})) / parts

        return jax.tree.map(lambda g: g / scale, jax.grad(loss)(params))

    exact = grads(jnp.float32, 1.0)

    def error(scale):
        """Returns the largest relative error of a gradient array, by its norm."""
        pairs = zip(
            *map(jax.tree.leaves, (grads(jnp.float16, scale), exact)), strict=True
        )
        return max(float(jnp.linalg.norm(g - e) / jnp.linalg.norm(e)) for g, e in pairs)

    # A float16 number has 11 significant bits. Below 6e-5, each halving costs one of
    # them.
    assert error(2.0**15) < 0.01 and error(1.0) > 0.05
