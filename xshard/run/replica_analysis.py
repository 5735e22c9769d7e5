"""Analysis of a run's programs for values that must be equal on all replicas.

Replicas of a group stay equal only if each of them makes the same update. A traced
program shows where they may not: state, or integers to log, that differ between
replicas without being declared as such; a rule that updates with a replica's own
values; and a prediction of which only one device's copy is read. `replication` finds
what no program shows, by comparing the replicas while the run trains.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xshard import errors
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard.base.jax_internals import jaxprs
from xshard.learners import validation
from xshard.optimizers import replica_calls, trees, varying
from xshard.training import state as state_lib

# Labels of the values of a program: that a value is a replica's own along an axis and
# has not been reduced over it, and that it is a shard of an array that lies along an
# axis.
_OWN = {axis: f"own along {axis}" for axis in mesh_lib.REPLICAS}
_SHARD = {axis: f"a shard along {axis}" for axis in mesh_lib.REPLICAS}
# The label of an input that is state of a learner.
_LEARNER = "of a learner"
_REDUCING = varying.EQUALIZING | {"reduce_scatter"}


def check_outputs(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    state: state_lib.TrainState,
    batch: Any,
    traced: Any,
) -> None:
    """Checks that the results of a step are equal on all replicas, if they must be.

    A checkpoint holds one copy of undeclared state. After a resume all replicas would
    continue from that copy. A row holds one number of all replicas: their mean, which
    for integers is none.

    Args:
      experiment: the experiment.
      mesh: the run's mesh.
      state: the shapes of the run's state.
      batch: the shapes of a batch.
      traced: the traced step, which contains one `jax.shard_map`.

    Raises:
      UserError: if a result may differ between replicas without being declared as such.
    """
    causes = jax.tree.leaves(
        (_labeled(state, varying.Cause.STATE), _labeled(batch, varying.Cause.BATCH))
    )
    differing, declared = varying.mapped_outputs(traced.jaxpr.jaxpr, causes)
    axes_of_copies = _axes_of_copies(mesh)
    where = validation.describe_method(experiment.train_step)
    leaves = jax.tree_util.tree_leaves_with_path(traced.out_info)
    for (path, leaf), variation, declared_axes in zip(
        leaves, differing, declared, strict=True
    ):
        if not (variation.axes - declared_axes) & axes_of_copies:
            continue
        kind, _, name = trees.path_name(path).partition("/")
        if kind == "metrics" and jnp.issubdtype(leaf.dtype, jnp.integer):
            raise errors.UserError(
                f"{where} returns the integer {name!r}, which differs between the "
                "replicas. A row has one number of all of them, and integers are "
                "logged as they are: return jax.lax.psum(x, ('slice', 'replica')) for "
                "the sum, or x.astype(jnp.float32) for the mean."
            )
        if kind != "state":
            continue
        why = (
            f"{name!r}, of type {leaf.dtype}, which differs between the replicas: on "
            f"each of them it depends on {varying.because(variation)}"
        )
        for learner in state_lib.learners(state):
            if name.removeprefix(f"{learner}/").startswith("net_state/"):
                raise errors.UserError(
                    f"A network keeps the state {why}. Only one copy of a network's "
                    "state is kept: the mean over the replicas, which needs a "
                    "floating-point type. Count steps rather than examples, or keep a "
                    "float32 mean over the batch."
                )
        raise errors.UserError(
            f"{where} leaves the state {why}, but a checkpoint keeps only one copy of "
            "it. Wrap it in xshard.PerReplica or xshard.PerExample, in init and in the "
            "step; make it equal with a collective, such as jax.lax.pmean(x, ('slice', "
            "'replica')); or, if it is equal for a reason that the program does not "
            "show, declare that with xshard.equal_on_replicas."
        )


def check_updates(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    state: state_lib.TrainState,
    batch: Any,
    traced: Any,
) -> None:
    """Checks that no rule updates with a value of a replica's own.

    These are its loss, key, index, rows and state. It may use them only through a
    collective over the replicas. Where the update is sharded no comparison of replicas
    would show the mistake, since each replica updates another part of each array.

    Args:
      experiment: the experiment.
      mesh: the run's mesh.
      state: the shapes of the run's state.
      batch: the shapes of a batch.
      traced: the traced step, which contains one `jax.shard_map`: of a sharded update
        the form that is made for this analysis.

    Raises:
      UserError: if one does.
    """
    several = _axes_of_several(mesh)
    own = _labels(_OWN, several)
    if not own:
        # One replica has no values of its own, and its program shows no sums.
        return
    # An experiment's own state may differ between replicas; a learner's never does.
    labels = state_lib.map_learners(
        lambda _, learner: _labeled(learner, _LEARNER),
        _labeled(state, varying.Cause.STATE),
    )
    causes = jax.tree.leaves((labels, _labeled(batch, varying.Cause.BATCH)))
    for name, variation in _updated_values(traced.jaxpr.jaxpr, causes, several):
        if variation.labels & own:
            # Supervised has a method that makes its rule; other experiments make theirs
            # where they like.
            maker = getattr(experiment, "optimizer", experiment.train_step)
            path = "/".join(re.findall(r"'(.*?)'", name))
            raise errors.UserError(
                f"The rule of {validation.describe_method(maker)} updates {path!r} "
                "with a value of a replica's own, which depends on "
                f"{varying.because(variation)}. Each replica would make another "
                "update. "
                "Make the value equal where the rule takes it, as with "
                "jax.lax.pmean(value, ('slice', 'replica')) in compute_gradients; or "
                "use it only before the sum of gradients."
            )


def check_prediction(
    experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh, traced: Any
) -> None:
    """Checks that a prediction is equal on all devices, as only one copy is read.

    Args:
      experiment: the experiment.
      mesh: the run's mesh.
      traced: the traced prediction.

    Raises:
      UserError: if outputs may differ between replicas or groups.
    """
    differing, _ = varying.mapped_outputs(traced.jaxpr.jaxpr)
    leaves = jax.tree_util.tree_leaves_with_path(traced.out_info)
    for (path, leaf), variation in zip(leaves, differing, strict=True):
        axes = variation.axes & _axes_of_copies(mesh)
        if not axes:
            continue
        if mesh_lib.GROUP in axes:
            among = "groups"
            fix = (
                "Return the outputs of all groups, as jax.lax.all_gather(outputs, "
                "'group') does."
            )
        else:
            among = "replicas"
            fix = (
                "It depends on the replica's index, or on per-replica state: make it "
                "equal with a collective, such as jax.lax.pmean(x, ('slice', "
                "'replica'))."
            )
        name = trees.path_name(path) or "outputs"
        raise errors.UserError(
            f"{validation.describe_method(experiment.predict)} returns {name!r}, "
            f"{leaf.dtype} of shape {leaf.shape}, which differs between the {among}; a "
            f"prediction must be equal on all devices. {fix}"
        )


def _updated_values(
    jaxpr: jaxprs.Jaxpr, causes: Sequence[Any], several: varying.Axes
) -> list[tuple[str, varying.Variation]]:
    """Lists what the rules of a step update with.

    Args:
      jaxpr: a training step, which contains one `jax.shard_map`.
      causes: for each argument of the step, a `varying.Cause`, or _LEARNER for state of
        a learner.
      several: the mesh axes along which there are several replicas.

    Returns:
      The name of each value in the program, and its variation.
    """
    own = _labels(_OWN, several)
    mapped = varying.mapped_equation(jaxpr).params
    inputs = []
    for variation in varying.with_causes(mapped["in_specs"], causes):
        if _LEARNER in variation.labels:
            # A learner's state is equal on all replicas or in shards along them.
            shards = _labels(_SHARD, variation.axes)
            inputs.append(variation.remove_labels([_LEARNER]).add_labels(*shards))
        else:
            inputs.append(variation.add_labels(*_labels(_OWN, variation.axes)))
    updated: list[tuple[str, varying.Variation]] = []

    def transfer(
        eqn: Any, operands: list[varying.Variation]
    ) -> list[varying.Variation] | None:
        name = eqn.params.get("name")
        if name == replica_calls.UPDATED:
            names = jaxprs.argument_names(eqn)
            updated.extend(zip(names, operands, strict=True))
            return operands
        if name == replica_calls.EQUAL:
            # What is declared equal is not a replica's own.
            return [_without_own(x) for x in varying.of_equation(eqn, operands)]
        if eqn.primitive.name == "axis_index":
            axes = varying.mapped_axes(eqn)
            labels = _labels(_OWN, axes) | {varying.Cause.INDEX}
            return [varying.Variation(axes, labels)]
        if eqn.primitive.name in _REDUCING:
            results = []
            for x in _of_collective(eqn, operands):
                if not x.labels & own:
                    x = _without_own(x)
                results.append(x)
            return results
        return varying.transfer_causes(several, eqn, operands)

    varying.outputs(jaxprs.opened(mapped["jaxpr"]), inputs, transfer)
    return updated


def _of_collective(
    eqn: Any, operands: list[varying.Variation]
) -> list[varying.Variation]:
    """Returns the variations of a collective's results.

    A reduction over an axis leaves nothing of a replica's own along it.
    """
    axes = varying.mapped_axes(eqn)
    own = _labels(_OWN, axes)
    shards = _labels(_SHARD, axes)
    name = eqn.primitive.name
    if name == "reduce_scatter":
        return [x.remove_labels(own).add_labels(*shards) for x in operands]
    results = varying.of_equation(eqn, operands)
    if len(eqn.params.get("axis_index_groups") or ()) > 1:
        # It leaves what is the own of each of these groups.
        return results
    if name.startswith("all_gather") and any(shards & x.labels for x in operands):
        # Shards differ, and what is gathered from them is the global array. If a shard
        # was computed from a replica's own value, so was that array.
        return results
    return [x.remove_labels(own) for x in results]


def _without_own(variation: varying.Variation) -> varying.Variation:
    """Returns the variation of a value that is no replica's own any more."""
    # Then it does not matter either why it was.
    return varying.without_causes(variation.remove_labels(_OWN.values()))


def _labels(kind: dict[str, str], axes: varying.Axes) -> frozenset[Any]:
    """Returns the labels of a kind along those of some axes that replicas have."""
    return frozenset(label for axis, label in kind.items() if axis in axes)


def _labeled(tree: Any, label: Any) -> Any:
    """Returns a tree with the label in place of each leaf."""
    return jax.tree.map(lambda _: label, tree)


def _axes_of_several(mesh: jax.sharding.Mesh) -> varying.Axes:
    """Returns the mesh axes along which there are several groups or replicas."""
    return frozenset(axis for axis in varying.ALL if mesh.shape[axis] > 1)


def _axes_of_copies(mesh: jax.sharding.Mesh) -> varying.Axes:
    """Returns the mesh axes along which copies of a value could differ.

    With a single replica the replica axis counts too, so that one replica refuses the
    programs that several refuse.
    """
    several = _axes_of_several(mesh)
    if several & set(mesh_lib.REPLICAS):
        return several
    return several | {mesh_lib.REPLICA}
