"""The project's rules: py_library and pytest tests."""

load("@rules_python//python:defs.bzl", "py_library", "py_test")

def xshard_library(name, srcs, deps = [], **kwargs):
    """A library of the project's Python."""
    py_library(name = name, srcs = srcs, deps = deps, **kwargs)

def pytest_test(name, srcs, deps = [], data = [], args = [], **kwargs):
    """A test that pytest runs: its files, with the project's settings."""
    py_test(
        name = name,
        srcs = srcs + ["//third_party/bazel:pytest_main.py"],
        main = "//third_party/bazel:pytest_main.py",
        args = ["$(location %s)" % src for src in srcs] + args,
        data = data + ["//:pyproject.toml"],
        deps = deps + ["//tests:conftest", "@pypi//pytest"],
        # It only ends what hangs: how long a test takes is up to what else the machine has to do.
        timeout = "eternal",
        **kwargs
    )
