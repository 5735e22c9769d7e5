"""Tests of the claim of one process to a folder, on disks that go away."""

import errno
import gc
import os

import pytest

from xshard.files import claim


@pytest.fixture
def held(tmp_path):
    return claim.Claim(tmp_path / "run")


def test_a_disk_that_was_unmounted_is_named(held, tmp_path):
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    (tmp_path / "run").mkdir()
    with pytest.raises(claim.LostError, match="no process holds it.*was unmounted"):
        held.check()
    held.release()


def test_a_lock_that_cannot_be_closed_does_not_stop_a_release(
    held, tmp_path, monkeypatch
):
    close = os.close
    closed = []

    def fails(descriptor):
        closed.append(descriptor)
        close(descriptor)
        # As a network disk answers that was away.
        raise OSError(errno.EBADFD, os.strerror(errno.EBADFD))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", fails)
        held.release()
    assert len(closed) == 1
    assert not (tmp_path / "run" / claim.HOLDER).exists()
    claim.Claim(tmp_path / "run").release()


def test_a_claim_ends_with_its_object(tmp_path):
    claim.Claim(tmp_path / "run")
    gc.collect()
    claim.Claim(tmp_path / "run").release()


def test_nothing_that_is_reached_by_a_link_is_changed(tmp_path):
    shared = tmp_path / "shared"
    shared.write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / claim.HOLDER).symlink_to(shared)
    held = claim.Claim(tmp_path / "run")
    assert not (tmp_path / "run" / claim.HOLDER).is_symlink()
    held.release()
    assert shared.read_text() == "kept"
