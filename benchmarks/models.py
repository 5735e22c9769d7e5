"""What is timed: perceptrons of two sizes, and an experiment of the smaller one for the loop."""

from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from tests import toy


class Size(NamedTuple):
    """A model and its work.

    Attributes:
      width: of the input and of each layer.
      layers: how many, before the output's.
      batch: examples a step, on all devices together.
    """

    width: int
    layers: int
    batch: int


# By what a step takes: on one or two cores of a CPU, and on a GPU of the Hopper kind.
_ON_CPU = {"1 ms": Size(128, 4, 128), "20 ms": Size(512, 4, 512)}
_ON_ACCELERATOR = {"1 ms": Size(2048, 4, 4096), "20 ms": Size(4096, 8, 16384)}


def sizes() -> dict[str, Size]:
    """The models for the devices at hand, by about how long a step takes."""
    return _ON_CPU if jax.default_backend() == "cpu" else _ON_ACCELERATOR


def make(size: Size, dtype: Any) -> tuple[Callable[[Any, jax.Array], jax.Array], Callable[[], Any]]:
    """The loss as a function of parameters and input, computed in `dtype`; what makes the parameters."""
    network = hk.without_apply_rng(
        hk.transform(lambda x: hk.nets.MLP([size.width] * size.layers + [1])(x)[:, 0])
    )

    def loss(params: Any, x: jax.Array) -> jax.Array:
        params, x = jax.tree.map(lambda a: a.astype(dtype), (params, x))
        return jnp.mean((network.apply(params, x).astype(jnp.float32) - 1) ** 2)

    return loss, lambda: network.init(jax.random.key(0), jnp.ones((1, size.width)))


class Wide(toy.Toy):
    """The toy with a network whose step takes long enough to be a step, and not only a call."""

    def forward(self, batch: Any, *, is_training: bool) -> jax.Array:
        """The outputs of a perceptron."""
        del is_training
        return hk.nets.MLP([self.config.width] * self.config.layers + [1])(batch["x"])[:, 0]
