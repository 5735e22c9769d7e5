"""One trajectory: the same bits on any number of devices."""

import hashlib
import json

import jax
import numpy as np
import pytest

from tests import carried, quantized, toy
from xshard import errors, evaluation, loop
from xshard import experiment as experiment_lib
from xshard import state as state_lib
from xshard.run import preflight

_STEPS = 6
_COUNT = 4
_HALF = "params=float32,compute=float16,output=float32"


def config(**changes):
    made = toy.get_config()
    made.experiment = changes.pop("experiment", "tests.toy.Wide")
    made.logical_replicas = _COUNT
    made.reduction.arithmetic = changes.pop("arithmetic", "exact")
    # In some steps, which a dynamic scale skips.
    made.overflow_above = 1.98
    made.group_assignment = changes.pop("group_assignment", ())
    made.update(changes)
    return made.lock()


def digest(tree):
    raw = lambda x: (
        jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    )
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        found.update(np.asarray(raw(leaf)).tobytes())
    return found.hexdigest()


def trajectory(devices, of=None, **changes):
    """Checksums of all states, of what the steps log, and of an evaluation, of so many devices; and the skips."""
    of = of or config(**changes)
    experiment = experiment_lib.load(of.experiment)(of)
    mesh = experiment_lib.mesh_of(of, jax.devices()[:devices])
    batches = preflight.train_batches(experiment, mesh)
    step = preflight.jitted_step(experiment, mesh)
    state = state_lib.init(experiment, mesh, of.seed, batches.example)
    states, logged, skips = [digest(state)], [], 0
    for _ in range(_STEPS):
        state, metrics, _, begun = step(state, next(batches))
        states.append(digest(state))
        logged.append(digest((metrics, begun.values)))
        skips += int(np.sum(metrics.get("skipped", 0)))
    values = evaluation.Evaluation(experiment, mesh, of.eval_batch_size)(state)
    return states, logged, values, skips


@pytest.mark.parametrize(
    "changes, devices",
    [
        ({"experiment": "tests.toy.Toy"}, (1, 2, 3, 4, 5)),
        ({"precision": _HALF, "micro_batches": 2}, (1, 3, 8)),
    ],
    ids=str,
)
def test_the_bits_do_not_depend_on_the_devices(changes, devices):
    first, *others = [trajectory(count, **changes) for count in devices]
    assert 0 < first[-1] < _STEPS
    for other in others:
        assert other == first


def test_an_exchange_may_depend_on_another():
    # The codes are averaged over the replicas, and then the gradients.
    of = quantized.get_config()
    of.logical_replicas, of.reduction.arithmetic = _COUNT, "exact"
    with jax.numpy_dtype_promotion("standard"):
        assert trajectory(3, of) == trajectory(1, of)


def test_slices_are_devices_like_others():
    assert trajectory(4, slices=2) == trajectory(1)


def test_groups_have_replicas_of_their_own():
    halves = ((0, 1), (2, 3))
    assert trajectory(2, group_assignment=((0,), (1,))) == trajectory(4, group_assignment=halves)


def test_floating_point_sums_differ_by_rounding_alone():
    def end(devices, arithmetic):
        of = config(arithmetic=arithmetic)
        experiment = experiment_lib.load(of.experiment)(of)
        mesh = experiment_lib.mesh_of(of, jax.devices()[:devices])
        batches = preflight.train_batches(experiment, mesh)
        step = preflight.jitted_step(experiment, mesh)
        state = state_lib.init(experiment, mesh, of.seed, batches.example)
        for _ in range(_STEPS):
            state = step(state, next(batches)).state
        return state.experiment.params

    exact = end(1, "exact")
    for devices in (1, 3):
        # Sums in another order, over six steps of Adam.
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
            end(devices, "float"),
            exact,
        )


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"logical_replicas": 0}, "--config.logical_replicas=8"),
        ({"model_parallel": 2}, "model_parallel=2"),
        ({"logical_replicas": 3}, "batch_size=16 must be a positive multiple of replicas"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_anything_is_made(tmp_path, changes, words):
    with pytest.raises(errors.UserError, match=words):
        loop.Run(config(**changes), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_state_of_a_replicas_own_is_refused(tmp_path):
    made = carried.get_config()
    made.logical_replicas = _COUNT
    with pytest.raises(errors.UserError, match="xshard.PerExample.*Set logical_replicas to 0"):
        loop.Run(made, str(tmp_path / "run"))


@pytest.mark.parametrize("key", ["shard_update", "shard_params"])
def test_exact_sums_are_of_whole_arrays(tmp_path, key):
    made = config().copy_and_resolve_references()
    made.unlock()
    made.reduction[key] = True
    with pytest.raises(errors.UserError, match=f"{key}=True cannot be used with.*exact"):
        loop.Run(made, str(tmp_path / "run"))


@pytest.mark.parametrize("name", ["chip", "libraries", "flags"])
def test_a_run_goes_on_only_where_its_bits_are_the_same(tmp_path, name):
    made = config(steps=1)
    run = loop.Run(made, str(tmp_path))
    with run.opened():
        run.complete()
    origin = json.loads((tmp_path / "origin.json").read_text())
    (tmp_path / "origin.json").write_text(json.dumps({**origin, name: "another"}))
    with pytest.raises(errors.UserError, match=f"its {name} was another; .*arithmetic=float"):
        loop.Run(made, str(tmp_path))
    loop.Run(config(steps=1, arithmetic="float"), str(tmp_path))
