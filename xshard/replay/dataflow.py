"""The data flow of a step's program: which value is computed from which, and on which
line of the user's code.

Nested functions are laid out flat, in the order in which they run. Calls, such as of a
function under `jax.jit`, are inlined: they have the values of their body, and none of
their own. A loop has the values of one round.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from xshard import errors, jax_internals
from xshard.optimizers import inspection, trees, varying

# Equations that are inlined, and the parameter that holds their body.
INLINED = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
_JAX = os.path.dirname(jax.__file__) + os.sep
# Equations that only rearrange their operand: their value is the operand's.
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
# An equation, preceded by the equations that contain it; and the numbers of the loops
# among these.
_Place = tuple[Any, ...]
_Loops = tuple[int, ...]
# The results that a run reads of a step, by field of `Stepped`.
_RESULTS = {"state": "the state {}", "metrics": "the logged {}"}


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

    place: _Place
    sources: list[int]
    loops: _Loops
    shape: tuple[int, ...]
    dtype: Any

    @property
    def equation(self) -> Any:
        """The equation that computes it; None for an input."""
        return self.place[-1] if self.place else None

    @property
    def runs_once(self) -> bool:
        """Returns whether it is outside of all loops and branches."""
        return not self.loops and all(
            e.primitive.name in INLINED for e in self.place[:-1]
        )


class Block(NamedTuple):
    """A function of the program, laid out.

    Attributes:
      jaxpr: the function.
      consts: the values of its constants.
      inputs: whether its inputs are numbered as values of their own; they come first.
      parts: for each equation, the functions that it contains, each a `Block`.
      size: the number of numbered values in it.
      num_floating: the number of floating-point values among them.
    """

    jaxpr: jax_internals.Jaxpr
    consts: Sequence[Any]
    inputs: bool
    parts: list[list[Any]]
    size: int
    num_floating: int


class Program:
    """A training step on one replica, laid out.

    Attributes:
      values: all values by number, in the order of computation.
      inputs: the names of the inputs, which are the first values.
      results: the value numbers of the results by name: the state by path, and the
        metrics. Results that are not values of the program are left out.
      losses: the value numbers of the losses that a run observes, by learner.
      gradients: the value numbers of the gradients that the update receives, by learner
        and parameter; those of the last update outside of a loop, if a step has
        several.
      all_gradients: the learner, parameter and value number of each gradient that an
        update receives, also in a loop.
      mapped: the equation of the outer program that runs this one on all replicas.
    """

    def __init__(self, traced: Any, arguments: Any):
        """Lays out a step.

        Args:
          traced: the result of `trace` on `preflight.jitted_step`.
          arguments: the state and the batch that it was traced for; only their paths
            matter.
        """
        self.values: list[Value] = []
        self._loops = 0
        self.whole = traced.jaxpr
        self.mapped = varying.mapped_equation(self.whole.jaxpr)
        leaves = jax.tree_util.tree_leaves_with_path(arguments)
        forms = ("the state {}", "the batch's {}")
        names = [_named(path[1:], forms[path[0].idx]) for path, _ in leaves]
        by_variable = dict(zip(self.whole.jaxpr.invars, names, strict=True))
        self.inputs = [
            by_variable.get(x, "a value computed from the state or the batch")
            for x in self.mapped.invars
        ]
        self.block, outputs = self._lay_out(
            jax_internals.opened(self.mapped.params["jaxpr"]), None, (), ()
        )
        by_output = dict(zip(self.mapped.outvars, outputs, strict=True))
        results = jax.tree_util.tree_leaves_with_path(traced.out_info)
        self.results: dict[str, int] = {}
        self.losses: dict[str, int] = {}
        self.gradients: dict[tuple[str, str], int] = {}
        self.all_gradients: list[tuple[str, str, int]] = []
        for (path, _), variable in zip(results, self.whole.jaxpr.outvars, strict=True):
            number = (
                None
                if isinstance(variable, jax_internals.Literal)
                else by_output.get(variable)
            )
            if number is None:
                continue
            # path[0] is a field of `Stepped`. Fingerprints are integers, and are left
            # out.
            if path[0].name == "observed":
                # `observed` has an `Observed` for each learner.
                self._take_observed(path[1].key, path[2].name, number)
            elif path[0].name in _RESULTS:
                self.results[_named(path[1:], _RESULTS[path[0].name])] = number
        self._forward = self._find_forward()

    def _add(self, place: _Place, loops: _Loops, sources: Any, aval: Any) -> int:
        known = [x for x in sources if x is not None]
        self.values.append(
            Value(
                place,
                known,
                loops,
                getattr(aval, "shape", ()),
                getattr(aval, "dtype", None),
            )
        )
        return len(self.values) - 1

    def _lay_out(
        self,
        function: Any,
        inputs: Sequence[int | None] | None,
        place: _Place,
        loops: _Loops,
    ) -> tuple[Block, list[int | None]]:
        """Lays out a function; returns it and its results' numbers. Without `inputs`,
        its inputs become new values.
        """
        jaxpr, consts = jax_internals.opened(function), getattr(function, "consts", ())
        begin, parts = len(self.values), []
        has_inputs = inputs is None
        if inputs is None:
            inputs = [self._add((), loops, (), x.aval) for x in jaxpr.invars]
        numbers: dict[Any, int | None] = dict(zip(jaxpr.invars, inputs, strict=True))
        read = lambda x: (
            None if isinstance(x, jax_internals.Literal) else numbers.get(x)
        )
        for eqn in jaxpr.eqns:
            blocks, outputs = self._lay_out_equation(
                eqn, [read(x) for x in eqn.invars], place, loops
            )
            parts.append(blocks)
            numbers.update(zip(eqn.outvars, outputs, strict=True))
        own = self.values[begin:]
        block = Block(
            jaxpr, consts, has_inputs, parts, len(own), sum(map(can_be_nonfinite, own))
        )
        return block, [read(x) for x in jaxpr.outvars]

    def _lay_out_equation(
        self, eqn: Any, inputs: list[int | None], place: _Place, loops: _Loops
    ) -> tuple[list[Block], list[int | None]]:
        name, place = eqn.primitive.name, (*place, eqn)
        if name in MOVES:
            return [], inputs[:1]
        if name in INLINED:
            block, outputs = self._lay_out(
                eqn.params[INLINED[name]], inputs, place, loops
            )
            return [block], outputs
        if name in ("scan", "while"):
            block, outputs = self._lay_out_loop(eqn, inputs, place, loops)
        elif name == "cond":
            blocks, branches = [], []
            for branch in eqn.params["branches"]:
                block, outputs = self._lay_out(branch, inputs[1:], place, loops)
                blocks.append(block)
                branches.append(outputs)
            # A conditional's result may come from any of its branches.
            sources = zip(*branches, strict=True)
            outcomes = zip(eqn.outvars, sources, strict=True)
            return blocks, [self._add(place, loops, of, x.aval) for x, of in outcomes]
        else:
            return [], [self._add(place, loops, inputs, x.aval) for x in eqn.outvars]
        of_loop = zip(eqn.outvars, outputs, strict=True)
        return [block], [
            self._add(place, loops, (source,), x.aval) for x, source in of_loop
        ]

    def _lay_out_loop(
        self, eqn: Any, inputs: list[int | None], place: _Place, loops: _Loops
    ) -> tuple[Block, list[int | None]]:
        params = eqn.params
        if eqn.primitive.name == "scan":
            body = params["jaxpr"]
            consts, carries = jax_internals.scan_counts(eqn)
        else:
            body, consts = params["body_jaxpr"], params["body_nconsts"]
            # The first inputs are read by the condition only.
            inputs = inputs[params["cond_nconsts"] :]
            carries = len(inputs) - consts
        self._loops += 1
        begin = len(self.values)
        block, outputs = self._lay_out(body, None, place, (*loops, self._loops))
        for index, source in enumerate(inputs):
            # A loop-carried input also depends on the previous round.
            carried = (
                outputs[index - consts] if consts <= index < consts + carries else None
            )
            known = [x for x in (source, carried) if x is not None]
            self.values[begin + index].sources += known
        return block, outputs

    def _take_observed(self, learner: str, what: str, number: int) -> None:
        """Records an observed loss, or the gradients: the operands of the `is_finite`
        equations behind `number`.
        """
        if what == "loss":
            self.losses[learner] = number
        if what != "gradients":
            return
        for asked in self._finite_checks(number):
            gradient = self.values[asked].sources[0]
            path = name_stack(self.values[asked]).partition(inspection.GRADIENT)[2]
            if not path:
                continue
            self.all_gradients.append((learner, path, gradient))
            if self.values[gradient].runs_once:
                self.gradients[learner, path] = gradient

    def is_backward(self, number: int) -> bool:
        """Returns whether a value belongs to the backward pass, or is a derivative that
        only the backward pass reads.
        """
        return "jvp(" in name_stack(self.values[number]) and number not in self._forward

    def _find_forward(self) -> set[int]:
        """Returns the values that a result depends on by a path outside of the backward
        pass.
        """
        seen: set[int] = set()
        left = list(self.results.values())
        while left:
            number = left.pop()
            if number not in seen and "transpose(" not in name_stack(
                self.values[number]
            ):
                seen.add(number)
                left += self.values[number].sources
        return seen

    def _finite_checks(self, number: int) -> list[int]:
        """Returns the nearest `is_finite` equations that a value depends on, in program
        order.
        """
        seen, left, asked = set(), [number], []
        while left:
            value = left.pop()
            if value in seen:
                continue
            seen.add(value)
            equation = self.values[value].equation
            if equation is not None and equation.primitive.name == "is_finite":
                asked.append(value)
            else:
                left += self.values[value].sources
        return sorted(asked)


def _named(path: tuple[Any, ...], form: str) -> str:
    return form.format(repr(trees.path_name(path)))


def can_be_nonfinite(value: Any) -> bool:
    """Returns whether a value, or an array, has a dtype that can hold inf or nan."""
    return value.dtype is not None and jax.numpy.issubdtype(
        value.dtype, jax.numpy.inexact
    )


def name_stack(value: Value) -> str:
    """Returns the name scopes in which an equation was traced, such as
    'transpose(jvp(mlp))/linear_0'.
    """
    return trees.join(*(str(eqn.source_info.name_stack) for eqn in value.place))


def module_path(value: Value) -> str:
    """Returns the path of the Haiku module whose forward or backward pass has an
    equation; empty if there is none.
    """
    words = name_stack(value)
    for transformation in (
        "transpose(",
        "jvp(",
        "vmap(",
        "checkpoint(",
        "rematted_computation",
        ")",
    ):
        words = words.replace(transformation, "")
    return trees.join(*words.split("/"))


def lines(value: Value) -> tuple[str, str]:
    """Returns the user's line that an equation comes from, and the innermost line
    outside of JAX; empty if unknown.
    """
    users, innermost = "", ""
    for eqn in value.place:
        # JAX ends the traceback of an equation at the function that contains it.
        frames = _frames(eqn.source_info.traceback)
        own = [frame for frame in frames if errors.is_user_file(frame[0])]
        users = _shown(*own[0]) if own else users
        innermost = _shown(*frames[0]) if frames else innermost
    return users, innermost


def _shown(file: str, line: int) -> str:
    """Formats a line as text; installed files have their path below site-packages."""
    return f"{errors.display_path(file.rpartition('-packages' + os.sep)[2])}:{line}"


def _frames(traceback: Any) -> list[tuple[str, int]]:
    """Returns the files and lines of a traceback, innermost first, without JAX's and
    the standard library's.
    """
    if traceback is None:
        return []
    frames = [(frame.file_name, frame.line_num) for frame in traceback.frames]
    return [
        x
        for x in frames
        if not x[0].startswith(_JAX) and not errors.is_stdlib_file(x[0])
    ]
