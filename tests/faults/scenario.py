"""A short run of the toy experiment in parts, each of which is tried in a process that is forked.

The process that forks has imported everything and started nothing, so that a part takes a second: it is the real
program nevertheless, with its flags, its exit code and what it prints.
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
from xshard.pod import notice

# What the programs need. None of it starts JAX's backend, or tensorstore's threads: they would be lost by a fork.
_IMPORTED = (
    "grain",
    "optax",
    "tensorboard.backend.event_processing.event_accumulator",
    "xshard.checkpoint.orbax",
    "xshard.metrics.event_files",
    "xshard.modes.follow",
    "xshard.modes.profiling",
    "xshard.pod.watch",
)
# Longer than any part takes beside other work: who is not done by then hangs.
DEADLINE_SECONDS = 180.0
_OPTIONS = {
    "steps": 6,
    "log_every_steps": 1,
    "eval_every_steps": 2,
    "overflow_above": 2.0,
    "writers": ("jsonl", "csv", "tensorboard"),
    "checkpoint.every_steps": 3,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_best": 1,
}
# The second batch of the evaluation of step 4: the checkpoint of that step is one that lacks its evaluation.
_STOPPED_AT_POLL = 8
NEW, STOPPED, FINISHED = "new", "stopped", "finished"


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the life of a run.

    Attributes:
      module: the program.
      start: what it finds.
      arguments: its own, with {run} and {checkpoints} for where these are.
    """

    module: str
    start: str
    arguments: tuple[str, ...]


_TRAIN = ("--config=tests/toy.py", "--workdir={run}", "--config.checkpoint.directory={directory}")
_TRAIN += tuple(f"--config.{name}={value}" for name, value in _OPTIONS.items())
PARTS = {
    "new": Part("xshard.main", NEW, _TRAIN),
    "resume": Part("xshard.main", STOPPED, _TRAIN),
    "again": Part("xshard.main", FINISHED, _TRAIN),
    "eval": Part("xshard.main", FINISHED, (*_TRAIN, "--mode=eval")),
    "ls": Part("xshard.checkpoint", FINISHED, ("ls", "{checkpoints}", "--json")),
    "verify": Part("xshard.checkpoint", FINISHED, ("verify", "{checkpoints}", "--json")),
}


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process has ended.

    Attributes:
      code: its exit code; less than 0: the signal that has ended it; None: it was not done in time.
      output: what it has printed.
    """

    code: int | None
    output: str


class Place:
    """Where the parts are tried: a folder on a disk, and checkpoints in it or in an object store."""

    def __init__(self, scratch, disk=None, directory="", objects=None):
        """Makes an empty one.

        Args:
          scratch: a folder for what is kept.
          disk: what work directories are on, if not on that of `scratch`: a `power.Disk`.
          directory: where checkpoints are, if not in the work directory.
          objects: what keeps them there and brings them back: a `proxy.Proxy`.
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
        """Keeps what is there as what parts find."""
        shutil.copytree(self.disk, self._starts / start, symlinks=True)
        if self._objects:
            self._objects.keep(start)

    def begin(self, start):
        """Puts there what a part finds."""
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
        """What a part finds, and whether it only reads."""
        return PARTS[part].start, PARTS[part].module == "xshard.checkpoint"

    def power_up(self):
        """Brings the disk back after a loss of power."""
        self._power.power_up()

    def stop_half_way(self):
        """Makes a run that was stopped in the middle of an evaluation."""
        config = toy.get_config()
        config.update_from_flattened_dict(_OPTIONS)
        config.checkpoint.directory = self.directory
        stopping = lambda: loop.run(config.lock(), str(self.run), "", None, _Stops())
        ended = self.fork(stopping)
        assert ended.code == notice.PREEMPTED, ended.output

    def start(self, name, watch=lambda: None):
        """Runs a part's program, with `watch` called first in its process."""
        part = PARTS[name]
        places = {"run": self.run, "directory": self.directory, "checkpoints": self.checkpoints}
        arguments = [argument.format(**places) for argument in part.arguments]

        def program():
            sys.argv = [part.module, *arguments]
            watch()
            runpy.run_module(part.module, run_name="__main__", alter_sys=True)

        return self.fork(program)

    def fork(self, program):
        """Calls something in a process of its own."""
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            _run(program, self._output)
        code = _wait(child)
        return Ended(code, self._output.read_text(errors="replace"))


class _Stops:
    """Stands in for what comes from outside."""

    polls = 0

    def poll(self):
        self.polls += 1
        if self.polls < _STOPPED_AT_POLL:
            return None
        return notice.Notice(notice.STOP, "told to", notice.PREEMPTED)

    def doing(self, what, **more):
        pass

    def publish(self):
        pass


def _run(program, output):
    """Ends this process, which was forked, with the exit code of a program."""
    code = 1
    try:
        stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        # What has been said has been said, also by a process that is killed.
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
        # What the process that forks would do at its end is not this one's.
        os._exit(code)


def _wait(child):
    """The exit code of a process; None if it had to be killed."""
    handle, done = os.pidfd_open(child), []
    try:
        done, _, _ = select.select([handle], [], [], DEADLINE_SECONDS)
    finally:
        # Also when who waits is told to end: nobody else would end it.
        if not done:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(handle)
    return os.waitstatus_to_exitcode(status) if done else None
