"""Reads text files as windows of bytes, with some of the files held out.

The default is the sources of Python's standard library, about 10 MB that exist wherever
Python does.
"""

import functools
import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable

import numpy as np

from xshard import errors

# The byte after each file.
SEPARATOR = 0
# Folders below the standard library to leave out: installed packages, tests, generated
# tables, and packages that some versions of Python lack.
_LEFT_OUT = (
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "encodings",
    "pydoc_data",
    "idlelib",
    "lib2to3",
)
_GENERATED = (".", "_sysconfigdata", "config-")


@functools.cache
def read(files: tuple[str, ...], held_out: float) -> tuple[np.ndarray, np.ndarray]:
    """Reads the training bytes and the held-out bytes, as uint8 arrays.

    Files are ordered by their names relative to the folder, or to the part of a pattern
    before its first wildcard. A hash of that name decides whether a file is held out,
    so adding files does not move others between the sets. A single file is split, with
    its end held out.

    Args:
      files: file names, `glob` patterns with `**`, and folders. A folder stands for all
        files below it that are not hidden. Links to folders are not followed, so that
        no text has two names. Empty: the standard library's sources.
      held_out: the approximate fraction of the files to hold out.

    Raises:
      ValueError: if an entry names no file, or a file cannot be read.
    """
    found = _named(files)
    paths = sorted(found, key=lambda path: (found[path], path))
    if len(paths) == 1:
        whole = _join(paths)
        cut = len(whole) - round(held_out * len(whole))
        return whole[:cut], whole[cut:]
    train, held = _divide(found, held_out)
    return _join(train), _join(held)


def documents(files: tuple[str, ...], held_out: float) -> tuple[list[str], list[str]]:
    """Returns the paths of the training files and of the held-out files.

    Files are chosen as in `read`; none is split.

    Raises:
      ValueError: if an entry names no file, or one of the two sets is empty.
    """
    found = _named(files)
    train, held = _divide(found, held_out)
    if not train or not held:
        raise errors.UserError(
            f"text.files={files!r} has {len(train)} files to train on and {len(held)} "
            f"held-out files, with text.held_out={held_out}. Each set needs at least "
            "one: give more files, or another text.held_out."
        )
    return train, held


def _named(files: tuple[str, ...]) -> dict[str, str]:
    """Returns the paths that all entries stand for, with their relative names."""
    if isinstance(files, str):
        raise errors.UserError(
            f"text.files={files!r} must be a tuple of names, as ({files!r},) is."
        )
    if not files:
        return _standard_library(sysconfig.get_path("stdlib"))
    found: dict[str, str] = {}
    for entry in files:
        found |= _find(entry)
    return found


def _divide(found: dict[str, str], held_out: float) -> tuple[list[str], list[str]]:
    """Returns the paths of the training files and of the held-out files.

    Args:
      found: the relative names of all files, by path.
      held_out: the approximate fraction to hold out.
    """
    train: list[str] = []
    held: list[str] = []
    for path in sorted(found, key=lambda path: (found[path], path)):
        if _fraction(found[path]) < held_out:
            held.append(path)
        else:
            train.append(path)
    return train, held


def windows(text: np.ndarray, length: int, what: str) -> np.ndarray:
    """Returns the text as overlapping rows of `length + 1` bytes, a view.

    Args:
      text: a one-dimensional uint8 array.
      length: the number of bytes that a row predicts from.
      what: the name of the text, for messages.

    Returns:
      An array of shape (rows, length + 1); the last byte of a row is the first of the
      next. An incomplete row at the end is dropped.

    Raises:
      ValueError: if the text is shorter than one row.
    """
    if len(text) <= length:
        raise errors.UserError(
            f"The {what} text has {len(text)} bytes, and text.length={length} needs at "
            f"least {length + 1}: give text.files more, choose a smaller text.length, "
            "or another text.held_out."
        )
    return np.lib.stride_tricks.sliding_window_view(text, length + 1)[::length]


def _find(entry: str) -> dict[str, str]:
    """Returns the paths that one entry stands for, with their relative names."""
    entry = os.path.expanduser(entry)
    if os.path.isdir(entry):
        found = _below(entry, lambda name: not name.startswith("."))
        if not found:
            raise errors.UserError(
                f"text.files has {entry!r}: this folder holds no file but hidden ones."
            )
        return found
    if os.path.lexists(entry):
        return {entry: os.path.basename(entry)}
    matches = [
        path for path in glob.glob(entry, recursive=True) if not os.path.isdir(path)
    ]
    if not matches:
        kind = "file does not exist"
        if glob.has_magic(entry):
            kind = "pattern matches no file"
        raise errors.UserError(
            f"text.files has {entry!r}: this {kind}. It must name files, folders or "
            f"patterns such as 'books/**/*.txt', from the folder {os.getcwd()} or "
            "absolute; empty: Python's own sources."
        )
    # Names are relative to the part of the pattern before its first wildcard.
    first_wildcard = next(i for i, c in enumerate(entry) if glob.has_magic(c))
    root = os.path.dirname(entry[:first_wildcard]) or "."
    return {path: os.path.relpath(path, root) for path in matches}


def _standard_library(root: str) -> dict[str, str]:
    def is_wanted(name: str) -> bool:
        return name not in _LEFT_OUT and not name.startswith(_GENERATED)

    found = _below(root, is_wanted)
    return {path: name for path, name in found.items() if name.endswith(".py")}


def _below(root: str, is_wanted: Callable[[str], bool]) -> dict[str, str]:
    """Returns the paths of all wanted files below a folder, with their relative names.

    A folder that is not wanted is left out with all that is below it.
    """
    found: dict[str, str] = {}
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = filter(is_wanted, folders)
        for name in filter(is_wanted, names):
            path = os.path.join(folder, name)
            found[path] = os.path.relpath(path, root)
    return found


def _refuse(e: OSError, path: str = "") -> None:
    raise errors.UserError(
        f"text.files: {path or e.filename} cannot be read ({e.strerror}); make it "
        "readable, or leave it out."
    ) from e


def _join(paths: list[str]) -> np.ndarray:
    text = bytearray()
    for path in paths:
        try:
            with open(path, "rb") as file:
                text += file.read()
        except OSError as e:
            _refuse(e, path)
        text.append(SEPARATOR)
    return np.frombuffer(text, np.uint8)


def _fraction(name: str) -> float:
    """Maps a name to a number from 0 to below 1, the same on every machine."""
    encoded = name.replace(os.sep, "/").encode("utf8", "surrogateescape")
    digest = hashlib.sha256(encoded).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
