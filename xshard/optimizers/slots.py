"""The state arrays of rules, and the slots in the state of an optax transformation.

A slot is a node of that state with one entry for each parameter, such as Adam's `mu`.
An entry is an array, or in some transformations a tree of arrays. The name of an array
joins the slot's path in the state, the parameter's path, and its path in the entry.
"""

import functools
from collections.abc import Callable, Container, Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from xshard.optimizers import trees


def state_of(module: hk.Module) -> dict[str, Any]:
    """Returns the current arrays of a module's state, by name without the module's."""
    prefix = f"{module.module_name}/"
    arrays = module.state_dict()
    return {name.removeprefix(prefix): x for name, x in arrays.items()}


def create(name: str, first: jax.Array) -> None:
    """Creates a state array of the current module.

    It is a copy, because several slots may begin with one array or with a parameter,
    and a donated tree must not contain one buffer twice.

    Args:
      name: its name.
      first: its first value.
    """
    copy = lambda *_: jnp.array(first, copy=True)
    hk.get_state(name, first.shape, first.dtype, copy)


def find(state: Any, params: trees.Params) -> list[tuple[str, Any]]:
    """Returns the slots in optax's state, with their paths."""
    return _find(state, functools.partial(_is_slot, params))


def find_paths(transformation: Any) -> list[str] | None:
    """Returns the paths of the slots in a transformation's state, for any parameters.

    None if they depend on the parameters.
    """
    found: list[str] = []

    def init(params: Any) -> tuple[()]:
        """Finds the slots in the state for these parameters; returns an empty one."""
        with jax.numpy_dtype_promotion("standard"):
            state = jax.eval_shape(lambda: transformation.init(params))
        is_slot = lambda node: isinstance(node, type(params))
        found.extend(path for path, _ in _find(state, is_slot))
        return ()

    # `tree_map_params` calls `init` with a placeholder that stands for any tree of
    # parameters. Only that call is wanted: the state that it maps is empty.
    try:
        optax.tree_utils.tree_map_params(init, lambda x: x, ())
    except Exception:
        # Any error may occur, such as a KeyError in a transformation that looks up
        # modules by name.
        return None
    return found


def map_slots(
    f: Callable[..., Any], params: trees.Params, state: Any, *rest: Any
) -> Any:
    """Applies a function to the slots of states.

    Args:
      f: a function of a slot of `state`, and of the same slot of each of `rest`.
      params: the parameters.
      state: a state of a transformation.
      *rest: other states of it.

    Returns:
      A state with the results. All other nodes come from the last given state.
    """
    is_slot = functools.partial(_is_slot, params)

    def map_node(*nodes: Any) -> Any:
        if is_slot(nodes[0]):
            return f(*nodes)
        return nodes[-1]

    return jax.tree.map(map_node, state, *rest, is_leaf=is_slot)


def names_by_parameter(state: Any, params: trees.Params) -> dict[str, list[str]]:
    """Returns the names of each parameter's slot arrays in optax's state, by path."""
    names: dict[str, list[str]] = {path: [] for path in trees.leaves_by_path(params)}
    structure: Any = jax.tree.structure(params)
    for slot_path, slot in find(state, params):
        # An entry is itself a tree. It has no arrays if it is hidden, and several in
        # some transformations.
        entries = structure.flatten_up_to(slot)
        for param, entry in zip(names, entries, strict=True):
            for path, _ in jax.tree_util.tree_leaves_with_path(entry):
                names[param].append(trees.join(slot_path, param, trees.path_name(path)))
    return names


class Mask:
    """Hides the entries of some parameters from an optax transformation.

    optax skips each entry that is an `optax.MaskedNode`, which is also how
    `optax.masked` leaves entries out.
    """

    def __init__(self, params: trees.Params, shown: Container[str]):
        """Creates a mask for trees with one entry for each parameter.

        Args:
          params: the parameters.
          shown: the paths of those whose entries are not hidden.
        """
        paths = trees.leaves_by_path(params)
        self._is_shown = trees.rebuild(params, {path: path in shown for path in paths})

    def hide(self, tree: Any) -> Any:
        """Returns the tree without the hidden entries."""

        def mask(is_shown: bool, x: Any) -> Any:
            return x if is_shown else optax.MaskedNode()

        return jax.tree.map(mask, self._is_shown, tree)

    def restore(self, old: Any, new: Any) -> Any:
        """Returns the tree `new`, with the entries of `old` where they were hidden."""

        def choose(is_shown: bool, old: Any, new: Any) -> Any:
            return new if is_shown else old

        return jax.tree.map(choose, self._is_shown, old, new)


def missing_error(rule: str, path: str) -> ValueError:
    """Returns the error for a parameter that has a gradient, but no slots.

    It had no gradient when the rule's state was created.

    Args:
      rule: the rule's name.
      path: the parameter's path.
    """
    return ValueError(
        f"The parameter '{path}' has a gradient, but {rule} has no slot for it: its "
        "gradient was None when the state was created. To train it, name it in "
        "var_list while hk.running_init() too, and create the state anew. Otherwise "
        "give it the gradient None."
    )


def _is_slot(params: trees.Params, node: Any) -> bool:
    """Returns whether a node of optax's state has one entry for each parameter."""
    if not isinstance(node, Mapping):
        return False
    try:
        # Raises unless the parameters' structure is a prefix of the node's.
        jax.tree.map(lambda param, entry: None, params, node)
    except ValueError:
        return False
    return True


def _find(state: Any, is_slot: Callable[[Any], bool]) -> list[tuple[str, Any]]:
    slots = []
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_slot):
        if is_slot(node):
            slots.append((trees.path_name(path), node))
    return slots
