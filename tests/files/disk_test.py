"""Tests of reads and writes on disks that go away."""

import os
import pathlib
import pwd

import pytest

from xshard import errors
from xshard.files import disk


def test_a_write_below_a_folder_that_cannot_be_asked_for_is_named(tmp_path):
    # The system answers each question for such a name by an error, as for all names on
    # a disk whose server is away.
    path = tmp_path / ("x" * 300) / "file"
    refused = pytest.raises(errors.UserError, match="not be written: File name too")
    with refused, disk.writing(path):
        disk.replace(path, b"")


def test_a_tilde_is_the_home_directory_and_nothing_else_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert disk.expanded("~") == str(tmp_path)
    assert disk.expanded("~/a/~b") == f"{tmp_path}/a/~b"
    assert disk.expanded(pathlib.Path("~/a")) == f"{tmp_path}/a"
    user = pwd.getpwuid(os.getuid())
    assert disk.expanded(f"~{user.pw_name}/a") == f"{user.pw_dir}/a"
    for path in ("", "a", "./~/a", "/a/~", "a~", "gs://bucket/~", "runs/~/x"):
        assert disk.expanded(path) == path
    with pytest.raises(errors.UserError, match=r"no such user.* \./~nobody_at_all/a"):
        disk.expanded("~nobody_at_all/a")
