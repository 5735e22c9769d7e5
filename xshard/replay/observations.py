"""Evaluates a step and observes each of its values: its largest magnitude, and when it
was first not finite.

The evaluation runs the step's own program equation by equation, on all replicas and
with its collectives. Half-precision values are rounded after each equation, where XLA
may keep more digits from one equation to the next. Only the condition of a loop is
neither observed nor rounded.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xshard import mesh as mesh_lib
from xshard.base import primitives
from xshard.base.jax_internals import jaxprs
from xshard.replay import dataflow


class Observations(NamedTuple):
    """The observations of a program's values.

    While a step is evaluated, each replica has such arrays without their first
    dimension.

    Attributes:
      largest: the largest magnitude of each value, [replicas of all groups, values]:
        inf or nan if an element is; in a loop, the largest of all rounds, or the
        magnitude in the first round that was not finite; 0 for integers.
      rounds: the rounds of the enclosing loops in which a value was first not finite,
        [replicas, values, loops].
    """

    largest: Any
    rounds: Any

    def bad(self, replica: int, value: int) -> bool:
        """Returns whether a value was not finite on a replica."""
        return not np.isfinite(self.largest[replica, value])


# Options of XLA for the CPU with which a program compiles in about a third of the time.
# Some versions lack some of them.
_QUICKLY_COMPILED: dict[str, bool | str] = {
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


def make_observer(
    program: dataflow.Program, mesh: jax.sharding.Mesh
) -> Callable[..., Observations]:
    """Returns the function that takes a state and a batch to observations of all values
    of a step; it compiles once.
    """
    evaluation = _Evaluation(program)

    def on_replica(*inputs: Any) -> Observations:
        _, observed = evaluation.run(
            program.function, inputs, (), evaluation.nothing_observed()
        )
        return jax.tree.map(lambda x: x[None], observed)

    along_replicas = jax.P(mesh_lib.BATCH)
    mapped = mesh_lib.on_replicas(
        on_replica,
        mesh,
        in_specs=tuple(program.mapped.params["in_specs"]),
        out_specs=along_replicas,
    )

    def observe(state: Any, batch: Any) -> Observations:
        # The program of the whole step up to the equation that maps it over the
        # replicas, with this one in its place.
        outer = program.outer.jaxpr
        eqns = itertools.takewhile(lambda eqn: eqn is not program.mapped, outer.eqns)
        before = outer.replace(eqns=list(eqns), outvars=program.mapped.invars)
        closed = program.outer.replace(jaxpr=before)
        inputs = primitives.evaluate(closed, jax.tree.leaves((state, batch)), _bind)
        return mapped(*inputs)

    # The program runs once, and compiling it takes most of a replay.
    options = {}
    if mesh.devices.flat[0].platform == "cpu":
        options = _known(_QUICKLY_COMPILED)
    jitted = jax.jit(observe, compiler_options=options)
    return lambda state, batch: jax.device_get(jitted(state, batch))


def _known(options: dict[str, bool | str]) -> dict[str, bool | str]:
    """Returns those of XLA's options that this version has."""
    known = {}
    for name, value in options.items():
        empty = jax.jit(lambda: 0, compiler_options={name: value})
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            empty.lower().compile()
            known[name] = value
    return known


class _Evaluation:
    """Evaluates a step's program on one replica.

    Each method that evaluates takes the observations so far, and returns them with
    those that it made.
    """

    def __init__(self, program: dataflow.Program):
        self._program = program

    def nothing_observed(self) -> Observations:
        """Returns the observations before a step."""
        count = len(self._program.values)
        return Observations(
            largest=jnp.zeros(count, jnp.float32),
            rounds=jnp.zeros((count, dataflow.DEPTH), jnp.int32),
        )

    def run(
        self,
        function: dataflow.Function,
        inputs: Sequence[Any],
        rounds: tuple[Any, ...],
        observed: Observations,
    ) -> tuple[list[Any], Observations]:
        """Evaluates a function; returns its results, and the observations with those of
        its values.

        Args:
          function: the function.
          inputs: its inputs.
          rounds: the rounds of the loops around it, outermost first.
          observed: the observations so far.
        """
        eqns = function.program.jaxpr.eqns
        equations = dict(zip(map(id, eqns), function.equations, strict=True))
        # The largest magnitudes of the function's values. Those of functions inside it
        # are observed as these run.
        magnitudes = {}
        if function.inputs:
            magnitudes = _magnitudes(function.inputs, inputs)

        def of_equation(eqn: Any, operands: list[Any]) -> list[Any]:
            nonlocal observed
            equation = equations[id(eqn)]
            results, observed = self._evaluate(
                eqn, equation.functions, operands, rounds, observed
            )
            if equation.numbers:
                magnitudes.update(_magnitudes(equation.numbers, results))
            return results

        results = primitives.evaluate(function.program, inputs, of_equation)
        return results, _add(magnitudes, rounds, observed)

    def _evaluate(
        self,
        eqn: Any,
        functions: Sequence[dataflow.Function],
        operands: list[Any],
        rounds: tuple[Any, ...],
        observed: Observations,
    ) -> tuple[list[Any], Observations]:
        """Evaluates an equation; observes the functions that it runs, but not its
        results.
        """
        name = eqn.primitive.name
        if name in primitives.CALLS:
            return self.run(functions[0], operands, rounds, observed)
        if name == "scan":
            return self._scan(eqn, functions[0], operands, rounds, observed)
        if name == "while":
            return self._while(eqn, functions[0], operands, rounds, observed)
        if name == "cond":
            return self._cond(eqn, functions, operands, rounds, observed)
        results = _bind(eqn, operands)
        if name not in dataflow.MOVES:
            results = [_rounded(x) for x in results]
        return results, observed

    def _scan(
        self,
        eqn: Any,
        body: dataflow.Function,
        operands: list[Any],
        rounds: tuple[Any, ...],
        observed: Observations,
    ) -> tuple[list[Any], Observations]:
        num_consts, num_carried = jaxprs.scan_counts(eqn)
        consts = operands[:num_consts]
        first = operands[num_consts : num_consts + num_carried]
        scanned = operands[num_consts + num_carried :]

        def run_round(carry: Any, elements: list[Any]) -> tuple[Any, list[Any]]:
            number, carried, observed = carry
            inputs = [*consts, *carried, *elements]
            results, observed = self.run(body, inputs, (*rounds, number), observed)
            carried = results[:num_carried]
            return (number + 1, carried, observed), results[num_carried:]

        (_, carried, observed), stacked = lax.scan(
            run_round,
            (jnp.int32(0), first, observed),
            scanned,
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
        )
        return [*carried, *stacked], observed

    def _while(
        self,
        eqn: Any,
        body: dataflow.Function,
        operands: list[Any],
        rounds: tuple[Any, ...],
        observed: Observations,
    ) -> tuple[list[Any], Observations]:
        # The operands are constants of the condition, constants of the body, and the
        # first values of what is carried.
        begin = eqn.params["cond_nconsts"]
        end = begin + eqn.params["body_nconsts"]
        condition_consts = operands[:begin]
        consts = operands[begin:end]
        condition = jaxprs.as_function(eqn.params["cond_jaxpr"])

        def goes_on(carry: Any) -> Any:
            _, carried, _ = carry
            return condition(*condition_consts, *carried)[0]

        def run_round(carry: Any) -> Any:
            number, carried, observed = carry
            inputs = [*consts, *carried]
            carried, observed = self.run(body, inputs, (*rounds, number), observed)
            return number + 1, carried, observed

        first = jnp.int32(0), operands[end:], observed
        _, carried, observed = lax.while_loop(goes_on, run_round, first)
        return carried, observed

    def _cond(
        self,
        eqn: Any,
        functions: Sequence[dataflow.Function],
        operands: list[Any],
        rounds: tuple[Any, ...],
        observed: Observations,
    ) -> tuple[list[Any], Observations]:
        def branch(function: dataflow.Function) -> Callable[..., Any]:
            return lambda observed, *inputs: self.run(
                function, inputs, rounds, observed
            )

        branches = [branch(function) for function in functions]
        index = operands[0]
        inputs = operands[1:]
        platforms = eqn.params.get("branches_platforms")
        if not platforms:
            return lax.switch(index, branches, observed, *inputs)
        # The branches of `lax.platform_dependent` are selected when lowering: other
        # platforms' branches cannot be compiled for this one.
        by_platform: dict[str, Callable[..., Any]] = {}
        for names, of_platforms in zip(platforms, branches, strict=True):
            # Without names, it is the branch of all other platforms.
            for name in names or ["default"]:
                by_platform[name] = of_platforms
        return lax.platform_dependent(observed, *inputs, **by_platform)


def _add(
    magnitudes: dict[int, jax.Array], rounds: tuple[Any, ...], observed: Observations
) -> Observations:
    """Returns the observations with those of one run of a function.

    Args:
      magnitudes: the bits of the largest magnitudes of its values, by number.
      rounds: the rounds of the loops around it, outermost first.
      observed: the observations so far.
    """
    if not magnitudes:
        return observed
    numbers = np.array(list(magnitudes))
    bits = jnp.stack(list(magnitudes.values()))
    now = lax.bitcast_convert_type(bits, jnp.float32)
    # In a loop there are observations of earlier rounds. The first round in which a
    # value was not finite counts; outside of loops, and in the first round, the value
    # before is 0.
    before = observed.largest[numbers]
    was_finite = jnp.isfinite(before)
    largest = jnp.where(was_finite, jnp.maximum(before, now), before)
    all_largest = observed.largest.at[numbers].set(largest)
    observed = observed._replace(largest=all_largest)
    if not rounds:
        return observed
    recorded = jnp.stack(rounds[: dataflow.DEPTH])
    recorded = jnp.pad(recorded, (0, dataflow.DEPTH - len(recorded)))
    is_first = was_finite & ~jnp.isfinite(now)
    first = jnp.where(is_first[:, None], recorded, observed.rounds[numbers])
    all_rounds = observed.rounds.at[numbers].set(first)
    return observed._replace(rounds=all_rounds)


def _magnitudes(numbers: Sequence[int], values: Sequence[Any]) -> dict[int, jax.Array]:
    """Returns the bits of the largest magnitude of each value that can be not finite.

    They are by number, as `_magnitude` returns them.
    """
    magnitudes = {}
    for number, value in zip(numbers, values, strict=True):
        if dataflow.can_be_nonfinite(value):
            magnitudes[number] = _magnitude(value)
    return magnitudes


def _magnitude(x: Any) -> jax.Array:
    """Returns the bits of the largest magnitude as float32; 0 if there are no elements.

    They are those of inf or nan only if an element is.
    """
    if jnp.iscomplexobj(x):
        x = jnp.abs(x)
    if x.dtype == jnp.float64:
        # A finite float64 beyond float32's range must not become inf.
        most = float(jnp.finfo(jnp.float32).max)
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -most, most), x)
    # The bits below the sign are ordered as the magnitudes are, with inf and nan above
    # all others. XLA's maximum of a large array of floats on the CPU may lose nan, and
    # a program of fewer operations compiles sooner.
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jnp.max(bits & 0x7FFFFFFF, initial=0)


def _bind(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Returns the results of an equation, in the context in which it was traced."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _rounded(x: Any) -> Any:
    """Rounds a half-precision value to its dtype, since XLA may otherwise keep more
    digits.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize != 2:
        return x
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)
