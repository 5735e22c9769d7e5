"""How arrays lie in shards on replicas, and what a run tells its rules of it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from xshard.base import mesh_axes
from xshard.optimizers import trees


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of one array as `count` equal shards.

    An array is sharded along a dimension that `count` divides. Each replica holds the
    whole of an array without such a dimension, and of one with fewer than `count`
    elements.

    Attributes:
      path: the array's name, for messages.
      shape: the shape of the whole array.
      count: the number of shards.
      dim: the dimension that is sharded, or None.
      along: the other mesh axes that the dimensions of `shape` lie along.
      shards_param: whether each replica also holds only its shard of the parameter
        itself between steps.
    """

    path: str = dataclasses.field(compare=False)
    shape: tuple[int, ...]
    count: int
    dim: int | None
    along: tuple[Any, ...] = ()
    shards_param: bool = False

    @property
    def size(self) -> int:
        """The number of elements of the whole array."""
        return math.prod(self.shape)

    @property
    def free(self) -> list[bool]:
        """For each dimension of `shape`, whether it lies along no other mesh axis."""
        free = [axis is None for axis in self.along]
        return free + [True] * (len(self.shape) - len(free))

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of one shard."""
        shape = list(self.shape)
        if self.dim is not None:
            shape[self.dim] //= self.count
        return tuple(shape)

    def spec(self, axis_name: Any, *, manual: bool = False) -> jax.P:
        """Returns the mesh axes that the array lies along.

        Args:
          axis_name: the axis of the replicas, or a tuple of axes.
          manual: whether to leave out the axes of `along`, as `jax.shard_map` over the
            replicas requires.
        """
        dims: list[Any] = [None] * len(self.shape)
        if not manual:
            dims[: len(self.along)] = self.along
        if self.dim is not None:
            dims[self.dim] = axis_name
        return jax.P(*dims)

    def is_param_shard(self, x: Any) -> bool:
        """Returns whether an array is a shard of a parameter that is held in shards."""
        return self.shards_param and x.shape == self.shard_shape


# By path.
Layouts = Mapping[str, Layout]


@dataclasses.dataclass(frozen=True)
class Placement:
    """What a run tells its rules, once, when it has made them: see `Optimizer.place`.

    A rule in a step of one's own has none.

    Attributes:
      sharding_rules: the experiment's rules for other mesh axes.
      scatter_steps: the sizes of the steps in which sums over the replicas are
        scattered, as along the axes of a torus; empty for a single step.
      gather_steps: the same, to gather shards.
      layouts: with parameters in shards, the layouts of all parameters, by path.
      is_logical: whether the replicas are logical ones, which share devices.
      update_key: in a training step, the random key from which updates draw, equal on
        all replicas of a group, so that they update alike.
    """

    sharding_rules: mesh_axes.ShardingRules = ()
    scatter_steps: Sequence[int] = ()
    gather_steps: Sequence[int] = ()
    layouts: Layouts = dataclasses.field(default_factory=dict)
    is_logical: bool = False
    update_key: jax.Array | None = None

    @property
    def held_in_shards(self) -> Layouts:
        """The layouts of parameters of which a replica holds its shard between steps.

        By path.
        """
        return {path: at for path, at in self.layouts.items() if at.shards_param}


def layout(
    path: str, shape: tuple[int, ...], count: int, spec: Sequence[Any] = ()
) -> Layout:
    """Decides how to shard an array.

    Args:
      path: its name.
      shape: its shape.
      count: the number of shards.
      spec: the mesh axis that each dimension already lies along, or None. A dimension
        with an axis is not sharded again.
    """
    whole = Layout(path, shape, count, dim=None, along=tuple(spec))
    if not shape or whole.size < count:
        return whole
    return dataclasses.replace(whole, dim=divisible(shape, count, whole.free))


def divisible(shape: tuple[int, ...], count: int, free: Sequence[bool]) -> int | None:
    """Returns the dimension to shard an array along, or None.

    This is the first whose shards need not be copied, or else the first at all.

    Args:
      shape: the array's shape.
      count: the number of shards, which must divide the dimension.
      free: for each dimension, whether it may be sharded.
    """
    found = [dim for dim, size in enumerate(shape) if free[dim] and size % count == 0]
    for dim in found:
        if _fills_tiles(shape, dim, count):
            return dim
    return found[0] if found else None


def _fills_tiles(shape: tuple[int, ...], dim: int, count: int) -> bool:
    """Returns whether shards along a dimension end at memory tiles.

    A TPU stores a float32 array in tiles of 8 rows of 128 elements, and copies a shard
    that ends within a tile. libtpu's programs for v5e, v5p and v6e have the same tiles
    for 16-bit types, whose rows lie in pairs, and 32 rows for 8-bit types, such as
    int8. 8 rows decide, since hardly any parameter has 8 bits.
    """
    size = shape[dim] // count
    if dim == len(shape) - 1:
        return size % 128 == 0
    if dim == len(shape) - 2:
        return size % 8 == 0
    return True


def of_params(
    params: Any, count: int, sharding_rules: mesh_axes.ShardingRules = ()
) -> dict[str, Layout]:
    """Decides how to shard the arrays of a tree.

    Args:
      params: arrays or shapes; None leaves get no layout.
      count: the number of shards.
      sharding_rules: the rules for other mesh axes.

    Returns:
      The layout of each array, by path.
    """
    layouts = {}
    for path, x in trees.present(params).items():
        spec = mesh_axes.spec_of(path, sharding_rules)
        layouts[path] = layout(path, tuple(x.shape), count, spec)
    return layouts


def of_slot(params: Layouts, name: str, shape: tuple[int, ...]) -> Layout | None:
    """Returns how a slot lies in shards, where the update is; None if it is whole.

    It lies as the parameter whose path ends its name, if it has that one's shape.

    Args:
      params: the layouts of the parameters.
      name: the name of an array of a rule's state.
      shape: its shape.
    """
    for path in trees.endings(name):
        layout = params.get(path)
        if layout is not None and shape == layout.shape:
            return layout if layout.dim is not None else None
    return None


class StateSharding:
    """The sharding of the state of rules with `shard_update=True`, for a custom
    training step.

    Attributes:
      specs: the mesh axes that each array lies along, a tree of `jax.P` with the
        state's structure, for the shardings of `jax.jit`.
    """

    def __init__(
        self,
        state: Any,
        params: Any,
        replicas: int,
        axis_name: str = "replica",
        *,
        sharding_rules: mesh_axes.ShardingRules = (),
    ):
        """Decides how each array is sharded.

        Args:
          state: the rules' state, or its shapes, as `Optimizer.init` creates it.
          params: the parameters, or their shapes.
          replicas: the size of the mapped axis of replicas.
          axis_name: the name of that axis.
          sharding_rules: as for `CrossShardOptimizer`.
        """
        param_layouts = of_params(params, replicas, sharding_rules)
        self.specs: dict[str, dict[str, jax.P]] = {}
        for module, arrays in state.items():
            self.specs[module] = {}
            for name, x in arrays.items():
                layout = of_slot(param_layouts, name, x.shape)
                spec = jax.P() if layout is None else layout.spec(axis_name)
                self.specs[module][name] = spec
