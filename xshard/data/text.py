"""Texts as packed rows of tokens: files and records, tokenizers, packing.

Each is a step of a pipeline of grain's, whose own steps, such as `grain.IterDataset.mix`, go between them;
`xshard.data.pipelines.Streams` feeds batches with what comes of it.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xshard import errors

if TYPE_CHECKING:
    import grain

# A `tokenizers.Tokenizer`, of a package that need not be installed.
Tokenizer = Any
# The token that ends a document.
END = "<|end|>"
# Of each stream, and there are several in a process.
_READ_THREADS, _READ_AHEAD = 1, 16


class Files:
    """A source of texts: file i is text i, a `str`."""

    def __init__(self, paths: Sequence[str | os.PathLike]):
        """Sees that all files are there; they are read one by one, when they are asked for.

        Raises:
          UserError: with the name of one that is not.
        """
        self._paths = [os.fspath(path) for path in paths]
        for path in self._paths:
            if not os.path.isfile(path):
                raise errors.UserError(
                    f"{path} is no file; each entry must be one, of text in UTF-8."
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
    """A source of the records in files of ArrayRecord, each `bytes`: those of the first file, then of the second."""

    def __init__(self, paths: Sequence[str | os.PathLike]):
        """Opens the files.

        Raises:
          UserError: with the name of one that is no file of ArrayRecord.
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
        place = index - int(self._ends[number]) + len(file)
        try:
            return file[place]
        except RuntimeError as e:
            raise errors.UserError(
                f"{self._paths[number]} is damaged at record {place} ({e}); replace it, or leave it out."
            ) from e


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Makes a tokenizer of so many tokens that are frequent in the texts: byte pairs of UTF-8.

    Any text can be encoded, and decoded to the same. Of the same texts, in whatever order, comes the same tokenizer.
    Source: Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", 2016; over bytes as by
    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.2.

    Args:
      texts: what to count in; some megabytes are enough, and take seconds.
      vocabulary: the number of tokens, `END` and the 256 bytes included; fewer come of short texts.

    Raises:
      UserError: if there is no room for the bytes, or the package is not installed.
    """
    lib = _tokenizers()
    if vocabulary <= 256:
        raise errors.UserError(
            f"A vocabulary of {vocabulary} must have more than 256 tokens: the bytes, and {END}."
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
    """The tokenizer in a file, as `Tokenizer.save` of the package tokenizers writes it.

    Raises:
      UserError: if it cannot be read, or has no token `END`; or the package is not installed.
    """
    lib = _tokenizers()
    # The package says of whatever is wrong that it is an Exception.
    try:
        tokenizer = lib.Tokenizer.from_file(os.fspath(path))
    except Exception as e:
        raise errors.UserError(f"{os.fspath(path)} cannot be read as a tokenizer ({e}).") from e
    if tokenizer.token_to_id(END) is None:
        raise errors.UserError(f"The tokenizer in {os.fspath(path)} has no token {END!r}.")
    return tokenizer


def encoder(tokenizer: Tokenizer) -> Callable[[str], np.ndarray]:
    """The function from a text to its tokens, int32 of shape (tokens,), and at their end `END`.

    A text in which that is written does not end there.
    """
    # A copy: whoever has the tokenizer may want it as it is.
    own = type(tokenizer).from_str(tokenizer.to_str())
    own.encode_special_tokens = True
    end = own.token_to_id(END)
    return lambda text: np.array([*own.encode(text, add_special_tokens=False).ids, end], np.int32)


def pack(
    documents: "grain.MapDataset",
    encode: Callable[[Any], np.ndarray],
    length: int,
    options: "grain.ReadOptions | None" = None,
) -> "grain.IterDataset":
    """Packs the tokens of documents, one after the other, into rows of one length; nothing is left out.

    Args:
      documents: of whatever kind.
      encode: takes one to its tokens, of shape (tokens,), such as `encoder(tokenizer)`.
      length: the tokens of a row.
      options: how documents are read ahead; by default 16 of them, in a thread.

    Returns:
      Rows {'text': tokens, 'text_segment_ids': int32, 'text_positions': int32}, each of shape (length,). Each document
      in a row, or what of it is there, is a segment; they are numbered from 1, and positions in each from 0. The
      segment 0 fills up the last row, if the documents have an end. Its state is a place in the documents, for
      `xshard.data.pipelines.Streams`.
    """
    import grain

    if options is None:
        options = grain.ReadOptions(_READ_THREADS, _READ_AHEAD)
    tokens = documents.map(lambda document: {"text": encode(document)}).to_iter_dataset(options)
    return grain.experimental.ConcatThenSplitIterDataset(tokens, length_struct={"text": length})


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as e:
        raise errors.UserError(
            "Tokens need the package tokenizers, which is not installed: pip install 'xshard[text]', or pip install "
            "tokenizers."
        ) from e
    return tokenizers
