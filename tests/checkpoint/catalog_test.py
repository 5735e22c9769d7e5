"""Tests of the catalog: the checkpoints in a folder as another process sees them, while
a run may save there.
"""

import jax
import jax.numpy as jnp
import pytest

from tests.checkpoint.harness import make_manager, save
from xshard import checkpoint
from xshard.checkpoint import format as format_lib


def test_the_catalog_lists_the_state_and_metrics_of_each_checkpoint(tmp_path):
    manager = make_manager(tmp_path / "ck", keep_last=3)
    for step in (1, 2):
        manager.save(
            step,
            {"w": jnp.ones(step)},
            {
                "config": {
                    "checkpoint": {
                        "keep_best": 1,
                        "best_metric": "error",
                        "best_mode": "min",
                    }
                }
            },
            metrics={"error": float(step)},
        )
    manager.close()
    (tmp_path / "ck/step_00000003.0123abcd").mkdir()
    listing = checkpoint.read_catalog(tmp_path / "ck")
    assert listing.written_with["jax"] == jax.__version__
    assert [(e.step, e.state, e.best, e.metrics) for e in listing.entries] == [
        (1, "complete", 1, {"error": 1.0}),
        (2, "complete", None, {"error": 2.0}),
        (3, "incomplete", None, {}),
    ]
    assert (
        listing.entries[0].nbytes > 0
        and listing.entries[0].time <= listing.entries[1].time
    )


def test_a_checkpoint_deleted_during_the_listing_is_absent_not_damaged(
    tmp_path, monkeypatch
):
    manager = make_manager(tmp_path, keep_last=3)
    for step in (1, 2):
        save(manager, step, {"w": jnp.ones(1)})
    read_commit = format_lib.read_commit

    def delete_first(attempt):
        if attempt.step == 1:
            attempt.store.delete_folder(attempt.prefix)
        return read_commit(attempt)

    monkeypatch.setattr(format_lib, "read_commit", delete_first)
    assert [(e.step, e.state) for e in checkpoint.read_catalog(tmp_path).entries] == [
        (2, "complete")
    ]


def test_a_damaged_checkpoint_is_listed_as_damaged(tmp_path):
    manager = make_manager(tmp_path)
    save(manager, 1, {"w": jnp.ones(1)})
    (path,) = tmp_path.glob("step_00000001.*/COMMIT")
    path.write_bytes(path.read_bytes()[:-20])
    (entry,) = checkpoint.read_catalog(tmp_path).entries
    assert (entry.state, entry.time, entry.metrics) == ("damaged", None, {})


def test_an_empty_folder_has_no_checkpoints_and_a_missing_one_is_an_error(tmp_path):
    assert checkpoint.read_catalog(tmp_path) == checkpoint.Catalog([], {})
    with pytest.raises(checkpoint.CheckpointError, match="is not a directory"):
        checkpoint.read_catalog(tmp_path / "nothing")
