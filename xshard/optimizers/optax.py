"""Any optax transformation as an `Optimizer`."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from jax import lax

from xshard.optimizers import base, trees


class OptaxOptimizer(base.Optimizer):
    """The updates of an optax transformation, its state as Haiku state under stable names.

    A state's name is its path in optax's state, such as '0/mu/mlp/linear_0/w'. Parameters narrower
    than float32 are updated in float32 and rounded once; their slots are float32 too, unless the
    transformation asks for another type itself (such as `mu_dtype`).

    >>> def step(params, x):
    ...     opt = OptaxOptimizer(optax.adam(0.1), name='adam')
    ...     return opt.minimize(lambda p: jnp.sum((p['linear']['w'] - x) ** 2), params)
    >>> step = hk.transform_with_state(step)
    >>> params, x = {'linear': {'w': jnp.zeros(2)}}, jnp.ones(2)
    >>> _, state = step.init(None, params, x)
    >>> sorted(state['adam'])
    ['0/count', '0/mu/linear/w', '0/nu/linear/w']
    >>> (loss, params), state = step.apply({}, state, None, params, x)
    >>> print(loss, params['linear']['w'].round(3))
    2.0 [0.1 0.1]
    """

    def __init__(self, transformation: Any, name: str | None = None):
        """Wraps a transformation.

        Args:
          transformation: an `optax.GradientTransformation`, or an object with its two functions
            `init(params)` and `update(grads, state, params)`, such as `optax.MultiSteps`.
          name: the module's name, which begins the names of its state.

        Raises:
          ValueError: if it is neither.
        """
        if not is_transformation(transformation):
            raise ValueError(
                "transformation must have init(params) and update(grads, state, params), as optax's "
                f"have; received {transformation!r}."
            )
        super().__init__(name=name)
        self.transformation = transformation
        self._slot_prefixes: list[str] = []

    def update(self, grads: trees.Gradients, params: trees.Params) -> trees.Params:
        """As `Optimizer.update`: one update of the transformation."""
        wide = jax.tree.map(trees.widen, params)
        old_state = self._get_state(wide)
        if hk.running_init():
            return params
        shown, restored = _absent_hidden(grads, params)
        gradients = jax.tree.map(lambda g, p: g.astype(p.dtype), shown(grads), shown(wide))
        # optax mixes counts with floats, which JAX's strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = self.transformation.update(
                gradients, _map_slots(shown, params, old_state), shown(wide)
            )
        new = restored(wide, optax.apply_updates(shown(wide), updates))
        self._set_state(_map_slots(restored, params, old_state, state), old_state)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), new, params)

    def get_slot(self, var: str, name: str) -> Any:
        """As `Optimizer.get_slot`; where several slots share a name, give its path."""
        wanted = "/".join(filter(None, (name, var)))
        found = [key for key in self._state_names() if f"/{key}".endswith(f"/{wanted}")]
        if len(found) > 1:
            paths = sorted(key.removesuffix(f"/{var}") for key in found)
            raise ValueError(f"Several slots are named {name!r}; give the path of one: {paths}.")
        return hk.get_state(found[0]) if found else None

    def get_slot_names(self) -> list[str]:
        """As `Optimizer.get_slot_names`; where several slots share a name, their paths."""
        short = [prefix.rpartition("/")[2] for prefix in self._slot_prefixes]
        pairs = zip(short, self._slot_prefixes, strict=True)
        return sorted(name if short.count(name) == 1 else prefix for name, prefix in pairs)

    def _state_names(self) -> list[str]:
        return [name.removeprefix(f"{self.module_name}/") for name in self.state_dict()]

    def _get_state(self, params: trees.Params) -> Any:
        init = self.transformation.init
        with jax.numpy_dtype_promotion("standard"):
            state = init(params) if hk.running_init() else jax.eval_shape(init, params)
        mirrors = functools.partial(_mirrors, params=params)
        nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=mirrors)
        self._slot_prefixes = [trees.path_name(path) for path, node in nodes if mirrors(node)]
        return jax.tree_util.tree_map_with_path(_get_leaf, state)

    def _set_state(self, state: Any, old_state: Any) -> None:
        new = trees.leaves_by_path(state)
        for name, old in trees.leaves_by_path(old_state).items():
            hk.set_state(name, _strong(new[name], old.dtype))


def is_transformation(x: Any) -> bool:
    """Whether `x` has the two functions of an optax transformation."""
    return callable(getattr(x, "init", None)) and callable(getattr(x, "update", None))


def as_optimizer(opt: Any) -> base.Optimizer:
    """`opt` itself, or an `OptaxOptimizer` of it; ValueError if it is neither."""
    if isinstance(opt, base.Optimizer):
        return opt
    if isinstance(opt, type) or not is_transformation(opt):
        raise ValueError(
            "opt must be an xshard Optimizer or an optax transformation, such as optax.adam(1e-3); "
            f"received {opt!r}."
        )
    return OptaxOptimizer(opt)


def _get_leaf(path: tuple[Any, ...], leaf: Any) -> jax.Array:
    name = trees.path_name(path)
    if not hk.running_init():
        return hk.get_state(name)
    leaf = _strong(leaf)
    return hk.get_state(name, leaf.shape, leaf.dtype, lambda *_: leaf)


def _mirrors(node: Any, params: trees.Params) -> bool:
    """Whether a node of optax's state has one entry for each parameter, so that it is a slot."""
    if not isinstance(node, Mapping):
        return False
    try:
        jax.tree.map(lambda _, entry: None, params, node)
    except ValueError:
        return False
    return True


def _map_slots(f: Callable[..., Any], params: trees.Params, state: Any, *rest: Any) -> Any:
    """Applies `f` to each slot; everything else comes from the last tree."""
    mirrors = functools.partial(_mirrors, params=params)
    return jax.tree.map(
        lambda *nodes: f(*nodes) if mirrors(nodes[0]) else nodes[-1], state, *rest, is_leaf=mirrors
    )


def _absent_hidden(grads: trees.Gradients, params: trees.Params) -> tuple[Any, Any]:
    """Two functions: one hides the entries that have no gradient, one puts the old ones back.

    optax skips what is an `optax.MaskedNode`: it is how `optax.masked` leaves entries out.
    """
    absent = {path for path, grad in trees.leaves_by_path(grads).items() if grad is None}
    by_path = jax.tree_util.tree_map_with_path

    def hide(tree: Any) -> Any:
        return by_path(
            lambda p, _, x: optax.MaskedNode() if trees.path_name(p) in absent else x, params, tree
        )

    def restore(old: Any, new: Any) -> Any:
        return by_path(
            lambda p, _, o, n: o if trees.path_name(p) in absent else n, params, old, new
        )

    return hide, restore


def _strong(x: Any, dtype: Any = None) -> jax.Array:
    """`x` with a strong type: a weak one makes jit compile the next step again."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return lax.convert_element_type(x, dtype or x.dtype)
