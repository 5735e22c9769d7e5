"""Tests of parameters that an experiment freezes by their paths."""

import jax
import numpy as np
import pytest

import xshard
from tests import rows, toy
from tests.optimizers import harness
from xshard import checkpoint, errors, loop

HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))
PAIRS = ((0, 1), (2, 3))
HALF = {"precision": "params=float32,compute=float16,output=float32"}
VARIANTS = [
    HALF,
    {**HALF, "group_assignment": HALVES, "reduction.shard_update": True, "hidden": 20},
    {"group_assignment": PAIRS, "model_parallel": 2, "micro_batches": 2},
    {
        "slices": 2,
        "reduction.shard_update": True,
        "micro_batches": 2,
        "on_nonfinite": "skip",
    },
]
FIRST = "mlp/~/linear_0"
LAST = "mlp/~/linear_1"


def config(**changes):
    config_of_run = toy.get_config()
    config_of_run.experiment = "tests.toy.Kept"
    config_of_run.kept = "linear_0/"
    config_of_run.update_from_flattened_dict({"steps": 4, **changes})
    return config_of_run.lock()


@pytest.mark.sample(1, of="freezing")
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_frozen_parameters_have_no_slots_and_keep_their_bits(tmp_path, changes):
    config_of_run = config(**changes)
    run = loop.Run(config_of_run, str(tmp_path / "run"))
    first = run.checkpoints.init_state(run.batches.example).experiment.params
    for steps in (2, 4):
        assert (
            loop.run(config(**{**changes, "steps": steps}), str(tmp_path / "run"), "")
            == 0
        )
    state = rows.final_state(tmp_path / "run", config_of_run)
    names = [
        f"{rule}/{slot}"
        for rule, slots in state.experiment.opt_state.items()
        for slot in slots
    ]
    assert not [name for name in names if "linear_0" in name]
    assert [name for name in names if "average" in name and "linear_1" in name]
    for name, x in state.experiment.params[FIRST].items():
        np.testing.assert_array_equal(x, first[FIRST][name])
    assert np.any(state.experiment.params[LAST]["w"] != first[LAST]["w"])
    # A run without an interruption ends in the same state.
    assert loop.run(config_of_run, str(tmp_path / "whole"), "") == 0
    harness.assert_equal(state, rows.final_state(tmp_path / "whole", config_of_run))


@pytest.mark.sample(1, of="freezing")
def test_freezing_equals_gradients_that_are_none(tmp_path):
    """Both ways end in the same bits, so nothing else in a step differs."""
    ends = []
    for experiment in ("tests.toy.Kept", "tests.toy.Frozen"):
        config_of_run = config(experiment=experiment)
        assert loop.run(config_of_run, str(tmp_path / experiment), "") == 0
        ends.append(rows.final_state(tmp_path / experiment, config_of_run))
    harness.assert_equal(*ends)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ("^mlp/~/linera_0", "matches no parameter's path; near it: .*mlp/~/linear_0"),
        ("mlp", "all parameters.*or leave out frozen if the step never updates"),
        ("(", "not a regular expression"),
    ],
)
def test_a_pattern_that_does_not_fit_is_refused(tmp_path, kept, message):
    with pytest.raises(errors.UserError, match=message):
        loop.run(config(kept=kept), str(tmp_path / "run"), "")
    assert not (tmp_path / "run").exists()


def test_a_warm_start_with_a_frozen_body(tmp_path):
    trained = config(experiment="tests.toy.Averaged")
    assert loop.run(trained, str(tmp_path / "body"), "") == 0
    source = checkpoint.Source(str(tmp_path / "body"), "^params/.*linear_0/")
    assert loop.run(config(), str(tmp_path / "head"), "", source) == 0
    # A new run takes the parameters that train, not their averages.
    body = xshard.load(tmp_path / "body").state.experiment.params
    head = xshard.load(tmp_path / "head").state.experiment.params
    jax.tree.map(np.testing.assert_array_equal, head[FIRST], body[FIRST])
    assert np.any(head[LAST]["w"] != body[LAST]["w"])
