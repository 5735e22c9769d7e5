"""Tests of flags among the words of a command."""

import pytest

from xshard.base import flag_words


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("run --a=1", "run --a=1 --steps=8"),
        ("run --steps=3 --a=1 --steps=4", "run --a=1 --steps=8"),
        ("run --steps 3 --a=1", "run --a=1 --steps=8"),
        ("run -steps=3 --steps_of_mine=2", "run --steps_of_mine=2 --steps=8"),
        ("'a b/python' --steps=3 '--a=x y'", "'a b/python' '--a=x y' --steps=8"),
    ],
)
def test_a_flag_that_is_already_there_is_replaced(command, wanted):
    assert flag_words.with_flag(command, "steps", 8) == wanted
