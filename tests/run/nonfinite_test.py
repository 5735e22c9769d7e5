"""Steps and states that are not finite: what a run does about them, and what it leaves."""

import dataclasses
import json
import math
import types

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xshard
from tests import rows, toy
from tests.optimizers import harness
from xshard import checkpoint, loop, mesh, step
from xshard import experiment as experiment_lib
from xshard import state as state_lib
from xshard.data import batches
from xshard.learners import state as learner_state
from xshard.metrics import show
from xshard.optimizers import inspection, phases
from xshard.pod import notice
from xshard.run import nonfinite

pytestmark = pytest.mark.usefixtures("shared_programs")

HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))
PARAMS = ["mlp/~/linear_0/b", "mlp/~/linear_0/w", "mlp/~/linear_1/b", "mlp/~/linear_1/w"]


def make_config(**changes):
    """Eight steps of which each even one is saved; the fifth is not finite."""
    config = toy.get_config()
    config.update({"experiment": "tests.toy.Poisoned", "steps": 8, "poisoned": ((0, 5),)})
    config.update({"log_every_steps": 1, "writers": ("jsonl",), "eval_every_steps": 100})
    config.checkpoint.update({"every_steps": 2, "keep_last": 1})
    config.reduction.shard_update = changes.pop("shard_update", False)
    config.group_assignment = changes.pop("group_assignment", ())
    config.update(changes)
    return config.lock()


def results_of(directory):
    return json.loads((directory / "results.json").read_text())


def saved(directory):
    """The checkpoints' steps, and what is said of each."""
    entries = checkpoint.read_catalog(directory / "checkpoints").entries
    return {entry.step: entry.state for entry in entries}


@pytest.mark.parametrize("shard_update", [False, True])
@pytest.mark.parametrize("loss_scale", ["none", "fixed"])
def test_stop_ends_the_run_and_keeps_what_is_finite(tmp_path, capsys, loss_scale, shard_update):
    config = make_config(loss_scale=loss_scale, shard_update=shard_update)
    assert loop.run(config, str(tmp_path), "") == notice.NONFINITE
    said = capsys.readouterr().err
    assert "error: step 5: the loss is nan, and 4 of 4 gradients are not finite: mlp/" in said
    assert "Check the learning rate" in said
    assert f"newest checkpoint of finite parameters is step 4, in {tmp_path}" in said
    assert saved(tmp_path) == {4: "complete"}
    results = results_of(tmp_path)
    assert results["finite"] is False and results["why"].startswith("step 5: the loss is nan")
    # Once more: it is as it was, and ends so again.
    assert loop.run(config, str(tmp_path), "") == notice.NONFINITE
    assert "resumed from the checkpoint of step 4" in capsys.readouterr().out


def test_what_a_dynamic_scale_skips_is_none_of_it(tmp_path, capsys):
    for shard_update in (False, True):
        directory = tmp_path / str(shard_update)
        config = make_config(loss_scale="dynamic", shard_update=shard_update, max_skips_in_a_row=1)
        assert loop.run(config, str(directory), "") == 0
        assert results_of(directory)["finite"] is True and results_of(directory)["why"] == ""
        trained = [row for row in rows.read(directory) if "loss" in row]
        assert trained[-1]["skipped"] == 1
    assert "finite" not in capsys.readouterr().err


@pytest.mark.parametrize("shard_update", [False, True])
@pytest.mark.parametrize("loss_scale", ["none", "fixed"])
def test_skip_leaves_every_leaf_as_it_was(tmp_path, loss_scale, shard_update):
    config = make_config(
        on_nonfinite="skip", loss_scale=loss_scale, shard_update=shard_update, steps=5
    )
    with config.unlocked():
        config.checkpoint.update({"every_steps": 1, "keep_last": 2})
    assert loop.run(config, str(tmp_path), "") == 0
    run = loop.Run(config, str(tmp_path))
    before, after = (run.checkpoints.manager.restore(run._target, n).state for n in (4, 5))
    harness.assert_equal(dataclasses.replace(after, step=0), dataclasses.replace(before, step=0))
    assert int(after.step) == 5 and int(after.experiment.global_step) == 4
    assert results_of(tmp_path)["finite"] is True


@pytest.mark.parametrize("shard_update", [False, True])
def test_warn_goes_on_says_so_once_and_does_not_end_well(tmp_path, capsys, shard_update):
    config = make_config(on_nonfinite="warn", shard_update=shard_update)
    for _ in range(2):
        # The second time there is nothing left to train, and it is not done either.
        assert loop.run(config, str(tmp_path), "") == notice.NONFINITE
        captured = capsys.readouterr()
        assert "error: step 8: the resulting state is not finite: params/mlp" in captured.err
        results = results_of(tmp_path)
        assert results["step"] == 8 and results["finite"] is False
        # The newest of finite parameters outlives the rule that keeps one.
        assert saved(tmp_path) == {4: "complete", 8: "not finite"}
    assert captured.out.count("the run continues, because on_nonfinite=warn") == 0
    stopped = make_config(shard_update=shard_update)
    with pytest.raises(ValueError, match=r"checkpoint of step 8 in .* is not finite") as e:
        loop.run(stopped, str(tmp_path), "")
    (command,) = [line for line in str(e.value).split(": ") if line.startswith("python -m")]
    assert command.startswith(f"python -m xshard.checkpoint rm {tmp_path}/checkpoints 8.")


def test_a_step_is_looked_at_before_it_is_saved(tmp_path, capsys):
    # The last one, which no later one follows.
    assert loop.run(make_config(poisoned=((0, 8),)), str(tmp_path), "") == notice.NONFINITE
    assert "error: step 8: the loss is nan, and 4 of 4 gradients" in capsys.readouterr().err
    assert saved(tmp_path) == {6: "complete"}


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_last_update_that_leaves_what_is_not_finite(tmp_path, capsys, policy):
    config = make_config(experiment="tests.toy.Overflowing", on_nonfinite=policy, overflow_at=8)
    assert loop.run(config, str(tmp_path), "") == notice.NONFINITE
    assert (
        "error: step 8: the resulting state is not finite: params/linear/"
        in capsys.readouterr().err
    )
    assert saved(tmp_path) == {6: "complete"} and results_of(tmp_path)["finite"] is False


def test_a_checkpoint_in_between_that_is_not_finite(tmp_path, capsys):
    # The loss of the step after it is not finite either, but the save may be heard of first.
    config = make_config(experiment="tests.toy.Overflowing", overflow_at=4)
    assert loop.run(config, str(tmp_path), "") == notice.NONFINITE
    assert saved(tmp_path) == {2: "complete"} and "error: step " in capsys.readouterr().err


def test_one_group_of_several(tmp_path, capsys):
    config = make_config(group_assignment=HALVES, poisoned=((1, 5),))
    assert loop.run(config, str(tmp_path), "") == notice.NONFINITE
    said = capsys.readouterr().err
    assert "error: step 5: in group 1 of 2 the loss is nan, and 4 of 4 gradients" in said
    skipping = make_config(group_assignment=HALVES, poisoned=((1, 5),), on_nonfinite="skip")
    assert loop.run(skipping, str(tmp_path), "") == 0
    assert results_of(tmp_path)["global_step"] == [8, 7]


def test_so_many_skips_in_a_row_end_the_run(tmp_path, capsys):
    poisoned = tuple((0, number) for number in range(3, 9))
    config = make_config(on_nonfinite="skip", poisoned=poisoned, max_skips_in_a_row=3)
    assert loop.run(config, str(tmp_path), "") == notice.NONFINITE
    said = capsys.readouterr().err
    assert "error: 3 steps in a row were skipped" in said and "the last, step 5: the loss" in said
    assert saved(tmp_path) == {4: "complete"}


class Poison(toy.Toy):
    """Of which no gradient is a number, whatever the scale."""

    def loss(self, outputs, batch):
        return jnp.nan * jnp.mean(outputs), {}


def test_a_dynamic_scale_at_its_minimum(tmp_path, capsys):
    config = make_config(
        experiment="tests.run.nonfinite_test.Poison",
        steps=40,
        max_skips_in_a_row=8,
        log_every_steps=20,
    )
    assert loop.run(config, str(tmp_path), "") == notice.NONFINITE
    # Of 15 that come before, each has lowered the scale from 2**15.
    assert "8 steps in a row were skipped without lowering a loss scale" in capsys.readouterr().err
    assert results_of(tmp_path)["why"].count("step 23: the loss is nan") == 1
    # A run that ends before it has tried so long has not ended well either, however often it is looked at.
    short = make_config(experiment="tests.run.nonfinite_test.Poison", steps=30, log_every_steps=20)
    for _ in range(2):
        assert loop.run(short, str(tmp_path / "short"), "") == notice.NONFINITE
        assert "15 steps in a row were skipped" in results_of(tmp_path / "short")["why"]


def test_a_failure_is_forgotten_when_the_run_goes_on(tmp_path):
    assert loop.run(make_config(), str(tmp_path), "") == notice.NONFINITE
    assert loop.run(make_config(on_nonfinite="skip"), str(tmp_path), "") == 0
    assert results_of(tmp_path)["finite"] is True


def test_a_directory_of_before_the_keys_goes_on(tmp_path):
    assert loop.run(make_config(steps=4), str(tmp_path), "") == 0
    file = tmp_path / "config.json"
    old = json.loads(file.read_text())
    for key in ("on_nonfinite", "max_skips_in_a_row"):
        del old[key]
    file.write_text(json.dumps(old))
    assert loop.run(make_config(on_nonfinite="skip"), str(tmp_path), "") == 0


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"on_nonfinite": "ignore"}, "on_nonfinite='ignore' must be 'stop'; 'skip'"),
        ({"max_skips_in_a_row": 0}, "max_skips_in_a_row=0 must be an integer of at least 1"),
    ],
)
def test_values_out_of_range(tmp_path, changes, match):
    with pytest.raises(ValueError, match=match):
        loop.Run(make_config(**changes), str(tmp_path))


def test_a_config_without_the_keys(tmp_path):
    config = make_config()
    with config.unlocked():
        del config.on_nonfinite
    with pytest.raises(ValueError, match="The config lacks on_nonfinite: begin with"):
        loop.Run(config, str(tmp_path))


def observe(config, devices=2):
    """What the first step says of itself."""
    made = experiment_lib.load(config.experiment)(config)
    the_mesh = mesh.make_mesh(devices=jax.devices()[:devices])
    train = batches.TrainBatches(made.train_batches, the_mesh, batch_size=16, seed=0)
    state = state_lib.init(made, the_mesh, 0, train.example)
    apply = jax.jit(step.make_watched_step(made, the_mesh))
    return jax.device_get(apply(state, next(train))[2][""])


class OneLayer(toy.Poisoned):
    """Trains its last layer only; the loss is finite, and the gradient of that layer's weights is not."""

    def loss(self, outputs, batch):
        return jnp.mean(jnp.sqrt(jnp.abs(outputs * 0.0))), {}

    def clip_gradients(self, grads):
        return {
            module: {name: grad if "linear_1" in module else None for name, grad in one.items()}
            for module, one in grads.items()
        }


@pytest.mark.parametrize("shard_update", [False, True])
def test_gradients_that_are_not_finite_where_the_loss_is(shard_update):
    config = make_config(
        experiment="tests.run.nonfinite_test.OneLayer", poisoned=(), shard_update=shard_update
    )
    observed = observe(config)
    assert observed.verdict == nonfinite.TROUBLE and observed.loss == 0
    # What is not trained has no gradient, and none that is not finite.
    assert observed.gradients.tolist() == [False, False, True, True]


class OneElement(toy.Poisoned):
    """A last element that is not a number, in the gradient of one array."""

    def clip_gradients(self, grads):
        last = "mlp/~/linear_0"
        return {**grads, last: {**grads[last], "w": grads[last]["w"].at[-1, -1].set(jnp.nan)}}


class Apart(toy.Poisoned):
    """A loss that is infinite where its gradients are not."""

    def loss(self, outputs, batch):
        loss, metrics = super().loss(outputs, batch)
        return loss + jnp.inf, metrics


@pytest.mark.parametrize("shard_update", [False, True])
@pytest.mark.parametrize(
    "name, bad", [("OneElement", [False, True, False, False]), ("Apart", [False] * 4)]
)
def test_one_element_or_the_loss_alone(name, bad, shard_update):
    config = make_config(
        experiment=f"tests.run.nonfinite_test.{name}", poisoned=(), shard_update=shard_update
    )
    observed = observe(config)
    assert observed.verdict == nonfinite.TROUBLE and observed.gradients.tolist() == bad


@pytest.mark.parametrize("shard_update", [False, True])
@pytest.mark.parametrize(
    "changes, skip, verdict",
    [
        ({}, False, nonfinite.TROUBLE),
        ({}, True, nonfinite.STUCK),
        ({"loss_scale": "fixed"}, False, nonfinite.TROUBLE),
        ({"loss_scale": "fixed"}, True, nonfinite.STUCK),
        ({"loss_scale": "dynamic"}, False, nonfinite.FINE),
        ({"poisoned": ()}, True, nonfinite.FINE),
        ({"micro_batches": 2}, True, nonfinite.STUCK),
    ],
    ids=str,
)
def test_what_a_step_says_of_itself(changes, skip, verdict, shard_update):
    changes = {"poisoned": ((0, 1),), **changes}
    config = make_config(shard_update=shard_update, **changes)
    config.on_nonfinite = "skip" if skip else "stop"
    observed = observe(config)
    assert observed.verdict == verdict
    assert observed.gradients.tolist() == [bool(config.poisoned)] * 4


def test_gradients_of_any_type_are_counted():
    nan, inf = jnp.nan, jnp.inf
    grads = {
        "m": {
            "complex": jnp.array([1j, complex(0, nan), complex(inf, 0)], jnp.complex64),
            "large": jnp.full(3, 3e38),
            "half": jnp.array([inf, 1.0], jnp.float16),
            "none": None,
            "scalar": jnp.asarray(-inf, jnp.bfloat16),
        }
    }
    applied = phases.Applied({}, True, None, grads, {}, None)
    counted = dict(
        zip(sorted(grads["m"]), inspection.count_nonfinite(applied).tolist(), strict=True)
    )
    assert counted == {"complex": 2, "half": 1, "large": 0, "none": 0, "scalar": 1}


class OwnApply(xshard.CrossShardOptimizer):
    """Applies in a way of its own."""

    def apply_gradients(self, grads, params, global_step=None, name=None):
        return super().apply_gradients(grads, params, global_step, name)


class Own(toy.Toy):
    def optimizer(self):
        return OwnApply(optax.sgd(0.1))


def test_a_rule_that_could_not_be_made_to_skip_is_refused():
    config = make_config(experiment="tests.run.nonfinite_test.Own")
    assert observe(config).verdict == nonfinite.FINE
    config.on_nonfinite = "skip"
    with pytest.raises(ValueError, match="'skip' cannot be used with OwnApply"):
        observe(config)


def test_skipping_adds_no_state():
    config = make_config(loss_scale="dynamic")
    the_mesh = mesh.make_mesh(devices=jax.devices()[:1])
    states = []
    for policy in ("stop", "skip"):
        config.on_nonfinite = policy
        made = experiment_lib.load(config.experiment)(config)
        states.append(state_lib.abstract_state(made, the_mesh, 0, made.train_data()))
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])


def watch(policy="warn", patience=100):
    config = types.SimpleNamespace(on_nonfinite=policy, max_skips_in_a_row=patience)
    the_mesh, said = mesh.make_mesh(devices=jax.devices()[:1]), []
    params = {"m": {"w": 0, "b": 0}}
    learners = {"": learner_state.LearnerState(params, {}, {}, 0)}
    return nonfinite.Watch(config, the_mesh, learners, said.append), said


def push_one(watching, number, verdict):
    loss = math.inf if verdict == nonfinite.TROUBLE else 1.0
    observed = (jnp.int32(verdict), jnp.float32(loss), jnp.array([False, True]))
    watching.push(number, {"": learner_state.Observed(*observed)})


def push(watching, verdicts, first=1):
    """Pushes steps, and has each looked at before the next."""
    for number, verdict in enumerate(verdicts, first):
        push_one(watching, number, verdict)
        watching.flush()


F, S, T = nonfinite.FINE, nonfinite.STUCK, nonfinite.TROUBLE


def test_a_stretch_is_said_once_and_its_end():
    watching, said = watch()
    push(watching, [F, T, T, S, T, F, F, T])
    assert said == [
        "step 2: the loss is inf, and 1 of 2 gradients are not finite: m/w; the run continues, because on_nonfinite=warn",
        "step 6: finite again (not finite since step 2)",
        "step 8: the loss is inf, and 1 of 2 gradients are not finite: m/w; the run continues, because on_nonfinite=warn",
    ]
    assert watching.at_end().startswith("step 8: the loss is inf")
    push(watching, [F], 9)
    assert watching.at_end() == ""


def test_stretches_without_end_are_not_said_without_end():
    watching, said = watch()
    push(watching, [T, F] * 50)
    assert len(said) == 20 and said[-2].endswith("later ones are not reported")


def test_a_step_is_looked_at_when_later_ones_have_been_dispatched():
    watching, _ = watch("stop")
    push_one(watching, 1, T)
    push_one(watching, 2, F)
    with pytest.raises(nonfinite.NonfiniteError, match="^step 1: "):
        push_one(watching, 3, F)
    watching, _ = watch("stop")
    push_one(watching, 1, F)
    push_one(watching, 2, T)
    with pytest.raises(nonfinite.NonfiniteError, match="^step 2: "):
        watching.flush()


def test_skips_in_a_row_are_counted_anew_after_one_that_helped():
    watching, _ = watch("stop", patience=3)
    push(watching, [S, S, F, S, S])
    with pytest.raises(nonfinite.NonfiniteError, match="3 steps in a row .* the last, step 6: "):
        push(watching, [S], 6)


def test_of_many_gradients_the_first_are_named():
    assert show.listed([str(i) for i in range(10)]) == "0, 1, 2, 3, 4, 5, 6, 7, and 2 more"


def test_network_state_of_a_step_that_is_skipped(tmp_path):
    class Counting(toy.Poisoned):
        """Keeps an average of what it sees."""

        def forward(self, batch, *, is_training):
            mean = hk.get_state("mean", [], jnp.float32, jnp.zeros)
            hk.set_state("mean", mean + jnp.mean(batch["y"]))
            return super().forward(batch, is_training=is_training)

    config = make_config(poisoned=((0, 1),), on_nonfinite="skip")
    the_mesh = mesh.make_mesh(devices=jax.devices()[:2])
    made = Counting(config)
    train = batches.TrainBatches(made.train_batches, the_mesh, batch_size=16, seed=0)
    state = state_lib.init(made, the_mesh, 0, train.example)
    apply = jax.jit(step.make_watched_step(made, the_mesh))
    after = apply(state, next(train))[0]
    np.testing.assert_array_equal(after.experiment.net_state["~"]["mean"], 0)
