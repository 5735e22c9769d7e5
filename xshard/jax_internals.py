"""The parts of JAX that xshard uses although JAX does not promise to keep them.

And what differs between the versions of JAX that it runs on. JAX changes its private
modules and `jax.extend`, `jax.interpreters` and `jax.experimental` without notice, so
only this file imports them. xshard runs on JAX 0.10, 0.11 and 0.12. Each item says what
it is for, and what makes it superfluous.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import (
    cache_key,
    clusters,
    compilation_cache_interface,
    distributed,
    profiler,
)
from jax._src import compilation_cache as private_cache
from jax._src import core as core_lib
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.extend import core, source_info_util
from jax.extend.mlir.dialects import sdy
from jax.interpreters import ad, batching, mlir, partial_eval

# The classes of traced programs, which the checks before a run read; JAX has no public
# ones.
Jaxpr = core.Jaxpr
Literal = core.Literal
Primitive = core.Primitive
# In JAX 0.10 a program with its constants is a class of its own. From 0.11 on, a Jaxpr
# has its constants, and this is another name for it, which can go with JAX 0.10.
ClosedJaxpr = core.ClosedJaxpr


def closed(program: Any) -> ClosedJaxpr:
    """Returns a program with its constants, from one with or without.

    In JAX 0.10 an equation's parameter may be either. From 0.11 on all programs have
    their constants, and `closed` can go with JAX 0.10.
    """
    # `ClosedJaxpr(program, ())` would drop the constants that a program of JAX 0.11
    # has.
    return program if hasattr(program, "consts") else core.ClosedJaxpr(program, ())


def opened(program: Any) -> Jaxpr:
    """Returns a program without its constants, from one with or without.

    It can go with JAX 0.10, as `closed`.
    """
    if isinstance(program, core.ClosedJaxpr):
        return program.jaxpr
    return program


def as_function(program: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Returns the function of a program: of its arguments, to the list of results."""
    return core.jaxpr_as_fun(program)


def with_constants_as_arguments(program: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program whose first arguments are the constants of the given one."""
    jaxpr = program.jaxpr
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    return core.ClosedJaxpr(jaxpr.replace(constvars=[], invars=inputs), [])


def without_mesh(x: jax.Array) -> jax.Array:
    """Returns the same array, which JAX no longer types as one on a mesh.

    JAX gives each value in a trace the mesh that it lies on, and a program traced for
    values on a mesh does not accept one device's part of them. It can go when
    `jax.shard_map` accepts such programs.
    """
    return _unchanged(x.shape, x.dtype)(x)[0]


# A step calls it for each array.
@functools.lru_cache(maxsize=4096)
def _unchanged(shape: tuple[int, ...], dtype: Any) -> Callable[..., list[Any]]:
    program = jax.make_jaxpr(jax.jit(lambda x: x))(jax.ShapeDtypeStruct(shape, dtype))
    return as_function(program)


def inner_programs(eqn: Any) -> Iterator[Jaxpr]:
    """Yields the programs in an equation's parameters, such as the body of a loop."""
    return core.jaxprs_in_params(eqn.params)


def argument_names(eqn: Any) -> tuple[str, ...]:
    """Returns the names of the arrays that a call of a jitted function is given.

    One is "tree['linear']['w']". Errors name an array by them. JAX records them for its
    own errors, and has no public way to read them.
    """
    return opened(eqn.params["jaxpr"]).debug_info.arg_names or ()


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Returns the number of constants and of carried arrays of a scan.

    They come first in its inputs, in this order. The carried arrays are its first
    results. The parameters of JAX 0.10 can go with it.
    """
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carried, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carried)


def without_dead_code(
    program: ClosedJaxpr, used: Sequence[bool], *, keep_inputs: bool = False
) -> tuple[ClosedJaxpr, list[bool]]:
    """Returns the part of a program that computes some of its outputs.

    Args:
      program: the program.
      used: for each output, whether the part computes it.
      keep_inputs: whether the part has all inputs, also those that it does not use.

    Returns:
      The part, and for each input of the program whether the part has it.
    """
    jaxpr, reads = partial_eval.dce_jaxpr(program.jaxpr, used, instantiate=keep_inputs)
    return core.ClosedJaxpr(jaxpr, program.consts), reads


def at_line_of(eqn: Any) -> AbstractContextManager[None]:
    """Gives what is traced in the context an equation's line in the user's code."""
    return source_info_util.user_context(eqn.source_info.traceback)


def is_of_current_trace(x: Any) -> bool:
    """Returns whether a traced value belongs to the innermost trace in progress.

    It may also belong to one around that. JAX has no public function for it.
    """
    return isinstance(x, jax.core.Tracer) and x._trace is core_lib.trace_ctx.trace


def mapped_axis_names() -> list[Any]:
    """Lists the axes that are mapped where it is called.

    Also those of vmap and pmap, which JAX's public functions omit.
    """
    return core.unsafe_get_axis_names_DO_NOT_USE()


def shard_alike(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two arrays of one shape, which the compiler shards alike.

    Along the axes whose sharding it chooses, that is. Up to 0.11.1, JAX has it as
    `jax.experimental.shard_alike`. It can go when JAX has it again.
    """
    return tuple(_shard_alike.bind(x, y))


_shard_alike = core.Primitive("xshard_shard_alike")
_shard_alike.multiple_results = True
_shard_alike.def_impl(lambda x, y: [x, y])
_shard_alike.def_abstract_eval(lambda x, y: [x, y])
# The numbers of the groups in a program. JAX's own `shard_alike` counts from 0.
_groups = itertools.count(2**32)


def _lower(context: Any, x: Any, y: Any) -> list[Any]:
    group = next(_groups)
    sdy.sharding_group(x, group)
    sdy.sharding_group(y, group)
    return [x, y]


def _transpose(grads: Sequence[Any], x: Any, y: Any) -> Sequence[Any]:
    # No array exists for the gradient of a result that nothing uses, so there is
    # nothing to shard.
    if any(type(grad) is ad.Zero for grad in grads):
        return grads
    return _shard_alike.bind(*grads)


def _batch(
    arrays: Sequence[Any], axes: Sequence[int | None]
) -> tuple[list[Any], list[int]]:
    sizes = set()
    for x, axis in zip(arrays, axes, strict=True):
        if axis is not None:
            sizes.add(x.shape[axis])
    (size,) = sizes
    batched = []
    for x, axis in zip(arrays, axes, strict=True):
        if axis is None:
            batched.append(jnp.broadcast_to(x, (size, *x.shape)))
        else:
            batched.append(jnp.moveaxis(x, axis, 0))
    return _shard_alike.bind(*batched), [0, 0]


mlir.register_lowering(_shard_alike, _lower)
ad.deflinear2(_shard_alike, _transpose)
batching.primitive_batchers[_shard_alike] = _batch


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
