"""Loss scaling, so that half-precision gradients neither underflow nor overflow.

float16 cannot represent a magnitude below 6e-8. Multiplying the loss by a scale before
differentiation multiplies its gradients by the same scale; float32 gradients are then
divided by it. If the scale is too large, some gradient is not finite. The step is then
skipped, and a dynamic scale is lowered.

Sources: Micikevicius et al., "Mixed Precision Training", 2018,
https://arxiv.org/abs/1710.03740; `tf.compat.v1.mixed_precision.{FixedLossScale,
DynamicLossScale, MixedPrecisionLossScaleOptimizer}`.
"""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from jax import lax

from xshard import errors
from xshard.base import arguments
from xshard.optimizers import base, shards, skips, trees
from xshard.optimizers import optax as optax_optimizer

_LARGEST = float(jnp.finfo(jnp.float32).max)


class LossScale(hk.Module):
    """A loss scale with its state.

    Call it inside `hk.transform_with_state`. A custom scale implements both methods,
    and keeps what it needs as Haiku state.

    Source: `tf.mixed_precision.experimental.LossScale`.
    """

    def __call__(self) -> jax.Array:
        """Returns the current scale, a float32 scalar."""
        raise NotImplementedError

    def update(self, grads: trees.Gradients) -> Any:
        """Adapts the scale to a step's gradients.

        It is called in each step, while `hk.running_init()` too, where it creates its
        state.

        Args:
          grads: unscaled gradients, aggregated over the group, so that all its replicas
            decide alike. Parameters without a gradient have None.

        Returns:
          Whether to apply the gradients: True, or a boolean scalar.
        """
        raise NotImplementedError


class FixedLossScale(LossScale):
    """A constant scale.

    As in TensorFlow, gradients are applied without a check that they are finite.

    Source: `tf.mixed_precision.experimental.FixedLossScale`.

    >>> scale = hk.transform(lambda: FixedLossScale(128)())
    >>> print(scale.apply({}, None))
    128.0
    """

    def __init__(self, loss_scale_value: float, name: str | None = None):
        """Initializes a fixed scale.

        Args:
          loss_scale_value: the scale, at least 1.
          name: the module's name.

        Raises:
          ValueError: if the scale is below 1, not finite in float32, or not a number.
        """
        super().__init__(name=name)
        self.loss_scale_value = _check_scale("loss_scale_value", loss_scale_value)

    def __call__(self) -> jax.Array:
        """Returns the scale, a float32 scalar."""
        return jnp.asarray(self.loss_scale_value, jnp.float32)

    def update(self, grads: trees.Gradients) -> bool:
        """Returns True: every step is applied."""
        del grads
        return True


class DynamicLossScale(LossScale):
    """A scale that adapts to be as large as the gradients allow.

    A step with a gradient that is not finite is not applied; it divides the scale by
    `multiplier`, down to at least 1. After `increment_period` finite steps in a row the
    scale is multiplied by `multiplier`, unless the product is not finite in float32.

    State, both scalars: `current_loss_scale` (float32), and `good_steps` (int32), the
    number of finite steps since the scale was last lowered or due to be raised.

    Source: `tf.mixed_precision.experimental.DynamicLossScale`.

    >>> def adapt(grad):
    ...     scale = DynamicLossScale(initial_loss_scale=8, increment_period=2)
    ...     applied = scale.update({'w': grad})
    ...     return applied, scale()
    >>> adapt = hk.transform_with_state(adapt)
    >>> _, state = adapt.init(None, jnp.ones(3))
    >>> for grad in (1.0, 1.0, jnp.inf):
    ...     (applied, scale), state = adapt.apply({}, state, None, jnp.full(3, grad))
    ...     print(applied, scale)
    True 8.0
    True 16.0
    False 8.0
    """

    def __init__(
        self,
        initial_loss_scale: float = 2**15,
        increment_period: int = 2000,
        multiplier: float = 2.0,
        name: str | None = None,
    ):
        """Initializes a dynamic scale.

        Args:
          initial_loss_scale: the first scale, at least 1.
          increment_period: the number of finite steps in a row that raises the scale,
            at least 1.
          multiplier: the factor by which the scale is raised and lowered, above 1.
          name: the module's name.

        Raises:
          ValueError: if an argument is out of bounds.
        """
        super().__init__(name=name)
        self.initial_loss_scale = _check_scale("initial_loss_scale", initial_loss_scale)
        self.increment_period = arguments.count("increment_period", increment_period)
        self.multiplier = _check_scale("multiplier", multiplier)
        if self.multiplier == 1:
            raise errors.UserError(
                "multiplier must be above 1, or the scale could never change; received "
                f"{multiplier!r}. For a scale that stays use FixedLossScale."
            )

    def __call__(self) -> jax.Array:
        """Returns the current scale, a float32 scalar."""
        initial = hk.initializers.Constant(self.initial_loss_scale)
        return hk.get_state("current_loss_scale", [], jnp.float32, initial)

    def update(self, grads: trees.Gradients) -> jax.Array:
        """Adapts the scale; returns whether all gradients are finite."""
        # The scale of this step, with which its loss was multiplied.
        scale = self()
        good_steps = hk.get_state("good_steps", [], jnp.int32, jnp.zeros) + 1
        finite = all_finite(grads)
        due = good_steps >= self.increment_period
        multiplier = jnp.asarray(self.multiplier, jnp.float32)

        raised = scale * multiplier
        kept_or_raised = jnp.where(due & jnp.isfinite(raised), raised, scale)
        lowered = jnp.maximum(scale / multiplier, jnp.ones_like(scale))
        new_scale = jnp.where(finite, kept_or_raised, lowered)
        hk.set_state("current_loss_scale", new_scale)

        # The count begins anew even if the raised scale would not be finite.
        is_counted = finite & ~due
        new_count = jnp.where(is_counted, good_steps, jnp.zeros_like(good_steps))
        hk.set_state("good_steps", new_count)
        return finite


class MixedPrecisionLossScaleOptimizer(base.OptimizerWrapper):
    """Scales the loss that `opt` differentiates, and skips non-finite gradients.

    `compute_gradients` returns the unscaled loss and unscaled gradients, in float32 or
    wider, so you can clip and log them as usual. A step whose gradients are not finite
    is skipped if the scale is dynamic; a fixed scale does not check them.

    It nests with `CrossShardOptimizer` in either order. The vote inspects the gradients
    after they are aggregated over the group, so one replica's overflow skips the step
    on all replicas of the group. A skipped step leaves parameters, slots, schedules and
    the global step unchanged, bit by bit.

    Source: `tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer`.

    >>> def step(params, x):
    ...     opt = MixedPrecisionLossScaleOptimizer(optax.sgd(0.5), 'dynamic')
    ...     loss, params = opt.minimize(lambda p: jnp.sum(p['linear']['w'] * x), params)
    ...     return loss, params, opt.loss_scale()
    >>> step = hk.transform_with_state(step)
    >>> params = {'linear': {'w': jnp.ones(())}}
    >>> _, state = step.init(None, params, 2.0)
    >>> (loss, params, scale), state = step.apply({}, state, None, params, 2.0)
    >>> print(loss, params['linear']['w'], scale)
    2.0 0.0 32768.0
    >>> (loss, params, scale), state = step.apply({}, state, None, params, jnp.inf)
    >>> print(params['linear']['w'], scale)
    0.0 16384.0
    """

    def __init__(self, opt: Any, loss_scale: Any, name: str | None = None):
        """Wraps an optimizer.

        Args:
          opt: an `Optimizer` or an optax transformation.
          loss_scale: a `LossScale`, a number of at least 1 for a fixed scale, or
            'dynamic'.
          name: the module's name. `get_name()` is the name of `opt`, as in TensorFlow.

        Raises:
          ValueError: for an invalid `opt` or `loss_scale`, or an `opt` that already
            scales losses.
        """
        super().__init__(name=name)
        self.opt = optax_optimizer.as_optimizer(opt)
        inner = base.rules_of_type(self.opt, MixedPrecisionLossScaleOptimizer)
        if inner:
            raise ValueError(
                f"opt already scales losses ({inner[0].name}): two scales would "
                "multiply, and each would blame the other's overflows. Use one "
                "MixedPrecisionLossScaleOptimizer."
            )
        self.loss_scale = get(loss_scale)

    def compute_gradients(
        self, loss: Any, params: trees.Params, *, grad_loss: Any = None, **kwargs: Any
    ) -> tuple[Any, trees.Gradients]:
        """Implements `Optimizer.compute_gradients`.

        The gradients are those of the scaled loss, unscaled in float32 or wider.
        """
        scale = self.loss_scale()
        # Scaling `grad_loss` rather than the loss keeps the returned value unscaled.
        scaled: Any
        if isinstance(grad_loss, list | tuple):
            scaled = [_times(weight, scale) for weight in grad_loss]
        else:
            scaled = _times(grad_loss, scale)
        value, grads = self.opt.compute_gradients(
            loss, params, grad_loss=scaled, **kwargs
        )
        unscaled = jax.tree.map(lambda g: _divide(trees.widen(g), scale), grads)
        return value, unscaled

    def vote(self, grads: trees.Gradients) -> Any:
        """Implements `Optimizer.vote`: adapts the scale, which decides on the step."""
        # Both are called in every step, since each may update its state.
        scale_vote = self.loss_scale.update(grads)
        inner_vote = self.opt.vote(grads)
        return skips.all_for(scale_vote, inner_vote)

    def get_name(self) -> str:
        """Returns the name of the wrapped optimizer, as in TensorFlow."""
        return self.opt.get_name()

    def state_by_name(self) -> dict[str, Any]:
        """Implements `Optimizer.state_by_name`, and includes the loss scale's state."""
        return {**super().state_by_name(), **self.loss_scale.state_dict()}


def get(identifier: Any) -> LossScale:
    """Returns the loss scale that an argument specifies.

    Args:
      identifier: a `LossScale`, a number of at least 1, or 'dynamic'.

    Raises:
      ValueError: if it is none of these.
    """
    if isinstance(identifier, LossScale):
        return identifier
    if arguments.is_number(identifier):
        return FixedLossScale(identifier)
    if identifier != "dynamic":
        raise ValueError(
            "loss_scale must be a LossScale, a number of at least 1, or 'dynamic'; "
            f"received {identifier!r}."
        )
    return DynamicLossScale()


def all_finite(grads: trees.Gradients) -> jax.Array:
    """Returns whether all elements of all gradients are finite, a boolean scalar.

    As in TensorFlow it is True if there are none.
    """
    return shards.holds_for_all(lambda grad: jnp.all(jnp.isfinite(grad)), grads)


def _times(weight: Any, scale: jax.Array) -> jax.Array:
    """Returns a loss's weight, 1 if it is None, times the scale."""
    if weight is None:
        return scale
    weight = trees.widen(weight)
    return weight * scale.astype(weight.dtype)


def _divide(grad: jax.Array, scale: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(grad):
        # Complex division squares the divisor, and the square of the scale may overflow
        # float32.
        real = _divide(grad.real, scale)
        imag = _divide(grad.imag, scale)
        return lax.complex(real, imag)
    return grad / scale.astype(grad.dtype)


def _check_scale(argument: str, value: Any) -> float:
    """Returns the value as a float.

    UserError unless it is a number from 1 to float32's largest.
    """
    is_good = arguments.is_number(value) and 1 <= value <= _LARGEST
    arguments.check(argument, value, is_good, "a number of at least 1")
    return float(value)
