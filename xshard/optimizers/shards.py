"""Arrays cut into one part for each replica.

Source: Xu et al., "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training", 2020,
https://arxiv.org/abs/2004.13336.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xshard.optimizers import trees

# Pairs of an expression that is searched in paths and a spec, as `xshard.mesh.tree_shardings` takes them.
Rules = Sequence[tuple[str, Any]]
Layouts = Mapping[str, "Layout"]
_WITH_MASK = {"sum": 0, "max": -math.inf, "min": math.inf, "and": True, "or": False}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one array is cut into `count` equal parts.

    An array is cut along a dimension that `count` divides. One that has none is flattened and filled up
    with zeros to a multiple of `count`; its dimensions but the last are then 1, so that rules which go by
    the number of dimensions see no other. A scalar, and an array of less than `count` elements, is not cut:
    each replica has it whole.

    Attributes:
      path: the array's name, for messages.
      shape: of the whole array.
      count: the number of parts.
      dim: the dimension of `stored_shape` that is cut, or None.
      flat: whether the array is stored flattened.
      along: the mesh axes that the dimensions of `shape` lie along besides.
      copies: the size of a leading dimension, for arrays that differ by slice; 0: there is none.
    """

    path: str = dataclasses.field(compare=False)
    shape: tuple[int, ...]
    count: int
    dim: int | None
    flat: bool = False
    along: tuple[Any, ...] = ()
    copies: int = 0

    @property
    def size(self) -> int:
        """The number of elements of the whole array."""
        return math.prod(self.shape)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of all parts together, without the leading dimension of copies."""
        if not self.flat:
            return self.shape
        return (*(1 for _ in self.shape[1:]), -(-self.size // self.count) * self.count)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of one part."""
        shape = list(self.stored_shape)
        if self.dim is not None:
            shape[self.dim] //= self.count
        return tuple(shape)

    def spec(
        self, axis_name: str, slice_axis_name: str | None = None, *, manual: bool = False
    ) -> jax.P:
        """The mesh axes that the stored array lies along, that of copies first.

        Args:
          axis_name: the axis of the replicas.
          slice_axis_name: the axis of the slices.
          manual: without the axes that it lies along besides, as `jax.shard_map` wants it.
        """
        along = () if manual else self.along
        dims = [*along, *(None for _ in self.shape[len(along) :])]
        if self.dim is not None:
            dims[self.dim] = axis_name
        return jax.P(*([slice_axis_name] if self.copies else []), *dims)

    def store(self, x: Any) -> jax.Array:
        """All parts together, of `stored_shape`, of a whole array."""
        if not self.flat:
            return jnp.asarray(x)
        rows = jnp.ravel(x)
        return jnp.pad(rows, (0, self.stored_shape[-1] - self.size)).reshape(self.stored_shape)

    def whole(self, stored: Any) -> jax.Array:
        """The inverse of `store`."""
        return jnp.ravel(stored)[: self.size].reshape(self.shape) if self.flat else stored

    def part(self, x: Any, index: Any) -> jax.Array:
        """The part number `index` of a whole array."""
        if self.dim is None:
            return jnp.asarray(x)
        size = self.part_shape[self.dim]
        return lax.dynamic_slice_in_dim(self.store(x), index * size, size, self.dim)

    def mask(self, part: jax.Array, index: Any, filling: Any) -> jax.Array:
        """A part with `filling` where it holds no element of the whole array."""
        if not self.flat or self.size == self.stored_shape[-1]:
            return part
        number = lax.broadcasted_iota(jnp.int32, part.shape, part.ndim - 1)
        number = number + jnp.int32(index * self.part_shape[-1])
        return jnp.where(number < self.size, part, jnp.full_like(part, filling))


def layout(path: str, shape: tuple[int, ...], count: int, spec: Sequence[Any] = ()) -> Layout:
    """How to cut an array.

    Args:
      path: its name.
      shape: its shape.
      count: the number of parts.
      spec: the mesh axis that each dimension lies along already; such a dimension is not cut, nor is an
        array flattened that has one.
    """
    along = tuple(spec)
    free = [dim >= len(along) or along[dim] is None for dim in range(len(shape))]
    if not shape or math.prod(shape) < count:
        return Layout(path, shape, count, None, along=along)
    good = [dim for dim, size in enumerate(shape) if free[dim] and size % count == 0]
    if good:
        dim = next((dim for dim in good if _fills_tiles(shape, dim, count)), good[0])
        return Layout(path, shape, count, dim, along=along)
    if not all(free):
        return Layout(path, shape, count, None, along=along)
    return Layout(path, shape, count, len(shape) - 1, flat=True)


def _fills_tiles(shape: tuple[int, ...], dim: int, count: int) -> bool:
    """Whether a part ends where a tile of a TPU's memory ends, of 8 rows of 128; else it is copied."""
    tile = {len(shape) - 1: 128, len(shape) - 2: 8}.get(dim, 1)
    return shape[dim] // count % tile == 0


class Partition:
    """The parts of the leaves of a tree, one for each replica of a group, and what goes between them.

    Attributes:
      count: the number of parts.
      copies: the number of slices.
      shapes: the tree, its whole leaves' shapes and types.
      layouts: of each leaf, by path.
    """

    def __init__(
        self,
        params: Any,
        count: int,
        axis_name: str,
        groups: Sequence[Sequence[int]] | None = None,
        rules: Rules = (),
        copies: int = 1,
        scatter_steps: Sequence[int] = (),
        gather_steps: Sequence[int] = (),
    ):
        """Decides how each leaf is cut.

        Args:
          params: a tree of arrays or shapes.
          count: the number of replicas of a group.
          axis_name: the mapped axis that they are along.
          groups: the numbers of each group's replicas along it, if there are several.
          rules: what lies along other axes already.
          copies: the number of slices, in each of which the whole is cut alike.
          scatter_steps: sizes whose product is `count`, to scatter in so many steps.
          gather_steps: the same, to gather.
        """
        self.count = count
        self.copies = copies
        self.shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        self._axis: dict[str, Any] = {"axis_name": axis_name, "axis_index_groups": groups}
        in_steps = lambda sizes: [{**self._axis, "axis_index_groups": g} for g in _in_steps(sizes)]
        self._scatters = in_steps(scatter_steps) if scatter_steps else [self._axis]
        self._gathers = in_steps(gather_steps) if gather_steps else [self._axis]
        self.layouts: dict[str, Layout] = {}
        for path, leaf in trees.leaves_by_path(self.shapes).items():
            if leaf is None:
                continue
            spec = next((spec for pattern, spec in rules if re.search(pattern, path)), ())
            self.layouts[path] = layout(path, tuple(leaf.shape), count, tuple(spec))

    @property
    def index(self) -> Any:
        """The number of this replica's parts."""
        number = lax.axis_index(self._axis["axis_name"])
        groups = self._axis["axis_index_groups"]
        if groups is None:
            return number
        place = {replica: i for group in groups for i, replica in enumerate(group)}
        return jnp.asarray([place[i] for i in range(len(place))])[number]

    def map(self, f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
        """Applies `f(layout, leaf, ...)` to the leaves; what is None stays."""
        is_leaf = lambda x: x is None
        return jax.tree_util.tree_map_with_path(
            lambda path, x, *xs: (
                None if x is None else f(self.layouts[trees.path_name(path)], x, *xs)
            ),
            tree,
            *rest,
            is_leaf=is_leaf,
        )

    def whole_shapes(self, tree: Any) -> Any:
        """The shapes of the whole arrays of a tree of parts."""
        return self.map(lambda layout, x: jax.ShapeDtypeStruct(layout.shape, x.dtype), tree)

    def parts(self, tree: Any) -> Any:
        """This replica's part of each leaf of a tree that all have whole."""
        return self.map(lambda layout, x: layout.part(x, self.index), tree)

    def scatter(self, layout: Layout, x: jax.Array, dtype: Any = None) -> jax.Array:
        """This replica's part of the sum over the group; a leaf that is not cut, summed.

        Args:
          layout: the leaf's.
          x: the whole array, each replica's own.
          dtype: the type to sum in, instead of x's; the result has x's.
        """
        if self.count == 1:
            return x
        if layout.dim is None:
            return summed(functools.partial(lax.psum, **self._axis), x, dtype)
        x = layout.store(x)
        for step in self._scatters:
            scatter = functools.partial(
                lax.psum_scatter, scatter_dimension=layout.dim, tiled=True, **step
            )
            x = summed(scatter, x, dtype)
        return x

    def gather(self, layout: Layout, part: jax.Array, dtype: Any = None) -> jax.Array:
        """The whole of what each replica has a part of; sent in a type, if one is given."""
        if self.count == 1 or layout.dim is None:
            return part
        x = part.astype(dtype or part.dtype)
        for step in reversed(self._gathers):
            x = lax.all_gather(x, axis=layout.dim, tiled=True, **step)
        return layout.whole(x).astype(part.dtype)

    def reduce(self, kind: str, layout: Layout, part: jax.Array) -> jax.Array:
        """A reduction, such as 'sum', of all elements of a whole array, a scalar on all replicas."""
        filling = _WITH_MASK[kind]
        if part.dtype != jnp.bool_ and not jnp.issubdtype(part.dtype, jnp.inexact) and filling:
            bounds = jnp.iinfo(part.dtype)
            filling = bounds.min if kind == "max" else bounds.max
        local = getattr(jnp, {"and": "all", "or": "any"}.get(kind, kind))(
            layout.mask(part, self.index, filling)
        )
        if layout.dim is None or self.count == 1:
            return local
        return self._across(kind, local)

    def _across(self, kind: str, x: jax.Array) -> jax.Array:
        if kind in ("and", "or"):
            hits = lax.psum(jnp.asarray(x if kind == "or" else ~x, jnp.int32), **self._axis)
            return (hits > 0) if kind == "or" else (hits == 0)
        collective = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}[kind]
        return collective(x, **self._axis)

    def ballots(self, grads: Any) -> Any:
        """For each gradient the same scalar on all replicas: 0, or NaN if an element of any is not finite."""
        bad = [~jnp.all(jnp.isfinite(grad)) for grad in jax.tree.leaves(grads)]
        any_bad = jnp.any(jnp.stack(bad))
        any_bad = self._across("or", any_bad) if self.count > 1 else any_bad
        ballot = jnp.where(any_bad, jnp.nan, 0.0)
        return jax.tree.map(lambda _: ballot, grads)


class Rehearsal(Partition):
    """A partition that needs no mapped axis: to see on shapes alone whether a rule can be cut."""

    def __init__(self, params: Any):
        """Cuts each leaf in two, if it has two elements."""
        super().__init__(params, 2, "")

    @property
    def index(self) -> int:
        """The first part."""
        return 0

    def _across(self, kind: str, x: jax.Array) -> jax.Array:
        del kind
        return x


def _in_steps(sizes: Sequence[int]) -> list[list[list[int]]]:
    """The groups of each step: replicas whose places differ in one digit, where a place has these digits."""
    places = np.arange(math.prod(sizes)).reshape(sizes)
    return [np.moveaxis(places, i, -1).reshape(-1, size).tolist() for i, size in enumerate(sizes)]


def map_state(
    f: Callable[[Layout | None, Any], Any], layouts: Mapping[str, Layouts], state: Any
) -> Any:
    """Applies `f(layout, array)` to a Haiku state; the layout is None where none is given.

    Args:
      f: the function.
      layouts: what `Optimizer.state_layouts` returns.
      state: the state of the rules.
    """
    return {
        module: {name: f(layouts.get(module, {}).get(name), x) for name, x in arrays.items()}
        for module, arrays in state.items()
    }


def summed(
    collective: Callable[[jax.Array], jax.Array], x: jax.Array, dtype: Any = None
) -> jax.Array:
    """A sum over devices in a type, or in x's own; the result has x's type.

    Args:
      collective: the sum.
      x: what to sum.
      dtype: the type.
    """
    if dtype is None or jnp.dtype(dtype) == x.dtype:
        return collective(x)
    # XLA's CPU compiler sums half precision in float32, and aborts the process over such a sum where
    # shard_map leaves a mesh axis to it.
    wide = lambda x: collective(x.astype(jnp.float32)).astype(dtype)
    total = lax.platform_dependent(x.astype(dtype), cpu=wide, default=collective)
    return total.astype(x.dtype)
