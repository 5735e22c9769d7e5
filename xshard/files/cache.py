"""Keeps what a run has compiled in its work directory: a restart need not compile it again.

JAX writes an entry in place, and takes one that a kill has left incomplete for good. So an attempt writes into
a folder of its own, from which entries move, whole, to where later attempts find them.
"""

import contextlib
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import compilation_cache

FOLDER = "compiled"
_DIRECTORY = "jax_compilation_cache_dir"
# What compiles faster is not worth a file.
_LEAST_SECONDS = 0.2


@contextlib.contextmanager
def kept(directory: pathlib.Path, say: Callable[[str], None]) -> Iterator[None]:
    """Has JAX keep meanwhile what it compiles in a folder of the work directory, if it keeps it nowhere else.

    JAX_COMPILATION_CACHE_DIR names another folder, and JAX_ENABLE_COMPILATION_CACHE=false none. Several processes need
    a folder that all of them see, which is to be named: one that compiles while another loads may wait for it. Of several
    devices of a CPU nothing is kept: see `_may_stand_still`.

    Args:
      directory: a work directory that no other attempt writes to.
      say: takes a line on why nothing is kept. No run ends for it.
    """
    settings = jax.config.values
    is_asked = not settings[_DIRECTORY] and settings["jax_enable_compilation_cache"]
    if not is_asked or jax.process_count() > 1 or _may_stand_still():
        yield
        return
    folder = directory / FOLDER
    try:
        own = _begin(folder)
    except OSError as e:
        say(f"what is compiled is not kept for a restart: {e}")
        yield
        return
    with _used(own):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                _move(_entries(own), folder)
                shutil.rmtree(own)


def _may_stand_still() -> bool:
    """Returns whether a program that was loaded might wait for ever.

    XLA for CPUs runs the collectives of a program that it has compiled one after the other, on all devices alike. In one that
    it has loaded, those that do not depend on one another begin in any order (seen with jaxlib 0.10.2).
    """
    return jax.default_backend() == "cpu" and jax.device_count() > 1


def _begin(folder: pathlib.Path) -> pathlib.Path:
    """An attempt's own folder, with links to what attempts before have left."""
    folder.mkdir(exist_ok=True)
    _take_leftovers(folder)
    own = pathlib.Path(tempfile.mkdtemp(prefix="attempt-", dir=folder.resolve()))
    for entry in _entries(folder):
        (own / entry.name).symlink_to(entry.resolve())
    return own


@contextlib.contextmanager
def _used(folder: pathlib.Path) -> Iterator[None]:
    settings = {
        _DIRECTORY: str(folder),
        "jax_persistent_cache_min_compile_time_secs": _LEAST_SECONDS,
        # They are written to the folder, whose path would then be in the name of each entry.
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
    # JAX decides whether it has a cache at the first program that it compiles.
    compilation_cache.compilation_cache.reset_cache()


def _take_leftovers(folder: pathlib.Path) -> None:
    """Takes what attempts that were killed have left: all but their newest entry, which may be incomplete."""
    for left in folder.glob("attempt-*"):
        entries = sorted(_entries(left), key=lambda path: path.stat().st_mtime_ns)
        _move(entries[:-1], folder)
        shutil.rmtree(left)


def _entries(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files in a folder, without links."""
    return [path for path in folder.iterdir() if path.is_file() and not path.is_symlink()]


def _move(entries: list[pathlib.Path], folder: pathlib.Path) -> None:
    for entry in entries:
        entry.replace(folder / entry.name)
