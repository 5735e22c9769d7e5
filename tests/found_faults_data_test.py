"""Tests of inputs that were once taken in part, wrongly or without a name: maps of
arrays, tokenizers, texts, positions in data, exports.
"""

import base64
import codecs
import io
import json
import os
import random
import struct
import tracemalloc
import warnings
import zlib

import haiku as hk
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import tokenizers
from jax import export as jax_export
from safetensors import numpy as safetensors

import xshard
from configs import lm_words
from experiments.lm import words
from tests import toy
from xshard import checkpoint, data, errors, export, loop
from xshard import mesh as mesh_lib
from xshard.data import batches, pipelines, text
from xshard.files import disk, jsonfile, tensors, weight_map
from xshard.metrics import writers
from xshard.pod import rendezvous, startup

_DATA_MAP = "experiments/lm/gpt2_map.json"


def _data_save(folder, arrays):
    path = folder / "model.safetensors"
    safetensors.save_file(arrays, path)
    return str(path)


def _data_mapped(folder, arrays, rules, prefix=""):
    file = tensors.open_path(_data_save(folder, arrays))
    return weight_map.Mapped(file, weight_map.Map(rules, prefix), "the map")


def _data_whole(file):
    arrays = {}
    for path, shape in file.shapes.items():
        arrays[path] = file.read(path, tuple(slice(0, size) for size in shape))
    return arrays


def _data_layers(names):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(3, 3)).astype(np.float32) for name in names}


@pytest.mark.parametrize("transposes", [(None, [1, 0]), ([1, 0], None), (None, None)])
def test_03_two_rules_that_stack_into_one_path_are_refused(tmp_path, transposes):
    first, second = transposes
    rules = [
        weight_map.Rule("a.{i}", "params/w", stack="i", transpose=first),
        weight_map.Rule("b.{i}", "params/w", stack="i", transpose=second),
    ]
    arrays = _data_layers(["a.0", "a.1", "b.2"])
    with pytest.raises(errors.UserError, match="'b.2' is 'params/w', which rule 1 wri"):
        _data_mapped(tmp_path, arrays, rules)


def test_03_an_array_that_another_rule_would_write_back_is_refused(tmp_path):
    # Parts, layers and whole arrays that lead to the path of an earlier rule.
    stacked = weight_map.Rule("a.{i}", "params/w", stack="i")
    for other, names in [
        (weight_map.Rule("b", "params/w", transpose=[1, 0]), ["a.1", "b"]),
        (weight_map.Rule("b.{i}", ["params/v", "params/w"], 0, stack="i"), ["b.1"]),
    ]:
        arrays = _data_layers(["a.0", *names])
        with pytest.raises(errors.UserError, match="which holds in both directions"):
            _data_mapped(tmp_path, arrays, [stacked, other])
    by_name = [
        weight_map.Rule("a.{x}", "params/{x}/w"),
        weight_map.Rule("b.{x}", "params/{x}/w", transpose=[1, 0]),
    ]
    with pytest.raises(errors.UserError, match="rule 1 writes back as 'a.q'"):
        _data_mapped(tmp_path, _data_layers(["a.p", "b.q"]), by_name)
    # 00 would come back as 0.
    with pytest.raises(errors.UserError, match="'a.00' has no number"):
        _data_mapped(tmp_path, _data_layers(["a.00"]), [stacked])


def test_03_a_special_rule_before_a_general_one_holds_in_both_directions(tmp_path):
    rules = [
        weight_map.Rule("emb", "params/special/w", transpose=[1, 0]),
        weight_map.Rule("{x}.weight", "params/{x}/w"),
    ]
    arrays = _data_layers(["p.emb", "p.a.weight", "b.weight"])
    found = _data_whole(_data_mapped(tmp_path, arrays, rules, prefix="p."))
    np.testing.assert_array_equal(found["params/special/w"], arrays["p.emb"].T)
    back = weight_map.to_theirs(found, weight_map.Map(rules, "p."), "the map")
    assert back.keys() == {"emb", "a.weight", "b.weight"}
    np.testing.assert_array_equal(back["emb"], arrays["p.emb"])


def test_03_an_export_writes_no_name_that_is_read_as_something_else():
    w = {"params/w": np.zeros((2, 2))}
    ignored = weight_map.Rule("{x}", ignore="of no use")
    named = weight_map.Rule("w", "params/w")
    for rules, prefix, message in [
        ([ignored, named], "", "rule 1, which ignores it"),
        ([named], "w", "begins with the prefix"),
    ]:
        with pytest.raises(errors.UserError, match=message):
            weight_map.to_theirs(w, weight_map.Map(rules, prefix), "the map")
    stacked = weight_map.Map([weight_map.Rule("w.{i}", "params/w", stack="i")])
    with pytest.raises(errors.UserError, match="stacks no i"):
        weight_map.to_theirs({"params/w": np.zeros((0, 2))}, stacked, "the map")


class _DataArrays:
    """Arrays in memory, as those of a file."""

    path = "the file"

    def __init__(self, arrays):
        self.metadata = {}
        self.shapes = {name: x.shape for name, x in arrays.items()}
        self.dtypes = {name: x.dtype.name for name, x in arrays.items()}
        self._arrays = arrays

    def read(self, name, index):
        return self._arrays[name][index]


def _data_random_rule(draw):
    """Returns a rule, which may overlap with others, and the shape of its arrays."""
    pattern = draw.choice(["a", "b", "{x}", "a.{i}", "b.{i}", "a.{i}.{x}", "{x}_{y}"])
    stack = "i" if "{i}" in pattern and draw.random() < 0.8 else ""
    fields = [name for name in "xyi" if f"{{{name}}}" in pattern and name != stack]
    ending = "".join(f"/{{{name}}}" for name in fields)
    shape = [draw.choice([1, 2, 3, 4]) for _ in range(draw.choice([1, 2, 3]))]
    split = None
    ours = f"params/{draw.choice('st')}{ending}"
    if draw.random() < 0.4:
        split = draw.randrange(len(shape))
        shape[split] *= 2
        ours = [f"params/{draw.choice('st')}{part}{ending}" for part in "pq"]
    part = list(shape)
    if split is not None:
        part[split] //= 2
    reshape = None
    order = None
    if draw.random() < 0.3:
        reshape = (part, [1, *part])
        part = [1, *part]
    if draw.random() < 0.5:
        order = draw.sample(range(len(part)), len(part))
    rule = weight_map.Rule(pattern, ours, split, reshape, order, stack)
    return rule, shape


@pytest.mark.parametrize("seed", range(3))
def test_03_what_is_read_by_a_map_is_written_back_as_it_was(seed):
    """Each array is read by its own rule, and comes back with its name and its bits."""
    draw = random.Random(seed)
    values = np.random.default_rng(seed)
    accepted = 0
    for _ in range(100):
        rules = []
        arrays = {}
        prefix = draw.choice(["", "p."])
        for _ in range(draw.randint(1, 4)):
            rule, shape = _data_random_rule(draw)
            rules.append(rule)
            for x in draw.sample(["a", "b", "c"], draw.randint(1, 2)):
                for i in range(draw.randint(1, 3)):
                    fields = {"x": x, "y": "u", "i": str(i)}
                    name = prefix + rule.theirs.format(**fields)
                    arrays[name] = values.normal(size=shape)
        found = weight_map.Map(rules, prefix)
        try:
            mapped = weight_map.Mapped(_DataArrays(arrays), found, "the map")
        except errors.UserError:
            continue
        accepted += 1
        back = weight_map.to_theirs(_data_whole(mapped), found, "the map")
        assert {prefix + name for name in back} == arrays.keys()
        for name, array in back.items():
            np.testing.assert_array_equal(array, arrays[prefix + name])
    assert accepted > 20


def test_22_a_split_that_arrays_have_no_dimension_for_is_named(tmp_path):
    rule = weight_map.Rule("w", ["params/a", "params/b"], split=1)
    for shape in [(3,), ()]:
        ours = {"params/a": np.zeros(shape), "params/b": np.ones(shape)}
        with pytest.raises(errors.UserError, match="dimension 1, which its parts"):
            weight_map.to_theirs(ours, weight_map.Map([rule]), "the map")
    with pytest.raises(errors.UserError, match="no dimension 1 of 2 equal parts"):
        _data_mapped(tmp_path, {"w": np.zeros(4, np.float32)}, [rule])


@pytest.mark.parametrize(
    "rule, message",
    [
        ({"theirs": "a", "ours": ["b", "b"], "split": 0}, "one path twice"),
        ({"theirs": "a", "ours": "b", "equals": "c"}, "which is for 'ignore'"),
        ({"theirs": "a", "ignore": "b", "equals": "{x}"}, "only its own {names}"),
        ({"theirs": "a", "ours": "b", "reshape": [[-1, 2], [2, -1]]}, "sizes below 0"),
    ],
)
def test_22_a_rule_that_cannot_hold_is_refused(tmp_path, rule, message):
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"rules": [rule]}))
    with pytest.raises(errors.UserError, match=message):
        weight_map.read(str(file))


@pytest.mark.parametrize("compared", [1, 7, 1 << 20])
def test_41_a_head_that_is_not_the_embedding_is_refused_by_name(
    tmp_path, monkeypatch, compared
):
    # Arrays are compared a few rows at a time.
    monkeypatch.setattr(weight_map, "_COMPARED", compared)
    rules = weight_map.read(_DATA_MAP).rules
    rules = [rule for rule in rules if rule.ignore or rule.theirs == "wte.weight"]
    embedding = np.arange(12, dtype=np.float32).reshape(4, 3)
    tied = {"transformer.wte.weight": embedding, "lm_head.weight": embedding.copy()}
    mapped = _data_mapped(tmp_path, tied, rules, "transformer.")
    assert mapped.ignored == [
        "lm_head.weight float32[4,3] (the embedding, to which the head is tied)"
    ]
    changed = embedding.copy()
    changed[3, 2] = 0
    for head in [changed, embedding[:3], embedding.T.copy(), np.full_like(changed, 2)]:
        untied = tied | {"lm_head.weight": head}
        with pytest.raises(
            errors.UserError, match="'lm_head.weight' .* does not equal"
        ):
            _data_mapped(tmp_path, untied, rules, "transformer.")
    # The same numbers of another type, and numbers that are none.
    half = tied | {"lm_head.weight": embedding.astype(ml_dtypes.bfloat16)}
    _data_mapped(tmp_path, half, rules, "transformer.")
    unset = np.full_like(embedding, np.nan)
    both = {"wte.weight": unset, "lm_head.weight": unset.copy()}
    _data_mapped(tmp_path, both, rules, "transformer.")


def test_41_what_a_map_leaves_out_is_printed(tmp_path):
    map_path = tmp_path / "map.json"
    rules = [
        {"theirs": "w", "ours": "params/w"},
        {"theirs": "mask.{i}", "ignore": "constant"},
    ]
    map_path.write_text(json.dumps({"rules": rules}))
    arrays = {"w": np.ones(2, np.float32)}
    for layer in range(3):
        arrays[f"mask.{layer}"] = np.ones((2, 2), bool)
    source = checkpoint.Source(_data_save(tmp_path, arrays), map_path=str(map_path))
    state = {"params": {"w": jnp.zeros(2)}}
    said = []
    checkpoint.init_from(source, state, said.append)
    masks = "mask.0 bool[2,2] and 2 more of 'mask.{i}' (constant)"
    assert f"ignored by {map_path}: {masks}" in said[0]


def test_44_an_array_of_eight_bit_floats_is_named(tmp_path):
    for kind, name in [("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2")]:
        arrays = {
            "params/w": np.ones(2).astype(kind),
            "net_state/s": np.ones(2).astype(kind),
            "params/unused": np.ones(2).astype(kind),
        }
        source = checkpoint.Source(_data_save(tmp_path, arrays))
        state = {"params": {"w": jnp.zeros(2)}, "net_state": {"s": jnp.zeros(2)}}
        with pytest.raises(
            errors.UserError, match=f"'params/w' is {name} in"
        ) as caught:
            checkpoint.init_from(source, state)
        # Network state that does not fit is left as it is, but not because of its type.
        assert f"'net_state/s' is {name} in it, which is not" in str(caught.value)
        assert "missing" not in str(caught.value)


def test_44_arrays_of_size_zero_come_from_a_file(tmp_path):
    shapes = {"params/a": (0,), "params/b": (2, 0, 3), "params/c": (0, 2)}
    arrays = {path: np.zeros(shape, np.float32) for path, shape in shapes.items()}
    arrays["params/w"] = np.ones(2, np.float32)
    params = {path[-1]: jnp.zeros(x.shape) for path, x in arrays.items()}
    source = checkpoint.Source(_data_save(tmp_path, arrays))
    found = checkpoint.init_from(source, {"params": params})
    np.testing.assert_array_equal(found["params"]["w"], [1, 1])
    assert {name: x.shape for name, x in found["params"].items()} == {
        path[-1]: x.shape for path, x in arrays.items()
    }
    rules = [weight_map.Rule("params/b", "b", transpose=[2, 0, 1])]
    mapped = _data_mapped(tmp_path, {"params/b": arrays["params/b"]}, rules)
    assert _data_whole(mapped)["b"].shape == (3, 2, 0)


def test_44_a_type_that_a_file_cannot_hold_is_named(tmp_path):
    with pytest.raises(errors.UserError, match="cannot hold arrays of these types"):
        tensors.write(tmp_path / "a.safetensors", {"w": np.ones(2, complex)}, {})


def _data_tokenizer(texts):
    return text.train_tokenizer(texts, 300)


_DATA_TEXT = "The quick brown fox jumps over the lazy dog, \N{SNOWMAN}  twice. " * 3


@pytest.mark.parametrize("place", ["a file", "an object"])
def test_38_settings_of_a_tokenizer_drop_add_and_draw_no_tokens(
    tmp_path, place, caplog
):
    clean = _data_tokenizer([_DATA_TEXT])
    expected = text.encoder(clean)(_DATA_TEXT)
    changed = tokenizers.Tokenizer.from_str(clean.to_str())
    changed.enable_truncation(5)
    changed.enable_padding(length=700)
    changed.model.dropout = 0.5
    end = (text.END, clean.token_to_id(text.END))
    changed.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{text.END} $A {text.END}", special_tokens=[end]
    )
    changed.save(str(tmp_path / "tokenizer.json"))
    if place == "a file":
        changed = text.load_tokenizer(tmp_path / "tokenizer.json")
        # Also what is encoded without `encoder` is whole.
        assert len(changed.encode(_DATA_TEXT).ids) == len(expected) + 1
    encode = text.encoder(changed)
    for _ in range(3):
        np.testing.assert_array_equal(encode(_DATA_TEXT), expected)
    for setting in ("truncation", "padding", "dropout=0.5"):
        assert setting in caplog.text
    caplog.clear()
    text.encoder(text.load_tokenizer(tmp_path / "tokenizer.json"))
    # Said once, by the function that reads the file.
    assert caplog.text.count("switched off") == 1


def test_38_an_end_that_is_no_special_token_does_not_end_a_text():
    settings = json.loads(_data_tokenizer([_DATA_TEXT]).to_str())
    settings["added_tokens"][0]["special"] = False
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(settings))
    tokens = text.encoder(tokenizer)(f"one{text.END}two")
    end = tokenizer.token_to_id(text.END)
    assert (tokens == end).tolist() == [False] * (len(tokens) - 1) + [True]
    with pytest.raises(errors.UserError, match="no token '<fin>'"):
        text.encoder(tokenizer, "<fin>")


def _data_metaspace():
    """Returns a lossless tokenizer that is not over bytes, as SentencePiece's are."""
    characters = sorted({*_DATA_TEXT, "\N{LOWER ONE EIGHTH BLOCK}", "q", "u", "\n"})
    vocabulary = {text.END: 0, "q": 1, "u": 2, "qu": 3}
    for character in characters:
        vocabulary.setdefault(character, len(vocabulary))
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [("q", "u")], fuse_unk=False)
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
        prepend_scheme="always"
    )
    tokenizer.decoder = tokenizers.decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens([text.END])
    return tokenizer


def test_38_the_bytes_of_tokens_are_those_of_the_text():
    byte_level = _data_tokenizer([_DATA_TEXT])
    added = tokenizers.Tokenizer.from_str(byte_level.to_str())
    added.add_tokens(["\N{SNOWMAN}  twice"])
    for tokenizer in (byte_level, added, _data_metaspace()):
        for sample in (_DATA_TEXT, "", "quick", "qu  \N{SNOWMAN}\N{SNOWMAN}  "):
            tokens = text.encoder(tokenizer)(sample)
            counts = text.byte_counter(tokenizer)(sample)
            assert counts.shape == tokens.shape and counts.dtype == np.int32
            assert counts.sum() == len(sample.encode()) + 1 and counts.min() >= 0
    # Each token of ASCII stands for its letters.
    encoding = byte_level.encode("the quick dog")
    sizes = [len(token) for token in encoding.tokens]
    assert text.byte_counter(byte_level)("the quick dog").tolist() == [*sizes, 1]


def test_38_bytes_of_a_text_that_is_not_given_back_are_refused():
    lossy = []
    for normalizer in ("Lowercase", "NFKC", "Strip"):
        changed = _data_tokenizer([_DATA_TEXT])
        changed.normalizer = getattr(tokenizers.normalizers, normalizer)()
        lossy.append(changed)
    without_decoder = _data_metaspace()
    without_decoder.decoder = None
    unknown = tokenizers.Tokenizer(tokenizers.models.BPE({text.END: 0, "T": 1}, []))
    for tokenizer in (*lossy, without_decoder, unknown):
        with pytest.raises(
            errors.UserError, match="The tokenizer gives back '.* for '"
        ):
            text.byte_counter(tokenizer)("The \N{ROMAN NUMERAL TWO} ")


def test_38_a_tokenizer_that_loses_texts_is_loaded_with_a_warning(tmp_path, caplog):
    path = tmp_path / "tokenizer.json"
    lossless = _data_tokenizer([_DATA_TEXT])
    lossless.save(str(path))
    text.load_tokenizer(path)
    assert not caplog.text
    lossless.normalizer = tokenizers.normalizers.Lowercase()
    words_only = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({text.END: 0, "word": 1}, unk_token="?")
    )
    for lossy, given_back in [(lossless, "'a word,"), (words_only, "an error")]:
        caplog.clear()
        lossy.save(str(path))
        text.load_tokenizer(path)
        assert "what differs is lost to a model" in caplog.text
        assert given_back in caplog.text


def _data_words(folder, tokenizer, **changes):
    """Returns an experiment over 20 files of words."""
    for number in range(20):
        (folder / f"{number}.txt").write_text(_DATA_TEXT * (1 + number % 3))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = lm_words.get_config()
    changes = {
        "text.files": (f"{folder}/*.txt",),
        "text.tokenizer": str(folder / "tokenizer.json"),
        "text.vocabulary": 320,
        "text.length": 16,
        "text.eval_windows": 0,
        "sample.length": 4,
        "sample.prompts": ("The quick brown fox jumps", f"dog{text.END}"),
        **changes,
    }
    config.update_from_flattened_dict(changes)
    return words.Words(config.lock())


def test_38_an_evaluation_counts_all_bytes_whatever_a_tokenizer_sets(tmp_path):
    tokenizer = _data_tokenizer([_DATA_TEXT])
    tokenizer.add_tokens(["\N{SNOWMAN}  twice"])
    tokenizer.enable_truncation(7)
    experiment = _data_words(tmp_path, tokenizer)
    rows = experiment.eval_data()
    size = 0
    for _, held_out in experiment._sources:
        size += sum(os.path.getsize(path) + 1 for path in held_out)
    assert rows["bytes"].sum() == size
    lowercase = _data_tokenizer([_DATA_TEXT])
    lowercase.normalizer = tokenizers.normalizers.Lowercase()
    with pytest.raises(errors.UserError, match="gives back 'the quick"):
        _data_words(tmp_path, lowercase).eval_data()
    with pytest.raises(errors.UserError, match="vocabulary=280 must be at least"):
        _data_words(tmp_path, tokenizer, **{"text.vocabulary": 280}).eval_data()


def test_38_a_prompt_is_all_of_its_tokens_and_nothing_else(tmp_path):
    tokenizer = _data_tokenizer([_DATA_TEXT])
    end = (text.END, tokenizer.token_to_id(text.END))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{text.END} $A {text.END}", special_tokens=[end]
    )
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=12)
    experiment = _data_words(tmp_path, tokenizer)
    full_stop = tokenizer.token_to_id(".")

    def predict(batch):
        logits = np.zeros((*batch["text"].shape, 320), np.float32)
        logits[..., full_stop] = 1e6
        return logits[:, :-1]

    shown = experiment.samples(predict, jax.random.key(0)).splitlines()
    assert shown[1] == "The quick brown fox jumps...."
    # The end that a prompt has as text is text.
    assert shown[3] == f"dog{text.END}...."


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_12_a_byte_order_mark_is_no_text(tmp_path, end):
    path = tmp_path / "a.jsonl"
    mark = codecs.BOM_UTF8
    lines = ['{"a": 1}', "\ufeffsecond", "third\ufeff"]
    path.write_bytes(mark + end.join(lines).encode())
    found = text.Lines([path, path])
    # A mark is one at the head of a file only.
    assert [found[i] for i in range(len(found))] == lines * 2
    assert json.loads(found[0]) == {"a": 1}
    assert text.Files([path])[0] == end.join(lines)
    for content, expected in [
        (mark, []),
        (mark + b"\n\nx", ["x"]),
        (mark * 2, ["\ufeff"]),
    ]:
        path.write_bytes(content)
        found = text.Lines([path])
        assert [found[i] for i in range(len(found))] == expected


def test_12_a_table_with_a_byte_order_mark_keeps_its_first_column(tmp_path):
    """A spreadsheet writes one when a user saves the table of a run."""
    path = tmp_path / "metrics.csv"
    table = writers.Csv(path, lambda: iter([]))
    table.write({"step": 1, "loss": 2.0})
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    # A new column rewrites the file.
    table.write({"step": 2, "loss": 1.0, "more": 3})
    assert path.read_text().splitlines() == ["step,loss,more", "1,2.0,", "2,1.0,3"]


def test_12_a_byte_order_mark_before_json_is_no_part_of_it(tmp_path):
    path = tmp_path / "map.json"
    rules = b'{"rules": [{"theirs": "a", "ours": "b"}]}'
    path.write_bytes(codecs.BOM_UTF8 + rules)
    assert weight_map.read(str(path)).rules == [weight_map.Rule("a", "b")]
    path.write_bytes(codecs.BOM_UTF8 + b'{"a": 1}\n{"a": 2}\n')
    rows = [row for _, row in jsonfile.read_lines(path)]
    assert rows == [{"a": 1}, {"a": 2}]


def _data_sources(weights, count=64):
    """Returns which of some datasets the first rows of a mix come from."""
    stream = pipelines.Stream(index=0, count=1, seed=0)
    datasets = [[number] for number in range(len(weights))]
    mix = pipelines.Mix(datasets, [(0, weights)], stream)
    return [mix.source(row) for row in range(count)]


@pytest.mark.parametrize(
    "weights, like",
    [
        ([1.7e308, 1.7e308], [1, 1]),
        ([1.7e308, 1.7e308, 1.7e308], [1, 1, 1]),
        ([5e-324, 5e-324], [1, 1]),
        ([1e-323, 5e-324], [2, 1]),
        ([10**308, 3 * 10**307], [10, 3]),
        ([np.float32(3e38), np.float32(3e38)], [1, 1]),
        ([1.7e308, 5e-324], [1, 0]),
        ([0, 1.7e308], [0, 1]),
    ],
)
def test_12_weights_of_any_size_have_their_shares(weights, like):
    assert _data_sources(weights) == _data_sources(like)
    assert set(_data_sources(like)) == {i for i, x in enumerate(like) if x}


@pytest.mark.parametrize(
    "weights",
    [
        [np.nan, 1],
        [np.inf, 1],
        [-1, 2],
        [0, 0],
        [10**400, 1],
        ["1", 1],
        [None, 1],
        [1j, 1],
    ],
)
def test_12_weights_that_are_no_shares_are_refused(weights):
    with pytest.raises(errors.UserError, match="of a mix must be rows"):
        _data_sources(weights)


def test_12_weights_of_words_are_checked_before_grain_divides(tmp_path):
    tokenizer = _data_tokenizer([_DATA_TEXT])
    changes = {"text.files": ("a", "b")}
    for weights in [(np.nan, 1.0), (np.inf, 1.0), (1e-320, 1e-320), (1e308, 1e-308)]:
        changes["text.weights"] = weights
        with pytest.raises(errors.UserError, match="with finite ratios"):
            _data_words(tmp_path, tokenizer, **changes)


class _DataKeeper:
    """Batches whose state has arrays."""

    rows = 8

    def __init__(self, *arrays):
        self.arrays = list(arrays)

    def __next__(self):
        return {"x": np.zeros((self.rows, 1), np.float32)}

    def get_state(self):
        return {"kept": self.arrays}

    def set_state(self, state):
        self.arrays = state["kept"]


def _data_batches(iterator):
    mesh = mesh_lib.make_mesh([[0]], devices=jax.devices()[:1])
    return batches.TrainBatches(lambda part: iterator, mesh, batch_size=8, seed=0)


def _data_forged(megabytes):
    """Returns an array of zeros as a position has it, and what it claims to be."""
    file = io.BytesIO()
    np.save(file, np.zeros(megabytes << 20, np.uint8))
    content = base64.b64encode(zlib.compress(file.getvalue(), 9)).decode()
    return {"npy": content}


def test_18_a_position_inflates_within_bounds():
    taken = _data_batches(_DataKeeper())
    forged = _data_forged(160)
    assert len(forged["npy"]) < 300_000
    for kept in ([forged], [_data_forged(40)] * 4, {"a": {"tuple": [forged]}}):
        position = {"step": 3, "iterator": {"kept": kept}}
        tracemalloc.start()
        try:
            with pytest.raises(errors.UserError, match="of step 3 has a position in"):
                taken.restore([position])
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # What the bound lets through, twice: as bytes and as an array.
        assert peak < 140 << 20
    # What is claimed is not allocated, and what is cut off is no array.
    header = np.lib.format.magic(1, 0) + struct.pack("<H", 118)
    header += b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999999,), }"
    header = header.ljust(127) + b"\n"
    cut = base64.b64decode(_data_forged(1)["npy"])[:-9]
    for content in (zlib.compress(header), cut, b"no zlib", zlib.compress(b"none")):
        kept = [{"npy": base64.b64encode(content).decode()}]
        with pytest.raises(errors.UserError, match="data that cannot be read"):
            taken.restore([{"step": 3, "iterator": {"kept": kept}}])
    for kept in ({"npy": 5}, {"tuple": 5}, {"base64": None}, {"npy": "AAA"}):
        with pytest.raises(errors.UserError, match="data that cannot be read"):
            taken.restore([{"step": 3, "iterator": {"kept": [kept]}}])


def test_18_a_large_state_is_restored_whatever_it_holds(monkeypatch):
    # The bounds of a smaller machine, to be fast.
    monkeypatch.setattr(batches, "_INFLATED_BYTES", 1 << 20)
    empty = np.zeros(8 << 20, np.uint8)
    # A buffer from the beginning, and one that grew.
    for begin, later in [([empty], [empty + 1]), ([], [empty, np.arange(9)])]:
        taken = _data_batches(_DataKeeper(*begin))
        taken._iterator.arrays = later
        position = json.loads(json.dumps(taken.position(5)))
        again = _data_batches(_DataKeeper(*begin))
        again.restore([position])
        for found, kept in zip(again._iterator.arrays, later, strict=True):
            np.testing.assert_array_equal(found, kept)
            assert found.dtype == kept.dtype
    # Arrays of other versions of the format, and of no elements.
    odd = np.zeros(3, [("\N{SNOWMAN}", "<f4"), ("y", "<i2")])
    for state in (odd, np.zeros((0, 3)), np.array(2.5), np.asfortranarray(np.eye(3))):
        with warnings.catch_warnings():
            # NumPy warns of the newest version.
            warnings.simplefilter("ignore")
            found = batches._from_json(batches._to_json(state))
        assert found.dtype == state.dtype and found.shape == state.shape
        np.testing.assert_array_equal(found, state)


class _DataMean(xshard.Experiment):
    """A state without a learner, and predictions with and without a key."""

    def train_data(self):
        return {"x": np.ones((16, 2), np.float32), "y": np.ones(16, np.int32)}

    def eval_data(self):
        return self.train_data()

    def init(self, key, batch):
        return {"center": jnp.zeros(2), "key": jax.random.split(key, 2)}

    def train_step(self, state, batch, key):
        center = state["center"] + 1
        return {**state, "center": center}, {"size": jnp.sum(center)}

    def eval_step(self, state, batch, key):
        return {"distance": jnp.sum((batch["x"] - state["center"]) ** 2, -1)}

    def predict(self, state, batch):
        return batch["x"] - state["center"]


class _DataDraws(_DataMean):
    def predict(self, state, batch, key):
        return batch["x"] - state["center"] + jax.random.normal(key, (2,))


class _DataDrawsRows(_DataMean):
    def predict(self, state, batch, key):
        return jax.random.normal(key, batch["x"].shape)


class _DataMayDraw(_DataMean):
    def predict(self, state, batch, key=None):
        noise = 0.0 if key is None else jax.random.normal(key, (2,))
        return batch["x"] - state["center"] + noise


class _DataNamesKey(_DataMean):
    """Takes a key for nothing."""

    def predict(self, state, batch, key):
        return batch["x"] - state["center"]


class _DataByName(_DataMean):
    def predict(self, state, batch, *, key):
        return batch["x"]


class _DataNoisy(toy.Toy):
    """A network that draws in its predictions."""

    def forward(self, batch, *, is_training):
        outputs = super().forward(batch, is_training=is_training)
        return outputs + jax.random.normal(hk.next_rng_key(), outputs.shape)


def _data_trained(folder, experiment):
    if issubclass(experiment, toy.Toy):
        config = toy.get_config()
    else:
        config = xshard.config.default()
        config.update({"batch_size": 8, "eval_batch_size": 8})
        config.precision = "params=float32,compute=float32,output=float32"
    config.experiment = f"tests.found_faults_data_test.{experiment.__name__}"
    config.steps = 1
    config.eval_every_steps = 0
    assert loop.run(config.lock(), str(folder / "run"), "") == 0
    return xshard.load(str(folder / "run"))


def _data_program(path):
    return jax_export.deserialize(bytearray(path.read_bytes()))


def test_32_an_experiment_without_a_learner_is_exported(tmp_path):
    trained = _data_trained(tmp_path, _DataMean)
    path = tmp_path / "a.stablehlo"
    assert "step 1, predict of x" in export.write(trained, path)
    x = np.ones((3, 2), np.float32)
    np.testing.assert_array_equal(_data_program(path).call({"x": x}), x - 1)
    for name, arguments in [("a.safetensors", False), ("b.stablehlo", True)]:
        with pytest.raises(errors.UserError, match="no learner, .* center") as caught:
            export.write(trained, tmp_path / name, arguments=arguments)
        assert "--select=" not in str(caught.value)
    export.write(trained, tmp_path / "a.safetensors", select="^center")
    # Nor does the start of another run blame a flag that nobody gave.
    source = checkpoint.Source(str(tmp_path / "a.safetensors"))
    with pytest.raises(errors.UserError, match="no parameters or network state of a"):
        checkpoint.check_init(source, {"center": jnp.zeros(2)})


@pytest.mark.parametrize(
    "experiment, arguments",
    [(_DataDraws, True), (_DataDrawsRows, False), (_DataNoisy, False)],
)
def test_33_a_prediction_with_a_key_is_exported(tmp_path, experiment, arguments):
    trained = _data_trained(tmp_path, experiment)
    path = tmp_path / "a.stablehlo"
    select = "center" if issubclass(experiment, _DataMean) else checkpoint.BY_DEFAULT
    said = export.write(trained, path, arguments=arguments, select=select)
    assert "a random key ->" in said
    before = []
    if arguments:
        export.write(trained, tmp_path / "a.safetensors", select=select)
        before = [safetensors.load_file(tmp_path / "a.safetensors")]
    width = 2 if issubclass(experiment, _DataMean) else 3
    batch = {"x": np.ones((5, width), np.float32)}
    program = _data_program(path)
    for seed in (0, 1):
        key = jax.random.key(seed)
        found = program.call(*before, batch, key)
        expected = trained.predict({**batch, "y": np.ones(5, np.float32)}, key)
        # The sums of a linear layer are in another order.
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(errors.UserError, match=r"predict\(batch, "):
        trained.predict({**batch, "y": np.ones(5, np.float32)})


def test_33_a_key_is_taken_where_the_prediction_depends_on_it(tmp_path):
    x = np.ones((2, 2), np.float32)
    for experiment in (_DataMayDraw, _DataNamesKey):
        folder = tmp_path / experiment.__name__
        folder.mkdir()
        trained = _data_trained(folder, experiment)
        # Without a key where that is possible, as before.
        assert "random key" not in export.write(trained, folder / "a.stablehlo")
        found = _data_program(folder / "a.stablehlo").call({"x": x})
        np.testing.assert_array_equal(found, x - 1)
    trained = _data_trained(tmp_path, _DataMean)
    with pytest.raises(errors.UserError, match="takes only a state and a batch"):
        trained.predict({"x": x}, jax.random.key(0))
    trained = trained._replace(experiment=_DataByName(trained.experiment.config))
    with pytest.raises(errors.UserError, match="predict.self, state, batch, key"):
        export.write(trained, tmp_path / "b.stablehlo")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rank": True}, "rank=True"),
        ({"rank": 0}, "rank=0"),
        ({"rank": 2.0}, "rank=2.0"),
        ({"rank": "2"}, "rank='2'"),
        ({"alpha": "2"}, "alpha='2'"),
        ({"alpha": True}, "alpha=True"),
        ({"alpha": None}, "alpha=None"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"alpha": -1}, "alpha=-1"),
        ({"select": 3}, "select=3"),
    ],
)
def test_22_values_of_lora_are_checked(changes, message):
    with pytest.raises(errors.UserError, match=message):
        xshard.lora(**{"rank": 2, "alpha": 2, "select": "", **changes})
    assert xshard.lora(np.int64(2), np.float32(3), "").scale == 1.5


def test_22_a_bool_is_no_number():
    part = data.Part(8, (np.arange(8),), seed=0)
    for call, message in [
        (lambda: pipelines.Streams(lambda _: [], True, part), "True streams do not"),
        (lambda: pipelines.Streams(lambda _: [], "8", part), "'8' streams do not"),
        (lambda: text.train_tokenizer(["a"], "300"), "vocabulary of '300' must"),
        (lambda: text.pack([], len, True), "length=True"),
        (lambda: text.pack([], len, 2.5), "length=2.5"),
        (lambda: xshard.make_mesh(model=True), "model_parallel=True"),
        (lambda: xshard.make_mesh(slices=True), "slices=True"),
        (lambda: xshard.early_stopping("loss", min_delta=True), "min_delta=True"),
        (lambda: xshard.early_stopping("loss", patience=True), "patience=True"),
    ]:
        with pytest.raises(errors.UserError, match=message):
            call()


def _data_toy(**changes):
    config = toy.get_config()
    config.update_from_flattened_dict(changes)
    return toy.Toy(config.lock())


def _data_rows(count):
    return {"x": np.ones((count, 3), np.float32), "y": np.ones(count, np.float32)}


@pytest.mark.parametrize("shards", [False, True])
def test_22_rows_that_do_not_divide_are_named(shards):
    experiment = _data_toy(**{"reduction.shard_update": shards})
    mesh = xshard.make_mesh(devices=jax.devices()[:4])
    state = xshard.init(experiment, mesh, 0, _data_rows(8))
    step = xshard.make_train_step(experiment, mesh)
    message = r"'x' of the batch, of shape \(6, 3\), .* multiple of replicas = 4"
    with pytest.raises(errors.UserError, match=message):
        jax.eval_shape(step, state, _data_rows(6))
    masked = {**_data_rows(6), "_mask": np.ones(6, bool)}
    with pytest.raises(errors.UserError, match="multiple of replicas = 4"):
        jax.eval_shape(xshard.make_eval_step(experiment, mesh), state, masked)
    scalar = {**_data_rows(8), "y": np.float32(1)}
    with pytest.raises(errors.UserError, match=r"'y' of the batch, of shape \(\)"):
        jax.eval_shape(step, state, scalar)


def test_22_rows_that_micro_batches_do_not_divide_are_named():
    experiment = _data_toy(micro_batches=2)
    for replicas, rows in [(1, 3), (4, 12)]:
        mesh = xshard.make_mesh(devices=jax.devices()[:replicas])
        state = xshard.init(experiment, mesh, 0, _data_rows(8))
        step = xshard.make_train_step(experiment, mesh)
        with pytest.raises(errors.UserError, match="multiple of micro_batches = 2 on"):
            jax.eval_shape(step, state, _data_rows(rows))
        jax.eval_shape(step, state, _data_rows(8))


def test_36_a_batch_of_another_number_of_rows_says_what_to_do():
    keeper = _DataKeeper()
    taken = _data_batches(keeper)
    next(taken)
    keeper.rows = 4
    with pytest.raises(errors.UserError, match="has 4 rows.* equally many"):
        next(taken)


@pytest.mark.parametrize(
    "address",
    [
        "::1:8476",
        "fd00::1:8476",
        "fe80::1%eth0:8476",
        "::1",
        "[::1]",
        "[::1:8476",
        "::1]:8476",
        "[h0]:8476",
        "[]:8476",
        "http://h0:8476",
        "h 0:8476",
        "h0:\N{ARABIC-INDIC DIGIT THREE}",
        "h0:0",
        "h0:+1",
        ":8476",
    ],
)
def test_44_an_address_that_grpc_would_abort_on_is_refused(address):
    with pytest.raises(rendezvous.StartError, match="must be HOST:PORT") as caught:
        startup.resolve_process(address, 2, 0)
    is_ipv6 = address.startswith(("::1:", "fd00", "fe80")) or address == "::1"
    assert ("stands in brackets" in str(caught.value)) == is_ipv6


@pytest.mark.parametrize(
    "address",
    ["[::1]:8476", "[fe80::1%eth0]:8476", "127.0.0.1:1", "h-0.a_b.svc:65535", "h0:80"],
)
def test_44_an_address_that_is_one_is_taken(address):
    assert startup.resolve_process(address, 2, 0).address == address


def test_18_a_file_of_no_room_is_not_read_into_memory(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="too large"):
        disk.read(path)


class _DataBuckets(xshard.Supervised):
    """Linear regression over rows of which some only fill a batch up."""

    def train_data(self):
        return {"x": np.ones((8, 3), np.float32), "is_row": np.ones(8, np.float32)}

    def eval_data(self):
        return self.train_data()

    def forward(self, batch, *, is_training):
        return hk.Linear(1, with_bias=False, name="linear")(batch["x"])[:, 0]

    def loss(self, outputs, batch):
        errors_of_rows = batch["is_row"] * (outputs - 1) ** 2
        return jnp.sum(errors_of_rows) / jnp.maximum(self.weight(batch), 1), {}

    def weight(self, batch):
        return jnp.sum(batch["is_row"])

    def evaluate(self, outputs, batch):
        return {"error": (outputs - 1) ** 2}

    def optimizer(self):
        return xshard.CrossShardOptimizer(optax.sgd(0.1), slice_axis_name="slice")


@pytest.mark.parametrize("replicas, micro_batches", [(1, 1), (4, 1), (2, 2), (4, 2)])
def test_36_rows_that_fill_up_a_batch_count_for_nothing(replicas, micro_batches):
    config = toy.get_config()
    config.micro_batches = micro_batches
    experiment = _DataBuckets(config.lock())
    mesh = xshard.make_mesh(devices=jax.devices()[:replicas])
    rng = np.random.default_rng(0)
    # Three of eight rows, so that some replicas have none.
    x = np.zeros((8, 3), np.float32)
    x[:3] = rng.normal(size=(3, 3))
    batch = {"x": x, "is_row": (np.arange(8) < 3).astype(np.float32)}
    state = xshard.init(experiment, mesh, 0, batch)
    before = np.asarray(state.experiment.params["linear"]["w"])
    step = jax.jit(xshard.make_train_step(experiment, mesh))
    after, _ = step(state, batch)
    gradient = 2 * x[:3].T @ (x[:3] @ before - 1) / 3
    found = np.asarray(after.experiment.params["linear"]["w"])
    # Sums of three float32 products, in another order.
    np.testing.assert_allclose(found, before - 0.1 * gradient, rtol=1e-5, atol=1e-6)


class _DataShuffled(_DataKeeper):
    """Batches of a data set that is shuffled anew whenever it is iterated, or not."""

    def __init__(self, is_anew):
        super().__init__()
        self._is_anew = is_anew
        self._order = np.random.default_rng(0)

    def __next__(self):
        self.arrays = [*self.arrays, np.zeros(1)]
        order = self._order
        if not self._is_anew:
            order = np.random.default_rng(len(self.arrays))
        x = order.normal(size=(8, 2)).astype(np.float32)
        # NaN equals itself.
        x[:, 1] = np.nan
        return {"x": x}


@pytest.mark.parametrize("is_anew", [False, True])
def test_36_data_that_cannot_be_put_back_is_warned_of(caplog, is_anew):
    taken = _data_batches(_DataShuffled(is_anew))
    for _ in range(3):
        next(taken)
    assert caplog.text.count("_DataShuffled gave another batch") == is_anew
    # A run that resumes has other batches than the first.
    caplog.clear()
    taken = _data_batches(_DataShuffled(True))
    taken.restore([taken.position(0)])
    next(taken)
    assert not caplog.text
