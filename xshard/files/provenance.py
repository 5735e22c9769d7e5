"""The identity of a run, and its provenance: the data, the code and the machine that it
was trained with.

`xshard.pod.origin` finds the provenance out, and a run records it in origin.json.
"""

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from xshard import errors
from xshard.base import user_code

_LIBRARIES = ("jax", "jaxlib", "dm-haiku", "optax", "numpy", "tensorstore")
# What may change the bits that a program computes.
_ARITHMETIC = ("chip", "libraries", "flags")
# The flag of XLA's scheduler for CPUs. It changes in which order a program starts what
# is independent, and no bit.
SCHEDULER_FLAG = "xla_cpu_enable_concurrency_optimized_scheduler"


class Identity(NamedTuple):
    """The identity of a run, which is part of everything that the run writes.

    Attributes:
      id: a random ID, created when the run began.
      fingerprint: a checksum of the config values that may not change during the run.
    """

    id: str
    fingerprint: str


class Provenance(NamedTuple):
    """Where a run comes from, beside its config. An unknown value is an empty text.

    Attributes:
      training: the training data, as `xshard.data.summary` describes it.
      evaluation: the evaluation data, described likewise.
      commit: the git commit of the experiment's code.
      libraries: the versions of the libraries.
      devices: the number and kind of the devices, the number of processes, and for CPUs
        the cores of the first.
      flags: XLA's flags, from the environment.
      chip: the kind of the devices, as far as it affects their arithmetic.
    """

    training: str
    evaluation: str
    commit: str
    libraries: str = ""
    devices: str = ""
    flags: str = ""
    chip: str = ""


def library_versions() -> dict[str, str]:
    """Returns the versions of the libraries that a run's results depend on."""
    return {name: importlib.metadata.version(name) for name in _LIBRARIES}


def source(experiment: str) -> dict[str, str]:
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


def compare_source(old: Any, experiment: str, whose: str) -> list[str]:
    """Checks whether the experiment that was imported is the one of a run.

    Args:
      old: what the run noted as `source` returned it, among other things.
      experiment: the dotted path of its class.
      whose: the beginning of the message, such as '--workdir=DIR holds'.

    Returns:
      A line if the source was edited.

    Raises:
      UserError: if it is other code, from another file.
    """
    new = source(experiment)
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


def from_json(content: Mapping[str, Any]) -> Provenance:
    """Returns the provenance in a file; values that are missing are unknown."""
    values = {name: str(content.get(name, "")) for name in Provenance._fields}
    return Provenance(**values)


def compare(
    old: Provenance, new: Provenance, directory: pathlib.Path, *, exact: bool
) -> list[str]:
    """Checks whether a run may resume with another provenance than it has.

    Args:
      old: the run's provenance.
      new: the provenance to resume with.
      directory: the run's work directory, for messages.
      exact: whether the run must continue bit for bit.

    Returns:
      The changes that the run may resume with, one text for each.

    Raises:
      UserError: if the run was trained on other data; or, if exact, with what may
        compute other bits.
    """
    if old.training and new.training and old.training != new.training:
        raise errors.UserError(
            f"--workdir={directory} holds a run with other training data: "
            f"{old.training}; now there are {new.training}. A run cannot continue with "
            "other data: restore that data, or start a new run in a new directory, "
            f"with the parameters of this one by --init_from={directory}."
        )
    if exact:
        _check_arithmetic(old, new, directory)
    changes = []
    if old.evaluation and old.evaluation != new.evaluation:
        changes.append(f"evaluation data: {old.evaluation} -> {new.evaluation}")
    if old.commit and old.commit != new.commit:
        changes.append(f"commit: {old.commit} -> {new.commit or 'none'}")
    if old.libraries and old.libraries != new.libraries:
        changes.append(_libraries_changed(old.libraries, new.libraries))
    return changes


def _check_arithmetic(
    old: Provenance, new: Provenance, directory: pathlib.Path
) -> None:
    for name in _ARITHMETIC:
        before = getattr(old, name)
        now = getattr(new, name)
        if _without_scheduler(before) != _without_scheduler(now):
            raise errors.UserError(
                f"--workdir={directory} holds a run with reduction.arithmetic='exact', "
                f"which continues bit for bit. Its {name} changed from "
                f"{before or 'none'} to {now or 'none'}, so the bits may differ. "
                f"Restore the former {name}, or give up equal bits with "
                "--config.reduction.arithmetic=float."
            )


def _without_scheduler(text: str) -> list[str]:
    """Returns the words of a text without the flag of the scheduler, which earlier
    versions did not set.
    """
    words = text.replace("XLA_FLAGS=", "").split()
    return [word for word in words if not word.startswith(f"--{SCHEDULER_FLAG}=")]


def _libraries_changed(old: str, new: str) -> str:
    """Describes the versions that changed, without those that are equal."""
    before = old.split(", ")
    after = new.split(", ")
    gone = [version for version in before if version not in after]
    added = [version for version in after if version not in before]
    return f"libraries: {', '.join(gone)} -> {', '.join(added)}"
