"""The cache of compiled programs, so that a restart need not compile.

It lies in the work directory, or in a store that several processes and runs share. Only
process 0 writes, since all processes compile the same programs.
"""

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax

from xshard import errors
from xshard.base.jax_internals import runtime
from xshard.files import provenance

FOLDER = "compiled"
# With its value, the flag of XLA without which `_may_deadlock`.
IN_ORDER_FLAG = (provenance.SCHEDULER_FLAG, "false")
# In the work directory, programs that compile faster than this are not cached.
_LEAST_SECONDS = 0.2
_DIRECTORY = "jax_compilation_cache_dir"


class Store(Protocol):
    """What the cache needs of a store: see `xshard.checkpoint.Store`."""

    url: str
    path: pathlib.Path | None

    def read(self, name: str) -> bytes | None:
        """Reads an object; returns None if it does not exist."""

    def create(self, name: str, content: bytes) -> None:
        """Creates an object atomically."""


class _Cache(runtime.CompilationCache):
    """Compiled programs in a store, by JAX's keys.

    JAX warns of an error in either method, and compiles.
    """

    def __init__(self, store: Store, is_read_only: bool):
        self._store = store
        self._is_read_only = is_read_only
        # JAX names it when it closes the cache.
        self._path = pathlib.Path(store.url)

    def get(self, key: str) -> bytes | None:
        return self._store.read(_name(key))

    def put(self, key: str, value: bytes) -> None:
        if self._is_read_only:
            return
        name = _name(key)
        # Another process may store the same program, also between these two calls, in
        # other bytes, which serve as well. A program that cannot be loaded is replaced
        # only by hand.
        if self._store.read(name) is None:
            try:
                self._store.create(name, value)
            except errors.UserError:
                if self._store.read(name) is None:
                    raise


def _name(key: str) -> str:
    # As JAX names the files of its own caches.
    return f"{key}-cache"


@contextlib.contextmanager
def enabled(
    store: Store,
    say: Callable[[str], None],
    *,
    flags: str,
    chip: str,
    is_shared: bool,
    is_seen: bool,
    is_read_only: bool = False,
) -> Iterator[None]:
    """Makes JAX cache compiled programs in a store, within the context.

    If another cache is configured, that one is used: JAX_COMPILATION_CACHE_DIR selects
    another folder, and JAX_ENABLE_COMPILATION_CACHE=false disables the cache.

    There is no cache that only some of the processes see: a process that compiles while
    another loads may wait for it. With several CPU devices there may be none either;
    see `_may_deadlock`.

    Args:
      store: where the programs are kept.
      say: called with the reason if a cache cannot be used. The run continues without
        it.
      flags: XLA's flags.
      chip: what programs are compiled for, with a CPU's instruction sets.
      is_shared: whether the config names the store, for several runs. Then all
        programs are cached, however fast they compile.
      is_seen: whether all processes see the store.
      is_read_only: whether programs are read only, as those of another run are.
    """
    configured = jax.config.values
    if not configured["jax_enable_compilation_cache"]:
        yield
        return
    reason = ""
    if configured[_DIRECTORY]:
        reason = f"JAX_COMPILATION_CACHE_DIR={configured[_DIRECTORY]} is used"
    elif _may_deadlock(flags):
        name, value = IN_ORDER_FLAG
        reason = f"with several CPU devices it needs XLA_FLAGS=--{name}={value}"
    elif not is_seen:
        reason = "the processes do not all see it"
    if not reason:
        try:
            if not is_read_only:
                _check(store)
        except (OSError, errors.UserError) as e:
            say(f"compiled programs are not cached for a restart: {e}")
            yield
            return
    elif is_shared:
        say(f"compiled programs are not cached in {store.url}: {reason}")
    if reason:
        yield
        return
    settings = {
        # JAX only asks whether this is set.
        _DIRECTORY: store.url,
        "jax_persistent_cache_min_compile_time_secs": 0
        if is_shared
        else _LEAST_SECONDS,
        # XLA's own caches would put the folder's path into the keys of all entries, so
        # they would not be found in a work directory that was moved.
        "jax_persistent_cache_enable_xla_caches": "none",
    }
    before = {name: configured[name] for name in settings}
    _set(settings)
    runtime.set_compilation_cache(_Cache(store, is_read_only), chip)
    try:
        yield
    finally:
        _set(before)


def _check(store: Store) -> None:
    """Raises an error if a store cannot be used."""
    if store.path is not None:
        store.path.mkdir(parents=True, exist_ok=True)
    store.read(_name("none"))


def _may_deadlock(flags: str) -> bool:
    """Returns whether a program that is loaded from the cache might deadlock.

    XLA on CPUs runs the collectives of a program that it compiled one by one, in the
    same order on all devices. In a program loaded from the cache, independent
    collectives start in any order (observed with jaxlib 0.10.2), unless a flag turns
    that scheduler off.
    """
    if jax.default_backend() != "cpu" or jax.device_count() == 1:
        return False
    name, value = IN_ORDER_FLAG
    return f"--{name}={value}" not in flags


def _set(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    # JAX decides once, at its first compilation, whether it has a cache; a reset makes
    # it decide again.
    runtime.reset_compilation_cache()
