"""Evaluation of functions that treat each layer of a stack separately, on the layers that a replica holds.

An array of stacked layers, as `hk.layer_stack` creates it, has a leading dimension of layers. If each replica holds
some whole layers, it can evaluate a function that does not mix layers, such as the matrix products in Muon, on these
alone.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xshard import jax_internals
from xshard.optimizers import primitives, values
from xshard.optimizers.values import Layers

# Primitives of matrices: all dimensions but the last two are batch dimensions.
_OF_MATRICES = {"cholesky", "eigh", "householder_product", "lu", "qr", "svd", "triangular_solve"}


class MixedError(Exception):
    """An equation mixes layers, or is not known to keep them separate."""


def run(program: jax_internals.ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluates a program of whole stacks on this replica's layers.

    Args:
      program: the program.
      args: `Layers` in place of each array of stacked layers; other arrays as they are.

    Returns:
      The results, as `Layers` if they depend on `Layers`.

    Raises:
      MixedError: if the program mixes layers.
    """
    results = primitives.evaluate(program, args, equation)
    return list(map(_whole, results, program.jaxpr.outvars))


def equation(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Evaluates an equation, with operands and results as for `run`."""
    name = eqn.primitive.name
    is_layers = [isinstance(x, Layers) for x in operands]
    called = primitives.called(eqn)
    if called is not None:
        return run(called, operands)
    if not any(is_layers):
        return values.on_whole(eqn, operands)
    if name == "scan":
        return _scan(eqn, operands, is_layers)
    if name == "cond":
        return _cond(eqn, operands, is_layers)
    changed = _changed(eqn, is_layers, next(x for x in operands if isinstance(x, Layers)))
    if name in primitives.ELEMENTWISE:
        operands = _alike(eqn, operands)
    return list(map(Layers, primitives.bind(eqn, *map(_raw, operands), **changed)))


def _changed(eqn: Any, is_layers: Sequence[bool], here: Layers) -> dict[str, Any]:
    """The parameters of an equation on whole stacks that change for this replica's layers.

    Raises:
      MixedError: if the equation mixes layers.
    """
    name, params = eqn.primitive.name, eqn.params
    count, own = eqn.invars[is_layers.index(True)].aval.shape[0], len(here.array)
    # Each case checks that the dimension of layers stays first, and that no layer depends on another.
    keeps = False
    changed: dict[str, Any] = {}
    if name in primitives.ELEMENTWISE:
        keeps = True
    elif name == "transpose":
        keeps = params["permutation"][0] == 0
    elif name == "reshape":
        keeps = params["dimensions"] is None and params["new_sizes"][0] == count
        changed = {"new_sizes": (own, *params["new_sizes"][1:])}
    elif name == "broadcast_in_dim":
        keeps = params["broadcast_dimensions"][:1] == (0,) and params["shape"][0] == count
        changed = {"shape": (own, *params["shape"][1:])}
    elif name == "squeeze":
        keeps = 0 not in params["dimensions"]
    elif name in primitives.REDUCTIONS:
        keeps = 0 not in params["axes"]
    elif name == "dot_general":
        keeps = _keeps_products(params["dimension_numbers"], is_layers)
    elif name in _OF_MATRICES:
        keeps = all(is_layers) and all(atom.aval.ndim > 2 for atom in eqn.invars)
    if not keeps:
        raise MixedError
    return changed


def _keeps_products(dimension_numbers: Any, is_layers: Sequence[bool]) -> bool:
    """Returns whether the products stay within each layer, and the result's first dimension is that of layers."""
    (left, _), (of_left, of_right) = dimension_numbers
    if all(is_layers):
        return of_left[:1] == of_right[:1] == (0,)
    # Only the left operand may have layers alone, since dot_general puts its dimensions first in the result.
    return bool(is_layers[0] and not of_left and 0 not in left)


def _alike(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """The operands of an elementwise equation, with each scalar that stands for a stack of one value broadcast."""
    shape = next(x.array.shape for x in operands if isinstance(x, Layers))
    alike = []
    for x, atom in zip(operands, eqn.invars, strict=True):
        if isinstance(x, Layers) or not atom.aval.shape:
            alike.append(x)
        elif jnp.ndim(x) == 0:
            alike.append(jnp.broadcast_to(x, shape))
        else:
            raise MixedError
    return alike


def _scan(eqn: Any, operands: Sequence[Any], is_layers: Sequence[bool]) -> list[Any]:
    fixed, carries = jax_internals.scan_counts(eqn)
    program, made = _on_layers(eqn.params["jaxpr"], operands)
    carried, in_each_round = made[:carries], made[carries:]
    # Scanned inputs and stacked outputs have the rounds as their first dimension, so they cannot be `Layers`.
    begin, scanned = is_layers[fixed : fixed + carries], is_layers[fixed + carries :]
    if carried != begin or any(scanned) or any(in_each_round):
        raise MixedError
    return _marked(primitives.bind(eqn, *_arrays(eqn, operands), jaxpr=program), made)


def _cond(eqn: Any, operands: Sequence[Any], is_layers: Sequence[bool]) -> list[Any]:
    on_layers = [_on_layers(branch, operands[1:]) for branch in eqn.params["branches"]]
    programs, (made, *others) = zip(*on_layers, strict=True)
    if is_layers[0] or any(other != made for other in others):
        raise MixedError
    return _marked(primitives.bind(eqn, *_arrays(eqn, operands), branches=programs), made)


def _on_layers(
    program: jax_internals.ClosedJaxpr, operands: Sequence[Any]
) -> tuple[jax_internals.ClosedJaxpr, list[bool]]:
    """Traces a program of whole stacks for this replica's layers; also returns which of its results are `Layers`."""
    is_layers = [isinstance(x, Layers) for x in operands]
    made: list[bool] = []

    def call(*inputs: Any) -> list[Any]:
        results = run(program, _marked(inputs, is_layers))
        made[:] = [isinstance(x, Layers) for x in results]
        return list(map(_raw, results))

    shapes = []
    for x, aval in zip(operands, program.in_avals, strict=True):
        shape = (len(x.array), *aval.shape[1:]) if isinstance(x, Layers) else aval.shape
        shapes.append(jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type))
    return jax.make_jaxpr(call)(*shapes), made


def _arrays(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """The raw arrays of an equation's operands: this replica's layers, or whole arrays."""
    return [_raw(_whole(x, atom)) for x, atom in zip(operands, eqn.invars, strict=True)]


def _marked(arrays: Sequence[Any], is_layers: Sequence[bool]) -> list[Any]:
    return [Layers(x) if of_layers else x for x, of_layers in zip(arrays, is_layers, strict=True)]


def _whole(x: Any, atom: Any) -> Any:
    """`Layers` as they are; for any other value the whole array that it stands for."""
    return x if isinstance(x, Layers) else values.whole(x, atom.aval.shape)


def _raw(x: Any) -> Any:
    return x.array if isinstance(x, Layers) else x
