"""The norms of each parameter, its gradient and its update."""

import jax
import jax.numpy as jnp

from xshard.learners import measures
from xshard.learners import state as state_lib
from xshard.optimizers import base, inspection, replica_calls, shards, trees

# The key of the config that asks for them.
KEY = "log_norms_every_steps"
_SQ_NORMS = "sq_norms"


class NormsByArray(measures.Measure):
    """The L2 norms of each trained parameter's gradient, new value and update.

    The update is the new value minus the old one, so it includes the rounding to the
    parameter's type. It is 0 in a skipped step.
    """

    name = "norms_by_array"

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
                local, whole = _sums_of_squares(applied.partition, arrays)
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


def _sums_of_squares(
    partition: shards.Partition, arrays: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of the squares of each array's elements, as two summands.

    Args:
      partition: how the arrays lie.
      arrays: global arrays by path, in a function that `replica_map.vmap_replicas`
        maps.

    Returns:
      For the sharded arrays each replica's own numbers, whose means over the replicas
      are their sums of squares; and the sums of squares of the other arrays. Both are
      float32 of shape [arrays].
    """
    sharded = {}
    specs = {}
    whole = []
    for path, x in arrays.items():
        layout = partition.layouts[path]
        if layout.dim is None:
            whole.append(trees.sum_of_squares(x).astype(jnp.float32))
        else:
            whole.append(jnp.zeros((), jnp.float32))
            sharded[path] = x
            specs[path] = partition.spec(layout, manual=True)

    def of_replica(parts: dict[str, jax.Array]) -> jax.Array:
        zero = jnp.zeros((), jnp.float32)
        squares = dict.fromkeys(arrays, zero)
        for path, x in parts.items():
            sum_of_squares = partition.count * trees.sum_of_squares(x)
            squares[path] = sum_of_squares.astype(jnp.float32)
        return jnp.stack(list(squares.values()))

    local = replica_calls.on_each_replica(of_replica, in_specs=(specs,))(sharded)
    return local, jnp.stack(whole)
