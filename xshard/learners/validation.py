"""Checks of what a learner is given: networks, losses and rules.

They run while it is traced, before the first step, and their errors name the function
and its line. Without them a mistake would fail later, inside a library, or train
something other than intended.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xshard import errors
from xshard.base import user_code
from xshard.optimizers import base, trees
from xshard.optimizers import optax as optax_optimizer

# Names that a run logs by itself. An experiment's values need other names.
_RESERVED = (
    "loss",
    "skipped",
    "global_step",
    "loss_scale",
    "gradient_norm",
    "parameter_norm",
    "updates_per_step",
    "noise_scale",
    "step",
    "kind",
)
# Under these names, a learner's counts are read back from its rows, where the learner's
# name precedes them. So no other name ends in one of them.
_COUNTS = ("skipped", "global_step", "loss_scale", "updates_per_step")
# The first words of names that a run logs by itself, and what they hold.
_FAMILIES = {
    "eval": "the results of evaluations",
    "roll_back": "roll-backs",
    "perf": "times and rates",
    "fingerprint": "the fingerprints of the state",
    "norms": "the norms of each parameter",
}
_MAPPED_AXES = ("group", "slice", "replica")
_Scalars = dict[str, jax.Array]


class Returned(NamedTuple):
    """What the loss of a learner returned, on a replica.

    With micro-batches, all but the loss and `aux` is that of each of them, stacked.

    Attributes:
      loss: the replica's own loss.
      net_state: the replica's own new network state.
      scalars: the replica's own scalars, as `scalar` returns them.
      aux: further arrays, with a row for each example: empty, or one tree.
    """

    loss: Any
    net_state: Any
    scalars: _Scalars
    aux: tuple[Any, ...]


def loss(method: Callable[..., Any], returned: Any) -> tuple[Any, _Scalars]:
    """Checks the result of `Supervised.loss`.

    Args:
      method: the loss function.
      returned: its result.

    Returns:
      The loss, and the scalars as `scalar` returns them.

    Raises:
      UserError: if it is anything else.
    """
    where = describe_method(method)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise errors.UserError(
            f"{where} returned {in_words(returned)}. It must return two things, the "
            "loss and a dictionary of scalars to log: return loss, {'accuracy': "
            "accuracy}, or return loss, {}."
        )
    return _checked_loss(where, *returned)


def learner_loss(method: Callable[..., Any], returned: Any, net_state: Any) -> Returned:
    """Checks the result of a learner's loss.

    Args:
      method: the loss function.
      returned: its result.
      net_state: the network state before the call.

    Raises:
      UserError: if it is anything else.
    """
    where = describe_method(method)
    if not isinstance(returned, tuple) or len(returned) not in (3, 4):
        raise errors.UserError(
            f"{where} returned {in_words(returned)}. The loss of a learner must "
            "return three things, or four: the loss, the network's state, a dictionary "
            "of scalars to log, and arrays that the step needs: outputs, net_state = "
            "learner.apply(...); ...; return loss, net_state, {'accuracy': accuracy}."
        )
    value, new_state, scalars, *aux = returned
    structure: Any = jax.tree.structure(net_state)
    if jax.tree.structure(new_state) != structure:
        raise errors.UserError(
            f"{where} returned {in_words(new_state)} as the network's state, which "
            "has another structure: return the second result of learner.apply, or "
            "state.net_state if the loss does not apply the network."
        )
    value, scalars = _checked_loss(where, value, scalars)
    if not all(jnp.ndim(x) for x in jax.tree.leaves(aux)):
        raise errors.UserError(
            f"{where} returned a scalar as its fourth value. Each array there must "
            "have a row for every example, because micro-batches are concatenated "
            "along rows. Scalars belong in the third value, a dictionary."
        )
    return Returned(value, new_state, scalars, tuple(aux))


def _checked_loss(where: str, value: Any, scalars: Any) -> tuple[Any, _Scalars]:
    """Checks a loss and the scalars beside it, which `where` returned."""
    if not isinstance(value, jax.Array) or not jnp.issubdtype(
        value.dtype, jnp.floating
    ):
        raise errors.UserError(
            f"{where} returned {in_words(value)} as the loss. It must be a "
            "floating-point scalar computed from the network's outputs, such as "
            "jnp.mean(errors)."
        )
    if value.shape:
        raise errors.UserError(
            f"{where} returned a loss of shape {value.shape}. It must be a scalar, the "
            "mean over the batch: return jnp.mean(loss)."
        )
    if not isinstance(scalars, Mapping):
        raise errors.UserError(
            f"{where} returned {in_words(scalars)} beside the loss. It must be a "
            "dictionary of scalars to log: {'accuracy': accuracy}, or {} for none."
        )
    return value, {name: scalar(where, name, x) for name, x in scalars.items()}


def scalar(where: str, name: Any, value: Any) -> jax.Array:
    """Checks a scalar to log.

    Args:
      where: the method that returned it, for errors.
      name: its name.
      value: the scalar.

    Returns:
      The scalar as float32; an integer as int32, a signed JAX array as it is.

    Raises:
      UserError: if it is no such scalar, or an integer that a row cannot hold.
    """
    check_name(where, name)
    check_free(f"{where} returned a scalar called", name)
    last = name.rpartition("/")[2]
    if last in _COUNTS:
        raise errors.UserError(
            f"{where} returned a scalar called {name!r}, which ends in {last!r} as the "
            "name of a learner's own count does. Give it another name, such as "
            f"{name.removesuffix(last)}my_{last}."
        )
    if isinstance(value, Mapping):
        inner = next(iter(value), "name")
        raise errors.UserError(
            f"{where} returned a dictionary called {name!r}. Logged values form one "
            f"level of scalars by name: call it '{name}/{inner}'."
        )
    if not is_number(value):
        raise errors.UserError(
            f"{where} returned {in_words(value)} called {name!r}. Values logged "
            "beside the loss must be scalars: numbers computed from the outputs and "
            "the batch."
        )
    if np.shape(value):
        raise errors.UserError(
            f"{where} returned {name!r} of shape {np.shape(value)}. Values logged "
            "beside the loss must be scalars, means over the batch: "
            f"jnp.mean({variable(name)})."
        )
    dtype = jnp.result_type(value)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise errors.UserError(
            f"{where} returned {name!r} as {dtype}, and rows hold real numbers: return "
            f"jnp.abs({variable(name)}), or its .real and .imag."
        )
    if not jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(value, jnp.float32)
    if not isinstance(value, jax.Array):
        # Python's and NumPy's integers may be larger than JAX's.
        bounds = jnp.iinfo(jnp.int32)
        if not bounds.min <= int(value) <= bounds.max:
            raise errors.UserError(
                f"{where} returned {name!r} as {int(value)}, which does not fit int32, "
                "and float32 would round it: return it as a floating-point number, "
                f"float({variable(name)}), or leave it out."
            )
        return jnp.asarray(int(value), jnp.int32)
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return value
    # An unsigned array among metrics is a fingerprint.
    if dtype.itemsize < 4:
        return value.astype(jnp.int32)
    raise errors.UserError(
        f"{where} returned {name!r} as {dtype}, which may not fit int32, and float32 "
        f"would round it: return {variable(name)}.astype(jnp.int32), or a "
        "floating-point number."
    )


def check_free(what: str, name: str, families: Mapping[str, str] = _FAMILIES) -> None:
    """Raises UserError if a run logs a name by itself.

    Args:
      what: the beginning of the message, up to the name.
      name: the name.
      families: the first words of names that are reserved, and what they hold.
    """
    if families is _FAMILIES and name in _RESERVED:
        raise errors.UserError(
            f"{what} {name!r}, which every run logs by itself. Leave it out, or give "
            f"it another name, such as 'my_{name}'. These names are taken: "
            f"{', '.join(_RESERVED)}."
        )
    first, _, rest = name.partition("/")
    if first in families:
        other = f"{first}_{rest}" if rest else f"my_{first}"
        raise errors.UserError(
            f"{what} {name!r}. A run logs {families[first]} by itself, under names "
            f"that begin with '{first}/', so {first!r} and all such names are taken. "
            f"Give it another name, such as {other!r}."
        )


def optimizer(method: Callable[[], Any]) -> Any:
    """Calls a method that returns a rule or a transformation, and checks its result."""
    returned = method()
    is_rule = isinstance(returned, base.Optimizer)
    if is_rule or optax_optimizer.is_transformation(returned):
        return returned
    kind = in_words(returned)
    if returned is None:
        kind = "None (does it end in return opt?)"
    raise errors.UserError(
        f"{describe_method(method)} returned {kind}. It must return an optax "
        "transformation, such as optax.adam(rate), or a rule that reduces the "
        "gradients over the replicas, such as "
        "xshard.CrossShardOptimizer(optax.adam(rate), slice_axis_name='slice')."
    )


def evaluation_params(where: str, returned: Any, params: Mapping[str, Any]) -> None:
    """Checks the parameters for evaluation that a rule returned.

    Args:
      where: the method, in words.
      returned: its result.
      params: the parameters that train.

    Raises:
      UserError: if it is not a tree of floating-point arrays of the same paths and
        shapes.
    """
    rule = "It must return a tree with the paths and shapes of the parameters."
    expected = trees.leaves_by_path(params)
    found = trees.leaves_by_path(returned)
    different = sorted(expected.keys() ^ found.keys())
    if different:
        has = "lacks" if different[0] in expected else "also has"
        raise errors.UserError(
            f"{where} returned {in_words(returned)} that {has} {different[0]!r}. {rule}"
        )
    for path, param in expected.items():
        dtype = jnp.result_type(found[path])
        if jnp.shape(found[path]) != param.shape:
            raise errors.UserError(
                f"{where} returned {path!r} with the shape {jnp.shape(found[path])}; "
                f"the parameter has {param.shape}. {rule}"
            )
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise errors.UserError(
                f"{where} returned {path!r} with the type {dtype}; the parameter has "
                f"{param.dtype}. Its arrays must be of a floating-point type."
            )


def outputs(network: Callable[..., Any], returned: Any) -> Any:
    """Returns the outputs of a network; raises UserError if they hold no array."""
    if not jax.tree.leaves(returned):
        raise errors.UserError(
            f"{describe_method(network)} returned {in_words(returned)}. It must "
            "return the network's outputs, an array or a tree of arrays: does it end "
            "in return outputs?"
        )
    return returned


def parameters(network: Callable[..., Any], params: Mapping[str, Any]) -> None:
    """Raises UserError if a network has created no parameters."""
    if not params:
        raise errors.UserError(
            f"{describe_method(network)} made no parameters, so there is nothing to "
            "train. Create parameters with Haiku: use its modules, such as "
            "hk.Linear(2)(x), or hk.get_parameter. Arrays created in another way, or "
            "by another library, are constants."
        )


def network_state(network: Callable[..., Any], old: Any, new: Any) -> None:
    """Checks that a network keeps the names and shapes of its Haiku state.

    Args:
      network: the network.
      old: the state that it created in its first call.
      new: the state after another call.

    Raises:
      UserError: if it does not.
    """
    where = describe_method(network)
    for module, arrays in new.items():
        for name, array in arrays.items():
            initial = old.get(module, {}).get(name)
            if initial is None:
                raise errors.UserError(
                    f"{where} sets the state {name!r} of {module!r}, which it did not "
                    "create in its first call, with is_training=True: create it there, "
                    "too, with hk.get_state(..., init=...)."
                )
            if array.shape != initial.shape:
                raise errors.UserError(
                    f"{where} sets the state {name!r} of {module!r} to shape "
                    f"{array.shape}; on one example it was created with "
                    f"{initial.shape}. Network state has one shape for any batch size, "
                    "so it cannot hold a value per example. Keep a mean over the "
                    "batch, or take the values from the data."
                )


@contextlib.contextmanager
def network_errors(network: Callable[..., Any]) -> Iterator[None]:
    """Turns errors of Haiku and JAX in a network into UserErrors with the fix."""
    try:
        yield
    except (NameError, ValueError) as e:
        fix = _network_fix(e)
        where = user_code.location(e) or describe_method(network)
        if not fix:
            raise
        raise errors.UserError(f"{where}: {fix}") from e


def _network_fix(e: Exception) -> str:
    """Returns the cause and the fix of an error in a network; empty if unknown."""
    text = str(e)
    if isinstance(e, NameError) and "unbound axis name" in text:
        axis = text.partition("unbound axis name: ")[2].partition(".")[0]
        return (
            f"there is no axis {axis!r}; a run has the axes {', '.join(_MAPPED_AXES)}."
        )
    if type(e).__name__ == "MissingRNGError":
        return (
            "hk.next_rng_key() was called where there are no keys, as in a prediction. "
            "Draw keys only in training: if is_training: x = "
            "hk.dropout(hk.next_rng_key(), rate, x). A network that also samples in an "
            "evaluation calls hk.maybe_next_rng_key(), which is None in a prediction "
            "without a key; predict(batch, key) gives one."
        )
    if "must be created as part of `init`" in text:
        return (
            f"{text.partition(' All parameters')[0]}: it is not created in the first "
            "call of forward, with is_training=True. Call the same modules whether "
            "is_training or not, and choose among their outputs."
        )
    return ""


def batch_rows(batch: Any, parts: int, what: str) -> None:
    """Raises UserError unless the rows of each array of a batch divide into parts.

    Args:
      batch: a tree of arrays, or of shapes.
      parts: the number of parts.
      what: what they are, for the message, such as "replicas = 4".
    """
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        shape = np.shape(x)
        if not shape or shape[0] % parts:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise errors.UserError(
                f"The array {name!r} of the batch, of shape {shape}, does not divide "
                f"into equal parts: its first dimension must be that of rows, and a "
                f"multiple of {what}."
            )


@contextlib.contextmanager
def loss_errors(loss: Callable[..., Any]) -> Iterator[None]:
    """Turns Haiku's error about parameters created in a loss into a UserError."""
    try:
        yield
    except ValueError as e:
        if "must be created as part of `init`" not in str(e):
            raise
        where = user_code.location(e) or describe_method(loss)
        raise errors.UserError(
            f"{where}: {str(e).partition(' All parameters')[0]}. Only the network, "
            "such as forward, may create parameters: create it there, and return it "
            "among the outputs."
        ) from e


def describe_method(method: Callable[..., Any]) -> str:
    """Returns a method and its place for messages: 'Digits.loss (experiment.py:39)'."""
    while isinstance(method, functools.partial):
        method = method.func
    place = user_code.definition_location(method)
    name = getattr(method, "__qualname__", repr(method))
    if not place:
        return name
    return f"{name} ({place})"


def check_name(where: str, name: Any) -> None:
    """Raises UserError unless a name is a text."""
    if not isinstance(name, str):
        raise errors.UserError(
            f"{where} returned a value under {name!r}; names must be strings."
        )


def is_number(value: Any) -> bool:
    """Returns whether a value is a number, or an array of numbers."""
    if not isinstance(value, bool | int | float | np.generic | np.ndarray | jax.Array):
        return False
    dtype = jnp.result_type(value)
    return jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)


def variable(name: str) -> str:
    """Returns the name of a variable for the value of a metric, for suggestions."""
    return name if name.isidentifier() else "value"


def in_words(value: Any) -> str:
    """Describes a value in words that fit into a sentence."""
    if value is None:
        return "None"
    if isinstance(value, jax.Array | np.ndarray):
        return f"a {value.dtype} array of shape {value.shape}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if isinstance(value, bool | int | float | str):
        return f"{value!r}"
    if isinstance(value, Sequence | Mapping):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
