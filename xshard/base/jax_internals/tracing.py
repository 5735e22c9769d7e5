"""What is asked of the trace in progress, and an operation that JAX has lost."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import core as core_lib
from jax.extend import core
from jax.extend.mlir.dialects import sdy
from jax.interpreters import ad, batching, mlir


def is_of_current_trace(x: Any) -> bool:
    """Returns whether a traced value belongs to the innermost trace in progress.

    It may also belong to one around that. JAX has no public function for it.
    """
    return isinstance(x, jax.core.Tracer) and x._trace is core_lib.trace_ctx.trace


def mapped_axis_names() -> list[Any]:
    """Lists the axes that are mapped where it is called.

    Also those of vmap and pmap, which JAX's public functions omit.
    """
    return core.unsafe_get_axis_names_DO_NOT_USE()


def shard_alike(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two arrays of one shape, which the compiler shards alike.

    Along the axes whose sharding it chooses, that is. Up to 0.11.1, JAX has it as
    `jax.experimental.shard_alike`. It can go when JAX has it again.
    """
    return tuple(_shard_alike.bind(x, y))


_shard_alike = core.Primitive("xshard_shard_alike")
_shard_alike.multiple_results = True
_shard_alike.def_impl(lambda x, y: [x, y])
_shard_alike.def_abstract_eval(lambda x, y: [x, y])
# The numbers of the groups in a program. JAX's own `shard_alike` counts from 0.
_groups = itertools.count(2**32)


def _lower(context: Any, x: Any, y: Any) -> list[Any]:
    group = next(_groups)
    sdy.sharding_group(x, group)
    sdy.sharding_group(y, group)
    return [x, y]


def _transpose(grads: Sequence[Any], x: Any, y: Any) -> Sequence[Any]:
    # No array exists for the gradient of a result that nothing uses, so there is
    # nothing to shard.
    if any(type(grad) is ad.Zero for grad in grads):
        return grads
    return _shard_alike.bind(*grads)


def _batch(
    arrays: Sequence[Any], axes: Sequence[int | None]
) -> tuple[list[Any], list[int]]:
    sizes = set()
    for x, axis in zip(arrays, axes, strict=True):
        if axis is not None:
            sizes.add(x.shape[axis])
    (size,) = sizes
    batched = []
    for x, axis in zip(arrays, axes, strict=True):
        if axis is None:
            batched.append(jnp.broadcast_to(x, (size, *x.shape)))
        else:
            batched.append(jnp.moveaxis(x, axis, 0))
    return _shard_alike.bind(*batched), [0, 0]


mlir.register_lowering(_shard_alike, _lower)
ad.deflinear2(_shard_alike, _transpose)
batching.primitive_batchers[_shard_alike] = _batch
