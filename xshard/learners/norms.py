"""The norms of all gradients, and of all parameters, of an update."""

import jax.numpy as jnp

from xshard.learners import measures
from xshard.learners import state as state_lib

# The names of the metrics.
GRADIENT = "gradient_norm"
PARAMETER = "parameter_norm"


class Norms(measures.Measure):
    """The global L2 norms of the aggregated gradients and of the new parameters.

    There are none if the rule hides the gradients.
    """

    name = "norms"

    def measure(self, update: measures.Update) -> measures.Measured:
        """Implements `Measure.measure`."""
        applied = update.applied
        if applied.grads is None:
            return measures.Measured(equal={})
        arrays = {GRADIENT: applied.grads, PARAMETER: applied.new_params}
        return measures.squares(applied, arrays)

    def finish(
        self,
        measured: measures.Measured,
        state: state_lib.LearnerState,
        outcome: state_lib.Outcome,
    ) -> tuple[state_lib.LearnerState, state_lib.Outcome]:
        """Implements `Measure.finish`."""
        metrics = dict(outcome.metrics)
        for name, sq_norm in measures.total(measured).items():
            metrics[name] = jnp.sqrt(sq_norm).astype(jnp.float32)
        return state, outcome._replace(metrics=metrics)
