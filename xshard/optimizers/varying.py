"""Finds the results of a step that differ between replicas, or between groups, in its program before it runs.

What a replica computes differs from what the others do if it depends on its part of the batch, on its keys or on
its number, and has not been through a collective that makes one value of all of theirs. Groups differ by their states, too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from xshard import mesh as mesh_lib

# Of the axes that something differs along.
Axes = frozenset[str]
_NONE: Axes = frozenset()
ALL: Axes = frozenset(mesh_lib.BATCH)
# Collectives after which all replicas along an axis hold the same.
_EQUALISING = {
    "psum": "axes",
    "psum_invariant": "axes",
    "pmax": "axes",
    "pmin": "axes",
    "all_gather": "axis_name",
    "all_gather_invariant": "axis_name",
}
_EQUAL = "equal_on_replicas"
# The name of the function that gathers a parameter in shards, as a program shows it.
GATHERED = "gathered_parameter"
# What the results of an equation differ by, given what its inputs do; None: it is like any other.
Special = Callable[[Any, list[Axes]], list[Axes] | None]


class _Mark:
    """A function that returns its first argument, and by whose name a program shows where it was called."""

    def __init__(self, name: str):
        self.__name__ = name

    def __call__(self, tree: Any, given: Any) -> Any:
        return tree


def marked(name: str, tree: Any, given: Any = ()) -> Any:
    """The same tree, as the result of a call that a program shows by a name.

    Args:
      name: the name.
      tree: arrays.
      given: further arrays that the call is shown to be given.
    """
    return jax.jit(_Mark(name))(tree, given)


def equal_on_replicas(tree: Any, *, given: Any = ()) -> Any:
    """The same tree, said to be equal on all replicas of a group where that cannot be seen in the program.

    Such is what a computation of one's own, or a gather among some replicas after others, makes equal. A run compares
    its state after its first step; replicas that part later stay apart, and a checkpoint keeps one of them.

    Args:
      tree: arrays.
      given: arrays on which it depends: where these differ between replicas, so does the tree.
    """
    return marked(_EQUAL, tree, given)


def mapped_outputs(jaxpr: core.Jaxpr) -> tuple[list[Axes], list[Axes]]:
    """The axes along which each result of a program on all replicas differs, and those that it is said to lie along.

    Args:
      jaxpr: the program, which holds one `jax.shard_map`: what is computed before it is of whole arrays.
    """
    (mapped,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"]
    inputs, declared = (
        [of_spec(spec) for spec in mapped.params[key]] for key in ("in_specs", "out_specs")
    )
    return outputs(opened(mapped.params["jaxpr"]), inputs), declared


def of_spec(spec: jax.P) -> Axes:
    """The axes of groups and replicas that an array lies along."""
    return ALL.intersection(mesh_lib.axes_of(spec))


def outputs(
    jaxpr: core.Jaxpr, inputs: Sequence[Axes], special: Special | None = None
) -> list[Axes]:
    """The axes along which each result of a replica's program differs.

    Args:
      jaxpr: the program.
      inputs: those along which its inputs do.
      special: is asked first of each equation, and may note what is no axis, too.
    """
    axes: dict[Any, Axes] = dict(zip(jaxpr.invars, inputs, strict=True))
    read = lambda x: _NONE if isinstance(x, core.Literal) else axes.get(x, _NONE)
    for eqn in jaxpr.eqns:
        read_axes = [read(x) for x in eqn.invars]
        results = of_equation(eqn, read_axes, special)
        axes.update(zip(eqn.outvars, results, strict=True))
        if eqn.effects:
            # What is written into an array that can change is read from it later.
            for x in eqn.invars:
                if not isinstance(x, core.Literal) and "Ref" in type(x.aval).__name__:
                    axes[x] = read(x).union(*read_axes)
    return [read(x) for x in jaxpr.outvars]


def of_equation(eqn: Any, inputs: list[Axes], special: Special | None = None) -> list[Axes]:
    """The axes along which each result of an equation differs, with the arguments of `outputs`."""
    name, params = eqn.primitive.name, eqn.params
    known = None if special is None else special(eqn, inputs)
    if known is not None:
        return known
    if name == "axis_index":
        return [frozenset([params["axis_name"]]) & ALL]
    if name in _EQUALISING:
        return _of_collective(params, _EQUALISING[name], inputs, len(eqn.outvars))
    if name == "scan":
        return _of_scan(params, inputs, special)
    if name == "while":
        return _of_while(params, inputs, special)
    if name == "cond":
        return _of_cond(params, inputs, special)
    if params.get("name") == _EQUAL:
        given = inputs[len(eqn.outvars) :]
        # What is no axis, and asked for beside them, is not made equal.
        others = [x - ALL for x in inputs]
        return [_NONE.union(*given, *others) for _ in eqn.outvars]
    if params.get("name") == GATHERED:
        # In steps, among some replicas each, which all have met in the end.
        return [_NONE.union(*inputs) - {mesh_lib.REPLICA} for _ in eqn.outvars]
    if "callback" in name:
        # What the host computes may be another number on each.
        return [ALL.union(*inputs) for _ in eqn.outvars]
    inner = [
        x for x in jax.tree.leaves(dict(params)) if isinstance(x, core.ClosedJaxpr | core.Jaxpr)
    ]
    if len(inner) == 1 and len(opened(inner[0]).invars) == len(inputs):
        results = outputs(opened(inner[0]), inputs, special)
        if len(results) == len(eqn.outvars):
            return results
    # What has functions of another kind differs with any of its inputs, or with a replica's number within; and what
    # is sent in another way, as by ppermute, differs however equal it was.
    within = [outputs_of_any(opened(x)) for x in inner]
    sent = [ALL.intersection(named_axes(params.get(key))) for key in ("axis_name", "axes")]
    axes = _NONE.union(*inputs, *within, *sent)
    return [axes for _ in eqn.outvars]


def named_axes(axes: Any) -> list[str]:
    """The axes that a collective is over, from its parameter; of others than collectives those are numbers."""
    return [x for x in (axes if isinstance(axes, tuple | list) else [axes]) if isinstance(x, str)]


def outputs_of_any(jaxpr: core.Jaxpr) -> Axes:
    """The axes along which some result of a program differs, of which all inputs are equal."""
    return _NONE.union(*outputs(jaxpr, [_NONE for _ in jaxpr.invars]))


def opened(jaxpr: Any) -> core.Jaxpr:
    """A program without the values of its constants."""
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _of_collective(params: Any, key: str, inputs: list[Axes], count: int) -> list[Axes]:
    over = frozenset(named_axes(params[key]))
    # Groups of some replicas make them equal within a group only.
    whole = params.get("axis_index_groups") is None
    left = [x - over if whole else x for x in inputs]
    return left if len(left) == count else [_NONE.union(*left) for _ in range(count)]


def _of_scan(params: Any, inputs: list[Axes], special: Special | None) -> list[Axes]:
    consts, carries = params["num_consts"], params["num_carry"]
    body = opened(params["jaxpr"])
    fixed, carry = inputs[:consts], inputs[consts : consts + carries]
    scanned = inputs[consts + carries :]
    while True:
        results = outputs(body, [*fixed, *carry, *scanned], special)
        joined = [old | new for old, new in zip(carry, results[:carries], strict=True)]
        if joined == carry:
            return [*carry, *results[carries:]]
        carry = joined


def _of_while(params: Any, inputs: list[Axes], special: Special | None) -> list[Axes]:
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = inputs[:of_cond], inputs[of_cond : of_cond + of_body]
    carry = inputs[of_cond + of_body :]
    condition, body = opened(params["cond_jaxpr"]), opened(params["body_jaxpr"])
    while True:
        # How often it goes round decides all that it makes.
        rounds = _NONE.union(*outputs(condition, [*cond_consts, *carry], special))
        results = outputs(body, [*body_consts, *carry], special)
        joined = [old | new | rounds for old, new in zip(carry, results, strict=True)]
        if joined == carry:
            return carry
        carry = joined


def _of_cond(params: Any, inputs: list[Axes], special: Special | None) -> list[Axes]:
    which, *operands = inputs
    branches = [outputs(opened(branch), operands, special) for branch in params["branches"]]
    return [which.union(*results) for results in zip(*branches, strict=True)]
