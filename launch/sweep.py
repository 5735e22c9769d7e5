"""Sweeps: one job for each point, and one table of all results."""

import concurrent.futures
import contextlib
import dataclasses
import difflib
import json
import pathlib
import runpy
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from launch import engine, local
from xshard import config as config_lib
from xshard import errors
from xshard.files import disk, jsonfile, workdir
from xshard.files import identity as identity_lib
from xshard.files import results as results_lib
from xshard.metrics import formatting
from xshard.metrics import rows as rows_lib
from xshard.pod import notice, status

Point = Mapping[str, Any]
POINTS_FILE = "sweep.json"
# The ID of the run that the sweep started in each point's directory, by the directory's
# name.
RUNS_FILE = "sweep_runs.json"
# The fingerprint of the parameters in a row. Its module imports JAX, which the launcher
# does without.
_FINGERPRINT = "fingerprint/params"
_LOG, _NOT_STARTED = "launch.log", "not started"
# At most this many differences of a config are shown.
_SHOWN = 3


def read(path: pathlib.Path) -> list[Point]:
    """Returns the points of a sweep.

    Args:
      path: a Python file with `get_sweep()`, which returns a list of points such as
        {'optimizer.learning_rate': 0.1}.

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
            f"--sweep={path}: get_sweep() must return a list of overrides, as [{{'seed': 0}}, {{'seed': 1}}]; "
            f"received {points!r}."
        )
    return points


def jobs(job: engine.Job, points: Sequence[Point]) -> list[engine.Job]:
    """Returns a job for each point, with its own work directory below the given job's."""
    jobs_of_points = []
    for index, point in enumerate(points):
        overrides = {f"config.{key}": _text(value) for key, value in point.items()}
        own = job.with_flags(**overrides, workdir=job.workdir / f"{index:03}")
        name = engine.check_name(f"{job.name}-{index:03}")
        jobs_of_points.append(dataclasses.replace(own, name=name))
    return jobs_of_points


def claim(
    directory: pathlib.Path, points: Sequence[Point], all_jobs: Sequence[engine.Job]
) -> None:
    """Claims a directory for this sweep, and records which run is in each point's
    directory.

    A run that the sweep did not start is adopted if its config is the requested one,
    and a line reports that. An example is a run that a user started anew with
    --restart_from_scratch.

    Raises:
      LaunchError: if the directory belongs to another sweep, because the results would
        mix; or if a point's directory holds a run that the sweep did not start, with
        another config than the requested one.
    """
    path = directory / POINTS_FILE
    content = json.dumps(points, indent=1, default=str)
    old = jsonfile.read_if_exists(path, list)
    if old not in (None, json.loads(content)):
        before, after = json.dumps(old, indent=1).splitlines(), content.splitlines()
        changed = difflib.unified_diff(before, after, lineterm="", n=0)
        raise engine.LaunchError(
            f"{directory} holds another sweep, which differs in {' '.join(list(changed)[3:7])}: give --workdir "
            "another directory."
        )
    if old is None and run_in(directory):
        raise engine.LaunchError(
            f"{directory} holds run {run_in(directory)}, and the runs of a sweep lie in a directory of its own: give "
            "--workdir another directory."
        )
    runs, texts = read_runs(directory), []
    for job in all_jobs:
        name = job.workdir.name
        try:
            there = run_in(job.workdir)
        except errors.UserError:
            # The run itself reports the error when it starts.
            continue
        # In an existing sweep, a run without a record was started by the sweep: its
        # launcher ended before the run did.
        begun = runs.pop(name, "" if old is None else there)
        if there != begun:
            texts.append(_adopt(job, there, begun))
        if there:
            runs[name] = there
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # The sweep's file is written last: once it exists, a run without a record is
        # treated as the sweep's own.
        disk.replace(directory / RUNS_FILE, json.dumps(runs, indent=1).encode())
        disk.replace(path, content.encode())
    except OSError as e:
        raise engine.LaunchError(f"{path} cannot be written: {e.strerror}.") from e
    for text in texts:
        print(text, flush=True)


def _adopt(job: engine.Job, there: str, begun: str) -> str:
    """Returns the line about a directory that holds another run than the recorded one.

    Raises:
      LaunchError: if the run cannot be adopted.
    """
    its_own = f"it started run {begun}" if begun else "it was there before"
    if not there:
        return f"{job.name}: run {begun}, which this sweep started, no longer exists; the job starts a new run"
    differs = _differences(job)
    if differs:
        raise engine.LaunchError(
            f"{job.workdir} holds run {there}, which this sweep did not start ({its_own}), with another config than the "
            f"requested one ({differs}): move it away, or give --workdir another directory."
        )
    return f"{job.name}: adopts run {there}, which this sweep did not start ({its_own}): its config is the requested one"


def _differences(job: engine.Job) -> str:
    """Returns the differences between the config in a job's work directory and the
    requested one; empty if none.
    """
    there, requested = jsonfile.read(job.workdir / "config.json"), requested_config(job)
    if requested is None:
        return "the requested config cannot be read"
    there.pop(workdir.IDENTITY, None)
    old = _with_present_names(there)
    new = config_lib.flatten(requested)
    changed = [
        key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)
    ]
    texts = [f"{key}: {old.get(key)!r} instead of {new.get(key)!r}" for key in changed]
    return formatting.listed(texts, _SHOWN, "; ")


def _with_present_names(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a run's config.json by path, as a config has them now."""
    return config_lib.with_present_names(config_lib.flatten(config))


def read_runs(directory: pathlib.Path) -> dict[str, Any]:
    """Returns the recorded IDs of the runs that a sweep started, by the name of the
    point's directory.
    """
    return jsonfile.read_if_exists(directory / RUNS_FILE) or {}


def run_in(directory: pathlib.Path) -> str:
    """Returns the ID of the run in a work directory, empty if there is none; raises
    UserError if it is unreadable.
    """
    return workdir.Workdir(directory).run_id()


def run(all_jobs: Sequence[engine.Job], options: local.Local, parallel: int) -> int:
    """Runs the jobs of a sweep on this machine, and prints the table.

    Jobs that have already ended with the requested config are not run again.

    Args:
      all_jobs: the jobs.
      options: the options of the supervisors.
      parallel: how many jobs run at a time.

    Returns:
      0 if all jobs are done; else the exit code of the first that is not.
    """
    todo = [job for job in all_jobs if not has_ended(job)]
    failed = [
        job.name
        for job in all_jobs
        if job not in todo and results_lib.nonfinite_reason(job.workdir)
    ]
    count = len(all_jobs) - len(todo) - len(failed)
    print(f"{count} of {len(all_jobs)} jobs are done; {parallel} at a time", flush=True)
    if failed:
        print(
            f"not finite, and not run again while their {workdir.RESULTS} exist: {', '.join(failed)}",
            flush=True,
        )
    supervisors: list[local.Supervisor] = []
    stopped: list[int] = []
    noting = threading.Lock()

    def pass_on(number: int) -> None:
        stopped.append(number)
        for supervisor in supervisors:
            supervisor.signal(number)

    def supervise(job: engine.Job) -> int:
        if stopped:
            return notice.PREEMPTED
        job.workdir.mkdir(parents=True, exist_ok=True)
        with (job.workdir / _LOG).open("a") as log:
            supervisor = local.Supervisor(job, options, log)
            supervisors.append(supervisor)
            if stopped:
                return notice.PREEMPTED
            print(f"{job.name}: started; its output goes to {log.name}", flush=True)
            code = supervisor.run()
        with noting:
            _record_run(job)
        print(
            f"{job.name}: {supervisor.cause or f'ended with exit code {code}'}",
            flush=True,
        )
        return code

    with (
        local.forwarding_signals(pass_on),
        concurrent.futures.ThreadPoolExecutor(parallel) as pool,
    ):
        codes = dict(
            zip(
                (job.workdir.name for job in todo),
                pool.map(supervise, todo),
                strict=True,
            )
        )
    table = rows(all_jobs[0].workdir.parent)
    for row in table:
        # After a stop, the code of a job that was never started is that of the stop.
        if codes.get(row["run"]) and row["doing"] != _NOT_STARTED:
            row["doing"] = f"exit code {codes[row['run']]}"
    print(f"\n{formatting.table(table)}")
    codes |= dict.fromkeys(failed, notice.NONFINITE)
    return next((code for code in codes.values() if code), notice.DONE)


def _record_run(job: engine.Job) -> None:
    """Records the run that a job has started or resumed."""
    directory = job.workdir.parent
    # If it cannot be recorded now, as on a full disk, the next start of the sweep
    # records it.
    with contextlib.suppress(errors.UserError):
        there = run_in(job.workdir)
        if there:
            runs = {**read_runs(directory), job.workdir.name: there}
            jsonfile.write(directory / RUNS_FILE, runs)


def has_ended(job: engine.Job) -> bool:
    """Returns whether a job's run has reached its end, with exactly the config that is
    requested now.
    """
    names = (workdir.RESULTS, "config.json", workdir.REACHED)
    try:
        results, config, reached = (
            jsonfile.read_if_exists(job.workdir / name) for name in names
        )
    except errors.UserError:
        # The run itself reports the error when it starts.
        return False
    if results is None or config is None:
        return False
    identity = config.pop(workdir.IDENTITY, None)
    # Results count only if this run wrote them, and if its newest checkpoint is of the
    # same step, unless it ended not finite.
    of_this_run = identity is None or results.get("run") == identity.get("id")
    is_saved = reached is None or reached.get("step") == results.get("step")
    is_over = is_saved or not results.get("finite", True)
    requested = requested_config(job)
    if requested is None:
        return False
    is_requested = _with_present_names(config) == config_lib.flatten(requested)
    return of_this_run and is_over and is_requested


def requested_config(job: engine.Job) -> dict[str, Any] | None:
    """Returns the config of a job as JSON values; None if it cannot be read, as for a
    program without --config.
    """
    arguments = list(job.arguments)
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file(
        "config", flag_values=values, sys_argv=arguments
    )
    try:
        values(arguments, known_only=True)
        return identity_lib.plain(holder.value)
    except Exception:
        # The job itself reports the error when it starts.
        return None


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
    runs = read_runs(directory)
    found = [
        _row(directory / f"{index:03}", point, runs.get(f"{index:03}"))
        for index, point in enumerate(points)
    ]
    _mark_equal(directory, found)
    return found


def _mark_equal(directory: pathlib.Path, found: Sequence[dict[str, Any]]) -> None:
    """Marks each run that has trained the same parameters, bit for bit, as one before
    it.

    Nothing may read the keys in which their points differ.
    """
    first: dict[Any, str] = {}
    for row in found:
        if row["doing"] != "done":
            continue
        trained = _last_fingerprint(directory / row["run"])
        if trained is None:
            continue
        before = first.setdefault(trained, row["run"])
        if before != row["run"]:
            row["doing"] = f"done; same parameters as {before}"


def _last_fingerprint(directory: pathlib.Path) -> tuple[int, str] | None:
    """Returns the newest fingerprint of a run's parameters, with its step; None if it
    has logged none.
    """
    row = rows_lib.newest_with(workdir.Workdir(directory).metrics, _FINGERPRINT)
    if row is None:
        return None
    # With several groups, it is a list of texts, which could not be looked up.
    return row["step"], jsonfile.dumps(row[_FINGERPRINT])


def _row(directory: pathlib.Path, point: Point, begun: Any) -> dict[str, Any]:
    try:
        there = run_in(directory)
        results = jsonfile.read_if_exists(directory / workdir.RESULTS) or {}
        processes = status.read_if_exists(directory)
    except errors.UserError as e:
        # An unreadable point must not hide the rows of the others.
        return {"run": directory.name, **point, "doing": f"not known: {e}", "step": ""}
    if begun is not None and there != begun:
        # The results in the directory are of another run than the sweep started, so
        # they are not shown.
        has = f"run {there}" if there else "no run"
        doing = f"not known: it holds {has}, but the sweep started run {begun}"
        return {"run": directory.name, **point, "doing": doing, "step": ""}
    # The program may have failed before its run began.
    started = disk.exists(directory / _LOG)
    nothing = f"no run yet: see {directory.name}/{_LOG}" if started else _NOT_STARTED
    process = processes[0] if processes else {"doing": nothing, "step": None}
    doing = str("done" if results else process["doing"])
    if results.get("finite") is False:
        doing = notice.ENDS[notice.NONFINITE]
    step = results.get("step", process["step"])
    row = {
        "run": directory.name,
        **point,
        "doing": doing,
        "step": "" if step is None else step,
    }
    evaluation = results.get("eval")
    if isinstance(evaluation, dict):
        row |= evaluation
    return row


def _is_point(point: Any) -> bool:
    return (
        isinstance(point, dict)
        and bool(point)
        and all(isinstance(key, str) for key in point)
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
