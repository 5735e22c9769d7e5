"""The project's rules: tests by pytest, and experiments."""

load("@rules_python//python:defs.bzl", "py_binary", "py_library", "py_test")

def pytest_test(name, paths, **kwargs):
    """A test that pytest runs: files, in one process, with the project's settings."""
    py_test(
        name = name,
        srcs = paths + ["//third_party/bazel:pytest_main.py"],
        main = "//third_party/bazel:pytest_main.py",
        args = ["$(location %s)" % path for path in paths],
        data = ["//:pyproject.toml"],
        # It only ends what hangs: how long a test takes is up to what else the machine has to do.
        timeout = "eternal",
        **kwargs
    )

def experiment(name, config, cpu_devices, deps = [], data = []):
    """An experiment's library, ":experiment", and a program that trains it: bazel run //experiments/NAME -- --workdir=DIR."""
    py_library(
        name = "experiment",
        srcs = native.glob(["*.py"]),
        data = data,
        visibility = ["//:__subpackages__"],
        deps = ["//experiments", "//xshard"] + deps,
    )
    py_binary(
        name = name,
        srcs = ["//xshard:main.py"],
        args = ["--config=" + config, "--cpu_devices=%d" % cpu_devices],
        main = "//xshard:main.py",
        deps = [":experiment", "//configs"],
    )
