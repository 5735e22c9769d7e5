"""Analysis of a step's program for rules that update with a replica's own values.

Replicas of a group stay equal only if each of them makes the same update. A rule that
uses a replica's own loss, key or index in its update, other than through a sum over the
replicas, makes another one on each. Where the update is sharded no comparison of
replicas would show it, since each replica updates another part of each array.
"""

import re
from collections.abc import Sequence
from typing import Any

from xshard import errors, jax_internals
from xshard import mesh as mesh_lib
from xshard.optimizers import varying

# Notes on values of the program, which are no mesh axes: what each replica has of its
# own along an axis and has not been reduced over that, and a shard of an array that
# lies along an axis.
_OWN = {axis: f"own along {axis}" for axis in mesh_lib.REPLICAS}
_SHARD = {axis: f"a shard along {axis}" for axis in mesh_lib.REPLICAS}
_ALL_OWN: varying.Axes = frozenset(_OWN.values())
# The note on an input that is state of a learner.
LEARNER = "of a learner"
_REDUCING = varying.EQUALISING | {"reduce_scatter"}


def check(
    jaxpr: jax_internals.Jaxpr,
    inputs: Sequence[str],
    several: varying.Axes,
    where: str,
) -> None:
    """Raises UserError if a rule's update depends on a replica's own values.

    Args:
      jaxpr: a training step, which contains one `jax.shard_map`.
      inputs: for each argument of the step, what depends on it: a note of `varying`, or
        LEARNER for state of a learner.
      several: the mesh axes along which there are several replicas.
      where: the method that updates, for the error.
    """
    own = frozenset(note for axis, note in _OWN.items() if axis in several)
    if not own:
        # One replica has no values of its own, and its program shows no sums.
        return
    mapped = varying.mapped_equation(jaxpr).params
    noted = []
    for axes in varying.with_causes(
        list(map(varying.of_spec, mapped["in_specs"])), inputs
    ):
        if LEARNER in axes:
            # Shards lie along the replicas. What lies along slices is the rounding
            # errors of each slice's sums.
            noted.append(axes - {LEARNER} | _notes(_SHARD, axes & {mesh_lib.REPLICA}))
        else:
            noted.append(axes | _notes(_OWN, axes))
    updated: list[tuple[str, varying.Axes]] = []

    def of_equation(eqn: Any, notes: list[varying.Axes]) -> list[varying.Axes] | None:
        name = eqn.params.get("name")
        if name == varying.UPDATED:
            updated.extend(zip(jax_internals.argument_names(eqn), notes, strict=True))
            return notes
        if name == varying.SLICES_ERROR:
            return [_without_own(note) for note in notes]
        if name == varying.EQUAL:
            # What is declared equal is not a replica's own.
            return [_without_own(note) for note in varying.of_equation(eqn, notes)]
        if eqn.primitive.name == "axis_index":
            axes = varying.mapped_axes(eqn)
            return [axes | _notes(_OWN, axes) | {varying.OF_INDEX}]
        if eqn.primitive.name in _REDUCING:
            reduced = _of_collective(eqn, notes)
            return [note if note & own else _without_own(note) for note in reduced]
        return varying.of_cause(several, eqn, notes)

    varying.outputs(jax_internals.opened(mapped["jaxpr"]), noted, of_equation)
    for name, note in updated:
        if note & own:
            path = "/".join(re.findall(r"'(.*?)'", name))
            raise errors.UserError(
                f"The rule of {where} updates {path!r} with a value of a replica's own, which depends on {varying.because(note)}. "
                "Each replica would make another update. Make the value equal where the rule takes it, as with "
                "jax.lax.pmean(value, ('slice', 'replica')) in compute_gradients; or use it only before the sum of gradients."
            )


def _without_own(note: varying.Axes) -> varying.Axes:
    """The notes of a value that is no replica's own any more, so that it does not
    matter why it was.
    """
    return varying.without_causes(note - _ALL_OWN)


def _notes(kind: dict[str, str], axes: varying.Axes) -> varying.Axes:
    """The notes of a kind along some axes; further notes among these do not count."""
    return frozenset(note for axis, note in kind.items() if axis in axes)


def _of_collective(eqn: Any, notes: list[varying.Axes]) -> list[varying.Axes]:
    """The notes of a collective's results: a reduction over an axis leaves nothing of a
    replica's own along it.
    """
    axes = varying.mapped_axes(eqn)
    own, shards = _notes(_OWN, axes), _notes(_SHARD, axes)
    name = eqn.primitive.name
    if name == "reduce_scatter":
        return [note - own | shards for note in notes]
    results = varying.of_equation(eqn, notes)
    if name.startswith("all_gather") and any(shards & note for note in notes):
        # Shards differ, and what is gathered from them is whole. If a shard was
        # computed from a replica's own value, so was the whole.
        return results
    return [note - own for note in results]
