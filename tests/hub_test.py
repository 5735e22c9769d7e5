"""Tests of weights in the form of the hub: a model of GPT-2's architecture, against a
reference in NumPy.
"""

import json
import math
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors

import xshard
from configs import lm_gpt2
from experiments.lm import gpt2
from tests import winged
from xshard import checkpoint, errors, export
from xshard.checkpoint import conversion
from xshard.data import text
from xshard.files import tensors

LAYERS, WIDTH, HEADS, LENGTH = 2, 16, 2, 8
VOCABULARY, POSITIONS = 300, 12


@pytest.fixture(autouse=True)
def standard_promotion():
    """Allows the standard dtype promotion, since experiments are user code."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def hub_arrays(layers=LAYERS):
    """Returns arrays as the hub has them for GPT-2."""
    rng = np.random.default_rng(0)
    shapes = {"wte.weight": (VOCABULARY, WIDTH), "wpe.weight": (POSITIONS, WIDTH)}
    for layer in range(layers):
        of_layer = {
            "ln_1.weight": (WIDTH,),
            "ln_1.bias": (WIDTH,),
            "attn.c_attn.weight": (WIDTH, 3 * WIDTH),
            "attn.c_attn.bias": (3 * WIDTH,),
            "attn.c_proj.weight": (WIDTH, WIDTH),
            "attn.c_proj.bias": (WIDTH,),
            "ln_2.weight": (WIDTH,),
            "ln_2.bias": (WIDTH,),
            "mlp.c_fc.weight": (WIDTH, 4 * WIDTH),
            "mlp.c_fc.bias": (4 * WIDTH,),
            "mlp.c_proj.weight": (4 * WIDTH, WIDTH),
            "mlp.c_proj.bias": (WIDTH,),
        }
        shapes |= {f"h.{layer}.{name}": shape for name, shape in of_layer.items()}
    shapes |= {"ln_f.weight": (WIDTH,), "ln_f.bias": (WIDTH,)}
    return {
        name: rng.normal(0, 0.3, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def reference(arrays, tokens):
    """Returns GPT-2's logits for one row of tokens, in float64."""
    arrays = {name: x.astype(np.float64) for name, x in arrays.items()}

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        return x * arrays[f"{name}.weight"] + arrays[f"{name}.bias"]

    def linear(x, name):
        return x @ arrays[f"{name}.weight"] + arrays[f"{name}.bias"]

    x = arrays["wte.weight"][tokens] + arrays["wpe.weight"][: len(tokens)]
    for layer in range(LAYERS):
        h = f"h.{layer}"
        query, key, value = np.split(
            linear(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn"), 3, axis=-1
        )
        mixed = []
        for head in np.split(np.arange(WIDTH), HEADS):
            scores = query[:, head] @ key[:, head].T / math.sqrt(len(head))
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            mixed.append(weights @ value[:, head])
        x = x + linear(np.concatenate(mixed, -1), f"{h}.attn.c_proj")
        hidden = linear(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc")
        inner = math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)
        hidden = 0.5 * hidden * (1 + np.tanh(inner))
        x = x + linear(hidden, f"{h}.mlp.c_proj")
    return norm(x, "ln_f") @ arrays["wte.weight"].T


def make_config(tmp_path, **changes):
    story = "The quick brown fox jumps over the lazy dog. " * 4
    folder = tmp_path / "texts"
    folder.mkdir(exist_ok=True)
    for number in range(60):
        (folder / f"{number}.txt").write_text(story)
    config = lm_gpt2.get_config()
    tokenizer = text.train_tokenizer([story], VOCABULARY - 10, config.text.end)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config.steps = 1
    config.eval_every_steps = 0
    config.precision = "params=float32,compute=float32,output=float32"
    config.loss_scale.kind = "none"
    # Nothing is trained, so that the result is what was read.
    config.optimizer.learning_rate = 0.0
    config.text.update(
        {
            "length": LENGTH,
            "files": (f"{folder}/*.txt",),
            "tokenizer": str(tmp_path / "tokenizer.json"),
            "vocabulary": VOCABULARY,
        }
    )
    config.model.update(
        {
            "layers": LAYERS,
            "width": WIDTH,
            "heads": HEADS,
            "feed_forward": 4 * WIDTH,
            "positions": POSITIONS,
        }
    )
    config.sample.length = 2
    config.update(changes)
    return config.lock()


def save(arrays, folder, *, files=1):
    """Writes arrays as the hub does, in some files with an index; returns its path."""
    if files == 1:
        safetensors.save_file(arrays, folder / "model.safetensors")
        return folder / "model.safetensors"
    names = list(arrays)
    weights = {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        chosen = {name: arrays[name] for name in names[number::files]}
        safetensors.save_file(chosen, folder / file)
        weights |= dict.fromkeys(chosen, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return index


def sharded(config):
    with config.unlocked():
        config.reduction.shard_params = True
    return config


@pytest.mark.parametrize(
    "files, prefix, change",
    [(1, "", lambda config: config), (3, "transformer.", sharded)],
)
def test_a_model_of_the_hub_computes_its_logits_and_is_written_back(
    tmp_path, files, prefix, change
):
    arrays = hub_arrays()
    stored = {prefix + name: x for name, x in arrays.items()}
    # Files also have what is left out.
    stored["lm_head.weight"] = arrays["wte.weight"]
    stored[f"{prefix}h.0.attn.bias"] = np.ones((1, 1, POSITIONS, POSITIONS), np.float32)
    place = save(stored, tmp_path, files=files)
    source = checkpoint.Source(str(place), convert=gpt2.HUB)
    run = tmp_path / "run"
    assert winged.run(change(make_config(tmp_path)), str(run), "", init=source) == 0
    trained = xshard.load(str(run))
    # Two texts in a row: each is computed by itself.
    row = np.arange(3, 3 + LENGTH, dtype=np.int32)
    sizes = (5, LENGTH - 5)
    batch = {
        "text": np.append(row, 0)[None],
        "text_segment_ids": np.repeat([1, 2, 3], [*sizes, 1])[None],
        "text_positions": np.concatenate([*map(np.arange, sizes), [0]])[None],
        "bytes": np.ones((1, LENGTH + 1), np.int32),
    }
    logits = trained.predict(batch)
    texts = np.split(row, [5])
    expected = np.concatenate([reference(arrays, tokens) for tokens in texts])
    # Sums of float32 beside float64.
    np.testing.assert_allclose(logits[0], expected, rtol=1e-4, atol=1e-4)
    export.write(trained, tmp_path / "back.safetensors", convert=gpt2.HUB)
    back = safetensors.load_file(tmp_path / "back.safetensors")
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)
        assert back[name].dtype == array.dtype


def test_a_new_model_trains_in_half_precision(tmp_path):
    """In float16, the gradient of a norm of small numbers would not be finite."""
    config = lm_gpt2.get_config()
    changes = {"precision": config.precision, "loss_scale": config.loss_scale}
    changed = make_config(tmp_path, steps=3, **changes)
    assert winged.run(changed, str(tmp_path / "run"), "") == 0
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-2])
    assert last["step"] == 3 and last["skipped"] < 3


def converted(arrays, folder, convert=gpt2.HUB):
    file = tensors.open_path(str(save(arrays, folder)))
    return conversion.Converted(file, convert)


def identity(arrays):
    return dict(arrays.items())


def renamed(old, new):
    """Returns a function that converts an array of one name to that of another."""
    return lambda arrays: {new: arrays[old]}


def test_arrays_are_read_one_at_a_time(tmp_path):
    arrays = {f"{number}.w": np.ones((64, 256), np.float32) for number in range(32)}
    size = sum(x.nbytes for x in arrays.values())
    tracemalloc.start()
    try:
        found = converted(arrays, tmp_path, checkpoint.Conversion(identity, identity))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.shapes) == 32
    # Beside what is converted are one array that is compared with it, and its copies.
    assert size <= peak < 1.25 * size


def test_arrays_of_size_zero_scalars_and_nan_come_back(tmp_path):
    arrays = {
        "a": np.zeros((2, 0, 3), np.float32),
        "b": np.array(np.nan, np.float32),
        "c": np.full(2, -0.0, ml_dtypes.bfloat16),
    }
    found = converted(arrays, tmp_path, checkpoint.Conversion(identity, identity))
    assert found.shapes == {"a": (2, 0, 3), "b": (), "c": (2,)}
    assert found.dtypes["c"] == "bfloat16"
    assert found.read("a", (slice(1, 2), slice(0, 0), slice(0, 3))).shape == (1, 0, 3)


@pytest.mark.parametrize(
    "from_hub, to_hub, message",
    [
        (renamed("w", "a"), renamed("a", "w"), "'v' is left over"),
        (identity, renamed("w", "w"), "'v' is left over"),
        (identity, lambda x: identity(x) | {"u": x["v"]}, "'u' is new"),
        (
            identity,
            lambda x: {"v": x["v"], "w": x["w"].T},
            r"'w' float32\[2, 3\] becomes float32\[3, 2\]",
        ),
        (
            lambda x: {"v": x["v"], "w": x["w"].astype(ml_dtypes.bfloat16)},
            identity,
            "'w' .* becomes bfloat16",
        ),
        (identity, lambda x: {"v": -x["v"], "w": x["w"]}, "'v' has other values"),
        (renamed("u", "u"), identity, "no array 'u'. Give arrays"),
        (identity, renamed("u", "u"), "no array 'u'. Give arrays"),
        (lambda x: x["w"] + x["v"], identity, r"hub_test.py:\d+, in .*broadcast"),
        (identity, lambda x: list(x), "returned a list"),
        (lambda x: {"w": jnp.zeros(2)}, identity, "'w': ArrayImpl"),
    ],
)
def test_functions_that_do_not_invert_each_other_are_refused(
    tmp_path, from_hub, to_hub, message
):
    arrays = {"v": np.arange(4, dtype=np.float32), "w": np.ones((2, 3), np.float32)}
    convert = checkpoint.Conversion(from_hub, to_hub)
    with pytest.raises(errors.UserError, match=message):
        converted(arrays, tmp_path, convert)
    # An export goes the other way.
    backwards = checkpoint.Conversion(to_hub, from_hub)
    with pytest.raises(errors.UserError, match=message):
        conversion.to_hub(arrays, backwards)


def test_each_array_that_does_not_fit_is_named(tmp_path):
    arrays = hub_arrays()
    more = arrays | {"rotary.x": np.zeros(2), "h.0.new": np.zeros(2)}
    with pytest.raises(errors.UserError, match="'h.0.new' is left .*'rotary.x' is lef"):
        converted(more, tmp_path)
    for name in ("h.0.ln_1.bias", "ln_f.weight"):
        lacking = {k: x for k, x in arrays.items() if k != name}
        with pytest.raises(errors.UserError, match=f"there is no array '{name}'"):
            converted(lacking, tmp_path)
    odd = arrays | {"h.1.attn.c_attn.bias": np.zeros(7, np.float32)}
    with pytest.raises(
        errors.UserError, match=r"gpt2.py:\d+, in .*from_hub.*same shape"
    ):
        converted(odd, tmp_path)
    both = arrays | {"transformer.wte.weight": arrays["wte.weight"]}
    with pytest.raises(errors.UserError, match="'wte.weight', which are one name"):
        converted(both, tmp_path)
    # The shapes here are compared with the run's, and all that differ are named.
    deep = hub_arrays(layers=LAYERS + 1)
    source = checkpoint.Source(str(save(deep, tmp_path)), convert=gpt2.HUB)
    with pytest.raises(errors.UserError, match="Correct from_hub of --init") as caught:
        winged.run(make_config(tmp_path), str(tmp_path / "run"), "", init=source)
    of_layers = [x for x in converted(deep, tmp_path).shapes if "/layers/" in x]
    assert len(of_layers) == 16
    for path in of_layers:
        assert f"'{path}' is float32[3, " in str(caught.value)
    # An array that is converted, but for which this run has no parameter.
    convert = checkpoint.Conversion(
        lambda x: (
            gpt2.from_hub({k: v for k, v in x.items() if k != "wqe"})
            | {"params/gpt2/wqe": x["wqe"]}
        ),
        lambda x: gpt2.to_hub(x) | {"wqe": x["params/gpt2/wqe"]},
    )
    place = save(arrays | {"wqe": np.zeros(2, np.float32)}, tmp_path)
    source = checkpoint.Source(str(place), convert=convert)
    with pytest.raises(errors.UserError, match="does not have: params/gpt2/wqe"):
        winged.run(make_config(tmp_path), str(tmp_path / "run"), "", init=source)
    assert not (tmp_path / "run").exists()


def test_a_head_that_is_not_the_embedding_is_refused(tmp_path):
    arrays = hub_arrays()
    embedding = arrays["wte.weight"]
    changed = embedding.copy()
    changed[3, 2] = 0
    for head in (changed, embedding[:3], embedding.T.copy()):
        with pytest.raises(errors.UserError, match="'lm_head.weight' does not equal"):
            converted(arrays | {"lm_head.weight": head}, tmp_path)
    # The same numbers of another type, and numbers that are none.
    rounded = embedding.astype(ml_dtypes.bfloat16)
    tied = {"wte.weight": rounded.astype(np.float32), "lm_head.weight": rounded}
    converted(arrays | tied, tmp_path)
    unset = np.full_like(embedding, np.nan)
    tied = {"wte.weight": unset, "lm_head.weight": unset.copy()}
    converted(arrays | tied, tmp_path)


def test_what_a_conversion_leaves_out_is_printed(tmp_path):
    def from_hub(arrays):
        del arrays["mask"]
        return {"params/w": arrays["w"]}

    arrays = {"p.w": np.ones(2, np.float32), "p.mask": np.ones((2, 2), bool)}
    place = str(save(arrays, tmp_path))
    convert = checkpoint.Conversion(from_hub, renamed("params/w", "w"), prefix="p.")
    said = []
    found = checkpoint.init_from(
        checkpoint.Source(place, convert=convert),
        {"params": {"w": jnp.zeros(2)}},
        said.append,
    )
    np.testing.assert_array_equal(found["params"]["w"], [1, 1])
    assert "; left out by from_hub: p.mask bool[2, 2]" in said[0]


def test_a_conversion_is_found_by_its_dotted_path():
    assert conversion.load("", "--convert") is None
    assert conversion.load("experiments.lm.gpt2.HUB", "--convert") is gpt2.HUB
    for path, message in [
        ("HUB", "--convert=HUB must be the dotted path"),
        (".HUB", "such as experiments.lm.gpt2.HUB: invalid format"),
        ("experiments.lm.gpt2.HUBS", "has no attribute 'HUBS'"),
        ("experiments.lm.nowhere.HUB", "No module named 'experiments.lm.nowhere'"),
        ("experiments.lm.gpt2.from_hub", "it is a function"),
    ]:
        with pytest.raises(errors.UserError, match=message):
            conversion.load(path, "--convert")


def test_a_conversion_is_for_files(tmp_path):
    source = checkpoint.Source(str(tmp_path / "other"), convert=gpt2.HUB)
    with pytest.raises(errors.UserError, match="is for a .safetensors file"):
        winged.run(make_config(tmp_path), str(tmp_path / "run"), "", init=source)


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(errors.UserError, match="gone.safetensors cannot be read"):
        tensors.open_path(str(index))
    for name in ("../gone.safetensors", "./a.safetensors", "..", ""):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(errors.UserError, match=f"'{name}', which is no name of"):
            tensors.open_path(str(index))
    index.write_text('{"weight_map": {"b": "c", "a": "c", "a": "d"}}')
    with pytest.raises(errors.UserError, match="it has a duplicate key: 'a'"):
        tensors.open_path(str(index))
    with pytest.raises(errors.UserError, match="is a URL, and .safetensors files are"):
        tensors.open_path("gs://bucket/model.safetensors")
    place = save(
        {"a": np.zeros(2), "b": np.zeros(2), "c": np.zeros(2)}, tmp_path, files=2
    )
    content = json.loads(place.read_text())
    del content["weight_map"]["c"]
    place.write_text(json.dumps(content))
    with pytest.raises(errors.UserError, match="does not say are in it: c"):
        tensors.open_path(str(place))
    assert jax.device_count() == 8
