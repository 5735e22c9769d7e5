"""Tests of inputs that were once taken in part, wrongly or without a name: maps of
arrays, tokenizers, texts, positions in data, exports.
"""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors

from xshard import checkpoint, errors
from xshard.files import tensors, weight_map

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


def test_41_a_head_that_is_not_the_embedding_is_refused_by_name(tmp_path):
    rules = weight_map.read(_DATA_MAP).rules
    rules = [rule for rule in rules if rule.ignore or rule.theirs == "wte.weight"]
    embedding = np.arange(12, dtype=np.float32).reshape(4, 3)
    tied = {"transformer.wte.weight": embedding, "lm_head.weight": embedding.copy()}
    mapped = _data_mapped(tmp_path, tied, rules, "transformer.")
    assert mapped.ignored == [
        "lm_head.weight, float32[4,3] (the embedding, to which the head is tied)"
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
    masks = "mask.0 and 2 more of 'mask.{i}', bool[2,2] (constant)"
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
