"""Tests of what a run that must continue bit for bit may resume with."""

import pathlib

import pytest

from xshard import errors
from xshard.files import provenance

SCHEDULER = f"--{provenance.SCHEDULER_FLAG}=false"


def compare(old, new):
    return provenance.compare(
        provenance.Provenance("", "", "", flags=old),
        provenance.Provenance("", "", "", flags=new),
        pathlib.Path("run"),
        exact=True,
    )


@pytest.mark.parametrize(
    "rest", ["", "XLA_FLAGS=--xla_a=1", "LIBTPU_INIT_ARGS=--xla_b=2"]
)
def test_a_run_from_before_the_scheduler_was_turned_off_resumes(rest):
    with_scheduler = f"XLA_FLAGS={SCHEDULER}"
    if rest.startswith("XLA"):
        with_scheduler = f"{rest} {SCHEDULER}"
    elif rest:
        with_scheduler += f" {rest}"
    assert compare(rest, with_scheduler) == []
    assert compare(with_scheduler, rest) == []


def test_other_flags_are_refused():
    changed = "Its flags changed from XLA_FLAGS=--xla_a=1 to none"
    with pytest.raises(errors.UserError, match=changed):
        compare("XLA_FLAGS=--xla_a=1", "")
    with pytest.raises(errors.UserError, match="flags changed"):
        compare(f"XLA_FLAGS=--xla_a=1 {SCHEDULER}", f"XLA_FLAGS=--xla_a=2 {SCHEDULER}")
