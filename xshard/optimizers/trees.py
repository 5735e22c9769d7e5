"""Haiku trees of parameters and gradients: paths, selections, and checks that name the leaf."""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xshard import errors

Params = Mapping[str, Any]
Gradients = Mapping[str, Any]
VarList = Sequence[str] | Callable[[str, str], bool] | None


def widen(x: Any) -> jax.Array:
    """`x` in float32 if its type is narrower, so that scaling and summing lose nothing."""
    x = jnp.asarray(x)
    # By its size, since bfloat16, float16 and all of 8 bits are narrower; float64 and complex numbers stay.
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def path_name(path: tuple[Any, ...]) -> str:
    """A key path as text, such as 'mlp/linear_0/w'."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def endings(path: str) -> list[str]:
    """The paths that a path ends in, the longest first: 'a/b' ends in 'a/b' and 'b'."""
    words = path.split("/")
    return ["/".join(words[i:]) for i in range(len(words))]


def plain(tree: Any) -> Any:
    """The tree with a dict for each mapping: of others, such as Haiku's FlatMap, JAX may not know the keys."""
    if isinstance(tree, Mapping):
        return {key: plain(node) for key, node in tree.items()}
    is_mapping = lambda node: isinstance(node, Mapping)
    # None stays a leaf, and mappings within other containers, such as a list, are made plain, too.
    return jax.tree.map(
        lambda node: plain(node) if is_mapping(node) else node,
        tree,
        is_leaf=lambda node: node is None or is_mapping(node),
    )


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths; None is a leaf."""
    return {path_name(path): leaf for path, leaf in _leaves_with_path(tree)}


def present(tree: Any) -> dict[str, Any]:
    """The leaves of a tree that are not None, such as the gradients of what is trained, by their paths."""
    return {path: leaf for path, leaf in leaves_by_path(tree).items() if leaf is not None}


def rebuild(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """A tree with the structure of another, and its leaves given by path; None where there is none."""
    old, structure = jax.tree.flatten(tree, is_leaf=_is_absent)
    # A mapping of another kind may order its leaves otherwise than a dict: each leaf's number tells its place.
    places = leaves_by_path(jax.tree.unflatten(structure, range(len(old))))
    new: list[Any] = [None] * len(old)
    for path, place in places.items():
        new[place] = leaves.get(path)
    return jax.tree.unflatten(structure, new)


def replace(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """The tree with the leaves that are given by path, and are not None, in place of its own."""
    new = leaves_by_path(tree)
    for path, leaf in leaves.items():
        if leaf is not None:
            new[path] = leaf
    return rebuild(tree, new)


def after(x: jax.Array, tree: Any) -> Any:
    """The tree, which is not there before the numbers of `x` are.

    XLA for CPUs has dropped an `optimization_barrier` by the time that it decides what to copy. This is an order by data:
    that a number is finite is always true, and XLA does not know it of a sum.
    """
    is_there = jnp.isfinite(jnp.sum(x.astype(jnp.float32)))
    return jax.tree.map(lambda y: jnp.where(is_there, y, jnp.zeros_like(y)), tree)


def sum_of_squares(tree: Any) -> jax.Array:
    """The sum of the squares of all elements of all arrays, in float32 or wider; what is None does not count."""
    squares = [jnp.sum(jnp.square(jnp.abs(widen(x)))) for x in jax.tree.leaves(tree)]
    return sum(squares, start=jnp.zeros((), jnp.float32))


def as_arrays(params: Params) -> Params:
    """The parameters in dicts, with an array for a number of Python's."""

    def to_array(x: Any) -> Any:
        return jnp.asarray(x, jnp.result_type(x)) if isinstance(x, float | complex) else x

    return jax.tree.map(to_array, plain(params))


def steepest(grads: Gradients, params: Params) -> Gradients:
    """The directions in which a loss grows most, in dicts: of a complex parameter the conjugate of its gradient.

    `jax.grad` gives dL/dx - i dL/dy for a parameter x + i y. Update rules, optax's among them, go against
    dL/dx + i dL/dy.
    """
    directions = leaves_by_path(grads)
    for path, grad in directions.items():
        if grad is not None and jnp.iscomplexobj(grad):
            directions[path] = jnp.conj(grad)
    return rebuild(plain(params), directions)


def check_params(params: Params) -> None:
    """Raises ValueError unless `params` is a Haiku tree of floating-point arrays, each of a path of its own."""
    if not isinstance(params, Mapping) or not params:
        raise ValueError(
            "params must be a Haiku tree {module: {name: array}} with at least one array; received "
            f"{type(params).__name__}: {str(params)[:80]}."
        )
    _check_paths(params, "parameters")
    for path, leaf in leaves_by_path(params).items():
        dtype = None if leaf is None else jnp.result_type(leaf)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(
                f"The parameter '{path}' is {dtype}; parameters must be floating-point arrays. Keep "
                "counters and tables in Haiku state."
            )


def check_gradients(grads: Gradients, params: Params) -> None:
    """Raises ValueError unless `grads` has the structure and shapes of `params`; None is allowed."""
    _check_paths(grads, "gradients")
    wanted = leaves_by_path(params)
    paths = leaves_by_path(grads).keys()
    missing = sorted(wanted.keys() - paths)
    unknown = sorted(paths - wanted.keys())
    if missing or unknown:
        raise ValueError(
            "The gradients must have the structure of the parameters, with None where a parameter is "
            f"not trained; missing: {missing[:5] or 'none'}, unknown: {unknown[:5] or 'none'}."
        )
    trained = present(grads)
    for path, grad in trained.items():
        _check_gradient(path, grad, wanted[path])
    if not trained:
        raise ValueError(
            f"There is no gradient for any of {sorted(wanted)[:5]}: all are None. Check var_list, and that the "
            "loss depends on the parameters that it is called with."
        )


def _check_gradient(path: str, grad: Any, param: Any) -> None:
    if jnp.shape(grad) != jnp.shape(param):
        raise ValueError(
            f"The gradient of '{path}' has shape {jnp.shape(grad)} and its parameter {jnp.shape(param)}; they "
            "must be equal."
        )
    if jnp.iscomplexobj(grad) and not jnp.iscomplexobj(param):
        raise ValueError(
            f"The gradient of '{path}' is {jnp.result_type(grad)} and its parameter {jnp.result_type(param)}: "
            "its imaginary part would be lost. Take its real part, or make the parameter complex."
        )


def select(params: Params, var_list: VarList) -> dict[str, Any]:
    """The parameters that `var_list` names, by path.

    Args:
      params: a Haiku tree.
      var_list: paths such as 'mlp/linear_0/w', a predicate of module and name, or None for all.
    """
    leaves = leaves_by_path(params)
    if var_list is None:
        return leaves
    if isinstance(var_list, str):
        raise ValueError(
            f"var_list must be a sequence of names or a predicate; received {var_list!r}."
        )
    if callable(var_list):
        # A module's name may hold slashes, a parameter's does not.
        chosen = set()
        for path in leaves:
            module, _, name = path.rpartition("/")
            if var_list(module, name):
                chosen.add(path)
    else:
        chosen = set(var_list)
    unknown = sorted(str(path) for path in chosen if path not in leaves)
    if unknown:
        near = difflib.get_close_matches(unknown[0], leaves, cutoff=0.3)
        near = near or sorted(leaves)[:3]
        raise ValueError(f"var_list names {unknown[0]!r}, which is no parameter; near it: {near}.")
    if not chosen:
        raise ValueError(f"var_list selects none of {sorted(leaves)[:5]}; select at least one.")
    return {path: leaf for path, leaf in leaves.items() if path in chosen}


def unfrozen(params: Params, pattern: str) -> list[str] | None:
    """The paths in which a regular expression is not found, as `var_list`; None, which is all, without an expression.

    Args:
      params: a Haiku tree.
      pattern: the expression; empty: none.

    Raises:
      UserError: if it is no expression, or is found in no path, or in all.
    """
    if not pattern:
        return None
    leaves = leaves_by_path(params)
    try:
        others = [path for path in leaves if not re.search(pattern, path)]
    except re.error as e:
        raise errors.UserError(f"frozen={pattern!r} is no regular expression: {e}.") from e
    if len(others) == len(leaves):
        near = difflib.get_close_matches(pattern.strip("^$/"), leaves, cutoff=0.3)
        raise errors.UserError(
            f"frozen={pattern!r} is found in no parameter's path; near it: {near or sorted(leaves)[:3]}."
        )
    if not others:
        raise errors.UserError(
            f"frozen={pattern!r} is found in the paths of all parameters, such as {sorted(leaves)[:3]}: leave at least "
            "one to be trained."
        )
    return others


def _is_absent(x: Any) -> bool:
    return x is None


def _leaves_with_path(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    return jax.tree_util.tree_leaves_with_path(plain(tree), is_leaf=_is_absent)


def _check_paths(tree: Any, of_what: str) -> None:
    """Raises ValueError if two leaves have one path, as 'a/b' of 'c' and 'a' of 'b/c' have."""
    seen: dict[str, str] = {}
    for path, _ in _leaves_with_path(tree):
        name, keys = path_name(path), jax.tree_util.keystr(path)
        if name in seen:
            raise ValueError(
                f"Two {of_what} have the path '{name}': {seen[name]} and {keys}. Slots and checkpoints name "
                "them by their paths, so each must have its own: rename a module or a parameter."
            )
        seen[name] = keys
