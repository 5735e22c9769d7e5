"""Checks of the arguments that a user gives."""

import numbers
from collections.abc import Collection
from typing import Any

from xshard import errors


def check(argument: str, value: Any, is_good: bool, rule: str) -> None:
    """Raises UserError unless an argument is good.

    Args:
      argument: its name.
      value: what was received.
      is_good: whether it may be that.
      rule: what it must be, for the message.

    >>> check('steps', 3, is_integer(3) and 3 >= 1, 'an integer of at least 1')
    """
    if not is_good:
        # As text, NaN is hard to tell from a name.
        shown = "not a number" if _is_nan(value) else repr(value)
        raise errors.UserError(f"{argument} must be {rule}; received {shown}.")


def one_of(argument: str, value: Any, allowed: Collection[str]) -> str:
    """Returns an argument as text; UserError unless it is one of those allowed."""
    check(argument, value, value in allowed, f"one of {', '.join(allowed)}")
    return str(value)


def count(argument: str, value: Any) -> int:
    """Returns an argument; UserError unless it is an integer of at least 1."""
    is_good = is_integer(value) and value >= 1
    check(argument, value, is_good, "an integer of at least 1")
    return int(value)


def is_integer(value: Any) -> bool:
    """Returns whether a value is an integer; a bool is one for Python only."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Returns whether a value is a real number; a bool is one for Python only."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and value != value
