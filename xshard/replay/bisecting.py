"""The first step at which two runs part, by the fingerprints in their rows, and what differs between the runs."""

import pathlib
from typing import Any, NamedTuple

from xshard import config as config_lib
from xshard import errors
from xshard.files import jsonfile, workdir
from xshard.metrics import show, writers
from xshard.stored import fingerprint

# Of rows that are a stretch of steps apart, so many values that differ are named.
_NAMES = 8


class Parting(NamedTuple):
    """The place where two runs part.

    Attributes:
      alike: the last logged step before which nothing differs; 0: there is none.
      step: the first logged step of which something differs; None: nothing does.
      states: the arrays, such as 'params', that differ in the state that `step` began with; empty if they are alike, or
        if the rows have no fingerprints.
      values: the logged values of `step` that differ.
      by_fingerprints: whether the rows have fingerprints.
    """

    alike: int
    step: int | None
    states: list[str]
    values: list[str]
    by_fingerprints: bool


class Run(NamedTuple):
    """The rows of a run, and what it says of itself.

    Attributes:
      directory: its work directory.
      rows: its rows of training by step, without what differs between runs of the same bits.
      facts: its config and its origin by name.
    """

    directory: pathlib.Path
    rows: dict[int, dict[str, Any]]
    facts: dict[str, Any]


def read(directory: str) -> Run:
    """Reads a run; nothing is written.

    Raises:
      UserError: if there is none, or if it has logged nothing.
    """
    there = workdir.Workdir(directory)
    config = jsonfile.read_if_exists(there.config)
    if config is None:
        raise errors.UserError(
            f"{directory} holds no {there.config.name}: give the work directory of a run."
        )
    rows = writers.of_training(there.metrics)
    if not rows:
        raise errors.UserError(f"{there.metrics} has no rows of training, to be compared.")
    config.pop(workdir.IDENTITY, None)
    origin = jsonfile.read_if_exists(there.origin) or {}
    facts = {f"config.{name}": x for name, x in config_lib.flatten(config).items()}
    return Run(there.path, rows, facts | {f"origin.{name}": x for name, x in origin.items()})


def parting(first: Run, second: Run) -> Parting:
    """The step at which two runs part, among the steps that both have logged.

    Raises:
      UserError: if there are none.
    """
    steps = sorted(first.rows.keys() & second.rows.keys())
    if not steps:
        logged = [f"{min(run.rows)} to {max(run.rows)}" for run in (first, second)]
        raise errors.UserError(
            f"{first.directory} and {second.directory} have logged no step in common ({logged[0]}; {logged[1]}): compare "
            "runs of one log_every_steps, or of which one's divides the other's."
        )
    alike, by_fingerprints = 0, False
    for step in steps:
        here, there = first.rows[step], second.rows[step]
        differing = [name for name in here if name in there and here[name] != there[name]]
        prefix = fingerprint.PREFIX
        by_fingerprints |= any(name.startswith(prefix) and name in there for name in here)
        states = [
            text
            for name in differing
            if name.startswith(prefix)
            for text in _of_groups(name.removeprefix(prefix), here[name], there[name])
        ]
        values = [name for name in differing if not name.startswith(prefix)]
        if differing:
            return Parting(alike, step, states, values, by_fingerprints)
        alike = step
    return Parting(alike, None, [], [], by_fingerprints)


def differences(first: Run, second: Run) -> list[dict[str, Any]]:
    """A row for each fact in which two runs differ."""
    rows = []
    for name in sorted(first.facts.keys() | second.facts.keys()):
        here, there = (run.facts.get(name, "unknown") for run in (first, second))
        if here != there:
            rows.append({"what": name, "A": str(here), "B": str(there)})
    return rows


def report(first: Run, second: Run) -> tuple[str, bool]:
    """Says for people where two runs part, and in what they differ; and whether they are alike."""
    found = parting(first, second)
    lines = [described(found)]
    rows = differences(first, second)
    if rows:
        lines += ["", "What differs between the runs:", show.table(rows)]
    else:
        lines += ["", "Their configs and origins are the same."]
    return "\n".join(lines), found.step is None


def described(found: Parting) -> str:
    """Says for people, in one line, where two runs part, or that they do not."""
    if found.step is None:
        what = "fingerprints and values" if found.by_fingerprints else "logged values"
        return f"The runs are alike: the {what} of all steps that both have logged, to step {found.alike}."
    until = f"alike to the row of step {found.alike}" if found.alike else "not alike in any row"
    if not found.by_fingerprints:
        return (
            f"The runs part at step {found.step} at the latest ({until}), in {_listed(found.values)}; their rows "
            "have no fingerprints (fingerprint_every_steps), so that it may have been before."
        )
    if not found.states:
        return (
            f"The runs part in step {found.step} ({until}): it began with the same state, and made other values of "
            f"{_listed(found.values)}. So its batch, its keys, its program or the devices differ."
        )
    if found.step == 1:
        return f"The runs part before step 1: their first states differ in {_listed(found.states)}."
    begin = found.alike or 1
    where = (
        f"in step {begin}" if begin == found.step - 1 else f"in steps {begin} to {found.step - 1}"
    )
    return (
        f"The runs part {where} ({until}): the state that step {found.step} begins with differs in "
        f"{_listed(found.states)}. A smaller log_every_steps tells it more exactly."
    )


def _of_groups(name: str, here: Any, there: Any) -> list[str]:
    """A name of what differs; of several groups one for each that does."""
    if not (isinstance(here, list) and isinstance(there, list) and len(here) == len(there)):
        return [name]
    pairs = enumerate(zip(here, there, strict=True))
    return [f"{name} of group {group}" for group, (x, y) in pairs if x != y]


def _listed(names: list[str]) -> str:
    more = [f"{len(names) - _NAMES} more"] if len(names) > _NAMES else []
    return ", ".join([*names[:_NAMES], *more])
