r"""Starts runs, shows what they are doing, and stops them.

    python -m launch --engine=local --num_processes=4 --cpu_devices=2 -- \
        python -m xshard.main --config=configs/digits.py --workdir=runs/digits
    python -m launch status runs/digits         what each process of a run is doing
    python -m launch status RUN_A RUN_B         whether two runs are the same so far
    python -m launch list --engine=slurm        the jobs of an engine
    python -m launch logs NAME --engine=gke     the output of a job
    python -m launch kill NAME --engine=slurm   stops a job, which saves its state first

--dry_run prints the files and commands of a launch, and executes nothing.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags, logging

from launch import elastic, engine, gke, local, mpi, slurm, status, sweep, tpu_vm
from xshard import cli
from xshard.files import disk

_ENGINES: Mapping[str, type[engine.Engine]] = {
    each.name: each
    for each in (local.Local, slurm.Slurm, mpi.Mpi, tpu_vm.TpuVm, gke.Gke)
}
_VERBS = ("list", "logs", "kill")


def make_flags() -> flags.FlagValues:
    """Returns the launcher's flags, without values yet: those of every launch, and the
    options of each engine.
    """
    # Not absl's own set: `xshard.main` has flags of the same names there.
    values = flags.FlagValues()
    flags.DEFINE_enum(
        "engine", "local", list(_ENGINES), "Where to launch.", flag_values=values
    )
    flags.DEFINE_bool(
        "dry_run",
        False,
        "Print the files and commands, and execute nothing.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "name",
        None,
        "The job's name; by default the work directory's.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "num_processes", 1, "The number of processes.", 1, flag_values=values
    )
    flags.DEFINE_string(
        "elastic",
        None,
        "local, slurm: MIN:MAX, instead of --num_processes: start on up to MAX hosts; "
        "after losing hosts, go on with the remaining ones if there are at least MIN. "
        "Runs without exact sums start again for that.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "spares",
        None,
        "local, slurm, mpi: go on without processes that end, and fill their places "
        "up; keep this many more ready for that. For runs with exact sums.",
        0,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "cpu_devices",
        0,
        "The number of virtual CPU devices of each process; 0: the real devices.",
        0,
        1024,
        flag_values=values,
    )
    flags.DEFINE_string(
        "sweep",
        None,
        "local, slurm: a file with get_sweep(), which returns a list of overrides: one "
        "job for each.",
        flag_values=values,
    )
    flags.DEFINE_bool("json", False, "With 'status': print JSON.", flag_values=values)
    flags.DEFINE_bool(
        "debug", False, "Show the traceback of an error.", flag_values=values
    )
    for name, fields in _options().items():
        default: Any = next(iter(fields.values())).default
        # What a flag says to each engine; once, where several read it alike.
        readers: dict[str, list[str]] = {}
        for reader, field in fields.items():
            readers.setdefault(field.metadata["help"], []).append(reader)
        texts = []
        for text, names in readers.items():
            texts.append(f"{', '.join(names)}: {text}")
        help_text = "; ".join(texts) + "."
        if isinstance(default, tuple):
            flags.DEFINE_multi_string(name, default, help_text, flag_values=values)
        elif isinstance(default, int):
            flags.DEFINE_integer(name, default, help_text, 1, flag_values=values)
        else:
            flags.DEFINE_string(name, default, help_text, flag_values=values)
    return values


def _options() -> dict[str, dict[str, dataclasses.Field[Any]]]:
    """Returns the options of the engines: by the flag's name, its field in each engine
    that has it.
    """
    options: dict[str, dict[str, dataclasses.Field[Any]]] = {}
    for name, kind in _ENGINES.items():
        for field in dataclasses.fields(kind):
            options.setdefault(field.name, {})[name] = field
    return options


def make_engine(values: flags.FlagValues) -> engine.Engine:
    """Returns the chosen engine, with the options that the flags give; raises
    LaunchError if one of them is for other engines only.
    """
    settings = {}
    for name, fields in _options().items():
        if values.engine in fields:
            value = values[name].value
            settings[name] = tuple(value) if isinstance(value, list) else value
        elif values[name].present:
            raise engine.LaunchError(
                f"--{name} is for --engine={' and '.join(fields)}, not for "
                f"{values.engine}: leave it out."
            )
    return _ENGINES[values.engine](**settings)


def main(argv: Sequence[str]) -> int:
    """Executes the command line; returns the exit code."""
    before, command = split(argv)
    values = make_flags()
    # Allows flags after words, as in `kill NAME --engine=slurm`.
    values.set_gnu_getopt(True)
    try:
        words = values(before)[1:]
    except flags.Error as e:
        raise engine.LaunchError(cli.flag_error(e)) from e
    if command and words:
        raise engine.LaunchError(f"{' '.join(words)}: the command begins after ' -- '.")
    if words[:1] == ["status"]:
        return status.show(words[1:], values.json)
    chosen = make_engine(values)
    if words:
        return _execute(_manage(chosen, words), dry_run=values.dry_run)
    job = _job(tuple(command), chosen, values)
    jobs = [job]
    if values.sweep:
        points = sweep.read(pathlib.Path(disk.expanded(values.sweep)))
        sweep.check(job.workdir, points)
        jobs = sweep.jobs(job, points)
    if job.spares is not None:
        elastic.check_spares(jobs, chosen)
    elif job.least:
        jobs = elastic.check(jobs)
    is_lasting = all(each.spares is not None for each in jobs)
    if isinstance(chosen, local.Local) and chosen.through and not is_lasting:
        raise engine.LaunchError(
            f"--through={chosen.through} is for --spares=K, with which a run goes on "
            "without hosts that it loses: add it, or leave --through out."
        )
    plan = chosen.launch(jobs)
    if values.sweep:
        files = {**sweep.files(job.workdir, jobs), **plan.files}
        plan = dataclasses.replace(plan, files=files)
    # On this machine the launcher supervises the processes itself instead of running
    # the plan.
    if not isinstance(chosen, local.Local) or values.dry_run:
        return _execute(plan, dry_run=values.dry_run)
    plan.write()
    if values.sweep:
        return sweep.run(jobs, chosen)
    return local.run(jobs[0], chosen)


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


def _job(
    command: tuple[str, ...], chosen: engine.Engine, values: flags.FlagValues
) -> engine.Job:
    if not command:
        raise engine.LaunchError(
            "nothing to start: give the command after ' -- ', as in python -m launch "
            "--num_processes=2 -- python -m xshard.main --config=configs/digits.py "
            "--workdir=runs/digits."
        )
    job = engine.Job("run", command, values.num_processes, values.cpu_devices)
    if values.elastic is not None:
        least, most = elastic.parse(values.elastic)
        elastic.check_engine(chosen)
        if values["num_processes"].present:
            raise engine.LaunchError(
                f"--elastic={values.elastic} and "
                f"--num_processes={values.num_processes} both say how many processes "
                "there are: leave one of them out."
            )
        job = dataclasses.replace(job, processes=most, least=least)
    if values.spares is not None:
        job = dataclasses.replace(job, spares=values.spares)
    if values.name is not None:
        return dataclasses.replace(job, name=engine.check_name(values.name))
    name = engine.derived_name(job.workdir)
    if name != job.workdir.name and chosen.name != "local":
        print(f"launch: the job's name is {name}", file=sys.stderr, flush=True)
    return dataclasses.replace(job, name=name)


def _execute(plan: engine.Plan, *, dry_run: bool) -> int:
    if dry_run:
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
        print(f"{__doc__}\n{make_flags().module_help(sys.modules[__name__])}")
        return 0
    return main(sys.argv)


if __name__ == "__main__":
    sys.exit(run())
