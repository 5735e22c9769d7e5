"""Tests of the messages and exit codes of programs that fail, and of the commands that they print."""

import pytest

from xshard import cli, errors
from xshard.files import disk
from xshard.pod import notice


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("run --a=1", "run --a=1 --steps=8"),
        ("run --steps=3 --a=1 --steps=4", "run --a=1 --steps=8"),
        ("run --steps 3 --a=1", "run --a=1 --steps=8"),
        ("run -steps=3 --steps_of_mine=2", "run --steps_of_mine=2 --steps=8"),
        ("'a b/python' --steps=3 '--a=x y'", "'a b/python' '--a=x y' --steps=8"),
    ],
)
def test_a_flag_that_is_already_there_is_replaced(command, wanted):
    assert cli.with_flag(command, "steps", 8) == wanted


def fails(e):
    def program():
        raise e

    return program


def test_a_user_error_is_one_message(capsys):
    assert cli.run(fails(errors.UserError("a=1 must be 2."))) == notice.FAILED
    assert capsys.readouterr().err == "error: a=1 must be 2.\n"
    assert cli.run(fails(errors.UserError("a=1 must be 2.")), has_debug_flag=True) == notice.FAILED
    assert capsys.readouterr().err == "error: a=1 must be 2.\n(--debug shows where)\n"


def test_a_value_error_shows_a_traceback(capsys):
    assert cli.run(fails(ValueError("shapes differ"))) == notice.FAILED
    error = capsys.readouterr().err
    place = error.splitlines()[-1]
    assert "Traceback" in error and "cli_test.py" in place
    assert place.endswith("in fails.<locals>.program: ValueError: shapes differ")


def test_an_error_without_a_message(capsys):
    assert cli.run(fails(RuntimeError())) == notice.FAILED
    assert capsys.readouterr().err.splitlines()[-1].endswith("program: RuntimeError")


def test_only_disk_errors_of_the_framework_are_messages(tmp_path, capsys):
    # An error in the user's code is reported with its traceback.
    assert cli.run(lambda: (tmp_path / "nothing").read_text()) == notice.FAILED
    assert "Traceback" in capsys.readouterr().err
    write = lambda: disk.replace(tmp_path / "nothing" / "file", b"")
    assert cli.run(write) == notice.FAILED
    error = capsys.readouterr().err
    assert "Traceback" not in error and "No such file" in error and "nothing/.file.new" in error


def test_an_interrupt(capsys):
    assert cli.run(fails(KeyboardInterrupt())) == notice.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"
