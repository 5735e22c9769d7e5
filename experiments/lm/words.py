"""The language model over tokens instead of bytes.

Files from one or more sources are packed into rows.
"""

import functools
import itertools
import math

import grain
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
        # The token that ends a text.
        self._end = config.text.get("end", text_lib.END)

    @functools.cached_property
    def _tokenizer(self):
        config = self.config.text
        if config.tokenizer:
            tokenizer = text_lib.load_tokenizer(config.tokenizer, self._end)
        else:
            paths = self._tokenizer_texts()
            # Evenly spread over all files.
            count = min(len(paths), config.tokenizer_files)
            spread = np.linspace(0, len(paths) - 1, count)
            files = text_lib.Files([paths[int(i)] for i in spread])
            texts = (files[i] for i in range(len(files)))
            tokenizer = text_lib.train_tokenizer(texts, config.vocabulary, self._end)
        # The numbers of tokens may have gaps.
        size = max(tokenizer.get_vocab().values()) + 1
        if size > config.vocabulary:
            raise xshard.UserError(
                f"text.vocabulary={config.vocabulary} must be at least the {size} "
                f"tokens of text.tokenizer={config.tokenizer!r}."
            )
        return tokenizer

    def _tokenizer_texts(self):
        """Returns the paths of the files to train the tokenizer on."""
        paths = []
        for train, _ in self._sources:
            paths += train
        return paths

    @functools.cached_property
    def _sources(self):
        """The training files and the held-out files of each source."""
        config = self.config.text
        sources = [tuple(config.files)]
        if config.weights:
            sources = [(name,) for name in config.files]
        return [text.documents(source, config.held_out) for source in sources]

    def _rows(self, documents):
        encode = text_lib.encoder(self._tokenizer, self._end)
        return self._packed(documents, encode)

    def _packed(self, documents, encode):
        return text_lib.pack(documents, encode, self.config.text.length + 1)

    def train_batches(self, part):
        return pipelines.Streams(self._stream, self.config.text.streams, part)

    def _stream(self, stream):
        rows = []
        for train, _ in self._sources:
            documents = grain.MapDataset.source(text_lib.Files(train))
            rows.append(self._rows(stream.part(documents)))
        # All rows have the same length, so weights of rows are weights of tokens.
        return grain.IterDataset.mix(rows, list(self.config.text.weights) or None)

    def eval_data(self):
        paths = []
        for _, held_out in self._sources:
            paths += held_out
        documents = grain.MapDataset.source(text_lib.Files(paths))
        rows = data.stack(list(self._rows(documents)))
        # Packed as the tokens are. The end of a file counts as one byte, as in the byte
        # model.
        count_bytes = text_lib.byte_counter(self._tokenizer, self._end)
        rows["bytes"] = data.stack(list(self._packed(documents, count_bytes)))["text"]
        count = self.config.text.eval_windows
        if 0 < count < len(rows["text"]):
            chosen = np.linspace(0, len(rows["text"]) - 1, count).astype(np.int64)
            rows = {name: array[chosen] for name, array in rows.items()}
        return rows

    def forward(self, batch, *, is_training):
        del is_training
        network = model.Transformer(
            **self.config.model,
            vocabulary=self.config.text.vocabulary,
            fp8=bool(self.config.fp8.dots),
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
        sizes = counts * batch["bytes"][:, 1:]
        return {
            "loss": jnp.sum(losses, axis=-1),
            "tokens": jnp.sum(counts, axis=-1),
            "bytes": jnp.sum(sizes, axis=-1),
        }

    def summarize(self, sums, count):
        nats = sums["loss"]
        bits = nats / sums["bytes"] / math.log(2)
        return {"loss": nats / sums["tokens"], "bits_per_byte": bits}

    def samples(self, predict, key):
        """Continues each prompt of `config.sample` with text from the model.

        Returns:
          The texts, each under a line with its prompt.
        """
        tokenizer = self._tokenizer
        end = tokenizer.token_to_id(self._end)
        encode = text_lib.encoder(tokenizer, self._end)
        prompts = self.config.sample.prompts
        texts = [[end, *encode(prompt)[:-1].tolist()] for prompt in prompts]

        def predict_rows(rows):
            batch = {
                "text": rows,
                "text_segment_ids": np.ones_like(rows),
                "text_positions": np.zeros_like(rows) + np.arange(rows.shape[1]),
            }
            return predict(batch)

        experiment.continue_texts(
            texts,
            predict_rows,
            key,
            symbols=self.config.text.vocabulary,
            window=self.config.text.length,
            config=self.config.sample,
        )
        shown = []
        for prompt, written in zip(prompts, texts, strict=True):
            tokens = list(itertools.takewhile(lambda token: token != end, written[1:]))
            decoded = tokenizer.decode(tokens, skip_special_tokens=False)
            shown.append(f"--- {prompt!r}\n{experiment.printable(decoded)}")
        return "\n".join(shown)


def _losses(outputs, batch):
    """Returns the cross entropy of each token but the first, in nats, and a mask.

    The mask is 1 for tokens that count, else 0. A token counts if its own file predicts
    it: not the first token of a file, and not padding. Others have loss 0.
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
    weights = config.text.weights
    files = config.text.files
    if weights and (len(weights) != len(files) or not _have_ratios(weights)):
        raise xshard.UserError(
            f"text.weights={weights!r} must have a number above 0 for each of the "
            f"{len(files)} entries of text.files, with finite ratios; or be empty, "
            "where all of them are one source."
        )
    for key in ("streams", "tokenizer_files"):
        if config.text[key] < 1:
            raise xshard.UserError(
                f"text.{key}={config.text[key]!r} must be at least 1."
            )


def _have_ratios(weights):
    """Returns whether grain can mix by these weights."""
    try:
        is_good = all(0 < weight < math.inf for weight in weights)
        # It divides by the smallest one.
        return is_good and math.isfinite(100 / min(weights) * max(weights))
    except (TypeError, OverflowError):
        return False
