"""Sweeps: one job for each point, and one table of all results."""

import ast
import concurrent.futures
import contextlib
import dataclasses
import difflib
import itertools
import json
import math
import os
import pathlib
import runpy
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_collections
from absl import flags
from ml_collections.config_flags import config_path

from launch import engine, local
from xshard import cli, config_values, errors
from xshard import config as config_lib
from xshard.base import formatting
from xshard.files import disk, jsonfile, workdir
from xshard.files import identity as identity_lib
from xshard.files import results as results_lib
from xshard.metrics import rows as rows_lib
from xshard.pod import exit_codes, status

Point = Mapping[str, Any]
POINTS_FILE = "sweep.json"
# The ID of the run that the sweep started in each point's directory, by the directory's
# name.
RUNS_FILE = "sweep_runs.json"
# The fingerprint of the parameters in a row. Its module imports JAX, which the launcher
# does without.
_FINGERPRINT = "fingerprint/params"
_LOG = "launch.log"
_PLATFORMS = "JAX_PLATFORMS"
_NOT_STARTED = "not started"
# The columns of a table beside those of the points' keys and the results.
_COLUMNS = ("run", "doing", "step")
# At most this many differences of a config are shown.
_SHOWN = 3


def read(path: pathlib.Path) -> list[Point]:
    """Returns the points of a sweep.

    Args:
      path: a Python file with `get_sweep()`, which returns a list of points such as
        {'optimizer.learning_rate': 0.1}. The numbers of NumPy become those of Python.

    Raises:
      LaunchError: if the file does not exist, fails, or returns no such list; or if no
        flag could give a value exactly.
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
    plain: list[Point] = []
    for index, point in enumerate(points):
        values = {}
        for key, value in point.items():
            values[key] = _plain(value, f"--sweep: {key}={value!r} of point {index}")
        plain.append(values)
    return plain


def _plain(value: Any, where: str) -> Any:
    """Returns a value of a point in the types of a config.

    Args:
      value: the value.
      where: the beginning of an error's message.

    Raises:
      LaunchError: if it has another type.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        value = value.item()
    kind = type(value)
    if value is None or kind in (bool, int, float):
        return value
    if kind is str and "\0" not in value:
        return value
    if kind in (list, tuple):
        return kind(_plain(item, where) for item in value)
    if kind is dict and all(type(key) is str for key in value):
        return {key: _plain(item, where) for key, item in value.items()}
    raise engine.LaunchError(
        f"{where} has a value of type {kind.__name__}: a flag can give None, bool, "
        "int, float, text, and lists, tuples and dictionaries of these."
    )


def jobs(job: engine.Job, points: Sequence[Point]) -> list[engine.Job]:
    """Returns a job for each point, in a directory below the given job's.

    Raises:
      LaunchError: if the config that a job would have differs from its point.
    """
    try:
        config = _parsed_config(job)
    except Exception:
        # The job itself reports the error when it starts.
        config = None
    jobs_of_points = []
    for index, point in enumerate(points):
        overrides = {}
        for key, value in point.items():
            where = f"--sweep: {key}={value!r} of point {index}"
            if value is not None:
                overrides[f"config.{key}"] = _text(value, where)
            elif _value_of(config, key) is not None:
                # The config has None there as long as no flag says otherwise.
                raise engine.LaunchError(
                    f"{where}: no flag gives None. Set the key to None in the config "
                    "file, as by ml_collections.config_dict.placeholder(float), or use "
                    "another value for that, such as 0."
                )
        directory = job.workdir / f"{index:03}"
        job_of_point = job.with_flags(**overrides, workdir=directory)
        name = engine.check_name(f"{job.name}-{index:03}")
        if config is not None:
            _check_arrival(job_of_point, index, point)
        jobs_of_points.append(dataclasses.replace(job_of_point, name=name))
    return jobs_of_points


def _check_arrival(job: engine.Job, index: int, point: Point) -> None:
    """Raises LaunchError if the config of a job has not the values of its point."""
    try:
        config = _parsed_config(job)
    except flags.Error as e:
        reason = cli.flag_error(e)
        raise engine.LaunchError(f"--sweep: point {index}: {reason}") from e
    # A key that is no path raises ValueError.
    except (AttributeError, KeyError, IndexError, ValueError) as e:
        raise engine.LaunchError(
            f"--sweep: point {index} ({', '.join(point)}): the config has no such key: "
            f"{e}"
        ) from e
    for key, value in point.items():
        arrived = _value_of(config, key)
        try:
            if _is_same(value, arrived):
                continue
        except errors.UserError as e:
            raise engine.LaunchError(f"--sweep: {key} of point {index}: {e}") from e
        raise engine.LaunchError(
            f"--sweep: {key}={value!r} of point {index} would arrive as {arrived!r}, "
            f"since the config file has a {type(arrived).__name__} there: write the "
            "point's value as it would arrive, or change the type in the config file."
        )


def _is_same(value: Any, arrived: Any) -> bool:
    """Returns whether a run has the value of a point."""
    if isinstance(value, str) and not isinstance(arrived, str):
        # As on the command line, a text may have the form of another type's value.
        try:
            # Python has no literal of 'inf'.
            parse = float if isinstance(arrived, float) else ast.literal_eval
            value = parse(value)
        except (ValueError, SyntaxError):
            value = {"true": True, "false": False}.get(value.lower(), value)
    if type(value) is int and type(arrived) is float:
        return value == arrived
    # Lists and tuples are the same to a run.
    config = ml_collections.ConfigDict({"value": value})
    arrived_config = ml_collections.ConfigDict({"value": arrived})
    return identity_lib.is_equal(
        config_values.to_json(config)["value"],
        config_values.to_json(arrived_config)["value"],
    )


def _value_of(config: Any, key: str) -> Any:
    """Returns the value of a config at a path such as 'optimizer.learning_rate'; an
    empty text if it has none.
    """
    if config is None:
        return ""
    try:
        return config_path.get_value(key, config)
    except (KeyError, IndexError, ValueError):
        return ""


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
    content = json.dumps(points, indent=1)
    old = jsonfile.read_if_exists(path, list)
    if old is not None and not identity_lib.is_equal(old, json.loads(content)):
        raise engine.LaunchError(
            f"{directory} holds another sweep, which differs in "
            f"{_first_change(json.dumps(old, indent=1), content)}: give --workdir "
            "another directory."
        )
    if old is None and run_in(directory):
        raise engine.LaunchError(
            f"{directory} holds run {run_in(directory)}, and the runs of a sweep lie "
            "in a directory of its own: give --workdir another directory."
        )
    runs = read_runs(directory)
    messages = []
    for job in all_jobs:
        name = job.workdir.name
        try:
            there = run_in(job.workdir)
        except errors.UserError:
            # The run itself reports the error when it starts.
            continue
        if name in runs:
            recorded = runs.pop(name)
        elif old is not None:
            # In an existing sweep, a run without a record was started by the sweep: its
            # launcher ended before the run did.
            recorded = there
        else:
            recorded = ""
        if there != recorded:
            messages.append(_adopt(job, there, recorded))
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
    for message in messages:
        print(message, flush=True)


def _first_change(old: str, new: str) -> str:
    """Returns the first lines in which two texts differ."""
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
    # The first three lines name the files and the place.
    return " ".join(itertools.islice(lines, 3, 7))


def _adopt(job: engine.Job, there: str, recorded: str) -> str:
    """Returns the message about a directory that holds another run than the recorded
    one.

    Args:
      job: the job of the directory.
      there: the ID of the run there; empty if there is none.
      recorded: the ID of the run that the sweep started; empty if it started none.

    Raises:
      LaunchError: if the run cannot be adopted.
    """
    if not there:
        return (
            f"{job.name}: run {recorded}, which this sweep started, no longer exists; "
            "the job starts a new run"
        )
    history = "it was there before"
    if recorded:
        history = f"it started run {recorded}"
    differences = _differences(job)
    if differences:
        raise engine.LaunchError(
            f"{job.workdir} holds run {there}, which this sweep did not start "
            f"({history}), with another config than the requested one "
            f"({differences}): move it away, or give --workdir another directory."
        )
    return (
        f"{job.name}: adopts run {there}, which this sweep did not start ({history}): "
        "its config is the requested one"
    )


def _differences(job: engine.Job) -> str:
    """Returns the differences between the config in a job's work directory and the
    requested one; empty if none.
    """
    there = jsonfile.read(job.workdir / "config.json")
    requested = requested_config(job)
    if requested is None:
        return "the requested config cannot be read"
    there.pop(workdir.IDENTITY, None)
    old = config_lib.flatten(there)
    new = config_lib.flatten(requested)
    texts = []
    for key in sorted(old.keys() | new.keys()):
        if not identity_lib.is_equal(old.get(key), new.get(key)):
            texts.append(f"{key}: {old.get(key)!r} instead of {new.get(key)!r}")
    return formatting.listed(texts, _SHOWN, "; ")


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


class Supervisor:
    """Runs the jobs of a sweep on this machine, some at a time."""

    def __init__(self, options: local.Local):
        """Starts nothing.

        Args:
          options: how many jobs run at a time, and the options of their supervisors.
        """
        self._options = options
        self._begun: list[local.Supervisor] = []
        self._signals: list[int] = []
        self._recording = threading.Lock()

    def signal(self, number: int) -> None:
        """Passes a signal on to all jobs that run, and prevents the start of others. A
        signal handler may call it.
        """
        self._signals.append(number)
        for supervisor in self._begun:
            supervisor.signal(number)

    def run(self, jobs: Sequence[engine.Job]) -> list[int]:
        """Runs jobs to their ends; returns their exit codes."""
        with concurrent.futures.ThreadPoolExecutor(self._options.parallel) as pool:
            return list(pool.map(self._supervise, jobs))

    def _supervise(self, job: engine.Job) -> int:
        if self._signals:
            return exit_codes.PREEMPTED
        job.workdir.mkdir(parents=True, exist_ok=True)
        with (job.workdir / _LOG).open("a") as log:
            supervisor = local.Supervisor(job, self._options, log)
            self._begun.append(supervisor)
            # The signal may have come before the supervisor was on the list.
            if self._signals:
                return exit_codes.PREEMPTED
            print(f"{job.name}: started; its output goes to {log.name}", flush=True)
            code = supervisor.run()
        with self._recording:
            _record_run(job)
        end = supervisor.cause or f"ended with exit code {code}"
        print(f"{job.name}: {end}", flush=True)
        return code


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
    supervisor = Supervisor(options)
    with local.forwarding_signals(supervisor.signal):
        ends = supervisor.run(todo)
    _print_table(all_jobs[0].workdir.parent, todo, ends)
    for code in ends:
        if code:
            return code
    if failed:
        return exit_codes.NONFINITE
    return exit_codes.DONE


def _print_table(
    directory: pathlib.Path, jobs: Sequence[engine.Job], codes: Sequence[int]
) -> None:
    """Prints the table of a sweep, with the exit codes of the jobs that have run."""
    code_of = {}
    for job, code in zip(jobs, codes, strict=True):
        code_of[job.workdir.name] = code
    all_rows = rows(directory)
    for row in all_rows:
        # After a stop, the code of a job that was never started is that of the stop.
        if code_of.get(row["run"]) and row["doing"] != _NOT_STARTED:
            row["doing"] = f"exit code {code_of[row['run']]}"
    print(f"\n{table(all_rows)}")


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
    try:
        results = jsonfile.read_if_exists(job.workdir / workdir.RESULTS)
        config = jsonfile.read_if_exists(job.workdir / "config.json")
        reached = jsonfile.read_if_exists(job.workdir / workdir.REACHED)
    except errors.UserError:
        # The run itself reports the error when it starts.
        return False
    if results is None or config is None:
        return False
    identity = config.pop(workdir.IDENTITY, {})
    # Results count only if this run wrote them, and if its newest checkpoint is of the
    # same step, unless it ended not finite.
    is_of_this_run = results.get("run") == identity.get("id")
    is_saved = reached is None or reached.get("step") == results.get("step")
    is_over = is_saved or not results.get("finite", True)
    requested = requested_config(job)
    if requested is None:
        return False
    is_requested = identity_lib.is_equal(
        config_lib.flatten(config), config_lib.flatten(requested)
    )
    return is_of_this_run and is_over and is_requested


def requested_config(job: engine.Job) -> dict[str, Any] | None:
    """Returns the config of a job as JSON values; None if it cannot be read, as for a
    program without --config.
    """
    try:
        return identity_lib.plain(_parsed_config(job))
    except Exception:
        # The job itself reports the error when it starts.
        return None


def _parsed_config(job: engine.Job) -> ml_collections.ConfigDict:
    """Returns the config that a job's flags select; raises whatever they cause."""
    arguments = list(job.arguments)
    values = flags.FlagValues()
    cli.define_config(values, arguments)
    with _without_accelerators():
        values(arguments, known_only=True)
        return cli.locked(values)


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
    runs = read_runs(directory)
    all_rows = []
    for index, point in enumerate(points):
        name = f"{index:03}"
        all_rows.append(_row(directory / name, point, runs.get(name)))
    _mark_equal(directory, all_rows)
    return all_rows


def _mark_equal(directory: pathlib.Path, all_rows: Sequence[dict[str, Any]]) -> None:
    """Marks each run that has trained the same parameters, bit for bit, as one before
    it.

    Nothing may read the keys in which their points differ.
    """
    first_with: dict[Any, str] = {}
    for row in all_rows:
        if row["doing"] != status.DONE:
            continue
        fingerprint = _last_fingerprint(directory / row["run"])
        if fingerprint is None:
            continue
        first = first_with.setdefault(fingerprint, row["run"])
        if first != row["run"]:
            row["doing"] = f"{status.DONE}; same parameters as {first}"


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
    """Returns the row of a point.

    Args:
      directory: its work directory.
      point: its overrides.
      begun: the ID of the run that the sweep began there; None if it began none.
    """
    row = {"run": directory.name}
    for key, value in point.items():
        row[f"config.{key}" if key in _COLUMNS else key] = value
    try:
        there = run_in(directory)
        results = jsonfile.read_if_exists(directory / workdir.RESULTS) or {}
        processes = status.read_if_exists(directory) or []
    except errors.UserError as e:
        # An unreadable point must not hide the rows of the others.
        return {**row, "doing": f"not known: {e}", "step": ""}
    if begun is not None and there != begun:
        # The results in the directory are of another run than the sweep started, so
        # they are not shown.
        has = "no run"
        if there:
            has = f"run {there}"
        doing = f"not known: it holds {has}, but the sweep started run {begun}"
        return {**row, "doing": doing, "step": ""}
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


def _is_point(point: Any) -> bool:
    if not isinstance(point, dict) or not point:
        return False
    return all(isinstance(key, str) for key in point)


def _text(value: Any, where: str) -> str:
    """Returns a value as a flag gives it.

    Raises:
      LaunchError: if a flag cannot give it.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple | dict):
        return _literal(value, where)
    return json.dumps(value)


def _literal(value: Any, where: str) -> str:
    """Returns a value as a literal of Python, which is how a flag gives a tuple."""
    if isinstance(value, list | tuple):
        items = [_literal(item, where) for item in value]
        if isinstance(value, list):
            return f"[{', '.join(items)}]"
        # The comma makes a tuple of one item.
        return f"({''.join(f'{item}, ' for item in items)})"
    if isinstance(value, dict):
        pairs = [f"{key!r}: {_literal(item, where)}" for key, item in value.items()]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            raise engine.LaunchError(
                f"{where}: a flag gives NaN only by itself, not within another value."
            )
        # Python has no literal of infinity, but one that is too large for a float.
        return "1e999" if value > 0 else "-1e999"
    return repr(value)
