"""The phases of a step (aggregate, vote, update, exchange), on each replica's copies or
on global arrays in shards.

Both forms begin alike: the rules aggregate and vote, and a skipped step restores the
state that losses and `aggregate` wrote. They differ in the update:

* Where no rule shards it, each replica updates its copies of all arrays. That needs no
  collectives, so a conditional skips it.
* Where a rule returns a partition, the replicas update global arrays, each its shard.
  That may need collectives, which must not be conditional. So the update always runs,
  and a skipped step selects the old arrays.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from xshard import errors
from xshard.optimizers import layouts as layouts_lib
from xshard.optimizers import replica_calls, shards, skips, trees


class Applied(NamedTuple):
    """The result of `Optimizer.apply`.

    Attributes:
      params: the new parameters.
      applied: whether the step was applied: True, or a boolean scalar; None if an
        override of `apply_gradients` does not say.
      global_step: the number of updates applied; None if the caller gave no
        `global_step`.
      grads: the aggregated gradients, with None for a parameter without one; None for
        all if they are not known.
      old_params: the parameters before the step, whole or sharded as `grads` are.
      new_params: the new parameters again, likewise.
      partition: how `grads` and these parameters are sharded; None if they are whole.
    """

    params: trees.Params
    applied: Any
    global_step: Any
    grads: trees.Gradients | None
    old_params: trees.Params | None
    new_params: trees.Params | None
    partition: shards.Partition | None


class Step:
    """One step of a rule."""

    def __init__(
        self,
        rules: Sequence[Any],
        required_phases: Sequence[tuple[Any, str]],
        update_key: jax.Array | None,
    ):
        """Stores the rules.

        Args:
          rules: the outermost rule, then all rules that it holds.
          required_phases: pairs of a rule and the name of its phase ('aggregate',
            'vote' or 'exchange') that the step must call.
          update_key: the random key from which the update draws, equal on all replicas
            of a group; None for the caller's next one, if the caller has keys.
        """
        self._rule = rules[0]
        self._rules = rules
        self._required_phases = required_phases
        self._update_key = update_key

    def apply(self, grads: trees.Gradients, params: trees.Params) -> Applied:
        """Aggregates, votes and updates.

        Args:
          grads: the gradients, in dicts.
          params: the parameters, in dicts.

        Returns:
          The result, without a `global_step`.
        """
        state_before = skips.current_state()
        partition = self._partition(params)
        if partition is None:
            done = self._apply_locally(grads, params)
            new = trees.present(done.params)
            self._check_equal(state_before, done.applied, new)
            return done
        self._check_given(params)
        return self._apply_in_shards(grads, params, partition)

    def _partition(self, params: trees.Params) -> shards.Partition | None:
        """Returns how the step is sharded: by the outermost rule that shards it."""
        for rule in self._rules:
            partition = rule.partition(params)
            if partition is not None:
                return partition
        return None

    def _apply_locally(self, grads: trees.Gradients, params: trees.Params) -> Applied:
        """Lets each replica update its copy of all arrays."""
        grads, applied = _with_separate_keys(self._aggregate_and_vote)(grads)
        self._restore_loss_writes(applied)
        update = _with_separate_keys(self._update, self._update_key)
        if applied is True or hk.running_init():
            new = update(grads, params)
        else:
            # A skipped step computes nothing. `hk.cond` also returns the old state for
            # it.
            keep = lambda _, old: old
            new = hk.cond(applied, update, keep, grads, params)
        new = self._exchange(params, new, applied)
        return Applied(
            params=new,
            applied=applied,
            global_step=None,
            grads=grads,
            old_params=params,
            new_params=new,
            partition=None,
        )

    def _apply_in_shards(
        self, grads: trees.Gradients, params: trees.Params, partition: shards.Partition
    ) -> Applied:
        """Updates global arrays in shards; XLA partitions what the rules compute."""

        def constrain(layout: layouts_lib.Layout, x: jax.Array) -> jax.Array:
            """Returns a global array, declared to lie in shards on the replicas."""
            return replica_calls.constrain(x, partition.spec(layout))

        first_state = skips.current_state()
        # With parameters in shards like the gradients, each device computes only its
        # shard of what an update computes by elements.
        old_shards = partition.map(constrain, trees.leaves_by_path(params))
        with shards.in_effect(partition):
            grads, applied = _with_separate_keys(self._aggregate_and_vote)(grads)
        self._restore_loss_writes(applied)
        # An `aggregate` may give a gradient to a parameter that had none.
        trained = trees.present(grads)

        # The update always runs. A skipped step selects the old arrays and state.
        state_before = skips.current_state()
        update = _with_separate_keys(self._update, self._update_key)
        trained_shards = {path: old_shards[path] for path in trained}
        before = trees.replace(params, trained_shards)
        updated = _changed(before, update(grads, before), trained)
        new_shards = {}
        for path, x in updated.items():
            new_shards[path] = skips.select(applied, x, old_shards[path])
        skips.restore_unless_applied(applied, skips.writes_since(state_before))

        after = trees.replace(params, new_shards)
        with shards.in_effect(partition):
            exchanged = self._exchange(before, after, applied)
        new_shards = _changed(after, exchanged, new_shards)
        # Only a global array can be constrained.
        self._check_equal(first_state, applied, new_shards)
        new_shards = partition.map(constrain, new_shards)
        return Applied(
            params=trees.replace(params, partition.gather_global(new_shards)),
            applied=applied,
            global_step=None,
            grads=grads,
            # The parameters that are not trained are there too, for the norm of all.
            old_params=trees.rebuild(params, old_shards),
            new_params=trees.rebuild(params, {**old_shards, **new_shards}),
            partition=partition,
        )

    def _aggregate_and_vote(
        self, grads: trees.Gradients
    ) -> tuple[trees.Gradients, Any]:
        """Runs the first two phases.

        A step that is voted against restores what `aggregate` wrote, but keeps what
        `vote` wrote, such as a lower loss scale.

        Returns:
          The aggregated gradients, and whether to apply them.
        """
        state_before = skips.current_state()
        with self._requiring_phases("aggregate", "vote"):
            grads = self._rule.aggregate(grads)
            writes = skips.writes_since(state_before)
            applied = self._rule.vote(grads)
        _check_vote(self._rule, applied)
        skips.restore_unless_applied(applied, writes)
        return grads, applied

    def _restore_loss_writes(self, applied: Any) -> None:
        for rule in self._rules:
            rule.restore_unless_applied(applied)

    def _update(self, grads: trees.Gradients, params: trees.Params) -> trees.Params:
        """Runs the third phase, and checks its result."""
        new = self._rule.update(grads, params)
        _check_updated(self._rule, params, new)
        return new

    def _exchange(
        self, before: trees.Params, after: trees.Params, applied: Any
    ) -> trees.Params:
        """Runs the fourth phase, and checks its result."""
        with self._requiring_phases("exchange"):
            new = self._rule.exchange(before, after, applied)
        if new is not after:
            _check_updated(self._rule, after, new)
        return new

    @contextlib.contextmanager
    def _requiring_phases(self, *phases: str) -> Iterator[None]:
        """Raises ValueError unless its body calls those of the required phases that
        have these names.
        """
        called: set[tuple[int, str]] = set()

        def note(method: Any, args: Any, kwargs: Any, context: hk.MethodContext) -> Any:
            called.add((id(context.module), context.method_name))
            return method(*args, **kwargs)

        with hk.intercept_methods(note):
            yield
        for rule, phase in self._required_phases:
            if phase not in phases or (id(rule), phase) in called:
                continue
            holder = type(self._rule).__name__
            raise ValueError(
                f"{holder} holds {rule.name}, but its own {phase} does not call that "
                f"of {rule.name}, which would have no effect. Derive {holder} from "
                f"OptimizerWrapper, which forwards {phase} to `opt`, or call it in its "
                f"own {phase}."
            )

    def _check_given(self, params: trees.Params) -> None:
        """Raises UserError if the parameters of a sharded update differ by replica.

        Where `vmap_replicas` maps the replicas, JAX shows that. Elsewhere it does
        nothing.
        """

        def error(path: str) -> Exception:
            return errors.UserError(
                f"{self._rule.name} shards its update, and is given the parameter "
                f"{path!r} with other values on each replica. Give it the same on all "
                "of them, with a spec of vmap_replicas that names no axis; or set "
                "shard_update=False."
            )

        replica_calls.check_equal(trees.leaves_by_path(params), error)

    def _check_equal(
        self, state_before: skips.State, applied: Any, params: dict[str, Any]
    ) -> None:
        """Raises UserError if the step depends on a value that differs by replica.

        Where `vmap_replicas` maps the replicas, JAX shows that. Elsewhere it does
        nothing.

        Args:
          state_before: the state before the step.
          applied: the vote.
          params: the new parameters, by path.
        """
        arrays = {}
        if applied is not True:
            arrays["its vote"] = applied
        for path, x in params.items():
            arrays[repr(path)] = x
        modules = {rule.module_name for rule in self._rules}
        for (module, name), (_, x) in skips.writes_since(state_before).items():
            if module in modules:
                arrays[f"{name!r} in the state of {module}"] = x

        def error(name: str) -> Exception:
            return errors.UserError(
                f"{self._rule.name} computes {name} from a value of a replica's own: "
                "its loss, its part of the batch, its key or its index. Each replica "
                "would make another update. Make the value equal where the rule takes "
                "it, as with jax.lax.pmean(value, 'replica') in compute_gradients; or "
                "use it only before the sum of gradients."
            )

        replica_calls.check_equal(arrays, error)


def _changed(old: trees.Params, new: trees.Params, trained: Any) -> dict[str, Any]:
    """Returns the new arrays of trained parameters, and of others that a rule moves.

    A rule may move a parameter without a gradient, as a projection does.

    Args:
      old: the parameters that the rule was given.
      new: those that it returned.
      trained: the paths of parameters that count as changed in any case.
    """
    before = trees.leaves_by_path(old)
    changed = {}
    for path, x in trees.leaves_by_path(new).items():
        if path in trained or x is not before[path]:
            changed[path] = x
    return changed


def _check_vote(rule: Any, applied: Any) -> None:
    """Raises UserError unless a vote is True, False or a boolean scalar."""
    if isinstance(applied, bool):
        return
    if getattr(applied, "shape", None) != () or applied.dtype != bool:
        raise errors.UserError(
            f"The vote of {rule.name} is {applied!r}: it must be True, or a boolean "
            "array of shape (), which says whether to apply the step. Does a vote lack "
            "a return statement?"
        )


def _check_updated(rule: Any, old: trees.Params, new: Any) -> None:
    """Raises UserError unless an update's result can replace the old parameters.

    It must have arrays of the same paths, shapes and dtypes.
    """
    old_leaves = trees.leaves_by_path(old)
    new_leaves = trees.leaves_by_path(new)
    for path in sorted(old_leaves.keys() | new_leaves.keys()):
        problem = _problem_of_updated(path, old_leaves, new_leaves)
        if problem:
            raise errors.UserError(
                f"The update of {rule.name} must return the new parameters in the tree "
                "of the old ones, with their shapes and types; what it returned "
                f"{problem}."
            )


def _problem_of_updated(path: str, old: dict[str, Any], new: dict[str, Any]) -> str:
    """Returns why the array of a path cannot replace the old one; empty if it can."""
    if new.get(path) is None:
        return f"lacks {path!r}"
    if path not in old:
        return f"has {path!r}, which is no parameter"
    shape = jnp.shape(new[path])
    dtype = jnp.result_type(new[path])
    old_shape = jnp.shape(old[path])
    old_dtype = jnp.result_type(old[path])
    if (shape, dtype) != (old_shape, old_dtype):
        return (
            f"has {path!r} as {dtype} of shape {shape}, but the parameter is "
            f"{old_dtype} of shape {old_shape}"
        )
    return ""


def _with_separate_keys(
    f: Callable[..., Any], key: jax.Array | None = None
) -> Callable[..., Any]:
    """Returns the function with random keys of its own.

    However many keys it draws, the caller's later keys are the same.

    Args:
      f: the function.
      key: the key from which it draws; by default the caller's next one, if the caller
        has keys.
    """
    # The caller's next key is drawn in either case, so that its later keys do not
    # depend on whether another is given.
    next_key = hk.maybe_next_rng_key()
    if key is None:
        key = next_key
    if key is None:
        return f

    def with_keys(*args: Any) -> Any:
        with hk.with_rng(key):
            return f(*args)

    return with_keys
