"""A language model over tokens with the architecture of GPT-2, whose weights the hub
has.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
`HUB` converts the hub's arrays to these parameters, and back.
"""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

import xshard
from experiments.lm import attention, words
from xshard import checkpoint

_EPSILON = 1e-5
# The hub's names of arrays, and the paths of these parameters.
_WHOLE = {
    "wte.weight": "params/gpt2/wte",
    "wpe.weight": "params/gpt2/wpe",
    "ln_f.weight": "params/gpt2/norm/scale",
    "ln_f.bias": "params/gpt2/norm/offset",
}
# Of each layer, where these parameters are one array of all layers.
_LAYERS = "params/gpt2/layers/"
_STACKED = {
    "ln_1.weight": "attention_norm/scale",
    "ln_1.bias": "attention_norm/offset",
    "attn.c_proj.weight": "out/w",
    "attn.c_proj.bias": "out/b",
    "ln_2.weight": "mlp_norm/scale",
    "ln_2.bias": "mlp_norm/offset",
    "mlp.c_fc.weight": "up/w",
    "mlp.c_fc.bias": "up/b",
    "mlp.c_proj.weight": "down/w",
    "mlp.c_proj.bias": "down/b",
}
# Likewise, where the hub has queries, keys and values side by side.
_JOINED = {"attn.c_attn.weight": "w", "attn.c_attn.bias": "b"}


class Gpt2(hk.Module):
    """Layers with norms before them, learned positions, and a tied head.

    Each parameter of a layer has a leading dimension of layers.
    """

    def __init__(
        self, layers, width, heads, feed_forward, *, positions, attention, vocabulary
    ):
        super().__init__(name="gpt2")
        self._layers = layers
        self._width = width
        self._heads = heads
        self._feed_forward = feed_forward
        self._positions = positions
        self._kind = attention
        self._vocabulary = vocabulary

    def __call__(self, tokens, segments, positions):
        """Returns the logits, float32, of shape (batch, length, vocabulary).

        Args:
          tokens: integers of shape (batch, length).
          segments: the number of each token's text, of the same shape. A token sees
            those before it in its own text.
          positions: the position of each token in its text, of the same shape.
        """
        normal = hk.initializers.RandomNormal(0.02)
        shape = (self._vocabulary, self._width)
        embedding = hk.get_parameter("wte", shape, init=normal)
        shape = (self._positions, self._width)
        of_positions = hk.get_parameter("wpe", shape, init=normal)
        x = embedding[tokens] + of_positions[positions]
        layer = functools.partial(
            _layer,
            segments=segments,
            heads=self._heads,
            feed_forward=self._feed_forward,
            kind=self._kind,
        )
        x = hk.experimental.layer_stack(self._layers, name="layers")(layer)(x)
        x = _norm(x, "norm")
        return (x @ embedding.T).astype(jnp.float32)


def _layer(x, *, segments, heads, feed_forward, kind):
    width = x.shape[-1]
    mixed = _attention(_norm(x, "attention_norm"), segments, heads, kind)
    x = x + _linear(mixed, width, "out")
    hidden = _linear(_norm(x, "mlp_norm"), feed_forward, "up")
    # GPT-2 has the tanh form of GELU.
    hidden = jax.nn.gelu(hidden, approximate=True)
    return x + _linear(hidden, width, "down")


def _attention(x, segments, heads, kind):
    batch, length, width = x.shape
    split = lambda y: y.reshape(batch, length, heads, width // heads)
    query, key, value = [split(_linear(x, width, name)) for name in "qkv"]
    mixed = attention.attend(query, key, value, segments, kind=kind)
    return mixed.reshape(batch, length, width)


def _linear(x, width, name):
    init = hk.initializers.RandomNormal(0.02)
    return hk.Linear(width, w_init=init, name=name)(x)


def _norm(x, name):
    # In float16, the gradient of the inverse root of a small variance is infinite.
    norm = hk.LayerNorm(-1, True, True, eps=_EPSILON, name=name)
    return norm(x.astype(jnp.float32)).astype(x.dtype)


class LanguageModel(words.Words):
    """The language model over tokens with this network."""

    def __init__(self, config):
        super().__init__(config)
        if config.text.length > config.model.positions:
            raise xshard.UserError(
                f"text.length={config.text.length} must be at most model.positions="
                f"{config.model.positions}, the positions that have a parameter."
            )

    def forward(self, batch, *, is_training):
        del is_training
        network = Gpt2(**self.config.model, vocabulary=self.config.text.vocabulary)
        return network(
            batch["text"][:, :-1],
            batch["text_segment_ids"][:, :-1],
            batch["text_positions"][:, :-1],
        )

    def sharding_rules(self):
        return ()


def from_hub(arrays):
    """Returns these parameters, by path.

    Args:
      arrays: the hub's arrays, by name. `del` leaves one out.
    """
    head = "lm_head.weight"
    if head in arrays:
        if not np.array_equal(arrays[head], arrays["wte.weight"], equal_nan=True):
            raise xshard.UserError(
                f"'{head}' does not equal 'wte.weight', so it is more than the "
                "embedding, to which the head is tied here, and would be lost. Train "
                "a model with a parameter for it"
            )
        del arrays[head]
    for name in arrays:
        # The causal masks, which old files have.
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            del arrays[name]
    layers = len({name.split(".")[1] for name in arrays if name.startswith("h.")})
    of_layers = lambda name: np.stack(
        [arrays[f"h.{layer}.{name}"] for layer in range(layers)]
    )
    params = {path: arrays[name] for name, path in _WHOLE.items()}
    for name, path in _STACKED.items():
        params[_LAYERS + path] = of_layers(name)
    for name, kind in _JOINED.items():
        parts = np.split(of_layers(name), 3, axis=-1)
        for module, part in zip("qkv", parts, strict=True):
            params[f"{_LAYERS}{module}/{kind}"] = part
    return params


def to_hub(params):
    """Returns the hub's arrays, by name.

    Args:
      params: these parameters, by path.
    """
    arrays = {name: params[path] for name, path in _WHOLE.items()}
    stacked = {name: params[_LAYERS + path] for name, path in _STACKED.items()}
    for name, kind in _JOINED.items():
        parts = [params[f"{_LAYERS}{module}/{kind}"] for module in "qkv"]
        stacked[name] = np.concatenate(parts, axis=-1)
    for name, of_layers in stacked.items():
        for layer, array in enumerate(of_layers):
            arrays[f"h.{layer}.{name}"] = array
    return arrays


HUB = checkpoint.Conversion(from_hub, to_hub, prefix="transformer.")
