"""The place of a process in its run."""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Place:
    """A process's place.

    Attributes:
      index: the process's index, from 0.
      count: the number of processes.
    """

    index: int
    count: int


def own() -> Place:
    """Returns this process's place: the only one, unless JAX has joined others."""
    return Place(jax.process_index(), jax.process_count())
