"""Tests of the record of a run's roll-backs."""

import json

import msgspec
import pytest

from tests import toy
from xshard import errors, loop
from xshard.run import roll_backs

pytestmark = pytest.mark.usefixtures("shared_programs")

ENTRY = {
    "step": 7,
    "why": "",
    "restored": 4,
    "first_batch": 5,
    "last_batch": 7,
    "given_up": [],
    "update_scale": 1.0,
}


@pytest.mark.parametrize(
    "content",
    [json.dumps([{**ENTRY, "update_scale": 0}]), "{}", "[1]", '[{"step": 1}]', "["],
)
def test_a_record_that_no_run_can_have_written_is_refused(tmp_path, content):
    config = toy.get_config().lock()
    assert loop.run(config, str(tmp_path), "") == 0
    (tmp_path / "roll_backs.json").write_text(content)
    with pytest.raises(errors.UserError, match=r"roll_backs.json"):
        loop.run(config, str(tmp_path), "")


def test_a_record_is_read_as_it_was_written(tmp_path):
    (tmp_path / "roll_backs.json").write_text(json.dumps([ENTRY]))
    (entry,) = roll_backs.read(tmp_path / "roll_backs.json")
    assert msgspec.to_builtins(entry) == ENTRY
    assert roll_backs.batches_to_skip([entry]) == {5: 3}
