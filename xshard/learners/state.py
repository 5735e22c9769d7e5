"""The state of a learner, and the report of an update of it."""

import abc
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xshard.optimizers import layouts, trees

# The verdicts on an update.
# Applied and finite, or skipped with a lowered loss scale.
FINE = 0
# Skipped, although no loss scale was lowered for the next one.
SKIPPED_AT_MIN_SCALE = 1
# Applied with a loss or gradient that is not finite.
NONFINITE = 2


class Adaptation(abc.ABC):
    """What a learner asks of an adaptation of its network, such as `xshard.lora`.

    It is further parameters, which change how the network uses its own.
    """

    @property
    @abc.abstractmethod
    def factors(self) -> dict[str, float]:
        """What else than parameters the adaptation follows from, as JSON values."""

    @abc.abstractmethod
    def extend(
        self,
        key: jax.Array,
        params: Mapping[str, Mapping[str, jax.Array]],
        requested: Mapping[str, tuple[int, ...]],
    ) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
        """Returns the first parameters of a network with those of the adaptation.

        Args:
          key: the random key.
          params: the parameters of the network, a Haiku tree.
          requested: the shape in which the network asks for each of them, by path.

        Returns:
          The parameters, and the shapes likewise.
        """

    @abc.abstractmethod
    def around(self, network: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a Haiku function that is the network as it is adapted."""

    @abc.abstractmethod
    def merge(self, params: Any) -> Any:
        """Returns the parameters with which the network alone is as it is adapted."""

    @abc.abstractmethod
    def trained(self, params: Any) -> list[str]:
        """Returns the paths of the parameters to train, of those of `extend`."""


@dataclasses.dataclass(frozen=True)
class LearnerMeta:
    """The properties of a learner's rules that decide how its state lies on the mesh.

    What a function computes of a state depends on some of them. These are part of its
    tree structure, so that a jitted function is traced anew for a state with other
    ones. Those that say how arrays lie compare as equal: a state has the same values
    and names with a sharded update and without. A step leaves them all as they are.

    Attributes:
      shards_update: whether slots are sharded over the replicas.
      statistics_module: the name of the module whose state has the network's
        floating-point state for evaluation; None if that of training is used.
      evaluation_rule: the name of the rule that has other parameters for evaluation;
        None if the parameters that train are evaluated.
      outer_module: the module name of the outer rule; None without one.
      slots_from_params: the slots that begin as copies of the parameters: pairs of a
        module's name and what precedes a parameter's path in the names of its state.
      param_layouts: the layouts of parameters and slots if parameters are also held in
        shards; otherwise empty.
      reduce_dtype: the type in which the gradients of parameters held in shards are
        summed.
      lora: the low-rank adaptation of the parameters; None without one.
      has_unscaled_half: whether gradients pass through float16 without a loss scale.
      in_float8: the modules whose products are computed in float8.
    """

    shards_update: bool = dataclasses.field(default=False, compare=False)
    statistics_module: str | None = None
    evaluation_rule: str | None = None
    outer_module: str | None = None
    slots_from_params: tuple[tuple[str, str], ...] = ()
    param_layouts: layouts.Layouts = dataclasses.field(
        default_factory=dict, compare=False
    )
    reduce_dtype: str = dataclasses.field(default="float32", compare=False)
    lora: Adaptation | None = None
    has_unscaled_half: bool = dataclasses.field(default=False, compare=False)
    in_float8: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class LearnerState:
    """Everything that a learner needs to resume: a pytree, equal on all replicas of a
    group.

    Attributes:
      params: the network's parameters.
      net_state: the network's Haiku state.
      opt_state: the state of the update rules: slots, counts, loss scale.
      global_step: the number of updates applied, int32. A skipped step does not advance
        it.
      gradient_noise: what the noise scale of the gradients is computed from, see
        `xshard.learners.noise_scale`; None if `config.noise_scale_steps` is 0.
      meta: the properties of the rules. It is no child of the pytree, so no checkpoint
        holds it.
    """

    params: Any
    net_state: Any
    opt_state: Any
    global_step: Any
    gradient_noise: Any = None
    meta: LearnerMeta = LearnerMeta()

    def replace(self, **changes: Any) -> "LearnerState":
        """Returns the state with new values for some attributes."""
        return dataclasses.replace(self, **changes)

    def with_meta(self, **changes: Any) -> "LearnerState":
        """Returns the state with new values for some properties of its rules."""
        return self.replace(meta=dataclasses.replace(self.meta, **changes))

    def as_it_is(self) -> "LearnerState":
        """Returns the state with its parameters as those to evaluate."""
        return self.with_meta(evaluation_rule=None)


jax.tree_util.register_dataclass(
    LearnerState,
    data_fields=("params", "net_state", "opt_state", "global_step", "gradient_noise"),
    meta_fields=("meta",),
)


def is_learner(x: Any) -> bool:
    """Returns whether a node of an experiment's state is a learner's state."""
    return isinstance(x, LearnerState)


def layout_of_copies(
    states: Collection[LearnerState],
) -> Callable[[str, Any], layouts.Layout | None]:
    """Returns a function that finds the layout of arrays outside learners that copy
    their parameters in shards.

    Args:
      states: the states of the learners.

    Returns:
      A function of an array's path in the experiment's state and of the array. An array
      counts as a copy if its path ends in a parameter's path and it has that
      parameter's shape. The result is the parameter's layout; or None if the array is
      not a copy, if the parameter is not held in shards, or if several such parameters
      have different layouts.
    """
    # The shape and the layout, if any, of all parameters of each path.
    params: dict[str, list[tuple[Any, layouts.Layout | None]]] = {}
    for state in states:
        for path, x in trees.leaves_by_path(state.params).items():
            layout = state.meta.param_layouts.get(path)
            params.setdefault(path, []).append((x.shape, layout))

    def find(path: str, x: Any) -> layouts.Layout | None:
        # The longest ending comes first, so a copy is matched to the most specific
        # path.
        for ending in trees.endings(path):
            found = [
                layout for shape, layout in params.get(ending, ()) if shape == x.shape
            ]
            if found:
                return _shared_layout(found)
        return None

    return find


def _shared_layout(found: list[layouts.Layout | None]) -> layouts.Layout | None:
    """Returns the layout if all are the same one, of a parameter held in shards."""
    first, *others = found
    if first is None or not first.shards_param:
        return None
    return first if all(other == first for other in others) else None


class Observed(NamedTuple):
    """The values of an update that a run watches.

    Attributes:
      verdict: FINE, SKIPPED_AT_MIN_SCALE or NONFINITE, an int32 scalar.
      loss: the mean loss over the replicas.
      gradients: for each parameter, whether its gradient, as passed to the update, was
        not finite.
    """

    verdict: Any
    loss: Any
    gradients: Any


def observe(
    applied: jax.Array, lowered: jax.Array, loss: jax.Array, nonfinite: jax.Array
) -> Observed:
    """Judges an update.

    Args:
      applied: whether it was applied.
      lowered: whether it lowered a loss scale.
      loss: its loss.
      nonfinite: for each parameter, whether its gradient was not finite.
    """
    has_nonfinite = jnp.any(nonfinite) | ~jnp.isfinite(loss)
    if_applied = jnp.where(has_nonfinite, NONFINITE, FINE)
    if_skipped = jnp.where(lowered, FINE, SKIPPED_AT_MIN_SCALE)
    verdict = jnp.where(applied, if_applied, if_skipped).astype(jnp.int32)
    return Observed(verdict=verdict, loss=loss, gradients=nonfinite)


# The norms of each array: those of its gradient, its new value and its update.
NORMS_BY_ARRAY = ("gradient", "parameter", "update")


@dataclasses.dataclass(frozen=True)
class ArrayNorms:
    """The L2 norms of each trained parameter, of an update: a pytree of one array.

    Attributes:
      paths: the paths of the parameters. They are no child of the pytree, so a compiled
        step returns them too.
      values: float32, of shape [3, parameters]: the norms of `NORMS_BY_ARRAY`. With
        several groups, there is a leading dimension of groups.
    """

    paths: tuple[str, ...]
    values: Any


jax.tree_util.register_dataclass(
    ArrayNorms, data_fields=("values",), meta_fields=("paths",)
)


class Outcome(NamedTuple):
    """The report of an update, which `Experiment.train_step` returns among its metrics.

    Attributes:
      metrics: the values to log, by name, equal on all replicas of a group.
      observed: the values that the run watches.
      aux: the fourth output of the loss, computed before the update, with a row for
        each example of the replica.
      norms: the norms of each array, if `config.log_norms_every_steps` is not 0.
    """

    metrics: dict[str, jax.Array]
    observed: Observed
    aux: Any = None
    norms: ArrayNorms | None = None

    @property
    def applied(self) -> jax.Array:
        """Whether the update was applied: a boolean scalar, False for a step that was
        skipped.

        State beside the learner that must not move in a skipped step, such as a target
        network, is selected by it: `jnp.where(outcome.applied, new, old)`.
        """
        return self.metrics["skipped"] == 0

    def joined(self) -> "Outcome":
        """Returns the outcomes of several updates, which a scan stacks, as one.

        It logs the values of the last update, and `updates_per_step`. The run watches
        the first update with a value that is not finite, or else the last.
        """
        # A verdict is a scalar, so its dimensions are those of the scans.
        shape = jnp.shape(self.observed.verdict)
        if not shape:
            return self
        flatten = lambda x: x.reshape(-1, *x.shape[len(shape) :])
        metrics, observed = jax.tree.map(flatten, (self.metrics, self.observed))
        is_nonfinite = observed.verdict == NONFINITE
        count = len(is_nonfinite)
        watched = jnp.where(jnp.any(is_nonfinite), jnp.argmax(is_nonfinite), count - 1)
        metrics = {name: x[-1] for name, x in metrics.items()}
        metrics["updates_per_step"] = jnp.int32(count)
        return Outcome(
            metrics=metrics,
            observed=jax.tree.map(lambda x: x[watched], observed),
            norms=jax.tree.map(lambda x: flatten(x)[-1], self.norms),
        )
