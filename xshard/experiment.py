"""The interface of an experiment: its science. Everything else is the framework's.

An experiment is a class and a config. The class says what is computed, how it is updated and how it is judged; it
knows nothing of devices, checkpoints or processes. The same file runs on one CPU, on eight virtual devices and on
a pod.
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

from xshard import callbacks as callbacks_lib
from xshard import contract, data, errors
from xshard import mesh as mesh_lib
from xshard.learners import state as learner_lib

Batch = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class PerReplica:
    """Marks what is a replica's own in an experiment's state.

    In a checkpoint it has a leading dimension of replicas, and comes back on as many.

    Attributes:
      value: a tree of arrays.
    """

    value: Any

    def joined(self) -> "PerReplica":
        """The values of all replicas, from those with two leading dimensions of slices and replicas."""
        return PerReplica(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), self.value))

    def local(self) -> "PerReplica":
        """The replica's own, without the dimension of replicas."""
        return PerReplica(jax.tree.map(lambda x: x[0], self.value))

    def stored(self) -> "PerReplica":
        """The inverse of `local`."""
        return PerReplica(jax.tree.map(lambda x: x[None], self.value))


@dataclasses.dataclass(frozen=True)
class PerExample:
    """Marks what belongs to the examples of a replica's part of a batch, such as the states of environments.

    In a checkpoint the first dimension is that of all examples of a batch, and comes back on any number of replicas
    that divides it.

    Attributes:
      value: a tree of arrays, whose first dimension is that of the replica's examples.
    """

    value: Any

    def joined(self) -> "PerExample":
        """The values of all replicas, from those with two leading dimensions of slices and replicas."""
        return PerExample(jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), self.value))

    def local(self) -> "PerExample":
        """The replica's own."""
        return self

    def stored(self) -> "PerExample":
        """The inverse of `local`."""
        return self


def is_own(x: Any) -> bool:
    """Returns whether a node of a state is marked as not equal on all replicas."""
    return isinstance(x, PerReplica | PerExample)


def children(tree: Any, of_leaf: str) -> tuple[list[tuple[Any, Any]], Any]:
    """The children of a pytree's root with their keys, and the structure of the root alone.

    Args:
      tree: the pytree.
      of_leaf: the key of a leaf, which is its own child.
    """
    # JAX puts None in the place of a child, and compares structures.
    below = lambda x: x is not tree or x is None
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=below)
    key_of = lambda path: path[0] if path else jax.tree_util.GetAttrKey(of_leaf)
    structure = jax.tree.structure(tree, is_leaf=below)
    return [(key_of(path), child) for path, child in found], structure


def _register(cls: Any) -> None:
    """Makes a class a pytree by the names of what it marks, as if it were not there."""

    def unflatten(structure: Any, leaves: Any) -> Any:
        return cls(jax.tree.unflatten(structure, leaves))

    jax.tree_util.register_pytree_with_keys(
        cls, lambda own: children(own.value, "value"), unflatten
    )


_register(PerReplica)
_register(PerExample)


class Experiment(abc.ABC):
    """What is trained: a state of any kind, and the step that advances it.

    `Supervised` is one for a network with a loss on its outputs. This is the tier below, for what is more than
    that: several networks that train in turn, environments, a moving target. Most of it is said with a
    `Learner` for each network; docs/beyond_a_classifier.md goes through it.

    `init`, `train_step`, `eval_step` and `predict` are traced, and see one replica of a group: its part of a
    batch, and its keys. The mapped axes 'slice' and 'replica' are there for collectives. They read
    `self.config`, which is frozen, and nothing else that changes.

    Each array of the state is one of three. Most are **equal on all replicas** of a group, as a learner's state is;
    this is checked before the first step. A **replica's own** is wrapped in `PerReplica`; what belongs to
    the **examples** of its part of a batch, in `PerExample`.
    """

    def __init__(self, config: ml_collections.ConfigDict):
        """Keeps the config, which holds all defaults, so that nothing under trace can change it."""
        self.config = ml_collections.FrozenConfigDict(config)

    @abc.abstractmethod
    def init(self, key: jax.Array, batch: Batch) -> Any:
        """The first state, a pytree.

        Args:
          key: of all randomness; equal on all replicas of a group.
          batch: a replica's part of a batch, of which only names, types and shapes count.
        """

    @abc.abstractmethod
    def train_step(
        self, state: Any, batch: Batch, key: jax.Array
    ) -> tuple[Any, learner_lib.Outcome | Mapping[str, Any]]:
        """Advances the state.

        Args:
          state: as `init` and earlier steps have made it.
          batch: the replica's part of the batch.
          key: the replica's own for this step.

        Returns:
          The new state, and what is logged: what `Learner.update` returned; or a dictionary of such by the
          learner's name, and of scalars, of which the means over the replicas are logged.
        """

    @abc.abstractmethod
    def eval_step(self, state: Any, batch: Batch, key: jax.Array) -> Mapping[str, jax.Array]:
        """Judges a state on a replica's part of a batch.

        Args:
          state: the state.
          batch: of `eval_data`.
          key: the replica's own for this batch, the same in each evaluation.

        Returns:
          A value for each example, of shape (batch,). The framework takes their means over all examples;
          where `summarize` is overridden a value may be an array, of shape (batch, ...).
        """

    def predict(self, state: Any, batch: Batch) -> Any:
        """The outputs for a batch, equal on all devices: a tree of arrays. For `samples` and `xshard.load`."""
        raise NotImplementedError(f"{type(self).__name__} makes no predictions: define predict.")

    def summarize(self, sums: Mapping[str, np.ndarray], count: float) -> Mapping[str, Any]:
        """What an evaluation reports, on the host: by default the means of the values of `eval_step`.

        Override it for what is no mean over the examples: a ratio of two sums, what comes of a confusion
        matrix or of a histogram of scores.

        Args:
          sums: of each value over all examples, float64.
          count: the number of examples.

        Returns:
          Numbers by name.
        """
        return {name: value / count for name, value in sums.items()}

    def train_data(self) -> data.Examples:
        """The training examples: arrays of one leading dimension, or a source (`xshard.data.Source`).

        They are shuffled and repeated. What they are is up to the experiment, but for each name an array.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no training data: define train_data, or train_batches."
        )

    @abc.abstractmethod
    def eval_data(self) -> data.Examples | Mapping[str, data.Examples]:
        """The examples to judge the state on; or several splits by name, {'test': ..., 'hard': ...}."""

    def train_batches(self, part: data.Part) -> data.BatchIterator:
        """Makes the iterator over this process's part of the batches. By default `train_data`, in an order of the seed.

        Any iterator with `get_state` and `set_state` will do: its state is in the checkpoint.
        """
        examples = self.train_data()
        data.check(examples, f"What {contract.described(self.train_data)} returned")
        return data.iterate(examples, part)

    def samples(
        self, predict: Callable[[Mapping[str, Any]], Any], key: jax.Array
    ) -> str | Mapping[str, Any]:
        """Returns samples of what has been trained, such as texts and images that it makes. By default nothing.

        Called on all processes alike, after the last evaluation, and each `config.samples_every_steps` if that is
        not 0. Before the run begins it is called up to its first prediction, which finds mistakes.

        Args:
          predict: the outputs of `predict`, on the host, of a batch on the host, of any number of rows. It
            compiles for each shape of a batch.
          key: a key for random choices, the same each time.

        Returns:
          A text; or a dictionary of texts, `xshard.Image` and `xshard.Histogram` by name. They are kept in the file
          samples.jsonl of the work directory, and shown by TensorBoard, wandb and the report.
        """
        del predict, key
        return ""

    def callbacks(self) -> Sequence[callbacks_lib.Callback]:
        """Returns functions that are called after each evaluation, and may end the run. By default none.

        Each is called on process 0 with the evaluations of the run so far, the last one among them: a list of
        dictionaries of 'step' and of the metrics by name, floats, or lists of them for several groups. It returns
        None, and the run goes on; or a text that says why the run ends there, as it does after its last step. It is
        to be a function of these rows alone: then a run that was stopped, and goes on, ends where it would have.

        `xshard.early_stopping('loss')` is one.
        """
        return ()

    def sharding_rules(self) -> Sequence[tuple[str, jax.sharding.PartitionSpec]]:
        """Returns what lies along the axis 'model': see `xshard.mesh.tree_shardings`. By default nothing."""
        return ()


def samples_key(experiment: Experiment) -> jax.Array:
    """The key that `Experiment.samples` is given."""
    return jax.random.key(experiment.config.seed)


def summarizes(experiment: Experiment) -> bool:
    """Returns whether an experiment says itself what comes of the sums of an evaluation, of arrays too."""
    return type(experiment).summarize is not Experiment.summarize


def example(experiment: Experiment) -> data.Arrays:
    """One example of the training data, for its names, types and shapes."""
    # An iterator of the experiment's own may need the batch size of the run; there may be fewer examples than that.
    is_own = type(experiment).train_batches is not Experiment.train_batches
    size = experiment.config.batch_size if is_own else 1
    part = data.Part(size, (np.arange(1),), experiment.config.seed)
    return next(experiment.train_batches(part))


def mesh_of(
    config: ml_collections.ConfigDict, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """The mesh that a config asks for: see `xshard.mesh.make_mesh`."""
    return mesh_lib.make_mesh(
        config.group_assignment or None,
        slices=config.slices,
        model=config.model_parallel,
        devices=devices,
    )


def load(path: str) -> type[Experiment]:
    """The experiment class of a dotted path, such as 'experiments.digits.experiment.Digits'.

    Raises:
      UserError: if there is none, or if it lacks a method, with the reason.
    """
    module_name, _, name = path.rpartition(".")
    rule = f"experiment={path!r} must be the dotted path of a class that can be imported from here"
    if not all(path.split(".")) or not module_name:
        raise errors.UserError(f"{rule}, such as 'experiments.digits.experiment.Digits'.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        # One that the file itself imports is its bug.
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
            f"experiment={path!r} is {found!r}, which is not a class that derives from xshard.Experiment."
        )
    _check_methods(found)
    return found


def _check_methods(experiment: type[Experiment]) -> None:
    """Raises UserError if a class lacks a method that it must have."""
    lacking = sorted(experiment.__abstractmethods__)
    users = [base for base in experiment.__mro__ if not base.__module__.startswith("xshard.")]
    own = {name for base in users for name in vars(base)}
    required = set(lacking) | {
        name
        for base in experiment.__mro__
        for name, value in vars(base).items()
        if getattr(value, "__isabstractmethod__", False)
    }
    if not own & {"train_data", "train_batches"}:
        lacking.append("train_data")
    if not lacking:
        return
    texts = []
    for name in lacking:
        near = difflib.get_close_matches(name, own, n=1, cutoff=0.7)
        meant = f" (is it {near[0]!r}, misspelt?)" if near else ""
        arguments = ", ".join(inspect.signature(getattr(experiment, name)).parameters)
        texts.append(f"{name}({arguments}){meant}")
    raise errors.UserError(
        f"The class {experiment.__module__}.{experiment.__qualname__} lacks {'; '.join(texts)}. It "
        f"defines train_data or train_batches, {', '.join(sorted(required))}."
    )


def checked_eval_data(experiment: Experiment) -> dict[str, data.Examples]:
    """The examples to judge the state on by split, if they can be read: see `data.splits`."""
    splits = data.splits(experiment.eval_data())
    what = f"What {contract.described(experiment.eval_data)} returned"
    for name, examples in splits.items():
        data.check(examples, f"{what} as {name!r}" if name else what)
    return splits
