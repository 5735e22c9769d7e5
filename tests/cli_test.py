"""Tests of how programs fail: their messages and exit codes, and what they suggest."""

import math
import sys

import pytest
from absl import flags

from tests import toy
from xshard import cli, errors
from xshard.base import user_code
from xshard.files import disk
from xshard.pod import exit_codes
from xshard.run import checkpoints


def fails(e):
    def program():
        raise e

    return program


def test_a_program_runs_in_a_directory_that_was_removed(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.run(lambda: exit_codes.DONE) == exit_codes.DONE
    assert cli.run(fails(errors.UserError("a reason"))) == exit_codes.FAILED
    warning, again, error = capsys.readouterr().err.splitlines()
    assert (
        warning
        == again
        == "warning: the current directory was removed: give absolute paths."
    )
    assert error == "error: a reason"


def test_a_user_error_is_one_message(capsys):
    assert cli.run(fails(errors.UserError("a=1 must be 2."))) == exit_codes.FAILED
    assert capsys.readouterr().err == "error: a=1 must be 2.\n"
    assert (
        cli.run(fails(errors.UserError("a=1 must be 2.")), has_debug_flag=True)
        == exit_codes.FAILED
    )
    assert capsys.readouterr().err == "error: a=1 must be 2.\n(--debug shows where)\n"


def test_a_value_error_shows_a_traceback(capsys):
    assert cli.run(fails(ValueError("shapes differ"))) == exit_codes.FAILED
    error = capsys.readouterr().err
    place = error.splitlines()[-1]
    assert "Traceback" in error and "cli_test.py" in place
    assert place.endswith("in fails.<locals>.program: ValueError: shapes differ")


def test_an_error_without_a_message(capsys):
    assert cli.run(fails(RuntimeError())) == exit_codes.FAILED
    assert capsys.readouterr().err.splitlines()[-1].endswith("program: RuntimeError")


def test_only_disk_errors_of_the_framework_are_messages(tmp_path, capsys):
    # An error in the user's code is reported with its traceback.
    assert cli.run(lambda: (tmp_path / "nothing").read_text()) == exit_codes.FAILED
    assert "Traceback" in capsys.readouterr().err
    write = lambda: disk.replace(tmp_path / "nothing" / "file", b"")
    assert cli.run(write) == exit_codes.FAILED
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "No such file" in error
    assert "nothing/.file.new" in error


def test_an_interrupt(capsys):
    assert cli.run(fails(KeyboardInterrupt())) == exit_codes.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--count=1e3", "--count=1e3 must be an integer, such as 1000."),
        ("--count=a: b", "--count=a: b must be an integer, such as 1000."),
        ("--rate=fast", "--rate=fast must be a number, such as 0.001."),
        (
            "--rate=None",
            "--rate=None must be a number, such as 0.001; leave the flag out for a "
            "value of None, if the config file has that.",
        ),
        ("--debug=perhaps", "--debug=perhaps must be true or false."),
        ("--count=-1", "flag --count=-1: -1 is not a non-negative integer."),
        (
            "--cuont=1",
            "Unknown command line flag 'cuont'. Did you mean: count; --help lists the "
            "flags.",
        ),
    ],
)
def test_the_message_for_a_wrong_flag_is_a_rule(argument, message):
    values = flags.FlagValues()
    flags.DEFINE_integer("count", 1, "", 0, flag_values=values)
    flags.DEFINE_float("rate", 1.0, "", flag_values=values)
    flags.DEFINE_bool("debug", False, "", flag_values=values)
    with pytest.raises(flags.Error) as raised:
        values(["program", argument])
    assert cli.flag_error(raised.value) == message


def parsed(monkeypatch, *arguments):
    """Returns the config that the arguments of a program select."""
    values = flags.FlagValues()
    config = cli.define_config(values)
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    cli.parse(values)
    return config.value


def config_file(folder, *lines):
    """Writes a config file whose function has these lines; returns its path."""
    head = "import ml_collections\nfrom ml_collections import config_dict\n"
    body = "".join(f"    {line}\n" for line in lines)
    file = folder / "config.py"
    file.write_text(f"{head}def get_config():\n{body}")
    return file


# ml_collections loads the file by a method that Python will remove.
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.parametrize(
    "text",
    ["(128", "[1, null]", "((1, true),)", "None", "null", "(nan,)", " (a)", "["],
)
@pytest.mark.parametrize("form", ["one word", "two words", "one dash", "file", "twice"])
def test_a_flag_that_is_no_tuple_is_refused(tmp_path, monkeypatch, form, text):
    values = "{'model': {'hidden': (1, 2)}}"
    file = config_file(tmp_path, f"return ml_collections.ConfigDict({values})")
    words = {
        "one word": [f"--config.model.hidden={text}"],
        "two words": ["--config.model.hidden", text],
        "one dash": [f"-config.model.hidden={text}"],
        "file": [f"--flagfile={tmp_path / 'flags.txt'}"],
        "twice": ["--config.model.hidden=a", f"--config.model.hidden={text}"],
    }
    (tmp_path / "flags.txt").write_text(f"--config.model.hidden={text}\n")
    rule = "must be a tuple as Python writes it.*infinity is 1e999. Leave the flag out"
    with pytest.raises(errors.UserError, match=rule) as raised:
        parsed(monkeypatch, f"--config={file}", *words[form])
    assert str(raised.value).startswith("--config.model.hidden=")
    assert f"{text.strip()} must be" in str(raised.value)


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["(3, None, 1e999)"], (3, None, float("inf"))),
        (["[3]"], (3,)),
        (["3"], (3,)),
        (["a"], ("a",)),
        (["'(a'"], ("(a",)),
        (["'None'"], ("None",)),
        (["a", "b"], ("a", "b")),
        (["data/*.txt"], ("data/*.txt",)),
    ],
)
def test_a_flag_that_is_a_tuple_or_one_text_is_taken(
    tmp_path, monkeypatch, words, wanted
):
    file = config_file(tmp_path, "return ml_collections.ConfigDict({'hidden': (1, 2)})")
    arguments = [f"--config.hidden={word}" for word in words]
    assert parsed(monkeypatch, f"--config={file}", *arguments).hidden == wanted


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_a_flag_gives_what_a_config_requires(tmp_path, monkeypatch):
    file = config_file(
        tmp_path,
        "config = ml_collections.ConfigDict({'inner': {}, 'steps': 1})",
        "config.need = config_dict.required_placeholder(int)",
        "config.inner.same = config.get_ref('need')",
        "config.inner.name = config_dict.required_placeholder(str)",
        "config.inner.sizes = config_dict.required_placeholder(tuple)",
        "return config",
    )
    need = ["--config.need=3"]
    inner = ["--config.inner.name", "a", "--config.inner.sizes=(1,)"]
    config = parsed(monkeypatch, f"--config={file}", *need, *inner)
    assert config.is_locked and config.inner.is_locked
    assert config.to_dict() == {
        "inner": {"same": 3, "name": "a", "sizes": (1,)},
        "steps": 1,
        "need": 3,
    }
    for given, lacks in [(inner, "inner.same"), (need, "inner.name"), ([], "inner.")]:
        with pytest.raises(errors.UserError, match=f"^{lacks}.* is required and has"):
            parsed(monkeypatch, f"--config={file}", *given)
    with pytest.raises(errors.UserError, match="--config.need=x must be an integer"):
        parsed(monkeypatch, f"--config={file}", "--config.need=x")
    with pytest.raises(errors.UserError, match="no such key; did you mean need"):
        parsed(monkeypatch, f"--config={file}", *inner, "-config.needs=3")
    flagfile = tmp_path / "flags.txt"
    flagfile.write_text(f"--config={file}\n--config.needs=3\n")
    with pytest.raises(errors.UserError, match="^--config.needs: .* did you mean need"):
        parsed(monkeypatch, f"--flagfile={flagfile}")


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_files_of_overrides_come_after_the_flags(tmp_path, monkeypatch):
    file = config_file(
        tmp_path,
        "inner = {'rate': 0.1, 'sizes': (1, 2), 'list': [1]}",
        "config = ml_collections.ConfigDict({'inner': inner, 'none': None})",
        "config.need = config_dict.required_placeholder(int)",
        "config.inner.same = config.get_ref('need')",
        "return config",
    )
    first = tmp_path / "first.json"
    second = tmp_path / "second.json"
    first.write_text('{"inner.rate": 1, "inner": {"sizes": [[3], NaN]}, "need": 3}')
    second.write_text('{"need": 4, "none": "text", "inner.list": [2.5]}')
    base = [f"--config={file}", "--config.need=2", "--config.inner.rate=7"]
    names = [f"--config_overrides={first}", "--config_overrides", str(second)]
    config = parsed(monkeypatch, *names, *base)
    assert config.is_locked and config.need == config.inner.same == 4
    assert type(config.inner.rate) is float and config.inner.rate == 1
    assert config.inner.sizes[0] == [3] and math.isnan(config.inner.sizes[1])
    assert config.none == "text" and config.inner.list == [2.5]
    for content, message in [
        ('{"inner.rat": 1}', "inner.rat: the config has no such key; did you mean inn"),
        ('{"inner": 1}', "inner=1 is of type int, and the config has dict there"),
        ('{"need": true}', "need=True is of type bool, and the config has int there: "),
    ]:
        first.write_text(content)
        with pytest.raises(errors.UserError) as raised:
            parsed(monkeypatch, *base, names[0])
        assert str(raised.value).startswith(f"--config_overrides={first}: {message}")
    first.write_text("[1]")
    with pytest.raises(errors.UserError, match="first.json cannot be read: it is not"):
        parsed(monkeypatch, *base, names[0])


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.parametrize(
    ("argument", "example"),
    [
        ("loss_scale=dynamic", "loss_scale.kind=dynamic"),
        ("loss_scale=fixed", "loss_scale.kind=fixed"),
        ("loss_scale=1024.0", "loss_scale.kind=dynamic"),
        ("reduction=sum", "reduction.KEY=VALUE"),
    ],
)
def test_a_flag_for_what_has_keys_of_its_own_names_one(
    tmp_path, monkeypatch, argument, example
):
    file = tmp_path / "config.py"
    file.write_text("import xshard.config\nget_config = xshard.config.default\n")
    name = f"config.{argument.partition('=')[0]}"
    with pytest.raises(errors.UserError) as raised:
        parsed(monkeypatch, f"--config={file}", f"--config.{argument}")
    assert str(raised.value) == (
        f"--config.{argument}: {name} has keys of its own; set one, as "
        f"--config.{example}."
    )


def test_a_method_that_dataclasses_wrote_is_not_the_users_place():
    config = toy.get_config().checkpoint
    config.keep_last = 0
    with pytest.raises(errors.UserError, match="keep_last=0") as raised:
        checkpoints.keep(config)
    assert user_code.location(raised.value) == ""
