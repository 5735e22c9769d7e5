"""Any optax transformation as an `Optimizer`."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from jax import lax

from xshard.optimizers import base, elementwise, shards, trees
from xshard.optimizers import layouts as layouts_lib


class OptaxOptimizer(base.Optimizer):
    """The updates of an optax transformation, its state as Haiku state under stable names.

    A state's name is its path in optax's state, such as '0/mu/mlp/linear_0/w'. Parameters narrower
    than float32 are updated in float32 and rounded once; their slots are float32 too, unless the
    transformation asks for another type itself (such as `mu_dtype`).

    Of a sharded update it sees whole arrays, of which each replica computes its part: a transformation
    may go element by element, and take sums and norms of whole arrays. Others are refused.

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

    takes_parts = True

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
        old_state = self._get_state(wide if self.given is None else self.given.whole_shapes(wide))
        if hk.running_init():
            return params
        shown, restored = _absent_hidden(grads, params)
        gradients = jax.tree.map(lambda g, p: g.astype(p.dtype), shown(grads), shown(wide))
        # optax mixes counts with floats, which JAX's strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = self._transform(
                gradients, _map_slots(shown, params, old_state), shown(wide), self.given
            )
        new = restored(wide, optax.apply_updates(shown(wide), updates))
        self._set_state(_map_slots(restored, params, old_state, state), old_state)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), new, params)

    def _transform(
        self, grads: Any, state: Any, params: Any, partition: shards.Partition | None
    ) -> tuple[Any, Any]:
        """The transformation's update; of parts, if the leaves are parts of `partition`."""
        if partition is None:
            return self.transformation.update(grads, state, params)
        slots = self._slot_layouts(partition)
        _check_slots(state, slots)
        in_slot = lambda f, tree: jax.tree_util.tree_map_with_path(
            lambda path, x: f(slots[name], x) if (name := trees.path_name(path)) in slots else x,
            tree,
        )
        of_param = functools.partial(partition.map, lambda layout, x: elementwise.part(layout, x))
        updates, state = elementwise.evaluate(
            self.transformation.update,
            (of_param(grads), in_slot(elementwise.part, state), of_param(params)),
            partition,
            f"The update of {self.name} ({type(self.transformation).__name__})",
        )
        own = lambda layout, x: elementwise.own(layout, x, partition.index)
        state = in_slot(own, state)
        for path, leaf in trees.leaves_by_path(state).items():
            if isinstance(leaf, elementwise.Part):
                raise ValueError(
                    f"{self.name} cannot be sharded: its state '{path}' is of the shape of "
                    f"'{leaf.layout.path}', but is no tree with an entry for each parameter, by which it "
                    "would be known as a slot."
                )
        return partition.map(own, updates), state

    def _slot_layouts(self, partition: shards.Partition) -> dict[str, layouts_lib.Layout]:
        """How the slots are cut: each as its parameter, if it has its shape."""
        params = partition.shapes
        with jax.numpy_dtype_promotion("standard"):
            state = jax.eval_shape(self.transformation.init, params)
        found: dict[str, layouts_lib.Layout] = {}
        for path, slot in _slots(state, params):
            for name, leaf in trees.leaves_by_path(slot).items():
                layout = partition.layouts.get(name)
                if layout and layout.dim is not None and leaf.shape == layout.shape:
                    found[f"{path}/{name}" if path else name] = layout
        return found

    def state_layouts(self, partition: shards.Partition) -> dict[str, layouts_lib.Layouts]:
        """As `Optimizer.state_layouts`: a slot of a parameter's shape is cut as its parameter is."""
        return {self.module_name: self._slot_layouts(partition)}

    def rehearse(self, params: trees.Params) -> None:
        """As `Optimizer.rehearse`: traces the update as it would go on one of two parts."""
        rehearsal = shards.Rehearsal(params)
        with jax.numpy_dtype_promotion("standard"):
            state = jax.eval_shape(self.transformation.init, rehearsal.shapes)
            slots = self._slot_layouts(rehearsal)
            parts = rehearsal.map(_part_shape, rehearsal.shapes)
            state = jax.tree_util.tree_map_with_path(
                lambda path, x: _part_shape(slots.get(trees.path_name(path)), x), state
            )
            update = functools.partial(self._transform, partition=rehearsal)
            jax.eval_shape(update, parts, state, parts)

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
        self._slot_prefixes = [path for path, _ in _slots(state, params)]
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


def _slots(state: Any, params: trees.Params) -> list[tuple[str, Any]]:
    """The slots in optax's state, by path."""
    mirrors = functools.partial(_mirrors, params=params)
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=mirrors)
    return [(trees.path_name(path), node) for path, node in nodes if mirrors(node)]


def _check_slots(state: Any, layouts: layouts_lib.Layouts) -> None:
    for path, leaf in trees.leaves_by_path(state).items():
        if path in layouts and leaf.shape != layouts[path].part_shape:
            raise ValueError(
                f"The slot '{path}' has the shape {leaf.shape}, and this replica's part of it would be "
                f"{layouts[path].part_shape}. The state of a sharded update is stored, and mapped over the "
                "replicas, as Optimizer.state_layouts says: docs/scale.md has an example."
            )


def _part_shape(layout: layouts_lib.Layout | None, x: Any) -> Any:
    if layout is None:
        return x
    return jax.ShapeDtypeStruct(layout.part_shape, x.dtype)


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
