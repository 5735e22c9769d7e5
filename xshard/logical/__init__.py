"""Logical replicas: a number of replicas fixed by the config and distributed over
however many devices there are.

A device computes the replicas that share it in turn; each has a place there. A
replica's program is split at its collectives into segments: the segment before a
collective computes, from the beginning, what the replica sends. With five replicas on
two devices there are three places on each, one of them empty, and every segment but the
last runs once for each place.

Data, keys, means, metrics and evaluations belong to logical replicas, so that no result
of a run depends on the number of its devices, except by rounding. With exact sums, a
run ends in the same bits on any number of devices.
"""

from xshard.logical.program import Exchange, Program, Stage
from xshard.logical.replicas import (
    Replicas,
    check_even,
    is_exact,
    mesh_of,
    of_config,
    per_replica_spec,
)
from xshard.logical.segments import Mapped

__all__ = [
    "Exchange",
    "Mapped",
    "Program",
    "Replicas",
    "Stage",
    "check_even",
    "is_exact",
    "mesh_of",
    "of_config",
    "per_replica_spec",
]
