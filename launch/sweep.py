"""Sweeps: a job for each point, and one table of what came out."""

import concurrent.futures
import dataclasses
import difflib
import json
import pathlib
import runpy
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from launch import engine, local
from xshard import errors
from xshard.files import disk, jsonfile, workdir
from xshard.files import identity as identity_lib
from xshard.metrics import show
from xshard.pod import notice, status

Point = Mapping[str, Any]
POINTS_FILE = "sweep.json"


def read(path: pathlib.Path) -> list[Point]:
    """The points of a sweep.

    Args:
      path: a file whose `get_sweep()` returns a list of points: {'optimizer.learning_rate': 0.1}.

    Raises:
      LaunchError: if the file is none.
    """
    if not path.is_file():
        raise engine.LaunchError(f"--sweep={path}: there is no such file.")
    try:
        points = runpy.run_path(str(path))["get_sweep"]()
    except Exception as e:
        raise engine.LaunchError(f"--sweep={path} raised {type(e).__name__}: {e}.") from e
    good = isinstance(points, list) and points and all(isinstance(p, dict) and p for p in points)
    if not good or any(not isinstance(key, str) for p in points for key in p):
        raise engine.LaunchError(
            f"--sweep={path}: get_sweep() must return a list of overrides, as [{{'seed': 0}}, {{'seed': 1}}]; "
            f"received {points!r}."
        )
    return points


def jobs(job: engine.Job, points: Sequence[Point]) -> list[engine.Job]:
    """A job for each point, in a work directory of its own below the job's."""
    return [
        dataclasses.replace(
            job.with_flags(
                **{f"config.{key}": _text(value) for key, value in point.items()},
                workdir=job.workdir / f"{index:03}",
            ),
            name=engine.check_name(f"{job.name}-{index:03}"),
        )
        for index, point in enumerate(points)
    ]


def claim(directory: pathlib.Path, points: Sequence[Point]) -> None:
    """Makes a directory this sweep's; LaunchError if it is another's, whose results it would mix with."""
    path = directory / POINTS_FILE
    content = json.dumps(points, indent=1, default=str)
    old = jsonfile.read_if_exists(path, list)
    if old is None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            disk.replace(path, content.encode())
        except OSError as e:
            raise engine.LaunchError(f"{path} cannot be written: {e.strerror}.") from e
    elif old != json.loads(content):
        before, after = json.dumps(old, indent=1).splitlines(), content.splitlines()
        changed = difflib.unified_diff(before, after, lineterm="", n=0)
        raise engine.LaunchError(
            f"{directory} holds another sweep, which differs in {' '.join(list(changed)[3:7])}: give --workdir "
            "another directory."
        )


def run(all_jobs: Sequence[engine.Job], options: local.Local, parallel: int) -> int:
    """Runs them here, some at a time, and prints the table. Those that have ended as they are asked for are not run again.

    Returns:
      0 if all are done; else the code of the first that is not.
    """
    todo = [job for job in all_jobs if not has_ended(job)]
    failed = [job.name for job in all_jobs if job not in todo and workdir.not_finite(job.workdir)]
    count = len(all_jobs) - len(todo) - len(failed)
    print(f"{count} of {len(all_jobs)} jobs are done; {parallel} at a time", flush=True)
    if failed:
        print(
            f"not finite, and not run again while their {workdir.RESULTS} are there: {', '.join(failed)}",
            flush=True,
        )
    supervisors: list[local.Supervisor] = []
    stopped: list[int] = []

    def pass_on(number: int) -> None:
        stopped.append(number)
        for supervisor in supervisors:
            supervisor.signal(number)

    def one(job: engine.Job) -> int:
        if stopped:
            return notice.PREEMPTED
        job.workdir.mkdir(parents=True, exist_ok=True)
        with (job.workdir / "launch.log").open("a") as log:
            supervisor = local.Supervisor(job, options, log)
            supervisors.append(supervisor)
            if stopped:
                return notice.PREEMPTED
            print(f"{job.name}: started; its output goes to {log.name}", flush=True)
            code = supervisor.run()
        print(f"{job.name}: ended with exit code {code}", flush=True)
        return code

    with local.passed_on(pass_on), concurrent.futures.ThreadPoolExecutor(parallel) as pool:
        codes = dict(zip((job.workdir.name for job in todo), pool.map(one, todo), strict=True))
    table = rows(all_jobs[0].workdir.parent)
    for row in table:
        if codes.get(row["run"]):
            row["doing"] = f"exit code {codes[row['run']]}"
    print(f"\n{show.table(table)}")
    codes |= dict.fromkeys(failed, notice.NONFINITE)
    return next((code for code in codes.values() if code), notice.DONE)


def has_ended(job: engine.Job) -> bool:
    """Whether a job's run has come to its end, with the very config that is asked for now."""
    names = (workdir.RESULTS, "config.json", workdir.REACHED)
    try:
        results, config, reached = (jsonfile.read_if_exists(job.workdir / name) for name in names)
    except errors.UserError:
        # The run itself says what is wrong.
        return False
    if results is None or config is None:
        return False
    identity = config.pop(workdir.IDENTITY, None)
    # Results of another run, or without the checkpoint that they are of, are none of this one's.
    of_this_run = identity is None or results.get("run") == identity.get("id")
    is_saved = reached is None or reached.get("step") == results.get("step")
    is_over = is_saved or not results.get("finite", True)
    return of_this_run and is_over and config == _asked_for(job)


def _asked_for(job: engine.Job) -> dict[str, Any] | None:
    """The config of a job, as JSON can hold it; None if it cannot be told, as of a program of another kind."""
    arguments = list(job.arguments)
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=arguments)
    try:
        values(arguments, known_only=True)
        return identity_lib.plain(holder.value)
    except Exception:
        # The job itself says what is wrong with it.
        return None


def rows(directory: pathlib.Path) -> list[dict[str, Any]]:
    """A row for each point: its overrides, what its run is doing, and its results as far as there are any.

    Raises:
      LaunchError: if the directory is no sweep's.
    """
    path = directory / POINTS_FILE
    points = jsonfile.read(path, list)
    if not all(isinstance(point, dict) for point in points):
        raise engine.LaunchError(f"{path} is no sweep's: a point is to be an object.")
    return [_row(directory / f"{index:03}", point) for index, point in enumerate(points)]


def _row(directory: pathlib.Path, point: Point) -> dict[str, Any]:
    try:
        results = jsonfile.read_if_exists(directory / workdir.RESULTS) or {}
        processes = status.read_if_exists(directory)
    except errors.UserError as e:
        # The other points' rows are as good as without this one's.
        return {"run": directory.name, **point, "doing": f"not known: {e}", "step": ""}
    (process, *_) = processes or [{"doing": "not started", "step": ""}]
    step = results.get("step", process["step"])
    evaluation = results.get("eval")
    doing = "done" if results else process["doing"]
    if results.get("finite") is False:
        doing = notice.ENDS[notice.NONFINITE]
    return {
        "run": directory.name,
        **point,
        "doing": doing,
        "step": "" if step is None else step,
        **(evaluation if isinstance(evaluation, dict) else {}),
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
