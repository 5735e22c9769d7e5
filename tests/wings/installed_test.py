"""Tests of what a run may lack: the list of wings, and what is refused without one."""

import pathlib

import pytest

from tests import toy
from xshard import config as config_lib
from xshard import errors, loop, main
from xshard.learners import learner
from xshard.metrics import writers
from xshard.wings import installed

# A value of each key that needs its wing.
VALUES = {
    "on_nonfinite": "roll_back",
    "on_divergence": "roll_back",
    "roll_back.limit": 4,
    "roll_back.loss_factor": 5.0,
    "roll_back.loss_steps": 7,
    "roll_back.learning_rate_factor": 0.5,
    "samples_every_steps": 2,
    "prometheus.port": 9465,
    "log_norms_every_steps": 5,
    "noise_scale_steps": 4,
}


def test_a_wing_has_the_name_of_its_folder():
    folder = pathlib.Path(installed.__file__).parent
    folders = sorted(path.parent.name for path in folder.glob("*/wing.py"))
    assert sorted(wing.name for wing in installed.WINGS) == folders
    for wing in installed.WINGS:
        assert wing.__module__ == f"xshard.wings.{wing.name}.wing"


def test_each_key_of_a_wing_is_tried_here():
    assert VALUES.keys() == {key.name for key in config_lib.KEYS if key.wing}


@pytest.mark.parametrize("name", VALUES)
def test_a_key_is_refused_by_name_without_its_wing(tmp_path, monkeypatch, name):
    monkeypatch.setattr(learner, "MEASURES", ())
    config = toy.get_config()
    loop.Run(config, str(tmp_path / "run"))
    config.update_from_flattened_dict({name: VALUES[name]})
    (wing,) = [key.wing for key in config_lib.KEYS if key.name == name]
    text = f"^{name}={VALUES[name]!r} needs the wing {wing}, which this installation"
    with pytest.raises(errors.UserError, match=text):
        loop.Run(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    config_lib.check_wings(config, [wing])


@pytest.mark.parametrize("name", ["wandb", "mlflow", "prometheus"])
def test_a_writer_is_refused_by_name_without_its_wing(name):
    text = f"^writers has '{name}', which needs the wing {name}, which this install"
    with pytest.raises(errors.UserError, match=text):
        writers.check(("jsonl", name))


def test_a_mode_is_refused_by_name_without_its_wing():
    text = "^--mode=profile needs the wing profiles, which this installation lacks"
    with pytest.raises(errors.UserError, match=text):
        main._profile_mode(())
