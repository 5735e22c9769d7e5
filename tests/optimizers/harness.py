"""A small network and ways to run a step of it, for the tests of the optimizers."""

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

import xshard
from xshard.optimizers import base, layouts

REPLICAS = 8
MESH_AXIS = "replica"
# An axis of size 1, for rules over an axis of groups or slices.
GROUP_AXIS = "group"


_COMPILED: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: (
        _COMPILED.append(event) if "backend_compile" in event else None
    )
)


def compile_count() -> int:
    """Returns the number of times that XLA has compiled in this process."""
    return len(_COMPILED)


def params(dtype: Any = np.float32) -> dict[str, dict[str, jax.Array]]:
    """Returns the parameters of a two-layer network: two matrices and a vector.

    Their paths have three parts.
    """
    rng = np.random.default_rng(0)
    shapes = {"mlp/linear_0": {"b": (4,), "w": (3, 4)}, "mlp/linear_1": {"w": (4, 2)}}
    return {
        module: {
            name: jnp.asarray(rng.normal(size=shape), dtype)
            for name, shape in arrays.items()
        }
        for module, arrays in shapes.items()
    }


def batch(dtype: Any = np.float32, examples: int = 16) -> jax.Array:
    """Returns a batch of inputs of the network."""
    return jnp.asarray(np.random.default_rng(1).normal(size=(examples, 3)), dtype)


def loss(variables: Any, x: jax.Array) -> jax.Array:
    """Returns the mean over examples of a smooth function of all parameters."""
    hidden = jnp.tanh(
        x @ variables["mlp/linear_0"]["w"] + variables["mlp/linear_0"]["b"]
    )
    return jnp.mean(
        jnp.sum((hidden @ variables["mlp/linear_1"]["w"] - 1) ** 2, axis=-1)
    )


def transform_step(
    make_optimizer: Callable[[], Any], loss_fn: Any = loss
) -> hk.TransformedWithState:
    """Transforms a step of an optimizer.

    It is `step(params, x, global_step)`, which returns `(value, params, global_step)`.
    """

    def step(variables: Any, x: Any, global_step: Any = 0) -> Any:
        return make_optimizer().minimize(
            lambda p: loss_fn(p, x), variables, global_step
        )

    return hk.transform_with_state(step)


def mesh(replicas: int = REPLICAS) -> jax.sharding.Mesh:
    """Returns a mesh with `replicas` devices along `MESH_AXIS`."""
    devices = np.array(jax.devices()[:replicas]).reshape(1, replicas)
    return jax.sharding.Mesh(devices, (GROUP_AXIS, MESH_AXIS))


def one_device(step: hk.TransformedWithState) -> Callable[..., Any]:
    """Returns `f(params, state, x, global_step)`, which runs a step.

    It returns `((value, params, global_step), state)`.
    """
    return lambda p, s, x, n=0: step.apply({}, s, None, p, x, n)


def replicated(
    step: hk.TransformedWithState, *, check_vma: bool = False, replicas: int = REPLICAS
) -> Callable[..., Any]:
    """As `one_device`, with x split over the replicas, and all else replicated.

    The value is averaged.
    """

    def local(p: Any, s: Any, x: Any, n: Any) -> Any:
        (value, p, n), s = step.apply({}, s, None, p, x, n)
        return (jax.lax.pmean(value, MESH_AXIS), p, n), s

    spec = jax.P()
    mapped = jax.shard_map(
        local,
        mesh=mesh(replicas),
        in_specs=(spec, spec, jax.P(MESH_AXIS), spec),
        out_specs=spec,
        check_vma=check_vma,
    )
    return lambda p, s, x, n=0: mapped(p, s, x, jnp.asarray(n, jnp.int32))


def per_replica(
    step: hk.TransformedWithState, replicas: int = REPLICAS
) -> Callable[..., Any]:
    """As `one_device`, but all arrays have a leading dimension of replicas.

    So every replica's copy is shown.
    """

    def local(*args: Any) -> Any:
        p, s, x, n = jax.tree.map(lambda a: a[0], args)
        return jax.tree.map(
            lambda a: jnp.asarray(a)[None], step.apply({}, s, None, p, x, n)
        )

    spec = jax.P(MESH_AXIS)
    return jax.shard_map(
        local,
        mesh=mesh(replicas),
        in_specs=(spec,) * 4,
        out_specs=spec,
        check_vma=False,
    )


def vmapped(f: Any, in_specs: Any, out_specs: Any, replicas: int = REPLICAS) -> Any:
    """Returns a function of a replica, mapped by `xshard.vmap_replicas` and jitted."""
    on_all = xshard.vmap_replicas(
        f, mesh(replicas), in_specs=in_specs, out_specs=out_specs
    )
    return jax.jit(on_all)


def placed(state: Any, of_params: Any, replicas: int = REPLICAS) -> Any:
    """Returns the state of rules that shard their update, on the devices in shards."""
    specs = layouts.StateSharding(state, of_params, replicas).specs
    place = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh(replicas), spec))
    return jax.tree.map(place, state, specs)


def sharded(
    step: hk.TransformedWithState,
    make_optimizer: Callable[[], Any],
    replicas: int = REPLICAS,
) -> Callable[..., Any]:
    """As `replicated`, with slots in shards if a rule shards its update."""

    def local(p: Any, s: Any, x: Any, n: Any) -> Any:
        (value, p, n), s = step.apply({}, s, None, p, x, n)
        return (jax.lax.pmean(value, MESH_AXIS), p, n), s

    whole = jax.P()
    specs: Any = (whole, whole, jax.P(MESH_AXIS), whole)
    on_all = xshard.vmap_replicas(
        local, mesh(replicas), in_specs=specs, out_specs=whole
    )
    place = lambda spec: jax.NamedSharding(mesh(replicas), spec)

    def run(p: Any, s: Any, x: Any, n: Any = 0) -> Any:
        rules = hk.transform(lambda: base.all_rules(make_optimizer())).apply({}, None)
        of_state: Any = place(whole)
        if any(getattr(rule, "shard_update", False) for rule in rules):
            sharding = layouts.StateSharding(s, params(), replicas)
            of_state = jax.tree.map(place, sharding.specs)
        shardings = place(whole), of_state, place(jax.P(MESH_AXIS)), place(whole)
        given = jax.device_put((p, s, x, jnp.asarray(n, jnp.int32)), shardings)
        jitted = jax.jit(on_all, out_shardings=(place(whole), of_state))
        return jitted(*given)

    return run


def stack(tree: Any, replicas: int = REPLICAS) -> Any:
    """Stacks a copy for each replica."""
    return jax.tree.map(lambda a: jnp.stack([jnp.asarray(a)] * replicas), tree)


def assert_equal(actual: Any, expected: Any) -> None:
    """Asserts equal structure, dtypes, shapes and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(actual),
        jax.tree.leaves(expected),
        strict=True,
    ):
        a = _plain(a)
        b = _plain(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert a.tobytes() == b.tobytes(), (path, a, b)


def assert_close(actual: Any, expected: Any, rtol: float, atol: float = 0.0) -> None:
    """Asserts equal structure and close values."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(_plain(a), _plain(b), rtol=rtol, atol=atol)


def _plain(a: Any) -> np.ndarray:
    is_key = jnp.issubdtype(jnp.result_type(a), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(a) if is_key else a)
