"""Tests of runs whose steps or states are not finite: what they do and leave."""

import dataclasses
import json
import math
import re
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
from xshard import checkpoint, loop, mesh
from xshard import experiment as experiment_lib
from xshard.base import formatting
from xshard.data import batches
from xshard.learners import state as learner_state
from xshard.metrics import deferred
from xshard.optimizers import inspection, phases
from xshard.pod import exit_codes
from xshard.run import nonfinite
from xshard.training import state as state_lib
from xshard.training import step

pytestmark = pytest.mark.usefixtures("shared_programs")

HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))
PARAMS = [
    "mlp/~/linear_0/b",
    "mlp/~/linear_0/w",
    "mlp/~/linear_1/b",
    "mlp/~/linear_1/w",
]


def make_config(**changes):
    """Returns a config of eight steps, saved every second; the fifth is not finite."""
    config = toy.get_config()
    config.update(
        {"experiment": "tests.toy.Poisoned", "steps": 8, "poisoned": ((0, 5),)}
    )
    config.update(
        {"log_every_steps": 1, "writers": ("jsonl",), "eval_every_steps": 100}
    )
    config.checkpoint.update({"every_steps": 2, "keep_last": 1})
    config.reduction.shard_update = changes.pop("shard_update", False)
    config.group_assignment = changes.pop("group_assignment", ())
    config.update(changes)
    return config.lock()


def results_of(directory):
    return json.loads((directory / "results.json").read_text())


def saved(directory):
    """Returns the states of the checkpoints in the catalog, by step."""
    entries = checkpoint.read_catalog(directory / "checkpoints").entries
    return {entry.step: entry.state for entry in entries}


@pytest.mark.sample(2)
@pytest.mark.parametrize("shard_update", [False, True])
@pytest.mark.parametrize("loss_scale", ["none", "fixed"])
def test_stop_ends_the_run_and_keeps_the_finite_checkpoint(
    tmp_path, capsys, loss_scale, shard_update
):
    config = make_config(loss_scale={"kind": loss_scale}, shard_update=shard_update)
    assert loop.run(config, str(tmp_path), "") == exit_codes.NONFINITE
    messages = capsys.readouterr().err
    assert (
        "error: step 5: the loss is nan, and 4 of 4 gradients are not finite: mlp/"
        in messages
    )
    assert "Check the learning rate" in messages
    assert f"newest finite checkpoint is step 4, in {tmp_path}" in messages
    assert saved(tmp_path) == {4: "complete"}
    results = results_of(tmp_path)
    assert results["finite"] is False
    assert results["why"].startswith("step 5: the loss is nan")
    # A second start resumes from the same checkpoint and ends the same way.
    assert loop.run(config, str(tmp_path), "") == exit_codes.NONFINITE
    assert "resumed from the checkpoint of step 4" in capsys.readouterr().out


@pytest.mark.sample(0.4)
def test_a_step_that_a_dynamic_scale_skips_is_not_in_trouble(tmp_path, capsys):
    for shard_update in (False, True):
        directory = tmp_path / str(shard_update)
        config = make_config(
            loss_scale={"kind": "dynamic"},
            shard_update=shard_update,
            max_skips_in_a_row=1,
        )
        assert loop.run(config, str(directory), "") == 0
        assert results_of(directory)["finite"] is True
        assert results_of(directory)["why"] == ""
        trained = [row for row in rows.read(directory) if "loss" in row]
        assert trained[-1]["skipped"] == 1
    assert "finite" not in capsys.readouterr().err


@pytest.mark.sample(2)
@pytest.mark.parametrize("shard_update", [False, True])
@pytest.mark.parametrize("loss_scale", ["none", "fixed"])
def test_skip_leaves_every_leaf_unchanged(tmp_path, loss_scale, shard_update):
    config = make_config(
        on_nonfinite="skip",
        loss_scale={"kind": loss_scale},
        shard_update=shard_update,
        steps=5,
    )
    with config.unlocked():
        config.checkpoint.update({"every_steps": 1, "keep_last": 2})
    assert loop.run(config, str(tmp_path), "") == 0
    run = loop.Run(config, str(tmp_path))
    before, after = (
        run.checkpoints.manager.restore(run.target, n).state for n in (4, 5)
    )
    harness.assert_equal(
        dataclasses.replace(after, step=0), dataclasses.replace(before, step=0)
    )
    assert int(after.step) == 5 and int(after.experiment.global_step) == 4
    assert results_of(tmp_path)["finite"] is True


@pytest.mark.parametrize("shard_update", [False, True])
def test_warn_continues_reports_once_and_ends_as_not_finite(
    tmp_path, capsys, shard_update
):
    config = make_config(on_nonfinite="warn", shard_update=shard_update)
    for _ in range(2):
        # The second start has nothing left to train, but it does not report success
        # either.
        assert loop.run(config, str(tmp_path), "") == exit_codes.NONFINITE
        captured = capsys.readouterr()
        assert (
            "error: step 8: the resulting state is not finite: params/mlp"
            in captured.err
        )
        results = results_of(tmp_path)
        assert results["step"] == 8 and results["finite"] is False
        # The newest finite checkpoint is kept, although keep_last is 1.
        assert saved(tmp_path) == {4: "complete", 8: "not finite"}
    assert captured.out.count("the run continues, because on_nonfinite=warn") == 0
    stopped = make_config(shard_update=shard_update)
    with pytest.raises(
        ValueError, match=r"checkpoint of step 8 in .* is not finite"
    ) as e:
        loop.run(stopped, str(tmp_path), "")
    (command,) = [
        line for line in str(e.value).split(": ") if line.startswith("python -m")
    ]
    assert command.startswith(
        f"python -m xshard.checkpoint rm {tmp_path}/checkpoints 8."
    )


def test_a_step_is_judged_before_it_is_saved(tmp_path, capsys):
    # The bad step is the last, so no later step triggers its check.
    assert (
        loop.run(make_config(poisoned=((0, 8),)), str(tmp_path), "")
        == exit_codes.NONFINITE
    )
    assert (
        "error: step 8: the loss is nan, and 4 of 4 gradients"
        in capsys.readouterr().err
    )
    assert saved(tmp_path) == {6: "complete"}


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_state_that_is_not_finite_after_the_last_step_is_not_saved(
    tmp_path, capsys, policy
):
    config = make_config(
        experiment="tests.toy.Overflowing", on_nonfinite=policy, overflow_at=8
    )
    assert loop.run(config, str(tmp_path), "") == exit_codes.NONFINITE
    assert (
        "error: step 8: the resulting state is not finite: params/linear/"
        in capsys.readouterr().err
    )
    assert saved(tmp_path) == {6: "complete"}
    assert results_of(tmp_path)["finite"] is False


def test_an_intermediate_state_that_is_not_finite_is_not_saved(tmp_path, capsys):
    # The loss of the next step is not finite either, but the error of the save may come
    # first.
    config = make_config(experiment="tests.toy.Overflowing", overflow_at=4)
    assert loop.run(config, str(tmp_path), "") == exit_codes.NONFINITE
    assert saved(tmp_path) == {2: "complete"}
    assert "error: step " in capsys.readouterr().err


def test_one_bad_group_of_two_is_named_or_skipped(tmp_path, capsys):
    config = make_config(group_assignment=HALVES, poisoned=((1, 5),))
    assert loop.run(config, str(tmp_path), "") == exit_codes.NONFINITE
    messages = capsys.readouterr().err
    assert (
        "error: step 5: in group 1 of 2 the loss is nan, and 4 of 4 gradients"
        in messages
    )
    skipping = make_config(
        group_assignment=HALVES, poisoned=((1, 5),), on_nonfinite="skip"
    )
    assert loop.run(skipping, str(tmp_path), "") == 0
    assert results_of(tmp_path)["global_step"] == [8, 7]


def test_too_many_skips_in_a_row_end_the_run(tmp_path, capsys):
    poisoned = tuple((0, number) for number in range(3, 9))
    config = make_config(on_nonfinite="skip", poisoned=poisoned, max_skips_in_a_row=3)
    assert loop.run(config, str(tmp_path), "") == exit_codes.NONFINITE
    messages = capsys.readouterr().err
    assert "error: 3 steps in a row were skipped" in messages
    assert "the last, step 5: the loss" in messages
    assert saved(tmp_path) == {4: "complete"}


class Poison(toy.Toy):
    """Has only NaN gradients, whatever the loss scale."""

    def loss(self, outputs, batch):
        return jnp.nan * jnp.mean(outputs), {}


@pytest.mark.sample(0.4)
def test_skips_at_the_minimum_of_a_dynamic_scale_end_the_run(tmp_path, capsys):
    config = make_config(
        experiment="tests.run.nonfinite_test.Poison",
        steps=40,
        max_skips_in_a_row=8,
        log_every_steps=20,
    )
    assert loop.run(config, str(tmp_path), "") == exit_codes.NONFINITE
    # The 15 steps before these lowered the scale from 2**15 to its minimum.
    assert (
        "8 steps in a row were skipped without lowering a loss scale"
        in capsys.readouterr().err
    )
    assert results_of(tmp_path)["why"].count("step 23: the loss is nan") == 1
    # A run that ends before it reaches the limit has not ended well either, and a
    # second start reports the same.
    short = make_config(
        experiment="tests.run.nonfinite_test.Poison", steps=30, log_every_steps=20
    )
    for _ in range(2):
        assert loop.run(short, str(tmp_path / "short"), "") == exit_codes.NONFINITE
        assert "15 steps in a row were skipped" in results_of(tmp_path / "short")["why"]


def test_a_failure_is_cleared_when_the_run_continues(tmp_path):
    assert loop.run(make_config(), str(tmp_path), "") == exit_codes.NONFINITE
    assert loop.run(make_config(on_nonfinite="skip"), str(tmp_path), "") == 0
    assert results_of(tmp_path)["finite"] is True


def test_a_run_from_before_the_config_keys_existed_resumes(tmp_path):
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
        (
            {"max_skips_in_a_row": 0},
            "max_skips_in_a_row=0 must be an integer of at least 1",
        ),
    ],
)
def test_values_out_of_range_are_refused(tmp_path, changes, match):
    with pytest.raises(ValueError, match=match):
        loop.Run(make_config(**changes), str(tmp_path))


def test_a_config_without_the_keys_is_refused(tmp_path):
    config = make_config()
    with config.unlocked():
        del config.on_nonfinite
    with pytest.raises(ValueError, match="The config lacks on_nonfinite: begin with"):
        loop.Run(config, str(tmp_path))


def observe(config, devices=2):
    """Returns the observations of the first step."""
    the_experiment = experiment_lib.load(config.experiment)(config)
    the_mesh = mesh.make_mesh(devices=jax.devices()[:devices])
    train = batches.TrainBatches(
        the_experiment.train_batches, the_mesh, batch_size=16, seed=0
    )
    state = state_lib.init(the_experiment, the_mesh, 0, train.example)
    apply = jax.jit(step.make_watched_step(the_experiment, the_mesh))
    return jax.device_get(apply(state, next(train))[2][""])


class OneLayer(toy.Poisoned):
    """Trains its last layer only, whose gradients are not finite though the loss is."""

    def loss(self, outputs, batch):
        return jnp.mean(jnp.sqrt(jnp.abs(outputs * 0.0))), {}

    def clip_gradients(self, grads):
        return {
            module: {
                name: grad if "linear_1" in module else None
                for name, grad in arrays.items()
            }
            for module, arrays in grads.items()
        }


@pytest.mark.parametrize("shard_update", [False, True])
def test_bad_gradients_of_a_finite_loss_are_detected(shard_update):
    config = make_config(
        experiment="tests.run.nonfinite_test.OneLayer",
        poisoned=(),
        shard_update=shard_update,
    )
    observed = observe(config)
    assert observed.verdict == nonfinite.NONFINITE and observed.loss == 0
    # The first layer is not trained, so it has no gradients to report.
    assert observed.gradients.tolist() == [False, False, True, True]


class OneElement(toy.Poisoned):
    """Has one NaN, the last element of one array's gradient."""

    def clip_gradients(self, grads):
        last = "mlp/~/linear_0"
        return {
            **grads,
            last: {**grads[last], "w": grads[last]["w"].at[-1, -1].set(jnp.nan)},
        }


class Apart(toy.Poisoned):
    """Has an infinite loss with finite gradients."""

    def loss(self, outputs, batch):
        loss, metrics = super().loss(outputs, batch)
        return loss + jnp.inf, metrics


@pytest.mark.sample(2)
@pytest.mark.parametrize("shard_update", [False, True])
@pytest.mark.parametrize(
    "name, bad", [("OneElement", [False, True, False, False]), ("Apart", [False] * 4)]
)
def test_one_bad_element_or_a_bad_loss_alone_is_detected(name, bad, shard_update):
    config = make_config(
        experiment=f"tests.run.nonfinite_test.{name}",
        poisoned=(),
        shard_update=shard_update,
    )
    observed = observe(config)
    assert observed.verdict == nonfinite.NONFINITE
    assert observed.gradients.tolist() == bad


@pytest.mark.sample(2)
@pytest.mark.parametrize("shard_update", [False, True])
@pytest.mark.parametrize(
    "changes, skip, verdict",
    [
        ({}, False, nonfinite.NONFINITE),
        ({}, True, nonfinite.SKIPPED_AT_MIN_SCALE),
        ({"loss_scale": {"kind": "fixed"}}, False, nonfinite.NONFINITE),
        ({"loss_scale": {"kind": "fixed"}}, True, nonfinite.SKIPPED_AT_MIN_SCALE),
        ({"loss_scale": {"kind": "dynamic"}}, False, nonfinite.FINE),
        ({"poisoned": ()}, True, nonfinite.FINE),
        ({"micro_batches": 2}, True, nonfinite.SKIPPED_AT_MIN_SCALE),
    ],
    ids=str,
)
def test_the_verdict_and_the_gradients_of_a_step(changes, skip, verdict, shard_update):
    changes = {"poisoned": ((0, 1),), **changes}
    config = make_config(shard_update=shard_update, **changes)
    config.on_nonfinite = "skip" if skip else "stop"
    observed = observe(config)
    assert observed.verdict == verdict
    assert observed.gradients.tolist() == [bool(config.poisoned)] * 4


def test_bad_gradients_of_any_dtype_are_counted():
    nan = jnp.nan
    inf = jnp.inf
    grads = {
        "m": {
            "complex": jnp.array([1j, complex(0, nan), complex(inf, 0)], jnp.complex64),
            "large": jnp.full(3, 3e38),
            "half": jnp.array([inf, 1.0], jnp.float16),
            "none": None,
            "scalar": jnp.asarray(-inf, jnp.bfloat16),
        }
    }
    applied = phases.Applied({}, True, None, grads, {}, {}, None)
    counted = dict(
        zip(
            sorted(grads["m"]),
            inspection.count_nonfinite(applied).tolist(),
            strict=True,
        )
    )
    assert counted == {"complex": 2, "half": 1, "large": 0, "none": 0, "scalar": 1}


class OwnApply(xshard.CrossShardOptimizer):
    """Overrides `apply_gradients`, so that the step cannot make it skip an update."""

    def apply_gradients(self, grads, params, global_step=None, name=None):
        return super().apply_gradients(grads, params, global_step, name)


class Own(toy.Toy):
    def optimizer(self):
        return OwnApply(optax.sgd(0.1))


def test_skip_is_refused_for_an_optimizer_that_cannot_skip():
    config = make_config(experiment="tests.run.nonfinite_test.Own")
    assert observe(config).verdict == nonfinite.FINE
    config.on_nonfinite = "skip"
    with pytest.raises(ValueError, match="'skip' cannot be used with OwnApply"):
        observe(config)


def test_skipping_adds_no_state():
    config = make_config(loss_scale={"kind": "dynamic"})
    the_mesh = mesh.make_mesh(devices=jax.devices()[:1])
    states = []
    for policy in ("stop", "skip"):
        config.on_nonfinite = policy
        the_experiment = experiment_lib.load(config.experiment)(config)
        states.append(
            state_lib.abstract_state(
                the_experiment, the_mesh, 0, the_experiment.train_data()
            )
        )
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])


def watch(policy="warn", patience=100, names=("",)):
    """Returns the check of these learners, and the list of the lines that it logs."""
    config = types.SimpleNamespace(on_nonfinite=policy, max_skips_in_a_row=patience)
    the_mesh = mesh.make_mesh(devices=jax.devices()[:1])
    messages = []
    params = {"m": {"w": 0, "b": 0}}
    learners = {name: learner_state.LearnerState(params, {}, {}, 0) for name in names}
    return nonfinite.NonfiniteCheck(
        config, the_mesh, learners, messages.append
    ), messages


def check_one(watching, number, verdict, name="", loss=1.0):
    """Checks a step with this verdict."""
    if verdict == nonfinite.NONFINITE:
        loss = math.inf
    observed = learner_state.Observed(
        verdict=jnp.int32(verdict),
        loss=jnp.float32(loss),
        gradients=jnp.array([False, True]),
    )
    watching.check(number, {name: observed})


def check(watching, verdicts, first=1):
    """Checks steps with these verdicts."""
    for number, verdict in enumerate(verdicts, first):
        check_one(watching, number, verdict)


F = nonfinite.FINE
S = nonfinite.SKIPPED_AT_MIN_SCALE
T = nonfinite.NONFINITE


def test_the_start_and_the_end_of_a_bad_stretch_are_reported_once():
    watching, messages = watch()
    check(watching, [F, T, T, S, T, F, F, T])
    assert messages == [
        "step 2: the loss is inf, and 1 of 2 gradients are not finite: m/w; the run "
        "continues, because on_nonfinite=warn",
        "step 6: finite again (not finite since step 2)",
        "step 8: the loss is inf, and 1 of 2 gradients are not finite: m/w; the run "
        "continues, because on_nonfinite=warn",
    ]
    assert watching.failure().startswith("step 8: the loss is inf")
    check(watching, [F], 9)
    assert watching.failure() == ""


def test_a_learner_without_observations_is_fine():
    watching, messages = watch(names=("frozen", "student", "teacher"))
    for number, verdict in enumerate([F, T, F], 1):
        check_one(watching, number, verdict, "student")
    assert messages[0].startswith("step 2: for learner student the loss is inf")
    assert messages[1].startswith("step 3: finite again") and watching.failure() == ""


def test_the_number_of_reported_stretches_is_limited():
    watching, messages = watch()
    check(watching, [T, F] * 50)
    assert len(messages) == 20 and messages[-2].endswith("later ones are not reported")


@pytest.mark.parametrize(("every_steps", "flushed"), [(100, 0), (6, 1)])
def test_a_step_is_checked_when_later_ones_are_dispatched_or_saved(
    tmp_path, every_steps, flushed
):
    config = make_config(steps_per_dispatch=1)
    with config.unlocked():
        config.checkpoint.every_steps = every_steps
    run = loop.Run(config, str(tmp_path))
    with run.opened(), pytest.raises(nonfinite.NonfiniteError, match="^step 5: "):
        run.train()
    # A save waits for all steps before it.
    assert run.step == 5 + (flushed or deferred.IN_FLIGHT)
    # Its row tells what was wrong, and comes before the error.
    assert rows.read(tmp_path)[-1]["step"] == 5


def test_a_fine_step_resets_the_count_of_skips_in_a_row():
    watching, _ = watch("stop", patience=3)
    check(watching, [S, S, F, S, S])
    with pytest.raises(
        nonfinite.NonfiniteError, match="3 steps in a row .* the last, step 6: "
    ):
        check(watching, [S], 6)


def test_a_long_list_names_only_its_first_items():
    assert (
        formatting.listed([str(i) for i in range(10)])
        == "0, 1, 2, 3, 4, 5, 6, 7, and 2 more"
    )


def test_a_skipped_step_leaves_the_network_state_unchanged():
    class Counting(toy.Poisoned):
        """Adds up the means of its batches in the network state."""

        def forward(self, batch, *, is_training):
            mean = hk.get_state("mean", [], jnp.float32, jnp.zeros)
            hk.set_state("mean", mean + jnp.mean(batch["y"]))
            return super().forward(batch, is_training=is_training)

    config = make_config(poisoned=((0, 1),), on_nonfinite="skip")
    the_mesh = mesh.make_mesh(devices=jax.devices()[:2])
    the_experiment = Counting(config)
    train = batches.TrainBatches(
        the_experiment.train_batches, the_mesh, batch_size=16, seed=0
    )
    state = state_lib.init(the_experiment, the_mesh, 0, train.example)
    apply = jax.jit(step.make_watched_step(the_experiment, the_mesh))
    after = apply(state, next(train))[0]
    np.testing.assert_array_equal(after.experiment.net_state["~"]["mean"], 0)


class Overflowed(toy.Toy):
    """Has state that becomes infinite, and nothing else that does."""

    def forward(self, batch, *, is_training):
        outputs = super().forward(batch, is_training=is_training)
        total = hk.get_state("total", (2,), init=jnp.zeros)
        if is_training:
            large = jnp.where(self.config.where == "net_state", jnp.inf, 1.0)
            hk.set_state("total", total + large)
        return outputs

    def optimizer(self):
        large = jnp.inf if self.config.where == "opt_state" else 1.0
        zeros = lambda params: jax.tree.map(jnp.zeros_like, params)
        update = lambda updates, state, params=None: (
            updates,
            {
                "least": state["least"],
                "sums": jax.tree.map(lambda x: x + large, state["sums"]),
            },
        )
        # A number may be infinite by design.
        init = lambda params: {"least": jnp.asarray(jnp.inf), "sums": zeros(params)}
        rule = optax.chain(optax.sgd(0.1), optax.GradientTransformation(init, update))
        return xshard.CrossShardOptimizer(
            rule, slice_axis_name="slice", **self.config.reduction
        )

    def evaluate(self, outputs, batch):
        values = super().evaluate(outputs, batch)
        return {
            **values,
            "ratio": values["error"]
            * (jnp.nan if self.config.where == "eval" else 1.0),
        }


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "where, match",
    [
        ("net_state", "step 2: the resulting state is not finite: net_state/~/total"),
        (
            "opt_state",
            r"step 2: the resulting state is not finite: opt_state/.*sums/linear/b",
        ),
        ("eval", "step 8: the evaluation is not finite: ratio"),
        ("nowhere", ""),
    ],
)
def test_the_whole_state_must_be_finite(tmp_path, capsys, where, match):
    config = make_config(experiment="tests.run.nonfinite_test.Overflowed", where=where)
    code = loop.run(config, str(tmp_path), "")
    said = capsys.readouterr().err
    if not match:
        assert code == 0 and results_of(tmp_path)["finite"] and said == ""
        return
    assert code == exit_codes.NONFINITE and re.search(match, said)
    assert not results_of(tmp_path)["finite"]
