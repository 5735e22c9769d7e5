"""The report on a repeated step."""

from collections.abc import Callable, Sequence

from xshard import logical
from xshard import mesh as mesh_lib
from xshard.metrics import formatting
from xshard.replay import diagnosis, replayer


def replay(directory: str, step: int | None, say: Callable[[str], None]) -> bool:
    """Repeats a step of a run, compares it with the run's rows, and reports its first
    value that is not finite.

    Args:
      directory: the run's work directory.
      step: the step; None: the first one that was not finite, or was skipped.
      say: takes lines to print.

    Returns:
      Whether all rows on the way were reproduced.

    Raises:
      UserError: if there is no such run or step, or if it cannot be repeated here.
    """
    run = replayer.Replayer(directory)
    for change in run.changes:
        say(f"changed since the run: {change}")
    is_elsewhere = any(change.startswith("devices") for change in run.changes)
    if is_elsewhere and not logical.is_exact(run.config):
        say(
            "on other devices sums are computed in another order, and other replicas draw other random numbers, so bits may differ"
        )
    if step is not None:
        run.check(step)
    suspect_steps = run.suspect_steps() if step is None else range(step, step + 1)
    different, compared, again = None, 0, None
    for again in run.steps(suspect_steps):
        compared += again.number in run.rows
        different = different or run.difference(again)
        # A step given by its number is the only suspect. Otherwise stop at the first
        # bad one.
        if again.number in suspect_steps and not again.is_healthy:
            break
    assert again is not None
    begin = (
        f"the checkpoint of step {run.first_step}"
        if run.first_step
        else "the first state"
    )
    say(f"step {again.number}, repeated from {begin}")
    say(_compared(run, different, compared))
    say(describe(run, again))
    return different is None


def describe(run: replayer.Replayer, step: replayer.Step) -> str:
    """Analyzes a repeated step, and describes what was found."""
    taken_apart = diagnosis.Diagnosis(run, step)
    finding = taken_apart.find()
    if finding is None and not step.is_healthy:
        return (
            "The step is not finite, or is skipped, but all of its values are finite when computed one by one: it is at the "
            "edge of a type's range, and XLA's fused operations round differently."
        )
    if finding is None:
        return f"Every value that reaches a result of the step is finite.\n{taken_apart.table()}"
    text = _finding(run, step, finding)
    # The state is not among the metrics.
    of_state = all(name.startswith("the state ") for name in finding.results)
    if step.is_healthy and not of_state:
        text += "\nIn the program with XLA's fused operations, all metrics of the step were finite."
    return text


def _compared(
    run: replayer.Replayer, different: replayer.Difference | None, compared: int
) -> str:
    if not compared:
        return "no row to compare with"
    if different is None:
        return f"{compared} rows compared: reproduced, bit for bit"
    text = f"not reproduced: step {different.step}, column {different.column}, logged {different.logged}, now {different.now}"
    if run.changes:
        return f"{text}; changed since: {'; '.join(run.changes)}"
    resumed = run.resumed_from()
    if different.step <= resumed:
        return (
            f"{text}; the run was resumed after step {resumed}, and its work directory describes only this last start: an "
            "earlier one may have had another config, commit, libraries, devices or XLA flags"
        )
    if not run.first_step:
        text += "; a run that began with --init_from has another first state"
    return f"{text}; commit, libraries, devices and XLA's flags are those that the run recorded"


def _finding(
    run: replayer.Replayer, step: replayer.Step, finding: diagnosis.Finding
) -> str:
    first, nan = finding.first, finding.nan
    if first.input:
        lines = [f"not finite before the step: {first.input} is {first.gives}"]
        if first.input.startswith("the state") and step.number > 1:
            lines.append(
                f"  made by      an earlier step: --step={step.number - 1} analyzes the one before"
            )
    else:
        lines = [
            f"first not finite: {first.primitive} gives {first.gives}",
            *_where(first),
        ]
    lines.append(f"  on           {_replicas(run, finding.replicas)}")
    lines += _examples(run, step, finding)
    if nan is not None:
        lines += [f"which {nan.primitive} turns into nan:", *_where(nan)]
    lines.append(f"  reaches      {formatting.listed(finding.results)}")
    if finding.cure:
        lines.append(f"  cure         {finding.cure}")
    return "\n".join(lines)


def _where(operation: diagnosis.Operation) -> list[str]:
    line = operation.line or operation.innermost
    within = "" if operation.innermost == line else f", within it {operation.innermost}"
    lines = [
        f"  line         {line}{within}",
        f"  pass         {'backward' if operation.backward else 'forward'}",
        f"  value        {operation.kind}",
    ]
    if operation.module:
        lines.insert(1, f"  module       {operation.module}")
    return lines


def _replicas(run: replayer.Replayer, replicas: Sequence[int]) -> str:
    """Describes the replicas, with their groups and slices if there are several."""
    groups, slices = mesh_lib.num_groups(run.mesh), mesh_lib.num_slices(run.mesh)
    size = mesh_lib.num_replicas(run.mesh)
    if len(replicas) == groups * size:
        return "all replicas" if len(replicas) > 1 else "the only replica"
    texts = []
    for replica in replicas:
        group, number = divmod(replica, size)
        text = f"replica {number} of {size}"
        if slices > 1:
            text += f", in slice {number // (size // slices)}"
        if groups > 1:
            text += f", in group {group}"
        texts.append(text)
    return formatting.listed(texts)


def _examples(
    run: replayer.Replayer, step: replayer.Step, finding: diagnosis.Finding
) -> list[str]:
    if finding.rows is None:
        return ["  examples     any: the value does not depend on them"]
    size, parts = run.config.batch_size, run.config.micro_batches
    rows_each = size // mesh_lib.num_replicas(run.mesh) // parts
    lines = []
    for rows in finding.rows:
        numbers = run.examples(step.number, step.batch, rows)
        # Rows are numbered within their group.
        text = (
            f"row {formatting.listed([str(row % size) for row in rows])} of the batch"
        )
        if numbers:
            text = f"{formatting.listed(list(map(str, numbers)))} ({text})"
        if len(rows) > 1:
            text += ", together"
        lines.append(f"  examples     {text}")
        if parts > 1:
            which = sorted({row // rows_each % parts for row in rows})
            lines.append(f"  micro-batch  {', '.join(map(str, which))} of {parts}")
    return lines
