"""Tests that a run with exact sums computes the same bits on any number of devices."""

import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xshard
from configs import rl
from tests import quantized, rows, toy
from tests.logical import members
from xshard import errors, loop
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard.logical import comparison
from xshard.run import evaluation, preflight
from xshard.training import state as state_lib

_STEPS = 6
_COUNT = 4
_HALF = "params=float32,compute=float16,output=float32"
_OWN = "tests.logical.trajectory_test.Own"


class Own(toy.Wide):
    """An experiment with a key and a sum for each replica, and a sum for each example;
    its evaluation uses the sums.
    """

    def init(self, key, batch):
        shown = xshard.PerExample({"sum": jnp.zeros_like(batch["y"])})
        return {
            "line": super().init(key, batch),
            "shown": shown,
            "drawn": self._drawn(key, 0.0),
        }

    def _drawn(self, key, total):
        key = jax.random.fold_in(key, jax.lax.axis_index(("slice", "replica")))
        return xshard.PerReplica({"key": key, "sum": jnp.asarray(total)})

    def train_step(self, state, batch, key):
        line, outcome = super().train_step(state["line"], batch, key)
        old = state["drawn"].value
        # The sum combines parameters, which the replicas have combined, with the
        # replica's own random key.
        total = old["sum"] + jnp.sum(
            line.params["mlp/~/linear_0"]["w"]
        ) * jax.random.uniform(key)
        shown = xshard.PerExample(
            {"sum": state["shown"].value["sum"] + jnp.sin(batch["y"])}
        )
        new = {"line": line, "shown": shown, "drawn": self._drawn(old["key"], total)}
        return new, {"line": outcome, "total": total}

    def eval_step(self, state, batch, key):
        values = super().eval_step(state["line"], batch, key)
        own = state["drawn"].value["sum"] + jnp.mean(state["shown"].value["sum"])
        return {**values, "own": jnp.full_like(batch["y"], own)}

    def predict(self, state, batch):
        outputs = super().predict(state["line"], batch)
        own = jax.lax.pmean(state["drawn"].value["sum"], ("slice", "replica"))
        return outputs + own if self.config.reads else outputs


class Clipped(toy.Averaged):
    """An experiment whose rule clips by the norm of all gradients, and which is
    evaluated on moving averages.
    """

    def optimizer(self):
        rate = self.config.optimizer.learning_rate
        rule = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(rate))
        opt = xshard.OptaxOptimizer(rule, name="adam")
        opt = xshard.CrossShardOptimizer(
            opt, slice_axis_name="slice", **self.config.reduction
        )
        opt = xshard.MixedPrecisionLossScaleOptimizer(
            opt, xshard.DynamicLossScale(increment_period=3)
        )
        return xshard.MovingAverageOptimizer(opt, 0.5)


class Contrasting(toy.Wide):
    """An experiment whose loss depends on the outputs of all replicas."""

    def loss(self, outputs, batch):
        value, logged = super().loss(outputs, batch)
        return value + jnp.var(
            jax.lax.all_gather(outputs, ("slice", "replica"))
        ), logged


def config(**changes):
    run_config = toy.get_config()
    run_config.experiment = changes.pop("experiment", "tests.toy.Wide")
    run_config.logical_replicas = _COUNT
    run_config.reduction.arithmetic = changes.pop("arithmetic", "exact")
    # Some steps overflow, and a dynamic loss scale skips them.
    run_config.overflow_above = 1.98
    run_config.group_assignment = changes.pop("group_assignment", ())
    run_config.update(changes)
    return run_config.lock()


def digest(tree):
    raw = lambda x: (
        jax.random.key_data(x)
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        else x
    )
    checksum = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        checksum.update(np.asarray(raw(leaf)).tobytes())
    return checksum.hexdigest()


def trajectory(devices, of=None, *, exchange=None, **changes):
    """Trains on `devices` devices, of each member if there is an exchange.

    Returns:
      Checksums of all states, checksums of the logged values, the evaluated values, and
      the number of skipped steps.
    """
    of = of or config(**changes)
    experiment = experiment_lib.load(of.experiment)(of)
    mesh = experiment_lib.mesh_of(of, jax.devices()[:devices])
    batches = preflight.train_batches(experiment, mesh)
    step = preflight.jitted_step(experiment, mesh, exchange)
    state = state_lib.init(experiment, mesh, of.seed, batches.example)
    states, logged, skips = [digest(state)], [], 0
    for _ in range(_STEPS):
        stepped = step(state, next(batches))
        state = stepped.state
        states.append(digest(state))
        before = stepped.fingerprints_before
        logged.append(digest((stepped.metrics, before.values)))
        skips += int(np.sum(stepped.metrics.get("skipped", 0)))
    values = evaluation.Evaluation(experiment, mesh, of.eval_batch_size)(state)
    return states, logged, values, skips


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "changes, devices",
    [
        ({"experiment": "tests.toy.Toy"}, (1, 2, 3, 4, 5)),
        ({"precision": _HALF, "micro_batches": 2}, (1, 3, 8)),
        ({"experiment": "tests.logical.trajectory_test.Contrasting"}, (1, 3)),
    ],
    ids=str,
)
def test_the_bits_do_not_depend_on_the_devices(changes, devices):
    first, *others = [trajectory(count, **changes) for count in devices]
    assert 0 < first[-1] < _STEPS
    for other in others:
        assert other == first


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [5, 8])
def test_the_bits_do_not_depend_on_the_members_of_a_run(count):
    changes = {
        "precision": _HALF,
        "micro_batches": 2,
        "logical_replicas": count,
        "batch_size": 4 * count,
        "eval_batch_size": 2 * count,
    }
    expected = trajectory(1, **changes)
    assert 0 < expected[-1] < _STEPS
    for number, devices in ((1, 1), (2, 1), (3, 2), (4, 1)):
        exchange = members.Members(number)
        assert trajectory(devices, exchange=exchange, **changes) == expected
        assert len(exchange.calls) % _STEPS == 0 < len(exchange.calls)


@pytest.mark.parametrize("name", ["Contrasting", "Clipped"])
def test_members_combine_what_a_network_gathers_and_a_rule_clips(name):
    changes = {"experiment": f"tests.logical.trajectory_test.{name}"}
    shared = trajectory(1, exchange=members.Members(3), **changes)
    assert shared == trajectory(1, **changes)


def test_state_of_each_replica_is_refused_in_a_run_of_members():
    with pytest.raises(errors.UserError, match="arrays of which each replica has its"):
        trajectory(1, exchange=members.Members(2), experiment=_OWN, reads=False)


@pytest.mark.sample(3, of="steps")
@pytest.mark.parametrize(
    "changes, places",
    [
        (
            {},
            [
                {"devices": 1},
                {"devices": 2},
                {"devices": 4, "slices": 2},
                {"devices": 8},
            ],
        ),
        (
            {
                "precision": _HALF,
                "micro_batches": 2,
                "hidden": 16,
                "logical_replicas": 4,
            },
            [{"devices": 4}, {"devices": 2}],
        ),
        (
            {"logical_replicas": 2},
            [
                {"devices": 2, "group_assignment": ((0,), (1,))},
                {"devices": 4, "group_assignment": ((0, 1), (2, 3))},
            ],
        ),
    ],
    ids=["whole", "half", "groups"],
)
def test_a_rule_with_norms_does_not_depend_on_the_devices(changes, places):
    clipped = {
        "experiment": "tests.logical.trajectory_test.Clipped",
        "logical_replicas": 8,
        "hidden": 10,
        "fingerprint_every_steps": 2,
    }
    first, *others = [trajectory(**{**clipped, **changes, **place}) for place in places]
    assert 0 < first[-1] < 2 * _STEPS
    for other in others:
        assert other == first


def test_only_collectives_communicate_between_devices():
    of = config(logical_replicas=8, fingerprint_every_steps=2)
    experiment = experiment_lib.load(of.experiment)(of)
    mesh = experiment_lib.mesh_of(of, jax.devices()[:2])
    batches = preflight.train_batches(experiment, mesh)
    state = state_lib.abstract_state(experiment, mesh, of.seed, batches.example)
    stages = (
        preflight.jitted_step(experiment, mesh).lower(state, batches.shapes()).stages
    )
    names = ("all_reduce", "reduce_scatter", "all_gather")
    crosses = [
        any(name in stage.program.as_text() for name in names) for stage in stages
    ]
    # Each device computes four of the eight replicas before each collective, and only a
    # collective crosses devices.
    assert [stage.times for stage in stages if stage.times > 1] == [4] * sum(crosses)
    assert sum(crosses) >= 1


@pytest.mark.sample(3, of="steps")
def test_a_collective_may_depend_on_another():
    # The codes are averaged over the replicas, and then the gradients.
    of = quantized.get_config()
    of.logical_replicas, of.reduction.arithmetic = _COUNT, "exact"
    with jax.numpy_dtype_promotion("standard"):
        assert trajectory(3, of) == trajectory(1, of)


@pytest.mark.sample(3, of="steps")
def test_per_replica_state_does_not_depend_on_the_devices():
    changes = {"experiment": _OWN, "reads": False, "fingerprint_every_steps": 2}
    first, *others = [trajectory(devices, **changes) for devices in (1, 2, 4)]
    assert others == [first, first]
    # With floating-point sums the values agree within rounding.
    values = trajectory(2, arithmetic="float", **changes)[2]
    assert values == pytest.approx(first[2], rel=1e-3)


@pytest.mark.long
def test_environments_do_not_depend_on_the_devices():
    of = rl.get_config()
    of.logical_replicas, of.reduction.arithmetic = 6, "exact"
    of.update(
        {
            "batch_size": 12,
            "eval_batch_size": 12,
            "eval_games": 12,
            "model": {"hidden": (8,)},
        }
    )
    with jax.numpy_dtype_promotion("standard"):
        first, *others = [trajectory(devices, of) for devices in (1, 2, 3, 6)]
    assert others == [first] * 3


@pytest.mark.sample(3, of="steps")
def test_slices_do_not_change_the_bits():
    assert trajectory(4, slices=2) == trajectory(1)


@pytest.mark.sample(3, of="steps")
def test_groups_do_not_depend_on_the_devices():
    halves = ((0, 1), (2, 3))
    assert trajectory(2, group_assignment=((0,), (1,))) == trajectory(
        4, group_assignment=halves
    )


@pytest.mark.long
def test_per_replica_state_of_groups_does_not_depend_on_the_devices():
    halves, own = ((0, 1), (2, 3)), {"experiment": _OWN, "reads": False}
    alone = trajectory(2, group_assignment=((0,), (1,)), **own)
    assert alone == trajectory(4, group_assignment=halves, **own)


@pytest.mark.sample(3, of="steps")
def test_floating_point_sums_differ_only_by_rounding():
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
        # The tolerances allow for another order of summation in six steps of Adam.
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
        (
            {"logical_replicas": 3},
            "batch_size=16 must be a positive multiple of replicas",
        ),
    ],
    ids=str,
)
def test_an_impossible_config_is_refused_before_a_run_is_created(
    tmp_path, changes, words
):
    with pytest.raises(errors.UserError, match=words):
        loop.Run(config(**changes), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.fixture
def use_devices(monkeypatch):
    """A function that sets the number of devices that runs use."""

    def take(count):
        of = lambda config: mesh_lib.make_mesh(
            config.group_assignment or None, devices=jax.devices()[:count]
        )
        monkeypatch.setattr(experiment_lib, "mesh_of", of)

    return take


@pytest.mark.sample(1, of="resumes")
def test_per_replica_state_resumes_on_other_numbers_of_devices(tmp_path, use_devices):
    def run(name, *devices):
        directory = tmp_path / name
        for i, count in enumerate(devices, 1):
            use_devices(count)
            of = config(experiment=_OWN, steps=_STEPS * i // len(devices), reads=False)
            assert loop.run(of, str(directory), "") == 0
        end = loop.Run(of, str(directory))
        state = end.checkpoints.manager.restore(end.target).state
        assert state.experiment["drawn"].value["sum"].shape == (_COUNT,)
        return digest(state), rows.results(directory)["eval"]["own"]

    assert run("moved", 4, 2, 1) == run("stayed", 2)


def test_state_that_differs_by_replica_needs_even_shares_of_devices(
    tmp_path, use_devices
):
    use_devices(3)
    match = r"drawn/.*differs between replicas.*one of \[1, 2, 4\]"
    with pytest.raises(errors.UserError, match=match):
        loop.Run(config(experiment=_OWN), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_predict_may_not_read_per_replica_state_on_shared_devices(
    tmp_path, use_devices
):
    use_devices(2)
    run_config = config(experiment=_OWN, reads=True)
    with pytest.raises(
        errors.UserError, match="Own.predict .* reads the state 'drawn/sum'"
    ):
        loop.Run(run_config, str(tmp_path / "run"))


@pytest.mark.parametrize("key", ["shard_update", "shard_params"])
@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_logical_replicas_cannot_be_used_with_shards(tmp_path, key, arithmetic):
    run_config = config(arithmetic=arithmetic).copy_and_resolve_references()
    run_config.unlock()
    run_config.reduction[key] = True
    match = f"reduction.{key}=True cannot be used with logical_replicas"
    with pytest.raises(errors.UserError, match=match):
        loop.Run(run_config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["chip", "libraries", "flags"])
def test_an_exact_run_resumes_only_where_its_bits_stay_the_same(tmp_path, name):
    run_config = config(steps=1)
    run = loop.Run(run_config, str(tmp_path))
    with run.opened():
        run.complete()
    origin = json.loads((tmp_path / "origin.json").read_text())
    (tmp_path / "origin.json").write_text(json.dumps({**origin, name: "another"}))
    with pytest.raises(
        errors.UserError, match=f"Its {name} changed from another to .*arithmetic=float"
    ):
        loop.Run(run_config, str(tmp_path))
    loop.Run(config(steps=1, arithmetic="float"), str(tmp_path))


@pytest.mark.sample(3, of="steps")
def test_a_run_says_if_one_device_would_compute_other_bits(
    tmp_path, use_devices, capfd, monkeypatch
):
    use_devices(2)
    loop.run(config(steps=2), str(tmp_path / "same"), "")
    assert "other bits" not in capfd.readouterr().out
    real = comparison.Comparison.on_one_device

    def round_otherwise(x):
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.nextafter(x, jnp.inf)
        return x

    def changed(self, part, *args):
        return jax.tree.map(round_otherwise, real(self, part, *args))

    monkeypatch.setattr(comparison.Comparison, "on_one_device", changed)
    loop.run(config(steps=2), str(tmp_path / "other"), "")
    said = capfd.readouterr().out
    assert (
        said.count("XLA computes other bits on one device than on these 2, in part 1")
        == 1
    )
