"""Traces of some steps of a run for xprof and Perfetto.

All processes trace the same steps. Their traces are files of one folder, as xprof and
TensorBoard show several hosts:

    WORKDIR/profile/plugins/profile/steps_16_to_18/process_0.xplane.pb
"""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax

from xshard import hooks, loop
from xshard.base import formatting, spans
from xshard.base.jax_internals import runtime
from xshard.files import disk, workdir
from xshard.pod import request as request_lib
from xshard.training import step as step_lib

STEPS = 3
# A trace is in memory until it is written, and viewers do not open one of gigabytes.
_MOST_STEPS = 100
# The free space that a trace needs. Traces of a few steps have some megabytes, those of
# many devices and long steps more than a hundred.
_ROOM_BYTES = 250_000_000
# The longest content of the file that asks for a trace.
_MOST_BYTES = 100
# How long the processes wait for the one that writes its trace last.
_WRITE_SECONDS = 1800.0
# What the names of JAX's files end with: for xprof, and for Perfetto.
_KINDS = ("xplane.pb", "trace.json.gz")


class ProfileError(Exception):
    """A trace that could not be made or written; the message says where and why."""


class Tracer(hooks.Wing):
    """Traces steps of a run, the same ones on all processes.

    Every process creates one and makes the same calls. Between traces, `before_step`
    costs next to nothing.
    """

    def __init__(self, run: loop.Run):
        """Prepares traces; writes nothing."""
        self._run = run
        self._file = run.workdir.path / workdir.PROFILE_FILE
        self._folder = run.workdir.path / workdir.PROFILES
        self._say = run.terminal.say
        self._members = run.members
        self._index = run.members.number
        self._channel = run.members.channel("the trace of steps", _WRITE_SECONDS)
        # The folder that JAX writes into. The names of its files do not tell the
        # processes of one host apart.
        self._new_folder = self._folder / f".process_{self._index}.new"
        # The traced steps: from the first one until before the end. None: no trace is
        # asked for.
        self._steps: range | None = None
        self._is_tracing = False
        self._annotation = contextlib.ExitStack()
        # The last step that has been dispatched, and the number of dispatches.
        self._last = 0
        self._num_dispatches = 0
        # Whether the processes are told of the file; only the thread that looks sets
        # it, and only the training clears it.
        self._is_asked = False
        self._was_empty = False
        # A file that could not be removed is not answered again.
        self._answered: tuple[int, int] | None = None

    # The file that asks for a trace.

    def opened(self) -> None:
        """Looks for the file PROFILE from now on, where the run is led."""
        watch = self._run.watch
        if self._members.may_lead and watch is not None:
            watch.in_each_tick(lambda: self._look(watch.ask))

    def _look(self, ask: Callable[[request_lib.Request], None]) -> None:
        if self._is_asked or not self._members.leads:
            return
        # If a shared disk does not answer for a moment, the next look finds the file.
        try:
            with self._file.open("rb") as file:
                content = file.read(_MOST_BYTES)
                info = os.fstat(file.fileno())
        except OSError:
            return
        found = (info.st_mtime_ns, info.st_ino)
        if found == self._answered:
            return
        # A shell creates the file before the command writes into it.
        self._was_empty = not content and not self._was_empty
        if self._was_empty:
            return
        self._answered = found
        text = content.decode(errors="replace").strip() or str(STEPS)
        steps = int(text) if text.isdecimal() else 0
        if not 1 <= steps <= _MOST_STEPS:
            self._say(
                f"{self._file} holds {text!r}: nothing is traced, and the file is "
                "removed. Leave it empty, or give it the number of steps to trace, 1 "
                f"to {_MOST_STEPS}: echo 5 > {self._file}"
            )
            self._remove_file()
            return
        self._is_asked = True
        why = f"there is a file {self._file}"
        ask(request_lib.Request(request_lib.PROFILE, why, steps=steps))

    def _remove_file(self) -> None:
        try:
            self._file.unlink(missing_ok=True)
        except OSError as e:
            self._say(
                f"{self._file} could not be removed ({e.strerror}): remove it, and "
                "create it again to trace more steps."
            )

    # For the training.

    def next_due(self, step: int) -> int:
        """Returns the first step after a given one, before whose successor a trace
        begins or ends.
        """
        if self._steps is None:
            return hooks.NEVER
        first = self._steps.start - 1
        return first if first > step else max(self._steps.stop - 1, step + 1)

    def prepare(self, step: int, state: Any) -> Any:
        """Begins or ends a trace before a step, if that is due.

        A run does not end because of a trace that fails.
        """
        try:
            self.before_step(step, state)
        except ProfileError as e:
            self._say(f"the trace failed: {e}")
        return state

    def fetch(self, chunk: step_lib.Chunk) -> None:
        """Notes which steps the trace has."""
        if self._is_tracing:
            self._last = chunk.last
            self._num_dispatches += 1

    def receive(self, step: int, request: request_lib.Request) -> None:
        """Takes a request for a trace of some steps, on all processes.

        It is ignored while a trace is under way.
        """
        if request.kind == request_lib.PROFILE and self._steps is None:
            self._steps = range(step, step + request.steps)

    def finish(self, state: Any) -> None:
        """Ends a trace, if there is one, at the end of training."""
        try:
            self.end(state)
        except ProfileError as e:
            self._say(f"the trace failed: {e}")

    def before_step(self, step: int, newest: Any) -> None:
        """Begins or ends a trace, if that is due.

        Args:
          step: the step that comes next.
          newest: an array, or a tree of arrays, computed by the step before.

        Raises:
          ProfileError: as `end` does.
        """
        if self._steps is None:
            return
        self._annotation.close()
        if self._is_tracing and step >= self._steps.stop:
            self.end(newest)
        elif not self._is_tracing and step >= self._steps.start:
            self._begin(step, newest)
        if self._is_tracing:
            annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
            self._annotation.enter_context(annotation)

    def end(self, newest: Any) -> None:
        """Ends and writes the trace, if there is one, on all processes together.

        It has the steps that have begun so far.

        Args:
          newest: as for `before_step`.

        Raises:
          ProfileError: on all processes, if one could not write its trace.
        """
        if self._steps is None:
            return
        if not self._is_tracing:
            self._forget()
            self._say("no step is left to trace: the run is at its end")
            return
        first = self._steps.start
        with spans.Span(spans.TRACE):
            jax.block_until_ready(newest)
            self._run.set_phase("writing a trace")
            folder = self._run_folder(first)
            sizes, problems = self._on_all(lambda: self._write(folder))
            self._forget()
        if problems:
            if len(problems) < len(sizes):
                problems.append(f"the traces of the other processes are in {folder}")
            raise ProfileError("; ".join(problems))
        dispatches = ""
        if self._num_dispatches != self._last + 1 - first:
            times = "dispatch" if self._num_dispatches == 1 else "dispatches"
            dispatches = f" in {self._num_dispatches} {times}"
        processes = "1 process" if len(sizes) == 1 else f"{len(sizes)} processes"
        self._say(
            f"traced {self._named(first)}{dispatches} on {processes}: "
            f"{formatting.scaled(sum(sizes), 'B')} in {folder}\n"
            f"to view it: xprof --logdir {self._folder} (pip install xprof); or open "
            "the .trace.json.gz of a process in ui.perfetto.dev"
        )

    def close(self) -> None:
        """Ends a trace that an error or a roll-back interrupts, if there is one.

        It writes the trace of this process without waiting for the others.
        """
        if self._steps is not None and self._is_tracing:
            folder = self._run_folder(self._steps.start)
            try:
                self._write(folder)
                self._say(
                    "the trace was cut short: it has "
                    f"{self._named(self._steps.start)}, in {folder}"
                )
            except ProfileError as e:
                self._say(f"the trace is lost: {e}")
        self._forget()

    def _begin(self, step: int, newest: Any) -> None:
        assert self._steps is not None
        # If it begins late, as after a roll-back, it has as many steps.
        self._steps = range(step, step + len(self._steps))
        self._last = step
        self._num_dispatches = 0
        with spans.Span(spans.TRACE):
            # Waits for the earlier steps, so that the trace contains only the chosen
            # ones.
            jax.block_until_ready(newest)
            if self._is_asked:
                self._remove_file()
            _, problems = self._on_all(self._start)
        if problems:
            if self._is_tracing:
                with contextlib.suppress(ProfileError):
                    self._stop()
            self._forget()
            raise ProfileError("; ".join(problems))

    def _on_all(self, action: Callable[[], int]) -> tuple[list[int], list[str]]:
        """Does something on all processes; returns what each has returned, 0 where it
        failed, and the problems.
        """
        returned = 0
        problem = ""
        try:
            returned = action()
        except ProfileError as e:
            problem = str(e)
        of_all = self._channel.gather([returned, problem])
        return [number for number, _ in of_all], [text for _, text in of_all if text]

    def _forget(self) -> None:
        """Ends what belongs to one trace."""
        self._annotation.close()
        self._steps = None
        self._is_tracing = False
        self._is_asked = False
        self._remove_new()

    # The trace of this process.

    @contextlib.contextmanager
    def _naming_errors(self) -> Iterator[None]:
        """Raises what fails as a ProfileError, with the number of this process."""
        try:
            yield
        except (OSError, RuntimeError) as e:
            if isinstance(e, OSError):
                problem = f"{self._folder} could not be written: {e.strerror or e}"
            else:
                problem = str(e).splitlines()[0]
            if self._channel.count > 1:
                problem = f"process {self._index}: {problem}"
            raise ProfileError(problem) from e

    def _start(self) -> int:
        self._remove_new()
        with self._naming_errors():
            self._folder.mkdir(exist_ok=True)
            free = shutil.disk_usage(self._folder).free
            if free < _ROOM_BYTES:
                raise RuntimeError(
                    f"{self._folder} has {formatting.scaled(free, 'B')} of free space; "
                    f"a trace may need {formatting.scaled(_ROOM_BYTES, 'B')}"
                )
            # It fails if another part of the program is tracing.
            jax.profiler.start_trace(str(self._new_folder))
        self._is_tracing = True
        return 0

    def _stop(self) -> None:
        self._annotation.close()
        with self._naming_errors():
            try:
                jax.profiler.stop_trace()
            except (OSError, RuntimeError):
                runtime.forget_trace()
                raise

    def _write(self, folder: pathlib.Path) -> int:
        """Writes the trace into a folder; returns the size of its files in bytes.

        JAX's files have the host's name, and get that of this process.
        """
        self._stop()
        nbytes = 0
        with self._naming_errors():
            folder.mkdir(parents=True, exist_ok=True)
            for kind in _KINDS:
                paths = list(self._new_folder.glob(f"plugins/profile/*/*.{kind}"))
                # JAX does not report every trace that it could not write.
                if not paths or not paths[0].stat().st_size:
                    raise RuntimeError(
                        f"JAX wrote no trace into {folder}, or an empty one. Is the "
                        "disk full, or the folder not writable?"
                    )
                nbytes += paths[0].stat().st_size
                disk.sync(paths[0])
                paths[0].replace(folder / f"process_{self._index}.{kind}")
            if self._members.leads and self._members.exchange is None:
                # An earlier start of the run may have traced on more processes.
                for path in folder.glob("process_*"):
                    index = path.name.removeprefix("process_").partition(".")[0]
                    if index.isdecimal() and int(index) >= self._channel.count:
                        path.unlink()
        return nbytes

    def _run_folder(self, first: int) -> pathlib.Path:
        """Returns the folder of the steps that have been traced, from the first on."""
        name = f"steps_{first}_to_{self._last}"
        return self._folder / "plugins" / "profile" / name

    def _remove_new(self) -> None:
        shutil.rmtree(self._new_folder, ignore_errors=True)

    def _named(self, first: int) -> str:
        """Names the traced steps, from the first on."""
        if first == self._last:
            return f"step {first}"
        return f"steps {first} to {self._last}"
