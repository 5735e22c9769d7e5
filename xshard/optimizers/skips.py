"""Skipped steps: how they restore state that was written before the vote.

Only the phase `update` is conditional. Losses and the phase `aggregate` have written
Haiku state by the time of the vote. A skipped step selects the old arrays again.
"""

import functools
import types
from collections.abc import Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from xshard.optimizers import slots

# Arrays of Haiku state, by module and name.
State = Mapping[tuple[str, str], Any]
# State that was written, by module and name: the array before, and the array that was
# written.
Writes = Mapping[tuple[str, str], tuple[Any, Any]]
NO_WRITES: Writes = types.MappingProxyType({})


class _AnyModule(hk.Module):
    """Reads and writes the state of any module, by its name.

    Haiku's functions read and write only the state of the current module. A module that
    takes the name of another one stands for that one.
    """

    def __init__(self) -> None:
        # A name that no other module has: reserving a name in use could change the
        # names of modules created later.
        super().__init__(name=hk.force_name("any_module_of_skips"))

    def read(self, module: str) -> dict[str, Any]:
        """Returns the current arrays of a module's state, by name."""
        self.module_name = module
        return slots.state_of(self)

    def write(self, module: str, name: str, value: Any) -> None:
        """Sets one array of a module's state."""
        self.module_name = module
        hk.set_state(name, value)


def all_for(*votes: Any) -> Any:
    """Returns whether all votes are for a step.

    Args:
      *votes: each True or a boolean scalar.

    Returns:
      A boolean scalar; or the constant True if all votes are, so that the update is
      unconditional.
    """
    scalars = [vote for vote in votes if vote is not True]
    if not scalars:
        return True
    return functools.reduce(jnp.logical_and, scalars)


def select(applied: Any, new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns the new array if the step is applied, else the old one.

    Args:
      applied: True, or a boolean scalar.
      new: the array that the update computed; it may hold any values if the step is not
        applied.
      old: the array before the step.
    """
    if applied is True:
        return new
    return jnp.where(applied, new, old)


def current_state() -> State:
    """Returns all current state arrays."""
    # Inside hk.scan and similar loops, `hk.get_current_state` returns the arrays from
    # before the loop. So only the modules' names are taken from there.
    modules = _AnyModule()
    state = {}
    for module, arrays in hk.get_current_state().items():
        # These include the arrays of modules within it, whose names begin with its own.
        current = modules.read(module)
        for name in arrays:
            state[module, name] = current[name]
    return state


def by_module(state: State) -> dict[str, dict[str, Any]]:
    """Returns the state in Haiku's structure, `{module: {name: array}}`."""
    modules: dict[str, dict[str, Any]] = {}
    for (module, name), array in state.items():
        modules.setdefault(module, {})[name] = array
    return modules


def by_name(modules: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], Any]:
    """Returns the inverse of `by_module`."""
    state = {}
    for module, arrays in modules.items():
        for name, array in arrays.items():
            state[module, name] = array
    return state


def write(state: State) -> None:
    """Sets state arrays."""
    modules = _AnyModule()
    for (module, name), array in state.items():
        modules.write(module, name, array)


def writes_since(before: State, earlier: Writes = NO_WRITES) -> Writes:
    """Returns the state that was written since, together with earlier writes.

    An array that was created since is not among them.

    Args:
      before: the state at that time.
      earlier: writes from before that time, such as those of other losses of this step.
    """
    writes = dict(earlier)
    for key, new in current_state().items():
        old = before.get(key)
        if old is None or old is new:
            continue
        if key in earlier:
            first, last = earlier[key]
            # Several losses of one step wrote this array in turn, and nothing else
            # wrote it in between. A skipped step must restore the array from before the
            # first of them.
            if last is old:
                old = first
        writes[key] = (old, new)
    return writes


def restore_unless_applied(applied: Any, writes: Writes) -> None:
    """Restores the state that was written, if the step is not applied.

    State that something else has overwritten since stays. So does state that was
    written in another trace, such as in the body of a loop.

    Args:
      applied: True, or a boolean scalar.
      writes: what was written.
    """
    if applied is True or hk.running_init():
        return
    modules = _AnyModule()
    for (module, name), (old, new) in writes.items():
        if modules.read(module)[name] is new:
            modules.write(module, name, select(applied, new, old))


def check_count(global_step: Any) -> None:
    """Raises ValueError unless a global step is None or an integer scalar."""
    if global_step is not None and not is_integer_scalar(global_step):
        raise ValueError(
            "global_step must be an integer scalar, such as jnp.int32(0), which counts "
            f"the updates applied; received {global_step!r}."
        )


def is_integer_scalar(x: Any) -> bool:
    """Returns whether `x` is a Python integer or an integer array of shape ()."""
    is_leaf = jax.tree_util.all_leaves([x])
    if not is_leaf or isinstance(x, str | bool) or jnp.shape(x) != ():
        return False
    return jnp.issubdtype(jnp.result_type(x), jnp.integer)


def count(applied: Any, global_step: Any) -> jax.Array:
    """Returns the number of updates applied, after a step.

    Args:
      applied: whether the step was applied: True, or a boolean scalar.
      global_step: the number before it, an integer scalar.
    """
    global_step = jnp.asarray(global_step)
    return global_step + jnp.asarray(applied, global_step.dtype)
