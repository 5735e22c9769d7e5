"""The analysis of a step: its first value that is not finite, and the examples that
cause it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from xshard import mesh as mesh_lib
from xshard.base import primitives
from xshard.optimizers import trees
from xshard.replay import dataflow, observations, replayer
from xshard.run import preflight

# The number of examples that are tried before the cause is reported as independent of
# the examples.
_MAX_TRIED = 16
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


class Operation(NamedTuple):
    """A value of a step, and its origin.

    Attributes:
      primitive: the JAX primitive that computes it; empty for an input.
      input: the path of the input; empty for other values.
      line: the line of the user's code, its place and its text; empty if unknown.
      innermost: the innermost line outside of JAX.
      module: the path of the Haiku module; empty outside of modules.
      backward: whether it belongs to the backward pass, or is a derivative that only
        the backward pass reads.
      kind: its dtype and shape on one replica.
      gives: inf or nan.
    """

    primitive: str
    input: str
    line: str
    innermost: str
    module: str
    backward: bool
    kind: str
    gives: str


class Finding(NamedTuple):
    """The first value of a step that is not finite.

    Attributes:
      first: the first value.
      nan: the value where it first becomes nan, if that is another one.
      replicas: the replicas on which it is not finite, numbered over all groups.
      rows: the rows of the batch of all groups that cause it, a list for each cause;
        None if it does not depend on the examples.
      results: the results that become not finite.
    """

    first: Operation
    nan: Operation | None
    replicas: list[int]
    rows: list[list[int]] | None
    results: list[str]


# A value on a replica: the replica's number, and the value's.
_Node = tuple[int, int]


class Diagnosis:
    """A repeated step of a run, with observations of all its values."""

    def __init__(self, run: replayer.Replayer, step: replayer.Step):
        """Traces the step once more, and observes its values."""
        self._run = run
        self._step = step
        program = preflight.single_program(run.experiment, run.mesh)
        traced = program.trace(step.state, step.batch)
        self._program = dataflow.Program(traced, (step.state, step.batch))
        self._observe = observations.make_observer(self._program, run.mesh)
        self._observed = self._observe(step.state, step.batch)

    def find(self) -> Finding | None:
        """Finds the origin of the step's non-finite results; None if every value that
        reaches a result is finite.

        The search goes back from a result through values that are not finite, so an
        infinity that reaches no result, such as a mask's, is not a cause. From nan it
        first goes back through nan values only. If an operation makes nan from
        infinities, both this operation and the origin of the infinities are reported.
        """
        program = self._program
        # Losses and gradients are searched first, since the new state and other metrics
        # follow from them.
        observed = []
        for learner, number in program.losses.items():
            of_learner = f" of {learner}" if learner else ""
            observed.append((f"the loss{of_learner}", number))
        # All gradients, since an update that was skipped leaves no trace in the
        # results, nor in what is observed of a later one.
        for learner, path, number in program.gradients:
            observed.append((f"the gradient of {trees.join(learner, path)}", number))
        ends = self._nonfinite(observed) or self._nonfinite(program.results.items())
        if not ends:
            return None
        origins = self._origins(ends, only_nan=True)
        nans = [number for _, number in filter(self._is_nan, origins)]
        deeper = self._origins(origins, only_nan=False)
        # A constant of the program, such as a mask's infinity, is not a cause. The
        # operation that makes nan from it is.
        computed = [node for node in deeper if not self._is_constant(node)]
        first = min(number for _, number in computed or origins)
        replicas = sorted({r for r, number in [*deeper, *origins] if number == first})
        nan = None
        if nans and min(nans) != first:
            nan = self._operation(min(nans), range(len(self._observed.largest)))
        return Finding(
            first=self._operation(first, replicas),
            nan=nan,
            replicas=replicas,
            rows=self._find_rows(first, replicas),
            # Each name once, in the order in which they were found.
            results=list(dict.fromkeys(ends.values())),
        )

    def _nonfinite(self, named: Iterable[tuple[str, int]]) -> dict[_Node, str]:
        """Returns the names of the values that are not finite, by where they are
        not.
        """
        ends = {}
        for name, number in named:
            for replica in range(len(self._observed.largest)):
                if self._observed.bad(replica, number):
                    ends[replica, number] = name
        return ends

    def _is_constant(self, node: _Node) -> bool:
        """Returns whether a non-finite value without non-finite sources is a constant
        of the program.
        """
        value = self._program.values[node[1]]
        if not value.primitive:
            return False
        return not value.sources or value.primitive in _CHOOSE

    def _operation(self, number: int, replicas: Sequence[int]) -> Operation:
        """Describes a value that is not finite on some replicas."""
        value = self._program.values[number]
        input_name = ""
        if not value.primitive and number < len(self._program.inputs):
            input_name = self._program.inputs[number]
        line, innermost = dataflow.lines(value)
        largest = self._observed.largest[list(replicas), number]
        return Operation(
            primitive=value.primitive,
            input=input_name,
            line=line,
            innermost=innermost,
            module=dataflow.module_path(value),
            backward=self._program.is_backward(number),
            kind=f"{value.dtype}{list(value.shape)}",
            gives="nan" if np.isnan(largest).any() else "inf",
        )

    def _find_rows(
        self, number: int, replicas: Sequence[int]
    ) -> list[list[int]] | None:
        """Finds the rows of the batch for which a value is not finite on some replicas,
        by replacing others; None if it does not depend on the rows.
        """
        batch = {name: np.asarray(x) for name, x in self._step.batch.items()}
        num_rows = len(next(iter(batch.values())))
        size = num_rows // len(self._observed.largest)
        # Only the rows of the replicas on which the value is not finite can cause it.
        rows = np.concatenate(
            [np.arange(size) + size * replica for replica in replicas]
        )

        def is_bad(source: np.ndarray) -> bool:
            """Returns whether the value is not finite if `rows` have the examples of
            `source`.
            """
            changed = {}
            for name, x in batch.items():
                x = x.copy()
                x[rows] = batch[name][source]
                changed[name] = jax.device_put(x, self._step.batch[name].sharding)
            observed = self._observe(self._step.state, changed)
            return any(observed.bad(replica, number) for replica in replicas)

        # An example is harmless if the value is finite when every row is a copy of it.
        places = np.linspace(0, len(rows) - 1, _MAX_TRIED).astype(int)
        for harmless in rows[np.unique(places)]:
            if not is_bad(np.full_like(rows, harmless)):
                break
        else:
            return None

        def is_caused_by(kept: np.ndarray) -> bool:
            return is_bad(np.where(np.isin(rows, kept), rows, harmless))

        micro_batches = self._run.config.micro_batches * len(replicas)
        return blame_examples(is_caused_by, np.split(rows, micro_batches))

    def _origins(self, ends: Iterable[_Node], *, only_nan: bool) -> list[_Node]:
        """Returns the values without non-finite sources; with `only_nan`, a nan counts
        if it has no nan source.
        """
        seen: set[_Node] = set()
        left = list(ends)
        origins = []
        while left:
            node = left.pop()
            if node in seen:
                continue
            seen.add(node)
            causes = self._causes(node)
            if only_nan and self._is_nan(node):
                causes = [cause for cause in causes if self._is_nan(cause)]
            if not causes:
                origins.append(node)
            left += causes
        return origins

    def _is_nan(self, node: _Node) -> bool:
        return bool(np.isnan(self._observed.largest[node]))

    def _causes(self, node: _Node) -> list[_Node]:
        """Returns the sources that are not finite, and were so before the value was."""
        replica, number = node
        value = self._program.values[number]
        peers = self._peers(replica, value.equation)
        causes = []
        for source in value.sources:
            for peer in peers:
                is_bad = self._observed.bad(peer, source)
                if is_bad and self._is_before((peer, source), node):
                    causes.append((peer, source))
        return causes

    def _is_before(self, source: _Node, node: _Node) -> bool:
        """Returns whether the source was first not finite in the same round of the
        common loops as the node, or earlier.
        """
        source_loops = self._program.values[source[1]].loops
        loops = self._program.values[node[1]].loops
        # Loops have unique numbers, so the common ones are those with equal numbers.
        common = sum(a == b for a, b in zip(source_loops, loops, strict=False))
        common = min(common, dataflow.DEPTH)
        rounds = self._observed.rounds
        return rounds[source][:common].tolist() <= rounds[node][:common].tolist()

    def _peers(self, replica: int, equation: Any) -> list[int]:
        """Returns the replicas whose values an equation reads: for a collective, all
        along its axes.
        """
        over = []
        # A replica's index has the axes that it counts along, but reads no other
        # replica.
        if equation is not None and equation.primitive.name != "axis_index":
            over = primitives.mapped_axes(equation)
        if not over:
            return [replica]
        mesh = self._run.mesh
        shape = tuple(mesh.shape[name] for name in mesh_lib.BATCH)
        numbers = np.arange(np.prod(shape)).reshape(shape)
        place = np.unravel_index(replica, shape)
        index: list[Any] = []
        for name, coordinate in zip(mesh_lib.BATCH, place, strict=True):
            index.append(slice(None) if name in over else coordinate)
        return numbers[tuple(index)].ravel().tolist()


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
    # A stack, whose last element is the next part.
    left = [np.asarray(rows) for rows in reversed(parts)]
    while left and len(blamed) < _MOST_CAUSES:
        rows = left.pop()
        if not is_bad(rows):
            continue
        if len(rows) == 1:
            blamed.append(rows.tolist())
            continue
        bad_halves = [half for half in np.array_split(rows, 2) if is_bad(half)]
        # If neither half alone causes it, the rows cause it together.
        if not bad_halves:
            blamed.append(rows.tolist())
        left += reversed(bad_halves)
    return [sorted(rows) for rows in blamed]
