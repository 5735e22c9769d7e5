"""Sharded parameters in a TPU program: the collective that gathers each layer, and its
overlap with computation.
"""

import importlib.util
import json
import os
import subprocess
import sys

import haiku as hk
import jax
import numpy as np
import pytest

from tests import forks, toy
from xshard.dryrun import analysis, collectives, hlo
from xshard.run import preflight

LAYERS, WIDTH, EXAMPLES = 4, 2048, 2048

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: python -m pip install -r "
    "requirements/dryrun_lock.txt",
)


class Stack(toy.Toy):
    """A stack of layers, large enough that gathering one takes as long as computing
    one.
    """

    def train_data(self):
        x = np.zeros((self.config.batch_size, WIDTH), np.float32)
        return {"x": x, "y": x[:, 0]}

    def forward(self, batch, *, is_training):
        def layer(x):
            hidden = jax.nn.silu(hk.Linear(2 * WIDTH, name="wide")(x))
            return x + hk.Linear(WIDTH, name="narrow")(hidden)

        return hk.layer_stack(LAYERS)(hk.remat(layer))(batch["x"])[:, 0]


def main(topology, ahead):
    """Compiles the step of a run; prints what it gathers.

    The output has the kinds of the collectives, the number of loops over layers, how
    many of these compute with an array that the same round gathers, the bytes gathered
    in a round of each, and those gathered while products are computed.

    Args:
      topology: the slice to compile for.
      ahead: whether the loops have a round less than layers.
    """
    replicas = int(np.prod([int(size) for size in topology.split(":")[1].split("x")]))
    config = toy.get_config()
    config.experiment = f"{__name__}.Stack"
    config.precision = "params=float32,compute=bfloat16,output=float32"
    config.batch_size = EXAMPLES * replicas
    config.reduction.shard_params = True
    step = analysis.prepare(config, topology)
    jitted = preflight.jitted_step(step.experiment, step.mesh)
    compiled = jitted.lower(step.state, step.batch).compile()
    program = hlo.parse(compiled.as_text())
    times = program.times()
    # If gathers run ahead, the first layer's arrays are gathered before the loop, and
    # the last layer is computed after it.
    rounds = LAYERS - 1 if ahead else LAYERS
    loops = [name for name in loop_bodies(program) if times[name] == rounds]
    sent = [op for op in collectives.in_program(program) if op.dtypes == ("bf16",)]
    kinds = sorted({op.kind for op in sent})
    late = sum(uses_own_gathers(program, name) for name in loops)
    gathered = sum(op.bytes for op in sent if op.times == rounds)
    hidden = sum(overlapped_bytes(program, name) for name in loops)
    print(json.dumps([kinds, len(loops), late, gathered, hidden]))


def loop_bodies(program):
    """Returns the bodies of a program's loops."""
    bodies = []
    for name, computation in program.computations.items():
        for op in computation.instructions.values():
            loop = program.loop(name, op)
            if loop is not None:
                bodies.append(loop.body)
    return bodies


def uses_own_gathers(program, name):
    """Returns whether products of a computation read arrays that it gathers itself."""
    gathered = set()
    for op in program.computations[name].instructions.values():
        # A gather in two steps reads the first step's array. What is in flight is not
        # gathered yet.
        if op.name.startswith("async-collective-start"):
            continue
        reads = not gathered.isdisjoint(op.operands)
        if reads and computes_products(instructions(program, op)):
            return True
        is_done = op.name.startswith("async-collective-done")
        if reads or is_done or op.opcode == "all-gather":
            gathered.add(op.name)
    return False


def overlapped_bytes(program, name):
    """Returns the bytes that a computation gathers while it computes products."""
    total = 0
    # The bytes of the gathers in flight, and those of them beside products.
    started = {}
    hidden = set()
    for op in program.computations[name].instructions.values():
        inside = list(instructions(program, op))
        if op.name.startswith("async-collective-start"):
            gathers = [inner for inner in inside if inner.opcode == "all-gather"]
            started[op.name] = sum(inner.bytes for inner in gathers)
        elif op.name.startswith("async-collective-done"):
            start = op.name.replace("done", "start")
            size = started.pop(start, 0)
            if start in hidden:
                total += size
        elif computes_products(inside):
            hidden |= set(started)
    return total


def computes_products(ops):
    return any(op.opcode == "convolution" for op in ops)


def instructions(program, op):
    for body in op.bodies:
        for inner in program.computations[body].instructions.values():
            yield inner
            yield from instructions(program, inner)


def gathers_of(topology, *, ahead):
    """Returns what `main` prints, in a process of its own."""
    program = (
        "from tests.dryrun import gathers_test\n"
        f"gathers_test.main({topology!r}, {ahead})"
    )
    environment = {**os.environ, "PYTHONPATH": forks.python_path()}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.sample(1, of="gathers")
@needs_libtpu
def test_each_layer_is_gathered_while_the_one_before_is_computed():
    kinds, loops, late, gathered, hidden = gathers_of("v5e:4x4", ahead=True)
    # A gather by an all-reduce of zero-padded shards would send twice as much.
    assert kinds == ["all-gather"]
    # One loop is the forward pass and one the backward pass.
    assert (loops, late) == (2, 0)
    assert gathered / 2 < hidden <= gathered


@pytest.mark.long
@needs_libtpu
@pytest.mark.parametrize("topology", ["v5p:4x4x4", "v6e:4x4"])
def test_a_layer_is_gathered_before_it_is_computed(topology):
    """The compiler accepts the step, whose gathers overlap nothing; an option that it
    accepts might change this.
    """
    kinds, _, late, gathered, hidden = gathers_of(topology, ahead=False)
    assert kinds == ["all-gather"] and late == 2
    assert gathered > 0 and hidden == 0
