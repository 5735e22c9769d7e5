"""Rules written by hand that hold other rules, and how tests train with a rule."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from tests.optimizers import harness
from xshard.optimizers import base

STEPS = 4
# The step whose batch contains a NaN.
BAD_STEP = 2


def path_name(path):
    return "/".join(key.key for key in path)


class ByLayer(base.Optimizer):
    """Applies one rule to the first layer and another to the rest.

    It is not an OptimizerWrapper.
    """

    def __init__(self, first, rest, name):
        super().__init__(name=name)
        self.rules = {"first": first, "rest": rest}

    def update(self, grads, params):
        is_first = lambda path: path[0].key == "mlp/linear_0"
        select = lambda wanted: jax.tree_util.tree_map_with_path(
            lambda path, g: g if is_first(path) == wanted else None, grads
        )
        return self.rules["rest"].update(
            select(False), self.rules["first"].update(select(True), params)
        )


class Lookahead(base.OptimizerWrapper):
    """Updates slow copies of the parameters every second step."""

    def __init__(self, opt, name):
        super().__init__(name=name)
        self.opt = opt

    def update(self, grads, params):
        fast = self.opt.update(grads, params)
        n = hk.get_state("n", [], jnp.int32, jnp.zeros) + 1

        def update_leaf(path, new, old):
            name = f"slow/{path_name(path)}"
            slow = hk.get_state(
                name, old.shape, old.dtype, lambda *_: jnp.array(old, copy=True)
            )
            if hk.running_init():
                return new
            slow = jnp.where(n % 2 == 0, slow + 0.5 * (new - slow), slow)
            hk.set_state(name, slow)
            return jnp.where(n % 2 == 0, slow, new)

        new = jax.tree_util.tree_map_with_path(update_leaf, fast, params)
        if not hk.running_init():
            hk.set_state("n", n)
        return new


def train(make, x, replicas, start=None):
    """Returns `(params, update count, state)` after each of STEPS steps.

    The rule is replicated or in shards, as it says. `start` is such a triple or None.
    """
    transformed = harness.transform_step(make)
    params = harness.params(np.float64)
    _, state = transformed.init(jax.random.key(0), params, x)
    rules = hk.transform(lambda: base.all_rules(make())).apply({}, None)

    def local(params, state, x, n, key):
        (_, params, n), state = transformed.apply({}, state, key, params, x, n)
        return params, state, n

    whole = jax.P()
    in_specs = (whole, whole, jax.P("replica"), whole, whole)
    if any(getattr(rule, "shard_update", False) for rule in rules):
        run = harness.vmapped(local, in_specs, whole, replicas)
    else:
        run = jax.jit(
            jax.shard_map(
                local,
                mesh=harness.mesh(replicas),
                in_specs=in_specs,
                out_specs=whole,
                check_vma=False,
            )
        )
    params, n, state = jax.device_get(start) or (params, jnp.int32(0), state)
    state = harness.placed(state, params, replicas)
    results = []
    for step in range(STEPS):
        inputs = x.at[3, 1].set(jnp.nan) if step == BAD_STEP else x
        params, state, n = run(params, state, inputs, n, jax.random.key(step))
        results.append((params, n, state))
    return results
