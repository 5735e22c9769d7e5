"""What a rule asks of `vmap_replicas`, if that maps its replicas.

A rule is a function of one replica. Where `jax.shard_map` maps the replicas, or nothing
does, that is all. Where `replica_map.vmap_replicas` does, only what differs between
replicas is mapped, and what a collective returns is a global array. Some computation
still belongs on each replica: the functions here pass it on to what maps them.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

# The names of calls that mark values in a traced program, by which an analysis of it
# knows them: what is declared equal on all replicas, and what a learner's update
# results in.
EQUAL = "equal_on_replicas"
UPDATED = "updated"

# The name of the function that gathers a parameter held in shards.
GATHERED = "gathered_parameter"

# The spec of an array that lies along no mapped axis.
GLOBAL = jax.P()

# What maps the function being traced, as `replica_map` makes it, or None. A user
# context, so that JAX's caches never reuse the trace of a jitted function from one
# value for another.
_MAPPED_OVER = jax.make_user_context(None)


def mapped_over(replicas: Any) -> contextlib.AbstractContextManager[None]:
    """Traces functions in its body as mapped over these replicas; None: over none."""
    return _MAPPED_OVER(replicas)


def current() -> Any:
    """Returns what maps the function being traced, as `mapped_over` was given it."""
    return _MAPPED_OVER.value


def is_current() -> bool:
    """Returns whether `vmap_replicas` maps the function being traced.

    If so, its sums are global arrays.
    """
    return current() is not None


def on_each_replica(
    f: Callable[..., Any], *, in_specs: Any = GLOBAL, out_specs: Any = GLOBAL
) -> Callable[..., Any]:
    """Returns a function that each replica calls by itself where `vmap_replicas` maps
    the replicas; elsewhere it is as it was.

    A user's code calls it as `replica_map.per_replica`, which may be differentiated.

    Args:
      f: a function of arrays, which may use collectives over the mapped axes. What it
        closes over may be arrays, too.
      in_specs: how global arguments lie along the mapped axes, a prefix of the
        arguments' tree. The function gets its replica's shard of them. All others are a
        replica's own, or whole.
      out_specs: the same for results, a prefix of their tree, or a function from the
        results' shapes to that.

    Returns:
      A function with the same arguments and results. What `f` makes equal on all
      replicas is a global array.
    """

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        replicas = current()
        if replicas is None:
            return f(*args, **kwargs)
        return replicas.call_on_each(
            f, args, kwargs, in_specs=in_specs, out_specs=out_specs
        )

    return call


def marked(name: str, tree: Any, given: Any = ()) -> Any:
    """Returns the same tree, as the result of a call that a program shows.

    Args:
      name: the name of the call.
      tree: arrays.
      given: further arrays, which the program shows as arguments of the call.
    """

    def mark(tree: Any, given: Any) -> Any:
        del given
        return tree

    mark.__name__ = name
    return jax.jit(mark)(tree, given)


def equal_on_replicas(tree: Any, *, given: Any = ()) -> Any:
    """Returns the same tree, declared equal on all replicas of a group where the
    program does not show that it is.

    Use it for the result of a custom computation that makes values equal, or of a
    gather in steps among some replicas at a time. The declaration is not proved: a run
    compares fingerprints of the replicas' state every `fingerprint_every_steps` steps
    and before each save, and stops or rolls back if copies differ.

    Args:
      tree: arrays.
      given: arrays that the tree depends on. If these differ between replicas, so does
        the tree.
    """

    def declare(tree: Any, given: Any) -> Any:
        return marked(EQUAL, tree, given)

    # Each device keeps its replica's own copy, so that the fingerprints show a
    # declaration that is wrong.
    return on_each_replica(declare)(tree, given)


def check_equal(arrays: Mapping[str, Any], error: Callable[[str], Exception]) -> None:
    """Raises an error if an array differs between replicas, where `vmap_replicas` maps
    these; elsewhere does nothing.

    Args:
      arrays: the arrays, by name.
      error: returns the error for a name.
    """
    replicas = current()
    if replicas is not None:
        replicas.check_equal(arrays, error)


def constrain(x: jax.Array, spec: jax.P) -> jax.Array:
    """Returns a global array that lies on the devices by a spec.

    Call it in a function that `vmap_replicas` maps.
    """
    constrained: jax.Array = current().constrain(x, spec)
    return constrained
