"""All of optax's rules: an update with exact sums is the same on any number of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.optimizers import harness, table
from xshard import logical
from xshard import mesh as mesh_lib

# Coverage is measured by the other tests: it would double the time of these, which trace many rules.
pytestmark = pytest.mark.no_cover

_COUNT = 4
_STEPS = 3
_ROWS = jax.P(mesh_lib.BATCH)


def make_step(name):
    return harness.transform_step(
        table.make_optimizer(name, axis_name="replica", slice_axis_name="slice")
    )


def trajectory(devices, name):
    """Parameters and state of a rule after each of some steps on so many devices."""
    mesh = mesh_lib.make_mesh(devices=jax.devices()[:devices])
    replicas = logical.Replicas(_COUNT, mesh, limbs=1)
    transformed = make_step(name)

    def step(held, x):
        (_, params, _), state = transformed.apply({}, held[1], None, held[0], x)
        return params, state

    mapped = logical.Mapped(step, (jax.P(), _ROWS), jax.P())
    program = logical.Program("step", lambda *_: mapped, replicas)
    params, batch = harness.params(), harness.batch()
    held = params, transformed.init(jax.random.key(0), params, batch)[1]
    held, states = jax.device_put(held, mesh_lib.sharding(mesh)), []
    for number in range(_STEPS):
        # The last rows are at places without a replica.
        rows = np.full((replicas.rows(len(batch)), batch.shape[1]), np.nan, np.float32)
        rows[: len(batch)] = batch * (number + 1)
        held = program(held, mesh_lib.put(mesh, rows, _ROWS))
        states.append(held)
    return states


@pytest.mark.parametrize("name", table.NAMES)
def test_an_update_does_not_depend_on_the_devices(name):
    alone = trajectory(1, name)
    # Of three the last has none of the four replicas.
    harness.assert_equal(trajectory(3, name), alone)
    changed = jax.tree.map(lambda x, y: bool(jnp.any(x != y)), alone[-1][0], harness.params())
    assert all(jax.tree.leaves(changed))
