"""Describes the machine on which the figures are measured.

python -m benchmarks.machine
"""

import importlib.metadata
import json
import os
import pathlib
import platform
import re
from typing import Any

import jax
from absl import app

_PACKAGES = (
    "jax",
    "jaxlib",
    "dm-haiku",
    "optax",
    "jmp",
    "orbax-checkpoint",
    "libtpu",
)


def describe() -> dict[str, Any]:
    """Returns a description of the machine, its accelerators and its software.

    It starts JAX's backend.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "CPU": f"{_cpu()}, {len(os.sched_getaffinity(0))} cores",
        "RAM": f"{memory / 2**30:.1f} GiB",
        "system": platform.platform(),
        "Python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "backend": jax.default_backend(),
        "devices": "; ".join(map(_device, jax.local_devices())),
    }


def _cpu() -> str:
    # Only Linux has this file, and `platform` knows less about the CPU.
    path = pathlib.Path("/proc/cpuinfo")
    found = (
        re.search(r"model name\s*: (.*)", path.read_text()) if path.exists() else None
    )
    return found[1] if found else platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _device(device: Any) -> str:
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return device.device_kind + (f", {limit / 2**30:.1f} GiB for JAX" if limit else "")


def main(argv: list[str]) -> None:
    """Prints the description as one line of JSON."""
    del argv
    print(json.dumps(describe()))


if __name__ == "__main__":
    app.run(main)
