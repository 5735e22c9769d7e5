"""Tests of runs whose losses jump."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import rolled, rows, toy, winged
from xshard import config as config_lib
from xshard import errors, loop, mesh
from xshard.learners import state as learner_state
from xshard.pod import request
from xshard.run import nonfinite
from xshard.training import state as state_lib
from xshard.wings.loss_jumps import wing

pytestmark = pytest.mark.usefixtures("shared_programs")


class Jumping(toy.Wide):
    """Has a loss near 1, except for some batches, where it is near 100."""

    def train_batches(self, part):
        result = super().train_batches(part)
        original = type(result).__next__
        jumps_at = self.config.poisoned

        class Batches(type(result)):
            def __next__(self):
                number = self.get_state()["batches"] + 1
                batch = dict(original(self))
                scale = 100.0 if number in jumps_at else 1.0
                return {**batch, "scale": np.full(len(batch["x"]), scale, np.float32)}

        result.__class__ = Batches
        return result

    def loss(self, outputs, batch):
        loss, metrics = super().loss(outputs, batch)
        return jnp.mean(batch["scale"]) * (1.0 + 1e-3 * loss), metrics

    def eval_data(self):
        return {**super().eval_data(), "scale": np.ones(10, np.float32)}


@pytest.mark.wing("roll_backs")
@pytest.mark.sample(1)
@pytest.mark.parametrize("groups", [(), rolled.HALVES])
def test_a_loss_that_jumps_causes_a_roll_back(tmp_path, groups):
    changes = {
        "experiment": "tests.wings.loss_jumps.wing_test.Jumping",
        "group_assignment": groups,
    }
    # The jump at step 3 is not detected, because loss_steps earlier losses do not exist
    # yet.
    config = rolled.make_config(
        **changes, poisoned=(3, 7), loss_factor=5.0, loss_steps=4
    )
    assert winged.run(config, str(tmp_path / "whole"), "") == 0
    (entry,) = rolled.recorded(tmp_path / "whole")
    where = "in group 0 of 2 " if groups else ""
    assert entry["why"].startswith(f"step 7: {where}the loss is 1")
    assert "above 5 times the earlier median, 1." in entry["why"]
    assert rolled.rows_of(tmp_path / "whole") == [(5, 1, 7, 5, 7)]
    # The checkpoint contains the earlier losses, so a resumed run detects the same
    # jump.
    stopped = tmp_path / "stopped"
    config.steps_per_dispatch = 1
    watch = rows.ScriptedWatch(8, request.STOP)
    assert winged.run(config, str(stopped), "", watch=watch) == 42
    assert winged.run(config, str(stopped), "") == 0
    rolled.assert_same(stopped, tmp_path / "whole", config)


def make_wing(names, **roll_back):
    """Returns the wing of a run with learners of these names."""
    config = config_lib.default()
    config.on_nonfinite = "roll_back"
    config.roll_back.update(roll_back)
    params = {"m": {"w": 0, "b": 0}}
    learners = {name: learner_state.LearnerState(params, {}, {}, 0) for name in names}
    run = types.SimpleNamespace(
        config=config,
        mesh=mesh.make_mesh(devices=jax.devices()[:1]),
        target=state_lib.TrainState(0, learners, 0),
    )
    return wing.LossJumps(run)


def observed(loss):
    """Returns the observations of a fine step of the learner 'student'."""
    of_student = learner_state.Observed(
        verdict=jnp.int32(nonfinite.FINE),
        loss=jnp.float32(loss),
        gradients=jnp.array([False, True]),
    )
    return {"student": of_student}


def test_a_learner_without_observations_does_not_jump():
    jumps = make_wing(("student", "teacher"), loss_factor=5.0, loss_steps=2)
    for step in (1, 2):
        jumps.read(step, ..., observed(1.0), None)
    match = "^step 3: for learner student the loss is 9"
    with pytest.raises(nonfinite.NonfiniteError, match=match):
        jumps.read(3, ..., observed(9.0), None)


def test_a_resumed_run_continues_with_the_losses():
    jumps = make_wing(("student",), loss_factor=5.0, loss_steps=2)
    for step in (1, 2):
        jumps.read(step, ..., observed(1.0), None)
    other = make_wing(("student",), loss_factor=5.0, loss_steps=2)
    other.restored(jumps.get_state())
    with pytest.raises(nonfinite.NonfiniteError, match="^step 3: "):
        other.read(3, ..., observed(9.0), None)
    # A run that begins anew has none.
    other.restored({})
    other.read(3, ..., observed(9.0), None)


def test_losses_that_nobody_checks_are_not_copied():
    assert make_wing(("student",)).fetch(None) is None


def test_a_factor_without_roll_backs_is_refused(tmp_path):
    config = rolled.make_config(on_nonfinite="stop", loss_factor=3.0)
    match = "loss_factor=3.0 requires on_nonfinite='roll_back'"
    with pytest.raises(errors.UserError, match=match):
        winged.Run(config, str(tmp_path / "run"))
    match = "loss_factor=3.0 needs the wing loss_jumps, which this installation lacks"
    with pytest.raises(errors.UserError, match=match):
        loop.Run(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
