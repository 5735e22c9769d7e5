"""Texts as packed rows of tokens: files, lines, tokenizers, packing.

Each is a stage of a grain pipeline, and can be combined with grain's own stages, such
as `grain.IterDataset.mix`. `xshard.data.pipelines.Streams` makes batches from the
result.
"""

import codecs
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent import futures
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import logging

from xshard import errors
from xshard.base import arguments
from xshard.files import disk, inputs

if TYPE_CHECKING:
    import grain

# A `tokenizers.Tokenizer`; the package is optional.
Tokenizer = Any
# The token that ends a document, unless another one is given.
END = "<|end|>"
# A text by which a tokenizer shows whether it keeps cases, spaces, ends of lines and
# characters other than English ones.
_PROBE = "A word,  \N{LATIN SMALL LETTER E WITH ACUTE}\n"
# The read-ahead of a stream. A process runs several streams, so each reads with one
# thread.
_READ_THREADS = 1
_READ_AHEAD = 16
# The number of files whose lines are found at the same time.
_INDEX_THREADS = 8

# The files that match a pattern, such as `gs://bucket/books/*.txt`.
find = inputs.find


class Files:
    """A source of texts: file i is text i, a `str`.

    Each is read whole, when it is accessed.
    """

    def __init__(self, paths: Sequence[str | os.PathLike]):
        """Checks that all files exist.

        Args:
          paths: paths, or URLs such as `gs://bucket/a.txt`; see `xshard.files.buckets`.
            `find` returns those of a folder.

        Raises:
          UserError: if one does not exist or a bucket cannot be listed; the message
            names it.
        """
        self._paths = _existing(paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> str:
        path = self._paths[index]
        try:
            content, _ = inputs.read(path)
        except OSError as e:
            raise errors.UserError(f"{path} cannot be read ({e}).") from e
        try:
            # Some programs begin a file with a mark of its encoding, which is no text.
            return content.decode("utf-8-sig")
        except UnicodeError as e:
            raise errors.UserError(
                f"{path} cannot be read as UTF-8 ({e}); repair it, or leave it out."
            ) from e


class Lines:
    """A source of the lines of files, file after file, such as those of JSON lines.

    A line is a `str` without its end, a newline that may follow a carriage return.
    Lines without any character are left out, and so is the byte order mark with which
    some programs begin a file. Each is read when it is accessed, by its range of bytes.
    """

    def __init__(self, paths: Sequence[str | os.PathLike]):
        """Reads each file once, to find where its lines begin.

        It keeps 8 bytes of memory for each line. Meanwhile, a few files are in memory.

        Args:
          paths: paths, or URLs such as `gs://bucket/a.jsonl`; see
            `xshard.files.buckets`. `find` returns those of a folder.

        Raises:
          UserError: if one does not exist or cannot be read; the message names it.
        """
        self._paths = _existing(paths)
        with futures.ThreadPoolExecutor(_INDEX_THREADS) as pool:
            indices = list(pool.map(_index, self._paths))
        # For each file, where its lines begin, and the file's end.
        self._begins = [begins for begins, _ in indices]
        self._versions = [version for _, version in indices]
        self._ends = np.cumsum([len(begins) - 1 for begins in self._begins])

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._paths else 0

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._ends, index, side="right"))
        path = self._paths[number]
        begins = self._begins[number]
        line = index - int(self._ends[number]) + len(begins) - 1
        begin = int(begins[line])
        end = int(begins[line + 1])
        try:
            content, version = inputs.read(path, begin, end)
        except OSError as e:
            raise errors.UserError(f"{path} cannot be read ({e}).") from e
        if version != self._versions[number]:
            raise errors.UserError(
                f"{path} has changed since this process found its lines. Restore it, "
                "or start a new run with files that do not change."
            )
        try:
            # Empty lines may follow, up to the next line that is not.
            text, _, _ = content.partition(b"\n")
            return text.removesuffix(b"\r").decode()
        except UnicodeError as e:
            raise errors.UserError(
                f"{path} cannot be read as UTF-8 in the line at byte {begin} ({e}); "
                "repair it, or leave it out."
            ) from e


def _existing(paths: Sequence[str | os.PathLike]) -> list[str]:
    """Returns the paths of files as texts; raises UserError if one does not exist."""
    names = [os.fspath(path) for path in paths]
    missing = inputs.missing(names)
    if missing:
        raise errors.UserError(
            f"{missing[0]} is not a file. Each entry must be a text file in UTF-8."
        )
    return names


def _index(path: str) -> tuple[np.ndarray, Hashable]:
    """Returns where the lines of a file begin and its size, and the file's version."""
    try:
        content, version = inputs.read(path)
    except OSError as e:
        raise errors.UserError(f"{path} cannot be read ({e}).") from e
    codes = np.frombuffer(content, np.uint8)
    after_ends = np.flatnonzero(codes == ord("\n")) + 1
    start = len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0
    bounds = np.unique(np.concatenate([[start], after_ends, [len(codes)]]))
    begins = bounds[:-1]
    sizes = np.diff(bounds)
    first = codes[begins]
    last = codes[bounds[1:] - 1]
    is_empty = (sizes == 1) & ((first == ord("\n")) | (first == ord("\r")))
    is_empty |= (sizes == 2) & (first == ord("\r")) & (last == ord("\n"))
    kept = np.append(begins[~is_empty], len(codes))
    return kept.astype(np.int64), version


def train_tokenizer(texts: Iterable[str], vocabulary: int, end: str = END) -> Tokenizer:
    """Trains a byte-pair tokenizer over UTF-8 bytes.

    It can encode any text, and decodes it to the same text. The same texts, in any
    order, give the same tokenizer. Source: Sennrich et al., "Neural Machine Translation
    of Rare Words with Subword Units", 2016; over bytes as by Radford et al., "Language
    Models are Unsupervised Multitask Learners", 2019, section 2.2.

    Args:
      texts: the texts to train on; some megabytes are enough, and take seconds.
      vocabulary: the number of tokens, including `end` and the 256 bytes; short texts
        give fewer.
      end: the token that ends a document.

    Raises:
      UserError: if `vocabulary` has no room for the bytes, or the package is not
        installed.
    """
    lib = _tokenizers()
    if not arguments.is_integer(vocabulary) or vocabulary <= 256:
        raise errors.UserError(
            f"A vocabulary of {vocabulary!r} must have more than 256 tokens: the "
            f"bytes, and {end}."
        )
    tokenizer = lib.Tokenizer(lib.models.BPE())
    tokenizer.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = lib.decoders.ByteLevel()
    trainer = lib.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[end],
        initial_alphabet=lib.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: str | os.PathLike, end: str = END) -> Tokenizer:
    """Loads a tokenizer from a file.

    Settings of the file by which tokens would be dropped, added or drawn at random are
    switched off: truncation, padding and dropout. A tokenizer that does not decode to
    the same text, such as one with a normalizer, is loaded with a warning.

    Args:
      path: a file that `Tokenizer.save` of the package tokenizers wrote, such as a
        `tokenizer.json` of the hub.
      end: the token that ends a document, such as '<|endoftext|>' of GPT-2.

    Raises:
      UserError: if it cannot be read, or has no token `end`; or the package is not
        installed.
    """
    lib = _tokenizers()
    # For any problem, the package raises a plain Exception.
    try:
        tokenizer = lib.Tokenizer.from_file(disk.expanded(path))
    except Exception as e:
        raise errors.UserError(
            f"{os.fspath(path)} cannot be read as a tokenizer ({e})."
        ) from e
    if tokenizer.token_to_id(end) is None:
        raise errors.UserError(
            f"The tokenizer in {os.fspath(path)} has no token {end!r}."
        )
    tokenizer = _whole(tokenizer)
    try:
        tokens = tokenizer.encode(_PROBE, add_special_tokens=False).ids
        decoded = tokenizer.decode(tokens, skip_special_tokens=False)
    except Exception as e:
        # Some have no token for what is not in their vocabulary.
        decoded = f"an error ({e})"
    if decoded != _PROBE:
        logging.warning(
            "The tokenizer in %s gives back %r for %r: what differs is lost to a model "
            "of its tokens.",
            os.fspath(path),
            decoded,
            _PROBE,
        )
    return tokenizer


def encoder(tokenizer: Tokenizer, end: str = END) -> Callable[[str], np.ndarray]:
    """Returns the function that encodes a text as tokens, followed by `end`.

    The tokens are an int32 array of shape (tokens,), the same at each call. If a text
    contains `end` literally, it is encoded as ordinary bytes. Truncation, padding and
    dropout are switched off, as `load_tokenizer` does, and a post-processor adds no
    tokens.

    Raises:
      UserError: if the tokenizer has no token `end`.
    """
    encode, end_token = _encoder(tokenizer, end)

    def encode_with_end(text: str) -> np.ndarray:
        return np.array([*encode(text).ids, end_token], np.int32)

    return encode_with_end


def byte_counter(tokenizer: Tokenizer, end: str = END) -> Callable[[str], np.ndarray]:
    """Returns the function that counts the bytes for which each token of a text stands.

    The counts are an int32 array of shape (tokens,), in the order of the tokens of
    `encoder`. Their sum is the size of the text in UTF-8, and 1 for `end`. Where
    several tokens are parts of one character, its bytes are those of the first.

    The function raises UserError if the tokens of a text do not decode to it, since a
    model of them is no model of its bytes.
    """
    encode, _ = _encoder(tokenizer, end)

    def count(text: str) -> np.ndarray:
        encoding = encode(text)
        decoded = tokenizer.decode(encoding.ids, skip_special_tokens=False)
        if decoded != text:
            raise errors.UserError(
                f"The tokenizer gives back {_difference(text, decoded)}, so its tokens "
                "have no number of bytes. Use one that decodes to the same text, such "
                "as those that train_tokenizer trains, over bytes and without a "
                "normalizer."
            )
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        sizes = 1 + (codes >= 1 << 7) + (codes >= 1 << 11) + (codes >= 1 << 16)
        # Where each character begins, and the end of the text.
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        last = np.array([0, *[stop for _, stop in encoding.offsets]])
        # What no token covers, such as a space, belongs to the next token.
        ends = bounds[np.maximum.accumulate(last)]
        at_end = bounds[-1] - ends[-1] + 1
        return np.append(np.diff(ends), at_end).astype(np.int32)

    return count


def _encoder(tokenizer: Tokenizer, end: str) -> tuple[Callable[[str], Any], int]:
    """Returns the function that encodes a text without `end`, and the token `end`."""
    tokenizer = _whole(tokenizer)
    tokenizer.encode_special_tokens = True
    end_token = tokenizer.token_to_id(end)
    if end_token is None:
        raise errors.UserError(
            f"The tokenizer has no token {end!r}, which is to end each text: name "
            "another one."
        )
    # A token that is not special would be found in texts.
    tokenizer.add_special_tokens([end])

    def encode(text: str) -> Any:
        return tokenizer.encode(text, add_special_tokens=False)

    return encode, end_token


def _whole(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a copy of a tokenizer that drops, pads and draws no tokens."""
    whole = type(tokenizer).from_str(tokenizer.to_str())
    whole.no_truncation()
    whole.no_padding()
    if hasattr(whole.model, "dropout"):
        whole.model.dropout = None
    return whole


def _difference(text: str, decoded: str) -> str:
    """Describes where two texts begin to differ."""
    same = 0
    for character, other in zip(text, decoded, strict=False):
        if character != other:
            break
        same += 1
    begin = max(same - 10, 0)
    return f"{decoded[begin : same + 20]!r} for {text[begin : same + 20]!r}"


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

    Raises:
      UserError: if the length is no number of tokens.
    """
    import grain

    if not arguments.is_integer(length) or length < 1:
        raise errors.UserError(
            f"pack(length={length!r}) must be a number of tokens, at least 1."
        )
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
