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
from xshard.base import hashing, mesh_axes
from xshard.learners.state import is_learner
from xshard.optimizers import trees, varying
from xshard.training import state as state_lib

# The kinds of arrays. Each kind has one fingerprint, over all learners.
PARAMS = "params"
SLOTS = "slots"
NET_STATE = "net_state"
OTHER = "other"
KINDS = (PARAMS, SLOTS, NET_STATE, OTHER)

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
      differing_axes: the replica axes along which the values differ; along the others,
        replicas hold copies.
    """

    name: str
    differing_axes: tuple[str, ...]


class Fingerprints(NamedTuple):
    """The fingerprints of a state. With several groups, each array has a leading
    dimension of groups.

    Attributes:
      values: the fingerprint, two uint32, of each kind that has arrays; or of each
        array, by its path.
      diverged: whether replicas of a group hold different copies of a value that must
        be equal; a scalar.
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
    """How an array lies, without its dimension of groups.

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
    """Returns the cells of a state, of which only the shapes are used.

    The other arguments are those of `program`.
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
        state = state_lib.on_devices(state)
        specs = state_lib.specs(experiment, mesh, state)

        def on_replica(local_state: state_lib.TrainState) -> Fingerprints:
            due = is_due(local_state.step, every_steps)
            of_group = of_replica(experiment, mesh, state, local_state, due, each=each)
            if not grouped:
                return of_group
            return jax.tree.map(lambda x: x[None], of_group)

        on_all = mesh_lib.on_replicas(
            on_replica,
            mesh,
            in_specs=(state_lib.on_replica(specs),),
            out_specs=jax.P(*mesh_lib.group_axes(mesh)),
        )
        return on_all(state)

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
    local_state: state_lib.TrainState,
    is_due: Any = True,
    *,
    each: bool = False,
) -> Fingerprints:
    """Computes the fingerprints of a state, equal on every replica.

    Call it in a `jax.shard_map` over the replicas. They send their sums as float32, so
    that XLA can combine the all-reduce with others of that type.

    Args:
      experiment: the experiment.
      mesh: the run's mesh.
      state: the shapes of the state.
      local_state: the replica's part of the state.
      is_due: whether to compute the fingerprints, a scalar that may be traced. If it is
        False, all of them are 0.
      each: as for `program`.
    """
    places = _places(experiment, mesh, state, each)
    cells = _cells(places)
    leaves = jax.tree.leaves(local_state)
    if mesh_lib.num_groups(mesh) > 1:
        # The step and the key, which come first, are the same for all groups.
        shared = len(jax.tree.leaves((state.step, state.rng)))
        leaves = leaves[:shared] + [x[0] for x in leaves[shared:]]
    # Computed outside the branch below: logical replicas know their index only here.
    shard_indices = {}
    for axes in sorted({axes for place in places for axes in place.axes if axes}):
        shard_indices[axes] = lax.axis_index(axes).astype(jnp.uint32)

    def local_sums() -> jax.Array:
        sums = {cell: jnp.zeros(2, jnp.uint32) for cell in cells}
        small = collections.defaultdict(list)
        for place, x in zip(places, leaves, strict=True):
            words = hashing.words(x, jnp)
            if words.size <= _SMALL and not any(place.axes):
                small[place.cell].append((place.path, words.reshape(-1)))
            else:
                sums[place.cell] += _of_array(place, words, shard_indices)
        for cell, arrays in small.items():
            sums[cell] += _of_small(arrays)
        return jnp.stack(list(sums.values()))

    if is_due is True:
        local = local_sums()
    else:
        zeros = lambda: jnp.zeros((len(cells), 2), jnp.uint32)
        local = lax.cond(is_due, local_sums, zeros)
    table = _gather(mesh, local)
    values, diverged = _combine(cells, table)
    return Fingerprints(values=values, diverged=diverged, table=table)


def _cells(places: Sequence[_Place]) -> list[Cell]:
    return sorted({place.cell for place in places})


def _places(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    state: state_lib.TrainState,
    each: bool,
) -> list[_Place]:
    """Returns the place of each leaf of a state."""
    state_specs = state_lib.on_replica(state_lib.specs(experiment, mesh, state))
    specs = jax.tree.leaves(state_specs)
    kinds = jax.tree.leaves(jax.tree.broadcast(_kinds(state), state))
    places = []
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for (path, leaf), spec, kind in zip(leaves, specs, kinds, strict=True):
        name = trees.path_name(path)
        num_group_dims = len(mesh_lib.group_axes(mesh))
        if name in ("step", "rng"):
            num_group_dims = 0
        sizes = leaf.shape[num_group_dims:]
        # A spec may leave out the last dimensions.
        axes: list[tuple[str, ...]] = [()] * len(sizes)
        for dim, entry in enumerate(spec[num_group_dims:]):
            axes[dim] = tuple(mesh_axes.axes_of([entry]))
        varying_axes = varying.axes_of_spec(spec)
        cell = Cell(
            name=name if each else kind,
            differing_axes=tuple(
                axis for axis in mesh_lib.REPLICAS if axis in varying_axes
            ),
        )
        places.append(
            _Place(cell=cell, path=name, axes=tuple(axes), sizes=tuple(sizes))
        )
    return places


def _kinds(state: state_lib.TrainState) -> state_lib.TrainState:
    """Returns a prefix of the state's tree with the kind of each leaf, or of all leaves
    below a node.
    """

    def kind_of(x: Any) -> Any:
        if not is_learner(x):
            return OTHER
        return x.replace(
            params=PARAMS,
            net_state=NET_STATE,
            opt_state=SLOTS,
            global_step=OTHER,
            gradient_noise=OTHER,
        )

    experiment = jax.tree.map(kind_of, state.experiment, is_leaf=is_learner)
    return state_lib.TrainState(step=OTHER, experiment=experiment, rng=OTHER)


def _of_small(arrays: Sequence[tuple[str, jax.Array]]) -> jax.Array:
    """Computes the sums over small whole arrays, given as pairs of path and words."""
    # The keys depend on shapes and paths alone, so NumPy computes them once, as
    # constants of the program.
    keys = []
    for path, words in arrays:
        positions = np.arange(words.size, dtype=np.uint32)
        keys.append(hashing.keys(positions, path, np))
    words = jnp.concatenate([words for _, words in arrays])
    return _sums(words, jnp.asarray(np.concatenate(keys)))


def _of_array(
    place: _Place, words: jax.Array, shard_indices: Mapping[Any, jax.Array]
) -> jax.Array:
    """Computes the sums over a replica's part of an array, given as words.

    Args:
      place: the array's place.
      words: the words of the replica's part.
      shard_indices: for each tuple of mesh axes, the index of the replica's shard along
        them.
    """
    # An element of several words has extra trailing dimensions, which number its words.
    sizes = (*place.sizes, *words.shape[len(place.sizes) :])
    positions = jnp.zeros(words.shape, jnp.uint32)
    for dim, size in enumerate(sizes):
        index = lax.broadcasted_iota(jnp.uint32, words.shape, dim)
        if dim < len(place.axes) and place.axes[dim]:
            shard_index = shard_indices[place.axes[dim]]
            index = index + shard_index * jnp.uint32(words.shape[dim])
        positions = positions * jnp.uint32(size) + index
    return _sums(words, hashing.keys(positions, place.path, jnp))


def _sums(words: jax.Array, keys: jax.Array) -> jax.Array:
    """Mixes words with keys, and sums the two results over all words."""
    lanes: Any = hashing.mixed(words, keys, jnp)
    # Both sums are computed in one pass, because reading the words is limited by memory
    # bandwidth.
    zeros = (jnp.uint32(0), jnp.uint32(0))
    add_both = lambda x, y: (x[0] + y[0], x[1] + y[1])
    return jnp.stack(lax.reduce(lanes, zeros, add_both, tuple(range(words.ndim))))


def _gather(mesh: jax.sharding.Mesh, local: jax.Array) -> jax.Array:
    """Gathers the sums of all replicas of a group on each of them.

    Args:
      mesh: the run's mesh.
      local: the replica's own sums, of shape (cells, 2).

    Returns:
      The sums, of shape (slices, replicas, cells, 2).
    """
    # A float32 holds 16 bits exactly, and adding zeros keeps them exact; 32 bits would
    # be rounded.
    halves = jnp.stack([local & jnp.uint32(0xFFFF), local >> 16]).astype(jnp.float32)
    rows = jnp.zeros((mesh_lib.num_replicas(mesh), *halves.shape), jnp.float32)
    rows = rows.at[lax.axis_index(mesh_lib.REPLICAS)].set(halves)
    all_halves = lax.psum(rows, mesh_lib.REPLICAS).astype(jnp.uint32)
    low, high = jnp.moveaxis(all_halves, 1, 0)
    slices = mesh.shape[mesh_lib.SLICE]
    replicas = mesh.shape[mesh_lib.REPLICA]
    return (low | high << 16).reshape(slices, replicas, *local.shape)


def _combine(
    cells: Sequence[Cell], table: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns the fingerprint of each cell name, and whether copies differ.

    Args:
      cells: the cells.
      table: the sums of all replicas, as `_gather` returns them.
    """
    values: dict[str, jax.Array] = {}
    diverged = jnp.asarray(False)
    for index, cell in enumerate(cells):
        sums = table[:, :, index]
        # Along the axes of copies, only the first replica's sums count.
        counted = tuple(
            slice(None) if axis in cell.differing_axes else slice(1)
            for axis in mesh_lib.REPLICAS
        )
        diverged |= jnp.any(sums != sums[counted])
        value = jnp.sum(sums[counted].reshape(-1, 2), axis=0, dtype=jnp.uint32)
        values[cell.name] = values.get(cell.name, jnp.zeros(2, jnp.uint32)) + value
    return values, diverged
