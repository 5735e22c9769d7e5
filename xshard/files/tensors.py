"""Files of named arrays in the .safetensors format.

The safetensors library is an optional dependency.
"""

import importlib.util
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from xshard import errors
from xshard.files import disk, jsonfile

WRITE_ELSEWHERE = "Nothing was exported: give another file, or make room."
SUFFIX = ".safetensors"
# An index of the files that a model is divided into.
INDEX_SUFFIX = ".safetensors.index.json"
# The names of types in the format, and those of NumPy and ml_dtypes.
_TYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


class File:
    """A file of named arrays. Arrays can be read in part.

    Attributes:
      path: the path of the file.
      metadata: the writer's notes, text by name.
      shapes: the shapes of its arrays, by name. Arrays of unsupported types, such as
        8-bit floats, are left out.
      unsupported: the format's names of the types of those, such as 'F8_E4M3', by name.
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
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.unsupported: dict[str, str] = {}
        names = self._file.keys()
        for name in names:
            array = self._file.get_slice(name)
            if array.get_dtype() in _TYPES:
                self.shapes[name] = tuple(array.get_shape())
                self.dtypes[name] = _TYPES[array.get_dtype()]
            else:
                self.unsupported[name] = array.get_dtype()

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of an array.

        Args:
          name: the name of the array.
          index: a slice for each dimension.
        """
        # A scalar has no dimensions. safetensors cannot slice it.
        if not index:
            return np.asarray(self._file.get_tensor(name))
        sizes = []
        for part, size in zip(index, self.shapes[name], strict=True):
            sizes.append(len(range(*part.indices(size))))
        # Nor can it slice where nothing is left.
        if 0 in sizes:
            return np.empty(sizes, np.dtype(self.dtypes[name]))
        return np.asarray(self._file.get_slice(name)[index])


class Files:
    """The files of a model, by their index: the same interface as `File`.

    The index is the hub's: `{"weight_map": {name of an array: name of its file}}`.
    """

    def __init__(self, path: str):
        """Opens the index and all files.

        Raises:
          UserError: if one cannot be read, or if the index and the files differ in what
            is where.
        """
        index = jsonfile.read_if_exists(pathlib.Path(path))
        if index is None:
            raise errors.UserError(f"There is no file {path}.")
        self.path = path
        self.metadata: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.unsupported: dict[str, str] = {}
        self._files: dict[str, File] = {}
        try:
            names = jsonfile.parse(index.get("weight_map"), dict[str, str])
        except ValueError as e:
            raise errors.UserError(
                f"{path} is no index of {SUFFIX} files: weight_map: {e}."
            ) from e
        opened: dict[str, File] = {}
        for name, file_name in names.items():
            if file_name not in opened:
                # '..' is a name to pathlib, but of no file.
                is_name = pathlib.Path(file_name).name == file_name
                if not is_name or file_name in ("", ".."):
                    raise errors.UserError(
                        f"{path} says that '{name}' is in {file_name!r}, which is no "
                        "name of a file beside it."
                    )
                beside = pathlib.Path(path).with_name(file_name)
                opened[file_name] = File(str(beside))
            file = opened[file_name]
            if name in file.unsupported:
                self.unsupported[name] = file.unsupported[name]
                continue
            if name not in file.shapes:
                raise errors.UserError(
                    f"{file.path} lacks '{name}', which {path} says it has."
                )
            self._files[name] = file
            self.shapes[name] = file.shapes[name]
            self.dtypes[name] = file.dtypes[name]
        for file_name, file in opened.items():
            omitted = []
            for name in [*file.shapes, *file.unsupported]:
                if names.get(name) != file_name:
                    omitted.append(name)
            if omitted:
                raise errors.UserError(
                    f"{file.path} has arrays that {path} does not say are in it: "
                    f"{', '.join(omitted)}."
                )

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of an array, as `File.read` does."""
        return self._files[name].read(name, index)


def is_path(path: str) -> bool:
    """Returns whether a path is that of a file, or of an index of files."""
    return path.endswith((SUFFIX, INDEX_SUFFIX))


def open_path(path: str) -> File | Files:
    """Opens a file, or the files of an index.

    Raises:
      UserError: as `File` and `Files` do, or if the path is a URL.
    """
    if "://" in path:
        raise errors.UserError(
            f"{path} is a URL, and {SUFFIX} files are read from local and mounted "
            "disks only: copy the file, or mount the bucket."
        )
    if path.endswith(INDEX_SUFFIX):
        return Files(path)
    return File(path)


def write(
    path: pathlib.Path, arrays: Mapping[str, Any], metadata: Mapping[str, str]
) -> None:
    """Writes arrays to a file atomically.

    Args:
      path: the file.
      arrays: the arrays by name, as NumPy converts them.
      metadata: the notes to store, text by name.

    Raises:
      UserError: if safetensors is not installed, the format has no type for an array,
        or the file cannot be written.
    """
    _check_installed()
    import safetensors
    from safetensors import numpy as library

    contiguous = {}
    for name, array in arrays.items():
        # `ascontiguousarray` turns a scalar into an array of one dimension, so the
        # shape is restored.
        contiguous[name] = np.ascontiguousarray(array).reshape(np.shape(array))
    try:
        content = library.save(contiguous, dict(metadata))
    except safetensors.SafetensorError as e:
        kinds = sorted({str(array.dtype) for array in contiguous.values()})
        raise errors.UserError(
            f"{path} cannot hold arrays of these types: {', '.join(kinds)} ({e}). "
            "Convert them, or leave them out."
        ) from e
    with disk.writing(path, WRITE_ELSEWHERE):
        disk.replace(path, content)


def _check_installed() -> None:
    if importlib.util.find_spec("safetensors") is None:
        raise errors.UserError(
            f"safetensors is not installed, and {SUFFIX} files need it: "
            "pip install '.[export]', or 'xshard[export]'."
        )
