"""What a run tells its rules: how arrays lie on its replicas."""

import dataclasses
from collections.abc import Sequence

import jax

from xshard import mesh_axes
from xshard.optimizers import layouts as layouts_lib


@dataclasses.dataclass(frozen=True)
class Placement:
    """What a run tells its rules, once, when it has made them: see `Optimizer.place`.

    A rule in a step of one's own has none.

    Attributes:
      sharding_rules: the experiment's rules for other mesh axes.
      scatter_steps: the sizes of the steps in which sums over the replicas are
        scattered, as along the axes of a torus; empty for a single step.
      gather_steps: the same, to gather shards.
      layouts: with parameters in shards, the layouts of all parameters, by path.
      is_logical: whether the replicas are logical ones, which share devices.
      update_key: in a training step, the random key from which updates draw, equal on
        all replicas of a group, so that they update alike.
    """

    sharding_rules: mesh_axes.ShardingRules = ()
    scatter_steps: Sequence[int] = ()
    gather_steps: Sequence[int] = ()
    layouts: layouts_lib.Layouts = dataclasses.field(default_factory=dict)
    is_logical: bool = False
    update_key: jax.Array | None = None

    @property
    def held_in_shards(self) -> layouts_lib.Layouts:
        """The layouts of parameters of which a replica holds its shard between steps.

        By path.
        """
        return {path: at for path, at in self.layouts.items() if at.shards_param}
