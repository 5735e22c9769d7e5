"""Tests of weights in the form of the hub: a model of GPT-2's architecture, against a
reference in NumPy.
"""

import json
import math
import pathlib
import tracemalloc

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors

import xshard
from configs import lm_gpt2
from tests import winged
from xshard import checkpoint, errors, export
from xshard.data import text
from xshard.files import tensors, weight_map

MAP = "experiments/lm/gpt2_map.json"
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
    # Files also have what a map leaves out.
    stored["lm_head.weight"] = arrays["wte.weight"]
    stored[f"{prefix}h.0.attn.bias"] = np.ones((1, 1, POSITIONS, POSITIONS), np.float32)
    place = save(stored, tmp_path, files=files)
    source = checkpoint.Source(str(place), map_path=MAP)
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
    export.write(trained, tmp_path / "back.safetensors", map_path=MAP)
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


def test_any_part_of_an_array_is_read(tmp_path):
    """A process reads what its own devices hold."""
    arrays = hub_arrays()
    arrays["q"] = np.arange(24, dtype=np.float32).reshape(4, 6)
    found = weight_map.read(MAP)
    found.rules.append(
        weight_map.Rule("q", ["params/a", "params/b"], split=1, transpose=[1, 0])
    )
    file = tensors.open_path(str(save(arrays, tmp_path)))
    mapped = weight_map.Mapped(file, found, MAP)
    whole = {}
    for path, shape in mapped.shapes.items():
        whole[path] = mapped.read(path, tuple(slice(0, size) for size in shape))
        assert whole[path].shape == shape
        part = tuple(slice(size // 4, 3 * size // 4 + 1) for size in shape)
        np.testing.assert_array_equal(mapped.read(path, part), whole[path][part])
    np.testing.assert_array_equal(whole["params/b"], arrays["q"][:, 3:].T)
    stacked = [np.split(arrays[f"h.{i}.attn.c_attn.weight"], 3, axis=1) for i in (0, 1)]
    for part, name in enumerate("qkv"):
        np.testing.assert_array_equal(
            whole[f"params/gpt2/layers/{name}/w"], [x[part] for x in stacked]
        )


def test_a_stack_is_in_memory_once(tmp_path):
    names = [f"h.{layer}.w" for layer in range(8)]
    arrays = {name: np.ones((64, 256), np.float32) for name in names}
    found = weight_map.Map([weight_map.Rule("h.{i}.w", "params/w", stack="i")])
    file = tensors.open_path(str(save(arrays, tmp_path)))
    mapped = weight_map.Mapped(file, found, "map")
    tracemalloc.start()
    try:
        stacked = mapped.read("params/w", (slice(0, 8), slice(0, 64), slice(0, 256)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Beside it are two layers of eight: the first, and the one that is read.
    assert stacked.nbytes <= peak < 1.5 * stacked.nbytes


def test_each_array_that_does_not_fit_is_named(tmp_path):
    arrays = hub_arrays()
    found = weight_map.read(MAP)

    def mapped(changed):
        path = save(changed, tmp_path)
        return weight_map.Mapped(tensors.open_path(str(path)), found, MAP)

    with pytest.raises(errors.UserError, match="no rule matches h.0.new, rotary.x"):
        mapped(arrays | {"rotary.x": np.zeros(2), "h.0.new": np.zeros(2)})
    lacking = {k: x for k, x in arrays.items() if k not in ("h.0.ln_1.bias",)}
    with pytest.raises(errors.UserError, match=r"offset' stacks \[1\], which has gaps"):
        mapped(lacking)
    without = {k: x for k, x in arrays.items() if not k.startswith("ln_f.")}
    with pytest.raises(errors.UserError, match=r"matches none: 'ln_f.weight'.*'ln_f"):
        mapped(without)
    odd = arrays | {"h.1.attn.c_attn.bias": np.zeros(7, np.float32)}
    with pytest.raises(
        errors.UserError, match="c_attn.bias' .*the arrays to stack dif"
    ):
        mapped(odd)
    # The shapes here are compared with the run's, and all that differ are named.
    deep = hub_arrays(layers=LAYERS + 1)
    source = checkpoint.Source(str(save(deep, tmp_path)), map_path=MAP)
    with pytest.raises(errors.UserError, match=f"Correct the rules of {MAP}") as caught:
        winged.run(make_config(tmp_path), str(tmp_path / "run"), "", init=source)
    of_layers = [path for path in mapped(deep).shapes if "/layers/" in path]
    assert len(of_layers) == 16
    for path in of_layers:
        assert f"'{path}' is float32[3, " in str(caught.value)
    wide = arrays | {"wte.weight": np.zeros((301, WIDTH), np.float32)}
    source = checkpoint.Source(str(save(wide, tmp_path)), map_path=MAP)
    with pytest.raises(errors.UserError, match="'params/gpt2/wte' is .*301.* in it"):
        winged.run(make_config(tmp_path), str(tmp_path / "run"), "", init=source)
    assert not (tmp_path / "run").exists()
    with pytest.raises(errors.UserError, match="no rule has 'ours' for params/other"):
        weight_map.to_theirs({"params/other": np.zeros(2)}, found, MAP)
    two = [weight_map.Rule("w", "params/a"), weight_map.Rule("w", "params/b")]
    pair = {"params/a": np.zeros(2), "params/b": np.ones(2)}
    with pytest.raises(errors.UserError, match="'w' is that of another array, too"):
        weight_map.to_theirs(pair, weight_map.Map(two), MAP)
    uneven = {
        f"params/gpt2/layers/{name}/b": np.zeros((2, size), np.float32)
        for name, size in (("q", 8), ("k", 4), ("v", 4))
    }
    with pytest.raises(
        errors.UserError, match="parts of 'h.0.attn.c_attn.bias' differ"
    ):
        weight_map.to_theirs(uneven, found, MAP)
    # An array of theirs with a rule, but for which this run has no parameter.
    more = tmp_path / "more.json"
    content = json.loads(pathlib.Path(MAP).read_text())
    content["rules"].append({"theirs": "wqe.weight", "ours": "params/gpt2/wqe"})
    more.write_text(json.dumps(content))
    place = save(arrays | {"wqe.weight": np.zeros(2, np.float32)}, tmp_path)
    source = checkpoint.Source(str(place), map_path=str(more))
    with pytest.raises(errors.UserError, match="does not have: params/gpt2/wqe"):
        winged.run(make_config(tmp_path), str(tmp_path / "run"), "", init=source)
    part = {"params/gpt2/layers/q/b": np.zeros((2, 4), np.float32)}
    with pytest.raises(errors.UserError, match="c_attn.bias' lacks 2 of its parts"):
        weight_map.to_theirs(part, found, MAP)


def test_reshaped_and_transposed_arrays_come_back(tmp_path):
    rules = [
        weight_map.Rule(
            "q.{i}.weight",
            "params/l_{i}/w",
            reshape=([6, 4], [2, 3, 4]),
            transpose=[2, 0, 1],
        )
    ]
    theirs = {"q.7.weight": np.arange(24, dtype=np.float16).reshape(6, 4)}
    path = save(theirs, tmp_path)
    found = weight_map.Map(rules)
    mapped = weight_map.Mapped(tensors.open_path(str(path)), found, "map")
    assert mapped.shapes == {"params/l_7/w": (4, 2, 3)}
    part = mapped.read("params/l_7/w", (slice(1, 3), slice(0, 2), slice(0, 3)))
    whole = theirs["q.7.weight"].reshape(2, 3, 4).transpose(2, 0, 1)
    np.testing.assert_array_equal(part, whole[1:3])
    back = weight_map.to_theirs({"params/l_7/w": whole}, found, "map")
    np.testing.assert_array_equal(back["q.7.weight"], theirs["q.7.weight"])


@pytest.mark.parametrize(
    "rule, message",
    [
        ({"theirs": "a"}, "needs either 'ours' or 'ignore'"),
        ({"theirs": "a", "ours": ["b", "c"]}, "'split' exactly if"),
        ({"theirs": "a.{x}", "ours": "b"}, "must have these {names} in 'b': x"),
        ({"theirs": "a", "ours": "b", "stack": "x"}, "stacks 'x', which is no"),
        ({"theirs": "a", "ours": "b", "transpose": [0, 2]}, "no permutation"),
        ({"theirs": "a", "ours": "b", "reshape": [[2, 3], [5]]}, "of another size"),
        ({"theirs": "a", "ours": 3}, "rules/0/ours"),
        ({"theirs": "a", "ours": ["b", "c"], "split": -1}, "which is below 0"),
        ({"theirs": "a", "ours": "b", "scale": 2}, "scale"),
    ],
)
def test_a_rule_that_is_none_is_refused(tmp_path, rule, message):
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"rules": [rule]}))
    with pytest.raises(errors.UserError, match=message):
        weight_map.read(str(file))


def test_a_map_is_for_files_and_for_one_model(tmp_path):
    source = checkpoint.Source(str(tmp_path / "other"), map_path=MAP)
    with pytest.raises(errors.UserError, match="is for a .safetensors file"):
        winged.run(make_config(tmp_path), str(tmp_path / "run"), "", init=source)
    with pytest.raises(errors.UserError, match="There is no map nowhere.json"):
        weight_map.read("nowhere.json")
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
