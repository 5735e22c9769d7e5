"""Tests of the speeds that rows of a run have with this wing."""

import jax
import pytest

from tests import rows, toy, winged
from xshard import loop
from xshard.metrics import chips

pytestmark = pytest.mark.usefixtures("shared_programs")

FLOPS = "perf/flops_per_second"
UTILISATION = "perf/utilisation"


class Unknown(toy.Toy):
    """Has a matrix product in a loop of an unknown number of iterations."""

    def loss(self, outputs, batch):
        value, metrics = super().loss(outputs, batch)
        product = lambda x: jax.lax.stop_gradient(x @ x.T + 1)
        below = lambda x: x[0, 0] < 3
        square = jax.lax.while_loop(below, product, batch["x"][:2, :2])
        return value + 0 * square[0, 0], metrics


def train(directory, experiment="tests.toy.Wide", run=winged.run):
    """Makes two steps; returns their rows."""
    config = toy.get_config()
    config.experiment = experiment
    config.steps = 2
    config.log_every_steps = 1
    assert run(config, str(directory), "") == 0
    return [row for row in rows.read(directory) if row["kind"] == "train"]


def test_rows_have_the_rate_of_model_flops_and_its_fraction_of_the_peak(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(chips, "peak_flops", lambda kind, dtype: 1e9)
    for row in train(tmp_path):
        flops = 3 * 2 * 16 * (3 * 16 + 16)
        assert row[FLOPS] == pytest.approx(flops * row["perf/steps_per_second"], 1e-4)
        peak = 1e9 * jax.device_count()
        assert row[UTILISATION] == pytest.approx(row[FLOPS] / peak, 1e-4)


def test_an_unknown_peak_leaves_out_the_fraction(tmp_path):
    for row in train(tmp_path):
        assert FLOPS in row and UTILISATION not in row


def test_why_flops_cannot_be_counted_is_said_once(tmp_path, capsys):
    for row in train(tmp_path, f"{__name__}.Unknown"):
        assert FLOPS not in row and "perf/steps_per_second" in row
    assert capsys.readouterr().out.count("model FLOPs are not logged: There is") == 1


def test_a_run_without_the_wing_has_the_other_speeds(tmp_path):
    for row in train(tmp_path, run=loop.run):
        assert FLOPS not in row and "perf/steps_per_second" in row
