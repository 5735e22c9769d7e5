"""What Weights & Biases is given; a stand-in takes it, as real ones are made by its service."""

import sys
import types

import pytest

from xshard.metrics import writers


class Run:
    """What `wandb.init` returns."""

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
    """What was sent, and the arguments of each `init`."""
    found = types.SimpleNamespace(rows=[], options=[], error=None)

    def init(**options):
        if found.error:
            raise Error(found.error)
        found.options.append(options)
        return Run(found.rows, options)

    stand_in = types.SimpleNamespace(init=init, Error=Error, Settings=lambda **options: options)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    return found


def part(directory, step, rows, *, killed=False):
    history = lambda: writers.read(directory / "metrics.jsonl")
    opened = writers.open_all(["wandb", "jsonl"], writers.Part(directory, step, {"a": 1}, history))
    for row in rows:
        for writer in opened:
            writer.write(row)
    for writer in opened:
        if not killed:
            writer.close()


def training(step):
    return {"step": step, "loss": [1.0, float(step)], "scale": None}


def test_one_run_goes_on_and_gets_each_row(tmp_path, sent):
    evaluation = {"step": 2, "eval/error": 0.5}
    part(tmp_path, 0, [training(1), training(2), evaluation])
    values = lambda step: {"step": step, "loss/0": 1.0, "loss/1": float(step)}
    first = [(1, values(1)), (2, values(2)), (2, evaluation), "finished"]
    assert sent.rows == first
    # The next part goes on before the end of the last one; then one is killed, and lets all be sent again.
    part(tmp_path, 1, [training(2), evaluation, training(3)], killed=True)
    assert sent.rows == [*first, (3, values(3))]
    part(tmp_path, 3, [training(4)])
    assert sent.rows == [*first, (3, values(3)), (3, values(3)), (4, values(4)), "finished"]
    ids = {options["id"] for options in sent.options}
    assert len(sent.options) == 3 and len(ids) == 1
    assert sent.options[0]["resume"] == "allow" and sent.options[0]["config"] == {"a": 1}


def test_a_first_part_that_is_killed_is_of_the_same_run(tmp_path, sent):
    part(tmp_path, 0, [training(1)], killed=True)
    part(tmp_path, 0, [training(1), training(2)])
    first, second = sent.options
    assert first["id"] == second["id"]
    # Nobody knows what of the first part has arrived.
    assert [row[0] for row in sent.rows if row != "finished"] == [1, 1, 2]


def test_what_weights_and_biases_refuses_is_a_message(tmp_path, sent):
    sent.error = "no key."
    with pytest.raises(ValueError, match="does not begin: no key. .*WANDB_MODE=offline"):
        part(tmp_path, 0, [])
