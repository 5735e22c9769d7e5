"""Finds the first step at which two runs differ, by the fingerprints in their rows, and
lists the runs' differences.
"""

import pathlib
from typing import Any, NamedTuple

from xshard import config as config_lib
from xshard import errors
from xshard.files import jsonfile, workdir
from xshard.metrics import formatting
from xshard.metrics import rows as rows_lib
from xshard.stored import fingerprint


class Divergence(NamedTuple):
    """The point where two runs begin to differ.

    Attributes:
      alike: the last logged step up to which nothing differs; 0 if there is none.
      step: the first logged step with a difference; None if there is none.
      states: the kinds of arrays, such as 'params', that differ in the state that
        `step` began with; empty if none differs, or if its rows have no fingerprints.
      values: the logged values of `step` that differ.
      same_state: the last step whose fingerprints show that it began with the same
        state; 0 if there is none.
    """

    alike: int
    step: int | None
    states: list[str]
    values: list[str]
    same_state: int


class Run(NamedTuple):
    """The rows of a run, and its recorded facts.

    Attributes:
      directory: its work directory.
      rows: its rows of training by step, without values that may differ between runs
        with the same bits.
      evaluations: its rows of evaluations by step, likewise.
      facts: the values of its config and its origin by name.
    """

    directory: pathlib.Path
    rows: dict[int, rows_lib.Row]
    evaluations: dict[int, rows_lib.Row]
    facts: dict[str, Any]


def read(directory: str) -> Run:
    """Reads a run; nothing is written.

    Raises:
      UserError: if there is no run, or if it has logged nothing.
    """
    there = workdir.Workdir(directory)
    config = jsonfile.read_if_exists(there.config)
    if config is None:
        raise errors.UserError(
            f"{directory} holds no {there.config.name}: give the work directory of a run."
        )
    rows, evaluations = rows_lib.by_step(there.metrics)
    if not rows:
        raise errors.UserError(
            f"{there.metrics} has no rows of training, to be compared."
        )
    # The identity differs between any two runs, so it explains nothing.
    config.pop(workdir.IDENTITY, None)
    origin = jsonfile.read_if_exists(there.origin) or {}
    facts = {f"config.{name}": x for name, x in config_lib.flatten(config).items()}
    facts |= {f"origin.{name}": x for name, x in origin.items()}
    return Run(there.path, rows, evaluations, facts)


def find_divergence(first: Run, second: Run) -> Divergence:
    """Returns where two runs begin to differ, among the steps that both have logged.

    Raises:
      UserError: if there are no such steps.
    """
    # The runs may log at different intervals.
    steps = sorted(first.rows.keys() & second.rows.keys())
    if not steps:
        logged = [f"{min(run.rows)} to {max(run.rows)}" for run in (first, second)]
        raise errors.UserError(
            f"{first.directory} and {second.directory} have logged no step in common ({logged[0]}; {logged[1]}): compare "
            "runs with the same log_every_steps, or with one that divides the other's."
        )
    alike, same_state = 0, 0
    for step in steps:
        here, there = first.rows[step], second.rows[step]
        states, values = [], []
        names = [name for name in here if name in there]
        for name in (name for name in names if here[name] != there[name]):
            if name.startswith(fingerprint.PREFIX):
                kind = name.removeprefix(fingerprint.PREFIX)
                states += _of_groups(kind, here[name], there[name])
            else:
                values.append(name)
        # Rows between those of fingerprint_every_steps have no fingerprints, and show
        # nothing about the state.
        if not states and any(name.startswith(fingerprint.PREFIX) for name in names):
            same_state = step
        if states or values:
            return Divergence(alike, step, states, values, same_state)
        alike = step
    return Divergence(alike, None, [], [], same_state)


def differences(first: Run, second: Run) -> list[dict[str, Any]]:
    """Returns a row for each fact in which two runs differ."""
    rows = []
    for name in sorted(first.facts.keys() | second.facts.keys()):
        here, there = (
            first.facts.get(name, "unknown"),
            second.facts.get(name, "unknown"),
        )
        if here != there:
            rows.append({"what": name, "A": str(here), "B": str(there)})
    return rows


def report(first: Run, second: Run) -> tuple[str, bool]:
    """Returns a text on where and in what two runs differ, and whether they are equal."""
    divergence = find_divergence(first, second)
    evaluations = "" if divergence.step else _evaluations(first, second)
    lines = [describe(divergence) + evaluations]
    rows = differences(first, second)
    if rows:
        lines += ["", "Differences between the runs:", formatting.table(rows)]
    else:
        lines += ["", "Their configs and origins are the same."]
    return "\n".join(lines), divergence.step is None and not evaluations


def _evaluations(first: Run, second: Run) -> str:
    """Describes the first evaluation that differs between runs of equal training; empty
    if none does.
    """
    for step in sorted(first.evaluations.keys() & second.evaluations.keys()):
        here, there = first.evaluations[step], second.evaluations[step]
        names = [name for name in here if name in there and here[name] != there[name]]
        if names:
            return f" But the evaluation after step {step} differs in {formatting.listed(names)}: in its data, its code or the devices."
    return ""


def describe(divergence: Divergence) -> str:
    """Describes in one line where two runs begin to differ, or that they do not."""
    step, begin = divergence.step, divergence.same_state
    if step is None:
        what = "fingerprints and values" if begin else "logged values"
        return f"The runs are equal: the {what} of all steps that both logged, up to step {divergence.alike}."
    until = (
        f"equal up to the row of step {divergence.alike}"
        if divergence.alike
        else "no row is equal"
    )
    if divergence.states and step == 1:
        return f"The runs diverge before step 1: their first states differ in {formatting.listed(divergence.states)}."
    if divergence.states:
        return (
            f"The runs diverge {_in_steps(begin, step - 1)} ({until}): the state that step {step} begins with differs in "
            f"{formatting.listed(divergence.states)}. Smaller log_every_steps and fingerprint_every_steps narrow the range."
        )
    if begin == step:
        return (
            f"The runs diverge in step {step} ({until}): it began with the same state, but computed different "
            f"values of {formatting.listed(divergence.values)}. So its batch, its keys, its program or the devices differ."
        )
    return (
        f"The runs diverge {_in_steps(begin, step)} ({until}), in {formatting.listed(divergence.values)}. The rows of step {step} have "
        "no fingerprints (fingerprint_every_steps), which would show an earlier difference."
    )


def _in_steps(first: int, last: int) -> str:
    """Names the steps from `first`, or from the beginning of the runs if it is 0, to
    `last`.
    """
    if not first:
        return f"at step {last} or earlier"
    return f"in step {last}" if first == last else f"in steps {first} to {last}"


def _of_groups(name: str, here: Any, there: Any) -> list[str]:
    """Returns the name of a difference; with several groups, one name for each group
    that differs.
    """
    if not (
        isinstance(here, list) and isinstance(there, list) and len(here) == len(there)
    ):
        return [name]
    pairs = enumerate(zip(here, there, strict=True))
    return [f"{name} of group {group}" for group, (x, y) in pairs if x != y]
