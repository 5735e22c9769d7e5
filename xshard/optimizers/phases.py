"""The three phases of a step, evaluated on whole arrays or on this replica's shards."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from absl import logging

from xshard import errors
from xshard.optimizers import layouts as layouts_lib
from xshard.optimizers import sharded_calls, shards, skips, trees, values

# The random key of updates, equal on all replicas of a group; None where the caller's own keys serve.
_UPDATE_KEY: contextvars.ContextVar[Any] = contextvars.ContextVar("update_key", default=None)


@contextlib.contextmanager
def update_key(key: jax.Array | None) -> Iterator[None]:
    """Lets the updates of rules in its body draw their random keys from a key that is equal on all replicas of a group."""
    token = _UPDATE_KEY.set(key)
    try:
        yield
    finally:
        _UPDATE_KEY.reset(token)


class Applied(NamedTuple):
    """The result of `Optimizer.apply`.

    Attributes:
      params: the new parameters.
      applied: whether the step was applied: True, or a boolean scalar.
      global_step: the number of updates applied; None if the caller gave no `global_step`.
      grads: the aggregated gradients, with None for a parameter without one; None as a whole if not known.
      new_params: the new parameters again, whole or sharded as `grads` are.
      partition: the partition that `grads` and `new_params` are this replica's shards of; None if they are whole.
    """

    params: trees.Params
    applied: Any
    global_step: Any
    grads: trees.Gradients | None
    new_params: trees.Params | None
    partition: shards.Partition | None


class Step:
    """One step of a rule."""

    def __init__(self, rules: Sequence[Any], duties: Sequence[tuple[Any, str]]):
        """Stores the rules.

        Args:
          rules: the outermost rule, then all rules that it holds.
          duties: pairs of a rule and the name of its phase ('aggregate' or 'vote') that each step must call.
        """
        self._rule = rules[0]
        self._rules = rules
        self._duties = duties

    def apply(self, grads: trees.Gradients, params: trees.Params) -> Applied:
        """Aggregates, votes and updates; on shards, if a rule returns a partition."""
        partition = self._partition(params)
        if partition is None or hk.running_init():
            # State is created whole. The caller that stores it (a run or `StateSharding`) cuts it into shards.
            applied, grads, new = self._on_whole(grads, params)
            if isinstance(partition, shards.Rehearsal):
                self._rehearse(grads, params, partition)
            return Applied(new, applied, None, grads, new, None)
        shape_of_whole = lambda layout, x: jax.ShapeDtypeStruct(layout.shape, x.dtype)
        whole = partition.map(shape_of_whole, params)
        state = self._state_shapes(grads, whole)
        applied, grads, new = self._on_shards(grads, params, partition, state)

        def gather(layout: layouts_lib.Layout, grad: Any, x: jax.Array) -> jax.Array:
            # `map` skips the parameters without a gradient: they are unchanged on all replicas, so nothing is sent.
            del grad
            return x if layout.shards_param else partition.gather(layout, x)

        gathered = partition.map(gather, grads, new)
        params = trees.replace(params, trees.leaves_by_path(gathered))
        return Applied(params, applied, None, grads, new, partition)

    def _partition(self, params: trees.Params) -> shards.Partition | None:
        for rule in self._rules:
            partition = rule.partition(params)
            if partition is not None:
                return partition
        return None

    def _on_whole(
        self, grads: trees.Gradients, params: trees.Params
    ) -> tuple[Any, trees.Gradients, trees.Params]:
        """Returns whether the step is applied, the aggregated gradients and the new parameters."""
        grads, applied = _with_own_keys(self._decide)(grads)
        self._settle(applied)
        update = _with_own_keys(self._update, _UPDATE_KEY.get())
        if applied is True or hk.running_init():
            return applied, grads, update(grads, params)
        return applied, grads, hk.cond(applied, update, lambda _, old: old, grads, params)

    def _on_shards(
        self,
        grads: trees.Gradients,
        params: trees.Params,
        partition: shards.Partition,
        state: Any,
    ) -> tuple[Any, trees.Gradients, trees.Params]:
        """Does the same on this replica's shards. The returned gradients and parameters are shards, too."""
        names = [rule.name for rule in self._rules]
        calls = sharded_calls.ShardedCalls(partition, state, names)
        grads = partition.map(functools.partial(_given, partition), grads)
        grads, applied = self._decide_on_shards(calls, grads)
        self._settle(applied)
        old = partition.own(params)
        update = _with_own_keys(self._rule.update, _UPDATE_KEY.get())
        new = calls(update, grads, partition.map(values.shard, old), applied=applied)
        new = trees.rebuild(params, trees.leaves_by_path(new))
        new = partition.map(calls.own, new)
        # The update may contain collectives, so it always runs, and a skipped step selects the old values.
        new = jax.tree.map(lambda new, old: skips.select(applied, new, old), new, old)
        return applied, partition.map(calls.own, grads), new

    def _decide_on_shards(
        self, calls: sharded_calls.ShardedCalls, grads: trees.Gradients
    ) -> tuple[trees.Gradients, Any]:
        def decide(grads: trees.Gradients) -> Any:
            # A traced function returns only arrays and None, so None stands for the constant True.
            grads, applied = self._decide(grads)
            return grads, None if applied is True else applied

        before = _traced_attributes(self._rules)
        grads, applied = calls(_with_own_keys(decide), grads)
        for (rule, name), value in _traced_attributes(self._rules).items():
            if value is not before.get((rule, name)):
                raise ValueError(
                    f"{rule} cannot be sharded: its aggregate or vote sets the attribute '{name}' to a value of the "
                    "step, but each phase is traced separately. Keep the value as Haiku state (hk.set_state)."
                )
        return grads, True if applied is None else applied

    def _decide(self, grads: trees.Gradients) -> tuple[trees.Gradients, Any]:
        """Runs the first two phases: returns the aggregated gradients, and whether to apply them."""
        before = skips.current_state()
        with self._all_reached():
            grads = self._rule.aggregate(grads)
            written = skips.merge_writes(before, skips.current_state(), skips.NO_WRITES)
            applied = self._rule.vote(grads)
        _check_vote(self._rule, applied)
        skips.restore_unless_applied(applied, written)
        return grads, applied

    def _update(self, grads: trees.Gradients, params: trees.Params) -> trees.Params:
        """Returns the rule's new parameters, once it is known that they can take the place of the old ones."""
        new = self._rule.update(grads, params)
        _check_updated(self._rule, params, new)
        return new

    def _settle(self, applied: Any) -> None:
        for rule in self._rules:
            rule.settle(applied)

    def _state_shapes(self, grads: trees.Gradients, params: trees.Params) -> Any:
        """The shapes and types of the rules' whole state."""
        paths = trees.leaves_by_path(params).keys()
        trained = set(trees.present(grads))
        # A phase may also read state that other modules created. Its name ends in no parameter's path, so it is not a
        # slot and is already whole.
        others = {}
        for key, x in skips.current_state().items():
            _, name = key
            ends = paths & trees.endings(name)
            trained |= ends
            if not ends:
                others[key] = x

        def make(others: Any, params: trees.Params) -> None:
            skips.write(others)
            leaves = trees.leaves_by_path(params)
            # Only shapes matter here, so the parameters serve as their own gradients.
            grads, _ = self._decide(trees.rebuild(params, {path: leaves[path] for path in trained}))
            self._update(grads, params)

        init = hk.transform_with_state(make).init
        parameters, state = jax.eval_shape(init, jax.random.key(0), others, params)
        if parameters:
            names = sorted(trees.leaves_by_path(parameters))
            raise ValueError(
                f"{self._rule.name} cannot be sharded: its aggregate, vote or update calls hk.get_parameter for "
                f"{names}, but on shards each phase is traced separately, with access to Haiku's state only. Keep "
                "these arrays as Haiku state (hk.get_state, hk.set_state), or set shard_update=False."
            )
        return state

    def _rehearse(
        self, grads: trees.Gradients, params: trees.Params, partition: shards.Rehearsal
    ) -> None:
        """Raises ValueError if the rules cannot update these parameters on shards; logs what the update gathers."""
        whole = self._state_shapes(grads, params)

        def of_shard(layout: layouts_lib.Layout | None, x: Any) -> Any:
            return x if layout is None else jax.ShapeDtypeStruct(layout.local_shape, x.dtype)

        def update(grads: trees.Gradients, params: trees.Params) -> Any:
            _, grads, new = self._on_shards(grads, params, partition, whole)
            return grads, new

        state = layouts_lib.map_state(of_shard, partition.state_layouts(whole), whole)
        step = hk.transform_with_state(update)
        # A rule may use a mapped axis, which only a step has: JAX then raises NameError.
        with contextlib.suppress(NameError):
            jax.eval_shape(step.apply, {}, state, jax.random.key(0), grads, params)
        if partition.gathered:
            _log_gathered(sum(partition.gathered.values()), *sorted(partition.gathered))

    @contextlib.contextmanager
    def _all_reached(self) -> Iterator[None]:
        """Raises ValueError on exit unless each rule in `duties` has had its phase called meanwhile."""
        reached: set[tuple[int, str]] = set()

        def note(method: Any, args: Any, kwargs: Any, context: hk.MethodContext) -> Any:
            reached.add((id(context.module), context.method_name))
            return method(*args, **kwargs)

        with hk.intercept_methods(note):
            yield
        for rule, phase in self._duties:
            if (id(rule), phase) not in reached:
                holder = type(self._rule).__name__
                raise ValueError(
                    f"{holder} holds {rule.name}, but its own {phase} does not call that of {rule.name}, which "
                    f"would have no effect. Derive {holder} from OptimizerWrapper, which forwards {phase} to "
                    f"`opt`, or call it in its {phase}(grads)."
                )


@functools.cache
def _log_gathered(size: int, *paths: str) -> None:
    """Logs this once for each set of arguments, because a run creates its state several times."""
    more = ", ..." if len(paths) > 8 else ""
    logging.info(
        "Besides the new parameters, the sharded update gathers %.3g MB in each step, because its rules need these "
        "arrays whole: %s%s.", size / 1e6, ", ".join(paths[:8]), more,
    )  # fmt: skip


def _given(partition: shards.Partition, layout: layouts_lib.Layout, grad: Any) -> Any:
    """A gradient as a rule receives it; `Summed` for a parameter held in shards, whose gradient is summed already."""
    if not layout.shards_param:
        return grad
    return values.Summed(trees.widen(layout.shard(grad, partition.index)), layout)


def _traced_attributes(rules: Sequence[Any]) -> dict[tuple[str, str], Any]:
    """The attributes of rules that hold JAX tracers, by the names of the rule and of the attribute."""
    traced = {}
    for rule in rules:
        for name, value in vars(rule).items():
            if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
                traced[rule.name, name] = value
    return traced


def _check_vote(rule: Any, applied: Any) -> None:
    """Raises UserError unless a vote is True, False or a boolean scalar."""
    if isinstance(applied, bool):
        return
    if getattr(applied, "shape", None) != () or applied.dtype != bool:
        raise errors.UserError(
            f"The vote of {rule.name} is {applied!r}: it must be True, or a boolean array of shape (), which says whether to apply "
            "the step. Does a vote lack a return statement?"
        )


def _check_updated(rule: Any, old: trees.Params, new: Any) -> None:
    """Raises UserError unless an update returns arrays of the paths, shapes and types of the parameters."""
    wanted, given = trees.leaves_by_path(old), trees.leaves_by_path(new)
    for path in sorted(wanted.keys() | given.keys()):
        if given.get(path) is None:
            problem = f"lacks {path!r}"
        elif path not in wanted:
            problem = f"has {path!r}, which is no parameter"
        elif _kind(given[path]) != _kind(wanted[path]):
            shape, dtype = _kind(given[path])
            old_shape, old_dtype = _kind(wanted[path])
            problem = f"has {path!r} as {dtype} of shape {shape}, but the parameter is {old_dtype} of shape {old_shape}"
        else:
            continue
        raise errors.UserError(
            f"The update of {rule.name} must return the new parameters in the tree of the old ones, with their shapes and "
            f"types; what it returned {problem}."
        )


def _kind(x: Any) -> tuple[tuple[int, ...], Any]:
    return jnp.shape(x), jnp.result_type(x)


def _with_own_keys(f: Callable[..., Any], given: jax.Array | None = None) -> Callable[..., Any]:
    """The function with a separate stream of random keys, so the number that it draws does not affect later keys.

    Args:
      f: the function.
      given: the key from which it draws, in place of the caller's next one.
    """
    own = hk.maybe_next_rng_key()
    key = own if given is None else given
    if key is None:
        return f

    def with_keys(*args: Any) -> Any:
        with hk.with_rng(key):
            return f(*args)

    return with_keys
