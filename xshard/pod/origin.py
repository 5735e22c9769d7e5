"""The code of a run: what must be equal on all of its processes, and the commit that it is of."""

import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import subprocess
import sys
import zlib
from typing import Any

import jax
import ml_collections

from xshard import config as config_lib
from xshard import logical
from xshard.files import identity as identity_lib
from xshard.files import workdir
from xshard.pod import processes

_LIBRARIES = ("jax", "jaxlib", "dm-haiku", "optax", "numpy", "tensorstore")
# The environment variables that change what XLA makes of a program.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_INSTRUCTIONS, _X86 = "xla_cpu_max_isa", ("x86_64", "AMD64")
# A repository on a slow disk is not waited for.
_GIT_SECONDS = 10.0


def of(config: ml_collections.ConfigDict, cpu_devices: int) -> dict[str, str]:
    """Names and short texts of what must be equal.

    Args:
      config: the run's config.
      cpu_devices: as the flag says.
    """
    facts = {"version of Python": platform.python_version(), "--cpu_devices": str(cpu_devices)}
    for key, value in config_lib.flatten(identity_lib.plain(config)).items():
        facts[f"config.{key}"] = repr(value)
    for library in _LIBRARIES:
        facts[f"version of {library}"] = importlib.metadata.version(library)
    # An experiment is 'package.module.Class'.
    experiment = str(config.get("experiment", ""))
    package = experiment.rpartition(".")[0].rpartition(".")[0]
    return facts | _files("xshard") | _files(package)


def origin(module: str, training: str, evaluation: str) -> workdir.Origin:
    """Returns the origin of a run, beside its config. All processes call it.

    Args:
      module: the experiment's.
      training: a summary of the training data.
      evaluation: one of the evaluation data.

    Raises:
      UserError: if the processes have other data than one another.
    """
    summaries = {"training": lambda: training, "evaluation": lambda: evaluation}
    processes.check_equal_data(summaries)
    file = getattr(sys.modules.get(module), "__file__", None)
    git_commit = ""
    if file:
        git_commit = commit(file)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in _LIBRARIES]
    all_devices = jax.devices()
    kinds = "/".join(sorted({device.device_kind for device in all_devices}))
    devices = f"{len(all_devices)} {kinds} on {jax.process_count()} process(es)"
    if jax.default_backend() == "cpu":
        # XLA divides an operation among them, and with it the order of a sum.
        devices += f", {cores()} core(s)"
        kinds = f"{kinds} {platform.machine()} {_instructions():08x}"
    flags = [f"{name}={os.environ[name]}" for name in _FLAGS if os.environ.get(name)]
    libraries = ", ".join(versions)
    environment = libraries, devices, " ".join(flags)
    return workdir.Origin(training, evaluation, git_commit, *environment, kinds)


def _instructions() -> int:
    """A checksum of the instructions that a CPU has, by which XLA orders sums; 0 where the system does not say."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return 0
    features = [line for line in lines if line.startswith(("flags", "Features"))]
    return zlib.crc32(" ".join(sorted(features[0].split())).encode()) if features else 0


def set_up_cpu(config: Any, devices: int = 0) -> None:
    """Has JAX compute on CPUs as a run needs it; to be called before JAX has any devices.

    Args:
      config: the run's, or a dictionary as it.
      devices: the virtual devices that the CPU is split into; 0: JAX decides.
    """
    if devices:
        jax.config.update("jax_num_cpu_devices", devices)
    if config.get("logical_replicas") and cores() == 1:
        # XLA computes some sums in another order where it has one thread; the number of several does not show.
        os.environ.setdefault("NPROC", "2")
    flags = os.environ.get("XLA_FLAGS", "")
    if logical.is_exact(config) and _INSTRUCTIONS not in flags and platform.machine() in _X86:
        # Later ones multiply, add and round once. Which operations LLVM joins so depends on what else is in a program, and that on
        # the number of devices.
        os.environ["XLA_FLAGS"] = f"{flags} --{_INSTRUCTIONS}=AVX".strip()


def cores() -> int | None:
    """The number of cores that this process may use."""
    # Not all systems say which these are.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def commit(file: str) -> str:
    """The git commit that a source file is of, with '-dirty' if what is there differs; empty if it is in none.

    Nothing fails for want of git, or of its leave to read the repository.
    """
    folder, name = os.path.split(os.path.abspath(file))
    described = _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    if not described or described.endswith("-dirty"):
        return described
    # What git does not track does not make a tree dirty.
    if not _git(folder, "ls-files", "--", name):
        return f"{described}-dirty"
    return described


def _git(folder: str, *arguments: str) -> str:
    """Returns what git prints on one line; empty if it cannot say."""
    # A container's user is often another one than who owns the repository.
    command = ["git", "-c", "safe.directory=*", "-C", folder, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode != 0:
        return ""
    return done.stdout.strip()


def _files(package: str) -> dict[str, str]:
    """The checksum of each source file of a package; of none if it cannot be found, which shows later."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return {}
    checksums: dict[str, str] = {}
    if spec is None or spec.submodule_search_locations is None:
        return checksums
    for location in spec.submodule_search_locations:
        folder = pathlib.Path(location)
        for path in sorted(folder.rglob("*.py")):
            name = f"{package}/{path.relative_to(folder).as_posix()}"
            checksums[name] = f"{zlib.crc32(path.read_bytes()):08x}"
    return checksums
