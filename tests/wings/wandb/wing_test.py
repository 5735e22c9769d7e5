"""Tests of the data sent to Weights & Biases.

A stand-in receives it, because real runs need the service.
"""

import sys
import types

import numpy as np
import pytest

from tests import winged
from xshard import samples
from xshard.metrics import writers


class Run:
    """A stand-in for the run that `wandb.init` returns."""

    def __init__(self, sent, options):
        self.options = options
        self._sent = sent

    def log(self, values, step):
        self._sent.append((step, values))

    def finish(self):
        self._sent.append("finished")


class Error(Exception):
    pass


@pytest.fixture
def sent(monkeypatch):
    """A stand-in for wandb: the rows sent, and the arguments of each `init`.

    If a test sets its `error`, `init` raises that.
    """
    record = types.SimpleNamespace(rows=[], options=[], error=None)

    def init(**options):
        if record.error:
            raise Error(record.error)
        record.options.append(options)
        return Run(record.rows, options)

    stand_in = types.SimpleNamespace(
        init=init,
        Error=Error,
        Settings=lambda **options: options,
        Html=lambda content: ("html", content),
        Histogram=lambda *, np_histogram: ("histogram", *np_histogram),
    )
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    return record


def write_part(directory, step, rows, *, killed=False):
    part = writers.Part(directory, step, {"a": 1})
    opened = writers.Writers(["wandb", "jsonl"], part, winged.WINGS)
    for row in rows:
        opened.write(row)
    if not killed:
        for writer in opened._opened.values():
            writer.close()


def training(step):
    return {"step": step, "loss": [1.0, float(step)], "scale": None}


def test_all_parts_of_a_run_send_their_rows_to_one_wandb_run(tmp_path, sent):
    evaluation = {"step": 2, "eval/error": 0.5}
    write_part(tmp_path, 0, [training(1), training(2), evaluation])
    values = lambda step: {"step": step, "loss/0": 1.0, "loss/1": float(step)}
    first = [(1, values(1)), (2, values(2)), (2, evaluation), "finished"]
    assert sent.rows == first
    # The next part resumes before the end of the last one, and is killed, so the part
    # after it sends its row again.
    write_part(tmp_path, 1, [training(2), evaluation, training(3)], killed=True)
    assert sent.rows == [*first, (3, values(3))]
    write_part(tmp_path, 3, [training(4)])
    assert sent.rows == [
        *first,
        (3, values(3)),
        (3, values(3)),
        (4, values(4)),
        "finished",
    ]
    ids = {options["id"] for options in sent.options}
    assert len(sent.options) == 3 and len(ids) == 1
    assert sent.options[0]["resume"] == "allow"
    assert sent.options[0]["config"] == {"a": 1}


def test_a_killed_first_part_belongs_to_the_same_run(tmp_path, sent):
    write_part(tmp_path, 0, [training(1)], killed=True)
    write_part(tmp_path, 0, [training(1), training(2)])
    first, second = sent.options
    assert first["id"] == second["id"]
    # Some rows of the killed part may not have arrived, so all are sent again.
    assert [row[0] for row in sent.rows if row != "finished"] == [1, 1, 2]


def test_a_refusal_by_weights_and_biases_is_a_message(tmp_path, sent):
    sent.error = "no key."
    with pytest.raises(ValueError, match="cannot start: no key. .*WANDB_MODE=offline"):
        write_part(tmp_path, 0, [])


def test_samples_are_sent_once_and_after_the_rows_of_their_step(tmp_path, sent):
    pixels = samples.Image(np.zeros((2, 4))).item()
    bars = samples.Histogram(np.arange(4)).item()
    shown = {"a": {"kind": "text", "text": "x < y"}, "b": pixels, "c": bars}
    # With several learners, each loss has its learner's name. An evaluation follows the
    # row of its step.
    rows = [{"step": 1, "net/loss": 1.0}, {"step": 1, "eval/error": 2.0}]
    rows += [{"step": 1, "samples": shown}, {"step": 2, "net/loss": 1.0}]
    write_part(tmp_path, 0, rows, killed=True)
    values = [values for _, values in sent.rows]
    assert [step for step, _ in sent.rows] == [1, 1, 1, 2] and values[:2] == rows[:2]
    assert values[2]["a"] == ("html", "<pre>x &lt; y</pre>")
    assert f"data:image/png;base64,{pixels['png']}" in values[2]["b"][1]
    assert values[2]["c"] == ("histogram", bars["counts"], bars["edges"])
    # The next part resends all rows in order, as some may not have arrived. The part
    # after it sends nothing twice.
    write_part(tmp_path, 2, [])
    assert sent.rows[4:8] == sent.rows[:4] and sent.rows[8:] == ["finished"]
    write_part(tmp_path, 2, [])
    assert sent.rows[9:] == ["finished"]


def test_norms_of_parameters_are_sent_once(tmp_path, sent):
    lists = {"gradient": [3.0], "parameter": [2.0], "update": [None]}
    row = {"step": 2, "norms": {"": {"paths": ["w"], **lists}}}
    write_part(tmp_path, 0, [row])
    write_part(tmp_path, 2, [])
    # wandb takes no null, and what is not finite has none.
    expected = {"step": 2, "norms/gradient/w": 3.0, "norms/parameter/w": 2.0}
    assert sent.rows == [(2, expected), "finished", "finished"]
