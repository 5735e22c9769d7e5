"""Functions of whole arrays, evaluated on the part of each array that a replica holds.

An update rule is traced on whole arrays, so that it sees their shapes, sizes and numbers of dimensions.
What it does element by element is then done on parts; a reduction of a whole array, such as the norm in
LAMB or in a global clip, becomes one over all replicas; and what mixes elements otherwise is refused.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from xshard.optimizers import layouts as layouts_lib
from xshard.optimizers import shards

# Primitives that make each element of their result from the elements at its place.
_ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "conj", "convert_element_type", "copy",
    "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1",
    "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic",
    "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow",
    "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "xor",
}  # fmt: skip
_REDUCTIONS = {f"reduce_{kind}": kind for kind in ("sum", "max", "min", "and", "or")}
# Primitives that stand for a function of their own, by the parameter that holds it.
_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
}


@dataclasses.dataclass(frozen=True)
class Part:
    """This replica's part of an array. Elements that the layout has for filling may be anything."""

    array: Any
    layout: layouts_lib.Layout


@dataclasses.dataclass(frozen=True)
class _Filled:
    """An array of one value."""

    value: Any
    shape: tuple[int, ...]

    def array(self) -> jax.Array:
        return jnp.broadcast_to(self.value, self.shape)


def part(layout: layouts_lib.Layout, x: Any) -> Any:
    """A `Part`, or the array itself if its layout does not cut it."""
    return x if layout.dim is None else Part(x, layout)


def own(layout: layouts_lib.Layout, x: Any, index: Any) -> jax.Array:
    """The array of a `Part`, or the part of a whole array."""
    return x.array if isinstance(x, Part) else layout.part(x, index)


def evaluate(f: Callable[..., Any], args: Any, partition: shards.Partition, what: str) -> Any:
    """`f(*args)`, where a `Part` among the leaves of `args` stands for its whole array.

    Args:
      f: a function of whole arrays.
      args: trees of arrays, which are equal on all replicas, and `Part`s.
      partition: what the parts are of.
      what: the name of `f`, for messages.

    Returns:
      A tree as `f`'s, with a `Part` wherever a value was made from one element by element.

    Raises:
      ValueError: if `f` does with a part what cannot be done without the others.
    """
    is_part = lambda x: isinstance(x, Part)
    closed, out = jax.make_jaxpr(f, return_shape=True)(
        *jax.tree.map(_abstract, args, is_leaf=is_part)
    )
    values = jax.tree.leaves(args, is_leaf=is_part)
    results = _Evaluator(partition, what).run(closed.jaxpr, closed.consts, values)
    results = [x.array() if isinstance(x, _Filled) else x for x in results]
    return jax.tree.unflatten(jax.tree.structure(out), results)


def _abstract(x: Any) -> Any:
    if isinstance(x, Part):
        return jax.ShapeDtypeStruct(x.layout.shape, x.array.dtype)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))


class _Evaluator:
    """Goes through a jaxpr whose values are parts, arrays of one value, and other arrays."""

    def __init__(self, partition: shards.Partition, what: str):
        self._partition = partition
        self._what = what

    def run(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        read = lambda atom: atom.val if isinstance(atom, core.Literal) else env[atom]
        for eqn in jaxpr.eqns:
            values = [_as_filled(read(atom)) for atom in eqn.invars]
            env.update(zip(eqn.outvars, self._equation(eqn, values), strict=True))
        return [_as_filled(read(atom)) for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        parts = [value for value in values if isinstance(value, Part)]
        if name in _CALLS:
            inner = eqn.params[_CALLS[name]]
            consts = inner.consts if isinstance(inner, core.ClosedJaxpr) else ()
            return self.run(getattr(inner, "jaxpr", inner), consts, values)
        if name == "reshard":
            # Of whole arrays; a part lies where it lies.
            return values
        if not parts:
            return _on_whole(eqn, values)
        if name == "optimization_barrier":
            arrays = _bind(eqn, [_raw(value) for value in values])
            return [_like(value, x) for value, x in zip(values, arrays, strict=True)]
        if name == "cond":
            return self._cond(eqn, values)
        if name in _ELEMENTWISE:
            return self._elementwise(eqn, values, parts)
        first = parts[0]
        if _reduces_all(eqn):
            return [self._reduce(_REDUCTIONS[name], first)]
        if _contracts_all(eqn) and len(parts) == 2 and first.layout == parts[1].layout:
            product = jnp.multiply(
                *(part.array.astype(eqn.outvars[0].aval.dtype) for part in parts)
            )
            return [self._reduce("sum", Part(product, first.layout))]
        if _keeps_the_order(eqn):
            return [first]
        raise self._refusal(name, first)

    def _elementwise(self, eqn: Any, values: list[Any], parts: list[Part]) -> Sequence[Any]:
        layout = parts[0].layout
        if any(part.layout != layout for part in parts):
            raise self._refusal(
                f"{eqn.primitive.name} of arrays that are cut differently", parts[0]
            )
        arrays = [self._own(value, layout) for value in values]
        return [Part(x, layout) for x in _bind(eqn, arrays)]

    def _own(self, value: Any, layout: layouts_lib.Layout) -> Any:
        """Returns what of a value belongs to this replica's shard."""
        if isinstance(value, Part):
            return value.array
        if isinstance(value, _Filled):
            # A scalar predicate or bound stays one; it may stand beside arrays.
            scalar = value.shape == () and layout.shape != ()
            return value.value if scalar else jnp.broadcast_to(value.value, layout.part_shape)
        return layout.part(value.reshape(layout.shape), self._partition.index)

    def _reduce(self, kind: str, part: Part) -> jax.Array:
        return self._partition.reduce(kind, part.layout, part.array)

    def _cond(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        # All branches, and then a selection: they may hold reductions over replicas, and no collective is
        # conditional.
        which, *operands = values
        branches = [
            self.run(branch.jaxpr, branch.consts, operands) for branch in eqn.params["branches"]
        ]
        index = which.value if isinstance(which, _Filled) else which
        return [self._select(index, cases) for cases in zip(*branches, strict=True)]

    def _select(self, index: Any, cases: Sequence[Any]) -> Any:
        layout = next((case.layout for case in cases if isinstance(case, Part)), None)
        if layout is None:
            arrays = [case.array() if isinstance(case, _Filled) else case for case in cases]
            return lax.select_n(index, *arrays)
        arrays = [jnp.broadcast_to(self._own(case, layout), layout.part_shape) for case in cases]
        return Part(lax.select_n(index, *arrays), layout)

    def _refusal(self, operation: str, part: Part) -> ValueError:
        return ValueError(
            f"{self._what} cannot be sharded: its {operation} takes '{part.layout.path}' "
            f"{part.layout.shape} as a whole, of which each replica would hold a part. shard_update is for "
            "rules that go element by element, but for sums over whole arrays: adamw, lamb, "
            "clip_by_global_norm and the like. Take one of these, or shard_update=False."
        )


def _raw(value: Any) -> Any:
    return value.array if isinstance(value, Part) else getattr(value, "value", value)


def _like(value: Any, x: Any) -> Any:
    """`x` as what `value` is."""
    return (
        dataclasses.replace(value, array=x)
        if isinstance(value, Part)
        else (dataclasses.replace(value, value=x) if isinstance(value, _Filled) else x)
    )


def _as_filled(value: Any) -> Any:
    if isinstance(value, Part | _Filled) or jnp.ndim(value):
        return value
    return _Filled(value, ())


def _on_whole(eqn: Any, values: list[Any]) -> Sequence[Any]:
    """The result where there is no part among the operands."""
    name = eqn.primitive.name
    filled = [isinstance(value, _Filled) for value in values]
    if all(filled) and values and name == "broadcast_in_dim":
        return [_Filled(values[0].value, eqn.params["shape"])]
    shapes = {value.shape for value in values if isinstance(value, _Filled)}
    if all(filled) and name in _ELEMENTWISE and shapes - {()}:
        (shape,) = shapes - {()}
        return [_Filled(x, shape) for x in _bind(eqn, [value.value for value in values])]
    arrays = [value.array() if isinstance(value, _Filled) else value for value in values]
    return _bind(eqn, arrays)


def _bind(eqn: Any, arrays: list[Any]) -> Sequence[Any]:
    params = eqn.params
    if eqn.primitive.name == "convert_element_type":
        # Its sharding is one of whole arrays.
        params = {**params, "sharding": None}
    results = eqn.primitive.bind(*arrays, **params)
    return results if eqn.primitive.multiple_results else [results]


def _reduces_all(eqn: Any) -> bool:
    """Returns whether it is a reduction of a whole array; of integers 'and' and 'or' are of their bits."""
    name, aval = eqn.primitive.name, eqn.invars[0].aval
    bitwise = name in ("reduce_and", "reduce_or") and aval.dtype != jnp.bool_
    return name in _REDUCTIONS and len(eqn.params["axes"]) == aval.ndim and not bitwise


def _contracts_all(eqn: Any) -> bool:
    """Returns whether it is the scalar product of two arrays of one shape."""
    if eqn.primitive.name != "dot_general":
        return False
    (left, right), batch = eqn.params["dimension_numbers"]
    shapes = {atom.aval.shape for atom in eqn.invars}
    return len(shapes) == 1 and left == right and len(left) == len(*shapes) and not any(batch)


def _keeps_the_order(eqn: Any) -> bool:
    """Returns whether it only gives an array another shape: the shard stays what it is."""
    name = eqn.primitive.name
    if len(eqn.invars) != 1 or len(eqn.outvars) != 1:
        return False
    old, new = eqn.invars[0].aval, eqn.outvars[0].aval
    if name == "broadcast_in_dim":
        return old.size == new.size
    return name == "squeeze" or (name == "reshape" and eqn.params["dimensions"] is None)
