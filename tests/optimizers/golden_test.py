"""Tests that names, types and shapes of optimizer state do not change.

The names are the keys of a checkpoint.

After an intended change run: python -m tests.optimizers.golden_test --regenerate
"""

import json
import pathlib
import sys

import jax
import pytest

from tests.optimizers import harness, table

GOLDEN = pathlib.Path(__file__).with_name("golden_state.json")


def layout(name):
    """Returns the types and shapes of the state, by their names in a checkpoint."""
    _, state = jax.eval_shape(
        table.make_step(name).init, None, harness.params(), harness.batch()
    )
    return {
        f"{module}/{key}": f"{leaf.dtype}{list(leaf.shape)}"
        for module, entries in state.items()
        for key, leaf in entries.items()
    }


@pytest.mark.parametrize("name", table.NAMES)
def test_state_names_are_stable(name):
    assert layout(name) == json.loads(GOLDEN.read_text())[name]


def test_the_golden_file_lists_the_optimizers_of_the_table():
    assert json.loads(GOLDEN.read_text()).keys() == set(table.NAMES)


if __name__ == "__main__" and "--regenerate" in sys.argv:
    layouts = {name: layout(name) for name in table.NAMES}
    GOLDEN.write_text(json.dumps(layouts, indent=1) + "\n")
