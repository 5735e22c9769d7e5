"""The seam between the loop and its checkpoints: what a run saves and goes on from."""

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from xshard import checkpoint, errors
from xshard import experiment as experiment_lib
from xshard import state as state_lib
from xshard.data import batches as batches_lib
from xshard.files import identity as identity_lib
from xshard.files import workdir
from xshard.metrics import log as log_lib
from xshard.metrics import show, writers
from xshard.run import nonfinite, resuming, states

# In a checkpoint's metadata: how many rows the run had logged until then.
_ROWS = "rows"


class Checkpoints:
    """The checkpoints of a run, as its config says."""

    def __init__(
        self,
        experiment: experiment_lib.Experiment,
        mesh: jax.sharding.Mesh,
        directory: workdir.Workdir,
        run: resuming.Run,
        batches: batches_lib.TrainBatches,
        notify: Callable[[str], None],
        origin: workdir.Origin,
    ):
        """Opens them; nothing is written.

        Args:
          experiment: the run's experiment.
          mesh: the run's mesh.
          directory: the run's, in which it is noted how far it has come; process 0's counts.
          run: which run it is.
          batches: whose position is saved.
          notify: takes a line on each checkpoint that counts, from another thread.
          origin: of the run; process 0's counts.

        Raises:
          ValueError: if a value of the config does not make sense.
        """
        config = experiment.config
        plain = identity_lib.plain(config)
        self._metadata = {
            "experiment": config.experiment,
            "config": plain,
            "origin": origin._asdict(),
        }
        self._batches = batches
        self._go_on = config.checkpoint.on_failure == "go_on"
        self._must_be_finite = states.must_be_finite(config)
        self._last: int | None = None
        self._notify = notify
        self._directory = directory
        self._run = run
        host = f"{directory.path} on {socket.gethostname()}"
        owner = checkpoint.Owner(*run.identity, host, plain)
        self.states = states.States(
            experiment, mesh, batches.example, directory, owner, self._note_saved
        )
        self.manager = self.states.manager

    def check_begin(self, source: checkpoint.Source | None) -> None:
        """Sees whether the run can go on, or a new one begin with what `source` says.

        Raises:
          ValueError: if it cannot.
        """
        target = self.states.target
        # Or two arrays of one name were found when the first checkpoint is written.
        checkpoint.flatten(target)
        latest = None
        if not self._run.sets_aside:
            latest = self.manager.latest_step()
            self.manager.agree(lambda: self._check_reached(latest))
        if latest is not None:
            self.manager.agree(lambda: resuming.check_replicas(self.manager, target, latest))
        if source is not None and latest is None:
            checkpoint.check_init(source, target)

    def resume_or_init(self, source: checkpoint.Source | None) -> resuming.Begin:
        """The newest checkpoint's state; a new one if the run has come to none yet.

        Args:
          source: what a new run begins with, if not with a new state alone.

        Raises:
          ValueError: if what is there does not fit, or if a checkpoint that the run has come to is not there.
        """
        # A step of before a roll-back is saved again.
        self._last = None
        latest = self.manager.agreed_latest_step()
        reached = self.manager.agree(lambda: self._check_reached(latest))
        if latest is None:
            state = self.states.init()
            return resuming.Begin(state if source is None else self._init_from(source, state))
        if source is not None:
            states.say(
                f"--init_from={source.place} is for a new run; this one goes on from its own"
            )
        if self._must_be_finite:
            resuming.check_finite(self.manager, latest)
        restored = self.states.restore()
        if self._must_be_finite and restored.step != latest:
            resuming.check_finite(self.manager, restored.step)
        if reached is not None and restored.step < reached:
            states.say(
                f"goes back from step {reached} to {restored.step}: later ones are damaged, or deleted"
            )
        self._batches.restore(restored.data)
        evaluated = restored.metadata.get("evaluated", True)
        if not evaluated:
            # The evaluation may have been made since, by a run that went on from here.
            evaluated = bool(self.manager.agree(lambda: self.manager.metrics(restored.step)))
        names = (_ROWS, "watched", "fingerprint")
        rows, watched, fingerprints = (restored.metadata.get(name) for name in names)
        if not restored.is_whole:
            fingerprints = None
        return resuming.Begin(
            restored.state, evaluated, rows, restored.folder, watched, fingerprints
        )

    def _check_reached(self, latest: int | None) -> int | None:
        return resuming.check_reached(self.manager, self._directory, self._run, latest)

    def go_on_from(self, begin: resuming.Begin) -> None:
        """Notes that the run goes on from here, which what has been reached beyond it does not survive."""
        step = int(begin.state.step)
        if begin.folder:
            self.manager.agree(lambda: self._note_reached(step, begin.folder))

    def check_rows(self, begin: resuming.Begin, log: log_lib.Log) -> None:
        """Says, on process 0, how many of the rows that the checkpoint was saved with are not there."""
        if begin.rows is None or jax.process_index() != 0:
            return
        if log.rows < begin.rows:
            self._notify(
                f"{self._directory.metrics} holds {log.rows} of the {begin.rows} rows that were logged until then; "
                "the other files are made of what is there."
            )

    def late_evaluation(self, step: int) -> dict[str, Any] | None:
        """The evaluation of a step that was saved without it, if its row has been written since."""
        return self.manager.agree(lambda: writers.evaluation(self._directory.metrics, step))

    def wait(self) -> None:
        """Waits for the last save; CheckpointError if it has failed, whatever the config says."""
        self.manager.wait()

    def nonfinite(self, step: int) -> str:
        """Says which parameters of a saved step are not finite, if any, on all processes alike."""
        bad = self.manager.agree(lambda: self.manager.nonfinite(step))
        return nonfinite.of_state(step, bad) if bad else ""

    def kept(self) -> str:
        """The newest checkpoint of finite parameters, for people; on all processes alike."""
        # One failure is being told already.
        with contextlib.suppress(checkpoint.CheckpointError):
            self.manager.wait()
        newest = self.manager.agree(self.manager.newest_finite_step)
        if newest is None:
            return f"There is no checkpoint of finite parameters in {self.manager.store}."
        return (
            f"The newest checkpoint of finite parameters is step {newest}, in {self.manager.store}."
        )

    def _init_from(
        self, source: checkpoint.Source, state: state_lib.TrainState
    ) -> state_lib.TrainState:
        # What is taken has a checkpoint's shapes.
        storage = self.states.storage
        whole = storage.to_whole(state)
        taken = checkpoint.init_from(source, whole)
        return storage.from_whole(storage.begin_averages(taken, whole))

    def evaluated_late(self, step: int, metrics: Mapping[str, Any], log: log_lib.Log) -> None:
        """Takes the metrics of an evaluation that came after its step was saved.

        Args:
          step: the step.
          metrics: those of the evaluation.
          log: what has its row, which is on the disk before the checkpoint says that it was made.
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
        """Begins to save, unless it has; returns when the state may be donated.

        Args:
          step: the number of steps made.
          state: the state after them.
          metrics: those of the evaluation of this state, if there was one.
          noted: 'evaluated', whether the evaluation that is due at this step has been made, if there is one; and
            'watched', what the watch over the steps knows, as JSON can hold it; and 'fingerprint', of the state.
          log: the rows until now, which are on the disk before the checkpoint counts.
        """
        if step == self._last:
            return
        self._last = step
        with self._tolerated():
            self.manager.save(
                step,
                self.states.storage.to_whole(state),
                {**self._metadata, **noted, _ROWS: log.rows},
                data=self._batches.position(step),
                metrics=_numbers(metrics),
                # What has been logged until then is on the disk before the checkpoint says that it is.
                before_commit=log.sync,
            )

    def check(self) -> None:
        """Says, or raises as the config has it, that the last save has failed."""
        with self._tolerated():
            self.manager.check()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Makes them this run's and nobody else's meanwhile, and waits for the last save at the end.

        Raises:
          ValueError: if another run has them, or if the last save has failed, whatever the config says.
        """
        self.manager.acquire()
        try:
            yield
        except KeyboardInterrupt:
            # Who asks twice does not want to wait.
            raise
        except BaseException:
            # What is being saved is worth waiting for; what made the run fail is what the user wants to see.
            with contextlib.suppress(checkpoint.CheckpointError):
                self.manager.close()
            raise
        self.manager.clean()
        self.manager.close()

    def _note_saved(self, saved: checkpoint.Committed) -> None:
        """Notes and says that a checkpoint counts, on process 0, in the thread that has saved it."""
        # It counts, whatever comes now.
        try:
            self._note_reached(saved.step, saved.folder)
        except (errors.UserError, OSError) as e:
            states.say(f"step {saved.step} is saved, but: {e}")
        size = show.scaled(saved.nbytes, "B")
        message = (
            f"step {saved.step}: saved {size} in {saved.seconds:.2g} s, in {self.manager.store}"
        )
        if saved.nonfinite:
            message += f"; NOT FINITE: {show.listed(saved.nonfinite)}"
        self._notify(message)

    def _note_reached(self, step: int, folder: str) -> None:
        self._directory.note_reached(workdir.Reached(step, folder, str(self.manager.store)))

    @contextlib.contextmanager
    def _tolerated(self) -> Iterator[None]:
        """Says, or raises as the config has it, what has made a save fail."""
        try:
            yield
        except checkpoint.CheckpointError as e:
            if not self._go_on or isinstance(e, checkpoint.NonfiniteError):
                raise
            self._last = None
            states.say(f"NOT SAVED: {e} Training goes on, as checkpoint.on_failure=go_on says.")


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: number(value) for name, value in metrics.items()}


def number(value: Any) -> float:
    """One number for a metric; of several groups their mean."""
    return float(np.mean(jax.device_get(value)))
