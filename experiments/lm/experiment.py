"""A language model of bytes: a transformer that learns to predict the next byte of a
text.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

import xshard
from experiments.lm import attention, model, text

_BITS = 1 / math.log(2)


class LanguageModel(xshard.Supervised):
    """Predicts each byte of a window of text from the bytes before it in the window."""

    def __init__(self, config):
        super().__init__(config)
        _check(config)

    def train_data(self):
        return {"text": self._windows(0, "training")}

    def eval_data(self):
        windows, count = self._windows(1, "held-out"), self.config.text.eval_windows
        if 0 < count < len(windows):
            windows = windows[np.linspace(0, len(windows) - 1, count).astype(np.int64)]
        return {"text": windows}

    def _windows(self, part, what):
        config = self.config.text
        return text.windows(
            text.read(tuple(config.files), config.held_out)[part], config.length, what
        )

    def forward(self, batch, *, is_training):
        del is_training
        return model.Transformer(**self.config.model)(batch["text"][:, :-1])

    def loss(self, outputs, batch):
        value = jnp.mean(_losses(outputs, batch))
        return value, {"bits_per_byte": _BITS * value}

    def optimizer(self):
        config, steps = self.config.optimizer, self.config.steps
        rate = optax.warmup_cosine_decay_schedule(
            0.0,
            config.learning_rate,
            int(config.warmup_fraction * steps),
            steps,
            config.final_fraction * config.learning_rate,
        )
        # The norm is over all parameters, of the gradients' mean over all replicas,
        # since the rule runs after the reduction.
        rule = optax.chain(
            optax.clip_by_global_norm(config.clip_norm),
            optax.adamw(
                rate,
                config.b1,
                config.b2,
                weight_decay=config.weight_decay,
                mask=_decays,
            ),
        )
        opt = xshard.OptaxOptimizer(
            rule, name="adamw", schedules={"learning_rate": rate}
        )
        opt = xshard.CrossShardOptimizer(
            opt, slice_axis_name="slice", **self.config.reduction
        )
        scale = self.config.loss_scale
        if scale.kind == "none":
            return opt
        if scale.kind == "fixed":
            return xshard.MixedPrecisionLossScaleOptimizer(
                opt, scale.initial_loss_scale
            )
        values = {
            key: scale[key]
            for key in ("initial_loss_scale", "increment_period", "multiplier")
        }
        return xshard.MixedPrecisionLossScaleOptimizer(
            opt, xshard.DynamicLossScale(**values)
        )

    def evaluate(self, outputs, batch):
        losses = jnp.mean(_losses(outputs, batch), axis=-1)
        return {"loss": losses, "bits_per_byte": _BITS * losses}

    def ensemble(self, outputs):
        # The log of the mean probability, which serves as logits.
        return jax.nn.logsumexp(jax.nn.log_softmax(outputs), axis=0) - math.log(
            len(outputs)
        )

    def sharding_rules(self):
        # Parameters have a leading dimension of layers. Heads and the hidden size are
        # sharded, so that a layer's forward pass sums twice over 'model'. Embedding and
        # head, with 256 symbols, are too small to shard.
        return (
            ("/qkv$", jax.P(None, None, None, "model", None)),
            ("/attention_out$", jax.P(None, "model", None, None)),
            ("/gate_up$", jax.P(None, None, None, "model")),
            ("/down$", jax.P(None, "model", None)),
        )

    def samples(self, predict, key):
        """Continues each prompt of `config.sample` with text from the model.

        Args:
          predict: takes a batch {"text": uint8 of shape (prompts, length + 1)} to
            logits of shape (prompts, length, 256). The last byte of a row is ignored.
          key: a key of `jax.random`, which determines the text.

        Returns:
          The texts, each under a line with its prompt.
        """
        config, length = self.config.sample, self.config.text.length
        # Each text starts with the separator, as a file in the training text follows
        # the end of the file before it.
        texts = [[text.SEPARATOR, *prompt.encode()] for prompt in config.prompts]
        # The Gumbel-max trick: the argmax of logits plus Gumbel noise is a sample from
        # their distribution.
        noise = np.asarray(
            jax.random.gumbel(key, (config.length, len(texts), model.BYTES))
        )
        for place in range(config.length):
            # All windows have one shape, to compile once. Causal attention ignores the
            # zeros after a text.
            rows = np.zeros((len(texts), length + 1), np.uint8)
            for row, written in zip(rows, texts, strict=True):
                row[: min(len(written), length)] = written[-length:]
            logits = np.asarray(predict({"text": rows}), np.float32)
            ends = [min(len(written), length) - 1 for written in texts]
            logits = logits[np.arange(len(texts)), ends]
            chosen = np.argmax(logits + config.temperature * noise[place], axis=-1)
            for written, byte in zip(texts, chosen, strict=True):
                written.append(int(byte))
        return "\n".join(
            f"--- {prompt!r}\n{_show(written[1:])}"
            for prompt, written in zip(config.prompts, texts, strict=True)
        )


def _losses(outputs, batch):
    """Returns the cross entropy of each byte but the first, in nats, of shape (batch,
    length).
    """
    targets = batch["text"][:, 1:].astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets)


def _decays(params):
    """Returns whether weight decay applies to each parameter: to matrices, not to the
    scales of norms.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key != "scale", params
    )


def _show(written):
    """Returns bytes as text, up to the first end of a file."""
    return printable(
        bytes(written).split(bytes([text.SEPARATOR]))[0].decode("utf8", "replace")
    )


def printable(written):
    """Returns a text with control characters replaced, which could move a terminal's
    cursor.
    """
    return "".join(
        c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for c in written
    )


def _check(config):
    """Raises UserError for values that would otherwise fail deep inside a library, or
    train nothing.
    """
    network, optimizer, parts = config.model, config.optimizer, config.model_parallel
    scale, sample = config.loss_scale, config.sample
    size = network.width // max(1, network.heads)
    kinds = ("dynamic", "fixed", "none")
    for key, value, fits, rule in (
        ("text.length", config.text.length, config.text.length >= 1, "at least 1"),
        ("text.held_out", config.text.held_out, 0 < config.text.held_out < 1, "between 0 and 1"),
        ("text.eval_windows", config.text.eval_windows, config.text.eval_windows >= 0,
         "at least 1, or 0 for all"),
        *((f"model.{name}", network[name], network[name] >= 1, "at least 1")
          for name in ("layers", "width", "heads", "feed_forward")),
        ("model.heads", network.heads, network.width % max(1, network.heads) == 0,
         f"a divisor of model.width={network.width}"),
        ("model.heads", network.heads, size % 2 == 0,
         f"such that a head, of model.width={network.width} / heads = {size}, has an "
         "even size: rotary positions rotate pairs"),
        *((f"model.{name}", network[name], network[name] % parts == 0,
           f"a multiple of model_parallel={parts}") for name in ("heads", "feed_forward")),
        ("model.attention", network.attention, network.attention in attention.KINDS,
         f"one of {', '.join(attention.KINDS)}"),
        ("optimizer.warmup_fraction", optimizer.warmup_fraction,
         0 <= optimizer.warmup_fraction < 1, "from 0 to below 1"),
        ("optimizer.clip_norm", optimizer.clip_norm, optimizer.clip_norm > 0, "above 0"),
        ("loss_scale.kind", scale.kind, scale.kind in kinds, f"one of {', '.join(kinds)}"),
        ("sample.prompts", sample.prompts, all(isinstance(p, str) for p in sample.prompts),
         "a tuple of texts"),
        ("sample.length", sample.length, sample.length >= 0, "at least 0"),
        ("sample.temperature", sample.temperature, sample.temperature >= 0, "at least 0"),
    ):  # fmt: skip
        if not fits:
            raise xshard.UserError(f"{key}={value!r} must be {rule}.")
