"""Launches with Open MPI's mpirun; JAX detects the processes' places."""

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from typing import ClassVar

from launch import engine
from xshard.pod import rendezvous


@dataclasses.dataclass(frozen=True)
class Mpi(engine.Engine):
    """The Open MPI engine."""

    name: ClassVar[str] = "mpi"
    has_spares: ClassVar[bool] = True
    why_not_elastic: ClassVar[str] = (
        "mpirun does not start a run again; give the same command with another "
        "--num_processes"
    )

    mpirun: tuple[str, ...] = engine.option(
        (), "an option of mpirun, as --mpirun='--hostfile hosts'"
    )

    def launch(self, jobs: Sequence[engine.Job]) -> engine.Plan:
        """Returns the plan that runs the job in the foreground; mpirun ends all
        processes when one fails.
        """
        job = self.only_job(jobs)
        options = []
        for option in self.mpirun:
            options += shlex.split(option)
        # Only the variable's name is on the command line, which other users can read.
        token = ["-x", rendezvous.TOKEN_VARIABLE]
        count = job.processes + (job.spares or 0)
        mpirun = ["mpirun", "-n", str(count), *options, *token]
        if job.spares is None:
            return engine.Plan([[*mpirun, *job.arguments]])
        # The launcher goes on without the processes that it loses.
        words = [f"--num_processes={job.processes}", f"--spares={job.spares}"]
        launcher = [sys.executable, "-m", "launch", *words]
        through = f"--through={shlex.join(mpirun)}"
        return engine.Plan([[*launcher, through, "--", *job.arguments]])
