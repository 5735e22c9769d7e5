"""The language model over tokens instead of bytes, with files from one or more sources
packed into rows.
"""

import functools
import math

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

import xshard
from experiments.lm import experiment, model, text
from xshard import data
from xshard.data import pipelines
from xshard.data import text as text_lib


class Words(experiment.LanguageModel):
    """Predicts each token of a row from the earlier tokens of its own file."""

    def __init__(self, config):
        super().__init__(config)
        _check(config)

    @functools.cached_property
    def _tokenizer(self):
        config = self.config.text
        if config.tokenizer:
            tokenizer = text_lib.load_tokenizer(config.tokenizer)
        else:
            every = [path for train, _ in self._sources for path in train]
            spread = np.linspace(
                0, len(every) - 1, min(len(every), config.tokenizer_files)
            )
            files = text_lib.Files([every[int(i)] for i in spread])
            tokenizer = text_lib.train_tokenizer(
                (files[i] for i in range(len(files))), config.vocabulary
            )
        if tokenizer.get_vocab_size() > config.vocabulary:
            raise xshard.UserError(
                f"text.vocabulary={config.vocabulary} must be at least the "
                f"{tokenizer.get_vocab_size()} tokens of "
                f"text.tokenizer={config.tokenizer!r}."
            )
        return tokenizer

    @functools.cached_property
    def _sources(self):
        """The training files and the held-out files of each source."""
        config = self.config.text
        sources = (
            [(name,) for name in config.files]
            if config.weights
            else [tuple(config.files)]
        )
        return [text.documents(source, config.held_out) for source in sources]

    def _rows(self, documents):
        return text_lib.pack(
            documents, text_lib.encoder(self._tokenizer), self.config.text.length + 1
        )

    def train_batches(self, part):
        return pipelines.Streams(self._stream, self.config.text.streams, part)

    def _stream(self, stream):
        rows = [
            self._rows(stream.part(grain.MapDataset.source(text_lib.Files(train))))
            for train, _ in self._sources
        ]
        # All rows have the same length, so weights of rows are weights of tokens.
        return grain.IterDataset.mix(rows, list(self.config.text.weights) or None)

    def eval_data(self):
        held_out = [path for _, held in self._sources for path in held]
        rows = data.stack(
            list(self._rows(grain.MapDataset.source(text_lib.Files(held_out))))
        )
        count = self.config.text.eval_windows
        if 0 < count < len(rows["text"]):
            chosen = np.linspace(0, len(rows["text"]) - 1, count).astype(np.int64)
            rows = {name: array[chosen] for name, array in rows.items()}
        # In a byte-level vocabulary, each letter of a token's name stands for one byte.
        # The end of a file counts as one byte, as in the byte model.
        tokens = self._tokenizer.get_vocab()
        sizes = np.zeros(self.config.text.vocabulary, np.int32)
        sizes[list(tokens.values())] = [
            1 if name == text_lib.END else len(name) for name in tokens
        ]
        return {**rows, "bytes": sizes[rows["text"]]}

    def forward(self, batch, *, is_training):
        del is_training
        network = model.Transformer(
            **self.config.model, vocabulary=self.config.text.vocabulary
        )
        return network(batch["text"][:, :-1], batch["text_segment_ids"][:, :-1])

    def loss(self, outputs, batch):
        losses, counts = _losses(outputs, batch)
        value = jnp.sum(losses) / jnp.maximum(jnp.sum(counts), 1)
        return value, {}

    def weight(self, batch):
        """Returns the number of tokens that `loss` is the mean of."""
        return jnp.sum(_counts(batch))

    def evaluate(self, outputs, batch):
        losses, counts = _losses(outputs, batch)
        values = {
            "loss": losses,
            "tokens": counts,
            "bytes": counts * batch["bytes"][:, 1:],
        }
        return {name: jnp.sum(value, axis=-1) for name, value in values.items()}

    def summarize(self, sums, count):
        nats = sums["loss"]
        bits = nats / sums["bytes"] / math.log(2)
        return {"loss": nats / sums["tokens"], "bits_per_byte": bits}

    def samples(self, predict, key):
        """Continues each prompt of `config.sample` with text from the model, each under
        a line with its prompt.
        """
        config, length = self.config.sample, self.config.text.length
        tokenizer = self._tokenizer
        end = tokenizer.token_to_id(text_lib.END)
        texts = [[end, *tokenizer.encode(prompt).ids] for prompt in config.prompts]
        shape = config.length, len(texts), self.config.text.vocabulary
        noise = np.asarray(jax.random.gumbel(key, shape))
        for place in range(config.length):
            rows = np.zeros((len(texts), length + 1), np.int32)
            for row, written in zip(rows, texts, strict=True):
                row[: min(len(written), length)] = written[-length:]
            logits = np.asarray(
                predict({"text": rows, "text_segment_ids": np.ones_like(rows)})
            )
            ends = [min(len(written), length) - 1 for written in texts]
            logits = logits[np.arange(len(texts)), ends]
            chosen = np.argmax(logits + config.temperature * noise[place], axis=-1)
            for written, token in zip(texts, chosen, strict=True):
                written.append(int(token))
        shown = [
            tokenizer.decode(written[1:], skip_special_tokens=False)
            for written in texts
        ]
        return "\n".join(
            f"--- {prompt!r}\n{experiment.printable(words.split(text_lib.END)[0])}"
            for prompt, words in zip(config.prompts, shown, strict=True)
        )


def _losses(outputs, batch):
    """Returns the cross entropy of each token but the first, in nats, and a mask of the
    tokens that count (1 or 0).

    A token counts if its own file predicts it: not the first token of a file, and not
    padding. Others have loss 0.
    """
    counts = _counts(batch)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        outputs, batch["text"][:, 1:]
    )
    return jnp.where(counts, losses, 0.0), counts.astype(jnp.float32)


def _counts(batch):
    """Returns which tokens but the first count, as booleans."""
    segments = batch["text_segment_ids"]
    return (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)


def _check(config):
    """Raises UserError for values that would otherwise fail deep inside a library."""
    weights, files = config.text.weights, config.text.files
    if weights and (len(weights) != len(files) or min(weights) <= 0):
        raise xshard.UserError(
            f"text.weights={weights!r} must have a number above 0 for each of the "
            f"{len(files)} entries of text.files; or be empty, where all of them are "
            "one source."
        )
    for key in ("streams", "tokenizer_files"):
        if config.text[key] < 1:
            raise xshard.UserError(
                f"text.{key}={config.text[key]!r} must be at least 1."
            )
