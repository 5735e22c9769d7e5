"""Tests of standard streams that are closed, full, broken or ASCII only.

The processes and the descriptors are real.
"""

import io
import os
import pty
import subprocess
import sys

import pytest

from tests.launch import harness
from xshard import cli
from xshard.files import standard_streams

# Prints more than any buffer holds, and reports to a file. The file is opened first:
# its descriptor must be above 2.
PROGRAM = """
import contextlib, os, sys
from xshard import cli
def program():
    with open(sys.argv[1], "w") as file:
        for _ in range(200):
            print("\\u65e5\\u672c \\udcff" * 100)
            print("\\u65e5\\u672c" * 100, file=sys.stderr, flush=True)
            sys.stdout.writelines(["line", "\\n"])
        with contextlib.suppress(OSError):
            os.write(1, b"to stdout")
            os.write(2, b"to stderr")
        file.write(f"done {sys.stdin.read()!r} {file.fileno() > 2}")
    return 7
sys.exit(cli.run(program))
"""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
SHELL = {
    "stdout closed": ">&-",
    "stderr closed": "2>&-",
    "stdin closed": "<&- >/dev/null",
    "all closed": "<&- >&- 2>&-",
    "a full device": ">/dev/full 2>/dev/full",
    "a pager that has quit": "2>&1 | head -c 1",
    "a reader that has ended": "> >(true) 2>&1",
}


@pytest.mark.parametrize("case", SHELL)
def test_a_program_finishes_with_its_own_exit_code(tmp_path, case):
    line = f'"$@" {SHELL[case]}; exit ${{PIPESTATUS[0]}}'
    command = [
        "bash",
        "-c",
        line,
        "-",
        sys.executable,
        "-c",
        PROGRAM,
        str(tmp_path / "said"),
    ]
    done = subprocess.run(
        command,
        env=harness.environment(**ASCII),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=harness.FOREVER,
    )
    assert done.returncode == 7, done.stderr
    assert (tmp_path / "said").read_text() == "done '' True"


def test_a_program_outlives_its_terminal(tmp_path):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "said")],
        env=harness.environment(),
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    assert os.read(ours, 1)
    os.close(ours)
    assert process.wait(harness.FOREVER) == 7
    assert (tmp_path / "said").read_text().startswith("done")


@pytest.mark.parametrize("module", ["xshard.main", "xshard.dryrun", "launch"])
def test_help_into_a_pager_that_has_quit(module):
    line = '"$@" --help | true; exit ${PIPESTATUS[0]}'
    command = ["bash", "-c", line, "-", sys.executable, "-m", module]
    done = subprocess.run(
        command, env=harness.environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


class Broken(io.StringIO):
    def write(self, text):
        raise BrokenPipeError

    def flush(self):
        raise OSError(28, "No space left on device")


def test_a_broken_stream_drops_text_and_an_ascii_stream_escapes_it():
    stream = standard_streams.tolerant(Broken())
    assert stream.write("text") == 4
    stream.flush()
    stream.writelines(["a", "b"])
    assert standard_streams.tolerant(stream) is stream
    raw = io.BytesIO()
    stream = standard_streams.tolerant(io.TextIOWrapper(raw, "ascii"))
    print("日", file=stream, flush=True)
    assert raw.getvalue() == b"\\u65e5\n"
    stream.close()
    stream.write("no more")


def test_a_second_run_does_not_wrap_the_streams_again(monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.StringIO())
    assert cli.run(lambda: 3) == 3
    wrapped = sys.stdout
    assert cli.run(lambda: 3) == 3 and sys.stdout is wrapped
