"""Analysis of a step's program, before it runs, for results that differ between
replicas or groups.

A value differs between replicas if it depends on the replica's part of the batch, its
keys or its number, and has not passed through a collective that makes it equal. Values
of different groups also differ by the groups' states.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from xshard import jax_internals
from xshard import mesh as mesh_lib
from xshard.optimizers import primitives

# The mesh axes along which a value differs.
Axes = frozenset[str]
_NONE: Axes = frozenset()
ALL: Axes = frozenset(mesh_lib.BATCH)
# Collectives after which all replicas along an axis hold the same value.
EQUALISING = {
    "psum",
    "psum_invariant",
    "pmax",
    "pmin",
    "all_gather",
    "all_gather_invariant",
}
# The names of marks in a program: on values declared equal, on the results of a
# learner's update, and on the rounding errors that each slice keeps of its own sums.
EQUAL, UPDATED = "equal_on_replicas", "updated"
SLICES_ERROR = "slices_error"
# The name, in a program, of the function that gathers a parameter held in shards.
GATHERED = "gathered_parameter"
# Notes on why a value differs between replicas, and the words for that.
OF_BATCH, OF_STATE, OF_INDEX, OF_KEY = "of batch", "of state", "of index", "of key"
_WORDS = {
    OF_BATCH: "its part of the batch",
    OF_STATE: "state of its own",
    OF_INDEX: "its index",
    OF_KEY: "its key",
}
_CAUSES: Axes = frozenset(_WORDS)
# A function of an equation and its inputs' axes that returns its results' axes, or None
# to treat it like any other.
Special = Callable[[Any, list[Axes]], list[Axes] | None]


class _Mark:
    """A function that returns its first argument. Its name marks the call in a program."""

    def __init__(self, name: str):
        self.__name__ = name

    def __call__(self, tree: Any, given: Any) -> Any:
        return tree


def marked(name: str, tree: Any, given: Any = ()) -> Any:
    """The same tree, as the result of a call that a program shows under `name`.

    Args:
      name: the name.
      tree: arrays.
      given: further arrays, which the program shows as arguments of the call.
    """
    return jax.jit(_Mark(name))(tree, given)


def mapped_equation(jaxpr: jax_internals.Jaxpr) -> Any:
    """The one equation of a program on all replicas that maps a replica's program: its
    `jax.shard_map`.
    """
    (mapped,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"]
    return mapped


def mapped_outputs(
    jaxpr: jax_internals.Jaxpr, causes: Sequence[str] = ()
) -> tuple[list[Axes], list[Axes]]:
    """The axes along which each result of a program on all replicas differs, and the
    axes that its spec declares.

    Args:
      jaxpr: the program, which contains one `jax.shard_map`. All computation before
        that is on whole arrays.
      causes: for each of the last inputs, the note on what depends on it where it
        differs: OF_BATCH or OF_STATE. Results then have such notes, too.
    """
    mapped = mapped_equation(jaxpr).params
    inputs = with_causes(list(map(of_spec, mapped["in_specs"])), causes)
    declared = list(map(of_spec, mapped["out_specs"]))
    long = frozenset(axis for axis in ALL if mapped["mesh"].shape.get(axis, 1) > 1)
    special = functools.partial(of_cause, long)
    return outputs(jax_internals.opened(mapped["jaxpr"]), inputs, special), declared


def with_causes(inputs: Sequence[Axes], causes: Sequence[str]) -> list[Axes]:
    """The axes along which inputs differ, with the note on what depends on them, if
    they do.
    """
    # The constants of a program come before its arguments.
    known = [""] * (len(inputs) - len(causes)) + list(causes)
    return [
        axes | {cause} if axes and cause else axes
        for axes, cause in zip(inputs, known, strict=True)
    ]


def of_cause(long: Axes, eqn: Any, inputs: list[Axes]) -> list[Axes] | None:
    """Notes that a value depends on a replica's index or on a key that was made from
    it, as a `Special`.

    Args:
      long: the axes of a size above 1. A value that is equal along them differs for no
        cause.
      eqn: the equation.
      inputs: the notes of its inputs.
    """
    name = eqn.primitive.name
    if name == "axis_index":
        return [mapped_axes(eqn) | {OF_INDEX}]
    if name in EQUALISING:
        return [x if x & long else x - _CAUSES for x in _of_collective(eqn, inputs)]
    if name.startswith("random_") and any(OF_INDEX in x for x in inputs):
        results = of_equation(eqn, inputs)
        return [x - {OF_INDEX} | {OF_KEY} if OF_INDEX in x else x for x in results]
    return None


def without_causes(noted: Axes) -> Axes:
    """The notes without those on why a value differs."""
    return noted - _CAUSES


def because(noted: Axes) -> str:
    """The causes in a value's notes as words, such as 'its index'."""
    words = [text for note, text in _WORDS.items() if note in noted]
    return " and ".join(words) or "its part of the batch, its key or its index"


def mapped_axes(eqn: Any, axes: Axes = ALL) -> Axes:
    """The axes, of those of groups and replicas, over which an equation is a
    collective, or of which it is an index.
    """
    return axes.intersection(primitives.mapped_axes(eqn))


def of_spec(spec: jax.P) -> Axes:
    """The axes of groups and replicas that an array lies along."""
    return ALL.intersection(mesh_lib.axes_of(spec))


def outputs(
    jaxpr: jax_internals.Jaxpr,
    inputs: Sequence[Axes],
    special: Special | None = None,
    axes: Axes = ALL,
) -> list[Axes]:
    """The axes along which each result of a replica's program differs.

    Args:
      jaxpr: the program.
      inputs: the axes along which each of its inputs differs.
      special: called first for each equation. It may also return notes that are not
        axes.
      axes: the mapped axes.
    """
    noted: dict[Any, Axes] = dict(zip(jaxpr.invars, inputs, strict=True))
    read = lambda x: (
        _NONE if isinstance(x, jax_internals.Literal) else noted.get(x, _NONE)
    )
    for eqn in jaxpr.eqns:
        read_axes = [read(x) for x in eqn.invars]
        results = of_equation(eqn, read_axes, special, axes)
        noted.update(zip(eqn.outvars, results, strict=True))
        if eqn.effects:
            # An effect may write any input into a mutable reference, from which later
            # equations read it.
            for x in eqn.invars:
                if (
                    not isinstance(x, jax_internals.Literal)
                    and "Ref" in type(x.aval).__name__
                ):
                    noted[x] = read(x).union(*read_axes)
    return [read(x) for x in jaxpr.outvars]


def of_equation(
    eqn: Any, inputs: list[Axes], special: Special | None = None, axes: Axes = ALL
) -> list[Axes]:
    """The axes along which each result of an equation differs, with the arguments of
    `outputs`.
    """
    name, params = eqn.primitive.name, eqn.params
    known = None if special is None else special(eqn, inputs)
    if known is not None:
        return known
    if name == "axis_index":
        return [mapped_axes(eqn, axes)]
    if name in EQUALISING:
        return _of_collective(eqn, inputs)
    if name == "scan":
        return _of_scan(eqn, inputs, special, axes)
    if name == "while":
        return _of_while(params, inputs, special, axes)
    if name == "cond":
        return _of_cond(params, inputs, special, axes)
    if params.get("name") == EQUAL:
        given = inputs[len(eqn.outvars) :]
        # Notes that are not axes pass through: the mark makes values equal only along
        # axes.
        of_replicas = axes - {mesh_lib.GROUP}
        others = [x - of_replicas for x in inputs]
        return [_NONE.union(*given, *others) for _ in eqn.outvars]
    if params.get("name") == GATHERED:
        # Each gather may be among some replicas only, but after all of its steps the
        # result is equal on all.
        return [_NONE.union(*inputs) - {mesh_lib.REPLICA} for _ in eqn.outvars]
    if "callback" in name:
        # The host may compute a different number on each replica.
        return [axes.union(*inputs) for _ in eqn.outvars]
    inner = list(jax_internals.inner_programs(eqn))
    if len(inner) == 1 and len(inner[0].invars) == len(inputs):
        results = outputs(inner[0], inputs, special, axes)
        if len(results) == len(eqn.outvars):
            return results
    # The results of any other equation differ along the axes of all its inputs, and
    # along those that arise in its inner programs. Those of any other collective, such
    # as ppermute, differ along its axes even if its inputs are equal.
    within = [
        _NONE.union(*outputs(x, [_NONE] * len(x.invars), axes=axes)) for x in inner
    ]
    noted = mapped_axes(eqn, axes).union(*inputs, *within)
    return [noted for _ in eqn.outvars]


def _of_collective(eqn: Any, inputs: list[Axes]) -> list[Axes]:
    # With axis_index_groups, the collective makes values equal only within each of
    # these groups.
    if eqn.params.get("axis_index_groups") is None:
        inputs = [x.difference(primitives.mapped_axes(eqn)) for x in inputs]
    if len(inputs) == len(eqn.outvars):
        return inputs
    return [_NONE.union(*inputs) for _ in eqn.outvars]


def _of_scan(
    eqn: Any, inputs: list[Axes], special: Special | None, axes: Axes
) -> list[Axes]:
    consts, carries = jax_internals.scan_counts(eqn)
    body = jax_internals.opened(eqn.params["jaxpr"])
    fixed, carry = inputs[:consts], inputs[consts : consts + carries]
    scanned = inputs[consts + carries :]
    # Each round may make more of the carry differ, so this repeats until nothing
    # changes.
    while True:
        results = outputs(body, [*fixed, *carry, *scanned], special, axes)
        joined = [old | new for old, new in zip(carry, results[:carries], strict=True)]
        if joined == carry:
            return [*carry, *results[carries:]]
        carry = joined


def _of_while(
    params: Any, inputs: list[Axes], special: Special | None, axes: Axes
) -> list[Axes]:
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = inputs[:of_cond], inputs[of_cond : of_cond + of_body]
    carry = inputs[of_cond + of_body :]
    condition = jax_internals.opened(params["cond_jaxpr"])
    body = jax_internals.opened(params["body_jaxpr"])
    while True:
        # If the number of rounds differs between replicas, so do all results.
        rounds = _NONE.union(*outputs(condition, [*cond_consts, *carry], special, axes))
        results = outputs(body, [*body_consts, *carry], special, axes)
        joined = [old | new | rounds for old, new in zip(carry, results, strict=True)]
        if joined == carry:
            return carry
        carry = joined


def _of_cond(
    params: Any, inputs: list[Axes], special: Special | None, axes: Axes
) -> list[Axes]:
    which, *operands = inputs
    branches = [
        outputs(jax_internals.opened(branch), operands, special, axes)
        for branch in params["branches"]
    ]
    return [which.union(*results) for results in zip(*branches, strict=True)]
