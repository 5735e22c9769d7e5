"""Parameters held in shards, and gathered where a network asks Haiku for them.

Between steps each replica holds its shard of a parameter. A Haiku getter around the
network gathers the whole parameter, in the compute type, each time that a module asks
for it: in `hk.layer_stack` one layer at a time. Gathered arrays are not kept for the
backward pass but gathered again. The gradient of a gather is this replica's shard of
the sum over the replicas.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", 2020, its third stage, https://arxiv.org/abs/1910.02054.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from xshard import errors, jax_internals, mesh
from xshard.optimizers import layouts as layouts_lib
from xshard.optimizers import remat, replica_map, shards, trees, varying

# The least number of elements in a shard, one row of a TPU memory tile. Gathering fewer
# costs more than it saves.
_SMALLEST = 128

# Prefixes of notes on a value: it is computed from the shard of a path; and it has
# entered a loop or a branch since.
_SHARD, _WITHIN = "shard:", "within:"


def recording_shapes(
    network: Callable[..., Any],
) -> tuple[Callable[..., Any], dict[str, tuple[int, ...]]]:
    """The network, and the shapes in which it asks for its parameters, by path, filled
    while these are created.
    """
    requested: dict[str, tuple[int, ...]] = {}

    def note(next_getter: Any, value: jax.Array, context: Any) -> jax.Array:
        if hk.running_init():
            path = f"{context.lifted_prefix_name or ''}{context.full_name}"
            requested[path] = tuple(context.original_shape)
        return next_getter(value)

    return with_getter(network, note), requested


def layouts_of(
    params: Any,
    requested: Mapping[str, tuple[int, ...]],
    on: jax.sharding.Mesh,
    rules: mesh.Rules = (),
) -> layouts_lib.Layouts:
    """Decides how the parameters of a network and their slots lie over the replicas of
    a mesh, by path.

    Args:
      params: arrays or shapes.
      requested: the shapes that `recording_shapes` recorded. Extra leading dimensions
        of a parameter are scanned over, and are not sharded. A parameter that is small
        or not in `requested` is whole on each replica.
      on: the mesh.
      rules: the sharding rules for the other mesh axes.
    """
    count = on.shape[mesh.REPLICA]
    found = layouts_lib.of_params(params, count, rules)
    for path, layout in found.items():
        shape = requested.get(path)
        if count == 1 or shape is None or math.prod(shape) < _SMALLEST * count:
            continue
        first = len(layout.shape) - len(shape)
        free = [False] * first + layout.free[first:]
        dim = layouts_lib.divisible(layout.shape, count, free)
        if dim is not None:
            found[path] = dataclasses.replace(layout, dim=dim, shards_param=True)
    return found


def sharded(params: Any, layouts: layouts_lib.Layouts) -> dict[str, jax.Array]:
    """The parameters that are held in shards, by path."""
    leaves = trees.leaves_by_path(params).items()
    return {
        path: x
        for path, x in leaves
        if path in layouts and layouts[path].is_param_shard(x)
    }


def specs(
    layouts: layouts_lib.Layouts, of_groups: Sequence[str], *, manual: bool
) -> dict[str, jax.P]:
    """The mesh axes of the parameters that are held in shards, by path.

    Args:
      layouts: the layouts that `layouts_of` returns.
      of_groups: the axes of a leading dimension of groups.
      manual: as for `Layout.spec`.
    """
    shares = {path: layout for path, layout in layouts.items() if layout.shards_param}
    place = lambda layout: layout.spec(mesh.REPLICA, manual=manual)
    return {path: jax.P(*of_groups, *place(layout)) for path, layout in shares.items()}


def whole(
    shards: Mapping[str, jax.Array],
    on: jax.sharding.Mesh,
    layouts: layouts_lib.Layouts,
    reduce_dtype: str,
    dtype: Any = None,
) -> dict[str, jax.Array]:
    """The whole arrays of a replica's shards, by path; their gradients are the
    replica's shards of sums.

    Arrays that are not used cost nothing.

    Args:
      shards: the replica's shards, by path.
      on: a mesh of `xshard.mesh.make_mesh`.
      layouts: the layouts of these arrays.
      reduce_dtype: the type to sum gradients in, as for `Partition.scatter`.
      dtype: the type to gather in; each array's own by default.
    """
    partition = _partition(on, layouts)
    arrays = {}
    for path, x in shards.items():
        sent = x.dtype if dtype is None else dtype
        arrays[path] = _gather(partition, sent, reduce_dtype, layouts[path], x)
    return arrays


def gather_params(
    params: Any, on: jax.sharding.Mesh, layouts: layouts_lib.Layouts, dtype: Any
) -> dict[str, jax.Array]:
    """Gathers each parameter that is held in shards, by path, given global arrays.
    Arguments as for `gathering_apply`.
    """
    held = specs(layouts, (), manual=True)
    arrays = {path: x for path, x in trees.present(params).items() if path in held}

    def gather_all(shards: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return whole(shards, on, layouts, "float32", dtype)

    return replica_map.per_replica(gather_all, in_specs=(held,))(arrays)


def gathering_apply(
    network: Callable[..., Any],
    on: jax.sharding.Mesh,
    layouts: layouts_lib.Layouts,
    dtype: Any,
    reduce_dtype: str,
    *,
    ready: Mapping[str, jax.Array] = types.MappingProxyType({}),
) -> Callable[..., Any]:
    """The `apply` of a network, as `hk.transform_with_state` returns it, that also
    accepts shards of parameters.

    Args:
      network: a Haiku function.
      on: a mesh of `xshard.mesh.make_mesh`.
      layouts: the layouts that `layouts_of` returns.
      dtype: the type to gather in.
      reduce_dtype: the type to sum gradients in, as for `Partition.scatter`.
      ready: arrays that `gather_params` has returned for some of these parameters; they
        are not gathered again.
    """

    def apply(params: Any, *args: Any, **kwargs: Any) -> Any:
        partition = _partition(on, layouts)
        gather = functools.partial(_gather, partition, dtype, reduce_dtype)
        asking = hk.transform_with_state(
            with_getter(network, _getter(partition, gather))
        ).apply

        def run(early: Sequence[str], params: Any) -> Any:
            leaves, first = trees.leaves_by_path(params), {}
            for path in sorted({*early, *ready}):
                first[path] = gather(layouts[path], leaves[path], ready.get(path))
            return asking(trees.replace(params, first), *args, **kwargs)

        return _with_regathering(run, params, layouts)

    return apply


def _partition(on: jax.sharding.Mesh, layouts: layouts_lib.Layouts) -> shards.Partition:
    # Gathers use the scatter's steps. In one step over all chips of a three-axis torus,
    # each gather would become an all-reduce, which sends twice the bytes and cannot
    # overlap with computation.
    steps, _ = mesh.torus_steps(on)
    count = on.shape[mesh.REPLICA]
    return shards.Partition(
        layouts, count, mesh.REPLICA, scatter_steps=steps, gather_steps=steps
    )


def _getter(
    partition: shards.Partition, gather: Callable[..., jax.Array]
) -> Callable[..., Any]:
    def getter(next_getter: Any, value: jax.Array, context: Any) -> jax.Array:
        whole = tuple(context.original_shape)
        # Haiku knows only the shape that the module asks for, so the shard is
        # recognized by its own shape.
        dim = _sharded_along(value.shape, whole, partition.count)
        if dim is not None:
            along = _lies_along(partition.layouts, context.full_name, whole)
            value = gather(
                layouts_lib.Layout("", whole, partition.count, dim, along=along), value
            )
        # The network's own getters come next. They may need the whole array, as for the
        # norm of its columns.
        return next_getter(value)

    return getter


def _with_regathering(
    run: Callable[[Sequence[str], Any], Any], params: Any, layouts: layouts_lib.Layouts
) -> Any:
    """The result of `run(early, params)`. Its backward pass keeps all intermediate
    values except gathered parameters.

    Args:
      run: gathers the parameters of the paths `early`, then applies the network.
      params: the parameters of the network.
      layouts: the layouts of the parameters.
    """
    # Traced once to find the parameters that must be gathered early, then again with
    # these gathered.
    program, shapes = jax.make_jaxpr(functools.partial(run, ()), return_shape=True)(
        params
    )
    early = _needed_early(program.jaxpr, params, layouts)
    final = functools.partial(run, early)
    if not remat.is_in(program.jaxpr):
        return jax.checkpoint(final, policy=_is_kept)(params)
    program = jax.make_jaxpr(final)(params) if early else program
    final = functools.partial(remat.run, program)
    results = jax.checkpoint(final, policy=_is_kept)(*jax.tree.leaves(params))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def with_getter(network: Callable[..., Any], getter: Any) -> Callable[..., Any]:
    """The network, with a Haiku getter around it that supplies its parameters."""

    @functools.wraps(network)
    def asking(*args: Any, **kwargs: Any) -> Any:
        with hk.custom_getter(getter):
            return network(*args, **kwargs)

    return asking


def _sharded_along(
    shape: tuple[int, ...], whole: tuple[int, ...], count: int
) -> int | None:
    """The dimension along which `shape` is a shard of `whole`; None if no dimension
    fits, or if they are equal.
    """
    # An array without elements is whole, although any number of its kind make one like
    # it.
    if shape == whole:
        return None
    for dim in range(min(len(shape), len(whole))):
        if (*shape[:dim], shape[dim] * count, *shape[dim + 1 :]) == whole:
            return dim
    return None


def _lies_along(
    layouts: layouts_lib.Layouts, name: str, shape: tuple[int, ...]
) -> tuple[Any, ...]:
    """The other mesh axes that a parameter lies along, by its name in a network and its
    shape.

    In a scan over layers a module knows only the end of its path. If this end fits
    parameters that lie along different axes, no axes are returned, and XLA makes the
    array whole along them before it is gathered.
    """
    places = set()
    for path, layout in layouts.items():
        layers = len(layout.shape) - len(shape)
        if name in trees.endings(path) and layout.shape[layers:] == shape:
            places.add(layout.along[layers:])
    return places.pop() if len(places) == 1 else ()


def _gather(
    partition: shards.Partition,
    dtype: Any,
    reduce_dtype: str,
    layout: layouts_lib.Layout,
    shard: jax.Array,
    ready: jax.Array | None = None,
) -> jax.Array:
    """Gathers a whole array from its shards; its gradient is this replica's shard of
    the sum over the replicas.
    """
    sent = dtype if jnp.issubdtype(shard.dtype, jnp.floating) else shard.dtype

    # `varying.GATHERED` is this function's name, by which an analysis of the program
    # finds it.
    def gathered_parameter(shard: jax.Array, ready: jax.Array | None) -> jax.Array:
        return partition.gather(layout, shard.astype(sent)) if ready is None else ready

    def backward(_: None, grad: jax.Array) -> tuple[jax.Array, None]:
        total = partition.scatter(layout, trees.widen(grad), reduce_dtype)
        return total.astype(shard.dtype), None

    named = jax.jit(gathered_parameter)
    gather = jax.custom_vjp(named)
    gather.defvjp(lambda *inputs: (named(*inputs), None), backward)
    return gather(shard, ready)


def _is_kept(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """Returns whether a primitive's result is kept for the backward pass: all results
    except gathered arrays.

    Complex numbers are computed again too, since `jax.checkpoint` fails to keep them.
    """
    dtypes = [
        params.get("new_dtype", bool),
        *(x.dtype for x in inputs if hasattr(x, "dtype")),
    ]
    is_complex = any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes)
    return not is_complex and primitive.name not in ("all_gather", "complex", "fft")


def _needed_early(
    jaxpr: jax_internals.Jaxpr, params: Any, layouts: layouts_lib.Layouts
) -> list[str]:
    """The parameters in shards that a network asks for in a branch, or in a loop over
    anything but layers, by path.

    A gather in a branch could hang, since only some replicas may reach it; one in a
    loop would repeat each round.

    Args:
      jaxpr: the network's program, whose arguments are the parameters.
      params: the parameters of the network.
      layouts: the layouts of the parameters.

    Raises:
      UserError: if an output depends on a shard that was used without being gathered.
    """
    early: set[str] = set()

    def of_equation(eqn: Any, inputs: list[varying.Axes]) -> list[varying.Axes] | None:
        if eqn.params.get("name") == varying.GATHERED:
            early.update(_paths(inputs[0], _WITHIN))
            return [frozenset() for _ in eqn.outvars]
        entering = _entering(eqn, inputs)
        # With its inputs already marked, an equation is treated like any other.
        if entering == inputs:
            return None
        return varying.of_equation(eqn, entering, of_equation)

    shares = sharded(params, layouts)
    paths = trees.present(params)
    inputs = [frozenset([_SHARD + path] if path in shares else []) for path in paths]
    for noted in varying.outputs(jaxpr, inputs, of_equation):
        for path in _paths(noted):
            raise errors.UserError(
                f"The network uses the parameter {path!r} without asking hk.get_parameter for it, such as by "
                "params_dict(). With shard_params=True each replica holds a shard of it, and only hk.get_parameter "
                "gathers it. Ask for it, or set shard_params=False."
            )
    return sorted(early)


def _entering(eqn: Any, inputs: list[varying.Axes]) -> list[varying.Axes]:
    """The inputs of an equation, marked where they enter a branch, or enter a loop
    other than as scanned layers.
    """
    name = eqn.primitive.name
    if name in ("cond", "while"):
        return [_within(noted) for noted in inputs]
    if name == "scan":
        # A scanned array supplies one layer each round. Any other array would be
        # gathered again in each round.
        fixed = sum(jax_internals.scan_counts(eqn))
        return [*(_within(noted) for noted in inputs[:fixed]), *inputs[fixed:]]
    return inputs


def _within(noted: varying.Axes) -> varying.Axes:
    return noted.union(_WITHIN + path for path in _paths(noted))


def _paths(noted: varying.Axes, kind: str = _SHARD) -> list[str]:
    """The paths of the parameters in a value's notes of one kind."""
    return sorted(x.removeprefix(kind) for x in noted if x.startswith(kind))
