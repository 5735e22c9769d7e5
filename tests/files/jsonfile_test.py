"""Tests of JSON parsed into types."""

import dataclasses
from typing import Any, Literal

import msgspec
import pytest

from xshard.files import jsonfile

Count = jsonfile.Count


@dataclasses.dataclass(frozen=True)
class Array:
    shape: tuple[Count, ...]
    dtype: Literal["float32", "int8"]
    key_impl: str | None = None


class Saved(msgspec.Struct, frozen=True):
    step: Count
    finite: bool
    arrays: dict[str, Array]
    metrics: dict[str, float]
    data: list[Any]
    bounds: tuple[int, float] = (0, 1.0)


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    step: Count
    before: list["Strict"] = []


ARRAY = {"shape": [2, 3], "dtype": "int8"}
VALUE = {
    "step": 3,
    "finite": True,
    "arrays": {"params/w": ARRAY},
    "metrics": {"error": 0.5, "count": 7},
    "data": [None, {"a": 1}],
}


def test_a_value_is_parsed_into_its_type():
    parsed = jsonfile.parse(VALUE, Saved)
    assert parsed == Saved(
        step=3,
        finite=True,
        arrays={"params/w": Array((2, 3), "int8")},
        metrics={"error": 0.5, "count": 7},
        data=[None, {"a": 1}],
    )
    assert jsonfile.parse([VALUE], list[Saved]) == [parsed]
    assert jsonfile.parse({**VALUE, "bounds": [1, 2]}, Saved).bounds == (1, 2)
    keyed = jsonfile.parse({**ARRAY, "key_impl": "rbg"}, Array)
    assert keyed.key_impl == "rbg"
    assert jsonfile.parse({**ARRAY, "key_impl": None}, Array).key_impl is None


@pytest.mark.parametrize(
    "change,message",
    [
        ({"step": True}, "Expected `int`, got `bool` - at `$.step`: True"),
        ({"step": 1.0}, "Expected `int`, got `float` - at `$.step`: 1.0"),
        ({"step": "3"}, "Expected `int`, got `str` - at `$.step`: '3'"),
        ({"step": -1}, "Expected `int` >= 0 - at `$.step`: -1"),
        ({"step": None}, "Expected `int`, got `null` - at `$.step`: None"),
        ({"finite": 1}, "Expected `bool`, got `int` - at `$.finite`: 1"),
        ({"metrics": [1]}, "Expected `object`, got `array` - at `$.metrics`: [1]"),
        (
            {"metrics": {"a": False}},
            "Expected `float`, got `bool` - at `$.metrics[...]`: {'a': False}",
        ),
        ({"data": {}}, "Expected `array`, got `object` - at `$.data`: {}"),
        ({"bounds": [1]}, "Expected `array` of length 2, got 1 - at `$.bounds`: [1]"),
        ({"bounds": [1, "x"]}, "Expected `float`, got `str` - at `$.bounds[1]`: 'x'"),
        ({"bounds": [1.5, 1]}, "Expected `int`, got `float` - at `$.bounds[0]`: 1.5"),
        (
            {"arrays": {"w": 3}},
            "Expected `object`, got `int` - at `$.arrays[...]`: {'w': 3}",
        ),
        (
            {"arrays": {"w": {"shape": []}}},
            "Object missing required field `dtype` - at `$.arrays[...]`: "
            "{'w': {'shape': []}}",
        ),
        (
            {"arrays": {"w": {"shape": [1, -2]}}},
            "Expected `int` >= 0 - at `$.arrays[...].shape[1]`: "
            "{'w': {'shape': [1, -2]}}",
        ),
        (
            {"arrays": {"w": {"dtype": "int4"}}},
            "Invalid enum value 'int4' - at `$.arrays[...].dtype`: "
            "{'w': {'dtype': 'int4'}}",
        ),
        (
            {"data": "x" * 99},
            f"Expected `array`, got `str` - at `$.data`: '{'x' * 59}...",
        ),
    ],
)
def test_the_first_wrong_field_is_named_with_its_path_and_value(change, message):
    with pytest.raises(ValueError) as raised:
        jsonfile.parse({**VALUE, **change}, Saved)
    assert str(raised.value) == message


def test_a_missing_field_and_a_wrong_outermost_value_are_named():
    with pytest.raises(ValueError, match=r"^Object missing .* `step`: \{\}$"):
        jsonfile.parse({}, Saved)
    with pytest.raises(ValueError, match=r"^Expected `object`, got `array`: \[\]$"):
        jsonfile.parse([], Saved)
    with pytest.raises(ValueError, match=r"missing .* `step` - at `\$\[1\]`: \{\}$"):
        jsonfile.parse([VALUE, {}], list[Saved])


def test_extra_keys_are_dropped_at_every_depth_unless_the_type_forbids_them():
    more = {**VALUE, "new": 1, "arrays": {"params/w": ARRAY | {"new": 2}}}
    assert jsonfile.parse(more, Saved) == jsonfile.parse(VALUE, Saved)
    wrong = {"step": 2, "before": [{"step": 1, "new": 3}]}
    with pytest.raises(ValueError, match=r"field `new` - at `\$\.before\[0\]`: {'step"):
        jsonfile.parse(wrong, Strict)


@pytest.mark.parametrize("value", [True, 1.0, "1", 2])
def test_a_literal_has_the_type_of_its_choice(value):
    with pytest.raises(ValueError, match=f": {value!r}$"):
        jsonfile.parse(value, Literal[1])


def test_a_union_accepts_each_of_its_types():
    kind = Saved | list[int] | None
    assert jsonfile.parse(VALUE, kind).step == 3
    assert jsonfile.parse([1], kind) == [1]
    assert jsonfile.parse(None, kind) is None
    with pytest.raises(ValueError, match="^Expected `object | array | null`, got `str"):
        jsonfile.parse("x", kind)


def test_a_path_within_a_value_is_no_path():
    with pytest.raises(ValueError, match=r"^Invalid enum value ' - at `\$\.a`'"):
        jsonfile.parse({"a": " - at `$.a`"}, dict[str, Literal["b"]])
