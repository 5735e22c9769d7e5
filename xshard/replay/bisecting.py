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
        states, values = [], []
        for name in (name for name in here if name in there):
            is_fingerprint = name.startswith(fingerprint.PREFIX)
            by_fingerprints |= is_fingerprint
            if here[name] == there[name]:
                continue
            if is_fingerprint:
                kind = name.removeprefix(fingerprint.PREFIX)
                states += _of_groups(kind, here[name], there[name])
            else:
                values.append(name)
        if states or values:
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
    parted = parting(first, second)
    lines = [described(parted)]
    rows = differences(first, second)
    if rows:
        lines += ["", "What differs between the runs:", show.table(rows)]
    else:
        lines += ["", "Their configs and origins are the same."]
    return "\n".join(lines), parted.step is None


def described(parted: Parting) -> str:
    """Says for people, in one line, where two runs part, or that they do not."""
    if parted.step is None:
        what = "fingerprints and values" if parted.by_fingerprints else "logged values"
        return f"The runs are alike: the {what} of all steps that both have logged, to step {parted.alike}."
    until = f"alike to the row of step {parted.alike}" if parted.alike else "not alike in any row"
    if not parted.by_fingerprints:
        return (
            f"The runs part at step {parted.step} at the latest ({until}), in {_listed(parted.values)}; their rows "
            "have no fingerprints (fingerprint_every_steps), so that it may have been before."
        )
    if not parted.states:
        return (
            f"The runs part in step {parted.step} ({until}): it began with the same state, and made other values of "
            f"{_listed(parted.values)}. So its batch, its keys, its program or the devices differ."
        )
    if parted.step == 1:
        return (
            f"The runs part before step 1: their first states differ in {_listed(parted.states)}."
        )
    begin = parted.alike or 1
    where = (
        f"in step {begin}" if begin == parted.step - 1 else f"in steps {begin} to {parted.step - 1}"
    )
    return (
        f"The runs part {where} ({until}): the state that step {parted.step} begins with differs in "
        f"{_listed(parted.states)}. A smaller log_every_steps tells it more exactly."
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
