"""The base class of experiments that train one network with a loss on its outputs.

Most experiments do.
"""

import abc
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from jax import lax

from xshard import config as config_lib
from xshard import errors, experiment, methods
from xshard import mesh as mesh_lib
from xshard.learners import learner, validation
from xshard.learners.state import Adaptation, LearnerState, Outcome
from xshard.optimizers import trees


class Supervised(experiment.Experiment):
    """The base class of experiments that train one network with a loss on its outputs.

    JAX traces `forward`, `loss`, `optimizer` and `evaluate`. They may read
    `self.config`, which is frozen, and nothing else that changes.

    >>> class Line(xshard.Supervised):
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
    ...         return optax.sgd(self.config.learning_rate)
    ...     def evaluate(self, outputs, batch):
    ...         return {'error': jnp.abs(outputs - batch['y'])}
    >>> config = xshard.config.default()
    >>> config.learning_rate = 0.5
    >>> line = Line(config)

    `python -m xshard.new DIR` writes a complete example with its config.
    """

    def __init__(self, config: ml_collections.ConfigDict):
        """Stores a frozen copy of the config, and creates the learner."""
        super().__init__(config)
        clip_gradients = None
        if type(self).clip_gradients is not Supervised.clip_gradients:
            clip_gradients = self.clip_gradients
        self.learner = learner.Learner(
            self.forward,
            self.optimizer,
            self.config,
            clip_gradients=clip_gradients,
            frozen=self.frozen(),
            uncast=self.uncast(),
            lora=self.lora(),
        )

    @abc.abstractmethod
    def forward(self, batch: experiment.Batch, *, is_training: bool) -> Any:
        """Returns the network's outputs.

        This is a Haiku function: it creates its modules and parameters. It sees one
        replica's part of the batch, in the compute dtype of `config.precision`. It may
        draw keys with `hk.next_rng_key()` in training and evaluation; in a prediction
        only if the caller gives it a key.

        For a network of another library, `forward` is a property instead, which returns
        the pair (init, apply) of `Learner`'s argument `network`. Both functions are
        called with a batch and with `is_training=`.
        """

    @abc.abstractmethod
    def loss(
        self, outputs: Any, batch: experiment.Batch
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """Returns the mean loss over the replica's part of the batch, and scalars.

        The loss is a float32 scalar. The scalars, in a dictionary, are logged: means
        over the step's batch; an integer that depends on no part of the batch and on no
        key as it is. It may draw keys with `hk.next_rng_key()`.
        """

    @abc.abstractmethod
    def optimizer(self) -> learner.Rule:
        """Returns the update rule: an optax transformation, such as `optax.adam(1e-3)`.

        The learner reduces it over the replicas and scales its loss, as the config's
        `reduction` and `loss_scale` say.

        For more control, return a rule composed by hand, which is used as it is. It
        must contain a `CrossShardOptimizer` over 'replica', and 'slice' if there are
        several. The learner calls this method inside `hk.transform_with_state`: create
        the rule's modules here.
        """

    @abc.abstractmethod
    def evaluate(
        self, outputs: Any, batch: experiment.Batch
    ) -> Mapping[str, jax.Array]:
        """Returns arrays of shape (batch,) by name, with a value per example.

        The framework averages them over all examples.
        """

    def clip_gradients(self, grads: Any) -> Any:
        """Returns a replica's gradients, clipped before they are reduced.

        By default they are unchanged.
        """
        return grads

    def weight(self, batch: experiment.Batch) -> jax.Array:
        """Returns how much the loss of a part of a batch counts, a float32 scalar.

        It is what `loss` divides by, such as tokens. The parts are those of the
        replicas and the micro-batches. By default all count the same, so a loss that
        divides by its own number of tokens is a mean of means, which depends on how a
        batch is divided. With their number as the weight, the loss of a step and its
        gradients are those of the mean over all tokens of the step, on any number of
        replicas and micro-batches. Scalars beside the loss count by the same weight, as
        means over the same tokens. Those of a part without weight do not count, but its
        loss and gradients must be finite: divide the loss by `jnp.maximum(tokens, 1)`.
        Where it is 0/0 in a part, the loss of the step is NaN, as its gradients are.
        """
        return jnp.float32(1)

    def frozen(self) -> str:
        """Returns a regular expression for the paths of parameters not to train.

        An example is '^encoder/'. By default all are trained.
        """
        return ""

    def lora(self) -> Adaptation | None:
        """Returns a low-rank adaptation of the network, from `xshard.lora`.

        The parameters of the network are then frozen. By default there is none.
        """
        return None

    def uncast(self) -> str:
        """Returns a regular expression for the fields of a batch that are not cast.

        An example is '/time$'. The others are cast to the compute type, in which
        numbers are coarse: bfloat16 has no step between 1,000 and 1,004. By default all
        are. A path is as in `Learner`'s argument `uncast`.
        """
        return ""

    def ensemble(self, outputs: Any) -> Any:
        """Combines the outputs of all groups into one. By default their mean.

        They are stacked along a leading dimension.
        """
        return jax.tree.map(lambda x: jnp.mean(x, axis=0), outputs)

    def init(self, key: jax.Array, batch: experiment.Batch) -> LearnerState:
        """Implements `Experiment.init`."""
        # On one example, since parameters do not depend on the batch size.
        example = {name: x[:1] for name, x in batch.items()}
        return self.learner.init(key, example, is_training=True)

    def train_step(
        self, state: LearnerState, batch: experiment.Batch, key: jax.Array
    ) -> tuple[LearnerState, Outcome]:
        """Implements `Experiment.train_step`."""
        if type(self).weight is Supervised.weight:
            return self.learner.update(state, self.training_loss, batch, key)
        # The rule and the learner take plain means over the replicas and the
        # micro-batches. So each part's loss is multiplied by its weight, in units of
        # the mean weight of a part.
        mean_weight = lax.pmean(self._weight(batch), mesh_lib.REPLICAS)
        mean_weight /= self.config.micro_batches

        equal_integers = functools.partial(
            self.learner.equal_integers, state, self.training_loss, batch, key
        )

        def weighted_loss(
            state: LearnerState, part: experiment.Batch, key: jax.Array
        ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
            value, net_state, scalars = self.training_loss(state, part, key)
            # A step without any weight has a loss of 0.
            tiny = jnp.finfo(mean_weight.dtype).tiny
            factor = self._weight(part) / jnp.maximum(mean_weight, tiny)
            averaged = set(scalars)
            if any(jnp.issubdtype(x.dtype, jnp.integer) for x in scalars.values()):
                averaged -= equal_integers()
            for name in averaged:
                # What does not count is selected away: a mean over none of its tokens
                # may be NaN, which zero times would be, too.
                weighted = scalars[name].astype(jnp.float32) * factor
                scalars[name] = jnp.where(factor != 0, weighted, 0)
            # The loss is not: its gradients would be NaN all the same, and not be seen.
            # In a narrow type the product may overflow, where the mean does not.
            value = trees.widen(value)
            return value * factor.astype(value.dtype), net_state, scalars

        return self.learner.update(state, weighted_loss, batch, key)

    def _weight(self, batch: experiment.Batch) -> jax.Array:
        weight = jnp.asarray(self.weight(batch))
        if weight.shape:
            raise errors.UserError(
                f"{validation.describe_method(self.weight)} returned an array of shape "
                f"{weight.shape}: the weight of a part of a batch is a scalar, such as "
                "the number of its tokens, jnp.sum(mask)."
            )
        return weight.astype(jnp.float32)

    def training_loss(
        self, state: LearnerState, batch: experiment.Batch, key: jax.Array
    ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        """Returns `loss` of the outputs of `forward`, as `Learner.update` expects it.

        That is the loss, the network's state and the scalars to log.
        """
        outputs, net_state = self.learner.apply(state, key, batch, is_training=True)
        value, scalars = validation.loss(self.loss, self.loss(outputs, batch))
        return value, net_state, scalars

    def eval_step(
        self, state: LearnerState, batch: experiment.Batch, key: jax.Array
    ) -> dict[str, jax.Array]:
        """Implements `Experiment.eval_step`.

        If the rules have parameters of their own for evaluation, such as averages, the
        values are theirs, and 'raw/<name>' is each value of the parameters that train.
        With several groups, 'ensemble/<name>' is each value computed from the outputs
        of `ensemble`, one for all groups.
        """
        evaluated = self.for_evaluation(state)
        outputs, _ = self.learner.apply(evaluated, key, batch, is_training=False)
        values = dict(self._values(outputs, batch))
        if evaluated is not state:
            of_trained, _ = self.learner.apply(state, key, batch, is_training=False)
            for name, value in self._values(of_trained, batch).items():
                values[f"raw/{name}"] = value
        if self._has_ensemble():
            ensemble = self._ensemble_of_groups(outputs)
            for name, value in self._values(ensemble, batch).items():
                values[f"ensemble/{name}"] = value
        return values

    def for_evaluation(self, state: LearnerState) -> LearnerState:
        """Implements `Experiment.for_evaluation`."""
        return self.learner.for_evaluation(state)

    def predict(
        self, state: LearnerState, batch: experiment.Batch, key: jax.Array | None = None
    ) -> Any:
        """Implements `Experiment.predict`: returns the network's outputs.

        With several groups it returns the outputs of `ensemble`.

        Args:
          state: the learner's state.
          batch: a batch, whole on each device.
          key: the random key for a network that draws keys in an evaluation; equal on
            all devices.
        """
        evaluated = self.for_evaluation(state)
        outputs, _ = self.learner.apply(evaluated, key, batch, is_training=False)
        if not self._has_ensemble():
            return outputs
        return self._ensemble_of_groups(outputs)

    def _values(self, outputs: Any, batch: experiment.Batch) -> Mapping[str, jax.Array]:
        """Returns the checked result of `evaluate`."""
        returned = self.evaluate(outputs, batch)
        rows = len(next(iter(batch.values())))
        allows_arrays = experiment.overrides(self, "summarize")
        return methods.evaluation(
            self.evaluate,
            returned,
            rows,
            allows_arrays=allows_arrays,
            families=methods.EVALUATION_FAMILIES,
        )

    def _has_ensemble(self) -> bool:
        """Returns whether there are several groups, each with a model of its own."""
        # Under an outer rule the groups of the mesh are slices of one model.
        if config_lib.separates_slices(self.config):
            return False
        return lax.axis_size(mesh_lib.GROUP) > 1

    def _ensemble_of_groups(self, outputs: Any) -> Any:
        return self.ensemble(lax.all_gather(outputs, mesh_lib.GROUP))
