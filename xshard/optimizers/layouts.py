"""The sharding of arrays over replicas, and the form in which all shards of an array are stored."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xshard import mesh
from xshard.optimizers import trees

# The first word in the names of the state arrays that hold rounding errors.
ERROR = "error"
# The largest array that 32-bit indices can address when it is flattened.
_LARGEST_FLAT = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sharding of one array into `count` equal shards.

    An array is sharded along a dimension that `count` divides. An array without such a dimension is flattened
    and padded with zeros to a multiple of `count`. All its stored dimensions but the last are then 1, so that
    rules which depend on the number of dimensions see the same number.

    Each replica holds the whole of a scalar, of an array with fewer than `count` elements, and of an array that
    would have to be flattened but has more than 2**31 - 1 - `count` elements.

    Attributes:
      path: the array's name, for messages.
      shape: the shape of the whole array.
      count: the number of shards.
      dim: the dimension of `stored_shape` that is sharded, or None.
      flat: whether the array is stored flattened.
      along: the other mesh axes that the dimensions of `shape` lie along.
      copies: the size of a leading dimension, for arrays that differ by slice; 0 if there is none.
      shards_param: whether each replica also holds only its shard of the parameter itself between steps.
    """

    path: str = dataclasses.field(compare=False)
    shape: tuple[int, ...]
    count: int
    dim: int | None
    flat: bool = False
    along: tuple[Any, ...] = ()
    copies: int = 0
    shards_param: bool = False

    @property
    def size(self) -> int:
        """The number of elements of the whole array."""
        return math.prod(self.shape)

    @property
    def free(self) -> list[bool]:
        """For each dimension of `shape`, whether it lies along no other mesh axis."""
        return [axis is None for axis in self.spec(axis_name=None)]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of all shards together, without the leading dimension of copies."""
        if not self.flat:
            return self.shape
        padded = math.ceil(self.size / self.count) * self.count
        return (*[1] * (len(self.shape) - 1), padded)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of one shard."""
        shape = list(self.stored_shape)
        if self.dim is not None:
            shape[self.dim] //= self.count
        return tuple(shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of one shard, with a leading dimension of size 1 if the array differs by slice."""
        return (1, *self.shard_shape) if self.copies else self.shard_shape

    def spec(
        self, axis_name: Any, slice_axis_name: str | None = None, *, manual: bool = False
    ) -> jax.P:
        """The mesh axes that the stored array lies along, starting with the dimension of copies.

        Args:
          axis_name: the axis of the replicas, or a tuple of axes.
          slice_axis_name: the axis of the slices.
          manual: whether to leave out the axes of `along`, as `jax.shard_map` over the replicas requires.
        """
        dims: list[Any] = [None] * len(self.shape)
        if not manual:
            dims[: len(self.along)] = self.along
        if self.dim is not None:
            dims[self.dim] = axis_name
        if self.copies:
            dims.insert(0, slice_axis_name)
        return jax.P(*dims)

    def store(self, x: Any) -> jax.Array:
        """Converts a whole array to its stored form, all shards together in `stored_shape`."""
        if not self.flat:
            return jnp.asarray(x)
        padded = jnp.pad(jnp.ravel(x), (0, self.stored_shape[-1] - self.size))
        return padded.reshape(self.stored_shape)

    def whole(self, stored: Any) -> jax.Array:
        """The inverse of `store`."""
        if not self.flat:
            return stored
        return jnp.ravel(stored)[: self.size].reshape(self.shape)

    def shard(self, x: Any, index: Any) -> jax.Array:
        """Shard `index` of a whole array. The shard of a parameter held in shards is returned as it is."""
        if self.dim is None or self.is_param_shard(x):
            return jnp.asarray(x)
        size = self.shard_shape[self.dim]
        return lax.dynamic_slice_in_dim(self.store(x), index * size, size, self.dim)

    def is_param_shard(self, x: Any) -> bool:
        """Returns whether an array is the shard of a parameter that is held in shards."""
        return self.shards_param and x.shape == self.shard_shape

    def without(self, dims: Sequence[int]) -> "Layout":
        """The layout of the array after a reduction over `dims`, which must not include the sharded dimension."""
        left = [dim for dim in range(len(self.shape)) if dim not in dims]
        along = tuple(self.along[dim] for dim in left if dim < len(self.along))
        shape = tuple(self.shape[dim] for dim in left)
        dim = None if self.dim is None else left.index(self.dim)
        return dataclasses.replace(self, shape=shape, dim=dim, along=along)

    def mask(self, shard: jax.Array, index: Any, filling: Any) -> jax.Array:
        """A shard with `filling` where it holds no element of the whole array."""
        if not self.flat or self.size == self.stored_shape[-1]:
            return shard
        # The padding is at the end, in the last shard or the last few.
        number = lax.broadcasted_iota(jnp.int32, shard.shape, shard.ndim - 1)
        number = number + jnp.int32(index * self.shard_shape[-1])
        return jnp.where(number < self.size, shard, jnp.full_like(shard, filling))


Layouts = Mapping[str, Layout]


def layout(path: str, shape: tuple[int, ...], count: int, spec: Sequence[Any] = ()) -> Layout:
    """Decides how to shard an array.

    Args:
      path: its name.
      shape: its shape.
      count: the number of shards.
      spec: the mesh axis that each dimension already lies along, or None. A dimension with an axis is not
        sharded again, and an array with such a dimension is not flattened.
    """
    whole = Layout(path, shape, count, None, along=tuple(spec))
    if not shape or whole.size < count:
        return whole
    dim = divisible(shape, count, whole.free)
    if dim is not None:
        return dataclasses.replace(whole, dim=dim)
    if not all(whole.free) or whole.size + count > _LARGEST_FLAT:
        return whole
    return Layout(path, shape, count, len(shape) - 1, flat=True)


def divisible(shape: tuple[int, ...], count: int, free: Sequence[bool]) -> int | None:
    """The free dimension to shard an array along; None if `count` divides none of them."""
    found = [dim for dim, size in enumerate(shape) if free[dim] and size % count == 0]
    good = [dim for dim in found if _fills_tiles(shape, dim, count)]
    return next(iter(good or found), None)


def _fills_tiles(shape: tuple[int, ...], dim: int, count: int) -> bool:
    """Returns whether a shard ends at a TPU memory tile of 8 rows of 128 elements; otherwise it is copied."""
    size = shape[dim] // count
    if dim == len(shape) - 1:
        return size % 128 == 0
    if dim == len(shape) - 2:
        return size % 8 == 0
    return True


def of_params(params: Any, count: int, rules: mesh.Rules = ()) -> dict[str, Layout]:
    """Decides how to shard the arrays of a tree, by their paths.

    Args:
      params: arrays or shapes; None leaves get no layout.
      count: the number of shards.
      rules: the sharding rules for other mesh axes.
    """
    layouts = {}
    for path, x in trees.present(params).items():
        layouts[path] = layout(path, tuple(x.shape), count, mesh.spec_of(path, rules))
    return layouts


def of_state(
    params: Layouts, state: Any, copies: int = 1, *, slots: bool = True
) -> dict[str, dict[str, Layout]]:
    """Returns how the state of rules is sharded: `{module: {name: layout}}`. State without an entry is whole.

    A slot is sharded like the parameter whose path ends the slot's name, if it has that parameter's shape.

    Args:
      params: the layouts of the parameters.
      state: the rules' state, or its shapes, in whole or in stored form.
      copies: the number of slices, each of which keeps its own rounding errors.
      slots: whether the update is sharded; if not, only rounding errors are.
    """
    layouts: dict[str, dict[str, Layout]] = {}
    for module, arrays in state.items():
        for name, x in arrays.items():
            layout = _of_slot(params, name, x.shape, copies, slots)
            if layout is not None:
                layouts.setdefault(module, {})[name] = layout
    return layouts


def _of_slot(
    params: Layouts, name: str, shape: tuple[int, ...], copies: int, slots: bool
) -> Layout | None:
    for path in trees.endings(name):
        layout = params.get(path)
        if layout is None:
            continue
        shapes = (layout.shape, layout.stored_shape)
        # A rounding error has a leading dimension of slices.
        is_of_slices = len(shape) == len(layout.shape) + 1
        if name == f"{ERROR}/{path}" and is_of_slices and shape[1:] in shapes:
            return dataclasses.replace(layout, copies=copies)
        if shape in shapes:
            return layout if slots and layout.dim is not None else None
    return None


class StateSharding:
    """The sharding of the state of rules with `shard_update=True`, for a custom training step.

    With several groups (`group_assignment`), a whole state has a leading dimension of groups, and a stored state
    a leading dimension of replicas. Each replica's step takes its own entry of that dimension.

    Attributes:
      specs: the mesh axes that each stored array lies along, a tree of `jax.P` with the state's structure.
    """

    def __init__(
        self,
        state: Any,
        params: Any,
        replicas: int,
        axis_name: str = "replica",
        *,
        group_assignment: Sequence[Sequence[int]] | None = None,
        slices: int = 1,
        slice_axis_name: str | None = None,
        sharding_rules: mesh.Rules = (),
    ):
        """Decides how each array is sharded.

        Args:
          state: the whole state of one group's rules, or its shapes, as `Optimizer.init` creates it.
          params: the parameters of one group, or their shapes.
          replicas: the size of the mapped axis of replicas.
          axis_name: the name of that axis.
          group_assignment: as for `CrossShardOptimizer`.
          slices: the size of the mapped axis of slices, if there is one.
          slice_axis_name: the name of that axis.
          sharding_rules: as for `CrossShardOptimizer`.
        """
        self._groups = group_assignment or ()
        count = replicas if group_assignment is None else len(group_assignment[0])
        self._layouts = of_state(of_params(params, count, sharding_rules), state, slices)

        def spec(layout: Layout | None, x: Any) -> jax.P:
            del x
            if group_assignment is not None:
                return jax.P(axis_name)
            if layout is None:
                return jax.P()
            return layout.spec(axis_name, slice_axis_name)

        self.specs = map_state(spec, self._layouts, state)

    def store(self, state: Any) -> Any:
        """Converts a whole state to the stored form that a step takes."""
        each = self._store_groups if self._groups else stored
        return map_state(each, self._layouts, state)

    def whole(self, state: Any) -> Any:
        """The inverse of `store`."""
        each = self._whole_groups if self._groups else whole
        return map_state(each, self._layouts, state)

    def _store_groups(self, layout: Layout | None, x: Any) -> jax.Array:
        """Stacks each replica's shard of an array that has one entry for each group."""
        shards: dict[int, Any] = {}
        for group, replicas in enumerate(self._groups):
            for index, replica in enumerate(replicas):
                shards[replica] = x[group] if layout is None else layout.shard(x[group], index)
        return jnp.stack([shards[replica] for replica in range(len(shards))])

    def _whole_groups(self, layout: Layout | None, x: Any) -> jax.Array:
        """The inverse of `_store_groups`."""
        groups = []
        for replicas in self._groups:
            shards = [x[replica] for replica in replicas]
            if layout is None or layout.dim is None:
                groups.append(shards[0])
            else:
                groups.append(layout.whole(jnp.concatenate(shards, layout.dim)))
        return jnp.stack(groups)


def stored(layout: Layout | None, x: Any) -> Any:
    """Converts a whole state array to its stored form, repeated for each slice where slices keep their own."""
    if layout is None:
        return x
    each = for_each_slice(layout, x)
    return jax.vmap(layout.store)(each) if layout.copies else layout.store(each)


def for_each_slice(layout: Layout, x: Any) -> Any:
    """A whole state array, repeated if it was created for one slice but each slice keeps its own."""
    if not layout.copies or len(x) == layout.copies:
        return x
    return jnp.repeat(x, layout.copies, axis=0)


def whole(layout: Layout | None, x: Any) -> Any:
    """The inverse of `stored`, except that an array of slices keeps one entry for each."""
    if layout is None:
        return x
    return jax.vmap(layout.whole)(x) if layout.copies else layout.whole(x)


def map_state(
    f: Callable[[Layout | None, Any], Any], layouts: Mapping[str, Layouts], state: Any
) -> Any:
    """Applies `f(layout, array)` to a Haiku state, given what `of_state` returns. An array may have no layout: None."""
    new: dict[str, dict[str, Any]] = {}
    for module, arrays in state.items():
        of_module = layouts.get(module, {})
        new[module] = {name: f(of_module.get(name), x) for name, x in arrays.items()}
    return new
