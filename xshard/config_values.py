"""The values of a config in config.json, a file of JSON.

A config may hold what the file gives back, equal and of the same type: numbers, texts,
True, False, None, lists, and dictionaries; and functions and classes, each as the path
that imports it. Anything else is refused, so that a model that is loaded, a replay and
a run that resumes have the config of the run.
"""

import json
import os
import pkgutil
import reprlib
import sys
from typing import Any

import ml_collections
from ml_collections import config_dict

from xshard import errors

# What precedes the path of a function or a class: '$import MODULE:NAME'.
IMPORT = "$import "
# The key of config.json that is the run's own; see `xshard.files.workdir`.
_RESERVED = "_run"
# The deepest nesting of a config, well below what JSON can be read back from.
_DEPTH = 100
# How messages show a value; at most so many characters.
_SHOWN = reprlib.Repr()
_SHOWN.maxother = 60
_SHOWN.maxstring = 60


def to_json(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Converts a config to plain JSON values.

    Raises:
      UserError: if JSON cannot hold a value exactly: with its key, the value and what
        to write instead.
    """
    return _dictionary((), config)


def from_json(value: Any, path: tuple[str, ...] = ()) -> Any:
    """Returns the values of a config, or of what `to_json` returned, as an experiment
    gets them: with tuples for all lists, which JSON does not tell apart.

    Args:
      value: a value of a config, a dictionary for a config.
      path: the keys that lead to it.

    Raises:
      UserError: if a function or a class cannot be imported.
    """
    if isinstance(value, ml_collections.ConfigDict | dict):
        return {key: from_json(value[key], (*path, key)) for key in value}
    if type(value) in (list, tuple):
        items = enumerate(value)
        return tuple(from_json(item, (*path, str(i))) for i, item in items)
    if not is_import(value):
        return value
    try:
        return _imported(value)
    except ImportError as e:
        raise errors.UserError(
            f"{'.'.join(path)} is {value.removeprefix(IMPORT)!r} in config.json, which "
            f"cannot be imported ({e}): make it available there again, or start in the "
            "directory that the run was started in."
        ) from e


def is_import(value: Any) -> bool:
    """Returns whether a JSON value stands for a function or a class."""
    return isinstance(value, str) and value.startswith(IMPORT)


def is_same_import(text: str, other: str) -> bool:
    """Returns whether two texts '$import MODULE:NAME' stand for the same object.

    A library may have moved it, so that another path leads to it first.
    """
    try:
        return text == other or _imported(text) is _imported(other)
    except ImportError:
        return False


def described(value: Any) -> str:
    """Returns a value of a config as a person reads it: a function by its path, not by
    its address.
    """
    if isinstance(value, list | tuple):
        items = [described(item) for item in value]
        if isinstance(value, list):
            return f"[{', '.join(items)}]"
        # The comma makes a tuple of one item.
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if callable(value):
        return _import((), value).removeprefix(IMPORT)
    return repr(value)


def _imported(text: str) -> Any:
    """Returns the function or the class that a text '$import MODULE:NAME' stands for;
    raises ImportError if there is none.
    """
    try:
        return pkgutil.resolve_name(text.removeprefix(IMPORT))
    # What the import of a module may raise is not known.
    except Exception as e:
        raise ImportError(str(e)) from e


def _value(path: tuple[str, ...], value: Any) -> Any:
    """Returns the JSON value for the value at a path."""
    if len(path) > _DEPTH:
        raise _refusal(path, value)
    if isinstance(value, ml_collections.ConfigDict | dict):
        return _dictionary(path, value)
    if type(value) in (list, tuple):
        items = []
        for i, item in enumerate(value):
            inner = (*path, str(i))
            if isinstance(item, ml_collections.ConfigDict | dict):
                # A config that is frozen for a run cannot have these.
                raise _refusal(inner, item)
            items.append(_value(inner, item))
        return items
    if callable(value):
        return _import(path, value)
    if not _comes_back(value):
        raise _refusal(path, value)
    return value


def _dictionary(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    if isinstance(value, ml_collections.FrozenConfigDict):
        # The config that was frozen does not note that its values are read.
        value = value.as_configdict()
    items = {}
    fields = value
    if isinstance(value, ml_collections.ConfigDict):
        # In their own order. A ConfigDict itself sorts them, which fails if keys
        # are of several types.
        fields = config_dict.CustomJSONEncoder().default(value)
    for key in fields:
        is_reserved = hasattr(object, str(key)) or (not path and key == _RESERVED)
        if is_reserved or not _comes_back(key) or type(key) is not str or "." in key:
            raise errors.UserError(
                f"The config has the key {_SHOWN.repr(key)} of type "
                f"{type(key).__name__} in {'.'.join(path) or 'itself'}: a key is a "
                "text without a dot, which separates the keys of a path, and neither "
                f"{_RESERVED!r}, under which config.json holds the run's identity, nor "
                "an attribute of every object of Python. Give it another name, such as "
                f"{str(getattr(key, 'value', key)).strip('_').replace('.', '_')!r}."
            )
        inner = (*path, key)
        try:
            item = value[key]
        except config_dict.RequiredValueError:
            raise errors.UserError(
                f"{'.'.join(inner)} is required and has no value: set it in the "
                f"config file, or by --config.{'.'.join(inner)}=VALUE."
            ) from None
        items[key] = _value(inner, item)
    return items


def _comes_back(value: Any) -> bool:
    """Returns whether JSON gives a value back, equal and of the same type."""
    try:
        back = json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        return False
    # NaN is not equal to itself.
    is_equal = back == value or back != back
    return is_equal and type(back) is type(value) and not is_import(value)


def _import(path: tuple[str, ...], value: Any) -> str:
    """Returns the text '$import MODULE:NAME' for a function or a class.

    Raises:
      UserError: if no path leads to this very object.
    """
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    module_name = getattr(value, "__module__", None) or type(value).__module__
    # A library defines its functions in private modules, which move from version to
    # version: jax.nn.relu is in jax._src.nn.functions.
    parts = [part for part in str(module_name).split(".") if not part.startswith("_")]
    public = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    for module in (*public, module_name):
        text = f"{IMPORT}{module}:{name}"
        try:
            if _is_importable(module) and _imported(text) is value:
                return text
        except ImportError:
            continue
    raise _refusal(path, value)


def _is_importable(name: str) -> bool:
    """Returns whether another program can import a module by its name, and gets what
    this one has.

    That Python has a module of this name means little: it may be the config file, which
    was not found by its name but by its path.
    """
    package = name.partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None)
    for finder in sys.meta_path:
        spec = finder.find_spec(package, None)
        if spec is not None:
            if file is None or not spec.has_location or spec.origin is None:
                return name != "__main__"
            return os.path.realpath(spec.origin) == os.path.realpath(file)
    return False


def _refusal(path: tuple[str, ...], value: Any) -> errors.UserError:
    """Returns the error for a value that config.json does not give back."""
    try:
        shown = _SHOWN.repr(value)
    except ValueError:
        shown = f"an integer of {value.bit_length()} bits"
    return errors.UserError(
        f"{'.'.join(path)}={shown}, of type {type(value).__name__}: "
        "config.json does not give it back. A config holds numbers, texts, True, False "
        "and None, of Python's own types; dictionaries; tuples and lists without "
        f"dictionaries, at most {_DEPTH} deep; and functions and classes that a module "
        "has under their names, without arguments. Write numbers as an array's "
        ".tolist() returns them; or a name, or the numbers and texts that it is made "
        "from, and make it in the experiment."
    )
