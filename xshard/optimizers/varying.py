"""Analysis of a program before it runs: which of its values differ between replicas.

A value differs between replicas if it depends on the replica's part of the batch, its
keys or its number, and has not passed through a collective that makes it equal. Values
of different groups also differ by the groups' states.

This is a dataflow analysis. It visits the equations of a program in order, and computes
the `Variation` of each result from those of the equation's operands. An analysis that
asks for more than axes attaches labels to the inputs, which spread to all that is
computed from them.
"""

import contextlib
import enum
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from xshard.base import mesh_axes, primitives
from xshard.base.jax_internals import jaxprs
from xshard.optimizers import replica_calls

Axes = frozenset[str]

# The mesh axes of groups and replicas.
ALL: Axes = frozenset(mesh_axes.BATCH)

# Collectives after which all replicas along an axis hold the same value.
EQUALIZING = frozenset(
    [
        "psum",
        "psum_invariant",
        "pmax",
        "pmin",
        "all_gather",
        "all_gather_invariant",
    ]
)


class Cause(enum.Enum):
    """Labels a value with the reason why it differs between replicas.

    The values of the members are the words for messages.
    """

    BATCH = "its part of the batch"
    STATE = "state of its own"
    INDEX = "its index"
    KEY = "its key"


_CAUSES = frozenset(Cause)


class Variation(NamedTuple):
    """How a value of a program varies.

    Attributes:
      axes: the mesh axes along which it differs.
      labels: the labels of all inputs that it was computed from, of any hashable type.
        Unlike axes, they stay when a collective makes the value equal.
    """

    axes: Axes = frozenset()
    labels: frozenset[Any] = frozenset()

    def __or__(self, other: "Variation") -> "Variation":
        """Returns the variation of a value that is computed from two others."""
        return Variation(self.axes | other.axes, self.labels | other.labels)

    def equal_along(self, axes: Iterable[str]) -> "Variation":
        """Returns the variation of a value that was made equal along some axes."""
        return self._replace(axes=self.axes.difference(axes))

    def add_labels(self, *labels: Any) -> "Variation":
        """Returns the variation with further labels."""
        return self._replace(labels=self.labels.union(labels))

    def remove_labels(self, labels: Iterable[Any]) -> "Variation":
        """Returns the variation without some labels."""
        return self._replace(labels=self.labels.difference(labels))


# The variation of a constant.
NONE = Variation()

# Computes the variations of an equation's results from those of its operands. It
# returns None for an equation that it leaves to `of_equation`.
TransferFunction = Callable[[Any, list[Variation]], list[Variation] | None]


def join(variations: Iterable[Variation]) -> Variation:
    """Returns the variation of a value that is computed from all of these."""
    joined = NONE
    for variation in variations:
        joined |= variation
    return joined


def mapped_equation(jaxpr: jaxprs.Jaxpr) -> Any:
    """Returns the equation of a program that maps the replicas: its `jax.shard_map`."""
    (mapped,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"]
    return mapped


def mapped_outputs(
    jaxpr: jaxprs.Jaxpr, causes: Sequence[Any] = ()
) -> tuple[list[Variation], list[Axes]]:
    """Analyzes a program of all replicas, which contains one `jax.shard_map`.

    All computation before the `jax.shard_map` must be on whole arrays.

    Args:
      jaxpr: the program.
      causes: for each of the last inputs, the `Cause` that a value which depends on it
        differs. Variations of results then have causes among their labels.

    Returns:
      The variation of each result, and the axes that its spec declares.
    """
    mapped = mapped_equation(jaxpr).params
    inputs = with_causes(mapped["in_specs"], causes)
    declared = [axes_of_spec(spec) for spec in mapped["out_specs"]]
    sizes = mapped["mesh"].shape
    long_axes = frozenset(axis for axis in ALL if sizes.get(axis, 1) > 1)
    transfer = functools.partial(transfer_causes, long_axes)
    program = jaxprs.opened(mapped["jaxpr"])
    return outputs(program, inputs, transfer), declared


def may_differ(f: Callable[[Any, Any], Any], equal: Any, own: Any) -> Any:
    """Returns for each result of a function of one replica whether it may differ
    between the replicas of a group: a tree of booleans.

    The function is traced and not computed. Arrays of an outer trace that it closes
    over count as a replica's own.

    Args:
      f: the function, which may use collectives over the mapped axes.
      equal: its first argument, arrays that are equal on all replicas.
      own: its second argument, arrays of a replica's own.
    """
    replicas = replica_calls.current()
    with contextlib.ExitStack() as stack:
        if replicas is not None:
            # As in `per_replica`.
            stack.enter_context(replica_calls.mapped_over(None))
            mesh = replicas.mesh_of_replica
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        trace = jax.make_jaxpr(f, return_shape=True)
        shapes = jax.tree.map(_shape_of, (equal, own))
        program, results = trace(*shapes)
    differs = Variation(ALL)
    inputs = []
    for constant in program.consts:
        is_traced = isinstance(constant, jax.core.Tracer)
        inputs.append(differs if is_traced else NONE)
    inputs += [NONE] * len(jax.tree.leaves(equal))
    inputs += [differs] * len(jax.tree.leaves(own))
    found = outputs(jaxprs.with_constants_as_arguments(program).jaxpr, inputs)
    axes = frozenset(mesh_axes.REPLICAS)
    return jax.tree.unflatten(
        jax.tree.structure(results), [bool(axes & x.axes) for x in found]
    )


def _shape_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns the shape and the type of an array, without the array's mesh."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=jax.typeof(x).weak_type)


def with_causes(in_specs: Sequence[jax.P], causes: Sequence[Any]) -> list[Variation]:
    """Returns the variations of the inputs of a `jax.shard_map`.

    Args:
      in_specs: the spec of each input.
      causes: for each of the last inputs, the label of the input if it differs.
    """
    variations = [Variation(axes_of_spec(spec)) for spec in in_specs]
    # The constants of a program come before its arguments, and have no cause.
    first = len(variations) - len(causes)
    for index, cause in enumerate(causes, first):
        if variations[index].axes:
            variations[index] = variations[index].add_labels(cause)
    return variations


def transfer_causes(
    long_axes: Axes, eqn: Any, inputs: list[Variation]
) -> list[Variation] | None:
    """Labels values that depend on a replica's index, or on a key made from it.

    With its first argument bound it is a `TransferFunction`.

    Args:
      long_axes: the axes of a size above 1. A value that is equal along them differs
        for no cause.
      eqn: the equation.
      inputs: the variations of its operands.
    """
    name = eqn.primitive.name
    if name == "axis_index":
        return [Variation(mapped_axes(eqn), frozenset([Cause.INDEX]))]
    if name in EQUALIZING:
        results = []
        for result in _of_collective(eqn, inputs):
            differs = not result.axes.isdisjoint(long_axes)
            results.append(result if differs else without_causes(result))
        return results
    if name.startswith("random_") and any(Cause.INDEX in x.labels for x in inputs):
        results = []
        for result in of_equation(eqn, inputs):
            if Cause.INDEX in result.labels:
                result = result.remove_labels([Cause.INDEX]).add_labels(Cause.KEY)
            results.append(result)
        return results
    return None


def without_causes(variation: Variation) -> Variation:
    """Returns the variation without the labels that say why a value differs."""
    return variation.remove_labels(_CAUSES)


def because(variation: Variation) -> str:
    """Returns the causes among a value's labels as words, such as 'its index'."""
    words = [cause.value for cause in Cause if cause in variation.labels]
    return " and ".join(words) or "its part of the batch, its key or its index"


def mapped_axes(eqn: Any, axes: Axes = ALL) -> Axes:
    """Returns the axes, of those given, that an equation is a collective over.

    Those of an `axis_index` are the axes of the index.
    """
    return axes.intersection(primitives.mapped_axes(eqn))


def axes_of_spec(spec: jax.P) -> Axes:
    """Returns the axes of groups and replicas that an array lies along."""
    return ALL.intersection(mesh_axes.axes_of(spec))


def depends_on(jaxpr: jaxprs.Jaxpr, index: int) -> bool:
    """Returns whether any result of a program depends on the input of an index."""
    inputs = [NONE] * len(jaxpr.invars)
    inputs[index] = NONE.add_labels("input")
    return any(result.labels for result in outputs(jaxpr, inputs))


def outputs(
    jaxpr: jaxprs.Jaxpr,
    inputs: Sequence[Variation],
    transfer: TransferFunction | None = None,
    axes: Axes = ALL,
) -> list[Variation]:
    """Returns the variation of each result of a replica's program.

    Args:
      jaxpr: the program.
      inputs: the variations of its inputs.
      transfer: called for each equation first, and for those of the functions that an
        equation calls, but not of loops and branches.
      axes: the mapped axes.
    """
    known: dict[Any, Variation] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(x: Any) -> Variation:
        if isinstance(x, jaxprs.Literal):
            return NONE
        # The constants of a program are not in `known`.
        return known.get(x, NONE)

    for eqn in jaxpr.eqns:
        operands = [read(x) for x in eqn.invars]
        results = of_equation(eqn, operands, transfer, axes)
        known.update(zip(eqn.outvars, results, strict=True))
        if eqn.effects:
            # An effect may write any operand into a mutable reference, from which later
            # equations read it.
            written = join(operands)
            for x in eqn.invars:
                if _is_reference(x):
                    known[x] = read(x) | written
    return [read(x) for x in jaxpr.outvars]


def _is_reference(x: Any) -> bool:
    if isinstance(x, jaxprs.Literal):
        return False
    return "Ref" in type(x.aval).__name__


def of_equation(
    eqn: Any,
    inputs: list[Variation],
    transfer: TransferFunction | None = None,
    axes: Axes = ALL,
) -> list[Variation]:
    """Returns the variation of each result of an equation.

    Args:
      eqn: the equation.
      inputs: the variations of its operands.
      transfer: as for `outputs`.
      axes: the mapped axes.
    """
    if transfer is not None:
        results = transfer(eqn, inputs)
        if results is not None:
            return results
    primitive = eqn.primitive.name
    if primitive == "axis_index":
        return [Variation(mapped_axes(eqn, axes))]
    if primitive in EQUALIZING:
        return _of_collective(eqn, inputs)
    if primitive == "scan":
        return _of_scan(eqn, inputs, transfer, axes)
    if primitive == "while":
        return _of_while(eqn, inputs, transfer, axes)
    if primitive == "cond":
        return _of_cond(eqn, inputs, transfer, axes)
    if "callback" in primitive:
        # The host may compute a different number on each replica.
        return [join(inputs) | Variation(axes)] * len(eqn.outvars)
    called = eqn.params.get("name")
    if called == replica_calls.EQUAL:
        # What is declared equal still differs by group, and as its given arrays do.
        given = inputs[len(eqn.outvars) :]
        of_replicas = axes - {mesh_axes.GROUP}
        declared = join(inputs).equal_along(of_replicas)
        return [declared | join(given)] * len(eqn.outvars)
    if called == replica_calls.GATHERED:
        # Each gather may be among some replicas only, but after all of its steps the
        # result is equal on all.
        gathered = join(inputs).equal_along([mesh_axes.REPLICA])
        return [gathered] * len(eqn.outvars)
    return _of_any(eqn, inputs, transfer, axes)


def _of_any(
    eqn: Any,
    inputs: list[Variation],
    transfer: TransferFunction | None,
    axes: Axes,
) -> list[Variation]:
    inner = list(jaxprs.inner_programs(eqn))
    if len(inner) == 1 and len(inner[0].invars) == len(inputs):
        # It calls a program with its own operands.
        results = outputs(inner[0], inputs, transfer, axes)
        if len(results) == len(eqn.outvars):
            return results
    # The results of any other equation vary as all its operands do, and as what arises
    # in its inner programs. Those of any other collective, such as ppermute, differ
    # along its axes even if its operands are equal.
    result = join(inputs) | Variation(mapped_axes(eqn, axes))
    for program in inner:
        equal = [NONE] * len(program.invars)
        result |= join(outputs(program, equal, axes=axes))
    return [result] * len(eqn.outvars)


def _of_collective(eqn: Any, inputs: list[Variation]) -> list[Variation]:
    # With axis_index_groups, the collective makes values equal only within each of
    # these groups.
    if eqn.params.get("axis_index_groups") is None:
        over = primitives.mapped_axes(eqn)
        inputs = [x.equal_along(over) for x in inputs]
    if len(inputs) == len(eqn.outvars):
        return inputs
    return [join(inputs)] * len(eqn.outvars)


def _of_scan(
    eqn: Any,
    inputs: list[Variation],
    transfer: TransferFunction | None,
    axes: Axes,
) -> list[Variation]:
    num_consts, num_carry = jaxprs.scan_counts(eqn)
    body = jaxprs.opened(eqn.params["jaxpr"])
    consts = inputs[:num_consts]
    carry = inputs[num_consts : num_consts + num_carry]
    scanned = inputs[num_consts + num_carry :]
    # Each round may make more of the carry differ, so this repeats until nothing
    # changes.
    while True:
        results = outputs(body, [*consts, *carry, *scanned], transfer, axes)
        new_carry = [
            old | new for old, new in zip(carry, results[:num_carry], strict=True)
        ]
        if new_carry == carry:
            return [*carry, *results[num_carry:]]
        carry = new_carry


def _of_while(
    eqn: Any,
    inputs: list[Variation],
    transfer: TransferFunction | None,
    axes: Axes,
) -> list[Variation]:
    condition = jaxprs.opened(eqn.params["cond_jaxpr"])
    body = jaxprs.opened(eqn.params["body_jaxpr"])
    first_body_const = eqn.params["cond_nconsts"]
    first_carry = first_body_const + eqn.params["body_nconsts"]
    cond_consts = inputs[:first_body_const]
    body_consts = inputs[first_body_const:first_carry]
    carry = inputs[first_carry:]
    while True:
        # If the number of rounds differs between replicas, so do all results.
        rounds = join(outputs(condition, [*cond_consts, *carry], transfer, axes))
        results = outputs(body, [*body_consts, *carry], transfer, axes)
        new_carry = [
            old | new | rounds for old, new in zip(carry, results, strict=True)
        ]
        if new_carry == carry:
            return carry
        carry = new_carry


def _of_cond(
    eqn: Any,
    inputs: list[Variation],
    transfer: TransferFunction | None,
    axes: Axes,
) -> list[Variation]:
    which, *operands = inputs
    joined = [which] * len(eqn.outvars)
    for branch in eqn.params["branches"]:
        results = outputs(jaxprs.opened(branch), operands, transfer, axes)
        joined = [old | new for old, new in zip(joined, results, strict=True)]
    return joined
