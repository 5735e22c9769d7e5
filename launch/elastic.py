"""Elastic runs, `--elastic=MIN:MAX`, which continue on fewer hosts, and the checks of
their configs.
"""

import dataclasses
import re
import sys
from collections.abc import Sequence
from typing import Any

from launch import engine, sweep
from xshard import cli


def parse(text: str) -> tuple[int, int]:
    """Parses MIN:MAX, the fewest hosts on which a run is started again, and the number
    on which it is started first; raises LaunchError if the text is malformed.
    """
    # The digits are limited because no cluster has a million hosts, and Python's int()
    # rejects very long numbers.
    if re.fullmatch("[0-9]{1,6}:[0-9]{1,6}", text):
        least, most = map(int, text.split(":"))
        if 1 <= least <= most:
            return least, most
    raise engine.LaunchError(
        f"--elastic={text} must be MIN:MAX, two whole numbers with 1 <= MIN <= MAX, as "
        "in --elastic=2:4: the fewest hosts on which the run may continue, and the "
        "number on which it starts."
    )


def check_engine(chosen: engine.Engine) -> None:
    """Raises LaunchError unless the engine can start a run again on other hosts."""
    if chosen.why_not_elastic:
        raise engine.LaunchError(
            f"--elastic is for --engine=local and slurm, not for {chosen.name}: "
            f"{chosen.why_not_elastic}. Leave it out."
        )


def check_spares(jobs: Sequence[engine.Job], chosen: engine.Engine) -> None:
    """Raises LaunchError unless runs can go on without processes that they lose."""
    for job in jobs:
        flag = f"--spares={job.spares}"
        if not chosen.has_spares:
            raise engine.LaunchError(
                f"{flag} is for --engine=local, slurm and mpi, not for {chosen.name}, "
                "whose own system starts a run again: leave it out."
            )
        if job.least:
            raise engine.LaunchError(
                f"{flag} keeps the number of processes, which {job.elastic} changes: "
                "leave one of them out."
            )
        if job.spares is not None and job.spares > job.processes:
            raise engine.LaunchError(
                f"{flag}: there are {job.processes} processes, whose places the spares "
                f"take: give at most --spares={job.processes}."
            )
        config = sweep.requested_config(job)
        if config is None:
            # The program itself refuses what does not fit.
            continue
        if not _is_exact(config) or not config.get("logical_replicas"):
            raise engine.LaunchError(
                f"{flag} is for runs whose bits do not depend on the number of "
                f"processes: the config of {job.name} needs "
                "--config.logical_replicas=N --config.reduction.arithmetic=exact "
                "(docs/one_trajectory.md)."
            )


def _is_exact(config: dict[str, Any]) -> bool:
    """Returns whether a run has exact sums."""
    # The program may have a config of its own form.
    reduction = config.get("reduction")
    if not isinstance(reduction, dict):
        return False
    return (reduction.get("arithmetic") or "float") != "float"


def check(jobs: Sequence[engine.Job]) -> list[engine.Job]:
    """Checks that the trajectories of jobs do not depend on the number of hosts; prints
    a warning if they may.

    Returns:
      The jobs. They go on without the hosts that they lose if the bits of none depend
      on them; otherwise they start again.

    Raises:
      LaunchError: if a job's config has no logical replicas.
    """
    warnings = {_warning(job) for job in jobs}
    for warning in sorted(warnings - {""}):
        print(f"launch: warning: {warning}", file=sys.stderr, flush=True)
    modes = {cli.flag_value(job.command, "mode") for job in jobs}
    if warnings == {""} and modes <= {"", "train"}:
        return [dataclasses.replace(job, spares=0) for job in jobs]
    return list(jobs)


def _warning(job: engine.Job) -> str:
    """Returns the warning about a job, empty if its bits do not depend on its hosts;
    raises LaunchError if the job is refused.
    """
    config = sweep.requested_config(job)
    if config is None:
        return (
            "--elastic: the config of the command cannot be read here. Without "
            "logical_replicas in it, the results of the run change with the number of "
            "its hosts."
        )
    outer = config.get("outer")
    if isinstance(outer, dict) and outer.get("every_steps"):
        slices = config.get("slices")
        if slices:
            raise engine.LaunchError(
                f"{job.elastic} changes the number of hosts, and the config of "
                f"{job.name} has slices={slices}: add --config.slices=0, with which "
                "each process is a slice."
            )
        return (
            "--elastic: with other slices than before, the run goes on from the last "
            f"exchange, so up to {outer['every_steps']} steps of each slice do not "
            "count."
        )
    logical_replicas = config.get("logical_replicas", 0)
    if not logical_replicas:
        raise engine.LaunchError(
            f"{job.elastic} is for runs whose trajectory does not depend on the number "
            f"of hosts, but the config of {job.name} has "
            f"logical_replicas={logical_replicas}: add --config.logical_replicas=N "
            "--config.reduction.arithmetic=exact (docs/one_trajectory.md), or give "
            "--num_processes instead of --elastic."
        )
    if not _is_exact(config):
        return (
            "--elastic: without --config.reduction.arithmetic=exact, rounding depends "
            "on the number of hosts, so a run that loses hosts ends with other bits "
            "than a run that loses none."
        )
    return ""
