"""The compilation cache in a run's work directory, so that a restart need not compile
again.

JAX writes a cache entry in place, and would use an entry that a kill left incomplete.
So each start of the run (an attempt) writes into its own folder. Complete entries are
then moved to the folder where later attempts find them.
"""

import contextlib
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax

from xshard import jax_internals

FOLDER = "compiled"
_DIRECTORY = "jax_compilation_cache_dir"
# Programs that compile faster than this are not cached.
_LEAST_SECONDS = 0.2


@contextlib.contextmanager
def enabled(directory: pathlib.Path, say: Callable[[str], None]) -> Iterator[None]:
    """Makes JAX cache compiled programs in the work directory, within the context,
    unless another cache is configured.

    JAX_COMPILATION_CACHE_DIR selects another folder, and
    JAX_ENABLE_COMPILATION_CACHE=false disables the cache. With several processes there
    is no cache by default: a process that compiles while another loads may wait for it,
    so you must name a folder that all processes see. With several CPU devices there is
    none either; see `_may_deadlock`.

    Args:
      directory: a work directory to which no other attempt writes.
      say: called with the reason if the cache cannot be used. The run continues without
        it.
    """
    settings = jax.config.values
    is_enabled = not settings[_DIRECTORY] and settings["jax_enable_compilation_cache"]
    if not is_enabled or jax.process_count() > 1 or _may_deadlock():
        yield
        return
    folder = directory / FOLDER
    try:
        own = _begin(folder)
    except OSError as e:
        say(f"compiled programs are not cached for a restart: {e}")
        yield
        return
    with _used(own):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                _move(_entries(own), folder)
                shutil.rmtree(own)


def _may_deadlock() -> bool:
    """Returns whether a program that is loaded from the cache might deadlock.

    XLA on CPUs runs the collectives of a program that it compiled one by one, in the
    same order on all devices. In a program loaded from the cache, independent
    collectives start in any order (observed with jaxlib 0.10.2).
    """
    return jax.default_backend() == "cpu" and jax.device_count() > 1


def _begin(folder: pathlib.Path) -> pathlib.Path:
    """Creates an attempt's own folder, with links to the entries of earlier attempts."""
    folder.mkdir(exist_ok=True)
    _recover_entries(folder)
    own = pathlib.Path(tempfile.mkdtemp(prefix="attempt-", dir=folder.resolve()))
    for entry in _entries(folder):
        (own / entry.name).symlink_to(entry.resolve())
    return own


@contextlib.contextmanager
def _used(folder: pathlib.Path) -> Iterator[None]:
    settings = {
        _DIRECTORY: str(folder),
        "jax_persistent_cache_min_compile_time_secs": _LEAST_SECONDS,
        # XLA's own caches would put the folder's path, which changes with each attempt,
        # into the keys of all entries.
        "jax_persistent_cache_enable_xla_caches": "none",
    }
    before = {name: jax.config.values[name] for name in settings}
    _set(settings)
    try:
        yield
    finally:
        _set(before)


def _set(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    # JAX decides once, at its first compilation, whether it has a cache; a reset makes
    # it decide again.
    jax_internals.reset_compilation_cache()


def _recover_entries(folder: pathlib.Path) -> None:
    """Recovers the entries of attempts that were killed, except the newest of each,
    which may be incomplete.
    """
    for left in folder.glob("attempt-*"):
        entries = sorted(_entries(left), key=lambda path: path.stat().st_mtime_ns)
        _move(entries[:-1], folder)
        shutil.rmtree(left)


def _entries(folder: pathlib.Path) -> list[pathlib.Path]:
    """Lists the files in a folder, without links."""
    return [
        path for path in folder.iterdir() if path.is_file() and not path.is_symlink()
    ]


def _move(entries: list[pathlib.Path], folder: pathlib.Path) -> None:
    for entry in entries:
        entry.replace(folder / entry.name)
