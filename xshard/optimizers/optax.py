"""Any optax transformation as an `Optimizer`."""

import re
import traceback
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from jax import lax

from xshard.optimizers import base, trees
from xshard.optimizers import slots as slots_lib


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
        # Their paths; None: no update has shown them.
        self._known_slots: list[str] | None = None

    def update(self, grads: trees.Gradients, params: trees.Params) -> trees.Params:
        """Implements `Optimizer.update`: one update of the transformation.

        While `hk.running_init()` it makes slots for what has a gradient, and for nothing else.
        """
        wide = jax.tree.map(trees.widen, params)
        present = {path for path, grad in trees.leaves_by_path(grads).items() if grad is not None}
        shown, restored = slots_lib.hidden(params, present)
        if hk.running_init():
            self._make_state(shown(wide))
            return params
        old_state = self._get_state(present, wide)
        gradients = jax.tree.map(lambda g, p: g.astype(p.dtype), shown(grads), shown(wide))
        # optax mixes counts with floats, which JAX's strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = self.transformation.update(
                gradients, slots_lib.map_all(shown, params, old_state), shown(wide)
            )
        new = restored(wide, optax.apply_updates(shown(wide), updates))
        self._set_state(slots_lib.map_all(restored, params, old_state, state), old_state)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), new, params)

    def get_slot(self, var: str, name: str) -> Any:
        """Implements `Optimizer.get_slot`; where several slots share a name, give its path.

        A slot that is several arrays for each parameter has each at the parameter's path and its own.
        """
        found = [path for path in self._slot_paths() if f"/{path}".endswith(f"/{name}")]
        if name in found:
            found = [name]
        names = set(self._state_names())
        found = [path for path in found if slots_lib.join(path, var) in names]
        if len(found) > 1:
            raise ValueError(f"Several slots are named {name!r}; give the path of one: {found}.")
        return hk.get_state(slots_lib.join(found[0], var)) if found else None

    def get_slot_names(self) -> list[str]:
        """Implements `Optimizer.get_slot_names`; where several slots share a name, their paths."""
        paths = self._slot_paths()
        short = [path.rpartition("/")[2] for path in paths]
        pairs = zip(short, paths, strict=True)
        return sorted(name if short.count(name) == 1 else path for name, path in pairs)

    def _slot_paths(self) -> list[str]:
        """The paths, in optax's state, of the slots that the state has arrays of."""
        names = self._state_names()
        if self._known_slots is None and names:
            self._known_slots = slots_lib.of_any(self.transformation)
            if self._known_slots is None:
                raise ValueError(
                    f"The slots of {self.name} are known once it has updated in this step: how its "
                    "transformation begins depends on the parameters. Ask after apply_gradients."
                )
        begins = lambda path, name: not path or name.startswith(f"{path}/")
        known = self._known_slots or []
        return [path for path in known if any(begins(path, name) for name in names)]

    def _state_names(self) -> list[str]:
        return [name.removeprefix(f"{self.module_name}/") for name in self.state_dict()]

    def _make_state(self, params: trees.Params) -> None:
        with jax.numpy_dtype_promotion("standard"):
            state = self.transformation.init(params)
        self._known_slots = [path for path, _ in slots_lib.find(state, params)]
        self._check_update(params, state)
        jax.tree_util.tree_map_with_path(_make_leaf, state)

    def _check_update(self, params: trees.Params, state: Any) -> None:
        """Raises ValueError if an update takes more than gradients, state and parameters, or gives others."""
        is_lookahead = lambda node: isinstance(node, optax.LookaheadState)
        if any(map(is_lookahead, jax.tree.leaves(state, is_leaf=is_lookahead))):
            raise ValueError(
                f"{self.name} cannot use optax.lookahead, which takes optax.LookaheadParams for parameters. "
                "Use optax.contrib.schedule_free, or a MovingAverageOptimizer."
            )
        try:
            with jax.numpy_dtype_promotion("standard"):
                updates, _ = hk.eval_shape(self.transformation.update, params, state, params)
        except Exception as e:
            missing = _missing_arguments(e)
            if missing:
                raise ValueError(
                    f"{self.name} cannot use {missing[0]}: its update needs {missing[1]}, but a rule is given "
                    "gradients and parameters alone. Use a transformation that goes by these, such as "
                    "optax.adam, or optax.lbfgs with linesearch=None; or subclass Optimizer, and keep in its "
                    "compute_gradients what its update needs."
                ) from e
            # It may need what only a step has, such as a mapped axis; what else fails does so there.
            return
        wanted = trees.leaves_by_path(params)
        for path, update in trees.leaves_by_path(updates).items():
            if path in wanted and update.shape not in ((), wanted[path].shape):
                raise ValueError(
                    f"{self.name} cannot use its transformation: its update of '{path}' has the shape "
                    f"{update.shape}, and the parameter {wanted[path].shape}. One that takes gradients of "
                    "each example, as optax.contrib.dpsgd does, is not for gradients of a loss."
                )

    def _get_state(self, present: set[str], params: trees.Params) -> Any:
        """The state as optax has it, without the slots that were not made.

        Args:
          present: the paths of the parameters that have a gradient.
          params: the parameters.
        """
        shown, _ = slots_lib.hidden(params, self._trained(present, params))
        state = self._state_shapes(shown(params))
        slots = slots_lib.find(state, params)
        self._known_slots = [path for path, _ in slots]
        in_slots = {
            slots_lib.join(path, name)
            for path, slot in slots
            for name in trees.leaves_by_path(slot)
        }
        found = jax.tree_util.tree_map_with_path(
            lambda path, _: hk.get_state(trees.path_name(path)), state
        )
        shapes = trees.leaves_by_path(state)
        for name, leaf in trees.leaves_by_path(found).items():
            if name not in in_slots and leaf.shape != shapes[name].shape:
                raise ValueError(
                    f"The state '{name}' of {self.name} has the shape {leaf.shape}, and for the gradients "
                    f"of this step it would have {shapes[name].shape}: it is of all parameters together, as "
                    "that of optax.flatten is. Give a gradient to the same parameters in each step as when "
                    "the state was made, or use a transformation that keeps a slot for each parameter."
                )
        return found

    def _trained(self, present: set[str], params: trees.Params) -> set[str]:
        """The paths of the parameters whose slots are in the state, or that need none.

        Raises:
          ValueError: if a parameter has a gradient, and no slot was made for it.
        """
        made = set(self._state_names())
        needed = slots_lib.names_by_parameter(self._state_shapes(params), params)
        trained = {path for path, names in needed.items() if not names or made.intersection(names)}
        for path in sorted(present - trained):
            if not made:
                # Haiku says that there is no state.
                hk.get_state(needed[path][0])
            raise slots_lib.missing_error(self.name, path)
        return {path for path in trained if needed[path] or path in present}

    def _state_shapes(self, params: trees.Params) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return jax.eval_shape(self.transformation.init, params)

    def _set_state(self, state: Any, old_state: Any) -> None:
        new = trees.leaves_by_path(state)
        for name, old in trees.leaves_by_path(old_state).items():
            hk.set_state(name, _strong(new[name], old.dtype))


def is_transformation(x: Any) -> bool:
    """Returns whether `x` has the two functions of an optax transformation."""
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


def _make_leaf(path: tuple[Any, ...], leaf: Any) -> None:
    # A copy: transformations begin several slots with one array, or with a parameter, and what holds both
    # may be donated, which one buffer cannot be twice.
    leaf = jnp.array(_strong(leaf), copy=True)
    hk.get_state(trees.path_name(path), leaf.shape, leaf.dtype, lambda *_: leaf)


def _missing_arguments(e: Exception) -> tuple[str, str] | None:
    """The transformation, and what its update lacks, if that is why it has failed."""
    missing = re.search(r"([\w.<>]*update\w*)\(\) missing .* arguments?: (.*)", str(e))
    if isinstance(e, TypeError) and missing:
        return missing[1].partition(".")[0], missing[2]
    # Some have a default that they then refuse.
    missing = re.match(r"(\w+) must be provided", str(e))
    if isinstance(e, ValueError) and missing:
        *_, (frame, _) = traceback.walk_tb(e.__traceback__)
        return frame.f_code.co_qualname.partition(".")[0], f"'{missing[1]}'"
    return None


def _strong(x: Any, dtype: Any = None) -> jax.Array:
    """`x` with a strong type: a weak one makes jit compile the next step again."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return lax.convert_element_type(x, dtype or x.dtype)
