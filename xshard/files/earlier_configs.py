"""Configs as earlier versions wrote them: with descriptions of some values.

Those versions wrote a function as 'function relu' or as its attributes, with docstrings
and addresses, and a value such as a path as 'unserializable object: /data'.
"""

import json
import re
from typing import Any

import ml_collections

from xshard import config_values

# How the description of most values began that JSON cannot hold.
_DESCRIBED = "unserializable object: "
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
      The config of the run, and the paths of descriptions of other values that are now
      replaced: what the value was is not known exactly.
    """
    unknown: set[str] = set()
    return _update(old, new, "", unknown), unknown


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
    if isinstance(old, str) and old.startswith(_DESCRIBED):
        return None if "<built-in function" in old else old
    # The attributes of a member of an enumeration.
    if isinstance(old, dict) and {"_name_", "_value_"} <= old.keys():
        return f"{_DESCRIBED}{old['_name_']}"
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
