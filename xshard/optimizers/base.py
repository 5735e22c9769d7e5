"""The contract of every update rule, and the seam at which rules meet.

An update runs in three phases, and a wrapper may stand between any two of them:

1. `aggregate` makes per-replica gradients the gradients of the whole group. All collectives are here.
2. `vote` decides whether this step is applied. It sees aggregated gradients, so that all replicas of a
   group decide alike.
3. `update` turns gradients into new parameters and slots. It is local, and it alone is conditional.

Where the update is sharded, `aggregate` gives each replica its part of the gradients, and `update` its
part of the parameters; `vote` sees for each gradient a scalar, finite if all gradients are. The parts of
the new parameters are gathered at the end. The update may then hold reductions over replicas, such as a
norm; it is not conditional, but its result is selected.

No collective is conditional: groups may skip at different steps, and a collective that only some
devices reach never ends.

The names and their meaning are those of `tf.compat.v1.train.Optimizer`.
"""

from collections.abc import Sequence
from typing import Any

import haiku as hk
import jax

from xshard.optimizers import gradients, shards, skips, trees
from xshard.optimizers import layouts as layouts_lib


class Optimizer(hk.Module):
    """An update rule with its state. Source: `tf.compat.v1.train.Optimizer`.

    Call it inside `hk.transform_with_state`: all its state is Haiku state. A rule of your own
    implements `update`; a wrapper hands the phases on to the rule that it wraps.

    Parameters and gradients are Haiku trees, `{module: {name: array}}`. A gradient of None, of what is not
    trained or what the loss does not depend on, leaves that parameter and its slots as they are.

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

    # Whether the phases can do with parts of arrays (see `partition`). It counts for the class that says
    # so and defines them: one that overrides a phase says so itself.
    takes_parts = False
    # What `update` is given the parts of; None: whole arrays. Set before each update.
    given: shards.Partition | None = None
    # What `apply_gradients` of this rule has done last.
    applied: shards.Applied | None = None
    # The state that losses have written since the last step.
    _written: skips.Written = skips.NOTHING

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Makes what a loss makes be named as if it stood alone, also where these methods are overridden."""
        super().__init_subclass__(**kwargs)
        for name in {"compute_gradients", "minimize"} & vars(cls).keys():
            setattr(cls, name, hk.transparent(vars(cls)[name]))

    @hk.transparent
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
          loss: a function of the parameters that returns a scalar, or an array when `grad_loss` has
            its shape. It may use Haiku's state and random keys. A sequence of such functions, or one
            function at several inputs (`MicroBatches`), counts as their sum.
          params: a Haiku tree of floating-point arrays.
          var_list: what to train: paths such as 'mlp/linear_0/w', or a predicate of module and name.
            All parameters by default. The gradients of the others are None, as are those of parameters
            that no loss depends on; but while `hk.running_init()` the latter are zeros.
          gate_gradients: an optimization barrier over no gradient (GATE_NONE), each (GATE_OP) or all
            of them together (GATE_GRAPH).
          aggregation_method: how the gradients of several losses are summed: `AggregationMethod`.
          colocate_gradients_with_ops: gives each gradient its parameter's sharding.
          grad_loss: the gradient with respect to the loss, 1 by default. For several losses one for
            all, or for a sequence one each.
          has_aux: whether a loss returns `(value, aux)`.

        Returns:
          `(value, grads)`, or `((value, aux), grads)` with `has_aux`; the value without any scaling.
          For several losses the sum of the values, and a list of each one's aux.

        Raises:
          ValueError: for an option, a name or a shape that does not fit.
        """
        trees.check_params(params)
        gradients.check_options(gate_gradients, aggregation_method)
        trained = trees.select(trees.as_arrays(params), var_list)
        before = skips.current_state()
        value, aux, grads = gradients.value_and_grad(
            loss,
            params,
            trained,
            aggregation_method=aggregation_method,
            grad_loss=grad_loss,
            has_aux=has_aux,
        )
        self._written = skips.written(before, skips.current_state(), self._written)
        if colocate_gradients_with_ops:
            grads = gradients.colocate(grads, trained)
        grads = gradients.gate(grads, gate_gradients)
        return ((value, aux) if has_aux else value), trees.rebuild(params, grads)

    def apply_gradients(
        self,
        grads: trees.Gradients,
        params: trees.Params,
        global_step: Any = None,
        name: str | None = None,
    ) -> Any:
        """Aggregates, votes and updates.

        Args:
          grads: a tree as `params`, as `compute_gradients` and `jax.grad` return it, or with None leaves.
          params: a Haiku tree of floating-point arrays.
          global_step: an integer scalar that counts the updates applied.
          name: a scope's name for profiles; the optimizer's name by default.

        Returns:
          The new parameters, or `(params, global_step)` when a `global_step` was given. After a vote
          against the step both are what they were, bit by bit, and so is all state of the rules, and what
          losses have written since the last step, in this trace and through this rule.

        Raises:
          ValueError: if the gradients do not have the parameters' structure and shapes.
        """
        trees.check_params(params)
        trees.check_gradients(grads, params)
        skips.check_count(global_step)
        given, params = params, trees.as_arrays(params)
        grads = trees.steepest(grads, params)
        with jax.named_scope(name or self.get_name()):
            partition = self.partition(params)
            grads = self.aggregate(grads)
            applied = self.vote(grads if partition is None else partition.ballots(grads))
            for rule in unwrap(self):
                rule._settle(applied)
            if partition is not None:
                new_params = self._update_parts(applied, grads, params, partition)
            elif applied is True or hk.running_init():
                new_params = self.update(grads, params)
            else:
                new_params = hk.cond(applied, self.update, lambda _, old: old, grads, params)
            if partition is None:
                self.applied = shards.Applied(grads, new_params, None)
        new_params = trees.rebuild(given, trees.leaves_by_path(new_params))
        return (
            new_params if global_step is None else (new_params, skips.count(applied, global_step))
        )

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
        """`compute_gradients`, then `apply_gradients`; further arguments as for these.

        Returns:
          `(value, params)` or `((value, aux), params)`, with `global_step` last when it was given.
        """
        value, grads = self.compute_gradients(loss, params, has_aux=has_aux, **kwargs)
        result = self.apply_gradients(grads, params, global_step, name)
        return (value, result) if global_step is None else (value, *result)

    def aggregate(self, grads: trees.Gradients) -> trees.Gradients:
        """Phase 1: the group's gradients from each replica's. All collectives are here."""
        return grads

    def vote(self, grads: trees.Gradients) -> Any:
        """Phase 2: True, or a boolean scalar, equal on all replicas of a group: whether to update."""
        del grads
        return True

    def update(self, grads: trees.Gradients, params: trees.Params) -> trees.Params:
        """Phase 3: the new parameters. Creates its state while `hk.running_init()`."""
        raise NotImplementedError(
            f"{type(self).__name__} does not implement update(grads, params)."
        )

    def partition(self, params: trees.Params) -> shards.Partition | None:
        """Returns how parameters and slots are sharded over the replicas; None: they are not."""
        del params
        return None

    def state_layouts(self, partition: shards.Partition) -> dict[str, layouts_lib.Layouts]:
        """Returns how the state of this rule, and of those that it wraps, is sharded: `{module: {name: layout}}`.

        What is not named there is whole on each replica. A rule of your own with state of its parameters'
        shapes names it, each as its parameter: `{self.module_name: {name: partition.layouts[path], ...}}`.
        """
        del partition
        return {}

    def updates_parts(self) -> bool | None:
        """Returns whether the update is of shards of arrays; None if it is for rules around this one to say."""
        return None

    def rehearse(self, params: trees.Params) -> None:
        """Raises ValueError if an update of such parameters could not be done on parts of them."""
        del params
        self.check_takes_parts()

    def check_takes_parts(self) -> None:
        """Raises ValueError if a phase of this rule does not take parts of arrays."""
        for phase in ("aggregate", "vote", "update"):
            owner = next(cls for cls in type(self).__mro__ if phase in vars(cls))
            handed_on = owner is Optimizer and phase != "update"
            if not (handed_on or vars(owner).get("takes_parts", False)):
                raise ValueError(
                    f"{type(self).__name__} cannot be sharded: its {phase} may mix the elements of an array, "
                    "of which each replica would hold a part. If it goes element by element, set takes_parts "
                    "= True in its class, and name its state in state_layouts; else shard_update=False."
                )

    def _update_parts(
        self,
        applied: Any,
        grads: trees.Gradients,
        params: trees.Params,
        partition: shards.Partition,
    ) -> trees.Params:
        rules = unwrap(self)
        for rule in rules:
            rule.check_takes_parts()
            rule.given = partition
        old = partition.parts(params)
        with hk.custom_setter(skips.setter(applied, skips.current_state())):
            new = self.update(grads, old)
        for rule in rules:
            rule.given = None
        partition.check(new)
        new = jax.tree.map(lambda new, old: skips.select(applied, new, old), new, old)
        self.applied = shards.Applied(grads, new, partition)
        gathered = partition.map(lambda layout, _, new: partition.gather(layout, new), grads, new)
        return trees.replace(params, trees.leaves_by_path(gathered))

    def _settle(self, applied: Any) -> None:
        losses, self._written = self._written, skips.NOTHING
        skips.put_back(applied, losses)

    def get_name(self) -> str:
        """The module's name."""
        return self.name

    def get_slot(self, var: str, name: str) -> Any:
        """The slot of a parameter, such as `get_slot('mlp/linear_0/w', 'mu')`, or None.

        In a step whose update is sharded it is this replica's part.
        """
        del var, name
        return None

    def get_slot_names(self) -> list[str]:
        """The names of the slots in the state, sorted: those that `get_slot` knows. None before it is made."""
        return []

    def state_by_name(self) -> dict[str, Any]:
        """All arrays of state of this rule and of those that it wraps, by name."""
        return dict(self.state_dict())

    def variables(self) -> list[Any]:
        """All arrays of state, in the order of their names."""
        return [value for _, value in sorted(self.state_by_name().items())]


class OptimizerWrapper(Optimizer):
    """A rule around another: hands every phase and every question on to `opt`, which it sets."""

    opt: Optimizer
    takes_parts = True

    def compute_gradients(
        self, loss: Any, params: trees.Params, **kwargs: Any
    ) -> tuple[Any, trees.Gradients]:
        """Implements `Optimizer.compute_gradients`."""
        return self.opt.compute_gradients(loss, params, **kwargs)

    def aggregate(self, grads: trees.Gradients) -> trees.Gradients:
        """The wrapped rule's."""
        return self.opt.aggregate(grads)

    def vote(self, grads: trees.Gradients) -> Any:
        """The wrapped rule's."""
        return self.opt.vote(grads)

    def update(self, grads: trees.Gradients, params: trees.Params) -> trees.Params:
        """The wrapped rule's."""
        return self.opt.update(grads, params)

    def partition(self, params: trees.Params) -> shards.Partition | None:
        """The wrapped rule's."""
        return self.opt.partition(params)

    def state_layouts(self, partition: shards.Partition) -> dict[str, layouts_lib.Layouts]:
        """The wrapped rule's."""
        return self.opt.state_layouts(partition)

    def updates_parts(self) -> bool | None:
        """The wrapped rule's."""
        return self.opt.updates_parts()

    def get_slot(self, var: str, name: str) -> Any:
        """The wrapped rule's."""
        return self.opt.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """The wrapped rule's."""
        return self.opt.get_slot_names()

    def state_by_name(self) -> dict[str, Any]:
        """This rule's and the wrapped one's."""
        return {**self.state_dict(), **self.opt.state_by_name()}


def unwrap(opt: Optimizer) -> list[Optimizer]:
    """The rule and all that it wraps, outermost first."""
    chain = [opt]
    while isinstance(chain[-1], OptimizerWrapper):
        chain.append(chain[-1].opt)
    return chain
