"""Tests of the origin that a run records: the Git commit of its experiment's code, and
the libraries.
"""

import json
import os
import subprocess

import jax
import pytest

from xshard.files import provenance, workdir
from xshard.pod import origin as origin_lib


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "experiment.py").write_text("a = 1\n")
    git(folder, "init", "--quiet")
    git(folder, "add", "experiment.py")
    git(folder, "commit", "--quiet", "-m", "One")
    return folder


def git(folder, *arguments):
    identity = ["-c", "user.name=Someone", "-c", "user.email=someone@example.com"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_commit_is_marked_dirty_only_if_the_file_has_changed(repository):
    file = repository / "experiment.py"
    commit = git(repository, "rev-parse", "HEAD")
    assert len(commit) == 40 and origin_lib.commit(str(file)) == commit
    # A tag does not replace the hash.
    git(repository, "tag", "v1")
    assert origin_lib.commit(str(file)) == commit
    file.write_text("a = 2\n")
    assert origin_lib.commit(str(file)) == f"{commit}-dirty"


def test_an_untracked_experiment_marks_the_commit_dirty(repository):
    commit = git(repository, "rev-parse", "HEAD")
    other = repository / "other.py"
    other.write_text("")
    assert origin_lib.commit(str(other)) == f"{commit}-dirty"
    # Other untracked files, such as work directories, do not mark the commit dirty.
    assert origin_lib.commit(str(repository / "experiment.py")) == commit


def test_without_git_or_a_repository_the_commit_is_empty(
    repository, tmp_path, monkeypatch
):
    assert origin_lib.commit(str(tmp_path / "experiment.py")) == ""
    assert origin_lib.commit("/nowhere/experiment.py") == ""
    monkeypatch.setenv("PATH", "")
    assert origin_lib.commit(str(repository / "experiment.py")) == ""


def test_a_resume_with_other_libraries_is_reported(tmp_path):
    then = provenance.Provenance(
        "data", "data", "", "jax 0.10.2, jaxlib 0.10.2, optax 0.2.8"
    )
    now = then._replace(libraries="jax 0.12.0.1, jaxlib 0.12.0.1, optax 0.2.8")
    (tmp_path / "origin.json").write_text(json.dumps(then._asdict()))
    of_run = workdir.Workdir(tmp_path)
    assert of_run.check_provenance(then) == []
    (change,) = of_run.check_provenance(now)
    assert (
        change
        == "libraries: jax 0.10.2, jaxlib 0.10.2 -> jax 0.12.0.1, jaxlib 0.12.0.1"
    )


@pytest.mark.parametrize(
    "platforms, given, wanted",
    [
        ("cuda,cpu", "", "--xla_gpu_deterministic_ops=true"),
        ("rocm", "--xla_a=1", "--xla_a=1 --xla_gpu_deterministic_ops=true"),
        # What the user says holds.
        (
            "cuda",
            "--xla_gpu_deterministic_ops=false",
            "--xla_gpu_deterministic_ops=false",
        ),
        ("cpu", "", "--xla_cpu_enable_concurrency_optimized_scheduler=false"),
        ("tpu,cpu", "", ""),
    ],
)
def test_programs_for_gpus_are_made_deterministic(
    platforms, given, wanted, monkeypatch
):
    monkeypatch.setenv("XLA_FLAGS", given)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    try:
        # A replay calls it twice.
        for _ in range(2):
            origin_lib.set_up_backends({}, 0)
    finally:
        jax.config.update("jax_platforms", before)
    assert os.environ["XLA_FLAGS"] == wanted
