"""The run that learners are called within: it says on what mesh they are, while a step is traced."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple

import jax

from xshard import errors
from xshard import mesh as mesh_lib


class Run(NamedTuple):
    """What a learner is told by the run that it is in: see `run_on`."""

    mesh: jax.sharding.Mesh
    sharding_rules: mesh_lib.Rules
    all_slots: bool
    whole: bool


_CURRENT: contextvars.ContextVar[Run] = contextvars.ContextVar("run")
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


def looked_into() -> contextlib.AbstractContextManager[None]:
    """Says to learners that what is traced is not to be run, but looked into: see `xshard.held`."""
    return _LOOKED_INTO(True)


def run_only() -> contextlib.AbstractContextManager[None]:
    """Takes that back."""
    return _LOOKED_INTO(False)


def is_looked_into() -> bool:
    """Returns whether what is traced now is not to be run."""
    return bool(_LOOKED_INTO.value)
