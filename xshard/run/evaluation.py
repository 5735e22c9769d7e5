"""Evaluation of a state: metrics over all evaluation examples, and predictions."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import ml_collections
import numpy as np

from xshard import config as config_lib
from xshard import data, errors, logical, methods
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard.base import spans
from xshard.data import batches
from xshard.learners import validation
from xshard.metrics import deferred
from xshard.pod import host_collectives
from xshard.training import replica_state, step
from xshard.training import state as state_lib

# The prefixes of the names of values that `eval_step` computed from the parameters that
# train, where others are evaluated, and from the outputs of all groups together.
_RAW = "raw/"
_ENSEMBLE = "ensemble/"
_KINDS = ("", _RAW, _ENSEMBLE)


class Evaluation:
    """The evaluation of states of an experiment on all its evaluation examples."""

    def __init__(
        self,
        experiment: experiment_lib.Experiment,
        mesh: jax.sharding.Mesh,
        batch_size: int,
    ):
        """Checks the batch size and the examples.

        Args:
          experiment: the experiment.
          mesh: the run's mesh.
          batch_size: the number of examples per batch.

        Raises:
          ValueError: if there are no examples, or the replicas do not divide the batch.
        """
        self._experiment = experiment
        self._splits = experiment_lib.checked_eval_data(experiment)
        replicas = logical.of_config(experiment.config, mesh)
        self._batches = {
            split: batches.EvalBatches(examples, mesh, batch_size, replicas)
            for split, examples in self._splits.items()
        }
        self._logical_mesh = logical.mesh_of(experiment.config, mesh)
        self._jitted = _jitted(experiment, mesh, replicas)
        self._step = host_collectives.compiled_by_all(self._jitted, "the evaluation")

    def summary(self) -> str:
        """Returns a summary of the data, which the processes compare."""
        texts = []
        for split, examples in self._splits.items():
            text = data.summary(examples)
            if split:
                text = f"{split}: {text}"
            texts.append(text)
        return "; ".join(texts)

    def check(
        self, state: state_lib.TrainState, options: ml_collections.ConfigDict
    ) -> dict[str, bool] | None:
        """Traces the evaluation.

        Args:
          state: the shapes of a state.
          options: `config.checkpoint`; its `best_metric` must be one of the metrics if
            best checkpoints are kept.

        Returns:
          The names of the metrics, and whether each is a list with a value per group;
          None if they are unknown.

        Raises:
          UserError: if the experiment's methods do not fit, or no metric is called
            `best_metric`.
        """
        totals = {}
        for split, split_batches in self._batches.items():
            traced = self._jitted.trace(state, split_batches.shapes(), np.int32(0))
            replica_state.check_unread(
                self._experiment.eval_step, traced.jaxpr, state, self._logical_mesh
            )
            sums = traced.out_info
            # Zeros stand in for the sums, since only `summarize` determines the names
            # of the metrics.
            totals[split] = {name: np.zeros(x.shape) for name, x in sums.items()}
            totals[split]["count"] = np.ones(sums["count"].shape)
        is_per_group: dict[str, bool] = {}
        try:
            with np.errstate(all="ignore"):
                for split in totals:
                    for name, value in self._metrics(split, totals[split]).items():
                        if name in is_per_group:
                            raise errors.UserError(
                                f"Two splits of the evaluation data have a metric "
                                f"called {name!r}: the name of a split precedes those "
                                "of its metrics. Give the split another name than "
                                f"{split!r}, or the metric."
                            )
                        is_per_group[name] = isinstance(value, list)
        except errors.UserError:
            raise
        except (ArithmeticError, ValueError):
            # The sums here are all zeros, and `summarize` may fail on them, for example
            # by dividing by one of them. Then the names stay unknown until the first
            # evaluation.
            return None
        if options.keep_best and options.best_metric not in is_per_group:
            renamed = ""
            if "average/" in options.best_metric:
                name = options.best_metric.replace("average/", "")
                renamed = (
                    " Averages are evaluated under the plain names, and the "
                    f"parameters that train as 'raw/...': best_metric={name!r} is what "
                    f"{options.best_metric!r} was."
                )
            raise errors.UserError(
                f"checkpoint.best_metric={options.best_metric!r} must be a metric of "
                f"the evaluation: {', '.join(sorted(is_per_group))}.{renamed}"
            )
        return is_per_group

    def compile(self, state: state_lib.TrainState) -> None:
        """Compiles the evaluation of states of these shapes, ahead of the first."""
        for split_batches in self._batches.values():
            self._jitted.lower(state, split_batches.shapes(), np.int32(0)).compile()

    def __call__(self, state: state_lib.TrainState) -> dict[str, Any]:
        """Evaluates a state on all examples.

        Returns:
          The metrics by name, as lists if there are several groups.
        """
        results: dict[str, Any] = {}
        for metrics in self.by_batch(state):
            results = metrics or {}
        return results

    def by_batch(self, state: state_lib.TrainState) -> Iterator[dict[str, Any] | None]:
        """Evaluates a state as a call does, so that the caller can act in between.

        Yields:
          None after each batch; and at last the metrics.
        """
        results: dict[str, Any] = {}
        for split, split_batches in self._batches.items():
            totals: dict[str, np.ndarray] = {}
            # As in training, later batches keep the devices busy while the host reads
            # the sums of earlier ones.
            queue: deferred.Queue[dict[str, jax.Array]] = deferred.Queue()
            for number, batch in enumerate(split_batches):
                with spans.Span(spans.STEP):
                    sums = self._step(state, batch, np.int32(number))
                    deferred.to_host(sums.values())
                    for due in queue.push(sums):
                        _add(totals, due)
                yield None
            with spans.Span(spans.STEP):
                for due in queue.flush():
                    _add(totals, due)
            results |= self._metrics(split, totals)
        yield results

    def _metrics(self, split: str, totals: dict[str, np.ndarray]) -> dict[str, Any]:
        """Returns the metrics of a split by their full names.

        Args:
          split: the split's name, which precedes theirs; may be empty.
          totals: the sum of each value over all examples, and their 'count'; of shape
            (groups, ...) if there are several groups.
        """
        count = totals.pop("count")
        has_groups = count.ndim > 0
        if has_groups and config_lib.separates_slices(self._experiment.config):
            # Slices evaluate the same parameters, each with its own state of networks.
            totals = {name: np.mean(x, axis=0) for name, x in totals.items()}
            count = count[0]
            has_groups = False
        sums_by_kind: dict[str, dict[str, np.ndarray]] = {kind: {} for kind in _KINDS}
        for name, total in totals.items():
            kind = _kind(name)
            sums_by_kind[kind][name.removeprefix(kind)] = total
        metrics: dict[str, Any] = {}
        for kind, sums in sums_by_kind.items():
            if not sums:
                continue
            prefix = kind
            if split:
                prefix = f"{split}/{kind}"
            if not has_groups or kind == _ENSEMBLE:
                # An ensemble's sums are equal in all groups, and so are the counts.
                for name, value in self._summary(sums, count.max()).items():
                    metrics[prefix + name] = value
                continue
            for group in range(len(count)):
                group_sums = {name: x[group] for name, x in sums.items()}
                for name, value in self._summary(group_sums, count[group]).items():
                    metrics.setdefault(prefix + name, []).append(value)
        return metrics

    def _summary(self, sums: dict[str, np.ndarray], count: Any) -> dict[str, float]:
        summarize = self._experiment.summarize
        where = validation.describe_method(summarize)
        return methods.summary(where, summarize(sums, float(count)))


def _add(totals: dict[str, np.ndarray], sums: Mapping[str, jax.Array]) -> None:
    """Adds the sums over a batch to those over the batches before."""
    for name, value in sums.items():
        # Summed in float64, since float32 would lose digits over many batches.
        total = totals.get(name, np.float64(0))
        totals[name] = total + np.asarray(value).astype(np.float64)


def _jitted(
    experiment: experiment_lib.Experiment,
    mesh: jax.sharding.Mesh,
    replicas: logical.Replicas | None,
) -> Any:
    """Returns `step.make_eval_step`, jitted."""
    # The sums are replicated, so that each process can read those of all groups.
    replicated = mesh_lib.sharding(mesh)
    if replicas is None:
        return jax.jit(step.make_eval_step(experiment, mesh), out_shardings=replicated)
    mapped = lambda state, *_: step.evaluation_of_replica(
        experiment, replicas.mesh, state
    )
    return logical.Program(
        validation.describe_method(experiment.eval_step),
        mapped,
        replicas,
        out_shardings=replicated,
    )


def _kind(name: str) -> str:
    """Returns the one of `_KINDS` that a value's name begins with."""
    for kind in (_RAW, _ENSEMBLE):
        if name.startswith(kind):
            return kind
    return ""


def predictions(jitted: Any, mesh: jax.sharding.Mesh) -> Callable[..., Any]:
    """Returns a function that predicts from host to host.

    Args:
      jitted: the jitted function of `step.make_predict`, with replicated outputs, so
        that each process has all.
      mesh: the run's mesh.

    Returns:
      A function that takes a state, a batch on the host and, if any, a random key to
      the outputs on the host.
    """
    compiled = host_collectives.compiled_by_all(jitted, "the prediction")

    def predict(
        state: state_lib.TrainState,
        batch: Mapping[str, Any],
        key: jax.Array | None = None,
    ) -> Any:
        args = [state, mesh_lib.put_whole(mesh, batch)]
        if key is not None:
            args.append(jax.device_put(key, mesh_lib.sharding(mesh)))
        with spans.Span(spans.STEP):
            return jax.device_get(compiled(*args))

    return predict
