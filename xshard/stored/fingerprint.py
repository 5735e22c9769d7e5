"""Fingerprints of a run's state: integer sums that depend neither on the order of
summation nor on the layout.

Each 32-bit word counts once, however many copies exist. So equal states have equal
fingerprints on any number of devices, whole or in shards, and in a checkpoint. A change
of a single word always changes the fingerprint. Any other change goes unnoticed with a
probability of 2**-64.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard.learners.state import is_learner
from xshard.optimizers import trees, varying
from xshard.stored import hashing

# The kinds of arrays. Each kind has one fingerprint, over all learners.
PARAMS, SLOTS, NET_STATE, OTHER = KINDS = ("params", "slots", "net_state", "other")
# The prefix of the names under which fingerprints are logged.
PREFIX = "fingerprint/"
# Arrays of at most this many words are concatenated and mixed together: XLA takes 15 ms
# to compile the mixing of one array of any size.
_SMALL = 1024


class Cell(NamedTuple):
    """Arrays that share a fingerprint: arrays of one kind that differ along the same
    replica axes.

    Attributes:
      name: one of `KINDS`; or the array's path, if each array has its own fingerprint.
      own: the replica axes along which the values differ; along the others, replicas
        hold copies.
    """

    name: str
    own: tuple[str, ...]


class Fingerprints(NamedTuple):
    """The fingerprints of a state. With several groups, each array has a leading
    dimension of groups.

    Attributes:
      values: the fingerprint, two uint32, of each kind that has arrays; or of each
        array, by its path.
      diverged: whether replicas of a group hold different copies of a value that must be
        equal; a scalar.
      table: the sums of each replica, uint32 of shape (slices, replicas, cells, 2), in
        the order of `cells`.
    """

    values: dict[str, Any]
    diverged: Any
    table: Any

    def logged(self) -> dict[str, Any]:
        """Returns the values by their names in logged rows."""
        return {PREFIX + kind: value for kind, value in self.values.items()}


class _Place(NamedTuple):
    """The layout of an array, without its dimension of groups.

    Attributes:
      cell: the cell to whose fingerprint the array contributes.
      path: the array's path.
      axes: for each dimension, the manual mesh axes along which it is sharded.
      sizes: for each dimension, the size of the whole array.
    """

    cell: Cell
    path: str
    axes: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]


def cells(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    state: state_lib.TrainState,
    *,
    each: bool = False,
) -> list[Cell]:
    """Returns the cells of a state. Only the state's shapes are used. The other
    arguments are those of `program`.
    """
    return _cells(_places(experiment, mesh, state, each))


def program(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    *,
    each: bool = False,
    every_steps: int = 1,
) -> Callable[[state_lib.TrainState], Fingerprints]:
    """Returns a function from a state, as `xshard.init` returns it, to its
    fingerprints. The function is not jitted.

    Args:
      experiment: the experiment.
      mesh: the run's mesh.
      each: whether each array has its own fingerprint, by its path, instead of one for
        each kind of arrays.
      every_steps: for which steps to compute them, as for `is_due`.
    """
    grouped = mesh_lib.num_groups(mesh) > 1

    def fingerprints(state: state_lib.TrainState) -> Fingerprints:
        def local(state_of_replica: state_lib.TrainState) -> Fingerprints:
            due = is_due(state_of_replica.step, every_steps)
            of_group = of_replica(
                experiment, mesh, state, state_of_replica, due, each=each
            )
            return jax.tree.map(lambda x: x[None], of_group) if grouped else of_group

        specs = state_lib.specs(experiment, mesh, state, manual=True)
        per_group = jax.P(*mesh_lib.group_axes(mesh))
        return mesh_lib.on_replicas(
            local, mesh, in_specs=(specs,), out_specs=per_group
        )(state)

    return fingerprints


def is_due(step: Any, every_steps: int) -> Any:
    """Returns whether to compute the fingerprints of the state after a number of steps,
    before the next one.
    """
    return every_steps == 1 or (step + 1) % every_steps == 0


def of_replica(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    state: state_lib.TrainState,
    local: state_lib.TrainState,
    is_due: Any = True,
    *,
    each: bool = False,
) -> Fingerprints:
    """Computes the fingerprints of a state, equal on every replica. Call it in a
    `jax.shard_map` over the replicas.

    Replicas exchange their sums as float32, so that XLA can combine the all-reduce with
    others of that type.

    Args:
      experiment: the experiment.
      mesh: the run's mesh.
      state: the shapes of the state.
      local: the replica's part of the state.
      is_due: whether to compute the fingerprints, a scalar that may be traced. If it is
        False, all of them are 0.
      each: as for `program`.
    """
    places = _places(experiment, mesh, state, each)
    leaves = jax.tree.leaves(local)
    if mesh_lib.num_groups(mesh) > 1:
        shared = len(jax.tree.leaves((state.step, state.rng)))
        leaves = [x if i < shared else x[0] for i, x in enumerate(leaves)]
    cells = _cells(places)
    # Computed outside the branch below: logical replicas know their index only here.
    along = {axes for place in places for axes in place.axes if axes}
    shards = {axes: lax.axis_index(axes).astype(jnp.uint32) for axes in sorted(along)}

    def of_own() -> jax.Array:
        sums = {cell: jnp.zeros(2, jnp.uint32) for cell in cells}
        small = collections.defaultdict(list)
        for place, x in zip(places, leaves, strict=True):
            words = hashing.words(x, jnp)
            if words.size <= _SMALL and not any(place.axes):
                small[place.cell].append((place.path, words.reshape(-1)))
            else:
                sums[place.cell] += _of_array(place, words, shards)
        for cell, arrays in small.items():
            sums[cell] += _of_small(arrays)
        return jnp.stack(list(sums.values()))

    if is_due is True:
        own = of_own()
    else:
        own = lax.cond(is_due, of_own, lambda: jnp.zeros((len(cells), 2), jnp.uint32))
    table = _exchange(mesh, own)
    values, diverged = _combine(cells, table)
    return Fingerprints(values, diverged, table)


def _cells(places: Sequence[_Place]) -> list[Cell]:
    return sorted({place.cell for place in places})


def _places(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    state: state_lib.TrainState,
    each: bool,
) -> list[_Place]:
    """Returns the place of each leaf of a state."""
    groups = mesh_lib.group_axes(mesh)
    specs = jax.tree.leaves(state_lib.specs(experiment, mesh, state, manual=True))
    kinds = jax.tree.leaves(jax.tree.broadcast(_kinds(state), state))
    places = []
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for (path, leaf), spec, kind in zip(leaves, specs, kinds, strict=True):
        name = trees.path_name(path)
        skip = len(groups)
        if name in ("step", "rng"):
            skip = 0
        sizes = list(leaf.shape[skip:])
        entries = [*spec[skip:], *[None] * len(sizes)][: len(sizes)]
        axes = tuple(tuple(mesh_lib.axes_of([entry])) for entry in entries)
        own = tuple(
            axis for axis in mesh_lib.REPLICAS if axis in varying.axes_of_spec(spec)
        )
        places.append(
            _Place(Cell(name if each else kind, own), name, axes, tuple(sizes))
        )
    return places


def _kinds(state: state_lib.TrainState) -> state_lib.TrainState:
    """Returns a prefix of the state's tree with the kind of each leaf, or of all leaves
    below a node.
    """

    def of(x: Any) -> Any:
        if not is_learner(x):
            return OTHER
        return x.replace(
            params=PARAMS, net_state=NET_STATE, opt_state=SLOTS, global_step=OTHER
        )

    inner = jax.tree.map(of, state.experiment, is_leaf=is_learner)
    return state_lib.TrainState(OTHER, inner, OTHER)


def _of_small(arrays: Sequence[tuple[str, jax.Array]]) -> jax.Array:
    """Computes the sums over small whole arrays, given as pairs of path and words."""
    # The keys depend on shapes and paths alone, so NumPy computes them once, as
    # constants of the program.
    numbers = [(np.arange(words.size, dtype=np.uint32), path) for path, words in arrays]
    keys = np.concatenate([hashing.keys(number, path, np) for number, path in numbers])
    return _sums(jnp.concatenate([words for _, words in arrays]), jnp.asarray(keys))


def _of_array(
    place: _Place, words: jax.Array, shards: Mapping[Any, jax.Array]
) -> jax.Array:
    """Computes the sums over a replica's part of an array, given as words.

    Args:
      place: the array's place.
      words: the words of the replica's part.
      shards: for each tuple of mesh axes, the index of the replica's shard along them.
    """
    # An element of several words has extra trailing dimensions, which number its words.
    sizes = (*place.sizes, *words.shape[len(place.sizes) :])
    number = jnp.zeros(words.shape, jnp.uint32)
    for dim, size in enumerate(sizes):
        here = lax.broadcasted_iota(jnp.uint32, words.shape, dim)
        if dim < len(place.axes) and place.axes[dim]:
            here = here + shards[place.axes[dim]] * jnp.uint32(words.shape[dim])
        number = number * jnp.uint32(size) + here
    return _sums(words, hashing.keys(number, place.path, jnp))


def _sums(words: jax.Array, keys: jax.Array) -> jax.Array:
    """Mixes words with keys, and sums the two results over all words."""
    lanes: Any = hashing.mixed(words, keys, jnp)
    # Both sums are computed in one pass, because reading the words is limited by memory
    # bandwidth.
    zeros = (jnp.uint32(0), jnp.uint32(0))
    both = lambda x, y: (x[0] + y[0], x[1] + y[1])
    return jnp.stack(lax.reduce(lanes, zeros, both, tuple(range(words.ndim))))


def _exchange(mesh: jax.sharding.Mesh, own: jax.Array) -> jax.Array:
    """Gathers the sums of all replicas of a group on each of them; of shape (slices,
    replicas, cells, 2).
    """
    # A float32 holds 16 bits exactly, and adding zeros keeps them exact; 32 bits would
    # be rounded.
    halves = jnp.stack([own & jnp.uint32(0xFFFF), own >> 16]).astype(jnp.float32)
    slots = jnp.zeros((mesh_lib.num_replicas(mesh), *halves.shape), jnp.float32)
    slots = slots.at[lax.axis_index(mesh_lib.REPLICAS)].set(halves)
    low, high = jnp.moveaxis(
        lax.psum(slots, mesh_lib.REPLICAS).astype(jnp.uint32), 1, 0
    )
    shape = mesh.shape[mesh_lib.SLICE], mesh.shape[mesh_lib.REPLICA]
    return (low | high << 16).reshape(*shape, *own.shape)


def _combine(
    cells: Sequence[Cell], table: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Computes the fingerprint of each cell name from the table, and whether copies
    differ between replicas.
    """
    values: dict[str, jax.Array] = {}
    diverged = jnp.asarray(False)
    for index, cell in enumerate(cells):
        copies = table[:, :, index]
        # Along the axes of copies, only the first replica's sums count.
        once = tuple(
            slice(None) if axis in cell.own else slice(1) for axis in mesh_lib.REPLICAS
        )
        diverged |= jnp.any(copies != copies[once])
        value = jnp.sum(copies[once].reshape(-1, 2), axis=0, dtype=jnp.uint32)
        values[cell.name] = values.get(cell.name, jnp.zeros(2, jnp.uint32)) + value
    return values, diverged
