"""Files of named arrays in the .safetensors format. The safetensors library is an
optional dependency.
"""

import importlib.util
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from xshard import errors
from xshard.files import disk

WRITE_ELSEWHERE = "Nothing was exported: give another file, or make room."
SUFFIX = ".safetensors"
_TYPES = {
    "BOOL": "bool", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "I8": "int8", "I16": "int16",
    "I32": "int32", "I64": "int64", "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64",
    "C64": "complex64",
}  # fmt: skip


class File:
    """A file of named arrays. Arrays can be read in part.

    Attributes:
      path: the path of the file.
      metadata: the writer's notes, text by name.
      shapes: the shapes of its arrays, by name. Arrays of unsupported types, such as
        8-bit floats, are left out.
      dtypes: the names of the arrays' types, such as 'bfloat16', by name.
    """

    def __init__(self, path: str):
        """Opens a file, and reads its description but no array.

        Raises:
          UserError: if the file does not exist, is damaged or has another format, or if
            safetensors is not installed.
        """
        _check_installed()
        import safetensors

        self.path = path
        try:
            self._file = safetensors.safe_open(path, framework="numpy")
        except (OSError, ValueError, safetensors.SafetensorError) as e:
            raise errors.UserError(f"{path} cannot be read as {SUFFIX}: {e}.") from e
        self.metadata: dict[str, str] = self._file.metadata() or {}
        names = self._file.keys()
        slices = {name: self._file.get_slice(name) for name in names}
        slices = {name: x for name, x in slices.items() if x.get_dtype() in _TYPES}
        self.shapes = {name: tuple(x.get_shape()) for name, x in slices.items()}
        self.dtypes = {name: _TYPES[x.get_dtype()] for name, x in slices.items()}

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of an array."""
        # A scalar has an empty index, and is read whole.
        part = self._file.get_slice(name)
        return np.asarray(part[index] if index else self._file.get_tensor(name))


def write(
    path: pathlib.Path, arrays: Mapping[str, Any], metadata: Mapping[str, str]
) -> None:
    """Writes arrays to a file atomically.

    Args:
      path: the file.
      arrays: the arrays by name, as NumPy converts them.
      metadata: the notes to store, text by name.

    Raises:
      UserError: if safetensors is not installed, or the file cannot be written.
    """
    _check_installed()
    from safetensors import numpy as library

    # `ascontiguousarray` turns a scalar into an array of one dimension, so the shape is
    # restored.
    plain = {
        name: np.ascontiguousarray(x).reshape(np.shape(x)) for name, x in arrays.items()
    }
    content = library.save(plain, dict(metadata))
    with disk.writing(path, WRITE_ELSEWHERE):
        disk.replace(path, content)


def _check_installed() -> None:
    if importlib.util.find_spec("safetensors") is None:
        raise errors.UserError(
            f"safetensors is not installed, and {SUFFIX} files need it: pip install '.[export]', or "
            "'xshard[export]'."
        )
