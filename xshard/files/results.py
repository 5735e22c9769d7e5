"""The results of a run, in results.json: how it ended, and its final evaluation.

step         the number of steps made
global_step  the number of updates made, or a dictionary of them by learner
eval         the metrics of the final evaluation
samples      the texts that the experiment showed at the end
finite, why  whether the run ended with finite values; if not, the reason
ended        the reason that a callback gave for ending the run, if one did
run          the ID of the run
"""

import pathlib
from typing import Any

from xshard.files import jsonfile, workdir


def write(directory: workdir.Workdir, results: dict[str, Any]) -> None:
    """Writes the results of the run in a work directory, with the run's ID."""
    directory.write(directory.results, {**results, "run": directory.run_id()})


def nonfinite_reason(directory: pathlib.Path) -> str:
    """Returns why the run in a work directory ended with values that are not finite.

    Returns:
      The reason; empty if the run did not end in this way, or has not ended.

    Raises:
      UserError: if results.json is damaged.
    """
    results = _read(directory)
    if results.get("finite") is not False:
        return ""
    return str(results.get("why", "not finite"))


def callback_stop(directory: pathlib.Path) -> tuple[int, str] | None:
    """Returns the step at which a callback ended the run in a work directory.

    Returns:
      The step and the callback's reason; None if no callback ended the run.

    Raises:
      UserError: if results.json is damaged.
    """
    results = _read(directory)
    reason = results.get("ended")
    step = results.get("step")
    # Not isinstance, because a bool is an int too.
    if not reason or type(step) is not int:
        return None
    return step, str(reason)


def discard_early_end(directory: workdir.Workdir) -> None:
    """Deletes the results if they say that the run ended before its last step.

    A run calls it when it trains further. Otherwise programs that look at the directory
    would take it for a run that has failed or ended. Results of a run that made all of
    its steps stay until it writes new ones.

    Raises:
      UserError: if results.json is damaged.
    """
    path = directory.path
    if nonfinite_reason(path) or callback_stop(path) is not None:
        directory.delete(directory.results)


def _read(directory: pathlib.Path) -> dict[str, Any]:
    return jsonfile.read_if_exists(directory / workdir.RESULTS) or {}
