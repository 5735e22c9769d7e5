"""Checks of what an experiment's methods return, and of what they take.

They run while a method is traced, before the first step, and their errors name the
method and its line. What a loss returns, a learner checks.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xshard import errors
from xshard.learners import validation

# The first words of names among the values of an evaluation that a run adds itself, and
# what they hold.
EVALUATION_FAMILIES = {
    "raw": "the values of the parameters that train, beside those of averages",
    "ensemble": "the values of all groups together",
}


def learner_name(where: str, name: str) -> None:
    """Raises UserError if a learner's name, which begins the names of its values, is
    one that a run logs by itself.
    """
    validation.check_free(f"{where} returned the outcome of a learner called", name)


def per_example(
    init: Callable[..., Any],
    name: str,
    arrays: Sequence[jax.ShapeDtypeStruct],
    rows: int,
) -> None:
    """Checks arrays that an experiment's state has as `PerExample`.

    Args:
      init: the method that made the state.
      name: the path of the marked value.
      arrays: its arrays, of shape (slices, replicas, ...).
      rows: the number of examples of a replica.

    Raises:
      UserError: if an array has another number of rows.
    """
    where = validation.describe_method(init)
    for array in arrays:
        shape = array.shape[2:]
        if shape[:1] != (rows,):
            raise errors.UserError(
                f"{where} makes {name!r} with an array of shape "
                f"{shape} as xshard.PerExample. Its first dimension must be that of "
                f"the batch that init is given, {rows}; use xshard.PerReplica for "
                "other arrays that differ between replicas."
            )


def step(method: Callable[..., Any], returned: Any) -> tuple[Any, Any]:
    """Checks the result of `Experiment.train_step`: the state and the metrics.

    Args:
      method: the step, for errors.
      returned: its result.

    Raises:
      UserError: if it is anything else.
    """
    if isinstance(returned, tuple) and len(returned) == 2:
        state, metrics = returned
        # `Outcome`, the result of `Learner.update`, is a tuple.
        if isinstance(metrics, Mapping | tuple):
            return state, metrics
    where = validation.describe_method(method)
    shown = validation.in_words(returned)
    raise errors.UserError(
        f"{where} returned {shown}. It must return two "
        "things, the new state and a dictionary of values to log: return state, "
        "{'generator': outcome, 'distance': distance}, or return state, {}."
    )


def evaluation(
    method: Callable[..., Any],
    returned: Any,
    rows: int,
    *,
    allows_arrays: bool = False,
    families: Mapping[str, str] | None = None,
) -> dict[str, jax.Array]:
    """Checks the values that an evaluation method returned for a batch.

    Args:
      method: the method.
      returned: its result.
      rows: the number of examples of the batch.
      allows_arrays: whether an example's value may be an array, because the experiment
        overrides `summarize`.
      families: the first words of names that the method's caller adds itself.

    Returns:
      The values as arrays.
    """
    where = validation.describe_method(method)
    if not isinstance(returned, Mapping):
        shown = validation.in_words(returned)
        raise errors.UserError(
            f"{where} returned {shown}. It must return a dictionary of "
            "arrays with a value for each example, of shape (batch,): return "
            "{'accuracy': hits}."
        )
    for name, value in returned.items():
        validation.check_name(where, name)
        if name == "count":
            raise errors.UserError(
                f"{where} returned a value called 'count', which is the number of "
                "examples; give it another name."
            )
        _check_evaluated(f"{where} returned a value called", name, families or {})
        _check_per_example(where, name, value, rows=rows, allows_arrays=allows_arrays)
    return {name: jnp.asarray(value) for name, value in returned.items()}


def summary(where: str, returned: Any) -> dict[str, float]:
    """Checks the result of `Experiment.summarize`.

    Args:
      where: the method, for errors.
      returned: its result.

    Returns:
      The numbers as floats.
    """
    if not isinstance(returned, Mapping):
        shown = validation.in_words(returned)
        raise errors.UserError(
            f"{where} returned {shown}. It must return a dictionary of numbers by name."
        )
    for name, value in returned.items():
        validation.check_name(where, name)
        _check_evaluated(f"{where} returned a number called", name, EVALUATION_FAMILIES)
        if not validation.is_number(value) or np.shape(value):
            shown = validation.in_words(value)
            raise errors.UserError(
                f"{where} returned {shown} as {name!r}. An evaluation "
                "reports numbers: reduce the sum of an array to a number in summarize."
            )
    return {name: float(value) for name, value in returned.items()}


def _check_evaluated(what: str, name: str, families: Mapping[str, str]) -> None:
    """Raises UserError if a value of an evaluation has a name that is taken."""
    if name == "step":
        raise errors.UserError(
            f"{what} 'step', under which callbacks see the step of each evaluation. "
            "Give it another name, such as 'my_step'."
        )
    validation.check_free(what, name, families)


def _check_per_example(
    where: str, name: str, value: Any, *, rows: int, allows_arrays: bool
) -> None:
    """Raises UserError unless a value has a row for each example."""
    rule = (
        "It must hold a value for each example, of shape (batch,): the framework takes "
        "the mean over all of them"
    )
    if not validation.is_number(value):
        raise errors.UserError(
            f"{where} returned {validation.in_words(value)} as {name!r}. {rule}."
        )
    shape = np.shape(value)
    if shape == (rows,) or (allows_arrays and shape[:1] == (rows,)):
        return
    if not shape:
        fix = (
            f"{rule}. A mean over the batch would be wrong where the last batch is not "
            f"full: return {validation.variable(name)} without jnp.mean."
        )
    elif shape[0] == rows:
        axes = tuple(range(1, len(shape)))
        variable = validation.variable(name)
        fix = (
            f"{rule}. Reduce the other dimensions, jnp.mean({variable}, "
            f"axis={axes}), or define summarize to reduce the sums of arrays."
        )
    else:
        fix = f"{rule}. Here a replica's part of the batch has {rows} examples."
    raise errors.UserError(f"{where} returned {name!r} of shape {shape}. {fix}")


def takes_key(predict: Callable[..., Any]) -> tuple[bool, bool]:
    """Returns whether `Experiment.predict` may be given a random key, and whether it
    must be.

    Raises:
      UserError: if it cannot be called with a state and a batch, with or without a key.
    """
    signature = inspect.signature(predict)

    def accepts(count: int) -> bool:
        try:
            signature.bind(*[None] * count)
        except TypeError:
            return False
        return True

    may = accepts(3)
    must = not accepts(2)
    if must and not may:
        where = validation.describe_method(predict)
        raise errors.UserError(
            f"{where} has the parameters {signature}; it must take "
            "a state and a batch, and may take a random key after them: predict(self, "
            "state, batch, key)."
        )
    return may, must


def check_key(predict: Callable[..., Any], has_key: bool) -> None:
    """Raises UserError unless `Experiment.predict` can be called with a random key, or
    without one.
    """
    may, must = takes_key(predict)
    where = validation.describe_method(predict)
    if has_key and not may:
        raise errors.UserError(
            f"{where} was given a random key, but takes only a state and a batch: "
            "leave the key out, or add a parameter: predict(self, state, batch, key)."
        )
    if must and not has_key:
        raise errors.UserError(
            f"{where} needs a random key, and its caller gave none: predict(batch, "
            "jax.random.key(0)). With key=None as its default it can be called without."
        )
