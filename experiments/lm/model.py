"""A decoder-only transformer over bytes.

Pre-norm (Xiong et al., 2020, https://arxiv.org/abs/2002.04745) with RMSNorm (Zhang and Sennrich, 2019,
https://arxiv.org/abs/1910.07467), rotary positions (Su et al., 2021, https://arxiv.org/abs/2104.09864), and a
gated feed-forward layer, SwiGLU, which at equal parameters is better than GELU (Shazeer, 2020,
https://arxiv.org/abs/2002.05202).

Matrix products are in the type of the parameters, which is the compute type; norms, softmax, rotations and
logits in float32.
"""

import functools
import math
from collections.abc import Callable

import haiku as hk
import jax
import jax.numpy as jnp

from experiments.lm import attention as attention_lib

BYTES = 256
_EPSILON = 1e-6
_ROTARY_BASE = 10_000.0


class Transformer(hk.Module):
    """Logits of the next byte, or token, at each position.

    Layers are scanned: the program is as large as for one, and a layer's parameters have a leading
    dimension of layers. The embedding and the last matrix are two arrays: for 256 symbols a second one costs
    next to nothing, and the last can begin at zero, where each byte is equally likely.
    """

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        feed_forward: int,
        *,
        remat: bool,
        attention: str = attention_lib.AUTO,
        vocabulary: int = BYTES,
    ):
        """Makes the module.

        Args:
          layers: the number of layers.
          width: the size of the residual stream.
          heads: the number of attention heads, each of width / heads.
          feed_forward: the hidden size of the feed-forward layer.
          remat: whether a layer's activations are computed again for its gradient instead of kept.
          attention: the `kind` of `attention.attend`.
          vocabulary: the number of bytes, or of tokens.
        """
        super().__init__(name="transformer")
        self._layers = layers
        self._width = width
        self._heads = heads
        self._feed_forward = feed_forward
        self._remat = remat
        self._attention = attention
        self._vocabulary = vocabulary

    def __call__(self, text: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        """Computes logits.

        Args:
          text: bytes or tokens, of shape (batch, length).
          segments: of the same shape; a token attends to those of its own segment alone. None: to all before it.
            Positions need not begin anew in each, as with rotary ones only distances count.

        Returns:
          Float32 logits of shape (batch, length, vocabulary).
        """
        init = hk.initializers.TruncatedNormal(1.0)
        table = hk.get_parameter("embedding", (self._vocabulary, self._width), jnp.float32, init)
        # Looked up in float32, so that the gradients of a byte's many places are summed in it.
        x = jnp.asarray(table, jnp.float32)[text].astype(table.dtype)

        attend = functools.partial(attention_lib.attend, segments=segments, kind=self._attention)

        def layer(x: jax.Array) -> jax.Array:
            return Layer(self._layers, self._heads, self._feed_forward)(x, attend)

        x = hk.layer_stack(self._layers, name="layers")(hk.remat(layer) if self._remat else layer)(
            x
        )
        head = hk.get_parameter("head", (self._width, self._vocabulary), jnp.float32, jnp.zeros)
        return jnp.einsum(
            "btd,dv->btv", RMSNorm("norm")(x), head, preferred_element_type=jnp.float32
        )


class Layer(hk.Module):
    """Causal attention, then the feed-forward layer, each added to the residual stream."""

    def __init__(self, layers: int, heads: int, feed_forward: int):
        """Makes one of `layers` layers."""
        super().__init__(name="layer")
        self._heads = heads
        self._feed_forward = feed_forward
        # What is added to the stream twice a layer grows its variance with the depth, but for this:
        # Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3.
        self._out_scale = 1 / math.sqrt(2 * layers)

    def __call__(self, x: jax.Array, attend: Callable[..., jax.Array]) -> jax.Array:
        """An array of the shape (batch, length, width) to one of the same; `attend` as `attention.attend`."""
        x = x + self._attention(RMSNorm("attention_norm")(x), attend)
        return x + self._feed_forward_layer(RMSNorm("feed_forward_norm")(x))

    def _attention(self, x: jax.Array, attend: Callable[..., jax.Array]) -> jax.Array:
        width, heads = x.shape[-1], self._heads
        size = width // heads
        # As one product: the gradient of its input is one sum over 'model', and not three.
        qkv = _product("btd,dkhe->btkhe", x, _weights("qkv", (width, 3, heads, size), width))
        query, key, value = (jnp.squeeze(part, 2) for part in jnp.split(qkv, 3, axis=2))
        mixed = attend(rotary(query), rotary(key), value)
        out = _weights("attention_out", (heads, size, width), width, self._out_scale)
        return _product("bthe,hed->btd", mixed, out)

    def _feed_forward_layer(self, x: jax.Array) -> jax.Array:
        width, hidden = x.shape[-1], self._feed_forward
        both = _product("btd,dkf->btkf", x, _weights("gate_up", (width, 2, hidden), width))
        gate, up = (jnp.squeeze(part, 2) for part in jnp.split(both, 2, axis=2))
        down = _weights("down", (hidden, width), hidden, self._out_scale)
        return _product("btf,fd->btd", jax.nn.silu(gate) * up, down)


class RMSNorm(hk.Module):
    """Divides by the root of the mean square, in float32, and multiplies by a learnt scale."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """An array of the shape and type of `x`, normalised over its last dimension."""
        scale = hk.get_parameter("scale", x.shape[-1:], jnp.float32, jnp.ones)
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide**2, axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean_square + _EPSILON) * scale.astype(jnp.float32)).astype(
            x.dtype
        )


def rotary(x: jax.Array) -> jax.Array:
    """Rotates pairs of elements by angles that grow with the position, from 0.

    The product of a query and a key then depends on how far apart they are, not on where they are.

    Args:
      x: of shape (batch, length, heads, an even size).

    Returns:
      An array of its shape and type; computed in float32.
    """
    length, half = x.shape[1], x.shape[-1] // 2
    rates = _ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None, None] * rates
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def _weights(name: str, shape: tuple[int, ...], inputs: int, scale: float = 1.0) -> jax.Array:
    init = hk.initializers.TruncatedNormal(scale / math.sqrt(inputs))
    return hk.get_parameter(name, shape, jnp.float32, init)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """An einsum that is summed in float32, and rounded once; its gradients, too."""
    # Where what is summed over lies along the axis 'model', CPUs add the devices' parts in float32, too: XLA
    # aborts there on a bfloat16 all-reduce. The TPU's compiler rounds the parts first, and sends half as much.
    # A gradient of its own, since JAX's would multiply in float32 whatever the compute type.
    return jnp.einsum(spec, x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def _product_forward(
    spec: str, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(spec, x, w), (x, w)


def _product_backward(
    spec: str, kept: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    (x, w), (left, right, result) = kept, spec.replace("->", ",").split(",")
    return _product(f"{result},{right}->{left}", grad, w), _product(
        f"{left},{result}->{right}", x, grad
    )


_product.defvjp(_product_forward, _product_backward)
