"""A trained model in a script or a notebook."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections

from xshard import config as config_lib
from xshard import errors
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard.checkpoint import place as place_lib
from xshard.files import jsonfile, workdir
from xshard.learners import lora as lora_lib
from xshard.learners import state as learner_state
from xshard.run import checkpoints, evaluation, preflight
from xshard.training import replica_state
from xshard.training import state as state_lib
from xshard.training import step as step_lib


class Trained(NamedTuple):
    """A trained model: the state of a run, and its prediction function.

    Attributes:
      experiment: the experiment, with the run's config.
      state: the state of a checkpoint, on the requested devices. `state.experiment` is
        the experiment's own state. With several groups its arrays have a leading
        dimension of groups. `PerReplica` arrays have a dimension of all replicas that
        the run had.
      predict: takes a batch on the host, `{name: array}`, to the outputs of
        `Experiment.predict` on the host. A random key may follow, if the network draws
        keys. It compiles once for each batch shape.
    """

    experiment: experiment_lib.Experiment
    state: state_lib.TrainState
    predict: Callable[..., Any]

    @property
    def params(self) -> Any:
        """The network's parameters, a Haiku tree.

        They are those that the run evaluates, such as averages; `state` has those that
        train. With several learners it is a dictionary of such trees by learner name.
        """
        learners = state_lib.learners(self.for_evaluation())
        params = {name: x.params for name, x in learners.items()}
        # The only learner of an experiment has no name.
        return params.get("", params)

    def for_evaluation(self) -> state_lib.TrainState:
        """Returns the state with the parameters that the run evaluates."""
        return for_evaluation(self.experiment, self.state)


def load(
    place: str | pathlib.Path,
    devices: Sequence[jax.Device] | None = None,
    *,
    merge_lora: bool = False,
) -> Trained:
    """Loads the trained model of a run.

    It writes nothing, and the run may still be training.

    Args:
      place: the run's work directory; append '@STEP' to load another checkpoint than
        the newest.
      devices: the devices to load it on, as many as the run has groups; the first ones
        by default.
      merge_lora: whether to add the products of the run's low-rank matrices (see
        `xshard.lora`) to the parameters, which are then those of the network alone.

    Returns:
      The trained model.

    Raises:
      UserError: if there is no run, its experiment cannot be imported from the current
        directory, or it has no low-rank matrices to merge.
      CheckpointError: if the checkpoint does not exist, or does not fit.

    ::

      trained = xshard.load("runs/digits")
      logits = trained.predict({"image": images, "label": labels})
    """
    directory, step = place_lib.split(str(place))
    run = workdir.Workdir(directory)
    config = config_of(run)
    # Nothing is updated here, and these devices may have no other memory.
    config.slots_memory = config_lib.DEVICE
    mesh = _mesh(config, directory, devices)
    experiment = experiment_lib.of_config(config, run)
    example = experiment_lib.example(experiment)
    saved = checkpoints.States(experiment, mesh, example, run)
    state = saved.restore_state(step, fits=True).state
    if merge_lora:
        if not has_lora(state):
            raise errors.UserError(
                f"load(merge_lora=True): {place} has no low-rank matrices, so there is "
                "nothing to merge: leave merge_lora out."
            )
        state = with_merged_lora(for_evaluation(experiment, state))
    return Trained(experiment, state, _predictor(experiment, mesh, state))


def for_evaluation(
    experiment: experiment_lib.Experiment, state: state_lib.TrainState
) -> state_lib.TrainState:
    """Returns a state with the parameters that a run evaluates."""
    learners = state_lib.learners(state).values()
    if not any(learner.meta.evaluation_rule for learner in learners):
        return state
    mesh = state.step.sharding.mesh
    return jax.jit(step_lib.make_for_evaluation(experiment, mesh))(state)


def has_lora(state: state_lib.TrainState) -> bool:
    """Returns whether a learner of a state has low-rank matrices."""
    learners = state_lib.learners(state).values()
    return any(lora_lib.has_matrices(learner.params) for learner in learners)


def with_merged_lora(state: state_lib.TrainState) -> state_lib.TrainState:
    """Returns the state with the products of all low-rank matrices added to the
    parameters.

    The matrices are gone, and an experiment's `predict` takes the state as before.
    """

    def merge(_: str, learner: learner_state.LearnerState) -> Any:
        lora = learner.meta.lora
        if lora is None:
            return learner
        # The state of the rules belongs to the matrices, so it has no parameters for
        # the evaluation of what they are merged into.
        meta = dataclasses.replace(learner.meta, evaluation_rule=None, lora=None)
        merged = lora.merge(learner.params)
        return learner.replace(params=merged, meta=meta)

    return state_lib.map_learners(merge, state)


def config_of(run: workdir.Workdir) -> ml_collections.ConfigDict:
    """Returns the config of the run in a work directory.

    Optional keys that it lacks have their defaults.

    Raises:
      UserError: if there is no run.
    """
    content = jsonfile.read_if_exists(run.config)
    if content is None:
        raise errors.UserError(f"There is no run in {run.path}: it has no config.json.")
    if not isinstance(content.get("experiment"), str):
        raise errors.UserError(
            f"{run.config} names no experiment, so no run wrote it: give the work "
            "directory of a run."
        )
    flat = config_lib.flatten(workdir.config_in(content))
    return config_lib.Config(config_lib.nested(config_lib.with_defaults(flat)))


def _mesh(
    config: ml_collections.ConfigDict, place: str, devices: Sequence[jax.Device] | None
) -> jax.sharding.Mesh:
    """Returns a mesh of one replica for each group of a run."""
    groups = len(config.group_assignment) or 1
    chosen = list(devices or jax.devices()[:groups])
    if len(chosen) != groups:
        raise errors.UserError(
            f"{place} was trained as {groups} group(s), and each needs a device; there "
            f"are {len(chosen)}: pass more devices, or start with "
            "--xla_force_host_platform_device_count in XLA_FLAGS."
        )
    return mesh_lib.make_mesh([[group] for group in range(groups)], devices=chosen)


def _predictor(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    state: state_lib.TrainState,
) -> Callable[..., Any]:
    """Returns the function that predicts with a state."""
    jitted = preflight.jitted_predict(experiment, mesh)
    predict = functools.partial(evaluation.predictions(jitted, mesh), state)
    if not replica_state.has_others(state, mesh):
        return predict

    def checked_predict(batch: Mapping[str, Any], *keys: jax.Array) -> Any:
        # The state has values of more replicas than there are here, so the prediction
        # must not depend on them.
        traced = jitted.trace(state, mesh_lib.put_whole(mesh, batch), *keys)
        replica_state.check_unread(experiment.predict, traced.jaxpr, state, mesh)
        return predict(batch, *keys)

    return checked_predict
