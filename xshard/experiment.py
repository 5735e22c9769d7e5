"""The interface of an experiment.

An experiment is a class and a config. The class defines the computation, its update and
its evaluation. It knows nothing about devices, checkpoints or processes: the framework
provides those. The same file runs on one CPU, on eight virtual devices and on a pod.
"""

import abc
import dataclasses
import difflib
import importlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np
from absl import logging

from xshard import callbacks as callbacks_lib
from xshard import config as config_lib
from xshard import data, errors
from xshard import hooks as hooks_lib
from xshard import mesh as mesh_lib
from xshard.base import places
from xshard.files import workdir
from xshard.learners import state as learner_lib
from xshard.learners import validation

Batch = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class PerReplica:
    """Marks arrays of an experiment's state that differ from replica to replica.

    In a checkpoint they have a leading dimension of replicas, so they can only be
    restored on as many replicas.

    Attributes:
      value: a tree of arrays.
    """

    value: Any

    def joined(self) -> "PerReplica":
        """Merges the leading dimensions, slices and replicas, into one of replicas."""
        merge = lambda x: x.reshape(-1, *x.shape[2:])
        return PerReplica(jax.tree.map(merge, self.value))

    def local(self) -> "PerReplica":
        """Returns this replica's value, without the dimension of replicas."""
        return PerReplica(jax.tree.map(lambda x: x[0], self.value))

    def stored(self) -> "PerReplica":
        """The inverse of `local`."""
        return PerReplica(jax.tree.map(lambda x: x[None], self.value))


@dataclasses.dataclass(frozen=True)
class PerExample:
    """Marks arrays of an experiment's state that have a row per example of the batch.

    The states of environments are such arrays. In a checkpoint the first dimension has
    all examples of a batch, so they can be restored on any number of replicas that
    divides it.

    Attributes:
      value: a tree of arrays whose first dimension is the number of the replica's
        examples.
    """

    value: Any

    def joined(self) -> "PerExample":
        """Merges the leading dimensions, of slices, replicas and examples, into one."""
        merge = lambda x: x.reshape(-1, *x.shape[3:])
        return PerExample(jax.tree.map(merge, self.value))

    def local(self) -> "PerExample":
        """Returns the value unchanged: a replica's shard holds exactly its examples."""
        return self

    def stored(self) -> "PerExample":
        """The inverse of `local`."""
        return self


def is_marked(x: Any) -> bool:
    """Returns whether a node of a state is marked as not equal on all replicas."""
    return isinstance(x, PerReplica | PerExample)


def children(tree: Any, of_leaf: str) -> tuple[list[tuple[Any, Any]], Any]:
    """Flattens the root of a pytree only.

    Args:
      tree: the pytree.
      of_leaf: the key to use if the tree is a single leaf, which counts as its own
        child.

    Returns:
      The children of the root with their keys, and the structure of the root alone.
    """
    found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_below(tree))
    key_of = lambda path: path[0] if path else jax.tree_util.GetAttrKey(of_leaf)
    return [(key_of(path), child) for path, child in found], structure


def unnamed_children(tree: Any) -> tuple[list[Any], Any]:
    """Returns what `children` does, without the keys."""
    # Each call of a step needs it, and the keys would take most of the time.
    return jax.tree.flatten(tree, is_leaf=_below(tree))


def _below(tree: Any) -> Callable[[Any], bool]:
    """Returns the `is_leaf` that stops below the root of a tree."""
    # JAX also calls `is_leaf` on structures whose children are None, and compares the
    # results.
    return lambda x: x is not tree or x is None


def _register(cls: Any) -> None:
    """Registers a marker class as a pytree.

    It is transparent in paths: its keys are the marked value's.
    """

    def unflatten(structure: Any, leaves: Any) -> Any:
        return cls(jax.tree.unflatten(structure, leaves))

    jax.tree_util.register_pytree_with_keys(
        cls,
        lambda marked: children(marked.value, "value"),
        unflatten,
        lambda marked: unnamed_children(marked.value),
    )


_register(PerReplica)
_register(PerExample)


class Experiment(abc.ABC):
    """The base class of experiments: a training state, and the step that advances it.

    The state may have any structure. Derive from `Supervised` to train one network with
    a loss on its outputs. Derive from this class for anything else: several networks
    that train in turn, environments, a moving target. Most such experiments use one
    `Learner` per network; see docs/beyond_a_classifier.md.

    JAX traces `init`, `train_step`, `eval_step` and `predict`. Each call sees one
    replica of a group: its part of a batch, and its keys. Collectives may use the
    mapped axes 'slice' and 'replica'. These methods may read `self.config`, which is
    frozen, and nothing else that changes.

    Each array of the state is of one of three kinds:

    - **Equal on all replicas** of a group, like a learner's state. Most arrays are. The
      framework checks this before the first step.
    - **Per replica**: wrap it in `PerReplica`.
    - **Per example** of the replica's part of a batch: wrap it in `PerExample`.
    """

    def __init__(self, config: ml_collections.ConfigDict):
        """Stores a frozen copy of the config.

        So nothing can change it after a function is traced. The copy records which keys
        are read, and a run names those of the experiment's own that are not.
        """
        if not isinstance(config, config_lib.ReadConfig):
            config = config_lib.ReadConfig(config)
        self.config = config

    @abc.abstractmethod
    def init(self, key: jax.Array, batch: Batch) -> Any:
        """Returns the initial state, a pytree.

        Args:
          key: the random key; equal on all replicas of a group.
          batch: a replica's part of a batch; only its names, dtypes and shapes matter.
        """

    @abc.abstractmethod
    def train_step(
        self, state: Any, batch: Batch, key: jax.Array
    ) -> tuple[Any, learner_lib.Outcome | Mapping[str, Any]]:
        """Advances the state.

        Args:
          state: the state that `init` or the previous step returned.
          batch: the replica's part of the batch.
          key: a random key for this replica and this step. One that is equal on all
            replicas of a group is a part of the state: `init` keeps its own key, and
            each step splits it.

        Returns:
          The new state, and the values to log: the outcome of `Learner.update`, or
            those of several updates, stacked;
          or a dictionary of these by the learner's name, and of scalars. Those are
          averaged over the replicas, but for integers, which must be equal on all
          replicas and are logged as they are.
        """

    @abc.abstractmethod
    def eval_step(
        self, state: Any, batch: Batch, key: jax.Array
    ) -> Mapping[str, jax.Array]:
        """Evaluates a state on a replica's part of a batch.

        Args:
          state: the state.
          batch: the replica's part of a batch of `eval_data`.
          key: a random key for this replica and this batch, the same in each
            evaluation.

        Returns:
          Arrays of shape (batch,) by name, with a value per example. The framework
          averages them over all examples. If the experiment overrides `summarize`,
          arrays may be of shape (batch, ...).
        """

    def for_evaluation(self, state: Any) -> Any:
        """Returns the state to use once trained, as `xshard.load` and exports do.

        It is the same one by default. With a learner whose rule has parameters of its
        own for evaluation, it has those: see `Learner.for_evaluation`, which your
        `eval_step` and `predict` call, too.
        """
        return state

    def predict(self, state: Any, batch: Batch) -> Any:
        """Returns the outputs for a batch, a tree of arrays, equal on all devices.

        `samples` and `xshard.load` use it. A third parameter, `key`, is optional. It
        receives the random key of a caller that gives one after the batch.
        """
        raise NotImplementedError(
            f"{type(self).__name__} makes no predictions: define predict."
        )

    def summarize(
        self, sums: Mapping[str, np.ndarray], count: float
    ) -> Mapping[str, Any]:
        """Computes the metrics of an evaluation, on the host.

        By default they are the means of the values of `eval_step`. Override it for
        metrics that are not means over the examples: a ratio of two sums, or a number
        computed from a confusion matrix or a histogram of scores.

        Args:
          sums: the sum of each value of `eval_step` over all examples, float64.
          count: the number of examples.

        Returns:
          Numbers by name.
        """
        return {name: value / count for name, value in sums.items()}

    def train_data(self) -> data.Examples:
        """Returns the training examples, which the framework shuffles and repeats.

        They are arrays by name, of one leading dimension, or a source
        (`xshard.data.Source`).
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no training data: define train_data, or "
            "train_batches."
        )

    @abc.abstractmethod
    def eval_data(self) -> data.Examples | Mapping[str, data.Examples]:
        """Returns the evaluation examples, or several splits of them by name.

        Several splits are a dictionary such as {'test': ..., 'hard': ...}.
        """

    def train_batches(self, part: data.Part) -> data.BatchIterator:
        """Returns an iterator over this process's part of each batch.

        By default it goes over `train_data`, shuffled by the seed. Any iterator with
        `get_state` and `set_state` works; checkpoints contain its state.
        """
        examples = self.train_data()
        data.check(
            examples, f"What {validation.describe_method(self.train_data)} returned"
        )
        return data.iterate(examples, part)

    def samples(
        self, predict: Callable[[Mapping[str, Any]], Any], key: jax.Array
    ) -> str | Mapping[str, Any]:
        """Returns samples of the trained model. By default none.

        They may be texts and images that it generates. The run calls it on all
        processes, after the last evaluation, and every `config.samples_every_steps`
        steps if that is not 0. Before the run begins, a trial call runs up to the first
        prediction, to detect mistakes early.

        Args:
          predict: takes a batch on the host, of any number of rows, to the outputs of
            `self.predict` on the host. It compiles once for each batch shape.
          key: a random key, the same in each call.

        Returns:
          A text; or a dictionary of texts, `xshard.Image` and `xshard.Histogram` by
          name. The run writes them to samples.jsonl in the work directory; TensorBoard,
          wandb and the report show them.
        """
        del predict, key
        return ""

    def callbacks(self) -> Sequence[callbacks_lib.Callback]:
        """Returns functions of the evaluations that may end the run. By default none.

        The run calls each one after each evaluation, on process 0, with all evaluations
        so far: a list of dictionaries of 'step' and the metrics by name, which are
        floats, or lists of floats with several groups. A callback returns None to
        continue, or a text with the reason to end the run, which then ends as after its
        last step.

        A callback must depend on these rows alone. Then a run that was stopped and
        resumed ends at the same step.

        `xshard.early_stopping('loss')` returns one.
        """
        return ()

    def hooks(self) -> Sequence[hooks_lib.Hook]:
        """Returns what the run does beside its steps. By default nothing.

        A hook acts after steps that it chooses, on all processes, before the state
        after such a step is saved. So a run that is resumed from that checkpoint does
        not act again; one that was killed acts again after the steps that it repeats.
        """
        return ()

    def sharding_rules(self) -> mesh_lib.ShardingRules:
        """Returns the rules that shard arrays over the axis 'model'. By default none.

        See `xshard.mesh.tree_shardings`.
        """
        return ()


def samples_key(experiment: Experiment) -> jax.Array:
    """Returns the key that the run passes to `Experiment.samples`."""
    return jax.random.key(experiment.config.seed)


def overrides(experiment: Experiment, method: str) -> bool:
    """Returns whether an experiment defines a method that `Experiment` implements."""
    return getattr(type(experiment), method) is not getattr(Experiment, method)


def example(experiment: Experiment) -> data.Arrays:
    """Returns one example of the training data, for its names, dtypes and shapes."""
    size = 1
    if overrides(experiment, "train_batches"):
        # A custom iterator may need the run's batch size. `train_data` may have fewer
        # examples than that.
        size = experiment.config.batch_size
    part = data.Part(size, (np.arange(1),), experiment.config.seed)
    return next(experiment.train_batches(part))


def mesh_of(
    config: ml_collections.ConfigDict, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """Makes the mesh that a config describes: see `xshard.mesh.make_mesh`."""
    return mesh_lib.make_mesh(
        config.group_assignment or None,
        slices=num_slices(config),
        separate_slices=config_lib.separates_slices(config),
        model=config.model_parallel,
        devices=devices,
    )


def num_slices(config: ml_collections.ConfigDict) -> int:
    """Returns the number of slices of a run on the present processes."""
    return int(config.slices) or places.own().count


def num_models(config: ml_collections.ConfigDict, mesh: mesh_lib.AnyMesh) -> int:
    """Returns the number of models that a run trains: one, or one for each group.

    Slices that train apart under an outer rule are groups of the mesh, but train one
    model.
    """
    if config_lib.separates_slices(config):
        return 1
    return mesh_lib.num_groups(mesh)


def examples_per_step(config: ml_collections.ConfigDict, mesh: mesh_lib.AnyMesh) -> int:
    """Returns the number of examples of a training step, of all models."""
    return int(config.batch_size) * num_models(config, mesh)


def of_config(
    config: ml_collections.ConfigDict, run: workdir.Workdir | None = None
) -> Experiment:
    """Creates the experiment of a config.

    Whatever builds the experiment of a run does it here, so that it is the same each
    time: the experiment reads a frozen copy of the config, in which lists are tuples.

    Args:
      config: the config.
      run: the work directory of the run that is read. What writes there compares the
        experiment with that of the run as it compares the config.

    Raises:
      UserError: as `load` does, or if the experiment of this name is not the run's.
    """
    found = load(config.experiment)
    if run is not None:
        for change in run.check_source(config.experiment):
            logging.warning("%s: %s", run.path, change)
    return found(config_lib.ReadConfig(config))


def load(path: str) -> type[Experiment]:
    """Imports an experiment class.

    Args:
      path: its dotted path, such as 'experiments.digits.experiment.Digits'.

    Raises:
      UserError: if the path names no experiment class, or the class lacks a method.
    """
    module_name, _, name = path.rpartition(".")
    rule = (
        f"experiment={path!r} must be the dotted path of a class that can be imported "
        "from here"
    )
    if not all(path.split(".")) or not module_name:
        raise errors.UserError(
            f"{rule}, such as 'experiments.digits.experiment.Digits'."
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        # A module that the experiment's file fails to import is a bug in that file, not
        # a wrong path.
        if e.name is None or not f"{module_name}.".startswith(f"{e.name}."):
            raise
        raise errors.UserError(f"{rule}: {e} (seen from {os.getcwd()}).") from e
    found = getattr(module, name, None)
    if found is None:
        near = difflib.get_close_matches(name, vars(module))
        meant = f"; did you mean {' or '.join(near)}?" if near else "."
        raise errors.UserError(f"{rule}: {module.__file__} has no {name!r}{meant}")
    if not (isinstance(found, type) and issubclass(found, Experiment)):
        raise errors.UserError(
            f"experiment={path!r} is {found!r}, which is not a class that derives from "
            "xshard.Experiment."
        )
    _check_methods(found)
    return found


def _check_methods(experiment: type[Experiment]) -> None:
    """Raises UserError if a class lacks a required method.

    The message suggests methods of the class with similar names.
    """
    lacking = sorted(experiment.__abstractmethods__)
    defined: set[str] = set()
    required: set[str] = set()
    for base in experiment.__mro__:
        required |= getattr(base, "__abstractmethods__", frozenset())
        if not base.__module__.startswith("xshard."):
            defined |= vars(base).keys()
    if not defined & {"train_data", "train_batches"}:
        lacking.append("train_data")
    if not lacking:
        return
    texts = []
    for name in lacking:
        near = difflib.get_close_matches(name, defined, n=1, cutoff=0.7)
        meant = f" (is it {near[0]!r}, misspelt?)" if near else ""
        arguments = ", ".join(inspect.signature(getattr(experiment, name)).parameters)
        texts.append(f"{name}({arguments}){meant}")
    raise errors.UserError(
        f"The class {experiment.__module__}.{experiment.__qualname__} lacks "
        f"{'; '.join(texts)}. It defines train_data or train_batches, "
        f"{', '.join(sorted(required))}."
    )


def checked_eval_data(experiment: Experiment) -> dict[str, data.Examples]:
    """Returns the evaluation examples by split, after checking that they are valid.

    See `data.splits`.
    """
    splits = data.splits(experiment.eval_data())
    for name, examples in splits.items():
        what = f"What {validation.describe_method(experiment.eval_data)} returned"
        if name:
            what += f" as {name!r}"
        data.check(examples, what)
    return splits
