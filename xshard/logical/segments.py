"""The segments of a program on logical replicas, as functions of the arrays that one
device holds.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xshard import mesh as mesh_lib
from xshard.logical import split as split_lib
from xshard.logical import sums
from xshard.logical.replicas import Replicas

# Arrays by index: results of exchanges, or outputs that replicas keep.
Results = dict[int, jax.Array]
# The arrays that a replica sends into an exchange, and the outputs that it keeps.
Sent = tuple[list[jax.Array], Results]
OWN = jax.P(mesh_lib.BATCH)


class Replica(NamedTuple):
    """The data of a logical replica on its device.

    Attributes:
      own: the leaves of the arguments that are the replica's own.
      number: its number, of shape [1].
      shards: the replica's own results of exchanges, each with a leading dimension of
        places, of size 1.
    """

    own: Any
    number: Any
    shards: Any


class Mapped(NamedTuple):
    """A function of one replica, with the specs of its arguments and results, as for
    `jax.shard_map`.

    Attributes:
      function: a function of the replica's part of each argument.
      in_specs: the specs of each argument, a prefix of its tree.
      out_specs: the specs of the results, a prefix of their tree.
      finish: converts the results of all replicas to the final result.
    """

    function: Callable[..., Any]
    in_specs: Any
    out_specs: Any
    finish: Callable[[Any], Any] = lambda returned: returned

    def on(self, mesh: Any) -> Callable[..., Any]:
        """The function of all replicas of a mesh."""
        mapped = mesh_lib.on_replicas(
            self.function, mesh, in_specs=self.in_specs, out_specs=self.out_specs
        )

        def on_all(*args: Any) -> Any:
            return self.finish(mapped(*args))

        # Profiles show this name.
        function = getattr(self.function, "func", self.function)
        on_all.__name__ = getattr(function, "__name__", "on_all")
        return on_all


class Leaves:
    """The leaves of a function's arguments or results: some are equal on all replicas,
    others a replica's own.

    Attributes:
      specs: the spec of each leaf.
      own: for each leaf, whether it is a replica's own.
      dims: for each leaf that is a replica's own, the dimension along the replicas.
    """

    def __init__(self, tree: Any, specs: Any):
        """Finds how each leaf lies along the replicas, by specs that are a prefix of
        the tree.
        """
        self._structure = jax.tree.structure(tree)
        self.specs = jax.tree.leaves(jax.tree.broadcast(specs, tree))
        self.own = list(map(_is_own, self.specs))
        self.dims = list(map(_dim, filter(_is_own, self.specs)))

    def parted(self, tree: Any) -> tuple[list[Any], list[Any]]:
        """The leaves that are equal on all replicas, and the leaves that are a
        replica's own.
        """
        equal: list[Any] = []
        own: list[Any] = []
        for x, is_own in zip(jax.tree.leaves(tree), self.own, strict=True):
            (own if is_own else equal).append(x)
        return equal, own

    def joined(self, equal: Sequence[Any], own: Sequence[Any]) -> list[Any]:
        """The inverse of `parted`."""
        of_equal, of_own = iter(equal), iter(own)
        return [next(of_own if is_own else of_equal) for is_own in self.own]

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """The tree with these leaves."""
        return jax.tree.unflatten(self._structure, leaves)


class SegmentedProgram:
    """The parts of a program, as functions of the arrays that one device holds."""

    def __init__(self, what: str, mapped: Mapped, replicas: Replicas, args: Any):
        """Traces the function of one replica, and splits its program at the exchanges."""
        axes, groups = dict(replicas.mesh.shape), mesh_lib.group_axes(replicas.on)
        self.on, self.rounds = replicas.on, replicas.rounds
        self._replicas, self._args = replicas, args
        self.inputs = Leaves(args, mapped.in_specs)
        trace = jax.make_jaxpr(
            mapped.function, axis_env=list(axes.items()), return_shape=True
        )
        program, returned = trace(*self.shapes(dict.fromkeys(axes, 1)))
        self._outputs, self._finish = Leaves(returned, mapped.out_specs), mapped.finish
        self.out_specs, self.own_specs = self._outputs.parted(self._outputs.specs)
        self.split = split_lib.split(
            program, what, axes, self.inputs.own, self._outputs.own
        )
        # With several groups, values that are equal within a group have a leading
        # dimension of groups.
        self._grouped = bool(groups)
        self.equal = jax.P(*groups)
        numbers = np.arange(replicas.places, dtype=np.int32)
        self._numbers = np.tile(numbers, mesh_lib.num_groups(replicas.on))

    def shapes(self, sizes: Mapping[str, int]) -> Any:
        """The shapes of the arguments if the mesh axes had these sizes. Sizes of 1 give
        one replica's shapes.
        """
        here = {
            **self.on.shape,
            mesh_lib.SLICE: 1,
            mesh_lib.REPLICA: self._replicas.places,
        }
        shapes = []
        for leaf, spec in zip(
            jax.tree.leaves(self._args), self.inputs.specs, strict=True
        ):
            shape = list(leaf.shape)
            for dim, entry in enumerate(spec):
                for axis in mesh_lib.axes_of([entry]):
                    shape[dim] = shape[dim] // here[axis] * sizes[axis]
            shapes.append(jax.ShapeDtypeStruct(tuple(shape), leaf.dtype))
        return self.inputs.unflatten(shapes)

    @functools.cached_property
    def numbers(self) -> jax.Array:
        """The replica numbers of each device's places."""
        return mesh_lib.put(self.on, self._numbers, OWN)

    @property
    def shape_of_numbers(self) -> jax.ShapeDtypeStruct:
        """The shape and sharding of `numbers`, for tracing without devices."""
        return placed_on(self.on, self._numbers, OWN)

    def finish(self, outputs: Sequence[Any], own: Sequence[Any]) -> Any:
        """Assembles the final result from the results of `after` and of `join`."""
        leaves = self._outputs.joined(outputs, own)
        return self._finish(self._outputs.unflatten(leaves))

    def divide(self, own: Sequence[jax.Array], numbers: jax.Array) -> list[Replica]:
        """Divides a device's arrays into its replicas, which have no shards yet."""
        parts = []
        for x, dim in zip(own, self.inputs.dims, strict=True):
            parts.append(jnp.split(x, self.rounds, dim))
        replicas = []
        for i, number in enumerate(jnp.split(numbers, self.rounds)):
            replicas.append(Replica([of_leaf[i] for of_leaf in parts], number, {}))
        return replicas

    def join(self, kept: Sequence[Results]) -> list[jax.Array]:
        """Concatenates the outputs that the replicas of a device keep as their own."""
        joined = []
        for i, dim in enumerate(self._outputs.dims):
            joined.append(jnp.concatenate([of_one[i][0] for of_one in kept], dim))
        return joined

    def before(self, at: int, state: Any, results: Results, replica: Replica) -> Sent:
        """Computes the arrays that a replica sends into an exchange, and the outputs
        that it keeps.
        """
        equal = self.inputs.joined(state, replica.own)
        shards = {i: x[0] for i, x in replica.shards.items()}
        exchange = self.split.exchanges[at]
        made = exchange.before(
            [*equal, replica.number[0], *self._values(results, shards)]
        )
        # With a leading dimension of places, along which these arrays lie on the
        # devices.
        stacked = [x[None] for x in made]
        count = len(exchange.kinds)
        return stacked[:count], dict(zip(exchange.kept, stacked[count:], strict=True))

    def exchange(
        self, at: int, sent: Sequence[list[jax.Array]], numbers: Sequence[jax.Array]
    ) -> tuple[Results, list[Results]]:
        """Exchanges the arrays of a device's replicas. Returns the equal results, and
        each replica's shards.
        """
        # Removes the leading dimension of places, of size 1.
        held = [[x[0] for x in of_round] for of_round in sent]
        exchange, replicas = self.split.exchanges[at], self._replicas
        # If every place has a replica, no mask is needed.
        has_replica = None
        if replicas.places > replicas.count:
            has_replica = jnp.concatenate(numbers) < replicas.count
        how = replicas.count, replicas.num_words, replicas.gather_steps
        made = sums.combine(exchange.kinds, held, has_replica, *how)
        equal, shards = Results(), [Results() for _ in sent]
        for i, kind, x in zip(exchange.results, exchange.kinds, made, strict=True):
            if kind.name != split_lib.SCATTER:
                equal[i] = x[None] if self._grouped else x
                continue
            for of_one, shard in zip(shards, x, strict=True):
                of_one[i] = shard[None]
        return equal, shards

    def run(
        self,
        before: Callable[..., list[Any]],
        exchange: Callable[..., Any],
        state: Any,
        replicas: Any,
    ) -> tuple[Results, list[Results]]:
        """Runs all exchanges. Returns their equal results, and the outputs that each
        replica of a device keeps.

        Args:
          before: the method `before`, applied to all replicas of a device.
          exchange: the method `exchange`.
          state: the leaves of the arguments that are equal on all replicas.
          replicas: the replicas that `divide` returns.
        """
        results, kept = Results(), [Results() for _ in replicas]
        for at, each in enumerate(self.split.exchanges):
            made = before(at, state, results, replicas)
            kept = [of_one | new for of_one, (_, new) in zip(kept, made, strict=True)]
            if not each.kinds:
                continue
            numbers = [replica.number for replica in replicas]
            equal, shards = exchange(at, [sent for sent, _ in made], numbers)
            # Frees the sent arrays, which are large for all replicas of a device
            # together.
            del made
            results = results | equal
            replicas = [
                replica._replace(shards=replica.shards | new)
                for replica, new in zip(replicas, shards, strict=True)
            ]
        return results, kept

    def after(self, state: Any, results: Results) -> list[jax.Array]:
        """Computes the outputs of the program that are equal on all replicas."""
        leaves = self.inputs.joined(state, [None] * sum(self.inputs.own))
        return self.split.after([*leaves, None, *self._values(results, {})])

    def _values(self, results: Results, shards: Results) -> list[Any]:
        """The results of all exchanges, with None for those that have not run yet."""
        known = {i: x[0] if self._grouped else x for i, x in results.items()} | shards
        return [known.get(i) for i in range(self.split.size)]


def _is_own(spec: jax.P) -> bool:
    """Returns whether an array with this spec is a replica's own."""
    return mesh_lib.REPLICA in mesh_lib.axes_of(spec)


def _dim(spec: jax.P) -> int:
    """The dimension along the replicas."""
    return next(dim for dim, entry in enumerate(spec) if _is_own(jax.P(entry)))


def placed_on(on: jax.sharding.Mesh, shapes: Any, specs: Any) -> Any:
    """The shapes of arrays, with shardings on a mesh by their specs."""

    def placed(spec: jax.P, x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=mesh_lib.sharding(on, *spec)
        )

    return jax.tree.map(placed, jax.tree.broadcast(specs, shapes), shapes)
