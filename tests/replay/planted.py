"""A run with a fault that was put into it: in a layer, for one example, of a kind, in a precision; and what replaying it names."""

import inspect
import itertools
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
from xshard.replay import anatomy, past

EXAMPLES, LAYERS, WIDTH = 128, 3, 6
FLOAT32, FLOAT16 = (f"params=float32,compute={x},output=float32" for x in ("float32", "float16"))


class Layers(toy.Toy):
    """Layers of which one does to the last example of all what its data say: their `flag` is 1 for one, and 0 for others."""

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
        # Each kind is one line, which it is told by.
        match self.config.kind:
            case "zero_over_zero":
                return x * (1 - flag) / (1 - flag)
            case "inf_minus_inf":
                large = jnp.exp(flag * 200)  # inf_minus_inf, the infinities
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
            case "gradient_overflow":
                return x + 4e4 * flag * (x - jax.lax.stop_gradient(x))
        return x

    def optimizer(self):
        opt = xshard.CrossShardOptimizer(
            optax.sgd(0.01), slice_axis_name="slice", **self.config.reduction
        )
        if self.config.loss_scale == "none":
            return opt
        scale = xshard.DynamicLossScale(initial_loss_scale=2.0**self.config.exponent)
        return xshard.MixedPrecisionLossScaleOptimizer(opt, scale)


@jax.custom_vjp
def _kernel(x, flag):
    """The same for TPUs, which cannot be compiled for what the tests are on."""

    def add(x, flag, out):
        out[...] = x[...] + jnp.log(1 - 2 * flag[...])

    return pallas.pallas_call(add, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, flag)


_kernel.defvjp(lambda x, flag: (_kernel(x, flag), None), lambda _, grad: (grad, None))


KINDS = (
    "zero_over_zero", "inf_minus_inf", "logarithm", "power", "root_gradient", "bad_example", "forward_overflow",
    "gradient_overflow",
)  # fmt: skip


class Fault(NamedTuple):
    """A fault.

    Attributes:
      kind: one of KINDS, or "by_platform".
      layer: in which layer.
      example: for which example.
      precision: the run's.
      loss_scale: 'none', then the run stops; or 'dynamic', then the step is skipped.
      micro_batches: the run's.
      shard_update: the run's.
      groups: how many groups of replicas.
    """

    kind: str
    layer: int = 1
    example: int = 37
    precision: str = FLOAT32
    loss_scale: str = "none"
    micro_batches: int = 1
    shard_update: bool = False
    groups: int = 1


def draw(rng: np.random.Generator, examples: int) -> list[Fault]:
    """A fault at random, for so many examples; where only half precision or a loss scale has such, with these."""
    kind = str(rng.choice(KINDS))
    # A root's gradient is large where its argument is small: in float16, under a scale, that is a fault of its own.
    is_half = kind.endswith("_overflow") or (kind != "root_gradient" and rng.random() < 0.5)
    is_scaled = kind == "gradient_overflow" or rng.random() < 0.5
    fault = Fault(
        kind,
        layer=int(rng.integers(LAYERS)),
        precision=FLOAT16 if is_half else FLOAT32,
        loss_scale="dynamic" if is_scaled else "none",
        micro_batches=int(rng.choice([1, 2])),
        shard_update=bool(rng.integers(2)),
        groups=int(rng.choice([1, 2])),
    )
    chosen = rng.choice(EXAMPLES, size=examples, replace=False).tolist()
    return [fault._replace(example=example) for example in chosen]


def get_config(fault: Fault, replicas: int = 8) -> ml_collections.ConfigDict:
    """A run of one epoch."""
    config = toy.get_config()
    config.experiment = "tests.replay.planted.Layers"
    config.update(fault._asdict() | {"exponent": 13, "batch_size": 32 // fault.groups})
    del config["shard_update"], config["groups"]
    config.reduction.shard_update = fault.shard_update
    config.steps = EXAMPLES // config.batch_size
    config.update({"log_every_steps": 1, "eval_every_steps": 100, "writers": ("jsonl",)})
    config.checkpoint.update({"every_steps": 100})
    if fault.groups > 1:
        numbers = np.arange(replicas).reshape(fault.groups, -1)
        config.group_assignment = tuple(map(tuple, numbers.tolist()))
    return config.lock()


def train(fault: Fault, directory: pathlib.Path, replicas: int = 8) -> None:
    """Runs it, until the fault stops it or to its end."""
    loop.run(get_config(fault, replicas), str(directory), "")


def line(kind: str) -> str:
    """The line that a kind of fault is on, as a report has it."""
    source, begin = inspect.getsourcelines(Layers._fault)
    (case,) = (number for number, text in enumerate(source) if f'"{kind}"' in text)
    return f"{pathlib.Path(__file__).relative_to(pathlib.Path.cwd())}:{begin + case + 1}"


def place(fault: Fault) -> tuple[int, list[int]]:
    """The first step that has the example in its batch of some group, and the rows that it has there, of all groups."""
    config = get_config(fault)
    size, groups = config.batch_size, fault.groups
    numbers = data.order({"x": np.zeros(EXAMPLES)}, config.seed, groups)
    orders = [numbers(group, np.arange(EXAMPLES)).tolist() for group in range(groups)]
    places = [order.index(fault.example) for order in orders]
    step = min(places) // size
    rows = [group * size + at % size for group, at in enumerate(places) if at // size == step]
    return step + 1, rows


def wrong(fault: Fault, directory: pathlib.Path, replicas: int = 8) -> list[str]:
    """What a replay says otherwise than it is; nothing if it names all of it."""
    step, rows = place(fault)
    run = past.Past(str(directory))
    *_, made = run.steps(run.suspects())
    found = anatomy.Anatomy(run, made).find()
    if made.number != step or found is None:
        return [f"step {made.number} for {step}, {found}"]
    size = fault.groups * get_config(fault).batch_size // replicas
    numbers = [run.examples(made.number, made.batch, group) for group in found.rows or []]
    said = {
        "replicas": (found.replicas, sorted({row // size for row in rows})),
        "rows": (sorted(itertools.chain(*found.rows or [])), rows),
        "examples": (sorted(itertools.chain(*numbers)), [fault.example] * len(rows)),
        "reproduced": (run.difference(made), None),
    }
    if fault.kind == "bad_example":
        said["input"] = (found.first.input, "the batch's 'x'")
    else:
        said["line"] = (found.first.line, line(fault.kind))
        is_backward = fault.kind in ("root_gradient", "gradient_overflow")
        said["backward"] = (found.first.backward, is_backward)
    said |= _of_cure(fault, found)
    return [
        f"{name}: {is_so!r} for {ought!r}"
        for name, (is_so, ought) in said.items()
        if is_so != ought
    ]


def _of_cure(fault: Fault, found: anatomy.Finding) -> dict[str, tuple[object, object]]:
    if fault.kind == "bad_example":
        return {"cure": (found.cure, "")}
    if fault.kind == "gradient_overflow" and fault.loss_scale == "dynamic":
        return {"scale": (found.scale_exponent is not None and "too high" in found.cure, True)}
    no_scale = "no loss scale would cure it" in found.cure
    if fault.kind == "forward_overflow":
        finite = "in float32 the step is finite" in found.cure
        return {"cure": ((no_scale, finite), (fault.loss_scale == "dynamic", True))}
    return {"cure": (no_scale, fault.loss_scale == "dynamic")}
