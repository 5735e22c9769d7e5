"""Runs with a planted fault, and a check that their replay names it.

A fault has a kind, a layer and an example. It occurs in a run with a given precision
and loss scale.
"""

import inspect
import pathlib
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from jax.experimental import pallas

import xshard
from tests import toy
from xshard import data, loop
from xshard.replay import diagnosis, replayer

EXAMPLES = 128
# Of all groups: one for each device of a test.
REPLICAS = 8
LAYERS = 3
WIDTH = 6
FLOAT32 = "params=float32,compute=float32,output=float32"
FLOAT16 = "params=float32,compute=float16,output=float32"


class Layers(toy.Toy):
    """A stack of layers, one of which applies the fault to a single example, marked by
    a `flag` of 1 in the data.
    """

    def train_data(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(EXAMPLES, 3)).astype(np.float32)
        flag = (np.arange(EXAMPLES) == self.config.example).astype(np.float32)
        y = x.sum(axis=1)
        if self.config.kind == "bad_example":
            x[self.config.example, 1] = np.nan
        return {"x": x, "y": y, "flag": flag}

    def eval_data(self):
        return {name: np.zeros_like(x[:8]) for name, x in self.train_data().items()}

    def forward(self, batch, *, is_training):
        x = batch["x"]
        for layer in range(LAYERS):
            x = jnp.tanh(hk.Linear(WIDTH, name=f"layer_{layer}")(x))
            if layer == self.config.layer:
                x = self._fault(x, batch["flag"][:, None])
        return hk.Linear(1, name="last")(x)[:, 0]

    def _fault(self, x, flag):
        # The fault of each kind arises in the first line of its case, where `line`
        # looks for it.
        match self.config.kind:
            case "zero_over_zero":
                return x * (1 - flag) / (1 - flag)
            case "inf_minus_inf":
                large = jnp.exp(flag * 200)  # The infinities arise here.
                return x + (large - large)
            case "logarithm":
                return x + jnp.log(1 - 2 * flag)
            case "power":
                return x * jnp.power(1 - 2 * flag, 0.5)
            case "root_gradient":
                return x + jnp.sqrt(jnp.square(x) * (1 - flag))
            case "forward_overflow":
                return x + 1e-6 * jnp.square(x + 3000 * flag)
            case "by_platform":
                wrong = lambda x, flag: x + jnp.log(1 - 2 * flag)
                return jax.lax.platform_dependent(x, flag, tpu=_kernel, default=wrong)
            case "masked":
                return x + jax.nn.softmax(jnp.where(flag > 0, -jnp.inf, x))
            case "within_jit":
                wrong = lambda x, flag: x + jnp.log(1 - 2 * flag)
                return jax.jit(wrong)(x, flag)
            case "gradient_overflow":
                return x + 4e4 * flag * (x - jax.lax.stop_gradient(x))
        return x

    def optimizer(self):
        opt = xshard.CrossShardOptimizer(
            optax.sgd(0.01), slice_axis_name="slice", **self.config.reduction
        )
        if self.config.loss_scale.kind == "none":
            return opt
        scale = xshard.DynamicLossScale(initial_loss_scale=2.0**self.config.exponent)
        return xshard.MixedPrecisionLossScaleOptimizer(opt, scale)


@jax.custom_vjp
def _kernel(x, flag):
    """The TPU branch of the 'by_platform' fault, which cannot be compiled for the
    platform that the tests run on.
    """

    def add(x, flag, out):
        out[...] = x[...] + jnp.log(1 - 2 * flag[...])

    out_shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(add, out_shape=out_shape)(x, flag)


_kernel.defvjp(lambda x, flag: (_kernel(x, flag), None), lambda _, grad: (grad, None))


# Kinds of faults within what a network calls.
OTHERS = ("by_platform", "within_jit", "masked")


class Fault(NamedTuple):
    """A fault.

    Attributes:
      kind: a case of `Layers._fault`, or bad_example.
      layer: the layer that has it.
      example: the number of the example that triggers it.
      precision: the run's policy.
      loss_scale: 'none', so that the run stops; or 'dynamic', so that it skips the
        step.
      micro_batches: the run's setting.
      shard_update: the run's setting.
      groups: the number of groups of replicas.
    """

    kind: str
    layer: int = 1
    example: int = 37
    precision: str = FLOAT32
    loss_scale: str = "none"
    micro_batches: int = 1
    shard_update: bool = False
    groups: int = 1


def get_config(fault: Fault) -> ml_collections.ConfigDict:
    """Returns the config of a run of one epoch with a fault."""
    config = toy.get_config()
    config.experiment = "tests.replay.planted.Layers"
    config.loss_scale.kind = fault.loss_scale
    values = fault._asdict() | {"exponent": 13, "batch_size": 32 // fault.groups}
    del values["loss_scale"]
    config.update(values)
    del config["shard_update"], config["groups"]
    config.reduction.shard_update = fault.shard_update
    config.steps = EXAMPLES // config.batch_size
    config.update(
        {"log_every_steps": 1, "eval_every_steps": 100, "writers": ("jsonl",)}
    )
    config.checkpoint.update({"every_steps": 100})
    if fault.groups > 1:
        numbers = np.arange(REPLICAS).reshape(fault.groups, -1)
        config.group_assignment = tuple(map(tuple, numbers.tolist()))
    return config.lock()


def train(fault: Fault, directory: pathlib.Path) -> None:
    """Trains a run with a fault, until the fault stops it or to its end."""
    loop.run(get_config(fault), str(directory), "")


def line(kind: str) -> str:
    """Returns the source line of a kind of fault, in the form that a report prints."""
    source, begin = inspect.getsourcelines(Layers._fault)
    (case,) = (number for number, text in enumerate(source) if f'"{kind}"' in text)
    file = pathlib.Path(__file__).relative_to(pathlib.Path.cwd())
    return f"{file}:{begin + case + 1}: {source[case + 1].strip()}"


def place(fault: Fault) -> tuple[int, list[int]]:
    """Returns the first step in which a group's batch has the example, and the
    example's rows there over all groups.
    """
    config = get_config(fault)
    size, groups = config.batch_size, fault.groups
    numbers = data.order({"x": np.zeros(EXAMPLES)}, config.seed, groups)
    orders = [numbers(group, np.arange(EXAMPLES)).tolist() for group in range(groups)]
    places = [order.index(fault.example) for order in orders]
    # The step's number, counted from 0.
    step = min(places) // size
    rows = [
        group * size + at % size
        for group, at in enumerate(places)
        if at // size == step
    ]
    return step + 1, rows


def wrong(fault: Fault, directory: pathlib.Path) -> list[str]:
    """Returns the differences between a replay's findings and the planted fault; empty
    if there are none.
    """
    step, rows = place(fault)
    run = replayer.Replayer(str(directory))
    *_, repeated = run.steps(run.suspect_steps())
    finding = diagnosis.Diagnosis(run, repeated).find()
    if repeated.number != step or finding is None:
        return [f"step {repeated.number} for {step}, {finding}"]
    size = fault.groups * get_config(fault).batch_size // REPLICAS
    found_rows = []
    found_examples = []
    for of_cause in finding.rows or []:
        found_rows += of_cause
        found_examples += run.examples(repeated.number, repeated.batch, of_cause)
    # What was found, and what was planted.
    checks = {
        "replicas": (finding.replicas, sorted({row // size for row in rows})),
        "rows": (sorted(found_rows), rows),
        "examples": (sorted(found_examples), [fault.example] * len(rows)),
        "reproduced": (run.difference(repeated), None),
    }
    if fault.kind == "bad_example":
        checks["input"] = (finding.first.input, "the batch's 'x'")
    else:
        checks["line"] = (finding.first.line, line(fault.kind))
        is_backward = fault.kind in ("root_gradient", "gradient_overflow")
        checks["backward"] = (finding.first.backward, is_backward)
    differences = []
    for name, (actual, expected) in checks.items():
        if actual != expected:
            differences.append(f"{name}: {actual!r} for {expected!r}")
    return differences
