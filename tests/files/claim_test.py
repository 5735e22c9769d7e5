"""Tests of the claim of one process to a folder, on disks that go away."""

import errno
import os

import pytest

from xshard.files import claim


@pytest.fixture
def held(tmp_path):
    return claim.Claim(tmp_path / "run", renew_seconds=600, watch_seconds=600)


def test_a_disk_that_was_unmounted_is_named(held, tmp_path):
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    (tmp_path / "run").mkdir()
    with pytest.raises(claim.LostError, match="no process holds it.*was unmounted"):
        held.check()
    held.release()


def test_a_file_appears_where_the_disk_has_no_links(held, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", fails)
    path = tmp_path / "run" / "config.json"
    held.create(path, b"first")
    assert path.read_bytes() == b"first"
    with pytest.raises(FileExistsError):
        held.create(path, b"other")
    assert path.read_bytes() == b"first"
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
    claim.Claim(tmp_path / "run", renew_seconds=600, watch_seconds=600).release()


@pytest.mark.parametrize("place", [".holder/" + "a" * 16, ".holder"])
def test_nothing_that_is_reached_by_a_link_is_deleted(tmp_path, place):
    shared = tmp_path / "shared"
    held = shared / ("b" * 16)
    held.mkdir(parents=True)
    for folder in (shared, held):
        (folder / "precious").write_text("kept")
    link = tmp_path / "run" / place
    link.parent.mkdir(parents=True)
    link.symlink_to(shared)
    if place == ".holder":
        # As a folder of holders has it, and nothing else.
        (shared / "precious").unlink()
    with pytest.raises(ValueError, match="was not written by a run.*or the link"):
        claim.Claim(tmp_path / "run", renew_seconds=600, watch_seconds=600)
    assert (held / "precious").read_text() == "kept" and link.is_symlink()
    # Once the link is gone, the folder is free.
    link.unlink()
    claim.Claim(tmp_path / "run", renew_seconds=600, watch_seconds=600).release()
    assert (held / "precious").read_text() == "kept"
