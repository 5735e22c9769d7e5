"""Differentiation of one loss or of several: the body of `Optimizer.compute_gradients`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import shard_alike

from xshard.optimizers import trees

Loss = Callable[[trees.Params], Any]

GATE_NONE = 0
GATE_OP = 1
GATE_GRAPH = 2


class AggregationMethod:
    """How `Optimizer.compute_gradients` sums the gradients of several losses (micro-batches).

    Source: `tf.AggregationMethod`. All of them sum in float32 or wider.

    Attributes:
      ADD_N: all gradients are computed, in any order, then added one by one. The default.
      EXPERIMENTAL_TREE: as ADD_N, but added in pairs: rounding grows with log2 of their number.
      EXPERIMENTAL_ACCUMULATE_N: one loss after the other into a running sum, so that two gradients
        at most, and the activations of one micro-batch, are alive at once.
    """

    ADD_N = 0
    DEFAULT = ADD_N
    EXPERIMENTAL_TREE = 1
    EXPERIMENTAL_ACCUMULATE_N = 2


def check_options(gate_gradients: Any, aggregation_method: Any) -> None:
    """Raises ValueError unless both are among the constants above."""
    if isinstance(gate_gradients, bool) or gate_gradients not in (GATE_NONE, GATE_OP, GATE_GRAPH):
        raise ValueError(
            "gate_gradients must be one of Optimizer.GATE_NONE, Optimizer.GATE_OP, "
            f"Optimizer.GATE_GRAPH; received {gate_gradients!r}."
        )
    if isinstance(aggregation_method, bool) or aggregation_method not in (None, 0, 1, 2):
        raise ValueError(
            "aggregation_method must be None or one of AggregationMethod.ADD_N, .EXPERIMENTAL_TREE, "
            f".EXPERIMENTAL_ACCUMULATE_N; received {aggregation_method!r}."
        )


def value_and_grad(
    loss: Loss | Sequence[Loss],
    params: trees.Params,
    trained: dict[str, Any],
    *,
    aggregation_method: int | None,
    grad_loss: Any,
    has_aux: bool,
) -> tuple[Any, Any, dict[str, Any]]:
    """Differentiates with respect to the parameters in `trained`, {path: array}.

    Returns:
      `(value, aux, {path: gradient})`; for several losses the sum of the values and a list of aux.
    """
    evaluate = functools.partial(_one, params=params, trained=trained, has_aux=has_aux)
    if callable(loss):
        return evaluate(loss, None if grad_loss is None else trees.widen(grad_loss))
    weights = _weights(grad_loss, len(loss))
    if aggregation_method == AggregationMethod.EXPERIMENTAL_ACCUMULATE_N:
        return _accumulate(evaluate, loss, weights)
    values, auxes, grads = zip(*map(evaluate, loss, weights), strict=True)
    tree = aggregation_method == AggregationMethod.EXPERIMENTAL_TREE
    add = _add_pairs if tree else _add_in_order
    value, total = add([_widen((value, grad)) for value, grad in zip(values, grads, strict=True)])
    return value, list(auxes), total


def colocate(grads: dict[str, Any], trained: dict[str, Any]) -> dict[str, Any]:
    """Gives each gradient its parameter's sharding."""
    return {path: shard_alike.shard_alike(trained[path], grad)[1] for path, grad in grads.items()}


def gate(grads: dict[str, Any], gate_gradients: int) -> dict[str, Any]:
    """Puts optimization barriers over no gradient, each one, or all of them together."""
    if gate_gradients == GATE_OP:
        return {path: lax.optimization_barrier(grad) for path, grad in grads.items()}
    return lax.optimization_barrier(grads) if gate_gradients == GATE_GRAPH else grads


def _one(
    loss: Loss,
    weight: jax.Array | None,
    *,
    params: trees.Params,
    trained: dict[str, Any],
    has_aux: bool,
) -> tuple[Any, Any, dict[str, Any]]:
    def objective(trained: dict[str, Any]) -> tuple[jax.Array, Any]:
        out = loss(trees.replace(params, trained))
        value, aux = out if has_aux else (out, None)
        value = jnp.asarray(value)
        return _weighted_sum(value, weight), (value, aux)

    (_, (value, aux)), grads = hk.value_and_grad(objective, has_aux=True)(trained)
    return value, aux, grads


def _weighted_sum(value: jax.Array, weight: jax.Array | None) -> jax.Array:
    """The scalar to differentiate. It may overflow: only its derivative, the weight, is used."""
    shape = () if weight is None else weight.shape
    if value.shape != shape:
        raise ValueError(
            f"The loss has shape {value.shape} and grad_loss {'none' if weight is None else shape}; "
            "a loss must be a scalar, or grad_loss must have the shape of the loss."
        )
    value = trees.widen(value)
    return value if weight is None else jnp.sum(value * weight.astype(value.dtype))


def _weights(grad_loss: Any, count: int) -> list[jax.Array | None]:
    """`grad_loss` for each of several losses."""
    if not count:
        raise ValueError("loss is an empty sequence; give at least one function of the parameters.")
    if not isinstance(grad_loss, list | tuple):
        grad_loss = [grad_loss] * count
    if len(grad_loss) != count:
        raise ValueError(
            f"grad_loss has {len(grad_loss)} entries for {count} losses; give one each."
        )
    return [None if weight is None else trees.widen(weight) for weight in grad_loss]


def _accumulate(
    evaluate: Callable[..., Any], losses: Sequence[Loss], weights: list[Any]
) -> tuple[Any, list[Any], dict[str, Any]]:
    total: Any = None
    auxes = []
    for loss, weight in zip(losses, weights, strict=True):

        def after_total(params: trees.Params, loss: Loss = loss, total: Any = total) -> Any:
            # Without the barrier XLA may run all forward passes first, and hold their activations.
            return loss(lax.optimization_barrier((params, total))[0])

        value, aux, grads = evaluate(after_total, weight)
        new = _widen((value, grads))
        total = new if total is None else jax.tree.map(jnp.add, total, new)
        auxes.append(aux)
    return total[0], auxes, total[1]


def _widen(tree: Any) -> Any:
    return jax.tree.map(trees.widen, tree)


def _add_in_order(summands: list[Any]) -> Any:
    return jax.tree.map(lambda *xs: functools.reduce(jnp.add, xs), *summands)


def _add_pairs(summands: list[Any]) -> Any:
    while len(summands) > 1:
        pairs = [_add_in_order(summands[i : i + 2]) for i in range(0, len(summands) - 1, 2)]
        summands = pairs + summands[2 * len(pairs) :]
    return summands[0]
