"""The context in which learners are called: it gives them their mesh while a step is traced."""

import contextlib
import contextvars
import itertools
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from xshard import errors
from xshard import mesh as mesh_lib
from xshard.optimizers import trees


class RunContext(NamedTuple):
    """The context in which a learner is called; the fields are the arguments of `run_on`."""

    mesh: jax.sharding.Mesh
    sharding_rules: mesh_lib.Rules
    all_slots: bool


_CURRENT: contextvars.ContextVar[RunContext] = contextvars.ContextVar("run")
# The shard and the whole array of each gathered parameter, by path.
_GATHERED: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar(
    "gathered", default=types.MappingProxyType({})
)
# A random key that is equal on all replicas of a group, and the numbers of the keys drawn from it.
_EQUAL_KEYS: contextvars.ContextVar[tuple[jax.Array, Iterator[int]] | None] = (
    contextvars.ContextVar("equal_keys", default=None)
)
# A user context, so that JAX's caches never reuse a trace from one value for the other.
_ANALYSIS_ONLY = jax.make_user_context(False)


@contextlib.contextmanager
def run_on(
    mesh: jax.sharding.Mesh,
    sharding_rules: mesh_lib.Rules = (),
    *,
    all_slots: bool = False,
) -> Iterator[None]:
    """Tells the learners that are called in its body on which mesh they run, while they are traced.

    Args:
      mesh: a mesh of `xshard.mesh.make_mesh`.
      sharding_rules: the rules for parameters that lie along the mesh axis 'model'.
      all_slots: whether to create slots for frozen parameters too, as old checkpoints contain them.
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
    """Gives the learners that are called in its body a random key that is equal on all replicas of a group."""
    token = _EQUAL_KEYS.set((key, itertools.count()))
    try:
        yield
    finally:
        _EQUAL_KEYS.reset(token)


def next_equal_key() -> jax.Array | None:
    """The next random key that is equal on all replicas of a group, another one in each call; None outside a step."""
    keys = _EQUAL_KEYS.get()
    if keys is None:
        return None
    key, numbers = keys
    # From the top, since the replicas' own keys are numbered from 0.
    return jax.random.fold_in(key, 2**32 - 1 - next(numbers))


@contextlib.contextmanager
def with_gathered(params: Any, whole: Mapping[str, jax.Array]) -> Iterator[None]:
    """Provides learners with parameters in shards that are already gathered.

    Args:
      params: the parameters that learners receive in its body.
      whole: the gathered arrays, by path.
    """
    leaves = trees.leaves_by_path(params)
    token = _GATHERED.set({path: (leaves[path], x) for path, x in whole.items()})
    try:
        yield
    finally:
        _GATHERED.reset(token)


def gathered(params: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The gathered arrays of exactly these parameter arrays, by path. Arrays computed from them have none."""
    arrays = {}
    for path, (shard, whole) in _GATHERED.get().items():
        # Compared by identity: a parameter that the loss has replaced must be gathered again.
        if params.get(path) is shard:
            arrays[path] = whole
    return arrays


def analysis_only(is_so: bool = True) -> contextlib.AbstractContextManager[None]:
    """Tells learners whether the current trace is only analyzed and never run: see `xshard.stored.shard_usage`."""
    return _ANALYSIS_ONLY(is_so)


def is_analysis_only() -> bool:
    """Returns whether the current trace is only analyzed and never run."""
    return bool(_ANALYSIS_ONLY.value)
