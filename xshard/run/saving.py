"""The interface between the loop and its checkpoints: what a run saves, and what it
resumes from.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xshard import checkpoint, errors
from xshard import experiment as experiment_lib
from xshard import state as state_lib
from xshard.data import batches as batches_lib
from xshard.files import identity as identity_lib
from xshard.files import provenance, workdir
from xshard.learners.state import LearnerState
from xshard.metrics import formatting, rows
from xshard.metrics import log as log_lib
from xshard.optimizers import moving_average, trees
from xshard.run import nonfinite, resuming, states

# The key of a checkpoint's metadata for the number of rows that the run had logged when
# it saved.
_ROWS = "rows"


class Checkpoints:
    """The checkpoints of a run, written and kept as its config says."""

    def __init__(
        self,
        experiment: experiment_lib.Experiment,
        mesh: jax.sharding.Mesh,
        directory: workdir.Workdir,
        run: resuming.ResumePlan,
        batches: batches_lib.TrainBatches,
        notify: Callable[[str], None],
        origin: provenance.Provenance,
    ):
        """Opens the checkpoints; writes nothing.

        Args:
          experiment: the run's experiment.
          mesh: the run's mesh.
          directory: the run's work directory, in which process 0 records the newest
            saved step.
          run: the run that writes them.
          batches: the training batches; each checkpoint holds their position.
          notify: called with a line about each committed checkpoint, from another
            thread.
          origin: the origin of the run; process 0's is saved.

        Raises:
          ValueError: if a value of the config is invalid.
        """
        config = experiment.config
        plain = identity_lib.plain(config)
        self._metadata = {
            "experiment": config.experiment,
            "config": plain,
            "origin": origin._asdict(),
        }
        self._batches = batches
        self._tolerates_failure = config.checkpoint.on_failure == "go_on"
        self._must_be_finite = states.must_be_finite(config)
        self._notify = notify
        self._directory = directory
        self._run = run
        host = f"{directory.path} on {socket.gethostname()}"
        owner = checkpoint.Owner(*run.identity, host, plain)
        self.states = states.States(
            experiment, mesh, batches.example, directory, owner, self._note_saved
        )
        self.manager = self.states.manager

    def check_can_start(self, source: checkpoint.Source | None) -> None:
        """Checks that the run can resume, or that a new run can begin from `source`.

        Raises:
          ValueError: if it cannot.
        """
        target = self.states.target
        # Raises if two arrays share a name. Without this check the first save would be
        # the first to notice.
        checkpoint.flatten(target)
        latest = None
        if not self._run.sets_aside:
            latest = self.manager.latest_step()
            self._check_newest(latest)
        if latest is not None:
            self.manager.on_process_0(
                lambda: resuming.check_replicas(self.manager, target, latest)
            )
        if source is not None and latest is None:
            checkpoint.check_init(source, target)

    def resume_or_init(self, source: checkpoint.Source | None) -> resuming.StartState:
        """Restores the newest checkpoint, or creates a new state if there is none yet.

        Args:
          source: the checkpoint that a new run takes arrays from; None for a run that
            initializes all of its state.

        Raises:
          ValueError: if the checkpoint does not fit the run, or if the newest one that
            the run saved is missing.
        """
        latest = self.manager.agreed_latest_step()
        reached = self._check_newest(latest)
        if latest is None:
            state = self.states.init()
            return resuming.StartState(
                state if source is None else self._init_from(source, state)
            )
        if source is not None:
            states.say(
                f"--init_from={source.place} is for a new run; this run resumes from its own checkpoint"
            )
        if self._must_be_finite:
            resuming.check_finite(self.manager, latest)
        restored = self.states.restore()
        if self._must_be_finite and restored.step != latest:
            resuming.check_finite(self.manager, restored.step)
        if reached is not None and restored.step < reached:
            states.say(
                f"goes back from step {reached} to {restored.step}: the later checkpoints are damaged or deleted"
            )
        self._batches.restore(restored.data)
        evaluated = restored.metadata.get("evaluated", True)
        if not evaluated:
            # A run that resumed from this checkpoint may have made the evaluation
            # since.
            evaluated = bool(
                self.manager.on_process_0(lambda: self.manager.metrics(restored.step))
            )
        # If the state lacks arrays of the checkpoint, the saved fingerprints cannot be
        # compared with it.
        fingerprints = (
            restored.metadata.get("fingerprint") if restored.is_whole else None
        )
        return resuming.StartState(
            restored.state,
            evaluated,
            restored.metadata.get(_ROWS),
            restored.folder,
            restored.metadata.get("watched"),
            fingerprints,
        )

    def _check_newest(self, latest: int | None) -> int | None:
        return self.manager.on_process_0(
            lambda: resuming.check_newest(self.manager, self._directory, latest)
        )

    def record_restored_step(self, begin: resuming.StartState) -> None:
        """Records the restored step as the newest that the run has reached; later steps
        no longer count.
        """
        step = int(begin.state.step)
        if begin.folder:
            self.manager.on_process_0(lambda: self._record_newest(step, begin.folder))

    def check_rows(self, begin: resuming.StartState, log: log_lib.Log) -> None:
        """Reports, on process 0, if rows that were logged before the checkpoint was
        saved are missing.
        """
        if begin.rows is None or jax.process_index() != 0:
            return
        if log.rows < begin.rows:
            self._notify(
                f"{self._directory.metrics} holds {log.rows} of the {begin.rows} rows that were logged before this "
                "checkpoint; the other metrics files are rebuilt from these."
            )

    def find_late_evaluation(self, step: int) -> dict[str, Any] | None:
        """Returns the evaluation of a step that was saved without one, if its row has
        been written since, else None.
        """
        return self.manager.on_process_0(
            lambda: rows.evaluation(self._directory.metrics, step)
        )

    def wait(self) -> None:
        """Waits for the last save; raises CheckpointError if it failed, whatever
        `checkpoint.on_failure` says.
        """
        self.manager.wait()

    def nonfinite(self, step: int) -> str:
        """Describes what of a saved state is not finite; empty if all is that must be.
        All processes call it.
        """
        bad = self.manager.on_process_0(lambda: self.manager.nonfinite(step))
        return nonfinite.of_state(step, bad) if bad else ""

    def kept(self) -> str:
        """Returns a sentence that names the newest finite checkpoint. All processes
        call it.
        """
        # The run is already failing for another reason, so a failed save must not hide
        # that reason.
        with contextlib.suppress(checkpoint.CheckpointError):
            self.manager.wait()
        newest = self.manager.on_process_0(self.manager.newest_finite_step)
        if newest is None:
            return f"There is no finite checkpoint in {self.manager.store}."
        return (
            f"The newest finite checkpoint is step {newest}, in {self.manager.store}."
        )

    def _init_from(
        self, source: checkpoint.Source, state: state_lib.TrainState
    ) -> state_lib.TrainState:
        old = state_lib.learners(state)
        taken = checkpoint.init_from(source, state)
        return state_lib.map_learners(
            lambda name, x: _begin_averages(x, old[name]), taken
        )

    def add_late_evaluation(
        self, step: int, metrics: Mapping[str, Any], log: log_lib.Log
    ) -> None:
        """Adds the metrics of an evaluation to the checkpoint of its step, which was
        saved before.

        Args:
          step: the step.
          metrics: the metrics of the evaluation.
          log: the log that holds their row; it is synced to the disk before the
            checkpoint records the evaluation.
        """
        with self._tolerated():
            self.manager.add_metrics(step, _numbers(metrics), log.sync)

    def save(
        self,
        step: int,
        state: state_lib.TrainState,
        metrics: Mapping[str, Any],
        noted: Mapping[str, Any],
        log: log_lib.Log,
    ) -> None:
        """Starts to save a step, unless it has a checkpoint already; returns when the
        state may be donated.

        Args:
          step: the number of steps made.
          state: the state after the last of these steps.
          metrics: the metrics of this state's evaluation; empty if there was none.
          noted: metadata as JSON values: 'evaluated', whether the evaluation that is
            due at this step has been made; 'watched', the state of the watch over the
            steps; and 'fingerprint', the fingerprints of the state.
          log: the run's log; its rows reach the disk before the checkpoint is
            committed.
        """
        with self._tolerated():
            self.manager.save(
                step,
                state,
                {**self._metadata, **noted, _ROWS: log.rows},
                data=self._batches.position(step),
                metrics=_numbers(metrics),
                # The checkpoint records the number of rows, so they must be on the disk
                # before it is committed.
                before_commit=log.sync,
            )

    def check(self) -> None:
        """Prints or raises, as `checkpoint.on_failure` says, the error of the last save
        if it failed.
        """
        # Called after each step, so it enters no context.
        try:
            self.manager.check()
        except checkpoint.CheckpointError as e:
            self._tolerate(e)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Locks the checkpoints for this process's run, and waits for the last save at
        the end.

        Raises:
          ValueError: if another run holds the lock, or if the last save failed,
            whatever `checkpoint.on_failure` says.
        """
        self.manager.acquire()
        try:
            yield
        except KeyboardInterrupt:
            # A user who interrupts a second time does not want to wait for the save.
            raise
        except BaseException:
            # The save is worth waiting for. If it fails too, the user still sees the
            # error that made the run fail.
            with contextlib.suppress(checkpoint.CheckpointError):
                self.manager.close()
            raise
        self.manager.clean()
        self.manager.close()

    def _note_saved(self, saved: checkpoint.Committed) -> None:
        """Records and reports a committed checkpoint, on process 0, in the thread that
        saved it.
        """
        # The checkpoint is committed, so an error here must not make the save fail.
        try:
            self._record_newest(saved.step, saved.folder)
        except (errors.UserError, OSError) as e:
            states.say(f"step {saved.step} is saved, but: {e}")
        size = formatting.scaled(saved.nbytes, "B")
        message = f"step {saved.step}: saved {size} in {saved.seconds:.2g} s, in {self.manager.store}"
        if saved.nonfinite:
            message += f"; NOT FINITE: {formatting.listed(saved.nonfinite)}"
        self._notify(message)

    def _record_newest(self, step: int, folder: str) -> None:
        self._directory.record_newest(
            workdir.NewestCheckpoint(step, folder, str(self.manager.store))
        )

    @contextlib.contextmanager
    def _tolerated(self) -> Iterator[None]:
        """Prints or raises the error that made a save fail, as `checkpoint.on_failure`
        says.
        """
        try:
            yield
        except checkpoint.CheckpointError as e:
            self._tolerate(e)

    def _tolerate(self, e: checkpoint.CheckpointError) -> None:
        if not self._tolerates_failure or isinstance(e, checkpoint.NonfiniteError):
            raise e
        states.say(
            f"NOT SAVED: {e} Training continues, because checkpoint.on_failure=go_on."
        )


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: number(value) for name, value in metrics.items()}


def number(value: Any) -> float:
    """Returns a metric as one number: the mean over groups if there are several."""
    return float(np.mean(jax.device_get(value)))


def _begin_averages(state: LearnerState, before: LearnerState) -> LearnerState:
    """Restarts averages of parameters at the parameters' values, after parameters were
    taken from elsewhere.

    Args:
      state: the state of a learner.
      before: the state before some of its arrays were replaced. Averages that were
        replaced, too, are kept.
    """
    name = state.rules.averages_module
    if name is None:
        return state
    slots, old = dict(state.opt_state[name]), before.opt_state[name]
    for path, param in trees.leaves_by_path(state.params).items():
        key = f"{moving_average.SLOT}/{path}"
        if key in slots and slots[key] is old[key]:
            # The average is a copy, because a step that donates the state may not get
            # one buffer twice.
            copy = lambda x, dtype=old[key].dtype: jnp.array(x, dtype, copy=True)
            slots[key] = jax.jit(copy, out_shardings=old[key].sharding)(param)
    return state.replace(opt_state={**state.opt_state, name: slots})
