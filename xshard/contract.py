"""Checks that an experiment's methods return what they promise.

A mistake is named here, with the method and its place, while the run is being checked; left alone it would fail
later, in a library, or train something else than was meant.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from xshard import errors
from xshard import experiment as experiment_lib
from xshard.optimizers import base

# The step's own, beside which an experiment's are logged.
_OWN_METRICS = (
    "loss", "skipped", "global_step", "loss_scale", "gradient_norm", "parameter_norm", "step",
)  # fmt: skip
_MAPPED_AXES = ("group", "slice", "replica")
_Scalars = dict[str, jax.Array]


def loss(experiment: experiment_lib.Experiment, outputs: Any, batch: Any) -> tuple[Any, _Scalars]:
    """The loss and the scalars of `experiment.loss`, the scalars as float32."""
    returned = experiment.loss(outputs, batch)
    where = method(experiment, "loss")
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise errors.UserError(
            f"{where} returned {_described(returned)}. It must return two things, the loss and a dictionary of "
            "scalars to log: return loss, {'accuracy': accuracy}, or return loss, {}."
        )
    value, scalars = returned
    if not isinstance(value, jax.Array) or not jnp.issubdtype(value.dtype, jnp.floating):
        raise errors.UserError(
            f"{where} returned {_described(value)} as the loss. It must be a floating-point scalar computed from "
            "the network's outputs, such as jnp.mean(errors)."
        )
    if value.shape:
        raise errors.UserError(
            f"{where} returned a loss of shape {value.shape}. It must be a scalar, the mean over the batch: "
            "return jnp.mean(loss)."
        )
    if not isinstance(scalars, Mapping):
        raise errors.UserError(
            f"{where} returned {_described(scalars)} beside the loss. It must be a dictionary of scalars to log: "
            "{'accuracy': accuracy}, or {} for none."
        )
    return value, {name: _scalar(where, name, value) for name, value in scalars.items()}


def _scalar(where: str, name: Any, value: Any) -> jax.Array:
    _check_name(where, name)
    if name in _OWN_METRICS:
        raise errors.UserError(
            f"{where} returned a scalar called {name!r}, which every run logs by itself. Leave it out, or give it "
            f"another name; taken are {', '.join(_OWN_METRICS)}."
        )
    if isinstance(value, Mapping):
        inner = next(iter(value), "name")
        raise errors.UserError(
            f"{where} returned a dictionary called {name!r}. What is logged is one level of scalars by name: call "
            f"it '{name}/{inner}'."
        )
    if not _is_number(value):
        raise errors.UserError(
            f"{where} returned {_described(value)} called {name!r}. What is logged beside the loss are scalars: "
            "numbers computed from the outputs and the batch."
        )
    if np.shape(value):
        raise errors.UserError(
            f"{where} returned {name!r} of shape {np.shape(value)}. What is logged beside the loss are scalars, "
            f"means over the batch: jnp.mean({_variable(name)})."
        )
    return jnp.asarray(value, jnp.float32)


def evaluate(
    experiment: experiment_lib.Experiment, outputs: Any, batch: Mapping[str, Any], rows: int
) -> _Scalars:
    """The values of `experiment.evaluate` for a batch of so many rows, each of shape (rows,)."""
    returned = experiment.evaluate(outputs, batch)
    where = method(experiment, "evaluate")
    if not isinstance(returned, Mapping):
        raise errors.UserError(
            f"{where} returned {_described(returned)}. It must return a dictionary of arrays with a value for "
            "each example, of shape (batch,): return {'accuracy': hits}."
        )
    for name, value in returned.items():
        _check_name(where, name)
        if name == "count":
            raise errors.UserError(
                f"{where} returned a value called 'count', which is the number of examples; give it another name."
            )
        _check_per_example(where, name, value, rows)
    return {name: jnp.asarray(value) for name, value in returned.items()}


def _check_per_example(where: str, name: str, value: Any, rows: int) -> None:
    rule = "It must hold a value for each example, of shape (batch,): the framework takes the mean over all of them"
    if not _is_number(value):
        raise errors.UserError(f"{where} returned {_described(value)} as {name!r}. {rule}.")
    shape = np.shape(value)
    if shape == (rows,):
        return
    if not shape:
        fix = (
            f"{rule}. A mean over the batch would be wrong where the last batch is not full: return "
            f"{_variable(name)} without jnp.mean."
        )
    elif shape[0] == rows:
        axes = tuple(range(1, len(shape)))
        fix = f"{rule}. Reduce the other dimensions: jnp.mean({_variable(name)}, axis={axes})."
    else:
        fix = f"{rule}. Here a replica's part of the batch has {rows} examples."
    raise errors.UserError(f"{where} returned {name!r} of shape {shape}. {fix}")


def optimizer(experiment: experiment_lib.Experiment) -> base.Optimizer:
    """The rule of `experiment.optimizer`."""
    returned = experiment.optimizer()
    if isinstance(returned, base.Optimizer):
        return returned
    where = method(experiment, "optimizer")
    if returned is None:
        raise errors.UserError(
            f"{where} returned None. It must return the update rule: does it end in return opt?"
        )
    kind = (
        "an optax transformation"
        if isinstance(returned, optax.GradientTransformation)
        else _described(returned)
    )
    raise errors.UserError(
        f"{where} returned {kind}. It must return a rule that reduces the gradients over the replicas: "
        "return xshard.CrossShardOptimizer(optax.adam(rate), slice_axis_name='slice')."
    )


def outputs(experiment: experiment_lib.Experiment, returned: Any) -> Any:
    """Returns the outputs of `experiment.forward`, if there are any."""
    if not jax.tree.leaves(returned):
        raise errors.UserError(
            f"{method(experiment, 'forward')} returned {_described(returned)}. It must return the network's "
            "outputs, an array or a tree of arrays: does it end in return outputs?"
        )
    return returned


def parameters(experiment: experiment_lib.Experiment, params: Mapping[str, Any]) -> None:
    """Raises UserError if `experiment.forward` has made no parameters."""
    if not params:
        raise errors.UserError(
            f"{method(experiment, 'forward')} made no parameters, so that there is nothing to train. Parameters "
            "are Haiku's: use its modules, as hk.Linear(2)(x), or hk.get_parameter; arrays made in another way, "
            "or by another library, are constants."
        )


def network_state(experiment: experiment_lib.Experiment, old: Any, new: Any) -> None:
    """Raises UserError if `experiment.forward` has changed the names or shapes of the network's Haiku state."""
    where = method(experiment, "forward")
    for module, arrays in new.items():
        for name, array in arrays.items():
            made = old.get(module, {}).get(name)
            if made is None:
                raise errors.UserError(
                    f"{where} sets the state {name!r} of {module!r}, which it has not made when it was first called, "
                    "with is_training=True: make it there, too, with hk.get_state(..., init=...)."
                )
            if array.shape != made.shape:
                raise errors.UserError(
                    f"{where} sets the state {name!r} of {module!r} to shape {array.shape}; on one example it was "
                    f"made with {made.shape}. Network state has one shape, whatever the batch: what belongs to an "
                    "example cannot be kept in it. Keep a mean over the batch, or take it from the data."
                )


@contextlib.contextmanager
def network(experiment: experiment_lib.Experiment, *, is_training: bool) -> Iterator[None]:
    """Says of what Haiku and JAX refuse in `experiment.forward` what to write instead."""
    try:
        yield
    except (NameError, ValueError) as e:
        fix = _network_fix(e, is_training)
        where = errors.location(e) or method(experiment, "forward")
        if not fix:
            raise
        raise errors.UserError(f"{where}: {fix}") from e


def _network_fix(e: Exception, is_training: bool) -> str:
    text = str(e)
    if isinstance(e, NameError) and "unbound axis name" in text:
        axis = text.partition("unbound axis name: ")[2].partition(".")[0]
        if axis not in _MAPPED_AXES:
            return f"there is no axis {axis!r}; those of a run are {', '.join(_MAPPED_AXES)}."
        return (
            f"the network reduces over the axis {axis!r}, as hk.BatchNorm(cross_replica_axis=...) does, which is "
            "not supported in forward. Leave the axis out: each replica normalises its own part of the batch, and "
            "floating-point state is averaged over the replicas after each step."
        )
    if type(e).__name__ == "MissingRNGError" and not is_training:
        return (
            "hk.next_rng_key() was called in an evaluation, which has no keys. Draw them while training only: "
            "if is_training: x = hk.dropout(hk.next_rng_key(), rate, x)."
        )
    if "must be created as part of `init`" in text:
        return (
            f"{text.partition(' All parameters')[0]}: it is not made when forward is first called, with "
            "is_training=True. Call the same modules whether is_training or not, and choose among their outputs."
        )
    return ""


@contextlib.contextmanager
def rules(experiment: experiment_lib.Experiment) -> Iterator[None]:
    """Says of parameters that `experiment.loss` asks Haiku for where they are to be made."""
    try:
        yield
    except ValueError as e:
        if "must be created as part of `init`" not in str(e):
            raise
        where = errors.location(e) or method(experiment, "loss")
        raise errors.UserError(
            f"{where}: {str(e).partition(' All parameters')[0]}. Parameters are made in forward alone: make it "
            "there, and return it among the outputs."
        ) from e


def method(experiment: experiment_lib.Experiment, name: str) -> str:
    """A method and its place, for messages: 'Digits.loss (experiment.py:39)'."""
    return experiment_lib.described(getattr(experiment, name))


def _check_name(where: str, name: Any) -> None:
    if not isinstance(name, str):
        raise errors.UserError(f"{where} returned a value under {name!r}; names must be strings.")


def _is_number(value: Any) -> bool:
    if not isinstance(value, bool | int | float | np.generic | np.ndarray | jax.Array):
        return False
    dtype = jnp.result_type(value)
    return jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)


def _variable(name: str) -> str:
    return name if name.isidentifier() else "value"


def _described(value: Any) -> str:
    """A value in words that fit into a sentence."""
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
