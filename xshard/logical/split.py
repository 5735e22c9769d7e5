"""A replica's program, split at its collectives: the parts that each replica computes,
and a last part after them.

All devices compute the last part alike. Values that differ between replicas reach it
only through an exchange with results that are equal on all replicas.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xshard import errors, jax_internals
from xshard import mesh as mesh_lib
from xshard.optimizers import primitives

# The collectives that a program is split at.
SUM, MAX, MIN, SCATTER, GATHER = COLLECTIVES = (
    "psum",
    "pmax",
    "pmin",
    "reduce_scatter",
    "all_gather",
)
# The parameters of their equations that hold the dimension to cut or to join.
_DIMS = {SCATTER: "scatter_dimension", GATHER: "all_gather_dimension"}
# The most exchanges that may depend on one another. The program before each exchange
# recomputes all that precedes it.
_MOST = 16


class Kind(NamedTuple):
    """The way in which an array is exchanged.

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
        replica's number, and the results of all exchanges.
    """

    program: jax_internals.ClosedJaxpr
    reads: tuple[int, ...]

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Evaluates the part on the values at the positions in `reads`."""
        return jax_internals.as_function(self.program)(*(values[i] for i in self.reads))


class Exchange(NamedTuple):
    """The arrays that replicas exchange together, and the outputs that each replica
    keeps at that point.

    Attributes:
      before: computes the arrays that a replica sends, followed by the outputs that it
        keeps.
      kinds: the way in which each sent array is exchanged.
      results: the positions of this exchange's results among those of all exchanges.
      kept: the positions of the kept outputs among the outputs that are a replica's
        own.
    """

    before: Segment
    kinds: tuple[Kind, ...]
    results: tuple[int, ...]
    kept: tuple[int, ...]


class Split(NamedTuple):
    """The parts of a program.

    Attributes:
      exchanges: the exchanges in order. The last one may send nothing and only keep
        outputs.
      after: computes the outputs that are equal on all replicas, and reads nothing that
        is a replica's own.
      size: the number of results of all exchanges.
    """

    exchanges: tuple[Exchange, ...]
    after: Segment
    size: int


def split(
    program: jax_internals.ClosedJaxpr,
    what: str,
    sizes: Mapping[str, int],
    own: Sequence[bool],
    outputs_own: Sequence[bool],
) -> Split:
    """Splits a replica's program.

    Args:
      program: the program.
      what: a name of the program, for error messages.
      sizes: the sizes of the axes that are mapped in it.
      own: whether each input is the replica's own.
      outputs_own: whether each output is the replica's own.

    Raises:
      UserError: if too many exchanges depend on one another; if one is in a loop or a
        branch, or is not in `COLLECTIVES`; or if an output that must be equal depends
        on values that differ between replicas.
    """
    both, kinds = _merged_program(program, what, sizes, outputs_own)
    levels = _levels(both.jaxpr, len(kinds), sum(outputs_own))
    _check_depth(what, max(levels[: len(kinds)], default=-1) + 1)
    after = _segment(both, range(len(levels), len(both.out_avals)))
    _check_equal(what, after, [*own, True, *(kind.name == SCATTER for kind in kinds)])
    exchanges = []
    for level in sorted(set(levels)):
        at = [i for i, x in enumerate(levels) if x == level]
        results = tuple(i for i in at if i < len(kinds))
        kept = tuple(i - len(kinds) for i in at[len(results) :])
        sent = tuple(kinds[i] for i in results)
        exchanges.append(Exchange(_segment(both, at), sent, results, kept))
    return Split(tuple(exchanges), after, len(kinds))


def _merged_program(
    program: jax_internals.ClosedJaxpr,
    what: str,
    sizes: Mapping[str, int],
    outputs_own: Sequence[bool],
) -> tuple[jax_internals.ClosedJaxpr, list[Kind]]:
    """A program that takes the inputs, the replica's number and the results of
    exchanges; and the kinds of these.

    It returns the arrays to exchange, then the outputs that are the replica's own, and
    then the others.
    """
    # Dead code is removed first, so that unused results are not exchanged.
    all_outputs = [True] * len(outputs_own)
    used, _ = jax_internals.without_dead_code(program, all_outputs, keep_inputs=True)
    exchanged = [(eqn, x) for eqn in _exchanged(used.jaxpr, what) for x in eqn.outvars]

    def run(inputs: Sequence[Any], number: Any, results: Sequence[Any]) -> Any:
        sent: list[Any] = []
        made = _Run(number, iter(results), sent)(used, inputs)
        kept = [x for x, is_own in zip(made, outputs_own, strict=True) if is_own]
        return (
            sent,
            kept,
            [x for x, is_own in zip(made, outputs_own, strict=True) if not is_own],
        )

    number = jax.ShapeDtypeStruct((), jnp.int32)
    results = [_result(eqn, x.aval) for eqn, x in exchanged]
    both = jax.make_jaxpr(run, axis_env=list(sizes.items()))(
        program.in_avals, number, results
    )
    return both, [_kind(eqn) for eqn, _ in exchanged]


def _check_depth(what: str, depth: int) -> None:
    if depth > _MOST:
        raise errors.UserError(
            f"{what} has {depth} exchanges between the replicas that depend on one another, as several hk.BatchNorm with "
            f"cross_replica_axis do; with logical_replicas there may be at most {_MOST}. Leave some out (a BatchNorm without "
            "an axis uses the statistics of each replica's examples), or set logical_replicas to 0."
        )


def _check_equal(what: str, after: Segment, own: Sequence[bool]) -> None:
    if not any(i < len(own) and own[i] for i in after.reads):
        return
    for eqn in primitives.all_equations(after.program.jaxpr):
        # A part of a program keeps these calls, whichever of its results are used.
        if eqn.primitive.name in ("debug_print", "debug_callback", "io_callback"):
            raise errors.UserError(
                f"{what} has {eqn.primitive.name} of a replica's values, as by jax.debug.print. With logical_replicas a "
                "step may be several programs, each of which would call it: leave it out, or set logical_replicas to 0."
            )
    raise errors.UserError(
        f"{what} returns a value that differs between the replicas. With logical_replicas each result must be equal on "
        "them, or pass through jax.lax.pmean, psum, pmax, pmin or all_gather over ('slice', 'replica'), or be marked as "
        "a replica's own: xshard.PerReplica, xshard.PerExample."
    )


def _levels(jaxpr: jax_internals.Jaxpr, count: int, kept: int) -> list[int]:
    """The depth of each exchange and of each kept output: the length of the chain of
    exchanges that it depends on.

    Args:
      jaxpr: the program. Its first outputs go into the exchanges, and its last inputs
        are their results.
      count: the number of exchanged arrays.
      kept: the number of kept outputs, which follow the exchanged ones.
    """
    sent = jaxpr.outvars[:count]
    result_of = dict(zip(jaxpr.invars[len(jaxpr.invars) - count :], sent, strict=True))
    found: dict[Any, int] = {}

    def level(x: Any) -> int:
        if isinstance(x, jax_internals.Literal):
            return 0
        # A result is one level after the array that goes into its exchange.
        return level(result_of[x]) + 1 if x in result_of else found.get(x, 0)

    for eqn in jaxpr.eqns:
        highest = max(map(level, eqn.invars), default=0)
        found.update((x, highest) for x in eqn.outvars)
    return [level(x) for x in jaxpr.outvars[: count + kept]]


def _segment(program: jax_internals.ClosedJaxpr, outputs: Sequence[int]) -> Segment:
    """The part of a program that computes some of its outputs."""
    is_made = [i in outputs for i in range(len(program.out_avals))]
    part, reads = jax_internals.without_dead_code(program, is_made)
    reads_at = tuple(i for i, is_read in enumerate(reads) if is_read)
    return Segment(part, reads_at)


class _Run:
    """Evaluates a program with a given replica's number and given results of its
    exchanges.
    """

    def __init__(self, number: Any, results: Iterator[Any], sent: list[Any]):
        """Stores the given values.

        Args:
          number: the number of the replica.
          results: the results of the exchanges, in the order of the program.
          sent: a list, to which the evaluation appends the arrays that the replica
            sends.
        """
        self._number = number
        self._results = results
        self._brought = sent

    def __call__(
        self, program: jax_internals.ClosedJaxpr, args: Sequence[Any]
    ) -> list[Any]:
        """The outputs of a program."""
        return primitives.evaluate(program, args, self._results_of)

    def _results_of(self, eqn: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        # Keeps the scope names, which profiles show.
        with jax.named_scope(str(eqn.source_info.name_stack)):
            if _is_over_replicas(eqn):
                return self._exchanged(eqn, inputs)
            called = primitives.called(eqn)
            if called is None:
                return primitives.bind(eqn, *inputs)
            # Opens calls that contain exchanges, and empty calls: a call that only
            # returns its inputs would otherwise make each of its results depend on all
            # of them.
            within = primitives.all_equations(called.jaxpr)
            if any(map(_is_over_replicas, within)) or not called.jaxpr.eqns:
                return self(called, inputs)
            return primitives.bind(eqn, *inputs)

    def _exchanged(self, eqn: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        if eqn.primitive.name == "axis_index":
            is_slice = eqn.params["axis_name"] == mesh_lib.SLICE
            return [jnp.zeros_like(self._number) if is_slice else self._number]
        kind = _kind(eqn)
        stacks = eqn.params.get("tiled") is False
        if stacks and kind.name == GATHER:
            inputs = [jnp.expand_dims(x, kind.dim) for x in inputs]
        self._brought += inputs
        results = [next(self._results) for _ in eqn.outvars]
        if stacks and kind.name == SCATTER:
            results = [jnp.squeeze(x, kind.dim) for x in results]
        return results


def _kind(eqn: Any) -> Kind:
    name = eqn.primitive.name
    return Kind(name, eqn.params.get(_DIMS.get(name), 0))


def _result(eqn: Any, aval: Any) -> jax.ShapeDtypeStruct:
    """The shape of an exchange's result in tiled form, where the cut or joined
    dimension exists in all arrays.
    """
    kind, shape = _kind(eqn), list(aval.shape)
    if kind.name == SCATTER and not eqn.params["tiled"]:
        shape.insert(kind.dim, 1)
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype, weak_type=aval.weak_type)


def _is_over_replicas(eqn: Any) -> bool:
    """Returns whether an equation exchanges values between the replicas of a group, or
    reads a replica's number.
    """
    return not {*mesh_lib.REPLICAS}.isdisjoint(primitives.mapped_axes(eqn))


def _exchanged(
    jaxpr: jax_internals.Jaxpr, what: str, inside: str = ""
) -> Iterator[Any]:
    """The equations of a program that exchange values, in the order in which they run."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if _is_over_replicas(eqn):
            _check(eqn, what, inside)
            if name in COLLECTIVES:
                yield eqn
        within = inside if name in primitives.CALLS else inside or name
        for called in jax_internals.inner_programs(eqn):
            yield from _exchanged(called, what, within)


def _check(eqn: Any, what: str, inside: str) -> None:
    name = eqn.primitive.name
    rule = "set logical_replicas to 0, with which each device is one replica."
    if inside:
        raise errors.UserError(
            f"{what} has {name} over the replicas inside a {inside}; with logical_replicas it must be outside of loops and "
            f"branches. Move it out (a loss of micro-batches runs in a scan: set micro_batches to 1), or {rule}"
        )
    if name not in (*COLLECTIVES, "axis_index"):
        raise errors.UserError(
            f"{what} has {name} over the replicas; logical_replicas supports psum, pmean, pmax, pmin, psum_scatter and "
            f"all_gather. Use these, or {rule}"
        )
    axes = primitives.mapped_axes(eqn)
    if name in COLLECTIVES and (
        mesh_lib.REPLICA not in axes or not {*axes} <= {*mesh_lib.REPLICAS}
    ):
        raise errors.UserError(
            f"{what} has {name} over {axes}; with logical_replicas it must be over all replicas of a group, which form one "
            f"slice: over ('slice', 'replica') or 'replica'. Use these axes, or {rule}"
        )
    if eqn.params.get("axis_index_groups") is not None:
        raise errors.UserError(
            f"{what} has {name} over groups of replicas (axis_index_groups); with logical_replicas it must be over all "
            f"replicas of a mesh group. Use config.group_assignment, or {rule}"
        )
