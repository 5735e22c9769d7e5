"""The report on a repeated step."""

from collections.abc import Callable, Sequence

from xshard import logical
from xshard import mesh as mesh_lib
from xshard.base import formatting
from xshard.replay import comparison, diagnosis, replayer


def replay(
    directory: str,
    step: int | None,
    say: Callable[[str], None],
    flags: Sequence[str] = (),
) -> bool:
    """Repeats a step of a run, compares it with the run's rows, and reports its first
    value that is not finite.

    Args:
      directory: the run's work directory.
      step: the step; None: the first one that was not finite, or was skipped.
      say: takes lines to print.
      flags: values of the config that replace those of the run, such as
        '--config.precision=float32'.

    Returns:
      Whether all rows on the way were reproduced.

    Raises:
      UserError: if there is no such run or step, or if it cannot be repeated here.
    """
    run = replayer.Replayer(directory, flags)
    for change in run.changes:
        say(f"changed since the run: {change}")
    is_elsewhere = any(change.startswith("devices") for change in run.changes)
    if is_elsewhere and not logical.is_exact(run.config):
        say(
            "on other devices sums are computed in another order, and other replicas "
            "draw other random numbers, so bits may differ"
        )
    if step is None:
        suspect_steps = run.suspect_steps()
    else:
        run.check(step)
        suspect_steps = range(step, step + 1)
    different = None
    num_compared = 0
    repeated = None
    with run.programs():
        for repeated in run.steps(suspect_steps):
            if repeated.number in run.rows:
                num_compared += 1
            if different is None:
                different = run.difference(repeated)
            # A step given by its number is the only suspect. Otherwise stop at the
            # first bad one.
            if repeated.number in suspect_steps and not repeated.is_healthy:
                break
    assert repeated is not None
    begin = "the first state"
    if repeated.restored:
        begin = f"the checkpoint of step {repeated.restored}"
    say(f"step {repeated.number}, repeated from {begin}")
    if not num_compared:
        say("no row to compare with")
    elif different is None:
        say(f"{num_compared} rows compared: reproduced, bit for bit")
    else:
        say(_describe_difference(run, repeated, different))
    say(describe(run, repeated))
    return different is None


def _describe_difference(
    run: replayer.Replayer,
    repeated: replayer.Step,
    different: comparison.Difference,
) -> str:
    """Describes a number that was not reproduced, and what may be the reason."""
    text = (
        f"not reproduced: step {different.step}, column {different.column}, logged "
        f"{different.first}, now {different.second}"
    )
    if run.changes:
        return f"{text}; changed since: {'; '.join(run.changes)}"
    resumed = run.resumed_from()
    if resumed is None or different.step <= resumed:
        start = "was started again, without a step so far"
        if resumed is not None:
            start = f"was resumed after step {resumed}"
        return (
            f"{text}; the run {start}, and its work directory describes only this last "
            "start: an earlier one may have had another config, commit, libraries, "
            "devices or XLA flags"
        )
    if not repeated.restored:
        text += "; a run that began with --init_from has another first state"
    return (
        f"{text}; commit, libraries, devices and XLA's flags are those that the run "
        "recorded"
    )


def describe(run: replayer.Replayer, step: replayer.Step) -> str:
    """Analyzes a repeated step, and describes what was found."""
    finding = diagnosis.Diagnosis(run, step).find()
    if finding is None and not step.is_healthy:
        return (
            "The step is not finite, or is skipped, but all of its values are finite "
            "when computed one by one: it is at the edge of a type's range, and XLA's "
            "fused operations round differently."
        )
    if finding is None:
        return "Every value that reaches a result of the step is finite."
    text = _describe_finding(run, step, finding)
    # The state is not among the metrics.
    only_in_state = all(name.startswith("the state ") for name in finding.results)
    if step.is_healthy and not only_in_state:
        text += (
            "\nIn the program with XLA's fused operations, all metrics of the step "
            "were finite."
        )
    return text


def _describe_finding(
    run: replayer.Replayer, step: replayer.Step, finding: diagnosis.Finding
) -> str:
    first = finding.first
    nan = finding.nan
    lines = []
    if first.input:
        lines.append(f"not finite before the step: {first.input} is {first.gives}")
        if first.input.startswith("the state") and step.number > 1:
            lines.append(
                f"  made by      an earlier step: --step={step.number - 1} analyzes "
                "the one before"
            )
    else:
        lines.append(f"first not finite: {first.primitive} gives {first.gives}")
        lines += _where(first)
    lines.append(f"  on           {_replicas(run, finding.replicas)}")
    lines += _examples(run, step, finding)
    if nan is not None:
        lines.append(f"which {nan.primitive} turns into nan:")
        lines += _where(nan)
    lines.append(f"  reaches      {formatting.listed(finding.results)}")
    return "\n".join(lines)


def _where(operation: diagnosis.Operation) -> list[str]:
    """Returns lines on where an operation is in the user's code."""
    line = operation.line or operation.innermost
    lines = [f"  line         {line}"]
    if operation.innermost != line:
        lines.append(f"  within it    {operation.innermost}")
    if operation.module:
        lines.append(f"  module       {operation.module}")
    lines.append(f"  pass         {'backward' if operation.backward else 'forward'}")
    lines.append(f"  value        {operation.kind}")
    return lines


def _replicas(run: replayer.Replayer, replicas: Sequence[int]) -> str:
    """Describes the replicas, with their groups and slices if there are several."""
    groups = mesh_lib.num_groups(run.mesh)
    slices = mesh_lib.num_slices(run.mesh)
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
    """Returns lines on the examples that cause a finding and their micro-batches."""
    if finding.rows is None:
        return ["  examples     any: the value does not depend on them"]
    size = run.config.batch_size
    micro_batches = run.config.micro_batches
    rows_each = size // mesh_lib.num_replicas(run.mesh) // micro_batches
    lines = []
    for rows in finding.rows:
        # Rows are numbered within their group.
        within = formatting.listed([str(row % size) for row in rows])
        text = f"row {within} of the batch"
        numbers = run.examples(step.number, step.batch, rows)
        if numbers:
            text = f"{formatting.listed([str(n) for n in numbers])} ({text})"
        if len(rows) > 1:
            text += ", together"
        lines.append(f"  examples     {text}")
        if micro_batches > 1:
            which = sorted({row // rows_each % micro_batches for row in rows})
            listed = ", ".join(map(str, which))
            lines.append(f"  micro-batch  {listed} of {micro_batches}")
    return lines
