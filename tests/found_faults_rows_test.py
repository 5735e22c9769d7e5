"""Named tests of faults that were found in rows, in their writers and in the report."""

import json
import math
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xshard
from tests import rows as rows_of
from tests import toy
from xshard import errors, loop, validation
from xshard.metrics import rows as rows_lib
from xshard.metrics import writer, writers
from xshard.pod import exit_codes, heartbeat, request, startup, status, watchdog
from xshard.report import charts
from xshard.report import rows as report_rows

# A name that a run logs by itself, and the other name that the refusal gives.
ROWS_TAKEN = {
    "eval": "my_eval",
    "eval/loss": "eval_loss",
    "roll_back/number": "roll_back_number",
    "perf/time": "perf_time",
    "fingerprint/params": "fingerprint_params",
    "norms/update/w": "norms_update/w",
    "updates_per_step": "my_updates_per_step",
    "noise_scale": "my_noise_scale",
    "kind": "my_kind",
    "step": "my_step",
    "global_step": "my_global_step",
    "a/skipped": "a/my_skipped",
    "a/updates_per_step": "a/my_updates_per_step",
}


class RowsNamed(toy.Averaged):
    """Logs scalars and evaluates under the names of its config."""

    def loss(self, outputs, batch):
        value, _ = super().loss(outputs, batch)
        return value, {name: 2 * value for name in self.config.scalars}

    def evaluate(self, outputs, batch):
        (values,) = super().evaluate(outputs, batch).values()
        return dict.fromkeys(["error", *self.config.metrics], values)


class RowsLearner(xshard.Experiment):
    """Trains one learner, and logs it and a scalar under the names of its config."""

    def __init__(self, config):
        super().__init__(config)
        inner = toy.Toy(config)
        self.data = inner.train_data
        self.learner = inner.learner
        self.loss = inner.training_loss

    def train_data(self):
        return self.data()

    def eval_data(self):
        return self.data()

    def init(self, key, batch):
        example = {name: x[:1] for name, x in batch.items()}
        state = self.learner.init(key, example, is_training=True)
        return {self.config.learner: state}

    def train_step(self, state, batch, key):
        name = self.config.learner
        new, outcome = self.learner.update(state[name], self.loss, batch, key)
        scalars = dict.fromkeys(self.config.scalars, jnp.float32(2))
        return {name: new}, {name: outcome, **scalars}

    def eval_step(self, state, batch, key):
        return {"error": batch["y"]}


class RowsBare(xshard.Experiment):
    """Counts its steps, and logs nothing."""

    def train_data(self):
        return {"x": np.arange(32, dtype=np.float32)}

    def eval_data(self):
        return self.train_data()

    def init(self, key, batch):
        return {"count": jnp.int32(0)}

    def train_step(self, state, batch, key):
        return {"count": state["count"] + 1}, {}

    def eval_step(self, state, batch, key):
        return dict.fromkeys(self.config.metrics, batch["x"])


class RowsEnding(toy.Poisoned):
    """Has callbacks that end it in the way of its config."""

    def callbacks(self):
        def end(history):
            if self.config.ends == "fails":
                raise OSError("the first line\nthe last line")
            if self.config.ends == "is interrupted":
                raise KeyboardInterrupt
            return "enough" if self.config.ends == "stops itself" else None

        return [end]


class RowsNoting(writer.Writer):
    """A writer that notes what it is told."""

    def __init__(self, part):
        self._file = (part.directory / "told.jsonl").open("a")

    def _note(self, what, value):
        print(json.dumps([what, value]), file=self._file, flush=True)

    def write(self, row):
        self._note("row", row)

    def write_outcome(self, outcome):
        self._note("outcome", [outcome.kind, outcome.why, outcome.code])

    def close(self):
        self._note("closed", None)
        self._file.close()


def _rows_config(name, **changes):
    config = toy.get_config()
    config.experiment = f"{__name__}.{name}"
    config.scalars = ()
    config.metrics = ()
    config.learner = "a"
    config.ends = ""
    config.checkpoint.best_metric = "error"
    config.update({"steps": 4, "log_every_steps": 1, "eval_every_steps": 2, **changes})
    return config.lock()


def _rows_run(directory, config, watch=None):
    return loop.run(config, str(directory), "again", watch=watch)


def _rows_told(directory):
    lines = (directory / "told.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _rows_refusal(name):
    return f"called '{name}'.*such as '?{ROWS_TAKEN[name]}"


@pytest.mark.parametrize("name", ROWS_TAKEN)
def test_10_a_scalar_under_a_name_of_the_run_is_refused(name):
    with pytest.raises(errors.UserError, match=_rows_refusal(name)):
        validation.scalar("Mine.loss", name, 1.0)


@pytest.mark.parametrize("name", ["eval/loss", "updates_per_step", "noise_scale"])
@pytest.mark.parametrize("experiment", ["RowsNamed", "RowsLearner"])
def test_10_it_is_refused_before_the_run_writes(tmp_path, experiment, name):
    config = _rows_config(experiment, scalars=(name,))
    with pytest.raises(errors.UserError, match=_rows_refusal(name)):
        loop.Run(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["roll_back", "perf", "fingerprint", "norms", "step"])
def test_42_a_learner_under_a_name_of_the_run_is_refused(name):
    with pytest.raises(errors.UserError, match=f"a learner called '{name}'.*my_{name}"):
        validation.learner_name("Mine.train_step", name)


def test_42_a_learner_is_refused_before_the_run_writes(tmp_path):
    config = _rows_config("RowsLearner", learner="eval")
    with pytest.raises(errors.UserError, match="a learner called 'eval'.*my_eval"):
        loop.Run(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["step", "raw/error", "ensemble", "count"])
def test_42_a_metric_under_a_name_of_the_evaluation_is_refused(tmp_path, name):
    config = _rows_config("RowsNamed", metrics=(name,))
    with pytest.raises(errors.UserError, match=f"called '{name}'.*another name"):
        loop.Run(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_42_names_near_those_of_the_run_are_free(tmp_path):
    scalars = ("evaluation/x", "rolls", "raw/x", "epoch", "steps", "learning_rate")
    config = _rows_config("RowsNamed", scalars=scalars, metrics=("loss", "perf/x"))
    assert _rows_run(tmp_path, config) == 0
    logged = [row for row in rows_of.read(tmp_path) if row["kind"] == "train"]
    assert len(logged) == 4
    for row in logged:
        assert all(row[name] == pytest.approx(2 * row["loss"]) for name in scalars)


def test_42_each_row_says_its_kind(tmp_path):
    config = _rows_config(
        "RowsEnding",
        on_nonfinite="roll_back",
        poisoned=((0, 3),),
        log_norms_every_steps=1,
        writers=("jsonl", "csv", f"{__name__}.RowsNoting"),
    )
    assert _rows_run(tmp_path, config) == 0
    rows = rows_of.read(tmp_path)
    for row in rows:
        assert row["kind"] == rows_lib.kind({**row, "kind": None})
    kinds = [row["kind"] for row in rows]
    assert kinds.count("train") == 4 and kinds.count("evaluation") == 2
    assert kinds.count("roll_back") == 1
    (norms, *_) = (tmp_path / "norms.jsonl").read_text().splitlines()
    assert json.loads(norms)["kind"] == "norms"
    told = _rows_told(tmp_path)
    assert {row["kind"] for what, row in told if what == "row"} == set(kinds)
    # What compares rows does so with those of earlier versions, too.
    assert all("kind" not in rows_lib.reproducible(row) for row in rows)


def test_42_rows_of_earlier_versions_are_read(tmp_path):
    old = [
        {"step": 1, "loss": 1.0, "kind": 3.0},
        {"step": 1, "eval/error": 2.0},
        {"step": 2, "roll_back/number": 1},
        {"step": 2, "kind": "train", "loss": 0.5},
        {"step": 2, "kind": "of a later version", "loss": 7.0},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in old))
    training, evaluations = rows_lib.by_step(path)
    assert {step: row["loss"] for step, row in training.items()} == {1: 1.0, 2: 0.5}
    assert evaluations == {1: {"step": 1, "eval/error": 2.0}}
    read = report_rows.read(path)
    assert read.training["loss"].steps.tolist() == [1, 2]
    assert read.evaluation["error"].values.tolist() == [[2.0]]


ROWS_ENDS = {
    "done": ({}, None, 0, ["done", "", 0]),
    "a callback": ({"ends": "stops itself"}, None, 0, ["done", "enough", 0]),
    "a stop": ({}, exit_codes.PREEMPTED, 42, ["stopped", "it is time", 42]),
    "Ctrl-C": ({}, exit_codes.INTERRUPTED, 130, ["interrupted", "it is time", 130]),
    "NaN": ({"poisoned": ((0, 3),)}, None, 3, ["not_finite", "step 3", 3]),
    "an exception": (
        {"ends": "fails"},
        None,
        OSError,
        ["failed", "the last line", 1],
    ),
    "a second Ctrl-C": (
        {"ends": "is interrupted"},
        None,
        KeyboardInterrupt,
        ["interrupted", "KeyboardInterrupt", 130],
    ),
}


class RowsWatch(rows_of.ScriptedWatch):
    """A watch that stops the run at its third poll, with an exit code."""

    def __init__(self, code):
        super().__init__(3, request.STOP)
        self._code = code

    def poll(self):
        polled = super().poll()
        return polled and polled._replace(why="it is time", code=self._code)


@pytest.mark.parametrize("end", ROWS_ENDS)
def test_39_each_writer_is_told_the_outcome_before_it_closes(
    tmp_path, shared_programs, end
):
    changes, stop, code, outcome = ROWS_ENDS[end]
    named = f"{__name__}.RowsNoting"
    config = _rows_config("RowsEnding", writers=("jsonl", named), **changes)
    watch = None if stop is None else RowsWatch(stop)
    if isinstance(code, int):
        assert _rows_run(tmp_path, config, watch) == code
    else:
        with pytest.raises(code):
            _rows_run(tmp_path, config, watch)
    told = _rows_told(tmp_path)
    (_, [kind, why, told_code]), closed = told[-2:]
    assert closed == ["closed", None]
    assert [kind, told_code] == [outcome[0], outcome[2]] and outcome[1] in why
    assert [what for what, _ in told].count("outcome") == 1


def test_39_a_roll_back_is_told_as_one(tmp_path, shared_programs):
    config = _rows_config(
        "RowsEnding",
        writers=("jsonl", f"{__name__}.RowsNoting"),
        on_nonfinite="roll_back",
        poisoned=((0, 3),),
    )
    assert _rows_run(tmp_path, config) == 0
    told = _rows_told(tmp_path)
    kinds = [value[0] for what, value in told if what == "outcome"]
    assert kinds == ["rolled_back", "done"]


class _RowsMlflow:
    """A stand-in for MLflow: its values by step, its tags, and the run's status."""

    def __init__(self, monkeypatch):
        self.values = []
        self.tags = {}
        self.status = "RUNNING"
        run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="an ID"))

        def start_run(run_id, tags, **_):
            self.status = "RUNNING"
            self.tags |= tags
            return run

        stand_in = types.SimpleNamespace(
            is_tracking_uri_set=lambda: True,
            start_run=start_run,
            end_run=lambda status: None,
            MlflowClient=lambda: self,
            exceptions=types.SimpleNamespace(MlflowException=RuntimeError),
            entities=types.SimpleNamespace(
                Param=lambda *values: values, Metric=lambda *values: values
            ),
        )
        monkeypatch.setitem(sys.modules, "mlflow", stand_in)

    def log_batch(self, run_id, metrics=(), params=(), synchronous=None):
        self.values += [
            (step, value) for name, value, _, step in metrics if name == "x"
        ]

    def set_tag(self, run_id, name, value):
        self.tags[name] = value

    def update_run(self, run_id, status):
        self.status = status

    def set_terminated(self, run_id, status):
        self.status = status


@pytest.mark.parametrize(
    "outcome, wanted",
    [
        (writer.Outcome(writer.DONE, code=0), "FINISHED"),
        (writer.Outcome(writer.STOPPED, "SIGTERM", 42), "SCHEDULED"),
        (writer.Outcome(writer.INTERRUPTED, "SIGINT", 130), "KILLED"),
        (writer.Outcome(writer.NOT_FINITE, "step 3", 3), "FAILED"),
        (writer.outcome_of(OSError("no space")), "FAILED"),
        (writer.Outcome(writer.ROLLED_BACK), "RUNNING"),
    ],
)
def test_39_mlflow_shows_how_the_run_ended(tmp_path, monkeypatch, outcome, wanted):
    service = _RowsMlflow(monkeypatch)
    part = writers.Part(tmp_path, 0, {}, lambda: iter(()))
    writers.close(writers.open_all(["mlflow"], part), outcome)
    assert service.status == wanted
    assert service.tags["xshard.outcome"] == outcome.in_words()
    # A part that is killed tells nothing, so the next one says that it goes on.
    writers.open_all(["mlflow"], part._replace(step=7))
    assert service.tags["xshard.outcome"] == "runs, resumed from step 7"


def test_39_mlflow_gets_the_steps_that_a_roll_back_repeats(tmp_path, monkeypatch):
    service = _RowsMlflow(monkeypatch)
    file = writers.JsonLines(tmp_path / "metrics.jsonl", 0)

    def part(step, rows):
        history = lambda: rows_lib.read(tmp_path / "metrics.jsonl")
        opened = writers.open_all(
            ["jsonl", "mlflow"], writers.Part(tmp_path, step, {}, history)
        )
        for row in rows:
            writers.write(opened, row)
        writers.close(opened, writer.Outcome(writer.ROLLED_BACK))

    def train(step, x):
        return {"step": step, "kind": "train", "x": x}

    back = {"step": 3, "kind": "roll_back", "roll_back/number": 1}
    part(0, [train(step, 1.0) for step in (1, 2, 3, 4)])
    part(2, [back, train(3, 2.0)])
    assert service.values == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (3, 2.0)]
    assert "before step 3" in service.tags["xshard.roll_back"]
    # A resume repeats the roll-back's row and the step after it, with the same bits.
    part(2, [back, train(3, 2.0), train(4, 2.0)])
    assert service.values[5:] == [(4, 2.0)]
    assert file.count == 0


def test_39_wandb_is_told_the_exit_code(tmp_path, monkeypatch):
    told = []

    summary = {}

    class Run:
        def __init__(self):
            self.summary = summary

        def log(self, values, step):
            told.append(values)

        def mark_preempting(self):
            told.append("preempting")

        def finish(self, exit_code):
            told.append(exit_code)

    stand_in = types.SimpleNamespace(
        init=lambda **_: Run(),
        Error=RuntimeError,
        Settings=lambda **_: None,
        Html=lambda content: content,
    )
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    part = writers.Part(tmp_path, 0, {}, lambda: iter(()))
    for outcome, wanted in (
        (writer.Outcome(writer.STOPPED, "SIGTERM", 42), ["preempting", 42]),
        (writer.outcome_of(ValueError("bad")), [1]),
        (writer.Outcome(writer.NOT_FINITE, "NaN", 3), [3]),
        (writer.Outcome(writer.ROLLED_BACK), [0]),
        (writer.Outcome(writer.DONE, code=0), [0]),
    ):
        writers.close(writers.open_all(["wandb"], part), outcome)
        assert told == wanted and summary["perf/outcome"] == outcome.in_words()
        told.clear()
    # A sample does not replace the number of its name.
    (opened,) = writers.open_all(["wandb"], part)
    opened.write({"step": 1, "kind": "train", "digits": 1.0})
    shown = {"digits": {"kind": "text", "text": "7"}, "other": told}
    opened.write_samples({"step": 1, "kind": "samples", "samples": shown})
    assert told == [{"step": 1, "digits": 1.0}, {"samples/digits": "<pre>7</pre>"}]


def RowsLacking(part):  # noqa: N802
    """Opens an object that is no writer."""
    return types.SimpleNamespace(write=print, flush=lambda: None)


def RowsPlain(part):  # noqa: N802
    """Opens a writer of a class of its own, which notes what it gets."""
    told = (part.directory / "told").open("a")
    note = lambda value: print(value, file=told, flush=True)
    return types.SimpleNamespace(
        write=note, write_outcome=note, flush=lambda: None, close=told.close
    )


def test_39_a_writer_of_another_class_works_or_is_refused_by_name(tmp_path):
    part = writers.Part(tmp_path, 0, {}, lambda: iter(()))
    opened = writers.open_all(["jsonl", f"{__name__}.RowsPlain"], part)
    writers.write(opened, {"step": 1, "kind": "train", "loss": 2.0})
    for each in opened:
        each.write_samples({})
        each.write_norms({})
        each.sync()
    writers.close(opened, writer.Outcome(writer.DONE))
    # It gets numbers alone, as before rows had a kind.
    told = (tmp_path / "told").read_text()
    assert told.startswith("{'step': 1, 'loss': 2.0}\nOutcome(kind='done'")
    with pytest.raises(errors.UserError, match="RowsLacking'.* without close: derive"):
        writers.open_all([f"{__name__}.RowsLacking"], part)


@pytest.mark.parametrize("fingerprints", [0, 1])
def test_16_an_experiment_may_log_nothing(tmp_path, fingerprints):
    config = _rows_config(
        "RowsBare",
        fingerprint_every_steps=fingerprints,
        writers=("jsonl", "csv", "tensorboard"),
    )
    assert _rows_run(tmp_path, config) == 0
    kinds = [row["kind"] for row in rows_of.read(tmp_path)]
    assert kinds == ["train", "train", "evaluation"] * 2
    assert rows_of.results(tmp_path)["eval"] == {}
    with config.unlocked():
        config.steps = 6
    assert _rows_run(tmp_path, config) == 0
    assert int(rows_of.final_state(tmp_path, config).experiment["count"]) == 6


def test_20_curves_are_smoothed_as_one_row_after_the_other():
    def one_by_one(values, weight):
        averages = []
        total = total_weight = 0.0
        for value in values.tolist():
            if math.isfinite(value):
                total = weight * total + (1 - weight) * value
                total_weight = weight * total_weight + (1 - weight)
                averages.append(total / total_weight)
            else:
                averages.append(math.nan)
        return np.array(averages)

    rng = np.random.default_rng(0)
    for count in (0, 1, 127, 128, 129, 3000):
        values = rng.normal(size=count) * 10.0 ** rng.integers(-9, 9, size=count)
        values[rng.random(count) < 0.2] = np.nan
        for weight in (0.0, 0.6, 0.99):
            # The sums have another order.
            scale = one_by_one(np.abs(values), weight)
            gap = charts.smooth(values, weight) - one_by_one(values, weight)
            np.testing.assert_array_less(np.abs(gap[~np.isnan(scale)]), 1e-12 * 1e9)
            np.testing.assert_allclose(
                charts.smooth(np.abs(values), weight), scale, rtol=1e-12
            )


def test_20_no_peak_is_lost_where_rows_are_thinned():
    rng = np.random.default_rng(0)
    for count in (201, 1000, 1003):
        values = rng.normal(size=count)
        values[300:340] = np.nan
        wanted = {0, count - 1}
        for part in np.array_split(np.arange(count), 100):
            known = part[np.isfinite(values[part])]
            if len(known):
                wanted.add(int(known[values[known].argmin()]))
                wanted.add(int(known[values[known].argmax()]))
            else:
                wanted.add(int(part[0]))
        assert charts.thin(values, 100).tolist() == sorted(wanted)


def test_20_columns_of_rows_with_other_names(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"step": 1, "a": 1.0, "b": 1},
        {"step": 2, "a": 2.0},
        {"step": 3, "b": 3, "a": None, "c": [1.0, None]},
        {"step": 2, "a": 5.0, "b": 10**400},
        {"step": 4, "c": "text", "a": True},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = report_rows.read(path)
    assert list(read.training) == ["a", "b", "c"]
    a, b, c = read.training.values()
    assert a.steps.tolist() == [1, 2, 3, 4]
    np.testing.assert_array_equal(a.values[:, 0], [1.0, 5.0, np.nan, 1.0])
    np.testing.assert_array_equal(b.values[:, 0], [1.0, np.nan, 3.0])
    np.testing.assert_array_equal(c.values, [[1.0, np.nan]])
    assert read.notes == [
        "metrics.jsonl: skipped 1 value(s) of 'c' that are not numbers."
    ]


class _RowsBoard:
    """A board with the status of a thousand processes, which counts its reads."""

    def __init__(self, texts):
        self.texts = texts
        self.reads = 0

    def write(self, topic, text):
        self.texts[0] = text

    def read(self, topic):
        if topic != "alive":
            return {}
        self.reads += 1
        return self.texts


def test_19_process_0_parses_no_status_of_a_thousand_processes(tmp_path, monkeypatch):
    row = status.Status("a host").row()
    board = _RowsBoard({index: json.dumps(row) for index in range(1024)})
    watching = watchdog.Watchdog(tmp_path)
    monkeypatch.setattr(watching, "_count", 1024)
    monkeypatch.setattr(watching, "_board", board)
    monkeypatch.setattr(
        watching, "_heartbeat", heartbeat.Heartbeat(1024, startup.Timeouts(), 0.5)
    )
    clock = [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    parsed = []
    monkeypatch.setattr(heartbeat.json, "loads", parsed.append)
    written = []
    monkeypatch.setattr(
        watchdog.status, "write_texts", lambda _, texts: written.append(texts)
    )
    watching.publish()
    for _ in range(20):
        watching._exchange_status()
        clock[0] += 0.5
    # Ten seconds have passed.
    assert board.reads == 20 and not parsed
    assert [len(texts) for texts in written] == [1024] * 3
    # The end is written at once.
    watching._write_status()
    assert len(written) == 4


def test_19_who_is_silent_is_known_within_the_promised_time():
    timeouts = startup.Timeouts()
    beat = heartbeat.Heartbeat(1024, timeouts, 0.5)
    row = status.Status("a host").row() | {"doing": status.TRAINING}
    texts = {index: json.dumps(row | {"pid": 0}) for index in range(1024)}
    ticks = 0
    while not beat.update(texts):
        ticks += 1
        # All but process 7 go on.
        changed = json.dumps(row | {"pid": ticks})
        texts = dict.fromkeys(range(1024), changed) | {7: texts[7]}
    assert beat.lost == {7}
    assert ticks * 0.5 == pytest.approx(timeouts.heartbeat, abs=2)
    # A row in the file is never as old as that of a silent process.
    assert status.seconds_between_writes(4096) + 0.5 < status._SILENT_SECONDS / 2


class RowsShared(RowsBare):
    """Draws one number for all replicas, by a key in its state, and logs it."""

    def init(self, key, batch):
        return {"key": key, "count": jnp.int32(0)}

    def train_step(self, state, batch, key):
        shared, next_key = jax.random.split(state["key"])
        drawn = jax.random.bits(shared, dtype=jnp.uint32) >> 8
        new = {"key": next_key, "count": state["count"] + 1}
        # An integer must be equal on all replicas.
        return new, {"drawn": drawn.astype(jnp.int32)}


def test_36_a_key_in_the_state_is_equal_on_all_replicas(tmp_path):
    config = _rows_config("RowsShared", metrics=("x",))
    assert _rows_run(tmp_path, config) == 0
    drawn = [row["drawn"] for row in rows_of.read(tmp_path) if row["kind"] == "train"]
    assert len(set(drawn)) == 4


def test_36_an_evaluation_batch_is_a_multiple_of_the_replicas(tmp_path):
    config = _rows_config("RowsNamed", eval_batch_size=12)
    with pytest.raises(errors.UserError, match="eval_batch_size=12.*replicas = 8"):
        loop.Run(config, str(tmp_path / "run"))
