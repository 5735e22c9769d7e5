"""The program: `python -m xshard.main --config=configs/digits.py --workdir=runs/digits`.

On a pod, one process a host: each is given its place by --coordinator_address, --num_processes and
--process_id, or JAX detects it (Slurm, Open MPI, GKE, GCE). `python -m launch` starts them.

Exit codes: 0 done; 42 stopped with the state saved (SIGTERM, --stop_after, a file STOP in the work
directory), run the same command again to go on; 130 the same by Ctrl-C; 3 ended with a loss, gradients or
parameters that are not finite, as it would again (config.on_nonfinite); 1 failed.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

import haiku as hk
import jax
from absl import flags, logging
from ml_collections import config_flags

from xshard import checkpoint, cli, errors, loop
from xshard import config as config_lib
from xshard.files import streams, workdir
from xshard.metrics import terminal
from xshard.modes import follow, profiling
from xshard.pod import handshake, notice, places, rendezvous, signals, watch
from xshard.pod import origin as origin_lib

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "The run's config file; --config.key=value changes a value.", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "The run's directory: the same one again resumes.")
_INIT_FROM = flags.DEFINE_string(
    "init_from", None,
    "A new run begins with the network of this checkpoint, DIR or DIR@STEP, or of FILE.safetensors.",
)  # fmt: skip
_RESTART = flags.DEFINE_string(
    "restart_from_scratch", "",
    "The ID of the run in --workdir, as a message names it: it is put away, and a new one begins. Does nothing once "
    "another run is there.",
)  # fmt: skip
_INIT_SELECT = flags.DEFINE_string(
    "init_select",
    checkpoint.BY_DEFAULT,
    "What it takes: a regular expression of paths; by default parameters and the network's state.",
)
_INIT_RENAME = flags.DEFINE_multi_string(
    "init_rename", [], "OLD=NEW: paths that begin with OLD there begin with NEW here; again, or with commas, for more."
)  # fmt: skip
_INIT_GROUP = flags.DEFINE_integer("init_group", 0, "Of which group, if it has several.", 0)
_SHOW_CONFIG = flags.DEFINE_bool(
    "show_config", False, "Print every key of the config, with what it means, and leave."
)
_MODE = flags.DEFINE_enum(
    "mode", "train", ["train", "eval", "profile"],
    "train; eval: judge the run's checkpoints as they come; profile: trace some steps for xprof.",
)  # fmt: skip
_PROFILE_STEPS = flags.DEFINE_string(
    "profile_steps",
    "10:13",
    "With --mode=profile, which steps after the start: FIRST:END, without END.",
)
_DEBUG = flags.DEFINE_bool("debug", False, "Show the traceback of an error.")
_QUIET = flags.DEFINE_bool(
    "quiet", False, "Print errors, what stops the run, and its results; nothing else."
)
_VERBOSE = flags.DEFINE_bool(
    "verbose", False, "Print each logged row also on a terminal, and every parameter."
)
_CPU_DEVICES = flags.DEFINE_integer(
    "cpu_devices", 0, "The virtual devices that the CPU is split into; 0: as JAX has it.", 0
)
_STOP_AFTER = flags.DEFINE_float(
    "stop_after", 0, "After so many minutes the run saves and leaves with 42; 0: never.", 0
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator_address", None, "HOST:PORT of process 0, where the processes meet."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "The number of processes.", 1)
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "This process's number, from 0.", 0)
_DEFAULTS = rendezvous.Timeouts()
_START = flags.DEFINE_integer(
    "start_timeout_seconds", _DEFAULTS.start, "How long processes wait until all have come.", 1
)
_HEARTBEAT = flags.DEFINE_integer(
    "heartbeat_timeout_seconds", _DEFAULTS.heartbeat,
    "How long a process may be silent: a shorter outage is survived, a longer one ends all.", 5,
)  # fmt: skip
_STEP = flags.DEFINE_integer(
    "step_timeout_seconds", _DEFAULTS.step,
    "How long a run may train or evaluate without coming on, as where a device stands still; then it ends with 1, and a "
    "launcher starts it again. 0: for ever.", 0,
)  # fmt: skip
_SHUTDOWN = flags.DEFINE_integer(
    "shutdown_timeout_seconds", _DEFAULTS.shutdown, "How long processes wait until all leave.", 1
)


def main(argv: Sequence[str], config: Any) -> int:
    """Runs a config as the flags say; returns the exit code."""
    if argv[1:]:
        raise errors.UserError(f"{' '.join(argv[1:])}: arguments begin with '--'.")
    if config is not None and _SHOW_CONFIG.value:
        config_lib.check(config)
        print(config_lib.describe(config))
        return notice.DONE
    if config is None or _WORKDIR.value is None:
        raise errors.UserError(
            "--config and --workdir are needed, as in --config=configs/digits.py --workdir=runs/digits."
        )
    if not _WORKDIR.value:
        raise errors.UserError("--workdir= is empty; give a directory (--workdir=. for this one).")
    if any("\ud800" <= character <= "\udfff" for character in _WORKDIR.value):
        raise errors.UserError(
            f"--workdir={_WORKDIR.value} is not UTF-8, which the paths of checkpoints must be: rename the "
            "directory; or, if it is UTF-8 and the locale is not, set PYTHONUTF8=1."
        )
    if _QUIET.value and _VERBOSE.value:
        raise errors.UserError("--quiet and --verbose exclude each other; give one of them.")
    origin_lib.set_up_cpu(config, _CPU_DEVICES.value)
    # Haiku then refuses what would leak tracers into its state.
    hk.config.set(check_jax_usage=True)
    if _MODE.value != "train" and _INIT_FROM.value is not None:
        raise errors.UserError("--init_from is for --mode=train, which begins runs.")
    if _INIT_RENAME.value and _INIT_FROM.value is None:
        raise errors.UserError("--init_rename is for --init_from, whose paths it renames.")
    timeouts = rendezvous.Timeouts(_START.value, _HEARTBEAT.value, _SHUTDOWN.value, _STEP.value)
    try:
        code = _run_on_place(config, _WORKDIR.value, timeouts)
    except places.StoppedError as e:
        print(e, file=sys.stderr, flush=True)
        return e.code
    # All is done and said. What comes now, as srun's SIGTERM does when the first process has left, would
    # only put another exit code in the place of this one.
    signals.ignore()
    jax.distributed.shutdown()
    return code


def _run_on_place(config: Any, run_directory: str, timeouts: rendezvous.Timeouts) -> int:
    """Meets the other processes, if there are any, and runs with them."""
    # What a job beside the run says of itself is not the run's.
    directory = run_directory
    if _MODE.value == "eval":
        directory = os.path.join(directory, follow.FOLDER)
    place = rendezvous.place(
        _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value, timeouts.start
    )
    # The signals are heard from here on without a gap: who has come to the others tells them.
    with signals.Heard() as heard:
        hosts, console = _join(place, timeouts, config, directory, heard)
        with watch.Watch(
            directory,
            hosts,
            stop_after_seconds=60 * _STOP_AFTER.value,
            timeouts=timeouts,
            console=console,
            heard=heard,
        ) as watching:
            return _run_watched(config, run_directory, watching, is_pod=bool(hosts))


def _run_watched(config: Any, directory: str, watching: watch.Watch, *, is_pod: bool) -> int:
    try:
        code = _run_mode(config, directory, watching)
        watching.end(notice.ENDS.get(code, "stopped"))
        return code
    except Exception as e:
        if is_pod:
            _fail_together(watching, e)
        watching.end(f"failed: {cli.summary(e).splitlines()[0]}")
        raise


def _run_mode(config: Any, directory: str, watching: watch.Watch) -> int:
    command = _command()
    show = terminal.Show.NORMAL
    if _QUIET.value:
        show = terminal.Show.QUIET
    if _VERBOSE.value:
        show = terminal.Show.VERBOSE
    if _MODE.value == "eval":
        return follow.run(config, directory, command, watching, show)
    if _MODE.value == "profile":
        return profiling.run(config, directory, _PROFILE_STEPS.value, watching, show)
    init = None
    if _INIT_FROM.value is not None:
        rename = checkpoint.renames(_INIT_RENAME.value)
        init = checkpoint.Source(_INIT_FROM.value, _INIT_SELECT.value, _INIT_GROUP.value, rename)
    return loop.run(config, directory, command, init, watching, show, _RESTART.value)


def _join(
    place: places.Place | None,
    timeouts: rendezvous.Timeouts,
    config: Any,
    directory: str,
    heard: signals.Heard,
) -> tuple[list[str], TextIO | None]:
    """Meets the other processes, if there are any.

    Returns:
      Their hosts; and the terminal, if stdout and stderr are now this process's log.
    """
    # What this process starts has no need of it.
    token = os.environ.pop(handshake.VARIABLE, "")
    if place is None:
        return [], None
    log = None
    if place.index:
        # Before the others count on this process.
        log = workdir.Workdir(directory).open_log(place.index)
    facts = origin_lib.of(config, _CPU_DEVICES.value)
    hosts = rendezvous.join(place, timeouts, facts, token, heard)
    if log is None:
        return hosts, None
    console = streams.lasting(os.fdopen(os.dup(2), "w"))
    for stream in (1, 2):
        os.dup2(log, stream)
    return hosts, console


def _fail_together(watching: watch.Watch, e: Exception) -> NoReturn:
    """Says why this process has failed, and ends the others, which would wait for it."""
    # What breaks in the middle of a computation may be the end of a peer; but not this.
    is_own = str(e).startswith(("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED"))
    if isinstance(e, jax.errors.JaxRuntimeError) and not is_own:
        print(f"{cli.summary(e)}\nwaiting to hear of the cause", file=sys.stderr, flush=True)
        watching.await_cause()
    cli.print_error(e, has_debug_flag=True)
    watching.fail(cli.summary(e))


def run() -> int:
    """Parses the flags and runs; returns the exit code."""
    logging.set_verbosity(logging.WARNING)
    return cli.run(_run, has_debug_flag=True)


def _run() -> int:
    if "--help" in sys.argv[1:]:
        print(f"{__doc__}\n{flags.FLAGS.module_help(sys.modules[__name__])}")
        return notice.DONE
    return main(cli.parse(_CONFIG), _CONFIG.value)


def _command() -> str:
    python = sys.executable
    if python.startswith(f"{os.getcwd()}/"):
        python = os.path.relpath(python)
    # A process's place is for whoever starts the pod to give.
    place = ("coordinator_address", "num_processes", "process_id")
    return shlex.join([python, "-m", "xshard.main", *cli.without_flags(sys.argv[1:], place)])


if __name__ == "__main__":
    # Before the processes meet there is nothing to save; the meeting and the watch take the signals over.
    signals.leave_at_once()
    sys.exit(run())
