"""Compares two runs.

The rows of a run have fingerprints of the state that a step begins with, so the rows of
any two runs tell in which step they diverge, and whether their states, or only what was
computed from these, differ. Of two runs that have ended, the arrays of the last
checkpoints and the results are compared, too.
"""

import itertools
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from xshard import config as config_lib
from xshard import errors
from xshard.base import formatting
from xshard.checkpoint import diff as diff_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import store as store_lib
from xshard.files import identity, jsonfile, workdir
from xshard.metrics import rows as rows_lib
from xshard.training import fingerprint


class Difference(NamedTuple):
    """A value that differs between two rows of the same step.

    Attributes:
      step: the step.
      column: the name of the value.
      first: the value in the first row; None if it is missing or not finite.
      second: the value in the second row, likewise.
    """

    step: int
    column: str
    first: Any
    second: Any


def differing(
    names: Iterable[str], here: rows_lib.Row, there: rows_lib.Row
) -> list[str]:
    """Returns those of some names under which two rows have different values.

    Fingerprints come first: they are of the state that the step begins with, and the
    other values are computed from it.
    """
    found = [name for name in names if here.get(name) != there.get(name)]
    return sorted(found, key=lambda name: not name.startswith(fingerprint.PREFIX))


# Any two runs, as `python -m xshard.bisect` compares them.


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


class Divergence(NamedTuple):
    """The point where two runs begin to differ.

    Attributes:
      alike: the last logged step up to which nothing differs; 0 if there is none.
      step: the first logged step with a difference; None if there is none.
      states: the kinds of arrays, such as 'params', that differ in the state that
        `step` began with; empty if none differs, or if its rows have no fingerprints.
      values: the logged values of `step`, or of `evaluation`, that differ. The runs are
        equal, as far as both have logged, if neither states nor values differ.
      same_state: the last step whose fingerprints show that it began with the same
        state; 0 if there is none.
      evaluation: the first step after which runs of equal training are evaluated
        differently; None if there is none.
    """

    alike: int
    step: int | None
    states: list[str]
    values: list[str]
    same_state: int
    evaluation: int | None = None


def read(directory: str) -> Run:
    """Reads a run; nothing is written.

    Raises:
      UserError: if there is no run, or if it has logged nothing.
    """
    files = workdir.Workdir(directory)
    config = jsonfile.read_if_exists(files.config)
    if config is None:
        raise errors.UserError(
            f"{directory} holds no {files.config.name}: give the work directory of a "
            "run."
        )
    rows, evaluations = rows_lib.by_step(files.metrics)
    if not rows:
        raise errors.UserError(
            f"{files.metrics} has no rows of training, to be compared."
        )
    # The identity differs between any two runs, so it explains nothing.
    config.pop(workdir.IDENTITY, None)
    origin = jsonfile.read_if_exists(files.origin) or {}
    facts = {f"config.{name}": x for name, x in config_lib.flatten(config).items()}
    facts |= {f"origin.{name}": x for name, x in origin.items()}
    return Run(files.path, rows, evaluations, facts)


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
            f"{first.directory} and {second.directory} have logged no step in common "
            f"({logged[0]}; {logged[1]}): compare runs with the same log_every_steps, "
            "or with one that divides the other's."
        )
    alike = 0
    same_state = 0
    for step in steps:
        here = first.rows[step]
        there = second.rows[step]
        # The runs may log different values, too.
        common = [name for name in here if name in there]
        states = []
        values = []
        for name in differing(common, here, there):
            if name.startswith(fingerprint.PREFIX):
                kind = name.removeprefix(fingerprint.PREFIX)
                states += _differing_groups(kind, here[name], there[name])
            else:
                values.append(name)
        # Rows between those of fingerprint_every_steps have no fingerprints, and show
        # nothing about the state.
        if not states and any(name.startswith(fingerprint.PREFIX) for name in common):
            same_state = step
        if states or values:
            return Divergence(alike, step, states, values, same_state)
        alike = step
    for step in sorted(first.evaluations.keys() & second.evaluations.keys()):
        here = first.evaluations[step]
        there = second.evaluations[step]
        names = differing([name for name in here if name in there], here, there)
        if names:
            return Divergence(alike, None, [], names, same_state, step)
    return Divergence(alike, None, [], [], same_state)


def _differing_groups(name: str, here: Any, there: Any) -> list[str]:
    """Returns the name of a difference; or, with several groups of replicas, the name
    with each group that differs.
    """
    are_groups = isinstance(here, list) and isinstance(there, list)
    if not are_groups or len(here) != len(there):
        return [name]
    names = []
    for group, (x, y) in enumerate(zip(here, there, strict=True)):
        if x != y:
            names.append(f"{name} of group {group}")
    return names


def describe(divergence: Divergence) -> str:
    """Describes in one line where two runs begin to differ, or that they do not."""
    step = divergence.step
    begin = divergence.same_state
    if step is None:
        compared = "fingerprints and values" if begin else "logged values"
        text = (
            f"The runs are equal: the {compared} of all steps that both logged, up to "
            f"step {divergence.alike}."
        )
        if divergence.evaluation is not None:
            text += (
                f" But the evaluation after step {divergence.evaluation} differs in "
                f"{formatting.listed(divergence.values)}: in its data, its code or "
                "the devices."
            )
        return text
    states = formatting.listed(divergence.states)
    values = formatting.listed(divergence.values)
    if states and step == 1:
        return f"The runs diverge before step 1: their first states differ in {states}."
    until = "no row is equal"
    if divergence.alike:
        until = f"equal up to the row of step {divergence.alike}"
    if states:
        return (
            f"The runs diverge {_in_steps(begin, step - 1)} ({until}): the state that "
            f"step {step} begins with differs in {states}. Smaller log_every_steps and "
            "fingerprint_every_steps narrow the range."
        )
    if begin == step:
        return (
            f"The runs diverge in step {step} ({until}): it began with the same state, "
            f"but computed different values of {values}. So its batch, its keys, its "
            "program or the devices differ."
        )
    return (
        f"The runs diverge {_in_steps(begin, step)} ({until}), in {values}. The rows "
        f"of step {step} have no fingerprints (fingerprint_every_steps), which would "
        "show an earlier difference."
    )


def _in_steps(first: int, last: int) -> str:
    """Names the steps from `first` to `last`; if `first` is 0, from the beginning of
    the runs.
    """
    if not first:
        return f"at step {last} or earlier"
    if first == last:
        return f"in step {last}"
    return f"in steps {first} to {last}"


def report(first: Run, second: Run) -> tuple[str, bool]:
    """Describes where two runs differ, and in what; returns also whether they are
    equal.
    """
    divergence = find_divergence(first, second)
    lines = [describe(divergence), ""]
    facts = differing_facts(first, second)
    if facts:
        lines += ["Differences between the runs:", formatting.table(facts)]
    else:
        lines.append("Their configs and origins are the same.")
    return "\n".join(lines), not (divergence.states or divergence.values)


def differing_facts(first: Run, second: Run) -> list[dict[str, str]]:
    """Returns a row for each fact in which two runs differ."""
    rows = []
    for name in sorted(first.facts.keys() | second.facts.keys()):
        here = first.facts.get(name, "unknown")
        there = second.facts.get(name, "unknown")
        if not identity.is_equal(here, there):
            rows.append({"what": name, "A": str(here), "B": str(there)})
    return rows


# Two runs with the same flags that have ended, as `--verify_resume` compares them.


class Comparison(NamedTuple):
    """The first differences between two runs that have ended.

    Attributes:
      row: the first value of a row that differs; None if none does.
      array: the path of the first array of the last checkpoint that differs; empty if
        none does.
      results: the results that differ, with their values.
      size: a description of how much was compared.
    """

    row: Difference | None
    array: str = ""
    results: str = ""
    size: str = ""

    def lines(self) -> list[str]:
        """Returns lines to print; none if nothing differs."""
        lines = []
        if self.row is not None:
            step, column, first, second = self.row
            lines.append(f"row of step  {step}, {column}: {first} | {second}")
        if self.array:
            lines.append(f"array        {self.array}")
        if self.results:
            lines.append(f"results      {self.results}")
        return lines


def compare(first: pathlib.Path, second: pathlib.Path) -> Comparison:
    """Compares two runs that have ended, by their work directories, bit for bit."""
    rows = rows_of(first)
    end = _last_checkpoint(first)
    array = ""
    for pair in diff_lib.differing_arrays(end, _last_checkpoint(second)):
        array = pair.path
        break
    here = jsonfile.read(first / workdir.RESULTS)
    there = jsonfile.read(second / workdir.RESULTS)
    results = []
    for name in differing(sorted((here.keys() | there.keys()) - {"run"}), here, there):
        results.append(f"{name}: {here.get(name)} | {there.get(name)}")
    num_arrays = len(format_lib.read_array_metas(end))
    return Comparison(
        row=first_row(rows, rows_of(second)),
        array=array,
        results=", ".join(results),
        size=f"{len(rows)} rows, {num_arrays} arrays",
    )


def rows_of(directory: pathlib.Path) -> list[rows_lib.Row]:
    """Returns all rows of a run, without values that may differ between runs with the
    same bits.
    """
    rows = rows_lib.read(workdir.Workdir(directory).metrics)
    return [rows_lib.reproducible(row) for row in rows]


def first_row(
    first: list[rows_lib.Row], second: list[rows_lib.Row]
) -> Difference | None:
    """Returns the first value that differs between rows; None if none does."""
    for here, there in itertools.zip_longest(first, second, fillvalue=dict[str, Any]()):
        for column in differing({**here, **there}, here, there):
            step = here.get("step") or there["step"]
            return Difference(step, column, here.get(column), there.get(column))
    return None


def checkpoints(directory: pathlib.Path) -> dict[int, format_lib.SaveAttempt]:
    """Returns a run's committed checkpoints by step."""
    store = store_lib.Store(workdir.Workdir(directory).checkpoints)
    return {attempt.step: attempt for attempt in format_lib.committed(store)}


def _last_checkpoint(directory: pathlib.Path) -> format_lib.SaveAttempt:
    attempts = checkpoints(directory)
    return attempts[max(attempts)]
