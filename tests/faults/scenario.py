"""A short run of the toy experiment, in parts. Each part runs in a forked process.

The parent has imported everything, but has started neither JAX's backend nor
tensorstore's threads. A part therefore takes a second. Each part is nevertheless the
real program, with its flags, its exit code and its output.
"""

import dataclasses
import faulthandler
import importlib
import os
import runpy
import select
import shutil
import signal
import sys

from tests import toy
from xshard import loop
from xshard.pod import exit_codes, request

# Modules that the programs import. None of them starts JAX's backend or tensorstore's
# threads, which a fork would lose.
_IMPORTED = (
    "grain",
    "optax",
    "tensorboard.backend.event_processing.event_accumulator",
    "xshard.checkpoint.orbax",
    "xshard.metrics.event_files",
    "xshard.modes.continuous_eval",
    "xshard.pod.watchdog",
    "xshard.wings.installed",
)
# Longer than any part takes on a busy machine. A part that takes longer is treated as
# hung.
DEADLINE_SECONDS = 180.0
_OPTIONS = {
    "steps": 6,
    # Each step polls once.
    "steps_per_dispatch": 1,
    "log_every_steps": 1,
    "eval_every_steps": 2,
    "overflow_above": 2.0,
    "writers": ("jsonl", "csv", "tensorboard"),
    "checkpoint.every_steps": 3,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_best": 1,
}
# The poll at the second batch of the evaluation of step 4, so that the checkpoint of
# step 4 lacks its evaluation.
_STOPPED_AT_POLL = 8
NEW, STOPPED, FINISHED = "new", "stopped", "finished"


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the life of a run.

    Attributes:
      module: the program.
      start: the state that it starts from: NEW, STOPPED or FINISHED.
      arguments: its arguments, with the placeholders {run}, {directory} and
        {checkpoints}.
    """

    module: str
    start: str
    arguments: tuple[str, ...]


_TRAIN = (
    "--config=tests/toy.py",
    "--workdir={run}",
    "--config.checkpoint.directory={directory}",
)
_TRAIN += tuple(f"--config.{name}={value}" for name, value in _OPTIONS.items())
PARTS = {
    "new": Part("xshard.main", NEW, _TRAIN),
    "resume": Part("xshard.main", STOPPED, _TRAIN),
    "again": Part("xshard.main", FINISHED, _TRAIN),
    "eval": Part("xshard.main", FINISHED, (*_TRAIN, "--mode=eval")),
    "ls": Part("xshard.checkpoint", FINISHED, ("ls", "{checkpoints}", "--json")),
    "verify": Part(
        "xshard.checkpoint", FINISHED, ("verify", "{checkpoints}", "--json")
    ),
}


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a process.

    Attributes:
      code: its exit code; negative: the signal that ended it; None: it missed the
        deadline.
      output: what it printed.
    """

    code: int | None
    output: str


class Place:
    """The place where parts run: a folder on a disk, and checkpoints in this folder or
    in an object store.
    """

    def __init__(self, scratch, disk=None, directory="", objects=None):
        """Creates an empty place.

        Args:
          scratch: a folder for the states that parts start from, and for the work
            directory without `disk`.
          disk: the `power.Disk` that holds the work directory; None: a folder in
            `scratch`.
          directory: the folder of the checkpoints; empty: in the work directory.
          objects: the `proxy.Proxy` that keeps and restores objects; None: the
            checkpoints are on the disk.
        """
        for name in _IMPORTED:
            importlib.import_module(name)
        self.disk = disk.folder if disk else scratch / "disk"
        self.run = self.disk / "run"
        self.directory = directory
        self.checkpoints = directory or str(self.run / "checkpoints")
        self._power, self._objects = disk, objects
        self._starts = scratch / "starts"
        self._output = scratch / "output"
        self.disk.mkdir()

    def keep(self, start):
        """Keeps the current files and objects as the state `start`."""
        shutil.copytree(self.disk, self._starts / start, symlinks=True)
        if self._objects:
            self._objects.keep(start)

    def begin(self, start):
        """Restores the state `start`."""
        shutil.rmtree(self.disk)
        if start == NEW:
            self.disk.mkdir()
        else:
            shutil.copytree(self._starts / start, self.disk, symlinks=True)
        if self._objects:
            self._objects.begin(start)
        if self._power:
            self._power.settle()

    def describe(self, part):
        """Returns the state that a part starts from, and whether it only reads."""
        return PARTS[part].start, PARTS[part].module == "xshard.checkpoint"

    def power_up(self):
        """Brings the disk back after a loss of power."""
        self._power.power_up()

    def stop_half_way(self):
        """Starts a run and stops it in the middle of an evaluation."""
        config = toy.get_config()
        config.update_from_flattened_dict(_OPTIONS)
        config.checkpoint.directory = self.directory
        stopping = lambda: loop.run(config.lock(), str(self.run), "", None, _Stops())
        ended = self.fork(stopping)
        assert ended.code == exit_codes.PREEMPTED, ended.output

    def start(self, name, watch=lambda: None):
        """Runs a part's program in a forked process, which calls `watch` first; returns
        its end.
        """
        part = PARTS[name]
        places = {
            "run": self.run,
            "directory": self.directory,
            "checkpoints": self.checkpoints,
        }
        arguments = [argument.format(**places) for argument in part.arguments]

        def program():
            sys.argv = [part.module, *arguments]
            watch()
            runpy.run_module(part.module, run_name="__main__", alter_sys=True)

        return self.fork(program)

    def fork(self, program):
        """Calls a function in a forked process; returns the end of the process."""
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            _run(program, self._output)
        code = _wait(child)
        return Ended(code, self._output.read_text(errors="replace"))


class _Stops:
    """Replaces the source of requests from outside: it stops the run at one poll."""

    polls = 0

    def poll(self):
        self.polls += 1
        if self.polls < _STOPPED_AT_POLL:
            return None
        return request.Request(request.STOP, "told to", exit_codes.PREEMPTED)

    def set_phase(self, phase, **more):
        pass

    def publish(self):
        pass

    def in_each_tick(self, action):
        pass


def _run(program, output):
    """Ends this process, which was forked, with the exit code of a program."""
    code = 1
    try:
        stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        # Each line is flushed at once, so that no output is lost if the process is
        # killed.
        sys.stdout.reconfigure(line_buffering=True)
        faulthandler.enable()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = program() or 0
    except SystemExit as e:
        code = int(e.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # This skips the exit handlers inherited from the parent.
        os._exit(code)


def _wait(child):
    """Waits for a process; returns its exit code, or None if it missed the deadline and
    was killed.
    """
    handle, done = os.pidfd_open(child), []
    try:
        done, _, _ = select.select([handle], [], [], DEADLINE_SECONDS)
    finally:
        # The child is killed also if this process is interrupted, since nothing else
        # would end it.
        if not done:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(handle)
    return os.waitstatus_to_exitcode(status) if done else None
