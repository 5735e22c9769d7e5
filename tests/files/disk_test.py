"""Tests of reads and writes on disks that go away."""

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
