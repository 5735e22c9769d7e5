"""Tests that roll-backs skip the bad data, and end in the same bits and rows.

They do even if the run is stopped or killed.
"""

import json
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import xshard
from tests import flips, rolled, rows, toy, winged
from tests.launch import harness as system
from tests.optimizers import harness
from xshard import checkpoint, errors, loop
from xshard.checkpoint import manager as manager_lib
from xshard.data import batches
from xshard.files import jsonfile, workdir
from xshard.metrics import log as log_lib
from xshard.pod import exit_codes, request
from xshard.replay import replayer
from xshard.run import replication
from xshard.wings.roll_backs import wing

pytestmark = pytest.mark.usefixtures("shared_programs")

make_config = rolled.make_config
recorded = rolled.recorded
assert_same = rolled.assert_same


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The directory of a run that rolls back twice and is never stopped or killed."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    assert winged.run(make_config(), str(directory), "") == 0
    return directory


class SkipsPast(toy.Poisoned):
    """Has data without batches 5 to 11."""

    def train_batches(self, part):
        result = super().train_batches(part)
        original = type(result).__next__

        class Passing(type(result)):
            def __next__(self):
                while 4 <= self.get_state()["batches"] < 11:
                    original(self)
                return original(self)

        result.__class__ = Passing
        return result


@pytest.mark.sample(5, of="roll-backs")
def test_the_run_ends_in_the_bits_of_a_run_without_the_skipped_data(
    uninterrupted, tmp_path
):
    first, second = recorded(uninterrupted)
    assert first["why"].startswith("step 7: the loss is nan, and 4 of 4 gradients")
    assert (first["restored"], first["first_batch"], first["last_batch"]) == (4, 5, 7)
    assert second["why"].startswith("step 8: ")
    assert (second["restored"], second["first_batch"], second["last_batch"]) == (
        4,
        5,
        11,
    )
    # The second roll-back replaced the rows of the first.
    assert rolled.rows_of(uninterrupted) == [(5, 2, 8, 5, 11)]
    config = make_config(
        experiment="tests.wings.roll_backs.wing_test.SkipsPast", on_nonfinite="stop"
    )
    assert winged.run(config, str(tmp_path), "") == 0
    left = rows.final_state(uninterrupted, make_config())
    right = rows.final_state(tmp_path, config)
    harness.assert_equal(left, right)
    assert rows.results(uninterrupted) == rows.results(tmp_path)
    trained = [row for row in rows.same_bits(uninterrupted) if "roll_back/" not in row]
    assert trained == rows.same_bits(tmp_path)


def test_roll_backs_are_reported(tmp_path, capsys):
    assert winged.run(make_config(), str(tmp_path), "") == 0
    captured = capsys.readouterr()
    assert "step 7: the loss is nan" in captured.out and "error" not in captured.err
    assert (
        "rolled back to step 4, skipping batches 5 to 11 of the data (roll-back 2 of "
        "at most 3)" in captured.out
    )
    # The table of the model is printed once, and the restored checkpoint after each
    # roll-back.
    assert captured.out.count("on each device") == 1
    assert captured.out.count("resumed from the checkpoint of step 4 in") == 2


# With one step a dispatch, polls 2 and 8 are at steps 2 and 6, poll 12 at step 8 before
# the trouble of step 7 is known, 20 in the third attempt.
@pytest.mark.sample(5, of="roll-backs")
@pytest.mark.parametrize("at", [2, 8, 12, 20])
def test_a_run_that_is_stopped_at_any_poll_ends_as_if_uninterrupted(
    tmp_path, uninterrupted, at
):
    config = make_config(steps_per_dispatch=1)
    watch = rows.ScriptedWatch(at, request.STOP)
    assert winged.run(config, str(tmp_path), "", watch=watch) == 42
    assert winged.run(config, str(tmp_path), "") == 0
    assert_same(tmp_path, uninterrupted, config)


def test_a_roll_back_ignores_checkpoints_that_the_clock_caused(tmp_path, uninterrupted):
    config = make_config(steps_per_dispatch=1)
    watch = rows.ScriptedWatch(8, request.SAVE)
    assert winged.run(config, str(tmp_path), "", watch=watch) == 0
    assert_same(tmp_path, uninterrupted, config)
    assert [name[:14] for name in recorded(tmp_path)[0]["given_up"]] == [
        "step_00000006."
    ]


def killing(original):
    """Returns a function that calls the original and then kills the run."""

    def killed(*args, **kwargs):
        original(*args, **kwargs)
        raise rows.Killed

    return killed


# The functions that a roll-back calls, in order. The run is killed after the first call
# of one of them.
INSTANTS = [
    (jsonfile, "write"),
    (wing.RollBacks, "decide"),
    (manager_lib.Manager, "restore"),
    (manager_lib.Manager, "give_up"),
    (workdir.Workdir, "record_newest"),
    (log_lib.Log, "write_ahead"),
    (batches.TrainBatches, "batches_for_steps"),
    (loop.Run, "_save"),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("at", range(len(INSTANTS)), ids=lambda at: INSTANTS[at][1])
def test_a_run_killed_at_any_call_of_a_roll_back_ends_as_if_uninterrupted(
    tmp_path, uninterrupted, monkeypatch, at
):
    owner, name = INSTANTS[at]
    config = make_config()
    # The stop saves a checkpoint after the one that the roll-back restores.
    watch = rows.ScriptedWatch(8, request.STOP)
    assert winged.run(config, str(tmp_path), "", watch=watch) == 42
    add = wing.RollBacks.decide

    def adds(self, *args):
        monkeypatch.setattr(wing.RollBacks, "decide", add)
        # The kill is prepared when the first roll-back begins, so calls before it do
        # not count.
        monkeypatch.setattr(owner, name, killing(getattr(owner, name)))
        self.decide(*args)

    monkeypatch.setattr(wing.RollBacks, "decide", adds)
    with pytest.raises(rows.Killed):
        winged.run(config, str(tmp_path), "")
    monkeypatch.undo()
    assert winged.run(config, str(tmp_path), "") == 0
    assert_same(tmp_path, uninterrupted, config)


KILLED = """
import os, signal, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
from tests import winged
from tests.wings.roll_backs import wing_test as test
from xshard.files import jsonfile

write = jsonfile.write

def killed(path, value, **options):
    write(path, value, **options)
    if path.name == "roll_backs.json" and len(value) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

jsonfile.write = killed
winged.run(test.make_config(), sys.argv[1], "")
"""


@pytest.mark.sample(0.4)
def test_a_run_survives_sigkill_after_it_records_each_roll_back(
    tmp_path, uninterrupted
):
    for number in (1, 2):
        command = [sys.executable, "-c", KILLED, str(tmp_path), str(number)]
        ended = subprocess.run(
            command, cwd=system.ROOT, env=system.environment(), check=False
        )
        assert ended.returncode == -signal.SIGKILL
        assert len(recorded(tmp_path)) == number
    assert winged.run(make_config(), str(tmp_path), "") == 0
    assert_same(tmp_path, uninterrupted, make_config())


def test_the_limit_of_roll_backs_ends_the_run_and_lists_them(tmp_path, capsys):
    for _ in range(2):
        assert (
            winged.run(make_config(limit=1), str(tmp_path), "") == exit_codes.NONFINITE
        )
        messages = capsys.readouterr().err
        assert "error: step 8: the loss is nan" in messages
        assert "rolled back 1 time, the most" in messages
        assert "(1) step 7: the loss is nan" in messages
        assert "rolled back to step 4, skipping batches 5 to 7" in messages
        why = json.loads((tmp_path / "results.json").read_text())["why"]
        assert why in messages and len(recorded(tmp_path)) == 1
    assert winged.run(make_config(limit=2), str(tmp_path), "") == 0


def test_a_roll_back_before_the_first_checkpoint_returns_to_step_0(tmp_path):
    config = make_config(poisoned=((0, 2),))
    assert winged.run(config, str(tmp_path), "") == 0
    assert rolled.rows_of(tmp_path) == [(1, 1, 2, 1, 2)]
    assert [entry["restored"] for entry in recorded(tmp_path)] == [0]


def test_a_later_roll_back_counts_the_batches_already_skipped(tmp_path):
    # After the first roll-back, step 8 uses batch 11, and step 11, after the checkpoint
    # of step 8, uses batch 14.
    config = make_config(poisoned=((0, 7), (0, 14)))
    assert winged.run(config, str(tmp_path), "") == 0
    assert rolled.rows_of(tmp_path) == [(5, 1, 7, 5, 7), (9, 2, 11, 12, 14)]


def test_checkpoints_of_evaluations_are_saved_again(tmp_path):
    config = make_config(keep_best=9, poisoned=((0, 7),))
    assert winged.run(config, str(tmp_path), "") == 0
    (entry,) = recorded(tmp_path)
    assert len(entry["given_up"]) == 1
    assert entry["given_up"][0].startswith("step_00000006.")
    entries = checkpoint.read_catalog(tmp_path / "checkpoints").entries
    evaluated = {
        row["step"]: row["eval/error"]
        for row in rows.read(tmp_path)
        if "eval/error" in row
    }
    assert {e.step: e.metrics["error"] for e in entries if e.metrics} == evaluated
    assert sorted(evaluated) == [3, 6, 9, 12]


@pytest.mark.sample(5, of="roll-backs")
def test_trouble_in_one_group_of_two_rolls_back_both(tmp_path):
    config = make_config(group_assignment=rolled.HALVES, poisoned=((1, 6),))
    assert winged.run(config, str(tmp_path), "") == 0
    assert recorded(tmp_path)[0]["why"].startswith(
        "step 6: in group 1 of 2 the loss is nan"
    )
    assert rows.results(tmp_path)["global_step"] == [12, 12]


def test_a_state_that_is_not_finite_although_its_loss_is_rolls_back(tmp_path, capsys):
    # The last step is bad with any batch, so skipping batches does not help.
    config = make_config(experiment="tests.toy.Overflowing", poisoned=(), limit=2)
    assert winged.run(config, str(tmp_path), "") == exit_codes.NONFINITE
    assert [entry["step"] for entry in recorded(tmp_path)] == [12, 12]
    assert (
        "error: step 12: the resulting state is not finite: params/linear/"
        in capsys.readouterr().err
    )


class Bursting(toy.Poisoned):
    """Has parameters that overflow at a poisoned batch, while the loss is finite."""

    def loss(self, outputs, batch):
        large = jnp.where(jnp.isnan(batch["y"]), 1e9, batch["y"])
        return super().loss(outputs, {**batch, "y": large})

    def optimizer(self):
        burst = lambda x: jnp.where(jnp.abs(x) > 1e4, jnp.inf, -0.01 * x)
        rule = optax.stateless(lambda updates, _: jax.tree.map(burst, updates))
        return xshard.CrossShardOptimizer(rule)


@pytest.mark.sample(5, of="roll-backs")
@pytest.mark.parametrize(("at", "step"), [(8, 6), (12, 8)])
def test_a_stop_at_a_state_that_is_not_finite_causes_no_roll_back(tmp_path, at, step):
    # Step 8 is saved on schedule, step 6 only because of the stop. The loss of the next
    # step reveals the bad state.
    config = make_config(
        experiment="tests.wings.roll_backs.wing_test.Bursting", poisoned=((0, step),)
    )
    assert winged.run(config, str(tmp_path / "whole"), "") == 0
    stopped = tmp_path / "stopped"
    config.steps_per_dispatch = 1
    watch = rows.ScriptedWatch(at, request.STOP)
    assert winged.run(config, str(stopped), "", watch=watch) == 42
    assert not (stopped / "roll_backs.json").exists()
    assert winged.run(config, str(stopped), "") == 0
    assert [entry["step"] for entry in recorded(tmp_path / "whole")] == [step + 1]
    assert_same(stopped, tmp_path / "whole", config)


class Stuck(toy.Poisoned):
    """Has a dynamic loss scale that is already at its minimum."""

    def optimizer(self):
        unscaled = xshard.CrossShardOptimizer(optax.sgd(0.1))
        return xshard.MixedPrecisionLossScaleOptimizer(
            unscaled, xshard.DynamicLossScale(1.0, increment_period=100)
        )


@pytest.mark.sample(5, of="roll-backs")
def test_skips_without_lowering_the_scale_cause_a_roll_back(tmp_path):
    config = make_config(
        experiment="tests.wings.roll_backs.wing_test.Stuck",
        max_skips_in_a_row=3,
        poisoned=tuple((0, number) for number in (5, 6, 7)),
    )
    assert winged.run(config, str(tmp_path / "whole"), "") == 0
    (entry,) = recorded(tmp_path / "whole")
    assert entry["why"].startswith("3 steps in a row were skipped")
    assert entry["step"] == 7
    # The count of skips continues after a stop.
    stopped = tmp_path / "stopped"
    config.steps_per_dispatch = 1
    watch = rows.ScriptedWatch(8, request.STOP)
    assert winged.run(config, str(stopped), "", watch=watch) == 42
    assert winged.run(config, str(stopped), "") == 0
    assert_same(stopped, tmp_path / "whole", config)


class Acting(toy.Poisoned):
    """Has batches that come from acting on the model."""

    def train_batches(self, part):
        result = super().train_batches(part)
        result.acts_every_steps = 2
        result.act = lambda step, predict: None
        return result


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"experiment": "tests.wings.roll_backs.wing_test.Acting"},
            "acting on the model",
        ),
        (
            {"learning_rate_factor": 0.5},
            "backs_off=True., but this experiment has none",
        ),
        (
            {"on_nonfinite": "skip", "learning_rate_factor": 0.5},
            "factor=0.5 requires on_nonfinite='roll_back'",
        ),
        (
            {"learning_rate_factor": 2.0},
            "learning_rate_factor=2.0 must be a number above 0, at most 1",
        ),
        (
            {"on_divergence": "skip"},
            "on_divergence='skip' must be 'stop' or 'roll_back', which",
        ),
        ({"limit": 0}, "limit=0 must be an integer of at least 1"),
    ],
)
def test_an_invalid_config_is_refused_before_the_run(tmp_path, changes, match):
    with pytest.raises(errors.UserError, match=match):
        winged.Run(make_config(**changes), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_recorded_roll_backs_apply_under_another_policy(tmp_path):
    config = make_config(poisoned=((0, 7),))
    watch = rows.ScriptedWatch(12, request.STOP)
    assert winged.run(config, str(tmp_path), "", watch=watch) == 42
    # The run still skips the data, whatever its policy for later trouble is.
    assert (
        winged.run(
            make_config(poisoned=((0, 7),), on_nonfinite="stop"), str(tmp_path), ""
        )
        == 0
    )
    assert rolled.rows_of(tmp_path) == [(5, 1, 7, 5, 7)]


def test_a_run_without_a_checkpoint_to_roll_back_to_ends(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(manager_lib.Manager, "finite_steps", lambda self: [])
    assert winged.run(make_config(), str(tmp_path), "") == exit_codes.NONFINITE
    assert "there is no checkpoint to roll back to" in capsys.readouterr().err
    assert jax.process_count() == 1 and not (tmp_path / "roll_backs.json").exists()


FLIPPED = "params/mlp/~/linear_0/w"


def assert_same_history(directory, other, config):
    """Asserts that two runs have the same final state, rows and results.

    Roll-backs that skip no data leave no rows, but they count. The numbers of the
    others may therefore differ.
    """
    harness.assert_equal(
        rows.final_state(directory, config), rows.final_state(other, config)
    )
    left, right = (
        [
            {k: x for k, x in json.loads(row).items() if k != "roll_back/number"}
            for row in records
        ]
        for records in map(rows.same_bits, (directory, other))
    )
    assert left == right
    assert rows.results(directory) == rows.results(other)


# The flips are in the first history, or in the third, which begins after 12 steps and
# skips batches 5 to 11.
@pytest.mark.sample(5, of="roll-backs")
@pytest.mark.parametrize(
    ("steps", "begin", "first", "change"),
    [
        ([5], 0, [5], flips.one_bit),
        ([6], 12, [5], flips.one_bit),
        ([6, 9], 12, [5, 16], flips.one_bit),
        # The loss of the next step is not finite either. The data did not cause that,
        # so none is skipped.
        ([5], 0, [5], flips.to_nan),
    ],
)
def test_a_run_whose_replicas_part_repeats_the_same_steps(
    tmp_path, uninterrupted, monkeypatch, capsys, steps, begin, first, change
):
    config = make_config(on_divergence="roll_back", limit=9)
    left = list(steps)
    flips.after(monkeypatch, left, FLIPPED, 3, begin=begin, change=change)
    assert winged.run(config, str(tmp_path), "") == 0
    assert not left
    assert_same_history(tmp_path, uninterrupted, config)
    records = [
        entry for entry in recorded(tmp_path) if entry["why"].startswith("After step")
    ]
    for entry, step, batch in zip(records, steps, first, strict=True):
        assert entry["step"] == step
        assert "replica 3 (device 3 of process 0)" in entry["why"]
        assert "was not saved" not in entry["why"]
        assert entry["restored"] == step // 4 * 4
        assert (entry["first_batch"], entry["last_batch"]) == (batch, batch - 1)
    assert len(recorded(tmp_path)) == 2 + len(steps)
    assert (
        "repeating the steps with the same data (roll-back" in capsys.readouterr().out
    )


def test_a_run_that_is_killed_or_stopped_after_a_flip_ends_the_same(
    tmp_path, uninterrupted, monkeypatch
):
    config = make_config(on_divergence="roll_back", limit=9)
    flips.after(monkeypatch, [5], FLIPPED, 3)
    with monkeypatch.context() as before:
        before.setattr(wing.RollBacks, "decide", killing(wing.RollBacks.decide))
        with pytest.raises(rows.Killed):
            winged.run(config, str(tmp_path), "")
    (entry,) = recorded(tmp_path)
    assert entry["why"].startswith("After step 5")
    # This flip is detected at the save for the stop.
    flips.after(monkeypatch, [9], FLIPPED, 3)
    watch = rows.ScriptedWatch(19, request.STOP)
    assert winged.run(config, str(tmp_path), "", watch=watch) == 42
    assert len(recorded(tmp_path)) > 1
    assert winged.run(config, str(tmp_path), "") == 0
    assert_same_history(tmp_path, uninterrupted, config)


@pytest.mark.sample(5, of="roll-backs")
def test_a_device_that_flips_bits_repeatedly_ends_the_run(tmp_path, monkeypatch):
    config = make_config(on_divergence="roll_back", poisoned=(), limit=2)
    flips.after(monkeypatch, [6] * 9, FLIPPED, 3)
    with pytest.raises(replication.ReplicaDivergenceError) as e:
        winged.run(config, str(tmp_path), "")
    assert (
        "rolled back 2 times, the most that roll_back.limit allows: (1) After step 6"
        in str(e.value)
    )
    assert str(e.value).count("This step was not saved") == 1
    # With on_divergence='stop' the first flip ends the run, whatever on_nonfinite is.
    for on_divergence, on_nonfinite, count in (
        ("stop", "roll_back", 0),
        ("roll_back", "stop", 2),
    ):
        other = tmp_path / on_divergence
        config = make_config(
            on_divergence=on_divergence, on_nonfinite=on_nonfinite, poisoned=(), limit=2
        )
        with pytest.raises(replication.ReplicaDivergenceError):
            winged.run(config, str(other), "")
        assert len(recorded(other) if count else []) == count
        assert (other / "roll_backs.json").exists() == bool(count)


def lowered_config(**changes):
    return make_config(
        experiment="tests.toy.Lowered", learning_rate_factor=0.25, **changes
    )


@pytest.fixture(scope="module")
def lowered(tmp_path_factory):
    """The directory of a run that lowers its updates at two roll-backs."""
    directory = tmp_path_factory.mktemp("lowered")
    assert (
        winged.run(lowered_config(on_divergence="roll_back"), str(directory), "") == 0
    )
    return directory


def update_scales(directory):
    """Returns the logged factor of the updates, by step."""
    records = rows.read(directory)
    return {
        row["step"]: row["update_scale"] for row in records if "update_scale" in row
    }


@pytest.mark.sample(5, of="roll-backs")
def test_a_roll_back_lowers_updates_by_a_factor(lowered, tmp_path, capsys):
    assert [entry["update_scale"] for entry in recorded(lowered)] == [0.25, 0.0625]
    scales = update_scales(lowered)
    assert scales == {step: 1.0 if step < 5 else 0.0625 for step in range(1, 13)}
    # The optimizer state holds the product of the factors of both roll-backs.
    config = lowered_config()
    run = winged.Run(config, str(lowered))
    state = run.checkpoints.manager.restore(run.target).state
    (scale,) = [
        x
        for arrays in state.experiment.opt_state.values()
        for name, x in arrays.items()
        if name.endswith("hyperparams/update_scale")
    ]
    assert scale == 0.0625
    unchanged = make_config(experiment="tests.toy.Lowered")
    assert winged.run(unchanged, str(tmp_path), "") == 0
    assert set(update_scales(tmp_path).values()) == {1.0}
    plain = {
        row["step"]: row["parameter_norm"]
        for row in rows.read(tmp_path)
        if "loss" in row
    }
    norms = {
        row["step"]: row["parameter_norm"]
        for row in rows.read(lowered)
        if "loss" in row
    }
    moved = [abs(x[12] - x[4]) for x in (plain, norms)]
    assert plain[4] == norms[4] and 0 < moved[1] < moved[0] / 4


@pytest.mark.sample(5, of="roll-backs")
@pytest.mark.parametrize("at", [8, 12, 20])
def test_a_stopped_run_with_lowered_updates_resumes_to_the_same_end(
    tmp_path, lowered, monkeypatch, at
):
    config = lowered_config(on_divergence="roll_back", steps_per_dispatch=1)
    watch = rows.ScriptedWatch(at, request.STOP)
    assert winged.run(config, str(tmp_path), "", watch=watch) == 42
    if at == 20:
        # A changed factor applies only to later roll-backs; repeated steps use the
        # recorded one.
        config = make_config(experiment=config.experiment, on_divergence="roll_back")
        flips.after(monkeypatch, [10], FLIPPED, 3)
    assert winged.run(config, str(tmp_path), "") == 0
    assert_same_history(tmp_path, lowered, config)
    assert len(recorded(tmp_path)) == 2 + (at == 20)


def test_steps_with_lowered_updates_are_replayed(lowered):
    for step in (3, 6, 12):
        run = replayer.Replayer(str(lowered))
        for result in run.steps(range(step, step + 1)):
            assert run.difference(result) is None
