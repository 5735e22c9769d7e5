"""A run's queries of its update rule, and its requirements on it."""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xshard import errors
from xshard import mesh as mesh_lib
from xshard.optimizers import base, cross_shard, loss_scale, phases, skips, slots, trees
from xshard.optimizers import optax as optax_optimizer

# The metric names of the norms of gradients and of parameters.
NORMS = ("gradient_norm", "parameter_norm")

# The prefix of a gradient's path in the name of the scope that counts its non-finite
# elements.
GRADIENT = "gradient_of:"

# The folder of `optax.inject_hyperparams` in its state.
_HYPERPARAMETERS = "hyperparams"


class SkipNonfinite(base.OptimizerWrapper):
    """Skips each step with a gradient that is not finite, as a dynamic loss scale does.
    It has no state.
    """

    def __init__(self, opt: base.Optimizer):
        super().__init__()
        self.opt = opt

    def vote(self, grads: trees.Gradients) -> Any:
        """Implements `Optimizer.vote`."""
        return skips.all_for(loss_scale.all_finite(grads), self.opt.vote(grads))

    def get_name(self) -> str:
        """The wrapped rule's name."""
        return self.opt.get_name()


def reducing(opt: base.Optimizer) -> list[cross_shard.CrossShardOptimizer]:
    """The rules that reduce gradients, outermost first."""
    return base.rules_of_type(opt, cross_shard.CrossShardOptimizer)


def check_reduces(where: str, opt: base.Optimizer, mesh: jax.sharding.Mesh) -> None:
    """Raises UserError unless a rule, made by `where`, reduces over all replicas of a
    mesh with options that fit it.
    """
    rules = reducing(opt)
    over = {axis for rule in rules for axis in (rule.axis_name, rule.slice_axis_name)}
    wanted = {mesh_lib.REPLICA: "axis_name"}
    if mesh_lib.num_slices(mesh) > 1:
        wanted[mesh_lib.SLICE] = "slice_axis_name"
    for axis, argument in wanted.items():
        if axis not in over:
            raise errors.UserError(
                f"{where} returned {' around '.join(rule.name for rule in base.all_rules(opt))}, which does not "
                f"reduce over the axis '{axis}': replicas would drift apart. Wrap it in a "
                f"CrossShardOptimizer with {argument}='{axis}'."
            )
    for rule in rules:
        if rule.shard_update and rule.axis_name != mesh_lib.REPLICA:
            raise errors.UserError(
                f"{rule.name} shards its update over the axis '{rule.axis_name}'; a run's state is sharded over "
                f"'{mesh_lib.REPLICA}'. Set shard_update on the CrossShardOptimizer over that axis."
            )
        if rule.slice_dtype == "int8" and mesh_lib.num_slices(mesh) == 1:
            raise errors.UserError(cross_shard.NOTHING_BETWEEN_SLICES)


def check_shards_params(
    opt: base.Optimizer, mesh: jax.sharding.Mesh, *, clips: bool
) -> None:
    """Raises UserError if replicas cannot hold shards of the parameters that a rule
    updates.

    Args:
      opt: the rule.
      mesh: the run's mesh.
      clips: whether the learner clips a replica's own gradients before they are summed.
    """
    why = ""
    if clips:
        why = (
            "clip_gradients: no replica has its own gradients, because differentiating a network returns their sum. Clip the "
            "sum in the rule, as optax.clip_by_global_norm does"
        )
    elif type(opt).apply_gradients is not base.Optimizer.apply_gradients:
        why = f"{type(opt).__name__}, which overrides apply_gradients. Implement update instead"
    for rule in base.all_rules(opt):
        if not type(rule).compute_gradients.__module__.startswith("xshard."):
            why = (
                f"{type(rule).__name__}, which overrides compute_gradients: there, a replica has shards of the parameters and "
                "of gradients that are summed already, so a norm or a clip would be another one. Implement update instead"
            )
        elif not type(rule).aggregate.__module__.startswith("xshard."):
            why = (
                f"{type(rule).__name__}, which overrides aggregate: what it is given is no replica's own gradient, because "
                "differentiating a network returns the sum. Implement update instead, which gets the sum"
            )
    if why:
        raise errors.UserError(
            f"reduction.shard_params=True cannot be used with {why}; or set reduction.shard_params to False."
        )


def check_skips(opt: base.Optimizer) -> None:
    """Raises UserError if a rule overrides `apply_gradients`, which `SkipNonfinite`
    around it would not call.
    """
    if type(opt).apply_gradients is not base.Optimizer.apply_gradients:
        raise errors.UserError(
            f"on_nonfinite='skip' cannot be used with {type(opt).__name__}, which overrides apply_gradients: skipping "
            "calls `Optimizer.apply_gradients`, and would not call the override. Implement vote and update "
            "instead, or set on_nonfinite to 'stop' or 'warn'."
        )


def loss_scales(opt: base.Optimizer) -> list[jax.Array]:
    """The current loss scales of all rules, outermost first."""
    rules = base.rules_of_type(opt, loss_scale.MixedPrecisionLossScaleOptimizer)
    return [rule.loss_scale() for rule in rules]


def schedules(opt: base.Optimizer, updates: Any) -> dict[str, Any]:
    """The values of all rules' schedules for the next update, by name; by rule and name
    if two share a name.

    Args:
      opt: the rule.
      updates: the number of updates applied, used as the count if a transformation
        keeps none.
    """
    values = []
    for rule in base.rules_of_type(opt, optax_optimizer.OptaxOptimizer):
        count = updates
        for path, x in sorted(slots.state_of(rule).items(), reverse=True):
            # If there are several counts, the one whose path is first remains.
            if path.rpartition("/")[2] == "count" and skips.is_integer_scalar(x):
                count = x
        # optax also calls schedules with standard type promotion.
        with jax.numpy_dtype_promotion("standard"):
            values += [
                (rule.name, name, f(count)) for name, f in rule.schedules.items()
            ]
    return _by_shortest_name(values)


def hyperparameters(opt: base.Optimizer, params: trees.Params) -> dict[str, Any]:
    """The scalars that `optax.inject_hyperparams` keeps, with their values in the last
    update.

    Args:
      opt: the rule.
      params: the parameters. Their slots are left out, even if a module is named
        'hyperparams'.

    Returns:
      The scalars by name; if two share a name, by their paths in the rules' state.
    """
    values = []
    paths = trees.leaves_by_path(params).keys()
    for rule in base.rules_of_type(opt, optax_optimizer.OptaxOptimizer):
        for path, x in sorted(slots.state_of(rule).items()):
            *place, folder, name = f"{rule.name}/{path}".split("/")
            is_injected = folder == _HYPERPARAMETERS and paths.isdisjoint(
                trees.endings(path)
            )
            if is_injected and not x.shape:
                values.append(("/".join(place), name, x))
    return _by_shortest_name(values)


def _by_shortest_name(values: Sequence[tuple[str, str, Any]]) -> dict[str, Any]:
    """Maps (place, name, value) to values by name, or by place and name if two share a
    name.
    """
    counts = collections.Counter(name for _, name, _ in values)
    return {
        name if counts[name] == 1 else f"{place}/{name}": x for place, name, x in values
    }


def apply(
    opt: base.Optimizer, grads: Any, params: Any, global_step: Any
) -> phases.Applied:
    """Applies gradients. A rule that overrides `apply_gradients` returns only its
    result.
    """
    if type(opt).apply_gradients is base.Optimizer.apply_gradients:
        return opt.apply(grads, params, global_step)
    # The override does not expose its aggregated gradients.
    params, global_step = opt.apply_gradients(grads, params, global_step)
    return phases.Applied(params, None, global_step, None, None, None)


def count_nonfinite(applied: phases.Applied) -> jax.Array:
    """Counts the non-finite elements of each gradient, in float32; 0 for a parameter
    without a gradient.

    The counts have the type of the norms of the same arrays, so that one reduction sums
    both over the replicas.
    """
    if applied.grads is None:
        return jnp.zeros((0,), jnp.float32)
    zero, one = jnp.float32(0), jnp.float32(1)
    numbers = dict.fromkeys(trees.leaves_by_path(applied.grads), zero)
    for path, grad in trees.present(applied.grads).items():
        # The scope's name tells in the program which gradient an operation counts.
        with jax.named_scope(f"{GRADIENT}{path}"):
            numbers[path] = jnp.sum(jnp.where(jnp.isfinite(grad), zero, one))
    return jnp.stack(list(numbers.values()))


def norms(applied: phases.Applied) -> tuple[dict[str, Any], dict[str, Any]]:
    """`shares` and `squares`, as the learner's `_Update` defines them, of the gradients
    and of the new parameters.
    """
    shares: dict[str, Any] = {}
    squares: dict[str, Any] = {}
    if applied.grads is None:
        return shares, squares
    for name, tree in zip(NORMS, (applied.grads, applied.new_params), strict=True):
        if applied.partition is None:
            squares[name] = trees.sum_of_squares(tree)
        else:
            shares[name], squares[name] = applied.partition.sums_of_squares(tree)
    return shares, squares
