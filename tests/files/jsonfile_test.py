"""Tests of JSON parsed into types."""

import dataclasses
from typing import Any, Literal, NamedTuple

import pytest

from xshard.files import jsonfile

Count = jsonfile.Count


@dataclasses.dataclass(frozen=True)
class Array:
    shape: tuple[Count, ...]
    dtype: Literal["float32", "int8"]
    key_impl: str | None = None


class Saved(NamedTuple):
    step: Count
    finite: bool
    arrays: dict[str, Array]
    metrics: dict[str, float]
    data: list[Any]
    bounds: tuple[int, float] = (0, 1.0)


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
    assert jsonfile.parse([{}, 1], tuple) == ({}, 1)
    assert jsonfile.parse({"a": []}, dict) == {"a": []}
    assert jsonfile.parse({**VALUE, "bounds": [1, 2]}, Saved).bounds == (1, 2)
    keyed = jsonfile.parse({**ARRAY, "key_impl": "rbg"}, Array)
    assert keyed.key_impl == "rbg"
    assert jsonfile.parse({**ARRAY, "key_impl": None}, Array).key_impl is None


@pytest.mark.parametrize(
    "change,message",
    [
        ({"step": True}, "step is True, not an integer of at least 0"),
        ({"step": 1.0}, "step is 1.0, not an integer of at least 0"),
        ({"step": "3"}, "step is '3', not an integer of at least 0"),
        ({"step": -1}, "step is -1, not an integer of at least 0"),
        ({"step": 1 << 63}, f"step is {1 << 63}, not an integer of at least 0"),
        ({"step": None}, "step is None, not an integer of at least 0"),
        ({"finite": 1}, "finite is 1, not true or false"),
        ({"metrics": [1]}, "metrics is [1], not an object"),
        ({"metrics": {"a": False}}, "metrics/a is False, not a number"),
        ({"metrics": {"a": 1 << 63}}, f"metrics/a is {1 << 63}, not a number"),
        ({"data": {}}, "data is {}, not a list"),
        ({"bounds": [1]}, "bounds is [1], not a list of 2 values"),
        ({"bounds": [1, "x"]}, "bounds/1 is 'x', not a number"),
        ({"bounds": [1.5, 1]}, "bounds/0 is 1.5, not an integer of 64 bits"),
        ({"stop": 4}, "stop is not one of step, finite, arrays, metrics, data, bounds"),
        ({"arrays": {"w": 3}}, "arrays/w is 3, not an object"),
        ({"arrays": {"w": {"shape": []}}}, "arrays/w/dtype is missing"),
        (
            {"arrays": {"w": ARRAY | {"shape": [1, -2]}}},
            "arrays/w/shape/1 is -2, not an integer of at least 0",
        ),
        (
            {"arrays": {"w": ARRAY | {"dtype": "int4"}}},
            "arrays/w/dtype is 'int4', not one of 'float32', 'int8'",
        ),
        (
            {"arrays": {"w": ARRAY | {"key_impl": 3}}},
            "arrays/w/key_impl is 3, not a string",
        ),
        ({"data": "x" * 99}, f"data is '{'x' * 59}..., not a list"),
    ],
)
def test_the_first_wrong_field_is_named_with_its_path(change, message):
    with pytest.raises(ValueError) as raised:
        jsonfile.parse({**VALUE, **change}, Saved)
    assert str(raised.value) == message


def test_a_missing_field_and_a_wrong_outermost_value_are_named():
    with pytest.raises(ValueError, match="^step is missing$"):
        jsonfile.parse({}, Saved)
    with pytest.raises(ValueError, match=r"^it is \[\], not an object$"):
        jsonfile.parse([], Saved)
    with pytest.raises(ValueError, match="^1/step is missing$"):
        jsonfile.parse([VALUE, {}], list[Saved])


def test_extra_keys_are_dropped_at_every_depth_if_they_may_be_there():
    more = {**VALUE, "new": 1, "arrays": {"params/w": ARRAY | {"new": 2}}}
    expected = jsonfile.parse(VALUE, Saved)
    assert jsonfile.parse(more, Saved, extra_keys=True) == expected
    with pytest.raises(ValueError, match="^arrays/params/w/new is not one of shape"):
        jsonfile.parse({**VALUE, "arrays": more["arrays"]}, Saved)


@pytest.mark.parametrize("value", [True, 1.0, "1", 2])
def test_a_literal_has_the_type_of_its_choice(value):
    with pytest.raises(ValueError, match="not one of 1"):
        jsonfile.parse(value, Literal[1])


def test_a_union_accepts_each_of_its_types():
    kind = Saved | list[int] | None
    assert jsonfile.parse(VALUE, kind).step == 3
    assert jsonfile.parse([1], kind) == [1]
    assert jsonfile.parse(None, kind) is None
    with pytest.raises(ValueError, match="it is 'x', not a list"):
        jsonfile.parse("x", kind)


def test_a_type_that_is_not_known_is_a_bug():
    with pytest.raises(TypeError, match="is not a type that `parse` knows"):
        jsonfile.parse({"step": 1}, "Saved")
