"""A function of all replicas as a program, or as several, on logical replicas.

With exact sums it is several, and no floating-point number crosses a device: what a replica computes, of the shapes of one,
once for each of a device's; what they exchange, in integers; and what all devices make of that alike. In one program a
compiler fuses them, on other numbers of devices in other ways, and rounds otherwise.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xshard import errors
from xshard import mesh as mesh_lib
from xshard.logical import split as split_lib
from xshard.logical import sums
from xshard.logical.replicas import Replicas

# The results of exchanges, by their numbers.
Results = dict[int, jax.Array]
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

        def on_all(*args: Any) -> Any:
            return self.finish(mapped(*args))

        # By this name profiles show it.
        function = getattr(self.function, "func", self.function)
        on_all.__name__ = getattr(function, "__name__", "on_all")
        return on_all


class Program:
    """A function of all replicas, run on logical ones; called, traced and lowered as what `jax.jit` returns."""

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
        self._built: dict[Any, _One | _Apart] = {}

    def trace(self, *args: Any) -> Any:
        """The traced program of as many devices as there are replicas, as `jax.jit(...).trace` returns it.

        Raises:
          UserError: if the function cannot be run on logical replicas.
        """
        inputs = self._of(args).parts.inputs
        shapes = jax.tree.unflatten(inputs.tree, inputs.shapes(self._replicas.mesh.shape))
        return jax.jit(lambda *args: self._mapped(*args).on(self._replicas.mesh)(*args)).trace(
            *shapes
        )

    def lower(self, *args: Any) -> "Lowered":
        """The programs for such arguments, to be compiled."""
        return Lowered(self._of(args).lower(args))

    def __call__(self, *args: Any) -> Any:
        """The result of the function."""
        program = self._of(args)
        if not program.is_compiled:
            self.lower(*args).compile()
        return program(args)

    def _of(self, args: Any) -> "_One | _Apart":
        key = jax.tree.structure(args), *(x.shape for x in jax.tree.leaves(args))
        if key not in self._built:
            parts = _Parts(self._what, self._mapped(*args), self._replicas, args)
            kind = _Apart if self._replicas.limbs else _One
            self._built[key] = kind(parts, **self._options)
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
        here = {
            **self._replicas.on.shape,
            mesh_lib.SLICE: 1,
            mesh_lib.REPLICA: self._replicas.places,
        }
        shapes = []
        for leaf, spec in zip(self._leaves, self._specs, strict=True):
            shape = list(leaf.shape)
            for dim, entry in enumerate(spec):
                for axis in mesh_lib.axes_of([entry]):
                    shape[dim] = shape[dim] // here[axis] * sizes[axis]
            shapes.append(jax.ShapeDtypeStruct(tuple(shape), leaf.dtype))
        return shapes

    @property
    def specs(self) -> tuple[list[jax.P], list[jax.P]]:
        """The specs, in two as of `parted`."""
        return self._in_two(self._specs)

    def parted(self, args: Any) -> tuple[list[Any], list[Any]]:
        """The leaves of arguments that do not differ from replica to replica, and those that do."""
        return self._in_two(jax.tree.leaves(args))

    def _in_two(self, of_leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        pairs = list(zip(of_leaves, self.own, strict=True))
        return [x for x, is_own in pairs if not is_own], [x for x, is_own in pairs if is_own]

    def joined(self, equal: Sequence[Any], own: Sequence[Any]) -> list[Any]:
        """The inverse of `parted`."""
        of_both = iter(equal), iter(own)
        return [next(of_both[is_own]) for is_own in self.own]


class _Parts:
    """The parts of a program, as functions of what a device holds."""

    def __init__(self, what: str, mapped: Mapped, replicas: Replicas, args: Any):
        """Traces the function as one replica has it, and splits it."""
        if any(
            mesh_lib.REPLICA in mesh_lib.axes_of(spec) for spec in jax.tree.leaves(mapped.out_specs)
        ):
            raise errors.UserError(
                f"{what} has state that is a replica's own (xshard.PerReplica, xshard.PerExample), or in shards; with "
                "logical_replicas all state is equal on the replicas. Set logical_replicas to 0."
            )
        axes, groups = dict(replicas.mesh.shape), mesh_lib.num_groups(replicas.on)
        self.inputs, self._replicas = _Inputs(mapped, replicas, args), replicas
        function = lambda *leaves: mapped.function(*jax.tree.unflatten(self.inputs.tree, leaves))
        trace = jax.make_jaxpr(function, axis_env=list(axes.items()), return_shape=True)
        program, returned = trace(*self.inputs.shapes(dict.fromkeys(axes, 1)))
        self.split = split_lib.split(program, what, axes, self.inputs.own)
        self._out_tree, self._join = jax.tree.structure(returned), mapped.finish
        self.out_specs = jax.tree.leaves(jax.tree.broadcast(mapped.out_specs, returned))
        # What is equal in a group has, of several groups, a dimension of them.
        self._grouped = groups > 1
        self.equal = jax.P(mesh_lib.GROUP) if self._grouped else jax.P()
        self.on, self.rounds = replicas.on, replicas.rounds
        self._numbers = np.tile(np.arange(replicas.places, dtype=np.int32), groups)

    @functools.cached_property
    def numbers(self) -> jax.Array:
        """The numbers of the replicas at each device's places."""
        return mesh_lib.put(self.on, self._numbers, _OWN)

    @property
    def shape_of_numbers(self) -> jax.ShapeDtypeStruct:
        """The same before there are devices."""
        return _placed(self.on, self._numbers, _OWN)

    def finish(self, outputs: Sequence[Any]) -> Any:
        """The result, of the results of `after`."""
        return self._join(jax.tree.unflatten(self._out_tree, outputs))

    def divide(self, batch: Any, numbers: Any) -> Any:
        """The part of the batch of each replica of a device, with its number."""
        count = self._replicas.rounds
        of = lambda i, x: x.reshape(count, -1, *x.shape[1:])[i]
        return [jax.tree.map(lambda x, i=i: of(i, x), (batch, numbers)) for i in range(count)]

    def before(self, at: int, state: Any, results: Any, own: Any) -> list[jax.Array]:
        """Computes what a replica brings to an exchange, of its part of the batch and its number, which are its own."""
        batch, number = own
        values = [*self.inputs.joined(state, batch), number[0], *self._values(results)]
        return [x[None] for x in self.split.exchanges[at].before(values)]

    def exchange(self, at: int, brought: Sequence[list[jax.Array]], numbers: Any) -> Results:
        """The results of an exchange, of what a device's replicas bring."""
        # Without the dimension of places, of which there is one on a device.
        held = [[x[0] for x in of_round] for of_round in brought]
        is_one = jnp.concatenate(numbers) < self._replicas.count
        count, limbs = self._replicas.count, self._replicas.limbs
        exchange = self.split.exchanges[at]
        made = sums.combine(exchange.kinds, held, is_one, count, limbs)
        if self._grouped:
            made = [x[None] for x in made]
        return dict(zip(exchange.results, made, strict=True))

    def after(self, state: Any, results: Results) -> list[jax.Array]:
        """The results of the whole."""
        leaves = self.inputs.joined(state, [None] * sum(self.inputs.own))
        return self.split.after([*leaves, None, *self._values(results)])

    def _values(self, results: Results) -> list[Any]:
        """The results of all exchanges, None of those that have not been."""
        known = {i: x[0] if self._grouped else x for i, x in results.items()}
        return [known.get(i) for i in range(self.split.size)]


class _One:
    """The parts as one program."""

    def __init__(self, parts: _Parts, **options: Any):
        """Puts them together; the options are of `jax.jit`."""
        self.parts, self.is_compiled = parts, False
        equal, own = parts.inputs.specs
        mapped = Mapped(self._run, (equal, own, _OWN), parts.out_specs)
        self._jitted = jax.jit(mapped.on(parts.on), **options)

    def _run(self, state: Any, batch: Any, numbers: jax.Array) -> list[jax.Array]:
        parts, results = self.parts, dict[int, jax.Array]()
        rounds = jax.tree.map(lambda *xs: jnp.stack(xs), *parts.divide(batch, numbers))
        for at in range(len(parts.split.exchanges)):
            before = functools.partial(parts.before, at, state, results)
            brought = lax.map(before, rounds)
            of_rounds = [[x[i] for x in brought] for i in range(parts.rounds)]
            results = results | parts.exchange(at, of_rounds, [numbers])
        return parts.after(state, results)

    def lower(self, args: Any) -> list[Any]:
        """The program, to be compiled."""
        parts, self.is_compiled = self.parts, True
        return [self._jitted.lower(*parts.inputs.parted(args), parts.shape_of_numbers)]

    def __call__(self, args: Any) -> Any:
        """The result."""
        inputs = self.parts.inputs.parted(args)
        return self.parts.finish(self._jitted(*inputs, self.parts.numbers))


class _Apart:
    """The parts as programs of their own, one after the other; the host waits for none."""

    def __init__(self, parts: _Parts, **options: Any):
        """Jits them; the options are those of the last, whose first argument is all that is equal on replicas."""
        self.parts, on, self.is_compiled = parts, parts.on, False
        equal, own = parts.inputs.specs
        self._rounds = [(own, _OWN)] * parts.rounds
        self._divide = jax.jit(Mapped(parts.divide, (own, _OWN), self._rounds).on(on))
        self._exchanges = []
        for at in range(len(parts.split.exchanges)):
            takes = (equal, parts.equal, (own, _OWN))
            before = Mapped(functools.partial(parts.before, at), takes, _OWN)
            exchange = Mapped(functools.partial(parts.exchange, at), (_OWN, _OWN), parts.equal)
            self._exchanges.append((jax.jit(before.on(on)), jax.jit(exchange.on(on))))
        after = Mapped(parts.after, (equal, parts.equal), parts.out_specs)
        self._after = jax.jit(after.on(on), **options)

    def lower(self, args: Any) -> list[Any]:
        """The programs, to be compiled, in the order in which they are run."""
        parts, results = self.parts, dict[int, Any]()
        self.is_compiled = True
        state, batch = parts.inputs.parted(args)
        programs = [self._divide.lower(batch, parts.shape_of_numbers)]
        rounds = _placed(parts.on, programs[0].out_info, self._rounds)
        numbers = [number for _, number in rounds]
        for run_before, run_exchange in self._exchanges:
            before = run_before.lower(state, results, rounds[0])
            brought = _placed(parts.on, before.out_info, _OWN)
            exchange = run_exchange.lower([brought] * parts.rounds, numbers)
            results = results | _placed(parts.on, exchange.out_info, parts.equal)
            programs += [before, exchange]
        return [*programs, self._after.lower(state, results)]

    def __call__(self, args: Any) -> Any:
        """The result."""
        results: Results = {}
        state, batch = self.parts.inputs.parted(args)
        rounds = self._divide(batch, self.parts.numbers)
        numbers = [number for _, number in rounds]
        for before, exchange in self._exchanges:
            # Nothing keeps what is brought: of all replicas of a device it is much.
            results = results | exchange([before(state, results, own) for own in rounds], numbers)
        return self.parts.finish(self._after(state, results))


class Lowered(NamedTuple):
    """The programs that a function is made of, not compiled; `compile` keeps them for when it is called.

    Attributes:
      programs: of `jax.jit(...).lower(...)`, in the order in which they are run.
    """

    programs: list[Any]

    def compile(self) -> list[Any]:
        """The programs, compiled side by side."""
        with futures.ThreadPoolExecutor() as pool:
            return list(pool.map(lambda program: program.compile(), self.programs))


def _placed(on: jax.sharding.Mesh, shapes: Any, specs: Any) -> Any:
    """The shapes of arrays that lie so on a mesh."""

    def placed(spec: jax.P, x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=mesh_lib.sharding(on, *spec))

    return jax.tree.map(placed, jax.tree.broadcast(specs, shapes), shapes)
