"""The possible plans for a run on a pod, their ranking, and the choice of the next one
to compile.

A plan is a value for each key that determines the layout and the computation of a run,
but not what it learns: the batch is the same in all plans.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from xshard import config as config_lib
from xshard import mesh

MODEL, MICRO = "model_parallel", "micro_batches"
# The outcomes of a plan. The framework, the experiment or the compiler may refuse one.
WAITING, COMPILING, FITS, TOO_LARGE, PRUNED, REFUSED = (
    "not compiled", "being compiled", "fitting", "too large", "pruned", "refused",
)  # fmt: skip
_DTYPES = ("float32", "bfloat16")
_UPDATE, _PARAMS = "reduction.shard_update", "reduction.shard_params"
_SWITCHES = {
    _UPDATE: (False, True),
    _PARAMS: (False, True),
    "reduction.reduce_dtype": _DTYPES,
}
_BETWEEN_SLICES = {"reduction.slice_dtype": (*_DTYPES, "int8")}


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
    result: dict[str, Any] = dataclasses.field(default_factory=dict)

    def require(self, memory: int) -> None:
        """Sets the bytes that a chip needs at least."""
        self.needs = memory

    def end(self, outcome: str, reason: str = "") -> None:
        """Sets the outcome and its reason."""
        # The outcome is set last, since the search reads it from another thread.
        self.reason = reason
        self.outcome = outcome

    def fit(self, result: dict[str, Any]) -> None:
        """Sets the result of the dry run, and the outcome `FITS`."""
        self.result = result
        self.end(FITS)

    @property
    def rank(self) -> tuple[float, int, int]:
        """The rank, smaller for a better plan: the bound, then the compiler's estimate,
        then the memory.
        """
        seconds, cycles = self.result["seconds"], self.result["estimated_cycles"]
        return seconds, cycles, self.result["memory"]["peak"]


def enumerate_plans(config: Any, num_chips: int, *, has_model_axis: bool) -> list[Plan]:
    """Returns all plans for a config, the config's own first.

    Args:
      config: the config of the run.
      num_chips: the number of chips of all slices.
      has_model_axis: whether the experiment shards any array over 'model'.
    """
    flat = config_lib.flatten(config.to_dict())
    wanted = _SWITCHES | (_BETWEEN_SLICES if config.slices > 1 else {})
    wanted |= {
        name: (False, True) for name, value in flat.items() if is_remat(name, value)
    }
    switches = {name: values for name, values in wanted.items() if name in flat}
    slices = {"slices": config.slices} if config.slices > 1 else {}
    own = {**slices, **{name: flat[name] for name in (MODEL, MICRO, *switches)}}
    models = mesh.divisors(num_chips) if has_model_axis else [own[MODEL]]
    groups = len(config.group_assignment) or 1
    found = [own]
    for model in models:
        on_chips = max(1, num_chips // model // groups)
        replicas = config.get("logical_replicas") or on_chips
        for micro in mesh.divisors(max(1, config.batch_size // replicas)):
            for values in itertools.product(*switches.values()):
                chosen = dict(zip(switches, values, strict=True))
                # shard_params implies shard_update, so this combination would repeat
                # another plan.
                if chosen.get(_PARAMS) and not chosen.get(_UPDATE, True):
                    continue
                found.append({**slices, MODEL: model, MICRO: micro, **chosen})
    return [Plan(own, is_own=True)] + [
        Plan(values) for values in found if values != own
    ]


def is_remat(name: str, value: Any) -> bool:
    """Returns whether a key of an experiment's config switches recomputation: a boolean
    called 'remat'.
    """
    return name.rpartition(".")[2] == "remat" and isinstance(value, bool)


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Returns the distance of two plans: the doublings between their numbers, plus one
    for each other difference.
    """
    double = lambda x, y: abs(math.log2(x / y))
    models = double(one[MODEL], other[MODEL])
    micros = double(one[MICRO], other[MICRO])
    # Plans are near if they have equally many micro-batches, or equally large ones.
    rows = double(one[MODEL] / one[MICRO], other[MODEL] / other[MICRO])
    steps = models + min(micros, rows)
    return steps + sum(
        one[name] != other[name] for name in one if name not in (MODEL, MICRO)
    )


def needs_more(values: dict[str, Any], failed: dict[str, Any]) -> bool:
    """Returns whether a plan differs from one that does not fit only by larger
    activations.
    """
    remats = [name for name in values if is_remat(name, values[name])]
    alike = set(values) - {MICRO, *remats}
    if (
        any(values[name] != failed[name] for name in alike)
        or values[MICRO] > failed[MICRO]
    ):
        return False
    # One micro-batch keeps no sums of gradients, so it may need less memory.
    if values[MICRO] == 1 < failed[MICRO]:
        return False
    return all(failed[name] or not values[name] for name in remats)


def next_to_compile(plans: Sequence[Plan]) -> Plan | None:
    """Returns the plan to compile next; None if none is left."""
    waiting = [plan for plan in plans if plan.outcome == WAITING]
    # First, try each way to hold the state once, since the best plan may be far from
    # the config.
    tried = {
        _sharding_choice(plan)
        for plan in plans
        if plan.outcome in (COMPILING, FITS, TOO_LARGE)
    }
    waiting = [
        plan for plan in waiting if _sharding_choice(plan) not in tried
    ] or waiting
    best = min(fitting(plans), key=lambda plan: plan.rank, default=None)
    own_is_too_large = plans[0].outcome in (TOO_LARGE, PRUNED)
    if best is None and own_is_too_large:
        return min(waiting, key=lambda plan: plan.needs, default=None)
    near = best or plans[0]
    # Among equally near plans, prefer the one that needs most memory: saving memory
    # costs time.
    nearest = lambda plan: (distance(plan.values, near.values), -plan.needs)
    return min(waiting, key=nearest, default=None)


def _sharding_choice(plan: Plan) -> tuple[Any, ...]:
    return tuple(plan.values.get(name) for name in (_UPDATE, _PARAMS))


def fitting(plans: Sequence[Plan]) -> list[Plan]:
    """Returns the plans that were compiled and fit."""
    return [plan for plan in plans if plan.outcome == FITS]


def flags_of(plan: Plan) -> list[str]:
    """Returns the flags that change a config to the plan's values."""
    return [f"--config.{name}={value}" for name, value in plan.values.items()]
