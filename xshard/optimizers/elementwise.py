"""Functions of whole arrays, evaluated on the shard of each array that a replica holds.

The update rules are traced on whole arrays, so that they see their shapes, sizes and numbers of dimensions.
What they do element by element is then done on shards; a reduction of a whole array, such as the norm in
LAMB or in a global clip, becomes one over all replicas; and what mixes elements otherwise is refused.
"""

import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from xshard.optimizers import layouts as layouts_lib
from xshard.optimizers import shards, values

# Primitives that make each element of their result from the elements at its place.
_ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "complex", "conj", "convert_element_type", "copy",
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


# Whether a function is being traced to be evaluated on shards.
_TRACING = contextvars.ContextVar("tracing", default=False)


class _Call(core.Primitive):
    """Stands in a trace for a function that is to be called with shards."""

    multiple_results = True


_CALL = _Call("call_with_shards")
_CALL.def_abstract_eval(lambda *avals, **_: avals)


def is_traced() -> bool:
    """Returns whether what is called now is traced on whole arrays, to be evaluated on shards."""
    return _TRACING.get()


def call(f: Callable[[shards.Partition, Any], Any], tree: Any) -> Any:
    """Calls `f(partition, tree)` while the trace is evaluated, with a `Shard` for each array that is sharded.

    Args:
      f: what returns a tree of the same structure, shapes and types.
      tree: whole arrays, as they are traced.
    """
    leaves, structure = jax.tree.flatten(tree)

    def with_shards(partition: shards.Partition, operands: list[Any]) -> list[Any]:
        return jax.tree.leaves(f(partition, jax.tree.unflatten(structure, operands)))

    return jax.tree.unflatten(structure, _CALL.bind(*leaves, f=with_shards))


def evaluate(
    f: Callable[..., Any], args: Any, partition: shards.Partition, rules: Sequence[str]
) -> Any:
    """`f(*args)`, where a `Shard` among the leaves of `args` stands for its whole array.

    Args:
      f: a function of whole arrays.
      args: trees of arrays, which are equal on all replicas, and `Shard`s.
      partition: what the shards are of.
      rules: the names of the rules that it calls; the first is told of where none is known.

    Returns:
      A tree as `f`'s, with a `Shard` wherever a value was made from one element by element.

    Raises:
      ValueError: if `f` does with a shard what cannot be done without the others.
    """
    is_shard = lambda x: isinstance(x, values.Shard)
    token = _TRACING.set(True)
    try:
        closed, out = jax.make_jaxpr(f, return_shape=True)(
            *jax.tree.map(_abstract, args, is_leaf=is_shard)
        )
    finally:
        _TRACING.reset(token)
    operands = jax.tree.leaves(args, is_leaf=is_shard)
    evaluator = _Evaluator(partition, rules)
    results = evaluator.run(closed.jaxpr, closed.consts, operands)
    return jax.tree.unflatten(jax.tree.structure(out), [evaluator.array(x) for x in results])


def _abstract(x: Any) -> Any:
    if isinstance(x, values.Shard):
        copies = (1,) if x.layout.copies else ()
        return jax.ShapeDtypeStruct((*copies, *x.layout.shape), x.array.dtype)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))


class _Evaluator:
    """Goes through a jaxpr whose operands are shards, arrays of one value, and other arrays."""

    def __init__(self, partition: shards.Partition, rules: Sequence[str]):
        self._partition = partition
        self._rules = rules
        # The scopes of the functions that are being evaluated.
        self._scopes: list[str] = []
        # What has been put together, by what it was, so that each takes one collective however often it is used.
        self._totals: dict[int, tuple[values.Partial, values.Filled]] = {}

    def run(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        read = lambda atom: atom.val if isinstance(atom, core.Literal) else env[atom]
        for eqn in jaxpr.eqns:
            operands = [values.as_filled(read(atom)) for atom in eqn.invars]
            env.update(zip(eqn.outvars, self._equation(eqn, operands), strict=True))
        # As they are: what was not touched is known by its identity.
        return [read(atom) for atom in jaxpr.outvars]

    def array(self, x: Any) -> Any:
        """A `Shard`, or the array that stands for anything else."""
        if isinstance(x, values.Partial | values.Filled):
            return self._put_together(x).array()
        return x if isinstance(x, values.Shard | jax.Array) else jnp.asarray(x)

    def _equation(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        if name in _CALLS:
            return self._call(eqn, eqn.params[_CALLS[name]], operands)
        if values.joins(name, operands):
            return [values.join(operands)]
        operands = [self._put_together(value) for value in operands]
        if eqn.primitive is _CALL:
            return eqn.params["f"](self._partition, [self.array(value) for value in operands])
        sharded = [value for value in operands if isinstance(value, values.Shard)]
        if name == "reshard":
            # Of whole arrays; a shard lies where it lies.
            return operands
        if not sharded:
            return _on_whole(eqn, operands)
        if name == "optimization_barrier":
            arrays = _bind(eqn, [values.raw(value) for value in operands])
            return [values.like(value, x) for value, x in zip(operands, arrays, strict=True)]
        if name == "cond":
            return self._cond(eqn, operands)
        if name in _ELEMENTWISE:
            return self._elementwise(eqn, operands, sharded)
        first = sharded[0]
        if _reduces_all(eqn):
            return [self._reduce(_REDUCTIONS[name], first)]
        if _contracts_all(eqn) and len(sharded) == 2 and first.layout == sharded[1].layout:
            product = jnp.multiply(
                *(shard.array.astype(eqn.outvars[0].aval.dtype) for shard in sharded)
            )
            return [self._reduce("sum", values.Shard(product, first.layout))]
        if _keeps_the_order(eqn):
            return [first]
        raise self._refusal(eqn, first)

    def _call(self, eqn: Any, function: Any, operands: list[Any]) -> list[Any]:
        """The results of a function of its own that an equation calls."""
        consts = function.consts if isinstance(function, core.ClosedJaxpr) else ()
        self._scopes.append(str(eqn.source_info.name_stack))
        results = self.run(getattr(function, "jaxpr", function), consts, operands)
        self._scopes.pop()
        return results

    def _elementwise(
        self, eqn: Any, operands: list[Any], sharded: list[values.Shard]
    ) -> Sequence[Any]:
        layout = sharded[0].layout
        if any(shard.layout != layout for shard in sharded):
            raise self._refusal(eqn, sharded[0], " of arrays that are sharded differently")
        arrays = [self._own(value, layout) for value in operands]
        return [values.Shard(x, layout) for x in _bind(eqn, arrays)]

    def _own(self, value: Any, layout: layouts_lib.Layout) -> Any:
        """Returns what of a value belongs to this replica's shard."""
        if isinstance(value, values.Shard):
            return value.array
        if isinstance(value, values.Filled):
            # A scalar predicate or bound stays one; it may stand beside arrays.
            scalar = value.shape == () and layout.shape != ()
            return value.value if scalar else jnp.broadcast_to(value.value, layout.shard_shape)
        return layout.shard(value.reshape(layout.shape), self._partition.index)

    def _reduce(self, kind: str, shard: values.Shard) -> Any:
        if kind not in values.JOINED_BY or shard.layout.dim is None:
            return self._partition.reduce(kind, shard.layout, shard.array)
        own = self._partition.reduce_own(kind, shard.layout, shard.array)
        return values.Partial(kind, own, jnp.full((), kind == "and", own.dtype))

    def _put_together(self, x: Any) -> Any:
        if not isinstance(x, values.Partial):
            return x
        if id(x) not in self._totals:
            total = x.with_rest(self._partition.across(x.kind, x.own))
            self._totals[id(x)] = (x, total)
        return self._totals[id(x)][1]

    def _cond(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        # All branches, and then a selection: they may hold reductions over replicas, and no collective is
        # conditional.
        which, *operands = operands
        branches = [
            [values.as_filled(self._put_together(x)) for x in self._call(eqn, branch, operands)]
            for branch in eqn.params["branches"]
        ]
        index = which.value if isinstance(which, values.Filled) else which
        return [self._select(eqn, index, cases) for cases in zip(*branches, strict=True)]

    def _select(self, eqn: Any, index: Any, cases: Sequence[Any]) -> Any:
        sharded = [case for case in cases if isinstance(case, values.Shard)]
        if not sharded:
            arrays = [case.array() if isinstance(case, values.Filled) else case for case in cases]
            return lax.select_n(index, *arrays)
        layout = sharded[0].layout
        if any(case.layout != layout for case in sharded):
            raise self._refusal(eqn, sharded[0], " of arrays that are sharded differently")
        arrays = [jnp.broadcast_to(self._own(case, layout), layout.shard_shape) for case in cases]
        return values.Shard(lax.select_n(index, *arrays), layout)

    def _refusal(self, eqn: Any, shard: values.Shard, detail: str = "") -> ValueError:
        scopes = "/".join([*self._scopes, str(eqn.source_info.name_stack)]).split("/")
        rule = next((name for name in reversed(scopes) if name in self._rules), self._rules[0])
        return ValueError(
            f"{rule} cannot be sharded: its {eqn.primitive.name}{detail} takes '{shard.layout.path}' "
            f"{shard.layout.shape} as a whole, of which each replica would hold a shard. shard_update is for "
            "rules that go element by element, but for sums over whole arrays: adamw, lamb, "
            "clip_by_global_norm and the like. Take one of these, or shard_update=False."
        )


def _on_whole(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    """The result where there is no shard among the operands."""
    name = eqn.primitive.name
    filled = [isinstance(value, values.Filled) for value in operands]
    if all(filled) and operands and name == "broadcast_in_dim":
        return [values.Filled(operands[0].value, eqn.params["shape"])]
    shapes = {value.shape for value in operands if isinstance(value, values.Filled)}
    if all(filled) and name in _ELEMENTWISE and shapes - {()}:
        (shape,) = shapes - {()}
        return [values.Filled(x, shape) for x in _bind(eqn, [value.value for value in operands])]
    arrays = [value.array() if isinstance(value, values.Filled) else value for value in operands]
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
