"""The end of a run: its results, and the lines that it prints last."""

import contextlib
import copy
import sys
from collections.abc import Mapping
from typing import Any

import jax
import ml_collections
import numpy as np

from xshard import config as config_lib
from xshard import mesh as mesh_lib
from xshard.base import flag_words, formatting, places
from xshard.files import identity as identity_lib
from xshard.files import results as results_lib
from xshard.files import workdir
from xshard.metrics import overview, rows, writer
from xshard.pod import exit_codes
from xshard.pod import request as request_lib
from xshard.run import nonfinite
from xshard.training import state as state_lib


def results(
    mesh: jax.sharding.Mesh,
    step: int,
    state: state_lib.TrainState,
    metrics: Any,
    end: str,
) -> dict[str, Any]:
    """Returns the results of a run, with the samples still empty.

    All processes call it.

    Args:
      mesh: the run's mesh.
      step: the number of steps made.
      state: the state after the last of these steps.
      metrics: the metrics of the state's evaluation.
      end: the reason that a callback gave for ending the run; empty if no callback
        ended it.

    Returns:
      The content of results.json, but for 'finite', 'why' and the run's ID.
    """
    # The counts of other groups may be on other processes, so they are gathered.
    counts = {name: x.global_step for name, x in state_lib.learners(state).items()}
    numbers = jax.tree.map(rows.to_number, mesh_lib.replicate(mesh, counts))
    content = {
        "step": step,
        # The only learner of an experiment has no name.
        "global_step": numbers.get("", numbers),
        "eval": metrics,
        "samples": "",
    }
    if end:
        content["ended"] = end
    return content


def nonfinite_metrics(step: int, metrics: Mapping[str, Any]) -> str:
    """Describes the metrics of an evaluation that are not finite, in any group.

    The description is empty if all are.
    """
    names = [name for name, value in metrics.items() if not np.all(np.isfinite(value))]
    if not names:
        return ""
    return f"step {step}: the evaluation is not finite: {formatting.listed(names)}"


def announce(
    values: Mapping[str, Any],
    directory: workdir.Workdir,
    store: Any,
    config: ml_collections.ConfigDict,
    command: str,
) -> int:
    """Prints the results of a run, and the command that trains further.

    Args:
      values: the content of results.json.
      directory: the run's work directory.
      store: where its checkpoints are.
      config: the run's config.
      command: the command line that resumes the run.

    Returns:
      The exit code: 0, or 3 if the run did not end finite.
    """
    print(overview.results(values))
    print(f"  in {directory.results}; metrics of the run in {directory.metrics}")
    print(f"checkpoints: {store}")
    if not values["finite"]:
        print(nonfinite.message(values["why"]), file=sys.stderr, flush=True)
        return exit_codes.NONFINITE
    # A callback that ended this run would end the resumed one too, so no command is
    # printed.
    if "ended" not in values:
        steps = 2 * max(config.steps, values["step"])
        print(f"to train further{each_process()}: {_further(config, steps, command)}")
    return exit_codes.DONE


def _further(config: ml_collections.ConfigDict, steps: int, command: str) -> str:
    """Returns the command that trains a run to more steps.

    What the config file computes from the steps keeps the value that the run began
    with.
    """
    # A function's copy would be another one, which config.json could not hold.
    values = config_lib.flatten(config.to_dict()).values()
    longer = copy.deepcopy(config, {id(value): value for value in values}).unlock()
    before = config_lib.flatten(identity_lib.plain(longer))
    longer.steps = steps
    after = config_lib.flatten(identity_lib.plain(longer))
    command = flag_words.with_flag(command, "config.steps", steps)
    kept = {}
    for key, value in before.items():
        if value != after[key] and not config_lib.may_change(key):
            kept[key] = value
            command = flag_words.with_flag(command, f"config.{key}", value)
    with contextlib.suppress(TypeError):
        longer.update_from_flattened_dict(kept)
    after = config_lib.flatten(identity_lib.plain(longer))
    if not kept.items() <= after.items() or longer.steps != steps:
        return (
            f"give {', '.join(kept)} in the config file values that do not refer to "
            "steps"
        )
    return flag_words.shown(command)


def stopped(stop: request_lib.Request, step: int, store: Any, command: str) -> int:
    """Prints why and at which step a run stopped, and the command that resumes it.

    Returns:
      The exit code.
    """
    print(f"{stop.why}: stopped at step {step}, state saved in {store}")
    print(f"to resume{each_process()}: {flag_words.shown(command)}")
    return stop.code


def outcome(
    stop: request_lib.Request | None, values: Mapping[str, Any] | None = None
) -> writer.Outcome:
    """Returns the outcome of a run that no exception ended.

    Args:
      stop: the request that stopped it, or None.
      values: the content of results.json; None if there is none.
    """
    if stop is not None:
        kind = writer.STOPPED
        if stop.code == exit_codes.INTERRUPTED:
            kind = writer.INTERRUPTED
        return writer.Outcome(kind, stop.why, stop.code)
    if values is None:
        return writer.Outcome(writer.DONE, code=exit_codes.DONE)
    if not values["finite"]:
        return nonfinite_outcome(values["why"], values)
    ended = values.get("ended", "")
    return writer.Outcome(writer.DONE, ended, exit_codes.DONE, values)


def nonfinite_outcome(
    why: str, values: Mapping[str, Any] | None = None
) -> writer.Outcome:
    """Returns the outcome of a run that ends with values that are not finite."""
    code = exit_codes.NONFINITE
    return writer.Outcome(writer.NOT_FINITE, why, code, values or {})


def fail(
    step: int, why: str, kept: str, directory: workdir.Workdir, *, writes: bool
) -> None:
    """Reports that a run ended at a step that was not finite.

    It does so on stderr and in results.json.

    Args:
      step: the step; later ones may have been dispatched.
      why: a description of what was not finite.
      kept: a sentence that names the newest finite checkpoint.
      directory: the run's work directory.
      writes: whether this process writes the results there.
    """
    content = {"step": step, "eval": {}, "samples": "", "finite": False, "why": why}
    if writes:
        results_lib.write(directory, content)
    print(f"{nonfinite.message(why)} {kept}", file=sys.stderr, flush=True)


def each_process() -> str:
    """Returns the words that say that every process must run a command, if several."""
    count = places.own().count
    if count == 1:
        return ""
    return f", in each of the {count} processes"
