"""What every Python process of the tests does at its start, since this folder is in its
PYTHONPATH.

It makes JAX's compilation cache fit for tests, where many processes share one folder
and some of them are killed: an entry appears whole or not at all, and each process of a
pod writes its own (JAX lets process 0 alone write, so the others would compile in every
test).
"""

import importlib.abc
import importlib.util
import os
import sys
import threading


def _write_whole_entries(lru_cache):
    def put(self, key, value):
        entry = os.path.join(self.path, f"{key}-cache")
        if os.path.exists(entry):
            return
        part = f"{entry}.{os.getpid()}.{threading.get_ident()}"
        with open(part, "wb") as file:
            file.write(value)
        os.replace(part, entry)

    lru_cache.LRUCache.put = put


def _write_in_each_process(compiler):
    write_in_process_0 = compiler._cache_write

    def write(cache_key, seconds, module_name, backend, executable, *host_callbacks):
        # JAX 0.10 passes a list of host callbacks, and 0.12 does not.
        if compiler.distributed.global_state.process_id == 0:
            write_in_process_0(
                cache_key, seconds, module_name, backend, executable, *host_callbacks
            )
        elif not any(host_callbacks):
            compiler.compilation_cache.put_executable_and_time(
                cache_key, module_name, executable, backend, int(seconds)
            )

    compiler._cache_write = write


_CHANGES = {
    "jax._src.lru_cache": _write_whole_entries,
    "jax._src.compiler": _write_in_each_process,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Changes a module of `_CHANGES` after its import, so that processes without JAX
    stay without it.
    """

    def find_spec(self, name, path, target=None):
        del path, target
        change = _CHANGES.get(name)
        if change is None:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


for _name, _change in _CHANGES.items():
    if _name in sys.modules:
        _change(sys.modules[_name])
sys.meta_path.insert(0, _Finder())
