"""The interface of every update rule, and the phases through which rules compose.

A wrapper may override any of the phases:

1. `aggregate` turns each replica's gradients into the gradients of its group. All
   collectives are here.
2. `vote` decides whether to apply this step. It sees the aggregated gradients, so all
   replicas of a group decide alike.
3. `update` computes new parameters and slots from the gradients.
4. `exchange` may combine the new parameters with those of other replicas. It runs in
   every step, skipped or not, and does nothing in most rules.

Where each replica updates its copy of all arrays, `update` is local, and it alone is
conditional. In a sharded update the sums that `aggregate` returns are global arrays, of
which each replica holds a shard. XLA partitions what `vote` and `update` compute from
them, so a rule declares nothing. The new parameters are gathered at the end. `update`
may then contain collectives, such as those of a norm. It therefore always runs, and its
result is selected afterwards.

No collective is conditional on a vote. Groups may skip different steps, and a
collective that only some devices reach never returns.

Names and meanings follow `tf.compat.v1.train.Optimizer`.
"""

import collections
import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import haiku as hk
import jax
import jax.numpy as jnp

from xshard import errors
from xshard.base import mesh_axes
from xshard.optimizers import gradients, phases, replica_calls, shards, skips, trees
from xshard.optimizers import layouts as layouts_lib

_Rule = TypeVar("_Rule", bound="Optimizer")


def _calls_losses(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a rule's `compute_gradients` or `minimize`, which call losses.

    The method becomes transparent to Haiku, so that the modules of a loss take the
    names that they have without a rule. State that the method itself keeps would go to
    the caller's module, where no phase of the rule finds it, so it is refused.

    The loss that it returns is left with the rule and all that it holds, for their
    updates. A rule that the method calls has had its own from that call.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and callable(args[0]):
            # An overriding method may call its loss itself, which may keep state.
            loss = args[0]

            @functools.wraps(loss)
            def as_loss(*args: Any, **kwargs: Any) -> Any:
                with _loss_is_called():
                    return loss(*args, **kwargs)

            args = (as_loss, *args[1:])
        rules = all_rules(self)
        for rule in rules:
            rule._loss_value = None
        with _refusing_state(method):
            returned = method(self, *args, **kwargs)
        value = returned[0]
        if kwargs.get("has_aux"):
            value, _ = value
        for rule in rules:
            if rule._loss_value is None:
                rule._loss_value = value
        return returned

    return hk.transparent(call)


class Optimizer(hk.Module):
    """An update rule with its state. Source: `tf.compat.v1.train.Optimizer`.

    Call it inside `hk.transform_with_state`: all its state is Haiku state. A custom
    rule implements `update`. A wrapper derives from `OptimizerWrapper`, which forwards
    the phases to the rule that it wraps.

    Parameters and gradients are Haiku trees, `{module: {name: array}}`. A parameter
    that is not trained, or that the loss does not depend on, has the gradient None. It
    and its slots stay unchanged.

    >>> class SignDescent(xshard.Optimizer):
    ...     def update(self, grads, params):
    ...         move = lambda w, g: w if g is None else w - 0.5 * jnp.sign(g)
    ...         return jax.tree.map(move, params, grads)
    >>> def step(params):
    ...     loss = lambda params: jnp.sum(params['m']['w'] ** 2)
    ...     return SignDescent().minimize(loss, params)
    >>> params = {'m': {'w': jnp.array([2.0, -3.0])}}
    >>> step = hk.transform_with_state(step)
    >>> (loss, params), _ = step.apply({}, {}, None, params)
    >>> print(loss, params['m']['w'])
    13.0 [ 1.5 -2.5]
    """

    GATE_NONE = gradients.GATE_NONE
    GATE_OP = gradients.GATE_OP
    GATE_GRAPH = gradients.GATE_GRAPH

    def __init__(self, name: str | None = None):
        """Creates a rule without state.

        Args:
          name: the module's name; by default the class's, in snake case.
        """
        super().__init__(name=name)
        # What `compute_gradients` of this rule, or of one that holds it, leaves for
        # `apply_gradients`, which a user calls with nothing but gradients: the
        # replica's own loss, unscaled, until a rule around this one reduces it, or
        # None; and the state that losses wrote since the last step, which a skipped
        # step restores.
        self._loss_value: Any = None
        self._loss_writes: skips.Writes = skips.NO_WRITES
        # How a run's arrays lie on its replicas; None in a step of one's own.
        self._placement: layouts_lib.Placement | None = None

    # The constructor of rules that are dataclasses, as Haiku's modules may be.
    __post_init__ = __init__

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Treats methods of a subclass that call losses as this class's own."""
        super().__init_subclass__(**kwargs)
        for name in ("compute_gradients", "minimize"):
            if name in vars(cls):
                setattr(cls, name, _calls_losses(vars(cls)[name]))

    @_calls_losses
    def compute_gradients(
        self,
        loss: gradients.Loss | Sequence[gradients.Loss],
        params: trees.Params,
        *,
        var_list: trees.VarList = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: int | None = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: Any = None,
        has_aux: bool = False,
    ) -> tuple[Any, trees.Gradients]:
        """Differentiates a loss, as `jax.value_and_grad` does.

        Args:
          loss: a function of the parameters that returns a scalar, or an array when
            `grad_loss` has its shape. It may use Haiku's state and random keys. A
            sequence of such functions, or one function at several inputs
            (`MicroBatches`), counts as their sum.
          params: a Haiku tree of floating-point arrays.
          var_list: the parameters to train: paths such as 'mlp/linear_0/w', or a
            predicate of module and name. All parameters by default. The other
            parameters have the gradient None, and so has each parameter that no loss
            depends on (while `hk.running_init()`, the latter is zeros instead).
          gate_gradients: places an optimization barrier on no gradient (GATE_NONE), on
            each one (GATE_OP), or on all of them together (GATE_GRAPH).
          aggregation_method: how the gradients of several losses are summed:
            `AggregationMethod`.
          colocate_gradients_with_ops: gives each gradient its parameter's sharding.
          grad_loss: the gradient with respect to the loss, 1 by default. Several losses
            share one value, or a list gives one for each loss of a sequence.
          has_aux: whether a loss returns `(value, aux)`.

        Returns:
          `(value, grads)`, or `((value, aux), grads)` with `has_aux`. The value is
          unscaled. For several losses the value is their sum, and aux is a list with
          one entry for each loss. A gradient has its parameter's shape and dtype; for
          several losses it is float32 or wider.

        Raises:
          ValueError: for an invalid option, an unknown name or a mismatched shape.
        """
        trees.check_params(params)
        gradients.check_options(gate_gradients, aggregation_method)
        paths = list(trees.select(trees.as_arrays(params), var_list))

        def differentiate(params: trees.Params) -> tuple[Any, Any, trees.Gradients]:
            """Returns the value, aux and gradients of a replica's own loss."""
            leaves = trees.leaves_by_path(trees.as_arrays(params))
            trained = {path: leaves[path] for path in paths}
            with _loss_is_called():
                value, aux, grads = gradients.value_and_grad(
                    loss,
                    params,
                    trained,
                    aggregation_method=aggregation_method,
                    grad_loss=grad_loss,
                    has_aux=has_aux,
                )
            if colocate_gradients_with_ops:
                grads = gradients.colocate(grads, trained)
            grads = gradients.gate(grads, gate_gradients)
            return value, aux, trees.rebuild(params, grads)

        held = self._placement.held_in_shards if self._placement is not None else {}
        state_before = skips.current_state()
        value, aux, grads = _on_each_replica(differentiate, params, held)
        self._loss_writes = skips.writes_since(state_before, self._loss_writes)
        result = (value, aux) if has_aux else value
        return result, grads

    def init(self, params: trees.Params, var_list: trees.VarList = None) -> None:
        """Creates the state of this rule and all rules that it holds, without a loss.

        Args:
          params: a Haiku tree of floating-point arrays.
          var_list: the parameters to train and create slots for, as for
            `compute_gradients`.

        Raises:
          ValueError: unless `hk.running_init()`, because only `init` of a transform
            creates state.

        >>> make = lambda: xshard.OptaxOptimizer(optax.adam(0.1), name='adam')
        >>> rule = hk.transform_with_state(lambda params: make().init(params))
        >>> _, state = rule.init(None, {'m': {'w': jnp.ones(3)}})
        >>> sorted(state['adam'])
        ['0/count', '0/mu/m/w', '0/nu/m/w']
        """
        if not hk.running_init():
            raise ValueError(
                "Optimizer.init creates state: call it in "
                "hk.transform_with_state(...).init. In a step, apply provides the "
                "state."
            )
        trees.check_params(params)
        trained = trees.select(trees.as_arrays(params), var_list)
        zeros = {path: jnp.zeros_like(leaf) for path, leaf in trained.items()}
        # While state is created, a rule's update creates that of each parameter with a
        # gradient, whatever its value.
        self.apply_gradients(trees.rebuild(params, zeros), params)

    def apply_gradients(
        self,
        grads: trees.Gradients,
        params: trees.Params,
        global_step: Any = None,
        name: str | None = None,
    ) -> Any:
        """Aggregates, votes, updates and exchanges.

        Args:
          grads: a tree with the structure of `params`, as `compute_gradients` or
            `jax.grad` returns it; leaves may be None.
          params: a Haiku tree of floating-point arrays.
          global_step: an integer scalar that counts the updates applied.
          name: a scope's name for profiles; the optimizer's name by default.

        Returns:
          The new parameters, or `(params, global_step)` if `global_step` is given. They
          have the shapes and dtypes of the old ones. A vote against the step leaves
          both unchanged, bit by bit. It also restores the state that `aggregate` and
          `update` wrote, and the state that losses wrote since the last step, in this
          trace and through this rule.

        Raises:
          ValueError: if the gradients do not have the parameters' structure and shapes,
            or if this rule holds another rule but does not call that rule's own
            `aggregate`, `vote` or `exchange`.
        """
        done = self.apply(grads, params, global_step, name)
        if global_step is None:
            return done.params
        return done.params, done.global_step

    @hk.transparent
    def apply(
        self,
        grads: trees.Gradients,
        params: trees.Params,
        global_step: Any = None,
        name: str | None = None,
    ) -> phases.Applied:
        """Does what `apply_gradients` does; also returns the aggregated gradients.

        Args:
          grads: as for `apply_gradients`, and so are the others.
          params: a Haiku tree of floating-point arrays.
          global_step: an integer scalar that counts the updates applied.
          name: a scope's name for profiles.

        Raises:
          ValueError: as `apply_gradients` does.
        """
        trees.check_params(params)
        trees.check_gradients(grads, params)
        skips.check_count(global_step)
        # From here on all trees are plain dicts. `rebuild` below restores the caller's
        # structure.
        old_params = trees.as_arrays(params)
        # `jax.grad` conjugates the gradients of complex parameters.
        directions = trees.conjugate(grads, old_params)
        rules = all_rules(self)
        update_key = None
        if self._placement is not None:
            update_key = self._placement.update_key
        step = phases.Step(rules, _required_phases(rules), update_key)
        with jax.named_scope(name or self.get_name()):
            done = step.apply(directions, old_params)
        new_params = trees.rebuild(params, trees.leaves_by_path(done.params))
        if global_step is not None:
            global_step = skips.count(done.applied, global_step)
        return done._replace(params=new_params, global_step=global_step)

    @hk.transparent
    def minimize(
        self,
        loss: gradients.Loss | Sequence[gradients.Loss],
        params: trees.Params,
        global_step: Any = None,
        *,
        name: str | None = None,
        has_aux: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Calls `compute_gradients`, then `apply_gradients`, with their arguments.

        Returns:
          `(value, params)` or `((value, aux), params)`, followed by `global_step` if it
          is given.

        Raises:
          ValueError: as these two do.
        """
        value, grads = self.compute_gradients(loss, params, has_aux=has_aux, **kwargs)
        result = self.apply_gradients(grads, params, global_step, name)
        if global_step is None:
            return value, result
        return value, *result

    def aggregate(self, grads: trees.Gradients) -> trees.Gradients:
        """Computes the group's gradients from each replica's: phase 1.

        All collectives are here, but for those of a rule that implements `exchange`.

        Args:
          grads: the replica's own gradients, in dicts, with None for a parameter
            without one. A complex gradient is conjugated.

        Returns:
          The group's gradients, equal on all its replicas, in the same structure and
          shapes; by default `grads`. They are in float32 or wider if a rule has summed
          or unscaled them, and else in the types of `grads`.
        """
        return grads

    def vote(self, grads: trees.Gradients) -> Any:
        """Returns whether to update: phase 2.

        Args:
          grads: the aggregated gradients, in dicts.

        Returns:
          True, or a boolean scalar that is equal on all replicas of a group.
        """
        del grads
        return True

    def update(self, grads: trees.Gradients, params: trees.Params) -> trees.Params:
        """Computes the new parameters, and writes the rule's state: phase 3.

        While `hk.running_init()` it creates that state.

        Args:
          grads: the aggregated gradients, in dicts, with None for a parameter without
            one. A complex gradient is conjugated, so that the rule descends along it.
          params: the parameters, in dicts.

        Returns:
          The new parameters, with the structure, shapes and dtypes of `params`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not implement update(grads, params)."
        )

    def exchange(
        self, before: trees.Params, after: trees.Params, applied: Any
    ) -> trees.Params:
        """Returns the parameters with which the next step begins: phase 4.

        By default these are `after`. A rule that exchanges parameters with other
        replicas in some steps does so here, at the same steps on all of them. State
        that it writes here is kept if the step is skipped.

        Args:
          before: the parameters before the update, in dicts. With a sharded update they
            are global arrays, as for `update`.
          after: those after it, equal to `before` if the step is skipped.
          applied: whether the step is applied: True, or a boolean scalar.

        Returns:
          Parameters with the structure, shapes and dtypes of `after`.
        """
        del before, applied
        return after

    def has_evaluation_params(self, params: trees.Params) -> bool:
        """Returns whether this rule itself defines `evaluation_params`.

        Args:
          params: the parameters, or their shapes.
        """
        del params
        defaults = (Optimizer.evaluation_params, OptimizerWrapper.evaluation_params)
        return type(self).evaluation_params not in defaults

    def evaluation_params(self, params: trees.Params) -> trees.Params:
        """Returns the parameters to evaluate, and to use once trained.

        By default they are those that train. A rule whose state determines others, such
        as averages, returns those. It is called after an update, with the rule's state.

        Args:
          params: the parameters that train, in dicts.

        Returns:
          A tree with the structure and shapes of `params`.
        """
        return params

    def slots_from_params(self, params: trees.Params) -> list[str]:
        """Returns the slots of this rule itself that begin as copies of parameters.

        A run that takes its parameters from another run begins them anew.

        Args:
          params: the parameters, or their shapes.

        Returns:
          What precedes a parameter's path in the names of this rule's state.
        """
        del params
        return []

    def place(self, placement: layouts_lib.Placement) -> None:
        """Tells this rule itself how a run's arrays lie on its replicas.

        A run's `Learner` calls it, before any other method, for each rule that it makes
        and all rules that this holds. A step of one's own does not.

        Args:
          placement: the run's.
        """
        self._placement = placement

    def partition(self, params: trees.Params) -> shards.Partition | None:
        """Returns how this rule itself shards parameters and slots over the replicas.

        None if it does not.
        """
        del params
        return None

    def restore_unless_applied(self, applied: Any) -> None:
        """Restores the state that losses wrote since the last step, if it is skipped.

        Args:
          applied: whether this step is applied: True, or a boolean scalar.
        """
        writes = self._loss_writes
        # The next step restores only what losses write after this one.
        self._loss_writes = skips.NO_WRITES
        skips.restore_unless_applied(applied, writes)

    def get_name(self) -> str:
        """Returns the module's name."""
        return self.name

    def get_slot(self, var: str, name: str) -> Any:
        """Returns a slot, such as `get_slot('mlp/linear_0/w', 'mu')`, or None.

        Args:
          var: the parameter's path.
          name: the slot's name, one of `get_slot_names`.
        """
        del var, name
        return None

    def get_slot_names(self) -> list[str]:
        """Returns the sorted names that `get_slot` takes; none before init."""
        return []

    def state_by_name(self) -> dict[str, Any]:
        """Returns all state arrays of this rule and of those it wraps, by name."""
        return dict(self.state_dict())

    def variables(self) -> list[Any]:
        """Returns all state arrays, in the order of their names."""
        arrays = self.state_by_name()
        return [arrays[name] for name in sorted(arrays)]


class OptimizerWrapper(Optimizer):
    """A rule that wraps another, and forwards every phase and query to it.

    A subclass sets `opt`, and overrides the phases that it changes.

    Attributes:
      opt: the wrapped rule.

    >>> class Halved(xshard.OptimizerWrapper):
    ...     def __init__(self, opt):
    ...         super().__init__()
    ...         self.opt = opt
    ...     def aggregate(self, grads):
    ...         return jax.tree.map(lambda g: g / 2, self.opt.aggregate(grads))
    >>> def step(params):
    ...     opt = Halved(xshard.OptaxOptimizer(optax.sgd(1.0)))
    ...     return opt.minimize(lambda params: jnp.sum(params['m']['w']), params)
    >>> params = {'m': {'w': jnp.array([2.0, -3.0])}}
    >>> step = hk.transform_with_state(step)
    >>> (loss, params), _ = step.apply({}, {}, None, params)
    >>> print(loss, params['m']['w'])
    -1.0 [ 1.5 -3.5]
    """

    opt: Optimizer

    def compute_gradients(
        self, loss: Any, params: trees.Params, **kwargs: Any
    ) -> tuple[Any, trees.Gradients]:
        """Forwards to the wrapped rule."""
        return self.opt.compute_gradients(loss, params, **kwargs)

    def aggregate(self, grads: trees.Gradients) -> trees.Gradients:
        """Forwards to the wrapped rule."""
        return self.opt.aggregate(grads)

    def vote(self, grads: trees.Gradients) -> Any:
        """Forwards to the wrapped rule."""
        return self.opt.vote(grads)

    def update(self, grads: trees.Gradients, params: trees.Params) -> trees.Params:
        """Forwards to the wrapped rule."""
        return self.opt.update(grads, params)

    def exchange(
        self, before: trees.Params, after: trees.Params, applied: Any
    ) -> trees.Params:
        """Forwards to the wrapped rule."""
        return self.opt.exchange(before, after, applied)

    def evaluation_params(self, params: trees.Params) -> trees.Params:
        """Forwards `Optimizer.evaluation_params`."""
        return self.opt.evaluation_params(params)

    def get_slot(self, var: str, name: str) -> Any:
        """Forwards to the wrapped rule."""
        return self.opt.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """Forwards to the wrapped rule."""
        return self.opt.get_slot_names()

    def state_by_name(self) -> dict[str, Any]:
        """Returns the state arrays of this rule and of the wrapped rule, by name."""
        return {**self.state_dict(), **self.opt.state_by_name()}


def all_rules(opt: Optimizer) -> list[Optimizer]:
    """Returns the rule and all rules that it holds, outermost first.

    It may hold them in attributes, and in lists, tuples and dicts there.
    """
    rules: list[Optimizer] = []
    # A container may contain itself, and two rules may hold the same third rule.
    seen: set[int] = set()
    waiting: collections.deque[Any] = collections.deque([opt])
    while waiting:
        x = waiting.popleft()
        if not isinstance(x, Optimizer | Mapping | list | tuple) or id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, Optimizer):
            rules.append(x)
            waiting.extend(vars(x).values())
        elif isinstance(x, Mapping):
            waiting.extend(x.values())
        else:
            waiting.extend(x)
    return rules


def rules_of_type(opt: Optimizer, kind: type[_Rule]) -> list[_Rule]:
    """Returns the rules of one class among `all_rules(opt)`, outermost first."""
    return [rule for rule in all_rules(opt) if isinstance(rule, kind)]


def _required_phases(rules: Sequence[Optimizer]) -> list[tuple[Optimizer, str]]:
    """Returns the phases that each step must call by way of the outermost rule.

    Args:
      rules: the outermost rule, then all rules that it holds.

    Returns:
      Pairs of a rule that the outermost one holds, and the name of a phase that it
      overrides. Its effect would be lost if the rules around it did not call it.
    """
    # A rule with one of these has no such phase of its own.
    forwarding = {
        Optimizer.aggregate,
        Optimizer.vote,
        Optimizer.exchange,
        OptimizerWrapper.aggregate,
        OptimizerWrapper.vote,
        OptimizerWrapper.exchange,
    }
    required = []
    for rule in rules[1:]:
        for phase in ("aggregate", "vote", "exchange"):
            if getattr(type(rule), phase) not in forwarding:
                required.append((rule, phase))
    return required


# The method of a rule that is being called: of a rule within others, its own. None
# while a loss is being called, whose state belongs to the caller of the rule.
_METHOD: contextvars.ContextVar[Callable[..., Any] | None] = contextvars.ContextVar(
    "method", default=None
)


@contextlib.contextmanager
def _loss_is_called() -> Iterator[None]:
    """Declares that losses are called in its body, which may keep Haiku state."""
    token = _METHOD.set(None)
    try:
        yield
    finally:
        _METHOD.reset(token)


@contextlib.contextmanager
def _refusing_state(method: Callable[..., Any]) -> Iterator[None]:
    """Raises UserError if a method that is called in its body keeps Haiku state itself.

    Losses may keep state, and so may modules and other methods that it calls.
    """
    scope = hk.experimental.current_name()

    def check(context: Any) -> None:
        called = _METHOD.get()
        if called is None or hk.experimental.current_name() != scope:
            return
        name = context.full_name.rpartition("/")[2]
        raise errors.UserError(
            f"{called.__qualname__} keeps the state {name!r}, which would go to "
            "the module that calls the rule, where no phase finds it. Keep a value "
            "for this step's phases as an attribute, self.value = value. State that "
            "later steps need belongs in aggregate, vote or update, or in a method of "
            "another name."
        )

    def create(make: Any, shape: Any, dtype: Any, init: Any, context: Any) -> Any:
        check(context)
        return make(shape, dtype, init)

    def write(set_value: Any, value: Any, context: Any) -> Any:
        check(context)
        return set_value(value)

    creating = hk.custom_creator(create, params=False, state=True)
    token = _METHOD.set(method)
    try:
        # The checks of the rules around this one are called first.
        with creating, hk.custom_setter(write):
            yield
    finally:
        _METHOD.reset(token)


def _on_each_replica(
    differentiate: Callable[[trees.Params], tuple[Any, Any, trees.Gradients]],
    params: trees.Params,
    held_in_shards: layouts_lib.Layouts,
) -> tuple[Any, Any, trees.Gradients]:
    """Calls a function that calls losses, on each replica by itself.

    Where `vmap_replicas` maps the replicas, XLA would otherwise compute a loss for all
    replicas of a device together, which is slow for some losses: see
    `replica_calls.on_each_replica`.

    That function traces the call as a separate program, whose arrays leave it only as
    results. So the random keys that are still to be drawn, and the Haiku state that
    losses write, become results too, and are put in place afterwards.

    Args:
      differentiate: takes a replica's parameters to a value, aux and gradients.
      params: the parameters.
      held_in_shards: the layouts of those of which a replica holds its shard, by path.
    """
    if not replica_calls.is_current():
        return differentiate(params)
    state_before = skips.current_state()

    def with_keys(keys: Any, params: trees.Params) -> Any:
        """Calls the function with these keys; also returns those that remain."""
        if keys is not None:
            hk.replace_rng_sequence_state(keys)
        results = differentiate(params)
        return *results, hk.maybe_get_rng_sequence_state()

    def of_replica(params: trees.Params, keys: Any) -> Any:
        # A separate transform turns the state and the keys that the loss uses into
        # arguments and results. Its key only makes it draw keys: `with_keys` replaces
        # it.
        key = None if keys is None else jax.random.key(0)
        apply = hk.transform_with_state(with_keys).apply
        state = skips.by_module(state_before)
        results, new_state = apply(hk.get_params(), state, key, keys, params)
        written = {}
        for name, x in skips.by_name(new_state).items():
            if x is not state_before[name]:
                written[name] = x
        return *results, written

    def specs_of(tree: Any) -> Any:
        """Returns how parameters, or their gradients, lie on the replicas."""
        specs = {}
        for path in trees.present(tree):
            specs[path] = jax.P()
            if path in held_in_shards:
                specs[path] = held_in_shards[path].spec(mesh_axes.REPLICA, manual=True)
        return trees.rebuild(tree, specs)

    def specs_of_results(results: Any) -> Any:
        _, _, grads, _, _ = results
        return jax.P(), jax.P(), specs_of(grads), jax.P(), jax.P()

    call = replica_calls.on_each_replica(
        of_replica,
        in_specs=(specs_of(params), jax.P()),
        out_specs=specs_of_results,
    )
    keys = hk.maybe_get_rng_sequence_state()
    value, aux, grads, keys, written = call(params, keys)
    if keys is not None:
        hk.replace_rng_sequence_state(keys)
    with _loss_is_called():
        skips.write(written)
    return value, aux, grads
