"""A replica's program, split at what the replicas exchange: what each computes before, and what all compute after.

Nothing that differs between replicas comes into the second part but through the exchange: its results are equal on all.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval

from xshard import errors
from xshard import mesh as mesh_lib

# The collectives that a program is split at.
SUM, MAX, MIN = COLLECTIVES = ("psum", "pmax", "pmin")
# What calls a program once, in the place of which that program may stand.
_CALLS = ("jit", "closed_call", "remat2", "custom_jvp_call", "custom_vjp_call")


# So many exchanges may follow one another: before each a program computes anew what comes before.
_MOST = 16


class Part(NamedTuple):
    """A part of a program.

    Attributes:
      program: the part.
      reads: what it takes, as positions in the inputs of the whole program, the replica's number after them, and the
        results of all exchanges after that.
    """

    program: core.ClosedJaxpr
    reads: tuple[int, ...]

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """The results, of values of which those that it reads count."""
        return core.jaxpr_as_fun(self.program)(*(values[i] for i in self.reads))


class Exchange(NamedTuple):
    """Arrays that the replicas exchange at a time.

    Attributes:
      before: makes what a replica brings.
      kinds: for each array of it one of `COLLECTIVES`.
      results: where its results are among those of all exchanges.
    """

    before: Part
    kinds: tuple[str, ...]
    results: tuple[int, ...]


class Split(NamedTuple):
    """The parts of a program.

    Attributes:
      exchanges: one after the other.
      own: makes those of the program's outputs that are a replica's own.
      after: makes the others; reads nothing that is a replica's own.
      size: the number of results of all exchanges.
    """

    exchanges: tuple[Exchange, ...]
    own: Part
    after: Part
    size: int


def split(
    program: core.ClosedJaxpr,
    what: str,
    sizes: Mapping[str, int],
    own: Sequence[bool],
    left_own: Sequence[bool],
) -> Split:
    """Splits a replica's program.

    Args:
      program: the program.
      what: what it is, for messages.
      sizes: of the axes that are mapped in it.
      own: whether each input is the replica's own.
      left_own: whether each output is.

    Raises:
      UserError: if too many exchanges depend on one another, one stands in a loop or a branch, or is none of
        `COLLECTIVES`; or if another output does not come of what is equal on all replicas.
    """
    exchanged = list(_exchanged(program.jaxpr, what))
    inputs = [_shape(aval) for aval in program.in_avals]
    results = [_shape(x.aval) for eqn in exchanged for x in eqn.outvars]
    kinds = [eqn.primitive.name for eqn in exchanged for _ in eqn.outvars]

    def run(inputs: Sequence[Any], number: Any, results: Sequence[Any]) -> Any:
        brought: list[Any] = []
        run = _Run(number, iter(results), brought)
        return brought, run(program.jaxpr, program.consts, inputs)

    number = jax.ShapeDtypeStruct((), jnp.int32)
    both = jax.make_jaxpr(run, axis_env=list(sizes.items()))(inputs, number, results)
    levels = _levels(both.jaxpr, len(kinds))
    _check_depth(what, max(levels, default=0) + 1)
    none = [False] * len(kinds)
    after = _part(both, [*none, *(not is_own for is_own in left_own)])
    _check_equal(what, after, [*own, True])
    exchanges = []
    for level in sorted(set(levels)):
        at = tuple(i for i, x in enumerate(levels) if x == level)
        before = _part(both, [i in at for i in range(len(both.out_avals))])
        exchanges.append(Exchange(before, tuple(kinds[i] for i in at), at))
    of_own = _part(both, [*none, *left_own])
    return Split(tuple(exchanges), of_own, after, len(kinds))


def _check_depth(what: str, depth: int) -> None:
    if depth > _MOST:
        raise errors.UserError(
            f"{what} has {depth} exchanges between the replicas that depend on one another, as several hk.BatchNorm with "
            f"cross_replica_axis do; with logical_replicas there are at most {_MOST}. Leave some out (a BatchNorm without "
            "an axis has the statistics of each replica's examples), or set logical_replicas to 0."
        )


def _check_equal(what: str, after: Part, own: Sequence[bool]) -> None:
    if any(i < len(own) and own[i] for i in after.reads):
        raise errors.UserError(
            f"{what} leaves something that differs between the replicas. With logical_replicas all that it leaves is equal "
            "on them, or has been through jax.lax.pmean, psum, pmax or pmin over ('slice', 'replica'), or is marked as a replica's "
            "own: xshard.PerReplica, xshard.PerExample."
        )


def _levels(jaxpr: core.Jaxpr, count: int) -> list[int]:
    """The number of exchanges that each of those in a program depends on.

    Args:
      jaxpr: the program, whose first outputs go into the exchanges, and whose last inputs are their results.
      count: how many.
    """
    brought = jaxpr.outvars[:count]
    result_of = dict(zip(jaxpr.invars[len(jaxpr.invars) - count :], brought, strict=True))
    found: dict[Any, int] = {}

    def level(x: Any) -> int:
        if isinstance(x, core.Literal):
            return 0
        # What goes into an exchange is computed before its result is read.
        return level(result_of[x]) + 1 if x in result_of else found.get(x, 0)

    for eqn in jaxpr.eqns:
        highest = max(map(level, eqn.invars), default=0)
        found.update((x, highest) for x in eqn.outvars)
    return [level(x) for x in brought]


def _part(program: core.ClosedJaxpr, outputs: Sequence[bool]) -> Part:
    """The part of a program that makes some of its outputs."""
    jaxpr, reads = partial_eval.dce_jaxpr(program.jaxpr, outputs)
    reads_at = tuple(i for i, is_read in enumerate(reads) if is_read)
    return Part(core.ClosedJaxpr(jaxpr, program.consts), reads_at)


class _Run:
    """Runs a program in which the replicas' numbers are given, and the results of their exchanges."""

    def __init__(self, number: Any, results: Iterator[Any], brought: list[Any]):
        """Keeps what is given.

        Args:
          number: of the replica.
          results: of the exchanges, in the order of the program.
          brought: a list to which is appended what the replica brings to each.
        """
        self._number = number
        self._results = results
        self._brought = brought

    def __call__(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The outputs of a program."""
        found = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        read = lambda x: x.val if isinstance(x, core.Literal) else found[x]
        for eqn in jaxpr.eqns:
            with jax.named_scope(str(eqn.source_info.name_stack)):
                results = self._results_of(eqn, [read(x) for x in eqn.invars])
            found.update(zip(eqn.outvars, results, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _results_of(self, eqn: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        name, params = eqn.primitive.name, eqn.params
        if _is_over_replicas(eqn):
            if name == "axis_index":
                is_slice = params["axis_name"] == mesh_lib.SLICE
                return [jnp.zeros_like(self._number) if is_slice else self._number]
            self._brought += inputs
            return [next(self._results) for _ in eqn.outvars]
        if name in _CALLS and any(map(_holds, core.jaxprs_in_params(params))):
            called = next(
                x for x in params.values() if isinstance(x, core.ClosedJaxpr | core.Jaxpr)
            )
            if isinstance(called, core.ClosedJaxpr):
                return self(called.jaxpr, called.consts, inputs)
            return self(called, (), inputs)
        results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(params))
        return results if eqn.primitive.multiple_results else [results]


def _is_over_replicas(eqn: Any) -> bool:
    """Returns whether an equation exchanges something between the replicas of a group, or asks for a replica's number."""
    axes = eqn.params.get("axes" if eqn.primitive.name in COLLECTIVES else "axis_name", ())
    return not {*mesh_lib.REPLICAS}.isdisjoint(axes if isinstance(axes, tuple | list) else [axes])


def _holds(jaxpr: core.Jaxpr) -> bool:
    """Returns whether a program has such equations."""
    return any(
        _is_over_replicas(eqn) or any(map(_holds, core.jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


def _exchanged(jaxpr: core.Jaxpr, what: str, inside: str = "") -> Iterator[Any]:
    """The equations of a program that exchange something, in the order in which they are run."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if _is_over_replicas(eqn):
            _check(eqn, what, inside)
            if name in COLLECTIVES:
                yield eqn
        within = inside if name in _CALLS else inside or name
        for called in core.jaxprs_in_params(eqn.params):
            yield from _exchanged(called, what, within)


def _check(eqn: Any, what: str, inside: str) -> None:
    name = eqn.primitive.name
    rule = "set logical_replicas to 0, with which each device is one replica."
    if inside:
        raise errors.UserError(
            f"{what} has {name} over the replicas inside a {inside}; with logical_replicas it is outside of loops and "
            f"branches. Move it there, or {rule}"
        )
    if name not in (*COLLECTIVES, "axis_index"):
        raise errors.UserError(
            f"{what} has {name} over the replicas; with logical_replicas there are psum, pmean, pmax and pmin. Use these, "
            f"or {rule}"
        )
    if eqn.params.get("axis_index_groups") is not None:
        raise errors.UserError(
            f"{what} has {name} over groups of replicas (axis_index_groups); with logical_replicas it is over all of a "
            f"group of the mesh. Use config.group_assignment, or {rule}"
        )


def _shape(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
