"""A run that rolls back, for tests of what makes it do so."""

import json

from tests import rows, toy
from tests.optimizers import harness

HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))
# Batch 7 makes step 7 bad. After the roll-back to step 4, which skips batches 5 to 7,
# batch 11 makes step 8 bad.
TWO = ((0, 7), (0, 11))


def make_config(**changes):
    """Returns a config of twelve steps: each fourth is saved, each third evaluated."""
    config = toy.get_config()
    config.update(
        {
            "experiment": "tests.toy.Poisoned",
            "poisoned": TWO,
            "on_nonfinite": "roll_back",
        }
    )
    config.update({"log_every_steps": 1, "writers": ("jsonl",), "eval_every_steps": 3})
    config.checkpoint.update({"every_steps": 4, "keep_last": 1, "best_metric": "error"})
    for name in ("limit", "loss_factor", "loss_steps", "learning_rate_factor"):
        config.roll_back[name] = changes.pop(name, config.roll_back[name])
    config.checkpoint.keep_best = changes.pop("keep_best", 0)
    with config.unlocked():
        config.update(changes)
    return config.lock()


def recorded(directory):
    """Returns the recorded roll-backs of a run."""
    return json.loads((directory / "roll_backs.json").read_text())


def rows_of(directory):
    """Returns the rows about roll-backs.

    Each is (step, number, step in trouble, first batch, last batch).
    """
    names = ("number", "trouble_step", "first_batch", "last_batch")
    records = [row for row in rows.read(directory) if "roll_back/number" in row]
    return [
        (row["step"], *(row[f"roll_back/{name}"] for name in names)) for row in records
    ]


def assert_same(directory, other, config):
    """Asserts that two runs have the same state, rows, results and roll-backs."""
    harness.assert_equal(
        rows.final_state(directory, config), rows.final_state(other, config)
    )
    assert rows.same_bits(directory) == rows.same_bits(other)
    assert rows.results(directory) == rows.results(other)
    keys = ("step", "why", "restored", "first_batch", "last_batch")
    left, right = (
        [[entry[k] for k in keys] for entry in recorded(x)] for x in (directory, other)
    )
    assert left == right
