"""A function of one replica, mapped over the replicas of a mesh by `jax.vmap`, so that
its sums are global arrays.

Under `jax.shard_map` every value of a function belongs to one replica, also the sum of
the gradients and all that a rule computes from it. Under `jax.vmap` only what differs
between replicas is mapped. What a collective such as `jax.lax.psum` returns is an
ordinary array, which XLA partitions over the devices as its sharding says. So a rule
needs no code of its own to update arrays in shards.

Some computation still belongs on each replica: XLA does not partition the gradient of a
mapped convolution, and a sum should be scattered rather than made whole. `per_replica`
calls such parts in a `jax.shard_map`.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xshard import jax_internals, mesh
from xshard.optimizers import varying

# The spec of an array that lies along no mapped axis.
_WHOLE = jax.P()


class _Replicas(NamedTuple):
    """The replicas that a function is mapped over.

    Attributes:
      mesh: the mesh.
      axes: the mapped axes, outermost first; all other axes of the mesh are left to
        XLA's partitioner.
    """

    mesh: jax.sharding.Mesh
    axes: tuple[str, ...]

    @property
    def manual(self) -> set[str]:
        """The axes that `jax.shard_map` maps on a replica."""
        return mesh.manual_axes(self.mesh, self.axes)

    @property
    def inside(self) -> jax.sharding.AbstractMesh:
        """The mesh as it is within that `jax.shard_map`."""
        manual = jax.sharding.AxisType.Manual
        return self.mesh.abstract_mesh.update_axis_types(
            dict.fromkeys(self.manual, manual)
        )

    @property
    def long(self) -> tuple[str, ...]:
        """The mapped axes of a size above 1. Along the others nothing is mapped, which
        traces and compiles faster.
        """
        return tuple(axis for axis in self.axes if self.mesh.shape[axis] > 1)


# The replicas that the function being traced is mapped over, or None. A user context,
# so that JAX's caches never reuse the trace of a jitted function from one value for
# another.
_MAPPED_OVER = jax.make_user_context(None)


def _current() -> _Replicas | None:
    replicas: _Replicas | None = _MAPPED_OVER.value
    return replicas


def not_mapped() -> contextlib.AbstractContextManager[None]:
    """Traces a function of one replica in its body, where `vmap_replicas` maps the
    replicas.
    """
    return _MAPPED_OVER(None)


def is_current() -> bool:
    """Returns whether the function being traced is mapped by `vmap_replicas`, so that
    its sums are global arrays.
    """
    return _current() is not None


def vmap_replicas(
    f: Callable[..., Any],
    mesh: jax.sharding.Mesh,
    *,
    in_specs: Any,
    out_specs: Any,
    axis_names: Sequence[str] | None = None,
) -> Callable[..., Any]:
    """Maps a function over the replicas of a mesh, as `jax.shard_map` does, but by
    `jax.vmap`.

    The function sees its part of each argument whose spec names mapped axes, and the
    whole of any other argument. A result whose spec does not name an axis must be equal
    along it, as far as JAX can tell, and is whole.

    Jit it with `in_shardings` and `out_shardings`: they alone decide how whole arrays,
    such as slots, lie on the devices.

    Args:
      f: a function of one replica. It may use collectives over the mapped axes, without
        `axis_index_groups`.
      mesh: the mesh.
      in_specs: the mapped axes of each argument's dimensions, a prefix of the
        arguments' tree.
      out_specs: those of each result's dimensions.
      axis_names: the mapped axes, outermost first; all axes of the mesh by default.

    Returns:
      The function of all replicas.

    Raises:
      ValueError: if a result differs along an axis that its spec does not name.

    >>> mesh = jax.sharding.Mesh(jax.devices()[:4], ('replica',))
    >>> f = lambda w, x: (jax.lax.psum(w * x, 'replica'), w * x)
    >>> specs = jax.P(), jax.P('replica')
    >>> f = jax.jit(xshard.vmap_replicas(f, mesh, in_specs=specs, out_specs=specs))
    >>> total, own = f(2.0, jnp.arange(4.))
    >>> print(total, own)
    [12.] [0. 2. 4. 6.]
    """
    replicas = _Replicas(
        mesh, tuple(mesh.axis_names if axis_names is None else axis_names)
    )

    def of_all(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        leaves = list(map(jnp.asarray, leaves))
        specs = _leaf_specs(in_specs, args)
        divided = [
            _divide(replicas, spec, x) for spec, x in zip(specs, leaves, strict=True)
        ]

        def of_replica(divided: list[Any]) -> Any:
            return f(*jax.tree.unflatten(structure, divided))

        mapped: Callable[[list[Any]], Any] = of_replica
        # The axes of size 1 come first, so that no `jax.shard_map` of `per_replica` is
        # within their `jax.vmap`, which would map its collectives a second time.
        for axis in replicas.axes:
            if axis not in replicas.long:
                mapped = _bind_name(mapped, axis)
        for axis in reversed(replicas.long):
            out_axes = jax.tree.map(functools.partial(_first_if_along, axis), out_specs)
            mapped = jax.vmap(
                mapped,
                in_axes=([_first_if_along(axis, spec) for spec in specs],),
                out_axes=out_axes,
                axis_name=axis,
                axis_size=mesh.shape[axis],
                spmd_axis_name=axis,
            )
        # Traced without the arguments' meshes: JAX does not let a program that was
        # traced for arrays on a mesh run on one replica's part of them, as
        # `per_replica` does.
        shapes = [_shape_of(x, x.shape) for x in divided]
        with _MAPPED_OVER(replicas):
            program, returned = _explained(jax.make_jaxpr(mapped, return_shape=True))(
                shapes
            )
        results = jax_internals.as_function(program)(*divided)
        specs = _leaf_specs(out_specs, returned)
        joined = [
            _join(replicas, spec, x) for spec, x in zip(specs, results, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(returned), joined)

    return of_all


def per_replica(
    f: Callable[..., Any], *, in_specs: Any = _WHOLE, out_specs: Any = _WHOLE
) -> Callable[..., Any]:
    """Returns a function that each replica calls by itself where `vmap_replicas` maps
    the replicas; elsewhere it is as it was.

    A run maps its step so where the update is sharded. XLA then computes what
    `train_step` does for all replicas of a device together. That is slower for some
    computation: a convolution with weights of a replica's own, the gradient of a
    convolution with respect to such weights, and a loop or a branch that depends on a
    replica's own values, of which all replicas take as many rounds as the longest and
    both sides. The loss of `Learner.update` is called on each replica already; wrap
    other such code yourself.

    Args:
      f: a function of arrays, which may use collectives over the mapped axes. What it
        closes over may be arrays, too.
      in_specs: how whole arguments lie along the mapped axes, a prefix of the
        arguments' tree. The function gets its replica's shard of them. All others are a
        replica's own, or whole.
      out_specs: the same for results, a prefix of their tree, or a function from the
        results' shapes to that.

    Returns:
      A function with the same arguments and results. What `f` makes equal on all
      replicas is whole.

    >>> @xshard.per_replica
    ... def step(x):
    ...     return jax.lax.while_loop(lambda x: x[0] < 100, lambda x: 2 * x, x)
    >>> mesh, spec = jax.sharding.Mesh(jax.devices()[:4], ('replica',)), jax.P('replica')
    >>> step = xshard.vmap_replicas(step, mesh, in_specs=spec, out_specs=spec)
    >>> print(jax.jit(step)(jnp.array([1., 3., 5., 7.])))
    [128. 192. 160. 112.]
    """

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        replicas = _current()
        if replicas is None:
            return f(*args, **kwargs)
        leaves, structure = jax.tree.flatten((args, kwargs))
        leaves = list(map(jnp.asarray, leaves))
        specs = _leaf_specs(in_specs, args) + _leaf_specs(_WHOLE, kwargs)
        shards = []
        for spec, x in zip(specs, leaves, strict=True):
            shape = _scaled(
                x.shape, spec, lambda size, axis: size // replicas.mesh.shape[axis]
            )
            shards.append(_shape_of(x, shape))

        def of_leaves(leaves: Sequence[Any]) -> Any:
            args, kwargs = jax.tree.unflatten(structure, leaves)
            return f(*args, **kwargs)

        trace = jax.make_jaxpr(of_leaves, return_shape=True)
        # As within the `jax.shard_map` that calls it: a collective may ask which axes
        # are left to XLA.
        with not_mapped(), jax.sharding.use_abstract_mesh(replicas.inside):
            program, returned = trace(shards)
        # What `f` closes over may be mapped, too, so it becomes an argument.
        constants = list(program.consts)
        closed = jax_internals.with_constants_as_arguments(program)
        of_results = out_specs(returned) if callable(out_specs) else out_specs
        island = _Island(
            replicas,
            closed,
            [_WHOLE] * (len(constants) + 1) + specs,
            _leaf_specs(of_results, returned),
        )
        # The replica's number differs along all axes, so that each of them calls the
        # rule below.
        number = lax.axis_index(replicas.long) if replicas.long else jnp.int32(0)
        results = island.call([], [()] * len(program.out_avals))(
            number, *constants, *leaves
        )
        return jax.tree.unflatten(jax.tree.structure(returned), results)

    return call


class _Island:
    """A program of one replica that is called in a `jax.shard_map` within a function
    that `jax.vmap` maps.

    The axes are mapped one by one, the innermost first. The rule of each records which
    arguments it maps, and hands on to the next axis. The last one calls
    `jax.shard_map`.
    """

    def __init__(
        self,
        replicas: _Replicas,
        program: jax_internals.ClosedJaxpr,
        in_specs: list[jax.P],
        out_specs: list[jax.P],
    ):
        """Stores a program, and how its arguments, after the replica's number, and its
        results lie along the axes.
        """
        self._replicas = replicas
        self._program = program
        self._in_specs = in_specs
        self._out_specs = out_specs

    def call(
        self, mapped: list[list[bool]], along: list[tuple[str, ...]]
    ) -> Callable[..., list[Any]]:
        """Returns the function of all replicas along the innermost axes.

        Args:
          mapped: for each of these axes, the innermost first, which arguments have a
            leading dimension along it.
          along: for each result, along which of these axes it has one.
        """
        long = self._replicas.long
        if not long:
            # Hidden from the `jax.vmap` of an axis of size 1, which would map the
            # collectives once more.
            return jax.custom_batching.sequential_vmap(self._on_devices(mapped, along))
        if len(mapped) == len(long):
            return self._on_devices(mapped, along)
        axis = long[-1 - len(mapped)]

        def shapes_only(*leaves: Any) -> list[Any]:
            del leaves
            return self._empty_results(along)

        # `custom_vmap` takes the results' shapes from this function, which never runs:
        # the number is always mapped.
        mappable = jax.custom_batching.custom_vmap(shapes_only)

        @mappable.def_vmap
        def rule(
            size: int, is_mapped: Sequence[bool], *leaves: Any
        ) -> tuple[list[Any], Any]:
            del size
            now = [*mapped, list(is_mapped)]
            now_along = self._mapped_along(now)
            return self.call(now, now_along)(*leaves), [
                axis in axes for axes in now_along
            ]

        return mappable

    def _mapped_along(self, mapped: Sequence[Sequence[bool]]) -> list[tuple[str, ...]]:
        """The axes along which each result is mapped: where it differs, unless its spec
        says how its shards lie.
        """
        long = self._replicas.long
        inner = long[len(long) - len(mapped) :]
        noted = []
        for index, spec in enumerate(self._in_specs[1:], 1):
            axes = set(mesh.axes_of(spec))
            for axis, flags in zip(reversed(inner), mapped, strict=True):
                if flags[index]:
                    axes.add(axis)
            noted.append(varying.Variation(frozenset(axes)))
        every = frozenset(self._replicas.axes)
        found = varying.outputs(self._program.jaxpr, noted, axes=every)
        results = []
        for differs, spec in zip(found, self._out_specs, strict=True):
            own = differs.axes.difference(mesh.axes_of(spec))
            results.append(tuple(axis for axis in inner if axis in own))
        return results

    def _empty_results(self, along: Sequence[tuple[str, ...]]) -> list[Any]:
        sizes = self._replicas.mesh.shape
        results = []
        for aval, spec, axes in zip(
            self._program.out_avals, self._out_specs, along, strict=True
        ):
            shape = _scaled(aval.shape, spec, lambda size, axis: size * sizes[axis])
            shape = (*(sizes[axis] for axis in axes), *shape)
            results.append(jnp.zeros(shape, aval.dtype))
        return results

    def _on_devices(
        self, mapped: Sequence[Sequence[bool]], along: Sequence[tuple[str, ...]]
    ) -> Callable[..., list[Any]]:
        long = self._replicas.long
        leading: list[tuple[str, ...]] = []
        in_specs = []
        for index, spec in enumerate(self._in_specs):
            flags = dict(zip(reversed(long), mapped, strict=True))
            axes = tuple(axis for axis in long if flags[axis][index])
            leading.append(axes)
            in_specs.append(jax.P(*axes, *spec))
        out_specs = [
            jax.P(*axes, *spec)
            for axes, spec in zip(along, self._out_specs, strict=True)
        ]

        def on_replica(*leaves: Any) -> list[Any]:
            own = []
            for x, axes in zip(leaves, leading, strict=True):
                own.append(x.reshape(x.shape[len(axes) :]) if axes else x)
            results = jax_internals.as_function(self._program)(*own[1:])
            return [
                x.reshape(*(1 for _ in axes), *x.shape) if axes else x
                for x, axes in zip(results, along, strict=True)
            ]

        on_devices = jax.shard_map(
            on_replica,
            mesh=self._replicas.mesh,
            axis_names=self._replicas.manual,
            in_specs=tuple(in_specs),
            out_specs=out_specs,
            check_vma=False,
        )
        return lambda *leaves: list(
            map(jax_internals.without_mesh, on_devices(*leaves))
        )


def equal_on_replicas(tree: Any, *, given: Any = ()) -> Any:
    """The same tree, declared equal on all replicas of a group where the program does
    not show that it is.

    Use it for the result of a custom computation that makes values equal, or of a
    gather in steps among some replicas at a time. The declaration is not proved: a run
    compares fingerprints of the replicas' state every `fingerprint_every_steps` steps
    and before each save, and stops or rolls back if copies differ.

    Args:
      tree: arrays.
      given: arrays that the tree depends on. If these differ between replicas, so does
        the tree.
    """
    if not is_current():
        return varying.marked(varying.EQUAL, tree, given)
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _resolved(lambda index, x: x[0], leaves))


def check_equal(arrays: Mapping[str, Any], error: Callable[[str], Exception]) -> None:
    """Raises an error if an array is a replica's own, where `vmap_replicas` maps the
    replicas; elsewhere does nothing.

    Args:
      arrays: the arrays, by name.
      error: returns the error for a name.
    """
    if not is_current():
        return
    names = list(arrays)

    def refuse(index: int, x: jax.Array) -> jax.Array:
        raise error(names[index])

    _resolved(refuse, list(arrays.values()))


def _resolved(
    resolve: Callable[[int, jax.Array], jax.Array], leaves: list[Any]
) -> list[Any]:
    """The arrays, of which those that are mapped along replicas are replaced by what
    `resolve(index, all copies)` returns.
    """
    replicas = _current()
    assert replicas is not None
    long = replicas.long

    def call(depth: int) -> Callable[..., list[Any]]:
        mappable = jax.custom_batching.custom_vmap(lambda number, *leaves: list(leaves))
        if depth == len(long) or long[-1 - depth] == mesh.GROUP:
            return lambda number, *leaves: list(leaves)

        @mappable.def_vmap
        def rule(
            size: int, is_mapped: Sequence[bool], number: Any, *leaves: Any
        ) -> Any:
            del size
            equal = []
            for index, (x, is_own) in enumerate(
                zip(leaves, is_mapped[1:], strict=True)
            ):
                equal.append(resolve(index, x) if is_own else x)
            return call(depth + 1)(number, *equal), [False] * len(equal)

        return mappable

    number = lax.axis_index(long) if long else 0
    return call(0)(number, *leaves)


def lying(x: jax.Array, spec: jax.P) -> jax.Array:
    """A whole array of a function that `vmap_replicas` maps, which lies on the devices
    by a spec.
    """
    replicas = _current()
    assert replicas is not None
    place = jax.NamedSharding(replicas.mesh, spec)
    return jax_internals.without_mesh(lax.with_sharding_constraint(x, place))


def _explained(trace: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which adds a remedy to JAX's error about collectives that it cannot
    map.
    """

    def call(*args: Any) -> Any:
        try:
            return trace(*args)
        except (NotImplementedError, AssertionError) as e:
            # JAX asserts that a collective over several axes is over one.
            if isinstance(e, AssertionError) and str(e) != "axis size doesn't match":
                raise
            e.add_note(
                "Where the update is sharded, jax.vmap maps the replicas, and JAX has no such collective under jax.vmap: over "
                "several axes at once, as ('slice', 'replica'), it has only sums, largest and least values, and none with "
                "axis_index_groups. Wrap the function that calls the collective in xshard.per_replica."
            )
            raise

    return call


def _bind_name(f: Callable[[list[Any]], Any], axis: str) -> Callable[[list[Any]], Any]:
    """The function, where an axis of size 1 has this name. No array is mapped along it."""
    mapped = jax.vmap(f, in_axes=None, out_axes=0, axis_name=axis, axis_size=1)
    return lambda divided: jax.tree.map(lambda x: x[0], mapped(divided))


def _shape_of(x: jax.Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """The shape and type of an array without its mesh, or of its part."""
    return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=jax.typeof(x).weak_type)


def _leaf_specs(specs: Any, tree: Any) -> list[jax.P]:
    return jax.tree.leaves(jax.tree.broadcast(specs, tree))


def _first_if_along(axis: str, spec: jax.P) -> int | None:
    """The mapped dimension of an array that `_divide` has divided, for `jax.vmap`."""
    return 0 if axis in mesh.axes_of(spec) else None


def _scaled(
    shape: Sequence[int], spec: jax.P, scale: Callable[[int, str], int]
) -> tuple[int, ...]:
    """A shape with the size of each dimension changed for each mesh axis that it lies
    along.
    """
    sizes = list(shape)
    for dim, entry in enumerate(spec):
        for axis in mesh.axes_of([entry]):
            sizes[dim] = scale(sizes[dim], axis)
    return tuple(sizes)


def _axes_by_dim(replicas: _Replicas, spec: jax.P) -> list[list[str]]:
    """For each dimension, the mapped axes of a size above 1 that it lies along."""
    return [
        [axis for axis in mesh.axes_of([entry]) if axis in replicas.long]
        for entry in spec
    ]


def _divide(replicas: _Replicas, spec: jax.P, x: Any) -> Any:
    """Divides dimensions among replicas: each mapped axis becomes a leading dimension,
    the outermost first.
    """
    sizes = replicas.mesh.shape
    shape: list[int] = []
    place = {}
    by_dim = _axes_by_dim(replicas, spec)
    for dim, size in enumerate(x.shape):
        for axis in by_dim[dim] if dim < len(by_dim) else ():
            place[axis] = len(shape)
            shape.append(sizes[axis])
            size //= sizes[axis]
        shape.append(size)
    if not place:
        return x
    dims = [place[axis] for axis in replicas.long if axis in place]
    return jnp.moveaxis(x.reshape(shape), dims, range(len(dims)))


def _join(replicas: _Replicas, spec: jax.P, x: Any) -> Any:
    """The inverse of `_divide`."""
    by_dim = _axes_by_dim(replicas, spec)
    leading = [axis for axis in replicas.long if any(axis in axes for axes in by_dim)]
    if not leading:
        return x
    order: list[int] = []
    shape: list[int] = []
    for dim, size in enumerate(x.shape[len(leading) :]):
        axes = by_dim[dim] if dim < len(by_dim) else []
        order += [leading.index(axis) for axis in axes]
        order.append(len(leading) + dim)
        shape.append(size * math.prod(replicas.mesh.shape[axis] for axis in axes))
    return jnp.transpose(x, order).reshape(shape)
