"""Runs pytest on the files given, as Bazel asks for it."""

import os
import sys

import pytest

if __name__ == "__main__":
    options = ["--rootdir=.", "-c", "pyproject.toml"]
    if "XML_OUTPUT_FILE" in os.environ:
        options.append(f"--junitxml={os.environ['XML_OUTPUT_FILE']}")
    if "TESTBRIDGE_TEST_ONLY" in os.environ:
        options.append(f"-k={os.environ['TESTBRIDGE_TEST_ONLY']}")
    sys.exit(pytest.main(options + sys.argv[1:]))
