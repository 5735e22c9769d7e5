"""JAX's place in a cluster, its compilation cache, its compilers and its profiler."""

from typing import Any

import jax
from jax._src import (
    cache_key,
    clusters,
    compilation_cache_interface,
    config,
    distributed,
    profiler,
    xla_bridge,
)
from jax._src import compilation_cache as private_cache
from jax._src.lib import _jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache


def detect_cluster(
    seconds: int,
    address: str | None = None,
    count: int | None = None,
    index: int | None = None,
) -> tuple[str | None, int | None, int | None, Any]:
    """Detects this process's place in a cluster as `jax.distributed.initialize` does,
    which also connects it.

    Processes meet before JAX connects them, so the place is needed before. It can go
    when JAX has a public function.

    Args:
      seconds: how long requests to a cloud's metadata may take.
      address: the address of process 0; None: detected.
      count: the number of processes; None: detected.
      index: this process's index; None: detected.

    Returns:
      The address of process 0, the number of processes, this process's index, and its
      devices; None for what is not detected.
    """
    # The Nones leave the devices and the method of detection to JAX.
    return clusters.ClusterEnv.auto_detect_unset_distributed_params(
        address, count, index, None, None, seconds
    )


def listen_at(address: str) -> None:
    """Makes the collectives of CPUs listen at an address of this host; JAX has them
    listen where the host's name resolves to.

    It must be called before the first use of a device. It can go when JAX has a setting
    for it.
    """

    def make_client() -> Any:
        collectives = None
        if config.cpu_collectives_implementation.value == "gloo":
            collectives = _jax.make_gloo_tcp_collectives(
                distributed_client=coordination_client(), hostname=address
            )
        return xla_bridge.make_cpu_client(collectives)

    xla_bridge.register_backend_factory("cpu", make_client, fail_quietly=False)


def coordination_client() -> Any:
    """Returns the client of JAX's coordination service, whose store of keys and values
    works while devices compute.

    It is None before `jax.distributed.initialize`. It can go when JAX has a public
    store.
    """
    return distributed.global_state.client


def reset_compilation_cache() -> None:
    """Makes JAX look again whether it has a compilation cache.

    It looks once, at its first compilation. This can go when `jax.config.update` of the
    cache's folder does the same.
    """
    compilation_cache.reset_cache()
    cache_key._hash_accelerator_config = _hash_devices_of_jax


_hash_devices_of_jax = cache_key._hash_accelerator_config
# The base class of a cache of compiled programs. JAX itself has caches in folders only.
CompilationCache = compilation_cache_interface.CacheInterface


def set_compilation_cache(cache: CompilationCache, chip: str) -> None:
    """Makes JAX keep compiled programs in a cache, until the next reset.

    Whether it looks there at all depends on `jax_compilation_cache_dir`. This can go
    when JAX has caches in object stores without further packages, and when on CPUs the
    keys of its programs no longer differ between processes.

    Args:
      cache: the cache.
      chip: what programs are compiled for, with a CPU's instruction sets.
    """
    private_cache._cache = cache
    private_cache._cache_initialized = True

    def hash_chip(hash_obj: Any, accelerators: Any) -> None:
        del accelerators
        hash_obj.update(chip.encode())

    if jax.default_backend() == "cpu":
        cache_key._hash_accelerator_config = hash_chip


def topology_devices(topology: str, **options: Any) -> list[jax.Device]:
    """Returns devices of a TPU topology, for which programs can be compiled only.

    It can go when JAX has a function outside of `jax.experimental`.

    Args:
      topology: libtpu's name of it, as in v5e:4x4.
      **options: libtpu's options.
    """
    description = topologies.get_topology_desc(
        platform="tpu", topology_name=topology, **options
    )
    return list(description.devices)


def forget_trace() -> None:
    """Ends a trace that `jax.profiler.stop_trace` could not write.

    JAX otherwise takes it as still running, and refuses the next one. It can go when
    `stop_trace` resets its state after an error, too.
    """
    with profiler._profile_state.lock:
        profiler._profile_state.reset()
