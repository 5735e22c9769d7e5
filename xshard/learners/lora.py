"""Low-rank adaptation of a network: its arrays stay fixed, and to some of them the
product of two small trained matrices is added.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021,
https://arxiv.org/abs/2106.09685.
"""

import dataclasses
import functools
import math
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from xshard import errors
from xshard.base import arguments
from xshard.learners import state as state_lib
from xshard.optimizers import trees

# The ends of the names of the two matrices that belong to an array. The first is drawn
# at random and the second is zero, so at first nothing is added.
_A = "_lora_a"
_B = "_lora_b"
# Matches the paths of both.
PATHS = "_lora_[ab]$"


# The key of the adaptations in the metadata of a checkpoint or a file: what `factors`
# returns, by the learner's path.
METADATA = "lora"


def lora(rank: int, alpha: float, select: str, *, train: str = "") -> "Lora":
    """Adapts a network by low-rank matrices, which alone are trained.

    A selected array `w`, taken as a matrix, becomes `w + alpha / rank * a @ b`, where
    `a` has `rank` columns and `b` has `rank` rows. They are the parameters 'w_lora_a'
    and 'w_lora_b' of the same module. `b` begins at zero, so the first step sees the
    network as it was. All other parameters are frozen: they have no gradients, slots or
    averages. Their names and initial values are those of the network without it.

    An array of more than two dimensions is taken as a matrix by joining neighbouring
    dimensions into two, so that the two matrices have the fewest elements: the kernel
    of a convolution, of shape (3, 3, 64, 128), as one of shape (576, 128).

    Args:
      rank: the number of columns of `a`.
      alpha: the scale of the product, times `rank`.
      select: a regular expression for the paths of the arrays to adapt, such as
        '/attention/'; '' for all. Of the matches only arrays of at least two dimensions
        are adapted, which leaves out biases and scales.
      train: a regular expression for the paths of parameters to train as they are, such
        as those of a new output layer; '' for none.

    Returns:
      What `Supervised.lora` returns, or the argument `lora` of a `Learner`.

    Raises:
      UserError: if a value is not of these kinds.

    >>> adaptation = xshard.lora(rank=8, alpha=16, select='/(query|value)/w$')
    >>> adaptation.scale
    2.0
    """
    return Lora(rank=rank, alpha=alpha, select=select, train=train)


@dataclasses.dataclass(frozen=True)
class Lora(state_lib.Adaptation):
    """A low-rank adaptation, as `lora` describes it."""

    rank: int
    alpha: float
    select: str
    train: str = ""

    def __post_init__(self) -> None:
        """Checks the values."""
        if not arguments.is_integer(self.rank) or self.rank < 1:
            raise errors.UserError(
                f"lora(rank={self.rank!r}) must be a whole number of at least 1."
            )
        if not arguments.is_number(self.alpha) or not 0 < self.alpha < math.inf:
            raise errors.UserError(
                f"lora(alpha={self.alpha!r}) must be a number above 0; with alpha=rank "
                "the product is added as it is."
            )
        for name in ("select", "train"):
            pattern = getattr(self, name)
            try:
                re.compile(pattern)
            except (re.error, TypeError) as e:
                raise errors.UserError(
                    f"lora({name}={pattern!r}) is not a regular expression: {e}."
                ) from e

    @property
    def factors(self) -> dict[str, float]:
        """What the product `a @ b` is multiplied by follows from, as JSON values.

        It is saved with the matrices, which mean something else with another alpha.
        """
        return {"rank": int(self.rank), "alpha": float(self.alpha)}

    @property
    def scale(self) -> float:
        """The factor of the product `a @ b`."""
        return self.alpha / self.rank

    def extend(
        self,
        key: jax.Array,
        params: Mapping[str, Mapping[str, jax.Array]],
        requested: Mapping[str, tuple[int, ...]],
    ) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
        """Adds the low-rank matrices to the initial parameters of a network.

        Args:
          key: the random key.
          params: the parameters, a Haiku tree.
          requested: the shape in which the network asks for each of them, by path.
            Further leading dimensions of a parameter are those of stacked layers, each
            of which gets matrices of its own.

        Returns:
          The parameters with the matrices, and the shapes likewise.

        Raises:
          UserError: if no array is selected, or the rank is too large for one.
        """
        extended = {module: dict(arrays) for module, arrays in params.items()}
        shapes = dict(requested)
        for path in self._selected(params, requested):
            shape = requested[path]
            rows, columns = _matrix_shape(shape)
            if self.rank > min(rows, columns):
                raise errors.UserError(
                    f"lora(rank={self.rank}): '{path}' of shape {shape} is a matrix of "
                    f"{rows} x {columns}, whose rank is at most {min(rows, columns)}: "
                    f"lower the rank, or leave the array out of select={self.select!r}."
                )
            module, _, name = path.rpartition("/")
            base = params[module][name]
            layers = base.shape[: base.ndim - len(shape)]
            # A key for each path, so that it does not matter what else is selected.
            key_of_path = jax.random.fold_in(key, zlib.crc32(path.encode()))
            a = jax.random.normal(key_of_path, (*layers, rows, self.rank), base.dtype)
            # The variance of the product's input is kept, as in a linear layer.
            extended[module][name + _A] = a / math.sqrt(rows)
            extended[module][name + _B] = jnp.zeros(
                (*layers, self.rank, columns), base.dtype
            )
            shapes[path + _A] = (rows, self.rank)
            shapes[path + _B] = (self.rank, columns)
        return extended, shapes

    def around(self, network: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a Haiku function that adapts each array as the network asks for it.

        Args:
          network: a Haiku function. It is called with the parameters of `extend`, or
            with those of `merge`, which need no more adaptation.
        """

        @functools.wraps(network)
        def adapted(*args: Any, **kwargs: Any) -> Any:
            with hk.custom_getter(self._get):
                return network(*args, **kwargs)

        return adapted

    def _get(self, next_getter: Any, value: jax.Array, context: Any) -> jax.Array:
        """Adapts an array that a module asks for: a Haiku getter."""
        name = context.name
        if re.search(PATHS, name):
            # The network's own getters are meant for the network's own arrays.
            return value
        shape = tuple(context.original_shape)
        if len(shape) >= 2:
            rows, columns = _matrix_shape(shape)
            dtype = context.original_dtype
            # In a scan over layers a module knows only the end of its path, so `select`
            # cannot be asked here. But only adapted arrays have these parameters.
            try:
                a = hk.get_parameter(name + _A, (rows, self.rank), dtype, _missing)
                b = hk.get_parameter(name + _B, (self.rank, columns), dtype, _missing)
            except _MissingError:
                return next_getter(value)
            value = _add_product(value, a, b, self.scale)
        return next_getter(value)

    def merge(self, params: Any) -> Any:
        """Returns the parameters of the network alone, with the products added to them.

        Args:
          params: a Haiku tree with low-rank matrices; further leading dimensions are
            those of stacked layers and of groups.
        """
        merged: dict[str, dict[str, jax.Array]] = {}
        for module, arrays in params.items():
            merged[module] = {}
            for name, x in arrays.items():
                if re.search(PATHS, name):
                    continue
                if name + _A in arrays:
                    a = arrays[name + _A]
                    x = _add_product(x, a, arrays[name + _B], self.scale)
                merged[module][name] = x
        return merged

    def trained(self, params: Any) -> list[str]:
        """Returns the paths of the parameters to train.

        Args:
          params: the parameters of `extend`.

        Raises:
          UserError: if `train` matches no path.
        """
        paths = trees.leaves_by_path(params)
        further = [path for path in paths if self.train and self._trains(path)]
        if self.train and not further:
            raise errors.UserError(
                f"lora(train={self.train!r}) matches no parameter's path; near it: "
                f"{trees.near(self.train, paths)}."
            )
        return [path for path in paths if re.search(PATHS, path)] + further

    def _trains(self, path: str) -> bool:
        """Returns whether a parameter of the network itself is trained."""
        is_matrix = re.search(PATHS, path) is not None
        return not is_matrix and re.search(self.train, path) is not None

    def _selected(
        self, params: Any, requested: Mapping[str, tuple[int, ...]]
    ) -> list[str]:
        """Returns the paths of the arrays to adapt."""
        paths = trees.leaves_by_path(params)
        taken = [path for path in paths if re.search(PATHS, path)]
        if taken:
            raise errors.UserError(
                f"lora: the network has a parameter '{taken[0]}', a name that low-rank "
                "matrices have. Rename it, or adapt the network once only."
            )
        matching = [path for path in requested if re.search(self.select, path)]
        chosen = [path for path in matching if len(requested[path]) >= 2]
        if matching and not chosen:
            raise errors.UserError(
                f"lora(select={self.select!r}) matches only arrays of fewer than two "
                f"dimensions, such as '{matching[0]}' of shape "
                f"{requested[matching[0]]}: select matrices."
            )
        if not chosen:
            raise errors.UserError(
                f"lora(select={self.select!r}) matches no parameter's path; near it: "
                f"{trees.near(self.select, paths)}."
            )
        # A matrix that is trained as it is needs no product.
        adapted = [path for path in chosen if not (self.train and self._trains(path))]
        if not adapted:
            raise errors.UserError(
                f"lora(select={self.select!r}, train={self.train!r}): all arrays that "
                "are selected are trained as they are, which leaves none to adapt."
            )
        return adapted


def described(factors: Mapping[str, Any]) -> str:
    """Returns `Lora.factors`, or what a checkpoint has in its place, as a call."""
    rank = factors.get("rank")
    alpha = factors.get("alpha")
    return f"lora(rank={rank!r}, alpha={alpha!r})"


def has_matrices(params: Any) -> bool:
    """Returns whether a tree of parameters has low-rank matrices."""
    return any(re.search(PATHS, path) for path in trees.leaves_by_path(params))


def _add_product(x: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """Returns `x + scale * a @ b` in the type of `x`, computed in float32 or wider."""
    product = jnp.matmul(trees.widen(a), trees.widen(b))
    wide = trees.widen(x)
    return (wide + scale * product.reshape(x.shape).astype(wide.dtype)).astype(x.dtype)


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the shape of the matrix that an array is taken as.

    Of the ways to join neighbouring dimensions into two, it is the one with the fewest
    rows and columns together, the first of equal ones.
    """
    sizes = []
    for cut in range(1, len(shape)):
        sizes.append((math.prod(shape[:cut]), math.prod(shape[cut:])))
    return min(sizes, key=sum)


class _MissingError(Exception):
    """Raised if a module has no low-rank matrices for an array."""


def _missing(shape: Any, dtype: Any) -> Any:
    """Stands for an initial value, which Haiku asks for if there is no parameter."""
    del shape, dtype
    raise _MissingError
