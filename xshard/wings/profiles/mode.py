"""Profiles chosen steps of a run, for xprof and Perfetto: `--mode=profile`.

`xshard.wings.profiles.tracer` does the same in a run that trains.
"""

from collections.abc import Sequence

import jax
import ml_collections

from xshard import errors, hooks, loop
from xshard.metrics import terminal
from xshard.pod import exit_codes, request
from xshard.pod import watchdog as watchdog_lib
from xshard.wings.profiles import tracer as tracer_lib


def run(
    config: ml_collections.ConfigDict,
    directory: str,
    steps: str,
    watch: watchdog_lib.Watchdog | None,
    show: terminal.Show = terminal.Show.NORMAL,
    wings: Sequence[type[hooks.Wing]] = (),
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
      wings: what the run has beside its core.

    Returns:
      The exit code.

    Raises:
      UserError: if `steps` is not a valid range, or something does not fit.
    """
    first, end = _range(steps)
    current = loop.Run(config, directory, watch=watch, show=show, wings=wings)
    tracer = tracer_lib.Tracer(current)
    state = current.resume_or_init().state
    start = int(state.step)
    current.terminal.say(f"steps {start + first + 1} to {start + end} will be traced")
    wanted = request.Request(request.PROFILE, "--profile_steps", steps=end - first)
    tracer.receive(start + first + 1, wanted)
    values = None
    try:
        for step in range(start + 1, start + end + 1):
            tracer.before_step(step, (state, values))
            chunk = current.dispatch_step(step, state)
            tracer.fetch(chunk)
            state, values, *_ = chunk.stepped
            # Keeps few steps in flight, as the training loop does, so that the trace
            # resembles a run.
            if (step - start) % 2 == 0:
                jax.block_until_ready(values)
            if watch is not None:
                asked = watch.poll()
                if asked is not None and asked.kind == request.STOP:
                    print(f"{asked.why}: stopped")
                    return asked.code
        tracer.end((state, values))
    except tracer_lib.ProfileError as e:
        raise errors.UserError(str(e)) from e
    finally:
        tracer.close()
    return exit_codes.DONE


def _range(steps: str) -> tuple[int, int]:
    """Parses FIRST:END."""
    first, colon, last = steps.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise errors.UserError(
            f"--profile_steps={steps} must be FIRST:END with FIRST below END: 10:13 "
            "traces steps 10, 11 and 12."
        )
    return int(first), int(last)
