"""What a run is to those that start it, and what an engine is."""

import contextlib
import dataclasses
import os
import pathlib
import re
import secrets
import shlex
import subprocess
import zlib
from collections.abc import Mapping, Sequence

from xshard import errors
from xshard.pod import handshake

# Stands for the token in a plan, which is made when the plan is run, and shown to nobody.
TOKEN = "TOKEN-OF-THE-LAUNCH"
_LONGEST_NAME = 40
# A sweep adds the number of a point.
_LONGEST_DERIVED_NAME = 34


class LaunchError(errors.UserError):
    """What was asked for cannot be launched. The message says why, and what to do."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A run to be started.

    Attributes:
      name: of the job, in lower case letters, digits and '-'.
      command: the program and its arguments.
      processes: how many processes run it together, one a host on a pod.
      cpu_devices: the virtual devices of each; 0 where the devices are real.
      least: the fewest processes that it may go on with when hosts are lost; 0: it goes on with `processes` alone.
    """

    name: str
    command: tuple[str, ...]
    processes: int = 1
    cpu_devices: int = 0
    least: int = 0

    @property
    def elastic(self) -> str:
        """The flag that says how many processes it may have."""
        return f"--elastic={self.least}:{self.processes}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command with what all of its processes are given."""
        more = [f"--cpu_devices={self.cpu_devices}"] if self.cpu_devices else []
        return (*self.command, *more)

    @property
    def workdir(self) -> pathlib.Path:
        """The run's work directory, from its command; LaunchError if that names none."""
        for argument in reversed(self.command):
            if argument.startswith("--workdir=") and argument != "--workdir=":
                return pathlib.Path(argument.partition("=")[2]).absolute()
        raise LaunchError(
            f"The command {shlex.join(self.command)} has no --workdir=DIR, where its state is to be."
        )

    def with_flags(self, **flags: object) -> "Job":
        """The same with more arguments, which come last and so count."""
        more = (f"--{name}={value}" for name, value in flags.items())
        return dataclasses.replace(self, command=(*self.command, *more))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What an engine would do.

    Attributes:
      files: the content of each file that it writes.
      commands: what it then runs, one after another. They find the launch's token in the environment.
      private: the content of files that only this user may read, and that last as long as the commands. `TOKEN` in
        them becomes the launch's.
    """

    commands: Sequence[Sequence[str]]
    files: Mapping[pathlib.Path, str] = dataclasses.field(default_factory=dict)
    private: Mapping[pathlib.Path, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"# {path}\n{content}" for path, content in self.files.items()]
        parts += [f"# {path}, meanwhile\n{content}" for path, content in self.private.items()]
        return "\n".join([*parts, *(shlex.join(command) for command in self.commands)])

    def run(self, *, replace: bool = False) -> int:
        """Does it, up to the first command that fails; its exit code.

        Args:
          replace: whether the last command takes this process's place, and with it its terminal and signals.

        Raises:
          LaunchError: if a file cannot be written, or a program is not there.
        """
        token = make_token()
        for path, content in self.files.items():
            _write(path, content, 0o666)
        with contextlib.ExitStack() as stack:
            for path, content in self.private.items():
                path.unlink(missing_ok=True)
                stack.callback(path.unlink, missing_ok=True)
                _write(path, content.replace(TOKEN, token), 0o600)
            environment = {**os.environ, handshake.VARIABLE: token}
            return self._run_commands(environment, replace=replace and not self.private)

    def _run_commands(self, environment: Mapping[str, str], *, replace: bool) -> int:
        for index, command in enumerate(self.commands):
            try:
                if replace and index == len(self.commands) - 1:
                    os.execvpe(command[0], list(command), environment)
                code = subprocess.run(command, check=False, env=environment).returncode
            except FileNotFoundError as e:
                raise LaunchError(
                    f"{command[0]} is not on PATH; --dry_run shows what it is for."
                ) from e
            if code:
                # As a shell has it where a signal has ended the program.
                return code if code > 0 else 128 - code
        return 0


def make_token() -> str:
    """A secret for the processes of one launch, by which they know one another."""
    return secrets.token_hex(32)


def _write(path: pathlib.Path, content: str, mode: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(number, "w") as file:
            file.write(content)
    except OSError as e:
        raise LaunchError(f"{path} cannot be written: {e.strerror}.") from e


class Engine:
    """Where runs are started. A new engine implements `launch`, and of the rest what there is."""

    def launch(self, jobs: Sequence[Job]) -> Plan:
        """Starts jobs, of a sweep several; LaunchError if they do not fit."""
        raise NotImplementedError

    def running(self) -> Plan:
        """Lists what runs there."""
        return self._nothing("list")

    def logs(self, name: str) -> Plan:
        """Shows what a job prints."""
        del name
        return self._nothing("logs")

    def kill(self, name: str) -> Plan:
        """Stops a job, which saves if there is time."""
        del name
        return self._nothing("kill")

    def _nothing(self, verb: str) -> Plan:
        raise LaunchError(
            f"there is no '{verb}' for this engine: 'status DIR' shows a run, DIR/launch.log or its terminal "
            "what it prints, and 'touch DIR/STOP' has it save and leave."
        )


def only_job(jobs: Sequence[Job], engine: str) -> Job:
    """The only job; LaunchError if there are several, as of a sweep."""
    if len(jobs) != 1:
        raise LaunchError(f"--sweep runs with --engine=local or slurm, not with {engine}.")
    return jobs[0]


def check_name(name: str) -> str:
    """The name; LaunchError unless all engines take it."""
    if len(name) > _LONGEST_NAME or not re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", name):
        raise LaunchError(
            f"--name={name} must be of at most {_LONGEST_NAME} lower case letters, digits and '-', and begin with a letter."
        )
    return name


def derived_name(directory: pathlib.Path) -> str:
    """A name that all engines take, from a work directory's."""
    name = re.sub("[^a-z0-9]+", "-", directory.name.lower()).strip("-")
    if not name:
        # Of other letters than these; two of them are not to have one name.
        name = f"run-{zlib.crc32(os.fsencode(directory.name)):08x}"
    if not name[0].isalpha():
        name = f"run-{name}"
    return name[:_LONGEST_DERIVED_NAME].rstrip("-")
