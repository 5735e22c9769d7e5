"""The two forms of a network that a learner trains, behind one interface: a Haiku
function, or a pair of pure functions of any library.
"""

import abc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from xshard import errors
from xshard.learners import state as state_lib
from xshard.learners import validation
from xshard.optimizers import gathering, trees

# The module of an array that has a name alone, as in Haiku.
_NO_MODULE = "~"


class Network(abc.ABC):
    """A network whose parameters and state are Haiku trees, {module: {name: array}}.

    Attributes:
      function: the function of the user that messages name.
    """

    function: Callable[..., Any]

    @abc.abstractmethod
    def init(
        self, key: jax.Array, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any, dict[str, tuple[int, ...]]]:
        """Returns the parameters, the state, and the shape in which the network asks
        for each parameter, by path, as `gathering.init_network` does.
        """

    @abc.abstractmethod
    def apply(
        self, params: Any, net_state: Any, key: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Returns the outputs and the new state."""

    @abc.abstractmethod
    def gathering_apply(
        self,
        gatherer: gathering.Gatherer,
        dtype: Any,
        gathered: Mapping[str, jax.Array],
    ) -> Callable[..., tuple[Any, Any]]:
        """Returns a function like `apply` that also accepts shards of parameters.

        Args:
          gatherer: gathers them.
          dtype: the type to gather in.
          gathered: arrays that are gathered already, by path.
        """


def of(network: Any, lora: state_lib.Adaptation | None) -> Network:
    """Returns the network of a `Learner`'s argument.

    Args:
      network: a Haiku function, or a pair of pure functions.
      lora: the network's low-rank adaptation, if any.

    Raises:
      UserError: if it is neither, or `lora` is no adaptation.
    """
    if lora is not None and not isinstance(lora, state_lib.Adaptation):
        raise errors.UserError(
            f"lora is {lora!r}: give the result of xshard.lora, or None."
        )
    if isinstance(network, tuple):
        if len(network) != 2 or not all(callable(part) for part in network):
            raise errors.UserError(
                f"The network of a learner is a tuple of {len(network)}, {network!r}: "
                "give a Haiku function, or a pair of functions (init, apply)."
            )
        init, apply = network
        return _Pair(init, apply, lora)
    # Models of flax and equinox can be called as a Haiku function is, but with what
    # makes their parameters, or with the parameters inside.
    is_model = hasattr(network, "apply") or not jax.tree_util.all_leaves([network])
    if is_model or not callable(network):
        raise errors.UserError(
            f"The network of a learner is of type {type(network).__name__}: give a "
            "Haiku function, or a pair of functions (init, apply), as "
            "docs/beyond_a_classifier.md#networks-of-other-libraries shows for models "
            "of flax and equinox."
        )
    return _Haiku(network, lora)


class _Haiku(Network):
    """A Haiku function."""

    def __init__(self, function: Callable[..., Any], lora: state_lib.Adaptation | None):
        self.function = function
        self._adapted = lora.around(function) if lora else function
        self._transformed = hk.transform_with_state(self._adapted)

    def init(
        self, key: jax.Array, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any, dict[str, tuple[int, ...]]]:
        # Without the adaptation, which adds its own arrays.
        params, net_state, requested = gathering.init_network(
            self.function, key, *args, **kwargs
        )
        validation.parameters(self.function, params)
        return params, net_state, requested

    def apply(
        self, params: Any, net_state: Any, key: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        return self._transformed.apply(params, net_state, key, *args, **kwargs)

    def gathering_apply(
        self,
        gatherer: gathering.Gatherer,
        dtype: Any,
        gathered: Mapping[str, jax.Array],
    ) -> Callable[..., tuple[Any, Any]]:
        return gatherer.apply(self._adapted, dtype, gathered=gathered)


class _Named(NamedTuple):
    """How a tree of any containers is a Haiku tree.

    Attributes:
      structure: the structure of the tree.
      names: the module and the name of each leaf, in the order of the tree.
    """

    structure: Any
    names: tuple[tuple[str, str], ...]

    def join(self, arrays: Mapping[str, Mapping[str, Any]]) -> Any:
        """Returns the tree of a Haiku tree's arrays."""
        leaves = [arrays[module][name] for module, name in self.names]
        return jax.tree.unflatten(self.structure, leaves)


class _Pair(Network):
    """A pair of pure functions, whose trees may consist of any containers.

    A leaf's name is the last key of its path, and its module the keys before it.
    """

    def __init__(
        self,
        init: Callable[..., Any],
        apply: Callable[..., Any],
        lora: state_lib.Adaptation | None,
    ):
        self.function = apply
        self._init = init
        self._apply = apply
        self._lora = lora
        # How the trees of parameters and of state are Haiku trees: `init` alone decides
        # it, so it is found once.
        self._names: tuple[_Named, _Named] | None = None

    def init(
        self, key: jax.Array, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any, dict[str, tuple[int, ...]]]:
        returned = self._init(key, *args, **kwargs)
        where = validation.describe_method(self._init)
        params, net_state = _two(where, returned, "parameters, state")
        param_names = _names(where, params, "parameter")
        state_names = _names(where, net_state, "state")
        if not param_names.names:
            raise errors.UserError(
                f"{where} made no parameters, so there is nothing to train: the first "
                "value that it returns is the tree of parameters."
            )
        self._names = (param_names, state_names)
        params = _split(param_names, params)
        requested = {}
        for path, x in trees.leaves_by_path(params).items():
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                raise errors.UserError(
                    f"{where} returned {x.dtype} as the parameter '{path}'. Parameters "
                    "are floating-point arrays; others belong in the state, the second "
                    "value that it returns."
                )
            requested[path] = tuple(x.shape)
        return params, _split(state_names, net_state), requested

    def apply(
        self, params: Any, net_state: Any, key: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        param_names, state_names = self._found_names(args, kwargs)
        if self._lora is not None:
            params = self._lora.merge(params)
        returned = self._apply(
            param_names.join(params), state_names.join(net_state), key, *args, **kwargs
        )
        where = validation.describe_method(self._apply)
        outputs, new_state = _two(where, returned, "outputs, state")
        new_names = _names(where, new_state, "state")
        if new_names.names != state_names.names:
            raise errors.UserError(
                f"{where} returned a state of the arrays {_listed(new_names)}, and was "
                f"given {_listed(state_names)}: return the same ones, changed or not."
            )
        return outputs, _split(new_names, new_state)

    def gathering_apply(
        self,
        gatherer: gathering.Gatherer,
        dtype: Any,
        gathered: Mapping[str, jax.Array],
    ) -> Callable[..., tuple[Any, Any]]:
        return gatherer.apply_whole(self.apply, dtype, gathered=gathered)

    def _found_names(self, args: Any, kwargs: Any) -> tuple[_Named, _Named]:
        if self._names is None:
            # Only shapes are computed. The arguments may be any of the network's, since
            # names do not depend on them.
            jax.eval_shape(lambda: self.init(jax.random.key(0), *args, **kwargs))
        assert self._names is not None
        return self._names


def _two(where: str, returned: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise errors.UserError(
            f"{where} returned a {type(returned).__name__}. A function of a pair "
            f"(init, apply) must return two things here: return {what}. A network "
            "without state returns {} as its state."
        )
    first, second = returned
    return first, second


def _names(where: str, tree: Any, what: str) -> _Named:
    """Returns how a tree is a Haiku tree.

    Raises:
      UserError: if a leaf is no array, or two have the same path.
    """
    names = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        text = trees.path_name(path)
        # The arrays of an exported prediction are constants, NumPy's.
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise errors.UserError(
                f"{where} returned {repr(leaf)[:80]} as the {what} '{text}', which is "
                "no array of JAX. Return arrays alone, and keep what is constant in "
                "the functions, as equinox.partition(model, equinox.is_inexact_array) "
                "does."
            )
        module, _, name = text.rpartition("/")
        if not name:
            raise errors.UserError(
                f"{where} returned an array as the {what} by itself; put it under a "
                "name, as in {'w': array}, by which checkpoints know it."
            )
        names.append((module or _NO_MODULE, name))
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise errors.UserError(
            f"{where} returned two arrays with the path '{'/'.join(twice)}' as {what}: "
            "checkpoints know them by their paths, so rename one of them."
        )
    return _Named(jax.tree.structure(tree), tuple(names))


def _split(named: _Named, tree: Any) -> dict[str, dict[str, Any]]:
    """Returns the Haiku tree of a tree's arrays."""
    arrays: dict[str, dict[str, jax.Array]] = {}
    for (module, name), leaf in zip(named.names, jax.tree.leaves(tree), strict=True):
        arrays.setdefault(module, {})[name] = jnp.asarray(leaf)
    return arrays


def _listed(named: _Named) -> list[str]:
    return sorted("/".join(name) for name in named.names)[:5]
