"""How the state of rules lies in shards on replicas."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from xshard.base import mesh_axes
from xshard.optimizers import layouts as layouts_lib
from xshard.optimizers import trees


def of_state(
    params: layouts_lib.Layouts, state: Any
) -> dict[str, dict[str, layouts_lib.Layout]]:
    """Returns how the state of rules is sharded, where the update is.

    A slot is sharded like the parameter whose path ends the slot's name, if it has that
    parameter's shape.

    Args:
      params: the layouts of the parameters.
      state: the rules' state, or its shapes.

    Returns:
      The layouts as `{module: {name: layout}}`. An array without an entry is whole.
    """
    layouts: dict[str, dict[str, layouts_lib.Layout]] = {}
    for module, arrays in state.items():
        for name, x in arrays.items():
            layout = _of_slot(params, name, x.shape)
            if layout is not None:
                layouts.setdefault(module, {})[name] = layout
    return layouts


def _of_slot(
    params: layouts_lib.Layouts, name: str, shape: tuple[int, ...]
) -> layouts_lib.Layout | None:
    for path in trees.endings(name):
        layout = params.get(path)
        if layout is not None and shape == layout.shape:
            return layout if layout.dim is not None else None
    return None


class StateSharding:
    """The sharding of the state of rules with `shard_update=True`, for a custom
    training step.

    Attributes:
      specs: the mesh axes that each array lies along, a tree of `jax.P` with the
        state's structure, for the shardings of `jax.jit`.
    """

    def __init__(
        self,
        state: Any,
        params: Any,
        replicas: int,
        axis_name: str = "replica",
        *,
        sharding_rules: mesh_axes.ShardingRules = (),
    ):
        """Decides how each array is sharded.

        Args:
          state: the rules' state, or its shapes, as `Optimizer.init` creates it.
          params: the parameters, or their shapes.
          replicas: the size of the mapped axis of replicas.
          axis_name: the name of that axis.
          sharding_rules: as for `CrossShardOptimizer`.
        """
        param_layouts = layouts_lib.of_params(params, replicas, sharding_rules)

        def spec(layout: layouts_lib.Layout | None, x: Any) -> jax.P:
            del x
            if layout is None:
                return jax.P()
            return layout.spec(axis_name)

        self.specs = map_state(spec, of_state(param_layouts, state), state)


def map_state(
    f: Callable[[layouts_lib.Layout | None, Any], Any],
    layouts: Mapping[str, layouts_lib.Layouts],
    state: Any,
) -> Any:
    """Applies a function to each array of the state of rules.

    Args:
      f: a function of an array's layout, or of None, and of the array.
      layouts: the layouts, as `of_state` returns them.
      state: a Haiku state, `{module: {name: array}}`.

    Returns:
      The results, in the structure of the state.
    """
    new: dict[str, dict[str, Any]] = {}
    for module, arrays in state.items():
        layouts_here = layouts.get(module, {})
        new[module] = {name: f(layouts_here.get(name), x) for name, x in arrays.items()}
    return new
