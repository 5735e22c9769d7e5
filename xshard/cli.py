"""The arguments of a program, and the end of one that has failed: one message for a mistake, a traceback for a bug."""

import argparse
import difflib
import itertools
import os
import re
import runpy
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from xshard import config as config_lib
from xshard import errors
from xshard.files import identity as identity_lib
from xshard.files import streams
from xshard.pod import notice


def parser(program: str, description: str | None, **options: Any) -> argparse.ArgumentParser:
    """A parser of the arguments of `python -m xshard.PROGRAM`, whose help has the description as it is written."""
    return argparse.ArgumentParser(
        prog=f"python -m xshard.{program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


def run(program: Callable[[], int], *, has_debug_flag: bool = False) -> int:
    """Runs a program, and says what has ended it before its time.

    A `UserError`, or an error of the disk or the network that the framework has met, is one message. Any
    other exception is a bug: it shows where, from the first line of the user's code on if it came from there.
    Streams that are closed, full or broken, or that lack a character, end nothing.

    Args:
      program: returns its exit code.
      has_debug_flag: whether it has the flag --debug, which the message then names.

    Returns:
      The exit code.
    """
    streams.last()
    # From where a program is started configs may import one another, and experiments are found.
    sys.path.insert(0, os.getcwd())
    try:
        return program()
    except KeyboardInterrupt:
        # Before there was anything to save.
        print("interrupted", file=sys.stderr, flush=True)
        return notice.INTERRUPTED
    except Exception as e:
        print_error(e, has_debug_flag=has_debug_flag)
        return notice.FAILED


def parse(config: flags.FlagHolder, values: flags.FlagValues = flags.FLAGS) -> list[str]:
    """Parses the flags and loads the config file that they name; returns the arguments that are no flags.

    Args:
      config: of `config_flags.DEFINE_config_file`.
      values: the program's flags.

    Raises:
      UserError: if there is no such flag, key or file, or if the file cannot be run.
    """
    try:
        words = values(sys.argv)
        # A file that is not there shows only when the config is used.
        _ = config.value and config.value.is_locked
        return words
    except Exception as e:
        raise errors.UserError(_flag_error(e)) from e


def is_bug(e: Exception) -> bool:
    """Returns whether an exception is to be shown with its traceback: it is neither the user's input nor the disk's."""
    if isinstance(e, errors.UserError):
        return False
    return not (isinstance(e, OSError) and errors.is_frameworks(e))


def summary(e: Exception) -> str:
    """Summarises an exception: a bug in one line, with where it is in the user's code.

    A rule that the user's code makes with what the config says is refused with the place, too: either may be
    wrong.
    """
    where = errors.location(e)
    text = message(e)
    if is_bug(e):
        text = text.splitlines()[0]
        kind = type(e).__name__
        # An exception without words is its kind already.
        if text != kind:
            text = f"{kind}: {text}"
    elif not errors.is_frameworks(e):
        where = ""
    if not where:
        return text
    return f"{where}: {text}"


def print_error(e: Exception, *, has_debug_flag: bool) -> None:
    """Prints an exception: a bug, and whatever --debug asks about, with its traceback."""
    # From the arguments themselves: the flags may be what could not be parsed.
    debug = "--debug" in sys.argv or "--debug=true" in sys.argv
    if debug:
        traceback.print_exception(e)
    elif is_bug(e):
        _print_bug(e)
    text = f"error: {summary(e)}"
    if has_debug_flag and not debug and not is_bug(e):
        text += "\n(--debug shows where)"
    print(text, file=sys.stderr, flush=True)


def _print_bug(e: Exception) -> None:
    """Prints the traceback, without how the framework has come to call the user's code."""
    begin = errors.from_users_code(e)
    if begin is None and not isinstance(e, SyntaxError):
        begin = e.__traceback__
    traceback.TracebackException(type(e), e, begin).print()


def with_flag(command: str, name: str, value: object) -> str:
    """A command with this value of a flag, in the place of any that it has."""
    words = without_flags(shlex.split(command), [name])
    return shlex.join([*words, f"--{name}={value}"])


def without_flags(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """Arguments without some flags, each of them given as --name=value or as --name value."""
    rest: list[str] = []
    value_follows = False
    for word in words:
        name, equals, _ = word.removeprefix("-").removeprefix("-").partition("=")
        if word.startswith("-") and name in names:
            value_follows = not equals
        elif value_follows:
            value_follows = False
        else:
            rest.append(word)
    return rest


def message(e: Exception) -> str:
    """An exception's own words."""
    if isinstance(e, SyntaxError):
        return e.msg
    # JAX adds a line about its own tracebacks.
    return str(e).split("\n-----")[0] or type(e).__name__


def _flag_error(e: Exception) -> str:
    """The message for what parsing the flags, or loading the config that they name, has raised."""
    if isinstance(e, flags.UnrecognizedFlagError):
        return f"{e}. --help lists the flags."
    if isinstance(e, flags.Error):
        return f"{e}."
    path = _config_path()
    if isinstance(e, OSError) and not os.path.isfile(path):
        return f"--config={path}: there is no such file (seen from {os.getcwd()})."
    if isinstance(e, AttributeError | KeyError):
        unknown = _unknown_key(path)
        if unknown:
            return unknown
    text = f"--config={path} raised {type(e).__name__}: {e}"
    where = errors.location(e)
    if where:
        text += f" ({where})"
    return f"{text}."


def _config_path() -> str:
    """The config file, from the arguments themselves: --config=PATH or --config PATH."""
    path = ""
    for argument, following in itertools.pairwise([*sys.argv[1:], ""]):
        name, equals, value = argument.partition("=")
        if name == "--config" and equals:
            path = value
        elif name == "--config":
            path = following
    return path


def _unknown_key(path: str) -> str | None:
    """The message for an override of a key that the config does not have."""
    try:
        keys = list(config_lib.flatten(identity_lib.plain(runpy.run_path(path)["get_config"]())))
    except Exception:
        # The file itself is what is wrong.
        return None
    for argument in sys.argv[1:]:
        match = re.match(r"--config\.([^=]+)", argument)
        if match is None or any(f"{key}.".startswith(f"{match[1]}.") for key in keys):
            continue
        text = f"--config.{match[1]}: {path} has no such key;"
        near = difflib.get_close_matches(match[1], keys, cutoff=0.4)
        if near:
            return f"{text} did you mean {' or '.join(near)}?"
        return f"{text} it has {', '.join(keys)}."
    return None
