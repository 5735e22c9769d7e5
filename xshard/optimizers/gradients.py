"""Differentiation of one loss or of several, for `Optimizer.compute_gradients`."""

import dataclasses
import functools
from collections.abc import Callable, Container, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xshard import errors
from xshard.base.jax_internals import tracing
from xshard.optimizers import trees

Loss = Callable[[trees.Params], Any]


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """Losses of one function at several inputs, computed one after the other.

    They are the iterations of a `lax.scan`. So the program is as large as for one
    input, and only one input's activations are alive at a time. Gradients are summed in
    float32 or wider, into a running sum. AggregationMethod.EXPERIMENTAL_TREE sums them
    in pairs instead, which keeps one more gradient alive each time that the number of
    inputs doubles.

    Attributes:
      loss: a function of the parameters and one input.
      inputs: a tree of arrays whose leading dimension is the number of micro-batches.
      measures: None; or a boolean scalar, which may be traced. Then aux is `(aux,
        sq_norms)`, with the squared norm of each input's gradients, float32 of shape
        [inputs], or zeros if it is False. These are the gradients before a number given
        as `grad_loss`, such as a loss scale, multiplies them.

    >>> def mean_loss(params, x):
    ...     opt = xshard.OptaxOptimizer(optax.sgd(0.5))
    ...     loss = lambda params, x: jnp.sum(params['m']['w'] * x) / 4
    ...     return opt.compute_gradients(xshard.MicroBatches(loss, x), params)
    >>> mean_loss = hk.transform_with_state(mean_loss)
    >>> params = {'m': {'w': jnp.ones(())}}
    >>> (value, grads), _ = mean_loss.apply({}, {}, None, params, jnp.arange(4.))
    >>> print(value, grads['m']['w'])
    1.5 1.5
    """

    loss: Callable[..., Any]
    inputs: Any
    measures: Any = None


GATE_NONE = 0
GATE_OP = 1
GATE_GRAPH = 2


class AggregationMethod:
    """The ways in which the gradients of several losses are summed.

    An argument of `Optimizer.compute_gradients`. All of them sum in float32 or wider.

    Source: `tf.AggregationMethod`.

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
    """Returns the constant of `AggregationMethod` with a name, or raises UserError."""
    names = [name for name in vars(AggregationMethod) if name.isupper()]
    if name not in names:
        raise errors.UserError(
            f"aggregation_method={name!r} must be one of {', '.join(names)}; for "
            "micro-batches EXPERIMENTAL_TREE adds in pairs, the others to a running "
            "sum."
        )
    return int(getattr(AggregationMethod, name))


def check_options(gate_gradients: Any, aggregation_method: Any) -> None:
    """Raises ValueError unless both options are among the constants above."""
    # A bool equals 0 or 1, but means no constant.
    gates = (GATE_NONE, GATE_OP, GATE_GRAPH)
    if isinstance(gate_gradients, bool) or gate_gradients not in gates:
        raise ValueError(
            "gate_gradients must be one of Optimizer.GATE_NONE, Optimizer.GATE_OP, "
            f"Optimizer.GATE_GRAPH; received {gate_gradients!r}."
        )
    methods = (None, 0, 1, 2)
    if isinstance(aggregation_method, bool) or aggregation_method not in methods:
        raise ValueError(
            "aggregation_method must be None or one of AggregationMethod.ADD_N, "
            ".EXPERIMENTAL_TREE, .EXPERIMENTAL_ACCUMULATE_N; received "
            f"{aggregation_method!r}."
        )


def check_loss(loss: Any) -> None:
    """Raises ValueError unless a loss is of a type that `value_and_grad` takes."""
    functions: Sequence[Any]
    if isinstance(loss, MicroBatches):
        functions = [loss.loss]
    elif isinstance(loss, Sequence):
        functions = loss
    else:
        functions = [loss]
    for function in functions:
        if not callable(function):
            raise ValueError(
                "loss must be a function of the parameters, a list of such functions, "
                f"or MicroBatches; received {_shown(function)}. A value does not "
                "record how it was computed: pass lambda params: ... in its place."
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
    """Differentiates with respect to some of the parameters.

    Args:
      loss: a function of the parameters, a sequence of such functions, or
        micro-batches.
      params: all parameters.
      trained: those to differentiate with respect to, {path: array}.
      aggregation_method: a constant of `AggregationMethod`, or None.
      grad_loss: the gradient with respect to the loss; 1 if None.
      has_aux: whether a loss returns `(value, aux)`.

    Returns:
      `(value, aux, {path: gradient})`. Only parameters that a loss depends on have a
      gradient; while `hk.running_init()` all of them have one, so that state is created
      for them. For several losses the value is their sum and aux is a list; for
      micro-batches aux is stacked.
    """
    check_loss(loss)
    tracker = DependenceTracker()
    # Evaluates and differentiates one loss, given the loss and its weight.
    evaluate = functools.partial(
        _evaluate_one, params=params, trained=trained, tracker=tracker, has_aux=has_aux
    )
    adds_in_pairs = aggregation_method == AggregationMethod.EXPERIMENTAL_TREE
    if isinstance(loss, MicroBatches):
        weight = _weight(grad_loss)
        value, aux, grads = _scan(evaluate, loss, weight, trained, adds_in_pairs)
    elif callable(loss):
        value, aux, grads = evaluate(loss, _weight(grad_loss))
    else:
        value, aux, grads = _add_up(evaluate, loss, grad_loss, aggregation_method)
    if hk.running_init():
        return value, aux, grads
    # A parameter that no loss depends on gets no gradient. With a gradient of zeros, a
    # rule with weight decay would still change it.
    grads = {path: grad for path, grad in grads.items() if path in tracker.paths}
    return value, aux, grads


def _add_up(
    evaluate: Callable[..., Any],
    losses: Sequence[Loss],
    grad_loss: Any,
    aggregation_method: int | None,
) -> tuple[Any, list[Any], dict[str, Any]]:
    """Returns the sums of several losses' values and gradients, and each aux."""
    count = len(losses)
    if not count:
        raise ValueError(
            "loss is an empty sequence; give at least one function of the parameters."
        )
    weights = grad_loss
    if not isinstance(grad_loss, list | tuple):
        weights = [grad_loss] * count
    if len(weights) != count:
        raise ValueError(
            f"grad_loss has {len(weights)} entries for {count} losses; give one each."
        )
    in_turn = aggregation_method == AggregationMethod.EXPERIMENTAL_ACCUMULATE_N
    # Pairs of a value and of gradients. In turn, there is only the sum so far.
    summands: list[Any] = []
    auxes = []
    for loss, weight in zip(losses, weights, strict=True):
        # In turn, each loss waits for the sum so far, so that only one of them holds
        # activations at a time.
        wait_for = (summands,) if in_turn else ()
        value, aux, grads = evaluate(loss, _weight(weight), wait_for=wait_for)
        auxes.append(aux)
        summands.append(_widen((value, grads)))
        if in_turn:
            summands = [_add_in_order(summands)]
    if aggregation_method == AggregationMethod.EXPERIMENTAL_TREE:
        value, grads = _add_in_pairs(summands)
    else:
        value, grads = _add_in_order(summands)
    return value, auxes, grads


def colocate(grads: dict[str, Any], trained: dict[str, Any]) -> dict[str, Any]:
    """Gives each gradient its parameter's sharding."""
    colocated = {}
    for path, grad in grads.items():
        _, colocated[path] = tracing.shard_alike(trained[path], grad)
    return colocated


def gate(grads: dict[str, Any], gate_gradients: int) -> dict[str, Any]:
    """Puts optimization barriers over no gradient, each one, or all together."""
    if gate_gradients == GATE_OP:
        return {path: lax.optimization_barrier(grad) for path, grad in grads.items()}
    if gate_gradients == GATE_GRAPH:
        return lax.optimization_barrier(grads)
    return grads


class DependenceTracker:
    """Records the parameters that losses depend on.

    A parameter counts if JAX propagates a derivative to it. Those behind
    `lax.stop_gradient`, or used only in computations that do not affect the value, do
    not count. A derivative that happens to be zero counts, and so does one that JAX
    cannot tell to be zero, such as behind a `lax.optimization_barrier`.

    Attributes:
      paths: the paths of the parameters, complete once the backward passes have been
        traced.
    """

    def __init__(self) -> None:
        self.paths: set[str] = set()

    def watch(self, params: trees.Params, paths: Container[str]) -> trees.Params:
        """Returns the same parameters; a backward pass records which it reaches.

        Args:
          params: a Haiku tree.
          paths: the paths of the parameters to record.
        """
        leaves = trees.leaves_by_path(params)
        for path in leaves:
            if path in paths:
                identity = self._recording_identity(path)
                leaves[path] = identity(leaves[path])
        return trees.rebuild(params, leaves)

    def _recording_identity(self, path: str) -> Callable[[Any], Any]:
        """Returns an identity whose backward pass records a path."""
        identity = jax.custom_vjp(lambda x: x)

        def forward(x: Any) -> tuple[Any, None]:
            # With `symbolic_zeros` the argument comes in a wrapper.
            return x.value, None

        def backward(_: None, cotangent: Any) -> tuple[Any]:
            # JAX represents a derivative that it knows to be zero as a symbol.
            if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
                self.paths.add(path)
            return (cotangent,)

        identity.defvjp(forward, backward, symbolic_zeros=True)
        return identity


def _evaluate_one(
    loss: Loss,
    weight: jax.Array | None,
    *,
    params: trees.Params,
    trained: dict[str, Any],
    tracker: DependenceTracker,
    has_aux: bool,
    wait_for: tuple[Any, ...] = (),
) -> tuple[Any, Any, dict[str, Any]]:
    """Returns the value, aux and gradients of one loss.

    Args:
      loss: the loss.
      weight: the gradient with respect to it; 1 if None.
      params: all parameters.
      trained: those to differentiate with respect to, by path.
      tracker: records those of them that the loss depends on.
      has_aux: whether the loss returns `(value, aux)`.
      wait_for: arrays that are computed before the loss is.
    """

    def objective(trained: dict[str, Any]) -> tuple[jax.Array, Any]:
        arguments = trees.replace(params, trained)
        if wait_for:
            # Without the barrier XLA may run all forward passes first, and keep all
            # their activations alive.
            arguments, _ = lax.optimization_barrier((arguments, wait_for))
        out = loss(tracker.watch(arguments, trained))
        value, aux = _value_and_aux(out, has_aux)
        return _weighted_sum(value, weight), (value, aux)

    differentiate = hk.value_and_grad(objective, has_aux=True)
    (_, (value, aux)), grads = differentiate(trained)
    return value, aux, grads


def _value_and_aux(out: Any, has_aux: bool) -> tuple[jax.Array, Any]:
    """Splits what a loss returns; ValueError if it does not match `has_aux`."""
    if has_aux:
        if not isinstance(out, tuple) or len(out) != 2:
            raise ValueError(
                "With has_aux=True a loss must return (value, aux), a tuple of two; it "
                f"returned {_shown(out)}. Return both, or leave out has_aux."
            )
        value, aux = out
    else:
        value = out
        aux = None
    if not jax.tree_util.all_leaves([value]):
        raise ValueError(
            f"A loss must return an array; it returned {_shown(value)}. If it returns "
            "(value, aux), pass has_aux=True."
        )
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"A loss must be a floating-point number; it is {value.dtype}. Of a "
            "complex one take the real part or the absolute value."
        )
    return value, aux


def _shown(x: Any) -> str:
    """Returns an argument or a result, for messages."""
    if isinstance(x, jax.Array | np.ndarray):
        return f"an array of the shape {x.shape}"
    return f"{type(x).__name__}: {str(x)[:80]}"


def _weighted_sum(value: jax.Array, weight: jax.Array | None) -> jax.Array:
    """Returns the scalar to differentiate.

    It may overflow, because only its derivative, the weight, is used.
    """
    shape = () if weight is None else weight.shape
    if value.shape != shape:
        given = "none" if weight is None else shape
        raise ValueError(
            f"The loss has shape {value.shape} and grad_loss {given}; a loss must be a "
            "scalar, or grad_loss must have the shape of the loss."
        )
    value = trees.widen(value)
    if weight is None:
        return value
    return jnp.sum(value * weight.astype(value.dtype))


def _weight(grad_loss: Any) -> jax.Array | None:
    """Returns `grad_loss` for one loss, in float32 or wider."""
    if grad_loss is None:
        return None
    return trees.widen(grad_loss)


def _scan(
    evaluate: Callable[..., Any],
    loss: MicroBatches,
    weight: jax.Array | None,
    trained: dict[str, Any],
    adds_in_pairs: bool,
) -> tuple[Any, Any, dict[str, Any]]:
    """Returns the sums over micro-batches of values and gradients, and stacked aux."""
    counts = {jnp.shape(x)[:1] for x in jax.tree.leaves(loss.inputs)}
    if len(counts) != 1 or counts <= {(), (0,)}:
        raise ValueError(
            "The inputs of MicroBatches must be arrays of one leading dimension of at "
            f"least 1; received {jax.tree.map(jnp.shape, loss.inputs)}."
        )
    ((count,),) = counts
    divisor = None
    if weight is not None and not weight.shape:
        # The square of a large loss scale is not finite.
        divisor = weight
    # The initial carry must vary over the same mapped axes as the gradients, so it is
    # selected from the parameters.
    never = jnp.zeros((), jnp.bool_)
    zeros = jax.tree.map(lambda p: jnp.where(never, trees.widen(p), 0), trained)

    def of_input(x: Any) -> tuple[Any, Any]:
        of_x = lambda params: loss.loss(params, x)
        value, aux, grads = evaluate(of_x, weight)
        if loss.measures is not None:
            # Without the loss's weight.
            sq_norm = trees.sum_of_squares_if(loss.measures, grads, divisor)
            aux = (aux, sq_norm.astype(jnp.float32))
        return _widen(grads), (trees.widen(value), aux)

    if adds_in_pairs:
        total, outputs = _sum_in_pairs(of_input, zeros, loss.inputs, count)
    else:

        def add(total: Any, x: Any) -> tuple[Any, Any]:
            grads, output = of_input(x)
            return jax.tree.map(jnp.add, total, grads), output

        total, outputs = hk.scan(add, zeros, loss.inputs)
    values, aux = outputs
    return jnp.sum(values, axis=0), aux, total


def _sum_in_pairs(
    f: Callable[[Any], tuple[Any, Any]], zeros: Any, xs: Any, count: int
) -> tuple[Any, Any]:
    """Applies a function to several inputs, and sums its first results in pairs.

    Args:
      f: a function of one input, which returns a tree to sum and another output.
      zeros: zeros like the tree to sum.
      xs: the inputs, stacked.
      count: their number.

    Returns:
      The sum, and the other outputs, stacked.
    """
    if count == 1:
        total, output = f(jax.tree.map(lambda x: x[0], xs))
        return total, jax.tree.map(lambda x: jnp.asarray(x)[None], output)

    # The largest power of 2 below the count, so that the first part is a complete
    # binary tree.
    first = 1 << (count - 1).bit_length() - 1
    if count == 2 * first:
        # Nested loops, so that the program contains `f` only once.
        def add(total: Any, half: Any) -> tuple[Any, Any]:
            part, outputs = _sum_in_pairs(f, zeros, half, first)
            return jax.tree.map(jnp.add, total, part), outputs

        halves = jax.tree.map(lambda x: x.reshape(2, first, *x.shape[1:]), xs)
        total, outputs = hk.scan(add, zeros, halves)
        return total, jax.tree.map(lambda x: x.reshape(count, *x.shape[2:]), outputs)

    first_xs = jax.tree.map(lambda x: x[:first], xs)
    total, outputs = _sum_in_pairs(f, zeros, first_xs, first)
    other_xs = jax.tree.map(lambda x: x[first:], xs)
    other_total, other_outputs = _sum_in_pairs(f, zeros, other_xs, count - first)
    concatenate = lambda a, b: jnp.concatenate([a, b])
    outputs = jax.tree.map(concatenate, outputs, other_outputs)
    return jax.tree.map(jnp.add, total, other_total), outputs


def _widen(tree: Any) -> Any:
    return jax.tree.map(trees.widen, tree)


def _add_in_order(summands: list[Any]) -> Any:
    """Returns the sum of trees, added one by one."""
    return jax.tree.map(lambda *xs: functools.reduce(jnp.add, xs), *summands)


def _add_in_pairs(summands: list[Any]) -> Any:
    """Returns the sum of trees: neighbours are added, then neighbouring sums."""
    while len(summands) > 1:
        sums = []
        for i in range(0, len(summands), 2):
            # The last one may have no neighbour.
            sums.append(_add_in_order(summands[i : i + 2]))
        summands = sums
    return summands[0]
