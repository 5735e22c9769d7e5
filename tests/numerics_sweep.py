"""Small networks trained with random combinations of keys, and faults in random places.

    python -m tests.numerics_sweep --programs=100 [--seed=0] [--patterns=8]
    python -m tests.numerics_sweep --only=17:3

A program is a network, a rule, a layout and all other keys, which its number draws. A
draw is one run of it, of a few steps, in which some rows of some batches hold NaN,
infinity or numbers that overflow a narrow type. The draw decides on the replica, the
micro-batch, the group or slice, and the step. It holds after each step:

- a step is skipped if and only if the model in NumPy finds a gradient that is not
  finite in its group;
- each leaf of the state after a skipped step is that before it, bit by bit, except
  those that `may_move` lists with the reason;
- each leaf after any other step is that of the model, as far as the types allow;
- everything that is evaluated is finite, and is that of the model.

The model begins each step with the state that the program had, so no step hides
another. In float32, with rules that are smooth, it also makes all steps by itself.
"""

import argparse
import collections
import dataclasses
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import xshard
from tests import numerics_model as model_lib
from tests.optimizers import table
from xshard import experiment as experiment_lib
from xshard.optimizers import trees
from xshard.run import preflight
from xshard.training import state as state_lib
from xshard.training import step as step_lib

STEPS = 7
PATTERNS = 8
_FEATURES = 6
_HIDDEN = 8
# By so many for each replica, the matrices beside the hidden layer are held in shards.
_HIDDEN_IN_SHARDS = 64
_OUTPUTS = 2
_ROWS = 4

# The devices, groups, slices and replicas of each layout.
LAYOUTS = {
    "1 replica": {"devices": 1},
    "2 replicas": {"devices": 2},
    "3 replicas": {"devices": 3},
    "4 replicas": {"devices": 4},
    "6 replicas": {"devices": 6},
    "8 replicas": {"devices": 8},
    "2 groups": {"devices": 2, "groups": 2},
    "2 groups of 2": {"devices": 4, "groups": 2},
    "2 slices of 1": {"devices": 2, "slices": 2},
    "2 slices of 2": {"devices": 4, "slices": 2},
    "2 slices apart": {"devices": 2, "slices": 2, "apart": True},
    "2 slices of 2 apart": {"devices": 4, "slices": 2, "apart": True},
    "3 logical on 1": {"devices": 1, "logical": 3},
    "4 logical on 2": {"devices": 2, "logical": 4},
    "3 logical on 2": {"devices": 2, "logical": 3},
    "2 groups of 2 logical": {"devices": 2, "groups": 2, "logical": 2},
    "2 slices of 2 logical": {"devices": 2, "slices": 2, "logical": 2, "apart": True},
}

# Rules that the model computes; of all others only skipped steps are checked.
MODELLED = (
    "sgd",
    "momentum",
    "nesterov",
    "adam",
    "adamw",
    "rmsprop",
    "adagrad",
    "lion",
    "schedule_free_sgd",
)
# Their updates are continuous in the gradient, and do not magnify its errors.
_SMOOTH = ("sgd", "momentum", "nesterov", "schedule_free_sgd")

# The values of each key. A value that stands twice is drawn twice as often.
VALUES: dict[str, tuple[Any, ...]] = {
    "layout": tuple(LAYOUTS),
    "network": ("linear", "hidden", "norm", "norm"),
    "cross_replica": (False, False, True),
    "state": (True, False),
    "weighted": (False, False, True),
    "rule": (*MODELLED, *MODELLED, "another"),
    "compute": ("float32", "float32", "bfloat16", "float16"),
    "params": ("float32", "float32", "float32", "bfloat16", "float16"),
    "loss_scale": ("none", "fixed", "dynamic", "dynamic"),
    "increment_period": (1, 2, 3),
    "initial_scale": (1, 2, 8),
    "on_nonfinite": ("skip", "skip", "warn"),
    "reduction": ("mean", "mean", "sum"),
    "reduce_dtype": ("float32", "float32", "float32", "bfloat16"),
    "slice_dtype": ("float32", "bfloat16", "bfloat16"),
    "arithmetic": ("float", "exact"),
    "shards": ("none", "none", "update", "params", "params"),
    "gather_once": (False, True),
    "micro_batches": (1, 2, 3),
    "aggregation_method": ("EXPERIMENTAL_ACCUMULATE_N", "EXPERIMENTAL_TREE"),
    "clip": ("none", "none", "value", "norm"),
    "average": ("none", "constant", "count"),
    "average_place": ("outside", "inside"),
    "scale_place": ("outside", "inside"),
    "estimate_statistics": (False, True),
    "backs_off": (False, False, True),
    "schedule": ("constant", "falling"),
    "lora": (False, False, True),
    "frozen": ("", "", "b/"),
    "noise_scale": (False, False, True),
    "norms": (0, 0, 1),
    "fingerprints": (0, 0, 1),
    "outer": (0, 2, 3),
    "outer_dtype": ("float32", "bfloat16", "int8"),
    "fragments": (1, 2),
    "delay_steps": (0, 1),
}

# How a row of a batch is not finite.
FAULTS = (
    "input nan",
    "input inf",
    "input -inf",
    "label nan",
    "label inf",
    "label -inf",
    "loss nan",
    "cast",
    "forward",
    "backward",
    "large",
)

# Keys that only an outer rule has.
_OF_OUTER = (
    "outer",
    "outer_dtype",
    "fragments",
    "delay_steps",
)


def _refused_keys(choice: Mapping[str, Any]) -> list[str]:
    """Returns the keys of which another value is to be drawn; empty if all fit.

    Some combinations are refused, as the documentation says. In others a key has no
    effect, so that its first value stands for all.
    """
    layout = LAYOUTS[choice["layout"]]
    apart = "apart" in layout
    logical = "logical" in layout
    slices = layout.get("slices", 1) > 1 and not apart
    averages = choice["average"] != "none"
    schedule_free = choice["rule"] == "schedule_free_sgd"
    unmodelled = choice["rule"] == "another"
    shards_params = choice["shards"] == "params"
    is_linear = choice["network"] == "linear"
    has_state = choice["state"] or choice["network"] == "norm"
    one_part = _shape(choice).replicas * choice["micro_batches"] == 1
    exact = choice["arithmetic"] != "float"
    refused: dict[str, bool] = {
        # Logical replicas do not shard, and their sums are in float32.
        "shards": logical and choice["shards"] != "none",
        "arithmetic": exact and not logical,
        "reduce_dtype": logical and choice["reduce_dtype"] != "float32",
        "clip": shards_params and choice["clip"] != "none",
        "noise_scale": choice["noise_scale"] and (shards_params or one_part),
        # Schedule-free rules evaluate other parameters themselves, and slices apart
        # those of the last exchange.
        "average": averages and (schedule_free or apart),
        "rule": apart and (schedule_free or unmodelled),
        # Its matrix is too small to lie in shards.
        "network": shards_params and is_linear,
        "backs_off": choice["backs_off"] and (schedule_free or unmodelled),
        "estimate_statistics": choice["estimate_statistics"]
        and not (has_state and (averages or schedule_free or apart)),
        "outer": apart and not choice["outer"],
        "lora": choice["lora"] and is_linear,
        # No gradient is a replica's own then, and slices have statistics of their own.
        "cross_replica": choice["cross_replica"]
        and (
            choice["network"] != "norm"
            or choice["noise_scale"]
            or choice["weighted"]
            or choice["clip"] != "none"
            or slices
            # Logical replicas exchange nothing in the loop over micro-batches.
            or (logical and choice["micro_batches"] > 1)
        ),
        "frozen": choice["frozen"] != "" and (is_linear or choice["lora"]),
    }
    without_effect: dict[str, bool] = {
        "slice_dtype": not slices,
        "gather_once": not shards_params or choice["micro_batches"] == 1,
        "schedule": schedule_free or unmodelled,
        "average_place": not averages,
        "scale_place": choice["loss_scale"] == "none",
        "increment_period": choice["loss_scale"] != "dynamic",
        "initial_scale": choice["loss_scale"] != "dynamic",
        "aggregation_method": choice["micro_batches"] == 1,
        **dict.fromkeys(_OF_OUTER, not apart),
    }
    keys = [key for key, is_refused in refused.items() if is_refused]
    for key, has_no_effect in without_effect.items():
        if has_no_effect and choice[key] != VALUES[key][0]:
            keys.append(key)
    return keys


def draw_choice(number: int) -> dict[str, Any]:
    """Draws the values of all keys."""
    generator = np.random.default_rng([number, 0])
    choice = {}
    for key, values in VALUES.items():
        choice[key] = values[generator.integers(len(values))]
    while keys := _refused_keys(choice):
        key = keys[0]
        values = VALUES[key]
        choice[key] = values[generator.integers(len(values))]
    if choice["rule"] == "another":
        names = sorted(table.OPTIMIZERS)
        choice["another"] = names[generator.integers(len(names))]
    choice["hidden"] = _HIDDEN
    if choice["shards"] == "params":
        layout = LAYOUTS[choice["layout"]]
        replicas = layout["devices"] // layout.get("groups", 1)
        choice["hidden"] = _HIDDEN_IN_SHARDS * (replicas // layout.get("slices", 1))
    # Small enough for sums over as many hidden units.
    choice["rate"] = model_lib.RATE * _HIDDEN / choice["hidden"]
    return choice


@dataclasses.dataclass(frozen=True)
class Fault:
    """Where a row is not finite.

    Attributes:
      step: the step, from 1.
      group: the number of the group, or of the slice that trains apart.
      replica: the replica of the group.
      micro_batch: the micro-batch of the replica.
      row: the row of the micro-batch.
      kind: one of `FAULTS`.
    """

    step: int
    group: int
    replica: int
    micro_batch: int
    row: int
    kind: str


class Drawn(xshard.Supervised):
    """A network and a rule that the config's `choice` describes."""

    # What the next batches are, set by the program before each step.
    feed: dict[str, np.ndarray]

    def train_data(self):
        return {}

    def eval_data(self):
        return {}

    def train_batches(self, part):
        return _Feed(self, part)

    def frozen(self):
        prefix = self.config.choice.frozen
        return f"^{prefix}" if prefix else ""

    def lora(self):
        if not self.config.choice.lora:
            return None
        return xshard.lora(rank=2, alpha=2 * model_lib.LORA_SCALE, select="^a/w")

    def forward(self, batch, *, is_training):
        choice = self.config.choice
        x = batch["x"]
        if choice.state:
            seen = hk.get_state("seen", [], jnp.float32, jnp.zeros)
            count = hk.get_state("count", [], jnp.int32, jnp.zeros)
            hk.get_state("table", [50], jnp.float32, _table)
            if is_training:
                mean = jnp.mean(x).astype(seen.dtype)
                hk.set_state("seen", seen + 0.1 * (mean - seen))
                hk.set_state("count", count + 1)
        if choice.network != "linear":
            has_norm = choice.network == "norm"
            x = hk.Linear(choice.hidden, with_bias=not has_norm, name="a")(x)
            if has_norm:
                axis = "replica" if choice.cross_replica else None
                norm = hk.BatchNorm(
                    create_scale=True,
                    create_offset=True,
                    decay_rate=model_lib.NORM_DECAY,
                    cross_replica_axis=axis,
                    name="norm",
                )
                # Haiku's averages mix integers with floats.
                with jax.numpy_dtype_promotion("standard"):
                    x = norm(x, is_training)
            x = jnp.tanh(x)
        outputs = hk.Linear(_OUTPUTS, name="b")(x)
        for gain in (
            batch["gain"],
            batch["gain"],
            1 / batch["gain"],
            1 / batch["gain"],
        ):
            # A gain of 60,000 overflows float16, and is taken back in any other type.
            outputs = outputs * gain
        return outputs

    def loss(self, outputs, batch):
        error = jnp.mean(jnp.square(outputs - batch["y"]))
        return error + jnp.mean(batch["extra"]), {}

    def evaluate(self, outputs, batch):
        return {"error": jnp.mean(jnp.square(outputs - batch["y"]), axis=1)}

    def optimizer(self):
        choice = self.config.choice
        rule = xshard.OptaxOptimizer(
            self._transformation(), name="rule", backs_off=choice.backs_off
        )
        wraps = [self._scale, self._reduce]
        if choice.scale_place == "inside":
            wraps.reverse()
        if choice.average != "none":
            at = 0 if choice.average_place == "outside" else 2
            wraps.insert(at, self._average)
        for wrap in reversed(wraps):
            rule = wrap(rule)
        return rule

    def _scale(self, rule):
        choice = self.config.choice
        if choice.loss_scale == "none":
            return rule
        scale: Any = 4.0
        if choice.loss_scale == "dynamic":
            scale = xshard.DynamicLossScale(
                choice.initial_scale, choice.increment_period
            )
        return xshard.MixedPrecisionLossScaleOptimizer(rule, scale)

    def _reduce(self, rule):
        return xshard.CrossShardOptimizer(
            rule, slice_axis_name="slice", **self.config.reduction
        )

    def _average(self, rule):
        count = "count" if self.config.choice.average == "count" else None
        return xshard.MovingAverageOptimizer(rule, model_lib.DECAY, count)

    def _transformation(self):
        choice = self.config.choice
        rate: Any = choice.rate
        if choice.schedule == "falling":
            rate = lambda count: choice.rate / (1 + 0.5 * count)
        rules = {
            "sgd": lambda: optax.sgd(rate),
            "momentum": lambda: optax.sgd(rate, momentum=model_lib.MOMENTUM),
            "nesterov": lambda: optax.sgd(
                rate, momentum=model_lib.MOMENTUM, nesterov=True
            ),
            "adam": lambda: optax.adam(rate),
            "adamw": lambda: optax.adamw(rate, weight_decay=1e-2),
            "rmsprop": lambda: optax.rmsprop(rate),
            "adagrad": lambda: optax.adagrad(rate),
            "lion": lambda: optax.lion(rate, weight_decay=1e-2),
            "schedule_free_sgd": lambda: optax.contrib.schedule_free_sgd(rate),
        }
        if choice.rule == "another":
            return _ANOTHER.get(choice.another, table.OPTIMIZERS[choice.another])()
        return rules[choice.rule]()


class Weighted(Drawn):
    """Weighs the loss of each part of a batch."""

    def weight(self, batch):
        return jnp.sum(batch["mass"])


class Clipped(Drawn):
    """Clips the gradients of each replica."""

    def clip_gradients(self, grads):
        kind = self.config.choice.clip
        if kind == "value":
            clip = lambda g: jnp.clip(g, -model_lib.CLIP, model_lib.CLIP)
            return jax.tree.map(clip, grads)
        norm = optax.tree.norm(grads)
        factor = jnp.minimum(1, model_lib.CLIP / jnp.maximum(norm, 1e-6))
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)


class ClippedAndWeighted(Clipped, Weighted):
    """Does both."""


# By whether gradients are clipped, and whether parts are weighed.
_KINDS = {
    (False, False): Drawn,
    (False, True): Weighted,
    (True, False): Clipped,
    (True, True): ClippedAndWeighted,
}


def _table(shape, dtype):
    # None of them is a sum of powers of two, so a mean of equal ones may round.
    return jnp.asarray(np.linspace(0.1, 0.7, shape[0]), dtype)


def _label(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "w" if path[-1].key == "w" else "b", params
    )


# Rules of the table that name the parameters of its own network.
_ANOTHER = {
    "partition": lambda: optax.partition(
        {"w": optax.adam(0.1), "b": optax.sgd(0.1)}, _label
    )
}


class _Feed:
    """Batches that the program sets before each step."""

    state_is_shared = True
    arrays_are_new = True

    def __init__(self, experiment, part):
        self._experiment = experiment
        self._part = part
        self._taken = 0

    def __next__(self):
        self._taken += 1
        batch = {}
        for name, array in self._experiment.feed.items():
            rows = [array[g][r] for g, r in enumerate(self._part.rows)]
            batch[name] = np.concatenate(rows)
        return batch

    def get_state(self):
        return {"taken": self._taken}

    def set_state(self, state):
        self._taken = state["taken"]


def config_of(choice: Mapping[str, Any]) -> Any:
    """Returns the config of a program."""
    layout = LAYOUTS[choice["layout"]]
    config = xshard.config.default()
    config.experiment = "tests.numerics_sweep.Drawn"
    config.steps = STEPS
    config.choice = dict(choice)
    for key in ("micro_batches", "on_nonfinite", "gather_once", "aggregation_method"):
        config[key] = choice[key]
    config.estimate_statistics = choice["estimate_statistics"]
    compute, params = choice["compute"], choice["params"]
    config.precision = f"params={params},compute={compute},output=float32"
    config.reduction.update(
        {
            "reduction": choice["reduction"],
            "reduce_dtype": choice["reduce_dtype"],
            "slice_dtype": choice["slice_dtype"],
            "arithmetic": choice["arithmetic"],
            "shard_update": choice["shards"] == "update",
            "shard_params": choice["shards"] == "params",
        }
    )
    config.log_norms_every_steps = choice["norms"]
    config.noise_scale_steps = model_lib.NOISE_STEPS if choice["noise_scale"] else 0
    config.fingerprint_every_steps = choice["fingerprints"]
    groups = layout.get("groups", 1)
    if groups > 1:
        numbers = np.arange(layout["devices"]).reshape(groups, -1).tolist()
        config.group_assignment = tuple(map(tuple, numbers))
    config.slices = layout.get("slices", 1)
    config.logical_replicas = layout.get("logical", 0)
    if "apart" in layout:
        config.outer.update(
            {
                "every_steps": choice["outer"],
                "learning_rate": model_lib.OUTER_RATE,
                "momentum": model_lib.OUTER_MOMENTUM,
                "dtype": choice["outer_dtype"],
                "fragments": choice["fragments"],
                "delay_steps": choice["delay_steps"],
            }
        )
    shape = _shape(choice)
    config.batch_size = shape.models_rows
    config.lock()
    return config


@dataclasses.dataclass(frozen=True)
class _Shape:
    """The numbers of parts of a batch.

    Attributes:
      groups: the groups, or the slices that train apart.
      replicas: the replicas of each.
      micro_batches: the micro-batches of each replica.
      models: the groups that have a batch of their own.
    """

    groups: int
    replicas: int
    micro_batches: int
    models: int

    @property
    def models_rows(self) -> int:
        rows = self.groups * self.replicas * self.micro_batches * _ROWS
        return rows // self.models


def _shape(choice: Mapping[str, Any]) -> _Shape:
    layout = LAYOUTS[choice["layout"]]
    groups = layout.get("groups", 1)
    apart = "apart" in layout
    if apart:
        groups = layout["slices"]
    replicas = layout.get("logical", layout["devices"] // groups)
    return _Shape(
        groups=groups,
        replicas=replicas,
        micro_batches=choice["micro_batches"],
        models=1 if apart else groups,
    )


class DrawError(Exception):
    """Raised if a draw does not hold."""


def draw_faults(
    choice: Mapping[str, Any], number: int, pattern: int
) -> tuple[list[Fault], np.random.Generator]:
    """Draws the faults of a draw, and returns the generator of its data."""
    generator = np.random.default_rng([number, 1, pattern])
    shape = _shape(choice)
    skips = choice["loss_scale"] == "dynamic" or choice["on_nonfinite"] == "skip"
    last = STEPS
    steps = {
        0: [],
        1: [1],
        2: [last],
        3: [2, 3],
        4: [4, 4],
        5: [1, 2, last],
    }.get(pattern)
    if steps is None:
        count = int(generator.integers(1, 5))
        steps = sorted(generator.integers(1, last + 1, count).tolist())
    if not skips:
        # Nothing is left to check after a fault that is applied.
        steps = [last] if steps else []
    kinds = [kind for kind in FAULTS if _fits(choice, kind)]
    faults = []
    for step in steps:
        kind = kinds[generator.integers(len(kinds))]
        if kind == "large":
            # Its updates would overflow the next step's activations.
            step = last
        faults.append(
            Fault(
                step=step,
                group=int(generator.integers(shape.groups)),
                replica=int(generator.integers(shape.replicas)),
                micro_batch=int(generator.integers(shape.micro_batches)),
                row=int(generator.integers(_ROWS)),
                kind=kind,
            )
        )
    return faults, generator


def _fits(choice: Mapping[str, Any], kind: str) -> bool:
    """Returns whether it is beyond doubt what a kind of fault does in a program."""
    if choice["clip"] == "value" and kind not in ("input nan", "label nan", "loss nan"):
        # Infinity is clipped to a finite number.
        return False
    if kind in ("cast", "forward"):
        return choice["compute"] == "float16"
    if kind == "backward" and choice["lora"]:
        # The gradients of small factors may be finite in float16.
        return choice["compute"] == "float16"
    if kind == "backward":
        return "float16" in (choice["compute"], choice["params"])
    if kind == "large":
        return (
            "float16" in (choice["compute"], choice["params"])
            and choice["clip"] == "none"
            and choice["network"] != "norm"
            and not choice["weighted"]
            and choice["rule"] in MODELLED
        )
    return True


class Program:
    """A program that is compiled once, for many draws."""

    def __init__(self, number: int):
        """Draws and compiles it."""
        self.number = number
        self.choice = draw_choice(number)
        config = config_of(self.choice)
        self.shape = _shape(self.choice)
        self._data = np.random.default_rng([number, 2])
        kind = _KINDS[self.choice["clip"] != "none", self.choice["weighted"]]
        self.experiment = kind(config)
        devices = jax.devices()[: LAYOUTS[self.choice["layout"]]["devices"]]
        self.mesh = experiment_lib.mesh_of(config, devices)
        self.experiment.feed = self._feed(self._batch(np.random.default_rng(0)))
        self._batches = preflight.train_batches(self.experiment, self.mesh)
        self._step = preflight.jitted_step(self.experiment, self.mesh)
        self._evaluated: Any = None
        state = state_lib.init(
            self.experiment, self.mesh, number, self._batches.example
        )
        self._first = jax.device_get(state.experiment)
        self._specs = jax.tree.map(lambda x: x.sharding, state.experiment)
        self._rng = state.rng
        self._root = np.asarray(jax.random.key_data(state.rng))
        rows = _ROWS * self.shape.micro_batches
        self.model = model_lib.Model(self.choice, rows, self.shape.replicas)

    def run(self, pattern: int) -> list[Fault]:
        """Makes the steps of one draw; raises DrawError if one does not hold."""
        faults, generator = draw_faults(self.choice, self.number, pattern)
        self._check(pattern, faults, generator)
        return faults

    def _initial(self) -> state_lib.TrainState:
        """Returns the first state; rules that back off halve their updates."""
        first = jax.tree_util.tree_map_with_path(_halved, self._first)
        on_devices = jax.tree.map(jax.device_put, first, self._specs)
        return state_lib.TrainState(
            step=jnp.int32(0), experiment=on_devices, rng=jnp.copy(self._rng)
        )

    def _check(
        self, pattern: int, faults: list[Fault], generator: np.random.Generator
    ) -> None:
        state = self._initial()
        before = self._leaves(state.experiment)
        free = before
        is_free = self._is_free()
        modelled = self._is_modelled()
        for number in range(1, STEPS + 1):
            drawn = self._batch(generator)
            now = [fault for fault in faults if fault.step == number]
            scales = [_scale_of(leaves) for leaves in before]
            for fault in now:
                _plant(self, drawn, fault, before, scales[fault.group])
            self.experiment.feed = self._feed(drawn)
            self._batches._iterator.set_state({"taken": 0})
            batch = self._batches.batch_for_step(number, None, state)
            stepped = self._step(state, batch)
            state = stepped.state
            after = self._leaves(state.experiment)
            parts = self._parts(drawn)
            with np.errstate(all="ignore"):
                predicted = self.model.step(before, parts)
                if is_free:
                    made = self.model.step(free, parts)
                    free = [
                        _typed(x.leaves, y) for x, y in zip(made, free, strict=True)
                    ]
            where = f"step {number} of pattern {pattern}, faults {now}"
            if int(state.step) != number:
                raise DrawError(f"{where}: step is {int(state.step)}")
            if not np.array_equal(jax.random.key_data(state.rng), self._root):
                raise DrawError(f"{where}: the root key changed")
            self._check_metrics(where, stepped, predicted, modelled)
            is_guarded = all(x.finite or x.skipped for x in predicted)
            if self.choice["outer"] and not is_guarded:
                # What is not finite arrives in other slices.
                return
            norms = self._norms(stepped)
            for group in range(self.shape.groups):
                of_group = f"{where}, group {group}"
                if norms:
                    _check_norms(of_group, norms[group], before[group], after[group])
                _check_constant(of_group, before[group], after[group])
                if predicted[group].skipped:
                    _check_skipped(
                        of_group, before[group], after[group], predicted[group]
                    )
                if modelled:
                    _check_moved(
                        of_group, before[group], after[group], predicted[group]
                    )
                elif predicted[group].skipped or predicted[group].finite:
                    _check_finite(of_group, after[group])
            before = after
            if not is_guarded:
                return
        where = f"after pattern {pattern}"
        if is_free:
            for group in range(self.shape.groups):
                _check_free(f"{where}, group {group}", before[group], free[group])
        self._check_evaluated(where, state, before, modelled)

    def _is_modelled(self) -> bool:
        return self._is_certain() and self.choice["rule"] in MODELLED

    def _is_certain(self) -> bool:
        """Returns whether a step without a fault has finite gradients.

        The variance of a few rows in a narrow type is mostly rounding, so the inverse
        of its root may be anything.
        """
        types = {self.choice["compute"], self.choice["params"]}
        return self.choice["network"] != "norm" or types == {"float32"}

    def _is_free(self) -> bool:
        types = [self.choice[key] for key in ("compute", "params", "reduce_dtype")]
        types.append(self.choice["slice_dtype"])
        if "apart" in LAYOUTS[self.choice["layout"]]:
            types.append(self.choice["outer_dtype"])
        return set(types) == {"float32"} and self.choice["rule"] in _SMOOTH

    def _check_metrics(
        self, where: str, stepped: Any, predicted: list[Any], modelled: bool
    ) -> None:
        metrics = jax.device_get(stepped.metrics)
        verdicts = np.ravel(jax.device_get(stepped.observed[""].verdict))
        skipped = np.ravel(metrics["skipped"]).tolist()
        for group, wanted in enumerate(predicted):
            of_group = f"{where}, group {group}"
            is_off = bool(skipped[group]) != wanted.skipped
            is_off |= verdicts[group] != wanted.verdict
            if not self._is_certain() and wanted.finite and is_off:
                # What the narrow type overflowed is skipped, or not, as any other.
                wanted.finite = False
                wanted.skipped = self.model.skips
                wanted.verdict = verdicts[group]
            if bool(skipped[group]) != wanted.skipped:
                raise DrawError(f"{of_group}: skipped is {skipped[group]}")
            if verdicts[group] != wanted.verdict:
                raise DrawError(
                    f"{of_group}: the verdict is {verdicts[group]}, not "
                    f"{wanted.verdict}"
                )
            norm = float(np.ravel(metrics["gradient_norm"])[group])
            if np.isfinite(norm) != wanted.finite:
                raise DrawError(f"{of_group}: the gradient's norm is {norm}")
            loss = float(np.ravel(metrics["loss"])[group])
            if not modelled or not wanted.finite:
                continue
            if abs(norm - wanted.grad_norm) > wanted.norm_tolerance:
                raise DrawError(
                    f"{of_group}: the gradient's norm is {norm}, not "
                    f"{wanted.grad_norm}, up to {wanted.norm_tolerance}"
                )
            if not np.isfinite(wanted.loss) and not np.isfinite(loss):
                continue
            if not abs(loss - wanted.loss) <= wanted.loss_tolerance:
                raise DrawError(
                    f"{of_group}: the loss is {loss}, not {wanted.loss}, up to "
                    f"{wanted.loss_tolerance}"
                )

    def _norms(self, stepped: Any) -> list[dict[str, np.ndarray]]:
        """Returns the norms of each array, by path, of each group."""
        if not stepped.norms:
            return []
        norms = stepped.norms[""]
        values = np.reshape(norms.values, (self.shape.groups, 3, -1))
        return [dict(zip(norms.paths, x.T, strict=True)) for x in values]

    def _check_evaluated(
        self, where: str, state: Any, leaves: list[Any], modelled: bool
    ) -> None:
        """Checks what is evaluated."""
        if not self._evaluates_others():
            return
        if self._evaluated is None:
            make = step_lib.make_for_evaluation(self.experiment, self.mesh)
            self._evaluated = jax.jit(make)
        try:
            evaluated = self._leaves(self._evaluated(state).experiment)
        except Exception as e:
            raise DrawError(f"{where}: the evaluation raised {e!r}") from e
        for group, found in enumerate(evaluated):
            _check_finite(f"{where}, evaluated in group {group}", found)
            if not modelled:
                continue
            wanted = self.model.evaluated(leaves[group])
            for name, x in found.items():
                if not name.startswith(("params/", "net_state/")):
                    continue
                old = leaves[group][name]
                epsilon = model_lib.EPSILON.get(str(old.dtype), 0)
                bound = 8 * epsilon * (1 + np.abs(wanted[name]))
                _check_close(
                    f"{where}, evaluated in group {group}", name, x, wanted[name], bound
                )

    def _evaluates_others(self) -> bool:
        is_apart = "apart" in LAYOUTS[self.choice["layout"]]
        is_schedule_free = self.choice["rule"] == "schedule_free_sgd"
        return self.choice["average"] != "none" or is_schedule_free or is_apart

    # Batches, of shape (groups, replicas, micro-batches, rows, ...).

    def _batch(self, generator: np.random.Generator) -> dict[str, np.ndarray]:
        shape = self.shape
        lead = (shape.groups, shape.replicas, shape.micro_batches, _ROWS)
        normal = lambda size: generator.normal(size=(*lead, size)).astype(np.float32)
        return {
            "x": normal(_FEATURES),
            "y": 2 * normal(_OUTPUTS),
            "gain": np.ones((*lead, 1), np.float32),
            "extra": np.zeros(lead, np.float32),
            "mass": generator.uniform(0.5, 2, lead).astype(np.float32),
            # Read by the model only.
            "overflows": np.zeros(lead, bool),
        }

    def _feed(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the rows of each model."""
        feed = {}
        for name in ("x", "y", "gain", "extra", "mass"):
            rest = batch[name].shape[4:]
            feed[name] = batch[name].reshape(
                self.shape.models, self.shape.models_rows, *rest
            )
        return feed

    def _parts(self, batch: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """Returns the batch of each group, in replicas and micro-batches."""
        groups = []
        for group in range(self.shape.groups):
            groups.append({name: x[group] for name, x in batch.items()})
        return groups

    def _leaves(self, state: Any) -> list[dict[str, np.ndarray]]:
        """Returns the leaves of the state of each group, by path."""
        arrays = {}
        for path, x in jax.tree_util.tree_leaves_with_path(state):
            arrays[trees.path_name(path)] = np.array(jax.device_get(x))
        if self.shape.groups == 1:
            return [arrays]
        groups = []
        for group in range(self.shape.groups):
            groups.append({name: x[group] for name, x in arrays.items()})
        return groups


def _halved(path: Any, x: Any) -> Any:
    if trees.path_name(path).endswith("/hyperparams/update_scale"):
        return np.full_like(x, 0.5)
    return x


def _typed(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(x, old[name].dtype) for name, x in new.items()}


def _scale_of(leaves: Mapping[str, np.ndarray]) -> float:
    for name, x in leaves.items():
        if name.endswith("/current_loss_scale"):
            return float(x)
    return 4.0


def _plant(
    program: Program,
    batch: dict[str, np.ndarray],
    fault: Fault,
    before: list[Any],
    scale: float,
) -> None:
    """Puts a fault into the batch of a step."""
    place = (fault.group, fault.replica, fault.micro_batch, fault.row)
    word, _, value = fault.kind.partition(" ")
    if word == "input":
        batch["x"][place][0] = float(value)
    elif word == "label":
        batch["y"][place][1] = float(value)
    elif word == "loss":
        batch["extra"][place] = float(value)
    elif word == "cast":
        batch["x"][place][0] = 1e5
    elif word == "forward":
        batch["gain"][place] = 6e4
        batch["overflows"][place] = True
    elif word == "backward":
        batch["y"][place][1] = 3e7
        batch["overflows"][place] = True
    else:
        assert word == "large"
        # The largest element of a replica's gradient, which is about linear in large
        # labels, is to be near float16's largest number on all replicas, and of one
        # sign, so that their sum is above it.
        batch["x"][fault.group] = 0.5
        if program.choice["loss_scale"] == "none":
            scale = 1.0
        group = batch["y"][fault.group]
        group[:] = 1e3
        parts = program._parts(batch)[fault.group]
        largest = 0.0
        for replica in range(program.shape.replicas):
            for number in range(program.shape.micro_batches):
                rows = {name: x[replica, number] for name, x in parts.items()}
                part = program.model.part(before[fault.group], rows)
                for grad in part.grads.values():
                    largest = max(largest, float(np.max(np.abs(grad))))
        group[:] = 1e3 * 2.5e4 / scale / largest


def may_move(name: str, exchanged: bool) -> str:
    """Returns why a leaf may move in a skipped step; empty if it may not.

    Args:
      name: its path in the state of the learner.
      exchanged: whether slices exchange parameters after this step.
    """
    word = name.rpartition("/")[2]
    if word in ("current_loss_scale", "good_steps"):
        return "the loss scale adapts to the step that was skipped"
    module, _, slot = name.removeprefix("opt_state/").partition("/")
    if module.startswith("OuterOptimizer"):
        if slot == "steps":
            return "a skipped step counts, so that all slices exchange together"
        if exchanged:
            return "the parameters of other slices arrive"
    if exchanged and name.startswith("params/"):
        return "the parameters of other slices arrive"
    return ""


def _check_skipped(
    where: str, before: Mapping[str, Any], after: Mapping[str, Any], predicted: Any
) -> None:
    for name, x in after.items():
        if may_move(name, predicted.exchanged):
            continue
        if x.tobytes() != before[name].tobytes():
            raise DrawError(
                f"{where}: {name} moved in a skipped step, from {_short(before[name])} "
                f"to {_short(x)}"
            )


def _check_constant(
    where: str, before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]
) -> None:
    """Checks the network's state that nothing writes."""
    for name, x in after.items():
        if name.endswith("/table") and x.tobytes() != before[name].tobytes():
            moved = np.max(np.abs(x - before[name]))
            raise DrawError(f"{where}: {name}, which nothing writes, moved by {moved}")


def _check_moved(
    where: str, before: Mapping[str, Any], after: Mapping[str, Any], predicted: Any
) -> None:
    for name, x in after.items():
        wanted = predicted.leaves[name]
        if not predicted.finite and not predicted.skipped:
            # An update that nothing guards.
            continue
        if name.endswith("/table"):
            # It is checked bit by bit.
            continue
        if "/residual/" in name:
            # A rounding error.
            if not np.all(np.isfinite(x)):
                raise DrawError(f"{where}: {name} is {_short(x)}")
            continue
        _check_close(where, name, x, wanted, predicted.tolerances[name])


def _check_norms(
    where: str,
    norms: Mapping[str, np.ndarray],
    before: Mapping[str, np.ndarray],
    after: Mapping[str, np.ndarray],
) -> None:
    """Compares the norms of parameters and updates with those of the state."""
    for path, (_, of_param, of_update) in norms.items():
        new = after[f"params/{path}"].astype(np.float64)
        update = new - before[f"params/{path}"].astype(np.float64)
        for x, norm in ((new, of_param), (update, of_update)):
            wanted = np.linalg.norm(x)
            # Float32 sums of squares, of which the smallest are 0. XLA may compute the
            # new value once more for them, and round its last sum otherwise.
            rounding = 2.0**-23 * np.linalg.norm(new)
            tolerance = 1e-5 * wanted + rounding + 1e-18
            if np.isfinite(wanted) and not abs(norm - wanted) <= tolerance:
                raise DrawError(f"{where}: a norm of {path} is {norm}, not {wanted}")


def _check_close(
    where: str, name: str, x: np.ndarray, wanted: np.ndarray, tolerance: Any
) -> None:
    off = np.abs(np.asarray(x, np.float64) - np.asarray(wanted, np.float64))
    if np.all(off <= tolerance):
        return
    raise DrawError(
        f"{where}: {name} is {_short(x)}, not {_short(wanted)}: off by "
        f"{np.nanmax(off) if not np.all(np.isnan(off)) else np.nan:.3g}, up to "
        f"{np.max(tolerance):.3g}"
    )


def _check_finite(where: str, leaves: Mapping[str, np.ndarray]) -> None:
    for name, x in leaves.items():
        if np.issubdtype(x.dtype, np.integer):
            continue
        if not np.all(np.isfinite(np.asarray(x, np.float64))):
            raise DrawError(f"{where}: {name} is {_short(x)}")


def _check_free(
    where: str, leaves: Mapping[str, np.ndarray], free: Mapping[str, np.ndarray]
) -> None:
    """Compares with the model that made all steps by itself, of those not skipped."""
    for name, x in leaves.items():
        if name.startswith("params/") or name == "global_step":
            # float32 sums in another order, of several steps.
            _check_close(f"{where}, all steps", name, x, free[name], 2e-3)


def _short(x: np.ndarray) -> str:
    flat = np.ravel(np.asarray(x, np.float64))[:4].tolist()
    return f"{x.dtype}{list(x.shape)} {flat}"


def failures(number: int, patterns: Iterator[int] | range) -> Iterator[str]:
    """Yields a text for each draw of a program that does not hold."""
    try:
        program = Program(number)
    except Exception:
        yield f"program {number} cannot be made:\n{traceback.format_exc()}"
        return
    for pattern in patterns:
        try:
            program.run(pattern)
        except DrawError as e:
            yield _report(number, pattern, str(e))
        except Exception:
            yield _report(number, pattern, traceback.format_exc())


def _report(number: int, pattern: int, what: str) -> str:
    command = f"python -m tests.numerics_sweep --only={number}:{pattern}"
    return f"{command}\n  {what}"


def main() -> None:
    """Runs the draws that the flags ask for."""
    parser = argparse.ArgumentParser(description="Sweeps the numerics of a step.")
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--patterns", type=int, default=PATTERNS)
    parser.add_argument(
        "--seed", type=int, default=0, help="the first program's number"
    )
    parser.add_argument("--only", default="", help="PROGRAM or PROGRAM:PATTERN")
    options = parser.parse_args()
    numbers: Any = range(options.seed, options.seed + options.programs)
    patterns: Any = range(options.patterns)
    if options.only:
        program, _, pattern = options.only.partition(":")
        numbers = [int(program)]
        if pattern:
            patterns = [int(pattern)]
        choice = draw_choice(int(program))
        for key, value in choice.items():
            print(f"{key} = {value!r}")
        for pattern in patterns:
            print(pattern, draw_faults(choice, int(program), pattern)[0])
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    pairs: set[Any] = set()
    failed = 0
    for index, number in enumerate(numbers):
        if index and not index % 10:
            print(f"{index} programs, {failed} draws failed", flush=True)
        choice = draw_choice(number)
        values = [(key, str(value)) for key, value in choice.items()]
        counts.update(values)
        pairs.update((a, b) for a in values for b in values if a < b)
        for text in failures(number, patterns):
            failed += 1
            print(text, flush=True)
        # Thousands of compiled programs would not fit into the memory.
        jax.clear_caches()
    for (key, value), count in sorted(counts.items()):
        print(f"{count:6d} {key} = {value}")
    draws = len(numbers) * len(patterns)
    print(f"{draws} draws of {len(numbers)} programs, {len(pairs)} pairs of values")
    print(f"{failed} draws failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    main()
