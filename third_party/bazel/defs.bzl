"""The project's rules: libraries, tests by pytest, and experiments."""

load("@rules_python//python:defs.bzl", "py_binary", "py_library", "py_test")

def modules(srcs, deps, **kwargs):
    """A library for each file, named after it; and ":modules", with all of them.

    Args:
      srcs: the files. Each depends on the package, "__init__.py", which may be defined beside them.
      deps: the dependencies by name.
      **kwargs: further arguments of each library.
    """
    names = [path[:-len(".py")] for path in srcs]
    for name in names:
        package = [] if name == "__init__" else [":__init__"]
        py_library(name = name, srcs = [name + ".py"], deps = deps.get(name, []) + package, **kwargs)
    py_library(name = "modules", deps = [":" + name for name in names], **kwargs)

def pytest_test(name, paths, deps, data = [], **kwargs):
    """A test that pytest runs: files, in one process, with the project's settings."""

    # Without the packages around it, pytest takes a folder such as tests/wings/wandb for the module of that name.
    parts = native.package_name().split("/")
    around = ["//%s:__init__" % "/".join(parts[:count]) for count in range(2, len(parts))]
    py_test(
        name = name,
        srcs = paths + ["//third_party/bazel:pytest_main.py"],
        main = "//third_party/bazel:pytest_main.py",
        args = ["$(location %s)" % path for path in paths],
        data = data + ["//:pyproject.toml"],
        deps = deps + around + ["//tests:conftest"],
        # It only ends what hangs: how long a test takes is up to what else the machine has to do.
        timeout = "eternal",
        **kwargs
    )

def pytest_tests(name, deps, groups = {}, exclude = [], shard_count = None, **kwargs):
    """The tests of a folder, whatever files there are.

    Args:
      name: the test of all files that no group has.
      deps: the dependencies by the name of the test.
      groups: files that have a process of their own together, by the name of their test.
      exclude: files that are left out.
      shard_count: the number of processes in which the test of the other files runs.
      **kwargs: further arguments of each test.
    """
    rest = native.glob(["*_test.py"], exclude = exclude)
    for group, members in groups.items():
        paths = [path for path in rest if path in members]
        rest = [path for path in rest if path not in members]
        if paths:
            pytest_test(name = group, paths = paths, deps = deps.get(group, []) + [":__init__"], **kwargs)
    if rest:
        pytest_test(
            name = name,
            paths = rest,
            shard_count = shard_count,
            deps = deps.get(name, []) + [":__init__"],
            **kwargs
        )

def experiment(name, config, cpu_devices, deps, data = []):
    """An experiment's library, ":experiment", and a program that trains it: bazel run //experiments/NAME -- --workdir=DIR."""
    py_library(
        name = "experiment",
        srcs = native.glob(["*.py"]),
        data = data,
        visibility = ["//:__subpackages__"],
        deps = deps + ["//experiments"],
    )
    py_binary(
        name = name,
        srcs = ["//xshard:main.py"],
        args = ["--config=configs/%s.py" % config, "--cpu_devices=%d" % cpu_devices],
        main = "//xshard:main.py",
        deps = ["//configs:" + config, "//xshard:main"],
    )
