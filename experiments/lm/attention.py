"""Causal attention whose scores stay on the chip: by a kernel, where the backend has one for the shape.

The scores of a head are a square of the sequence's length, which XLA writes to memory and reads again. A kernel goes over
them block by block, and once more in the backward pass: Dao et al., "FlashAttention: Fast and Memory-Efficient Exact
Attention with IO-Awareness", 2022, https://arxiv.org/abs/2205.14135.

The kernels are JAX's own for TPUs (splash attention, in Pallas) and cuDNN's for NVIDIA's GPUs. Which one runs is decided
where the program is lowered, so that one program is traced for all backends.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from xshard import mesh as mesh_lib

AUTO, XLA = KINDS = ("auto", "xla")
# The TPU's kernel goes over blocks of the sequence, of the largest of these sizes that divides it.
_BLOCKS = (512, 256, 128)
# The sizes of a head that the TPU's compiler was asked for.
_HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
# Of query, key and value, of the shape (batch, heads, length, size), and of the segments.
Implementation = Callable[..., jax.Array]


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None = None,
    *,
    kind: str = AUTO,
) -> jax.Array:
    """Attends to the positions up to one's own; in a run the heads may lie along the mesh axis 'model'.

    Args:
      query: of shape (batch, length, heads, size).
      key: of the same.
      value: of the same.
      segments: integers of shape (batch, length); a position attends to those of its own segment alone.
      kind: 'auto' for the backend's kernel in a run, or XLA's attention where it has none for these shapes; 'xla' for
        XLA's.

    Returns:
      An array of the shape and type of the query.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # Outside of a run's mesh a program may be exported, for all backends at once, which a kernel cannot be.
    kernels = {} if kind == XLA or mesh.empty else kernels_for(query, segments)
    if not kernels:
        return _xla(query, key, value, segments)
    # The order of the TPU's kernel: what is kept for the backward pass then is the same for it and for XLA's.
    by_head = [jnp.swapaxes(x, 1, 2) for x in (query, key, value)]
    return jnp.swapaxes(_over_heads(mesh, kernels, *by_head, segments), 1, 2)


def kernels_for(query: Any, segments: Any) -> dict[str, Implementation]:
    """The kernels that take a query of the shape (batch, length, heads, size), by JAX's name of the platform."""
    _, length, _, size = query.shape
    kernels: dict[str, Implementation] = {}
    if length % _BLOCKS[-1] == 0 and size in _HEAD_SIZES:
        kernels["tpu"] = _splash
    if segments is None and _cudnn_takes(query):
        kernels["cuda"] = _cudnn
    return kernels


def _over_heads(mesh: Any, kernels: Mapping[str, Implementation], *inputs: Any) -> jax.Array:
    """The attention by the kernel of the platform; on a mesh with an axis 'model' each device has its heads."""
    chosen = functools.partial(lax.platform_dependent, **kernels, default=_xla_of_heads)
    if mesh_lib.MODEL not in mesh.auto_axes or mesh.shape[mesh_lib.MODEL] == 1:
        return chosen(*inputs)
    # XLA's partitioner, which the axis is left to, cannot cut a kernel.
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
    """XLA's attention, of arrays of the shape (batch, length, heads, size)."""
    mask = None
    if segments is not None:
        mask = (segments[:, :, None] == segments[:, None, :])[:, None]
    attend = functools.partial(jax.nn.dot_product_attention, mask=mask, is_causal=True)
    return attend(*map(_widened, (query, key, value))).astype(query.dtype)


def _widened(x: jax.Array) -> jax.Array:
    """The array, in float32 where it is in float16, which asks for a product that CPUs and TPUs have not."""
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


@jax.custom_vjp
def _xla_of_heads(*inputs: Any) -> jax.Array:
    """XLA's attention, of arrays of the shape (batch, heads, length, size).

    Its scores are computed again for the backward pass: in a program for several backends there is room for what any of
    them keeps, and scores are large.
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
    """Computes the result of an implementation that has positions before heads."""
    *arrays, segments = inputs
    return jnp.swapaxes(implementation(*(jnp.swapaxes(x, 1, 2) for x in arrays), segments), 1, 2)


def _splash(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """The TPU's kernel; interpreted, it runs anywhere."""
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
    wide, *others = map(_widened, (query, key, value))
    # By this name the dry run knows which of the scores there are.
    with jax.named_scope("causal"):
        return jax.vmap(kernel)(wide * size**-0.5, *others, ids).astype(query.dtype)


def _cudnn(*inputs: Any) -> jax.Array:
    """The attention of cuDNN; for arrays that it does not take, and where it is not installed, there is an error."""
    return _of_heads(_cudnn_of_positions, inputs)


def _cudnn_of_positions(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: None
) -> jax.Array:
    del segments
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def _cudnn_takes(query: Any) -> bool:
    """Whether there is a cuDNN here, and takes the shape and type of a query: it says so itself."""
    shape = jax.ShapeDtypeStruct(query.shape, query.dtype)
    try:
        jax.eval_shape(_cudnn_of_positions, shape, shape, shape, None)
    except (RuntimeError, ValueError):
        return False
    return True
