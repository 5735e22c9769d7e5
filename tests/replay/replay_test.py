"""The replay of a step: the comparison with the logged rows, and the search for a
fault.
"""

import inspect
import json
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xshard
from configs import digits
from tests import programs, toy
from tests.replay import planted
from xshard import cli, loop
from xshard.pod import status
from xshard.replay import __main__ as program
from xshard.replay import dataflow, diagnosis, observations

KINDS = {
    "zero_over_zero": {},
    "inf_minus_inf": {"micro_batches": 2, "loss_scale": "dynamic"},
    "logarithm": {"groups": 2, "shard_update": True},
    "power": {"layer": 2, "shard_update": True},
    "root_gradient": {"layer": 0},
    "bad_example": {"loss_scale": "dynamic", "shard_update": True},
    "forward_overflow": {"precision": planted.FLOAT16, "loss_scale": "dynamic"},
    "gradient_overflow": {
        "precision": planted.FLOAT16,
        "loss_scale": "dynamic",
        "micro_batches": 2,
    },
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_fault_is_named(tmp_path, kind):
    with programs.shared(besides=("example",)):
        for example in (0, 37, 64, 127):
            fault = planted.Fault(kind, example=example, **KINDS[kind])
            directory = tmp_path / str(example)
            planted.train(fault, directory)
            before = contents(directory)
            assert not planted.wrong(fault, directory), fault
            assert contents(directory) == before


@pytest.mark.sample(3, of="replays")
@pytest.mark.parametrize("kind", planted.OTHERS)
def test_a_fault_in_a_nested_function_or_a_mask_is_named(tmp_path, kind):
    fault = planted.Fault(kind, loss_scale="dynamic", groups=2)
    planted.train(fault, tmp_path)
    assert not planted.wrong(fault, tmp_path)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A run that skipped its third step, because an example was not finite, and
    continued to its end.
    """
    directory = tmp_path_factory.mktemp("run")
    config = toy.get_config()
    config.update(
        {"experiment": "tests.toy.Poisoned", "steps": 6, "poisoned": ((0, 3),)}
    )
    config.update(
        {
            "loss_scale": {"kind": "dynamic"},
            "log_every_steps": 2,
            "writers": ("jsonl",),
        }
    )
    config.checkpoint.update({"every_steps": 2, "keep_last": 3})
    assert loop.run(config.lock(), str(directory), "") == 0
    return directory


def replay(directory, capsys, *options):
    """Replays a run that is reproduced; returns what this prints, without what was
    printed before.
    """
    capsys.readouterr()
    assert program.main([str(directory), *options]) == 0
    return capsys.readouterr().out


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def rewrite(directory, tmp_path, change):
    """Copies a run with its rows changed; returns the directory of the copy."""
    copy = tmp_path / "copy"
    for path, content in contents(directory).items():
        place = copy / path.relative_to(directory)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    metrics = copy / "metrics.jsonl"
    lines = [change(json.loads(line)) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return copy


@pytest.mark.sample(3, of="replays")
def test_the_first_skipped_step_is_replayed_by_default(directory, capsys):
    # The skipped step lies between two logged rows; the second one counts it.
    before = contents(directory)
    output = replay(directory, capsys)
    assert "step 3, repeated from the checkpoint of step 2" in output
    assert "not finite before the step: the batch's 'y' is nan" in output
    assert "replica 0 of 8\n" in output and "(row 0 of the batch)" in output
    assert "reaches      the loss, the gradient of mlp/~/linear_0/b" in output
    assert contents(directory) == before


def test_a_finite_step_is_reproduced(directory, capsys):
    output = replay(directory, capsys, "--step=4")
    assert "1 rows compared: reproduced, bit for bit" in output
    assert output.endswith("Every value that reaches a result of the step is finite.\n")


@pytest.fixture
def standard_promotion():
    # Haiku's dropout multiplies by booleans, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.sample(3, of="replays")
@pytest.mark.usefixtures("standard_promotion")
def test_another_config_answers_what_would_be_finite_as_the_guide_shows(
    tmp_path, capsys
):
    """The guide's report and questions are those of this run."""
    guide = pathlib.Path("docs/when_a_run_goes_wrong.md").read_text()
    config = digits.get_config()
    (flag,) = re.findall("After a run of digits with `(.*)`,", guide)
    cli.override(config, [flag])
    # The width changes nothing of the report.
    config.model.update({"channels": 2, "hidden": 4})
    config.update({"steps": 2, "writers": ("jsonl",)})
    assert loop.run(config.lock(), str(tmp_path), "") == 0
    (report,) = re.findall("```text\n(step 1, .*?)\\.\\.\\.\n```", guide, re.DOTALL)
    assert report in replay(tmp_path, capsys)
    questions = re.findall(
        "^python -m xshard.replay runs/digits (--step.*)$", guide, re.M
    )
    assert len(questions) == 2
    for question in questions:
        step, flag = question.split()
        output = replay(tmp_path, capsys, step, flag)
        name, _, value = flag.removeprefix("--").partition("=")
        assert (
            f"changed since the run: {name}: " in output and f"-> {value}\n" in output
        )
        assert "step 1, repeated from the first state\nno row to compare" in output
        assert "Every value that reaches a result of the step is finite." in output


def test_values_that_the_config_of_a_run_cannot_have_are_refused(directory, capsys):
    for flag, message in {
        "--config.stepz=3": "--config.stepz: the run's config has no such key; did you "
        "mean steps",
        "--config.steps.of=3": "--config.steps.of: the run's config has no such key",
        "--config.steps=many": "--config.steps=many must be an integer",
        "--config.steps=0": "steps=0 must be an integer of at least 1",
    }.items():
        assert program.main([str(directory), flag]) == 1
        assert message in capsys.readouterr().err


def test_what_a_scan_carries_alone_comes_from_the_round_before():
    scan = lambda x: jax.lax.scan(lambda sum_, x: (sum_ + x, sum_ * x), x[0], x)
    numbering = dataflow._Numbering()
    numbering.function(jax.make_jaxpr(scan)(jnp.ones(3)))
    inputs = [x for x in numbering.values if x.loops and not x.place]
    sources = [[numbering.values[i].primitive for i in x.sources] for x in inputs]
    # The sum and the array, which begin as the scan's operands.
    assert [names[1:] for names in sources] == [["add"], []]


def test_the_rounds_of_a_while_loop_are_observed():
    def f(x, least, factor):
        return jax.lax.while_loop(lambda x: x > least, lambda x: x * factor, x)

    inputs = [jnp.float32(x) for x in (8, 1, 0.5)]
    numbering = dataflow._Numbering()
    function, _ = numbering.function(jax.make_jaxpr(f)(*inputs))
    program = types.SimpleNamespace(values=numbering.values, gradients={})
    evaluation = observations._Evaluation(program)
    nothing = evaluation.nothing_observed()
    results, observed = evaluation.run(function, inputs, (), nothing)
    assert results == [1.0]
    largest = {}
    for value, magnitude in zip(numbering.values, observed.largest, strict=True):
        largest[value.primitive, bool(value.loops)] = magnitude
    assert largest["mul", True] == 4 and largest["while", False] == 1


def test_a_value_of_a_replica_with_one_row_depends_on_no_other():
    some = types.SimpleNamespace
    step = some(
        _observed=some(largest=[np.inf]),
        _observe=lambda state, batch: some(bad=lambda replica, value: True),
        _step=some(state=None, batch={"x": jnp.zeros(1)}),
    )
    assert diagnosis.Diagnosis._find_rows(step, 0, [0]) is None


@pytest.mark.sample(3, of="replays")
def test_a_changed_row_is_reported_as_not_reproduced(directory, tmp_path, capsys):
    def change(row):
        if row["step"] == 4 and "loss" in row:
            row["loss"] = float(np.nextafter(np.float32(row["loss"]), np.float32(9)))
        return row

    copy = rewrite(directory, tmp_path, change)
    origin = json.loads((copy / "origin.json").read_text())
    (copy / "origin.json").write_text(
        json.dumps({**origin, "libraries": "jax 0.0.1", "flags": "XLA_FLAGS=--xla_x"})
    )
    # The replay of step 6 begins at the checkpoint of step 4, after the changed row.
    assert program.main([str(copy), "--step=6"]) == 0
    assert program.main([str(copy), "--step=4"]) == program.NOT_REPRODUCED
    output = capsys.readouterr().out
    assert "not reproduced: step 4, column loss, logged " in output
    assert "changed since: libraries: jax 0.0.1 -> jax " in output
    assert "changed since the run: flags: XLA_FLAGS=--xla_x -> " in output


@pytest.mark.sample(3, of="replays")
def test_a_difference_before_the_last_start_may_be_due_to_an_earlier_start(
    directory, tmp_path, capsys
):
    def change(row):
        if "loss" not in row:
            return row
        return {**row, "loss": 0.5, "fingerprint/params": "0"}

    copy = rewrite(directory, tmp_path, change)
    last = status.Status("host")
    last.set_phase(status.TRAINING, step=4)
    status.write(copy, [last.row()])
    assert program.main([str(copy), "--step=4"]) == program.NOT_REPRODUCED
    output = capsys.readouterr().out
    assert "not reproduced: step 4, column fingerprint/params, logged 0, now " in output
    assert "the run was resumed after step 4, and its work directory" in output
    # The last start made step 6.
    assert program.main([str(copy), "--step=6"]) == program.NOT_REPRODUCED
    assert "are those that the run recorded" in capsys.readouterr().out
    # A start that has restored nothing yet has already recorded its config.
    status.write(copy, [status.Status("host").row()])
    assert program.main([str(copy), "--step=6"]) == program.NOT_REPRODUCED
    assert "was started again, without a step so far, and" in capsys.readouterr().out


@pytest.mark.sample(3, of="replays")
def test_a_replay_on_fewer_devices_warns_that_bits_may_differ(
    directory, capsys, monkeypatch
):
    devices = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda *args: devices)
    code = program.main([str(directory), "--step=3"])
    output = capsys.readouterr().out
    assert "bits may differ" in output and "devices: 8 cpu on 1 process(es), " in output
    assert code in (0, program.NOT_REPRODUCED) and "replica 0 of 2\n" in output


def test_a_step_outside_the_run_is_refused(directory, tmp_path, capsys):
    def message(*arguments):
        assert program.main([str(x) for x in arguments]) == 1
        return capsys.readouterr().err

    assert f"There is no run in {tmp_path}" in message(tmp_path)
    (tmp_path / "config.json").write_text('{"lr": 3}')
    assert "config.json names no experiment, so no run wrote it" in message(tmp_path)
    assert "add at least --config=FILE.py" in message("--verify_resume=3")
    assert "--step=9: the run in" in message(directory, "--step=9")
    assert "steps 1 to 6" in message(directory, "--step=0")
    fine = rewrite(directory, tmp_path, lambda row: {**row, "skipped": 0})
    text = "metrics.jsonl are finite, and no step was skipped: give --step"
    assert text in message(fine)

    def change(row):
        row = {**row, "skipped": 0}
        if "eval/error" in row:
            row["eval/error"] = None
        return row

    bad = message(rewrite(directory, tmp_path, change))
    assert "The evaluation after step 6 is not finite (eval/error)" in bad


@pytest.mark.sample(3, of="replays")
def test_the_update_that_leaves_a_nonfinite_state_is_found_between_rows(
    tmp_path, capsys
):
    config = toy.get_config()
    config.update({"experiment": "tests.toy.Overflowing", "overflow_at": 3, "steps": 8})
    config.update({"log_every_steps": 50, "writers": ("jsonl",)})
    assert loop.run(config.lock(), str(tmp_path), "") == 3
    assert "step 4: the loss is nan" in capsys.readouterr().err
    output = replay(tmp_path, capsys)
    assert "step 3, repeated from the first state" in output
    assert "first not finite: " in output
    assert "reaches      the state 'params/linear/b'" in output
    output = replay(tmp_path, capsys, "--step=4")
    assert "not finite before the step: the state 'params/linear/w' is " in output
    assert "an earlier step: --step=3 analyzes the one before" in output


@pytest.mark.sample(3, of="replays")
def test_a_fault_in_one_of_two_learners_is_named(tmp_path, capsys):
    config = toy.get_config()
    config.update(
        {"experiment": "tests.replay.pair.Pair", "steps": 1, "writers": ("jsonl",)}
    )
    config.checkpoint.update({"best_metric": "first"})
    assert loop.run(config.lock(), str(tmp_path), "") == 3
    output = replay(tmp_path, capsys)
    assert "step 1, repeated from the first state" in output
    place = "  line         tests/replay/pair.py:"
    assert f"first not finite: log gives nan\n{place}" in output
    # The logarithm's derivative is finite, and the fault does not reach the other
    # learner.
    assert "reaches      the loss of second\n" in output


@pytest.mark.sample(3, of="replays")
def test_a_step_that_skipped_only_the_first_of_two_updates_is_found(tmp_path, capsys):
    config = toy.get_config()
    config.update(
        {"experiment": "tests.replay.pair.Twice", "steps": 5, "log_every_steps": 5}
    )
    config.writers = ("jsonl",)
    assert loop.run(config.lock(), str(tmp_path), "") == 0
    # The metrics of the step are those of its second update, which was applied.
    output = replay(tmp_path, capsys)
    assert "step 2, repeated from the first state" in output
    place = "  line         tests/replay/pair.py:"
    assert f"first not finite: div gives inf\n{place}" in output
    assert "all metrics of the step were finite" not in output


@pytest.mark.sample(3, of="replays")
def test_a_run_that_skips_all_steps_before_its_first_row_is_replayed(tmp_path, capsys):
    config = toy.get_config()
    config.update(
        {"overflow_above": -1e9, "log_every_steps": 100, "max_skips_in_a_row": 3}
    )
    config.update({"steps": 40, "writers": ("jsonl",)})
    assert loop.run(config.lock(), str(tmp_path), "") == 3
    assert "3 steps in a row were skipped" in capsys.readouterr().err
    output = replay(tmp_path, capsys)
    assert "step 1, repeated from the first state" in output
    assert "first not finite: " in output


class Dividing(toy.Wide):
    """Divides its updates by zero in its second step, in a rule of its own."""

    def optimizer(self):
        divide = lambda updates, steps: jax.tree.map(lambda x: x / (1 - steps), updates)
        rule = optax.GradientTransformation(
            lambda params: jnp.zeros(()),
            lambda updates, steps, params=None: (divide(updates, steps), steps + 1),
        )
        return xshard.CrossShardOptimizer(
            rule, slice_axis_name="slice", **self.config.reduction
        )


@pytest.mark.sample(3, of="replays")
@pytest.mark.parametrize("shards", [False, True])
def test_the_line_of_a_division_in_a_rule_is_named(tmp_path, capsys, shards):
    config = toy.get_config()
    config.update(
        {"experiment": f"{__name__}.Dividing", "steps": 2, "log_every_steps": 1}
    )
    config.reduction.shard_update = shards
    assert loop.run(config.lock(), str(tmp_path), "") == 3
    output = replay(tmp_path, capsys)
    source, begin = inspect.getsourcelines(Dividing)
    (line,) = (i for i, text in enumerate(source) if "x / (1 - steps)" in text)
    place = f"tests/replay/replay_test.py:{begin + line}: {source[line].strip()}"
    assert f"first not finite: div gives inf\n  line         {place}\n" in output


def test_examples_that_fail_only_together_are_blamed_together():
    heavy = {3, 5}
    needs_both = lambda rows: heavy <= set(rows.tolist())
    blamed = diagnosis.blame_examples(needs_both, [np.arange(8)])
    assert blamed == [[0, 1, 2, 3, 4, 5, 6, 7]]
    needs_one = lambda rows: bool(heavy & set(rows.tolist()))
    blamed = diagnosis.blame_examples(needs_one, np.split(np.arange(8), 2))
    assert blamed == [[3], [5]]


class Large(toy.Toy):
    """Takes a logarithm of an array whose maximum XLA computes without regard for NaN
    on the CPU.
    """

    def forward(self, batch, *, is_training):
        x = jnp.tile(batch["x"], (1, 4096))
        return super().forward({"x": jnp.log(2.0 + x)[:, :3]}, is_training=is_training)


@pytest.mark.sample(3, of="replays")
def test_a_nonfinite_element_of_a_large_array_is_found(tmp_path, capsys):
    config = toy.get_config()
    config.update(
        {"experiment": f"{__name__}.Large", "steps": 12, "log_every_steps": 1}
    )
    loop.run(config.lock(), str(tmp_path), "")
    output = replay(tmp_path, capsys)
    source, begin = inspect.getsourcelines(Large)
    (line,) = (i for i, text in enumerate(source) if "jnp.log" in text)
    place = f"tests/replay/replay_test.py:{begin + line}: {source[line].strip()}"
    assert f"first not finite: log gives nan\n  line         {place}\n" in output
