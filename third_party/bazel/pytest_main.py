"""Runs pytest on the files given, as Bazel asks for it."""

import os
import pathlib
import sys
import zlib

import pytest


def chosen(arguments):
    """Returns the arguments with the files of this shard only. A file is never divided,
    because its tests share what is slow to make.
    """
    count = int(os.environ.get("TEST_TOTAL_SHARDS", "1"))
    if count == 1:
        return arguments
    pathlib.Path(os.environ["TEST_SHARD_STATUS_FILE"]).touch()
    index = int(os.environ["TEST_SHARD_INDEX"])
    kept = []
    for argument in arguments:
        if argument.startswith("-") or zlib.crc32(argument.encode()) % count == index:
            kept.append(argument)
    return kept


def main():
    """Runs the files of the command line; returns pytest's exit code."""
    arguments = chosen(sys.argv[1:])
    if all(argument.startswith("-") for argument in arguments):
        print("this shard has no file")
        return 0
    options = ["--rootdir=.", "-c", "pyproject.toml"]
    if "XML_OUTPUT_FILE" in os.environ:
        options.append(f"--junitxml={os.environ['XML_OUTPUT_FILE']}")
    if "TESTBRIDGE_TEST_ONLY" in os.environ:
        options.append(f"-k={os.environ['TESTBRIDGE_TEST_ONLY']}")
    return pytest.main(options + arguments)


if __name__ == "__main__":
    sys.exit(main())
