"""The shards of arrays that replicas hold, and what goes between them.

Source: Xu et al., "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training", 2020,
https://arxiv.org/abs/2004.13336.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xshard import mesh
from xshard.optimizers import layouts as layouts_lib
from xshard.optimizers import trees

# The types to sum in, or to send, that stand for an array's own.
_AS_IT_IS = (None, "float32")
_REDUCTIONS: dict[str, Callable[[Any], jax.Array]] = {
    "sum": jnp.sum,
    "max": jnp.max,
    "min": jnp.min,
    "and": jnp.all,
    "or": jnp.any,
}


class Partition:
    """The shards of the leaves of a tree, one for each replica of a group, and what goes between them.

    Attributes:
      count: the number of shards.
      copies: the number of slices.
      layouts: of each leaf, by path.
    """

    def __init__(
        self,
        params: Any,
        count: int,
        axis_name: str,
        groups: Sequence[Sequence[int]] | None = None,
        rules: mesh.Rules = (),
        copies: int = 1,
        scatter_steps: Sequence[int] = (),
        gather_steps: Sequence[int] = (),
        layouts: layouts_lib.Layouts | None = None,
    ):
        """Decides how each leaf is sharded.

        Args:
          params: a tree of arrays or shapes.
          count: the number of replicas of a group.
          axis_name: the mapped axis that they are along.
          groups: the numbers of each group's replicas along it, if there are several.
          rules: what lies along other axes already.
          copies: the number of slices, in each of which the whole is sharded alike.
          scatter_steps: sizes whose product is `count`, to scatter in so many steps.
          gather_steps: the same, to gather.
          layouts: how each leaf is sharded, if that is decided.
        """
        self.count = count
        self.copies = copies
        self._axis: dict[str, Any] = {"axis_name": axis_name, "axis_index_groups": groups}
        self._scatters = self._in_steps(scatter_steps)
        self._gathers = self._in_steps(gather_steps)
        self.layouts = layouts or layouts_lib.of_params(params, count, rules)

    @functools.cached_property
    def index(self) -> Any:
        """The number of this replica's shards, in the one trace that a partition is made for."""
        number = lax.axis_index(self._axis["axis_name"])
        groups = self._axis["axis_index_groups"]
        if groups is None:
            return number
        places = np.empty(len(groups) * self.count, np.int32)
        for group in groups:
            places[list(group)] = np.arange(self.count, dtype=np.int32)
        return jnp.asarray(places)[number]

    @property
    def by_layers(self) -> bool:
        """Whether replicas can exchange shards for whole layers. Logical ones, which no mesh maps, know gathers alone."""
        return self._axis["axis_name"] in jax.sharding.get_abstract_mesh().manual_axes

    def _in_steps(self, sizes: Sequence[int]) -> list[dict[str, Any]]:
        """The arguments of the collective of each step: replicas whose places differ in one digit of these."""
        if not sizes and isinstance(sizes, Sequence):
            return [self._axis]
        if self._axis["axis_index_groups"] or not _factorize(sizes, self.count):
            raise ValueError(
                "scatter_steps and gather_steps must be sizes whose product is the number of replicas, "
                f"{self.count}, and none where there is a group_assignment; received {sizes!r}."
            )
        return [{**self._axis, "axis_index_groups": groups} for groups in mesh.step_groups(sizes)]

    def map(self, f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
        """Applies `f(layout, leaf, ...)` to the leaves; what is None stays."""

        def with_layout(path: Any, x: Any, *more: Any) -> Any:
            if x is None:
                return None
            return f(self.layouts[trees.path_name(path)], x, *more)

        is_none = lambda x: x is None
        return jax.tree_util.tree_map_with_path(with_layout, tree, *rest, is_leaf=is_none)

    def own(self, tree: Any) -> Any:
        """This replica's shard of each leaf of a tree that all have whole, but for what they hold in shards."""
        return self.map(lambda layout, x: layout.shard(x, self.index), tree)

    def state_layouts(self, state: Any) -> dict[str, dict[str, layouts_lib.Layout]]:
        """Returns how the state of rules is sharded: `{module: {name: layout}}`; see `layouts.of_state`."""
        return layouts_lib.of_state(self.layouts, state, self.copies)

    def scatter(self, layout: layouts_lib.Layout, x: jax.Array, dtype: Any = None) -> jax.Array:
        """This replica's shard of the sum over the group; a leaf that is not sharded, summed.

        Args:
          layout: the leaf's.
          x: the whole array, each replica's own; the gradient of what is held in shards is summed already.
          dtype: the type to sum in, instead of x's; the result has x's.
        """
        if self.count == 1 or layout.is_held(x):
            return x
        if layout.dim is None:
            return summed(functools.partial(lax.psum, **self._axis), x, dtype)
        x = layout.store(x)
        for step in self._scatters:
            arguments = {"scatter_dimension": layout.dim, "tiled": True, **step}
            collective = functools.partial(lax.psum_scatter, **arguments)
            scatter = functools.partial(summed, collective, dtype=dtype)
            x = _in_place(scatter, layout)(x)
        return x

    def gather(self, layout: layouts_lib.Layout, shard: jax.Array, dtype: Any = None) -> jax.Array:
        """The whole of what each replica has a shard of; sent in a type, if one is given."""
        if self.count == 1 or layout.dim is None:
            return shard
        x = shard
        if dtype not in _AS_IT_IS:
            x = shard.astype(dtype)
        for step in reversed(self._gathers):
            gather = functools.partial(lax.all_gather, axis=layout.dim, tiled=True, **step)
            x = _in_place(gather, layout)(x)
        return layout.whole(x).astype(shard.dtype)

    def to_layers(self, layout: layouts_lib.Layout, shard: jax.Array) -> jax.Array:
        """This replica's layers of an array, whole, of what each has a shard of; padded to as many on each."""
        if layout.dim == 0:
            return shard
        missing = -layout.shape[0] % self.count
        x = jnp.pad(shard, [(0, missing), *[(0, 0)] * (shard.ndim - 1)])
        return self._exchange(layout, x, split_axis=0, concat_axis=layout.dim)

    def from_layers(self, layout: layouts_lib.Layout, layers: jax.Array) -> jax.Array:
        """The inverse of `to_layers`."""
        if layout.dim == 0:
            return layers
        x = self._exchange(layout, layers, split_axis=layout.dim, concat_axis=0)
        return x[: layout.shape[0]]

    def _exchange(self, layout: layouts_lib.Layout, x: jax.Array, **ends: Any) -> jax.Array:
        exchange = functools.partial(lax.all_to_all, tiled=True, **ends, **self._axis)
        return _in_place(exchange, layout)(x)

    def all_layers(self, layers: jax.Array, count: int) -> jax.Array:
        """The whole array of so many layers, of those that each replica has."""
        return lax.all_gather(layers, axis=0, tiled=True, **self._axis)[:count]

    def reduce_own(self, kind: str, layout: layouts_lib.Layout, shard: jax.Array) -> jax.Array:
        """A reduction of the elements of an array that this replica has, a scalar; `across` is then that of all.

        Args:
          kind: 'sum', 'max' or 'min'; of booleans 'and' or 'or'.
          layout: the array's.
          shard: this replica's shard.
        """
        masked = layout.mask(shard, self.index, _neutral(kind, shard.dtype))
        return _REDUCTIONS[kind](masked)

    def across(self, kind: str, x: jax.Array) -> jax.Array:
        """A reduction, of the same kinds, of a number of each replica; equal on all replicas."""
        if self.count == 1:
            return x
        if kind == "sum":
            return lax.psum(x, **self._axis)
        # There are no collectives of booleans.
        if kind == "or":
            return lax.psum(x.astype(jnp.int32), **self._axis) > 0
        if kind == "and":
            return lax.psum((~x).astype(jnp.int32), **self._axis) == 0
        collective = lax.pmax if kind == "max" else lax.pmin
        result = collective(x, **self._axis)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return result
        # Not every backend's hands NaN on.
        has_nan = self.across("or", jnp.isnan(x))
        return jnp.where(has_nan, jnp.full_like(x, jnp.nan), result)

    def sums_of_squares(self, shards: Any) -> tuple[jax.Array, jax.Array]:
        """The sum of the squares of all elements of whole arrays, in two summands.

        Args:
          shards: a tree of this replica's shards; what is not sharded is whole on each.

        Returns:
          A number of the replica's own, whose mean over the replicas is the sum for all arrays that are sharded;
          and the sum for those that are not, equal on all replicas.
        """
        sharded, whole = [], []
        for path, x in trees.present(shards).items():
            layout = self.layouts[path]
            if layout.dim is None:
                whole.append(x)
            else:
                sharded.append(layout.mask(x, self.index, 0))
        return self.count * trees.sum_of_squares(sharded), trees.sum_of_squares(whole)


class Rehearsal(Partition):
    """A partition that needs no mapped axis: to see on shapes alone whether a rule can be sharded.

    Attributes:
      gathered: the bytes of what a rule has had gathered, by path.
    """

    def __init__(
        self,
        params: Any,
        count: int,
        rules: mesh.Rules = (),
        layouts: layouts_lib.Layouts | None = None,
    ):
        """Shards as a `Partition` over so many replicas does."""
        super().__init__(params, count, "", rules=rules, layouts=layouts)
        self.gathered: dict[str, int] = {}

    @functools.cached_property
    def index(self) -> int:
        """The first shard."""
        return 0

    def gather(self, layout: layouts_lib.Layout, shard: jax.Array, dtype: Any = None) -> jax.Array:
        """An array of the whole's shape."""
        del dtype
        size = layout.size * shard.dtype.itemsize
        self.gathered[layout.path] = self.gathered.get(layout.path, 0) + size
        return jnp.zeros(layout.shape, shard.dtype)

    @property
    def by_layers(self) -> bool:
        """True."""
        return True

    def to_layers(self, layout: layouts_lib.Layout, shard: jax.Array) -> jax.Array:
        """An array of the shape of these layers."""
        layers = -(-layout.shape[0] // self.count)
        return jnp.zeros((layers, *layout.shape[1:]), shard.dtype)

    def from_layers(self, layout: layouts_lib.Layout, layers: jax.Array) -> jax.Array:
        """An array of the shape of a shard."""
        return jnp.zeros(layout.shard_shape, layers.dtype)

    def all_layers(self, layers: jax.Array, count: int) -> jax.Array:
        """An array of the whole's shape."""
        return jnp.zeros((count, *layers.shape[1:]), layers.dtype)

    def across(self, kind: str, x: jax.Array) -> jax.Array:
        """That of one replica."""
        del kind
        return x


def _in_place(
    f: Callable[[jax.Array], jax.Array], layout: layouts_lib.Layout
) -> Callable[[jax.Array], jax.Array]:
    """Does the same to each shard of an array that lies along other axes besides.

    XLA's partitioner, left to it, makes an array whole on each device to scatter or gather it.
    """
    mapped = jax.sharding.get_abstract_mesh()
    axes = {axis for axis in layout.along if mapped.shape.get(axis, 1) > 1}
    if not axes:
        return f
    spec = jax.P(*layout.along)
    return jax.shard_map(f, in_specs=spec, out_specs=spec, axis_names=axes, check_vma=False)


def _neutral(kind: str, dtype: Any) -> Any:
    """The element that changes no result of a reduction."""
    if kind not in ("max", "min"):
        return kind == "and"
    if jnp.issubdtype(dtype, jnp.inexact):
        lowest, highest = -math.inf, math.inf
    else:
        lowest, highest = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    return lowest if kind == "max" else highest


def _factorize(sizes: Any, count: int) -> bool:
    """Returns whether sizes are positive integers whose product is a number."""
    if not isinstance(sizes, Sequence) or not all(isinstance(n, int) and n > 0 for n in sizes):
        return False
    return math.prod(sizes) == count


def summed(
    collective: Callable[[jax.Array], jax.Array], x: jax.Array, dtype: Any = None
) -> jax.Array:
    """A sum over devices in a type; the result has x's.

    Args:
      collective: the sum.
      x: what to sum.
      dtype: the type; 'float32' and None stand for x's own, which is float32 or wider.
    """
    if dtype in _AS_IT_IS or jnp.dtype(dtype) == x.dtype:
        return collective(x)
    # XLA's CPU compiler sums half precision in float32, and aborts the process over such a sum where
    # shard_map leaves a mesh axis to it.
    wide = lambda x: collective(x.astype(jnp.float32)).astype(dtype)
    total = lax.platform_dependent(x.astype(dtype), cpu=wide, default=collective)
    return total.astype(x.dtype)


def check_real(grads: trees.Gradients, reduce_dtype: str, slice_dtype: str) -> None:
    """Raises ValueError for a complex gradient, where sums are of such types."""
    for path, grad in trees.present(grads).items():
        if jnp.iscomplexobj(grad):
            raise ValueError(
                f"The gradient of '{path}' is complex; reduce_dtype={reduce_dtype!r} and slice_dtype={slice_dtype!r} are "
                "types of real numbers. Leave both 'float32', with which a wider gradient is summed in its own type."
            )
