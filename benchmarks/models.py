"""The models that are timed: perceptrons of two sizes, and an experiment that trains
one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from tests import toy


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


def make_config(size: Size, batches: int) -> Any:
    """Returns the config of a run that trains `Wide`.

    Args:
      size: its size.
      batches: the number of batches of an epoch.
    """
    config = toy.get_config()
    config.experiment = "benchmarks.models.Wide"
    config.update({"width": size.width, "layers": size.layers})
    config.update({"batch_size": size.batch, "examples": batches * size.batch})
    # The default of runs, which the toy's config changes.
    config.fingerprint_every_steps = 10
    return config
