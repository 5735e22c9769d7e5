"""Moving averages of the parameters, which often predict better than these.

Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging",
1992. The weights are exponential, as in `tf.train.ExponentialMovingAverage`.
"""

from collections.abc import Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from xshard.base import arguments
from xshard.optimizers import base, skips, trees
from xshard.optimizers import optax as optax_optimizer
from xshard.optimizers import slots as slots_lib

SLOT = "average"
STATISTICS = "statistics"


class MovingAverageOptimizer(base.OptimizerWrapper):
    """Keeps an exponential moving average of each parameter that `opt` updates.

    An average starts as a copy of the parameter when the state is created. After each
    applied update it becomes `average - (1 - decay) * (average - parameter)`, with the
    new parameter. The parameters themselves are unaffected.

    A parameter without a gradient keeps its average. A parameter that has no gradient
    while the state is created counts as not trained: it has no average, and `averages`
    returns the parameter itself. A skipped step leaves all averages unchanged, bit by
    bit.

    The averages are its `evaluation_params`. A learner also keeps averages of its
    network's floating-point state, such as the statistics of a batch norm, with the
    same decay: those of the parameters themselves do not fit the averages.

    You can wrap it around `CrossShardOptimizer` and `MixedPrecisionLossScaleOptimizer`,
    or inside them. With a sharded update, each replica holds the averages of its
    shards.

    State: `average/<path>` for each trained parameter, of its shape, in float32 or
    wider; and with `num_updates='count'` also `num_updates`, an int32 scalar. A learner
    adds `statistics/<path>` for each floating-point array of the network's state. The
    function `averages` returns the averages as a tree of parameters.

    Source: `tf.contrib.opt.MovingAverageOptimizer`.

    >>> def step(params, x):
    ...     opt = MovingAverageOptimizer(optax.sgd(1.0), average_decay=0.75)
    ...     _, params = opt.minimize(lambda p: jnp.sum(p['linear']['w'] * x), params)
    ...     return params, opt.get_slot('linear/w', 'average')
    >>> step = hk.transform_with_state(step)
    >>> params = {'linear': {'w': jnp.zeros(())}}
    >>> _, state = step.init(None, params, 4.0)
    >>> (params, average), state = step.apply({}, state, None, params, 4.0)
    >>> print(params['linear']['w'], average)
    -4.0 -1.0
    """

    def __init__(
        self,
        opt: Any,
        average_decay: float = 0.9999,
        num_updates: Any = None,
        name: str = "MovingAverageOptimizer",
    ):
        """Wraps an optimizer.

        Args:
          opt: an `Optimizer` or an optax transformation.
          average_decay: the decay, at least 0 and below 1.
          num_updates: the number of updates applied, including this one: an integer
            scalar, or 'count' to let the optimizer count. It makes the decay smaller at
            first, namely `min(average_decay, (1 + num_updates) / (10 + num_updates))`.
            With None the decay is constant.
          name: the module's name.

        Raises:
          ValueError: for an invalid argument, or an `opt` that already keeps averages.
        """
        super().__init__(name=name)
        self.opt = optax_optimizer.as_optimizer(opt)
        inner = base.rules_of_type(self.opt, MovingAverageOptimizer)
        if inner:
            raise ValueError(
                f"opt already keeps averages of its parameters ({inner[0].name}): "
                "'average' would be the name of two slots. Use one "
                "MovingAverageOptimizer."
            )
        arguments.check(
            "average_decay",
            average_decay,
            arguments.is_number(average_decay) and 0 <= average_decay < 1,
            "a number of at least 0 and below 1, such as 0.999",
        )
        self.average_decay = float(average_decay)
        is_count = isinstance(num_updates, str) and num_updates == "count"
        arguments.check(
            "num_updates",
            num_updates,
            num_updates is None or is_count or skips.is_integer_scalar(num_updates),
            "an integer scalar, 'count' for one of the optimizer's own, or None",
        )
        self.num_updates = num_updates

    def update(self, grads: trees.Gradients, params: trees.Params) -> trees.Params:
        """Implements `Optimizer.update`; moves averages towards the new parameters.

        Raises:
          ValueError: for a parameter with a gradient whose average was never created.
        """
        # The averages follow the new parameters, so the wrapped rule updates first.
        new_params = self.opt.update(grads, params)
        count = self._next_count()
        trained = trees.present(grads).keys()
        if hk.running_init():
            old = trees.leaves_by_path(params)
            for path in trained:
                # In a narrow type, a small change of an average would be rounded away.
                slots_lib.create(_state_name(path), trees.widen(old[path]))
            return new_params
        # A parameter without a gradient keeps its average.
        new = trees.leaves_by_path(new_params)
        for path in trained:
            if not self._has_average(path):
                raise slots_lib.missing_error(self.name, path)
            average = hk.get_state(_state_name(path))
            rate = self._rate(count, average.dtype)
            param = new[path].astype(average.dtype)
            change = rate * (average - param)
            # The difference of equal infinities is NaN.
            moved = jnp.where(param == average, average, average - change)
            hk.set_state(_state_name(path), moved)
        return new_params

    def evaluation_params(self, params: trees.Params) -> trees.Params:
        """Implements `Optimizer.evaluation_params`: the averages."""
        return averages(slots_lib.state_of(self), params)

    def slots_from_params(self, params: trees.Params) -> list[str]:
        """Implements `Optimizer.slots_from_params`."""
        del params
        return [SLOT]

    def rate(self) -> jax.Array:
        """Returns by how much averages move towards new values after this update.

        It is a float32 scalar.
        """
        count = self.num_updates
        if count == "count":
            count = hk.get_state("num_updates")
        return self._rate(count, jnp.float32)

    def _has_average(self, path: str) -> bool:
        return _state_name(path) in slots_lib.state_of(self)

    def _next_count(self) -> Any:
        """Returns the number of updates with this one; None if it is not counted."""
        if self.num_updates != "count":
            return self.num_updates
        count = hk.get_state("num_updates", [], jnp.int32, jnp.zeros) + 1
        if not hk.running_init():
            hk.set_state("num_updates", count)
        return count

    def _rate(self, count: Any, dtype: Any) -> jax.Array:
        """Returns 1 - decay, after this number of updates."""
        rate = jnp.asarray(1 - self.average_decay, dtype)
        if count is None:
            return rate
        # Equal to 1 - (1 + n) / (10 + n), without the subtraction's loss of precision.
        early_rate = 9 / (10 + jnp.asarray(count).astype(dtype))
        return jnp.maximum(rate, early_rate)

    def get_slot(self, var: str, name: str) -> Any:
        """Implements `Optimizer.get_slot`; the slot 'average' is the average."""
        if name != SLOT:
            return self.opt.get_slot(var, name)
        if not self._has_average(var):
            return None
        return hk.get_state(_state_name(var))

    def get_slot_names(self) -> list[str]:
        """Implements `Optimizer.get_slot_names`; they include 'average'."""
        names = set(self.opt.get_slot_names())
        if any(name.startswith(f"{SLOT}/") for name in slots_lib.state_of(self)):
            names.add(SLOT)
        return sorted(names)


def averages(state: Mapping[str, Any], params: trees.Params) -> trees.Params:
    """Returns the averages, as a tree with the parameters' structure and shapes.

    They are float32 or wider.

    Args:
      state: the state of a `MovingAverageOptimizer`: the entry of the Haiku state under
        its `module_name`.
      params: the parameters. One that is not trained has no average, and is returned
        itself.
    """

    def average(path: tuple[Any, ...], param: Any) -> Any:
        name = _state_name(trees.path_name(path))
        if name in state:
            return state[name]
        return trees.widen(param)

    return jax.tree_util.tree_map_with_path(average, params)


def statistics(state: Mapping[str, Any], net_state: Any) -> Any:
    """Returns a network's state with the averages of its floating-point arrays.

    Args:
      state: as for `averages`.
      net_state: the network's state. An array without an average is returned itself.
    """

    def average(path: tuple[Any, ...], x: Any) -> Any:
        # Networks need the type that they created their state with.
        name = statistics_name(trees.path_name(path))
        return state[name].astype(x.dtype) if name in state else x

    return jax.tree_util.tree_map_with_path(average, net_state)


def statistics_name(path: str) -> str:
    """Returns the name of the average of an array of the network's state."""
    return f"{STATISTICS}/{path}"


def statistics_of(state: Mapping[str, Any]) -> list[str]:
    """Returns the names in a rule's state of averages of the network's state."""
    return [name for name in state if name.startswith(f"{STATISTICS}/")]


def _state_name(path: str) -> str:
    """Returns the name of a parameter's average in the state."""
    return f"{SLOT}/{path}"
