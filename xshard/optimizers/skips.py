"""Steps that are not applied: what they leave as it was, beside what is conditional."""

import types
from collections.abc import Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

# Arrays of Haiku state, by module and name.
State = Mapping[tuple[str, str], Any]
# What a loss has written, by module and name: the array before, and the array that it wrote.
Written = Mapping[tuple[str, str], tuple[Any, Any]]
NOTHING: Written = types.MappingProxyType({})


class _AnyModule(hk.Module):
    """Reads and writes the state of any module, by its name."""

    def __init__(self) -> None:
        # A module made under a name in use would change the names of those that are made after it.
        super().__init__(name=hk.force_name("any_module_of_skips"))

    def read(self, module: str) -> Mapping[str, Any]:
        """The arrays of a module's state as they are now, by name."""
        self.module_name = module
        state = self.state_dict()
        return {name.removeprefix(f"{module}/"): array for name, array in state.items()}

    def write(self, module: str, name: str, value: Any) -> None:
        """Sets one of them."""
        self.module_name = module
        hk.set_state(name, value)


def select(applied: Any, new: jax.Array, old: jax.Array) -> jax.Array:
    """The new array if the step is applied, else the old one.

    Args:
      applied: True, or a boolean scalar.
      new: what the update makes; it may be anything if the step is not applied.
      old: what was there.
    """
    return new if applied is True else jnp.where(applied, new, old)


def current_state() -> State:
    """All arrays of state as they are now."""
    # Inside of hk.scan and its like `hk.get_current_state` has the arrays from before the loop.
    modules = _AnyModule()
    return {
        (module, name): array
        for module in hk.get_current_state()
        for name, array in modules.read(module).items()
    }


def by_module(state: State) -> dict[str, dict[str, Any]]:
    """The state as Haiku has it."""
    modules: dict[str, dict[str, Any]] = {}
    for (module, name), array in state.items():
        modules.setdefault(module, {})[name] = array
    return modules


def by_name(state: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], Any]:
    """The inverse of `by_module`."""
    return {(module, name): x for module, arrays in state.items() for name, x in arrays.items()}


def write(state: State) -> None:
    """Sets arrays of state."""
    modules = _AnyModule()
    for (module, name), array in state.items():
        modules.write(module, name, array)


def written(before: State, after: State, earlier: Written) -> Written:
    """Returns what was written between two states, and what other losses have written before.

    Args:
      before: the state before a loss.
      after: the state after it.
      earlier: what other losses have written, whose step is not yet made.
    """
    changes = dict(earlier)
    for key, new in after.items():
        old = before.get(key)
        if old is None or old is new:
            continue
        if key in earlier:
            first, last = earlier[key]
            # Several losses of one step wrote it in turn, and nothing else between them.
            if last is old:
                old = first
        changes[key] = (old, new)
    return changes


def put_back(applied: Any, losses: Written) -> None:
    """Puts back what losses have written where the step is not applied.

    What something else has written since stays, and so does what was written in another trace, such as in
    the body of a loop.
    """
    if applied is True or hk.running_init():
        return
    modules = _AnyModule()
    for (module, name), (old, new) in losses.items():
        if modules.read(module)[name] is new:
            modules.write(module, name, select(applied, new, old))


def check_count(global_step: Any) -> None:
    """Raises ValueError unless a global step is None or an integer scalar."""
    if global_step is None:
        return
    if not is_integer_scalar(global_step):
        raise ValueError(
            "global_step must be an integer scalar, such as jnp.int32(0), which counts the updates applied; "
            f"received {global_step!r}."
        )


def is_integer_scalar(x: Any) -> bool:
    """Returns whether `x` is an integer, of Python's or as an array without dimensions."""
    is_array = jax.tree_util.all_leaves([x]) and not isinstance(x, str | bool)
    if not is_array or jnp.shape(x) != ():
        return False
    return jnp.issubdtype(jnp.result_type(x), jnp.integer)


def count(applied: Any, global_step: Any) -> jax.Array:
    """The number of updates applied, after a step."""
    global_step = jnp.asarray(global_step)
    return global_step + jnp.asarray(applied, global_step.dtype)
