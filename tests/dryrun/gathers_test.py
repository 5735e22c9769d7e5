"""Sharded parameters in a TPU program: the collective that gathers each layer, and its overlap with computation."""

import importlib.util
import json
import os
import subprocess
import sys

import haiku as hk
import jax
import numpy as np
import pytest

from tests import toy
from xshard.dryrun import __main__ as dryrun
from xshard.dryrun import collectives, hlo
from xshard.run import preflight

LAYERS, WIDTH, EXAMPLES = 3, 2048, 2048


class Stack(toy.Toy):
    """A stack of layers, large enough that gathering one takes as long as computing one."""

    def train_data(self):
        x = np.zeros((self.config.batch_size, WIDTH), np.float32)
        return {"x": x, "y": x[:, 0]}

    def forward(self, batch, *, is_training):
        def layer(x):
            hidden = jax.nn.silu(hk.Linear(2 * WIDTH, name="wide")(x))
            return x + hk.Linear(WIDTH, name="narrow")(hidden)

        return hk.layer_stack(LAYERS)(hk.remat(layer))(batch["x"])[:, 0]


def main(topology):
    """Compiles the step of a run; prints what it gathers.

    The output has the kinds of the collectives, the bytes gathered in the loops over layers, and the bytes gathered
    while products are computed.
    """
    replicas = int(np.prod([int(size) for size in topology.split(":")[1].split("x")]))
    config = toy.get_config()
    config.experiment = f"{__name__}.Stack"
    config.precision = "params=float32,compute=bfloat16,output=float32"
    config.batch_size = EXAMPLES * replicas
    config.reduction.shard_params = True
    _, mesh, experiment, state, batch, _ = dryrun.prepare(config, topology)
    compiled = preflight.jitted_step(experiment, mesh).lower(state, batch).compile()
    program = hlo.parse(compiled.as_text())
    times = program.times()
    loops = [name for name in program.computations if times[name] == LAYERS]
    sent = [op for op in collectives.in_program(program) if op.dtypes == ("bf16",)]
    kinds = sorted({op.kind for op in sent})
    gathered = sum(op.bytes for op in sent if op.times == LAYERS)
    print(json.dumps([kinds, gathered, sum(overlapped_bytes(program, name) for name in loops)]))


def overlapped_bytes(program, name):
    """Returns the bytes that a computation gathers while it computes products."""
    total, started, hidden = 0, {}, set()
    for op in program.computations[name].instructions.values():
        inside = list(instructions(program, op))
        if op.name.startswith("async-collective-start"):
            gathers = [inner for inner in inside if inner.opcode == "all-gather"]
            started[op.name] = sum(inner.bytes for inner in gathers)
        elif op.name.startswith("async-collective-done"):
            start = op.name.replace("done", "start")
            total += started.pop(start) if start in hidden else 0
        elif any(inner.opcode == "convolution" for inner in inside):
            hidden |= set(started)
    return total


def instructions(program, op):
    for body in op.bodies:
        for inner in program.computations[body].instructions.values():
            yield inner
            yield from instructions(program, inner)


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: python -m pip install -r requirements_dryrun_lock.txt",
)
@pytest.mark.parametrize("topology", ["v6e:4x4", "v5p:4x4x4"])
def test_layers_are_gathered_while_others_are_computed(topology):
    program = f"from tests.dryrun import gathers_test\ngathers_test.main({topology!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    kinds, gathered, hidden = json.loads(done.stdout)
    # A gather by an all-reduce of zero-padded shards would send twice as much.
    assert kinds == ["all-gather"]
    assert gathered / 3 < hidden <= gathered
