"""What a learner asks of an adaptation of its network, such as `xshard.lora`."""

import abc
from collections.abc import Callable, Mapping
from typing import Any

import jax


class Adaptation(abc.ABC):
    """Further parameters of a network, which change how it uses its own."""

    @property
    @abc.abstractmethod
    def factors(self) -> dict[str, float]:
        """What else than parameters the adaptation follows from, as JSON values."""

    @abc.abstractmethod
    def extend(
        self,
        key: jax.Array,
        params: Mapping[str, Mapping[str, jax.Array]],
        requested: Mapping[str, tuple[int, ...]],
    ) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
        """Returns the first parameters of a network with those of the adaptation.

        Args:
          key: the random key.
          params: the parameters of the network, a Haiku tree.
          requested: the shape in which the network asks for each of them, by path.

        Returns:
          The parameters, and the shapes likewise.
        """

    @abc.abstractmethod
    def around(self, network: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a Haiku function that is the network as it is adapted."""

    @abc.abstractmethod
    def merge(self, params: Any) -> Any:
        """Returns the parameters with which the network alone is as it is adapted."""

    @abc.abstractmethod
    def trained(self, params: Any) -> list[str]:
        """Returns the paths of the parameters to train, of those of `extend`."""
