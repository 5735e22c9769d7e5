"""Calls of functions that use Haiku state, with this replica's shards of arrays and of that state."""

from collections.abc import Callable, Sequence
from typing import Any

import haiku as hk
import jax

from xshard.optimizers import elementwise, layouts, shards, skips, values


class ShardedCalls:
    """Calls functions of whole arrays and whole Haiku state, where this replica has shards of both."""

    def __init__(self, partition: shards.Partition, state: Any, rules: Sequence[str]):
        """Decides which state arrays are sharded, and checks that the current state is sharded so.

        Args:
          partition: the partition of the parameters.
          state: the shapes of the rules' whole state.
          rules: the rules' names, outermost first.
        """
        self._partition = partition
        self._rules = rules
        self._layouts = skips.by_name(partition.state_layouts(state))
        for key, x in skips.current_state().items():
            module, name = key
            layout = self._layouts.get(key)
            if layout is not None and x.shape != layout.local_shape:
                raise ValueError(
                    f"The state '{name}' of {module} has the shape {x.shape}, but this replica's shard of it has "
                    f"{layout.local_shape}. Store the state of a sharded update, and map it over the "
                    "replicas, with xshard.StateSharding: docs/scale.md has an example."
                )

    def __call__(self, f: Callable[..., Any], *args: Any, applied: Any = True) -> Any:
        """Returns `f(*args)`. `f` reads and writes the current Haiku state.

        Args:
          f: a function of whole arrays.
          *args: trees of `Shard`s and of whole arrays.
          applied: whether to keep the state that `f` writes: True, or a boolean scalar.
        """
        before = skips.current_state()
        old = {key: self._shard(key, x) for key, x in before.items()}

        def call(state: Any, args: Any) -> Any:
            # A separate transform turns the state that `f` reads and writes into arguments and results.
            run = hk.transform_with_state(f)
            out, state = run.apply({}, skips.by_module(state), None, *args)
            return out, skips.by_name(state)

        out, new = elementwise.evaluate(call, (old, args), self._partition, self._rules)
        changed = {}
        for key, value in new.items():
            # `evaluate` returns unchanged state as the same object, which need not be written.
            if value is old.get(key):
                continue
            x = self._own_state(key, value)
            # An update on shards runs in a skipped step, too, so its state is selected here.
            changed[key] = skips.select(applied, x, before.get(key, x))
        skips.write(changed)
        return out

    def own(self, layout: layouts.Layout, x: Any) -> jax.Array:
        """This replica's shard of a function's result that has the layout of a parameter or slot."""
        if not isinstance(x, values.Shard):
            return layout.shard(x, self._partition.index)
        if x.layout != layout:
            raise ValueError(
                f"{self._rules[0]} cannot be sharded: its result for '{layout.path}' {layout.shape} has the shape "
                f"of '{x.layout.path}' {x.layout.shape}."
            )
        return x.array

    def _shard(self, key: tuple[str, str], x: Any) -> Any:
        layout = self._layouts.get(key)
        return x if layout is None else values.shard(layout, x)

    def _own_state(self, key: tuple[str, str], x: Any) -> Any:
        layout = self._layouts.get(key)
        if layout is not None:
            return self.own(layout, x)
        if isinstance(x, values.Shard):
            module, name = key
            raise ValueError(
                f"{self._rules[0]} cannot be sharded: the state '{name}' of {module} has the shape of "
                f"'{x.layout.path}', but its name does not end in that path, which would mark it as a "
                f"slot of that parameter. Name it '.../{x.layout.path}'."
            )
        return x
