"""Launches on a Slurm cluster: a batch script runs the processes with srun, and
requeues itself if they stop early.
"""

import dataclasses
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Sequence
from typing import ClassVar

from launch import engine
from xshard.pod import rendezvous

_SCRIPT = """\
#!/bin/bash
{options}
cd {directory} || exit 1
# The token by which the processes of this start recognize one another.
export {token}="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
{choice}# The time limit itself ends what has not saved by then, and this script.
late=
trap 'late=yes' TERM
# All variables, also of a job with --export=NONE; and srun does not ask for the
# processors of a task by itself.
{start}wait $!
code=$?
# Other ends of the job, such as scancel, send the signal as well.
if [ "$late" ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %r)" != TimeLimit ]; then
  exit "$code"
fi
say() {{
  echo "launch: $1" | tee -a "$log_file" >&2
}}
# 42: the run stopped early and saved its state; 143: it was told to before it could. It
# is requeued unless a user has created the file STOP, or unless it has not come further
# since the last requeue, as it would be forever.
if [ "$code" = 42 ] || [ "$code" = 143 ]; then
  reached="$(cat "$workdir/reached.json" 2>/dev/null)"
  if [ -e "$workdir/STOP" ]; then
    say "not requeued: $workdir/STOP exists"
  elif [ -e "$workdir/requeued" ] && [ "$reached" = "$(cat "$workdir/requeued")" ]; then
    say "not requeued: no checkpoint is newer than at the last requeue. \
Is the time limit too short for a step?"
  else
    echo "$reached" >"$workdir/requeued"
    if scontrol requeue "$SLURM_JOB_ID"; then
      wait
      exit 0
    fi
    say "not requeued: 'scontrol requeue' failed. \
The state is saved; submit the job again to go on"
  fi
fi
exit "$code"
"""

_SRUN = "srun --export=ALL ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}"
# An elastic job runs one process on each node that it got, which may be fewer after a
# requeue.
_EACH_NODE = "--ntasks=$SLURM_NNODES --ntasks-per-node=1"


@dataclasses.dataclass(frozen=True)
class Slurm(engine.Engine):
    """The Slurm engine."""

    name: ClassVar[str] = "slurm"
    has_spares: ClassVar[bool] = True

    slurm_time: str | None = engine.option(
        None, "the time limit, in sbatch's format; by default the cluster's own"
    )
    sbatch: tuple[str, ...] = engine.option(
        (), "an option of sbatch, such as --partition=p"
    )
    grace_seconds: int = engine.option(
        120, "how many seconds before the time limit the run is told to stop"
    )
    parallel: int = engine.option(1, "how many jobs of a sweep run at a time")

    def launch(self, jobs: Sequence[engine.Job]) -> engine.Plan:
        """Returns the plan that writes a batch script and submits it; several jobs
        become a job array.
        """
        script = self._folder(jobs) / "launch.sbatch"
        return engine.Plan([["sbatch", str(script)]], {script: self._script(jobs)})

    def running(self) -> engine.Plan:
        """Returns the plan that lists the user's jobs."""
        return engine.Plan(
            [["squeue", "--me", "--format=%.12i %.24j %.10T %.10M %.6D %R"]]
        )

    def kill(self, name: str) -> engine.Plan:
        """Returns the plan that asks the processes to save and leave, without a
        requeue.
        """
        job = [f"JobName={name}", f"UserID={os.getuid()}"]
        chosen = [f"--name={name}", "--me"]
        commands = [
            # After the signal alone the job would be requeued, and a pending job would
            # not receive it.
            ["scontrol", "update", *job, "Requeue=0"],
            ["scancel", *chosen, "--state=PENDING"],
            ["scancel", *chosen, "--signal=TERM"],
        ]
        return engine.Plan(commands)

    def _folder(self, jobs: Sequence[engine.Job]) -> pathlib.Path:
        """Returns the work directory of the job, or the folder of a sweep's."""
        if len(jobs) == 1:
            return jobs[0].workdir
        return jobs[0].workdir.parent

    def _script(self, jobs: Sequence[engine.Job]) -> str:
        name = jobs[0].name
        if len(jobs) > 1:
            # The jobs of a sweep end with the number of their point.
            name = name.rpartition("-")[0]
        options = {
            "job-name": name,
            **self._size(jobs[0]),
            "signal": f"TERM@{self.grace_seconds}",
            "open-mode": "append",
            # The output of the script itself. Each run's processes write to a log in
            # its work directory.
            "output": _literal(self._folder(jobs)) + "/slurm-%j.log",
        }
        if self.slurm_time:
            self._check_time(self.slurm_time)
            options["time"] = self.slurm_time
        if len(jobs) > 1:
            options["array"] = f"0-{len(jobs) - 1}%{self.parallel}"
        lines = ["--requeue"]
        if jobs[0].spares is not None:
            # The job keeps the nodes that are left.
            lines.append("--no-kill")
        lines += [f"--{option}={value}" for option, value in options.items()]
        lines += self.sbatch
        for line in lines:
            if not re.fullmatch(r"--[a-z-]+(=[^\s\"'\\#]+)?", line):
                raise engine.LaunchError(
                    f"{line!r} cannot be an option of sbatch in a script: it must be "
                    "--name=value without spaces, quotes and '#'. Give a work "
                    "directory without them, or --sbatch=--name=value."
                )
        return _SCRIPT.format(
            options="\n".join(f"#SBATCH {line}" for line in lines),
            directory=shlex.quote(os.getcwd()),
            choice=_choice(jobs),
            start=self._start(jobs[0]),
            token=rendezvous.TOKEN_VARIABLE,
        )

    def _start(self, job: engine.Job) -> str:
        """Returns the part of the script that starts the processes."""
        if job.spares is not None:
            # The launcher goes on without the processes and nodes that it loses.
            through = f"{_SRUN} --kill-on-bad-exit=0 --no-kill"
            size = f"--num_processes={job.processes} --spares={job.spares}"
            if job.least:
                through += f" {_EACH_NODE}"
                size = f'--elastic="{job.least}:$SLURM_NNODES"'
            lines = [
                f"{shlex.quote(sys.executable)} -m launch {size}",
                f'--grace_seconds={self.grace_seconds} --through="{through}"',
                '-- "${command[@]}" >>"$log_file" 2>&1 &',
            ]
            return " \\\n  ".join(lines) + "\n"
        hosts = ""
        if job.least:
            hosts = f"{_EACH_NODE} "
        output = '--output="$log" --open-mode=append'
        rest = f'{hosts}--kill-on-bad-exit=1 {output} -- "${{command[@]}}" &'
        return f"{_SRUN} \\\n  {rest}\n"

    def _check_time(self, time: str) -> None:
        limit = _seconds(time)
        # Slurm may send its signal a minute early.
        if limit is not None and limit <= self.grace_seconds + 60:
            raise engine.LaunchError(
                f"--slurm_time={time} leaves no time to train: a run is told to stop "
                f"--grace_seconds={self.grace_seconds} before, or up to a minute "
                "earlier. Give a longer time or a shorter grace."
            )

    def _size(self, job: engine.Job) -> dict[str, object]:
        """Returns the options for the size of a job; raises LaunchError if --sbatch
        sets the size of an elastic job.
        """
        if not job.least:
            return {"ntasks": job.processes + (job.spares or 0)}
        nodes = f"{job.least}-{job.processes}"
        for option in self.sbatch:
            if re.match("--(nodes|ntasks)", option):
                raise engine.LaunchError(
                    f"{job.elastic} asks sbatch for --nodes={nodes} with one process "
                    f"on each, but --sbatch={option} asks for another size: leave one "
                    "of them out."
                )
        # Without a number of tasks: Slurm would allocate just enough nodes for them,
        # which is always MIN.
        return {"nodes": nodes}


def _choice(jobs: Sequence[engine.Job]) -> str:
    """Returns the part of the script that sets the command and the work directory, for
    each task of an array.
    """
    if len(jobs) == 1:
        return _assign(jobs[0])
    cases = ""
    for index, job in enumerate(jobs):
        cases += f"{index})\n{_assign(job)};;\n"
    return f'case "$SLURM_ARRAY_TASK_ID" in\n{cases}esac\n'


def _assign(job: engine.Job) -> str:
    log = job.workdir / "launch.log"
    return (
        f"command=({shlex.join(job.arguments)})\n"
        f"workdir={shlex.quote(str(job.workdir))}\n"
        f"log={shlex.quote(_literal(log))}\n"
        f"log_file={shlex.quote(str(log))}\n"
        'mkdir -p "$workdir"\n'
    )


def _seconds(time: str) -> int | None:
    """Returns a time limit in sbatch's format in seconds; None for one without a limit,
    or of another form.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        return None
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None:
        # D-H, D-H:M and D-H:M:S.
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return (24 * int(days) + hours) * 3600 + 60 * minutes + seconds
    if len(numbers) == 3:
        return 3600 * numbers[0] + 60 * numbers[1] + numbers[2]
    # M and M:S. 0 is no limit.
    minutes, seconds = [*numbers, 0][:2]
    return 60 * minutes + seconds or None


def _literal(path: pathlib.Path) -> str:
    # Slurm expands patterns such as %j in file names, and %% stands for a literal %.
    return str(path).replace("%", "%%")
