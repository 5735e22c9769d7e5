"""Tests of the checks that run on accelerators, on the CPU's virtual devices."""

import jax
import numpy as np
import pytest

from benchmarks import checks
from benchmarks import sides as sides_lib
from tests import toy
from xshard import loop


@pytest.fixture(autouse=True)
def as_outside_of_tests():
    """Lets dtypes mix, as the steps by hand do."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_each_check_passes_on_this_cpu():
    assert "8 devices hold the same bits" in checks.rules()
    assert "kept their bits; 8 devices" in checks.skips()
    assert "have the same bits on 1 and 8 devices" in checks.exact()


def test_another_update_is_found(monkeypatch):
    def slower(loss):
        init, local = sides_lib.by_hand(loss, conditional=True)

        def halved(state, x):
            return local(state, x / 2)

        return init, halved

    monkeypatch.setitem(sides_lib.SIDES, "hand", slower)
    with pytest.raises(AssertionError, match="of what was trained differs"):
        checks.rules()


def test_a_step_that_is_not_skipped_is_found(monkeypatch):
    unscaled = sides_lib.SIDES["rules, unscaled"]
    monkeypatch.setitem(sides_lib.SIDES, "rules", unscaled)
    with pytest.raises(AssertionError, match="a skipped step changed"):
        checks.skips()


def test_one_other_bit_on_more_devices_is_found(monkeypatch):
    def rounded_otherwise(config, devices):
        up = np.float32(1 if len(devices) == 1 else 2)
        return {"w": np.nextafter(np.float32(1), up)}, 2

    monkeypatch.setattr(checks, "_trained", rounded_otherwise)
    with pytest.raises(AssertionError, match="1 and 8 devices differ in"):
        checks.exact()


def test_an_export_is_compared_with_its_run(tmp_path, monkeypatch):
    assert loop.run(toy.get_config().lock(), str(tmp_path), "") == 0
    assert "of the largest output of 8 examples" in checks.exported(tmp_path)
    call = checks.jax_export.Exported.call
    monkeypatch.setattr(
        checks.jax_export.Exported, "call", lambda self, batch: 1.01 * call(self, batch)
    )
    with pytest.raises(AssertionError, match="the export differs by 0.01"):
        checks.exported(tmp_path)
