"""Evaluates a step and observes each of its values: its largest magnitude, and when it
was first not finite.

The evaluation runs the step's own program equation by equation, on all replicas and
with its collectives. Half-precision values are rounded after each equation, where XLA
may keep more digits from one equation to the next.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xshard import jax_internals
from xshard import mesh as mesh_lib
from xshard.optimizers import primitives
from xshard.replay import dataflow


class Observations(NamedTuple):
    """The observations of a program's values.

    Attributes:
      largest: the largest magnitude of each value, [replicas of all groups, values]:
        inf or nan if an element is; in a loop, the largest of all rounds, or the
        magnitude in the first round that was not finite; 0 for integers.
      rounds: the rounds of the enclosing loops in which a value was first not finite,
        [replicas, values, loops].
      squares: the sum of the squares of each gradient on each replica, [replicas,
        gradients].
    """

    largest: np.ndarray
    rounds: np.ndarray
    squares: np.ndarray

    def bad(self, replica: int, value: int) -> bool:
        """Returns whether a value was not finite on a replica."""
        return not np.isfinite(self.largest[replica, value])


def make_observer(
    program: dataflow.Program, mesh: jax.sharding.Mesh
) -> Callable[..., Observations]:
    """Returns the function that takes a state and a batch to observations of all values
    of a step; it compiles once.
    """
    params = program.mapped.params
    along = jax.P(mesh_lib.BATCH)

    def on_replica(*inputs: Any) -> Any:
        observe = _Interpreter(program)
        _, seen = observe.run(program.block, inputs, ())
        # The zero keeps the stack from being empty.
        squares = jnp.stack([*observe.squares, jnp.zeros((), jnp.float32)])
        return jax.tree.map(lambda x: x[None], (*seen, squares))

    mapped = mesh_lib.on_replicas(
        on_replica,
        mesh,
        in_specs=tuple(params["in_specs"]),
        out_specs=(along, along, along),
    )

    def whole(state: Any, batch: Any) -> Any:
        outer = program.whole
        known = dict(
            zip(outer.jaxpr.invars, jax.tree.leaves((state, batch)), strict=True)
        )
        known |= dict(zip(outer.jaxpr.constvars, outer.consts, strict=True))
        read = lambda x: x.val if isinstance(x, jax_internals.Literal) else known[x]
        for eqn in outer.jaxpr.eqns:
            inputs = [read(x) for x in eqn.invars]
            if eqn is program.mapped:
                return mapped(*inputs)
            known.update(zip(eqn.outvars, _bind(eqn, inputs), strict=True))
        raise AssertionError("the program runs on no replica")

    jitted = jax.jit(whole)
    seen = np.flatnonzero(
        [dataflow.can_be_nonfinite(value) for value in program.values]
    )

    def observe(state: Any, batch: Any) -> Observations:
        some, some_rounds, squares = jax.device_get(jitted(state, batch))
        largest = np.zeros((len(some), len(program.values)), np.float32)
        rounds = np.zeros((*largest.shape, dataflow.DEPTH), np.int32)
        largest[:, seen], rounds[:, seen] = some, some_rounds
        return Observations(largest, rounds, squares)

    return observe


# The observations of a function's values: the largest magnitudes, and the rounds.
_Observed = tuple[jax.Array, jax.Array]
# The results of an equation, and the observations of its values.
_Evaluated = tuple[list[Any], list[_Observed]]
# The rounds of the loops around an equation, outermost first.
_Rounds = tuple[Any, ...]


class _Interpreter:
    """The interpreter, on one replica."""

    def __init__(self, program: dataflow.Program):
        self._gradients = {
            number: index for index, number in enumerate(program.gradients.values())
        }
        self.squares = [jnp.zeros((), jnp.float32)] * len(self._gradients)
        self._next = 0

    def run(
        self, block: dataflow.Block, inputs: Sequence[Any], rounds: _Rounds
    ) -> tuple[list[Any], _Observed]:
        """Evaluates a function; returns its results, and the observations of its
        numbered values.
        """
        begin = self._next
        blocks = iter(block.parts)
        seen: list[_Observed] = []
        if block.inputs:
            seen = [self._observe(inputs, rounds)]

        def of_equation(eqn: Any, operands: list[Any]) -> list[Any]:
            outputs, of_parts = self._evaluate(eqn, next(blocks), operands, rounds)
            seen.extend(of_parts)
            return outputs

        program = jax_internals.ClosedJaxpr(block.jaxpr, block.consts)
        results = primitives.evaluate(program, inputs, of_equation)
        assert self._next - begin == block.size, "the program is not as it was laid out"
        return results, _joined(seen)

    def _evaluate(
        self,
        eqn: Any,
        blocks: Sequence[dataflow.Block],
        inputs: list[Any],
        rounds: _Rounds,
    ) -> _Evaluated:
        name = eqn.primitive.name
        if name in dataflow.INLINED:
            outputs, seen = self.run(blocks[0], inputs, rounds)
            return outputs, [seen]
        if name == "scan":
            outputs, parts = self._scan(eqn, blocks[0], inputs, rounds)
        elif name == "while":
            outputs, parts = self._while(eqn, blocks[0], inputs, rounds)
        elif name == "cond":
            outputs, parts = self._cond(eqn, blocks, inputs, rounds)
        elif name in dataflow.MOVES:
            return _bind(eqn, inputs), []
        else:
            outputs, parts = [_rounded(x) for x in _bind(eqn, inputs)], []
        return outputs, [*parts, self._observe(outputs, rounds)]

    def _scan(
        self, eqn: Any, block: dataflow.Block, inputs: list[Any], rounds: _Rounds
    ) -> _Evaluated:
        params = eqn.params
        consts, carries = jax_internals.scan_counts(eqn)
        begin, scanned = inputs[consts : consts + carries], inputs[consts + carries :]
        body, init = self._loop(block, inputs[:consts], begin, rounds)
        (_, seen, carried), stacked = lax.scan(
            body, init, scanned, length=params["length"], reverse=params["reverse"]
        )
        return [*carried, *stacked], [seen]

    def _while(
        self, eqn: Any, block: dataflow.Block, inputs: list[Any], rounds: _Rounds
    ) -> _Evaluated:
        params = eqn.params
        skip, consts = params["cond_nconsts"], params["body_nconsts"]
        asked, fixed, begin = (
            inputs[:skip],
            inputs[skip : skip + consts],
            inputs[skip + consts :],
        )
        goes_on = jax_internals.as_function(params["cond_jaxpr"])
        body, init = self._loop(block, fixed, begin, rounds)
        _, seen, carried = lax.while_loop(
            lambda carry: goes_on(*asked, *carry[2])[0],
            lambda carry: body(carry, ())[0],
            init,
        )
        return carried, [seen]

    def _loop(
        self, block: dataflow.Block, fixed: list[Any], begin: list[Any], rounds: _Rounds
    ) -> tuple[Callable[..., Any], Any]:
        """Returns the body of a loop, as of a scan, and its first carry: the round, the
        observations and the values.
        """
        first = self._next

        def body(carry: Any, scanned: Any) -> tuple[Any, Any]:
            # JAX may trace the body several times; its values keep their numbers.
            self._next = first
            number, seen, carried = carry
            outputs, new = self.run(
                block, [*fixed, *carried, *scanned], (*rounds, number)
            )
            carried, stacked = outputs[: len(begin)], outputs[len(begin) :]
            return (number + 1, _merge_rounds(seen, new), carried), stacked

        return body, (jnp.int32(0), _no_values(block.num_floating), begin)

    def _cond(
        self,
        eqn: Any,
        blocks: Sequence[dataflow.Block],
        inputs: list[Any],
        rounds: _Rounds,
    ) -> _Evaluated:
        begins = np.cumsum([self._next, *(block.size for block in blocks)]).tolist()

        def branch(index: int) -> Callable[..., Any]:
            def run(*inputs: Any) -> Any:
                self._next = begins[index]
                outputs, seen = self.run(blocks[index], inputs, rounds)
                parts = [_no_values(block.num_floating) for block in blocks]
                parts[index] = seen
                return outputs, _joined(parts)

            return run

        branches = [branch(i) for i in range(len(blocks))]
        platforms = eqn.params.get("branches_platforms")
        if platforms:
            # The branches of `lax.platform_dependent` are selected when lowering: other
            # platforms' branches cannot be compiled for this one.
            named: dict[str, Callable[..., Any]] = {}
            for names, of_platforms in zip(platforms, branches, strict=True):
                named |= dict.fromkeys(names or ["default"], of_platforms)
            outputs, seen = lax.platform_dependent(*inputs[1:], **named)
        else:
            outputs, seen = lax.switch(inputs[0], branches, *inputs[1:])
        self._next = begins[-1]
        return outputs, [seen]

    def _observe(self, values: Sequence[Any], rounds: _Rounds) -> _Observed:
        """Observes values, which get the next numbers."""
        for x in values:
            if self._next in self._gradients:
                # Summed in float32, since squares may overflow half precision.
                square = jnp.sum(jnp.square(jnp.abs(x).astype(jnp.float32)))
                self.squares[self._gradients[self._next]] = square
            self._next += 1
        values = [x for x in values if dataflow.can_be_nonfinite(x)]
        if not values:
            return _no_values(0)
        padded = [
            *rounds[: dataflow.DEPTH],
            *[jnp.int32(0)] * (dataflow.DEPTH - len(rounds)),
        ]
        times = jnp.broadcast_to(jnp.stack(padded), (len(values), dataflow.DEPTH))
        return jnp.stack([_magnitude(x) for x in values]), times


def _bind(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    with eqn.ctx.manager:
        outputs = eqn.primitive.bind(
            *inputs, **eqn.primitive.get_bind_params(eqn.params)
        )
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def _rounded(x: Any) -> Any:
    """Rounds a half-precision value to its dtype, since XLA may otherwise keep more
    digits.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize != 2:
        return x
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


def _magnitude(x: Any) -> jax.Array:
    """Returns the largest magnitude as float32: inf or nan only if an element is."""
    if not x.size:
        return jnp.zeros((), jnp.float32)
    is_nan = jnp.isnan(x)
    # The nan are left out and looked for by themselves, since XLA's maximum of a large
    # array on the CPU may lose them.
    largest = jnp.max(jnp.where(is_nan, 0, jnp.abs(x)))
    largest = jnp.where(jnp.any(is_nan), jnp.nan, largest)
    # A finite float64 beyond float32's range must not become inf.
    if largest.dtype == jnp.float64:
        most = jnp.asarray(jnp.finfo(jnp.float32).max, jnp.float64)
        largest = jnp.where(jnp.isfinite(largest), jnp.minimum(largest, most), largest)
    return largest.astype(jnp.float32)


def _no_values(size: int) -> _Observed:
    return jnp.zeros((size,), jnp.float32), jnp.zeros((size, dataflow.DEPTH), jnp.int32)


def _joined(parts: Sequence[_Observed]) -> _Observed:
    parts = [_no_values(0), *parts]
    return jnp.concatenate([x for x, _ in parts]), jnp.concatenate(
        [x for _, x in parts]
    )


def _merge_rounds(before: _Observed, now: _Observed) -> _Observed:
    """Merges the observations before and in a round; a value that was not finite keeps
    its first observation.
    """
    (largest, rounds), (new, new_rounds) = before, now
    was_finite = jnp.isfinite(largest)
    is_first = was_finite & ~jnp.isfinite(new)
    return (
        jnp.where(was_finite, jnp.maximum(largest, new), largest),
        jnp.where(is_first[:, None], new_rounds, rounds),
    )
