"""The source of an experiment: which file its class came from, and a checksum."""

import ast
import functools
import hashlib
import importlib.util
import os
import pathlib
import sys
import types
from typing import Any

from xshard import errors
from xshard.base import user_code


def of_experiment(experiment: str) -> dict[str, str]:
    """Returns the file that an experiment came from, and a checksum of its source.

    The source is that of the file and of what it imports from its project: the files
    below its folder, or below the outermost package of which it is a part.

    Args:
      experiment: the dotted path of the class, whose module has been imported.

    Returns:
      'file' and 'source'; nothing if there is no file, as in a notebook.
    """
    module = sys.modules.get(experiment.rpartition(".")[0])
    return {} if module is None else _source(module)


# Cached, as what a process has imported stays what it was when a file is edited.
@functools.cache
def _source(module: types.ModuleType) -> dict[str, str]:
    checksums: dict[str, str] = {}
    try:
        file = os.path.realpath(str(module.__file__))
        outermost = max(module.__name__.count(".") - 1, 0)
        folder = os.path.join(pathlib.Path(file).parents[outermost], "")
        _add_checksums(module, folder, checksums)
    except (AttributeError, OSError, SyntaxError, ValueError):
        return {}
    # Without the names of the files: the same project may lie elsewhere.
    found = "".join(sorted(checksums.values()))
    return {"file": file, "source": hashlib.sha256(found.encode()).hexdigest()}


def _add_checksums(
    module: types.ModuleType, folder: str, checksums: dict[str, str]
) -> None:
    """Adds the checksums of a module and of what it imports from a folder, by file."""
    file = os.path.realpath(str(module.__file__))
    text = pathlib.Path(file).read_bytes()
    checksums[file] = hashlib.sha256(text).hexdigest()
    names = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            parent = importlib.util.resolve_name(relative, module.__package__)
            names += [parent, *(f"{parent}.{alias.name}" for alias in node.names)]
    for name in names:
        imported = sys.modules.get(name)
        other = os.path.realpath(getattr(imported, "__file__", None) or "")
        # An environment, or a clone of xshard, may lie in the folder, too.
        is_own = user_code.is_user_file(other.removeprefix(folder))
        if name.startswith("xshard") or other in checksums or not is_own:
            continue
        if imported and other.startswith(folder):
            _add_checksums(imported, folder, checksums)


def compare(old: Any, experiment: str, whose: str) -> list[str]:
    """Checks whether the experiment that was imported is the one of a run.

    Args:
      old: what the run noted as `of_experiment` returned it, among other things.
      experiment: the dotted path of its class.
      whose: the beginning of the message, such as '--workdir=DIR holds'.

    Returns:
      A line if the source was edited.

    Raises:
      UserError: if it is other code, from another file.
    """
    new = of_experiment(experiment)
    if not isinstance(old, dict) or not new or not old.get("source"):
        return []
    if old["source"] == new["source"]:
        return []
    if old.get("file") == new["file"]:
        return [f"the source of {experiment}: edited since the run last began"]
    raise errors.UserError(
        f"{whose} a run of {experiment} in {old.get('file')}. Here this name leads to "
        f"{new['file']}, which has other source. Start a program of its own for the "
        "run, in the folder of its project. Where that is this file, moved and edited "
        "since, write its path as 'file' of '_run' into the run's config.json."
    )
