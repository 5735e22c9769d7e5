"""Random keys and numbers of a first state that would be alike in all groups.

What an experiment draws from the key that `init` is given differs by group. A key that
the code brings itself does not: optax's `add_noise(..., key=0)` would give all groups
the same noise, and an ensemble of them would count one model several times.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xshard.optimizers import trees, varying

# Labels of the values of a program that creates a state: that a value depends on the
# group's number, that it depends on a random key, and that it depends on the plain
# numbers of a key, which `jax.random.PRNGKey` returns.
_OF_GROUP = "of the group"
_RANDOM = "random"
_PLAIN_KEY = "the numbers of a key"


def find(create: Callable[[Any], Any], numbers: Any) -> list[tuple[str, bool, bool]]:
    """Finds the random arrays of a first state that do not depend on the group.

    Args:
      create: takes the groups' numbers to the state of all groups, in which arrays that
        differ by group have a leading dimension of groups.
      numbers: the number of each group.

    Returns:
      For each array its path in the state; whether it is a random key, or the plain
      numbers of one; and whether the program shows that it is random. A constant of the
      code with the shape and the type of a key's plain numbers may be those.
    """
    program, shapes = jax.make_jaxpr(create, return_shape=True)(numbers)
    inputs = [varying.NONE.add_labels(_OF_GROUP)]
    results = varying.outputs(program.jaxpr, inputs, _label)
    found = []
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    for (path, x), variation in zip(leaves, results, strict=True):
        if _OF_GROUP in variation.labels:
            continue
        has_shape = _has_shape_of_key(x)
        is_key = _is_key(x) or (has_shape and _PLAIN_KEY in variation.labels)
        is_certain = is_key or _RANDOM in variation.labels
        if is_certain or has_shape:
            found.append((trees.path_name(path), is_key, is_certain))
    return found


def fold(key: jax.Array, numbers: Any) -> jax.Array:
    """Folds the number of each group into its key.

    Args:
      key: the keys of all groups, along the leading dimension, or their plain numbers.
      numbers: the number of each group.
    """
    keys = key if _is_key(key) else jax.random.wrap_key_data(key)
    fold_all = jax.vmap(jax.random.fold_in, (0, None))
    folded = jax.vmap(fold_all)(keys.reshape(len(numbers), -1), numbers)
    folded = folded.reshape(keys.shape)
    return folded if _is_key(key) else jax.random.key_data(folded)


def equal_in_groups(keys: Any) -> jax.Array:
    """Returns whether all groups hold the same keys, or plain numbers of them.

    Args:
      keys: the keys of all groups, along the leading dimension.
    """
    numbers = jax.random.key_data(keys) if _is_key(keys) else keys
    return jnp.all(numbers == numbers[:1])


def _label(eqn: Any, inputs: list[varying.Variation]) -> list[varying.Variation] | None:
    name = eqn.primitive.name
    if not name.startswith("random_"):
        return None
    labels = [_RANDOM]
    if name == "random_unwrap":
        labels.append(_PLAIN_KEY)
    return [x.add_labels(*labels) for x in varying.of_equation(eqn, inputs)]


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _has_shape_of_key(x: Any) -> bool:
    """Returns whether an array could be the plain numbers of keys, by its shape."""
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    num_dims = len(key.shape)
    # The first dimension is that of groups.
    return x.dtype == key.dtype and x.shape[1:][-num_dims:] == key.shape
