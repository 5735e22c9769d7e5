"""The data flow of a step's program: which value is computed from which, and on which
line of the user's code.

The values of a program have numbers, in the order in which they are computed. Calls,
such as of a function under `jax.jit`, are inlined: they have the values of their body,
and none of their own. A loop has the values of one round.
"""

import dataclasses
import linecache
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from xshard.base import primitives, user_code
from xshard.base.jax_internals import jaxprs
from xshard.optimizers import inspection, trees, varying

_JAX = os.path.dirname(jax.__file__) + os.sep
# Primitives that only rearrange their operand: their value is the operand's.
MOVES = {
    "reshape",
    "transpose",
    "squeeze",
    "expand_dims",
    "broadcast_in_dim",
    "copy",
    "rev",
    "stop_gradient",
}
# The number of nested loops whose rounds are recorded. A value in a deeper loop has the
# rounds of the outer ones.
DEPTH = 4
# How the arguments of a step, and the results that a run reads of it, are called.
_ARGUMENTS = ("the state {}", "the batch's {}")
_RESULTS = {"state": "the state {}", "metrics": "the logged {}"}
# What the name stack of an equation has around the names of Haiku's modules.
_TRANSFORMATIONS = (
    "transpose(",
    "jvp(",
    "vmap(",
    "checkpoint(",
    "rematted_computation",
    ")",
)


@dataclasses.dataclass
class Value:
    """A value of the program.

    Attributes:
      place: the equation that computes it, preceded by those that contain it; empty for
        an input of the program or of a loop's body.
      sources: the numbers of the values that it is computed from.
      loops: the unique numbers of the loops that contain it, outermost first.
      shape: its shape on one replica.
      dtype: its dtype.
    """

    place: tuple[Any, ...]
    sources: list[int]
    loops: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any

    @property
    def equation(self) -> Any:
        """The equation that computes it; None for an input."""
        return self.place[-1] if self.place else None

    @property
    def primitive(self) -> str:
        """The name of the primitive that computes it; empty for an input."""
        return self.equation.primitive.name if self.place else ""


class Equation(NamedTuple):
    """An equation of a function.

    Attributes:
      numbers: the numbers of its results; empty if they are values of its operands or
        of the function that it calls.
      functions: the functions that it runs, each a `Function`: one that it calls, the
        body of a loop, or the branches of a conditional.
    """

    numbers: list[int]
    functions: list[Any]


class Function(NamedTuple):
    """A function of the program, at one of the places where it runs.

    A function that runs at several places, as one under `jax.jit` may, has other values
    at each of them.

    Attributes:
      program: the function.
      inputs: the numbers of its inputs; empty if they are values of its caller.
      equations: its equations, in order.
    """

    program: jaxprs.ClosedJaxpr
    inputs: list[int]
    equations: list[Equation]


class Program:
    """A training step on one replica.

    Attributes:
      outer: the program of the whole step, which maps this one over the replicas.
      mapped: the equation of `outer` that does so.
      function: the function that runs on one replica.
      values: all values by number, in the order of computation.
      inputs: the names of the inputs, which are the first values.
      results: the value numbers of the results by name: the state by path, and the
        metrics. Results that are not values of the program are left out.
      losses: the value numbers of the losses that a run observes, by learner.
      gradients: the learner, parameter and value number of each gradient that an update
        receives, also in a loop.
    """

    def __init__(self, traced: Any, arguments: Any):
        """Numbers the values of a step.

        Args:
          traced: the result of `trace` on `preflight.jitted_step`.
          arguments: the state and the batch that it was traced for; only their paths
            matter.
        """
        self.outer = traced.jaxpr
        self.mapped = varying.mapped_equation(self.outer.jaxpr)
        numbering = _Numbering()
        self.function, outputs = numbering.function(self.mapped.params["jaxpr"])
        self.values = numbering.values
        # The inputs of the replicas' program are the step's arguments, or are computed
        # from them.
        names = {}
        leaves = jax.tree_util.tree_leaves_with_path(arguments)
        for variable, (path, _) in zip(self.outer.jaxpr.invars, leaves, strict=True):
            names[variable] = _named(path[1:], _ARGUMENTS[path[0].idx])
        computed = "a value computed from the state or the batch"
        self.inputs = [names.get(x, computed) for x in self.mapped.invars]
        # The results of the step are those of the replicas' program, or are computed
        # from them, and are then left out.
        self.results: dict[str, int] = {}
        self.losses: dict[str, int] = {}
        self.gradients: list[tuple[str, str, int]] = []
        by_variable = dict(zip(self.mapped.outvars, outputs, strict=True))
        results = jax.tree_util.tree_leaves_with_path(traced.out_info)
        for (path, _), variable in zip(results, self.outer.jaxpr.outvars, strict=True):
            if isinstance(variable, jaxprs.Literal):
                continue
            number = by_variable.get(variable)
            if number is None:
                continue
            # The first key of a path is a field of `step.Stepped`. Fingerprints are
            # integers, and are left out.
            field = path[0].name
            if field == "observed":
                # There is an `Observed` for each learner.
                self._take_observed(path[1].key, path[2].name, number)
            elif field in _RESULTS:
                self.results[_named(path[1:], _RESULTS[field])] = number
        self._forward = self._find_forward()

    def _take_observed(self, learner: str, field: str, number: int) -> None:
        """Records a learner's loss or gradients.

        Of the gradients a run observes which ones are not finite, so they are the
        operands of the `is_finite` equations behind the value of this number.
        """
        if field == "loss":
            self.losses[learner] = number
        if field != "gradients":
            return
        for check in self._finite_checks(number):
            value = self.values[check]
            path = name_stack(value).partition(inspection.GRADIENT)[2]
            if path:
                self.gradients.append((learner, path, value.sources[0]))

    def _finite_checks(self, number: int) -> list[int]:
        """Returns the nearest `is_finite` equations that a value depends on, in program
        order.
        """
        seen = set()
        left = [number]
        checks = []
        while left:
            number = left.pop()
            if number in seen:
                continue
            seen.add(number)
            value = self.values[number]
            if value.primitive == "is_finite":
                checks.append(number)
            else:
                left += value.sources
        return sorted(checks)

    def is_backward(self, number: int) -> bool:
        """Returns whether a value belongs to the backward pass, or is a derivative that
        only the backward pass reads.
        """
        is_derivative = "jvp(" in name_stack(self.values[number])
        return is_derivative and number not in self._forward

    def _find_forward(self) -> set[int]:
        """Returns the values that a result depends on by a path outside of the backward
        pass.
        """
        seen: set[int] = set()
        left = list(self.results.values())
        while left:
            number = left.pop()
            value = self.values[number]
            if number in seen or "transpose(" in name_stack(value):
                continue
            seen.add(number)
            left += value.sources
        return seen


class _Numbering:
    """Numbers the values of a function and of all functions inside it.

    Attributes:
      values: the values so far, by number.
    """

    def __init__(self) -> None:
        self.values: list[Value] = []
        self._num_loops = 0

    def function(
        self,
        program: Any,
        inputs: Sequence[int | None] | None = None,
        place: tuple[Any, ...] = (),
        loops: tuple[int, ...] = (),
    ) -> tuple[Function, list[int | None]]:
        """Numbers the values of a function.

        Args:
          program: the function.
          inputs: the numbers of its inputs, where None is a constant; or None if its
            inputs are values of their own.
          place: the equations that contain it.
          loops: the numbers of the loops among these.

        Returns:
          The function, and the numbers of its results, where None is a constant.
        """
        program = jaxprs.closed(program)
        jaxpr = program.jaxpr
        new_inputs: list[int] = []
        if inputs is None:
            new_inputs = [self._add((), (), loops, x.aval) for x in jaxpr.invars]
            inputs = new_inputs
        numbers: dict[Any, int | None] = dict(zip(jaxpr.invars, inputs, strict=True))

        def number_of(variable: Any) -> int | None:
            if isinstance(variable, jaxprs.Literal):
                return None
            # The constants of a program have no numbers.
            return numbers.get(variable)

        equations = []
        for eqn in jaxpr.eqns:
            operands = [number_of(x) for x in eqn.invars]
            equation, results = self._equation(eqn, operands, (*place, eqn), loops)
            equations.append(equation)
            numbers.update(zip(eqn.outvars, results, strict=True))
        results = [number_of(x) for x in jaxpr.outvars]
        return Function(program, new_inputs, equations), results

    def _equation(
        self,
        eqn: Any,
        operands: list[int | None],
        place: tuple[Any, ...],
        loops: tuple[int, ...],
    ) -> tuple[Equation, Sequence[int | None]]:
        """Numbers the values of an equation; returns it and its results' numbers.

        The values of the functions that it runs come before its results.
        """
        name = eqn.primitive.name
        if name in MOVES:
            return Equation([], []), operands[:1]
        called = primitives.called(eqn)
        if called is not None:
            function, results = self.function(called, operands, place, loops)
            return Equation([], [function]), results
        functions: list[Function] = []
        # What each result is computed from.
        sources: list[Sequence[int | None]]
        if name in ("scan", "while"):
            function, outcomes = self._loop(eqn, operands, place, loops)
            functions.append(function)
            sources = [[outcome] for outcome in outcomes]
        elif name == "cond":
            branches = []
            for branch in eqn.params["branches"]:
                function, outcomes = self.function(branch, operands[1:], place, loops)
                functions.append(function)
                branches.append(outcomes)
            # A result may come from any of the branches.
            sources = list(zip(*branches, strict=True))
        else:
            sources = [operands] * len(eqn.outvars)
        numbers = []
        for variable, read in zip(eqn.outvars, sources, strict=True):
            numbers.append(self._add(place, read, loops, variable.aval))
        return Equation(numbers, functions), numbers

    def _loop(
        self,
        eqn: Any,
        operands: list[int | None],
        place: tuple[Any, ...],
        loops: tuple[int, ...],
    ) -> tuple[Function, list[int | None]]:
        """Numbers the values of one round of a loop; returns its body, and the numbers
        of the loop's results at the end of the round.
        """
        params = eqn.params
        if eqn.primitive.name == "scan":
            body = params["jaxpr"]
            num_consts, num_carried = jaxprs.scan_counts(eqn)
        else:
            body = params["body_jaxpr"]
            num_consts = params["body_nconsts"]
            # The first operands are read by the condition only.
            operands = operands[params["cond_nconsts"] :]
            num_carried = len(operands) - num_consts
        self._num_loops += 1
        function, results = self.function(body, None, place, (*loops, self._num_loops))
        for index, operand in enumerate(operands):
            sources = [operand]
            if num_consts <= index < num_consts + num_carried:
                # What is carried also depends on the previous round.
                sources.append(results[index - num_consts])
            value = self.values[function.inputs[index]]
            value.sources += [x for x in sources if x is not None]
        return function, results

    def _add(
        self,
        place: tuple[Any, ...],
        sources: Sequence[int | None],
        loops: tuple[int, ...],
        aval: Any,
    ) -> int:
        """Adds a value, and returns its number."""
        value = Value(
            place=place,
            sources=[number for number in sources if number is not None],
            loops=loops,
            # Some abstract values, such as tokens, are no arrays.
            shape=getattr(aval, "shape", ()),
            dtype=getattr(aval, "dtype", None),
        )
        self.values.append(value)
        return len(self.values) - 1


def can_be_nonfinite(value: Any) -> bool:
    """Returns whether a value, or an array, has a dtype that can hold inf or nan."""
    if value.dtype is None:
        return False
    return jax.numpy.issubdtype(value.dtype, jax.numpy.inexact)


def name_stack(value: Value) -> str:
    """Returns the name scopes in which an equation was traced, such as
    'transpose(jvp(mlp))/linear_0'.
    """
    return trees.join(*(str(eqn.source_info.name_stack) for eqn in value.place))


def module_path(value: Value) -> str:
    """Returns the path of the Haiku module whose forward or backward pass has an
    equation; empty if there is none.
    """
    scopes = name_stack(value)
    for transformation in _TRANSFORMATIONS:
        scopes = scopes.replace(transformation, "")
    # Without empty parts, which the transformations leave.
    return trees.join(*scopes.split("/"))


def lines(value: Value) -> tuple[str, str]:
    """Returns the user's line that an equation comes from, and the innermost line
    outside of JAX; empty if unknown.
    """
    users = ""
    innermost = ""
    # JAX ends the traceback of an equation at the function that contains it, so some
    # have no line of the user's. The line of the nearest equation around counts then.
    for eqn in value.place:
        frames = _frames(eqn.source_info.traceback)
        of_user = [frame for frame in frames if user_code.is_user_file(frame[0])]
        if of_user:
            users = _shown(*of_user[0])
        if frames:
            innermost = _shown(*frames[0])
    return users, innermost


def _shown(file: str, line: int) -> str:
    """Formats a line as its place, and its text if there is a file; installed files
    have their path below site-packages.
    """
    path = file.rpartition("-packages" + os.sep)[2]
    place = f"{user_code.display_path(path)}:{line}"
    text = linecache.getline(file, line).strip()
    return f"{place}: {text}" if text else place


def _frames(traceback: Any) -> list[tuple[str, int]]:
    """Returns the files and lines of a traceback, innermost first, without JAX's and
    the standard library's.
    """
    if traceback is None:
        return []
    frames = []
    for frame in traceback.frames:
        file = frame.file_name
        if not file.startswith(_JAX) and not user_code.is_stdlib_file(file):
            frames.append((file, frame.line_num))
    return frames


def _named(path: tuple[Any, ...], form: str) -> str:
    return form.format(repr(trees.path_name(path)))
