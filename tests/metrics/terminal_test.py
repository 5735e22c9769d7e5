"""Tests of a run's output: a line for each row, or a progress line on a terminal."""

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

from tests import toy
from tests.checkpoint.harness import environment
from xshard import mesh
from xshard.base import progress_line
from xshard.metrics import log, overview, terminal
from xshard.optimizers import trees

ROW = {
    "step": 5,
    "accuracy": 0.5,
    "loss": [1.25, 3e-7],
    "scale": 65536.0,
    "perf/seconds": 3.0,
}


def make(show=terminal.Show.NORMAL, steps=100):
    now = [0.0]
    created = terminal.Terminal(steps, show, lambda: now[0])
    return created, now


def test_each_row_is_a_line_where_stdout_is_a_file(capsys):
    display, now = make()
    display.start(0)
    now[0] = 10.0
    display.progress(5)
    display.row(ROW, 0.625)
    display.close()
    out = capsys.readouterr().out
    assert out == (
        "step   5/100  loss [1.25 3e-07]  accuracy 0.5  scale 65536  0.6 steps/s  "
        "3:10 left\n"
    )


def test_quiet_prints_nothing(capsys):
    display, _ = make(terminal.Show.QUIET)
    display.start(0)
    display.row(ROW, 1.0)
    display.say("step 5: saved")
    display.close()
    assert capsys.readouterr() == ("", "")


class Screen:
    """A terminal that interprets text and escape sequences, and keeps its lines."""

    def __init__(self):
        self.lines = [""]
        self._row = 0
        self._column = 0

    def write(self, text):
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]", text):
            self._apply(part)

    def _apply(self, part):
        if part == "\n":
            self._row += 1
            if self._row == len(self.lines):
                self.lines.append("")
        elif part == "\r":
            self._column = 0
        elif part == "\x1b[2K":
            self.lines[self._row] = ""
        elif re.fullmatch(r"\x1b\[\d*A", part):
            self._row -= int(part[2:-1] or 1)
        elif part.startswith("\x1b["):
            assert part.endswith("m"), f"an unexpected escape sequence: {part!r}"
        else:
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = (
                line[: self._column] + part + line[self._column + 1 :]
            )
            self._column += 1


class Tty(io.StringIO):
    """A stream that reports that it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def open_screen(monkeypatch):
    """Returns a function that replaces stdout and stderr by a terminal.

    The function returns a reader of the terminal's lines.
    """

    def open_terminal(term="xterm"):
        stream = Tty()
        for name, value in {"TERM": term, "COLUMNS": "80"}.items():
            monkeypatch.setenv(name, value)
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, stream)

        def read():
            created = Screen()
            # The system translates newlines on a terminal in this way.
            created.write(stream.getvalue().replace("\n", "\r\n"))
            return [line.rstrip() for line in created.lines]

        return read

    yield open_terminal
    progress_line.close_open()


def test_the_progress_line_is_updated_below_all_other_output(open_screen):
    screen = open_screen()
    display, now = make()
    display.start(0)
    for step in range(1, 51):
        now[0] += 0.1
        display.progress(step)
        if step == 10:
            display.row({**ROW, "step": 10, "loss": 0.5}, 10.0)
    print("from anywhere")
    thread = threading.Thread(
        target=lambda: print("from another thread", file=sys.stderr)
    )
    thread.start()
    thread.join()
    display.say("step 50: saved")
    lines_above = screen()[:-1]
    line = screen()[-1]
    assert lines_above == ["from anywhere", "from another thread", "step 50: saved"]
    assert line.endswith("step 48/100  loss 0.5  10.0 steps/s  0:05 left"), line
    now[0] += 1
    display.progress(60)
    assert "step 60/100" in screen()[-1] and len(screen()) == 4
    display.close()
    print("results")
    assert "step 60/100" in screen()[3] and screen()[4] == "results"


def test_the_progress_line_is_drawn_a_few_times_a_second(open_screen):
    open_screen()
    display, now = make(steps=10_000)
    display.start(0)
    for step in range(1, 10_001):
        now[0] += 0.001
        display.progress(step)
    assert 30 <= sys.stdout.rich_proxied_file.getvalue().count("step ") <= 50


@pytest.mark.parametrize("show,is_shown", [("NORMAL", False), ("VERBOSE", True)])
def test_rows_are_printed_on_a_terminal_only_if_verbose(open_screen, show, is_shown):
    screen = open_screen()
    display, _ = make(terminal.Show[show])
    display.start(0)
    display.row(ROW, 1.0)
    assert any("accuracy 0.5" in line for line in screen()) == is_shown


def test_leaving_at_once_ends_the_progress_line_and_restores_stdout(open_screen):
    screen = open_screen()
    display, _ = make()
    display.start(0)
    assert "step 0/100" in screen()[-1]
    progress_line.close_open()
    assert screen()[-1] == "" and isinstance(sys.stdout, Tty)
    # The run may still close the display after that.
    display.close()


def test_a_dumb_terminal_gets_a_line_for_each_row(open_screen):
    screen = open_screen("dumb")
    display, _ = make()
    display.start(0)
    display.row(ROW, 1.0)
    assert screen()[0].startswith("step   5/100  loss [1.25 3e-07]")


def run_on_a_terminal(*arguments, until="", send=b""):
    """Runs Python on a real pseudo-terminal.

    Args:
      *arguments: the arguments of Python.
      until: the output after which to send bytes; none by default.
      send: the bytes.

    Returns:
      The exit code, and the lines on the screen.
    """
    ours, theirs = pty.openpty()
    # Ctrl-C reaches only processes whose controlling terminal this is, so the program
    # first makes it its own.
    program = (
        "import fcntl, os, sys, termios\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "os.execv(sys.executable, sys.argv)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**environment(), "TERM": "xterm", "COLUMNS": "200"},
    )
    os.close(theirs)
    output = b""
    # A read raises an error when the other side is closed.
    with contextlib.suppress(OSError):
        while piece := os.read(ours, 4096):
            output += piece
            if until and until in output.decode(errors="replace"):
                os.write(ours, send)
                until = ""
    os.close(ours)
    screen = Screen()
    screen.write(output.decode().replace("^C", ""))
    return process.wait(), [line.rstrip() for line in screen.lines]


def test_ctrl_c_stops_a_run_on_a_real_terminal(tmp_path):
    code, lines = run_on_a_terminal(
        "-m",
        "xshard.main",
        "--config=tests/toy.py",
        "--cpu_devices=4",
        f"--workdir={tmp_path}",
        "--config.steps=1000000",
        "--config.checkpoint.every_steps=1000000",
        "--config.overflow_above=2.0",
        until="step 6  evaluation: error",
        send=b"\x03",
    )
    assert code == 130, lines
    progress = [i for i, line in enumerate(lines) if "/1000000  loss" in line]
    assert len(progress) == 1
    above = "\n".join(lines[: progress[0]])
    below = "\n".join(lines[progress[0] :])
    for text in (
        "of the last 4 steps skipped",
        "step 6  evaluation: error",
        "SIGINT: saving after",
    ):
        assert text in above
    assert "to resume: " in below and "saved 84 B" in above + below


def test_output_after_a_process_that_left_at_once_begins_a_new_line():
    code, lines = run_on_a_terminal(
        "-c",
        "from xshard.metrics import terminal\nfrom xshard.pod import exits\n"
        "terminal.Terminal(100, terminal.Show.NORMAL).start(7)\n"
        "exits.exit_now(130)\n",
    )
    assert code == 130 and "step 7/100" in lines[-2] and lines[-1] == ""


def params(**shapes):
    return {name: {"w": jnp.zeros(shape)} for name, shape in shapes.items()}


def table_of(tree, the_mesh, whole=False):
    """Returns the lines of the table, without the title."""
    return overview.begin(
        toy.get_config(), the_mesh, trees.leaves_by_path(tree), whole=whole
    ).splitlines()[1:]


def test_the_table_of_parameters():
    the_mesh = mesh.make_mesh(((0, 1), (2, 3)), model=2)
    tree = params(linear=(2, 6, 4), scale=())
    tree["linear"]["w"] = jax.device_put(
        tree["linear"]["w"], mesh.sharding(the_mesh, "group", None, "model")
    )
    lines = table_of(tree, the_mesh)
    assert [line.split() for line in lines[:3]] == [
        ["parameter", "shape", "dtype", "axes", "size"],
        ["linear/w", "2x6x4", "float32", "group,-,model", "48"],
        ["scale/w", "scalar", "float32", "-", "1"],
    ]
    assert lines[3:] == ["49 parameters in 2 arrays, 196 B; 52 B on each device"]


def test_a_long_table_is_cut_in_the_middle():
    tree = params(**{f"layer_{i:03}": (3,) for i in range(100)})
    whole, cut = (table_of(tree, mesh.make_mesh(), whole) for whole in (True, False))
    assert len(whole) == 102 and whole[0] == cut[0] and whole[-1] == cut[-1]
    assert cut[12:15] == [whole[12], "... 76 more; --verbose shows all", whole[89]]


@pytest.mark.parametrize(
    "before,row,text",
    [
        ({"skipped": 0}, {"skipped": 0}, ""),
        ({"skipped": 1}, {"skipped": 3}, "step 150: 2 of the last 50 steps skipped"),
        (
            {"skipped": [0, 1]},
            {"skipped": [0, 3]},
            "step 150: [0 2] of the last 50 steps skipped",
        ),
        ({}, {"skipped": 3}, ""),
        (
            {"skipped": 0, "loss_scale": 32768.0},
            {"skipped": 2, "loss_scale": 8192.0},
            "step 150: 2 of the last 50 steps skipped; loss scale 32768 -> 8192",
        ),
        (
            {"skipped": 0, "loss_scale": [2.0, 4.0]},
            {"skipped": 0, "loss_scale": [4.0, 4.0]},
            "step 150: loss scale [2 4] -> [4 4]",
        ),
        ({"skipped": 0}, {"skipped": 0, "loss_scale": 2.0}, ""),
    ],
)
def test_skipped_steps_and_loss_scale_changes_are_reported(before, row, text):
    assert log.changes({"step": 100, **before}, {"step": 150, **row}) == text
