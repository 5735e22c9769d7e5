"""Records which programs are run on the devices, by the names of JAX's own trace of
them.
"""

import contextlib
import pathlib
import re

import jax

# A call of a jitted function, and of an operation outside of one, which is jitted by
# itself.
_CALL = re.compile(r"PjitFunction\((.*)\)")
# The run of a program on one of several devices.
_PROGRAM = re.compile(r"LoadedExecutable::Execute \((?:jit_)?(.*)\)")


@contextlib.contextmanager
def recorded(directory):
    """Records the programs that are run in its body.

    Args:
      directory: an empty folder, for the trace.

    Yields:
      A set, which contains the names of the programs after the body.
    """
    names = set()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(directory, profiler_options=options):
        yield names
    (file,) = pathlib.Path(directory).rglob("*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                found = _CALL.search(event.name) or _PROGRAM.search(event.name)
                if found:
                    names.add(found[1])
