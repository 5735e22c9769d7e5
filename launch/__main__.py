r"""Starts runs, shows what they are doing, and stops them.

    python -m launch --engine=local --num_processes=4 --cpu_devices=2 -- \
        python -m xshard.main --config=configs/digits.py --workdir=runs/digits
    python -m launch status runs/digits         what each process of a run is doing
    python -m launch status RUN --slowest       which process the others wait for
    python -m launch status RUN_A RUN_B         whether two runs are the same so far
    python -m launch list --engine=slurm        the jobs of an engine
    python -m launch logs NAME --engine=gke     the output of a job
    python -m launch kill NAME --engine=slurm   stops a job, which saves its state first

--dry_run prints the files and commands of a launch, and executes nothing.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Sequence

from absl import flags, logging

from launch import elastic, engine, gke, local, mpi, slurm, status, sweep, tpu_vm
from xshard import cli

_ENGINE = flags.DEFINE_enum(
    "engine",
    "local",
    ["local", "slurm", "mpi", "tpu_vm", "gke"],
    "Where to launch.",
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Print the files and commands, and execute nothing."
)
_NAME = flags.DEFINE_string(
    "name", None, "The job's name; by default the work directory's."
)
_PROCESSES = flags.DEFINE_integer("num_processes", 1, "The number of processes.", 1)
_ELASTIC = flags.DEFINE_string(
    "elastic",
    None,
    "local, slurm: MIN:MAX, instead of --num_processes: start on up to MAX hosts; "
    "after losing hosts, start again on the remaining ones if there are at least MIN.",
)
_CPU_DEVICES = flags.DEFINE_integer(
    "cpu_devices",
    0,
    "The number of virtual CPU devices of each process; 0: the real devices.",
    0,
    1024,
)
_SWEEP = flags.DEFINE_string(
    "sweep",
    None,
    "A file with get_sweep(), which returns a list of overrides: one job for each.",
)
_PARALLEL = flags.DEFINE_integer(
    "parallel", 1, "How many jobs of a sweep run at a time.", 1
)
_JSON = flags.DEFINE_bool("json", False, "With 'status': print JSON.")
_SLOWEST = flags.DEFINE_bool(
    "slowest",
    False,
    "With 'status': print which process the others wait for, and why.",
)
_DEBUG = flags.DEFINE_bool("debug", False, "Show the traceback of an error.")

# local
_MAX_FAILURES = flags.DEFINE_integer(
    "max_failures",
    3,
    "local, gke: give up after this many failures (local: in a row, without a new "
    "step).",
    1,
)
_GRACE = flags.DEFINE_integer(
    "grace_seconds", 120, "How long a run that is told to stop may take to save.", 1
)
# slurm, mpi
_TIME = flags.DEFINE_string(
    "slurm_time", None, "slurm: the time limit, in sbatch's format."
)
_SBATCH = flags.DEFINE_multi_string(
    "sbatch", [], "slurm: an option of sbatch, such as --partition=p."
)
_MPIRUN = flags.DEFINE_multi_string(
    "mpirun", [], "mpi: an option of mpirun, as --mpirun='--hostfile hosts'."
)
# tpu_vm, gke
_ZONE = flags.DEFINE_string("zone", None, "tpu_vm: the zone; by default gcloud's own.")
_PROJECT = flags.DEFINE_string(
    "project", None, "tpu_vm: the project; by default gcloud's own."
)
_TPU = flags.DEFINE_string(
    "tpu", None, "tpu_vm: the TPU VM's name. gke: type:topology, as v5e:4x4."
)
_DIRECTORY = flags.DEFINE_string(
    "directory", "xshard", "tpu_vm: the code's folder on the hosts."
)
_IMAGE = flags.DEFINE_string(
    "image", None, "gke: the container image, with the code in it."
)
_SLICES = flags.DEFINE_integer("slices", 1, "gke: the number of slices.", 1)
_NAMESPACE = flags.DEFINE_string(
    "namespace", None, "gke: the namespace; by default kubectl's own."
)

_VERBS = ("list", "logs", "kill")


def make_engine(name: str) -> engine.Engine:
    """Returns the engine of a name, with the options that the flags give."""
    makers: dict[str, Callable[[], engine.Engine]] = {
        "local": lambda: local.Local(_MAX_FAILURES.value, _GRACE.value),
        "slurm": lambda: slurm.Slurm(
            _TIME.value, tuple(_SBATCH.value), _GRACE.value, _PARALLEL.value
        ),
        "mpi": lambda: mpi.Mpi(tuple(_MPIRUN.value)),
        "tpu_vm": lambda: tpu_vm.TpuVm(
            _TPU.value, _DIRECTORY.value, _ZONE.value, _PROJECT.value
        ),
        "gke": lambda: gke.Gke(
            _TPU.value,
            _IMAGE.value,
            _SLICES.value,
            _MAX_FAILURES.value,
            _GRACE.value,
            _NAMESPACE.value,
        ),
    }
    return makers[name]()


def main(argv: Sequence[str]) -> int:
    """Executes the command line; returns the exit code."""
    before, command = split(argv)
    # Allows flags after words, as in `kill NAME --engine=slurm`.
    flags.FLAGS.set_gnu_getopt(True)
    try:
        words = flags.FLAGS(before)[1:]
    except flags.Error as e:
        raise engine.LaunchError(cli.flag_error(e)) from e
    if command and words:
        raise engine.LaunchError(f"{' '.join(words)}: the command begins after ' -- '.")
    if words[:1] == ["status"]:
        return status.show(words[1:], _JSON.value, show_slowest=_SLOWEST.value)
    chosen = make_engine(_ENGINE.value)
    if words:
        return _execute(_manage(chosen, words))
    job = _job(tuple(command))
    points: list[sweep.Point] = []
    jobs = [job]
    if _SWEEP.value:
        points = sweep.read(pathlib.Path(_SWEEP.value))
        jobs = sweep.jobs(job, points)
    if job.least:
        elastic.check(jobs)
    # The plan comes before the claim, so that a sweep that the engine refuses claims no
    # directory.
    plan = chosen.launch(jobs)
    if points and not _DRY_RUN.value:
        sweep.claim(job.workdir, points, jobs)
    # On this machine the launcher supervises the processes itself instead of running
    # the plan.
    if not isinstance(chosen, local.Local) or _DRY_RUN.value:
        return _execute(plan)
    if points:
        return sweep.run(jobs, chosen, _PARALLEL.value)
    return local.run(job, chosen)


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the launcher's own arguments, and the command after '--'."""
    words = list(argv)
    if "--" not in words:
        return words, []
    position = words.index("--")
    return words[:position], words[position + 1 :]


def _manage(chosen: engine.Engine, words: list[str]) -> engine.Plan:
    verb, *names = words
    if verb not in _VERBS or len(names) != (verb != "list"):
        raise engine.LaunchError(
            f"{' '.join(words)}: use 'status DIR', 'list', 'logs NAME', 'kill NAME', "
            "or '-- COMMAND' to start."
        )
    if verb == "list":
        return chosen.running()
    name = engine.check_name(names[0])
    if verb == "logs":
        return chosen.logs(name)
    return chosen.kill(name)


def _job(command: tuple[str, ...]) -> engine.Job:
    if not command:
        raise engine.LaunchError(
            "nothing to start: give the command after ' -- ', as in python -m launch "
            "--num_processes=2 -- python -m xshard.main --config=configs/digits.py "
            "--workdir=runs/digits."
        )
    job = engine.Job("run", command, _PROCESSES.value, _CPU_DEVICES.value)
    if _ELASTIC.value is not None:
        hosts = elastic.parse(_ELASTIC.value)
        elastic.check_engine(_ENGINE.value)
        if flags.FLAGS["num_processes"].present:
            raise engine.LaunchError(
                f"--elastic={_ELASTIC.value} and --num_processes={_PROCESSES.value} "
                "both say how many processes there are: leave one of them out."
            )
        job = dataclasses.replace(job, processes=hosts.most, least=hosts.least)
    if _NAME.value is not None:
        return dataclasses.replace(job, name=engine.check_name(_NAME.value))
    name = engine.derived_name(job.workdir)
    if name != job.workdir.name and _ENGINE.value != "local":
        print(f"launch: the job's name is {name}", file=sys.stderr, flush=True)
    return dataclasses.replace(job, name=name)


def _execute(plan: engine.Plan) -> int:
    if _DRY_RUN.value:
        print(plan)
        return 0
    sys.stdout.flush()
    return plan.run(replace=True)


def run() -> int:
    """Runs the launcher, and prints a user's error as one message; returns the code."""
    logging.set_verbosity(logging.WARNING)
    return cli.run(_run, has_debug_flag=True)


def _run() -> int:
    if set(sys.argv[1:]) & {"--help", "-h"} and "--" not in sys.argv:
        print(f"{__doc__}\n{flags.FLAGS.module_help(sys.modules[__name__])}")
        return 0
    return main(sys.argv)


if __name__ == "__main__":
    sys.exit(run())
