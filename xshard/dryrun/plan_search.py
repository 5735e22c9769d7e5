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
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from xshard import cli, errors
from xshard import config as config_lib
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard.base import formatting as formatting_lib
from xshard.base import primitives
from xshard.base.jax_internals import jaxprs
from xshard.dryrun import analysis, summary
from xshard.dryrun import result as result_lib
from xshard.files import jsonfile
from xshard.metrics import chips
from xshard.pod import exit_codes
from xshard.run import preflight

# The keys that a plan may change.
MODEL = "model_parallel"
MICRO = "micro_batches"
_SHARD_UPDATE = "reduction.shard_update"
_SHARD_PARAMS = "reduction.shard_params"
_REDUCE_DTYPE = "reduction.reduce_dtype"
_SLICE_DTYPE = "reduction.slice_dtype"
_SLOTS_MEMORY = "slots_memory"
# The policies that are tried where an experiment takes the name of one, besides True
# and False: one that keeps the products, and one that moves them to the host.
_OFFLOAD = "offload_dot_with_no_batch_dims"
_POLICIES = ("dots_with_no_batch_dims_saveable", _OFFLOAD)
# The distance of two plans of which one uses the host's memory.
_TO_HOST = 4
_OUTER_DTYPE = "outer.dtype"
# The outcomes of a plan. The framework, the experiment or the compiler may refuse one.
WAITING = "not compiled"
COMPILING = "being compiled"
FITS = "fitting"
TOO_LARGE = "too large"
PRUNED = "pruned"
REFUSED = "refused"
# The number of plans that are shown.
_SHOWN = 10
# One compilation may take 2 GB of memory.
_MOST_WORKERS = 8


@dataclasses.dataclass(eq=False)
class Plan:
    """One way to run a config.

    Attributes:
      values: the values by key.
      is_own: whether it is the unchanged config.
      needs: the estimated bytes that a chip needs at least.
      outcome: its outcome, such as `FITS`.
      reason: the reason, if it was refused or pruned.
      result: the result of its dry run, if it was compiled and fits.
    """

    values: dict[str, Any]
    is_own: bool = False
    needs: int = 0
    outcome: str = WAITING
    reason: str = ""
    result: result_lib.Result = dataclasses.field(default_factory=result_lib.Result)

    def require(self, memory: int) -> None:
        """Sets the bytes that a chip needs at least."""
        self.needs = memory

    def end(self, outcome: str, reason: str = "") -> None:
        """Sets the outcome and its reason."""
        # The outcome is set last, since the search reads it from another thread.
        self.reason = reason
        self.outcome = outcome

    def fit(self, result: result_lib.Result) -> None:
        """Sets the result of the dry run, and the outcome `FITS`."""
        self.result = result
        self.end(FITS)

    @property
    def rank(self) -> tuple[float, int, int, int]:
        """The rank, smaller for a better plan: the bound, then what goes to the host
        and back, the compiler's estimate, and the memory.
        """
        # Going to the host takes time, but no rate is published that would bound it.
        amounts = {bound["name"]: bound["amount"] for bound in self.result["bounds"]}
        return (
            self.result["seconds"],
            amounts.get("host", 0),
            self.result["estimated_cycles"],
            self.result["memory"]["peak"],
        )

    @property
    def flags(self) -> list[str]:
        """The flags that change a config to the plan's values."""
        return [f"--config.{name}={value}" for name, value in self.values.items()]


def fitting(plans: Sequence[Plan]) -> list[Plan]:
    """Returns the plans that were compiled and fit, the best first."""
    fit = [plan for plan in plans if plan.outcome == FITS]
    return sorted(fit, key=lambda plan: plan.rank)


# The plans for a config.


def enumerate_plans(config: Any, num_chips: int, *, has_model_axis: bool) -> list[Plan]:
    """Returns all plans for a config, the config's own first.

    Args:
      config: the config of the run.
      num_chips: the number of chips of all slices.
      has_model_axis: whether the experiment shards any array over 'model'.
    """
    flat = config_lib.flatten(config.to_dict())
    # The keys that do not depend on the number of chips, with the values to try.
    wanted: dict[str, tuple[Any, ...]] = {
        _SHARD_UPDATE: (False, True),
        _SHARD_PARAMS: (False, True),
        _REDUCE_DTYPE: ("float32", "bfloat16"),
    }
    if config_lib.separates_slices(config):
        wanted[_OUTER_DTYPE] = ("float32", "bfloat16", "int8", "int4")
    elif config.slices > 1:
        wanted[_SLICE_DTYPE] = ("float32", "bfloat16", "int8")
    # Slots may lie elsewhere where they may lie in shards.
    if _SHARD_UPDATE in flat and not config.get("logical_replicas"):
        wanted[_SLOTS_MEMORY] = config_lib.SLOTS_MEMORY
    for name, value in flat.items():
        if is_remat(name, value):
            wanted[name] = _remat_values(config, name)
    switches = {name: values for name, values in wanted.items() if name in flat}
    # The number of slices may come from --slices, and is then not in the config file.
    slices = {"slices": config.slices} if config.slices > 1 else {}
    unchanged = dict(slices)
    for name in (MODEL, MICRO, *switches):
        unchanged[name] = flat[name]
    plans = [Plan(unchanged, is_own=True)]
    models = [unchanged[MODEL]]
    if has_model_axis:
        models = mesh_lib.divisors(num_chips)
    groups = len(config.group_assignment) or 1
    for model in models:
        # The batch of a replica is divided into micro-batches.
        replicas = config.get("logical_replicas")
        if not replicas:
            replicas = max(1, num_chips // model // groups)
        for micro in mesh_lib.divisors(max(1, config.batch_size // replicas)):
            for choice in itertools.product(*switches.values()):
                chosen = dict(zip(switches, choice, strict=True))
                # shard_params implies shard_update, so this combination would repeat
                # another plan.
                if chosen.get(_SHARD_PARAMS) and not chosen.get(_SHARD_UPDATE, True):
                    continue
                values = {**slices, MODEL: model, MICRO: micro, **chosen}
                if values != unchanged:
                    plans.append(Plan(values))
    return plans


def is_remat(name: str, value: Any) -> bool:
    """Returns whether a key of an experiment's config says what is recomputed: one
    called 'remat', a boolean or the name of a policy.
    """
    return name.rpartition(".")[2] == "remat" and isinstance(value, bool | str)


def _remat_values(config: Any, name: str) -> tuple[Any, ...]:
    """Returns the values of a key that says what is recomputed: those of its type."""
    folder, _, key = name.rpartition(".")
    kind = (config[folder] if folder else config).get_type(key)
    if kind is bool:
        return False, True
    if kind is str:
        return "everything_saveable", "nothing_saveable", *_POLICIES
    return False, True, *_POLICIES


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Returns the distance of two plans: the doublings between their numbers, plus one
    for each other difference, and more if only one of them uses the host's memory.
    """
    models = _doublings(one[MODEL], other[MODEL])
    micros = _doublings(one[MICRO], other[MICRO])
    # Plans are near if they have equally many micro-batches, or equally large ones.
    sizes = _doublings(one[MODEL] / one[MICRO], other[MODEL] / other[MICRO])
    total = models + min(micros, sizes)
    for name in one:
        if name in (MODEL, MICRO) or one[name] == other[name]:
            continue
        # A plan on the host is tried late, since going there costs time of which the
        # bounds do not know.
        if _is_on_host(one[name]) != _is_on_host(other[name]):
            total += _TO_HOST
        else:
            total += 1
    return total


def _is_on_host(value: Any) -> bool:
    return value in (config_lib.PINNED_HOST, _OFFLOAD)


def _doublings(x: float, y: float) -> float:
    return abs(math.log2(x / y))


def needs_more(values: dict[str, Any], failed: dict[str, Any]) -> bool:
    """Returns whether a plan differs from one that does not fit only by larger
    activations.
    """
    remats = [name for name in values if is_remat(name, values[name])]
    for name in values:
        if name not in (MICRO, *remats) and values[name] != failed[name]:
            return False
    if values[MICRO] > failed[MICRO]:
        return False
    # One micro-batch keeps no sums of gradients, so it may need less memory.
    if values[MICRO] == 1 < failed[MICRO]:
        return False
    return all(_keeps_more(values[name], failed[name]) for name in remats)


def _keeps_more(remat: Any, other: Any) -> bool:
    """Returns whether one value of a key 'remat' keeps all that another keeps."""
    if remat == other or remat is False:
        return True
    # What is on the host needs no memory of the device.
    return other is True and remat != _OFFLOAD


# The memory of a plan, before it is compiled.


class MemoryScreen:
    """Estimates the memory that a plan needs at least, before it is compiled, and rules
    out invalid plans.

    Args:
      config: the config of the run.
      topology: the topology of a slice.
    """

    def __init__(self, config: Any, topology: str):
        self._config = config
        self._topology = topology
        self._prepared: dict[Any, analysis.Prepared | ValueError] = {}
        self._stacked: dict[Any, int] = {}

    def __call__(self, plan: Plan) -> None:
        """Sets what a plan needs; and its outcome, if it is invalid or cannot fit."""
        config = copy.deepcopy(self._config)
        config.update_from_flattened_dict(plan.values)
        try:
            step = self._prepare(plan, config)
            memory = step.result["memory"]
            needed = sum(memory.values())
            # With micro-batches, float32 sums of gradients are kept beside the
            # parameters.
            if plan.values[MICRO] > 1:
                needed += memory["parameters"]
            what = "state and sums of gradients"
            # The trace takes seconds, so it runs only if the state fits.
            if needed <= step.chip.hbm:
                # At best, everything that a loop keeps is sharded over 'model'.
                needed += self._kept(plan, config, step) // plan.values[MODEL]
                what = (
                    "state, sums of gradients, and what a loop keeps for the backward "
                    "pass"
                )
        except ValueError as e:
            plan.end(REFUSED, cli.message(e))
            return
        plan.require(needed)
        if needed > step.chip.hbm:
            available = summary.size(step.chip.hbm)
            plan.end(PRUNED, f"{what} need more than the {available} of a chip")

    def _prepare(self, plan: Plan, config: Any) -> analysis.Prepared:
        """Returns the prepared step of a plan with the same state. Plans that differ
        only in micro-batches, say, share it.
        """
        key = []
        for name, value in plan.values.items():
            # These keys do not change the state.
            if name not in (MICRO, _REDUCE_DTYPE) and not is_remat(name, value):
                key.append(value)
        if tuple(key) not in self._prepared:
            prepared: analysis.Prepared | ValueError
            try:
                prepared = analysis.prepare(config, self._topology)
            except ValueError as e:
                if plan.is_own:
                    # The config's own number of micro-batches may be invalid; other
                    # plans have other numbers.
                    raise
                prepared = e
            self._prepared[tuple(key)] = prepared
        found = self._prepared[tuple(key)]
        if isinstance(found, ValueError):
            raise found
        return found

    def _kept(self, plan: Plan, config: Any, step: analysis.Prepared) -> int:
        """Traces a step for the bytes that its loops stack; once for each micro-batch
        size.
        """
        values = plan.values
        remats = [value for name, value in values.items() if is_remat(name, value)]
        key = (values[MODEL] / values[MICRO], *remats)
        if key not in self._stacked:
            experiment = experiment_lib.of_config(config)
            program = preflight.jitted_step(experiment, step.mesh)
            traced = program.trace(step.state, step.batch)
            self._stacked[key] = stacked_bytes(traced.jaxpr)
        return self._stacked[key]


def stacked_bytes(program: Any) -> int:
    """Returns the bytes of the largest stacked outputs of a scan in a program: arrays
    kept for a gradient, or gradients. Those on the host do not count.

    Args:
      program: a jaxpr. Within `jax.shard_map`, sizes are per replica.
    """
    most = 0
    for eqn in primitives.all_equations(jaxprs.opened(program)):
        if eqn.primitive.name == "scan":
            _, num_carried = jaxprs.scan_counts(eqn)
            size = 0
            for stacked in eqn.outvars[num_carried:]:
                if stacked.aval.memory_space != jax.memory.Space.Host:
                    size += stacked.aval.size * stacked.aval.dtype.itemsize
            most = max(most, size)
    return most


# The compilations, and their order.


def search(
    plans: Sequence[Plan],
    compile_plan: Callable[[Plan], None],
    most: int,
    report: Callable[[Plan, int, int], None],
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
    running: dict[concurrent.futures.Future[None], Plan] = {}
    begun = 0
    done = 0
    while True:
        while len(running) < workers and begun < most:
            plan = next_to_compile(plans)
            if plan is None:
                break
            plan.end(COMPILING)
            running[pool.submit(compile_plan, plan)] = plan
            begun += 1
        if not running:
            return
        ended, _ = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
        for future in ended:
            plan = running.pop(future)
            # Raises what the compilation raised.
            future.result()
            done += 1
            if plan.outcome == TOO_LARGE:
                _prune(plans, plan)
            waiting = sum(other.outcome == WAITING for other in plans)
            report(plan, done, min(most, begun + waiting))


def _prune(plans: Sequence[Plan], failed: Plan) -> None:
    """Rules out plans that need more memory than one that did not fit."""
    for plan in plans:
        if plan.outcome == WAITING and needs_more(plan.values, failed.values):
            plan.end(
                PRUNED,
                "larger activations than an otherwise equal plan that does not fit",
            )


def next_to_compile(plans: Sequence[Plan]) -> Plan | None:
    """Returns the plan to compile next; None if none is left."""
    waiting = [plan for plan in plans if plan.outcome == WAITING]
    # First, try each way to hold the state once, since the best plan may be far from
    # the config.
    tried = set()
    for plan in plans:
        if plan.outcome in (COMPILING, FITS, TOO_LARGE):
            tried.add(_sharding_choice(plan))
    untried = [plan for plan in waiting if _sharding_choice(plan) not in tried]
    if untried:
        waiting = untried
    near = plans[0]
    fit = fitting(plans)
    if fit:
        near = fit[0]
    elif near.outcome in (TOO_LARGE, PRUNED):
        return min(waiting, key=lambda plan: plan.needs, default=None)

    def preference(plan: Plan) -> tuple[float, int]:
        # Among equally near plans, prefer the one that needs most memory: saving memory
        # costs time.
        return distance(plan.values, near.values), -plan.needs

    return min(waiting, key=preference, default=None)


def _sharding_choice(plan: Plan) -> tuple[Any, Any]:
    return plan.values.get(_SHARD_UPDATE), plan.values.get(_SHARD_PARAMS)


class Compiler:
    """Compiles each plan in a child process, which may crash, and can be killed.

    Args:
      arguments: the arguments of this program.
    """

    def __init__(self, arguments: Sequence[str]):
        # The last flag counts: a child must not search again.
        self._arguments = [*arguments, "--noplan", "--json"]
        self._running: set[subprocess.Popen[str]] = set()

    def __call__(self, plan: Plan) -> None:
        """Compiles a plan, and sets its outcome."""
        child = subprocess.Popen(
            [sys.executable, "-m", "xshard.dryrun", *self._arguments, *plan.flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._running.add(child)
        out, err = child.communicate()
        self._running.discard(child)
        record_outcome(plan, child.returncode, out, err)

    def stop(self) -> None:
        """Kills all compilations in progress."""
        # A copy, since the threads that wait for the children remove them.
        for child in list(self._running):
            child.kill()


def record_outcome(plan: Plan, code: int, out: str, err: str) -> None:
    """Sets a plan's outcome from the exit code and the output of its dry run."""
    result: result_lib.Result = {}
    # An experiment may print too, but the result is the last line.
    last_line = out.splitlines()[-1:]
    if last_line and last_line[0].startswith("{"):
        result = json.loads(last_line[0])
    if code == exit_codes.DONE:
        plan.fit(result)
        return
    if result and not result["memory"].get("fits", True):
        plan.require(result["memory"]["needed"])
        plan.end(TOO_LARGE)
        return
    reason = ""
    error_lines = err.splitlines()
    if error_lines:
        reason = error_lines[-1]
    if code < 0:
        reason = f"the compiler was ended by signal {-code}: {reason}"
    else:
        for line in error_lines:
            if line.startswith("error: "):
                reason = line.removeprefix("error: ")
    plan.end(REFUSED, reason)


# The program.


def run(
    config: Any,
    topology: str,
    arguments: Sequence[str],
    most: int,
    *,
    as_json: bool,
) -> int:
    """Searches, and prints the best plans; returns the exit code.

    Args:
      config: the config of the run.
      topology: the topology of a slice.
      arguments: the arguments of this program.
      most: the most plans to compile.
      as_json: whether to print JSON.

    Raises:
      UserError: if there is nothing to choose, all plans are refused, or no plan fits.
    """
    say = _clock()
    plans = _plans(config, topology)
    say(f"{len(plans)} plans; estimating their memory")
    screen = MemoryScreen(config, topology)
    for plan in plans:
        screen(plan)
    say(_counted(plans))
    if not any(plan.outcome == WAITING for plan in plans):
        raise errors.UserError(
            f"--plan: none of {len(plans)} plans is possible: {_reasons(plans)}"
        )

    def report(plan: Plan, done: int, count: int) -> None:
        say(f"{done} of {count}: {_line(plan)}")

    compiler = Compiler(arguments)
    code = exit_codes.DONE
    try:
        search(plans, compiler, most, report)
    except KeyboardInterrupt:
        compiler.stop()
        say("interrupted; results so far:")
        code = exit_codes.INTERRUPTED
    text = jsonfile.dumps(as_data(plans)) if as_json else show(plans, topology)
    print(text, flush=True)
    if code == exit_codes.DONE and not fitting(plans):
        raise errors.UserError(
            f"--plan: none of the compiled plans fits {topology}. Give a larger "
            "topology, a smaller --config.batch_size or model, or more --plan_compiles."
        )
    return code


def _plans(config: Any, topology: str) -> list[Plan]:
    """Returns the plans for a config; raises UserError if there is only one."""
    chips.parse_topology(topology)
    config_lib.check(config)
    num_chips = math.prod(chips.slice_shape(topology)) * config.slices
    rules = experiment_lib.of_config(config).sharding_rules()
    plans = enumerate_plans(config, num_chips, has_model_axis=bool(rules))
    if len(plans) == 1:
        raise errors.UserError(
            f"--plan: there is nothing to choose on {topology}: the experiment has no "
            "sharding_rules for a model_parallel, a replica has one example for its "
            "micro_batches, and the config has neither reduction.* nor a key 'remat'. "
            "Leave out --plan, or give a larger --config.batch_size."
        )
    return plans


def _clock() -> Callable[[str], None]:
    """Returns a function that prints a text on stderr, with the time since now."""
    begin = time.monotonic()

    def say(text: str) -> None:
        passed = formatting_lib.duration(time.monotonic() - begin)
        print(f"[{passed}] {text}", file=sys.stderr, flush=True)

    return say


def as_data(plans: Sequence[Plan]) -> dict[str, Any]:
    """Returns all plans for `--json`: those that fit, the best first; then the rest."""
    others = [plan for plan in plans if plan.outcome != FITS]
    listed = []
    for plan in [*fitting(plans), *others]:
        listed.append({**dataclasses.asdict(plan), "flags": plan.flags})
    return {"plans": listed}


def show(plans: Sequence[Plan], topology: str) -> str:
    """Formats the ten best plans, and the outcomes of the others."""
    parts = [f"{topology}, {len(plans)} plans: {_counted(plans)}"]
    reasons = _reasons(plans, "\n")
    if reasons:
        parts.append(reasons)
    best = fitting(plans)[:_SHOWN]
    if best:
        rows = [_row(number, plan) for number, plan in enumerate(best, 1)]
        header, *lines = formatting_lib.table(rows).splitlines()
        shown = ["the best by the bound on a step's time", header]
        for line, plan in zip(lines, best, strict=True):
            shown += [line, f"     {' '.join(plan.flags)}"]
        parts.append("\n".join(shown))
    parts.append(f"The config as it is: {_line(plans[0])}")
    parts.append("Bounds, not predictions.")
    return "\n\n".join(parts)


def _counted(plans: Sequence[Plan]) -> str:
    """Returns a text with the number of plans of each outcome."""
    counts = collections.Counter(plan.outcome for plan in plans)
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


def _reasons(plans: Sequence[Plan], between: str = "; ") -> str:
    """Returns a text with each reason why plans do not fit, and the number of these
    plans.
    """
    counts = collections.Counter(
        f"{plan.outcome}: {plan.reason}" for plan in plans if plan.reason
    )
    return between.join(f"{count} {reason}" for reason, count in counts.most_common())


def _row(number: int, plan: Plan) -> dict[str, str]:
    result = plan.result
    amounts = {bound["name"]: bound["amount"] for bound in result["bounds"]}
    return {
        "": f"{number}",
        "at least": formatting_lib.scaled(result["seconds"], "s"),
        "because of": result["dominated_by"],
        "peak": summary.size(result["memory"]["peak"]),
        "ICI": formatting_lib.scaled(amounts["ICI"], "B"),
        "DCN": formatting_lib.scaled(amounts["DCN"], "B"),
        "host": formatting_lib.scaled(amounts.get("host", 0), "B"),
        "cycles": formatting_lib.scaled(result["estimated_cycles"], ""),
        "is": "the config" if plan.is_own else "",
    }


def _line(plan: Plan) -> str:
    """Formats a plan and its outcome on one line."""
    values = []
    for name, value in plan.values.items():
        values.append(f"{name.rpartition('.')[2]}={value}")
    text = f"{' '.join(values)}:"
    if plan.outcome == TOO_LARGE:
        return f"{text} too large, {summary.size(plan.needs)}"
    if plan.outcome != FITS:
        reason = f" ({plan.reason})" if plan.reason else ""
        return f"{text} {plan.outcome}{reason}"
    seconds = formatting_lib.scaled(plan.result["seconds"], "s")
    peak = summary.size(plan.result["memory"]["peak"])
    return f"{text} at least {seconds} because of {plan.result['dominated_by']}, {peak}"
