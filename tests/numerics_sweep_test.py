"""Tests that a sample of the sweep of numerics holds, and that it finds errors."""

import collections

import jax.numpy as jnp
import pytest

from tests import numerics_sweep
from xshard.optimizers import loss_scale, moving_average, skips


@pytest.mark.sample(3)
@pytest.mark.parametrize("number", range(100))
def test_a_program_holds_with_each_pattern_of_faults(number):
    failures = numerics_sweep.failures(number, range(numerics_sweep.PATTERNS))
    assert list(failures) == []


def test_each_value_of_each_key_is_drawn():
    counts = collections.Counter()
    for number in range(1000):
        counts.update(numerics_sweep.draw_choice(number).items())
    for key, values in numerics_sweep.VALUES.items():
        for value in values:
            assert counts[key, value] >= 5, (key, value)


def test_each_kind_of_fault_is_drawn():
    counts = collections.Counter()
    for number in range(200):
        choice = numerics_sweep.draw_choice(number)
        for pattern in range(numerics_sweep.PATTERNS):
            faults, _ = numerics_sweep.draw_faults(choice, number, pattern)
            counts.update(fault.kind for fault in faults)
    assert counts.keys() == set(numerics_sweep.FAULTS)


def first_program(**wanted):
    """Returns the number of the first program that draws these values."""
    number = 0
    while not wanted.items() <= numerics_sweep.draw_choice(number).items():
        number += 1
    return number


@pytest.mark.parametrize(
    "wanted, module, name, wrong, message",
    [
        (
            {"layout": "1 replica", "loss_scale": "dynamic"},
            loss_scale,
            "all_finite",
            lambda grads: jnp.asarray(True),
            "skipped is 0",
        ),
        (
            {"layout": "2 replicas", "shards": "update", "rule": "adam"},
            skips,
            "restore_unless_applied",
            lambda applied, writes: None,
            "moved in a skipped step",
        ),
        (
            {"layout": "1 replica", "average": "constant"},
            moving_average.MovingAverageOptimizer,
            "_rate",
            lambda self, count, dtype: jnp.asarray(0.2, dtype),
            "/average/",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_an_error_in_the_package_is_found(
    monkeypatch, wanted, module, name, wrong, message
):
    number = first_program(**wanted, on_nonfinite="skip", estimate_statistics=False)
    monkeypatch.setattr(module, name, wrong)
    failures = "".join(numerics_sweep.failures(number, range(1, 4)))
    assert f"--only={number}:" in failures
    assert message in failures
