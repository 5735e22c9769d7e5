"""The slots in an optax state: where they are, and what parameter each array of them is of."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from xshard.optimizers import trees


def _mirrors(node: Any, params: trees.Params) -> bool:
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
    mirrors = functools.partial(_mirrors, params=params)
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=mirrors)
    return [(trees.path_name(path), node) for path, node in nodes if mirrors(node)]


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
    mirrors = functools.partial(_mirrors, params=params)
    return jax.tree.map(
        lambda *nodes: f(*nodes) if mirrors(nodes[0]) else nodes[-1], state, *rest, is_leaf=mirrors
    )


def names_by_parameter(state: Any, params: trees.Params) -> dict[str, list[str]]:
    """The names of what optax's state holds for each parameter, by the parameter's path."""
    names: dict[str, list[str]] = {path: [] for path in trees.leaves_by_path(params)}

    def note(prefix: str, path: tuple[Any, ...], entry: Any) -> None:
        param = trees.path_name(path)
        for rest, _ in jax.tree_util.tree_leaves_with_path(entry):
            names[param].append(join(prefix, param, trees.path_name(rest)))

    for prefix, slot in find(state, params):
        jax.tree_util.tree_map_with_path(
            lambda path, _, entry, prefix=prefix: note(prefix, path, entry), params, slot
        )
    return names


def hidden(params: trees.Params, shown: set[str]) -> tuple[Any, Any]:
    """Two functions: one hides the entries of all parameters but some, one puts the old ones back.

    optax skips what is an `optax.MaskedNode`: it is how `optax.masked` leaves entries out.
    """
    by_path = jax.tree_util.tree_map_with_path

    def hide(tree: Any) -> Any:
        return by_path(
            lambda p, _, x: x if trees.path_name(p) in shown else optax.MaskedNode(), params, tree
        )

    def restore(old: Any, new: Any) -> Any:
        return by_path(lambda p, _, o, n: n if trees.path_name(p) in shown else o, params, old, new)

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
