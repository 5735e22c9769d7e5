"""How many steps the host dispatches at once, and in which program.

A host needs some tenths of a millisecond to dispatch a program. For steps of a
millisecond that is a large part, so a run makes several steps in one program, which
loops over them. TensorFlow 1 calls their number `iterations_per_loop`
(`TPUConfig`), Keras `steps_per_execution`.

Which program makes a run's steps, the loop or the plain step, is part of the run, since
XLA may round differently in a loop. It is decided when the run begins, and recorded.
How many steps of the loop are dispatched at once changes no bit.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from xshard import errors, logical
from xshard.base.jax_internals import jaxprs
from xshard.data import batches as batches_lib
from xshard.files import identity
from xshard.metrics import flops
from xshard.training import state as state_lib
from xshard.training import step as step_lib

KEY = "steps_per_dispatch"
# The most steps of a dispatch that a run chooses by itself. With so many the host's
# time is small; more would only delay what follows a step.
_MOST_STEPS = 32
# And of one whose batches are drawn one by one, which may be slow: a request to stop
# waits for them.
_MOST_DRAWN = 8
# The limits of what a dispatch computes, writes and reads. Two dispatches are in flight
# when a run is asked to stop, and it finishes both: on two cores of a CPU each of these
# takes some tenths of a second. They are counted and not timed, so that all processes
# find the same.
_MOST_FLOPS = 2 * 10**10
_MOST_BYTES = 2 * 10**9
_MOST_BATCH_BYTES = 1 << 26
_CONVOLUTION = "conv_general_dilated"
# The fewest batches in the arrays of a loop. From arrays of one batch XLA removes the
# selection of the step's own, and may then round differently.
LEAST_ROOM = 2


class Plan(NamedTuple):
    """How a run dispatches its steps.

    Attributes:
      program: `identity.LOOP` or `identity.STEP`.
      most: the most steps of a dispatch.
      why: the reason, as a part of a sentence.
    """

    program: str
    most: int
    why: str

    @property
    def room(self) -> int:
        """The number of batches in the arrays of a loop, used or not."""
        return max(self.most, LEAST_ROOM)

    def __str__(self) -> str:
        if self.program == identity.STEP:
            return f"one step a dispatch: {self.why}"
        if self.most == 1:
            return f"one step a dispatch, in a program for several: {self.why}"
        return f"up to {self.most} steps a dispatch: {self.why}"


def plan(
    config: ml_collections.ConfigDict,
    mesh: jax.sharding.Mesh,
    traced_step: Any,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    *,
    updates_in_shards: bool,
    acts: bool,
    waits: bool,
    recorded: str | None,
) -> Plan:
    """Decides how a run dispatches its steps.

    All processes find the same.

    Args:
      config: the run's config.
      mesh: the run's mesh.
      traced_step: the training step, traced.
      batch: the shapes of its batch.
      updates_in_shards: whether each replica updates its shards of global arrays.
      acts: whether the training data uses the model.
      waits: whether a process draws the data batch by batch.
      recorded: the program that the run began with; None if it begins now.

    Raises:
      UserError: if the config asks for several steps of a program that makes one.
    """
    asked = config.get(KEY, 0)
    if logical.of_config(config, mesh) is not None:
        why = f"with logical_replicas={config.logical_replicas} a program makes no loop"
        return _plain(asked, f"{why} of steps")
    if recorded == identity.STEP:
        return _plain(asked, "the run began so, and its bits depend on it")
    cost = _cost(traced_step.jaxpr)
    unsuited = _why_not_in_a_loop(mesh, cost, updates_in_shards)
    if recorded is None and not asked and unsuited:
        return Plan(identity.STEP, 1, unsuited)
    if asked:
        return Plan(identity.LOOP, asked, f"{KEY}={asked}")
    if unsuited:
        return Plan(identity.LOOP, 1, unsuited)
    if acts:
        why = "the training data may use the model before each"
        return Plan(identity.LOOP, 1, why)
    most, why = _within_limits(cost, batch)
    if waits and most > _MOST_DRAWN:
        most = _MOST_DRAWN
        why = "its batches are drawn one by one, which may be slow"
    return Plan(identity.LOOP, most, why)


def _plain(asked: int, why: str) -> Plan:
    if asked > 1:
        raise errors.UserError(f"{KEY}={asked} cannot be had: {why}. Set it to 0 or 1.")
    return Plan(identity.STEP, 1, why)


class _Cost(NamedTuple):
    """What a step costs.

    Attributes:
      flops: of its products and convolutions; None if they cannot be counted.
      nbytes: of all intermediate results, as if XLA wrote each.
      convolves: whether it has a convolution.
    """

    flops: int | None
    nbytes: int
    convolves: bool


def _cost(closed: Any) -> _Cost:
    nbytes, convolves = _written(closed.jaxpr)
    try:
        count: int | None = flops.of_program(closed.jaxpr)
    except errors.UserError:
        count = None
    return _Cost(count, nbytes, convolves)


def _written(jaxpr: Any) -> tuple[int, bool]:
    """Returns the bytes of a program's results, and whether it has a convolution."""
    nbytes = 0
    convolves = False
    for eqn in jaxpr.eqns:
        inner_bytes = 0
        inner_programs = list(jaxprs.inner_programs(eqn))
        for inner in inner_programs:
            written, has_convolution = _written(inner)
            inner_bytes += written
            convolves |= has_convolution
        if not inner_programs:
            for output in eqn.outvars:
                inner_bytes += _nbytes(output.aval)
        convolves |= eqn.primitive.name == _CONVOLUTION
        nbytes += inner_bytes * flops.times(eqn)
    return nbytes, convolves


def _nbytes(aval: Any) -> int:
    # A random key counts as the words of Threefry's.
    itemsize = getattr(aval.dtype, "itemsize", 8)
    return int(np.prod(aval.shape, dtype=np.int64)) * itemsize


def _why_not_in_a_loop(
    mesh: jax.sharding.Mesh, cost: _Cost, updates_in_shards: bool
) -> str:
    """Returns why a loop is not known to be faster here; empty if it is.

    What `benchmarks.loop` has measured decides.
    """
    if jax.default_backend() != "cpu":
        kind = mesh.devices.flat[0].device_kind
        return f"no loop of steps has been measured on a {kind}"
    if cost.convolves:
        return "on CPUs, XLA computes convolutions within a loop on one thread"
    if updates_in_shards:
        return "on CPUs, a loop of sharded updates is not faster"
    return ""


def _within_limits(
    cost: _Cost, batch: Mapping[str, jax.ShapeDtypeStruct]
) -> tuple[int, str]:
    """Returns how many steps the limits allow, and which one decides."""
    if cost.flops is None:
        return 1, "the FLOPs of a step cannot be counted"
    batch_bytes = sum(map(_nbytes, batch.values()))
    limits = {
        "FLOPs": (_MOST_FLOPS, cost.flops),
        "bytes of results": (_MOST_BYTES, cost.nbytes),
        "bytes of its batch": (_MOST_BATCH_BYTES, batch_bytes),
    }
    most = _MOST_STEPS
    why = "a step is small"
    for name, (limit, of_step) in limits.items():
        count = max(1, limit // max(1, of_step))
        if count < most:
            most = count
            why = f"a step has {of_step:.2g} {name}"
    return most, why


def draw(
    plan: Plan,
    steps: range,
    batches: batches_lib.TrainBatches,
    predict: Callable[[Any, Mapping[str, Any]], Any],
    state: state_lib.TrainState,
) -> tuple[dict[str, jax.Array], int]:
    """Draws the batches of steps that are dispatched at once.

    Args:
      plan: how the run dispatches its steps.
      steps: the numbers of the steps that may be made at once.
      batches: the training batches.
      predict: as for `TrainBatches.batch_for_step`.
      state: the state before the steps.

    Returns:
      The batch, or the stacked batches of a loop; and how many steps they are for.
    """
    if plan.program == identity.STEP:
        return batches.batch_for_step(steps.start, predict, state), 1
    return batches.batches_for_steps(steps, plan.room, predict, state)


def dispatch(
    plan: Plan,
    program: Callable[..., step_lib.Stepped],
    first: int,
    count: int,
    state: state_lib.TrainState,
    batch: Mapping[str, jax.Array],
) -> step_lib.Chunk:
    """Dispatches steps, and does not wait for them.

    Args:
      plan: how the run dispatches its steps.
      program: the program of its steps.
      first: the number of the first step.
      count: the number of steps.
      state: the state before them, which is donated.
      batch: what `draw` returned.
    """
    if plan.program == identity.STEP:
        return step_lib.Chunk(first, 1, program(state, batch), is_stacked=False)
    stepped = program(state, batch, np.int32(count))
    return step_lib.Chunk(first, count, stepped, is_stacked=True)
