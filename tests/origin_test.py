"""The commit that an experiment's code is of."""

import subprocess

import pytest

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
    someone = ["-c", "user.name=Someone", "-c", "user.email=someone@example.com"]
    command = ["git", "-C", str(folder), *someone, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_commit(repository):
    file = repository / "experiment.py"
    commit = git(repository, "rev-parse", "HEAD")
    assert len(commit) == 40 and origin_lib.commit(str(file)) == commit
    # A tag does not take its place.
    git(repository, "tag", "v1")
    assert origin_lib.commit(str(file)) == commit
    file.write_text("a = 2\n")
    assert origin_lib.commit(str(file)) == f"{commit}-dirty"


def test_a_file_that_is_not_in_the_commit(repository):
    commit = git(repository, "rev-parse", "HEAD")
    other = repository / "other.py"
    other.write_text("")
    assert origin_lib.commit(str(other)) == f"{commit}-dirty"
    # Work directories and the like do not make the code another.
    assert origin_lib.commit(str(repository / "experiment.py")) == commit


def test_nothing_fails_for_want_of_git(repository, tmp_path, monkeypatch):
    assert origin_lib.commit(str(tmp_path / "experiment.py")) == ""
    assert origin_lib.commit("/nowhere/experiment.py") == ""
    monkeypatch.setenv("PATH", "")
    assert origin_lib.commit(str(repository / "experiment.py")) == ""
