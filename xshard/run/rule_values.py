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

# Labels of values of the program: what each replica has of its own along an axis and
# has not been reduced over that, and a shard of an array that lies along an axis.
_OWN = {axis: f"own along {axis}" for axis in mesh_lib.REPLICAS}
_SHARD = {axis: f"a shard along {axis}" for axis in mesh_lib.REPLICAS}
# The label of an input that is state of a learner.
LEARNER = "of a learner"
_REDUCING = varying.EQUALIZING | {"reduce_scatter"}


def check(
    jaxpr: jax_internals.Jaxpr,
    inputs: Sequence[Any],
    several: varying.Axes,
    where: str,
) -> None:
    """Raises UserError if a rule's update depends on a replica's own values.

    Args:
      jaxpr: a training step, which contains one `jax.shard_map`.
      inputs: for each argument of the step, a `varying.Cause`, or LEARNER for state of
        a learner.
      several: the mesh axes along which there are several replicas.
      where: the method that updates, for the error.
    """
    own = _labels(_OWN, several)
    if not own:
        # One replica has no values of its own, and its program shows no sums.
        return
    mapped = varying.mapped_equation(jaxpr).params
    labelled = []
    for x in varying.with_causes(mapped["in_specs"], inputs):
        if LEARNER in x.labels:
            # Shards lie along the replicas. What lies along slices is the rounding
            # errors of each slice's sums.
            shards = _labels(_SHARD, x.axes & {mesh_lib.REPLICA})
            labelled.append(x.remove_labels([LEARNER]).add_labels(*shards))
        else:
            labelled.append(x.add_labels(*_labels(_OWN, x.axes)))
    updated: list[tuple[str, varying.Variation]] = []

    def transfer(
        eqn: Any, operands: list[varying.Variation]
    ) -> list[varying.Variation] | None:
        name = eqn.params.get("name")
        if name == varying.UPDATED:
            names = jax_internals.argument_names(eqn)
            updated.extend(zip(names, operands, strict=True))
            return operands
        if name == varying.SLICES_ERROR:
            return [_without_own(x) for x in operands]
        if name == varying.EQUAL:
            # What is declared equal is not a replica's own.
            return [_without_own(x) for x in varying.of_equation(eqn, operands)]
        if eqn.primitive.name == "axis_index":
            axes = varying.mapped_axes(eqn)
            labels = _labels(_OWN, axes) | {varying.Cause.INDEX}
            return [varying.Variation(axes, labels)]
        if eqn.primitive.name in _REDUCING:
            reduced = _of_collective(eqn, operands)
            return [x if x.labels & own else _without_own(x) for x in reduced]
        return varying.transfer_causes(several, eqn, operands)

    varying.outputs(jax_internals.opened(mapped["jaxpr"]), labelled, transfer)
    for name, x in updated:
        if x.labels & own:
            path = "/".join(re.findall(r"'(.*?)'", name))
            raise errors.UserError(
                f"The rule of {where} updates {path!r} with a value of a replica's own, which depends on {varying.because(x)}. "
                "Each replica would make another update. Make the value equal where the rule takes it, as with "
                "jax.lax.pmean(value, ('slice', 'replica')) in compute_gradients; or use it only before the sum of gradients."
            )


def _without_own(x: varying.Variation) -> varying.Variation:
    """The variation of a value that is no replica's own any more, so that it does not
    matter why it was.
    """
    return varying.without_causes(x.remove_labels(_OWN.values()))


def _labels(kind: dict[str, str], axes: varying.Axes) -> frozenset[Any]:
    """The labels of a kind along some axes."""
    return frozenset(label for axis, label in kind.items() if axis in axes)


def _of_collective(
    eqn: Any, operands: list[varying.Variation]
) -> list[varying.Variation]:
    """The variations of a collective's results: a reduction over an axis leaves nothing
    of a replica's own along it.
    """
    axes = varying.mapped_axes(eqn)
    own = _labels(_OWN, axes)
    shards = _labels(_SHARD, axes)
    name = eqn.primitive.name
    if name == "reduce_scatter":
        return [x.remove_labels(own).add_labels(*shards) for x in operands]
    results = varying.of_equation(eqn, operands)
    if name.startswith("all_gather") and any(shards & x.labels for x in operands):
        # Shards differ, and what is gathered from them is whole. If a shard was
        # computed from a replica's own value, so was the whole.
        return results
    return [x.remove_labels(own) for x in results]
