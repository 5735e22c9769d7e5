"""The project's rule: tests by pytest."""

load("@rules_python//python:defs.bzl", "py_test")

def pytest_test(name, path, **kwargs):
    """A test that pytest runs: a file, with the project's settings."""
    py_test(
        name = name,
        srcs = [path, "//third_party/bazel:pytest_main.py"],
        main = "//third_party/bazel:pytest_main.py",
        args = ["$(location %s)" % path],
        data = ["//:pyproject.toml"],
        # It only ends what hangs: how long a test takes is up to what else the machine has to do.
        timeout = "eternal",
        **kwargs
    )
