"""Checks how an experiment's methods use parameters that are sharded over replicas.

With `reduction.shard_params`, a method sees a replica's shard where it otherwise sees the whole parameter. Three uses
are correct: `Learner.apply` gathers the parameters that its network requests, `Learner.update` handles shards, and
elementwise arithmetic, such as a moving average, gives the same result on shards. Any other use would compute with a
part instead of the whole, and is refused. The check analyzes the method's jaxpr before the first step runs.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from xshard import contract, errors, jax_internals, supervised
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard.learners import run_context, update_stub
from xshard.learners.state import is_learner, layout_of_copies
from xshard.optimizers import layouts, primitives, replica_map, trees, varying

_NONE: varying.Axes = frozenset()
# Marks on a value, beside the mesh axes along which it differs: it is computed elementwise from shards of a parameter
# (_SHARD and the path), or from shards in another way (_MIXED and the path); or it is computed from another array
# with elements that need not be equal (_OTHER).
_SHARD, _MIXED, _OTHER = "shard:", "mixed:", "other"
_OTHERWISE = "or set reduction.shard_params to False"


def call(
    method: Callable[..., Any],
    mesh: Any,
    experiment: experiment_lib.Experiment,
    shapes: state_lib.TrainState,
    *args: Any,
    steps: bool = False,
) -> Any:
    """Calls a method of an experiment on a replica, and checks its use of sharded parameters.

    Args:
      method: the method, which takes the experiment's state as its first argument.
      mesh: the run's mesh.
      experiment: the experiment.
      shapes: the shapes of the run's state, as it is stored.
      *args: the method's arguments.
      steps: whether the method's first result is the experiment's new state.

    Returns:
      The method's result.

    Raises:
      UserError: if the method uses a replica's shard of a parameter as if it were the whole parameter.
    """
    layouts_of = _layouts_of(shapes)
    with run_context.run_on(mesh, experiment.sharding_rules()):
        with _explained(layouts_of):
            returned = method(*args)
        if layouts_of and not supervised.leaves_state_alone(experiment):
            with run_context.analysis_only(), replica_map.not_mapped():
                local = _as_shards(layouts_of, args)
                _UsageChecker(method, layouts_of, local).check(steps=steps)
    return returned


def _as_shards(held: Mapping[str, layouts.Layout], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the shapes of a method's arguments where a replica has shards of the arrays in `held`."""
    state, *others = args

    def of(path: Any, x: Any) -> Any:
        layout = held.get(trees.path_name(path))
        shape = x.shape if layout is None else layout.shard_shape
        return jax.ShapeDtypeStruct(shape, x.dtype)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), tuple(others))
    return jax.tree_util.tree_map_with_path(of, state), *shapes


def _layouts_of(state: state_lib.TrainState) -> dict[str, layouts.Layout]:
    """Returns the layouts of sharded parameters and of their copies, by path in the experiment's state."""
    held: dict[str, layouts.Layout] = {}
    layout: layouts.Layout | None
    learners = state_lib.learners(state)
    for name, learner in learners.items():
        for path, layout in learner.rules.sharding.items():
            if layout.shards_param:
                held[f"{name}/params/{path}".removeprefix("/")] = layout
    copied = layout_of_copies(learners.values())
    node = lambda x: is_learner(x) or experiment_lib.is_own(x)
    for place, x in jax.tree_util.tree_leaves_with_path(state.experiment, is_leaf=node):
        path = trees.path_name(place)
        layout = None if node(x) else copied(path, x)
        if layout is not None:
            held[path] = layout
    return held


@contextlib.contextmanager
def _explained(held: Mapping[str, layouts.Layout]) -> Iterator[None]:
    """Adds a note on shards to a TypeError or ValueError, which mismatched shapes may have caused."""
    try:
        yield
    except (TypeError, ValueError) as e:
        if held and not isinstance(e, errors.UserError):
            path, layout = next(iter(held.items()))
            e.add_note(
                f"With reduction.shard_params=True this method sees a replica's shards of parameters, such as of {path!r}: the "
                f"whole has shape {layout.shape}, the shard {layout.shard_shape}. Arrays of the state that have the name and "
                "the shape of such a parameter are sharded, too."
            )
        raise


class _UsageChecker:
    """Follows the values that are shards through the program of a method."""

    def __init__(
        self, method: Callable[..., Any], held: Mapping[str, layouts.Layout], args: tuple[Any, ...]
    ):
        """Prepares the check; nothing is traced yet.

        Args:
          method: the method.
          held: the layouts of sharded arrays, by path in the experiment's state.
          args: the method's arguments.
        """
        self._where = contract.describe_method(method)
        self._layouts = held
        self._method = method
        self._args = args
        # The variables whose elements are all equal. Such a value is the same for a shard and for the whole.
        self._uniform: set[Any] = set()
        # For each parameter, the first equation that used its shard in another way than elementwise; for the message.
        self._mixed_by: dict[str, Any] = {}

    def check(self, *, steps: bool) -> None:
        """Raises UserError if the method uses a shard as if it were the whole parameter.

        Args:
          steps: whether the method's first result is the experiment's new state.
        """

        def leaves(*args: Any) -> dict[str, Any]:
            results = jax.tree_util.tree_leaves_with_path(self._method(*args))
            return {trees.path_name(path): x for path, x in results if isinstance(x, jax.Array)}

        closed, shapes = jax.make_jaxpr(leaves, return_shape=True)(*self._args)
        constants, jaxpr = closed.jaxpr.constvars, closed.jaxpr
        jaxpr = jaxpr.replace(constvars=[], invars=[*constants, *jaxpr.invars])
        inputs = [*(_other(x.aval) for x in constants), *self._inputs()]
        results = varying.outputs(jaxpr, inputs, self._of_equation)
        for name, var, noted in zip(sorted(shapes), jaxpr.outvars, results, strict=True):
            index, _, path = name.partition("/")
            layout = self._layouts.get(path) if steps and index == "0" else None
            if layout is not None and self._is_kept(var, noted, layout):
                continue
            self._check_whole(noted)
            if layout is not None:
                raise errors.UserError(
                    f"{self._where} returns a state in which {path!r} is not a shard; with shard_params=True each "
                    f"replica holds a shard of this array of shape {layout.shape}. Compute it elementwise from parameters, "
                    f"like a moving average; {_OTHERWISE}."
                )

    def _is_kept(self, var: Any, noted: varying.Axes, layout: layouts.Layout) -> bool:
        """Returns whether a result is a valid shard for a layout."""
        if _paths(noted):
            return self._layout(noted) == layout
        return var.aval.shape == layout.shard_shape and self._is_uniform(var)

    def _inputs(self) -> list[varying.Axes]:
        """Returns the marks of the arguments. Only the state contains shards; the other arguments differ by replica."""
        state, *others = self._args
        node = experiment_lib.is_own
        inputs = []
        for place, x in jax.tree_util.tree_leaves_with_path(state, is_leaf=node):
            path = trees.path_name(place)
            if node(x):
                inputs += [varying.ALL | _other(leaf) for leaf in jax.tree.leaves(x)]
            else:
                inputs.append(frozenset([_SHARD + path]) if path in self._layouts else _other(x))
        return inputs + [varying.ALL | _other(leaf) for leaf in jax.tree.leaves(others)]

    def _of_equation(self, eqn: Any, inputs: list[varying.Axes]) -> list[varying.Axes] | None:
        name, called = eqn.primitive.name, eqn.params.get("name")
        # A gathered parameter is whole, so the marks of its shard end here.
        if called == varying.GATHERED:
            return [_other(x.aval) for x in eqn.outvars]
        if called == update_stub.REPLICAS_OWN:
            return [varying.ALL | _other(x.aval) for x in eqn.outvars]
        if called == update_stub.USED_AS_WHOLE:
            self._check_whole(*inputs)
        if called == update_stub.USED_AS_SHARDS:
            self._check_shards(*inputs)
            return inputs
        if name in ("cond", "while") and _gathers(eqn):
            self._check_alike(eqn, inputs)
        if name in ("cond", "while", "scan", *primitives.CALLS):
            self._enter(eqn)
            return None
        return self._of_primitive(eqn, inputs)

    def _of_primitive(self, eqn: Any, inputs: list[varying.Axes]) -> list[varying.Axes] | None:
        name, noted = eqn.primitive.name, _NONE.union(*inputs)
        paths, axes = _paths(noted), [x & varying.ALL for x in inputs]
        results = varying.of_equation(eqn, axes)
        if not paths:
            # No shard is involved: only the axes and the uniformity of the results matter.
            repeats = name in primitives.ELEMENTWISE or name == "broadcast_in_dim"
            if repeats and all(map(self._is_uniform, eqn.invars)):
                self._uniform.update(eqn.outvars)
                return results
            return [x | _other(var.aval) for x, var in zip(results, eqn.outvars, strict=True)]
        if name in primitives.ELEMENTWISE and self._fits(eqn, inputs):
            return [noted]
        for path in paths:
            self._mixed_by.setdefault(path, eqn)
        # The uses of a value that an effect writes or sends cannot be followed.
        if eqn.effects:
            self._check_whole(noted)
        return [x.union(_MIXED + path for path in paths) for x in results]

    def _fits(self, eqn: Any, inputs: list[varying.Axes]) -> bool:
        """Returns whether an elementwise equation combines only shards of equal layout and uniform values."""
        shards = []
        for atom, noted in zip(eqn.invars, inputs, strict=True):
            layout = self._layout(noted)
            if layout is not None and atom.aval.shape == layout.shard_shape:
                shards.append(layout)
            elif _paths(noted) or not self._is_uniform(atom):
                return False
        return all(layout == shards[0] for layout in shards)

    def _layout(self, noted: varying.Axes) -> layouts.Layout | None:
        """Returns the layout of a value that is computed elementwise from shards alone; None for any other value."""
        shards = [self._layouts[path] for path in _paths(noted)]
        if _OTHER in noted or any(x.startswith(_MIXED) for x in noted):
            return None
        return shards[0] if shards and all(layout == shards[0] for layout in shards) else None

    def _is_uniform(self, atom: Any) -> bool:
        """Returns whether all elements of a value are known to be equal."""
        if isinstance(atom, jax_internals.Literal) or not atom.aval.shape:
            return not atom.aval.shape
        return atom in self._uniform

    def _enter(self, eqn: Any) -> None:
        """Passes the uniformity of an equation's arguments on to the variables of the function that it calls."""
        called = primitives.called(eqn)
        if called is None:
            return
        for var, atom in zip(called.jaxpr.invars, eqn.invars, strict=True):
            # JAX shares one jaxpr between calls, and an earlier call may have had other arguments.
            self._uniform.discard(var)
            if self._is_uniform(atom):
                self._uniform.add(var)

    def _check_whole(self, *values: varying.Axes) -> None:
        """Raises UserError if some values are computed from shards."""
        for path in _paths(_NONE.union(*values)):
            eqn = self._mixed_by.get(path)
            by = f", by {eqn.primitive.name}{_line(eqn)}" if eqn is not None else ""
            raise errors.UserError(
                f"{self._where} uses {path!r} as if it were whole{by}; with shard_params=True each replica holds a shard of it. "
                "Parameters that a network requests from Haiku in Learner.apply are gathered, and elementwise arithmetic, such as a "
                "moving average, is correct on shards. Compute anything else in the network, and return it among its outputs; "
                f"leave it to the update rule, such as optax.add_decayed_weights for a penalty; {_OTHERWISE}."
            )

    def _check_shards(self, *values: varying.Axes) -> None:
        """Raises UserError unless the parameters that are passed to an update are computed from shards."""
        for noted in values:
            if self._layout(noted) is not None:
                continue
            self._check_whole(noted)
            raise errors.UserError(
                f"{self._where} passes Learner.update parameters that are not computed from those in its state; with "
                "shard_params=True each replica holds shards of the parameters. Compute them elementwise from the state's "
                f"parameters; {_OTHERWISE}."
            )

    def _check_alike(self, eqn: Any, inputs: list[varying.Axes]) -> None:
        """Raises UserError unless all replicas of a group execute the gathers in a branch.

        A gather that only some replicas execute would wait forever.
        """
        name = eqn.primitive.name
        if name == "while" or inputs[0] - {mesh_lib.GROUP, _OTHER}:
            raise errors.UserError(
                f"{self._where} applies a network in a {name}{_line(eqn)}; with shard_params=True the network gathers "
                "parameters. All replicas must do so together, and some may not execute this code. Apply the network outside, "
                "and select with jnp.where; use a loop with a fixed number of iterations, such as jax.lax.scan; "
                f"{_OTHERWISE}."
            )


def _paths(noted: varying.Axes) -> list[str]:
    """Lists the sharded parameters from which a value is computed, by path."""
    return sorted(x.partition(":")[2] for x in noted if x.startswith((_SHARD, _MIXED)))


def _other(x: Any) -> varying.Axes:
    return frozenset([_OTHER] if x.shape else [])


def _gathers(eqn: Any) -> bool:
    """Returns whether an equation gathers a parameter in one of its inner programs."""
    for jaxpr in jax_internals.inner_programs(eqn):
        for inner in primitives.all_equations(jaxpr):
            if inner.params.get("name") == varying.GATHERED:
                return True
    return False


def _line(eqn: Any) -> str:
    """Returns the line of the user's code that an equation comes from, in parentheses; empty if unknown."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if errors.is_user_file(frame.file_name):
            return f" ({errors.display_path(frame.file_name)}:{frame.line_num})"
    return ""
