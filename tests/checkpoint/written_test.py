"""Tests that work directories of earlier versions open and resume; see
written/README.md.
"""

import json
import pathlib
import shutil
import warnings

import numpy as np
import pytest

from configs import digits
from tests import winged
from tests.checkpoint import write_runs
from xshard import config as config_lib
from xshard.checkpoint import __main__ as tool
from xshard.metrics import rows as rows_lib
from xshard.training import fingerprint

WRITTEN = pathlib.Path(__file__).parent / "written"
CONFIGS = {
    name: config_lib.flatten(write_runs.config_of(name).to_dict())
    for name in write_runs.RUNS
}
# By how much values may differ on another kind of machine, absolutely and relatively.
TOLERANCE = 0.05
# Keys that change nothing that a step computes, or only where there are several
# processes or damage.
NO_EFFECT = (
    "experiment",
    "steps_per_dispatch",
    "on_divergence",
    "max_skips_in_a_row",
    "roll_back.limit",
    "prometheus.port",
    "samples_every_steps",
    "compiled.directory",
    "checkpoint.directory",
    "checkpoint.every_minutes",
    "checkpoint.keep_every_steps",
    "checkpoint.keep_hours",
    "checkpoint.keep_best",
    "checkpoint.best_mode",
    "checkpoint.on_failure",
    "checkpoint.budget_gb",
)


def run_tool(capsys, command, directory):
    """Returns what a command of the checkpoint tool prints about a directory."""
    capsys.readouterr()
    assert tool.main([command, str(directory), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def within(name, expected, logged):
    """Asserts that a resume on another kind of machine logged what the recorded one
    did, within rounding.

    A row has the fingerprints of the state before its step. So the first one has those
    of the restored state, which must have the same bits as when it was saved.
    """
    expected = [rows_lib.flat(row) for row in expected]
    logged = [rows_lib.flat(row) for row in logged]
    assert [row["step"] for row in logged] == [row["step"] for row in expected]
    prefix = fingerprint.PREFIX
    restored = next(row for row in expected if any(x.startswith(prefix) for x in row))
    for left, right in zip(expected, logged, strict=True):
        assert left.keys() == right.keys()
        for column, value in left.items():
            where = f"{name}, step {left['step']}, {column}"
            if column.startswith(prefix):
                if left is restored:
                    assert right[column] == value, where
            elif isinstance(value, str):
                # The path of a parameter; or a checksum, which rounding changes.
                is_checksum = column.startswith(("state/", "samples"))
                assert is_checksum or right[column] == value, where
            else:
                # A value that is not finite is null.
                np.testing.assert_allclose(
                    np.array(right[column], float),
                    np.array(value, float),
                    rtol=TOLERANCE,
                    atol=TOLERANCE,
                    err_msg=where,
                )


@pytest.mark.filterwarnings("default:.*compared within")
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", winged.needing(CONFIGS))
def test_a_run_of_each_config_and_key_resumes(tmp_path, monkeypatch, name):
    directory = write_runs.copy(name, tmp_path)
    # The texts have relative names.
    monkeypatch.chdir(tmp_path)
    changed = write_runs.machine_changes(directory)
    if changed and write_runs.is_exact(name):
        # It refuses to go on where its bits may differ.
        write_runs.move_here(directory)
    logged = write_runs.resume(name, directory)
    expected = write_runs.recorded(name)
    steps = [row["step"] for row in logged if fingerprint.PREFIX + "params" in row]
    assert steps == list(range(write_runs.SAVED + 1, write_runs.STEPS + 1))
    why = write_runs.CHANGED.get(name)
    if changed:
        machine = "not those of the machine that recorded the rows"
        why = f"the {', '.join(changed)} are {machine}"
    if why is None:
        assert list(write_runs.differences(expected, logged)) == []
        return
    warnings.warn(
        f"{name}: compared within {TOLERANCE}, and not bit by bit, since {why}",
        stacklevel=1,
    )
    within(name, expected, logged)


def test_each_config_has_a_kept_work_directory():
    folder = pathlib.Path(digits.__file__).parent
    names = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert names <= write_runs.RUNS.keys()


def test_each_key_that_changes_what_a_step_computes_has_a_kept_work_directory():
    changed = set(NO_EFFECT)
    for name in write_runs.RUNS:
        for key in config_lib.KEYS:
            if CONFIGS[name].get(key.name, key.default) != key.default:
                changed.add(key.name)
    assert [key.name for key in config_lib.KEYS if key.name not in changed] == []


def test_each_run_has_a_kept_work_directory_and_no_other_has_one():
    kept = {path.name for path in WRITTEN.iterdir() if path.is_dir()}
    assert kept - {write_runs.TEXT} == write_runs.RUNS.keys()
    logged = {path.stem for path in WRITTEN.glob("*.jsonl")}
    assert logged == kept - {write_runs.TEXT}


def test_rows_of_another_machine_may_differ_by_rounding_only():
    for name in write_runs.RUNS:
        within(name, write_runs.recorded(name), write_runs.recorded(name))
    name = "shard_update"
    expected = write_runs.recorded(name)
    changed = lambda **values: [expected[0] | values, *expected[1:]]
    loss = expected[0]["loss"]
    within(name, expected, changed(loss=loss + 1e-4))
    checksums = {"samples": "0", "state/global_step": "0"}
    within(name, expected, [*expected[:-1], expected[-1] | checksums])
    for wrong in (
        changed(loss=loss + 1),
        changed(loss=None),
        changed(step=12),
        changed(further=1.0),
        changed(**{"fingerprint/params": "0"}),
        expected[1:],
    ):
        with pytest.raises(AssertionError):
            within(name, expected, wrong)


def test_every_bit_of_two_resumes_is_compared():
    rows_of = write_runs.recorded("warn")
    assert list(write_runs.differences(rows_of, rows_of)) == []
    loss = rows_of[0]["loss"]
    for step, name, value in (
        (11, "loss", float(np.nextafter(loss, 1))),
        (11, "loss", None),
        (11, "fingerprint/params", "0"),
        (11, "further", 1.0),
        (20, "state/global_step", "0"),
    ):
        i = 0 if step == 11 else -1
        changed = [dict(row) for row in rows_of]
        changed[i][name] = value
        assert list(write_runs.differences(rows_of, changed)) == [(step, name)]
    assert list(write_runs.differences(rows_of, rows_of[:-1]))


def another_checkout(folder):
    """Copies what runs need of this checkout."""
    other = folder / "other"
    for part in ("xshard", "configs", "experiments", "tests/checkpoint"):
        ignored = shutil.ignore_patterns("written", "__pycache__")
        shutil.copytree(write_runs.ROOT / part, other / part, ignore=ignored)
    shutil.copy(write_runs.ROOT / "tests/__init__.py", other / "tests")
    return other


def change(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def change_average(other):
    file = other / "xshard/optimizers/moving_average.py"
    change(file, "average - change)", "average - 1.0001 * change)")


@pytest.mark.long
@pytest.mark.wing("roll_backs")
@pytest.mark.wing("loss_jumps")
def test_two_checkouts_are_compared(tmp_path, capsys):
    """One of them computes another average."""
    other = another_checkout(tmp_path)
    command = ["compare", "--only=shard_update", "--only=roll_back_jump"]
    assert write_runs.main([*command, f"--old={other}"]) == 0
    assert "2 of 2 are equal bit by bit" in capsys.readouterr().out
    change_average(other)
    assert write_runs.main([*command, f"--old={other}"]) == 1
    said = capsys.readouterr().out
    assert "1 of 2 are equal bit by bit" in said
    assert "differs at step 12: fingerprint/slots" in said


@pytest.mark.long
def test_two_checkouts_train_anew(tmp_path, capsys):
    """One of them computes another average, and has other keys and rows."""
    other = another_checkout(tmp_path)
    change_average(other)
    tests = other / "tests/checkpoint"
    change(tests / "written_experiments.py", "config.kept", "config.held")
    change(tests / "write_runs.py", "RUNS = {", 'RUNS = {"warned": _curve(),')
    only = [f"--only={name}" for name in ("shard_update", "warn*", "injected")]
    assert write_runs.main(["compare", f"--old={other}", "--anew", *only]) == 1
    said = capsys.readouterr().out
    assert "left out, since the old checkout has no key kept\n" in said
    assert "differs at step 2: fingerprint/slots, and " in said
    assert "1 of 4 are equal bit by bit, 2 left out: warned, injected" in said


@pytest.mark.parametrize(
    ("run", "lacks"),
    [
        (write_runs.RUNS["digits"], ""),
        (write_runs.Run("configs.none", {}), "config configs.none"),
        (write_runs.Run("configs.digits", {"model.none": 1}), "key model.none"),
        (
            write_runs.Run("configs.gan", {"experiment": "tests.no"}),
            "experiment tests.no",
        ),
        (write_runs.Run("configs.gan", {"experiment": "no.No"}), "experiment no.No"),
    ],
)
def test_what_a_checkout_lacks_of_a_run_is_named(run, lacks):
    assert write_runs.lacking(run) == lacks


def test_what_only_one_of_two_checkouts_logs_is_named():
    outcome = lambda **end: {"logged": [end | {"step": 1}], "error": "", "lacks": ""}
    old = outcome(loss=[1.0], mistake=[0.5])
    new = outcome(loss=[1.0], error=[0.5])
    said = write_runs._verdict(old, new)
    assert said.endswith("only the old one has mistake; only the new one has error")
    assert write_runs._verdict(old, new, ["mistake", "err*"]) == "equal"
