"""Launches on the hosts of a TPU VM with gcloud; JAX detects the pod."""

import dataclasses
import pathlib
import shlex
from collections.abc import Sequence
from typing import ClassVar

from launch import engine
from xshard.pod import rendezvous

_GCLOUD = ("gcloud", "compute", "tpus", "tpu-vm")


@dataclasses.dataclass(frozen=True)
class TpuVm(engine.Engine):
    """The TPU VM engine. The credentials come from gcloud's configuration."""

    name: ClassVar[str] = "tpu_vm"
    why_not_elastic: ClassVar[str] = engine.A_SLICE_IS_WHOLE

    tpu: str | None = engine.option(None, "the TPU VM's name")
    directory: str = engine.option(
        "xshard",
        "the code's folder on each host; its .venv, which run.sh creates, is activated "
        "if it exists",
    )
    zone: str | None = engine.option(None, "the TPU VM's zone; by default gcloud's own")
    project: str | None = engine.option(
        None, "the TPU VM's project; by default gcloud's own"
    )

    def launch(self, jobs: Sequence[engine.Job]) -> engine.Plan:
        """Returns the plan that starts the command on all hosts, where it outlives the
        connection.
        """
        job = self.only_job(jobs)
        if job.processes != 1 or job.cpu_devices:
            raise engine.LaunchError(
                "--num_processes and --cpu_devices are not for tpu_vm: there is one "
                "process per host, and JAX detects its chips."
            )
        log = f"{job.name}.log"
        pid = f"{job.name}.pid"
        token = f"{job.name}.token"
        # setsid and nohup detach the program, so that the end of the ssh connection
        # does not stop it. The file with its process ID is for `kill`.
        remote = (
            f"cd {shlex.quote(self.directory)} && "
            f"if [ -e {pid} ] && kill -0 $(cat {pid}) 2>/dev/null; then "
            f"echo 'error: {job.name} is running' >&2; exit 1; fi && "
            "{ [ ! -d .venv ] || . .venv/bin/activate; } && "
            f"export {rendezvous.TOKEN_VARIABLE}=$(cat ~/{token}) && "
            f"rm -f ~/{token} && "
            f"{{ setsid nohup {shlex.join(job.arguments)} >>{log} 2>&1 </dev/null & "
            f"echo $! >{pid}; }}"
        )
        # The token travels in a file, because other users can read command lines. The
        # file is in the home directory, where its path needs no quoting.
        start = self._ssh("all", remote)
        send = [
            *_GCLOUD,
            "scp",
            token,
            f"{self.tpu}:{token}",
            "--worker=all",
            *self._where(),
        ]
        return engine.Plan([send, start], private={pathlib.Path(token): engine.TOKEN})

    def running(self) -> engine.Plan:
        """Returns the plan that lists the TPU VMs."""
        return engine.Plan([[*_GCLOUD, "list", *self._where()]])

    def logs(self, name: str) -> engine.Plan:
        """Returns the plan that shows the log of process 0's host, and follows it."""
        return engine.Plan(
            [self._ssh("0", f"tail -n 100 -f {shlex.quote(self.directory)}/{name}.log")]
        )

    def kill(self, name: str) -> engine.Plan:
        """Returns the plan that sends SIGTERM to all processes, which agree on a step,
        save and leave.
        """
        remote = f"cd {shlex.quote(self.directory)} && kill -TERM $(cat {name}.pid)"
        return engine.Plan([self._ssh("all", remote)])

    def _ssh(self, worker: str, remote: str) -> list[str]:
        if not self.tpu or self.tpu.startswith("-"):
            raise engine.LaunchError(
                "--engine=tpu_vm needs --tpu=NAME, the name of the TPU VM."
            )
        begin = [*_GCLOUD, "ssh", self.tpu]
        return [*begin, f"--worker={worker}", *self._where(), f"--command={remote}"]

    def _where(self) -> list[str]:
        options = {"zone": self.zone, "project": self.project}
        return [f"--{name}={value}" for name, value in options.items() if value]
