"""The norms of each parameter, its gradient and its update."""

import jax.numpy as jnp

from xshard.learners import measures
from xshard.learners import state as state_lib
from xshard.optimizers import base, inspection, trees

# The key of the config that asks for them.
KEY = "log_norms_every_steps"
_SQ_NORMS = "sq_norms"


class NormsByArray(measures.Measure):
    """The L2 norms of each trained parameter's gradient, new value and update.

    The update is the new value minus the old one, so it includes the rounding to the
    parameter's type. It is 0 in a skipped step.
    """

    def is_on(self) -> bool:
        """Implements `Measure.is_on`."""
        # Configs made before this key existed lack it.
        return bool(self.config.get(KEY, 0))

    def check(self, opt: base.Optimizer) -> None:
        """Implements `Measure.check`."""
        inspection.check_shows_gradients(opt, f"{KEY}={self.config[KEY]}")

    def measure(self, update: measures.Update) -> measures.Measured:
        """Implements `Measure.measure`."""
        applied = update.applied
        grads = trees.present(applied.grads)
        old = trees.leaves_by_path(applied.old_params)
        all_new = trees.leaves_by_path(applied.new_params)
        new = {path: all_new[path] for path in grads}
        updates = {}
        for path, x in new.items():
            updates[path] = trees.widen(x) - trees.widen(old[path])
        local_rows = []
        whole_rows = []
        for arrays in (grads, new, updates):
            if applied.partition is None:
                squares = [trees.sum_of_squares(x) for x in arrays.values()]
                whole_rows.append(jnp.stack(squares).astype(jnp.float32))
            else:
                local, whole = applied.partition.sums_of_squares_by_array(arrays)
                local_rows.append(local)
                whole_rows.append(whole)
        own = {}
        if local_rows:
            own[_SQ_NORMS] = jnp.stack(local_rows)
        return measures.Measured(local=own, equal=(tuple(grads), jnp.stack(whole_rows)))

    def finish(
        self,
        measured: measures.Measured,
        state: state_lib.LearnerState,
        outcome: state_lib.Outcome,
    ) -> tuple[state_lib.LearnerState, state_lib.Outcome]:
        """Implements `Measure.finish`."""
        paths, whole = measured.equal
        sq_norms = whole + measured.local.get(_SQ_NORMS, 0)
        values = jnp.sqrt(sq_norms).astype(jnp.float32)
        return state, outcome._replace(norms=state_lib.ArrayNorms(paths, values))
