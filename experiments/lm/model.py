"""A decoder-only transformer over bytes.

It uses pre-norm (Xiong et al., 2020, https://arxiv.org/abs/2002.04745) with RMSNorm
(Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467), rotary positions (Su et
al., 2021, https://arxiv.org/abs/2104.09864), and a gated feed-forward layer, SwiGLU,
which is better than GELU with equally many parameters (Shazeer, 2020,
https://arxiv.org/abs/2002.05202).

Matrix products use the parameters' dtype, which is the compute dtype. Norms, softmax,
rotations and logits are computed in float32.
"""

import functools
import math
from collections.abc import Callable

import haiku as hk
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import xshard
from experiments.lm import attention as attention_lib

BYTES = 256
_EPSILON = 1e-6
_ROTARY_BASE = 10_000.0
# The activations of a layer that a policy of `remat` can name: the products before the
# nonlinearities, and what is added to the residual stream.
QKV = "qkv"
ATTENTION = "attention"
GATE_UP = "gate_up"
DOWN = "down"
NAMES = (QKV, ATTENTION, GATE_UP, DOWN)


class Transformer(hk.Module):
    """A transformer that predicts the next byte, or token, at each position.

    Layers are scanned, so the program is only as large as for one layer, and parameters
    have a leading dimension of layers. The embedding and the output matrix are separate
    arrays: with 256 symbols the second one costs almost nothing, and the output matrix
    can begin at zero, where all bytes are equally likely.
    """

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        feed_forward: int,
        *,
        remat: bool | str,
        attention: str = attention_lib.AUTO,
        vocabulary: int = BYTES,
        fp8: bool = False,
    ):
        """Creates the module.

        Args:
          layers: the number of layers.
          width: the size of the residual stream.
          heads: the number of attention heads, each of width / heads.
          feed_forward: the hidden size of the feed-forward layer.
          remat: which activations of a layer are computed again for its gradient: the
            value of `xshard.remat_policy`, which may name those of `NAMES`.
          attention: the `kind` of `attention.attend`.
          vocabulary: the number of bytes, or of tokens.
          fp8: whether the layers multiply by their weights in float8. The embedding and
            the output matrix stay as they are.
        """
        super().__init__(name="transformer")
        self._layers = layers
        self._width = width
        self._heads = heads
        self._feed_forward = feed_forward
        self._remat = remat
        self._attention = attention
        self._vocabulary = vocabulary
        self._fp8 = fp8

    def __call__(self, text: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        """Computes logits.

        Args:
          text: bytes or tokens, of shape (batch, length).
          segments: integers of the same shape; a token attends only to tokens of its
            own segment. None: to all before it. Positions do not restart in each
            segment, since with rotary positions only distances matter.

        Returns:
          Float32 logits of shape (batch, length, vocabulary).
        """
        init = hk.initializers.TruncatedNormal(1.0)
        table = hk.get_parameter(
            "embedding", (self._vocabulary, self._width), jnp.float32, init
        )
        # The lookup is in float32 so that a byte's gradients from its many positions
        # are summed in float32.
        x = jnp.asarray(table, jnp.float32)[text].astype(table.dtype)

        attend = functools.partial(
            attention_lib.attend, segments=segments, kind=self._attention
        )

        def layer(x: jax.Array) -> jax.Array:
            make = functools.partial(Layer, fp8=self._fp8)
            return make(self._layers, self._heads, self._feed_forward)(x, attend)

        if self._remat is not False:
            policy = xshard.remat_policy(self._remat, names=NAMES)
            layer = hk.remat(layer, policy=policy)
        x = hk.layer_stack(self._layers, name="layers")(layer)(x)
        x = RMSNorm("norm")(x)
        head = hk.get_parameter(
            "head", (self._width, self._vocabulary), jnp.float32, jnp.zeros
        )
        return jnp.einsum("btd,dv->btv", x, head, preferred_element_type=jnp.float32)


class Layer(hk.Module):
    """Causal attention, then the feed-forward layer, each added to its input."""

    def __init__(
        self, layers: int, heads: int, feed_forward: int, *, fp8: bool = False
    ):
        """Creates one of `layers` layers."""
        super().__init__(name="layer")
        self._heads = heads
        self._feed_forward = feed_forward
        self._fp8 = fp8
        # Each layer adds to the residual stream twice. This scale keeps its variance
        # from growing with the depth: Radford et al., "Language Models are Unsupervised
        # Multitask Learners", 2019, section 2.3.
        self._out_scale = 1 / math.sqrt(2 * layers)

    def __call__(self, x: jax.Array, attend: Callable[..., jax.Array]) -> jax.Array:
        """Returns the layer's output.

        Args:
          x: an array of shape (batch, length, width).
          attend: a function like `attention.attend`.

        Returns:
          An array of the same shape and dtype.
        """
        x = x + self._attention(RMSNorm("attention_norm")(x), attend)
        return x + self._feed_forward_layer(RMSNorm("feed_forward_norm")(x))

    def _attention(self, x: jax.Array, attend: Callable[..., jax.Array]) -> jax.Array:
        width = x.shape[-1]
        heads = self._heads
        size = width // heads
        # Query, key and value are one product, so that the gradient of its input is one
        # sum over 'model', not three.
        weights = _weights("qkv", (width, 3, heads, size), width)
        qkv = checkpoint_name(self._multiply("btd,dkhe->btkhe", x, weights, QKV), QKV)
        query, key, value = (jnp.squeeze(part, 2) for part in jnp.split(qkv, 3, axis=2))
        mixed = attend(rotary(query), rotary(key), value)
        out = _weights("attention_out", (heads, size, width), width, self._out_scale)
        return checkpoint_name(
            self._multiply("bthe,hed->btd", mixed, out, ATTENTION), ATTENTION
        )

    def _feed_forward_layer(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        hidden = self._feed_forward
        weights = _weights("gate_up", (width, 2, hidden), width)
        gate_up = checkpoint_name(
            self._multiply("btd,dkf->btkf", x, weights, GATE_UP), GATE_UP
        )
        gate, up = (jnp.squeeze(part, 2) for part in jnp.split(gate_up, 2, axis=2))
        down = _weights("down", (hidden, width), hidden, self._out_scale)
        out = self._multiply("btf,fd->btd", jax.nn.silu(gate) * up, down, DOWN)
        return checkpoint_name(out, DOWN)

    # A product's name follows the method that asks for it.
    @hk.transparent
    def _multiply(self, spec: str, x: jax.Array, w: jax.Array, name: str) -> jax.Array:
        """Computes an einsum of an input and weights, whose sums are over all
        dimensions of the input but the first two.
        """
        if not self._fp8:
            return _product(spec, x, w)
        summed = range(x.ndim - 2)
        dims = (([2 + axis for axis in summed], list(summed)), ((), ()))
        return xshard.fp8_dot_general(x, w, dims, name=name)


class RMSNorm(hk.Module):
    """Divides by the root of the mean square, and multiplies by a learned scale.

    Both are computed in float32.
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes an array over its last dimension; keeps its shape and dtype."""
        scale = hk.get_parameter("scale", x.shape[-1:], jnp.float32, jnp.ones)
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide**2, axis=-1, keepdims=True)
        normalized = wide * jax.lax.rsqrt(mean_square + _EPSILON)
        return (normalized * scale.astype(jnp.float32)).astype(x.dtype)


def rotary(x: jax.Array) -> jax.Array:
    """Rotates pairs of elements by angles that grow with the position, from 0.

    The product of a query and a key then depends on their distance, not on their
    positions.

    Args:
      x: an array of shape (batch, length, heads, size), with an even size.

    Returns:
      An array of the same shape and dtype; computed in float32.
    """
    length = x.shape[1]
    half = x.shape[-1] // 2
    rates = _ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None, None] * rates
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    rotated = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return rotated.astype(x.dtype)


def _weights(
    name: str, shape: tuple[int, ...], inputs: int, scale: float = 1.0
) -> jax.Array:
    init = hk.initializers.TruncatedNormal(scale / math.sqrt(inputs))
    return hk.get_parameter(name, shape, jnp.float32, init)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """Computes an einsum, and its gradients, with sums in float32."""
    # If the summed dimension is sharded over 'model', CPUs also add the devices'
    # partial sums in float32, because XLA for CPUs aborts on a bfloat16 all-reduce. The
    # TPU compiler rounds partial sums first and sends half the bytes. The gradient is
    # custom because JAX's would multiply in float32 whatever the compute dtype.
    return jnp.einsum(spec, x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def _product_forward(
    spec: str, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(spec, x, w), (x, w)


def _product_backward(
    spec: str, kept: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = kept
    left, right, result = spec.replace("->", ",").split(",")
    x_grad = _product(f"{result},{right}->{left}", grad, w)
    w_grad = _product(f"{left},{result}->{right}", x, grad)
    return x_grad, w_grad


_product.defvjp(_product_forward, _product_backward)
