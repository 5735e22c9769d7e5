"""A function of all replicas as a program, or as three, on logical replicas.

With exact sums they are three, and no floating-point number crosses a device: what a replica computes, of the shapes of one,
once for each of a device's; what they exchange, in integers; and what all devices make of that alike. In one program a
compiler fuses the three, on other numbers of devices in other ways, and rounds otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from xshard import mesh as mesh_lib
from xshard.logical import split as split_lib
from xshard.logical import sums
from xshard.logical.replicas import Replicas

_OWN = jax.P(mesh_lib.BATCH)


class Mapped(NamedTuple):
    """A function of a replica, and how its arguments and results lie along the replicas, as for `jax.shard_map`.

    Attributes:
      function: takes what the replica holds of each argument.
      in_specs: for each argument a prefix of its tree.
      out_specs: a prefix of the tree that it returns.
      finish: takes what it returns, of all replicas, to the result.
    """

    function: Callable[..., Any]
    in_specs: Any
    out_specs: Any
    finish: Callable[[Any], Any] = lambda returned: returned

    def on(self, mesh: Any) -> Callable[..., Any]:
        """The function of all replicas of a mesh."""
        specs = {"in_specs": self.in_specs, "out_specs": self.out_specs}
        mapped = mesh_lib.on_replicas(self.function, mesh, **specs)
        return lambda *args: self.finish(mapped(*args))


class Program:
    """What `jax.jit` makes of a function of all replicas, on logical ones."""

    def __init__(
        self, what: str, mapped: Callable[..., Mapped], replicas: Replicas, **options: Any
    ):
        """Keeps the function.

        Args:
          what: what it is, for messages.
          mapped: takes the arguments, of which shapes count, to what a replica does with them.
          replicas: where they are. Batches have `replicas.rows` rows.
          **options: of `jax.jit`; `donate_argnums` are 0 or none.
        """
        self._what = what
        self._mapped = mapped
        self._replicas = replicas
        self._options = options
        self._built: dict[Any, Callable[..., Any]] = {}

    def trace(self, *args: Any) -> Any:
        """The traced program of as many devices as there are replicas, as `jax.jit(...).trace` returns it."""
        inputs = _Inputs(self._mapped(*args), self._replicas, args)
        shapes = jax.tree.unflatten(inputs.tree, inputs.shapes(self._replicas.mesh.shape))
        return jax.jit(lambda *args: self._mapped(*args).on(self._replicas.mesh)(*args)).trace(
            *shapes
        )

    def lower(self, *args: Any) -> "Program":
        """Returns itself, compiled for such arguments."""
        self._of(args)
        return self

    def compile(self) -> "Program":
        """Returns itself: as `lower` has compiled it."""
        return self

    def __call__(self, *args: Any) -> Any:
        """What the function returns."""
        return self._of(args)(*jax.tree.leaves(args))

    def _of(self, args: Any) -> Callable[..., Any]:
        key = jax.tree.structure(args), *(jnp.shape(x) for x in jax.tree.leaves(args))
        if key not in self._built:
            mapped = self._mapped(*args)
            inputs = _Inputs(mapped, self._replicas, args)
            parts = _Parts(self._what, mapped, inputs, self._replicas)
            build = parts.three if self._replicas.is_exact else parts.one
            self._built[key] = build(**self._options)
        return self._built[key]


class _Inputs:
    """The leaves of a function's arguments."""

    def __init__(self, mapped: Mapped, replicas: Replicas, args: Any):
        """Finds how each leaf lies along the replicas."""
        self._replicas = replicas
        self._leaves, self.tree = jax.tree.flatten(args)
        self._specs = jax.tree.leaves(jax.tree.broadcast(mapped.in_specs, args))
        self.own = [mesh_lib.REPLICA in mesh_lib.axes_of(spec) for spec in self._specs]

    def shapes(self, sizes: Mapping[str, int]) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the leaves, were these the sizes of the axes; with a size of 1 what a replica holds."""
        here = {**self._replicas.on.shape, mesh_lib.SLICE: 1, mesh_lib.REPLICA: self._replicas.places}
        shapes = []
        for leaf, spec in zip(self._leaves, self._specs, strict=True):
            shape = list(leaf.shape)
            for dim, entry in enumerate(spec):
                for axis in mesh_lib.axes_of([entry]):
                    shape[dim] = shape[dim] // here[axis] * sizes[axis]
            shapes.append(jax.ShapeDtypeStruct(tuple(shape), leaf.dtype))
        return shapes

    def specs(self, *, own: bool) -> list[jax.P]:
        """The specs of those that differ from replica to replica, or of those that do not."""
        return [x for x, is_own in zip(self._specs, self.own, strict=True) if is_own == own]

    def parted(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Those of leaves that do not differ from replica to replica, and those that do."""
        pairs = list(zip(leaves, self.own, strict=True))
        return [x for x, is_own in pairs if not is_own], [x for x, is_own in pairs if is_own]

    def joined(self, equal: Sequence[Any], own: Sequence[Any]) -> list[Any]:
        """The inverse of `parted`."""
        of_both = iter(equal), iter(own)
        return [next(of_both[is_own]) for is_own in self.own]


class _Parts:
    """The parts of a program, to be put together."""

    def __init__(self, what: str, mapped: Mapped, inputs: _Inputs, replicas: Replicas):
        """Traces the function as one replica has it, and splits it."""
        axes = dict(replicas.mesh.shape)
        function = lambda *leaves: mapped.function(*jax.tree.unflatten(inputs.tree, leaves))
        trace = jax.make_jaxpr(function, axis_env=list(axes.items()), return_shape=True)
        program, returned = trace(*inputs.shapes(dict.fromkeys(axes, 1)))
        self._split = split_lib.split(program, what, axes, inputs.own)
        self._inputs, self._replicas = inputs, replicas
        self._out_tree, self._join = jax.tree.structure(returned), mapped.finish
        self._out_specs = jax.tree.leaves(jax.tree.broadcast(mapped.out_specs, returned))
        # What is equal in a group has, of several groups, a dimension of them.
        self._grouped = mesh_lib.num_groups(replicas.on) > 1
        self._equal = jax.P(mesh_lib.GROUP) if self._grouped else jax.P()
        groups = mesh_lib.num_groups(replicas.on)
        self._numbers = np.tile(np.arange(replicas.places, dtype=np.int32), groups)

    def three(self, **options: Any) -> Callable[..., Any]:
        """Programs of their own, one after the other; the options are of the last, whose first argument is what is equal."""
        equal, own = (self._inputs.specs(own=is_own) for is_own in (False, True))
        on = self._replicas.on
        numbers = mesh_lib.put(on, self._numbers, _OWN)
        rounds = [(own, _OWN)] * self._replicas.rounds
        divide = jax.jit(_on(on, self._divide, (own, _OWN), rounds))
        before = jax.jit(_on(on, self._before, (equal, own, _OWN), _OWN))
        exchange = jax.jit(_on(on, self._exchange, (_OWN, _OWN), self._equal))
        after = jax.jit(_on(on, self._after, (equal, self._equal), self._out_specs), **options)

        def run(*leaves: Any) -> Any:
            state, batch = self._inputs.parted(leaves)
            rounds = divide(batch, numbers)
            brought = [before(state, *of_round) for of_round in rounds]
            results = exchange(brought, [number for _, number in rounds])
            return self._finish(after(state, results))

        return run

    def one(self, **options: Any) -> Callable[..., Any]:
        """The same as one program, with these options."""
        equal, own = (self._inputs.specs(own=is_own) for is_own in (False, True))
        on = self._replicas.on
        numbers = mesh_lib.put(on, self._numbers, _OWN)

        def local(state: Any, batch: Any, numbers: Any) -> Any:
            rounds = self._divide(batch, numbers)
            stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *rounds)
            brought = lax.map(lambda of_round: self._before(state, *of_round), stacked)
            results = self._exchange([brought], [numbers])
            return self._after(state, results)

        step = jax.jit(_on(on, local, (equal, own, _OWN), self._out_specs), **options)

        def run(*leaves: Any) -> Any:
            return self._finish(step(*self._inputs.parted(leaves), numbers))

        return run

    def _finish(self, outputs: Sequence[Any]) -> Any:
        return self._join(jax.tree.unflatten(self._out_tree, outputs))

    def _divide(self, batch: Any, numbers: Any) -> Any:
        """What each replica of a device has of the batch, and its number."""
        count = self._replicas.rounds
        of = lambda i, x: x.reshape(count, -1, *x.shape[1:])[i]
        return [jax.tree.map(lambda x, i=i: of(i, x), (batch, numbers)) for i in range(count)]

    def _before(self, state: Any, batch: Any, number: jax.Array) -> list[jax.Array]:
        """What a replica brings to the exchange."""
        part = self._split.before
        leaves = self._inputs.joined(state, batch)
        brought = core.jaxpr_as_fun(part.program)(*(leaves[i] for i in part.reads), number[0])
        return [x[None] for x in brought]

    def _exchange(self, brought: Sequence[list[jax.Array]], numbers: Any) -> list[jax.Array]:
        """The results of the exchange, of what a device's replicas bring."""
        held = [jnp.concatenate(of_all) for of_all in zip(*brought, strict=True)]
        is_one = jnp.concatenate(numbers) < self._replicas.count
        kinds, count, exact = self._split.kinds, self._replicas.count, self._replicas.is_exact
        results = sums.combine(kinds, held, is_one, count, exact=exact)
        return [x[None] for x in results] if self._grouped else results

    def _after(self, state: Any, results: list[jax.Array]) -> list[jax.Array]:
        """The results of the whole."""
        part = self._split.after
        leaves = self._inputs.joined(state, [None] * sum(self._inputs.own))
        if self._grouped:
            results = [x[0] for x in results]
        return core.jaxpr_as_fun(part.program)(*(leaves[i] for i in part.reads), *results)


def _on(on: jax.sharding.Mesh, function: Any, in_specs: Any, out_specs: Any) -> Any:
    return Mapped(function, in_specs, out_specs).on(on)
