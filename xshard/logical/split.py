"""A replica's program, split at its collectives: the parts that each replica computes,
and a last part after them.

All devices compute the last part alike. Values that differ between replicas reach it
only through a collective with results that are equal on all replicas.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xshard import errors
from xshard import mesh as mesh_lib
from xshard.base import primitives
from xshard.base.jax_internals import jaxprs

# The collectives that a program is split at, by the names of JAX's primitives.
SUM = "psum"
MAX = "pmax"
MIN = "pmin"
SCATTER = "reduce_scatter"
GATHER = "all_gather"
COLLECTIVES = (SUM, MAX, MIN, SCATTER, GATHER)
# The parameters of their equations that hold the dimension to cut or to join.
_DIMS = {SCATTER: "scatter_dimension", GATHER: "all_gather_dimension"}
# The most collectives that may depend on one another. The program before each of them
# recomputes all that precedes it.
_MAX_DEPTH = 16
# A part of a program keeps these calls, whichever of its results are used.
_SIDE_EFFECTS = ("debug_print", "debug_callback", "io_callback")


class Kind(NamedTuple):
    """The way in which an array is combined.

    Attributes:
      name: one of `COLLECTIVES`.
      dim: the dimension that is cut into the replicas' shards, or along which their
        arrays are joined.
    """

    name: str
    dim: int = 0


class Segment(NamedTuple):
    """A part of a program.

    Attributes:
      program: the program of the part.
      reads: the positions of its inputs in a list of the whole program's inputs, the
        replica's number, and the results of all collectives.
    """

    program: jaxprs.ClosedJaxpr
    reads: tuple[int, ...]

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Evaluates the part on the values at the positions in `reads`."""
        inputs = [values[i] for i in self.reads]
        return jaxprs.as_function(self.program)(*inputs)


class Collective(NamedTuple):
    """Arrays that replicas combine at once, and the outputs that are known then.

    Attributes:
      before: computes the arrays that a replica sends, followed by the per-replica
        outputs of the program that depend on no later collective.
      kinds: the way in which each sent array is combined.
      results: the positions of its results among those of all collectives.
      kept: the positions of these outputs among all per-replica outputs.
    """

    before: Segment
    kinds: tuple[Kind, ...]
    results: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def shapes(self) -> Sequence[Any]:
        """The shapes and types of the arrays that a replica sends."""
        return self.before.program.out_avals[: len(self.kinds)]


class Split(NamedTuple):
    """The parts of a program.

    Attributes:
      collectives: the collectives in order. The last one may send nothing and only
        compute outputs.
      after: computes the outputs that are equal on all replicas, and reads nothing that
        is per replica.
      size: the number of results of all collectives.
    """

    collectives: tuple[Collective, ...]
    after: Segment
    size: int


def split(
    program: jaxprs.ClosedJaxpr,
    what: str,
    axis_sizes: Mapping[str, int],
    inputs_per_replica: Sequence[bool],
    outputs_per_replica: Sequence[bool],
) -> Split:
    """Splits a replica's program.

    Args:
      program: the program.
      what: a name of the program, for error messages.
      axis_sizes: the sizes of the axes that are mapped in it.
      inputs_per_replica: whether each input is per replica.
      outputs_per_replica: whether each output is per replica.

    Raises:
      UserError: if too many collectives depend on one another; if one is in a loop or a
        branch, or is not in `COLLECTIVES`; or if an output that must be equal depends
        on values that differ between replicas.
    """
    opened, kinds = _open_at_collectives(program, what, axis_sizes, outputs_per_replica)
    num_sent = len(kinds)
    levels = _levels(opened.jaxpr, num_sent, sum(outputs_per_replica))
    _check_depth(what, max(levels[:num_sent], default=-1) + 1)

    after = _segment(opened, range(len(levels), len(opened.out_avals)))
    are_shards = [kind.name == SCATTER for kind in kinds]
    _check_equal(what, after, [*inputs_per_replica, True, *are_shards])

    collectives = []
    for level in sorted(set(levels)):
        outputs = [i for i, x in enumerate(levels) if x == level]
        # The outputs of the opened program are the combined arrays, then the kept
        # ones.
        results = tuple(i for i in outputs if i < num_sent)
        kept = tuple(i - num_sent for i in outputs if i >= num_sent)
        collective = Collective(
            before=_segment(opened, outputs),
            kinds=tuple(kinds[i] for i in results),
            results=results,
            kept=kept,
        )
        collectives.append(collective)
    return Split(tuple(collectives), after, num_sent)


def _open_at_collectives(
    program: jaxprs.ClosedJaxpr,
    what: str,
    axis_sizes: Mapping[str, int],
    outputs_per_replica: Sequence[bool],
) -> tuple[jaxprs.ClosedJaxpr, list[Kind]]:
    """Turns what replicas combine into outputs and inputs of their program.

    Returns:
      A program of the inputs, the replica's number and the results of all collectives.
      It returns the arrays to combine, then the per-replica outputs, and then the
      others. And the kind of each combined array.
    """
    # Dead code is removed first, so that unused results are not combined.
    all_outputs = [True] * len(outputs_per_replica)
    used, _ = jaxprs.without_dead_code(program, all_outputs, keep_inputs=True)
    kinds = []
    result_shapes = []
    for eqn in _collectives(used.jaxpr, what):
        for variable in eqn.outvars:
            kinds.append(_kind(eqn))
            result_shapes.append(_tiled_result(eqn, variable.aval))

    def run(inputs: Sequence[Any], number: Any, results: Sequence[Any]) -> Any:
        interpreter = _Interpreter(number, iter(results))
        outputs = interpreter(used, inputs)
        per_replica = []
        equal = []
        for output, is_per_replica in zip(outputs, outputs_per_replica, strict=True):
            if is_per_replica:
                per_replica.append(output)
            else:
                equal.append(output)
        return interpreter.sent, per_replica, equal

    number = jax.ShapeDtypeStruct((), jnp.int32)
    trace = jax.make_jaxpr(run, axis_env=list(axis_sizes.items()))
    return trace(program.in_avals, number, result_shapes), kinds


def _check_depth(what: str, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise errors.UserError(
            f"{what} has {depth} collectives between the replicas that depend on one "
            "another, as several hk.BatchNorm with cross_replica_axis do; with "
            f"logical_replicas there may be at most {_MAX_DEPTH}. Leave some out (a "
            "BatchNorm without an axis uses the statistics of each replica's "
            "examples), or set logical_replicas to 0."
        )


def _check_equal(what: str, after: Segment, inputs_per_replica: Sequence[bool]) -> None:
    """Raises UserError if the last segment reads anything that is per replica.

    Args:
      what: a name of the program.
      after: the segment.
      inputs_per_replica: whether each input of the opened program is per replica.
    """
    if not any(inputs_per_replica[i] for i in after.reads):
        return
    for eqn in primitives.all_equations(after.program.jaxpr):
        if eqn.primitive.name in _SIDE_EFFECTS:
            raise errors.UserError(
                f"{what} has {eqn.primitive.name} of a replica's values, as by "
                "jax.debug.print. With logical_replicas a step may be several "
                "programs, each of which would call it: leave it out, or set "
                "logical_replicas to 0."
            )
    raise errors.UserError(
        f"{what} returns a value that differs between the replicas. With "
        "logical_replicas each result must be equal on them, or pass through "
        "jax.lax.pmean, psum, pmax, pmin or all_gather over ('slice', 'replica'), or "
        "be marked as a replica's own: xshard.PerReplica, xshard.PerExample."
    )


def _levels(jaxpr: jaxprs.Jaxpr, num_sent: int, num_kept: int) -> list[int]:
    """Returns the level of each combined array and of each per-replica output.

    The level of a value is the length of the longest chain of collectives that it
    depends on. Arrays of one level are combined at once.

    Args:
      jaxpr: the program. Its first outputs go into the collectives, and its last inputs
        are their results.
      num_sent: the number of sent arrays.
      num_kept: the number of per-replica outputs, which follow the combined arrays.
    """
    sent = jaxpr.outvars[:num_sent]
    results = jaxpr.invars[len(jaxpr.invars) - num_sent :]
    sent_for_result = dict(zip(results, sent, strict=True))
    levels: dict[Any, int] = {}

    def level_of(variable: Any) -> int:
        if isinstance(variable, jaxprs.Literal):
            return 0
        # A result is one level after the array that goes into its collective.
        if variable in sent_for_result:
            return level_of(sent_for_result[variable]) + 1
        return levels.get(variable, 0)

    for eqn in jaxpr.eqns:
        level = max([level_of(variable) for variable in eqn.invars], default=0)
        for variable in eqn.outvars:
            levels[variable] = level
    return [level_of(x) for x in jaxpr.outvars[: num_sent + num_kept]]


def _segment(program: jaxprs.ClosedJaxpr, outputs: Sequence[int]) -> Segment:
    """Returns the part of a program that computes some of its outputs."""
    is_made = [i in outputs for i in range(len(program.out_avals))]
    part, is_read = jaxprs.without_dead_code(program, is_made)
    reads = tuple(i for i, input_is_read in enumerate(is_read) if input_is_read)
    return Segment(part, reads)


class _Interpreter:
    """Evaluates a program with given results of its collectives.

    Attributes:
      sent: the arrays that the replica sends into the collectives, in the order of the
        program. The evaluation appends to it.
    """

    def __init__(self, number: Any, results: Iterator[Any]):
        """Stores the given values.

        Args:
          number: the number of the replica.
          results: the results of the collectives, in the order of the program.
        """
        self.sent: list[Any] = []
        self._number = number
        self._results = results

    def __call__(self, program: jaxprs.ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """Returns the outputs of a program."""
        return primitives.evaluate(program, args, self._results_of)

    def _results_of(self, eqn: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        # Keeps the scope names, which profiles show.
        with jax.named_scope(str(eqn.source_info.name_stack)):
            if eqn.primitive.name == "axis_index" and _is_over_replicas(eqn):
                return [self._axis_index(eqn)]
            if _is_over_replicas(eqn):
                return self._combine(eqn, inputs)
            called = primitives.called(eqn)
            if called is None:
                return primitives.bind(eqn, *inputs)
            # Opens calls that contain collectives, and empty calls: a call that only
            # returns its inputs would otherwise make each of its results depend on all
            # of them.
            within = primitives.all_equations(called.jaxpr)
            if any(map(_is_over_replicas, within)) or not called.jaxpr.eqns:
                return self(called, inputs)
            return primitives.bind(eqn, *inputs)

    def _axis_index(self, eqn: Any) -> Any:
        # All replicas of a group form one slice.
        if eqn.params["axis_name"] == mesh_lib.SLICE:
            return jnp.zeros_like(self._number)
        return self._number

    def _combine(self, eqn: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        """Sends the inputs of a collective, and returns its results.

        Collectives are in tiled form, so an untiled one has its new dimension added
        before, or removed after it.
        """
        kind = _kind(eqn)
        is_untiled = eqn.params.get("tiled") is False
        if is_untiled and kind.name == GATHER:
            inputs = [jnp.expand_dims(x, kind.dim) for x in inputs]
        self.sent += inputs
        results = [next(self._results) for _ in eqn.outvars]
        if is_untiled and kind.name == SCATTER:
            results = [jnp.squeeze(x, kind.dim) for x in results]
        return results


def _kind(eqn: Any) -> Kind:
    name = eqn.primitive.name
    if name in _DIMS:
        return Kind(name, eqn.params[_DIMS[name]])
    return Kind(name)


def _tiled_result(eqn: Any, aval: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape of a collective's result in tiled form.

    In this form the cut or joined dimension exists in all arrays.
    """
    kind = _kind(eqn)
    shape = list(aval.shape)
    if kind.name == SCATTER and not eqn.params["tiled"]:
        shape.insert(kind.dim, 1)
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype, weak_type=aval.weak_type)


def _is_over_replicas(eqn: Any) -> bool:
    """Returns whether an equation combines values of the replicas of a group.

    Or reads a replica's number, as `axis_index` does.
    """
    return not set(mesh_lib.REPLICAS).isdisjoint(primitives.mapped_axes(eqn))


def _collectives(jaxpr: jaxprs.Jaxpr, what: str, inside: str = "") -> Iterator[Any]:
    """Yields the equations that combine values, in the order in which they run.

    Args:
      jaxpr: the program.
      what: a name of the whole program, for errors.
      inside: the primitive of the innermost loop or branch around it; empty if none is.
    """
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if _is_over_replicas(eqn):
            _check_collective(eqn, what, inside)
            if name in COLLECTIVES:
                yield eqn
        within = inside
        if not inside and name not in primitives.CALLS:
            within = name
        for called in jaxprs.inner_programs(eqn):
            yield from _collectives(called, what, within)


def _check_collective(eqn: Any, what: str, inside: str) -> None:
    """Raises UserError if logical replicas do not support a collective."""
    name = eqn.primitive.name
    axes = primitives.mapped_axes(eqn)
    alternative = "set logical_replicas to 0, with which each device is one replica."
    if inside:
        raise errors.UserError(
            f"{what} has {name} over the replicas inside a {inside}; with "
            "logical_replicas it must be outside of loops and branches. Move it out (a "
            "loss of micro-batches runs in a scan: set micro_batches to 1), or "
            f"{alternative}"
        )
    if name == "axis_index":
        return
    if name not in COLLECTIVES:
        raise errors.UserError(
            f"{what} has {name} over the replicas; logical_replicas supports psum, "
            "pmean, pmax, pmin, psum_scatter and all_gather. Use these, or "
            f"{alternative}"
        )
    if mesh_lib.REPLICA not in axes or not set(axes) <= set(mesh_lib.REPLICAS):
        raise errors.UserError(
            f"{what} has {name} over {axes}; with logical_replicas it must be over all "
            "replicas of a group, which form one slice: over ('slice', 'replica') or "
            f"'replica'. Use these axes, or {alternative}"
        )
    if eqn.params.get("axis_index_groups") is not None:
        raise errors.UserError(
            f"{what} has {name} over groups of replicas (axis_index_groups); with "
            "logical_replicas it must be over all replicas of a mesh group. Use "
            f"config.group_assignment, or {alternative}"
        )
