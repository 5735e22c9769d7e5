"""The context in which learners are called: it gives them their mesh while a step is
traced.
"""

import contextlib
import contextvars
import itertools
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from xshard import errors, jax_internals
from xshard import mesh as mesh_lib


class RunContext(NamedTuple):
    """The context in which a learner is called; the fields are the arguments of
    `run_on`.
    """

    mesh: jax.sharding.Mesh
    sharding_rules: mesh_lib.Rules
    all_slots: bool


_CURRENT: contextvars.ContextVar[RunContext] = contextvars.ContextVar("run")
# Whole arrays and their shards, by the identity of the whole array.
_SHARDS: contextvars.ContextVar[Mapping[int, Any]] = contextvars.ContextVar(
    "shards", default=types.MappingProxyType({})
)
# A random key that is equal on all replicas of a group, and the numbers of the keys
# drawn from it.
_EQUAL_KEYS: contextvars.ContextVar[tuple[jax.Array, Iterator[int]] | None] = (
    contextvars.ContextVar("equal_keys", default=None)
)


@contextlib.contextmanager
def run_on(
    mesh: jax.sharding.Mesh,
    sharding_rules: mesh_lib.Rules = (),
    *,
    all_slots: bool = False,
) -> Iterator[None]:
    """Tells the learners that are called in its body on which mesh they run, while they
    are traced.

    Args:
      mesh: a mesh of `xshard.mesh.make_mesh`.
      sharding_rules: the rules for parameters that lie along the mesh axis 'model'.
      all_slots: whether to create slots for frozen parameters too, as old checkpoints
        contain them.
    """
    token = _CURRENT.set(RunContext(mesh, sharding_rules, all_slots))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current() -> RunContext:
    """The run whose step is being traced; UserError outside a run."""
    current = _CURRENT.get(None)
    if current is None:
        raise errors.UserError(
            "A Learner must be called in the init, train_step, eval_step or predict of an Experiment, where the run "
            "sets its mesh. Elsewhere: with xshard.learners.run_context.run_on(mesh): ..."
        )
    return current


@contextlib.contextmanager
def equal_keys(key: jax.Array) -> Iterator[None]:
    """Gives the learners that are called in its body a random key that is equal on all
    replicas of a group.
    """
    token = _EQUAL_KEYS.set((key, itertools.count()))
    try:
        yield
    finally:
        _EQUAL_KEYS.reset(token)


def next_equal_key() -> jax.Array | None:
    """The next random key that is equal on all replicas of a group, another one in each
    call; None outside a step.
    """
    keys = _EQUAL_KEYS.get()
    if keys is None:
        return None
    key, numbers = keys
    # From the top, since the replicas' own keys are numbered from 0.
    return jax.random.fold_in(key, 2**32 - 1 - next(numbers))


class Shard(NamedTuple):
    """A replica's shard of a parameter.

    Attributes:
      array: the shard.
      gathered: the whole array in the type that networks compute in, if it is gathered
        already; None otherwise.
    """

    array: jax.Array
    gathered: jax.Array | None


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
    known = {}
    for path, x in whole.items():
        known[id(x)] = x, Shard(shards[path], gathered.get(path))
    token = _SHARDS.set(known)
    try:
        yield
    finally:
        _SHARDS.reset(token)


def shards_of(params: Mapping[str, Any]) -> dict[str, Shard]:
    """The shards of exactly these parameter arrays, by path. Arrays computed from them
    have none.

    Neither has an array that a branch, a loop or a derivative within the step uses from
    outside: a gather there may be reached by some replicas only.
    """
    known = _SHARDS.get()
    found = {}
    for path, x in params.items():
        # Compared by identity: the entry keeps the array, so that no other has its
        # number.
        if id(x) in known and jax_internals.is_of_current_trace(x):
            found[path] = known[id(x)][1]
    return found
