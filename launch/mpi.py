"""Launches with Open MPI's mpirun; JAX detects the processes' places."""

import dataclasses
import shlex
from collections.abc import Sequence

from launch import engine
from xshard.pod import rendezvous


@dataclasses.dataclass(frozen=True)
class Mpi(engine.Engine):
    """The Open MPI engine.

    Attributes:
      options: options for mpirun, such as '--hostfile hosts'.
    """

    options: tuple[str, ...] = ()

    def launch(self, jobs: Sequence[engine.Job]) -> engine.Plan:
        """Returns the plan that runs the job in the foreground; mpirun ends all
        processes when one fails.
        """
        job = engine.only_job(jobs, "mpi")
        options = []
        for option in self.options:
            options += shlex.split(option)
        # Only the variable's name is on the command line, which other users can read.
        token = ["-x", rendezvous.TOKEN_VARIABLE]
        mpirun = ["mpirun", "-n", str(job.processes)]
        return engine.Plan([[*mpirun, *options, *token, *job.arguments]])
