"""The state of a network for evaluation, where other parameters than those that train
are evaluated.

The module of the rule that has these parameters keeps it, beside them: averages of the
floating-point arrays of the network's state; or what one more pass with these
parameters gives, see the config's `estimate_statistics`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from xshard.learners import measures
from xshard.learners import state as state_lib
from xshard.optimizers import base, moving_average, trees


class Statistics(measures.Measure):
    """The network's state that belongs to the parameters to evaluate."""

    name = "statistics"

    def begin(self, state: state_lib.LearnerState) -> state_lib.LearnerState:
        """Implements `Measure.begin`."""
        name = state.meta.statistics_module
        if name is None:
            return state
        first = jax.tree.map(trees.widen, floats(state.net_state))
        return state.replace(opt_state=_with_statistics(state.opt_state, name, first))

    def measure(self, update: measures.Update) -> measures.Measured:
        """Implements `Measure.measure`."""
        name = update.state.meta.statistics_module
        if name is None:
            return measures.Measured()
        before = update.state.opt_state.get(name, {})
        if estimates(self.config):
            # They are those of the newest parameters, and no average.
            net_state = update.evaluated_net_state()
            return measures.Measured(
                equal=(before, jnp.float32(1)), net_state=net_state
            )
        averaging = base.rules_of_type(
            update.opt, moving_average.MovingAverageOptimizer
        )
        return measures.Measured(equal=(before, averaging[0].rate()))

    def finish(
        self,
        measured: measures.Measured,
        state: state_lib.LearnerState,
        outcome: state_lib.Outcome,
    ) -> tuple[state_lib.LearnerState, state_lib.Outcome]:
        """Implements `Measure.finish`."""
        name = state.meta.statistics_module
        if name is None:
            return state, outcome
        before, rate = measured.equal
        net_state = measured.net_state
        if net_state is None:
            net_state = state.net_state
        averages = _moved(before, net_state, rate, outcome.applied)
        opt_state = _with_statistics(state.opt_state, name, averages)
        return state.replace(opt_state=opt_state), outcome


def estimates(config: Any) -> bool:
    """Returns whether the network's state for evaluation is that of one more pass."""
    # Configs made before this key existed lack it.
    return bool(config.get("estimate_statistics", False))


def floats(net_state: Any) -> dict[str, Any]:
    """Returns the floating-point arrays of a network's state, by path."""
    leaves = trees.leaves_by_path(net_state)
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return {path: x for path, x in leaves.items() if is_float(x)}


def _moved(
    before: Mapping[str, Any], net_state: Any, rate: jax.Array, applied: jax.Array
) -> dict[str, jax.Array]:
    """Returns the arrays of a network's state for evaluation after an update, by path.

    Args:
      before: the state of the module that keeps them, before the update.
      net_state: the network's state towards which they move. It may hold any values if
        the update is not applied.
      rate: by how much: a scalar, 1 for the whole way.
      applied: whether the update was applied; otherwise nothing moves.
    """
    averages = {}
    for path, x in floats(net_state).items():
        average = before.get(moving_average.statistics_name(path))
        if average is None:
            # A step of an earlier version, which kept none, is repeated as it was.
            continue
        x = x.astype(average.dtype)
        change = rate.astype(average.dtype) * (average - x)
        # Selected: a rate of zero would make NaN of what is not finite, and so would
        # the difference of equal infinities.
        moves = applied & (x != average)
        # No average of what is not finite ever becomes finite again, such as that of a
        # smallest value so far, which begins at infinity.
        moved = jnp.where(jnp.isfinite(average), average - change, x)
        averages[path] = jnp.where(moves, moved, average)
    return averages


def _with_statistics(opt_state: Any, name: str, averages: Mapping[str, Any]) -> Any:
    """Returns the rules' state with arrays of the network's state for evaluation.

    Args:
      opt_state: the state of all rules.
      name: the name of the module that keeps them.
      averages: the arrays, by path.
    """
    module = dict(opt_state.get(name, {}))
    for path, average in averages.items():
        module[moving_average.statistics_name(path)] = average
    return {**opt_state, name: module}
