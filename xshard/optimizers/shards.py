"""The shards of arrays that replicas hold, and the collectives between replicas.

Source: Xu et al., "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel
Training", 2020, https://arxiv.org/abs/2004.13336.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xshard.base import mesh_axes
from xshard.optimizers import layouts as layouts_lib
from xshard.optimizers import replica_calls, trees

# Values of a `dtype` argument that stand for the array's own type.
_OWN_DTYPE = (None, "float32")

# The replicas that communicate in one step of a collective, as its `axis_index_groups`;
# None stands for all.
_Groups = list[list[int]] | None


class Partition:
    """The shards of the leaves of a tree, one for each replica of a group, and the
    collectives on them.

    Attributes:
      count: the number of shards.
      layouts: the layout of each leaf, by path.
    """

    def __init__(
        self,
        layouts: layouts_lib.Layouts,
        count: int,
        axis_name: str,
        scatter_steps: Sequence[int] = (),
        gather_steps: Sequence[int] = (),
    ):
        """Stores the layouts, and how to communicate.

        Args:
          layouts: the layout of each leaf, by path.
          count: the number of replicas.
          axis_name: the mapped axis of the replicas.
          scatter_steps: sizes whose product is `count`, to scatter in one step for each
            size; empty for a single step.
          gather_steps: the same, to gather.
        """
        self.layouts = layouts
        self.count = count
        self._axis_name = axis_name
        self._scatter_groups = _groups_of_steps(scatter_steps, count)
        self._gather_groups = _groups_of_steps(gather_steps, count)

    def map(self, f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
        """Applies `f(layout, leaf, ...)` to the leaves; None leaves stay."""

        def with_layout(path: Any, x: Any, *more: Any) -> Any:
            if x is None:
                return None
            return f(self.layouts[trees.path_name(path)], x, *more)

        is_none = lambda x: x is None
        return jax.tree_util.tree_map_with_path(
            with_layout, tree, *rest, is_leaf=is_none
        )

    def scatter(
        self, layout: layouts_lib.Layout, x: jax.Array, dtype: Any = None
    ) -> jax.Array:
        """Returns this replica's shard of the sum over the replicas.

        It is the whole sum if the leaf is not sharded.

        Args:
          layout: the leaf's layout.
          x: each replica's own whole array. A shard, the gradient of a parameter held
            in shards, is already summed and is returned as it is.
          dtype: the type to sum in, instead of x's. The result has x's type.
        """
        if self.count == 1 or layout.is_param_shard(x):
            return x
        if layout.dim is None:
            psum = functools.partial(lax.psum, axis_name=self._axis_name)
            return summed(psum, x, dtype)
        for groups in self._scatter_groups:
            collective = functools.partial(
                lax.psum_scatter,
                axis_name=self._axis_name,
                scatter_dimension=layout.dim,
                axis_index_groups=groups,
                tiled=True,
            )
            scatter = functools.partial(summed, collective, dtype=dtype)
            x = _map_other_axes(scatter, layout)(x)
        return x

    def gather(
        self, layout: layouts_lib.Layout, shard: jax.Array, dtype: Any = None
    ) -> jax.Array:
        """Gathers the shards of all replicas into the whole array.

        Args:
          layout: the leaf's layout.
          shard: this replica's shard.
          dtype: the type to send, instead of the shard's. The result has the shard's
            type.
        """
        if self.count == 1 or layout.dim is None:
            return shard
        x = shard
        if dtype not in _OWN_DTYPE:
            x = shard.astype(dtype)
        # In reverse, so that each step joins the shards that the same step of a scatter
        # divides.
        for groups in reversed(self._gather_groups):
            gather = functools.partial(
                lax.all_gather,
                axis_name=self._axis_name,
                axis=layout.dim,
                axis_index_groups=groups,
                tiled=True,
            )
            x = _map_other_axes(gather, layout)(x)
        return x.astype(shard.dtype)

    def holds_for_all(
        self, test: Callable[[jax.Array], jax.Array], arrays: Any
    ) -> jax.Array:
        """Returns whether a test holds for all elements of global arrays.

        See the function of this name.
        """
        sharded, specs, whole = self.divide(arrays)

        def of_replica(shards: list[jax.Array]) -> jax.Array:
            # JAX has no collectives of booleans, so this one counts.
            failed = ~_all_hold(test, shards)
            return lax.psum(failed.astype(jnp.int32), axis_name=self._axis_name) == 0

        holds = _all_hold(test, whole)
        if sharded:
            call = replica_calls.on_each_replica(of_replica, in_specs=(specs,))
            holds &= call(sharded)
        return holds

    def gather_global(self, tree: Any) -> Any:
        """Makes global arrays whole on each replica, but for those of parameters that
        are held in shards.
        """
        sharded = {}
        specs = {}
        for path, x in trees.present(tree).items():
            layout = self.layouts[path]
            if layout.dim is not None and not layout.shards_param:
                sharded[path] = x
                specs[path] = self.spec(layout, manual=True)

        def gather(shards: Any) -> Any:
            # The program does not show that what is gathered in steps is equal.
            return replica_calls.equal_on_replicas(self.map(self.gather, shards))

        whole = replica_calls.on_each_replica(gather, in_specs=(specs,))(sharded)
        return trees.replace(tree, whole)

    def spec(self, layout: layouts_lib.Layout, *, manual: bool = False) -> jax.P:
        """Returns the mesh axes that an array lies along, as for `Layout.spec`."""
        return layout.spec(self._axis_name, manual=manual)

    def divide(
        self, arrays: Any
    ) -> tuple[list[jax.Array], list[jax.P], list[jax.Array]]:
        """Returns the sharded ones of a tree of global arrays, the specs of these, and
        the arrays that are whole on each replica.
        """
        sharded: list[jax.Array] = []
        specs: list[jax.P] = []
        whole: list[jax.Array] = []
        for path, x in trees.present(arrays).items():
            layout = self.layouts[path]
            if layout.dim is None:
                whole.append(x)
            else:
                sharded.append(x)
                specs.append(self.spec(layout, manual=True))
        return sharded, specs, whole


def _groups_of_steps(sizes: Sequence[int], count: int) -> list[_Groups]:
    """Returns the groups of replicas that communicate in each step.

    The replicas of a group differ in one digit of the mixed radix of `sizes`.
    """
    if isinstance(sizes, Sequence) and not sizes:
        return [None]
    is_good = isinstance(sizes, Sequence)
    is_good = is_good and all(isinstance(size, int) and size > 0 for size in sizes)
    if not is_good or math.prod(sizes) != count:
        raise ValueError(
            "scatter_steps and gather_steps must be sizes whose product is the number "
            f"of replicas, {count}; received {sizes!r}."
        )
    return list(mesh_axes.step_groups(sizes))


def _map_other_axes(
    f: Callable[[jax.Array], jax.Array], layout: layouts_lib.Layout
) -> Callable[[jax.Array], jax.Array]:
    """Maps `f` over the other mesh axes that the array lies along, so that it acts on
    each device's part.

    Left to itself, XLA's partitioner makes the array whole on each device before it
    scatters or gathers it.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    axes = {axis for axis in layout.along if sizes.get(axis, 1) > 1}
    if not axes:
        return f
    spec = jax.P(*layout.along)
    return jax.shard_map(
        f, in_specs=spec, out_specs=spec, axis_names=axes, check_vma=False
    )


# The partition in which the rules of a step find global arrays.
_IN_EFFECT: contextvars.ContextVar[Partition | None] = contextvars.ContextVar(
    "partition", default=None
)


@contextlib.contextmanager
def in_effect(partition: Partition) -> Iterator[None]:
    """Tells the rules that are called in its body how their global arrays lie."""
    token = _IN_EFFECT.set(partition)
    try:
        yield
    finally:
        _IN_EFFECT.reset(token)


def current() -> Partition | None:
    """Returns how the global arrays of the rules being called lie; None if they are
    whole.
    """
    return _IN_EFFECT.get()


def holds_for_all(test: Callable[[jax.Array], jax.Array], arrays: Any) -> jax.Array:
    """Returns whether a test holds for all arrays of a tree.

    XLA would reduce each array in shards over the replicas by itself, and on CPUs
    repeat the conjunction of all results wherever it is used, which takes long to
    compile for many arrays. So the replicas' own conjunctions are reduced, once.

    Args:
      test: reduces an array to a boolean.
      arrays: the arrays; None leaves do not count.
    """
    partition = _IN_EFFECT.get()
    if partition is not None:
        return partition.holds_for_all(test, arrays)
    return _all_hold(test, jax.tree.leaves(arrays))


def _all_hold(
    test: Callable[[jax.Array], jax.Array], arrays: Sequence[jax.Array]
) -> jax.Array:
    holds = jnp.asarray(True)
    for x in arrays:
        holds &= test(x)
    return holds


def summed(
    collective: Callable[[jax.Array], jax.Array], x: jax.Array, dtype: Any = None
) -> jax.Array:
    """Sums over devices in a given type; the result has x's type.

    Args:
      collective: sums an array over the devices.
      x: the array.
      dtype: the type to sum in; 'float32' and None stand for x's own, which is float32
        or wider.
    """
    if dtype in _OWN_DTYPE or jnp.dtype(dtype) == x.dtype:
        return collective(x)

    # Cast explicitly on CPUs: XLA's CPU compiler sums half precision in float32, and
    # aborts the process on such a sum if shard_map leaves a mesh axis to its
    # partitioner.
    def sum_in_float32(x: jax.Array) -> jax.Array:
        return collective(x.astype(jnp.float32)).astype(dtype)

    total = lax.platform_dependent(
        x.astype(dtype), cpu=sum_in_float32, default=collective
    )
    return total.astype(x.dtype)


def check_real(grads: trees.Gradients, reduce_dtype: str, slice_dtype: str) -> None:
    """Raises ValueError for a complex gradient, which the types cannot represent."""
    for path, grad in trees.present(grads).items():
        if jnp.iscomplexobj(grad):
            raise ValueError(
                f"The gradient of '{path}' is complex; reduce_dtype={reduce_dtype!r} "
                f"and slice_dtype={slice_dtype!r} are types of real numbers. Leave "
                "both 'float32', with which a wider gradient is summed in its own type."
            )
