"""The identity of a run, and its provenance: the data, the code and the machine that it
was trained with.

`xshard.pod.origin` finds the provenance out, and a run records it in origin.json.
"""

import importlib.metadata
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from xshard import errors

_LIBRARIES = ("jax", "jaxlib", "dm-haiku", "optax", "numpy", "tensorstore")
# What may change the bits that a program computes.
_ARITHMETIC = ("chip", "libraries", "flags")
# The flag of XLA's scheduler for CPUs. It changes in which order a program starts what
# is independent, and no bit.
SCHEDULER_FLAG = "xla_cpu_enable_concurrency_optimized_scheduler"


class Identity(msgspec.Struct, frozen=True):
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
