"""What a run gives to the learners that are called in it, while its step is traced.

A learner is called in the methods of an experiment, which know nothing of devices. So
the run passes it the mesh and the like beside the methods' arguments.
"""

import contextlib
import contextvars
import itertools
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from xshard import errors
from xshard.base import mesh_axes
from xshard.base.jax_internals import tracing


class Shard(NamedTuple):
    """A replica's shard of a parameter.

    Attributes:
      array: the shard.
      gathered: the whole array in the type that networks compute in, if it is gathered
        already; None otherwise.
    """

    array: jax.Array
    gathered: jax.Array | None


class RunContext(NamedTuple):
    """The context in which a learner is called.

    Attributes:
      mesh: a mesh of `xshard.mesh.make_mesh`.
      sharding_rules: the rules for parameters that lie along the mesh axis 'model'.
      equal_keys: random keys that are equal on all replicas of a group, each another
        one; None outside a training step.
      shards: whole arrays and the shards that they were gathered from, by the identity
        of the whole array.
    """

    mesh: jax.sharding.Mesh
    sharding_rules: mesh_axes.ShardingRules
    equal_keys: Iterator[jax.Array] | None
    shards: Mapping[int, tuple[jax.Array, Shard]]


_CURRENT: contextvars.ContextVar[RunContext | None] = contextvars.ContextVar(
    "run", default=None
)


@contextlib.contextmanager
def run_on(
    mesh: jax.sharding.Mesh,
    sharding_rules: mesh_axes.ShardingRules = (),
    *,
    equal_key: jax.Array | None = None,
) -> Iterator[None]:
    """Tells the learners that are called in its body on which mesh they run, while they
    are traced.

    Args:
      mesh: a mesh of `xshard.mesh.make_mesh`.
      sharding_rules: the rules for parameters that lie along the mesh axis 'model'.
      equal_key: the random key of a training step, equal on all replicas of a group.
    """
    equal_keys = None if equal_key is None else _fold_numbers(equal_key)
    with _as_current(
        RunContext(
            mesh=mesh,
            sharding_rules=sharding_rules,
            equal_keys=equal_keys,
            shards=types.MappingProxyType({}),
        )
    ):
        yield


@contextlib.contextmanager
def _as_current(context: RunContext) -> Iterator[None]:
    token = _CURRENT.set(context)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _fold_numbers(key: jax.Array) -> Iterator[jax.Array]:
    """Yields keys that are folded from a key and a number each."""
    # From the top, since the replicas' own keys are numbered from 0.
    for number in itertools.count():
        yield jax.random.fold_in(key, 2**32 - 1 - number)


def current() -> RunContext:
    """Returns the context of the run whose step is being traced.

    Raises:
      UserError: outside a run.
    """
    context = _CURRENT.get()
    if context is None:
        raise errors.UserError(
            "A Learner must be called in the init, train_step, eval_step or predict of "
            "an Experiment, where the run sets its mesh. Elsewhere: with "
            "xshard.learners.run_context.run_on(mesh): ..."
        )
    return context


def current_mesh() -> mesh_axes.AnyMesh | None:
    """Returns the mesh of the run whose step is being traced; None outside a run."""
    context = _CURRENT.get()
    return None if context is None else context.mesh


def next_equal_key() -> jax.Array | None:
    """Returns the next random key that is equal on all replicas of a group.

    Each call in a training step returns another one. It is None outside of one.
    """
    context = _CURRENT.get()
    if context is None or context.equal_keys is None:
        return None
    return next(context.equal_keys)


@contextlib.contextmanager
def with_shards(
    whole: Mapping[str, jax.Array],
    shards: Mapping[str, jax.Array],
    gathered: Mapping[str, jax.Array] = types.MappingProxyType({}),
) -> Iterator[None]:
    """Lets learners that are called in its body use a replica's shards in place of
    whole arrays.

    Args:
      whole: the whole arrays, by path.
      shards: the shards from which they were gathered, by path.
      gathered: the arrays that are gathered already in the type that networks compute
        in, by path.
    """
    by_identity = {}
    for path, x in whole.items():
        by_identity[id(x)] = x, Shard(shards[path], gathered.get(path))
    with _as_current(current()._replace(shards=by_identity)):
        yield


def shards_of(params: Mapping[str, Any]) -> dict[str, Shard]:
    """Returns the shards of exactly these parameter arrays, by path.

    An array has none if it was computed from them, or if a branch, a loop or a
    derivative within the step uses it from outside: a gather there may be reached by
    some replicas only.
    """
    context = _CURRENT.get()
    shards: dict[str, Shard] = {}
    if context is None:
        return shards
    for path, x in params.items():
        # Arrays in a trace have no other identity than that of the object. The entry
        # keeps its array, so that no other object has the same number.
        if id(x) in context.shards and tracing.is_of_current_trace(x):
            _, shards[path] = context.shards[id(x)]
    return shards
