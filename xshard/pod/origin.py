"""The code and the machine of a run: what must match on all processes, and the
provenance that the run records.
"""

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
from xshard.base import places
from xshard.files import compile_cache
from xshard.files import identity as identity_lib
from xshard.files import provenance as provenance_lib
from xshard.pod import host_collectives

# The environment variables that change how XLA compiles a program.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_MAX_ISA_FLAG = "xla_cpu_max_isa"
_X86 = ("x86_64", "AMD64")
_GPU_FLAG = "xla_gpu_deterministic_ops"
# The names of JAX's platforms for GPUs, which the names of its plugins contain, too.
_GPUS = ("cuda", "gpu", "rocm")
# A run with 1,024 replicas also sets up the hosts of accelerators, which must not start
# a thread for each.
_MAX_THREADS = 128
# A repository on a slow disk must not delay the start of a run for longer.
_GIT_SECONDS = 10.0


def must_match(config: ml_collections.ConfigDict, cpu_devices: int) -> dict[str, str]:
    """Returns what must match on all processes: texts by their names.

    Args:
      config: the run's config.
      cpu_devices: the value of --cpu_devices.
    """
    facts = {
        "version of Python": platform.python_version(),
        "--cpu_devices": str(cpu_devices),
    }
    for key, value in config_lib.flatten(identity_lib.plain(config)).items():
        facts[f"config.{key}"] = repr(value)
    for library, version in provenance_lib.library_versions().items():
        facts[f"version of {library}"] = version
    # The experiment is named as 'package.module.Class', and only its package is
    # compared.
    experiment = str(config.get("experiment", ""))
    package = experiment.rpartition(".")[0].rpartition(".")[0]
    facts |= _source_checksums("xshard")
    facts |= _source_checksums(package)
    return facts


def must_match_bits(
    config: ml_collections.ConfigDict, cpu_devices: int
) -> dict[str, str]:
    """Returns what must match on processes that compute the same bits, also on what
    processor.

    Args:
      config: as in `must_match`.
      cpu_devices: as in `must_match`.
    """
    facts = must_match(config, cpu_devices)
    return facts | {
        "the processor": f"{len(jax.devices())} {_chip()}",
        "the compiler's flags": _flags(),
    }


def _chip() -> str:
    """Returns the kind of the devices, and of what compiles for them."""
    chip = "/".join(sorted({device.device_kind for device in jax.devices()}))
    if jax.default_backend() == "cpu":
        chip = f"{chip} {platform.machine()} {_instruction_checksum():08x}"
    return chip


def _flags() -> str:
    flags = [f"{name}={os.environ[name]}" for name in _FLAGS if os.environ.get(name)]
    return " ".join(flags)


def find_provenance(
    module: str,
    training: str,
    evaluation: str,
    channel: host_collectives.Channel | None = None,
) -> provenance_lib.Provenance:
    """Returns the provenance of a run: its data, code, libraries and devices. All
    processes must call it.

    Args:
      module: the name of the experiment's module.
      training: a summary of the training data.
      evaluation: a summary of the evaluation data.
      channel: connects the processes; by default those that JAX has joined.

    Raises:
      UserError: if the data differs between processes.
    """
    summaries = {"training": lambda: training, "evaluation": lambda: evaluation}
    host_collectives.check_equal_data(summaries, channel)
    file = getattr(sys.modules.get(module), "__file__", None)
    git_commit = ""
    if file:
        git_commit = commit(file)
    versions = []
    for name, version in provenance_lib.library_versions().items():
        versions.append(f"{name} {version}")
    all_devices = jax.devices()
    chip = "/".join(sorted({device.device_kind for device in all_devices}))
    devices = f"{len(all_devices)} {chip} on {places.own().count} process(es)"
    if jax.default_backend() == "cpu":
        # XLA divides an operation among the cores, so their number changes the order of
        # sums.
        devices += f", {cores()} core(s)"
    return provenance_lib.Provenance(
        training=training,
        evaluation=evaluation,
        commit=git_commit,
        libraries=", ".join(versions),
        devices=devices,
        flags=_flags(),
        chip=_chip(),
    )


def _instruction_checksum() -> int:
    """Returns a checksum of the CPU's instruction sets, on which XLA's order of sums
    depends; 0 if they are unknown.
    """
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        # x86 calls them flags, Arm features. All cores have the same.
        if line.startswith(("flags", "Features")):
            return zlib.crc32(" ".join(sorted(line.split())).encode())
    return 0


def set_up_backends(config: Any, cpu_devices: int) -> None:
    """Sets up JAX's backends for a run; it must be called before JAX creates devices.

    On CPUs, XLA is made to compile programs that may be loaded again; see
    `xshard.files.compile_cache`. On GPUs, it is made to compile programs that give the
    same bits each time. Without that a run that is resumed ends in other bits: XLA
    picks kernels by timing them, and some kernels sum in any order.
    XLA_FLAGS may say otherwise.

    Args:
      config: the run's config, or a dictionary with the same keys.
      cpu_devices: the number of virtual devices that the CPU is split into; 0 leaves it
        to JAX.
    """
    if cpu_devices:
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    if _may_have_gpu():
        _add_flag(_GPU_FLAG, "true")
    if config.get("compiled", {}).get("directory", "") or _has_cpus_only():
        _add_flag(*compile_cache.IN_ORDER_FLAG)
    if not logical.is_exact(config):
        return
    # XLA divides a large matrix product among its threads, and rounds differently near
    # the cuts. It has as many threads as cores or devices, whichever is more, unless
    # NPROC replaces the number of cores.
    groups = len(config.get("group_assignment") or ()) or 1
    if config_lib.separates_slices(config):
        groups = config["slices"] or 1
    threads = max(2, config["logical_replicas"] * groups)
    os.environ["NPROC"] = str(min(threads, _MAX_THREADS))
    if platform.machine() in _X86:
        # Instruction sets after AVX have a fused multiply-add, which rounds once. Which
        # operations LLVM fuses depends on the rest of the program, and the program
        # depends on the number of devices.
        _add_flag(_MAX_ISA_FLAG, "AVX")


def _has_cpus_only() -> bool:
    """Returns whether JAX is sure to find no accelerators."""
    platforms = jax.config.values["jax_platforms"]
    if platforms:
        return platforms == "cpu"
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return not plugins and importlib.util.find_spec("libtpu") is None


def _may_have_gpu() -> bool:
    """Returns whether JAX may find GPUs. To ask JAX itself would create its devices."""
    platforms = jax.config.values["jax_platforms"]
    if platforms:
        return any(name in platforms for name in _GPUS)
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return any(name in plugin.name for plugin in plugins for name in _GPUS)


def _add_flag(name: str, value: str) -> None:
    """Adds a flag to XLA_FLAGS, unless it has a value there."""
    flags = os.environ.get("XLA_FLAGS", "")
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{name}={value}".strip()


def cores() -> int | None:
    """Returns the number of cores that this process may use; None if it is unknown."""
    # Not every system has CPU affinity.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def commit(file: str) -> str:
    """Returns the git commit of a source file's repository; empty if the file is in no
    repository.

    It ends with '-dirty' if tracked files differ from the commit, or if git does not
    track the file. A missing git, or one that may not read the repository, is no error.
    """
    folder, name = os.path.split(os.path.abspath(file))
    described = _git(
        folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"
    )
    if not described or described.endswith("-dirty"):
        return described
    # `git describe` ignores untracked files, but an untracked experiment is not in the
    # commit.
    if not _git(folder, "ls-files", "--", name):
        return f"{described}-dirty"
    return described


def _git(folder: str, *arguments: str) -> str:
    """Returns the output of a git command, stripped; empty if the command fails."""
    # Git refuses repositories of other users, and a container often runs as another
    # user than the owner.
    command = ["git", "-c", "safe.directory=*", "-C", folder, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode != 0:
        return ""
    return done.stdout.strip()


def _source_checksums(package: str) -> dict[str, str]:
    """Returns the checksum of each source file of a package.

    It is empty if there is no such package, which the import of the experiment reports
    later.
    """
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
