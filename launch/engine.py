"""The interface between the launcher and its engines: the job to start, the plan of an
engine, and the engine.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import secrets
import shlex
import subprocess
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from xshard import cli, errors
from xshard.files import disk
from xshard.pod import rendezvous

# The placeholder for the token in a plan. The token is created when the plan runs, and
# never printed.
TOKEN = "TOKEN-OF-THE-LAUNCH"
# Why an engine of TPU slices cannot start a run again on other hosts.
A_SLICE_IS_WHOLE = (
    "a TPU slice computes on all of its hosts or on none; give the same command on "
    "another slice"
)
_LONGEST_NAME = 40
# Shorter than the limit, because a sweep appends the number of a point.
_LONGEST_DERIVED_NAME = 34


class LaunchError(errors.UserError):
    """The requested launch is not possible; the message says why, and what to do."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A run to be started.

    Attributes:
      name: the job's name, in lower case letters, digits and '-'.
      command: the program and its arguments.
      processes: the number of processes that run it together; on a pod, one per host.
      cpu_devices: the number of virtual devices of each process; 0 to use real devices.
      least: the fewest processes with which it is started again after hosts are lost; 0
        if their number is fixed.
      spares: how many processes more wait to take the place of one that is lost,
        without which the run goes on; None if it is started again then.
      overrides: the values by key with which a point of a sweep differs from the
        command's config; empty for another job.
    """

    name: str
    command: tuple[str, ...]
    processes: int = 1
    cpu_devices: int = 0
    least: int = 0
    spares: int | None = None
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def elastic(self) -> str:
        """The --elastic flag with the job's range of processes."""
        return f"--elastic={self.least}:{self.processes}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command with the arguments that all of its processes receive."""
        more = []
        if self.cpu_devices:
            more.append(f"--cpu_devices={self.cpu_devices}")
        if self.overrides:
            more.append(f"--config_overrides={self.overrides_file}")
        return (*self.command, *more)

    @property
    def overrides_file(self) -> pathlib.Path:
        """The file of the overrides, beside the work directory."""
        return self.workdir.with_name(f"{self.workdir.name}.json")

    @property
    def workdir(self) -> pathlib.Path:
        """The run's work directory, from its command; raises LaunchError if the command
        names none.
        """
        directory = cli.flag_value(self.command, "workdir")
        if directory:
            return pathlib.Path(disk.expanded(directory)).absolute()
        raise LaunchError(
            f"The command {shlex.join(self.command)} has no --workdir=DIR, the "
            "directory for its state."
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """The files and commands with which an engine launches, lists, shows or stops jobs.

    Attributes:
      commands: the commands to run, one after another. They receive the launch's token
        in the environment.
      files: the content of each file to write before the commands, by path.
      private: the content of temporary files that only this user may read, by path;
        they are deleted after the commands. `TOKEN` in them is replaced by the launch's
        token.
    """

    commands: Sequence[Sequence[str]]
    files: Mapping[pathlib.Path, str] = dataclasses.field(default_factory=dict)
    private: Mapping[pathlib.Path, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        parts = []
        for path, content in self.files.items():
            parts.append(f"# {path}\n{content}")
        for path, content in self.private.items():
            parts.append(f"# {path}, temporary\n{content}")
        for command in self.commands:
            parts.append(shlex.join(command))
        return "\n".join(parts)

    def write(self) -> None:
        """Writes the files; raises LaunchError if one cannot be written."""
        for path, content in self.files.items():
            with _naming(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                disk.replace(path, content.encode())

    def run(self, *, replace: bool = False) -> int:
        """Writes the files and runs the commands up to the first that fails; returns
        the exit code.

        Args:
          replace: whether the last command replaces this process, to receive its
            terminal and signals. A plan with private files never does, because this
            process has to delete them.

        Raises:
          LaunchError: if a file cannot be written, or if a program is missing.
        """
        self.write()
        token = make_token()
        with contextlib.ExitStack() as stack:
            for path, content in self.private.items():
                _write_private(path, content.replace(TOKEN, token))
                stack.callback(path.unlink, missing_ok=True)
            environment = {**os.environ, rendezvous.TOKEN_VARIABLE: token}
            for number, command in enumerate(self.commands, 1):
                is_last = number == len(self.commands)
                try:
                    if replace and is_last and not self.private:
                        os.execvpe(command[0], list(command), environment)
                    ended = subprocess.run(command, check=False, env=environment)
                except FileNotFoundError as e:
                    raise LaunchError(
                        f"{command[0]} is not on PATH; --dry_run shows the command "
                        "that needs it."
                    ) from e
                if ended.returncode:
                    return shell_code(ended.returncode)
            return 0


def make_token() -> str:
    """Returns a random secret, by which the processes of one launch recognize one
    another.
    """
    return secrets.token_hex(32)


def shell_code(code: int) -> int:
    """Returns an exit code as a shell has it: 128 plus the signal's number if a signal
    ended the program.
    """
    if code < 0:
        return 128 - code
    return code


def _write_private(path: pathlib.Path, content: str) -> None:
    """Creates a file that only this user may read.

    In a folder that others may write to, such as /tmp, a file or a link may be there
    already, or come there at any time: through it others would read the token, or have
    a file of this user overwritten. So it is created anew, or not at all.
    """
    with _naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "w") as file:
            file.write(content)


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Converts an OSError to a LaunchError that names the file."""
    try:
        yield
    except OSError as e:
        raise LaunchError(f"{path} cannot be written: {e.strerror}.") from e


def option(default: Any, help_text: str) -> Any:
    """Returns a field of an engine that the launcher's flag of the same name sets.

    Args:
      default: the value without the flag: a text, or None; a positive number; or a
        tuple of texts, if the flag may be given several times.
      help_text: what the flag says to the engine.
    """
    return dataclasses.field(default=default, metadata={"help": help_text})


@dataclasses.dataclass(frozen=True)
class Engine:
    """A system that runs jobs. A new engine is a frozen dataclass whose fields are its
    flags; it implements `launch`, and the other methods as far as the system allows.

    The methods return plans and execute nothing.

    Attributes:
      name: the engine's name, for --engine.
      why_not_elastic: why the engine cannot start a run again on other hosts; empty if
        it can.
      has_spares: whether it can go on without processes that it loses.
    """

    name: ClassVar[str]
    why_not_elastic: ClassVar[str] = ""
    has_spares: ClassVar[bool] = False

    def launch(self, jobs: Sequence[Job]) -> Plan:
        """Returns the plan that starts jobs, several for a sweep; raises LaunchError if
        the engine cannot run them.
        """
        raise NotImplementedError

    def running(self) -> Plan:
        """Returns the plan that lists the jobs."""
        return self._nothing("list")

    def logs(self, name: str) -> Plan:
        """Returns the plan that shows the output of a job."""
        del name
        return self._nothing("logs")

    def kill(self, name: str) -> Plan:
        """Returns the plan that stops a job, which saves its state if there is time."""
        del name
        return self._nothing("kill")

    def only_job(self, jobs: Sequence[Job]) -> Job:
        """Returns the only job; raises LaunchError if they are of a sweep."""
        if jobs[0].overrides:
            raise LaunchError(
                f"--sweep runs with --engine=local or slurm, not with {self.name}."
            )
        return jobs[0]

    def _nothing(self, verb: str) -> Plan:
        raise LaunchError(
            f"there is no '{verb}' for this engine: 'status DIR' shows a run, "
            "DIR/launch.log or the run's terminal shows its output, and 'touch "
            "DIR/STOP' makes it save and stop."
        )


def check_name(name: str) -> str:
    """Returns the name; raises LaunchError unless every engine accepts it."""
    is_valid = re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", name)
    if not is_valid or len(name) > _LONGEST_NAME:
        raise LaunchError(
            f"--name={name} must be at most {_LONGEST_NAME} lower case letters, digits "
            "and '-', and begin with a letter."
        )
    return name


def derived_name(directory: pathlib.Path) -> str:
    """Returns a name that every engine accepts, derived from the name of a work
    directory.
    """
    name = re.sub("[^a-z0-9]+", "-", directory.name.lower()).strip("-")
    if not name:
        # The directory's name has no usable character. The checksum gives different
        # directories different names.
        name = f"run-{zlib.crc32(os.fsencode(directory.name)):08x}"
    if not name[0].isalpha():
        name = f"run-{name}"
    return name[:_LONGEST_DERIVED_NAME].rstrip("-")
