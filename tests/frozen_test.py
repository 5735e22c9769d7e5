"""Parameters that are not trained, by their paths."""

import jax
import numpy as np
import pytest

import xshard
from tests import rows, toy
from tests.optimizers import harness
from xshard import checkpoint, errors, loop

HALVES, PAIRS = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1), (2, 3))
HALF = {"precision": "params=float32,compute=float16,output=float32"}
VARIANTS = [
    HALF,
    {**HALF, "group_assignment": HALVES, "reduction.shard_update": True, "hidden": 20},
    {"group_assignment": PAIRS, "model_parallel": 2, "micro_batches": 2},
    {"slices": 2, "reduction.shard_update": True, "micro_batches": 2, "on_nonfinite": "skip"},
]
FIRST, LAST = "mlp/~/linear_0", "mlp/~/linear_1"


def config(**changes):
    made = toy.get_config()
    made.experiment = "tests.toy.Kept"
    made.kept = "linear_0/"
    made.update_from_flattened_dict({"steps": 4, **changes})
    return made.lock()


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_what_is_frozen_has_no_slots_and_stays_bit_by_bit(tmp_path, changes):
    made = config(**changes)
    run = loop.Run(made, str(tmp_path / "run"))
    first = run.checkpoints.states.init().experiment.params
    for steps in (2, 4):
        assert loop.run(config(**{**changes, "steps": steps}), str(tmp_path / "run"), "") == 0
    state = rows.final_state(tmp_path / "run", made)
    names = [
        f"{rule}/{slot}" for rule, slots in state.experiment.opt_state.items() for slot in slots
    ]
    assert not [name for name in names if "linear_0" in name]
    assert [name for name in names if "average" in name and "linear_1" in name]
    for name, x in state.experiment.params[FIRST].items():
        np.testing.assert_array_equal(x, first[FIRST][name])
    assert np.any(state.experiment.params[LAST]["w"] != first[LAST]["w"])
    # Whether it was stopped or not.
    assert loop.run(made, str(tmp_path / "whole"), "") == 0
    harness.assert_equal(state, rows.final_state(tmp_path / "whole", made))


def test_it_is_what_gradients_of_none_do(tmp_path):
    """In the same bits: nothing else of a step is another."""
    ends = []
    for experiment in ("tests.toy.Kept", "tests.toy.Frozen"):
        made = config(experiment=experiment)
        assert loop.run(made, str(tmp_path / experiment), "") == 0
        ends.append(rows.final_state(tmp_path / experiment, made))
    harness.assert_equal(*ends)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ("^mlp/~/linera_0", "matches no parameter's path; near it: .*mlp/~/linear_0"),
        ("mlp", "all parameters"),
        ("(", "not a regular expression"),
    ],
)
def test_a_pattern_that_does_not_fit_is_named(tmp_path, kept, message):
    with pytest.raises(errors.UserError, match=message):
        loop.run(config(kept=kept), str(tmp_path / "run"), "")
    assert not (tmp_path / "run").exists()


def test_a_warm_start_with_a_frozen_body(tmp_path):
    trained = config(experiment="tests.toy.Averaged")
    assert loop.run(trained, str(tmp_path / "body"), "") == 0
    source = checkpoint.Source(str(tmp_path / "body"), "^params/.*linear_0/")
    assert loop.run(config(), str(tmp_path / "head"), "", source) == 0
    body, head = (xshard.load(tmp_path / name).params for name in ("body", "head"))
    jax.tree.map(np.testing.assert_array_equal, head[FIRST], body[FIRST])
    assert np.any(head[LAST]["w"] != body[LAST]["w"])
