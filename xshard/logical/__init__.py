"""Logical replicas: a number of them that a config fixes, shared out among whatever devices there are.

Data, keys, means, metrics and evaluations belong to logical replicas, so that nothing that a run computes depends on the
number of its devices. With exact sums it ends in the same bits on any number of them.
"""

from xshard.logical.parts import Mapped
from xshard.logical.program import Program, Stage
from xshard.logical.replicas import (
    Replicas,
    axes_of_shards,
    check_even,
    is_exact,
    mesh_of,
    of_config,
    own_spec,
)

__all__ = [
    "Mapped",
    "Program",
    "Replicas",
    "Stage",
    "axes_of_shards",
    "check_even",
    "is_exact",
    "mesh_of",
    "of_config",
    "own_spec",
]
