"""A language model of bytes: a transformer that predicts the next byte of a text."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

import xshard
from experiments.lm import attention, model, text

# The bits of a nat.
_BITS = 1 / math.log(2)


class LanguageModel(xshard.Supervised):
    """Predicts each byte of a window of text from the bytes before it in the window."""

    def __init__(self, config):
        super().__init__(config)
        _check(config)

    def train_data(self):
        return {"text": self._windows(0, "training")}

    def eval_data(self):
        windows = self._windows(1, "held-out")
        count = self.config.text.eval_windows
        if 0 < count < len(windows):
            chosen = np.linspace(0, len(windows) - 1, count).astype(np.int64)
            windows = windows[chosen]
        return {"text": windows}

    def _windows(self, part, what):
        config = self.config.text
        parts = text.read(tuple(config.files), config.held_out)
        return text.windows(parts[part], config.length, what)

    def forward(self, batch, *, is_training):
        del is_training
        network = model.Transformer(**self.config.model, fp8=bool(self.config.fp8.dots))
        return network(batch["text"][:, :-1])

    def loss(self, outputs, batch):
        value = jnp.mean(_losses(outputs, batch))
        return value, {"bits_per_byte": _BITS * value}

    def optimizer(self):
        config = self.config.optimizer
        rate = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=config.learning_rate,
            warmup_steps=int(config.warmup_fraction * self.config.steps),
            decay_steps=self.config.steps,
            end_value=config.final_fraction * config.learning_rate,
        )
        adamw = optax.adamw(
            rate,
            b1=config.b1,
            b2=config.b2,
            weight_decay=config.weight_decay,
            mask=_decays,
        )
        # The norm is over all parameters, of the gradients' mean over all replicas,
        # since the rule runs after the reduction.
        rule = optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)
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
        dynamic = xshard.DynamicLossScale(
            initial_loss_scale=scale.initial_loss_scale,
            increment_period=scale.increment_period,
            multiplier=scale.multiplier,
        )
        return xshard.MixedPrecisionLossScaleOptimizer(opt, dynamic)

    def evaluate(self, outputs, batch):
        losses = jnp.mean(_losses(outputs, batch), axis=-1)
        return {"loss": losses, "bits_per_byte": _BITS * losses}

    def ensemble(self, outputs):
        # The log of the mean probability, which serves as logits.
        log_probabilities = jax.nn.log_softmax(outputs)
        log_sum = jax.nn.logsumexp(log_probabilities, axis=0)
        return log_sum - math.log(len(outputs))

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
        # Each text starts with the separator, as a file in the training text follows
        # the end of the file before it.
        prompts = self.config.sample.prompts
        texts = [[text.SEPARATOR, *prompt.encode()] for prompt in prompts]
        continue_texts(
            texts,
            lambda rows: predict({"text": rows.astype(np.uint8)}),
            key,
            symbols=model.BYTES,
            window=self.config.text.length,
            config=self.config.sample,
        )
        shown = []
        for prompt, written in zip(prompts, texts, strict=True):
            shown.append(f"--- {prompt!r}\n{_show(written[1:])}")
        return "\n".join(shown)


def continue_texts(texts, predict, key, *, symbols, window, config):
    """Appends symbols that a model draws to texts.

    Args:
      texts: lists of symbols, that is of bytes or tokens.
      predict: takes int32 rows of shape (texts, window + 1) to logits of shape (texts,
        window, symbols), of which each ignores what follows it.
      key: a key of `jax.random`.
      symbols: the number of symbols.
      window: the largest number of symbols that the model sees.
      config: `length`, the number of symbols to append, and `temperature`.
    """
    # The Gumbel-max trick: the argmax of logits plus Gumbel noise is a sample from
    # their distribution.
    noise = jax.random.gumbel(key, (config.length, len(texts), symbols))
    noise = config.temperature * np.asarray(noise)
    for noise_of_position in noise:
        # All windows have one shape, to compile once.
        rows = np.zeros((len(texts), window + 1), np.int32)
        ends = []
        for row, written in zip(rows, texts, strict=True):
            seen = written[-window:]
            row[: len(seen)] = seen
            ends.append(len(seen) - 1)
        logits = np.asarray(predict(rows), np.float32)
        logits = logits[np.arange(len(texts)), ends]
        chosen = np.argmax(logits + noise_of_position, axis=-1)
        for written, symbol in zip(texts, chosen, strict=True):
            written.append(int(symbol))


def _losses(outputs, batch):
    """Returns the cross entropy of each byte but the first, in nats.

    Its shape is (batch, length).
    """
    targets = batch["text"][:, 1:].astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets)


def _decays(params):
    """Returns whether weight decay applies to each parameter.

    It applies to matrices, not to the scales of norms.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key != "scale", params
    )


def _show(written):
    """Returns bytes as text, up to the first end of a file."""
    first, *_ = bytes(written).split(bytes([text.SEPARATOR]))
    return printable(first.decode("utf8", "replace"))


def printable(written):
    """Returns a text with control characters replaced.

    They could move a terminal's cursor.
    """
    shown = ""
    for character in written:
        is_shown = character in "\n\t" or character.isprintable()
        shown += character if is_shown else "\N{REPLACEMENT CHARACTER}"
    return shown


def _check(config):
    """Raises UserError for values that fail inside a library, or train nothing."""
    _check_text(config.text)
    _check_model(config.model, config.model_parallel)
    _check_optimizer(config.optimizer)
    _check_sample(config.sample)


def _check_text(config):
    _require(config.length >= 1, "text.length", config.length, "at least 1")
    _require(
        0 < config.held_out < 1, "text.held_out", config.held_out, "between 0 and 1"
    )
    _require(
        config.eval_windows >= 0,
        "text.eval_windows",
        config.eval_windows,
        "at least 1, or 0 for all",
    )


def _check_model(config, model_parallel):
    for name in ("layers", "width", "heads", "feed_forward"):
        _require(config[name] >= 1, f"model.{name}", config[name], "at least 1")
    size = config.width // config.heads
    _require(
        config.width % config.heads == 0,
        "model.heads",
        config.heads,
        f"a divisor of model.width={config.width}",
    )
    _require(
        size % 2 == 0,
        "model.heads",
        config.heads,
        f"such that a head, of model.width={config.width} / heads = {size}, has an "
        "even size: rotary positions rotate pairs",
    )
    for name in ("heads", "feed_forward"):
        _require(
            config[name] % model_parallel == 0,
            f"model.{name}",
            config[name],
            f"a multiple of model_parallel={model_parallel}",
        )
    _require(
        config.attention in attention.KINDS,
        "model.attention",
        config.attention,
        f"one of {', '.join(attention.KINDS)}",
    )


def _check_optimizer(config):
    _require(
        0 <= config.warmup_fraction < 1,
        "optimizer.warmup_fraction",
        config.warmup_fraction,
        "from 0 to below 1",
    )
    _require(config.clip_norm > 0, "optimizer.clip_norm", config.clip_norm, "above 0")


def _check_sample(config):
    _require(
        all(isinstance(prompt, str) for prompt in config.prompts),
        "sample.prompts",
        config.prompts,
        "a tuple of texts",
    )
    for name in ("length", "temperature"):
        _require(config[name] >= 0, f"sample.{name}", config[name], "at least 0")


def _require(fits, key, value, rule):
    if not fits:
        raise xshard.UserError(f"{key}={value!r} must be {rule}.")
