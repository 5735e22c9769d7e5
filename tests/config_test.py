"""Tests of the keys of a run's config."""

import json

import pytest

from tests import toy, winged
from xshard import config as config_lib
from xshard import errors, trained
from xshard.base import loss_scale_keys
from xshard.files import identity, workdir

pytestmark = pytest.mark.usefixtures("shared_programs")


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
