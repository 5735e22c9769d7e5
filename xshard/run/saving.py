"""The interface between the loop and its checkpoints: what a run saves, and what it
resumes from.
"""

import contextlib
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xshard import checkpoint, errors
from xshard import experiment as experiment_lib
from xshard.base import formatting
from xshard.data import batches as batches_lib
from xshard.files import identity as identity_lib
from xshard.files import provenance as provenance_lib
from xshard.files import workdir
from xshard.learners import lora as lora_lib
from xshard.learners.state import LearnerState
from xshard.metrics import log as log_lib
from xshard.metrics import rows as rows_lib
from xshard.optimizers import moving_average, trees
from xshard.pod import members as members_lib
from xshard.run import adaptations, earlier_states, nonfinite, resuming, states
from xshard.training import state as state_lib


class Checkpoints(states.States):
    """The checkpoints of a run, which it writes and resumes from."""

    def __init__(
        self,
        experiment: experiment_lib.Experiment,
        mesh: jax.sharding.Mesh,
        directory: workdir.Workdir,
        run: resuming.ResumePlan,
        batches: batches_lib.TrainBatches,
        notify: Callable[[str], None],
        provenance: provenance_lib.Provenance,
        members: members_lib.Members,
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
          provenance: the provenance of the run; process 0's is saved.
          members: the members of the run.

        Raises:
          ValueError: if a value of the config is invalid.
        """
        config = experiment.config
        config_values = identity_lib.plain(config)
        self._metadata = {
            "experiment": config.experiment,
            "config": config_values,
            "origin": provenance._asdict(),
        }
        self._batches = batches
        self._tolerates_failure = config.checkpoint.on_failure == "go_on"
        self._must_be_finite = states.must_be_finite(config)
        self._notify = notify
        self._directory = directory
        self._run = run
        self._members = members
        owner = checkpoint.Owner(
            id=run.identity.id,
            fingerprint=run.identity.fingerprint,
            workdir=f"{directory.path} on {socket.gethostname()}",
            config=config_values,
        )
        super().__init__(
            experiment,
            mesh,
            batches.example,
            directory,
            owner,
            self._note_committed,
            members,
        )
        self._metadata[lora_lib.METADATA] = adaptations.of(self.target)

    # The start of a run.

    def check_can_start(self, source: checkpoint.Source | None) -> None:
        """Checks that the run can resume, or that a new run can begin from `source`.

        Raises:
          ValueError: if it cannot.
        """
        # Raises if two arrays share a name. Without this check the first save would be
        # the first to notice.
        checkpoint.flatten(self.target)
        if self._members.is_outside:
            # It restores what the members save for it.
            return
        latest = None
        if not self._run.sets_aside:
            # Process 0 decides whether there is a checkpoint. A process that does not
            # see it, for example because a disk is not mounted, is found when the
            # checkpoints are opened.
            latest = self.manager.on_process_0(self.manager.latest_step)
            self._check_newest(latest)
        if latest is not None:
            self.manager.on_process_0(
                lambda: resuming.check_replicas(
                    self._experiment, self.manager, self.target, latest
                )
            )
        elif source is not None:
            checkpoint.check_init(source, self.target, adaptations.meaning(self.target))
            if re.search(source.select, "step"):
                raise errors.UserError(
                    f"--init_select='{source.select}' takes 'step', too: this run has "
                    "not made the other one's steps, and begins with its own data. "
                    "Leave it out, as --init_select='^(?!step$)' does."
                )

    def step_program(self) -> str | None:
        """Returns the program that makes the steps of the run; None if it begins now.

        The work directory has it, or, if that was lost, each checkpoint.
        """
        if self._run.sets_aside or self._run.step_program is not None:
            return self._run.step_program

        def in_checkpoints() -> str | None:
            for step in reversed(self.manager.all_steps()):
                # The run resumes from an earlier checkpoint than a damaged one.
                with contextlib.suppress(checkpoint.CheckpointError):
                    return identity_lib.step_program(self.manager.metadata(step))
            return None

        return self.manager.on_process_0(in_checkpoints)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Locks the checkpoints for this run, and waits for the last save at the end.

        Raises:
          ValueError: if another run holds the lock, or if the last save failed,
            whatever `checkpoint.on_failure` says.
        """
        if not self._members.is_outside:
            self.manager.acquire()
        try:
            with contextlib.ExitStack() as stack:
                if self._members.exchange is not None:
                    stack.enter_context(
                        self._members.while_leading(self.manager.succeeding)
                    )
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

    def resume_or_init(self, source: checkpoint.Source | None) -> resuming.Point:
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
            return resuming.Point(self._init_state(source))
        if source is not None:
            states.announce(
                f"--init_from={source.place} is for a new run; this run resumes from "
                "its own checkpoint"
            )

        if self._must_be_finite:
            resuming.check_finite(self.manager, latest)
        restored = self.restore_state()
        if self._must_be_finite and restored.step != latest:
            # The newest one is damaged, so the one before it was restored.
            resuming.check_finite(self.manager, restored.step)
        if reached is not None and restored.step < reached:
            states.announce(
                f"goes back from step {reached} to {restored.step}: the later "
                "checkpoints are damaged or deleted"
            )
        self._batches.restore(restored.data)

        point = resuming.Point.restored(restored)
        if earlier_states.lacks_statistics(point.state, self.target):
            state = _begin_copies(point.state, self.target)
            # Its fingerprints are of fewer arrays.
            point = point._replace(state=state, fingerprint=None)
            states.announce(
                f"averages of the network's state begin at step {restored.step}, with "
                "its present values"
            )
        return point

    def _check_newest(self, latest: int | None) -> int | None:
        return self.manager.on_process_0(
            lambda: resuming.check_newest(self.manager, self._directory, latest)
        )

    def _init_state(self, source: checkpoint.Source | None) -> state_lib.TrainState:
        state = self.init_state(self._batches.first_example())
        if source is None:
            return state
        taken = checkpoint.init_from(source, state, meaning=adaptations.meaning(state))
        # Slots that were not taken, too, are copies of the new parameters.
        return _begin_copies(taken, state)

    def record_restored_step(self, begin: resuming.Point) -> None:
        """Records the restored step as the newest that the run has reached.

        Later steps no longer count.
        """
        step = int(begin.state.step)
        if begin.folder:
            self.manager.on_process_0(lambda: self._record_newest(step, begin.folder))

    def check_rows(self, begin: resuming.Point, log: log_lib.Log) -> None:
        """Reports, on process 0, rows that are missing.

        These are rows that were logged before the checkpoint was saved.
        """
        if begin.rows is None or not self._members.leads:
            return
        if log.rows < begin.rows:
            self._notify(
                f"{self._directory.metrics} holds {log.rows} of the {begin.rows} rows "
                "that were logged before this checkpoint; the other metrics files are "
                "rebuilt from these."
            )

    def find_late_evaluation(self, step: int) -> dict[str, Any] | None:
        """Returns the evaluation of a step that was saved without one.

        Returns None unless its row has been written since.
        """
        return self.manager.on_process_0(
            lambda: rows_lib.evaluation(self._directory.metrics, step)
        )

    def add_late_evaluation(
        self, step: int, metrics: Mapping[str, Any], log: log_lib.Log
    ) -> None:
        """Adds the metrics of an evaluation to the checkpoint of its step.

        Args:
          step: the step, which was saved before the evaluation.
          metrics: the metrics of the evaluation.
          log: the log that holds their row; it is synced to the disk before the
            checkpoint records the evaluation.
        """
        with self._tolerated():
            self.manager.add_metrics(step, numbers(metrics), log.sync)

    # The saves of a run.

    def save(
        self,
        step: int,
        point: resuming.Point,
        metrics: Mapping[str, Any],
        log: log_lib.Log,
    ) -> None:
        """Starts to save a point, unless its step has a checkpoint already.

        Returns when the state may be donated.

        Args:
          step: the number of steps made.
          point: the point that the run has reached by these.
          metrics: the metrics of this state's evaluation; empty if there was none.
          log: the run's log; its rows reach the disk before the checkpoint is
            committed.
        """
        with self._tolerated():
            self.manager.save(
                step,
                point.state,
                {**self._metadata, **point.metadata()},
                data=point.data,
                metrics=numbers(metrics),
                # The checkpoint records the number of rows, so they must be on the disk
                # before it is committed.
                before_commit=log.sync,
            )

    def check(self) -> None:
        """Prints or raises the error of the last save if it failed.

        `checkpoint.on_failure` says which.
        """
        self._directory.check_noticed()
        # Called after each step, so it enters no context.
        try:
            self.manager.check()
        except checkpoint.CheckpointError as e:
            self._tolerate(e)

    def wait(self) -> None:
        """Waits for the last save.

        Raises:
          CheckpointError: if it failed, whatever `checkpoint.on_failure` says.
        """
        self.manager.wait()

    def _note_committed(self, committed: checkpoint.Committed) -> None:
        """Records and reports a committed checkpoint.

        It runs on process 0, in the thread that saved.
        """
        # The checkpoint is committed, so an error here must not make the save fail.
        try:
            self._record_newest(committed.step, committed.folder)
        except (errors.UserError, OSError) as e:
            states.announce(f"step {committed.step} is saved, but: {e}")
        size = formatting.scaled(committed.nbytes, "B")
        message = (
            f"step {committed.step}: saved {size} in {committed.seconds:.2g} s, in "
            f"{self.manager.store}"
        )
        if committed.nonfinite:
            message += f"; NOT FINITE: {formatting.listed(committed.nonfinite)}"
        self._notify(message)

    def _record_newest(self, step: int, folder: str) -> None:
        self._directory.record_newest(
            workdir.NewestCheckpoint(step, folder, str(self.manager.store))
        )

    @contextlib.contextmanager
    def _tolerated(self) -> Iterator[None]:
        """Prints or raises the error that made a save fail.

        `checkpoint.on_failure` says which.
        """
        try:
            yield
        except checkpoint.CheckpointError as e:
            self._tolerate(e)

    def _tolerate(self, e: checkpoint.CheckpointError) -> None:
        # The run that has the lock now saves; this one must end.
        must_end = isinstance(e, checkpoint.NonfiniteError | checkpoint.LostError)
        if not self._tolerates_failure or must_end:
            raise e
        states.announce(
            f"NOT SAVED: {e} Training continues, because checkpoint.on_failure=go_on."
        )

    # The end of a run.

    def nonfinite(self, step: int) -> str:
        """Describes what of a saved state is not finite.

        The description is empty if all is that must be. All processes call it.
        """
        paths = self.manager.on_process_0(lambda: self.manager.nonfinite(step))
        if not paths:
            return ""
        return nonfinite.of_state(step, paths)

    def kept(self) -> str:
        """Returns a sentence that names the newest finite checkpoint.

        All processes call it.
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


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns each metric as one number: the mean over groups if there are several."""
    means = {}
    for name, value in metrics.items():
        means[name] = float(np.mean(jax.device_get(value)))
    return means


def _begin_copies(
    state: state_lib.TrainState, like: state_lib.TrainState
) -> state_lib.TrainState:
    """Begins slots that are copies of parameters, such as averages, with these.

    So it does with averages of the networks' state.

    Args:
      state: a state. Slots that it lacks begin so, and those that are the very arrays
        of the other.
      like: a state with all slots, or its shapes.
    """
    others = state_lib.learners(like)

    def begin(name: str, learner: LearnerState) -> LearnerState:
        opt_state = {module: dict(slots) for module, slots in learner.opt_state.items()}

        def copy(module: str, key: str, x: jax.Array) -> None:
            slot = others[name].opt_state.get(module, {}).get(key)
            if slot is None or opt_state[module].get(key, slot) is not slot:
                return
            # A step that donates the state may not get one buffer twice.
            copied = lambda x: jnp.array(x, slot.dtype, copy=True)
            opt_state[module][key] = jax.jit(copied, out_shardings=slot.sharding)(x)

        for path, param in trees.leaves_by_path(learner.params).items():
            for module, prefix in learner.meta.slots_from_params:
                copy(module, trees.join(prefix, path), param)
        if learner.meta.statistics_module is not None:
            for path, x in trees.leaves_by_path(learner.net_state).items():
                key = moving_average.statistics_name(path)
                copy(learner.meta.statistics_module, key, x)
        return learner.replace(opt_state=opt_state)

    return state_lib.map_learners(begin, state)
