"""The wing of traces, and of the memory of devices that ran out of it."""

import pathlib
import types

import jax

from xshard.files import disk
from xshard.wings.profiles import mode, tracer

_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


class Profiles(tracer.Tracer):
    """Traces steps if a user asks for it, and notes what was in memory."""

    name = "profiles"
    modes = types.MappingProxyType({"profile": mode.run})

    def note(self, error: Exception) -> None:
        """Writes the memory of the devices, if they ran out of it."""
        # Members that JAX has not joined all have the same index there.
        note_memory(self._folder / f"memory_process_{self._index}.prof", error)


def note_memory(path: pathlib.Path, e: Exception) -> None:
    """Writes the memory of this process's devices after an error, if it ran out.

    A note on the error, which its traceback shows, says where it is. No error of
    writing replaces the one that ended the run.

    Args:
      path: the file to write.
      e: the error that ends the run.
    """
    is_jax = isinstance(e, jax.errors.JaxRuntimeError)
    if not is_jax or not str(e).startswith(_OUT_OF_MEMORY):
        return
    try:
        # The error keeps the arrays alive that were in use.
        content = jax.profiler.device_memory_profile()
        path.parent.mkdir(exist_ok=True)
        disk.replace(path, content)
    except (OSError, RuntimeError) as failure:
        e.add_note(f"what was in memory could not be written to {path}: {failure}")
        return
    e.add_note(
        f"{path} has what was in the memory of the devices, by the line that allocated "
        f"it. To view it: pprof -top {path}"
    )
