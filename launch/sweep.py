"""Sweeps: one job for each point, and one table of all results."""

import concurrent.futures
import contextlib
import dataclasses
import difflib
import itertools
import json
import os
import pathlib
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from launch import engine, local
from xshard import cli, errors
from xshard.base import formatting
from xshard.files import disk, jsonfile, workdir
from xshard.files import identity as identity_lib
from xshard.files import results as results_lib
from xshard.pod import exit_codes, status

# The values of a run that differ from those of its command, by key.
Point = Mapping[str, Any]
POINTS_FILE = "sweep.json"
_LOG = "launch.log"
_PLATFORMS = "JAX_PLATFORMS"
_NOT_STARTED = "not started"
# The columns of a table beside those of the points' keys and the results.
_COLUMNS = ("run", "doing", "step")


def read(path: pathlib.Path) -> list[Point]:
    """Returns the points of a sweep, as values of JSON.

    Args:
      path: a Python file with `get_sweep()`, which returns a list of points such as
        {'optimizer.learning_rate': 0.1}. The numbers of NumPy become those of Python.

    Raises:
      LaunchError: if the file does not exist, fails, or returns no such list.
    """
    if not path.is_file():
        raise engine.LaunchError(f"--sweep={path}: there is no such file.")
    try:
        points = runpy.run_path(str(path))["get_sweep"]()
    except Exception as e:
        raise engine.LaunchError(
            f"--sweep={path} raised {type(e).__name__}: {e}."
        ) from e
    if not isinstance(points, list) or not points or not all(map(_is_point, points)):
        raise engine.LaunchError(
            f"--sweep={path}: get_sweep() must return a list of overrides, as "
            f"[{{'seed': 0}}, {{'seed': 1}}]; received {points!r}."
        )
    try:
        return json.loads(json.dumps(points, default=_of_numpy))
    except (TypeError, ValueError) as e:
        raise engine.LaunchError(
            f"--sweep={path}: {e}. A point can have None, bool, int, float, text, and "
            "lists, tuples and dictionaries of these."
        ) from e


def _is_point(point: Any) -> bool:
    if not isinstance(point, dict) or not point:
        return False
    return all(isinstance(key, str) for key in point)


def _of_numpy(value: Any) -> Any:
    """Returns a value of NumPy in Python's types; raises TypeError for another one."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"{value!r} is of type {type(value).__name__}")
    return value.tolist()


def check(directory: pathlib.Path, points: Sequence[Point]) -> None:
    """Checks that a directory is free for a sweep, or is this sweep's own.

    Raises:
      LaunchError: if it holds another sweep, because the results would mix, or a run.
    """
    old = jsonfile.read_if_exists(directory / POINTS_FILE, list)
    if old is None:
        run = workdir.Workdir(directory).run_id()
        if run:
            raise engine.LaunchError(
                f"{directory} holds run {run}, and the runs of a sweep lie in a "
                "directory of its own: give --workdir another directory."
            )
    elif not identity_lib.is_equal(old, points):
        before = json.dumps(old, indent=1).splitlines()
        after = json.dumps(points, indent=1).splitlines()
        # The first three lines name the files and the place.
        lines = difflib.unified_diff(before, after, lineterm="", n=0)
        raise engine.LaunchError(
            f"{directory} holds another sweep, which differs in "
            f"{' '.join(itertools.islice(lines, 3, 7))}: give --workdir another "
            "directory."
        )


def jobs(job: engine.Job, points: Sequence[Point]) -> list[engine.Job]:
    """Returns a job for each point, in a directory below the given job's.

    Raises:
      LaunchError: if the config lacks a key of a point, or has another type there.
    """
    jobs_of_points = []
    for index, point in enumerate(points):
        job_of_point = dataclasses.replace(
            job,
            name=engine.check_name(f"{job.name}-{index:03}"),
            command=(*job.command, f"--workdir={job.workdir / f'{index:03}'}"),
            overrides=point,
        )
        try:
            requested_config(job_of_point)
        except errors.UserError as e:
            raise engine.LaunchError(f"--sweep: point {index}: {e}") from e
        jobs_of_points.append(job_of_point)
    return jobs_of_points


def files(
    directory: pathlib.Path, jobs: Sequence[engine.Job]
) -> dict[pathlib.Path, str]:
    """Returns the content of the files of a sweep: of the overrides of each job, and
    the list of all.
    """
    contents = {job.overrides_file: json.dumps(job.overrides) for job in jobs}
    points = [job.overrides for job in jobs]
    return {**contents, directory / POINTS_FILE: json.dumps(points, indent=1)}


def run(all_jobs: Sequence[engine.Job], options: local.Local) -> int:
    """Runs the jobs of a sweep on this machine, and prints the table.

    Jobs that have already ended with the requested config are not run again.

    Args:
      all_jobs: the jobs.
      options: how many jobs run at a time, and the options of the supervisors.

    Returns:
      0 if all jobs are done; else the exit code of the first that is not.
    """
    todo = [job for job in all_jobs if not has_ended(job)]
    ended = [job for job in all_jobs if job not in todo]
    failed = [job for job in ended if results_lib.nonfinite_reason(job.workdir)]
    num_done = len(ended) - len(failed)
    print(f"{num_done} of {len(all_jobs)} jobs are done; {options.parallel} at a time")
    if failed:
        names = ", ".join(job.name for job in failed)
        print(
            f"not finite, and not run again while their {workdir.RESULTS} exist: "
            f"{names}"
        )
    sys.stdout.flush()
    ends = _run_all(todo, options)
    all_rows = rows(all_jobs[0].workdir.parent)
    for job, code in zip(todo, ends, strict=True):
        row = all_rows[all_jobs.index(job)]
        # After a stop, the code of a job that was never started is that of the stop.
        if code and row["doing"] != _NOT_STARTED:
            row["doing"] = f"exit code {code}"
    print(f"\n{table(all_rows)}")
    for code in ends:
        if code:
            return code
    if failed:
        return exit_codes.NONFINITE
    return exit_codes.DONE


def _run_all(jobs: Sequence[engine.Job], options: local.Local) -> list[int]:
    """Runs jobs to their ends, some at a time; returns their exit codes.

    A signal goes on to all jobs that run, and prevents the start of others.
    """
    begun: list[local.Supervisor] = []
    received: list[int] = []

    def take(number: int) -> None:
        received.append(number)
        for supervisor in begun:
            supervisor.signal(number)

    def supervise(job: engine.Job) -> int:
        if received:
            return exit_codes.PREEMPTED
        job.workdir.mkdir(parents=True, exist_ok=True)
        with (job.workdir / _LOG).open("a") as log:
            supervisor = local.Supervisor(job, options, log)
            begun.append(supervisor)
            # The signal may have come before the supervisor was on the list.
            if received:
                return exit_codes.PREEMPTED
            print(f"{job.name}: started; its output goes to {log.name}", flush=True)
            code = supervisor.run()
        end = supervisor.cause or f"ended with exit code {code}"
        print(f"{job.name}: {end}", flush=True)
        return code

    with (
        local.forwarding_signals(take),
        concurrent.futures.ThreadPoolExecutor(options.parallel) as pool,
    ):
        return list(pool.map(supervise, jobs))


def has_ended(job: engine.Job) -> bool:
    """Returns whether a job's run has reached its end, with exactly the config that is
    requested now.
    """
    try:
        results = _results(job.workdir)
        config = jsonfile.read_if_exists(job.workdir / "config.json") or {}
    except errors.UserError:
        # The run itself reports the error when it starts.
        return False
    config.pop(workdir.IDENTITY, None)
    # They may be of an earlier end, from before the run was resumed with more steps.
    is_last = results.get("step") == config.get("steps")
    is_early = bool(results.get("ended")) or results.get("finite") is False
    is_over = bool(results) and (is_last or is_early)
    return is_over and identity_lib.is_equal(config, requested_config(job))


def _results(directory: pathlib.Path) -> dict[str, Any]:
    """Returns the results of the run in a work directory; empty if it has none.

    Raises:
      UserError: if a file of the run is damaged.
    """
    results = jsonfile.read_if_exists(directory / workdir.RESULTS) or {}
    if results.get("run") != workdir.Workdir(directory).run_id():
        return {}
    return results


def requested_config(job: engine.Job) -> dict[str, Any] | None:
    """Returns the config of a job as JSON values; None if it cannot be read, as for a
    program without --config.

    Raises:
      UserError: if a value is refused.
    """
    arguments = list(job.command)
    values = flags.FlagValues()
    cli.define_config(values, arguments)
    try:
        with _without_accelerators():
            values(arguments, known_only=True)
            return identity_lib.plain(cli.locked(values, job.overrides))
    except errors.UserError:
        raise
    except Exception:
        # The job itself reports the error when it starts.
        return None


@contextlib.contextmanager
def _without_accelerators() -> Iterator[None]:
    """Lets JAX see the CPU only, if it is first imported within the context.

    A config file that makes an array would otherwise take the accelerators of this
    machine, which the processes of the job need.
    """
    before = os.environ.get(_PLATFORMS)
    os.environ[_PLATFORMS] = "cpu"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PLATFORMS]
        else:
            os.environ[_PLATFORMS] = before


def rows(directory: pathlib.Path) -> list[dict[str, Any]]:
    """Returns a row for each point: its overrides, the status of its run, and its
    results if there are any.

    Raises:
      LaunchError: if the directory holds no sweep.
    """
    path = directory / POINTS_FILE
    points = jsonfile.read(path, list)
    if not all(isinstance(point, dict) for point in points):
        raise engine.LaunchError(
            f"{path} is not a sweep's file: each point must be an object."
        )
    return [_row(directory / f"{i:03}", point) for i, point in enumerate(points)]


def _row(directory: pathlib.Path, point: Point) -> dict[str, Any]:
    """Returns the row of a point whose run has a directory."""
    row = {"run": directory.name}
    for key, value in point.items():
        row[f"config.{key}" if key in _COLUMNS else key] = value
    try:
        results = _results(directory)
        processes = status.read_if_exists(directory) or []
    except errors.UserError as e:
        # An unreadable point must not hide the rows of the others.
        return {**row, "doing": f"not known: {e}", "step": ""}
    state = status.run_state(processes, results)
    doing = state.doing
    if state.name == status.UNKNOWN:
        doing = _NOT_STARTED
        if disk.exists(directory / _LOG):
            # The program may have failed before its run began.
            doing = f"no run yet: see {directory.name}/{_LOG}"
    step = None
    if processes:
        step = processes[0]["step"]
    if state.name in (status.RUNNING, status.SILENT):
        # Results would be those of an earlier end, before the run was resumed.
        results = {}
    step = results.get("step", step)
    row["doing"] = doing
    row["step"] = "" if step is None else step
    evaluation = results.get("eval")
    if isinstance(evaluation, dict):
        for name, value in evaluation.items():
            # A metric must not take the place of a point's value.
            row[f"eval/{name}" if name in row else name] = value
    return row


def table(all_rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats the rows of a sweep, with the points' numbers in full."""
    shown = []
    for row in all_rows:
        cells: dict[str, Any] = {}
        for name, value in row.items():
            # The points' values come before the status, and the results after it.
            is_of_point = "doing" not in cells
            cells[name] = str(value) if is_of_point else value
        shown.append(cells)
    return formatting.table(shown)
