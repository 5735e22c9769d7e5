"""Flags among the words of a command."""

import shlex
import sys
from collections.abc import Sequence


def with_flag(command: str, name: str, value: object) -> str:
    """Returns a command with a flag set to this value; any earlier value is removed."""
    words = without_flags(shlex.split(command), [name])
    return shlex.join([*words, f"--{name}={value}"])


def shown(command: str) -> str:
    """Returns a command as stdout can show it, for a shell to read it back."""
    return " ".join(_quoted(word) for word in shlex.split(command))


def _quoted(word: str) -> str:
    try:
        word.encode(sys.stdout.encoding or "utf-8")
        return shlex.quote(word)
    except UnicodeEncodeError:
        # A shell makes the word's bytes of these escapes. A double quote within lets
        # Python enclose them in single ones.
        path = word.encode("utf-8", "surrogateescape").decode("latin1")
        return "$" + ascii(f'{path}"').removesuffix("\"'") + "'"


def without_flags(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns arguments without some flags.

    Args:
      words: arguments, in which flags are given as --name=value or as --name value.
      names: the names of the flags to leave out.
    """
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
