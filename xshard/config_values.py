"""The values of a config, as config.json holds them.

A run's config is written to config.json, and whatever builds the run again, such as a
resume, an export or a replay, reads it there. So a config has only values that a file
of JSON holds exactly: None, bool, int, float, str, and lists, tuples and dictionaries
of them. A function or a class is held by the path that imports it, as the text
'$import jax.nn:relu'. Anything else is refused, with what to write instead.
"""

import functools
import importlib
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Iterator
from typing import Any, NoReturn

import ml_collections
from ml_collections import config_dict

from xshard import errors

# What precedes the path of a function or a class: '$import MODULE:NAME'.
IMPORT = "$import "
# The key of config.json that is the run's own; see `xshard.files.workdir`.
_RESERVED = "_run"
# The deepest nesting of a config, well below that of the files that are read.
_DEPTH = 100
# The most bytes of a config, well below those of a file that is read.
_BYTES = 32_000_000
# The most characters of a wrong value that a message shows.
_SHOWN = 60


def to_json(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Converts a config to plain JSON values.

    Raises:
      UserError: if JSON cannot hold a value exactly.
    """
    return _dictionary((), config)


def check(config: ml_collections.ConfigDict) -> None:
    """Checks that config.json can hold a config exactly.

    Raises:
      UserError: with the key, its value, and what to write instead.
    """
    sizes = {}
    for key, value in to_json(config).items():
        sizes[key] = len(json.dumps(value, indent=2))
    if sum(sizes.values()) > _BYTES:
        largest = max(sizes, key=lambda key: sizes[key])
        raise errors.UserError(
            f"{largest} has {sizes[largest] / 1e6:.0f} MB of values, and config.json "
            f"holds {_BYTES / 1e6:.0f} MB: write them to a file, which the experiment "
            "reads, and give the config its path."
        )


def from_json(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a config from what `to_json` returned, with tuples for all
    lists, as an experiment gets them.

    Raises:
      UserError: if a function or a class cannot be imported.
    """

    def restored(path: tuple[str, ...], value: Any) -> Any:
        if isinstance(value, dict):
            return {key: restored((*path, key), item) for key, item in value.items()}
        if isinstance(value, list):
            items = enumerate(value)
            return tuple(restored((*path, str(i)), item) for i, item in items)
        if is_import(value):
            return _imported_for(".".join(path), value)
        return value

    return restored((), content)


def with_tuples(value: Any) -> Any:
    """Returns a value of a config, a dictionary for a config, with tuples for lists.

    A file of JSON does not tell them apart, so an experiment does not, either.
    """
    if isinstance(value, ml_collections.ConfigDict | dict):
        return {key: with_tuples(value[key]) for key in value}
    if type(value) in (list, tuple):
        return tuple(with_tuples(item) for item in value)
    return value


def is_import(value: Any) -> bool:
    """Returns whether a JSON value stands for a function or a class."""
    return isinstance(value, str) and value.startswith(IMPORT)


def imported(text: str) -> Any:
    """Returns the function or the class that a text '$import MODULE:NAME' stands for.

    Raises:
      ImportError: if the module cannot be imported, or lacks the name.
    """
    module_name, _, name = text.removeprefix(IMPORT).partition(":")
    try:
        value = importlib.import_module(module_name)
        for part in name.split("."):
            value = getattr(value, part)
    except (AttributeError, ValueError) as e:
        raise ImportError(str(e)) from e
    return value


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


def is_same_import(text: str, other: str) -> bool:
    """Returns whether two texts '$import MODULE:NAME' stand for the same object.

    A library may have moved it, so that another path leads to it first.
    """
    if text == other:
        return True
    try:
        return imported(text) is imported(other)
    # What the import of a module may raise is not known.
    except Exception:
        return False


def _imported_for(key: str, text: str) -> Any:
    try:
        return imported(text)
    except ImportError as e:
        raise errors.UserError(
            f"{key} is {text.removeprefix(IMPORT)!r} in config.json, which cannot be "
            f"imported ({e}): make it available there again, or start in the directory "
            "that the run was started in."
        ) from e


def _value(path: tuple[str, ...], value: Any) -> Any:
    """Returns the JSON value for the value at a path."""
    if len(path) > _DEPTH:
        _refuse(
            path,
            value,
            f"it is nested more than {_DEPTH} levels deep",
            "contain less, and not itself",
        )
    if isinstance(value, ml_collections.ConfigDict | dict):
        return _dictionary(path, value)
    kind = type(value)
    if kind in (list, tuple):
        return _list(path, value)
    if kind is str:
        return _text(path, value)
    if kind is int:
        return _integer(path, value)
    if value is None or kind in (bool, float):
        return value
    if callable(value):
        return _import(path, value)
    _refuse(path, value, _cannot(kind), _instead(value))


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
        name = _key(path, key)
        inner = (*path, name)
        try:
            item = value[key]
        except config_dict.RequiredValueError:
            raise errors.UserError(
                f"{'.'.join(inner)} is required and has no value: set it in the "
                f"config file, or by --config.{'.'.join(inner)}=VALUE."
            ) from None
        items[name] = _value(inner, item)
    return items


def _list(path: tuple[str, ...], value: Any) -> list[Any]:
    items = []
    for i, item in enumerate(value):
        inner = (*path, str(i))
        # A config that is frozen for a run cannot have these.
        if isinstance(item, ml_collections.ConfigDict | dict):
            _refuse(
                inner,
                item,
                "a list of a config cannot hold a dictionary",
                "a dictionary of dictionaries by name, or a tuple of pairs "
                "(key, value)",
            )
        if isinstance(item, ml_collections.FieldReference):
            _refuse(
                inner,
                item,
                "a list of a config cannot hold a reference",
                "the value itself",
            )
        items.append(_value(inner, item))
    return items


def _key(path: tuple[str, ...], key: Any) -> str:
    """Checks a key of a dictionary, and returns it."""
    where = f" in {'.'.join(path)}" if path else ""
    if type(key) is not str:
        raise errors.UserError(
            f"The config has the key {_shown(key)}{where}, of type "
            f"{type(key).__name__}: keys are strings in config.json, so write "
            f"{str(getattr(key, 'value', key))!r}."
        )
    if "." in key:
        raise errors.UserError(
            f"The config has the key {_shown(key)}{where}: a dot separates the keys of "
            f"a path, so write {key.replace('.', '_')!r}, or a dictionary within."
        )
    if hasattr(object, key):
        raise errors.UserError(
            f"The config has the key {key!r}{where}, an attribute of every object of "
            "Python: give it another name."
        )
    if not path and key == _RESERVED:
        raise errors.UserError(
            f"The config has the key {key!r}, under which config.json holds the run's "
            "identity: give it another name."
        )
    _text((*path, key), key)
    return key


def _text(path: tuple[str, ...], value: str) -> str:
    if json.loads(json.dumps(value)) != value:
        _refuse(
            path,
            value,
            "its surrogates are halves of one character, which JSON joins",
            "the character itself",
        )
    if is_import(value):
        _refuse(
            path,
            value,
            "in config.json such a text stands for a function or a class",
            "another text, or the function or class itself",
        )
    return value


def _integer(path: tuple[str, ...], value: int) -> int:
    try:
        str(value)
    except ValueError:
        raise errors.UserError(
            f"{'.'.join(path)} is an integer of {value.bit_length()} bits, more than "
            "Python writes to a file: write it in hexadecimal, as a text."
        ) from None
    return value


def _import(path: tuple[str, ...], value: Any) -> str:
    """Returns the text '$import MODULE:NAME' for a function or a class.

    Raises:
      UserError: if no path leads to this very object.
    """
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    module_name = getattr(value, "__module__", None) or type(value).__module__
    if isinstance(name, str) and isinstance(module_name, str):
        for text in _candidates(module_name, name):
            module_name, _, _ = text.removeprefix(IMPORT).partition(":")
            if _is_importable(module_name) and _leads_to(text, value):
                return text
    _refuse(path, value, _no_path(value), _function_instead(value))


def _candidates(module_name: str, name: str) -> Iterator[str]:
    """Yields the texts '$import MODULE:NAME' that may stand for what a module defines
    under a name.
    """
    parts = module_name.split(".")
    public = [part for part in parts if not part.startswith("_")]
    if len(public) < len(parts):
        # A library defines its functions in private modules, which move from version to
        # version: jax.nn.relu is in jax._src.nn.functions.
        for length in range(len(public), 0, -1):
            yield f"{IMPORT}{'.'.join(public[:length])}:{name}"
    yield f"{IMPORT}{module_name}:{name}"


def _leads_to(text: str, value: Any) -> bool:
    try:
        return imported(text) is value
    # What the import of a module may raise is not known.
    except Exception:
        return False


def _is_importable(name: str) -> bool:
    """Returns whether another program can import a module by its name, and gets what
    this one has.

    That Python has a module of this name means little: it may be the config file, which
    was not found by its name but by its path.
    """
    path = None
    spec = None
    parts = name.split(".")
    for i in range(len(parts)):
        spec = _find_spec(".".join(parts[: i + 1]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    file = getattr(sys.modules.get(name), "__file__", None)
    if spec is None or not spec.has_location or not spec.origin or not file:
        return name != "__main__"
    return os.path.realpath(spec.origin) == os.path.realpath(file)


def _find_spec(name: str, path: Any) -> importlib.machinery.ModuleSpec | None:
    """Searches for a module, also if Python has it already."""
    for finder in sys.meta_path:
        # A finder of the import system before Python 3.4 has no such method.
        find = getattr(finder, "find_spec", None)
        spec = find(name, path) if find else None
        if spec is not None:
            return spec
    return None


def _no_path(value: Any) -> str:
    """Returns why no path leads to a function or a class."""
    if isinstance(value, functools.partial):
        return "config.json cannot hold the arguments of a functools.partial"
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if not isinstance(name, str):
        return _cannot(type(value))
    owner = getattr(value, "__self__", None)
    if owner is not None and not isinstance(owner, types.ModuleType):
        return "config.json cannot hold the object of a method"
    if "<lambda>" in name:
        return "config.json holds a function by its name, and a lambda has none"
    if "<locals>" in name:
        return (
            "config.json holds a function by the path that imports it, and one that "
            "another function made has none"
        )
    module_name = getattr(value, "__module__", None)
    if isinstance(module_name, str) and not _is_importable(module_name):
        where = f"the module {module_name!r}"
        file = getattr(sys.modules.get(module_name), "__file__", None)
        if file:
            where = file
        return (
            "config.json holds a function by the path that imports it, and another "
            f"program cannot import {where} by its name"
        )
    return (
        f"config.json holds a function by the path that imports it, and "
        f"{module_name}:{name} is another object"
    )


def _function_instead(value: Any) -> str:
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    is_function = isinstance(name, str) or isinstance(value, functools.partial)
    if not is_function:
        return _instead(value)
    return (
        "a function or class at the top of a module that can be imported, such as the "
        "experiment's, or its name and arguments, from which the experiment makes it"
    )


def _cannot(kind: type) -> str:
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    return f"config.json cannot hold a value of type {name} exactly"


def _instead(value: Any) -> str:
    """Returns what to write instead of a value that is refused."""
    if hasattr(value, "tolist"):
        # Of NumPy or JAX.
        return "its numbers, as .tolist() returns them"
    return (
        "its name, or the numbers and texts that it is made from, or a tuple or a "
        "dictionary of them, and make it in the experiment"
    )


def _shown(value: Any) -> str:
    try:
        shown = repr(value)
    # A value of the user's own type, or one that contains itself.
    except Exception:
        shown = f"a {type(value).__name__}"
    shown = " ".join(shown.split())
    return f"{shown[:_SHOWN]}..." if len(shown) > _SHOWN else shown


def _refuse(path: tuple[str, ...], value: Any, reason: str, instead: str) -> NoReturn:
    raise errors.UserError(
        f"{'.'.join(path)}={_shown(value)}: {reason}. Write {instead}."
    )
