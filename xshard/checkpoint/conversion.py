"""Arrays of other programs under the names and in the forms that they have here.

Two functions, each the inverse of the other, convert them:

    def from_hub(arrays):
        return {"params/linear/w": arrays["weight"].T}

    def to_hub(arrays):
        return {"weight": arrays["params/linear/w"].T}

    LINEAR = checkpoint.Conversion(from_hub, to_hub)

That they are inverses is checked with the very arrays that are read or written.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from xshard import errors
from xshard.base import user_code
from xshard.files import tensors


class Conversion(NamedTuple):
    """Two functions, each the inverse of the other.

    Attributes:
      from_hub: takes the arrays of another program by name, and returns a dictionary of
        this run's by path. An array is read whenever it is asked for, so that not all
        are in memory. `del arrays[name]` leaves out one that is not needed; every other
        one must come back from `to_hub`.
      to_hub: takes this run's arrays by path, and returns those of the other program by
        name.
      prefix: what may precede the names in a file. `from_hub` gets names without it,
        and `to_hub` returns such.
    """

    from_hub: Callable[[Any], dict[str, np.ndarray]]
    to_hub: Callable[[Any], dict[str, np.ndarray]]
    prefix: str = ""


def load(path: str, flag: str) -> Conversion | None:
    """Imports a conversion.

    Args:
      path: its dotted path, such as 'experiments.lm.gpt2.HUB', or an empty text.
      flag: the flag whose value it is, for messages.

    Returns:
      The conversion; None for an empty text.

    Raises:
      UserError: if the path leads to no conversion.
    """
    if not path:
        return None
    module, _, name = path.rpartition(".")
    rule = (
        f"{flag}={path} must be the dotted path of a checkpoint.Conversion that can be "
        "imported from here, such as experiments.lm.gpt2.HUB"
    )
    try:
        found = pkgutil.resolve_name(f"{module}:{name}")
    except (AttributeError, ImportError, ValueError) as e:
        raise errors.UserError(f"{rule}: {e}.") from e
    if not isinstance(found, Conversion):
        raise errors.UserError(f"{rule}; it is a {type(found).__name__}.")
    return found


class _Arrays(Mapping[str, np.ndarray]):
    """The arrays of a file, each of which is read when it is asked for."""

    def __init__(self, file: tensors.File | tensors.Files, prefix: str):
        self.left_out: list[str] = []
        self._file = file
        # The names in the file, by those without the prefix.
        self._names: dict[str, str] = {}
        for name in file.shapes:
            short = name.removeprefix(prefix)
            if short in self._names:
                raise errors.UserError(
                    f"{file.path} has both '{self._names[short]}' and '{name}', which "
                    f"are one name without the prefix {prefix!r} of the conversion: "
                    "correct the file, or give a conversion without it."
                )
            self._names[short] = name

    def __getitem__(self, name: str) -> np.ndarray:
        stored = self._names[name]
        whole = (slice(None),) * len(self._file.shapes[stored])
        return self._file.read(stored, whole)

    def __delitem__(self, name: str) -> None:
        stored = self._names.pop(name)
        form = f"{self._file.dtypes[stored]}{list(self._file.shapes[stored])}"
        self.left_out.append(f"{stored} {form}")

    def __contains__(self, name: Any) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        # A copy, so that a loop may leave arrays out.
        return iter(list(self._names))

    def __len__(self) -> int:
        return len(self._names)


class Converted:
    """This run's arrays, from those of a file: the same interface as `tensors.File`.

    Attributes:
      path: the path of the file.
      metadata: the writer's notes.
      shapes: the shapes of the arrays, by path.
      dtypes: the names of their types, by path.
      unsupported: empty, as in a file without such types.
      left_out: descriptions of the file's arrays that `from_hub` leaves out.
    """

    def __init__(self, file: tensors.File | tensors.Files, conversion: Conversion):
        """Reads and converts all arrays, and checks that they would come back.

        Raises:
          UserError: if the file does not have the arrays that `from_hub` takes, or has
            others, or if `to_hub` does not return the file's arrays.
        """
        arrays = _Arrays(file, conversion.prefix)
        self._arrays = _call(conversion.from_hub, arrays, file.path)
        back = _call(conversion.to_hub, self._arrays, file.path)
        _check_came_back(
            arrays,
            back,
            f"{file.path} would not come back from to_hub(from_hub(arrays))",
            "`del arrays[name]` in from_hub leaves an array out",
        )
        self.path = file.path
        self.metadata = file.metadata
        self.shapes = {path: x.shape for path, x in self._arrays.items()}
        self.dtypes = {path: x.dtype.name for path, x in self._arrays.items()}
        self.unsupported: dict[str, str] = {}
        self.left_out = arrays.left_out

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of an array.

        Args:
          name: its path.
          index: a slice for each dimension.
        """
        return self._arrays[name][index]


def to_hub(
    arrays: Mapping[str, np.ndarray], conversion: Conversion
) -> dict[str, np.ndarray]:
    """Converts this run's arrays, and checks that they would come back.

    Args:
      arrays: the arrays, by path.
      conversion: the conversion.

    Returns:
      The arrays of the other program, by name.

    Raises:
      UserError: if `to_hub` needs others, or if `from_hub` does not return these.
    """
    where = "the export"
    theirs = _call(conversion.to_hub, arrays, where)
    # A copy, since `from_hub` may leave out what is only written.
    back = _call(conversion.from_hub, dict(theirs), where)
    _check_came_back(
        arrays,
        back,
        "The arrays would not come back from from_hub(to_hub(arrays))",
        "--select leaves arrays out of an export",
    )
    return theirs


def _call(
    function: Callable[[Any], Any], arrays: Mapping[str, np.ndarray], where: str
) -> dict[str, np.ndarray]:
    """Calls a function of a conversion, and checks what it returns.

    Args:
      function: the function.
      arrays: the arrays that it takes.
      where: what is converted, for messages.

    Raises:
      UserError: if an array is missing or does not fit, or if the function returns
        anything but arrays by name.
    """
    try:
        found = function(arrays)
    except (KeyError, ValueError) as e:
        lacks = "there is no array " if isinstance(e, KeyError) else ""
        raise errors.UserError(
            f"{where} cannot be converted ({user_code.location(e)}): {lacks}{e}. Give "
            "arrays that the conversion is for, or correct it."
        ) from e
    of_other_types = []
    if type(found) is dict:
        for name, x in found.items():
            if type(name) is not str or type(x) is not np.ndarray:
                of_other_types.append(f"{name!r}: {type(x).__name__}")
    if type(found) is not dict or of_other_types:
        raise errors.UserError(
            "A function of a conversion must return a dictionary of NumPy arrays by "
            f"name; {function} returned a {type(found).__name__} with other values: "
            f"{', '.join(of_other_types)}."
        )
    return found


def _check_came_back(
    arrays: Mapping[str, np.ndarray],
    back: Mapping[str, np.ndarray],
    what: str,
    remedy: str,
) -> None:
    """Raises UserError unless two mappings have the same names and bits."""
    problems = []
    for name in arrays:
        if name not in back:
            problems.append(f"'{name}' is left over")
            continue
        x = arrays[name]
        y = back[name]
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            problems.append(
                f"'{name}' {x.dtype}{list(x.shape)} becomes {y.dtype}{list(y.shape)}"
            )
        elif not np.array_equal(_bits(x), _bits(y)):
            problems.append(f"'{name}' has other values")
    for name in back:
        if name not in arrays:
            problems.append(f"'{name}' is new")
    if problems:
        raise errors.UserError(
            f"{what}: {', '.join(problems)}. The functions must be each other's "
            f"inverses: correct them; {remedy}."
        )


def _bits(x: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array: NaN is a value that must come back, too."""
    return x.reshape(-1).view(np.uint8)
