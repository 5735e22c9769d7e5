"""Tests that each of optax's rules, with exact sums, makes the same update on any
number of devices.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tests
from tests.checkpoint import harness as processes
from tests.optimizers import harness, table
from xshard import logical
from xshard import mesh as mesh_lib

# Other tests measure coverage. Measuring it here would double the time, because these
# tests trace many rules.
pytestmark = pytest.mark.no_cover

_COUNT = 4
_STEPS = 3
_ROWS = jax.P(mesh_lib.BATCH)


def make_step(name):
    return harness.transform_step(
        table.make_optimizer(name, axis_name="replica", slice_axis_name="slice")
    )


def trajectory(devices, names):
    """Returns each rule's parameters and state after each step, with all rules in one
    program on `devices` devices.
    """
    mesh = mesh_lib.make_mesh(devices=jax.devices()[:devices])
    replicas = logical.Replicas(_COUNT, mesh, is_exact=True)
    transformed = {name: make_step(name) for name in names}

    def step(held, x):
        new = {}
        for name, (params, state) in held.items():
            (_, params, _), state = transformed[name].apply({}, state, None, params, x)
            new[name] = params, state
        return new

    mapped = logical.Mapped(step, (jax.P(), _ROWS), jax.P())
    program = logical.Program("step", lambda *_: mapped, replicas)
    params, batch = harness.params(), harness.batch()
    init = lambda name: transformed[name].init(jax.random.key(0), params, batch)[1]
    held, states = {name: (params, init(name)) for name in names}, []
    held = jax.device_put(held, mesh_lib.sharding(mesh))
    for number in range(_STEPS):
        # The last rows belong to places without a replica. Their NaN would show if a
        # result depended on them.
        rows = np.full((replicas.rows(len(batch)), batch.shape[1]), np.nan, np.float32)
        rows[: len(batch)] = batch * (number + 1)
        held = program(held, mesh_lib.put(mesh, rows, _ROWS))
        states.append(held)
    return states


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", table.NAMES)
def test_an_update_does_not_depend_on_the_devices(name):
    alone = trajectory(1, [name])
    # The last of three devices holds none of the four replicas.
    harness.assert_equal(trajectory(3, [name]), alone)
    new, old = alone[-1][name][0], harness.params()
    changed = jax.tree.map(lambda x, y: bool(jnp.any(x != y)), new, old)
    assert all(jax.tree.leaves(changed))


def compare():
    """Prints the rules that, in one program, end with other bits on three devices than
    on one.
    """
    names = [name for name in table.NAMES[::7] if name != "noisy_sgd"]
    alone, among_three = trajectory(1, names)[-1], trajectory(3, names)[-1]
    for name in names:
        pairs = zip(
            jax.tree.leaves(alone[name]),
            jax.tree.leaves(among_three[name]),
            strict=True,
        )
        if any(np.asarray(x).tobytes() != np.asarray(y).tobytes() for x, y in pairs):
            print(name)


# A run sets up the CPU in the same way.
_PROGRAM = """
from xshard.pod import origin

origin.set_up_backends({"logical_replicas": 4, "reduction": {"arithmetic": "exact"}}, 3)

from tests.logical import rules_test

rules_test.compare()
"""


@pytest.mark.sample(0.4)
def test_many_updates_in_one_program_do_not_depend_on_the_devices():
    # If XLA may fuse products and sums, one of these updates does depend on the devices
    # with these flags.
    environment = processes.environment(XLA_FLAGS=tests.XLA_FLAGS)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
