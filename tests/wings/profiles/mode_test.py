"""Tests of the mode that traces chosen steps."""

import gzip
import json

import jax
import pytest

from tests import toy, winged
from xshard import errors
from xshard.wings.profiles import mode


def test_the_chosen_steps_are_traced_and_the_run_stays_unchanged(tmp_path, capsys):
    config = toy.get_config().lock()
    assert winged.run(config, str(tmp_path), "") == 0
    before = {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}
    assert mode.run(config, str(tmp_path), "3:5", None) == 0
    (path,) = tmp_path.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    numbers = {
        e["args"]["step_num"]
        for e in events
        if e.get("name") == "train" and "args" in e
    }
    # The requested steps count from the run's last checkpoint, which is of step 12.
    assert numbers == {"16", "17"}
    assert {p: p.read_bytes() for p in before} == before
    assert "steps 16 to 17 will be traced" in capsys.readouterr().out


@pytest.mark.parametrize("steps", ["", "3", "5:5", "5:3", "-1:3", "a:b"])
def test_malformed_ranges_of_steps_are_refused(tmp_path, steps):
    with pytest.raises(ValueError, match="--profile_steps=.* must be FIRST:END"):
        mode.run(toy.get_config().lock(), str(tmp_path), steps, None)


def test_a_trace_that_was_not_written_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: None)
    with pytest.raises(
        errors.UserError, match="JAX wrote no trace into .*profile.*, or an empty"
    ):
        mode.run(toy.get_config().lock(), str(tmp_path), "0:1", None)
