"""The state arrays of rules, and the slots in an optax state: their paths, and the
parameter of each of their arrays.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from xshard.optimizers import trees


def state_of(module: hk.Module) -> dict[str, Any]:
    """The current arrays of a module's state, by name without the module's."""
    arrays = module.state_dict()
    return {
        name.removeprefix(f"{module.module_name}/"): x for name, x in arrays.items()
    }


def _mirrors(params: trees.Params, node: Any) -> bool:
    """Returns whether a node of optax's state has one entry for each parameter, so that
    it is a slot.
    """
    if not isinstance(node, Mapping):
        return False
    try:
        jax.tree.map(lambda _, entry: None, params, node)
    except ValueError:
        return False
    return True


def create(name: str, first: jax.Array) -> None:
    """Creates a state array of the current module.

    It is a copy, because several slots may begin with one array or with a parameter,
    and a donated tree must not contain one buffer twice.
    """
    hk.get_state(name, first.shape, first.dtype, lambda *_: jnp.array(first, copy=True))


def find(state: Any, params: trees.Params) -> list[tuple[str, Any]]:
    """The slots in optax's state, by path."""
    return _find(state, functools.partial(_mirrors, params))


def _find(state: Any, is_slot: Callable[[Any], bool]) -> list[tuple[str, Any]]:
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_slot)
    return [(trees.path_name(path), node) for path, node in nodes if is_slot(node)]


def of_any(transformation: Any) -> list[str] | None:
    """The paths of the slots in a transformation's state, for any parameters; None if
    they depend on these.
    """
    found: list[str] = []

    def init(params: Any) -> tuple[()]:
        with jax.numpy_dtype_promotion("standard"):
            state = jax.eval_shape(lambda: transformation.init(params))
        slots = _find(state, lambda node: isinstance(node, type(params)))
        found.extend(path for path, _ in slots)
        return ()

    # optax calls `init` with a placeholder for any tree of parameters. There is no
    # state to map here.
    try:
        optax.tree_utils.tree_map_params(init, lambda x: x, ())
    except Exception:
        # Any error may occur, such as a KeyError in a transformation that looks up
        # modules by name.
        return None
    return found


def map_all(f: Callable[..., Any], params: trees.Params, state: Any, *rest: Any) -> Any:
    """Applies `f` to each slot; all other nodes come from the last tree."""
    is_slot = functools.partial(_mirrors, params)

    def each(*nodes: Any) -> Any:
        return f(*nodes) if is_slot(nodes[0]) else nodes[-1]

    return jax.tree.map(each, state, *rest, is_leaf=is_slot)


def names_by_parameter(state: Any, params: trees.Params) -> dict[str, list[str]]:
    """The names of the slot arrays of each parameter in optax's state, by the
    parameter's path.
    """
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


def hidden(params: trees.Params, shown: set[str]) -> tuple[Any, Any]:
    """Two functions: `hide` masks the entries of all parameters but `shown`; `restore`
    puts the old entries back.

    optax skips each entry that is an `optax.MaskedNode`, which is also how
    `optax.masked` leaves entries out.
    """
    is_shown = trees.rebuild(
        params, {path: path in shown for path in trees.leaves_by_path(params)}
    )

    def hide(tree: Any) -> Any:
        return jax.tree.map(
            lambda keep, x: x if keep else optax.MaskedNode(), is_shown, tree
        )

    def restore(old: Any, new: Any) -> Any:
        return jax.tree.map(lambda keep, x, y: y if keep else x, is_shown, old, new)

    return hide, restore


def missing_error(rule: str, path: str) -> ValueError:
    """The error for a parameter that has a gradient now, but had none when the rule's
    state was created.
    """
    return ValueError(
        f"The parameter '{path}' has a gradient, but {rule} has no slot for it: its gradient was None "
        "when the state was created. To train it, name it in var_list while hk.running_init() too, and "
        "create the state anew. Otherwise give it the gradient None."
    )
