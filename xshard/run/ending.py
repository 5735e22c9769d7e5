"""The end of a run that nothing has stopped: its results, and what is said of them."""

import sys
from collections.abc import Mapping
from typing import Any

import jax

from xshard import cli
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard.files import workdir
from xshard.metrics import overview, rows
from xshard.pod import notice
from xshard.run import nonfinite


def results(
    mesh: jax.sharding.Mesh, step: int, state: state_lib.TrainState, metrics: Any, end: str
) -> dict[str, Any]:
    """The results of a run, without samples yet; 'global_step' is that of each learner by name, if there are several.

    Args:
      mesh: the run's mesh.
      step: the number of steps made.
      state: the state after them.
      metrics: those of its evaluation.
      end: why a callback has ended the run; empty if none has.
    """
    counts = {name: x.global_step for name, x in state_lib.learners(state).items()}
    numbers = jax.tree.map(rows.to_number, mesh_lib.replicate(mesh, counts))
    content = {
        "step": step,
        "global_step": numbers.get("", numbers),
        "eval": metrics,
        "samples": "",
    }
    return content | ({"ended": end} if end else {})


def announce(
    values: Mapping[str, Any], directory: workdir.Workdir, store: Any, steps: int, command: str
) -> int:
    """Prints how a run has ended.

    Args:
      values: as they are in results.json.
      directory: the run's.
      store: where its checkpoints are.
      steps: the number of steps that were asked for.
      command: what the user can run to go on.

    Returns:
      The exit code: 0, or 3 if the run is not finite.
    """
    print(overview.results(values))
    print(f"  in {directory.results}; metrics of the run in {directory.metrics}")
    print(f"checkpoints: {store}")
    if not values["finite"]:
        print(nonfinite.message(values["why"]), file=sys.stderr, flush=True)
        return notice.NONFINITE
    # What a callback has ended it would end again.
    if "ended" not in values:
        more = cli.with_flag(command, "config.steps", 2 * max(steps, values["step"]))
        print(f"to train on{each_process()}: {more}")
    return notice.DONE


def stopped(stop: notice.Notice, step: int, store: Any, command: str) -> int:
    """Prints that a run was told to stop after a step, and how it goes on; the exit code."""
    print(f"{stop.why}: stopped at step {step}, state saved in {store}")
    print(f"to go on{each_process()}: {command}")
    return stop.code


def fail(step: int, why: str, kept: str, directory: workdir.Workdir) -> None:
    """Says, in the results too, that a run has ended at a step that was not finite.

    Args:
      step: the number of steps made.
      why: what was not finite.
      kept: the newest checkpoint of finite parameters, for people.
      directory: the run's; process 0 writes there.
    """
    content = {"step": step, "eval": {}, "samples": "", "finite": False, "why": why}
    if jax.process_index() == 0:
        directory.write_results(content)
    print(f"{nonfinite.message(why)} {kept}", file=sys.stderr, flush=True)


def each_process() -> str:
    """Words to be added to a command for people, where there are several processes."""
    count = jax.process_count()
    return f", by each of {count} processes" if count > 1 else ""
