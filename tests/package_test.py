"""Tests of the files that `pip install .` installs."""

import os
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


def copy_of_sources(folder):
    """Copies what the packages are built from."""
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)


def build(kind, source, output):
    """Builds an sdist or a wheel without a network; returns its path."""
    code = (
        f"from setuptools import build_meta; build_meta.build_{kind}({str(output)!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (path,) = output.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Returns the content of each file in a wheel that is built from a copy, without a
    network.
    """
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    copy_of_sources(source)
    return content(build("wheel", source, output))


def content(path):
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def test_the_sdist_builds_the_same_wheel(wheel, tmp_path):
    source, sdist, again = (tmp_path / name for name in ("source", "sdist", "again"))
    for folder in (source, sdist, again):
        folder.mkdir()
    copy_of_sources(source)
    path = build("sdist", source, sdist)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert path.name == f"xshard-{version}.tar.gz"
    # Python before 3.11.4 cannot name the filter that later ones warn without.
    subprocess.run(["tar", "-xf", path, "-C", tmp_path], check=True)
    rebuilt = content(build("wheel", tmp_path / f"xshard-{version}", again))
    # RECORD lists the others with their checksums.
    assert rebuilt == wheel


@pytest.mark.long
def test_a_clean_environment_passes_what_new_writes(tmp_path):
    """Needs what pip fetches, and is then what CI does for a release."""
    done = subprocess.run(
        [ROOT / ".ci" / "install", tmp_path],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "installed and passed with" in done.stdout


def test_the_wheel_has_every_file_of_the_packages(wheel):
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*")]
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if path.suffix in (".py", ".pyi", ".md") and "__pycache__" not in path.parts
    }
    assert "launch/__main__.py" in wanted and "xshard/new/template/README.md" in wanted
    assert not wanted - wheel.keys()


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
