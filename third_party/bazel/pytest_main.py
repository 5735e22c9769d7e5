"""Runs pytest on the files given, as Bazel asks for it."""

import os
import pathlib
import sys

import pytest


class Shard:
    """One of several processes that share a target's tests, as Bazel numbers them."""

    def __init__(self, index, count):
        self._index, self._count = index, count
        # It tells Bazel that not all of them run all of the tests.
        pathlib.Path(os.environ["TEST_SHARD_STATUS_FILE"]).touch()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = items[self._index :: self._count]


if __name__ == "__main__":
    options = ["--rootdir=.", "-c", "pyproject.toml"]
    if "XML_OUTPUT_FILE" in os.environ:
        options.append(f"--junitxml={os.environ['XML_OUTPUT_FILE']}")
    if "TESTBRIDGE_TEST_ONLY" in os.environ:
        options.append(f"-k={os.environ['TESTBRIDGE_TEST_ONLY']}")
    plugins = []
    if "TEST_TOTAL_SHARDS" in os.environ:
        index, count = (int(os.environ[f"TEST_{x}"]) for x in ("SHARD_INDEX", "TOTAL_SHARDS"))
        plugins.append(Shard(index, count))
    code = pytest.main(options + sys.argv[1:], plugins)
    # A filter may leave a shard without a test.
    sys.exit(0 if plugins and code == pytest.ExitCode.NO_TESTS_COLLECTED else code)
