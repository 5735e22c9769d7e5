"""The three phases of a step, on whole arrays or on global arrays in shards."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from xshard import errors
from xshard.optimizers import layouts as layouts_lib
from xshard.optimizers import replica_map, shards, skips, trees

# The random key of updates, equal on all replicas of a group; None where the caller's
# own keys serve.
_UPDATE_KEY: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "update_key", default=None
)


@contextlib.contextmanager
def update_key(key: jax.Array | None) -> Iterator[None]:
    """Lets the updates of rules in its body draw their random keys from a key that is
    equal on all replicas of a group.
    """
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
      global_step: the number of updates applied; None if the caller gave no
        `global_step`.
      grads: the aggregated gradients, with None for a parameter without one; None as a
        whole if not known.
      new_params: the new parameters again, whole or sharded as `grads` are.
      partition: the partition that `grads` and `new_params` are this replica's shards
        of; None if they are whole.
    """

    params: trees.Params
    applied: Any
    global_step: Any
    grads: trees.Gradients | None
    new_params: trees.Params | None
    partition: shards.Partition | None


class Step:
    """One step of a rule."""

    def __init__(
        self, rules: Sequence[Any], required_phases: Sequence[tuple[Any, str]]
    ):
        """Stores the rules.

        Args:
          rules: the outermost rule, then all rules that it holds.
          required_phases: pairs of a rule and the name of its phase ('aggregate' or 'vote') that
            each step must call.
        """
        self._rule = rules[0]
        self._rules = rules
        self._required_phases = required_phases

    def apply(self, grads: trees.Gradients, params: trees.Params) -> Applied:
        """Aggregates, votes and updates; on global arrays in shards, if a rule returns
        a partition.
        """
        before = skips.current_state()
        partition = self._partition(params)
        if partition is None:
            applied, grads, new = self._on_whole(grads, params)
            done = Applied(new, applied, None, grads, new, None)
        else:
            done = self._on_shards(grads, params, partition)
        self._check_equal(before, done)
        return done

    def _check_equal(self, before: skips.State, done: Applied) -> None:
        """Raises UserError if `vmap_replicas` maps the replicas and the step depends on
        a replica's own values.
        """
        arrays = {}
        if done.applied is not True:
            arrays["its vote"] = done.applied
        arrays |= {repr(path): x for path, x in trees.present(done.params).items()}
        modules = {rule.module_name for rule in self._rules}
        for key, (_, x) in skips.merge_writes(
            before, skips.current_state(), {}
        ).items():
            module, name = key
            # Each slice keeps its own rounding errors.
            if module in modules and not name.startswith(f"{layouts_lib.ERROR}/"):
                arrays[f"{name!r} in the state of {module}"] = x

        def error(name: str) -> Exception:
            return errors.UserError(
                f"{self._rule.name} computes {name} from a value of a replica's own: its loss, its part of the batch, its key or "
                "its index. Each replica would make another update. Make the value equal where the rule takes it, as with "
                "jax.lax.pmean(value, 'replica') in compute_gradients; or use it only before the sum of gradients."
            )

        replica_map.check_equal(arrays, error)

    def _partition(self, params: trees.Params) -> shards.Partition | None:
        for rule in self._rules:
            partition = rule.partition(params)
            if partition is not None:
                return partition
        return None

    def _on_whole(
        self, grads: trees.Gradients, params: trees.Params
    ) -> tuple[Any, trees.Gradients, trees.Params]:
        """Returns whether the step is applied, the aggregated gradients and the new
        parameters.
        """
        grads, applied = _with_own_keys(self._decide)(grads)
        self._settle(applied)
        update = _with_own_keys(self._update, _UPDATE_KEY.get())
        if applied is True or hk.running_init():
            return applied, grads, update(grads, params)
        return (
            applied,
            grads,
            hk.cond(applied, update, lambda _, old: old, grads, params),
        )

    def _on_shards(
        self, grads: trees.Gradients, params: trees.Params, partition: shards.Partition
    ) -> Applied:
        """Does the same on global arrays, whose shards lie on the replicas; XLA
        partitions what the rules compute.
        """
        lie: Callable[..., Any] = lambda layout, x: replica_map.constrain(
            x, partition.spec(layout)
        )
        trained = trees.present(grads)
        old = trees.leaves_by_path(params)
        moved = partition.map(lie, {path: old[path] for path in trained})
        with shards.in_effect(partition):
            grads, applied = _with_own_keys(self._decide)(grads)
        self._settle(applied)
        before = skips.current_state()
        update = _with_own_keys(self._update, _UPDATE_KEY.get())
        updated = trees.leaves_by_path(update(grads, trees.replace(params, moved)))
        # The update may contain collectives, so it always runs, and a skipped step
        # selects the old values.
        new = {}
        for path in trained:
            new[path] = skips.select(applied, updated[path], moved[path])
        written = skips.merge_writes(before, skips.current_state(), skips.NO_WRITES)
        skips.restore_unless_applied(applied, written)
        new = partition.map(lie, new)
        whole = trees.replace(params, partition.gather_global(new))
        return Applied(
            whole, applied, None, grads, trees.rebuild(params, new), partition
        )

    def _decide(self, grads: trees.Gradients) -> tuple[trees.Gradients, Any]:
        """Runs the first two phases: returns the aggregated gradients, and whether to
        apply them.
        """
        before = skips.current_state()
        with self._all_reached():
            grads = self._rule.aggregate(grads)
            written = skips.merge_writes(before, skips.current_state(), skips.NO_WRITES)
            applied = self._rule.vote(grads)
        _check_vote(self._rule, applied)
        skips.restore_unless_applied(applied, written)
        return grads, applied

    def _update(self, grads: trees.Gradients, params: trees.Params) -> trees.Params:
        """Returns the rule's new parameters, once it is known that they can take the
        place of the old ones.
        """
        new = self._rule.update(grads, params)
        _check_updated(self._rule, params, new)
        return new

    def _settle(self, applied: Any) -> None:
        for rule in self._rules:
            rule.restore_unless_applied(applied)

    @contextlib.contextmanager
    def _all_reached(self) -> Iterator[None]:
        """Raises ValueError on exit unless each rule in `required_phases` has had its phase
        called meanwhile.
        """
        reached: set[tuple[int, str]] = set()

        def note(method: Any, args: Any, kwargs: Any, context: hk.MethodContext) -> Any:
            reached.add((id(context.module), context.method_name))
            return method(*args, **kwargs)

        with hk.intercept_methods(note):
            yield
        for rule, phase in self._required_phases:
            if (id(rule), phase) not in reached:
                holder = type(self._rule).__name__
                raise ValueError(
                    f"{holder} holds {rule.name}, but its own {phase} does not call that of {rule.name}, which "
                    f"would have no effect. Derive {holder} from OptimizerWrapper, which forwards {phase} to "
                    f"`opt`, or call it in its {phase}(grads)."
                )


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
    """Raises UserError unless an update returns arrays of the paths, shapes and types
    of the parameters.
    """
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


def _with_own_keys(
    f: Callable[..., Any], given: jax.Array | None = None
) -> Callable[..., Any]:
    """The function with a separate stream of random keys, so the number that it draws
    does not affect later keys.

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
