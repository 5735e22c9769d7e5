"""By Open MPI's mpirun, which JAX detects."""

import dataclasses
import shlex
from collections.abc import Sequence

from launch import engine
from xshard.pod import handshake


@dataclasses.dataclass(frozen=True)
class Mpi(engine.Engine):
    """The engine.

    Attributes:
      options: options of mpirun, such as '--hostfile hosts'.
    """

    options: tuple[str, ...] = ()

    def launch(self, jobs: Sequence[engine.Job]) -> engine.Plan:
        """Runs the job in the foreground; mpirun ends all processes when one fails."""
        job = engine.only_job(jobs, "mpi")
        options = [part for option in self.options for part in shlex.split(option)]
        # By its name, since a command line can be read by others.
        token = ["-x", handshake.VARIABLE]
        return engine.Plan([["mpirun", "-n", str(job.processes), *options, *token, *job.arguments]])
