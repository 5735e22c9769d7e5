"""Configs as earlier versions wrote them: with descriptions of some values.

Those versions wrote a function as 'function relu' or as its attributes, with docstrings
and addresses, and a value such as a path as 'unserializable object: /data'.
"""

import json
import re
from typing import Any

import ml_collections

from xshard import config_values

_FUNCTION = re.compile(r"function [\w<>]+")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# The attributes of a function that say which one it is. Others, such as its docstring,
# are those of the library's version.
_NAMES = ("__module__", "__name__", "__qualname__")


def update(old: dict[str, Any], new: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Replaces the descriptions of a config that an earlier version may have written.

    Args:
      old: the config of the run, as JSON values.
      new: the config to resume with, likewise. Where it has the function or the class
        that is described, the path of that takes the place of the description.

    Returns:
      The config of the run, and the paths of descriptions that do not tell exactly what
      the value was.
    """
    unknown: set[str] = set()
    return _update(old, new, "", unknown), unknown


def restore(content: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replaces descriptions by the functions and classes that they name with a module.

    Args:
      content: the config of a run, as JSON values.

    Returns:
      The config, and the paths of other descriptions: what these values were is not
      known.
    """
    unknown: list[str] = []
    return _restore(content, "", unknown), unknown


def _restore(old: Any, path: str, unknown: list[str]) -> Any:
    if isinstance(old, list):
        items = []
        for i, item in enumerate(old):
            items.append(_restore(item, f"{path}.{i}", unknown))
        return items
    place = _named_place(old)
    if place is not None:
        for text in config_values.candidates(*place):
            try:
                value = config_values.imported(text)
            except ImportError:
                continue
            if _describes(old, text):
                return value
    if _described(old) is not None or _names_a_function(old):
        unknown.append(path)
        return old
    if isinstance(old, dict):
        if not config_values.ATTRIBUTES.isdisjoint(old):
            # The attributes of an object are no keys that a config can have.
            unknown.append(path)
            return f"{config_values.DESCRIBED}{old.get('__name__', 'an object')}"
        restored = {}
        for key, item in old.items():
            restored[key] = _restore(item, f"{path}.{key}" if path else key, unknown)
        return restored
    return old


def _named_place(old: Any) -> tuple[str, str] | None:
    """Returns the module and the name in the description of a function or a class; None
    if it is no such description.
    """
    if isinstance(old, dict):
        module = old.get("__module__")
        name = old.get("__qualname__", old.get("__name__"))
        if isinstance(module, str) and isinstance(name, str):
            return module, name
    if isinstance(old, str):
        matched = config_values.CLASS.fullmatch(old)
        if matched:
            return matched[1] or "builtins", matched[2]
    return None


def _names_a_function(old: Any) -> bool:
    if not isinstance(old, str):
        return False
    return (
        old.startswith(config_values.DESCRIBED) or _FUNCTION.fullmatch(old) is not None
    )


def _update(old: Any, new: Any, path: str, unknown: set[str]) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        updated = {}
        for key, item in old.items():
            inner = f"{path}.{key}" if path else key
            updated[key] = (
                _update(item, new[key], inner, unknown) if key in new else item
            )
        return updated
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        items = []
        for item, new_item in zip(old, new, strict=True):
            items.append(_update(item, new_item, path, unknown))
        return items
    if config_values.is_import(new):
        if _describes(old, new):
            if isinstance(old, str) and _FUNCTION.fullmatch(old):
                # Another module may have a function of this name.
                unknown.add(path)
                return old
            return new
        if isinstance(old, dict) and "__name__" in old:
            # A message shows its name, and not all of its attributes.
            return f"function {old['__name__']}"
    described = _described(old)
    if described is None or old == new:
        return old
    unknown.add(path)
    return described


def _described(old: Any) -> str | None:
    """Returns the description of a value, or None if it is none."""
    if isinstance(old, str) and old.startswith(config_values.DESCRIBED):
        return None if "<built-in function" in old else old
    # The attributes of a member of an enumeration.
    if isinstance(old, dict) and {"_name_", "_value_"} <= old.keys():
        return f"{config_values.DESCRIBED}{old['_name_']}"
    return None


def _describes(old: Any, text: str) -> bool:
    """Returns whether a value describes the function or the class of an import."""
    try:
        value = config_values.imported(text)
    except ImportError:
        return False
    if isinstance(old, dict):
        shared = [name for name in _NAMES if name in old]
        if len(shared) > 1:
            return all(old[name] == getattr(value, name, None) for name in shared)
    config = ml_collections.ConfigDict({"value": value}, convert_dict=False)
    described = json.loads(config.to_json_best_effort())["value"]
    return _without_versions(old) == _without_versions(described)


def _without_versions(description: Any) -> str:
    """Returns a description without addresses and docstrings."""
    if isinstance(description, dict):
        description = {k: v for k, v in description.items() if k != "__doc__"}
    return _ADDRESS.sub("", json.dumps(description, sort_keys=True))
