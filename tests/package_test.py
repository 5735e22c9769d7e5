"""Tests of the files that `pip install .` installs."""

import pathlib
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

import xshard
from tests.checkpoint import harness

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("xshard", "launch")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Returns the names of the files in a wheel that is built from a copy, without a
    network.
    """
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, source / package, ignore=ignored)
    shutil.copytree(ROOT / "requirements", source / "requirements")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = (
        f"from setuptools import build_meta; build_meta.build_wheel({str(output)!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (path,) = output.glob("*.whl")
    return set(zipfile.ZipFile(path).namelist())


def test_the_wheel_has_every_file_of_the_packages(wheel):
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*")]
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if path.suffix in (".py", ".pyi", ".md") and "__pycache__" not in path.parts
    }
    assert "launch/__main__.py" in wanted and "xshard/new/template/README.md" in wanted
    assert not wanted - wheel


def test_each_public_name_is_there_at_first_use():
    for name in xshard.__all__:
        assert hasattr(xshard, name)
    # What a config file uses before anything else has imported it.
    subprocess.run(
        [sys.executable, "-c", "import xshard; xshard.config.default()"],
        check=True,
        env=harness.environment(),
    )


def test_the_wheel_has_nothing_else(wheel):
    tops = {name.partition("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


def test_each_requirements_file_is_an_extra():
    dynamic = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
        "setuptools"
    ]["dynamic"]
    extras = {
        name: value["file"] for name, value in dynamic["optional-dependencies"].items()
    }
    names = {path.stem for path in (ROOT / "requirements").glob("*.in")} - {"run"}
    assert {"tpu", "cuda"} < names
    assert dynamic["dependencies"] == {"file": ["requirements/run.in"]}
    assert extras == {name: [f"requirements/{name}.in"] for name in names}
