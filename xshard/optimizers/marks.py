"""Marks of values in a traced program, by which an analysis of it knows them.

A mark is a call of a jitted function that returns what it is given; the program shows
the function's name.
"""

from typing import Any

import jax

# The names: of values that are declared equal on all replicas, and of the results of a
# learner's update.
EQUAL = "equal_on_replicas"
UPDATED = "updated"

# The name of the function that gathers a parameter held in shards.
GATHERED = "gathered_parameter"


class _Mark:
    """A function that returns its first argument, under a name that programs show."""

    def __init__(self, name: str):
        self.__name__ = name

    def __call__(self, tree: Any, given: Any) -> Any:
        return tree


def marked(name: str, tree: Any, given: Any = ()) -> Any:
    """Returns the same tree, as the result of a call that a program shows.

    Args:
      name: the name of the call.
      tree: arrays.
      given: further arrays, which the program shows as arguments of the call.
    """
    return jax.jit(_Mark(name))(tree, given)
