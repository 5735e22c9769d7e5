"""The run that learners are called within: it says on what mesh they are, while a step is traced."""

import contextlib
import contextvars
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from xshard import errors
from xshard import mesh as mesh_lib
from xshard.optimizers import trees


class Run(NamedTuple):
    """The run that a learner is called within: see `run_on`."""

    mesh: jax.sharding.Mesh
    sharding_rules: mesh_lib.Rules
    all_slots: bool
    whole: bool


_CURRENT: contextvars.ContextVar[Run] = contextvars.ContextVar("run")
_GATHERED: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar(
    "gathered", default=types.MappingProxyType({})
)
# JAX keeps no trace from one value for the other.
_LOOKED_INTO = jax.make_user_context(False)


@contextlib.contextmanager
def run_on(
    mesh: jax.sharding.Mesh,
    sharding_rules: mesh_lib.Rules = (),
    *,
    all_slots: bool = False,
    whole: bool = False,
) -> Iterator[None]:
    """Says to the learners that are called within it on what they run, while they are traced.

    Args:
      mesh: a mesh of `xshard.mesh.make_mesh`.
      sharding_rules: what lies along its axis 'model'.
      all_slots: whether slots are made for what is not trained, too, which checkpoints had once.
      whole: whether the rules' state is whole, as evaluations have it, also where the update is sharded.
    """
    token = _CURRENT.set(Run(mesh, sharding_rules, all_slots, whole))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def run() -> Run:
    """The run whose step is traced; UserError outside of any."""
    current = _CURRENT.get(None)
    if current is None:
        raise errors.UserError(
            "A Learner is called in the init, train_step, eval_step and predict of an Experiment, which say to it "
            "on what mesh it runs. Elsewhere: with xshard.learners.within.run_on(mesh): ..."
        )
    return current


@contextlib.contextmanager
def with_gathered(params: Any, whole: Mapping[str, jax.Array]) -> Iterator[None]:
    """Says to learners what of parameters in shards has been gathered already.

    Args:
      params: the parameters, as a learner is given them within.
      whole: what has been gathered, by path.
    """
    leaves = trees.leaves_by_path(params)
    token = _GATHERED.set({path: (leaves[path], x) for path, x in whole.items()})
    try:
        yield
    finally:
        _GATHERED.reset(token)


def gathered(params: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The arrays that have been gathered of these very parameters, by path; not of what was made of them."""
    arrays = {}
    for path, (shard, whole) in _GATHERED.get().items():
        if params.get(path) is shard:
            arrays[path] = whole
    return arrays


def looked_into(is_so: bool = True) -> contextlib.AbstractContextManager[None]:
    """Says to learners whether what is traced is not to be run, but looked into: see `xshard.stored.held`."""
    return _LOOKED_INTO(is_so)


def is_looked_into() -> bool:
    """Returns whether what is traced now is not to be run."""
    return bool(_LOOKED_INTO.value)
