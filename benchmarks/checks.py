"""Checks what the rules and runs promise on the devices that JAX finds, however many.

    python -m benchmarks.checks rules | skips | exact [--devices=8]
    python -m benchmarks.checks export --run=DIR

Each check prints what it compared. If a promise does not hold, it raises AssertionError
with what was found. `benchmarks.accelerator` runs all of them.
"""

import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax import export as jax_export

import xshard
from benchmarks import models
from benchmarks import sides as sides_lib
from tests import toy
from xshard import experiment as experiment_lib
from xshard import export
from xshard.pod import origin
from xshard.run import preflight
from xshard.training import state as state_lib

_DEVICES = flags.DEFINE_integer("devices", 1, "Virtual devices, on a CPU.", 1)
_RUN = flags.DEFINE_string("run", None, "export: the work directory of a run.")

_SIZE = models.Size(64, 2, 64)
_STEPS = 6
# The largest difference from the step by hand, as a fraction of what was trained. Both
# are float32, but XLA compiles two programs, and where a gradient is almost 0 Adam's
# update has the sign of its last bit.
_TOLERANCE = 1e-2


def rules() -> str:
    """Checks that the step by both rules trains as the step by hand, in the same bits
    on each device.
    """
    moved = {}
    # On accelerators the default precision of products is lower.
    with jax.default_matmul_precision("highest"):
        for side in ("rules", "hand"):
            step, state, x = _perceptron(side)
            # The state is donated.
            first = _host(_params(state, side))
            for _ in range(_STEPS):
                state, loss = step(state, x)
            assert np.isfinite(loss), f"{side}: the loss is {loss}"
            copies = _assert_equal_copies(state)
            last = _host(_params(state, side))
            moved[side] = np.concatenate(
                [(a - b).ravel() for a, b in zip(last, first, strict=True)]
            )
    distance = np.linalg.norm(moved["rules"] - moved["hand"])
    apart = distance / np.linalg.norm(moved["hand"])
    assert apart < _TOLERANCE, f"{apart:.2g} of what was trained differs"
    return f"{apart:.1g} of what {_STEPS} steps trained differs; {copies}"


def skips() -> str:
    """Checks that infinity on the last replica skips the step on all of them: no bit of
    the state changes, and the scale is halved.
    """
    step, state, x = _perceptron("rules")
    state, _ = step(state, x)
    before = _by_path(state)
    bad = jax.device_put(np.array(x), x.sharding)
    bad = bad.at[-1, 0].set(jnp.inf)
    state, _ = step(state, jax.device_put(bad, x.sharding))
    copies = _assert_equal_copies(state)
    skipped = _by_path(state)
    scale = "['dynamic_loss_scale']['current_loss_scale']"
    good = "['dynamic_loss_scale']['good_steps']"
    changed = [
        path
        for path, value in before.items()
        if value.tobytes() != skipped[path].tobytes()
    ]
    names = [path[len("[1]") :] for path in changed]
    assert names == [scale, good], f"a skipped step changed {names}"
    halves = {path: before[path] / 2 for path in changed if path.endswith(scale)}
    for path, half in halves.items():
        assert skipped[path] == half, f"the scale is {skipped[path]}, not {half}"
    state, loss = step(state, x)
    after = _by_path(state)
    assert np.isfinite(loss), f"the loss after a skipped step is {loss}"
    trained = [path for path in before if path.startswith("[0]")]
    for path in trained:
        assert (after[path] != skipped[path]).any(), f"{path} does not train again"
    return f"{len(before) - 2} arrays kept their bits; {copies}"


def exact() -> str:
    """Checks that exact sums have the same bits on one device and on all of them, in
    float16 with skipped steps. On one device alone the sums are compared with floats'.
    """
    config = _exact_config()
    count = jax.device_count()
    on_one, skipped = _trained(config, jax.devices()[:1])
    assert 0 < skipped < _STEPS, f"{skipped} steps of {_STEPS} were skipped"
    if count > 1:
        on_all, _ = _trained(config, jax.devices())
        assert on_one.keys() == on_all.keys()
        apart = [
            path
            for path, value in on_one.items()
            if value.tobytes() != on_all[path].tobytes()
        ]
        assert not apart, f"1 and {count} devices differ in {', '.join(apart)}"
        return (
            f"{len(on_one)} arrays have the same bits on 1 and {count} devices; "
            f"{skipped} of {_STEPS} steps were skipped"
        )
    config.reduction.arithmetic = "float"
    by_floats, _ = _trained(config, jax.devices())
    for path, value in on_one.items():
        # Float16 has 11 bits, and Adam's first steps are of the learning rate's size.
        np.testing.assert_allclose(value, by_floats[path], 0.02, 0.02, err_msg=path)
    return "within 0.02 of sums of floats; there is one device, and no other to compare"


def exported(directory: pathlib.Path) -> str:
    """Checks that the `.stablehlo` export of a run predicts as the run's model."""
    trained = xshard.load(directory)
    data = trained.experiment.eval_data()
    batch = {name: np.asarray(array)[:8] for name, array in data.items()}
    ours = trained.predict(batch)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "model.stablehlo"
        export.write(trained, file)
        program = jax_export.deserialize(bytearray(file.read_bytes()))
    taken = {name: batch[name] for name in _read(program)}
    theirs = jax.device_get(program.call(taken))
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    worst = max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs)
    # Two programs; the outputs come from float16, of which 2e-3 are two roundings.
    assert worst < 2e-3, f"the export differs by {worst:.2g} of the largest output"
    return f"differs by at most {worst:.1g} of the largest output of 8 examples"


def _read(program: Any) -> list[str]:
    """Returns the names of the arrays of a batch that an exported prediction takes."""
    (batch,), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
    return list(batch)


def _perceptron(side: str) -> tuple[Any, Any, jax.Array]:
    """Returns the jitted step of a side, its first state and its input."""
    loss, params = models.make(_SIZE, jnp.float32)
    init, local = sides_lib.SIDES[side](loss)
    count = jax.device_count()
    rows = -(-_SIZE.batch // count) * count
    x = jax.random.normal(jax.random.key(1), (rows, _SIZE.width))
    on_all = jax.sharding.NamedSharding(sides_lib.mesh(), jax.P())
    state = jax.jit(lambda: init(params(), x[:1]), out_shardings=on_all)()
    split = jax.sharding.NamedSharding(sides_lib.mesh(), jax.P("replica"))
    return sides_lib.jitted(local), state, jax.device_put(x, split)


def _params(state: Any, side: str) -> Any:
    # By hand, the parameters and Adam's state are one entry.
    return state[0] if side == "rules" else state[0][0]


def _host(tree: Any) -> list[np.ndarray]:
    return [np.array(x) for x in jax.tree.leaves(tree)]


def _by_path(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.array(x) for path, x in leaves}


def _assert_equal_copies(state: Any) -> str:
    """Checks that all devices hold the same bits; returns that as text."""
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        first, *others = [np.asarray(shard.data) for shard in x.addressable_shards]
        for number, other in enumerate(others, 1):
            assert first.tobytes() == other.tobytes(), (
                f"device {number} holds another {jax.tree_util.keystr(path)}"
            )
    count = jax.device_count()
    return "one device" if count == 1 else f"{count} devices hold the same bits"


def _exact_config() -> Any:
    config = toy.get_config()
    config.experiment = "tests.toy.Wide"
    count = jax.device_count()
    config.logical_replicas = count if count > 1 else 4
    config.batch_size = 2 * config.logical_replicas
    config.reduction.arithmetic = "exact"
    config.precision = "params=float32,compute=float16,output=float32"
    # Some batches have a larger number, and their loss is infinite.
    config.overflow_above = 2.2
    config.examples = max(50, 4 * config.batch_size)
    return config


def _trained(config: Any, devices: Any) -> tuple[dict[str, np.ndarray], int]:
    """Returns the state after some steps on some devices, and how many steps were
    skipped.
    """
    made = experiment_lib.load(config.experiment)(config)
    mesh = experiment_lib.mesh_of(config, devices)
    batches = preflight.train_batches(made, mesh)
    step = preflight.jitted_step(made, mesh)
    state = state_lib.init(made, mesh, 0, batches.example)
    skipped = 0
    for _ in range(_STEPS):
        before = _by_path(state.experiment)
        state = step(state, next(batches)).state
        after = _by_path(state.experiment)
        skipped += all(
            after[path].tobytes() == value.tobytes()
            for path, value in before.items()
            if "linear" in path and path.endswith("['w']")
        )
    return _by_path(state.experiment), skipped


_CHECKS = {"rules": rules, "skips": skips, "exact": exact}


def main(argv: list[str]) -> None:
    """Runs the check that the arguments name."""
    _, name = argv
    is_exact = name == "exact"
    # The number of logical replicas needs the number of devices, which these set up.
    config = {
        "logical_replicas": _DEVICES.value,
        "reduction": {"arithmetic": "exact" if is_exact else "float"},
    }
    origin.set_up_backends(config, _DEVICES.value)
    if name == "export":
        print(exported(pathlib.Path(_RUN.value)))
    else:
        print(_CHECKS[name]())


if __name__ == "__main__":
    app.run(main)
