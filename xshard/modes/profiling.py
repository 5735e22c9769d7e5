"""Profiles chosen steps of a run, for xprof and Perfetto: `--mode=profile`."""

import pathlib

import jax
import ml_collections

from xshard import errors, loop
from xshard.metrics import terminal
from xshard.pod import exit_codes, request
from xshard.pod import watchdog as watchdog_lib

FOLDER = "profile"


def run(
    config: ml_collections.ConfigDict,
    directory: str,
    steps: str,
    watch: watchdog_lib.Watchdog | None,
    show: terminal.Show = terminal.Show.NORMAL,
) -> int:
    """Profiles some steps from the newest checkpoint, or from a new state.

    It writes only the trace.

    Args:
      config: the run's config.
      directory: the run's work directory, in which the folder `profile` is created.
      steps: the profiled steps as FIRST:END, counted from the start, without END; for
        example '10:13'. Step 0 compiles.
      watch: the watch that may stop the job; None if nothing does.
      show: how much the job prints.

    Returns:
      The exit code.

    Raises:
      UserError: if `steps` is not a valid range, or something does not fit.
    """
    first, end = _range(steps)
    current = loop.Run(config, directory, watch=watch, show=show)
    traces = current.workdir.path / FOLDER
    if jax.process_count() > 1:
        # JAX names a trace's files after the host, which several processes may share.
        traces /= f"process_{jax.process_index()}"
    state = current.resume_or_init().state
    start = int(state.step)
    current.terminal.say(
        f"steps {start + first + 1} to {start + end} will be traced into {traces}"
    )
    values = None
    for number in range(end):
        if number == first:
            # Waits for the earlier steps, so that the trace contains only the chosen
            # ones.
            jax.block_until_ready((state, values))
            jax.profiler.start_trace(str(traces))
        with jax.profiler.StepTraceAnnotation("train", step_num=start + number):
            batch = current.batches.batch_for_step(
                start + number + 1, current.predict, state
            )
            state, values, *_ = current.train_step(state, batch)
        # Keeps few steps in flight, as the training loop does, so that the trace
        # resembles a run.
        if number % 2:
            jax.block_until_ready(values)
        if watch is not None:
            asked = watch.poll()
            if asked is not None and asked.kind == request.STOP:
                print(f"{asked.why}: stopped; no trace was written")
                return asked.code
    jax.block_until_ready((state, values))
    jax.profiler.stop_trace()
    _check_written(traces)
    print(f"to view it: xprof --logdir {traces} (pip install xprof)")
    return exit_codes.DONE


def _check_written(traces: pathlib.Path) -> None:
    """Raises UserError unless there is a trace with content.

    JAX reports no error if it cannot write the trace, for example to a full disk.
    """
    found = traces.glob("plugins/profile/*/*.xplane.pb")
    if not any(path.stat().st_size for path in found):
        raise errors.UserError(
            f"JAX wrote no trace into {traces}, or an empty one. Is the disk full, or "
            "the folder not writable?"
        )


def _range(steps: str) -> tuple[int, int]:
    """Parses FIRST:END."""
    first, colon, last = steps.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise errors.UserError(
            f"--profile_steps={steps} must be FIRST:END with FIRST below END: 10:13 "
            "traces steps 10, 11 and 12."
        )
    return int(first), int(last)
