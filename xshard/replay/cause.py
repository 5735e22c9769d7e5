"""Finds the cause of non-finite results of a step, from the observations of its values."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from xshard import mesh as mesh_lib
from xshard.optimizers import primitives, trees
from xshard.replay import dataflow, observations

# A replica's number, and a value's number.
_Node = tuple[int, int]
# The most causes among the examples that are searched for.
_MOST_CAUSES = 4
# Primitives whose results are elements of their operands.
_CHOOSE = {
    "select_n",
    "concatenate",
    "pad",
    "dynamic_update_slice",
    "slice",
    "gather",
    "max",
    "min",
    "clamp",
}


class Cause(NamedTuple):
    """The first value that is not finite, among those that make a result not finite.

    Attributes:
      value: the value's number.
      replicas: the replicas on which it is not finite, numbered over all groups.
      nan: the number of the first nan value; None if there is none.
      results: the names of the results that become not finite.
    """

    value: int
    replicas: list[int]
    nan: int | None
    results: list[str]


def find(
    program: dataflow.Program,
    observed: observations.Observations,
    mesh: jax.sharding.Mesh,
) -> Cause | None:
    """Finds the origin of a step's non-finite results; None if all results are finite.

    The search goes back from a result through values that are not finite, so an
    infinity that reaches no result, such as a mask's, is not a cause. From nan it first
    goes back through nan values only. If an operation makes nan from infinities, both
    this operation and the origin of the infinities are reported.
    """
    # Losses and gradients are searched first, since the new state and other metrics
    # follow from them.
    kinds = (_of_updates(program), list(program.results.items()))
    replicas = range(len(observed.largest))
    for results in kinds:
        ends = {}
        for name, value in results:
            for replica in replicas:
                if observed.bad(replica, value):
                    ends[replica, value] = name
        if ends:
            break
    else:
        return None
    graph = _Graph(program, observed, mesh)
    origins = graph.origins(ends, only_nan=True)
    nans = [value for r, value in origins if np.isnan(observed.largest[r, value])]
    deeper = graph.origins(origins, only_nan=False)
    # A constant of the program, such as a mask's infinity, is not a cause. The
    # operation that makes nan from it is.
    computed = [node for node in deeper if not _is_constant(program, node[1])]
    first = min((value for _, value in computed or origins), default=0)
    where = sorted({r for r, value in [*deeper, *origins] if value == first})
    return Cause(
        first, where, min(nans, default=None), list(dict.fromkeys(ends.values()))
    )


def _of_updates(program: dataflow.Program) -> list[tuple[str, int]]:
    """Returns the values that a run observes: the losses and the gradients."""
    of = lambda learner: f" of {learner}" if learner else ""
    losses = [
        (f"the loss{of(learner)}", value) for learner, value in program.losses.items()
    ]
    # An update that was skipped leaves no trace in the results, nor in what is observed
    # of a later one.
    gradients = [
        (f"the gradient of {trees.join(learner, path)}", value)
        for learner, path, value in program.all_gradients
    ]
    return [*losses, *gradients]


def _is_constant(program: dataflow.Program, value: int) -> bool:
    """Returns whether a non-finite value without non-finite sources is a constant of
    the program.
    """
    equation, sources = program.values[value].equation, program.values[value].sources
    return equation is not None and (not sources or equation.primitive.name in _CHOOSE)


class _Graph:
    """The graph of values that are not finite, with edges to their sources that are not
    finite either.
    """

    def __init__(
        self,
        program: dataflow.Program,
        observed: observations.Observations,
        mesh: jax.sharding.Mesh,
    ):
        self._program = program
        self._observed = observed
        self._axes = {name: mesh.shape[name] for name in mesh_lib.BATCH}

    def origins(self, ends: Iterable[_Node], *, only_nan: bool) -> list[_Node]:
        """Returns the values without non-finite sources; with `only_nan`, a nan counts
        if it has no nan source.
        """
        seen: set[_Node] = set()
        left, origins = list(ends), []
        while left:
            node = left.pop()
            if node in seen:
                continue
            seen.add(node)
            causes = self._causes(node)
            if only_nan and self._is_nan(node):
                causes = [x for x in causes if self._is_nan(x)]
            left += causes
            if not causes:
                origins.append(node)
        return origins

    def _is_nan(self, node: _Node) -> bool:
        return bool(np.isnan(self._observed.largest[node]))

    def _causes(self, node: _Node) -> list[_Node]:
        replica, number = node
        value = self._program.values[number]
        peers = self._peers(replica, value.equation)
        causes = []
        for source in value.sources:
            for peer in peers:
                if self._observed.bad(peer, source) and self._is_before(
                    (peer, source), node
                ):
                    causes.append((peer, source))
        return causes

    def _is_before(self, source: _Node, node: _Node) -> bool:
        """Returns whether the source was first not finite in the same round of the
        common loops as the node, or earlier.
        """
        values = self._program.values
        source_loops, loops = values[source[1]].loops, values[node[1]].loops
        common = sum(a == b for a, b in zip(source_loops, loops, strict=False))
        common = min(common, dataflow.DEPTH)
        rounds = self._observed.rounds
        return bool(rounds[source][:common].tolist() <= rounds[node][:common].tolist())

    def _peers(self, replica: int, equation: Any) -> list[int]:
        """Returns the replicas whose values an equation reads: for a collective, all
        along its axes.
        """
        over = _collective_axes(equation)
        if not over:
            return [replica]
        shape = tuple(self._axes.values())
        places = zip(self._axes, np.unravel_index(replica, shape), strict=True)
        along = tuple(slice(None) if name in over else place for name, place in places)
        return np.arange(np.prod(shape)).reshape(shape)[along].ravel().tolist()


def _collective_axes(equation: Any) -> list[str]:
    if equation is None or equation.primitive.name == "axis_index":
        return []
    return primitives.mapped_axes(equation)


def blame_examples(
    is_bad: Callable[[np.ndarray], bool], parts: Sequence[np.ndarray]
) -> list[list[int]]:
    """Finds the examples that cause non-finite values, by bisection.

    Args:
      is_bad: returns whether the problem occurs if only these rows keep their examples
        and all others get a harmless one.
      parts: the rows by replica and micro-batch.

    Returns:
      The rows of each cause. If several rows cause it together, all of them.
    """
    blamed: list[list[int]] = []
    left = [np.asarray(rows) for rows in reversed(parts)]
    while left and len(blamed) < _MOST_CAUSES:
        rows = left.pop()
        if not is_bad(rows):
            continue
        halves = [half for half in np.array_split(rows, 2) if len(half)]
        if len(rows) == 1:
            blamed.append(rows.tolist())
            continue
        bad = [half for half in halves if is_bad(half)]
        # Neither half alone causes it, so the rows cause it together.
        if not bad:
            blamed.append(rows.tolist())
        left += reversed(bad)
    return [sorted(rows) for rows in blamed]
