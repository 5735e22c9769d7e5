"""The models that are timed: perceptrons of two sizes, and an experiment that trains
one; a transformer and a convolutional network, in each precision.
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from benchmarks import measure
from experiments.lm import model as lm_model
from tests import toy
from xshard import experiment as experiment_lib
from xshard.dryrun import analysis, collectives
from xshard.run import preflight
from xshard.training import state as state_lib


class Size(NamedTuple):
    """The size of a model and of its batches.

    Attributes:
      width: the width of the input and of each layer.
      layers: the number of layers before the output layer.
      batch: the number of examples per step, on all devices together.
    """

    width: int
    layers: int
    batch: int


# The sizes by the time of a step, on one or two cores of a CPU and on a Hopper GPU.
_ON_CPU = {"1 ms": Size(128, 4, 128), "20 ms": Size(512, 4, 512)}
_ON_ACCELERATOR = {"1 ms": Size(2048, 4, 4096), "20 ms": Size(4096, 8, 16384)}


def sizes() -> dict[str, Size]:
    """Returns the models for the devices here, by the approximate time of a step."""
    return _ON_CPU if jax.default_backend() == "cpu" else _ON_ACCELERATOR


def make(
    size: Size, dtype: Any
) -> tuple[Callable[[Any, jax.Array], jax.Array], Callable[[], Any]]:
    """Returns the loss, a function of parameters and input computed in `dtype`, and the
    parameters' initializer.
    """
    network = hk.without_apply_rng(
        hk.transform(lambda x: hk.nets.MLP([size.width] * size.layers + [1])(x)[:, 0])
    )

    def loss(params: Any, x: jax.Array) -> jax.Array:
        params, x = jax.tree.map(lambda a: a.astype(dtype), (params, x))
        return jnp.mean((network.apply(params, x).astype(jnp.float32) - 1) ** 2)

    return loss, lambda: network.init(jax.random.key(0), jnp.ones((1, size.width)))


class Network(NamedTuple):
    """A network whose step is timed in several precisions.

    Attributes:
      outputs: a Haiku function of an input.
      input: returns the input of a step.
    """

    outputs: Callable[[jax.Array], jax.Array]
    input: Callable[[], jax.Array]


def networks() -> dict[str, Network]:
    """Returns the networks that are timed in several precisions, by name.

    They are smaller on a CPU, where half precision is slow.
    """
    if jax.default_backend() == "cpu":
        layers, width, length, rows, channels, side = 2, 64, 64, 8, 8, 16
    else:
        layers, width, length, rows, channels, side = 12, 1024, 1024, 16, 256, 64

    def transformer(text: jax.Array) -> jax.Array:
        return lm_model.Transformer(layers, width, width // 64, 4 * width, remat=False)(
            text
        )

    def convolutions(images: jax.Array) -> jax.Array:
        x = images
        for number in range(8):
            x = x + jax.nn.relu(hk.Conv2D(channels, 3, name=f"conv_{number}")(x))
        return jnp.mean(x, axis=(1, 2))

    def text() -> jax.Array:
        return jax.random.randint(jax.random.key(1), (rows, length), 0, lm_model.BYTES)

    def images() -> jax.Array:
        shape = (4 * rows, side, side, channels)
        return jax.random.normal(jax.random.key(1), shape)

    return {
        "transformer": Network(transformer, text),
        "convolutions": Network(convolutions, images),
    }


def made(
    network: Network, dtype: Any
) -> tuple[Callable[[Any, jax.Array], jax.Array], Callable[[], Any]]:
    """Returns a network's loss, as `make` does, and its parameters' initializer."""
    transformed = hk.without_apply_rng(hk.transform(network.outputs))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.floating):
            x = x.astype(dtype)
        params = jax.tree.map(lambda a: a.astype(dtype), params)
        return jnp.mean((transformed.apply(params, x).astype(jnp.float32) - 1) ** 2)

    return loss, lambda: transformed.init(jax.random.key(0), network.input()[:1])


class Wide(toy.Toy):
    """The toy experiment with a larger network, so that a step takes longer than the
    call's overhead.
    """

    def forward(self, batch: Any, *, is_training: bool) -> jax.Array:
        """Returns the outputs of a perceptron."""
        del is_training
        return hk.nets.MLP([self.config.width] * self.config.layers + [1])(batch["x"])[
            :, 0
        ]


class RunStep:
    """The jitted step of a run, with its state and one batch.

    Attributes:
      first: the seconds of the first step, including compilation.
    """

    def __init__(
        self, experiment: type[toy.Toy], size: Size, changes: Mapping[str, Any]
    ):
        """Compiles the step, without fingerprints, and with the given changes of the
        config.
        """
        config = toy.get_config()
        config.update(
            {"width": size.width, "layers": size.layers, "examples": 4 * size.batch}
        )
        config.update({"batch_size": size.batch, "fingerprint_every_steps": 0})
        config.update_from_flattened_dict(dict(changes))
        made = experiment(config)
        mesh = experiment_lib.mesh_of(config)
        train = preflight.train_batches(made, mesh)
        self._batch = next(train)
        self._step = preflight.jitted_step(made, mesh)
        self._state = state_lib.init(made, mesh, 0, train.example)
        self.first = self.seconds(1)

    def seconds(self, steps: int) -> float:
        """Returns the seconds per step of this many steps, including the wait for the
        last one.
        """
        begin = time.perf_counter()
        for _ in range(steps):
            self._state, *rest = self._step(self._state, self._batch)
        jax.block_until_ready((self._state, rest))
        return (time.perf_counter() - begin) / steps


def in_turn(
    sides: Mapping[str, RunStep], steps: int, rounds: int
) -> dict[str, list[float]]:
    """Returns the seconds per step of each side in each round; a turn has `steps`
    steps.
    """
    turns = {
        title: functools.partial(side.seconds, steps) for title, side in sides.items()
    }
    return measure.in_turn(turns, rounds)


def absolute(
    sides: Mapping[str, list[float]], what: Callable[[str], str]
) -> Iterator[measure.Row]:
    """Yields a row with the milliseconds of each side, named by `what`."""
    for title, values in sides.items():
        yield measure.figure(what(title), [1e3 * value for value in values], "ms")


def bytes_sent(config: Any) -> float:
    """Returns the bytes that each device here sends in a step of a run, on average.

    They are counted in the compiled program.

    Args:
      config: the run's config.
    """
    experiment = experiment_lib.load(config.experiment)(config)
    mesh = experiment_lib.mesh_of(config)
    train = preflight.train_batches(experiment, mesh)
    state = state_lib.abstract_state(experiment, mesh, 0, train.example)
    step = preflight.jitted_step(experiment, mesh)
    compiled = step.lower(state, next(train)).compile()
    # Only the exchange of an outer rule is conditional.
    every = analysis.exchange_every_steps(config) or 1
    total = 0.0
    for one in collectives.of(compiled):
        sent = one.times * collectives.sent(mesh, one)
        total += sent / every if one.is_conditional else sent
    return total
