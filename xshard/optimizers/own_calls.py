"""Calls that each replica makes by itself, in a user's code.

`per_replica` is `replica_calls.on_each_replica` for a user's functions: these may be
differentiated and mapped, and get what is no array as it is.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from xshard import errors
from xshard.base.jax_internals import jaxprs
from xshard.optimizers import replica_calls, replica_map

_GLOBAL = jax.P()
# What becomes an array. A program may depend on any other value, such as a size.
_ARRAYS = (jax.Array, np.ndarray, float, complex)


def per_replica(
    f: Callable[..., Any], *, in_specs: Any = _GLOBAL, out_specs: Any = _GLOBAL
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
            (jax.tree.broadcast(in_specs, args), jax.tree.broadcast(_GLOBAL, kwargs))
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

        program, shapes = replica_map.traced(of_arrays, arrays, specs=specs)
        constants = list(program.consts)
        on_replica = jaxprs.as_function(jaxprs.with_constants_as_arguments(program))
        specs_of_results = out_specs(shapes) if callable(out_specs) else out_specs
        result_specs = replica_map.leaf_specs(specs_of_results, shapes)
        operands = [*constants, *arrays]
        if any(tuple(spec) for spec in [*specs, *result_specs]):
            on_each = replica_calls.on_each_replica(
                on_replica,
                in_specs=tuple([_GLOBAL] * len(constants) + specs),
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
    as_current = replica_map.same_replicas()

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
