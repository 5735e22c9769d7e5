"""The interface of every update rule, and the three phases through which rules compose.

A wrapper may override any of the phases:

1. `aggregate` turns each replica's gradients into the gradients of its group. All
   collectives are here.
2. `vote` decides whether to apply this step. It sees the aggregated gradients, so all
   replicas of a group decide alike.
3. `update` computes new parameters and slots from the gradients. It is local, and only
   it is conditional.

In a sharded update the sums that `aggregate` returns are global arrays, of which each
replica holds a shard. XLA partitions what `vote` and `update` compute from them, so a
rule declares nothing. The new parameters are gathered at the end. `update` may then
contain collectives, such as those of a norm. It therefore always runs, and its result
is selected afterwards.

No collective is conditional. Groups may skip different steps, and a collective that
only some devices reach never returns.

Names and meanings follow `tf.compat.v1.train.Optimizer`.
"""

import collections
import contextvars
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import haiku as hk
import jax
import jax.numpy as jnp

from xshard import errors, mesh
from xshard.optimizers import gradients, phases, replica_map, shards, skips, trees
from xshard.optimizers import layouts as layouts_lib

_Rule = TypeVar("_Rule", bound="Optimizer")


# Whether a loss is being called, whose state belongs to the caller of the rule.
_IN_LOSS: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "in_loss", default=False
)


def _without_state(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a rule, which raises UserError where it keeps Haiku state itself.

    The method is transparent to Haiku, because the modules of the loss take the names
    that they have without a rule. So state of the method's own would go to the caller's
    module, where no phase of the rule finds it.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if method.__name__ == "compute_gradients" and replica_map.is_current():
            return _on_each_replica(call, self, *args, **kwargs)
        scope = hk.experimental.current_name()

        def check(context: Any) -> None:
            if _IN_LOSS.get() or hk.experimental.current_name() != scope:
                return
            name = context.full_name.rpartition("/")[2]
            raise errors.UserError(
                f"{method.__qualname__} keeps the state {name!r}, which would go to the module that calls the rule, where no "
                "phase finds it. Keep a value for this step's phases as an attribute, self.value = value. State that later "
                "steps need belongs in aggregate, vote or update, or in a method of another name."
            )

        def create(make: Any, shape: Any, dtype: Any, init: Any, context: Any) -> Any:
            check(context)
            return make(shape, dtype, init)

        def write(set_value: Any, value: Any, context: Any) -> Any:
            check(context)
            return set_value(value)

        if args and callable(args[0]):
            args = (_as_loss(args[0]), *args[1:])
        creating = hk.custom_creator(create, params=False, state=True)
        with creating, hk.custom_setter(write):
            return method(self, *args, **kwargs)

    return call


def _on_each_replica(
    method: Callable[..., Any],
    rule: Any,
    loss: Any,
    params: trees.Params,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, trees.Gradients]:
    """Calls `compute_gradients` of a rule on each replica by itself, where
    `vmap_replicas` maps the replicas.

    The state that the loss writes, the random keys that are drawn, and the values that
    rules keep as attributes for the phases of this step become results of that call.
    """
    rules = all_rules(rule)
    specs: dict[str, jax.P] = {}
    for each in rules:
        for path, layout in each.held_in_shards().items():
            specs[path] = layout.spec(mesh.REPLICA, manual=True)
    before = skips.current_state()
    written_before = [each._written for each in rules]
    attributes_before = [dict(vars(each)) for each in rules]
    kept: dict[tuple[int, str], _Kept] = {}

    def with_keys(keys: Any, params: trees.Params) -> Any:
        if keys is not None:
            hk.replace_rng_sequence_state(keys)
        result = method(rule, loss, params, *args, **kwargs)
        kept.update(_kept_attributes(rules, attributes_before))
        arrays = [one.arrays for one in kept.values()]
        return result, arrays, hk.maybe_get_rng_sequence_state()

    def of_replica(params: trees.Params, keys: Any) -> Any:
        # A separate transform turns the state and the keys that the loss uses into
        # arguments and results.
        key = None if keys is None else jax.random.key(0)
        run = hk.transform_with_state(with_keys).apply
        results, after = run(
            hk.get_params(), skips.by_module(before), key, keys, params
        )
        written = {}
        for name, x in skips.by_name(after).items():
            if x is not before[name]:
                written[name] = x
        return *results, written

    def specs_of(tree: Any) -> Any:
        return trees.rebuild(
            tree, {path: specs.get(path, jax.P()) for path in trees.present(tree)}
        )

    def of_results(returned: Any) -> Any:
        (_, grads), *_ = returned
        return (jax.P(), specs_of(grads)), jax.P(), jax.P(), jax.P()

    call = replica_map.per_replica(
        of_replica, in_specs=(specs_of(params), jax.P()), out_specs=of_results
    )
    result, arrays, keys, written = call(params, hk.maybe_get_rng_sequence_state())
    if keys is not None:
        hk.replace_rng_sequence_state(keys)
    skips.write(written)
    for (index, name), one, of_one in zip(kept, kept.values(), arrays, strict=True):
        setattr(rules[index], name, one.joined(of_one))
    for each, earlier in zip(rules, written_before, strict=True):
        # The arrays that were written are others here than on a replica.
        if each._written is not earlier:
            each._written = skips.merge_writes(before, skips.current_state(), earlier)
    return result


class _Kept(NamedTuple):
    """An attribute of a rule that holds arrays of the step.

    Attributes:
      structure: the structure of its value.
      leaves: the leaves of its value, with None in place of each array.
      arrays: these arrays.
    """

    structure: Any
    leaves: list[Any]
    arrays: list[jax.Array]

    def joined(self, arrays: Sequence[jax.Array]) -> Any:
        """The attribute's value with other arrays."""
        given = iter(arrays)
        leaves = [next(given) if leaf is None else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.structure, leaves)


def _kept_attributes(
    rules: Sequence[Any], before: Sequence[Mapping[str, Any]]
) -> dict[tuple[int, str], _Kept]:
    """The new attributes of rules that hold traced arrays, by the rule's number and the
    attribute's name.
    """
    is_traced = lambda leaf: isinstance(leaf, jax.core.Tracer)
    kept = {}
    for index, (rule, old) in enumerate(zip(rules, before, strict=True)):
        for name, value in vars(rule).items():
            if value is old.get(name) or name == "_written":
                continue
            leaves, structure = jax.tree.flatten(value)
            arrays = list(filter(is_traced, leaves))
            if arrays:
                others = [None if is_traced(leaf) else leaf for leaf in leaves]
                kept[index, name] = _Kept(structure, others, arrays)
    return kept


def _as_loss(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, a loss or one that calls losses; `_IN_LOSS` is set during its
    calls.
    """

    @functools.wraps(loss)
    def call(*args: Any, **kwargs: Any) -> Any:
        token = _IN_LOSS.set(True)
        try:
            return loss(*args, **kwargs)
        finally:
            _IN_LOSS.reset(token)

    return call


class Optimizer(hk.Module):
    """An update rule with its state. Source: `tf.compat.v1.train.Optimizer`.

    Call it inside `hk.transform_with_state`: all its state is Haiku state. A custom
    rule implements `update`. A wrapper forwards the phases to the rule that it wraps.

    Parameters and gradients are Haiku trees, `{module: {name: array}}`. A parameter
    that is not trained, or that the loss does not depend on, has the gradient None. It
    and its slots stay unchanged.

    >>> class SignDescent(xshard.Optimizer):
    ...     def update(self, grads, params):
    ...         move = lambda w, g: w if g is None else w - 0.5 * jnp.sign(g)
    ...         return jax.tree.map(move, params, grads)
    >>> step = lambda params: SignDescent().minimize(lambda p: jnp.sum(p['m']['w'] ** 2), params)
    >>> params = {'m': {'w': jnp.array([2.0, -3.0])}}
    >>> (loss, params), _ = hk.transform_with_state(step).apply({}, {}, None, params)
    >>> print(loss, params['m']['w'])
    13.0 [ 1.5 -2.5]
    """

    GATE_NONE = gradients.GATE_NONE
    GATE_OP = gradients.GATE_OP
    GATE_GRAPH = gradients.GATE_GRAPH

    # The state that losses wrote since the last step. A skipped step restores it.
    _written: skips.Writes = skips.NO_WRITES
    # The loss of the last call of `compute_gradients`: the replica's own, unscaled,
    # until a rule around this one reduces it.
    _loss: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keeps this rule's name out of the names of modules that a loss creates, in
        overriding methods too.
        """
        super().__init_subclass__(**kwargs)
        for name in {"compute_gradients", "minimize"} & vars(cls).keys():
            setattr(cls, name, hk.transparent(_without_state(vars(cls)[name])))

    @hk.transparent
    @_without_state
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
          one entry for each loss.

        Raises:
          ValueError: for an invalid option, an unknown name or a mismatched shape.
        """
        trees.check_params(params)
        gradients.check_options(gate_gradients, aggregation_method)
        trained = trees.select(trees.as_arrays(params), var_list)
        before = skips.current_state()
        value, aux, grads = _as_loss(gradients.value_and_grad)(
            loss,
            params,
            trained,
            aggregation_method=aggregation_method,
            grad_loss=grad_loss,
            has_aux=has_aux,
        )
        self._written = skips.merge_writes(before, skips.current_state(), self._written)
        self._loss = value
        if colocate_gradients_with_ops:
            grads = gradients.colocate(grads, trained)
        grads = gradients.gate(grads, gate_gradients)
        return ((value, aux) if has_aux else value), trees.rebuild(params, grads)

    def init(self, params: trees.Params, var_list: trees.VarList = None) -> None:
        """Creates the state of this rule and of the rules that it holds, without a
        loss.

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
                "Optimizer.init creates state: call it in hk.transform_with_state(...).init. In a step, apply "
                "provides the state."
            )
        trees.check_params(params)
        trained = trees.select(trees.as_arrays(params), var_list)
        zeros = {path: jnp.zeros_like(leaf) for path, leaf in trained.items()}
        self.apply_gradients(trees.rebuild(params, zeros), params)

    def apply_gradients(
        self,
        grads: trees.Gradients,
        params: trees.Params,
        global_step: Any = None,
        name: str | None = None,
    ) -> Any:
        """Aggregates, votes and updates.

        Args:
          grads: a tree with the structure of `params`, as `compute_gradients` or
            `jax.grad` returns it; leaves may be None.
          params: a Haiku tree of floating-point arrays.
          global_step: an integer scalar that counts the updates applied.
          name: a scope's name for profiles; the optimizer's name by default.

        Returns:
          The new parameters, or `(params, global_step)` if `global_step` is given. A
          vote against the step leaves both unchanged, bit by bit. It also restores the
          state that `aggregate` and `update` wrote, and the state that losses wrote
          since the last step, in this trace and through this rule.

        Raises:
          ValueError: if the gradients do not have the parameters' structure and shapes,
            or if this rule holds another rule but does not call that rule's own
            `aggregate` or `vote`.
        """
        done = self.apply(grads, params, global_step, name)
        return done.params if global_step is None else (done.params, done.global_step)

    @hk.transparent
    def apply(
        self,
        grads: trees.Gradients,
        params: trees.Params,
        global_step: Any = None,
        name: str | None = None,
    ) -> phases.Applied:
        """Does the same as `apply_gradients`, and also returns the aggregated
        gradients.
        """
        trees.check_params(params)
        trees.check_gradients(grads, params)
        skips.check_count(global_step)
        # From here on all trees are plain dicts. `rebuild` below restores the caller's
        # structure.
        old = trees.as_arrays(params)
        grads = trees.conjugate(grads, old)
        with jax.named_scope(name or self.get_name()):
            rules = all_rules(self)
            done = phases.Step(rules, _duties(rules)).apply(grads, old)
        whole = trees.rebuild(params, trees.leaves_by_path(done.params))
        count = None if global_step is None else skips.count(done.applied, global_step)
        return done._replace(params=whole, global_step=count)

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
        """
        value, grads = self.compute_gradients(loss, params, has_aux=has_aux, **kwargs)
        result = self.apply_gradients(grads, params, global_step, name)
        return (value, result) if global_step is None else (value, *result)

    def aggregate(self, grads: trees.Gradients) -> trees.Gradients:
        """Phase 1: computes the group's gradients from each replica's. All collectives
        are here.
        """
        return grads

    def vote(self, grads: trees.Gradients) -> Any:
        """Phase 2: returns whether to update: True, or a boolean scalar that is equal
        on all replicas of a group.
        """
        del grads
        return True

    def update(self, grads: trees.Gradients, params: trees.Params) -> trees.Params:
        """Phase 3: returns the new parameters. Creates the rule's state while
        `hk.running_init()`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not implement update(grads, params)."
        )

    def partition(self, params: trees.Params) -> shards.Partition | None:
        """Returns how this rule itself shards parameters and slots over the replicas,
        or None if it does not.
        """
        del params
        return None

    def held_in_shards(self) -> layouts_lib.Layouts:
        """Returns the layouts of the parameters of which this rule lets each replica
        hold only a shard, by path.
        """
        return {}

    def restore_unless_applied(self, applied: Any) -> None:
        """Restores the state that losses wrote since the last step, if this step is not
        applied.
        """
        # Cleared, so that the next step restores only what losses write after this one.
        losses, self._written = self._written, skips.NO_WRITES
        skips.restore_unless_applied(applied, losses)

    def get_name(self) -> str:
        """The module's name."""
        return self.name

    def get_slot(self, var: str, name: str) -> Any:
        """The slot of a parameter, such as `get_slot('mlp/linear_0/w', 'mu')`, or None."""
        del var, name
        return None

    def get_slot_names(self) -> list[str]:
        """The sorted names that `get_slot` accepts. Empty before the state is created."""
        return []

    def state_by_name(self) -> dict[str, Any]:
        """All state arrays of this rule and of the rules that it wraps, by name."""
        return dict(self.state_dict())

    def variables(self) -> list[Any]:
        """All state arrays, in the order of their names."""
        arrays = self.state_by_name()
        return [arrays[name] for name in sorted(arrays)]


class OptimizerWrapper(Optimizer):
    """A rule that wraps another: forwards every phase and query to `opt`. A subclass
    sets `opt`.
    """

    opt: Optimizer

    def compute_gradients(
        self, loss: Any, params: trees.Params, **kwargs: Any
    ) -> tuple[Any, trees.Gradients]:
        """Implements `Optimizer.compute_gradients`."""
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

    def get_slot(self, var: str, name: str) -> Any:
        """Forwards to the wrapped rule."""
        return self.opt.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """Forwards to the wrapped rule."""
        return self.opt.get_slot_names()

    def state_by_name(self) -> dict[str, Any]:
        """The state arrays of this rule and of the wrapped rule, by name."""
        return {**self.state_dict(), **self.opt.state_by_name()}


def all_rules(opt: Optimizer) -> list[Optimizer]:
    """The rule and all rules that it holds, in attributes, lists and dicts, outermost
    first.
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
    """The rules of one class among `all_rules(opt)`, outermost first."""
    return [rule for rule in all_rules(opt) if isinstance(rule, kind)]


def _duties(rules: Sequence[Optimizer]) -> list[tuple[Optimizer, str]]:
    """Pairs of a rule that the first one holds and a phase that it overrides, which
    each step must call.
    """
    handed_on = {
        Optimizer.aggregate,
        Optimizer.vote,
        OptimizerWrapper.aggregate,
        OptimizerWrapper.vote,
    }
    required_phases = []
    for rule in rules[1:]:
        for phase in ("aggregate", "vote"):
            if getattr(type(rule), phase) not in handed_on:
                required_phases.append((rule, phase))
    return required_phases
