"""What must be equal on all processes of a run: the code, the libraries, the config."""

import importlib.metadata
import importlib.util
import pathlib
import platform
import zlib

import ml_collections

from xshard import workdir

_LIBRARIES = ("jax", "jaxlib", "dm-haiku", "optax", "numpy", "tensorstore")


def of(config: ml_collections.ConfigDict, cpu_devices: int) -> dict[str, str]:
    """Names and short texts of what must be equal.

    Args:
      config: the run's config.
      cpu_devices: as the flag says.
    """
    facts = {f"config.{k}": repr(v) for k, v in workdir.flatten(workdir.plain(config)).items()}
    facts |= {f"version of {name}": importlib.metadata.version(name) for name in _LIBRARIES}
    facts |= {"version of Python": platform.python_version(), "--cpu_devices": str(cpu_devices)}
    for package in (
        "xshard",
        str(config.get("experiment", "")).rpartition(".")[0].rpartition(".")[0],
    ):
        facts |= _files(package)
    return facts


def _files(package: str) -> dict[str, str]:
    """The checksum of each source file of a package; of none if it cannot be found, which shows later."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return {}
    folders = map(pathlib.Path, (spec and spec.submodule_search_locations) or ())
    return {
        f"{package}/{path.relative_to(folder).as_posix()}": f"{zlib.crc32(path.read_bytes()):08x}"
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
    }
