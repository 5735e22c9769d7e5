"""The shards of arrays that replicas hold, and the collectives between replicas.

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
from xshard.optimizers import trees, varying

# Values of a `dtype` argument that stand for the array's own type.
_AS_IT_IS = (None, "float32")
_REDUCTIONS: dict[str, Callable[[Any], jax.Array]] = {
    "sum": jnp.sum,
    "max": jnp.max,
    "min": jnp.min,
    "and": jnp.all,
    "or": jnp.any,
}


class Partition:
    """The shards of the leaves of a tree, one for each replica of a group, and the collectives on them.

    Attributes:
      count: the number of shards.
      copies: the number of slices.
      layouts: the layout of each leaf, by path.
    """

    def __init__(
        self,
        layouts: layouts_lib.Layouts,
        count: int,
        axis_name: str,
        groups: Sequence[Sequence[int]] | None = None,
        copies: int = 1,
        scatter_steps: Sequence[int] = (),
        gather_steps: Sequence[int] = (),
    ):
        """Stores the layouts, and how to communicate.

        Args:
          layouts: the layout of each leaf, by path.
          count: the number of replicas of a group.
          axis_name: the mapped axis of the replicas.
          groups: the replica numbers of each group, if there are several groups.
          copies: the number of slices, each of which holds all shards.
          scatter_steps: sizes whose product is `count`, to scatter in one step for each size.
          gather_steps: the same, to gather.
        """
        self.layouts = layouts
        self.count = count
        self.copies = copies
        self._axis: dict[str, Any] = {"axis_name": axis_name, "axis_index_groups": groups}
        self._scatters = self._in_steps(scatter_steps)
        self._gathers = self._in_steps(gather_steps)

    @functools.cached_property
    def index(self) -> Any:
        """The index of this replica's shards. Cached, since a partition belongs to one trace."""
        number = varying.marked(varying.SHARD_INDEX, lax.axis_index(self._axis["axis_name"]))
        groups = self._axis["axis_index_groups"]
        if groups is None:
            return number
        # In a group of some replicas, a replica's shard number is its place within the group.
        places = np.empty(len(groups) * self.count, np.int32)
        for group in groups:
            places[list(group)] = np.arange(self.count, dtype=np.int32)
        return jnp.asarray(places)[number]

    @property
    def by_layers(self) -> bool:
        """Whether replicas can exchange shards for layers. Logical replicas, which no mesh maps, can only gather."""
        return self._axis["axis_name"] in jax.sharding.get_abstract_mesh().manual_axes

    def _in_steps(self, sizes: Sequence[int]) -> list[dict[str, Any]]:
        """The axis arguments of the collective of each step, between replicas that differ in one digit of `sizes`."""
        if not sizes and isinstance(sizes, Sequence):
            return [self._axis]
        if self._axis["axis_index_groups"] or not _factorize(sizes, self.count):
            raise ValueError(
                "scatter_steps and gather_steps must be sizes whose product is the number of replicas, "
                f"{self.count}, and must be left out with a group_assignment; received {sizes!r}."
            )
        return [{**self._axis, "axis_index_groups": groups} for groups in mesh.step_groups(sizes)]

    def map(self, f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
        """Applies `f(layout, leaf, ...)` to the leaves; None leaves stay."""

        def with_layout(path: Any, x: Any, *more: Any) -> Any:
            if x is None:
                return None
            return f(self.layouts[trees.path_name(path)], x, *more)

        is_none = lambda x: x is None
        return jax.tree_util.tree_map_with_path(with_layout, tree, *rest, is_leaf=is_none)

    def own(self, tree: Any) -> Any:
        """This replica's shard of each leaf. Leaves are whole, except parameters that are already held in shards."""
        return self.map(lambda layout, x: layout.shard(x, self.index), tree)

    def state_layouts(self, state: Any) -> dict[str, dict[str, layouts_lib.Layout]]:
        """Returns how the state of rules is sharded: `{module: {name: layout}}`; see `layouts.of_state`."""
        return layouts_lib.of_state(self.layouts, state, self.copies)

    def scatter(self, layout: layouts_lib.Layout, x: jax.Array, dtype: Any = None) -> jax.Array:
        """This replica's shard of the sum over the group, or the whole sum if the leaf is not sharded.

        Args:
          layout: the leaf's layout.
          x: each replica's own whole array. A shard, the gradient of a parameter held in shards, is already summed
            and is returned as it is.
          dtype: the type to sum in, instead of x's. The result has x's type.
        """
        if self.count == 1 or layout.is_param_shard(x):
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
        """Gathers the shards of all replicas into the whole array, sent in `dtype` if it is given."""
        if self.count == 1 or layout.dim is None:
            return shard
        x = shard
        if dtype not in _AS_IT_IS:
            x = shard.astype(dtype)
        # In reverse, so that each step joins the shards that the same step of a scatter divides.
        for step in reversed(self._gathers):
            gather = functools.partial(lax.all_gather, axis=layout.dim, tiled=True, **step)
            x = _in_place(gather, layout)(x)
        return layout.whole(x).astype(shard.dtype)

    def to_layers(self, layout: layouts_lib.Layout, shard: jax.Array) -> jax.Array:
        """Exchanges shards for whole layers: this replica's layers, padded so that each replica has as many."""
        if layout.dim == 0:
            return shard
        # An all_to_all needs the same number of layers on each replica.
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
        """Gathers each replica's layers into the whole array of `count` layers."""
        return lax.all_gather(layers, axis=0, tiled=True, **self._axis)[:count]

    def reduce_own(self, kind: str, layout: layouts_lib.Layout, shard: jax.Array) -> jax.Array:
        """Reduces the elements of this replica's shard to a scalar. `across` then reduces over the replicas.

        Args:
          kind: 'sum', 'max' or 'min'; 'and' or 'or' for booleans.
          layout: the array's layout.
          shard: this replica's shard.
        """
        masked = layout.mask(shard, self.index, _neutral(kind, shard.dtype))
        return _REDUCTIONS[kind](masked)

    def across(self, kind: str, x: jax.Array) -> jax.Array:
        """Reduces one number of each replica over all replicas; the result is equal on all of them."""
        if self.count == 1:
            return x
        if kind == "sum":
            return lax.psum(x, **self._axis)
        # JAX has no boolean collectives, so these count instead.
        if kind == "or":
            return lax.psum(x.astype(jnp.int32), **self._axis) > 0
        if kind == "and":
            return lax.psum((~x).astype(jnp.int32), **self._axis) == 0
        collective = lax.pmax if kind == "max" else lax.pmin
        result = collective(x, **self._axis)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return result
        # Not every backend's pmax and pmin propagate NaN.
        has_nan = self.across("or", jnp.isnan(x))
        return jnp.where(has_nan, jnp.full_like(x, jnp.nan), result)

    def sums_of_squares(self, shards: Any) -> tuple[jax.Array, jax.Array]:
        """The sum of the squares of all elements of the whole arrays, as two summands.

        Args:
          shards: a tree of this replica's shards; arrays that are not sharded are whole.

        Returns:
          The replica's own number for the sharded arrays, whose mean over the replicas is their sum of squares; and
          the sum of squares of the other arrays, equal on all replicas.
        """
        sharded, whole = [], []
        for path, x in trees.present(shards).items():
            layout = self.layouts[path]
            if layout.dim is None:
                whole.append(x)
            else:
                # Padding may have any value, so it must not count.
                sharded.append(layout.mask(x, self.index, 0))
        return self.count * trees.sum_of_squares(sharded), trees.sum_of_squares(whole)


class Rehearsal(Partition):
    """A partition that needs no mapped axis, to check on shapes alone that a rule can be sharded.

    Attributes:
      gathered: the bytes that a rule's update gathers, by path.
    """

    def __init__(self, layouts: layouts_lib.Layouts, count: int):
        """Shards as a `Partition` over `count` replicas does."""
        super().__init__(layouts, count, axis_name="")
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
        """An array of the shape of this replica's layers."""
        layers = -(-layout.shape[0] // self.count)
        return jnp.zeros((layers, *layout.shape[1:]), shard.dtype)

    def from_layers(self, layout: layouts_lib.Layout, layers: jax.Array) -> jax.Array:
        """An array of the shape of a shard."""
        return jnp.zeros(layout.shard_shape, layers.dtype)

    def all_layers(self, layers: jax.Array, count: int) -> jax.Array:
        """An array of the whole's shape."""
        return jnp.zeros((count, *layers.shape[1:]), layers.dtype)

    def across(self, kind: str, x: jax.Array) -> jax.Array:
        """The number itself, as for one replica."""
        del kind
        return x


def _in_place(
    f: Callable[[jax.Array], jax.Array], layout: layouts_lib.Layout
) -> Callable[[jax.Array], jax.Array]:
    """Maps `f` over the other mesh axes that the array lies along, so that it acts on each device's part.

    Left to itself, XLA's partitioner makes the array whole on each device before it scatters or gathers it.
    """
    mapped = jax.sharding.get_abstract_mesh()
    axes = {axis for axis in layout.along if mapped.shape.get(axis, 1) > 1}
    if not axes:
        return f
    spec = jax.P(*layout.along)
    return jax.shard_map(f, in_specs=spec, out_specs=spec, axis_names=axes, check_vma=False)


def _neutral(kind: str, dtype: Any) -> Any:
    """The neutral element of a reduction."""
    if kind not in ("max", "min"):
        return kind == "and"
    if jnp.issubdtype(dtype, jnp.inexact):
        lowest, highest = -math.inf, math.inf
    else:
        lowest, highest = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    return lowest if kind == "max" else highest


def _factorize(sizes: Any, count: int) -> bool:
    """Returns whether `sizes` are positive integers whose product is `count`."""
    if not isinstance(sizes, Sequence) or not all(isinstance(n, int) and n > 0 for n in sizes):
        return False
    return math.prod(sizes) == count


def summed(
    collective: Callable[[jax.Array], jax.Array], x: jax.Array, dtype: Any = None
) -> jax.Array:
    """Sums over devices in a given type; the result has x's type.

    Args:
      collective: sums an array over the devices.
      x: the array.
      dtype: the type to sum in; 'float32' and None stand for x's own, which is float32 or wider.
    """
    if dtype in _AS_IT_IS or jnp.dtype(dtype) == x.dtype:
        return collective(x)
    # Cast explicitly on CPUs: XLA's CPU compiler sums half precision in float32, and aborts the process on such a
    # sum if shard_map leaves a mesh axis to its partitioner.
    wide = lambda x: collective(x.astype(jnp.float32)).astype(dtype)
    total = lax.platform_dependent(x.astype(dtype), cpu=wide, default=collective)
    return total.astype(x.dtype)


def check_real(grads: trees.Gradients, reduce_dtype: str, slice_dtype: str) -> None:
    """Raises ValueError for a complex gradient, which the given types cannot represent."""
    for path, grad in trees.present(grads).items():
        if jnp.iscomplexobj(grad):
            raise ValueError(
                f"The gradient of '{path}' is complex; reduce_dtype={reduce_dtype!r} and slice_dtype={slice_dtype!r} are "
                "types of real numbers. Leave both 'float32', with which a wider gradient is summed in its own type."
            )
