"""The interface of an experiment: its science. Everything else is the framework's.

An experiment is a class and a config. The class says what the network computes, what its loss is, how
it is updated and how it is judged; it knows nothing of devices, checkpoints or processes. The same
file runs on one CPU, on eight virtual devices and on a pod.
"""

import abc
import difflib
import importlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from xshard import data, errors
from xshard import mesh as mesh_lib
from xshard.optimizers import base


class Experiment(abc.ABC):
    """The base class of experiments.

    `forward`, `loss`, `optimizer` and `evaluate` are traced: they read `self.config`, which is frozen,
    and nothing else that changes.

    >>> class Line(xshard.Experiment):
    ...     def train_data(self):
    ...         x = np.linspace(-1, 1, 64, dtype=np.float32)
    ...         return {'x': x, 'y': 3 * x}
    ...     def eval_data(self):
    ...         return self.train_data()
    ...     def forward(self, batch, *, is_training):
    ...         return hk.Linear(1)(batch['x'][:, None])[:, 0]
    ...     def loss(self, outputs, batch):
    ...         return jnp.mean((outputs - batch['y']) ** 2), {}
    ...     def optimizer(self):
    ...         return xshard.CrossShardOptimizer(optax.sgd(self.config.learning_rate))
    ...     def evaluate(self, outputs, batch):
    ...         return {'error': jnp.abs(outputs - batch['y'])}
    >>> line = Line(ml_collections.ConfigDict({
    ...     'precision': 'params=float32,compute=float32,output=float32',
    ...     'micro_batches': 1, 'aggregation_method': 'DEFAULT', 'learning_rate': 0.5}))

    `python -m xshard.new DIR` writes one, with a config that has all keys of a run.
    """

    def __init__(self, config: ml_collections.ConfigDict):
        """Keeps the config, which holds all defaults, so that nothing under trace can change it."""
        self.config = ml_collections.FrozenConfigDict(config)

    def train_data(self) -> data.Examples:
        """The training examples: arrays of one leading dimension, or a source (`xshard.data.Source`).

        They are shuffled and repeated. What they are is up to the experiment, but for each name an array.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no training data: define train_data, or train_batches."
        )

    @abc.abstractmethod
    def eval_data(self) -> data.Examples:
        """The examples to judge the network on."""

    def train_batches(self, part: data.Part) -> data.BatchIterator:
        """Makes the iterator over this process's part of the batches. By default `train_data`, in an order of the seed.

        Any iterator with `get_state` and `set_state` will do: its state is in the checkpoint.
        """
        examples = self.train_data()
        data.check(examples, f"What {described(self.train_data)} returned")
        return data.iterate(examples, part)

    @abc.abstractmethod
    def forward(self, batch: Mapping[str, jax.Array], *, is_training: bool) -> Any:
        """The network's outputs: a Haiku function, which makes its parameters.

        It sees one replica's part of the batch in the compute type of `config.precision`, and may draw
        keys with `hk.next_rng_key()` while training.
        """

    @abc.abstractmethod
    def loss(
        self, outputs: Any, batch: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """The mean loss over a part of the batch, a float32 scalar, and scalars to report."""

    @abc.abstractmethod
    def optimizer(self) -> base.Optimizer:
        """The update rule, with a `CrossShardOptimizer` over 'replica', and 'slice', in it.

        Called inside `hk.transform_with_state`: make its modules here.
        """

    @abc.abstractmethod
    def evaluate(self, outputs: Any, batch: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """A value for each example, of shape (batch,); the framework reports their means over all examples."""

    def clip_gradients(self, grads: Any) -> Any:
        """Acts on a replica's gradients before they are reduced. By default leaves them."""
        return grads

    def ensemble(self, outputs: Any) -> Any:
        """One output from those of several groups, along a leading dimension. By default their mean."""
        return jax.tree.map(lambda x: jnp.mean(x, axis=0), outputs)

    def samples(self, predict: Callable[[Mapping[str, Any]], Any], key: jax.Array) -> str:
        """Returns a sample of what the trained network does, such as text that it writes. By default nothing.

        Called after the last evaluation, on all processes alike, and printed. Before the run begins it is
        called up to its first prediction, which finds mistakes.

        Args:
          predict: outputs, on the host, of a batch on the host, of any number of rows: those of the
            ensemble where there are several groups. It compiles for each shape of a batch.
          key: a key for random choices, the same each time.
        """
        del predict, key
        return ""

    def sharding_rules(self) -> Sequence[tuple[str, jax.sharding.PartitionSpec]]:
        """Returns what lies along the axis 'model': see `xshard.mesh.tree_shardings`. By default nothing."""
        return ()


def example(experiment: Experiment) -> data.Arrays:
    """One example of the training data, for its names, types and shapes."""
    part = data.Part(1, (np.arange(1),), experiment.config.seed)
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
    own = {
        name for base in experiment.__mro__ for name in vars(base) if base.__module__ != __name__
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
        f"The class {experiment.__module__}.{experiment.__qualname__} lacks {'; '.join(texts)}. An Experiment "
        "defines train_data or train_batches, eval_data, forward, loss, optimizer and evaluate."
    )


def described(method: Callable[..., Any]) -> str:
    """A method and its place, such as 'Digits.train_data (experiment.py:31)'."""
    place = errors.place_of(method)
    return f"{method.__qualname__}{f' ({place})' if place else ''}"


def checked_eval_data(experiment: Experiment) -> data.Examples:
    """The examples to judge the network on, if they can be read."""
    examples = experiment.eval_data()
    data.check(examples, f"What {described(experiment.eval_data)} returned")
    return examples
