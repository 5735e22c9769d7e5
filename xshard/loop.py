"""The training loop: resume, train, evaluate, stop.

A run that was stopped at any instant and started again ends in the same bits as one that was not:
everything that decides the next step is in the checkpointed `TrainState`, or a function of it.
"""

import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jmp
import ml_collections
import numpy as np

from xshard import checkpoint, data, hooks, metrics, saving, step, workdir
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib

DONE, PREEMPTED = 0, 42
_COUNTS = (
    "steps",
    "batch_size",
    "eval_batch_size",
    "micro_batches",
    "model_parallel",
    "log_every_steps",
    "eval_every_steps",
    "checkpoint.every_steps",
)
_OTHER_KEYS = (
    "experiment",
    "seed",
    "precision",
    "group_assignment",
    *(f"checkpoint.{key}" for key in saving.CHECKPOINT_KEYS),
)


class Run:
    """An experiment in a work directory, checked as far as that can be done without touching it."""

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        directory: str,
        init: checkpoint.Source | None = None,
    ):
        """Checks a config and what is in the directory.

        Args:
          config: a run's config; see `configs/digits.py` for the keys.
          directory: the work directory, which need not exist.
          init: what a new run begins with.

        Raises:
          ValueError: with the key, its value and the mend, if something does not fit.
        """
        _check_config(config)
        self.config = config
        self.mesh = mesh_lib.make_mesh(config.group_assignment or None, model=config.model_parallel)
        self.experiment = experiment_lib.load(config.experiment)(config)
        train_data = self.experiment.train_data()
        self.batches = data.TrainBatches(
            train_data,
            self.mesh,
            batch_size=config.batch_size,
            seed=config.seed,
            micro_batches=config.micro_batches,
        )
        self._eval_data = self.experiment.eval_data()
        data.eval_batches(self._eval_data, self.mesh, config.eval_batch_size)
        self.workdir = workdir.Workdir(directory)
        self.changes = self.workdir.check(config)
        self._init_args = (self.experiment, self.mesh, config.seed, train_data)
        self._target = step.abstract_state(*self._init_args)
        self._init = init
        self.checkpoints = saving.Checkpoints(config, str(self.workdir.checkpoints), self.batches)
        self.checkpoints.check_init(self._target, init)
        self._train_step = jax.jit(
            step.make_train_step(self.experiment, self.mesh), donate_argnums=0
        )
        self._eval_step = jax.jit(step.make_eval_step(self.experiment, self.mesh))
        self._evaluated: tuple[int, dict[str, Any]] = (-1, {})
        self._check_best_metric()

    def train(self) -> tuple[step.TrainState, bool]:
        """Trains from where the run stands to its last step, or until it is told to stop.

        Returns:
          The state, and whether the run is done.
        """
        # 1. The state decides the step, and with it the batches and keys that follow.
        state = self._resume_or_init()
        start = int(state.step)
        self._say_start(start, state)
        # 2. Rows after the checkpoint are dropped: their steps will be made again.
        log = _Log(metrics.JsonLines(self.workdir.metrics, start), start, self.config)
        actions = self._hooks(log)
        with _StopSignals() as stop:
            for number in range(start, self.config.steps):
                state, values = self._train_step(state, self.batches(number))
                made = number + 1
                log.push(made, values)
                for hook in actions:
                    hook(made, state)
                self.checkpoints.check()
                if stop.requested and made < self.config.steps:
                    log.flush()
                    self._save(made, state)
                    return state, False
        log.flush()
        return state, True

    def evaluate(self, state: step.TrainState) -> dict[str, Any]:
        """The means over all evaluation examples; lists where there are several groups."""
        made = int(state.step)
        if self._evaluated[0] != made:
            self._evaluated = made, self._evaluate(state)
        return self._evaluated[1]

    def _evaluate(self, state: step.TrainState) -> dict[str, Any]:
        totals: dict[str, np.ndarray] = {}
        for batch in data.eval_batches(self._eval_data, self.mesh, self.config.eval_batch_size):
            for name, value in jax.device_get(self._eval_step(state, batch)).items():
                totals[name] = totals.get(name, np.float64(0)) + value.astype(np.float64)
        count = totals.pop("count").max()
        return {name: metrics.to_number(value / count) for name, value in totals.items()}

    def finish(self, state: step.TrainState) -> dict[str, Any]:
        """Evaluates the last state and writes the results."""
        results = {"step": int(state.step), "global_step": metrics.to_number(state.global_step)}
        results |= {"eval": self.evaluate(state)}
        metrics.write_atomically(self.workdir.results, workdir.to_json(results))
        return results

    def _resume_or_init(self) -> step.TrainState:
        return self.checkpoints.resume_or_init(
            self._target, lambda: step.init(*self._init_args), self._init
        )

    def _hooks(self, log: "_Log") -> Sequence[hooks.Hook]:
        def evaluate(made: int, state: step.TrainState) -> None:
            log.flush()
            log.write_evaluation(made, self.evaluate(state))

        def save(made: int, state: step.TrainState) -> None:
            # What has been logged when a checkpoint counts is what resuming keeps.
            log.flush()
            self._save(made, state)

        config, last = self.config, self.config.steps
        # The best is chosen among what has been evaluated, the last step included.
        best = config.checkpoint.keep_best > 0
        actions: list[hooks.Hook] = [
            hooks.EverySteps(evaluate, config.eval_every_steps, last=last, at_last=best),
            hooks.EverySteps(save, config.checkpoint.every_steps, last=last, at_last=True),
        ]
        if best:
            actions.append(
                hooks.EverySteps(save, config.eval_every_steps, last=last, at_last=False)
            )
        if config.checkpoint.every_minutes:
            actions.append(hooks.EverySeconds(save, 60 * config.checkpoint.every_minutes))
        return actions

    def _save(self, made: int, state: step.TrainState) -> None:
        evaluated, values = self._evaluated
        self.checkpoints.save(made, state, values if evaluated == made else {})

    def _check_best_metric(self) -> None:
        options = self.config.checkpoint
        if not options.keep_best:
            return
        batch = next(data.eval_batches(self._eval_data, self.mesh, self.config.eval_batch_size))
        names = jax.eval_shape(self._eval_step, self._target, batch).keys() - {"count"}
        if options.best_metric not in names:
            raise ValueError(
                f"checkpoint.best_metric={options.best_metric!r} must be a metric of the evaluation: "
                f"{', '.join(sorted(names))}."
            )

    def _say_start(self, start: int, state: step.TrainState) -> None:
        params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        shape = self.mesh.shape
        print(
            f"{self.config.experiment}: {params:,} parameters, {self.config.precision}, on "
            f"{shape['group']} group(s) x {shape['replica']} replica(s) x {shape['model']} device(s)"
        )
        for change in self.changes:
            print(f"changed since the run was started: {change}")
        if start:
            print(
                f"resumed from the checkpoint of step {start} in {self.checkpoints.manager.store}"
            )
        plan = f"training from step {start} to {self.config.steps}; the first step compiles"
        done = f"all {self.config.steps} steps have been made"
        if start > self.config.steps:
            done = f"nothing to train: steps={self.config.steps}, and {start} have been made"
        print(plan if start < self.config.steps else done, flush=True)


class _Log:
    """Training metrics and evaluations, to the file and to the terminal."""

    def __init__(self, rows: metrics.JsonLines, start: int, config: ml_collections.ConfigDict):
        self._rows = rows
        self._every = config.log_every_steps
        self._last = config.steps
        self._first = start + 1
        self._terminal = metrics.Terminal(config.steps)
        self._deferred = metrics.Deferred()

    def push(self, made: int, values: Mapping[str, jax.Array]) -> None:
        if made == self._first:
            # The first call has compiled, which says nothing of the steps to come.
            self._terminal.start(made - 1)
        keep = made % self._every == 0 or made == self._last
        self._write(self._deferred.push(made, values, keep))

    def flush(self) -> None:
        self._write(self._deferred.flush())

    def write_evaluation(self, made: int, values: Mapping[str, Any]) -> None:
        self._rows.write(
            {"step": made, **{f"eval/{name}": value for name, value in values.items()}}
        )
        numbers = "  ".join(f"{name} {metrics.show(value)}" for name, value in values.items())
        print(f"step {made}  evaluation: {numbers}", flush=True)

    def _write(self, rows: Iterable[metrics.Row]) -> None:
        for row in rows:
            # A total, since a skip between two rows would not show.
            steps, applied = row["step"], np.asarray(row.pop("global_step"))
            row |= {"global_step": applied.tolist(), "skipped": (steps - applied).tolist()}
            self._rows.write(row)
            self._terminal.write(row)


class _StopSignals:
    """Turns the first SIGINT or SIGTERM into a request to stop; the next one acts as it would have."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "_StopSignals":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: Any) -> None:
        del frame
        self.requested = True
        signal.signal(number, self._previous[number])
        name = signal.Signals(number).name
        # Not by print: the signal may come in the middle of one, which cannot be entered twice.
        os.write(2, f"\n{name}: saving after this step; once more leaves at once.\n".encode())


def run(
    config: ml_collections.ConfigDict,
    directory: str,
    command: str,
    init: checkpoint.Source | None = None,
) -> int:
    """Runs an experiment from wherever it stands to its end, or until it is told to stop.

    Args:
      config: a run's config, locked.
      directory: the work directory.
      command: what the user can run to go on, to be printed.
      init: what a new run begins with of another's checkpoint.

    Returns:
      The process's exit code: 0 done; 42 stopped on request with the state saved.
    """
    current = Run(config, directory, init)
    saved = current.checkpoints.manager.store
    with current.workdir.opened(config), current.checkpoints.opened():
        state, done = current.train()
        # While the last checkpoint is written.
        results = current.finish(state) if done else {}
    where = current.workdir
    if not done:
        print(f"stopped at step {int(state.step)}, state saved in {saved}")
        print(f"to go on: {command}")
        return PREEMPTED
    print("\nresults:")
    for name, value in results["eval"].items():
        print(f"  {name:<20} {metrics.show(value)}")
    print(f"  in {where.results}; metrics of the run in {where.metrics}")
    print(f"checkpoints: {saved}")
    print(f"to train on: {command} --config.steps={2 * max(config.steps, results['step'])}")
    return DONE


def _check_config(config: ml_collections.ConfigDict) -> None:
    """Raises ValueError unless the config has the keys of a run, with numbers that make sense."""
    values = workdir.flatten(workdir.plain(config))
    missing = [key for key in (*_COUNTS, *_OTHER_KEYS) if key not in values]
    if missing:
        raise ValueError(
            f"The config lacks {', '.join(missing)}; configs/digits.py shows every key."
        )
    for key in _COUNTS:
        value = values[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{key}={value!r} must be an integer of at least 1.")
    if not isinstance(config.seed, int) or not 0 <= config.seed < 2**32:
        raise ValueError(f"seed={config.seed!r} must be an integer from 0 to 2**32 - 1.")
    try:
        jmp.get_policy(config.precision)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(
            f"precision={config.precision!r} is no policy of jmp ({e}); an example: "
            "'params=float32,compute=float16,output=float32'."
        ) from e
