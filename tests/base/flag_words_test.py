"""Tests of flags among the words of a command."""

import io
import shlex
import subprocess
import sys

import pytest

from xshard.base import flag_words


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
    assert flag_words.with_flag(command, "steps", 8) == wanted


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize(
    "word",
    ["größe", "a b", "it's ö", "ö\"'\\x", "\udcc3\udcbc", "bad\udcff", "日本", "$ö"],
)
def test_a_command_that_is_shown_is_what_a_shell_reads(monkeypatch, encoding, word):
    shown_in = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", shown_in)
    print(flag_words.shown(shlex.join(["printf", "%s", word])), file=shown_in)
    shown_in.flush()
    command = shown_in.buffer.getvalue()
    done = subprocess.run(["bash", "-c", command], check=True, capture_output=True)
    # What the terminal gives bash are the bytes in its encoding.
    wanted = word.encode("utf-8", "surrogateescape")
    if b"$'" not in command:
        wanted = word.encode(encoding)
    assert done.stdout == wanted
