"""The command lines of programs, and how programs fail.

A user's mistake is one message; a bug has a traceback.
"""

import argparse
import contextlib
import difflib
import functools
import itertools
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_dict
from ml_collections.config_flags import config_flags, tuple_parser

from xshard import config as config_lib
from xshard import config_values, errors
from xshard.base import loss_scale_keys, user_code
from xshard.files import disk, jsonfile, standard_streams
from xshard.pod import exit_codes

# `define_config` defines its caller's flag.
flags.disclaim_key_flags()

# The beginnings of the reasons that Python and absl give for a value of another type,
# and the rule for each.
_RULES = {
    "invalid literal for int()": "an integer, such as 1000",
    "could not convert string to float": "a number, such as 0.001",
    "('Non-boolean argument": "true or false",
    "not a tuple": (
        "a tuple as Python writes it, such as (1, 0.5, None, True, 'text'); infinity "
        "is 1e999. Leave the flag out for the value of the config file"
    ),
}


class _TupleParser(tuple_parser.TupleParser):
    """Refuses a text that ml_collections would take as a tuple of that one text."""

    def parse(self, argument: Any) -> tuple[Any, ...]:
        value = super().parse(argument)
        if isinstance(argument, str):
            text = argument.strip()
            is_bracketed = text.startswith(("(", "[")) and value == (argument,)
            if is_bracketed or text in ("None", "null"):
                raise ValueError("not a tuple")
        return value


config_flags.register_flag_parser_for_type(tuple, _TupleParser())


class _ConfigParser(config_flags.ConfigFileFlagParser):
    """Loads a config whose required values flags may give.

    ml_collections asks for the value of a key before it sets the key to a flag's.

    Attributes:
      required: the references to what is required.
    """

    required: tuple[ml_collections.FieldReference, ...] = ()

    def parse(self, path: str) -> Any:
        config = super().parse(disk.expanded(path))
        self.required = tuple(_with_placeholders(config))
        return config


def _with_placeholders(config: Any) -> Iterator[ml_collections.FieldReference]:
    """Makes what a config requires None until a flag sets it; yields the references."""
    if not isinstance(config, ml_collections.ConfigDict):
        return
    for key in config:
        try:
            value = config[key]
        except config_dict.RequiredValueError:
            reference = config.get_ref(key)
            reference.set(config_dict.placeholder(reference.get_type()))
            yield reference
        else:
            yield from _with_placeholders(value)


def parser(
    program: str, description: str | None, **options: Any
) -> argparse.ArgumentParser:
    """Returns a parser for the arguments of `python -m xshard.PROGRAM`.

    Args:
      program: the last part of the program's name.
      description: the text of its help, which keeps its line breaks.
      **options: further arguments of `argparse.ArgumentParser`.
    """
    return argparse.ArgumentParser(
        prog=f"python -m xshard.{program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


def run(program: Callable[[], int], *, has_debug_flag: bool = False) -> int:
    """Runs a program, and reports the exception if one ends it.

    A `UserError`, and a disk or network error in the framework's own code, print one
    message. Any other exception is a bug and prints a traceback, which starts at the
    user's code if the exception comes from there. Output streams that are closed, full
    or broken, or cannot encode a character, do not end the program.

    Args:
      program: the program; returns its exit code.
      has_debug_flag: whether the program has the flag --debug, which messages then
        mention.

    Returns:
      The exit code.
    """
    standard_streams.make_tolerant()
    # Configs and experiments are imported from the current directory.
    try:
        sys.path.insert(0, os.getcwd())
    except FileNotFoundError:
        print(
            "warning: the current directory was removed: give absolute paths.",
            file=sys.stderr,
        )
    try:
        return program()
    except KeyboardInterrupt:
        # A run handles Ctrl-C itself once it has state to save, so nothing is lost
        # here.
        print("interrupted", file=sys.stderr, flush=True)
        return exit_codes.INTERRUPTED
    except Exception as e:
        print_error(e, has_debug_flag=has_debug_flag)
        return exit_codes.FAILED


def program(main: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """Decorates the main function of a program, so that it fails as `run` describes."""

    @functools.wraps(main)
    def wrapped(argv: Sequence[str]) -> int:
        return run(lambda: main(argv))

    return wrapped


def define_config(
    values: flags.FlagValues = flags.FLAGS, arguments: Sequence[str] | None = None
) -> flags.FlagHolder:
    """Defines the flags --config, which it returns, and --config_overrides.

    Args:
      values: the program's flags.
      arguments: the program's name and arguments; None: those of this program.
    """
    holder = config_flags.DEFINE_config_file(
        "config",
        None,
        "The run's config file; --config.key=value overrides a value.",
        lock_config=False,
        flag_values=values,
        sys_argv=arguments,
    )
    values[holder.name].parser = _ConfigParser(holder.name, lock_config=False)
    flags.DEFINE_multi_string(
        "config_overrides",
        [],
        'A JSON file of values by key, as {"seed": 1}, which override those of '
        "--config and --config.key=value.",
        flag_values=values,
    )
    return holder


def locked(values: flags.FlagValues, last: Mapping[str, Any] | None = None) -> Any:
    """Returns the config of flags that are parsed, locked; None if they name none.

    Args:
      values: the flags, those of `define_config` among them.
      last: values by key that override those of all flags.

    Raises:
      UserError: if a required value is missing, or if a value that overrides one has no
        key in the config, or another type than the value there.
    """
    flag: Any = values["config"]
    if flag.value is None:
        return None
    for path in values.config_overrides:
        content = jsonfile.read(pathlib.Path(disk.expanded(path)))
        _set_values(flag.value, content, f"--config_overrides={path}: ")
    _set_values(flag.value, last or {}, "")
    for reference in flag.parser.required:
        if reference.get() is None:
            reference.set(None)
    try:
        return flag.value.lock()
    except config_dict.RequiredValueError:
        # It names the key.
        config_values.to_json(flag.value)
        raise


def parse(values: flags.FlagValues = flags.FLAGS) -> list[str]:
    """Parses the flags, and loads and locks the config that they name.

    Args:
      values: the program's flags, with that of `define_config`.

    Returns:
      The arguments that are not flags.

    Raises:
      UserError: if a flag, key or file does not exist, or if the file cannot be run.
    """
    try:
        words = values(sys.argv)
        # The config file is read on first use, which is this one: a missing file is
        # reported as a flag error.
        locked(values)
    except errors.UserError:
        raise
    except Exception as e:
        raise errors.UserError(_parse_error(e)) from e
    return words


def override(config: ml_collections.ConfigDict, arguments: Sequence[str]) -> None:
    """Sets values of a config by arguments such as '--config.precision=float32'.

    Raises:
      UserError: if the config lacks a key, or has a value of another type there.
    """
    values = flags.FlagValues()
    words = ["", *arguments]
    try:
        config_flags.DEFINE_config_dict(
            "config", config, lock_config=False, flag_values=values, sys_argv=words
        )
        values(words)
    except flags.Error as e:
        raise errors.UserError(flag_error(e)) from e
    except (AttributeError, KeyError) as e:
        unknown = _unknown_key("the run's config", config, arguments)
        raise errors.UserError(unknown or message(e)) from e


def _set_values(
    config: ml_collections.ConfigDict, values: Mapping[str, Any], where: str
) -> None:
    """Sets values of a config, by key, as `locked` describes; `where` begins errors."""
    keys = list(config_lib.flatten(config.to_dict()))
    for key, value in config_lib.flatten(dict(values)).items():
        if not _is_known_key(key, keys):
            raise errors.UserError(
                f"{where}{key}: {_no_such_key(key, keys, 'the config')}"
            )
        path, _, name = key.rpartition(".")
        folder = config[path] if path else config
        kind = folder.get_type(name)
        try:
            # To Python and ml_collections, a bool is a number.
            if isinstance(value, bool) and kind in (int, float):
                raise TypeError
            folder[name] = value
        except TypeError as e:
            if issubclass(kind, ml_collections.ConfigDict):
                kind = dict
            raise errors.UserError(
                f"{where}{key}={value!r} is of type {type(value).__name__}, and the "
                f"config has {kind.__name__} there: give a value of that type, or "
                "change the type in the config file."
            ) from e


def is_bug(e: Exception) -> bool:
    """Returns whether an exception needs a traceback.

    A UserError does not, and neither does an I/O error in the framework.
    """
    if isinstance(e, errors.UserError):
        return False
    return not (isinstance(e, OSError) and user_code.is_framework_error(e))


def summary(e: Exception) -> str:
    """Summarizes an exception, a bug in one line, with its place in the user's code."""
    where = user_code.location(e)
    text = message(e)
    if is_bug(e):
        text = text.splitlines()[0]
        kind = type(e).__name__
        # For an exception without a message, `message` returned its type already.
        if text != kind:
            text = f"{kind}: {text}"
    elif not user_code.is_framework_error(e):
        # The user's code raised the UserError itself, and its message says what is
        # wrong. Where the framework raised it below the user's code, as for a value
        # that this code passes on, the place helps.
        where = ""
    if not where:
        return text
    return f"{where}: {text}"


def print_error(e: Exception, *, has_debug_flag: bool) -> None:
    """Prints an exception, with its traceback if it is a bug or --debug is given."""
    # --debug is read from the arguments themselves, since parsing the flags may be what
    # failed.
    debug = "--debug" in sys.argv or "--debug=true" in sys.argv
    if debug:
        traceback.print_exception(e)
    elif is_bug(e):
        # The framework's frames above the user's code are left out.
        begin = user_code.user_traceback(e)
        if begin is None and not isinstance(e, SyntaxError):
            begin = e.__traceback__
        traceback.TracebackException(type(e), e, begin).print()
    text = f"error: {summary(e)}"
    if has_debug_flag and not debug and not is_bug(e):
        text += "\n(--debug shows where)"
    print(text, file=sys.stderr, flush=True)


def flag_value(words: Sequence[str], name: str) -> str:
    """Returns the value of a flag; the last of several, empty if there is none.

    Args:
      words: arguments, in which the flag is given as --name=value or as --name value.
      name: the flag's name.
    """
    found = ""
    for word, following in itertools.pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        if flag == f"--{name}":
            found = value if equals else following
    return found


def message(e: Exception) -> str:
    """Returns an exception's message, or its type if it has none."""
    if isinstance(e, SyntaxError):
        return e.msg
    # JAX appends a note about its traceback filtering after a line of dashes.
    return str(e).split("\n-----")[0] or type(e).__name__


def flag_error(e: flags.Error) -> str:
    """Returns the message for an error of absl's parser of flags.

    It has the rule for the value instead of Python's reason.
    """
    text = str(e).rstrip(" .?")
    # absl appends the parser's exception to the flag.
    reason = str(e.__context__)
    for beginning, rule in _RULES.items():
        if reason.startswith(beginning):
            flag = str(e).removeprefix("flag ").removesuffix(f": {reason}")
            if flag.endswith("=None"):
                rule += (
                    "; leave the flag out for a value of None, if the config file has "
                    "that"
                )
            return f"{flag} must be {rule}."
    # ml_collections knows no type for a value that is None.
    untyped = re.match(
        r"Type <class 'NoneType'> of field (config\S*) is not supported", str(e)
    )
    if untyped:
        return (
            f"--{untyped[1]}: the config file sets this key to None, which has no type "
            "that a flag could have. Set it there to "
            "ml_collections.config_dict.placeholder(float), or another type, which "
            "reads as None until a flag sets it."
        )
    of_folder = re.match(
        r"flag --(config\S*?)=(.*): Failed to parse .* as a ConfigDict",
        str(e),
        re.DOTALL,
    )
    if of_folder:
        name, value = of_folder.groups()
        example = f"--{name}.KEY=VALUE"
        if name == "config.loss_scale":
            kind = value if value in loss_scale_keys.KINDS else loss_scale_keys.DYNAMIC
            example = f"--{name}.kind={kind}"
        return f"--{name}={value}: {name} has keys of its own; set one, as {example}."
    if isinstance(e, flags.UnrecognizedFlagError):
        text += "; --help lists the flags"
    return f"{text}."


def _parse_error(e: Exception) -> str:
    """Returns the message for an exception from parsing flags or loading the config."""
    if isinstance(e, flags.Error):
        return flag_error(e)
    arguments = flags.FLAGS.read_flags_from_files(sys.argv[1:], force_gnu=False)
    path = flag_value(arguments, "config")
    if isinstance(e, OSError) and not os.path.isfile(os.path.expanduser(path)):
        return f"--config={path}: there is no such file (seen from {os.getcwd()})."
    if isinstance(e, AttributeError | KeyError):
        # If the config file itself raises, its keys are unknown.
        with contextlib.suppress(Exception):
            config = _ConfigParser("config", lock_config=False).parse(path)
            unknown = _unknown_key(path, config, arguments)
            if unknown:
                return unknown
    text = f"--config={path} raised {type(e).__name__}: {e}"
    where = user_code.location(e)
    if where:
        text += f" ({where})"
    return f"{text}."


def _unknown_key(
    where: str, config: ml_collections.ConfigDict, arguments: Sequence[str]
) -> str | None:
    """Returns the message for a flag that overrides a key that the config lacks; None
    if there is no such flag.
    """
    keys = list(config_lib.flatten(config.to_dict()))
    for argument in arguments:
        match = re.match(r"--?config\.([^=]+)", argument)
        if match is None or _is_known_key(match[1], keys):
            continue
        return f"--config.{match[1]}: {_no_such_key(match[1], keys, where)}"
    return None


def _no_such_key(name: str, keys: Sequence[str], where: str) -> str:
    text = f"{where} has no such key;"
    near = difflib.get_close_matches(name, keys, cutoff=0.4)
    if near:
        return f"{text} did you mean {' or '.join(near)}?"
    return f"{text} it has {', '.join(keys)}."


def _is_known_key(name: str, keys: Sequence[str]) -> bool:
    """Returns whether a name is that of a key, or of a part of the config with keys."""
    return any(key == name or key.startswith(f"{name}.") for key in keys)
