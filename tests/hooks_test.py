"""Tests of hooks, also of an experiment's own: a stop and a kill between their acts."""

import json
import signal

import pytest

from tests import forks, pace, rows, toy
from tests.launch import harness
from tests.optimizers import harness as optimizers_harness
from xshard import errors, hooks, loop
from xshard.pod import request

DUE = 3


class Noted(hooks.Hook):
    """Appends each act to a file: the step, and a number of the state."""

    def __init__(self, path):
        self._path = path

    def next_due(self, step):
        return hooks.every(DUE, step)

    def act(self, step, state):
        bias = float(state.experiment.params["linear"]["b"][0])
        with open(self._path, "a") as file:
            file.write(json.dumps([step, bias]) + "\n")


class Hooked(toy.Toy):
    """Notes its acts in a file."""

    def hooks(self):
        return [Noted(self.config.noted)]


def get_config():
    config = toy.get_config()
    config.experiment = "tests.hooks_test.Hooked"
    config.noted = ""
    config.checkpoint.every_steps = 4
    return config


def config_of(folder, **changes):
    config = get_config()
    config.noted = str(folder / "noted")
    config.update(changes)
    return config.lock()


def noted(folder):
    return [json.loads(line) for line in (folder / "noted").read_text().splitlines()]


def test_every_returns_the_next_multiple():
    assert [hooks.every(3, step) for step in (0, 2, 3)] == [3, 3, 6]
    assert hooks.every(0, 5) == hooks.NEVER


def test_a_hook_acts_after_the_steps_that_it_chooses(tmp_path):
    assert loop.run(config_of(tmp_path), str(tmp_path / "run"), "") == 0
    assert [step for step, _ in noted(tmp_path)] == [3, 6, 9, 12]


@pytest.mark.parametrize("poll", [1, 2, 3])
def test_a_hook_does_not_act_twice_after_a_stop(tmp_path, poll):
    config = config_of(tmp_path, steps_per_dispatch=2)
    watch = rows.ScriptedWatch(poll, request.STOP)
    loop.run(config, str(tmp_path / "run"), "", watch=watch)
    assert loop.run(config, str(tmp_path / "run"), "") == 0
    acts = noted(tmp_path)
    assert [step for step, _ in acts] == [3, 6, 9, 12]
    (tmp_path / "noted").unlink()
    assert loop.run(config, str(tmp_path / "whole"), "") == 0
    assert noted(tmp_path) == acts


def test_a_hook_of_a_killed_run_repeats_its_acts(tmp_path):
    whole = config_of(tmp_path)
    assert loop.run(whole, str(tmp_path / "whole"), "") == 0
    expected = noted(tmp_path)
    (tmp_path / "noted").unlink()
    with pytest.MonkeyPatch.context() as patch:
        act = Noted.act

        def killed(self, step, state):
            act(self, step, state)
            if step == 6:
                raise rows.Killed

        patch.setattr(Noted, "act", killed)
        with pytest.raises(rows.Killed):
            loop.run(whole, str(tmp_path / "run"), "")
    assert loop.run(whole, str(tmp_path / "run"), "") == 0
    # Step 6 came after the checkpoint of step 4.
    assert noted(tmp_path) == [expected[0], expected[1], *expected[1:]]


def test_ctrl_c_ends_a_run_between_two_acts(tmp_path):
    """In a process, since only that gets a terminal's signal."""
    command = [
        "xshard.main",
        "--config=tests/hooks_test.py",
        f"--config.noted={tmp_path / 'noted'}",
        f"--workdir={tmp_path / 'run'}",
    ]
    with pace.slow(tmp_path / "slow", 4) as variables:
        process = forks.program(*command, env=harness.environment(**variables))
        with harness.running(process):
            harness.read_until(process, "step  4/12")
            process.send_signal(signal.SIGINT)
            code, output = harness.finish(process)
    assert code == 130, output
    code, output = harness.finish(forks.program(*command, env=harness.environment()))
    assert code == 0, output
    assert [step for step, _ in noted(tmp_path)] == [3, 6, 9, 12]


class Writes(Noted):
    """Also writes into the containers of the state."""

    def act(self, step, state):
        super().act(step, state)
        for arrays in state.experiment.params.values():
            for name, x in arrays.items():
                arrays[name] = 0 * x
        state.experiment.opt_state.clear()
        state.experiment.net_state["other"] = {"x": 1}


@pytest.mark.parametrize("size", [1, 8])
def test_what_a_hook_writes_into_a_state_does_not_train(tmp_path, size, monkeypatch):
    config = config_of(tmp_path, steps_per_dispatch=size)
    assert loop.run(config, str(tmp_path / "whole"), "") == 0
    acts = noted(tmp_path)
    (tmp_path / "noted").unlink()
    # Two hooks, of which the second is shown what the first has written into.
    make = lambda self: [Writes(self.config.noted), Noted(f"{self.config.noted}_after")]
    monkeypatch.setattr(Hooked, "hooks", make)
    watch = rows.ScriptedWatch(2, request.STOP)
    assert loop.run(config, str(tmp_path / "run"), "", watch=watch) == 42
    assert loop.run(config, str(tmp_path / "run"), "") == 0
    assert noted(tmp_path) == acts
    after = (tmp_path / "noted_after").read_text()
    assert after == (tmp_path / "noted").read_text()
    assert rows.same_bits(tmp_path / "run") == rows.same_bits(tmp_path / "whole")
    states = [rows.final_state(tmp_path / name, config) for name in ("run", "whole")]
    optimizers_harness.assert_equal(*states)


class Due(hooks.Hook):
    """Is due after a given step."""

    def __init__(self, due):
        self._due = due

    def next_due(self, step):
        return self._due if step < 5 else step


@pytest.mark.parametrize("due", [3, None, 8.0, "8", True])
@pytest.mark.parametrize("size", [1, 8])
def test_a_hook_that_names_no_later_step_is_refused(tmp_path, due, size, monkeypatch):
    config = config_of(tmp_path, steps_per_dispatch=size)
    monkeypatch.setattr(Hooked, "hooks", lambda self: [Due(due)])
    match = r"Due.next_due\(\d\) returned .* the number of a later step"
    with pytest.raises(errors.UserError, match=match):
        loop.run(config, str(tmp_path / "run"), "")


@pytest.mark.parametrize("size", [1, 4, 8])
@pytest.mark.parametrize("due", [lambda step: step + 3, lambda step: step + 1])
def test_a_hook_acts_after_the_same_steps_in_dispatches_of_any_size(
    tmp_path, size, due, monkeypatch
):
    """Also one whose answer another question would change."""
    acted = []

    class Later(hooks.Hook):
        def next_due(self, step):
            return due(step)

        def act(self, step, state):
            acted.append(step)

    monkeypatch.setattr(Hooked, "hooks", lambda self: [Later()])
    config = config_of(tmp_path, steps_per_dispatch=size)
    assert loop.run(config, str(tmp_path / "run"), "") == 0
    assert acted == list(range(due(0), 13, due(0)))


def test_a_hook_that_would_never_act_is_refused(tmp_path, monkeypatch):
    class Only(hooks.Hook):
        def is_due(self, step):
            return step % 2 == 0

        def act(self, step, state):
            pass

    class Reads(hooks.Hook):
        def read(self, step, place, fetched, newest):
            pass

    monkeypatch.setattr(Hooked, "hooks", lambda self: [Reads(), Only()])
    match = "returned a Only, which defines act and not next_due"
    with pytest.raises(errors.UserError, match=match):
        loop.run(config_of(tmp_path), str(tmp_path / "run"), "")
    assert not (tmp_path / "run").exists()


def test_what_is_no_hook_is_refused():
    class Wrong(toy.Toy):
        def hooks(self):
            return [print]

    config = toy.get_config()
    with pytest.raises(errors.UserError, match="hooks"):
        hooks.check("Wrong.hooks", Wrong(config).hooks())
