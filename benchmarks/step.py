"""What the rules and the loop cost, against the same written by hand, side by side in one process.

    JAX_PLATFORMS=cpu python -m benchmarks.step [--rounds=15] [--devices=2] [--batch=256]

Three ratios of times, each the median over rounds in which the sides alternate:

1. a training step with both rules / the step written by hand with optax, psum and a dynamic scale;
2. a step with a dynamic loss scale / the same without one;
3. the loop with logging, hooks and checkpoints / a bare `for` over the same jitted step.
"""

import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from absl import app, flags

import xshard
from tests import toy
from xshard import loop

_ROUNDS = flags.DEFINE_integer("rounds", 15, "How often each side is timed.", 3)
_DEVICES = flags.DEFINE_integer("devices", 2, "Virtual CPU devices.", 1)
_BATCH = flags.DEFINE_integer("batch", 256, "Examples a device.", 1)
_WIDTH, _LAYERS = 512, 4


def network(x: jax.Array) -> jax.Array:
    """A multilayer perceptron in the input's type."""
    return hk.nets.MLP([_WIDTH] * _LAYERS + [1])(x)[:, 0]


NETWORK = hk.without_apply_rng(hk.transform(network))
ADAM = optax.adamw(1e-3)


def loss(params: Any, x: jax.Array) -> jax.Array:
    """Computed in bfloat16, which CPUs have some speed in."""
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, x))
    return jnp.mean((NETWORK.apply(*half).astype(jnp.float32) - 1) ** 2)


def with_rules(scale: bool) -> tuple[Callable[..., Any], Any]:
    """The step by the rules, and its state."""

    def step(params: Any, x: jax.Array) -> Any:
        opt: Any = xshard.CrossShardOptimizer(ADAM)
        if scale:
            opt = xshard.MixedPrecisionLossScaleOptimizer(opt, "dynamic")
        return opt.minimize(lambda p: loss(p, x), params, gate_gradients=xshard.Optimizer.GATE_NONE)

    rules = hk.transform_with_state(step)
    params = NETWORK.init(jax.random.key(0), jnp.ones((1, _WIDTH)))
    state = rules.init(None, params, jnp.ones((1, _WIDTH)))[1]

    def local(state: Any, x: jax.Array) -> Any:
        (value, params), rule_state = rules.apply({}, state[1], None, state[0], x)
        return (params, rule_state), jax.lax.pmean(value, "replica")

    return local, (params, state)


def by_hand(state: Any, x: jax.Array) -> Any:
    """The same step as one would write it."""
    params, adam, scale, good = state
    value, grads = jax.value_and_grad(lambda p: loss(p, x) * scale)(params)
    grads = jax.tree.map(lambda g: g / scale, jax.lax.pmean(grads, "replica"))
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
    updates, new_adam = ADAM.update(grads, adam, params)
    select = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
    due = good + 1 >= 2000
    raised = jnp.where(due, scale * 2, scale)
    new_scale = jnp.where(finite, raised, jnp.maximum(scale / 2, 1))
    new_good = jnp.where(finite & ~due, good + 1, 0)
    params = select(optax.apply_updates(params, updates), params)
    new = (params, select(new_adam, adam), new_scale, new_good)
    return new, jax.lax.pmean(value / scale, "replica")


def jitted(local: Callable[..., Any]) -> Callable[..., Any]:
    """The step on all devices."""
    mesh = jax.sharding.Mesh(jax.devices(), "replica")
    specs = {"in_specs": (jax.P(), jax.P("replica")), "out_specs": jax.P()}
    return jax.jit(jax.shard_map(local, mesh=mesh, check_vma=False, **specs), donate_argnums=0)


def timed_steps(
    step: Callable[..., Any], state: Any, x: jax.Array, steps: int
) -> tuple[Any, float]:
    """The state after some steps, and the seconds of one."""
    begin = time.perf_counter()
    for _ in range(steps):
        state, value = step(state, x)
        jax.block_until_ready(value)
    return state, (time.perf_counter() - begin) / steps


def compare(name: str, side: Any, peer: Any, x: jax.Array) -> None:
    """Times two steps in turn, and prints the median ratio."""
    # Copies, since the first step of each side donates its state.
    states = [jax.tree.map(jnp.copy, state) for _, state in (side, peer)]
    steps = [jitted(local) for local, _ in (side, peer)]
    times: list[list[float]] = [[], []]
    for number in range(_ROUNDS.value + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            states[which], seconds = timed_steps(steps[which], states[which], x, 20)
            if number:  # The first compiles.
                times[which].append(seconds)
    report(name, times)


def report(name: str, times: list[list[float]]) -> None:
    """Prints medians and the ratio of each round's pair."""
    ratios = sorted(a / b for a, b in zip(*times, strict=True))
    quarter = len(ratios) // 4
    print(
        f"{name}: {statistics.median(ratios):.3f}x "
        f"(middle half {ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}; "
        f"{1e3 * statistics.median(times[0]):.2f} ms against {1e3 * statistics.median(times[1]):.2f} ms)",
        flush=True,
    )


def compare_loop(steps: int = 1500) -> None:
    """The loop of a small run, and a bare loop over its jitted step, which waits for each step."""
    config = toy.get_config()
    config.update({"steps": steps, "log_every_steps": 100, "eval_every_steps": 10 * steps})
    config.update({"examples": 20_000, "batch_size": 8192})
    config.checkpoint.every_steps = 500
    times: list[list[float]] = [[], []]
    for number in range(max(_ROUNDS.value // 3, 3) + 1):
        with tempfile.TemporaryDirectory() as directory:
            run = loop.Run(config, directory)
            first = run._resume_or_init()
            run._train_step(jax.tree.map(jnp.copy, first), run.batches(0))
            sides = [timed_run(run, first), timed_bare(run, first, steps)]
            if number:
                for side, seconds in zip(times, sides, strict=True):
                    side.append(seconds / steps)
    report("loop with logs and checkpoints / bare for", times)


def timed_run(run: Any, first: Any) -> float:
    """The seconds of the run's own loop from a given state."""
    state = jax.block_until_ready(jax.tree.map(jnp.copy, first))
    run._resume_or_init = lambda: state
    with run.workdir.opened(run.config), contextlib.redirect_stdout(io.StringIO()):
        begin = time.perf_counter()
        run.train()
        return time.perf_counter() - begin


def timed_bare(run: Any, first: Any, steps: int) -> float:
    """The seconds of a bare loop."""
    state = jax.block_until_ready(jax.tree.map(jnp.copy, first))
    begin = time.perf_counter()
    for number in range(steps):
        state, values = run._train_step(state, run.batches(number))
        jax.block_until_ready(values)
    return time.perf_counter() - begin


def main(_: Any) -> None:
    """Prints the three ratios."""
    jax.config.update("jax_num_cpu_devices", _DEVICES.value)
    x = jax.random.normal(jax.random.key(1), (_BATCH.value * _DEVICES.value, _WIDTH))
    rules, unscaled = with_rules(True), with_rules(False)
    hand_state = (rules[1][0], ADAM.init(rules[1][0]), jnp.float32(2**15), jnp.int32(0))
    compare("both rules / by hand", rules, (by_hand, hand_state), x)
    compare("dynamic loss scale / none", rules, unscaled, x)
    compare_loop()


if __name__ == "__main__":
    app.run(main)
