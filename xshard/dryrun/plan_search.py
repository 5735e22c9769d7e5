"""The search of `--plan`: ranks the layouts of a run on a pod by the lower bounds on
their step times.

A plan is a value for each key that determines the layout and the computation of a run,
but not what it learns: the batch is the same in all plans. Plans that cannot fit by an
estimate are not compiled. The others are compiled several at a time, starting with
those that differ least from the best one so far.
"""

import collections
import concurrent.futures
import copy
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from xshard import cli, errors
from xshard import config as config_lib
from xshard import experiment as experiment_lib
from xshard.dryrun import candidates, estimate, summary
from xshard.files import jsonfile
from xshard.metrics import chips
from xshard.metrics import formatting as formatting_lib
from xshard.pod import notice
from xshard.run import preflight

_SHOWN = 10
# One compilation may take 2 GB of memory.
_MOST_WORKERS = 8


def search(
    plans: Sequence[candidates.Plan],
    compile_plan: Callable[[candidates.Plan], None],
    most: int,
    report: Callable[[candidates.Plan, int, int], None],
) -> None:
    """Compiles at most `most` plans, one per CPU core at a time.

    Args:
      plans: all plans; those that wait are compiled.
      compile_plan: compiles a plan, and sets its outcome. It is called in threads.
      most: the most plans to compile.
      report: receives each finished plan, the number of finished plans, and the number
        that may be compiled in all.
    """
    workers = min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
    pool = concurrent.futures.ThreadPoolExecutor(workers)
    running: dict[concurrent.futures.Future[None], candidates.Plan] = {}
    begun = done = 0
    while True:
        while (
            len(running) < workers
            and begun < most
            and (plan := candidates.next_to_compile(plans))
        ):
            plan.end(candidates.COMPILING)
            running[pool.submit(compile_plan, plan)] = plan
            begun += 1
        if not running:
            return
        ended, _ = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
        for future in ended:
            plan = running.pop(future)
            future.result()
            done += 1
            _prune(plans, plan)
            waiting = sum(other.outcome == candidates.WAITING for other in plans)
            report(plan, done, min(most, begun + waiting))


def _prune(plans: Sequence[candidates.Plan], failed: candidates.Plan) -> None:
    """Rules out plans that need more memory than one that did not fit."""
    for plan in plans if failed.outcome == candidates.TOO_LARGE else ():
        if plan.outcome == candidates.WAITING and candidates.needs_more(
            plan.values, failed.values
        ):
            why = "larger activations than an otherwise equal plan that does not fit"
            plan.end(candidates.PRUNED, why)


class MemoryScreen:
    """Estimates the memory that a plan needs at least, before it is compiled, and rules
    out invalid plans.

    Args:
      config: the config of the run.
      prepare: takes a config to its step, prepared up to the compilation.
    """

    def __init__(self, config: Any, prepare: Callable[[Any], estimate.Prepared]):
        self._config = config
        self._prepare = prepare
        self._prepared: dict[Any, estimate.Prepared | ValueError] = {}
        self._stacked: dict[Any, int] = {}

    def __call__(self, plan: candidates.Plan) -> None:
        """Tells a plan what it needs; and its outcome, if it is invalid or cannot fit."""
        config = copy.deepcopy(self._config)
        config.update_from_flattened_dict(plan.values)
        try:
            step = self._step(plan, config)
            limit, memory = step.chip.hbm, step.result["memory"]
            # With micro-batches, float32 sums of gradients are kept beside the
            # parameters.
            sums = memory["parameters"] if plan.values[candidates.MICRO] > 1 else 0
            needed = sum(memory.values()) + sums
            what = "state and sums of gradients"
            # The trace takes seconds, so it runs only if the state fits.
            if needed <= limit:
                # At best, everything that a loop keeps is sharded over 'model'.
                needed += (
                    self._kept(plan, config, step) // plan.values[candidates.MODEL]
                )
                what = "state, sums of gradients, and what a loop keeps for the backward pass"
        except ValueError as e:
            plan.end(candidates.REFUSED, cli.message(e))
            return
        plan.require(needed)
        if needed > limit:
            plan.end(
                candidates.PRUNED,
                f"{what} need more than the {summary.size(limit)} of a chip",
            )

    def _step(self, plan: candidates.Plan, config: Any) -> estimate.Prepared:
        """Returns the step of a plan with the same state. Plans that differ only in
        micro-batches, say, share it.
        """
        # These keys, and recomputation, do not change the state.
        free = (candidates.MICRO, "reduction.reduce_dtype")
        values = plan.values.items()
        key = tuple(
            x
            for name, x in values
            if name not in free and not candidates.is_remat(name, x)
        )
        if key not in self._prepared:
            try:
                self._prepared[key] = self._prepare(config)
            except ValueError as e:
                if plan.is_own:
                    # The config's own number of micro-batches may be invalid; other
                    # plans have other numbers.
                    raise
                self._prepared[key] = e
        found = self._prepared[key]
        if isinstance(found, ValueError):
            raise found
        return found

    def _kept(self, plan: candidates.Plan, config: Any, step: estimate.Prepared) -> int:
        """Traces a step for the bytes that its loops stack; once for each micro-batch
        size.
        """
        values = plan.values
        remats = [
            value for name, value in values.items() if candidates.is_remat(name, value)
        ]
        key = (values[candidates.MODEL] / values[candidates.MICRO], *remats)
        if key not in self._stacked:
            experiment = experiment_lib.load(config.experiment)(config)
            traced = preflight.jitted_step(experiment, step.mesh).trace(
                step.state, step.batch
            )
            self._stacked[key] = estimate.stacked_bytes(traced.jaxpr)
        return self._stacked[key]


class Compiler:
    """Compiles each plan in a child process, which may crash, and can be killed.

    Args:
      arguments: the arguments of this program.
    """

    def __init__(self, arguments: Sequence[str]):
        # The last flag counts: a child must not search again.
        self._arguments = [*arguments, "--noplan", "--json"]
        self._running: set[subprocess.Popen[str]] = set()

    def __call__(self, plan: candidates.Plan) -> None:
        """Compiles a plan, and sets its outcome."""
        command = [
            sys.executable,
            "-m",
            "xshard.dryrun",
            *self._arguments,
            *candidates.flags_of(plan),
        ]
        pipe = subprocess.PIPE
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
        )
        self._running.add(child)
        out, err = child.communicate()
        self._running.discard(child)
        record_outcome(plan, child.returncode, out, err)

    def stop(self) -> None:
        """Kills all compilations in progress."""
        for child in list(self._running):
            child.kill()


def record_outcome(plan: candidates.Plan, code: int, out: str, err: str) -> None:
    """Sets a plan's outcome from the exit code and the output of its dry run."""
    # An experiment may print too, but the result is the last line.
    last_line = out.splitlines()[-1:]
    result = (
        json.loads(last_line[0]) if last_line and last_line[0].startswith("{") else {}
    )
    if code == notice.DONE:
        plan.fit(result)
        return
    if result and not result["memory"].get("fits", True):
        plan.require(result["memory"]["needed"])
        plan.end(candidates.TOO_LARGE)
        return
    last = (err.splitlines() or [""])[-1]
    error_lines = [line for line in err.splitlines() if line.startswith("error: ")]
    reason = error_lines[-1].removeprefix("error: ") if error_lines else last
    plan.end(
        candidates.REFUSED,
        reason if code > 0 else f"the compiler was ended by signal {-code}: {last}",
    )


def run(
    config: Any,
    topology: str,
    prepare: Callable[[Any, str], estimate.Prepared],
    arguments: Sequence[str],
    most: int,
    *,
    as_json: bool,
) -> int:
    """Searches, and prints the best plans; returns the exit code.

    Args:
      config: the config of the run.
      topology: the topology of a slice.
      prepare: takes a config and a topology to the step, prepared up to the
        compilation.
      arguments: the arguments of this program.
      most: the most plans to compile.
      as_json: whether to print JSON.

    Raises:
      UserError: if there is nothing to choose, all plans are refused, or no plan fits.
    """
    say = _clock()
    plans = _plans(config, topology)
    say(f"{len(plans)} plans; estimating their memory")
    judge = MemoryScreen(config, lambda config: prepare(config, topology))
    for plan in plans:
        judge(plan)
    say(_counted(plans))
    if not any(plan.outcome == candidates.WAITING for plan in plans):
        raise errors.UserError(
            f"--plan: none of {len(plans)} plans is possible: {_reasons(plans)}"
        )
    compiler, code = Compiler(arguments), notice.DONE
    try:
        search(
            plans,
            compiler,
            most,
            lambda plan, done, of: say(f"{done} of {of}: {_line(plan)}"),
        )
    except KeyboardInterrupt:
        compiler.stop()
        say("interrupted; results so far:")
        code = notice.INTERRUPTED
    print(
        jsonfile.dumps(as_data(plans)) if as_json else show(plans, topology), flush=True
    )
    if code == notice.DONE and not candidates.fitting(plans):
        raise errors.UserError(
            f"--plan: none of the compiled plans fits {topology}. Give a larger topology, a smaller "
            "--config.batch_size or model, or more --plan_compiles."
        )
    return code


def _plans(config: Any, topology: str) -> list[candidates.Plan]:
    """Returns the plans for a config; raises UserError if there is nothing to choose."""
    chips.parse_topology(topology)
    config_lib.check(config)
    sizes = [int(size) for size in topology.split(":")[1].split("x")]
    rules = experiment_lib.load(config.experiment)(config).sharding_rules()
    plans = candidates.enumerate_plans(
        config, math.prod(sizes) * config.slices, has_model_axis=bool(rules)
    )
    if len(plans) == 1:
        raise errors.UserError(
            f"--plan: there is nothing to choose on {topology}: the experiment has no sharding_rules for a "
            "model_parallel, a replica has one example for its micro_batches, and the config has neither "
            "reduction.* nor a key 'remat'. Leave out --plan, or give a larger --config.batch_size."
        )
    return plans


def _clock() -> Callable[[str], None]:
    """Returns a function that prints a text on stderr, with the time since this call."""
    begin = time.monotonic()

    def say(text: str) -> None:
        passed = formatting_lib.duration(time.monotonic() - begin)
        print(f"[{passed}] {text}", file=sys.stderr, flush=True)

    return say


def as_data(plans: Sequence[candidates.Plan]) -> dict[str, Any]:
    """Returns all plans for `--json`: those that fit in order of rank, then the others."""
    best = sorted(candidates.fitting(plans), key=lambda plan: plan.rank)
    rest = [plan for plan in plans if plan.outcome != candidates.FITS]
    return {
        "plans": [
            dataclasses.asdict(plan) | {"flags": candidates.flags_of(plan)}
            for plan in best + rest
        ]
    }


def show(plans: Sequence[candidates.Plan], topology: str) -> str:
    """Formats the ten best plans, and the outcomes of the others."""
    best = sorted(candidates.fitting(plans), key=lambda plan: plan.rank)[:_SHOWN]
    parts = [
        f"{topology}, {len(plans)} plans: {_counted(plans)}",
        _reasons(plans, "\n"),
    ]
    if best:
        head, *lines = formatting_lib.table(
            [_row(number, plan) for number, plan in enumerate(best, 1)]
        ).splitlines()
        for line, plan in zip(lines, best, strict=True):
            head += f"\n{line}\n     {' '.join(candidates.flags_of(plan))}"
        parts.append(f"the best by the bound on a step's time\n{head}")
    parts.append(f"The config as it is: {_line(plans[0])}")
    parts.append("Bounds, not predictions.")
    return "\n\n".join(part for part in parts if part)


def _counted(plans: Sequence[candidates.Plan]) -> str:
    """Returns a text with the number of plans of each outcome."""
    counts = collections.Counter(plan.outcome for plan in plans)
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


def _reasons(plans: Sequence[candidates.Plan], between: str = "; ") -> str:
    """Returns a text with each reason why plans do not fit, and the number of these
    plans.
    """
    reasons = collections.Counter(
        (plan.outcome, plan.reason) for plan in plans if plan.reason
    )
    return between.join(
        f"{n} {outcome}: {why}" for (outcome, why), n in reasons.most_common()
    )


def _row(number: int, plan: candidates.Plan) -> dict[str, str]:
    result = plan.result
    amounts = {limit["name"]: limit["amount"] for limit in result["bounds"]}
    return {
        "": f"{number}",
        "at least": formatting_lib.scaled(result["seconds"], "s"),
        "because of": result["dominated_by"],
        "peak": summary.size(result["memory"]["peak"]),
        "ICI": formatting_lib.scaled(amounts["ICI"], "B"),
        "DCN": formatting_lib.scaled(amounts["DCN"], "B"),
        "cycles": formatting_lib.scaled(result["estimated_cycles"], ""),
        "is": "the config" if plan.is_own else "",
    }


def _line(plan: candidates.Plan) -> str:
    """Formats a plan and its outcome on one line."""
    values = " ".join(
        f"{name.rpartition('.')[2]}={value}" for name, value in plan.values.items()
    )
    if plan.outcome == candidates.TOO_LARGE:
        return f"{values}: too large, {summary.size(plan.needs)}"
    if plan.outcome != candidates.FITS:
        why = f" ({plan.reason})" if plan.reason else ""
        return f"{values}: {plan.outcome}{why}"
    row = _row(0, plan)
    return f"{values}: at least {row['at least']} because of {row['because of']}, {row['peak']}"
