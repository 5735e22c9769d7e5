"""Launches with XManager: a launch script runs the program's Bazel target."""

import dataclasses
from collections.abc import Sequence

from launch import engine

_PROGRAM = ("python", "-m", "xshard.main")
_SCRIPT = '''\
"""Launches {name} by XManager, on this machine."""

from absl import app
from xmanager import xm, xm_local


def main(_):
    with xm_local.create_experiment(experiment_title={name!r}) as experiment:
        spec = xm.bazel_binary(label={target!r}, executor_spec=xm_local.Local.Spec())
        [executable] = experiment.package([spec])
        arguments = {arguments!r}
        experiment.add(xm.Job(executable, executor=xm_local.Local(), args=arguments))


if __name__ == "__main__":
    app.run(main)
'''


@dataclasses.dataclass(frozen=True)
class XManager(engine.Engine):
    """The XManager engine. It runs one process, which meets no others and needs no
    token.

    Attributes:
      target: the Bazel target of the program.
    """

    target: str = "//experiments/digits"

    def launch(self, jobs: Sequence[engine.Job]) -> engine.Plan:
        """Returns the plan that writes the script into the work directory and runs it
        with XManager.
        """
        job = engine.only_job(jobs, "xmanager")
        if job.processes != 1:
            raise engine.LaunchError(
                "--engine=xmanager runs one process; --num_processes must be 1."
            )
        if job.command[:3] != _PROGRAM:
            raise engine.LaunchError(
                f"--engine=xmanager runs the Bazel target {self.target} with the "
                "arguments of the command, which must begin with "
                f"{' '.join(_PROGRAM)}; received {' '.join(job.command[:3])}."
            )
        path = job.workdir / "launch_xmanager.py"
        content = _SCRIPT.format(
            name=job.name, target=self.target, arguments=list(job.arguments[3:])
        )
        return engine.Plan([["xmanager", "launch", str(path)]], {path: content})
