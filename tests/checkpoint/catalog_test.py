"""The checkpoints in a folder as others see them, while a run may be at work there."""

import jax
import jax.numpy as jnp
import pytest

from tests.checkpoint.harness import make_manager, save
from xshard import checkpoint
from xshard.checkpoint import catalog, source


def test_what_is_there(tmp_path):
    manager = make_manager(tmp_path / "ck", keep_last=3)
    for step in (1, 2):
        manager.save(
            step,
            {"w": jnp.ones(step)},
            {
                "config": {
                    "checkpoint": {"keep_best": 1, "best_metric": "error", "best_mode": "min"}
                }
            },
            metrics={"error": float(step)},
        )
    manager.close()
    (tmp_path / "ck/step_00000003.0123abcd").mkdir()
    found = checkpoint.read_catalog(tmp_path / "ck")
    assert found.written_with["jax"] == jax.__version__
    assert [(e.step, e.state, e.best, e.metrics) for e in found.entries] == [
        (1, "complete", 1, {"error": 1.0}),
        (2, "complete", None, {"error": 2.0}),
        (3, "incomplete", None, {}),
    ]
    assert found.entries[0].nbytes > 0 and found.entries[0].time <= found.entries[1].time


def test_what_is_deleted_meanwhile_is_not_there_and_not_damaged(tmp_path, monkeypatch):
    manager = make_manager(tmp_path, keep_last=3)
    for step in (1, 2):
        save(manager, step, {"w": jnp.ones(1)})
    read_commit = source.read_commit

    def delete_first(attempt):
        if attempt.step == 1:
            attempt.store.delete_folder(attempt.prefix)
        return read_commit(attempt)

    monkeypatch.setattr(catalog.source, "read_commit", delete_first)
    assert [(e.step, e.state) for e in checkpoint.read_catalog(tmp_path).entries] == [
        (2, "complete")
    ]


def test_what_is_damaged_is_said_to_be(tmp_path):
    manager = make_manager(tmp_path)
    save(manager, 1, {"w": jnp.ones(1)})
    (path,) = tmp_path.glob("step_00000001.*/COMMIT")
    path.write_bytes(path.read_bytes()[:-20])
    (entry,) = checkpoint.read_catalog(tmp_path).entries
    assert (entry.state, entry.time, entry.metrics) == ("damaged", None, {})


def test_an_empty_folder_and_none(tmp_path):
    assert checkpoint.read_catalog(tmp_path) == checkpoint.Catalog([], {})
    with pytest.raises(checkpoint.CheckpointError, match="is not a directory"):
        checkpoint.read_catalog(tmp_path / "nothing")
