"""The sharded update: each replica updates its part, and all end where a replicated update ends."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.optimizers import harness, table
from xshard.optimizers import cross_shard, loss_scale

CrossShard = functools.partial(cross_shard.CrossShardOptimizer, shard_update=True)
LossScaled = loss_scale.MixedPrecisionLossScaleOptimizer
EVERYWHERE = jax.P()


def trajectories(make, replicated_make, *, steps=4, dtype=np.float64, batches=None, replicas=8):
    """What a sharded and a replicated run end with: `((value, params, global_step), whole state)`."""
    ends = []
    for make_optimizer in (make, replicated_make):
        step = harness.transform_step(make_optimizer)
        params, x = harness.params(dtype), harness.batch(dtype)
        _, state = step.init(None, params, x)
        whole = lambda state: state
        run = harness.replicated(step, replicas=replicas)
        if make_optimizer is make:
            run, store, whole = harness.sharded(step, make_optimizer, replicas)
            state = store(state)
        run, n, value = jax.jit(run), jnp.int32(0), None
        for number in range(steps):
            (value, params, n), state = run(params, state, batches[number] if batches else x, n)
        ends.append(((value, params, n), whole(state)))
    return ends


SHARDABLE = sorted(table.OPTIMIZERS.keys() - table.CANNOT_BE_SHARDED.keys())


@pytest.mark.parametrize(
    "name, replicas",
    [(name, 4) for name in SHARDABLE]
    + [
        (name, 8) for name in ("adamw", "chain", "contrib.prodigy", "lamb", "noisy_sgd", "novograd")
    ],
)
def test_a_sharded_run_is_a_replicated_run(name, replicas):
    # 4 divides a dimension of each array; of 8 parts that of shape (3, 4) is flattened and filled up, and
    # the vector of 4 is whole on each replica.
    make = functools.partial(table.make_optimizer, name)
    with jax.enable_x64(True):
        sharded, replicated = trajectories(make(shard_update=True), make(), replicas=replicas)
        # float64 keeps 16 digits; norms are summed in another order.
        harness.assert_close(sharded, replicated, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", sorted(table.CANNOT_BE_SHARDED))
def test_what_mixes_elements_is_refused_by_name_before_the_first_step(name):
    step = harness.transform_step(table.make_optimizer(name, shard_update=True))
    operation = table.CANNOT_BE_SHARDED[name]
    with pytest.raises(
        ValueError, match=rf"update of opt .* its {operation} mixes .*'mlp/linear_0"
    ):
        jax.eval_shape(step.init, None, harness.params(), harness.batch())
