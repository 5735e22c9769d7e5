"""What a run shows: lines where nobody watches, one line that is kept up to date where somebody does."""

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
from xshard.metrics import log, overview, terminal
from xshard.optimizers import trees

ROW = {"step": 5, "accuracy": 0.5, "loss": [1.25, 3e-7], "scale": 65536.0, "perf/seconds": 3.0}


def make(show=terminal.Show.NORMAL, steps=100):
    now = [0.0]
    made = terminal.Terminal(steps, show, lambda: now[0])
    return made, now


def test_a_line_for_each_row_where_stdout_is_a_file(capsys):
    shown, now = make()
    shown.start(0)
    now[0] = 10.0
    shown.progress(5)
    shown.row(ROW, 0.625)
    shown.close()
    out = capsys.readouterr().out
    assert out == (
        "step   5/100  loss [1.25 3e-07]  accuracy 0.5  scale 65536  0.6 steps/s  3:10 left\n"
    )


def test_quiet_is_quiet(capsys):
    shown, _ = make(terminal.Show.QUIET)
    shown.start(0)
    shown.row(ROW, 1.0)
    shown.say("step 5: saved")
    shown.close()
    assert capsys.readouterr() == ("", "")


class Screen:
    """A terminal of 80 columns that remembers its lines, and understands what is written to it."""

    def __init__(self):
        self.lines, self._row, self._column = [""], 0, 0

    def write(self, text):
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]", text):
            self._one(part)

    def _one(self, part):
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
            assert part.endswith("m"), f"nothing else moves or hides: {part!r}"
        else:
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + part + line[self._column + 1 :]
            self._column += 1


class Tty(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def open_screen(monkeypatch):
    """Makes stdout and stderr a terminal; a function that reads what is on it."""

    def opened(term="xterm"):
        stream = Tty()
        for name, value in {"TERM": term, "COLUMNS": "80"}.items():
            monkeypatch.setenv(name, value)
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, stream)

        def read():
            made = Screen()
            # As the system does it on a terminal.
            made.write(stream.getvalue().replace("\n", "\r\n"))
            return [line.rstrip() for line in made.lines]

        return read

    yield opened
    terminal.leave()


def test_one_line_is_kept_up_to_date_and_all_else_is_above_it(open_screen):
    screen = open_screen()
    shown, now = make()
    shown.start(0)
    for step in range(1, 51):
        now[0] += 0.1
        shown.progress(step)
        if step == 10:
            shown.row({**ROW, "step": 10, "loss": 0.5}, 10.0)
    print("from anywhere")
    thread = threading.Thread(target=lambda: print("from another thread", file=sys.stderr))
    thread.start()
    thread.join()
    shown.say("step 50: saved")
    said, line = screen()[:-1], screen()[-1]
    assert said == ["from anywhere", "from another thread", "step 50: saved"]
    assert line.endswith("step 48/100  loss 0.5  10.0 steps/s  0:05 left"), line
    now[0] += 1
    shown.progress(60)
    assert "step 60/100" in screen()[-1] and len(screen()) == 4
    shown.close()
    print("results")
    assert "step 60/100" in screen()[3] and screen()[4] == "results"


def test_the_line_is_drawn_a_few_times_a_second(open_screen):
    open_screen()
    shown, now = make(steps=10_000)
    shown.start(0)
    for step in range(1, 10_001):
        now[0] += 0.001
        shown.progress(step)
    assert 30 <= sys.stdout.rich_proxied_file.getvalue().count("step ") <= 50


@pytest.mark.parametrize("show,shown_too", [("NORMAL", False), ("VERBOSE", True)])
def test_rows_are_lines_on_a_terminal_if_all_is_to_be_shown(open_screen, show, shown_too):
    screen = open_screen()
    shown, _ = make(terminal.Show[show])
    shown.start(0)
    shown.row(ROW, 1.0)
    assert any("accuracy 0.5" in line for line in screen()) == shown_too


def test_who_leaves_at_once_leaves_the_line_behind(open_screen):
    screen = open_screen()
    shown, _ = make()
    shown.start(0)
    assert "step 0/100" in screen()[-1]
    terminal.leave()
    assert screen()[-1] == "" and isinstance(sys.stdout, Tty)
    # The run may still be about to close it.
    shown.close()


def test_a_terminal_that_can_do_nothing_gets_lines(open_screen):
    screen = open_screen("dumb")
    shown, _ = make()
    shown.start(0)
    shown.row(ROW, 1.0)
    assert screen()[0].startswith("step   5/100  loss [1.25 3e-07]")


def run_on_a_terminal(*arguments, until="", send=b""):
    """Runs Python on a real pseudo-terminal; the exit code and what is on the screen."""
    ours, theirs = pty.openpty()
    # Ctrl-C is for the processes whose terminal it is.
    own = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv)"
    process = subprocess.Popen(
        [sys.executable, "-c", own, *arguments], stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, env={**environment(), "TERM": "xterm", "COLUMNS": "200"},
    )  # fmt: skip
    os.close(theirs)
    output = b""
    # The system says with an error that the other side is closed.
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


def test_a_run_on_a_real_terminal_that_ctrl_c_stops(tmp_path):
    code, lines = run_on_a_terminal(
        "-m", "xshard.main", "--config=tests/toy.py", "--cpu_devices=4", f"--workdir={tmp_path}",
        "--config.steps=1000000", "--config.checkpoint.every_steps=1000000",
        "--config.overflow_above=2.0", until="step 6  evaluation: error", send=b"\x03",
    )  # fmt: skip
    assert code == 130, lines
    progress = [i for i, line in enumerate(lines) if "/1000000  loss" in line]
    assert len(progress) == 1
    above, below = ("\n".join(part) for part in (lines[: progress[0]], lines[progress[0] :]))
    for text in (
        "of the last 4 steps skipped",
        "step 6  evaluation: error",
        "SIGINT: saving after",
    ):
        assert text in above
    assert "to resume: " in below and "saved 84 B" in above + below


def test_what_comes_after_a_process_that_leaves_at_once_is_on_a_line_of_its_own():
    code, lines = run_on_a_terminal(
        "-c",
        "from xshard.metrics import terminal\nfrom xshard.pod import ends\n"
        "terminal.Terminal(100, terminal.Show.NORMAL).start(7)\n"
        "ends.leave(130)\n",
    )
    assert code == 130 and "step 7/100" in lines[-2] and lines[-1] == ""


def params(**shapes):
    return {name: {"w": jnp.zeros(shape)} for name, shape in shapes.items()}


def table_of(tree, the_mesh, whole=False):
    """The lines of the table, without the title."""
    return overview.model(
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
        ({"skipped": [0, 1]}, {"skipped": [0, 3]}, "step 150: [0 2] of the last 50 steps skipped"),
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
def test_what_a_person_should_hear_of(before, row, text):
    assert log.changes({"step": 100, **before}, {"step": 150, **row}) == text
