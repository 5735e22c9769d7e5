"""Writes arrays to a file that NumPy reads."""

import hashlib
import re
import zipfile
from collections.abc import Iterator
from typing import IO

import numpy as np

# Characters and names that are unsafe in an archive's entry names. % itself is escaped,
# since it begins an escape.
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\\%\ud800-\udfff]|^\.{1,2}$|^$|\.(?=npy$)")
# The most bytes of a folder's name, and of a whole name, that file systems take when an
# archive is unpacked; with some room for the folder that it is unpacked in.
_LONGEST_FOLDER = 200
_LONGEST_NAME = 1000


def write(out: IO[bytes], arrays: Iterator[tuple[str, np.ndarray]]) -> dict[str, str]:
    """Writes arrays one by one, in the format that `np.load` reads.

    Args:
      out: the file.
      arrays: each array with its path. Types that NumPy alone does not know, such as
        bfloat16, are converted to float32.

    Returns:
      The name of each array in the archive, by its path.
    """
    names = {}
    with zipfile.ZipFile(out, "w") as archive:
        for path, value in arrays:
            names[path] = _entry_name(path)
            if value.dtype.kind not in "biufc" or not value.dtype.isbuiltin:
                value = value.astype("f4")
            # The entry's size is not known when it is opened, and entries of over 4 GiB
            # need zip64.
            with archive.open(f"{names[path]}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, value)
    return names


def _entry_name(path: str) -> str:
    """Converts a path to the name of an archive's entry; different paths get different
    names.
    """
    # An empty name becomes "%", which no other name does: "%" itself is escaped.
    folders = [_UNSAFE.sub(_escape, folder) or "%" for folder in path.split("/")]
    name = "/".join(folders)
    longest = max(len(folder.encode()) for folder in folders)
    if longest > _LONGEST_FOLDER or len(name.encode()) > _LONGEST_NAME:
        return f"%{hashlib.sha256(name.encode()).hexdigest()}"
    return name


def _escape(match: re.Match[str]) -> str:
    encoded = match[0].encode("utf-8", "surrogatepass")
    return "".join(f"%{byte:02X}" for byte in encoded)
