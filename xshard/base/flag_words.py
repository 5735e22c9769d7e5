"""Flags among the words of a command."""

import shlex
from collections.abc import Sequence


def with_flag(command: str, name: str, value: object) -> str:
    """Returns a command with a flag set to this value; any earlier value is removed."""
    words = without_flags(shlex.split(command), [name])
    return shlex.join([*words, f"--{name}={value}"])


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
