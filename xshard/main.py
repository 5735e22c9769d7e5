"""The program: `python -m xshard.main --config=configs/digits.py --workdir=DIR`.

On a pod, run one process per host. Each process gets its place from
--coordinator_address, --num_processes and --process_id, or JAX detects it (Slurm, Open
MPI, GKE, GCE). `python -m launch` starts all processes.

Exit codes:
  0    done
  42   stopped by SIGTERM, --stop_after or a file STOP in the work directory; the state
       is saved: run the same command again to resume
  130  the same, stopped by Ctrl-C
  3    ended because a loss, gradients or parameters are not finite
       (config.on_nonfinite); a rerun would end the same
  1    failed
"""

import gc
import math
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

from xshard.pod import signals

if __name__ == "__main__":
    # Before the processes join there is nothing to save, and `signals.SignalReceiver`
    # takes the signals over after that. A scheduler may stop the run already during the
    # imports below, which take a second or more.
    signals.exit_on_signal()

import haiku as hk
import jax
from absl import flags, logging

from xshard import checkpoint, cli, errors, hooks, logical, loop
from xshard import config as config_lib
from xshard.base import flag_words, user_code
from xshard.checkpoint import conversion
from xshard.files import disk, standard_streams, workdir
from xshard.metrics import terminal
from xshard.modes import continuous_eval
from xshard.pod import exchange as exchange_lib
from xshard.pod import (
    exchanging,
    exit_codes,
    exits,
    rendezvous,
    startup,
    status,
    watchdog,
)
from xshard.pod import members as members_lib
from xshard.pod import origin as origin_lib
from xshard.wings import installed

# How long to wait before another look for a run.
_LOOK_SECONDS = 0.2
_CONFIG = cli.define_config()
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "The work directory. An existing run resumes."
)
_INIT_FROM = flags.DEFINE_string(
    "init_from",
    None,
    "Initialize a new run with the network of a checkpoint (DIR or DIR@STEP) or of "
    "FILE.safetensors.",
)
_RESTART = flags.DEFINE_string(
    "restart_from_scratch",
    "",
    "The ID of the run in --workdir, as printed in the message that refuses to resume "
    "it. That run is moved aside and a new one begins. The flag has no effect if "
    "--workdir holds a run with another ID.",
)
_INIT_SELECT = flags.DEFINE_string(
    "init_select",
    checkpoint.BY_DEFAULT,
    "With --init_from: a regular expression of the paths to load. Default: parameters "
    "and network state.",
)
_INIT_RENAME = flags.DEFINE_multi_string(
    "init_rename",
    [],
    "OLD=NEW: a path that begins with OLD in the --init_from source begins with NEW in "
    "this run. Repeat the flag or separate pairs with commas.",
)
_INIT_CONVERT = flags.DEFINE_string(
    "init_convert",
    "",
    "With --init_from=FILE.safetensors, or FILE.safetensors.index.json: the dotted "
    "path of the checkpoint.Conversion of another program's arrays. See "
    "docs/trained_models.md.",
)
_INIT_GROUP = flags.DEFINE_integer(
    "init_group",
    0,
    "With --init_from: the group to load, if the source has several.",
    0,
)
_SHOW_CONFIG = flags.DEFINE_bool(
    "show_config",
    False,
    "Print every key of the config with its value and description, and exit.",
)
_MODE = flags.DEFINE_enum(
    "mode",
    "train",
    ["train", "eval", "profile"],
    "train; eval: evaluate the run's checkpoints as they are written; profile: trace "
    "some steps for xprof.",
)
_PROFILE_STEPS = flags.DEFINE_string(
    "profile_steps",
    "10:13",
    "With --mode=profile: the steps to trace, counted from the start. FIRST:END, END "
    "excluded.",
)
_DEBUG = flags.DEFINE_bool("debug", False, "Print the traceback of an error.")
_QUIET = flags.DEFINE_bool(
    "quiet", False, "Print only errors, the reason for a stop, and the results."
)
_VERBOSE = flags.DEFINE_bool(
    "verbose", False, "Print every logged row, on a terminal too, and every parameter."
)
_CPU_DEVICES = flags.DEFINE_integer(
    "cpu_devices",
    0,
    "The number of virtual devices to split the CPU into; 0: JAX's default.",
    0,
    1024,
)
_STOP_AFTER = flags.DEFINE_float(
    "stop_after", 0, "Save and exit with 42 after this many minutes; 0: never.", 0
)
# NaN is within all bounds.
flags.register_validator(
    "stop_after", math.isfinite, "it must be a finite number of minutes"
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator_address", None, "HOST:PORT of process 0, where the processes connect."
)
_NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "The number of processes.", 1
)
_PROCESS_ID = flags.DEFINE_integer(
    "process_id", None, "This process's number, from 0.", 0
)
_MEETING = flags.DEFINE_string(
    "meeting_address",
    None,
    "HOST:PORT of a launcher that gives the processes of an exact run their places, "
    "anew whenever it loses one. --process_id is then this process's number.",
)
_JOINS = flags.DEFINE_bool(
    "joins",
    False,
    "With --meeting_address: the run is under way. Wait for a place in it.",
)
_DEFAULTS = rendezvous.Timeouts()
_START = flags.DEFINE_integer(
    "start_timeout_seconds",
    _DEFAULTS.start,
    "How long to wait for all processes to connect.",
    1,
)
_HEARTBEAT = flags.DEFINE_integer(
    "heartbeat_timeout_seconds",
    _DEFAULTS.heartbeat,
    "How long a process may be silent. The run survives a shorter outage; a longer one "
    "ends all processes.",
    5,
)
_STEP = flags.DEFINE_integer(
    "step_timeout_seconds",
    _DEFAULTS.step,
    "How long a run may train or evaluate without progress, for example because a "
    "device hangs. Then it exits with 1, and a launcher restarts it. 0: forever.",
    0,
)
_SHUTDOWN = flags.DEFINE_integer(
    "shutdown_timeout_seconds",
    _DEFAULTS.shutdown,
    "How long to wait for all processes to exit.",
    1,
)


def main(argv: Sequence[str], config: Any) -> int:
    """Runs a config in the mode that the flags select; returns the exit code."""
    if argv[1:]:
        raise errors.UserError(f"{' '.join(argv[1:])}: arguments begin with '--'.")
    if config is not None and _SHOW_CONFIG.value:
        config_lib.check(config)
        print(config_lib.describe(config))
        return exit_codes.DONE
    if config is None or _WORKDIR.value is None:
        raise errors.UserError(
            "--config and --workdir are needed, as in --config=configs/digits.py "
            "--workdir=runs/digits."
        )
    if not _WORKDIR.value:
        raise errors.UserError(
            "--workdir= is empty; give a directory (--workdir=. for this one)."
        )
    directory = disk.expanded(_WORKDIR.value)
    # A name that checkpoints cannot have is refused before anything is written.
    checkpoint.Store(os.path.abspath(directory))
    if _QUIET.value and _VERBOSE.value:
        raise errors.UserError(
            "--quiet and --verbose exclude each other; give one of them."
        )
    origin_lib.set_up_backends(config, _CPU_DEVICES.value)
    # Haiku then rejects JAX transformations that would leak tracers into its state.
    hk.config.set(check_jax_usage=True)
    if _MODE.value != "train" and _INIT_FROM.value is not None:
        raise errors.UserError("--init_from is for --mode=train, which begins runs.")
    if _INIT_RENAME.value and _INIT_FROM.value is None:
        raise errors.UserError(
            "--init_rename is for --init_from, whose paths it renames."
        )
    if _INIT_CONVERT.value and _INIT_FROM.value is None:
        raise errors.UserError(
            "--init_convert is for --init_from, whose arrays it converts."
        )
    timeouts = rendezvous.Timeouts(
        start=_START.value,
        heartbeat=_HEARTBEAT.value,
        shutdown=_SHUTDOWN.value,
        step=_STEP.value,
    )
    try:
        code = _run_process(config, directory, timeouts)
    except rendezvous.StoppedError as e:
        signals.ignore()
        print(e, file=sys.stderr, flush=True)
        return e.code
    # The run is complete. A signal that arrives now, such as srun's SIGTERM after the
    # first process has exited, would only replace the exit code.
    signals.ignore()
    jax.distributed.shutdown()
    return code


def _run_process(config: Any, run_directory: str, timeouts: rendezvous.Timeouts) -> int:
    """Joins the other processes, if there are any, and runs with them.

    Returns:
      The exit code.
    """
    # The status of an evaluation job must not mix with that of the run.
    directory = run_directory
    if _MODE.value == "eval":
        directory = os.path.join(directory, continuous_eval.FOLDER)
    if _MEETING.value is not None:
        return _run_member(config, run_directory, timeouts)
    spec = startup.resolve_process(
        _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value, timeouts.start
    )
    # Signals are handled from here on without a gap. A process that has joined passes a
    # signal on to the others.
    with signals.SignalReceiver() as signal_receiver:
        hosts, console = _join(spec, timeouts, config, directory, signal_receiver)
        with watchdog.Watchdog(
            directory,
            hosts,
            stop_after_seconds=60 * _STOP_AFTER.value,
            timeouts=timeouts,
            console=console,
            signal_receiver=signal_receiver,
        ) as watch:
            try:
                code = _run_mode(config, run_directory, watch)
                watch.end(status.last_phase(code, watch.stop_reason))
                return code
            except Exception as e:
                if hosts:
                    _fail_together(watch, e)
                watch.end(f"failed: {cli.summary(e).splitlines()[0]}")
                raise


def _run_member(config: Any, directory: str, timeouts: rendezvous.Timeouts) -> int:
    """Runs as a member of a run that goes on without those it loses.

    Returns:
      The exit code.
    """
    address, number = _place_of_member(config)
    # Child processes must not inherit the token.
    token = os.environ.pop(rendezvous.TOKEN_VARIABLE, "")
    with (
        exits.ended_within(timeouts.shutdown),
        signals.SignalReceiver() as signal_receiver,
    ):

        def stop_on_signal() -> None:
            for told in signal_receiver.read():
                who = f"process {number} on {socket.gethostname()}"
                raise rendezvous.stopped(who, told)

        exchange = exchange_lib.Exchange(
            address,
            number,
            token,
            origin_lib.must_match_bits(config, _CPU_DEVICES.value),
            start_seconds=timeouts.start,
            heartbeat_seconds=timeouts.heartbeat,
            look=stop_on_signal,
        )
        if not _JOINS.value:
            exchange.enter(look=stop_on_signal)
        members = exchanging.Exchanging(number, exchange, is_outside=_JOINS.value)
        log = workdir.Workdir(directory).open_log(number)
        streams = standard_streams.SetAside(log)
        with (
            members.while_leading(streams.shown),
            watchdog.Watchdog(
                directory,
                stop_after_seconds=60 * _STOP_AFTER.value,
                timeouts=timeouts,
                signal_receiver=signal_receiver,
                members=members,
            ) as watch,
        ):
            try:
                if _JOINS.value:
                    _await_run(directory, timeouts.start)
                code = _run_mode(config, directory, watch, members)
                watch.end(status.last_phase(code, watch.stop_reason))
            except Exception as e:
                watch.end(f"failed: {cli.summary(e).splitlines()[0]}")
                raise
        members.close()
        return code


def _await_run(directory: str, seconds: float) -> None:
    """Waits until a directory has the run that this process is to join.

    Raises:
      UserError: if it has none in time.
    """
    deadline = time.monotonic() + seconds
    while not workdir.Workdir(directory).run_id():
        if time.monotonic() > deadline:
            raise errors.UserError(
                f"--joins: there is no run in {directory} after {seconds:g} s. Is the "
                "same disk mounted on all hosts?"
            )
        time.sleep(_LOOK_SECONDS)


def _place_of_member(config: Any) -> tuple[str, int]:
    """Returns the address and the number of a member; raises UserError if the flags or
    the config do not fit.
    """
    if not logical.is_exact(config):
        raise errors.UserError(
            "--meeting_address is for runs whose bits do not depend on the number of "
            "processes: set logical_replicas and reduction.arithmetic='exact'."
        )
    address = _MEETING.value
    number = _PROCESS_ID.value
    if not address or number is None or _COORDINATOR.value or _NUM_PROCESSES.value:
        raise errors.UserError(
            "--meeting_address needs --process_id, and takes the place of "
            "--coordinator_address and --num_processes."
        )
    if _MODE.value != "train":
        raise errors.UserError(
            f"--meeting_address is for --mode=train, not {_MODE.value}: start one "
            "process for that."
        )
    return address, number


def _run_mode(
    config: Any,
    directory: str,
    watch: watchdog.Watchdog,
    members: members_lib.Members | None = None,
) -> int:
    """Trains, evaluates or profiles; returns the exit code."""
    command = _command()
    show = terminal.Show.NORMAL
    if _QUIET.value:
        show = terminal.Show.QUIET
    if _VERBOSE.value:
        show = terminal.Show.VERBOSE
    if _MODE.value == "eval":
        return continuous_eval.run(
            config,
            directory,
            command,
            watch=watch,
            show=show,
            wings=installed.WINGS,
        )
    if _MODE.value == "profile":
        profile = _profile_mode(installed.WINGS)
        return profile(
            config,
            directory,
            steps=_PROFILE_STEPS.value,
            watch=watch,
            show=show,
            wings=installed.WINGS,
        )
    init = None
    if _INIT_FROM.value is not None:
        init = checkpoint.Source(
            place=_INIT_FROM.value,
            select=_INIT_SELECT.value,
            group=_INIT_GROUP.value,
            rename=checkpoint.renames(_INIT_RENAME.value),
            convert=conversion.load(_INIT_CONVERT.value, "--init_convert"),
        )
    return loop.run(
        config,
        directory,
        command,
        init=init,
        watch=watch,
        show=show,
        set_aside=_RESTART.value,
        wings=installed.WINGS,
        members=members,
    )


def _profile_mode(wings: Sequence[type[hooks.Wing]]) -> Callable[..., int]:
    """Returns the mode that profiles; raises UserError if no wing brings it."""
    for wing in wings:
        if "profile" in wing.modes:
            return wing.modes["profile"]
    raise config_lib.lacks_wing("--mode=profile", "profiles")


def _join(
    spec: rendezvous.ProcessSpec | None,
    timeouts: rendezvous.Timeouts,
    config: Any,
    directory: str,
    signal_receiver: signals.SignalReceiver,
) -> tuple[list[str], TextIO | None]:
    """Joins the other processes, if there are any.

    Returns:
      The hosts of all processes, empty for a single process; and a stream to the
      terminal if stdout and stderr now go to this process's log file, else None.
    """
    # Child processes must not inherit the token.
    token = os.environ.pop(rendezvous.TOKEN_VARIABLE, "")
    if spec is None:
        return [], None
    log = None
    if spec.process_id:
        # A log that cannot be opened must fail before the other processes depend on
        # this one.
        log = workdir.Workdir(directory).open_log(spec.process_id)
    facts = origin_lib.must_match(config, _CPU_DEVICES.value)
    hosts = startup.join(spec, timeouts, facts, token, signal_receiver)
    if log is None:
        return hosts, None
    # The terminal stays reachable for errors, under another descriptor.
    console = standard_streams.tolerant(os.fdopen(os.dup(2), "w"))
    for stream in (1, 2):
        os.dup2(log, stream)
    return hosts, console


def _fail_together(watch: watchdog.Watchdog, e: Exception) -> NoReturn:
    """Reports why this process has failed, and ends the others.

    They would wait for it.
    """
    # Most runtime errors in the middle of a computation may be caused by a peer that
    # died. These three never are.
    is_local = str(e).startswith(
        ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")
    )
    if isinstance(e, jax.errors.JaxRuntimeError) and not is_local:
        print(
            f"{cli.summary(e)}\nwaiting for another process to report the cause",
            file=sys.stderr,
            flush=True,
        )
        watch.await_cause()
    cli.print_error(e, has_debug_flag=True)
    watch.fail(cli.summary(e))


def run() -> int:
    """Parses the flags and runs; returns the exit code."""
    logging.set_verbosity(logging.WARNING)
    return cli.run(_run, has_debug_flag=True)


def _run() -> int:
    if "--help" in sys.argv[1:]:
        print(f"{__doc__}\n{flags.FLAGS.module_help(sys.modules[__name__])}")
        return exit_codes.DONE
    return main(cli.parse(), _CONFIG.value)


def _command() -> str:
    """Returns the command that resumes the run, to print."""
    # Python does not know its own path if a program has started it under another name.
    python = user_code.display_path(sys.executable or "python")
    # The launcher or scheduler sets the place of each process anew.
    place = (
        "coordinator_address",
        "num_processes",
        "process_id",
        "meeting_address",
        "joins",
    )
    arguments = flag_words.without_flags(sys.argv[1:], place)
    return shlex.join([python, "-m", "xshard.main", *arguments])


if __name__ == "__main__":
    # What has been imported stays, so the garbage collector need not search it while
    # programs are traced.
    gc.freeze()
    sys.exit(run())
