"""A run's queries of its update rule, and its requirements on it."""

import collections
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax

from xshard import errors
from xshard.base import loss_scale_keys, mesh_axes
from xshard.optimizers import (
    base,
    cross_shard,
    loss_scale,
    moving_average,
    outer,
    phases,
    skips,
    slots,
    trees,
)
from xshard.optimizers import optax as optax_optimizer

# The prefix of a gradient's path in the name of the scope that counts its non-finite
# elements. A replay of the step finds the gradient by it.
GRADIENT = "gradient_of:"

# The folder of `optax.inject_hyperparams` in its state.
_HYPERPARAMETERS = "hyperparams"

# The loss scales by the kind that `config.loss_scale` names.
_LOSS_SCALES: dict[str, type[loss_scale.LossScale]] = {
    loss_scale_keys.DYNAMIC: loss_scale.DynamicLossScale,
    loss_scale_keys.FIXED: loss_scale.FixedLossScale,
}

# The keys of `config.reduction` that a rule keeps. The arithmetic is the run's.
_REDUCTION_ARGUMENTS = (
    "reduction",
    "reduce_dtype",
    "slice_dtype",
    "shard_update",
    "shard_params",
)

# The keys of `config.outer` that are arguments of an outer rule.
_OUTER_ARGUMENTS = (
    "every_steps",
    "dtype",
    "fragments",
    "delay_steps",
)


class SkipNonfinite(base.OptimizerWrapper):
    """Skips each step with a gradient that is not finite.

    A dynamic loss scale does so too. This rule has no state.
    """

    def __init__(self, opt: base.Optimizer):
        super().__init__()
        self.opt = opt

    def vote(self, grads: trees.Gradients) -> Any:
        """Implements `Optimizer.vote`."""
        finite = loss_scale.all_finite(grads)
        return skips.all_for(finite, self.opt.vote(grads))

    def get_name(self) -> str:
        """Returns the wrapped rule's name."""
        return self.opt.get_name()


def compose(transformation: Any, config: ml_collections.ConfigDict) -> base.Optimizer:
    """Returns the rule that a run makes of a plain optax transformation.

    It is called inside `hk.transform_with_state`, as the constructors of rules are.

    Args:
      transformation: an optax transformation.
      config: the run's config, of which `reduction` and `loss_scale` are read.

    Raises:
      ValueError: for an invalid value of either.
    """
    opt: base.Optimizer = optax_optimizer.OptaxOptimizer(transformation)
    opt = cross_shard.CrossShardOptimizer(
        opt, slice_axis_name=mesh_axes.SLICE, **config.reduction
    )
    kind = loss_scale_keys.kind(config)
    if kind == loss_scale_keys.NONE:
        return opt
    scale = _LOSS_SCALES[kind](**loss_scale_keys.arguments(config))
    return loss_scale.MixedPrecisionLossScaleOptimizer(opt, scale)


def check_composed(
    where: str, opt: base.Optimizer, config: ml_collections.ConfigDict
) -> None:
    """Raises UserError if a config's reduction or loss scale reaches no rule.

    Whoever composes a rule by hand passes these values on. Without that, as in
    `CrossShardOptimizer(optax.adam(1e-3))`, nothing of what the config asks for would
    happen.

    Args:
      where: what returned the rule, for messages.
      opt: the rule.
      config: the run's config.
    """

    def unreached(key: str, value: Any, passed_on: str, default: Any) -> Exception:
        return errors.UserError(
            f"config.{key}={value!r} reaches no rule of {where}, so nothing of it "
            f"would happen: pass it on, as in {passed_on}; or return the plain optax "
            f"transformation, which the run wraps; or leave it at {default!r}."
        )

    signature = inspect.signature(cross_shard.CrossShardOptimizer.__init__)
    passed_on = "CrossShardOptimizer(rule, **self.config.reduction)"
    for key in _REDUCTION_ARGUMENTS:
        default = signature.parameters[key].default
        value = config.reduction.get(key, default)
        has_value = any(getattr(rule, key) == value for rule in reducing(opt))
        if value != default and not has_value:
            raise unreached(f"reduction.{key}", value, passed_on, default)
    kind = loss_scale_keys.kind(config)
    if kind == loss_scale_keys.NONE:
        return
    wanted = _LOSS_SCALES[kind]
    rules = base.rules_of_type(opt, loss_scale.MixedPrecisionLossScaleOptimizer)
    if not any(isinstance(rule.loss_scale, wanted) for rule in rules):
        passed_on = f"MixedPrecisionLossScaleOptimizer(rule, {wanted.__name__}(...))"
        raise unreached("loss_scale.kind", kind, passed_on, loss_scale_keys.NONE)


def reducing(opt: base.Optimizer) -> list[cross_shard.CrossShardOptimizer]:
    """Returns the rules that reduce gradients, outermost first."""
    return base.rules_of_type(opt, cross_shard.CrossShardOptimizer)


def check_reduces(where: str, opt: base.Optimizer, mesh: jax.sharding.Mesh) -> None:
    """Raises UserError unless a rule reduces over all replicas of a mesh.

    Its options must fit the mesh too, and it must not divide an axis into groups.

    Args:
      where: what returned the rule, for messages.
      opt: the rule.
      mesh: the run's mesh.
    """
    rules = reducing(opt)
    reduced_axes = set()
    for rule in rules:
        reduced_axes |= {rule.axis_name, rule.slice_axis_name}
    wanted = {mesh_axes.REPLICA: "axis_name"}
    if mesh.shape[mesh_axes.SLICE] > 1:
        wanted[mesh_axes.SLICE] = "slice_axis_name"
    for axis, argument in wanted.items():
        if axis not in reduced_axes:
            names = " around ".join(rule.name for rule in base.all_rules(opt))
            raise errors.UserError(
                f"{where} returned {names}, which does not reduce over the axis "
                f"'{axis}': replicas would drift apart. Wrap it in a "
                f"CrossShardOptimizer with {argument}='{axis}'."
            )
    for rule in rules:
        groups = rule.group_assignment or []
        if rule.axis_name in mesh_axes.BATCH and len(groups) > 1:
            raise errors.UserError(
                f"{where} returned {rule.name} with group_assignment={groups}, which "
                f"sums within parts of the axis '{rule.axis_name}': the replicas of a "
                "run's group would drift apart, and a checkpoint keeps only one copy "
                "of their model. Leave it out, and set config.group_assignment for "
                "groups that each train a model of their own."
            )
        if rule.shard_update and rule.axis_name != mesh_axes.REPLICA:
            raise errors.UserError(
                f"{rule.name} shards its update over the axis '{rule.axis_name}'; a "
                f"run's state is sharded over '{mesh_axes.REPLICA}'. Set shard_update "
                "on the CrossShardOptimizer over that axis."
            )


def check_shards_params(opt: base.Optimizer, *, clips: bool) -> None:
    """Raises UserError if replicas cannot hold shards of a rule's parameters.

    Args:
      opt: the rule.
      clips: whether the learner clips each replica's gradients before they are summed.
    """
    obstacle = _obstacle_to_shards(opt, clips)
    if obstacle:
        raise errors.UserError(
            f"reduction.shard_params=True cannot be used with {obstacle}; or set "
            "reduction.shard_params to False."
        )


def _obstacle_to_shards(opt: base.Optimizer, clips: bool) -> str:
    """Returns what keeps parameters from being in shards, and a remedy; or nothing."""
    # The innermost rule first.
    for rule in reversed(base.all_rules(opt)):
        kind = type(rule)
        if not kind.compute_gradients.__module__.startswith("xshard."):
            return (
                f"{kind.__name__}, which overrides compute_gradients: there, a replica "
                "has shards of the parameters and of gradients that are summed "
                "already, so a norm or a clip would be another one. Implement update "
                "instead"
            )
        if not kind.aggregate.__module__.startswith("xshard."):
            return (
                f"{kind.__name__}, which overrides aggregate: what it is given is no "
                "replica's own gradient, because differentiating a network returns the "
                "sum. Implement update instead, which gets the sum"
            )
    if clips:
        return (
            "clip_gradients: no replica has its own gradients, because differentiating "
            "a network returns their sum. Clip the sum in the rule, as "
            "optax.clip_by_global_norm does"
        )
    if _overrides_apply_gradients(opt):
        return (
            f"{type(opt).__name__}, which overrides apply_gradients. Implement update "
            "instead"
        )
    return ""


def _overrides_apply_gradients(opt: base.Optimizer) -> bool:
    return type(opt).apply_gradients is not base.Optimizer.apply_gradients


def check_skips(opt: base.Optimizer) -> None:
    """Raises UserError if a rule cannot be wrapped in `SkipNonfinite`.

    The wrapper would not call the rule's `apply_gradients`, if it overrides that.
    """
    if _overrides_apply_gradients(opt):
        raise errors.UserError(
            f"on_nonfinite='skip' cannot be used with {type(opt).__name__}, which "
            "overrides apply_gradients: skipping calls `Optimizer.apply_gradients`, "
            "and would not call the override. Implement vote and update instead, or "
            "set on_nonfinite to 'stop' or 'warn'."
        )


def check_shows_gradients(opt: base.Optimizer, key: str) -> None:
    """Raises UserError if a rule hides the gradients that it updates with.

    Args:
      opt: the rule.
      key: the key of the config that needs them, with its value.
    """
    if _overrides_apply_gradients(opt):
        raise errors.UserError(
            f"{key} cannot be used with {type(opt).__name__}, which overrides "
            "apply_gradients, so that the gradients it sums are not known. Implement "
            "update instead, or set the key to 0."
        )


def with_outer_rule(where: str, opt: base.Optimizer, options: Any) -> base.Optimizer:
    """Returns the rule within an `OuterOptimizer`, unless it has one already.

    Args:
      where: what returned the rule, for messages.
      opt: the rule.
      options: `config.outer` of the run.

    Raises:
      UserError: if the rule cannot be used with an outer rule, or has one with other
        arguments.
    """
    averaging = base.rules_of_type(opt, moving_average.MovingAverageOptimizer)
    if averaging:
        raise errors.UserError(
            f"{where} returned {averaging[0].name}, which cannot be used with "
            f"outer.every_steps={options.every_steps}: each slice would keep another "
            "average. An evaluation uses the parameters of the last exchange, which "
            "are a mean over slices already. Leave the averages out."
        )
    if _overrides_apply_gradients(opt):
        raise errors.UserError(
            f"outer.every_steps={options.every_steps} cannot be used with "
            f"{type(opt).__name__}, which overrides apply_gradients: an outer rule "
            "would not call the override. Implement vote and update instead."
        )
    own = base.rules_of_type(opt, outer.OuterOptimizer)
    if own:
        for key in _OUTER_ARGUMENTS:
            value = getattr(own[0], key)
            if value != options[key]:
                raise errors.UserError(
                    f"{where} returned an outer rule of {key}={value!r}, and "
                    f"config.outer.{key}={options[key]!r}, which would have no effect: "
                    f"give it {key}=self.config.outer.{key}, and set that key."
                )
        return opt
    sgd = optax.sgd(options.learning_rate, momentum=options.momentum, nesterov=True)
    return outer.OuterOptimizer(
        opt,
        sgd,
        every_steps=options.every_steps,
        axis_name=mesh_axes.GROUP,
        dtype=options.dtype,
        fragments=options.fragments,
        delay_steps=options.delay_steps,
    )


def scales_loss(opt: base.Optimizer) -> bool:
    """Returns whether a rule scales the loss."""
    return bool(base.rules_of_type(opt, loss_scale.MixedPrecisionLossScaleOptimizer))


def loss_scales(opt: base.Optimizer) -> list[jax.Array]:
    """Returns the current loss scales of all rules, outermost first."""
    rules = base.rules_of_type(opt, loss_scale.MixedPrecisionLossScaleOptimizer)
    return [rule.loss_scale() for rule in rules]


def schedules(opt: base.Optimizer, updates: Any) -> dict[str, Any]:
    """Returns the values of all rules' schedules for the next update.

    Args:
      opt: the rule.
      updates: the number of updates applied, used as the count if a transformation
        keeps none.

    Returns:
      The values by name; by rule and name if two share a name.
    """
    values = []
    for rule in base.rules_of_type(opt, optax_optimizer.OptaxOptimizer):
        count = _count(rule, updates)
        for name, schedule in rule.schedules.items():
            # optax also calls schedules with standard type promotion.
            with jax.numpy_dtype_promotion("standard"):
                values.append((rule.name, name, schedule(count)))
    return _by_shortest_name(values)


def _count(rule: optax_optimizer.OptaxOptimizer, updates: Any) -> Any:
    """Returns the number of updates that a transformation counts, or `updates`.

    If there are several counts, it is the one whose path is first.
    """
    for path, x in sorted(slots.state_of(rule).items()):
        name = path.rpartition("/")[2]
        if name == "count" and skips.is_integer_scalar(x):
            return x
    return updates


def hyperparameters(opt: base.Optimizer, params: trees.Params) -> dict[str, Any]:
    """Returns what `optax.inject_hyperparams` keeps, as the last update used it.

    Args:
      opt: the rule.
      params: the parameters. Their slots are left out, even if a module is named
        'hyperparams'.

    Returns:
      The scalars by name; if two share a name, by their paths in the rules' state.
    """
    values = []
    param_paths = trees.leaves_by_path(params).keys()
    for rule in base.rules_of_type(opt, optax_optimizer.OptaxOptimizer):
        for path, x in sorted(slots.state_of(rule).items()):
            *prefix, folder, name = f"{rule.name}/{path}".split("/")
            is_slot = not param_paths.isdisjoint(trees.endings(path))
            if folder == _HYPERPARAMETERS and x.shape == () and not is_slot:
                values.append(("/".join(prefix), name, x))
    return _by_shortest_name(values)


def _by_shortest_name(values: Sequence[tuple[str, str, Any]]) -> dict[str, Any]:
    """Maps triples of a prefix, a name and a value to the values by name.

    If two share a name, it is preceded by the prefix.
    """
    counts = collections.Counter(name for _, name, _ in values)
    by_name = {}
    for prefix, name, x in values:
        full_name = name if counts[name] == 1 else f"{prefix}/{name}"
        by_name[full_name] = x
    return by_name


def apply(
    opt: base.Optimizer, grads: Any, params: Any, global_step: Any
) -> phases.Applied:
    """Applies gradients by the rule's `apply_gradients`, which it may override.

    Args:
      opt: the rule.
      grads: the gradients.
      params: the parameters.
      global_step: an integer scalar that counts the updates applied.
    """
    if not _overrides_apply_gradients(opt):
        return opt.apply(grads, params, global_step)
    # The override returns neither the aggregated gradients nor its vote.
    params, global_step = opt.apply_gradients(grads, params, global_step)
    return phases.Applied(
        params=params,
        applied=None,
        global_step=global_step,
        grads=None,
        old_params=None,
        new_params=None,
        partition=None,
    )


def count_nonfinite(applied: phases.Applied) -> jax.Array:
    """Counts the non-finite elements of each gradient.

    Returns:
      A float32 vector with a number for each parameter, in the order of their paths; 0
      for a parameter without a gradient. It is empty if the gradients are not known.
    """
    if applied.grads is None:
        return jnp.zeros((0,), jnp.float32)
    zero = jnp.float32(0)
    one = jnp.float32(1)
    numbers = dict.fromkeys(trees.leaves_by_path(applied.grads), zero)
    for path, grad in trees.present(applied.grads).items():
        # The scope's name tells in the program which gradient an operation counts.
        with jax.named_scope(f"{GRADIENT}{path}"):
            numbers[path] = jnp.sum(jnp.where(jnp.isfinite(grad), zero, one))
    return jnp.stack(list(numbers.values()))
