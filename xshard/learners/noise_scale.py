"""The simple noise scale of gradients: how large a batch should be.

It is the trace of the covariance of one example's gradient, divided by the squared norm
of the mean gradient. A batch of that many examples has as much noise as signal in its
gradient. Smaller batches need nearly the same number of examples for the same progress,
and larger ones nearly the same number of steps.

Both parts are estimated from the gradients of batches of two sizes, without bias, and
are averaged over steps, because each step's estimate is noisy. For the small batches,
gradients are read once more, so that only some steps are measured.

Source: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018,
https://arxiv.org/abs/1812.06162, appendix A.1.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xshard import errors
from xshard.base import mesh_axes
from xshard.learners import measures, run_context
from xshard.learners import state as state_lib
from xshard.optimizers import base, inspection, replica_calls, trees

# The name of the metric, and the key of the config that asks for it.
NAME = "noise_scale"
KEY = "noise_scale_steps"
# One of so many steps is measured.
EVERY = 8
# The squared norms of the gradients of the small batches, and of the large one.
_SMALL = "small"
_LARGE = "large"


class GradientNoise(NamedTuple):
    """The averages that a noise scale is computed from, float32 scalars.

    Both begin at 0 and are biased toward it by the same factor, which their ratio does
    not have.

    Attributes:
      variance: the trace of the covariance of one example's gradient.
      sq_norm: the squared norm of the mean gradient.
    """

    variance: Any
    sq_norm: Any


class Sizes(NamedTuple):
    """The numbers of examples in the two batches of an estimate."""

    small: int
    large: int


class NoiseScale(measures.Measure):
    """The noise scale, whose averages a learner's state has as `gradient_noise`."""

    name = "noise_scale"

    def is_on(self) -> bool:
        """Implements `Measure.is_on`."""
        # Configs made before this key existed lack it.
        return bool(self.config.get(KEY, 0))

    def begin(self, state: state_lib.LearnerState) -> state_lib.LearnerState:
        """Implements `Measure.begin`."""
        return state.replace(gradient_noise=initial())

    def check(self, opt: base.Optimizer) -> None:
        """Implements `Measure.check`."""
        inspection.check_shows_gradients(opt, f"{KEY}={self.config[KEY]}")
        _check_rule(opt, micro_batches=_num_replicas() == 1)
        _check_has_own_gradients(opt)

    def reads_parts(self, state: state_lib.LearnerState) -> Any:
        """Implements `Measure.reads_parts`."""
        if self.config.micro_batches > 1 and _num_replicas() == 1:
            return is_measured(state.global_step)
        return None

    def measure(self, update: measures.Update) -> measures.Measured:
        """Implements `Measure.measure`."""
        replicas = _num_replicas()
        parts = self.config.micro_batches
        sizes = sizes_of(update.batch, replicas=replicas, micro_batches=parts)
        counts = is_measured(update.state.global_step)
        if update.part_sq_norms is None:
            # The replicas' gradients add up to that of the group, as they are after the
            # clip. Each counts as its part of it.
            large = measures.squares(update.applied, {_LARGE: update.applied.grads})
            sq_norm = trees.sum_of_squares_if(counts, update.clipped)
            small = replicas**2 * sq_norm
        else:
            # Micro-batches add up to the replica's gradient, before the clip.
            sq_norm = trees.sum_of_squares_if(counts, update.grads)
            large = measures.Measured(local={_LARGE: sq_norm}, equal={_LARGE: 0})
            small = parts**2 * jnp.mean(update.part_sq_norms)
        return measures.Measured(
            local={**large.local, _SMALL: small}, equal=(large.equal, sizes, counts)
        )

    def finish(
        self,
        measured: measures.Measured,
        state: state_lib.LearnerState,
        outcome: state_lib.Outcome,
    ) -> tuple[state_lib.LearnerState, state_lib.Outcome]:
        """Implements `Measure.finish`."""
        before = state.gradient_noise
        assert before is not None
        equal, sizes, counts = measured.equal
        small = measured.local[_SMALL]
        large = measures.total(measured._replace(equal=equal))[_LARGE]
        noise = average(
            before,
            estimate(small, large, sizes),
            counts=outcome.applied & counts,
            steps=self.config[KEY],
        )
        if not replica_calls.is_current():
            # As for the parameters, one replica's program shows no collective.
            noise = replica_calls.equal_on_replicas(noise, given=(before, small))
        metrics = {**outcome.metrics, NAME: of(noise)}
        return state.replace(gradient_noise=noise), outcome._replace(metrics=metrics)


def _num_replicas() -> int:
    mesh = run_context.current().mesh
    return math.prod(mesh.shape[axis] for axis in mesh_axes.REPLICAS)


def initial() -> GradientNoise:
    """Returns the averages before the first step."""
    return GradientNoise(variance=jnp.float32(0), sq_norm=jnp.float32(0))


def estimate(small: Any, large: Any, sizes: Sizes) -> GradientNoise:
    """Estimates both parts from one step, without bias.

    Args:
      small: the mean squared norm of the gradients of the small batches.
      large: the squared norm of the gradient of the large batch, which consists of the
        small ones.
      sizes: their numbers of examples.

    Half of the squared norm 3 of a single example's gradient is noise, of which a
    batch of 4 has a quarter:

    >>> estimate(3.0, 1.875, Sizes(small=1, large=4))
    GradientNoise(variance=1.5, sq_norm=1.5)
    """
    difference = sizes.large - sizes.small
    sq_norm = (sizes.large * large - sizes.small * small) / difference
    variance = (small - large) * (sizes.small * sizes.large / difference)
    return GradientNoise(variance=variance, sq_norm=sq_norm)


def is_measured(global_step: Any) -> Any:
    """Returns whether a step is measured, a boolean scalar.

    Args:
      global_step: the number of updates applied before it.
    """
    return global_step % EVERY == 0


def average(
    old: GradientNoise, new: GradientNoise, *, counts: Any, steps: int
) -> GradientNoise:
    """Returns the averages after a step.

    Args:
      old: the averages before it.
      new: the estimate of the step.
      counts: whether it was measured, and its update applied. An estimate that is not
        finite does not count either.
      steps: the number of steps that an average is taken over; the weight of the newest
        estimate is `EVERY / steps`, at most 1.
    """
    counts &= jnp.isfinite(new.variance) & jnp.isfinite(new.sq_norm)
    weight = min(EVERY / steps, 1.0)

    def moved(old: jax.Array, new: jax.Array) -> jax.Array:
        new = new.astype(jnp.float32)
        return jnp.where(counts, old + weight * (new - old), old)

    return jax.tree.map(moved, old, new)


def of(noise: GradientNoise) -> jax.Array:
    """Returns the noise scale, in examples: a float32 scalar.

    It is nan as long as the average of the squared norm is not above 0: then the mean
    gradient is too small to be told from the noise.
    """
    is_known = noise.sq_norm > 0
    sq_norm = jnp.where(is_known, noise.sq_norm, 1)
    return jnp.where(is_known, jnp.maximum(noise.variance, 0) / sq_norm, jnp.nan)


def sizes_of(batch: Any, *, replicas: int, micro_batches: int) -> Sizes:
    """Returns the numbers of examples in the batches of an estimate.

    The small ones are the replicas' parts of a batch; or of one replica, its
    micro-batches.

    Args:
      batch: a replica's part of a batch, a tree of arrays with a row for each example.
      replicas: the number of replicas of a group.
      micro_batches: the number of micro-batches of a replica.

    Raises:
      UserError: if there is only one part, or if the batch has no rows.
    """
    parts = replicas if replicas > 1 else micro_batches
    if parts == 1:
        raise errors.UserError(
            f"{KEY} needs batches of two sizes, but this run has one replica and one "
            "micro-batch: use several devices, set micro_batches to 2 or more, or "
            f"start a run with {KEY}=0."
        )
    shapes = {jnp.shape(x)[:1] for x in jax.tree.leaves(batch)}
    if len(shapes) != 1 or shapes <= {(), (0,)}:
        raise errors.UserError(
            f"{KEY} counts the examples of a batch, but Learner.update received arrays "
            f"of the shapes {jax.tree.map(jnp.shape, batch)}: give each a row for each "
            f"example, or set {KEY} to 0."
        )
    ((rows,),) = shapes
    large = rows * replicas
    return Sizes(small=large // parts, large=large)


def _check_rule(opt: base.Optimizer, *, micro_batches: bool) -> None:
    """Raises UserError if a rule does not show gradients of batches of two sizes.

    Args:
      opt: the rule.
      micro_batches: whether the small batches are micro-batches.
    """
    method = "compute_gradients" if micro_batches else "aggregate"
    for rule in base.all_rules(opt):
        kind = type(rule)
        if not getattr(kind, method).__module__.startswith("xshard."):
            raise errors.UserError(
                f"{KEY} cannot be used with {kind.__name__}, which overrides {method}: "
                "the large batch's gradient may then be another one than the mean of "
                f"the small ones'. Set {KEY} to 0, or change gradients in update."
            )


def _check_has_own_gradients(opt: base.Optimizer) -> None:
    """Raises UserError if replicas hold shards of parameters."""
    if any(rule.shard_params for rule in inspection.reducing(opt)):
        raise errors.UserError(
            f"{KEY} cannot be used with reduction.shard_params=True: no replica has "
            "its own gradients, because differentiating a network returns their sum. "
            f"Use reduction.shard_update, or set {KEY} to 0."
        )
