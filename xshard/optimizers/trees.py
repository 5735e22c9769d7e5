"""Haiku trees of parameters and gradients: paths, selection, and checks.

A path names a leaf, such as 'mlp/linear_0/w', in the names of slots, in checkpoints and
in error messages.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Params = Mapping[str, Any]
Gradients = Mapping[str, Any]
VarList = Sequence[str] | Callable[[str, str], bool] | None


def widen(x: Any) -> jax.Array:
    """Returns `x`, in float32 if its type is narrower, to scale and sum it safely."""
    x = jnp.asarray(x)
    # Decided by size: bfloat16, float16 and all 8-bit types are narrower. float64 and
    # complex types stay.
    if x.dtype.itemsize < 4:
        return x.astype(jnp.float32)
    return x


def strong(x: Any, dtype: Any = None) -> jax.Array:
    """Returns an array with a strong type.

    A weak type, as a Python number has, adapts to other operands. A weakly typed state
    would make jit compile the second step again.

    Args:
      x: an array or a number.
      dtype: the type; x's own by default.
    """
    x = jnp.asarray(x)
    # The type of a random key is always strong.
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return jax.lax.convert_element_type(x, dtype or x.dtype)


def path_name(path: tuple[Any, ...]) -> str:
    """Returns a key path as text, such as 'mlp/linear_0/w'."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def join(*paths: str) -> str:
    """Joins paths with slashes; empty ones are skipped."""
    return "/".join(path for path in paths if path)


def endings(path: str) -> list[str]:
    """Returns all suffixes of a path, the longest first: 'a/b' has 'a/b' and 'b'."""
    words = path.split("/")
    return ["/".join(words[i:]) for i in range(len(words))]


def plain(tree: Any) -> Any:
    """Returns the tree with a dict for each mapping.

    JAX may not know the keys of other mappings, such as Haiku's FlatMap. None stays a
    leaf.
    """
    if isinstance(tree, Mapping):
        return {key: plain(node) for key, node in tree.items()}

    def is_leaf(node: Any) -> bool:
        return node is None or isinstance(node, Mapping)

    def plain_node(node: Any) -> Any:
        # A mapping inside another container, such as a list.
        if isinstance(node, Mapping):
            return plain(node)
        return node

    return jax.tree.map(plain_node, tree, is_leaf=is_leaf)


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by their paths; None is a leaf."""
    return {path_name(path): leaf for path, leaf in _leaves_with_path(tree)}


def present(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree that are not None, by their paths.

    Those of a tree of gradients belong to the trained parameters.
    """
    leaves = leaves_by_path(tree)
    return {path: leaf for path, leaf in leaves.items() if leaf is not None}


def rebuild(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """Returns a tree with the structure of another, and other leaves.

    Args:
      tree: the other tree.
      leaves: the leaves by path; None for a path that is not among them.
    """
    old, structure = jax.tree.flatten(tree, is_leaf=_is_none)
    # The order of leaves is that of the tree's own containers, which may differ from
    # that of the dicts of `leaves_by_path`. Numbered leaves show which path is where.
    numbers = leaves_by_path(jax.tree.unflatten(structure, range(len(old))))
    new: list[Any] = [None] * len(old)
    for path, number in numbers.items():
        new[number] = leaves.get(path)
    return jax.tree.unflatten(structure, new)


def replace(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """Returns the tree, with other leaves at some paths.

    Args:
      tree: the tree.
      leaves: the new leaves by path. One that is None replaces nothing.
    """
    new = leaves_by_path(tree)
    for path, leaf in leaves.items():
        if leaf is not None:
            new[path] = leaf
    return rebuild(tree, new)


def sum_of_squares(tree: Any) -> jax.Array:
    """Returns the sum of the squares of all arrays' elements, in float32 or wider.

    None leaves are ignored. A complex element counts with its magnitude.
    """
    squares = [jnp.sum(jnp.square(jnp.abs(widen(x)))) for x in jax.tree.leaves(tree)]
    return sum(squares, start=jnp.zeros((), jnp.float32))


def sum_of_squares_if(
    is_wanted: Any, tree: Any, divisor: jax.Array | None = None
) -> jax.Array:
    """Returns `sum_of_squares`; 0, without reading, if a boolean scalar is False.

    Args:
      is_wanted: the boolean scalar.
      tree: the arrays.
      divisor: a scalar that divides each element before it is squared.
    """

    def of(tree: Any) -> jax.Array:
        if divisor is not None:
            tree = jax.tree.map(lambda x: widen(x) / divisor, tree)
        return sum_of_squares(tree)

    def zero(tree: Any) -> jax.Array:
        # It has the type of the sum, and varies over the same mapped axes.
        some = jax.tree.map(lambda x: jnp.ravel(x)[:1], tree)
        return jnp.where(jnp.zeros((), bool), of(some), 0)

    return lax.cond(is_wanted, of, zero, tree)


def as_arrays(params: Params) -> Params:
    """Returns the parameters in dicts, with Python numbers converted to arrays."""

    def to_array(x: Any) -> Any:
        if isinstance(x, float | complex):
            return jnp.asarray(x, jnp.result_type(x))
        return x

    return jax.tree.map(to_array, plain(params))


def conjugate(grads: Gradients, params: Params) -> Gradients:
    """Returns directions of steepest ascent, in dicts: complex gradients conjugated.

    `jax.grad` returns dL/dx - i dL/dy for a parameter x + i y. Update rules, including
    optax's, descend along dL/dx + i dL/dy.
    """
    directions = leaves_by_path(grads)
    for path, grad in directions.items():
        if grad is not None and jnp.iscomplexobj(grad):
            directions[path] = jnp.conj(grad)
    return rebuild(plain(params), directions)


def check_params(params: Params) -> None:
    """Raises ValueError unless `params` is a Haiku tree of floating-point arrays.

    Their paths must be distinct.
    """
    if not isinstance(params, Mapping) or not params:
        raise ValueError(
            "params must be a Haiku tree {module: {name: array}} with at least one "
            f"array; received {type(params).__name__}: {str(params)[:80]}."
        )
    _check_paths(params, "parameters")
    for path, leaf in leaves_by_path(params).items():
        dtype = None if leaf is None else jnp.result_type(leaf)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(
                f"The parameter '{path}' is {dtype}; parameters must be floating-point "
                "arrays. Keep counters and tables in Haiku state."
            )


def check_gradients(grads: Gradients, params: Params) -> None:
    """Raises ValueError unless `grads` has the structure and shapes of `params`.

    Gradients may be None, but not all of them.
    """
    _check_paths(grads, "gradients")
    param_leaves = leaves_by_path(params)
    paths = leaves_by_path(grads).keys()
    missing = sorted(param_leaves.keys() - paths)
    unknown = sorted(paths - param_leaves.keys())
    if missing or unknown:
        raise ValueError(
            "The gradients must have the structure of the parameters, with None where "
            f"a parameter is not trained; missing: {missing[:5] or 'none'}, unknown: "
            f"{unknown[:5] or 'none'}."
        )
    trained = present(grads)
    for path, grad in trained.items():
        _check_gradient(path, grad, param_leaves[path])
    if not trained:
        raise ValueError(
            f"There is no gradient for any of {sorted(param_leaves)[:5]}: all are "
            "None. Check var_list, and that the loss depends on the parameters that it "
            "is called with."
        )


def _check_gradient(path: str, grad: Any, param: Any) -> None:
    if jnp.shape(grad) != jnp.shape(param):
        raise ValueError(
            f"The gradient of '{path}' has shape {jnp.shape(grad)} and its parameter "
            f"{jnp.shape(param)}; they must be equal."
        )
    if jnp.iscomplexobj(grad) and not jnp.iscomplexobj(param):
        raise ValueError(
            f"The gradient of '{path}' is {jnp.result_type(grad)} and its parameter "
            f"{jnp.result_type(param)}: its imaginary part would be lost. Take its "
            "real part, or make the parameter complex."
        )


def select(params: Params, var_list: VarList) -> dict[str, Any]:
    """Returns the parameters that `var_list` selects, by path.

    Args:
      params: a Haiku tree.
      var_list: paths such as 'mlp/linear_0/w', a predicate of module and name, or None
        for all.

    Raises:
      ValueError: if `var_list` is neither of these, names a path that is not in
        `params`, or selects nothing.
    """
    leaves = leaves_by_path(params)
    if var_list is None:
        return leaves
    if isinstance(var_list, str):
        raise ValueError(
            "var_list must be a sequence of names or a predicate; received "
            f"{var_list!r}."
        )
    if callable(var_list):
        chosen = set()
        for path in leaves:
            # A module's name may contain slashes, a parameter's does not, so the last
            # slash separates them.
            module, _, name = path.rpartition("/")
            if var_list(module, name):
                chosen.add(path)
    else:
        chosen = set(var_list)
    unknown = sorted(str(path) for path in chosen if path not in leaves)
    if unknown:
        raise ValueError(
            f"var_list names {unknown[0]!r}, which is not a parameter; near it: "
            f"{near(unknown[0], leaves)}."
        )
    if not chosen:
        raise ValueError(
            f"var_list selects none of {sorted(leaves)[:5]}; select at least one."
        )
    return {path: leaf for path, leaf in leaves.items() if path in chosen}


def near(name: str, leaves: Mapping[str, Any]) -> list[str]:
    """Returns the paths most like a name, or some paths if none is like it."""
    similar = difflib.get_close_matches(name, leaves, cutoff=0.3)
    return similar or sorted(leaves)[:3]


def _is_none(x: Any) -> bool:
    return x is None


def _leaves_with_path(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    return jax.tree_util.tree_leaves_with_path(plain(tree), is_leaf=_is_none)


def _check_paths(tree: Any, of_what: str) -> None:
    """Raises ValueError if two leaves have one path.

    'c' in module 'a/b' and 'b/c' in module 'a' do.
    """
    seen: dict[str, str] = {}
    for path, _ in _leaves_with_path(tree):
        name = path_name(path)
        keys = jax.tree_util.keystr(path)
        if name in seen:
            raise ValueError(
                f"Two {of_what} have the path '{name}': {seen[name]} and {keys}. Slots "
                "and checkpoints name them by their paths, so each must have its own: "
                "rename a module or a parameter."
            )
        seen[name] = keys
