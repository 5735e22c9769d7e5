"""The cause of what is not finite in a step, from what was seen of its values."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from xshard import mesh as mesh_lib
from xshard.optimizers import varying
from xshard.replay import evaluate
from xshard.replay import program as program_lib

# A value on a replica.
_Node = tuple[int, int]
_AXES = ("axes", "axis_name")
# So many causes are looked for.
_MOST_CAUSES = 4
# What these give is among what they are given.
_CHOOSE = frozenset(
    (
        "select_n",
        "concatenate",
        "pad",
        "dynamic_update_slice",
        "slice",
        "gather",
        "max",
        "min",
        "clamp",
    )
)


class Cause(NamedTuple):
    """The first value that is not finite, of all those that make a result so.

    Attributes:
      value: its number.
      replicas: those on which it is not finite, by their numbers in all groups together.
      nan: the number of the value that is first nan; None if none is.
      results: the names of the results that it makes not finite.
    """

    value: int
    replicas: list[int]
    nan: int | None
    results: list[str]


def find(
    program: program_lib.Program, looks: evaluate.Looks, mesh: jax.sharding.Mesh
) -> Cause | None:
    """Finds where what is not finite in the results of a step begins; None if all of them are finite.

    From a result it goes back through values that are not finite: an infinity that reaches no result, such as a mask's,
    is no cause. From nan it goes back through nan. What makes nan of infinities is told beside what made these.
    """
    kinds = (_of_updates(program), list(program.results.items()))
    replicas = range(len(looks.largest))
    for results in kinds:
        ends = {
            (r, value): name for name, value in results for r in replicas if looks.bad(r, value)
        }
        if ends:
            break
    else:
        return None
    graph = _Graph(program, looks, mesh)
    origins = graph.origins(ends, only_nan=True)
    nans = [value for r, value in origins if np.isnan(looks.largest[r, value])]
    deeper = graph.origins(origins, only_nan=False)
    # A constant of the program, such as a mask's, is no event: what makes nan of it is.
    computed = [node for node in deeper if not _is_constant(program, node[1])]
    first = min((value for _, value in computed or origins), default=0)
    where = sorted({r for r, value in [*deeper, *origins] if value == first})
    return Cause(first, where, min(nans, default=None), list(dict.fromkeys(ends.values())))


def _of_updates(program: program_lib.Program) -> list[tuple[str, int]]:
    """The values that a run watches: the losses and the gradients."""
    of = lambda learner: f" of {learner}" if learner else ""
    losses = [(f"the loss{of(learner)}", value) for learner, value in program.losses.items()]
    gradients = [
        (f"the gradient of {'/'.join(filter(None, name))}", value)
        for name, value in program.gradients.items()
    ]
    return [*losses, *gradients]


def _is_constant(program: program_lib.Program, value: int) -> bool:
    """Returns whether what is not finite and comes of nothing else is a number that the program was written with."""
    equation = program.values[value].equation
    return equation is not None and equation.primitive.name in _CHOOSE


class _Graph:
    """The values that are not finite, and which come of which."""

    def __init__(
        self, program: program_lib.Program, looks: evaluate.Looks, mesh: jax.sharding.Mesh
    ):
        self._program = program
        self._looks = looks
        self._axes = {name: mesh.shape[name] for name in mesh_lib.BATCH}

    def origins(self, ends: Iterable[_Node], *, only_nan: bool) -> list[_Node]:
        """The values that come of none that is not finite; with `only_nan`, of nan those that come of no nan."""
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
        return bool(np.isnan(self._looks.largest[node]))

    def _causes(self, node: _Node) -> list[_Node]:
        replica, number = node
        value = self._program.values[number]
        peers = self._peers(replica, value.equation)
        return [
            (peer, source)
            for source in value.sources
            for peer in peers
            if self._looks.bad(peer, source) and self._is_before((peer, source), node)
        ]

    def _is_before(self, source: _Node, node: _Node) -> bool:
        """Returns whether what is not finite was so in the same round of the loops around both, or in an earlier one."""
        loops = [self._program.values[number].loops for _, number in (source, node)]
        common = sum(a == b for a, b in zip(*loops, strict=False))
        common = min(common, program_lib.DEPTH)
        first, second = (self._looks.rounds[x][:common].tolist() for x in (source, node))
        return bool(first <= second)

    def _peers(self, replica: int, equation: Any) -> list[int]:
        """The replicas that an equation reads: of a collective all along its axes."""
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
    return [name for key in _AXES for name in varying.named_axes(equation.params.get(key))]


def blame_examples(
    is_bad: Callable[[np.ndarray], bool], parts: Sequence[np.ndarray]
) -> list[list[int]]:
    """Finds the examples for which something is not finite, by leaving others out.

    Args:
      is_bad: whether it is so where only these rows are as they were, and each other one is a copy of one that does
        no harm.
      parts: the rows, by replica and micro-batch.

    Returns:
      The rows of each cause: of several that do it together, all of them.
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
        # Together they do what neither half does.
        if not bad:
            blamed.append(rows.tolist())
        left += reversed(bad)
    return [sorted(rows) for rows in blamed]
