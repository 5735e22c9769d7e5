"""Causal attention, by a kernel that keeps the scores on the chip if there is one.

The number of scores of a head is the square of the sequence length. XLA's attention
writes them to memory and reads them again. A kernel computes them block by block, and
again in the backward pass: Dao et al., "FlashAttention: Fast and Memory-Efficient Exact
Attention with IO-Awareness", 2022, https://arxiv.org/abs/2205.14135.

The kernels are JAX's splash attention for TPUs (in Pallas) and cuDNN's for NVIDIA GPUs.
The kernel is selected when the program is lowered, so one traced program serves all
backends.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from xshard import mesh as mesh_lib

AUTO = "auto"
XLA = "xla"
KINDS = (AUTO, XLA)
# The block sizes of the TPU kernel. It uses the largest one that divides the sequence
# length.
_BLOCKS = (512, 256, 128)
# The head sizes for which the kernel was compiled with the TPU compiler.
_HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
# A function of query, key and value, of shape (batch, heads, length, size), and of the
# segments.
Implementation = Callable[..., jax.Array]


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None = None,
    *,
    kind: str = AUTO,
) -> jax.Array:
    """Computes causal attention. In a run, the heads may be sharded over the mesh axis
    'model'.

    Args:
      query: an array of shape (batch, length, heads, size).
      key: an array of the same shape.
      value: an array of the same shape.
      segments: integers of shape (batch, length); a position attends only to positions
        of its own segment.
      kind: 'auto' for the backend's kernel in a run, or XLA's attention if it has none
        for these shapes; 'xla' for XLA's attention.

    Returns:
      An array of the query's shape and dtype.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kernels: dict[str, Implementation] = {}
    # Without a run's mesh, the program may be exported for all backends at once.
    # Kernels do not support that.
    if kind != XLA and not mesh.empty:
        kernels = kernels_for(query, segments)
    if not kernels:
        return _xla(query, key, value, segments)
    # Heads before positions is the TPU kernel's layout. XLA's attention uses it too, so
    # that both keep the same arrays for the backward pass.
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    mixed = _over_heads(mesh, kernels, query, key, value, segments)
    return jnp.swapaxes(mixed, 1, 2)


def kernels_for(query: Any, segments: Any) -> dict[str, Implementation]:
    """Returns the kernels that support a query, by JAX's platform name.

    Args:
      query: an array or shape of (batch, length, heads, size).
      segments: as for `attend`.
    """
    _, length, _, size = query.shape
    kernels: dict[str, Implementation] = {}
    if length % _BLOCKS[-1] == 0 and size in _HEAD_SIZES:
        kernels["tpu"] = _splash
    if segments is None and _cudnn_takes(query):
        kernels["cuda"] = _cudnn
    return kernels


def _over_heads(
    mesh: Any, kernels: Mapping[str, Implementation], *inputs: Any
) -> jax.Array:
    """Computes attention with the platform's kernel.

    If the mesh has an axis 'model', each device computes its heads.
    """
    chosen = functools.partial(lax.platform_dependent, **kernels, default=_xla_of_heads)
    if mesh_lib.MODEL not in mesh.auto_axes or mesh.shape[mesh_lib.MODEL] == 1:
        return chosen(*inputs)
    # The axis 'model' is otherwise left to XLA's partitioner, which cannot partition a
    # kernel.
    heads = jax.P(None, mesh_lib.MODEL)
    mapped = jax.shard_map(
        chosen,
        axis_names={mesh_lib.MODEL},
        in_specs=(heads, heads, heads, jax.P()),
        out_specs=heads,
        check_vma=False,
    )
    return mapped(*inputs)


def _xla(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None
) -> jax.Array:
    """Computes XLA's attention for arrays of shape (batch, length, heads, size)."""
    mask = None
    if segments is not None:
        mask = (segments[:, :, None] == segments[:, None, :])[:, None]
    mixed = jax.nn.dot_product_attention(
        _widened(query), _widened(key), _widened(value), mask=mask, is_causal=True
    )
    return mixed.astype(query.dtype)


def _widened(x: jax.Array) -> jax.Array:
    """Returns the array, converted to float32 if it is float16.

    CPUs and TPUs lack the float16 product that attention requests.
    """
    if x.dtype == jnp.float16:
        return x.astype(jnp.float32)
    return x


@jax.custom_vjp
def _xla_of_heads(*inputs: Any) -> jax.Array:
    """Computes XLA's attention for arrays of shape (batch, heads, length, size).

    The backward pass recomputes the scores. A program for several backends reserves
    memory for the arrays that any of them keeps, and scores are large.
    """
    return _of_heads(_xla, inputs)


def _forward(*inputs: Any) -> tuple[jax.Array, Any]:
    return _xla_of_heads(*inputs), inputs


def _backward(inputs: Any, grad: jax.Array) -> tuple[Any, ...]:
    *arrays, segments = inputs
    _, pull = jax.vjp(lambda *xs: _of_heads(_xla, (*xs, segments)), *arrays)
    return (*pull(grad), None)


_xla_of_heads.defvjp(_forward, _backward)


def _of_heads(implementation: Implementation, inputs: Any) -> jax.Array:
    """Calls an implementation that expects positions before heads.

    The arrays, and the result, have heads before positions.
    """
    *arrays, segments = inputs
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in arrays)
    return jnp.swapaxes(implementation(query, key, value, segments), 1, 2)


def _splash(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Computes attention with the TPU kernel.

    With `interpret` it runs on any backend.
    """
    _, heads, length, size = query.shape
    block = next(block for block in _BLOCKS if length % block == 0)
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([splash.CausalMask((length, length))] * heads),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        interpret=interpret,
    )
    ids = None if segments is None else splash.SegmentIds(segments, segments)
    scaled_query = _widened(query) * size**-0.5
    # The dry run recognizes causal attention, which computes half of the scores, by
    # this name.
    with jax.named_scope("causal"):
        mixed = jax.vmap(kernel)(scaled_query, _widened(key), _widened(value), ids)
        return mixed.astype(query.dtype)


def _cudnn(*inputs: Any) -> jax.Array:
    """Computes attention with cuDNN; raises if cuDNN is not installed or does not
    support the arrays.
    """
    return _of_heads(_cudnn_of_positions, inputs)


def _cudnn_of_positions(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: None
) -> jax.Array:
    del segments
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=True, implementation="cudnn"
    )


def _cudnn_takes(query: Any) -> bool:
    """Returns whether cuDNN is installed and supports a query's shape and dtype, by
    tracing it.
    """
    shape = jax.ShapeDtypeStruct(query.shape, query.dtype)
    try:
        jax.eval_shape(_cudnn_of_positions, shape, shape, shape, None)
    except (RuntimeError, ValueError):
        return False
    return True
