"""Tests of the keys of a run's config."""

import json
import logging
import sys

import pytest
from absl import flags

from tests import rows, toy, winged
from xshard import cli, errors, trained
from xshard import config as config_lib
from xshard.base import loss_scale_keys
from xshard.files import identity, workdir

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture
def logged(caplog):
    """The lines about renamed keys, as in a process that has logged none before."""
    config_lib._log_renamed.cache_clear()
    caplog.set_level(logging.WARNING, "absl")
    return caplog


def write_as_before(directory, **renamed):
    """Gives the values of config.json the names that they had before."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for earlier, present in renamed.items():
        config[earlier] = config.pop(present)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("earlier", config_lib.RENAMED)
def test_a_renamed_key_is_found_under_both_names(logged, earlier):
    present = config_lib.RENAMED[earlier]
    config = config_lib.default()
    config[earlier] = "roll_back"
    assert config[present] == config[earlier] == "roll_back"
    config.update({earlier: "stop"})
    assert config[present] == "stop" and earlier not in config
    copy = config.copy_and_resolve_references().lock()
    copy.update_from_flattened_dict({earlier: "roll_back"})
    assert copy[present] == "roll_back" and config[present] == "stop"
    config_lib.check(copy)
    assert logged.messages == [
        f"The config's key {earlier} is now called {present}.",
    ]


def parsed(monkeypatch, path, *arguments):
    """Returns the config that a program's flags select."""
    values = flags.FlagValues()
    holder = cli.define_config(values)
    monkeypatch.setattr(sys, "argv", ["program", f"--config={path}", *arguments])
    cli.parse(values)
    return holder.value


# ml_collections loads the file by a method that Python will remove.
@pytest.mark.filterwarnings("ignore:the load_module")
@pytest.mark.parametrize("in_file", ["on_parted", "on_divergence"])
@pytest.mark.parametrize("in_flag", ["on_parted", "on_divergence"])
def test_a_flag_wins_over_the_file_whatever_names_they_use(
    tmp_path, monkeypatch, in_file, in_flag
):
    path = tmp_path / "config.py"
    path.write_text(
        "import xshard\n"
        "def get_config():\n"
        "    config = xshard.config.default()\n"
        f"    config.{in_file} = 'roll_back'\n"
        "    return config\n"
    )
    assert parsed(monkeypatch, path).on_divergence == "roll_back"
    config = parsed(monkeypatch, path, f"--config.{in_flag}=stop")
    assert config.on_divergence == "stop"
    # The message about an unknown key does not blame the earlier name.
    with pytest.raises(errors.UserError, match="^--config.step: .* mean steps"):
        parsed(monkeypatch, path, f"--config.{in_flag}=stop", "--config.step=3")


def test_a_renamed_key_keeps_its_type_and_its_check():
    config = config_lib.default()
    with pytest.raises(TypeError):
        config.on_parted = 3
    config.on_parted = "skip"
    with pytest.raises(ValueError, match="^on_divergence='skip' must be 'stop'"):
        config_lib.check(config)


def test_a_present_name_is_a_key_and_an_earlier_one_is_not():
    names = {key.name for key in config_lib.KEYS}
    assert set(config_lib.RENAMED.values()) <= names
    assert not set(config_lib.RENAMED) & names


@pytest.mark.wing("roll_backs")
def test_a_work_directory_with_earlier_names_resumes(tmp_path, logged):
    config = toy.get_config()
    config.on_divergence = "roll_back"
    config.steps = 6
    assert winged.run(config.lock(), str(tmp_path), "") == 0
    write_as_before(tmp_path, on_parted="on_divergence")
    assert trained.config_of(workdir.Workdir(tmp_path)).on_divergence == "roll_back"
    longer = config.copy_and_resolve_references()
    longer.steps = 8
    assert workdir.Workdir(tmp_path).check(longer) == ["steps: 6 -> 8"]
    assert winged.run(longer, str(tmp_path), "") == 0
    assert rows.results(tmp_path)["step"] == 8
    assert "on_divergence" in json.loads((tmp_path / "config.json").read_text())
    lines = [x for x in logged.messages if "is now called" in x]
    assert lines == ["The config's key on_parted is now called on_divergence."]


def test_a_change_of_a_renamed_key_is_named_by_its_present_name():
    old = identity.plain(config_lib.default())
    old["on_parted"] = old.pop("on_divergence")
    new = identity.plain(config_lib.default())
    new["on_divergence"] = "roll_back"
    changes = identity.compare(old, new, "it is")
    assert changes == ["on_divergence: 'stop' -> 'roll_back'"]


@pytest.mark.parametrize("value", ["dynamic", 128.0, True])
def test_a_loss_scale_that_is_no_dictionary_is_refused(value):
    rule = f"^loss_scale={value!r} must be a dictionary: set loss_scale.kind to one of"
    config = config_lib.default()
    with pytest.raises(errors.UserError, match=rule):
        config.loss_scale = value
    del config["loss_scale"]
    config.loss_scale = value
    with pytest.raises(errors.UserError, match=rule):
        config_lib.check(config)


@pytest.mark.parametrize(
    "loss_scale, message",
    [
        ({"kind": "static"}, "loss_scale.kind='static' must be 'none', 'dynamic' or"),
        ({"kind": None}, "loss_scale.kind=None must be 'none', 'dynamic' or 'fixed'"),
        ({"kind": "fixed", "value": 8.0}, "loss_scale.value=8.0 is no key of a loss"),
        ({"kind": "none", "a": {"b": 1}}, "loss_scale.a.b=1 is no key of a loss scale"),
    ],
)
def test_a_kind_or_a_key_of_a_loss_scale_that_is_not_known_is_refused(
    loss_scale, message
):
    config = config_lib.default()
    config.loss_scale = loss_scale
    with pytest.raises(errors.UserError, match=f"^{message}"):
        config_lib.check(config)


@pytest.mark.parametrize("own", [{}, {"value": 8.0}, {"increment_period": 200}])
def test_a_loss_scale_without_a_kind_is_the_experiment_s_own(own):
    config = config_lib.default()
    config.loss_scale = own
    config_lib.check(config)
    assert loss_scale_keys.kind(config) == "none"
    assert config_lib.unread(config_lib.ReadConfig(config), config) == [
        f"loss_scale.{name}" for name in own
    ]
    flat = config_lib.with_defaults(config_lib.flatten(config.to_dict()))
    found = {name for name in flat if name.startswith("loss_scale")}
    if own:
        assert found == {f"loss_scale.{name}" for name in own}


def test_a_work_directory_without_a_loss_scale_resumes(tmp_path):
    config = toy.get_config()
    config.steps = 6
    assert winged.run(config.lock(), str(tmp_path), "") == 0
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    del content["loss_scale"]
    path.write_text(json.dumps(content))
    longer = config.copy_and_resolve_references()
    longer.steps = 8
    assert workdir.Workdir(tmp_path).check(longer) == ["steps: 6 -> 8"]
    assert trained.config_of(workdir.Workdir(tmp_path)).loss_scale.kind == "none"
    assert winged.run(longer, str(tmp_path), "") == 0
    longer.loss_scale.kind = "dynamic"
    with pytest.raises(errors.UserError, match="loss_scale.kind: 'none' -> 'dynamic'"):
        workdir.Workdir(tmp_path).check(longer)


def test_a_kind_that_was_the_loss_scale_itself_is_its_kind_now(tmp_path):
    path = tmp_path / "config.json"
    old = identity.plain(config_lib.default())
    path.write_text(json.dumps({**old, "loss_scale": "fixed"}))
    config = trained.config_of(workdir.Workdir(tmp_path))
    assert config.loss_scale.kind == "fixed"
    assert config.loss_scale.increment_period == 2000
    assert identity.compare({**old, "loss_scale": "none"}, old, "it is") == []
    with pytest.raises(errors.UserError, match="loss_scale.kind: 'fixed' -> 'none'"):
        identity.compare({**old, "loss_scale": "fixed"}, old, "it is")


def test_a_text_that_reads_like_a_description_is_a_text(tmp_path, caplog):
    texts = {
        "function": "function relu",
        "instance": "unserializable object: /data",
        "class": "<class 'int'>",
        "address": "<function relu at 0x7f>",
        "names": {"name": "relu", "qualname": "relu", "module": "jax.nn"},
        "path": "jax.nn:relu",
    }
    config = toy.get_config()
    config.own = texts
    run = workdir.Workdir(tmp_path)
    with run.opened(config):
        pass
    assert run.check(config) == []
    assert trained.config_of(run).own.to_dict() == texts
    assert not caplog.messages
    config.own.function = "function gelu"
    with pytest.raises(errors.UserError, match="own.function: 'function relu' ->"):
        run.check(config)
