"""The segments of a program on logical replicas, as functions of the arrays that one
device holds.

A device computes the logical replicas that share it one after the other. Between two
collectives they compute independently; a collective combines what all of them send,
first on each device and then over the devices. So a program is a sequence of

    divide                      the device's arrays into its replicas
    before(0), combine(0),      what each replica sends; the results on all of them
    before(1), combine(1), ...
    after                       the outputs that are equal on all replicas
    join                        the per-replica outputs into the device's arrays
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xshard import mesh as mesh_lib
from xshard.base import mesh_axes
from xshard.logical import split as split_lib
from xshard.logical import sums
from xshard.logical.replicas import Replicas

# Results of collectives, by their position among the results of all collectives; or
# per-replica outputs, by their position among all per-replica outputs.
Indexed = dict[int, jax.Array]
# The spec of an array with a leading dimension of replicas.
PER_REPLICA = jax.P(mesh_lib.BATCH)


class Replica(NamedTuple):
    """The data of a logical replica on its device.

    Attributes:
      inputs: the leaves of the arguments that are per replica.
      number: its number, of shape [1].
      shards: the shards that it received in scattering collectives, each with a leading
        dimension of replicas, of size 1.
    """

    inputs: Any
    number: Any
    shards: Any


class Sent(NamedTuple):
    """The results of a replica before a collective.

    All arrays have a leading dimension of replicas, of size 1, along which they lie on
    the devices.

    Attributes:
      arrays: the arrays that the replica sends.
      outputs: the per-replica outputs of the program that are computed by then.
    """

    arrays: list[Any]
    outputs: Indexed


class Combined(NamedTuple):
    """The results of a collective on a device.

    Attributes:
      equal: the results that are equal on all replicas of a group.
      shards: for each replica of the device, the shards that it received.
    """

    equal: Any
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
        """Returns the function of all replicas of a mesh."""
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
    """The leaves of a function's arguments or results, of which some are equal on all
    replicas and others are per replica.

    Attributes:
      specs: the spec of each leaf.
      is_per_replica: for each leaf, whether it is per replica.
      dims: for each per-replica leaf, the dimension along the replicas.
    """

    def __init__(self, tree: Any, specs: Any):
        """Finds which leaves are per replica.

        Args:
          tree: the arguments or results, as arrays or shapes.
          specs: the specs of the leaves, a prefix of the tree.
        """
        self._structure = jax.tree.structure(tree)
        self.specs = jax.tree.leaves(jax.tree.broadcast(specs, tree))
        self.is_per_replica = [_is_per_replica(spec) for spec in self.specs]
        self.dims = [_replica_dim(spec) for spec in self.specs if _is_per_replica(spec)]

    def partition(self, tree: Any) -> tuple[list[Any], list[Any]]:
        """Returns the leaves that are equal on all replicas, and those per replica."""
        equal: list[Any] = []
        per_replica: list[Any] = []
        leaves = jax.tree.leaves(tree)
        for leaf, is_per_replica in zip(leaves, self.is_per_replica, strict=True):
            if is_per_replica:
                per_replica.append(leaf)
            else:
                equal.append(leaf)
        return equal, per_replica

    def merge(self, equal: Sequence[Any], per_replica: Sequence[Any]) -> list[Any]:
        """Returns all leaves in order: the inverse of `partition`."""
        equal_leaves = iter(equal)
        per_replica_leaves = iter(per_replica)
        leaves = []
        for is_per_replica in self.is_per_replica:
            leaves.append(next(per_replica_leaves if is_per_replica else equal_leaves))
        return leaves

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Returns the tree with these leaves."""
        return jax.tree.unflatten(self._structure, leaves)


class SegmentedProgram:
    """A program of one replica in segments, each a function of the arrays of a device.

    Attributes:
      mesh: the mesh of devices.
      rounds: the number of logical replicas that a device computes in turn.
      inputs: the leaves of the arguments.
      outputs: the leaves of the results.
      equal_spec: the spec of the results of collectives that are equal on all replicas
        of a group. With several groups they have a leading dimension of groups.
      split: the segments.
    """

    def __init__(self, what: str, mapped: Mapped, replicas: Replicas, args: Any):
        """Traces the function of one replica, and splits its program at collectives.

        Args:
          what: a name of the function, for error messages.
          mapped: the function of one replica.
          replicas: the logical replicas and their devices.
          args: the arguments on all devices, or their shapes.

        Raises:
          UserError: if the program cannot be run on logical replicas.
        """
        self.mesh = replicas.device_mesh
        self.rounds = replicas.rounds
        self.inputs = Leaves(args, mapped.in_specs)
        self._replicas = replicas
        self._args = args
        self._finish = mapped.finish

        group_axes = mesh_lib.group_axes(self.mesh)
        self.equal_spec = jax.P(*group_axes)
        self._is_grouped = bool(group_axes)
        numbers = np.arange(replicas.places, dtype=np.int32)
        self._numbers = np.tile(numbers, mesh_lib.num_groups(self.mesh))

        axis_sizes = dict(replicas.mesh.shape)
        trace = jax.make_jaxpr(
            mapped.function, axis_env=list(axis_sizes.items()), return_shape=True
        )
        shapes_of_one = self.shapes(dict.fromkeys(axis_sizes, 1))
        program, returned = trace(*shapes_of_one)
        self.outputs = Leaves(returned, mapped.out_specs)
        self.split = split_lib.split(
            program,
            what,
            axis_sizes,
            self.inputs.is_per_replica,
            self.outputs.is_per_replica,
        )

    def shapes(self, axis_sizes: Mapping[str, int]) -> Any:
        """Returns the shapes of the arguments if the mesh axes had these sizes.

        Sizes of 1 give the shapes of one replica.
        """
        # The arguments have rows for every place, also for the empty ones.
        actual_sizes = {
            **self.mesh.shape,
            mesh_lib.SLICE: 1,
            mesh_lib.REPLICA: self._replicas.places,
        }
        shapes = []
        leaves = jax.tree.leaves(self._args)
        for leaf, spec in zip(leaves, self.inputs.specs, strict=True):
            shape = list(leaf.shape)
            for dim, entry in enumerate(spec):
                for axis in mesh_axes.axes_of([entry]):
                    shape[dim] = shape[dim] // actual_sizes[axis] * axis_sizes[axis]
            shapes.append(jax.ShapeDtypeStruct(tuple(shape), leaf.dtype))
        return self.inputs.unflatten(shapes)

    @functools.cached_property
    def numbers(self) -> jax.Array:
        """The replica numbers of each device's places."""
        return mesh_lib.put(self.mesh, self._numbers, PER_REPLICA)

    @property
    def shape_of_numbers(self) -> jax.ShapeDtypeStruct:
        """The shape and sharding of `numbers`, for tracing without devices."""
        return with_shardings(self.mesh, self._numbers, PER_REPLICA)

    def divide(
        self, per_replica: Sequence[jax.Array], numbers: jax.Array
    ) -> list[Replica]:
        """Divides a device's arrays into its replicas.

        Args:
          per_replica: the per-replica leaves of the arguments.
          numbers: the replica numbers of the device's places.

        Returns:
          The replicas, which have received no shards yet.
        """
        divided = []
        for array, dim in zip(per_replica, self.inputs.dims, strict=True):
            divided.append(jnp.split(array, self.rounds, dim))
        replicas = []
        for place, number in enumerate(jnp.split(numbers, self.rounds)):
            inputs = [parts[place] for parts in divided]
            replicas.append(Replica(inputs=inputs, number=number, shards={}))
        return replicas

    def before(
        self, index: int, state: Sequence[Any], results: Indexed, replica: Replica
    ) -> Sent:
        """Computes what a replica sends into a collective.

        Args:
          index: the index of the collective.
          state: the leaves of the arguments that are equal on all replicas.
          results: the equal results of all earlier collectives.
          replica: the replica.
        """
        collective = self.split.collectives[index]
        arguments = self.inputs.merge(state, replica.inputs)
        shards = {i: shard[0] for i, shard in replica.shards.items()}
        values = self._values_of_collectives(results, shards)
        made = collective.before([*arguments, replica.number[0], *values])
        made = [array[None] for array in made]
        num_sent = len(collective.kinds)
        outputs = dict(zip(collective.kept, made[num_sent:], strict=True))
        return Sent(arrays=made[:num_sent], outputs=outputs)

    def combine(
        self,
        index: int,
        sent: Sequence[Sequence[jax.Array]],
        numbers: Sequence[jax.Array],
    ) -> Combined:
        """Combines arrays of all replicas of a group.

        Args:
          index: the index of the collective.
          sent: for each replica of the device, the arrays that it sends.
          numbers: the replica numbers of the device's places.
        """
        collective = self.split.collectives[index]
        combined = sums.combine(
            collective.kinds,
            [[array[0] for array in arrays] for arrays in sent],
            self._has_replica(numbers),
            count=self._replicas.count,
            is_exact=self._replicas.is_exact,
            gather_steps=self._replicas.gather_steps,
        )
        equal: Indexed = {}
        shards: list[Indexed] = [{} for _ in sent]
        for i, kind, result in zip(
            collective.results, collective.kinds, combined, strict=True
        ):
            if kind.name == split_lib.SCATTER:
                for shards_of_replica, shard in zip(shards, result, strict=True):
                    shards_of_replica[i] = shard[None]
            else:
                equal[i] = self._of_group(result)
        return Combined(equal=equal, shards=shards)

    # The steps of `combine` for some of a device's replicas. What they return is equal
    # on all devices of a group, and may be combined with that of other processes.
    # These have whole sums where `combine` has shards of them.

    def whole_kinds(self, index: int) -> list[split_lib.Kind]:
        """Returns the way in which these steps combine each array."""
        kinds = []
        for kind in self.split.collectives[index].kinds:
            is_scatter = kind.name == split_lib.SCATTER
            kinds.append(split_lib.Kind(split_lib.SUM) if is_scatter else kind)
        return kinds

    def magnitudes(
        self, index: int, sent: Sequence[jax.Array], number: jax.Array
    ) -> jax.Array | None:
        """Runs `sums.magnitudes` for one replica of each device."""
        largest = sums.magnitudes(
            self.whole_kinds(index),
            [[array[0] for array in sent]],
            self._has_replica([number]),
        )
        return None if largest is None else self._of_group(largest)

    def terms(
        self,
        index: int,
        total: Sequence[Any] | None,
        sent: Sequence[jax.Array],
        number: jax.Array,
        largest: jax.Array | None,
    ) -> list[jax.Array]:
        """Runs `sums.terms` for one replica of each device.

        Args:
          index: the index of the collective.
          total: the result for other replicas of the devices, to which this one is
            added; None if there are none.
          sent: what the replica sends.
          number: its number.
          largest: the result of `magnitudes`, of all replicas.

        Returns:
          The terms. A gathered array has all replicas, with zeros for those that have
          not been added.
        """
        kinds = self.whole_kinds(index)
        combined = sums.terms(
            kinds,
            [[array[0] for array in sent]],
            self._has_replica([number]),
            self._in_group(largest),
            count=self._replicas.count,
            gather_steps=self._replicas.gather_steps,
        )
        if total is None:
            total = [None] * len(combined)
        added = []
        for kind, x, total_of_array in zip(kinds, combined, total, strict=True):
            added.append(self._added(kind, number, x, total_of_array))
        return added

    def _added(
        self,
        kind: split_lib.Kind,
        number: jax.Array,
        x: jax.Array,
        total: jax.Array | None,
    ) -> jax.Array:
        """Adds the term of one replica of each device to the total of others."""
        total = self._in_group(total)
        if kind.name == split_lib.GATHER:
            devices = mesh_lib.num_replicas(self.mesh)
            dim = kind.dim
            before = x.shape[:dim]
            size = x.shape[dim]
            after = x.shape[dim + 1 :]
            # The replicas of a device are consecutive.
            x = x.reshape(*before, devices, 1, size // devices, *after)
            shape = (*before, devices, self.rounds, size // devices, *after)
            whole = jnp.zeros(shape, x.dtype) if total is None else total.reshape(shape)
            place = number[0] % self.rounds
            x = lax.dynamic_update_slice_in_dim(whole, x, place, dim + 1)
            x = x.reshape(*before, size * self.rounds, *after)
        elif total is not None:
            is_extreme = kind.name in (split_lib.MAX, split_lib.MIN)
            x = jnp.maximum(total, x) if is_extreme else total + x
        return self._of_group(x)

    def results(
        self,
        index: int,
        combined: Sequence[jax.Array],
        largest: jax.Array | None,
        numbers: Sequence[jax.Array],
    ) -> Combined:
        """Runs `sums.results`, given the terms of all replicas."""
        collective = self.split.collectives[index]
        made = sums.results(
            self.whole_kinds(index),
            collective.shapes,
            [self._in_group(x) for x in combined],
            self._in_group(largest),
            count=self._replicas.count,
        )
        equal: Indexed = {}
        shards: list[Indexed] = [{} for _ in numbers]
        for i, kind, result in zip(
            collective.results, collective.kinds, made, strict=True
        ):
            if kind.name != split_lib.SCATTER:
                equal[i] = self._of_group(result)
                continue
            size = result.shape[kind.dim] // self._replicas.count
            for shards_of_replica, number in zip(shards, numbers, strict=True):
                shard = lax.dynamic_slice_in_dim(
                    result, number[0] * size, size, kind.dim
                )
                shards_of_replica[i] = shard[None]
        return Combined(equal=equal, shards=shards)

    def after(self, state: Sequence[Any], results: Indexed) -> list[jax.Array]:
        """Computes the outputs of the program that are equal on all replicas.

        Args:
          state: the leaves of the arguments that are equal on all replicas.
          results: the equal results of all collectives.
        """
        # The last segment reads nothing that is per replica, so None stands for that.
        per_replica = [None] * len(self.inputs.dims)
        arguments = self.inputs.merge(state, per_replica)
        number = None
        values = self._values_of_collectives(results, {})
        return self.split.after([*arguments, number, *values])

    def join(self, outputs: Sequence[Indexed]) -> list[jax.Array]:
        """Concatenates the per-replica outputs of a device's replicas."""
        joined = []
        for i, dim in enumerate(self.outputs.dims):
            arrays = [outputs_of_replica[i][0] for outputs_of_replica in outputs]
            joined.append(jnp.concatenate(arrays, dim))
        return joined

    def finish(self, equal: Sequence[Any], per_replica: Sequence[Any]) -> Any:
        """Assembles the final result from the results of `after` and of `join`."""
        leaves = self.outputs.merge(equal, per_replica)
        return self._finish(self.outputs.unflatten(leaves))

    def _has_replica(self, numbers: Sequence[jax.Array]) -> jax.Array | None:
        """Returns for each place whether it has a replica; None if every place has."""
        # Every place has a replica in most runs, and then nothing needs a mask.
        if self._replicas.places == self._replicas.count:
            return None
        return jnp.concatenate(numbers) < self._replicas.count

    def _of_group(self, result: jax.Array) -> jax.Array:
        """Returns a group's array with the dimension of groups, if there is one."""
        return result[None] if self._is_grouped else result

    def _in_group(self, result: Any) -> Any:
        """Inverts `_of_group`; None stays None."""
        return result[0] if self._is_grouped and result is not None else result

    def _values_of_collectives(self, results: Indexed, shards: Indexed) -> list[Any]:
        """Lists the results of all collectives; None for those that have yet to run."""
        values: list[Any] = [None] * self.split.size
        for i, result in results.items():
            values[i] = self._in_group(result)
        for i, shard in shards.items():
            values[i] = shard
        return values


def with_shardings(mesh: jax.sharding.Mesh, shapes: Any, specs: Any) -> Any:
    """Returns the shapes of arrays with shardings on a mesh.

    Args:
      mesh: the mesh.
      shapes: arrays or shapes.
      specs: their specs, a prefix of the tree.
    """

    def with_sharding(spec: jax.P, leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = mesh_lib.sharding(mesh, *spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(with_sharding, jax.tree.broadcast(specs, shapes), shapes)


def _is_per_replica(spec: jax.P) -> bool:
    return mesh_lib.REPLICA in mesh_axes.axes_of(spec)


def _replica_dim(spec: jax.P) -> int:
    """Returns the dimension along the replicas."""
    dims = [dim for dim, entry in enumerate(spec) if _is_per_replica(jax.P(entry))]
    return dims[0]
