"""A function of one replica, mapped over the replicas of a mesh by `jax.vmap`.

Under `jax.shard_map` every value of a function belongs to one replica, also the sum of
the gradients and all that a rule computes from it. Under `jax.vmap` only what differs
between replicas is mapped. What a collective such as `jax.lax.psum` returns is an
ordinary, global array, which XLA partitions over the devices as its sharding says. So a
rule needs no code of its own to update arrays in shards.

Some computation still belongs on each replica: XLA does not partition the gradient of a
mapped convolution, and a sum should be scattered rather than made whole.
`replica_calls.on_each_replica` asks for such parts to be called in a `jax.shard_map`.
`per_replica` is that for a user's functions: these may be differentiated and mapped,
and get what is no array as it is.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xshard import errors
from xshard import mesh as mesh_lib
from xshard.base import mesh_axes
from xshard.base.jax_internals import jaxprs
from xshard.optimizers import replica_calls, varying

_AxisNames = tuple[str, ...]
# What becomes an array. A program may depend on any other value, such as a size.
_ARRAYS = (jax.Array, np.ndarray, float, complex)


class _Replicas(NamedTuple):
    """The replicas that a function is mapped over.

    Attributes:
      mesh: the mesh.
      axes: the mapped axes, outermost first; all other axes of the mesh are left to
        XLA's partitioner.
    """

    mesh: jax.sharding.Mesh
    axes: _AxisNames

    @property
    def manual_axes(self) -> set[str]:
        """The axes that `jax.shard_map` maps on a replica."""
        return mesh_lib.manual_axes(self.mesh, self.axes)

    @property
    def mesh_of_replica(self) -> jax.sharding.AbstractMesh:
        """The mesh as it is within that `jax.shard_map`."""
        types = dict.fromkeys(self.manual_axes, jax.sharding.AxisType.Manual)
        return self.mesh.abstract_mesh.update_axis_types(types)

    @property
    def long_axes(self) -> _AxisNames:
        """The mapped axes of a size above 1.

        Along the others nothing is mapped, which traces and compiles faster.
        """
        return tuple(axis for axis in self.axes if self.mesh.shape[axis] > 1)

    def call_on_each(
        self,
        f: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        in_specs: Any,
        out_specs: Any,
    ) -> Any:
        """Calls a function on each replica, as `replica_calls.on_each_replica`."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        leaves = [jnp.asarray(x) for x in leaves]
        specs = _leaf_specs(in_specs, args) + _leaf_specs(replica_calls.GLOBAL, kwargs)

        def of_leaves(leaves: Sequence[Any]) -> Any:
            args, kwargs = jax.tree.unflatten(structure, leaves)
            return f(*args, **kwargs)

        program, result_shapes = _traced(of_leaves, leaves, specs=specs)
        # What `f` closes over may be mapped, too, so it becomes an argument.
        constants = list(program.consts)
        result_specs = out_specs(result_shapes) if callable(out_specs) else out_specs
        on_each = _ReplicaProgram(
            self,
            jaxprs.with_constants_as_arguments(program),
            in_specs=[replica_calls.GLOBAL] * len(constants) + specs,
            out_specs=_leaf_specs(result_specs, result_shapes),
        )
        results = on_each(*constants, *leaves)
        return jax.tree.unflatten(jax.tree.structure(result_shapes), results)

    def constrain(self, x: jax.Array, spec: jax.P) -> jax.Array:
        """Lays a global array out, as `replica_calls.constrain`."""
        sharding = jax.NamedSharding(self.mesh, spec)
        return jaxprs.without_mesh(lax.with_sharding_constraint(x, sharding))

    def check_equal(
        self, arrays: Mapping[str, Any], error: Callable[[str], Exception]
    ) -> None:
        """Raises an error if an array differs, as `replica_calls.check_equal`."""
        names = list(arrays)
        long_axes = self.long_axes

        def unchanged(number: Any, *leaves: Any) -> list[Any]:
            del number
            return list(leaves)

        # As in `_ReplicaProgram`, the rule of each axis calls the function for the
        # next.
        def for_axis(depth: int) -> Callable[..., list[Any]]:
            if depth == len(long_axes) or long_axes[-1 - depth] == mesh_lib.GROUP:
                # Groups may differ.
                return unchanged
            call = jax.custom_batching.custom_vmap(unchanged)

            @call.def_vmap
            def rule(axis_size: int, is_mapped: Sequence[bool], *args: Any) -> Any:
                unmapped = [False] * len(names)
                if axis_size == 1:
                    return call(*_without_mapped(args, is_mapped)), unmapped
                # The number is the first argument.
                for name, mapped in zip(names, is_mapped[1:], strict=True):
                    if mapped:
                        raise error(name)
                return for_axis(depth + 1)(*args), unmapped

            return call

        number = lax.axis_index(long_axes) if long_axes else 0
        for_axis(0)(number, *arrays.values())


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
    along it, as far as JAX can tell, and is a global array.

    Jit it with `in_shardings` and `out_shardings`: they alone decide how global arrays,
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
    >>> total, products = f(2.0, jnp.arange(4.))
    >>> print(total, products)
    [12.] [0. 2. 4. 6.]
    """
    if axis_names is None:
        axis_names = mesh.axis_names
    replicas = _Replicas(mesh, tuple(axis_names))

    def on_all_replicas(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        specs = _leaf_specs(in_specs, args)
        divided = [
            _divide(replicas, spec, jnp.asarray(x))
            for spec, x in zip(specs, leaves, strict=True)
        ]

        def on_replica(leaves: list[Any]) -> Any:
            return f(*jax.tree.unflatten(structure, leaves))

        mapped: Callable[[list[Any]], Any] = on_replica
        # The axes of size 1 come first, so that no `jax.shard_map` of a replica's own
        # call is within their `jax.vmap`, which would map its collectives a second
        # time.
        for axis in replicas.axes:
            if axis not in replicas.long_axes:
                mapped = _bind_axis_name(mapped, axis)
        for axis in reversed(replicas.long_axes):
            mapped = jax.vmap(
                mapped,
                in_axes=([_vmapped_dim(axis, spec) for spec in specs],),
                out_axes=jax.tree.map(functools.partial(_vmapped_dim, axis), out_specs),
                axis_name=axis,
                axis_size=mesh.shape[axis],
                spmd_axis_name=axis,
            )
        # Traced without the arguments' meshes: JAX does not let a program that was
        # traced for arrays on a mesh run on one replica's part of them, as
        # `call_on_each` does.
        shapes = [_shape_of(x, x.shape) for x in divided]
        trace = jax.make_jaxpr(mapped, return_shape=True)
        with replica_calls.mapped_over(replicas), _explain_unmapped_collectives():
            program, result_shapes = trace(shapes)
        results = jaxprs.as_function(program)(*divided)
        specs = _leaf_specs(out_specs, result_shapes)
        joined = [
            _join(replicas, spec, x) for spec, x in zip(specs, results, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(result_shapes), joined)

    return on_all_replicas


def _traced(
    f: Callable[[Sequence[Any]], Any], arrays: Sequence[Any], *, specs: Sequence[jax.P]
) -> tuple[jaxprs.ClosedJaxpr, Any]:
    """Traces a function of one replica, where `vmap_replicas` maps them.

    Args:
      f: a function of a list of arrays.
      arrays: the arrays.
      specs: how each of them lies along the mapped axes.

    Returns:
      The program, and the shapes of the results.
    """
    replicas: _Replicas = replica_calls.current()
    shapes = [
        _shape_of(x, _shard_shape(replicas.mesh, spec, x.shape))
        for spec, x in zip(specs, arrays, strict=True)
    ]
    trace = jax.make_jaxpr(f, return_shape=True)
    # As within the `jax.shard_map` that calls it: a collective may ask which axes are
    # left to XLA.
    with (
        replica_calls.mapped_over(None),
        jax.sharding.use_abstract_mesh(replicas.mesh_of_replica),
    ):
        return trace(shapes)


class _ReplicaProgram:
    """A program of one replica, called in a `jax.shard_map` within a function that
    `jax.vmap` maps over the replicas.

    JAX maps the axes one by one, the innermost first. At each axis a `custom_vmap` rule
    learns which arguments are mapped along it, and calls the function for one axis
    more. The function for all axes is the `jax.shard_map`.

    For example, four replicas in two slices share w, and each has an x:

    >>> devices = np.reshape(jax.devices()[:4], (2, 2))
    >>> mesh = jax.sharding.Mesh(devices, ('slice', 'replica'))
    >>> own, of_slice = jax.P(('slice', 'replica')), jax.P('slice')
    >>> f = xshard.per_replica(lambda w, x: (w * x, jax.lax.psum(x, 'replica')))
    >>> f = xshard.vmap_replicas(
    ...     f, mesh, in_specs=(jax.P(), own), out_specs=(own, of_slice))
    >>> products, sums = jax.jit(f)(2.0, jnp.arange(4.))
    >>> print(products, sums)
    [0. 2. 4. 6.] [1. 5.]

    The axes of the leading dimensions of the arguments (the number, w and x) and of the
    results, as `_along_inner_axes` gets them:

    | depth | number and x | w | product | sum |
    |---|---|---|---|---|
    | 0 | none | none | none | none |
    | 1: after `replica` | replica | none | replica | none: `psum` makes it equal |
    | 2: after `slice` | slice, replica | none | slice, replica | slice |

    `custom_vmap` tells the rule which arguments are mapped, and the rule has to tell
    which results are. That is what `varying` finds out, from the program: of the
    results at depth 1, only the product differs along `replica`, so that the sum is one
    array to all that follows. Depth 2 is all axes, and the table's last row becomes the
    specs of the `jax.shard_map`.
    """

    def __init__(
        self,
        replicas: _Replicas,
        program: jaxprs.ClosedJaxpr,
        in_specs: list[jax.P],
        out_specs: list[jax.P],
    ):
        """Stores the program, and how its global arguments and results lie.

        Args:
          replicas: the replicas.
          program: the program, without constants.
          in_specs: the spec of each argument.
          out_specs: the spec of each result.
        """
        self._replicas = replicas
        self._program = program
        # The first argument of all calls is the replica's number.
        self._in_specs = [replica_calls.GLOBAL, *in_specs]
        self._out_specs = out_specs

    def __call__(self, *args: Any) -> list[Any]:
        """Calls the program on each replica."""
        # The number differs along all axes, so that each of them calls its rule, also
        # if no argument is mapped along it.
        long_axes = self._replicas.long_axes
        number = lax.axis_index(long_axes) if long_axes else jnp.int32(0)
        call = self._along_inner_axes(
            0,
            arg_axes=[()] * len(self._in_specs),
            result_axes=[()] * len(self._out_specs),
        )
        return call(number, *args)

    def _along_inner_axes(
        self, depth: int, arg_axes: list[_AxisNames], result_axes: list[_AxisNames]
    ) -> Callable[..., list[Any]]:
        """Returns the function of all replicas along the innermost axes.

        Args:
          depth: the number of these axes.
          arg_axes: for each argument, the axes of its leading dimensions, outermost
            first. It is mapped along them.
          result_axes: the same for each result.
        """
        long_axes = self._replicas.long_axes
        if depth == len(long_axes):
            on_devices = self._on_devices(arg_axes, result_axes)
            if not long_axes:
                # Hidden from the `jax.vmap` of an axis of size 1, which would map the
                # collectives once more.
                on_devices = jax.custom_batching.sequential_vmap(on_devices)
            return on_devices
        axis = long_axes[-1 - depth]

        # `custom_vmap` takes the results' shapes from this function, which never runs:
        # the number is always mapped.
        @jax.custom_batching.custom_vmap
        def call(*args: Any) -> list[Any]:
            del args
            return self._zeros(result_axes)

        @call.def_vmap
        def rule(
            axis_size: int, is_mapped: Sequence[bool], *args: Any
        ) -> tuple[list[Any], list[bool]]:
            if not is_mapped[0] and axis_size > 1:
                # The number is mapped along each axis of the replicas, so this is
                # another `jax.vmap`, within that of the innermost axis.
                assert depth == 0
                call_all = self._vmapped(is_mapped[1:])
                return call_all(*args[1:]), [True] * len(self._out_specs)
            if axis_size == 1:
                # An axis of size 1, along which its own index, say, is mapped.
                unmapped = [False] * len(self._out_specs)
                return call(*_without_mapped(args, is_mapped)), unmapped
            # `custom_vmap` has made the mapped dimension the first.
            now_arg_axes = [
                (axis, *axes) if mapped else axes
                for axes, mapped in zip(arg_axes, is_mapped, strict=True)
            ]
            now_result_axes = self._axes_of_results(depth + 1, now_arg_axes)
            outer = self._along_inner_axes(depth + 1, now_arg_axes, now_result_axes)
            return outer(*args), [axis in axes for axes in now_result_axes]

        return call

    def _vmapped(self, is_mapped: Sequence[bool]) -> Callable[..., list[Any]]:
        """Returns the program mapped by `jax.vmap`, as each replica calls it.

        Args:
          is_mapped: whether each argument has a leading dimension to map.
        """
        dims = [0 if mapped else None for mapped in is_mapped]
        mapped_program = jax.vmap(jaxprs.as_function(self._program), in_axes=dims)
        in_specs = []
        for spec, mapped in zip(self._in_specs[1:], is_mapped, strict=True):
            in_specs.append(jax.P(None, *spec) if mapped else spec)
        return replica_calls.on_each_replica(
            mapped_program,
            in_specs=tuple(in_specs),
            out_specs=[jax.P(None, *spec) for spec in self._out_specs],
        )

    def _axes_of_results(
        self, depth: int, arg_axes: Sequence[_AxisNames]
    ) -> list[_AxisNames]:
        """Returns the axes of the leading dimensions of each result.

        A result is mapped along all axes along which it differs, but for those that its
        spec lists: along these lie its shards.
        """
        long_axes = self._replicas.long_axes
        inner_axes = long_axes[len(long_axes) - depth :]
        inputs = []
        for axes, spec in zip(arg_axes[1:], self._in_specs[1:], strict=True):
            inputs.append(
                varying.Variation(frozenset([*axes, *mesh_axes.axes_of(spec)]))
            )
        all_axes = frozenset(self._replicas.axes)
        outputs = varying.outputs(self._program.jaxpr, inputs, axes=all_axes)
        result_axes = []
        for output, spec in zip(outputs, self._out_specs, strict=True):
            unlisted = output.axes.difference(mesh_axes.axes_of(spec))
            result_axes.append(tuple(axis for axis in inner_axes if axis in unlisted))
        return result_axes

    def _zeros(self, result_axes: Sequence[_AxisNames]) -> list[Any]:
        """Returns zeros of the shapes of the results along the innermost axes."""
        mesh = self._replicas.mesh
        avals = self._program.out_avals
        results = []
        for aval, spec, axes in zip(avals, self._out_specs, result_axes, strict=True):
            leading = tuple(mesh.shape[axis] for axis in axes)
            shape = leading + _global_shape(mesh, spec, aval.shape)
            results.append(jnp.zeros(shape, aval.dtype))
        return results

    def _on_devices(
        self, arg_axes: Sequence[_AxisNames], result_axes: Sequence[_AxisNames]
    ) -> Callable[..., list[Any]]:
        """Returns the function of all replicas along all axes: a `jax.shard_map`."""

        def on_replica(*args: Any) -> list[Any]:
            # A replica's part of a leading dimension is of size 1.
            local_args = []
            for axes, x in zip(arg_axes, args, strict=True):
                local_args.append(x.reshape(x.shape[len(axes) :]) if axes else x)
            results = jaxprs.as_function(self._program)(*local_args[1:])
            mapped_results = []
            for axes, x in zip(result_axes, results, strict=True):
                leading = (1,) * len(axes)
                mapped_results.append(x.reshape(leading + x.shape) if axes else x)
            return mapped_results

        on_devices = jax.shard_map(
            on_replica,
            mesh=self._replicas.mesh,
            axis_names=self._replicas.manual_axes,
            in_specs=tuple(_prepend(arg_axes, self._in_specs)),
            out_specs=_prepend(result_axes, self._out_specs),
            check_vma=False,
        )
        return lambda *args: [jaxprs.without_mesh(x) for x in on_devices(*args)]


def _prepend(axes: Sequence[_AxisNames], specs: Sequence[jax.P]) -> list[jax.P]:
    """Returns the specs of arrays with leading dimensions along some axes."""
    return [jax.P(*a, *spec) for a, spec in zip(axes, specs, strict=True)]


def _without_mapped(args: Sequence[Any], is_mapped: Sequence[bool]) -> list[Any]:
    """Returns arguments without the dimension of an axis of size 1, the first."""
    return [x[0] if mapped else x for x, mapped in zip(args, is_mapped, strict=True)]


@contextlib.contextmanager
def _explain_unmapped_collectives() -> Iterator[None]:
    """Adds a remedy to JAX's error about collectives that `jax.vmap` cannot map."""
    try:
        yield
    except (NotImplementedError, AssertionError) as e:
        # JAX asserts that a collective over several axes is over one.
        if isinstance(e, AssertionError) and str(e) != "axis size doesn't match":
            raise
        e.add_note(
            "Where the update is sharded, jax.vmap maps the replicas, and JAX has no "
            "such collective under jax.vmap: over several axes at once, as ('slice', "
            "'replica'), it has only sums, largest and least values, and none with "
            "axis_index_groups. Wrap the function that calls the collective in "
            "xshard.per_replica."
        )
        raise


def _bind_axis_name(
    f: Callable[[list[Any]], Any], axis: str
) -> Callable[[list[Any]], Any]:
    """Returns the function, where an axis of size 1 has this name.

    No array is mapped along it.
    """
    mapped = jax.vmap(f, in_axes=None, out_axes=0, axis_name=axis, axis_size=1)
    return lambda leaves: jax.tree.map(lambda x: x[0], mapped(leaves))


def _shape_of(x: jax.Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Returns a shape with the type of an array, without the array's mesh."""
    return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=jax.typeof(x).weak_type)


def _leaf_specs(specs: Any, tree: Any) -> list[jax.P]:
    """Returns the spec of each leaf of a tree, given a prefix of it."""
    return jax.tree.leaves(jax.tree.broadcast(specs, tree))


def _vmapped_dim(axis: str, spec: jax.P) -> int | None:
    """Returns the dimension of an array that `jax.vmap` maps along an axis, if any.

    `_divide` has made it the first; `_join` expects the results so.
    """
    return 0 if axis in mesh_axes.axes_of(spec) else None


def _shard_shape(
    mesh: jax.sharding.Mesh, spec: jax.P, shape: Sequence[int]
) -> tuple[int, ...]:
    """Returns the shape of a shard, given the shape of the whole array."""
    sizes = list(shape)
    for dim, entry in enumerate(spec):
        for axis in mesh_axes.axes_of([entry]):
            sizes[dim] //= mesh.shape[axis]
    return tuple(sizes)


def _global_shape(
    mesh: jax.sharding.Mesh, spec: jax.P, shape: Sequence[int]
) -> tuple[int, ...]:
    """Returns the shape of the whole array, given the shape of a shard."""
    sizes = list(shape)
    for dim, entry in enumerate(spec):
        for axis in mesh_axes.axes_of([entry]):
            sizes[dim] *= mesh.shape[axis]
    return tuple(sizes)


def _long_axes_by_dim(replicas: _Replicas, spec: jax.P, ndim: int) -> list[list[str]]:
    """Returns the mapped axes of a size above 1 that each dimension lies along."""
    by_dim: list[list[str]] = [[] for _ in range(ndim)]
    # A spec may leave out its last entries.
    for axes, entry in zip(by_dim, spec, strict=False):
        for axis in mesh_axes.axes_of([entry]):
            if axis in replicas.long_axes:
                axes.append(axis)
    return by_dim


def _divide(replicas: _Replicas, spec: jax.P, x: Any) -> Any:
    """Divides dimensions among replicas.

    Each mapped axis of the spec becomes a leading dimension, the outermost axis first.
    """
    sizes = replicas.mesh.shape
    shape: list[int] = []
    position = {}
    by_dim = _long_axes_by_dim(replicas, spec, x.ndim)
    for size, axes in zip(x.shape, by_dim, strict=True):
        for axis in axes:
            position[axis] = len(shape)
            shape.append(sizes[axis])
            size //= sizes[axis]
        shape.append(size)
    if not position:
        return x
    dims = [position[axis] for axis in replicas.long_axes if axis in position]
    return jnp.moveaxis(x.reshape(shape), dims, range(len(dims)))


def _join(replicas: _Replicas, spec: jax.P, x: Any) -> Any:
    """Inverts `_divide`."""
    mapped = set(mesh_axes.axes_of(spec))
    leading = [axis for axis in replicas.long_axes if axis in mapped]
    if not leading:
        return x
    ndim = x.ndim - len(leading)
    by_dim = _long_axes_by_dim(replicas, spec, ndim)
    order: list[int] = []
    shape: list[int] = []
    for dim, axes in enumerate(by_dim, len(leading)):
        order += [leading.index(axis) for axis in axes]
        order.append(dim)
        count = math.prod(replicas.mesh.shape[axis] for axis in axes)
        shape.append(x.shape[dim] * count)
    return jnp.transpose(x, order).reshape(shape)


def per_replica(
    f: Callable[..., Any],
    *,
    in_specs: Any = replica_calls.GLOBAL,
    out_specs: Any = replica_calls.GLOBAL,
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

    The function may be differentiated in reverse mode, as by `jax.grad`, and mapped by
    `jax.vmap`; what differentiates it twice, or in forward mode, belongs inside of it.
    It may read Haiku's parameters and state, but draws
    no keys and writes no state: give it the keys, and let it return what it computes.

    Args:
      f: a function of arrays, which may use collectives over the mapped axes. Arguments
        that are no arrays, such as Python's bools and integers, it gets as they are;
        other numbers of Python become arrays of a weak type. What it closes over may be
        arrays, too.
      in_specs: how global arguments lie along the mapped axes, a prefix of the
        arguments' tree. The function gets its replica's shard of them. All others are a
        replica's own, or whole. With such specs it cannot be differentiated from
        outside.
      out_specs: the same for results, a prefix of their tree, or a function from the
        results' shapes to that.

    Returns:
      A function with the same arguments and results. What `f` makes equal on all
      replicas is a global array.

    Raises:
      UserError: if the function draws a key of Haiku's or writes its state where the
        replicas are mapped so, or if it is differentiated twice, or with specs.

    >>> @xshard.per_replica
    ... def step(x):
    ...     return jax.lax.while_loop(lambda x: x[0] < 100, lambda x: 2 * x, x)
    >>> devices = jax.devices()[:4]
    >>> mesh, spec = jax.sharding.Mesh(devices, ('replica',)), jax.P('replica')
    >>> step = xshard.vmap_replicas(step, mesh, in_specs=spec, out_specs=spec)
    >>> print(jax.jit(step)(jnp.array([1., 3., 5., 7.])))
    [128. 192. 160. 112.]
    """
    name = getattr(f, "__qualname__", repr(f))

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not replica_calls.is_current():
            return f(*args, **kwargs)
        leaves, structure = jax.tree.flatten((args, kwargs))
        are_arrays = [isinstance(x, _ARRAYS) for x in leaves]
        all_specs = jax.tree.leaves(
            (
                jax.tree.broadcast(in_specs, args),
                jax.tree.broadcast(replica_calls.GLOBAL, kwargs),
            )
        )
        arrays = []
        specs = []
        for x, spec, is_array in zip(leaves, all_specs, are_arrays, strict=True):
            if is_array:
                arrays.append(jnp.asarray(x))
                specs.append(spec)

        def of_arrays(arrays: Sequence[jax.Array]) -> Any:
            remaining = iter(arrays)
            merged = []
            for x, is_array in zip(leaves, are_arrays, strict=True):
                merged.append(next(remaining) if is_array else x)
            args, kwargs = jax.tree.unflatten(structure, merged)
            with _refusing_haiku(name):
                return f(*args, **kwargs)

        program, shapes = _traced(of_arrays, arrays, specs=specs)
        constants = list(program.consts)
        on_replica = jaxprs.as_function(jaxprs.with_constants_as_arguments(program))
        specs_of_results = out_specs(shapes) if callable(out_specs) else out_specs
        result_specs = _leaf_specs(specs_of_results, shapes)
        operands = [*constants, *arrays]
        if any(tuple(spec) for spec in [*specs, *result_specs]):
            on_each = replica_calls.on_each_replica(
                on_replica,
                in_specs=tuple([replica_calls.GLOBAL] * len(constants) + specs),
                out_specs=result_specs,
            )
            why = "with in_specs or out_specs, for arrays in shards"
            results = _not_differentiated(on_each, name, why)(*operands)
        else:
            results = _differentiated(on_replica, operands, name)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


def _differentiated(
    on_replica: Callable[..., list[Any]], operands: Sequence[jax.Array], name: str
) -> list[Any]:
    """Calls a function on each replica, so that each also computes its gradient.

    JAX cannot differentiate what tells on each axis how a replica's call is mapped.
    """
    are_inexact = []
    inexact: list[Any] = []
    others: list[Any] = []
    for x in operands:
        is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        are_inexact.append(is_inexact)
        (inexact if is_inexact else others).append(x)
    # JAX computes a gradient later than what it is the gradient of.
    replicas = replica_calls.current()
    as_current = functools.partial(replica_calls.mapped_over, replicas)

    def call(inexact: list[Any], others: list[Any]) -> list[Any]:
        sources = {True: iter(inexact), False: iter(others)}
        return on_replica(*[next(sources[bool(x)]) for x in are_inexact])

    def with_pullback(inexact: list[Any], others: list[Any]) -> Any:
        return jax.vjp(lambda inexact: call(inexact, others), inexact)

    def pull_back(pullback: Any, cotangents: dict[int, Any], shapes: Any) -> Any:
        full = []
        for index, shape in enumerate(shapes):
            if index in cotangents:
                full.append(cotangents[index])
            else:
                # An integer has no cotangent.
                full.append(np.zeros(shape, jax.dtypes.float0))
        (result,) = pullback(full)
        return result

    def on_each(f: Callable[..., Any]) -> Callable[..., Any]:
        called = replica_calls.on_each_replica(f)
        return _not_differentiated(called, name, "twice")

    @jax.custom_vjp
    def differentiated(inexact: list[Any], others: list[Any]) -> list[Any]:
        return replica_calls.on_each_replica(call)(inexact, others)

    def forward(inexact: list[Any], others: list[Any]) -> Any:
        with as_current():
            return on_each(with_pullback)(inexact, others)

    def backward(pullback: Any, cotangents: Any) -> Any:
        given = {}
        for index, x in enumerate(cotangents):
            if x.dtype != jax.dtypes.float0:
                given[index] = x
        pull = functools.partial(pull_back, shapes=[x.shape for x in cotangents])
        with as_current():
            return on_each(pull)(pullback, given), None

    differentiated.defvjp(forward, backward)
    return differentiated(inexact, others)


def _not_differentiated(
    on_each: Callable[..., Any], name: str, why: str
) -> Callable[..., Any]:
    """Returns the function, which raises an error if it is differentiated.

    Args:
      on_each: the function, which is called on each replica.
      name: the name of the user's function.
      why: what of the differentiation is not possible.
    """

    def forward(*operands: Any) -> Any:
        raise errors.UserError(
            f"{name}, which per_replica calls on each replica by itself, cannot be "
            f"differentiated {why}. Differentiate inside of it: "
            "per_replica(jax.grad(f))."
        )

    function = jax.custom_vjp(on_each)
    function.defvjp(forward, lambda *_: ())
    return function


@contextlib.contextmanager
def _refusing_haiku(name: str) -> Iterator[None]:
    """Raises UserError if its body draws a key of Haiku's, or writes its state.

    They would belong to a program of their own, and be lost.
    """
    try:
        keys = jax.tree.leaves(hk.maybe_get_rng_sequence_state())
    except ValueError:
        # Nothing is transformed here.
        yield
        return

    def refuse(what: str) -> errors.UserError:
        return errors.UserError(
            f"{name}, which per_replica calls on each replica by itself, {what}: give "
            "it as an argument what it needs, as f(hk.next_rng_key(), x), and let it "
            "return what it computes, to write it outside."
        )

    def create(make: Any, shape: Any, dtype: Any, init: Any, context: Any) -> Any:
        raise refuse(f"creates Haiku's {context.full_name!r}")

    def write(set_value: Any, value: Any, context: Any) -> Any:
        raise refuse(f"writes Haiku's state {context.full_name!r}")

    # Haiku's own check refuses even to read.
    with (
        hk.config.context(check_jax_usage=False),
        hk.custom_creator(create, state=True),
        hk.custom_setter(write),
    ):
        yield
    left = jax.tree.leaves(hk.maybe_get_rng_sequence_state())
    if list(map(id, left)) != list(map(id, keys)):
        raise refuse("draws a random key of Haiku's")
