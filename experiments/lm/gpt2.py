"""A language model with the architecture of GPT-2, whose weights the hub has.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019. The
map `gpt2_map.json` beside this file takes the hub's arrays to these parameters, and
back.
"""

import functools

import haiku as hk
import jax
import jax.numpy as jnp

from experiments.lm import experiment

_EPSILON = 1e-5


class Gpt2(hk.Module):
    """Layers with norms before them, learned positions, and a tied head.

    Each parameter of a layer has a leading dimension of layers.
    """

    def __init__(self, layers, width, heads, feed_forward, *, vocabulary, length):
        super().__init__(name="gpt2")
        self._layers = layers
        self._width = width
        self._heads = heads
        self._feed_forward = feed_forward
        self._vocabulary = vocabulary
        self._length = length

    def __call__(self, tokens):
        """Returns the logits, float32, of shape (batch, length, vocabulary).

        Args:
          tokens: integers of shape (batch, length).
        """
        normal = hk.initializers.RandomNormal(0.02)
        shape = (self._vocabulary, self._width)
        embedding = hk.get_parameter("wte", shape, init=normal)
        shape = (self._length, self._width)
        positions = hk.get_parameter("wpe", shape, init=normal)
        x = embedding[tokens.astype(jnp.int32)] + positions[: tokens.shape[1]]
        layer = functools.partial(
            _layer, heads=self._heads, feed_forward=self._feed_forward
        )
        x = hk.experimental.layer_stack(self._layers, name="layers")(layer)(x)
        x = _norm(x, "norm")
        return (x @ embedding.T).astype(jnp.float32)


def _layer(x, *, heads, feed_forward):
    width = x.shape[-1]
    mixed = _attention(_norm(x, "attention_norm"), heads)
    x = x + _linear(mixed, width, "out")
    hidden = _linear(_norm(x, "mlp_norm"), feed_forward, "up")
    # GPT-2 has the tanh form of GELU.
    hidden = jax.nn.gelu(hidden, approximate=True)
    return x + _linear(hidden, width, "down")


def _attention(x, heads):
    batch, length, width = x.shape
    split = lambda y: y.reshape(batch, length, heads, width // heads)
    query, key, value = [split(_linear(x, width, name)) for name in "qkv"]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32)
    scores *= (width // heads) ** -0.5
    is_before = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(is_before, scores, -jnp.inf))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value)
    return mixed.reshape(batch, length, width)


def _linear(x, width, name):
    init = hk.initializers.RandomNormal(0.02)
    return hk.Linear(width, w_init=init, name=name)(x)


def _norm(x, name):
    return hk.LayerNorm(-1, True, True, eps=_EPSILON, name=name)(x)


class LanguageModel(experiment.LanguageModel):
    """The language model of bytes with this network."""

    def forward(self, batch, *, is_training):
        del is_training
        config = self.config.model
        network = Gpt2(
            config.layers,
            config.width,
            config.heads,
            config.feed_forward,
            vocabulary=256,
            length=self.config.text.length,
        )
        return network(batch["text"][:, :-1])

    def sharding_rules(self):
        return ()
