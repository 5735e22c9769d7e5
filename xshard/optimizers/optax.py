"""The adapter that makes any optax transformation an `Optimizer`."""

import collections
import inspect
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from xshard import errors
from xshard.optimizers import base, trees
from xshard.optimizers import slots as slots_lib

# The name of the factor on a rule's updates in its state.
_SCALE = "update_scale"

_OPTAX = os.path.dirname(optax.__file__) + os.sep


class OptaxOptimizer(base.Optimizer):
    """Applies an optax transformation, and keeps its state as Haiku state.

    The name of a state array is its path in optax's state, such as
    '0/mu/mlp/linear_0/w'. Checkpoints have it under this name. Parameters narrower than
    float32 are updated in float32 and rounded once. Their slots are float32 too, unless
    the transformation itself sets another type (such as with `mu_dtype`).

    A transformation whose update needs the loss, as `value=`, is given that of
    `compute_gradients`, unscaled: within a `CrossShardOptimizer` the mean over the
    replicas of a group, or their sum if that is what it reduces to. `optax.chain`,
    `optax.MultiSteps` and others pass it on to what is declared to take it, as an
    `optax.GradientTransformationExtraArgs`, and to nothing else.

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

    def __init__(
        self,
        transformation: Any,
        name: str | None = None,
        schedules: Mapping[str, Callable[[Any], Any]] | None = None,
        *,
        backs_off: bool = False,
        evaluation_params: Callable[[Any, Any], Any] | None = None,
    ):
        """Wraps a transformation.

        Args:
          transformation: an `optax.GradientTransformation`, or another object with its
            two functions `init(params)` and `update(grads, state, params)`, such as
            `optax.MultiSteps`.
          name: the module's name, which begins the names of its state.
          schedules: the functions of a step count that the transformation uses, by the
            names under which a run logs their values: `{'learning_rate': schedule}`. A
            run logs the values of `optax.inject_hyperparams` anyway.
          backs_off: whether to multiply updates by a state scalar, logged as
            'update_scale'. It is 1 at first. Each roll-back that passes over data
            multiplies it by the config's `roll_back.learning_rate_factor`.
          evaluation_params: takes optax's state and the parameters to those to
            evaluate, for a transformation that has others. With
            `optax.contrib.schedule_free` in it, they are its
            `schedule_free_eval_params`.

        Raises:
          ValueError: if `transformation` is neither of these, or a schedule is not a
            function.
        """
        if not is_transformation(transformation):
            raise ValueError(
                "transformation must have init(params) and update(grads, state, "
                f"params), as optax's have; received {transformation!r}."
            )
        super().__init__(name=name)
        if backs_off:
            transformation = with_back_off(transformation)
        self.transformation = transformation
        self.schedules = _check_schedules(schedules or {})
        self._takes_loss = bool(_accepted(self.transformation, {"value": None}))
        self._backs_off = backs_off
        self._evaluation_params = evaluation_params
        # The paths of the slots, or None as long as no update has determined them.
        self._known_slots: list[str] | None = None

    def reduce_loss(self, reduce: Callable[[jax.Array], jax.Array]) -> None:
        """Changes the loss that the update is given, if the transformation may use it.

        Args:
          reduce: computes the loss from that of `compute_gradients`.
        """
        if self._takes_loss and self._loss_value is not None:
            self._loss_value = reduce(self._loss_value)

    def update(self, grads: trees.Gradients, params: trees.Params) -> trees.Params:
        """Implements `Optimizer.update`: one update of the transformation.

        While `hk.running_init()` it creates slots for the parameters that have a
        gradient, and for no others.

        Raises:
          ValueError: if the transformation needs more than gradients, state, parameters
            and the loss, or this step's loss is not known; if it changes a shape, or
            which arrays its state has; and for a parameter with a gradient whose slots
            were never created.
        """
        wide = jax.tree.map(trees.widen, params)
        present = set(trees.present(grads))
        # The transformation sees only the parameters that have a gradient, so that a
        # norm over all of them leaves out the others.
        mask = slots_lib.Mask(params, present)
        trained = mask.hide(wide)
        if hk.running_init():
            self._create_state(trained)
            return params

        old_state = self._get_state(present, wide)
        state = slots_lib.map_slots(mask.hide, params, old_state)
        cast = lambda g, p: g.astype(p.dtype)
        gradients = jax.tree.map(cast, mask.hide(grads), trained)
        # optax mixes counts with floats, which JAX's strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            try:
                updates, state = self._call_update(
                    gradients, state, trained, self._loss_value
                )
            except Exception as e:
                if self._loss_value is not None:
                    raise
                if not self._needs_loss(gradients, state, trained):
                    raise
                raise errors.UserError(
                    f"The update of {self.name} needs the loss of this step: call "
                    "compute_gradients of the rule, or minimize, which keep it, before "
                    "apply_gradients."
                ) from e
        new = mask.restore(wide, optax.apply_updates(trained, updates))
        state = slots_lib.map_slots(mask.restore, params, old_state, state)
        self._set_state(state, old_state)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), new, params)

    def _call_update(self, grads: Any, state: Any, params: Any, loss: Any) -> Any:
        """Returns the transformation's own update, given the loss if it takes that."""
        arguments = {} if loss is None else {"value": loss}
        accepted = _accepted(self.transformation, arguments)
        return self.transformation.update(grads, state, params, **accepted)

    def _needs_loss(self, grads: Any, state: Any, params: Any) -> bool:
        """Returns whether an update that fails without a loss succeeds with one."""
        try:
            hk.eval_shape(self._call_update, grads, state, params, jnp.zeros(()))
        except Exception:
            return False
        return True

    def state(self, params: trees.Params) -> Any:
        """Returns the state in optax's structure, with tuples like `ScaleByAdamState`.

        Functions of optax that read a state, such as `optax.tree.get`, take it.

        Args:
          params: the parameters, or their shapes, that the state was created for. Those
            without slots, which are not trained, have `optax.MaskedNode` in their
            place.

        >>> def step(params):
        ...     opt = OptaxOptimizer(optax.adam(0.1), name='adam')
        ...     loss = lambda params: jnp.sum(params['linear']['w'] ** 2)
        ...     _, params = opt.minimize(loss, params)
        ...     return optax.tree.get(opt.state(params), 'count')
        >>> params = {'linear': {'w': jnp.ones(2)}}
        >>> step = hk.transform_with_state(step)
        >>> count, _ = step.apply({}, step.init(None, params)[1], None, params)
        >>> print(count)
        1
        """
        wide = jax.tree.map(trees.widen, trees.as_arrays(params))
        return self._get_state(set(trees.leaves_by_path(wide)), wide)

    def has_evaluation_params(self, params: trees.Params) -> bool:
        """Implements `Optimizer.has_evaluation_params`."""
        if self._evaluation_params is not None:
            return True
        wide = jax.tree.map(trees.widen, trees.as_arrays(params))
        return bool(_schedule_free_states(self._state_shapes(wide)))

    def evaluation_params(self, params: trees.Params) -> trees.Params:
        """Implements `Optimizer.evaluation_params`."""
        wide = jax.tree.map(trees.widen, trees.as_arrays(params))
        state = self._get_state(set(), wide)
        if self._evaluation_params is not None:
            return self._evaluation_params(state, params)
        leaves = trees.leaves_by_path(wide)
        for inner in _schedule_free_states(state):
            # Parameters that are not trained, or by another rule, have no entry.
            for path, z in trees.leaves_by_path(inner.z).items():
                leaves[path] = optax.contrib.schedule_free_eval_params(
                    inner._replace(z=z), leaves[path]
                )
        return trees.rebuild(params, leaves)

    def slots_from_params(self, params: trees.Params) -> list[str]:
        """Implements `Optimizer.slots_from_params`: z of schedule-free rules."""
        wide = jax.tree.map(trees.widen, trees.as_arrays(params))
        shapes = self._state_shapes(wide)
        places = jax.tree_util.tree_leaves_with_path(shapes, is_leaf=_is_schedule_free)
        return [
            trees.join(trees.path_name(path), "z")
            for path, node in places
            if _is_schedule_free(node)
        ]

    def get_slot(self, var: str, name: str) -> Any:
        """Implements `Optimizer.get_slot`.

        Args:
          var: the parameter's path. If the slot holds several arrays for each
            parameter, it is followed by the array's path in the parameter's entry.
          name: the slot's name, or its path if several slots share a name.

        Raises:
          ValueError: if several slots of this parameter have the name.
        """
        paths = self._slot_paths()
        named = [path for path in paths if name in trees.endings(path)]
        if name in named:
            # The whole path of one slot may also end the path of another.
            named = [name]
        existing = slots_lib.state_of(self)
        slots = [path for path in named if trees.join(path, var) in existing]
        if len(slots) > 1:
            raise ValueError(
                f"Several slots are named {name!r}; give the path of one: {slots}."
            )
        if not slots:
            return None
        return hk.get_state(trees.join(slots[0], var))

    def get_slot_names(self) -> list[str]:
        """Implements `Optimizer.get_slot_names`.

        Slots that share a name are listed by their paths.
        """
        paths = self._slot_paths()
        counts = collections.Counter(_last_word(path) for path in paths)
        names = []
        for path in paths:
            word = _last_word(path)
            names.append(word if counts[word] == 1 else path)
        return sorted(names)

    def _slot_paths(self) -> list[str]:
        """Returns the paths of the slots that have arrays in the Haiku state."""
        names = slots_lib.state_of(self)
        if not names:
            return []
        known = self._known_slots
        if known is None:
            known = slots_lib.find_paths(self.transformation)
        if known is None:
            raise ValueError(
                f"The slots of {self.name} are known only after it has updated in this "
                "step, because its transformation's first state depends on the "
                "parameters. Ask after apply_gradients."
            )
        slots = []
        for path in known:
            # If optax's whole state is one slot, its path is empty.
            beginning = f"{path}/" if path else ""
            if any(name.startswith(beginning) for name in names):
                slots.append(path)
        return slots

    def _create_state(self, params: trees.Params) -> None:
        with jax.numpy_dtype_promotion("standard"):
            state = self.transformation.init(params)
        self._known_slots = [path for path, _ in slots_lib.find(state, params)]
        self._check_update(params, state)
        for name, leaf in trees.present(state).items():
            slots_lib.create(name, trees.strong(leaf))

    def _check_update(self, params: trees.Params, state: Any) -> None:
        """Tries an update on shapes.

        Raises ValueError if it needs more than gradients, state, parameters and the
        loss, or changes a shape.
        """
        is_lookahead = lambda node: isinstance(node, optax.LookaheadState)
        nodes = jax.tree.leaves(state, is_leaf=is_lookahead)
        if any(is_lookahead(node) for node in nodes):
            raise ValueError(
                f"{self.name} cannot use optax.lookahead, which takes "
                "optax.LookaheadParams for parameters. Use "
                "optax.contrib.schedule_free, or a MovingAverageOptimizer."
            )
        if self._backs_off and _schedule_free_states(state):
            raise ValueError(
                f"{self.name} cannot back off with optax.contrib.schedule_free: its "
                "state follows its own updates, and a factor on them would part the "
                "two. Leave out backs_off."
            )
        try:
            with jax.numpy_dtype_promotion("standard"):
                # The parameters stand for gradients, which have their shapes.
                updates, _ = hk.eval_shape(
                    self._call_update, params, state, params, jnp.zeros(())
                )
        except Exception as e:
            if not _is_of_call(e):
                # It recurs in the step, where it is raised unchanged. The update may
                # also need a mapped axis, which only a step has.
                return
            raise errors.UserError(
                f"{self.name} cannot use its transformation: given gradients, state, "
                "parameters and the loss, as value=, the update raises "
                f"{type(e).__name__}: {e}. A rule is given nothing else. Use a "
                "transformation that needs only these, such as optax.adam, or "
                "optax.lbfgs with linesearch=None. optax.chain and others pass the "
                "loss on to a GradientTransformationExtraArgs only: make one of what "
                "needs it, or of what is around it. Or subclass Optimizer, and let its "
                "compute_gradients keep the values that its update needs as "
                "attributes, equal on all replicas, as by jax.lax.pmean."
            ) from e
        leaves = trees.leaves_by_path(params)
        for path, update in trees.leaves_by_path(updates).items():
            if path in leaves and update.shape != leaves[path].shape:
                raise ValueError(
                    f"{self.name} cannot use its transformation: its update of "
                    f"'{path}' has the shape {update.shape}, and the parameter "
                    f"{leaves[path].shape}. A transformation of per-example gradients, "
                    "such as optax.contrib.dpsgd, cannot use the gradients of a loss."
                )

    def _get_state(self, present: set[str], params: trees.Params) -> Any:
        """Returns the state in optax's structure, without slots never created.

        Args:
          present: the paths of the parameters that have a gradient.
          params: the parameters, in float32 or wider.
        """
        shapes = self._state_shapes(params)
        needed = slots_lib.names_by_parameter(shapes, params)
        trained = self._trained(present, needed)
        if len(trained) < len(trees.leaves_by_path(params)):
            mask = slots_lib.Mask(params, trained)
            shapes = self._state_shapes(mask.hide(params))
        slots = slots_lib.find(shapes, params)
        self._known_slots = [path for path, _ in slots]
        names_in_slots: set[str] = set()
        for path, slot in slots:
            for name in trees.leaves_by_path(slot):
                names_in_slots.add(trees.join(path, name))

        def get(path: tuple[Any, ...], shape: Any) -> jax.Array:
            name = trees.path_name(path)
            array = hk.get_state(name)
            # A slot has its parameter's shape, which does not depend on the others.
            if name not in names_in_slots and array.shape != shape.shape:
                raise ValueError(
                    f"The state '{name}' of {self.name} has the shape {array.shape}, "
                    "but for the gradients of this step it would have "
                    f"{shape.shape}: it belongs to all parameters together, as with "
                    "optax.flatten. In each step, give a gradient to the same "
                    "parameters as when the state was created, or use a transformation "
                    "that keeps a slot for each parameter."
                )
            return array

        return jax.tree_util.tree_map_with_path(get, shapes)

    def _trained(
        self, present: set[str], needed: Mapping[str, Sequence[str]]
    ) -> set[str]:
        """Returns the paths of the parameters that are trained.

        Their slots exist, or they have a gradient and need no slots.

        Args:
          present: the paths of the parameters that have a gradient.
          needed: the names of each parameter's slots.

        Raises:
          ValueError: if a parameter has a gradient, but its slots were never created.
        """
        existing = slots_lib.state_of(self)
        trained = set()
        for path, names in needed.items():
            if not names:
                # The transformation keeps no slot for this parameter, so its gradient
                # alone decides.
                if path in present:
                    trained.add(path)
            elif not existing.keys().isdisjoint(names):
                trained.add(path)
            elif path in present and not existing:
                # There is no state at all. Haiku's own error explains that.
                hk.get_state(names[0])
            elif path in present:
                raise slots_lib.missing_error(self.name, path)
        return trained

    def _state_shapes(self, params: trees.Params) -> Any:
        """Returns the shapes of the state that the transformation would begin with."""
        with jax.numpy_dtype_promotion("standard"):
            return jax.eval_shape(self.transformation.init, params)

    def _set_state(self, state: Any, old_state: Any) -> None:
        """Writes the new state, in the types of the old one."""
        # None stands for no array, as in optax's own states.
        new = trees.present(state)
        old = trees.present(old_state)
        changed = sorted(new.keys() ^ old.keys())
        if changed:
            raise errors.UserError(
                f"The update of {self.name} turned the state {changed[0]!r} from None "
                "to an array, or the other way: the arrays of a rule's state must be "
                "the same in each step."
            )
        for name, x in old.items():
            hk.set_state(name, trees.strong(new[name], x.dtype))


def is_transformation(x: Any) -> bool:
    """Returns whether `x` has the two functions of an optax transformation, such as
    `optax.MultiSteps`, and is no rule.
    """
    # The class of a transformation has the same functions, but is none.
    if isinstance(x, base.Optimizer | type):
        return False
    return callable(getattr(x, "init", None)) and callable(getattr(x, "update", None))


def as_optimizer(opt: Any) -> base.Optimizer:
    """Returns `opt` itself, or an `OptaxOptimizer` around it.

    Raises:
      ValueError: if it is neither a rule nor a transformation.
    """
    if isinstance(opt, base.Optimizer):
        return opt
    if not is_transformation(opt):
        raise ValueError(
            "opt must be an xshard Optimizer or an optax transformation, such as "
            f"optax.adam(1e-3); received {opt!r}."
        )
    return OptaxOptimizer(opt)


def _check_schedules(schedules: Any) -> dict[str, Callable[[Any], Any]]:
    is_mapping = isinstance(schedules, Mapping)
    if not is_mapping or not all(map(callable, schedules.values())):
        raise errors.UserError(
            "schedules must be functions of a count by name, as {'learning_rate': "
            f"optax.cosine_decay_schedule(1e-3, 1000)}}; received {schedules!r}. Do "
            "not pass a constant, which is not logged: it is in the config."
        )
    return dict(schedules)


def _last_word(path: str) -> str:
    return path.rpartition("/")[2]


def _is_of_call(e: Exception) -> bool:
    """Returns whether an error of an update is about how it was called.

    Then this file or optax raised it; otherwise a user's own code did, or JAX.
    """
    if not isinstance(e, TypeError | ValueError):
        return False
    *_, (frame, _) = traceback.walk_tb(e.__traceback__)
    file = frame.f_code.co_filename
    return file == __file__ or file.startswith(_OPTAX)


def _schedule_free_states(state: Any) -> list[Any]:
    """Returns the states of `optax.contrib.schedule_free` in optax's state."""
    nodes = jax.tree.leaves(state, is_leaf=_is_schedule_free)
    return [node for node in nodes if _is_schedule_free(node)]


def _is_schedule_free(node: Any) -> bool:
    return isinstance(node, optax.contrib.ScheduleFreeState)


class BackOffState(NamedTuple):
    """The factor on a rule's updates, 1 at first.

    Each roll-back that passes over data multiplies it by
    `roll_back.learning_rate_factor`.

    Attributes:
      hyperparams: `{'update_scale': factor}`, a float32 scalar. The name is that of the
        state of `optax.inject_hyperparams`, so that a run logs the factor.
    """

    hyperparams: dict[str, jax.Array]


def with_back_off(transformation: Any) -> optax.GradientTransformation:
    """Returns a transformation that multiplies the updates of another by the factor.

    Args:
      transformation: an `optax.GradientTransformation`, or another object with its two
        functions `init(params)` and `update(grads, state, params)`.

    Returns:
      A transformation whose state is a pair: that of `transformation`, and a
      `BackOffState`.

    >>> from xshard.optimizers import optax as rules
    >>> rule = rules.with_back_off(optax.adam(1e-3))
    >>> rule.init({'w': jnp.zeros(2)})[-1].hyperparams['update_scale'].item()
    1.0
    """

    def init(params: Any) -> BackOffState:
        del params
        return BackOffState({_SCALE: jnp.ones([], jnp.float32)})

    def update(
        updates: Any, state: BackOffState, params: Any = None
    ) -> tuple[Any, BackOffState]:
        del params
        scale = state.hyperparams[_SCALE]
        scaled = jax.tree.map(lambda x: x * scale.astype(x.dtype), updates)
        return scaled, state

    # optax.chain unpacks tuples, and `transformation` may be another object with these
    # two methods.
    first = _with_extra_arguments(transformation)
    return optax.chain(first, optax.GradientTransformation(init, update))


def is_back_off(name: str) -> bool:
    """Returns whether the name of a rule's state array is that of the factor."""
    return f"/{name}".endswith(f"/hyperparams/{_SCALE}")


def _accepted(transformation: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Selects the arguments that the update of a transformation takes.

    By optax's convention, the update of a `GradientTransformationExtraArgs` takes any
    keyword argument, uses those that it knows, and passes all on to what it is made of.
    So it is offered all that there is, whatever is nested in it.

    Args:
      transformation: an optax transformation, or another object with its two functions.
      arguments: keyword arguments by name.
    """
    try:
        parameters = inspect.signature(transformation.update).parameters
    except ValueError:
        # A function that is not written in Python may have no signature.
        return {}
    kinds = {parameter.kind for parameter in parameters.values()}
    # What takes just any arguments is a wrapper of a function that may take none,
    # unless it is declared.
    is_wrapper = inspect.Parameter.VAR_POSITIONAL in kinds
    is_declared = isinstance(transformation, optax.GradientTransformationExtraArgs)
    if inspect.Parameter.VAR_KEYWORD in kinds and (is_declared or not is_wrapper):
        return arguments
    # optax.contrib.sam is declared to take any, and takes one that is its own.
    return {name: x for name, x in arguments.items() if name in parameters}


def _with_extra_arguments(transformation: Any) -> optax.GradientTransformation:
    """Returns a transformation that `optax.chain` passes the same arguments to.

    Args:
      transformation: an optax transformation, or another object with its two functions.
    """
    init = transformation.init
    if not _accepted(transformation, {"value": None}):
        return optax.GradientTransformation(init, transformation.update)

    def update(
        updates: Any, state: Any, params: Any = None, **arguments: Any
    ) -> tuple[Any, Any]:
        taken = _accepted(transformation, arguments)
        return transformation.update(updates, state, params, **taken)

    return optax.GradientTransformationExtraArgs(init, update)
