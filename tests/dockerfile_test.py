"""Tests that the Dockerfile agrees with the repository, without building the image."""

import fnmatch
import os
import pathlib
import re
import shlex
import shutil
import string
import subprocess
import sys
import tomllib

import pytest
from packaging import requirements, specifiers, utils

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXTRAS = ("tpu", "cuda")


def instructions():
    """Returns the instructions of the Dockerfile as pairs of name and arguments."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def arguments(name):
    return [rest for instruction, rest in instructions() if instruction == name]


def copies(extra):
    """Returns the sources and targets of what is copied into the image of an extra,
    relative to the repository.
    """
    pairs = []
    for rest in arguments("COPY"):
        *sources, target = string.Template(rest).substitute(EXTRA=extra).split()
        for source in sources:
            # Into a folder, where the target is one.
            name = pathlib.Path(source).name if target.endswith("/") else ""
            pairs.append((source, target + name))
    return pairs


@pytest.fixture(scope="module", params=EXTRAS)
def image(request, tmp_path_factory):
    """A folder with what the Dockerfile copies into its working directory."""
    folder = tmp_path_factory.mktemp("image")
    for source, target in copies(request.param):
        if (ROOT / source).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / source, folder / target, ignore=ignored)
        else:
            (folder / target).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / source, folder / target)
    return folder


def run(image, command):
    """Runs a command of the image, with its variables, as it would run in the working
    directory.
    """
    (workdir,) = arguments("WORKDIR")
    variables = dict(
        word.split("=") for rest in arguments("ENV") for word in shlex.split(rest)
    )
    assert variables["PYTHONPATH"] == workdir
    environment = {
        **os.environ,
        **variables,
        "PYTHONPATH": str(image),
        "JAX_PLATFORMS": "cpu",
    }
    assert command[0] == "python"
    return subprocess.run(
        [sys.executable, *command[1:]],
        cwd=image,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_the_command_runs_from_what_is_copied(image):
    (command,) = arguments("CMD")
    done = run(image, shlex.split(command.strip("[]").replace(",", " ")))
    # absl's exit code of --help is 1.
    assert "--workdir" in done.stdout and "Traceback" not in done.stderr


def test_the_configs_and_the_launcher_run_from_what_is_copied(image):
    config = "--config=configs/digits.py"
    shown = run(image, ["python", "-m", "xshard.main", config, "--show_config"])
    assert shown.returncode == 0 and "batch_size" in shown.stdout, shown.stderr
    command = ["python", "-m", "xshard.main", config, "--workdir=/tmp/run"]
    planned = run(image, ["python", "-m", "launch", "--dry_run", "--", *command])
    assert planned.returncode == 0 and "xshard.main" in planned.stdout, planned.stderr


@pytest.mark.parametrize("extra", EXTRAS)
def test_nothing_that_is_copied_is_ignored(extra):
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    first, *rest = [line for line in lines if not line.startswith("#")]
    assert first == "*"
    kept = [line.removeprefix("!") for line in rest if line.startswith("!")]
    for source, _ in copies(extra):
        assert any(fnmatch.fnmatch(source, pattern) for pattern in kept), source
    for pattern in kept:
        assert list(ROOT.glob(pattern)), pattern


def test_there_is_a_stage_for_each_extra():
    stages = [rest.split(" AS ")[1] for rest in arguments("FROM") if " AS " in rest]
    assert set(EXTRAS) < set(stages)
    assert arguments("FROM")[-1] == "${EXTRA}"
    default, _ = arguments("ARG")
    assert default.removeprefix("EXTRA=") in EXTRAS


def test_the_images_python_is_one_that_the_project_supports():
    (base,) = (rest for rest in arguments("FROM") if rest.startswith("python:"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = re.match(r"python:(\d+\.\d+)-slim", base)[1]
    assert version in specifiers.SpecifierSet(project["requires-python"])


def locked(path):
    """Returns the requirements in a lock file."""
    lines = (ROOT / path).read_text().splitlines()
    return [
        requirements.Requirement(line.removesuffix(" \\"))
        for line in lines
        if line[:1].isalpha()
    ]


def name_of(requirement):
    return utils.canonicalize_name(requirement.name)


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_lock_of_an_extra_has_the_versions_of_the_lock(extra):
    """If this fails, requirements/lock.txt has changed: CONTRIBUTING.md has the command
    that writes this one.
    """
    path = f"requirements/{extra}_lock.txt"
    text = (ROOT / path).read_text()
    # An index, a host or a folder would belong to the machine that wrote the lock.
    assert not re.search(r"://|--(extra-)?index-url|--find-links| @ ", text)
    known = {
        (name_of(each), str(each.specifier)) for each in locked("requirements/lock.txt")
    }
    names = {name for name, _ in known}
    found = {(name_of(each), str(each.specifier)) for each in locked(path)}
    assert not {(name, version) for name, version in found if name in names} - known
    extras = {name_of(each): each.extras for each in locked(path)}
    for source in ("requirements/run.in", f"requirements/{extra}.in"):
        for line in (ROOT / source).read_text().split():
            required = requirements.Requirement(line)
            assert required.extras <= extras[name_of(required)], line
    # Each of them has a hash, or pip would refuse the file.
    hashed = re.findall(r"^[a-z].*==.*\\\n    --hash=sha256:", text, re.MULTILINE)
    assert len(hashed) == len(locked(path))
