"""The comparison of two runs: where they diverge, and whether two finished ones are
equal.
"""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import pytest

from tests import toy
from xshard import bisect, loop
from xshard.replay import comparison
from xshard.training import fingerprint

NAME = fingerprint.PREFIX + fingerprint.PARAMS


def config(**changes):
    run_config = toy.get_config()
    run_config.update_from_flattened_dict({"log_every_steps": 1, "steps": 8, **changes})
    return run_config.lock()


def compared(tmp_path):
    first = comparison.read(str(tmp_path / "A"))
    second = comparison.read(str(tmp_path / "B"))
    return comparison.find_divergence(first, second)


def test_two_equal_runs_are_reported_as_equal(tmp_path, capsys):
    for name in "AB":
        assert loop.run(config(), str(tmp_path / name), "") == 0
    assert compared(tmp_path) == (8, None, [], [], 8, None)
    capsys.readouterr()
    assert bisect.main([str(tmp_path / "A"), str(tmp_path / "B")]) == 0
    output = capsys.readouterr().out
    equal = "equal: the fingerprints and values of all steps that both logged"
    assert f"{equal}, up to step 8" in output
    assert "configs and origins are the same" in output
    # Equal training does not make equal evaluations.
    rows = tmp_path / "B" / "metrics.jsonl"
    rows.write_text(rows.read_text().replace('"eval/error": ', '"eval/error": 1'))
    assert bisect.main([str(tmp_path / "A"), str(tmp_path / "B")]) == 1
    output = capsys.readouterr().out
    assert "But the evaluation after step 6 differs in eval/error" in output


def test_runs_with_different_seeds_diverge_in_their_first_state(tmp_path, capsys):
    for name, seed in (("A", 0), ("B", 1)):
        assert loop.run(config(seed=seed), str(tmp_path / name), "") == 0
    divergence = compared(tmp_path)
    assert divergence[:2] == (0, 1) and divergence.states == ["other", "params"]
    capsys.readouterr()
    assert bisect.main([str(tmp_path / "A"), str(tmp_path / "B")]) == 1
    output = capsys.readouterr().out
    assert "diverge before step 1: their first states differ in other, params" in output
    assert "config.seed" in output and "config.steps" not in output


@pytest.mark.sample(1)
@pytest.mark.parametrize("every", [0, 1])
def test_runs_resumed_with_different_configs_diverge_in_the_next_step(
    tmp_path, capsys, every
):
    changes = {"fingerprint_every_steps": every}
    assert loop.run(config(steps=4, **changes), str(tmp_path / "A"), "") == 0
    shutil.copytree(tmp_path / "A", tmp_path / "B")
    for name, parts in (("A", 1), ("B", 2)):
        changed = config(micro_batches=parts, **changes)
        assert loop.run(changed, str(tmp_path / name), "") == 0
    divergence = compared(tmp_path)
    # Step 5 begins with the same state in both runs, but its values differ.
    assert divergence[:3] == (4, 5, []) and "loss" in divergence.values
    assert bisect.main([str(tmp_path / "A"), str(tmp_path / "B")]) == 1
    output = capsys.readouterr().out
    assert "config.micro_batches" in output
    assert ("diverge in step 5" in output) == bool(every)
    assert ("rows of step 5 have no fingerprints" in output) != bool(every)


def test_a_bit_flip_in_all_copies_is_located(tmp_path, monkeypatch, capsys):
    assert loop.run(config(), str(tmp_path / "A"), "") == 0
    one_by_one = config(log_every_steps=2, steps_per_dispatch=1)
    run = loop.Run(one_by_one, str(tmp_path / "B"))
    step_of_run = run.train_step

    def train_step(state, *rest):
        if int(state.step) == 4:
            layer = state.experiment.params["linear"]
            flipped = (layer["w"].view(jnp.uint32) ^ 1).view(jnp.float32)
            layer["w"] = jax.device_put(flipped, layer["w"].sharding)
        return step_of_run(state, *rest)

    monkeypatch.setattr(run, "train_step", train_step)
    with run.opened():
        run.train()
    divergence = compared(tmp_path)
    # Step 5 begins with the flipped bit, but only run A logs it. By step 6 the
    # difference has reached the slots.
    assert divergence[:2] == (4, 6) and {"params", "slots"} <= set(divergence.states)
    bisect.main([str(tmp_path / "A"), str(tmp_path / "B")])
    output = capsys.readouterr().out
    assert "The runs diverge in steps 4 to 5 (equal up to the row of step 4)" in output


def test_rows_without_fingerprints_are_no_evidence_of_equal_states():
    def described(here, there, steps=(1, 7, 8, 9, 14)):
        # Only the rows of steps 7 and 14 have fingerprints.
        runs = []
        for state, losses in (here, there):
            rows = {step: {"loss": losses[i]} for i, step in enumerate(steps)}
            rows |= {7: {**rows[7], NAME: 0}, 14: {**rows[14], NAME: state}}
            runs.append(comparison.Run(pathlib.Path("run"), rows, {}, {}))
        return comparison.describe(comparison.find_divergence(*runs))

    equal = [1.0] * 5
    text = described((0, equal), (0, [1.0, 1.0, 1.0, 2.0, 2.0]))
    assert "diverge in steps 7 to 9 (equal up to the row of step 8), in loss" in text
    assert "rows of step 9 have no fingerprints" in text and "same state" not in text
    # Equal losses do not show that the states were equal.
    text = described((0, equal), (1, equal))
    assert "diverge in steps 7 to 13 (equal up to the row of step 9): the state" in text
    text = described((0, equal), (0, [2.0] * 5))
    assert "diverge at step 1 or earlier (no row is equal), in loss" in text
    text = described((0, equal), (0, [1.0, 2.0, 2.0, 2.0, 2.0]))
    equal_until = "equal up to the row of step 1"
    assert f"diverge in step 7 ({equal_until}): it began with the same state" in text


def test_a_missing_run_and_runs_without_a_common_step_are_refused(tmp_path, capsys):
    assert loop.run(config(steps=2), str(tmp_path / "A"), "") == 0
    assert bisect.main([str(tmp_path / "A"), str(tmp_path / "none")]) != 0
    error = capsys.readouterr().err
    assert "holds no config.json: give the work directory of a run" in error
    shutil.copytree(tmp_path / "A", tmp_path / "B")
    rows = tmp_path / "B" / "metrics.jsonl"
    rows.write_text(json.dumps({"step": 77, "loss": 1.0}) + "\n")
    assert bisect.main([str(tmp_path / "A"), str(tmp_path / "B")]) != 0
    assert "no step in common (1 to 2; 77 to 77)" in capsys.readouterr().err
    rows.write_text("")
    assert bisect.main([str(tmp_path / "A"), str(tmp_path / "B")]) != 0
    assert "has no rows of training" in capsys.readouterr().err


def test_the_first_difference_of_rows_is_found():
    first_row = comparison.first_row
    same = {"step": 1, "loss": 2.0, "fingerprint/params": "ab"}
    row = {"step": 2, "loss": 2.0, "fingerprint/params": "cd"}
    assert first_row([same, row], [same, dict(row)]) is None
    # A state that differs is named before the values computed from it.
    other = {**row, "loss": 3.0, "fingerprint/params": "ef"}
    difference = first_row([same, row], [same, other])
    assert difference == (2, "fingerprint/params", "cd", "ef")
    other = {**row, "loss": None}
    assert first_row([same, row], [same, other]) == (2, "loss", 2.0, None)
    assert first_row([same], [same, row])[:2] == (2, "fingerprint/params")
