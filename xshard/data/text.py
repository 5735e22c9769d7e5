"""Texts as packed rows of tokens: files and records, tokenizers, packing.

Each is a stage of a grain pipeline, and can be combined with grain's own stages, such
as `grain.IterDataset.mix`. `xshard.data.pipelines.Streams` makes batches from the
result.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xshard import errors

if TYPE_CHECKING:
    import grain

# A `tokenizers.Tokenizer`; the package is optional.
Tokenizer = Any
# The token that ends a document.
END = "<|end|>"
# The read-ahead of a stream. A process runs several streams, so each reads with one
# thread.
_READ_THREADS = 1
_READ_AHEAD = 16


class Files:
    """A source of texts: file i is text i, a `str`."""

    def __init__(self, paths: Sequence[str | os.PathLike]):
        """Checks that all files exist. Each is read only when it is accessed.

        Raises:
          UserError: if one does not exist; the message names it.
        """
        self._paths = [os.fspath(path) for path in paths]
        for path in self._paths:
            if not os.path.isfile(path):
                raise errors.UserError(
                    f"{path} is not a file. Each entry must be a text file in UTF-8."
                )

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> str:
        path = self._paths[index]
        try:
            with open(path, encoding="utf-8", newline="") as file:
                return file.read()
        except (OSError, UnicodeError) as e:
            raise errors.UserError(
                f"{path} cannot be read as UTF-8 ({e}); repair it, or leave it out."
            ) from e


class Records:
    """A source of the records in ArrayRecord files, as `bytes`, file after file."""

    def __init__(self, paths: Sequence[str | os.PathLike]):
        """Opens the files.

        Raises:
          UserError: if one is not an ArrayRecord file; the message names it.
        """
        import grain

        self._paths = [os.fspath(path) for path in paths]
        self._files = []
        for path in self._paths:
            try:
                self._files.append(grain.sources.ArrayRecordDataSource([path]))
            except RuntimeError as e:
                raise errors.UserError(
                    f"{path} cannot be read as a file of ArrayRecord ({e})."
                ) from e
        self._ends = np.cumsum([len(file) for file in self._files])

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._files else 0

    def __getitem__(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._ends, index, side="right"))
        file = self._files[number]
        begin = int(self._ends[number]) - len(file)
        try:
            return file[index - begin]
        except RuntimeError as e:
            raise errors.UserError(
                f"{self._paths[number]} is damaged at record {index - begin} ({e}); "
                "replace it, or leave it out."
            ) from e


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Trains a byte-pair tokenizer over UTF-8 bytes.

    It can encode any text, and decodes it to the same text. The same texts, in any
    order, give the same tokenizer. Source: Sennrich et al., "Neural Machine Translation
    of Rare Words with Subword Units", 2016; over bytes as by Radford et al., "Language
    Models are Unsupervised Multitask Learners", 2019, section 2.2.

    Args:
      texts: the texts to train on; some megabytes are enough, and take seconds.
      vocabulary: the number of tokens, including `END` and the 256 bytes; short texts
        give fewer.

    Raises:
      UserError: if `vocabulary` has no room for the bytes, or the package is not
        installed.
    """
    lib = _tokenizers()
    if vocabulary <= 256:
        raise errors.UserError(
            f"A vocabulary of {vocabulary} must have more than 256 tokens: the bytes, "
            f"and {END}."
        )
    tokenizer = lib.Tokenizer(lib.models.BPE())
    tokenizer.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = lib.decoders.ByteLevel()
    trainer = lib.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=lib.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """Loads a tokenizer from a file.

    `Tokenizer.save` of the package tokenizers writes such files.

    Raises:
      UserError: if it cannot be read, or has no token `END`; or the package is not
        installed.
    """
    lib = _tokenizers()
    # For any problem, the package raises a plain Exception.
    try:
        tokenizer = lib.Tokenizer.from_file(os.fspath(path))
    except Exception as e:
        raise errors.UserError(
            f"{os.fspath(path)} cannot be read as a tokenizer ({e})."
        ) from e
    if tokenizer.token_to_id(END) is None:
        raise errors.UserError(
            f"The tokenizer in {os.fspath(path)} has no token {END!r}."
        )
    return tokenizer


def encoder(tokenizer: Tokenizer) -> Callable[[str], np.ndarray]:
    """Returns the function that encodes a text as tokens, followed by `END`.

    The tokens are an int32 array of shape (tokens,). If a text contains `END`
    literally, it is encoded as ordinary bytes.
    """
    # A copy, so that the setting below does not change the caller's tokenizer.
    tokenizer = type(tokenizer).from_str(tokenizer.to_str())
    tokenizer.encode_special_tokens = True
    end = tokenizer.token_to_id(END)

    def encode(text: str) -> np.ndarray:
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        return np.array([*tokens, end], np.int32)

    return encode


def pack(
    documents: "grain.MapDataset",
    encode: Callable[[Any], np.ndarray],
    length: int,
    options: "grain.ReadOptions | None" = None,
) -> "grain.IterDataset":
    """Packs the tokens of documents, one after the other, into rows of one length.

    No token is dropped.

    Args:
      documents: documents of any type.
      encode: takes a document to its tokens, of shape (tokens,), such as
        `encoder(tokenizer)`.
      length: the number of tokens per row.
      options: the read-ahead of documents; by default 16 documents, in one thread.

    Returns:
      Rows {'text': tokens, 'text_segment_ids': int32, 'text_positions': int32}, each of
      shape (length,). Each document, or part of one, in a row is a segment. Segments
      are numbered from 1, and positions in each from 0. If the documents end, segment 0
      pads the last row. The dataset's state is a position in the documents, for
      `xshard.data.pipelines.Streams`.
    """
    import grain

    if options is None:
        options = grain.ReadOptions(_READ_THREADS, _READ_AHEAD)
    encoded = documents.map(lambda document: {"text": encode(document)})
    return grain.experimental.ConcatThenSplitIterDataset(
        encoded.to_iter_dataset(options), length_struct={"text": length}
    )


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as e:
        raise errors.UserError(
            "Tokens need the package tokenizers, which is not installed: pip install "
            "'xshard[text]', or pip install tokenizers."
        ) from e
    return tokenizers
