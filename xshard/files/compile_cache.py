"""The compilation cache in a run's work directory, so that a restart need not compile.

A start that was killed while JAX wrote an entry may leave the entry incomplete. JAX then
warns and compiles that program, since an incomplete entry cannot be decompressed.
"""

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from xshard import jax_internals

FOLDER = "compiled"
# Programs that compile faster than this are not cached.
_LEAST_SECONDS = 0.2
_DIRECTORY = "jax_compilation_cache_dir"


@contextlib.contextmanager
def enabled(directory: pathlib.Path, say: Callable[[str], None]) -> Iterator[None]:
    """Makes JAX cache compiled programs in the work directory, within the context.

    If another cache is configured, that one is used: JAX_COMPILATION_CACHE_DIR selects
    another folder, and JAX_ENABLE_COMPILATION_CACHE=false disables the cache.

    With several processes there is no cache by default: a process that compiles while
    another loads may wait for it, so you must name a folder that all processes see.
    With several CPU devices there is none either; see `_may_deadlock`.

    Args:
      directory: a work directory in which no other process runs.
      say: called with the reason if the cache cannot be used. The run continues without
        it.
    """
    configured = jax.config.values
    is_ours = not configured[_DIRECTORY] and configured["jax_enable_compilation_cache"]
    if not is_ours or jax.process_count() > 1 or _may_deadlock():
        yield
        return
    folder = directory / FOLDER
    try:
        folder.mkdir(exist_ok=True)
    except OSError as e:
        say(f"compiled programs are not cached for a restart: {e}")
        yield
        return
    settings = {
        _DIRECTORY: str(folder),
        "jax_persistent_cache_min_compile_time_secs": _LEAST_SECONDS,
        # XLA's own caches would put the folder's path into the keys of all entries, so
        # they would not be found in a work directory that was moved.
        "jax_persistent_cache_enable_xla_caches": "none",
    }
    before = {name: configured[name] for name in settings}
    _set(settings)
    try:
        yield
    finally:
        _set(before)


def _may_deadlock() -> bool:
    """Returns whether a program that is loaded from the cache might deadlock.

    XLA on CPUs runs the collectives of a program that it compiled one by one, in the
    same order on all devices. In a program loaded from the cache, independent
    collectives start in any order (observed with jaxlib 0.10.2).
    """
    return jax.default_backend() == "cpu" and jax.device_count() > 1


def _set(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    # JAX decides once, at its first compilation, whether it has a cache; a reset makes
    # it decide again.
    jax_internals.reset_compilation_cache()
