"""Tries what a run promises of its work directory on some kinds of disks."""

import pytest

from tests import disks


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return disks.make_reference(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "action"), disks.cases())
def test_a_run_keeps_its_promises_on_each_disk(name, action, reference):
    disks.attempt(name, action, reference)
