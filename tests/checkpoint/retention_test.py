"""Which checkpoints are kept, and what a Manager does about it."""

import jax.numpy as jnp
import pytest

from tests.checkpoint.harness import damage, save
from xshard import checkpoint
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import retention, writer

STATE = {"a": jnp.ones(3)}


def saved(**metrics):
    return [retention.Saved(int(step[1:]), metric) for step, metric in metrics.items()]


@pytest.mark.parametrize(
    "keep,kept",
    [
        (checkpoint.Keep(1), {7}),
        (checkpoint.Keep(2), {6, 7}),
        (checkpoint.Keep(9), {1, 2, 3, 4, 5, 6, 7}),
        (checkpoint.Keep(1, every_steps=3), {3, 6, 7}),
        (checkpoint.Keep(1, best=2, metric="m"), {3, 5, 7}),
        (checkpoint.Keep(1, best=2, metric="m", mode="min"), {1, 4, 7}),
        (checkpoint.Keep(2, 3, 1, "m"), {3, 6, 7}),
    ],
)
def test_rules(keep, kept):
    # Equals: the earlier. Without the metric, or with one that is no number: never the best.
    there = saved(s1=0.1, s2=None, s3=0.9, s4=0.1, s5=0.9, s6=float("nan"), s7=0.5)
    assert keep.kept(there) == kept


def test_pinned_ones_stay():
    there = [retention.Saved(1, pinned=True), *saved(s2=1.0, s3=1.0)]
    assert checkpoint.Keep(1).kept(there) == {1, 3}


@pytest.mark.parametrize(
    "options,match",
    [
        ({"last": 0}, "keep_last=0 must be an integer of at least 1"),
        ({"last": True}, "keep_last=True"),
        ({"last": 1.5}, "keep_last=1.5"),
        ({"last": 1, "every_steps": -1}, "keep_every_steps=-1 must be an integer of at least 0"),
        ({"last": 1, "best": 1}, "keep_best=1 needs best_metric"),
        (
            {"last": 1, "best": 1, "metric": "m", "mode": "most"},
            "'max' or 'min'; received 'm' and 'most'",
        ),
    ],
)
def test_bad_rules(options, match):
    with pytest.raises(checkpoint.CheckpointError, match=match):
        checkpoint.Keep(**options)


def test_the_best_survive_a_restart_and_what_is_damaged_takes_no_place(tmp_path):
    keep = checkpoint.Keep(1, best=1, metric="accuracy")
    for step, accuracy in enumerate([0.5, 0.9, 0.7, 0.8]):
        manager = checkpoint.Manager(tmp_path, keep)
        save(manager, step, STATE, metrics={"accuracy": accuracy, "loss": 1.0})
        manager.close()
    assert manager.all_steps() == [1, 3]
    (path,) = tmp_path.glob("step_00000001.*/COMMIT")
    damage("flipped", path)
    save(manager, 4, STATE, metrics={"accuracy": 0.1})
    assert manager.all_steps() == [3, 4]
    manager.close()


def test_deleting_begins_with_commit(tmp_path, monkeypatch):
    manager = checkpoint.Manager(tmp_path, checkpoint.Keep(1))
    save(manager, 1, STATE)
    monkeypatch.setattr(type(manager.store), "delete_folder", lambda *args: 1 / 0)
    said = []
    monkeypatch.setattr(manager, "_say", said.append)
    # The new one counts though the old one could not be deleted, and the old one does not any more.
    save(manager, 2, STATE)
    assert manager.all_steps() == [2] and "could not be deleted: division" in said[0]
    assert len(list(tmp_path.glob("step_00000001.*/meta.json"))) == 1
    monkeypatch.undo()
    save(manager, 3, STATE)
    assert len(list(tmp_path.glob("step_*"))) == 1
    manager.close()


def test_an_attempt_that_is_removed_does_not_count_from_the_first_instant(tmp_path, monkeypatch):
    manager = checkpoint.Manager(tmp_path, checkpoint.Keep(3))
    save(manager, 1, STATE)
    seen = []
    original = type(manager.store).delete_folder

    def delete_folder(store, prefix):
        seen.append(manager.all_steps())
        original(store, prefix)

    monkeypatch.setattr(type(manager.store), "delete_folder", delete_folder)
    (attempt,) = format_lib.attempts(manager.store)
    writer.remove(attempt)
    assert seen == [[]] and not list(tmp_path.glob("step_*"))
    manager.close()
