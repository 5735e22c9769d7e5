"""Tests of the rules that decide which checkpoints are kept, and of their application
by a Manager.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoint.harness import damage, save
from xshard import checkpoint
from xshard.checkpoint import finite, janitor, retention, saver
from xshard.checkpoint import format as format_lib

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
        (checkpoint.Keep(1, newest_of=3), {6, 7}),
        (checkpoint.Keep(1, newest_of=8), {7}),
        (checkpoint.Keep(1, best=2, metric="m"), {3, 5, 7}),
        (checkpoint.Keep(1, best=2, metric="m", mode="min"), {1, 4, 7}),
        (checkpoint.Keep(2, 3, 1, "m"), {3, 6, 7}),
    ],
)
def test_the_rules_select_the_steps_to_keep(keep, kept):
    # Of equal metrics the earlier step is better. A step without the metric, or with
    # NaN, is never the best.
    present = saved(s1=0.1, s2=None, s3=0.9, s4=0.1, s5=0.9, s6=float("nan"), s7=0.5)
    assert keep.kept(present) == kept


HOUR = 3600.0


@pytest.mark.parametrize(
    "hours, times, kept",
    [
        (1, [0.0, 0.5, 1.0, 1.6, 2.4, 2.5], [1, 3, 5]),
        (0.5, [0.0, 0.5, 1.0, 1.6, 1.7], [1, 2, 3, 4]),
        # The clock is set back by two hours.
        (1, [5.0, 5.9, 3.9, 4.5, 4.9], [1, 3, 5]),
        # A damaged checkpoint has no time.
        (1, [0.0, None, 1.5, 1.6], [1, 3]),
        (0, [0.0, 9.0], []),
    ],
)
def test_one_checkpoint_of_each_few_hours_is_kept(hours, times, kept):
    keep = checkpoint.Keep(1, hours=hours)
    present = []
    for step, time in enumerate(times, 1):
        seconds = None if time is None else 1e9 + time * HOUR
        present.append(retention.Saved(step, time=seconds))
        # What is deleted after each save changes nothing about what is kept later.
        present = [x for x in present if x.step in keep.kept(present)]
    assert {x.step for x in present} == {*kept, len(times)}


@pytest.mark.parametrize("hours", [-1, "2", True, float("nan"), float("inf")])
def test_hours_that_are_no_number_are_refused(hours):
    with pytest.raises(checkpoint.CheckpointError, match="keep_hours=.*at least 0"):
        checkpoint.Keep(1, hours=hours)


def test_a_manager_keeps_checkpoints_by_their_time(tmp_path, monkeypatch):
    now = [1e9]
    monkeypatch.setattr(saver.time, "time", lambda: now[0])
    manager = checkpoint.Manager(tmp_path, checkpoint.Keep(1, hours=1))
    for step in range(1, 6):
        save(manager, step, STATE)
        manager.wait()
        now[0] += 0.4 * HOUR
    assert manager.all_steps() == [1, 4, 5]


def test_a_pinned_checkpoint_is_kept():
    present = [retention.Saved(1, pinned=True), *saved(s2=1.0, s3=1.0)]
    assert checkpoint.Keep(1).kept(present) == {1, 3}


@pytest.mark.parametrize(
    "keep,kept",
    [
        (checkpoint.Keep(1), {3, 7}),
        (checkpoint.Keep(2, every_steps=2), {2, 3, 4, 6, 7}),
        (checkpoint.Keep(1, best=1, metric="m"), {1, 3, 7}),
    ],
)
def test_the_newest_finite_checkpoint_is_kept_beside_nonfinite_ones(keep, kept):
    metrics = {1: 0.9, 2: 0.5, 3: 0.1}
    present = [
        retention.Saved(i, metrics.get(i, float("nan")), finite=i <= 3)
        for i in range(1, 8)
    ]
    assert keep.kept(present) == kept


NOT_FINITE = {
    "params": {"w": jnp.array([1.0, jnp.nan]), "n": jnp.ones(2)},
    "slot": jnp.ones(1),
}
FINITE = {"params": {"w": jnp.ones(2), "n": jnp.ones(2)}, "slot": jnp.array([jnp.inf])}


def test_nonfinite_arrays_are_named_and_the_newest_finite_step_is_kept(tmp_path):
    commits = []
    options = {"finite": "^params/", "committed": commits.append}
    manager = checkpoint.Manager(tmp_path, checkpoint.Keep(1), **options)
    for step, state in enumerate([FINITE, FINITE, NOT_FINITE, NOT_FINITE]):
        save(manager, step, state)
    manager.close()
    # A new manager reads from COMMIT which checkpoints are finite.
    manager = checkpoint.Manager(tmp_path, checkpoint.Keep(1), **options)
    save(manager, 4, NOT_FINITE)
    assert manager.all_steps() == [1, 4] and manager.newest_finite_step() == 1
    assert manager.nonfinite(1) == [] and manager.nonfinite(4) == ["params/w"]
    assert [item.nonfinite for item in commits] == [(), (), *[("params/w",)] * 3]
    entries = checkpoint.read_catalog(tmp_path).entries
    assert [(e.step, e.state) for e in entries] == [(1, "complete"), (4, "not finite")]
    save(manager, 5, FINITE)
    assert manager.all_steps() == [5]
    manager.close()


def test_checkpoints_saved_without_the_check_count_as_finite(tmp_path):
    manager = checkpoint.Manager(tmp_path, checkpoint.Keep(1))
    save(manager, 1, NOT_FINITE)
    manager.close()
    manager = checkpoint.Manager(tmp_path, checkpoint.Keep(1), finite="^params/")
    assert manager.nonfinite(1) == [] and manager.newest_finite_step() == 1
    save(manager, 2, NOT_FINITE)
    assert manager.all_steps() == [1, 2]
    manager.close()


def test_a_refused_nonfinite_state_does_not_count(tmp_path):
    options = {"finite": "^params/", "refuse_nonfinite": True}
    manager = checkpoint.Manager(tmp_path, checkpoint.Keep(1), **options)
    save(manager, 1, FINITE)
    manager.save(2, NOT_FINITE, {})
    while not manager._saving.end.done():
        # `check` never raises a NonfiniteError: `wait` raises it on all processes at
        # the same step.
        manager.check()
    manager.check()
    with pytest.raises(
        checkpoint.NonfiniteError, match="^step 2: .* not finite: params/w$"
    ):
        manager.wait()
    assert manager.all_steps() == [1] and len(list(tmp_path.glob("step_*"))) == 1
    manager.close()


@pytest.mark.parametrize(
    "dtype",
    [
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "float8_e4m3fn",
        "int32",
    ],
)
@pytest.mark.parametrize("size", [0, 1, 5, 200_000])
def test_is_finite_checks_values_of_every_type(dtype, size):
    value = np.ones((size,), jnp.dtype(dtype))
    assert finite.is_finite(value) and finite.is_finite(value.reshape(-1, 1)[::2])
    if not size or dtype == "int32":
        return
    largest = np.full(3, jnp.finfo(dtype).max)
    assert finite.is_finite(largest) and finite.is_finite(-largest)
    bad = [np.nan] if dtype == "float8_e4m3fn" else [np.nan, np.inf, -np.inf]
    for item in bad:
        value[-1] = item
        assert not finite.is_finite(value)
        assert not finite.is_finite(value.reshape(1, -1))


@pytest.mark.parametrize(
    "options,match",
    [
        ({"last": 0}, "keep_last=0 must be an integer of at least 1"),
        ({"last": True}, "keep_last=True"),
        ({"last": 1.5}, "keep_last=1.5"),
        (
            {"last": 1, "every_steps": -1},
            "keep_every_steps=-1 must be an integer of at least 0",
        ),
        ({"last": 1, "best": 1}, "keep_best=1 needs best_metric"),
        (
            {"last": 1, "best": 1, "metric": "m", "mode": "most"},
            "'max' or 'min'; received 'm' and 'most'",
        ),
    ],
)
def test_invalid_rules_are_refused(options, match):
    with pytest.raises(checkpoint.CheckpointError, match=match):
        checkpoint.Keep(**options)


def test_the_best_step_survives_restarts_unless_it_is_damaged(tmp_path):
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


def test_a_deletion_removes_commit_first(tmp_path, monkeypatch):
    messages = []
    manager = checkpoint.Manager(tmp_path, checkpoint.Keep(1), log=messages.append)
    save(manager, 1, STATE)
    monkeypatch.setattr(type(manager.store), "delete_folder", lambda *args: 1 / 0)
    # The new checkpoint counts although deleting the old one failed. The old one no
    # longer counts.
    save(manager, 2, STATE)
    assert (
        manager.all_steps() == [2] and "could not be deleted: division" in messages[0]
    )
    assert len(list(tmp_path.glob("step_00000001.*/meta.json"))) == 1
    monkeypatch.undo()
    save(manager, 3, STATE)
    assert len(list(tmp_path.glob("step_*"))) == 1
    manager.close()


def test_an_attempt_stops_counting_before_its_files_are_deleted(tmp_path, monkeypatch):
    manager = checkpoint.Manager(tmp_path, checkpoint.Keep(3))
    save(manager, 1, STATE)
    seen = []
    original = type(manager.store).delete_folder

    def delete_folder(store, prefix):
        seen.append(manager.all_steps())
        original(store, prefix)

    monkeypatch.setattr(type(manager.store), "delete_folder", delete_folder)
    (attempt,) = format_lib.attempts(manager.store)
    janitor.remove(attempt)
    assert seen == [[]] and not list(tmp_path.glob("step_*"))
    manager.close()
