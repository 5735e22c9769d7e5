"""Tests that a new experiment is written whole or not at all.

docs_test runs it, as part of the tutorial.
"""

import importlib.util

import pytest

from xshard import config
from xshard.new import __main__ as new


def test_the_next_commands_are_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert new.main(["some where/spirals"]) == 0
    out = capsys.readouterr().out
    directory = tmp_path / "some where" / "spirals"
    assert sorted(path.name for path in directory.iterdir()) == sorted(new.FILES)
    assert "  cd 'some where/spirals'\n" in out
    commands = [
        line.split("#")[0].strip() for line in out.splitlines() if "python -m" in line
    ]
    readme = (directory / "README.md").read_text()
    assert len(commands) == 2 and all(command in readme for command in commands)


def test_a_missing_pytest_is_mentioned(tmp_path, monkeypatch, capsys):
    """xshard does not depend on pytest, which the new experiment's tests need."""
    assert new.main([str(tmp_path / "with")]) == 0
    assert "pip install pytest" not in capsys.readouterr().out
    monkeypatch.setattr(importlib.util, "find_spec", {"pytest": None}.get)
    assert new.main([str(tmp_path / "without")]) == 0
    assert "python -m pip install pytest" in capsys.readouterr().out


def test_the_new_config_has_every_key_of_a_run():
    namespace = {}
    exec((new.TEMPLATE / "config.py").read_text(), namespace)
    config.check(namespace["get_config"]())
    keys = config.flatten(namespace["get_config"]().to_dict()).keys()
    own = {key for key in keys if key.startswith(("model.", "optimizer."))}
    assert keys - own == {key.name for key in config.KEYS}


def test_an_empty_directory_is_accepted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert new.main(["."]) == 0
    assert "  cd " not in capsys.readouterr().out
    assert (tmp_path / "config.py").read_text() == (
        new.TEMPLATE / "config.py"
    ).read_text()


@pytest.mark.parametrize(
    "case", ["holds something", "is a file", "is below a file", "cannot be made"]
)
def test_nothing_is_overwritten(tmp_path, capsys, case):
    kept = tmp_path / "mine" / "config.py"
    kept.parent.mkdir()
    kept.write_text("mine")
    directory, message = {
        "holds something": (
            kept.parent,
            "is not empty: it holds config.py. Nothing is overwritten",
        ),
        "is a file": (kept, f"{kept} is a file"),
        "is below a file": (kept / "new", "is a file"),
        "cannot be made": ("/proc/new", "cannot be made or written: No such file"),
    }[case]
    assert new.main([str(directory)]) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and message in err
    assert kept.read_text() == "mine" and list(tmp_path.rglob("*.py")) == [kept]
