"""Tests of the checks of arguments."""

import numpy as np
import pytest

from xshard import errors
from xshard.base import arguments


@pytest.mark.parametrize("value", [1, np.int32(3)])
def test_a_count_is_an_integer_of_at_least_1(value):
    count = arguments.count("steps", value)
    assert (count, type(count)) == (value, int)


@pytest.mark.parametrize("value", [0, True, 1.0, "3", None, float("nan")])
def test_anything_else_is_refused_with_the_rule(value):
    with pytest.raises(
        errors.UserError, match="^steps must be an integer of at least 1; received "
    ):
        arguments.count("steps", value)


def test_a_choice_is_named_with_what_is_allowed():
    assert arguments.one_of("kind", "a", ("a", "b")) == "a"
    with pytest.raises(errors.UserError, match="^kind must be one of a, b; received 3"):
        arguments.one_of("kind", 3, ("a", "b"))


def test_nan_is_shown_as_words():
    with pytest.raises(errors.UserError, match=r"received not a number\.$"):
        arguments.check("rate", float("nan"), False, "a rate")


def test_a_bool_is_no_number():
    assert arguments.is_number(1.5) and arguments.is_integer(np.int8(1))
    assert not arguments.is_number(True)
    assert not arguments.is_integer(False)
