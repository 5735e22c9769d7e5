"""Programs in processes that are forked from a server, which has imported what they
need.

The imports of a program take longer than what most tests let it do. A forked process is
the real program nevertheless: it has its own flags, environment, signals, output and
exit code. It differs from a program that a shell starts in two ways: it skips Python's
exit handlers, and JAX has read its environment variables before. A test to which these
matter starts a new interpreter.

The server is the one of Python's `multiprocessing`. It ends with the process of the
tests.
"""

import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import threading
from multiprocessing import forkserver

import pytest

# What the programs import, but not the programs themselves: each runs as `__main__`.
# None of these starts JAX's backend or tensorstore's threads, which a fork would lose.
_IMPORTED = (
    "grain",
    "launch.elastic",
    "launch.status",
    "launch.tpu_vm",
    "pytest",
    "tensorboard.backend.event_processing.event_accumulator",
    "tests.checkpoint.pod",
    "tests.toy",
    "xshard.checkpoint.orbax",
    "xshard.cli",
    "xshard.loop",
    "xshard.metrics.event_files",
    "xshard.modes.continuous_eval",
    "xshard.pod.rendezvous",
    "xshard.replay.verify",
    "xshard.wings.installed",
)


@functools.cache
def _context():
    """Starts the server; returns the context whose processes it forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path())
        forkserver.ensure_running()
    return context


def python_path():
    """Returns the PYTHONPATH of a process of the tests: where they import from, and its
    set-up.
    """
    site = pathlib.Path(__file__).parent / "site"
    return os.pathsep.join([str(site), *filter(None, sys.path)])


class Process:
    """A forked process, with the attributes and methods of `subprocess.Popen` that
    tests use.

    Attributes:
      pid: the number of the process.
      stdout: what it prints to standard output and standard error, as a text file to
        read from; None if that goes to files.
    """

    def __init__(
        self, function, *arguments, env, output=None, cwd=None, start_new_session=False
    ):
        """Starts the process.

        Args:
          function: the function that it calls, of a module. What it returns is the exit
            code.
          *arguments: the arguments of the function.
          env: its environment variables.
          output: the files for standard output and standard error; None: one pipe for
            both.
          cwd: its working directory; by default the one of the tests.
          start_new_session: whether it leads a new session, and so a process group.
        """
        self.stdout = None
        if output is None:
            read, write = os.pipe()
            self.stdout = os.fdopen(read, errors="replace")
            written = [write, os.dup(write)]
        else:
            written = [
                os.open(p, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for p in output
            ]
        # Connections, because `multiprocessing` knows how to hand these to another
        # process.
        streams = [
            multiprocessing.connection.Connection(fd, readable=False) for fd in written
        ]
        self._process = _context().Process(
            target=_run,
            args=(
                function,
                arguments,
                dict(env),
                cwd or os.getcwd(),
                start_new_session,
                streams,
            ),
            daemon=True,  # So that it ends with the tests, at the latest.
        )
        self._process.start()
        self.pid = self._process.pid
        for stream in streams:
            stream.close()

    @property
    def returncode(self):
        """The exit code, or minus the number of the signal that ended it; None while it
        runs.
        """
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self._process.exitcode

    def communicate(self, timeout=None):
        """Waits for the process to close its output; returns its rest, and None."""
        if self.stdout.closed:
            return "", None
        rest = []
        reader = threading.Thread(
            target=lambda: rest.append(self.stdout.read()), daemon=True
        )
        reader.start()
        reader.join(timeout)
        if reader.is_alive():
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        self.stdout.close()
        self.wait(timeout)
        return rest[0], None

    def send_signal(self, number):
        # A process that has just ended may be known to have only by the server that
        # forked it.
        if self._process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait()
        if self.stdout is not None:
            self.stdout.close()


def program(module, *arguments, **options):
    """Starts `python -m MODULE ARGUMENTS`; the options are those of `Process`."""
    return Process(_run_program, module, list(map(str, arguments)), **options)


def _run_program(module, arguments):
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _run(function, arguments, env, cwd, start_new_session, streams):
    """Ends this process, which was forked, with the exit code of a function."""
    # `multiprocessing` forbids processes of its own to a daemon, and a run may have
    # them.
    multiprocessing.current_process().daemon = False
    if start_new_session:
        os.setsid()
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(
        2, "w", buffering=1, errors="backslashreplace", closefd=False
    )
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path.insert(0, cwd)
    code = 1
    try:
        code = function(*arguments) or 0
    except SystemExit as e:
        code = e.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
