"""The slots in an optax state: where they are, and what parameter each array of them is of."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from xshard.optimizers import trees


def _mirrors(params: trees.Params, node: Any) -> bool:
    """Returns whether a node of optax's state has one entry for each parameter, so that it is a slot."""
    if not isinstance(node, Mapping):
        return False
    try:
        jax.tree.map(lambda _, entry: None, params, node)
    except ValueError:
        return False
    return True


def find(state: Any, params: trees.Params) -> list[tuple[str, Any]]:
    """The slots in optax's state, by path."""
    is_slot = functools.partial(_mirrors, params)
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_slot)
    return [(trees.path_name(path), node) for path, node in nodes if is_slot(node)]


def of_any(transformation: Any) -> list[str] | None:
    """The paths of the slots in a transformation's state, whatever the parameters; None if it needs these."""
    found: list[str] = []

    def init(params: Any) -> tuple[()]:
        is_slot = lambda node: isinstance(node, type(params))
        with jax.numpy_dtype_promotion("standard"):
            state = jax.eval_shape(lambda: transformation.init(params))
        for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_slot):
            if is_slot(node):
                found.append(trees.path_name(path))
        return ()

    # optax gives `init` what stands for any tree of parameters; there is no state to map here.
    try:
        optax.tree_utils.tree_map_params(init, lambda x: x, ())
    except Exception:
        # Such as a KeyError of one that looks up the names of modules.
        return None
    return found


def map_all(f: Callable[..., Any], params: trees.Params, state: Any, *rest: Any) -> Any:
    """Applies `f` to each slot; everything else comes from the last tree."""
    is_slot = functools.partial(_mirrors, params)

    def each(*nodes: Any) -> Any:
        return f(*nodes) if is_slot(nodes[0]) else nodes[-1]

    return jax.tree.map(each, state, *rest, is_leaf=is_slot)


def names_by_parameter(state: Any, params: trees.Params) -> dict[str, list[str]]:
    """The names of what optax's state holds for each parameter, by the parameter's path."""
    names: dict[str, list[str]] = {path: [] for path in trees.leaves_by_path(params)}
    structure: Any = jax.tree.structure(params)
    for slot_path, slot in find(state, params):
        # An entry is a tree of its own: of no array where it is hidden, of several in some transformations.
        entries = structure.flatten_up_to(slot)
        for param, entry in zip(names, entries, strict=True):
            for path, _ in jax.tree_util.tree_leaves_with_path(entry):
                names[param].append(join(slot_path, param, trees.path_name(path)))
    return names


def hidden(params: trees.Params, shown: set[str]) -> tuple[Any, Any]:
    """Two functions: one hides the entries of all parameters but some, one puts the old ones back.

    optax skips what is an `optax.MaskedNode`: it is how `optax.masked` leaves entries out.
    """
    is_shown = trees.rebuild(params, {path: path in shown for path in trees.leaves_by_path(params)})

    def hide(tree: Any) -> Any:
        return jax.tree.map(lambda keep, x: x if keep else optax.MaskedNode(), is_shown, tree)

    def restore(old: Any, new: Any) -> Any:
        return jax.tree.map(lambda keep, x, y: y if keep else x, is_shown, old, new)

    return hide, restore


def join(*parts: str) -> str:
    """The path of these paths one after the other; empty ones do not count."""
    return "/".join(filter(None, parts))


def missing_error(rule: str, path: str) -> ValueError:
    """The error for a parameter that has a gradient, and had none when the state of a rule was made."""
    return ValueError(
        f"The parameter '{path}' has a gradient, but {rule} has no slot for it: its gradient was None "
        "when the state was made, so that it was not to be trained. If it is, name it in var_list while "
        "hk.running_init() too, and make the state anew; if not, give it the gradient None."
    )
