"""Tests that an experiment's class is loaded by its path, and is that of the run."""

import importlib
import json
import logging
import shutil
import sys

import jax
import numpy as np
import pytest

import xshard
from tests import toy
from xshard import errors, experiment, export, loop, mesh
from xshard.files import workdir
from xshard.modes import continuous_eval
from xshard.replay import replayer


def test_load():
    assert experiment.load("tests.toy.Toy") is toy.Toy


@pytest.mark.parametrize(
    "path", ["", "Toy", "tests.toy.", "tests.toy.Nothing", "nowhere.at.All", "a..b"]
)
def test_paths_without_a_class_are_refused(path):
    with pytest.raises(ValueError, match="must be the dotted path of a class"):
        experiment.load(path)


def test_a_path_of_something_else_is_refused():
    with pytest.raises(
        ValueError, match="not a class that derives from xshard.Experiment"
    ):
        experiment.load("tests.toy.get_config")


# The modules of the projects below, which all have the same names.
MODULES = ("an_experiment", "a_network", "a_package", "a_package.network")
EXPERIMENT = """\
from tests import toy
import a_network

class Net(toy.Toy):
    def forward(self, batch, *, is_training):
        outputs = super().forward(batch, is_training=is_training)
        return a_network.scale() * outputs
"""
NETWORK = "from a_package import network\nscale = lambda: network.SCALE\n"


def write_project(folder, scale=1.0):
    """Writes an experiment that imports a module, which imports one of a package."""
    (folder / "a_package").mkdir(parents=True, exist_ok=True)
    (folder / "an_experiment.py").write_text(EXPERIMENT)
    (folder / "a_network.py").write_text(NETWORK)
    (folder / "a_package" / "__init__.py").write_text("")
    (folder / "a_package" / "network.py").write_text(f"SCALE = {scale}\n")
    return folder


def enter(monkeypatch, folder):
    """Begins as a new program in a folder does, which has imported none of these."""
    for name in MODULES:
        sys.modules.pop(name, None)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()


def project_config():
    config = toy.get_config()
    config.experiment = "an_experiment.Net"
    config.steps = 2
    return config.lock()


def begin(monkeypatch, folder):
    """Writes the files with which a run of a project begins."""
    enter(monkeypatch, folder)
    run = workdir.Workdir(folder / "run")
    experiment.of_config(project_config())
    with run.opened(project_config()):
        pass
    return run


def test_a_run_is_of_the_file_with_its_source_wherever_it_lies(
    tmp_path, monkeypatch, caplog
):
    project = write_project(tmp_path / "project")
    begin(monkeypatch, project)
    moved = tmp_path / "moved"
    shutil.move(project, moved)
    enter(monkeypatch, moved)
    run = workdir.Workdir(moved / "run")
    experiment.of_config(project_config(), run)
    assert run.check(project_config()) == []
    # Files that the experiment does not import do not count.
    (moved / "config.py").write_text("1")
    (moved / "a_package" / "other.py").write_text("1")
    enter(monkeypatch, moved)
    importlib.import_module("a_package.other")
    experiment.of_config(project_config(), run)
    assert not caplog.messages
    # A run of a notebook, or one that noted nothing, is taken as it is.
    content = json.loads(run.config.read_text())
    del content["_run"]["source"]
    run.config.write_text(json.dumps(content))
    write_project(moved, scale=2.0)
    enter(monkeypatch, moved)
    experiment.of_config(project_config(), run)
    assert run.check(project_config()) == [] and not caplog.messages


@pytest.mark.parametrize(
    "file", ["an_experiment.py", "a_network.py", "a_package/network.py"]
)
def test_other_source_in_the_same_file_is_a_line_and_elsewhere_is_refused(
    tmp_path, monkeypatch, caplog, file
):
    caplog.set_level(logging.WARNING, "absl")
    run = begin(monkeypatch, write_project(tmp_path / "a"))
    for folder in ("a", "b"):
        project = write_project(tmp_path / folder)
        (project / file).write_text(f"{(project / file).read_text()}\n# Edited.\n")
    enter(monkeypatch, tmp_path / "b")
    message = f"a run of an_experiment.Net in {tmp_path}/a/an_experiment.py. Here this "
    message += f"name leads to {tmp_path}/b/an_experiment.py, which has other source"
    for check in (
        lambda: experiment.of_config(project_config(), run),
        lambda: run.check(project_config()),
    ):
        with pytest.raises(errors.UserError, match=message):
            check()
    assert not caplog.messages

    enter(monkeypatch, tmp_path / "a")
    line = "the source of an_experiment.Net: edited since the run last began"
    experiment.of_config(project_config(), run)
    assert caplog.messages == [f"{run.path}: {line}"]
    assert run.check(project_config()) == [line]
    # The run goes on with the edited source.
    with run.opened(project_config()):
        pass
    assert run.check(project_config()) == []

    # As the message says, for a project that was moved and edited since.
    content = json.loads(run.config.read_text())
    content["_run"]["file"] = str(tmp_path / "b" / "an_experiment.py")
    content["_run"]["source"] = "that of a"
    run.config.write_text(json.dumps(content))
    enter(monkeypatch, tmp_path / "b")
    experiment.of_config(project_config(), run)
    assert run.check(project_config()) == [line]


def test_whatever_reads_a_run_wants_its_experiment(tmp_path, monkeypatch):
    batch = {"x": np.ones((2, 3), np.float32), "y": np.zeros(2, np.float32)}
    runs = {}
    for name, scale in (("a", 1.0), ("b", 2.0)):
        project = write_project(tmp_path / name, scale)
        enter(monkeypatch, project)
        runs[name] = project / "run"
        assert loop.run(project_config(), str(runs[name]), "") == 0
    own = xshard.load(runs["b"]).predict(batch)

    # Python has imported b's modules already, and has its folder first.
    longer = project_config().copy_and_resolve_references()
    longer.steps = 4
    longer.lock()
    before = {path: path.read_bytes() for path in runs["a"].rglob("*.json*")}
    for read in (
        lambda: xshard.load(runs["a"]),
        lambda: export.write(xshard.load(runs["a"]), tmp_path / "a.safetensors"),
        lambda: replayer.Replayer(str(runs["a"])),
        lambda: loop.run(longer, str(runs["a"]), ""),
        lambda: continuous_eval.run(longer, str(runs["a"]), "", watch=None),
    ):
        with pytest.raises(errors.UserError, match="an_experiment.Net in .*/a/an_exp"):
            read()
    assert before == {path: path.read_bytes() for path in runs["a"].rglob("*.json*")}
    np.testing.assert_array_equal(xshard.load(runs["b"]).predict(batch), own)
    enter(monkeypatch, tmp_path / "a")
    assert np.any(np.asarray(xshard.load(runs["a"]).predict(batch)) != own)
    # A run that is set aside is not compared.
    enter(monkeypatch, tmp_path / "b")
    set_aside = workdir.Workdir(runs["a"]).run_id()
    assert loop.run(project_config(), str(runs["a"]), "", set_aside=set_aside) == 0
    xshard.load(runs["a"])


def test_slices_that_train_one_model_share_the_examples_of_a_step():
    config = toy.get_config()
    config.outer.every_steps = 2
    of_slices = mesh.make_mesh(slices=2, separate_slices=True)
    assert experiment.examples_per_step(config, of_slices) == config.batch_size
    # Groups are models of their own.
    config.outer.every_steps = 0
    of_groups = mesh.make_mesh([[0, 1], [2, 3]], devices=jax.devices()[:4])
    assert experiment.examples_per_step(config, of_groups) == 2 * config.batch_size
