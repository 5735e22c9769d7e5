"""Evaluation of functions of whole arrays on the shard of each array that a replica holds.

Update rules are traced on whole arrays, so they see whole shapes, sizes and numbers of dimensions. The trace is
then evaluated equation by equation:

- An elementwise operation runs on shards.
- A reduction, such as the norm in LAMB or the row sums in Adafactor, becomes one over all replicas.
- An operation that mixes elements only within a layer of a stack, such as the matrix products in Muon, runs on
  whole layers. The replicas exchange their shards for some layers each, and back where layers meet a shard.
- For any other operation the array is gathered, and each replica computes on the whole array from there on.
"""

import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xshard import jax_internals
from xshard.optimizers import layers as layers_lib
from xshard.optimizers import layouts as layouts_lib
from xshard.optimizers import primitives, shards, values, varying

# Whether a function is being traced for evaluation on shards.
_TRACING = contextvars.ContextVar("tracing", default=False)


class _Call(jax_internals.Primitive):
    """Stands in a trace for a function that `evaluate` calls with shards."""

    multiple_results = True


_CALL = _Call("call_with_shards")
_CALL.def_abstract_eval(lambda *avals, **_: avals)


def is_traced() -> bool:
    """Returns whether the current trace on whole arrays will be evaluated on shards."""
    return _TRACING.get()


def call(f: Callable[[shards.Partition, Any], Any], tree: Any) -> Any:
    """Records a call of `f(partition, tree)`, which `evaluate` makes with a `Shard` for each sharded array.

    Args:
      f: a function that returns a tree of the same structure, shapes and types.
      tree: the traced whole arrays.
    """
    leaves, structure = jax.tree.flatten(tree)

    def with_shards(partition: shards.Partition, operands: list[Any]) -> list[Any]:
        return jax.tree.leaves(f(partition, jax.tree.unflatten(structure, operands)))

    return jax.tree.unflatten(structure, _CALL.bind(*leaves, f=with_shards))


def evaluate(
    f: Callable[..., Any], args: Any, partition: shards.Partition, rules: Sequence[str]
) -> Any:
    """Evaluates `f(*args)`, where a `Shard` among the leaves of `args` stands for its whole array.

    Args:
      f: a function of whole arrays.
      args: trees of arrays, which are equal on all replicas, and `Shard`s.
      partition: the partition of the shards.
      rules: the names of the rules that `f` calls; errors name the first where the rule is unknown.

    Returns:
      The result of `f`, with a `Shard` for each value computed elementwise from shards.

    Raises:
      ValueError: if `f` uses a shard in an operation with effects, or a `Summed` gradient before it aggregates it.
    """
    operands, structure = jax.tree.flatten(args, is_leaf=lambda x: isinstance(x, values.Shard))
    whole = jax.tree.unflatten(structure, [_abstract(x) for x in operands])
    token = _TRACING.set(True)
    try:
        closed, out = jax.make_jaxpr(f, return_shape=True)(*whole)
    finally:
        _TRACING.reset(token)
    evaluator = _Evaluator(partition, rules)
    results = evaluator.run(closed, operands)
    shapes, structure = jax.tree.flatten(out)
    arrays = map(evaluator.array, results, [x.shape for x in shapes])
    return jax.tree.unflatten(structure, arrays)


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    """The shape and type of the whole array of a `Shard`, or of an array."""
    if isinstance(x, values.Shard):
        # State that differs by slice has a leading dimension of slices, and a replica has one entry of it.
        copies = (1,) if x.layout.copies else ()
        return jax.ShapeDtypeStruct((*copies, *x.layout.shape), x.array.dtype)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))


class _Evaluator:
    """Evaluates a jaxpr whose operands are shards, whole arrays, layers, and reductions that are not yet combined.

    An array whose elements are all equal is represented by one scalar. Its shape is in the jaxpr.
    """

    def __init__(self, partition: shards.Partition, rules: Sequence[str]):
        self._partition = partition
        self._rules = rules
        # The scopes of the functions that are being evaluated, outermost first.
        self._scopes: list[str] = []
        # Cached, so that each reduction needs one collective, however often its result is used.
        self._totals: dict[values.Partial, Any] = {}
        # Cached, so that each shard is gathered once. Operations on gathered shards stay whole.
        self._gathered: dict[values.Shard, jax.Array] = {}
        # Cached, so that each shard is exchanged for layers once.
        self._layers: dict[values.Shard, jax.Array] = {}

    def run(self, program: jax_internals.ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """The results of a program."""
        return primitives.evaluate(program, args, self._equation)

    def array(self, value: Any, shape: tuple[int, ...]) -> Any:
        """A `Shard` as it is, or the whole array of this shape that any other value stands for."""
        value = self._total(value)
        if isinstance(value, values.Shard):
            return value
        return values.whole(self._gather(value, shape), shape)

    def _equation(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if eqn.params.get("name") == varying.EQUAL:
            return [self._declared(value) for value in operands[: len(eqn.outvars)]]
        called = primitives.called(eqn)
        if called is not None:
            # The operands are passed on unchanged, since only the program's own equations decide what they need.
            return self._call(eqn, called, operands)
        # Partial reductions are joined before they are combined, to save collectives. Any other use needs the total.
        if values.joins(eqn, operands):
            return [values.join(*operands)]
        operands = [self._total(value) for value in operands]
        shapes = [atom.aval.shape for atom in eqn.invars]
        if eqn.primitive is _CALL:
            return eqn.params["f"](self._partition, list(map(self.array, operands, shapes)))
        for value in operands:
            if isinstance(value, values.Summed):
                raise self._summed_refusal(eqn, value)
        name = eqn.primitive.name
        if name == "reshard":
            # A reshard concerns whole arrays. A shard stays on its replica.
            return operands
        sharded = [value for value in operands if isinstance(value, values.Shard)]
        if not sharded:
            return self._on_layers_or_whole(eqn, operands, shapes)
        if name == "optimization_barrier":
            arrays = primitives.bind(eqn, *map(values.raw, operands))
            return [values.like(value, x) for value, x in zip(operands, arrays, strict=True)]
        if name == "cond":
            return self._cond(eqn, operands)
        if name in primitives.ELEMENTWISE:
            function = lambda *arrays: primitives.bind(eqn, *arrays)[0]
            return [self._elementwise(function, operands, shapes, eqn.outvars[0])]
        if primitives.keeps_the_order(eqn):
            return sharded
        if eqn.effects:
            raise self._refusal(eqn, sharded[0])
        if values.reduces_shards(eqn, sharded):
            return [self._reduction(eqn, sharded)]
        return self._on_layers_or_whole(eqn, operands, shapes)

    def _on_layers_or_whole(
        self, eqn: Any, operands: list[Any], shapes: Sequence[Any]
    ) -> Sequence[Any]:
        """The results of an equation on this replica's layers; or on whole arrays, if it mixes layers or has none."""
        try:
            layers = list(map(self._layers_of, operands, shapes))
            if any(isinstance(value, values.Layers) for value in layers):
                return layers_lib.equation(eqn, layers)
        except layers_lib.MixedError:
            pass
        return values.on_whole(eqn, list(map(self._gather, operands, shapes)))

    def _layers_of(self, value: Any, shape: tuple[int, ...]) -> Any:
        """This replica's layers of the array of a `Shard`; any other value as it is.

        Raises:
          MixedError: if the array has no dimension of layers.
        """
        if not isinstance(value, values.Shard):
            return value
        layout = value.layout
        has_layers = len(layout.shape) > 2 and not layout.flat and shape[:1] == layout.shape[:1]
        if not (self._partition.by_layers and has_layers) or layout.copies:
            raise layers_lib.MixedError
        if value not in self._layers:
            self._layers[value] = self._partition.to_layers(layout, value.array)
        layers = self._layers[value]
        return values.Layers(layers.reshape(len(layers), *shape[1:]))

    def _elementwise(
        self, f: Callable[..., Any], operands: list[Any], shapes: Sequence[Any], out: Any
    ) -> Any:
        """The result of an elementwise function: a `Shard`, unless all shards among the operands are gathered."""
        sharded = [value for value in operands if isinstance(value, values.Shard)]
        layouts = {shard.layout for shard in sharded}
        if len(layouts) == 1 and not self._gathered.keys() >= set(sharded):
            (layout,) = layouts
            # A primitive may broadcast a dimension of size 1 to a larger array, which a shard cannot follow.
            if out.aval.size == layout.size:
                own = [
                    self._own(value, shape, out.aval.shape, layout)
                    for value, shape in zip(operands, shapes, strict=True)
                ]
                return values.Shard(f(*own), layout)
        # Shards with different layouts do not line up either, so all operands are made whole.
        return f(*map(values.whole, map(self._gather, operands, shapes), shapes))

    def _gather(self, value: Any, shape: tuple[int, ...]) -> Any:
        """The whole array, in this shape, of a `Shard` or of `Layers`; any other value as it is."""
        if isinstance(value, values.Layers):
            return self._partition.all_layers(value.array, shape[0])
        if not isinstance(value, values.Shard):
            return value
        if value not in self._gathered:
            self._gathered[value] = self._partition.gather(value.layout, value.array)
        return self._gathered[value].reshape(shape)

    def _reduction(self, eqn: Any, sharded: list[values.Shard]) -> Any:
        """The whole result of a reduction or a scalar product."""
        first = sharded[0]
        if len(sharded) == 2:
            dtype = eqn.outvars[0].aval.dtype
            left, right = (shard.array.astype(dtype) for shard in sharded)
            return self._reduce("sum", values.Shard(left * right, first.layout))
        kind = primitives.REDUCTIONS[eqn.primitive.name]
        if first.array.dtype == jnp.bool_:
            kind = {"max": "or", "min": "and"}.get(kind, kind)
        if primitives.reduces_all(eqn):
            return self._reduce(kind, first)
        dims = eqn.params["axes"]
        if primitives.reduces_layers(eqn):
            dims = tuple(range(1, len(first.layout.shape)))
        (own,) = primitives.bind(eqn, first.array, axes=dims)
        if first.layout.dim in dims:
            return self._partition.across(kind, own)
        return self._partition.gather(first.layout.without(dims), own)

    def _call(self, eqn: Any, program: jax_internals.ClosedJaxpr, operands: list[Any]) -> list[Any]:
        """The results of a program that an equation calls."""
        self._scopes.append(str(eqn.source_info.name_stack))
        results = self.run(program, operands)
        self._scopes.pop()
        return results

    def _declared(self, value: Any) -> Any:
        """The value, which a rule declares equal on all replicas; the analysis of the step sees it declared."""
        value = self._total(value)
        if isinstance(value, values.Layers):
            return value
        return values.like(value, varying.equal_on_replicas(values.raw(value)))

    def _own(
        self, value: Any, shape: tuple[int, ...], out: tuple[int, ...], layout: layouts_lib.Layout
    ) -> Any:
        """This replica's shard of a value of this shape, broadcast to the shape of the result. A scalar stays one."""
        if isinstance(value, values.Shard):
            return value.array
        if isinstance(value, values.Layers):
            if out[0] == layout.shape[0] and not layout.flat:
                own = jnp.broadcast_to(value.array, (len(value.array), *out[1:]))
                layers = own.reshape(len(own), *layout.shape[1:])
                return self._partition.from_layers(layout, layers)
            value = self._gather(value, shape)
        if not shape:
            return value
        if jnp.ndim(value) == 0:
            return jnp.broadcast_to(value, layout.shard_shape)
        whole = jnp.broadcast_to(value, out).reshape(layout.shape)
        return layout.shard(whole, self._partition.index)

    def _reduce(self, kind: str, shard: values.Shard) -> Any:
        own = self._partition.reduce_own(kind, shard.layout, shard.array)
        if kind not in values.JOINED_BY:
            return self._partition.across(kind, own)
        return values.Partial(kind, own, jnp.full((), kind == "and", own.dtype))

    def _total(self, value: Any) -> Any:
        """The value itself, or the total over all replicas if it is a `Partial`."""
        if not isinstance(value, values.Partial):
            return value
        if value not in self._totals:
            reduced = self._partition.across(value.kind, value.own)
            self._totals[value] = value.total(reduced)
        return self._totals[value]

    def _cond(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        # Evaluates all branches and selects a result, because branches may contain reductions over replicas and no
        # collective may be conditional.
        index, *operands = operands
        branches = [self._call(eqn, branch, operands) for branch in eqn.params["branches"]]
        results = []
        for out, *cases in zip(eqn.outvars, *branches, strict=True):
            cases = [index, *(self._total(case) for case in cases)]
            shapes = [(), *[out.aval.shape] * len(branches)]
            results.append(self._elementwise(lax.select_n, cases, shapes, out))
        return results

    def _rule_of(self, eqn: Any) -> str:
        # The operation belongs to the rule that the innermost matching scope names.
        rule = self._rules[0]
        for scopes in [*self._scopes, str(eqn.source_info.name_stack)]:
            for name in scopes.split("/"):
                if name in self._rules:
                    rule = name
        return rule

    def _summed_refusal(self, eqn: Any, shard: values.Shard) -> ValueError:
        return ValueError(
            f"{self._rule_of(eqn)} cannot be used with shard_params=True: its {eqn.primitive.name} takes a replica's own "
            f"gradient of '{shard.layout.path}' before the sum over replicas, but with shard_params no replica has "
            "one: differentiating a network returns the sum. Act on the sum, as in "
            "CrossShardOptimizer(optax.chain(optax.clip_by_global_norm(1.0), ...)), or set only shard_update=True."
        )

    def _refusal(self, eqn: Any, shard: values.Shard) -> ValueError:
        return ValueError(
            f"{self._rule_of(eqn)} cannot be sharded: its {eqn.primitive.name} takes '{shard.layout.path}' "
            f"{shard.layout.shape}, of which each replica would hold a shard, and has effects besides its result. "
            "Leave it out of the rule, or set shard_update=False."
        )
