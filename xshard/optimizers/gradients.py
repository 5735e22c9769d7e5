"""Differentiation of one loss or of several: the body of `Optimizer.compute_gradients`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xshard import errors, jax_internals
from xshard.optimizers import dependence, trees

Loss = Callable[[trees.Params], Any]


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """Losses of one function at several inputs, computed one after the other by
    `lax.scan`.

    The program is as large as for one input, and only one input's activations are alive
    at a time. Gradients are summed in float32 or wider, into a running sum.
    AggregationMethod.EXPERIMENTAL_TREE sums them in pairs instead, which keeps one more
    gradient alive each time that the number of inputs doubles.

    Attributes:
      loss: a function of the parameters and one input.
      inputs: a tree of arrays whose leading dimension is the number of micro-batches.

    >>> def mean_loss(params, x):
    ...     opt = xshard.OptaxOptimizer(optax.sgd(0.5))
    ...     loss = lambda params, x: jnp.sum(params['m']['w'] * x) / 4
    ...     return opt.compute_gradients(xshard.MicroBatches(loss, x), params)
    >>> mean_loss = hk.transform_with_state(mean_loss)
    >>> (value, grads), _ = mean_loss.apply({}, {}, None, {'m': {'w': jnp.ones(())}}, jnp.arange(4.))
    >>> print(value, grads['m']['w'])
    1.5 1.5
    """

    loss: Callable[[trees.Params, Any], Any]
    inputs: Any


GATE_NONE = 0
GATE_OP = 1
GATE_GRAPH = 2


class AggregationMethod:
    """The ways in which `Optimizer.compute_gradients` sums the gradients of several
    losses.

    Source: `tf.AggregationMethod`. All of them sum in float32 or wider.

    Attributes:
      ADD_N: computes all gradients, in any order, then adds them one by one. The
        default.
      EXPERIMENTAL_TREE: as ADD_N, but adds in pairs, so that rounding grows with log2
        of their number.
      EXPERIMENTAL_ACCUMULATE_N: differentiates one loss after the other into a running
        sum. At most two gradients, and the activations of one loss, are alive at once.
    """

    ADD_N = 0
    DEFAULT = ADD_N
    EXPERIMENTAL_TREE = 1
    EXPERIMENTAL_ACCUMULATE_N = 2


def method(name: str) -> int:
    """The constant of `AggregationMethod` with this name; UserError if there is none."""
    names = [name for name in vars(AggregationMethod) if name.isupper()]
    if name not in names:
        raise errors.UserError(
            f"aggregation_method={name!r} must be one of {', '.join(names)}; for micro-batches "
            "EXPERIMENTAL_TREE adds in pairs, the others to a running sum."
        )
    return int(getattr(AggregationMethod, name))


def check_options(gate_gradients: Any, aggregation_method: Any) -> None:
    """Raises ValueError unless both options are among the constants above."""
    if isinstance(gate_gradients, bool) or gate_gradients not in (
        GATE_NONE,
        GATE_OP,
        GATE_GRAPH,
    ):
        raise ValueError(
            "gate_gradients must be one of Optimizer.GATE_NONE, Optimizer.GATE_OP, "
            f"Optimizer.GATE_GRAPH; received {gate_gradients!r}."
        )
    if isinstance(aggregation_method, bool) or aggregation_method not in (
        None,
        0,
        1,
        2,
    ):
        raise ValueError(
            "aggregation_method must be None or one of AggregationMethod.ADD_N, .EXPERIMENTAL_TREE, "
            f".EXPERIMENTAL_ACCUMULATE_N; received {aggregation_method!r}."
        )


def check_loss(loss: Any) -> None:
    """Raises ValueError unless a loss is a function, a sequence of functions or
    `MicroBatches`.
    """
    if isinstance(loss, MicroBatches):
        functions: Sequence[Any] = [loss.loss]
    else:
        functions = loss if isinstance(loss, Sequence) else [loss]
    for function in functions:
        if not callable(function):
            raise ValueError(
                "loss must be a function of the parameters, a list of such functions, or MicroBatches; "
                f"received {_shown(function)}. A value does not record how it was computed: pass "
                "lambda params: ... in its place."
            )


def value_and_grad(
    loss: Loss | Sequence[Loss] | MicroBatches,
    params: trees.Params,
    trained: dict[str, Any],
    *,
    aggregation_method: int | None,
    grad_loss: Any,
    has_aux: bool,
) -> tuple[Any, Any, dict[str, Any]]:
    """Differentiates with respect to the parameters in `trained`, {path: array}.

    Returns:
      `(value, aux, {path: gradient})`. Only parameters that a loss depends on have a
      gradient; while `hk.running_init()` all of them have one, so that state is created
      for them. For several losses the value is their sum and aux is a list; for
      micro-batches aux is stacked.
    """
    check_loss(loss)
    reached = dependence.DependenceTracker()
    evaluate = functools.partial(
        _evaluate_one, params=params, trained=trained, reached=reached, has_aux=has_aux
    )
    value, aux, grads = _evaluate_all(
        evaluate, loss, trained, aggregation_method, grad_loss
    )
    # A parameter that no loss depends on gets no gradient. With a gradient of zeros, a
    # rule with weight decay would still change it.
    if not hk.running_init():
        grads = {path: grad for path, grad in grads.items() if path in reached.paths}
    return value, aux, grads


def _evaluate_all(
    evaluate: Callable[..., Any],
    loss: Loss | Sequence[Loss] | MicroBatches,
    trained: dict[str, Any],
    aggregation_method: int | None,
    grad_loss: Any,
) -> tuple[Any, Any, dict[str, Any]]:
    in_pairs = aggregation_method == AggregationMethod.EXPERIMENTAL_TREE
    if isinstance(loss, MicroBatches):
        return _scan(evaluate, loss, _weight(grad_loss), trained, in_pairs)
    if callable(loss):
        return evaluate(loss, _weight(grad_loss))
    in_turn = aggregation_method == AggregationMethod.EXPERIMENTAL_ACCUMULATE_N
    summands: list[Any] = []
    auxes = []
    for function, weight in zip(loss, _weights(grad_loss, len(loss)), strict=True):
        # In turn, each loss waits for the sum so far, so that only one of them holds
        # activations at a time.
        value, aux, grads = evaluate(
            function, weight, wait_for=(summands,) if in_turn else ()
        )
        summands.append(_widen((value, grads)))
        if in_turn:
            summands = [_add_in_order(summands)]
        auxes.append(aux)
    value, total = _add_pairs(summands) if in_pairs else _add_in_order(summands)
    return value, auxes, total


def colocate(grads: dict[str, Any], trained: dict[str, Any]) -> dict[str, Any]:
    """Gives each gradient its parameter's sharding."""
    return {
        path: jax_internals.shard_alike(trained[path], grad)[1]
        for path, grad in grads.items()
    }


def gate(grads: dict[str, Any], gate_gradients: int) -> dict[str, Any]:
    """Puts optimization barriers over no gradient, each one, or all of them together."""
    if gate_gradients == GATE_OP:
        return {path: lax.optimization_barrier(grad) for path, grad in grads.items()}
    if gate_gradients == GATE_GRAPH:
        return lax.optimization_barrier(grads)
    return grads


def _evaluate_one(
    loss: Loss,
    weight: jax.Array | None,
    *,
    params: trees.Params,
    trained: dict[str, Any],
    reached: dependence.DependenceTracker,
    has_aux: bool,
    wait_for: tuple[Any, ...] = (),
) -> tuple[Any, Any, dict[str, Any]]:
    def objective(trained: dict[str, Any]) -> tuple[jax.Array, Any]:
        arguments = trees.replace(params, trained)
        if wait_for:
            # Without the barrier XLA may run all forward passes first, and keep all
            # their activations alive.
            arguments, _ = lax.optimization_barrier((arguments, wait_for))
        value, aux = _value_and_aux(loss(reached.watch(arguments, trained)), has_aux)
        return _weighted_sum(value, weight), (value, aux)

    (_, (value, aux)), grads = hk.value_and_grad(objective, has_aux=True)(trained)
    return value, aux, grads


def _value_and_aux(out: Any, has_aux: bool) -> tuple[jax.Array, Any]:
    """Splits the return value of a loss; raises ValueError if it does not match
    `has_aux`.
    """
    is_pair = isinstance(out, tuple) and len(out) == 2
    if has_aux and not is_pair:
        raise ValueError(
            "With has_aux=True a loss must return (value, aux), a tuple of two; it returned "
            f"{_shown(out)}. Return both, or leave out has_aux."
        )
    value, aux = out if has_aux else (out, None)
    if not jax.tree_util.all_leaves([value]):
        raise ValueError(
            f"A loss must return an array; it returned {_shown(value)}. If it returns (value, aux), pass "
            "has_aux=True."
        )
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"A loss must be a floating-point number; it is {value.dtype}. Of a complex one take the real "
            "part or the absolute value."
        )
    return value, aux


def _shown(x: Any) -> str:
    if isinstance(x, jax.Array | np.ndarray):
        return f"an array of the shape {x.shape}"
    return f"{type(x).__name__}: {str(x)[:80]}"


def _weighted_sum(value: jax.Array, weight: jax.Array | None) -> jax.Array:
    """The scalar to differentiate. It may overflow, because only its derivative, the
    weight, is used.
    """
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
        raise ValueError(
            "loss is an empty sequence; give at least one function of the parameters."
        )
    if not isinstance(grad_loss, list | tuple):
        grad_loss = [grad_loss] * count
    if len(grad_loss) != count:
        raise ValueError(
            f"grad_loss has {len(grad_loss)} entries for {count} losses; give one each."
        )
    return [_weight(weight) for weight in grad_loss]


def _weight(grad_loss: Any) -> jax.Array | None:
    return None if grad_loss is None else trees.widen(grad_loss)


def _scan(
    evaluate: Callable[..., Any],
    loss: MicroBatches,
    weight: jax.Array | None,
    trained: dict[str, Any],
    in_pairs: bool,
) -> tuple[Any, Any, dict[str, Any]]:
    counts = {jnp.shape(x)[:1] for x in jax.tree.leaves(loss.inputs)}
    if len(counts) != 1 or counts <= {(), (0,)}:
        raise ValueError(
            "The inputs of MicroBatches must be arrays of one leading dimension of at least 1; received "
            f"{jax.tree.map(jnp.shape, loss.inputs)}."
        )
    ((count,),) = counts
    # The initial carry must vary over the same mapped axes as the gradients, so it is
    # selected from the parameters.
    never = jnp.zeros((), jnp.bool_)
    zeros = jax.tree.map(lambda p: jnp.where(never, trees.widen(p), 0), trained)

    def of_input(x: Any) -> tuple[Any, Any]:
        value, aux, grads = evaluate(lambda params: loss.loss(params, x), weight)
        return _widen(grads), (trees.widen(value), aux)

    def add(total: Any, x: Any) -> tuple[Any, Any]:
        grads, out = of_input(x)
        return jax.tree.map(jnp.add, total, grads), out

    if in_pairs:
        total, (values, aux) = _sum_in_pairs(of_input, zeros, loss.inputs, count)
    else:
        total, (values, aux) = hk.scan(add, zeros, loss.inputs)
    return jnp.sum(values, axis=0), aux, total


def _sum_in_pairs(
    f: Callable[[Any], tuple[Any, Any]], zeros: Any, xs: Any, count: int
) -> tuple[Any, Any]:
    """The sum of `f(x)[0]` in pairs, and all `f(x)[1]`, stacked."""
    if count == 1:
        total, out = f(jax.tree.map(lambda x: x[0], xs))
        return total, jax.tree.map(lambda x: jnp.asarray(x)[None], out)
    # The largest power of 2 below the count, so that the first part is a complete
    # binary tree.
    first = 1 << (count - 1).bit_length() - 1
    if count == 2 * first:
        # Nested loops, so that the program contains `f` only once.
        def add(total: Any, half: Any) -> tuple[Any, Any]:
            part, out = _sum_in_pairs(f, zeros, half, first)
            return jax.tree.map(jnp.add, total, part), out

        halves = jax.tree.map(lambda x: x.reshape(2, first, *x.shape[1:]), xs)
        total, out = hk.scan(add, zeros, halves)
        return total, jax.tree.map(lambda x: x.reshape(count, *x.shape[2:]), out)
    total, out = _sum_in_pairs(f, zeros, jax.tree.map(lambda x: x[:first], xs), first)
    rest, more = _sum_in_pairs(
        f, zeros, jax.tree.map(lambda x: x[first:], xs), count - first
    )
    outs = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), out, more)
    return jax.tree.map(jnp.add, total, rest), outs


def _widen(tree: Any) -> Any:
    return jax.tree.map(trees.widen, tree)


def _add_in_order(summands: list[Any]) -> Any:
    return jax.tree.map(lambda *xs: functools.reduce(jnp.add, xs), *summands)


def _add_pairs(summands: list[Any]) -> Any:
    while len(summands) > 1:
        pairs = [
            _add_in_order(summands[i : i + 2]) for i in range(0, len(summands) - 1, 2)
        ]
        summands = pairs + summands[2 * len(pairs) :]
    return summands[0]
