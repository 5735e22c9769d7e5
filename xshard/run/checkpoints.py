"""The checkpoints of a run: which ones are kept, what they hold, and how a run resumes
from them.
"""

import contextlib
import dataclasses
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from xshard import checkpoint, errors
from xshard import config as config_lib
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
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
from xshard.run import adaptations, earlier_states, nonfinite, resuming, slices
from xshard.training import replica_state
from xshard.training import state as state_lib


class States:
    """The states of a run in its checkpoints, kept as the run's config says.

    All processes make the same calls.

    Attributes:
      manager: the checkpoints, as any program sees them.
      target: the shapes, types and shardings of a state in a checkpoint.
    """

    def __init__(
        self,
        experiment: experiment_lib.Experiment,
        mesh: jax.sharding.Mesh,
        example: Any,
        directory: workdir.Workdir,
        owner: checkpoint.Owner | None = None,
        committed: Callable[[checkpoint.Committed], None] = lambda committed: None,
        members: members_lib.Members | None = None,
    ):
        """Opens the checkpoints; writes nothing.

        Args:
          experiment: the experiment, with the run's config.
          mesh: the mesh on which states are placed.
          example: one row of a batch; only its shapes and types matter.
          directory: the run's work directory.
          owner: the run that writes the checkpoints; None for a reader.
          committed: called on process 0, from another thread, when a checkpoint is
            committed.
          members: the members of the run; by default the processes that JAX has joined.

        Raises:
          ValueError: if a value of the config is invalid.
        """
        config = experiment.config
        options = config.checkpoint
        rules = keep(options)
        if config.on_nonfinite == config_lib.ROLL_BACK:
            # A roll-back needs the newest scheduled checkpoint, which extra saves must
            # not push out.
            rules = dataclasses.replace(rules, newest_of=options.every_steps)
        # Whether the run refuses checkpoints of a state that is not finite.
        self._must_be_finite = config.on_nonfinite != config_lib.WARN
        target = state_lib.abstract_state(experiment, mesh, config.seed, example)
        self.manager = checkpoint.Manager(
            options.directory or directory.checkpoints,
            rules,
            budget_bytes=int(options.budget_gb * 1e9),
            finite=_finite_patterns(target, mesh),
            refuse_nonfinite=self._must_be_finite,
            owner=owner,
            log=announce,
            committed=committed,
            members=members,
        )
        self.target = target
        self._experiment = experiment
        self._mesh = mesh
        self._seed = config.seed
        # The number of slices of the checkpoint that was read last.
        self._slices_read = 0
        self._has_said_adaptation = False

    def init_state(self, example: Any) -> state_lib.TrainState:
        """Creates a new state.

        Args:
          example: one row of a batch, equal on all processes.
        """
        return state_lib.init(self._experiment, self._mesh, self._seed, example)

    def check_replicas(self, step: int) -> None:
        """Checks that per-replica state of a checkpoint is of as many replicas as there
        are.

        It reads for itself: only process 0 needs to call it.

        Args:
          step: the step of the checkpoint.

        Raises:
          UserError: if it is of another number of replicas.
        """
        try:
            stored = self.manager.shapes(step)
        except checkpoint.CheckpointError:
            # The restore reports a damaged checkpoint, and takes an older one.
            return
        if slices.differ(self._experiment, self.target, stored):
            slices.check(self.target)
            return
        replica_state.check_count(self.target, self._mesh, stored)

    def restore_state(
        self, step: int | None = None, *, fits: bool = False
    ) -> checkpoint.Restored:
        """Reads a checkpoint.

        Args:
          step: the step to restore; the newest by default.
          fits: whether per-replica state may have the checkpoint's number of replicas
            instead of the mesh's.

        Returns:
          The checkpoint. Its state has no averages of networks' state if an earlier
          version saved it, which kept none.

        Raises:
          CheckpointError: as `Manager.restore` does.
          UserError: if the experiment now adapts the network in another way.
        """

        def target(stored: replica_state.Shapes) -> state_lib.TrainState:
            shapes = self.target
            if fits:
                shapes = replica_state.fit(shapes, self._mesh, stored)
            return earlier_states.without_unsaved(shapes, stored)

        are_slices = config_lib.separates_slices(self._experiment.config)
        restored = self.manager.restore(target, step, any_groups=are_slices)
        where = f"the checkpoint of step {restored.step} in {self.manager.store}"
        note = adaptations.check(restored.metadata, self.target, where)
        if note and not self._has_said_adaptation:
            # A reader of many checkpoints says it once.
            self._has_said_adaptation = True
            announce(note)
        if earlier_states.lacks_statistics(restored.state, self.target):
            announce(
                f"step {restored.step} was saved without averages of the network's "
                "state, by an earlier version: its averages of the parameters are "
                "evaluated with the state of those that train"
            )
        if not slices.differ(self._experiment, self.target, restored.shapes):
            return restored
        before = checkpoint.num_groups(restored.shapes) or 1
        now = mesh_lib.num_groups(self._mesh)
        options = self._experiment.config.outer
        if not fits:
            announce(slices.describe(before, now, restored.step, options))
        elif before != self._slices_read:
            # A reader of many checkpoints says it once.
            announce(slices.describe_read(before, now))
            self._slices_read = before
        # What was noted of the saved state does not hold of this one.
        metadata = {**restored.metadata, "watched": None, "fingerprint": None}
        return restored._replace(
            state=slices.continued(restored.state), metadata=metadata
        )


class Checkpoints(States):
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
            self.manager.on_process_0(lambda: self.check_replicas(latest))
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
            state = self.init_state(self._batches.first_example())
            if source is not None:
                meaning = adaptations.meaning(state)
                taken = checkpoint.init_from(source, state, meaning=meaning)
                # Slots that were not taken, too, are copies of the new parameters.
                state = _begin_copies(taken, state)
            return resuming.Point(state)
        if source is not None:
            announce(
                f"--init_from={source.place} is for a new run; this run resumes from "
                "its own checkpoint"
            )

        self._check_finite(latest)
        restored = self.restore_state()
        if restored.step != latest:
            # The newest one is damaged, so the one before it was restored.
            self._check_finite(restored.step)
        if reached is not None and restored.step < reached:
            announce(
                f"goes back from step {reached} to {restored.step}: the later "
                "checkpoints are damaged or deleted"
            )
        self._batches.restore(restored.data)

        point = resuming.Point.restored(restored)
        if earlier_states.lacks_statistics(point.state, self.target):
            state = _begin_copies(point.state, self.target)
            # Its fingerprints are of fewer arrays.
            point = point._replace(state=state, fingerprint=None)
            announce(
                f"averages of the network's state begin at step {restored.step}, with "
                "its present values"
            )
        return point

    def _check_newest(self, latest: int | None) -> int | None:
        """Checks that the run resumes from the newest checkpoint that it has saved.

        Args:
          latest: the step of the newest checkpoint; None if there is none.

        Returns:
          The newest step that the run has saved; None if it has saved none.

        Raises:
          UserError: on all processes, if that checkpoint is missing.
        """
        return self.manager.on_process_0(lambda: self._reached(latest))

    def _reached(self, latest: int | None) -> int | None:
        """Does on process 0 what `_check_newest` says."""
        reached = self._directory.reached()
        store = self.manager.store
        run = self._directory.run_id()
        begin_again = (
            f"or give --restart_from_scratch={run}, which moves all of this run to "
            f"{self._directory.path}/{workdir.SET_ASIDE}/{run} and begins a new one."
        )
        if reached is None:
            damaged = self.manager.damaged_steps()
            if latest is not None or not damaged:
                return None
            steps = ", ".join(map(str, damaged))
            raise errors.UserError(
                f"All checkpoints in {store} are damaged (steps {steps}): 'python -m "
                "xshard.checkpoint heal' removes a mark that is wrong; "
                f"{begin_again}"
            )
        # An earlier checkpoint is acceptable only if the newest one is known to be
        # damaged, deleted by hand, or given up by a roll-back. If it is missing for no
        # known reason, perhaps a disk is not mounted; resuming would lose steps.
        if latest is not None and (
            latest >= reached.step or self.manager.is_given_up(reached.folder)
        ):
            return reached.step
        newest = "no checkpoint is"
        if latest is not None:
            newest = f"step {latest} is the newest"
        moved = ""
        if reached.checkpoints != str(store):
            moved = f" The checkpoint was in {reached.checkpoints}."
        raise errors.UserError(
            f"This run has reached step {reached.step}, but {newest} in {store}."
            f"{moved} Nothing was changed. Make {reached.folder} available again, for "
            f"example by mounting its disk; {begin_again}"
        )

    def _check_finite(self, step: int) -> None:
        """Checks that a checkpoint is finite, since the run could only fail again.

        All processes call it. A run that only warns resumes from any.

        Raises:
          UserError: on all processes, if it is not.
        """
        if not self._must_be_finite:
            return
        bad = self.manager.on_process_0(lambda: self.manager.nonfinite(step))
        if not bad:
            return
        store = self.manager.store
        newest = self.manager.on_process_0(self.manager.newest_finite_step)
        if newest is None:
            way = "No checkpoint there is finite: give a new --workdir."
        else:
            commands = []
            for number in self.manager.on_process_0(self.manager.all_steps):
                if number > newest:
                    commands.append(f"python -m xshard.checkpoint rm {store} {number}")
            way = (
                f"The newest finite checkpoint is step {newest}; to resume from it, "
                f"delete those after it: {'; '.join(commands)}."
            )
        raise errors.UserError(
            f"The checkpoint of step {step} in {store} is not finite "
            f"({formatting.listed(bad)}), so the run would only fail again. {way} "
            f"--config.on_nonfinite=warn resumes from step {step} all the same."
        )

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
            announce(f"step {committed.step} is saved, but: {e}")
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
        announce(
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


def _finite_patterns(
    target: state_lib.TrainState, mesh: jax.sharding.Mesh
) -> tuple[str, str]:
    """Returns patterns of the paths of all arrays that a run requires to be finite.

    These are the parameters, the state of the networks, and the slots, but for slots
    that are a single number. Such a slot may be infinite by design: the least loss so
    far is, before the first. An experiment's own state may hold anything. Slots are
    named last: they follow from what else is not finite, and are many.
    """
    scalar_ndim = len(mesh_lib.group_axes(mesh))
    exempt = []
    for path, leaf in checkpoint.flatten(target).items():
        if leaf.ndim == scalar_ndim and re.search("(^|/)opt_state/", path):
            exempt.append(re.escape(path))
    either = "|".join(exempt)
    # What the first one matches is no slot.
    return checkpoint.BY_DEFAULT, f"^(?!({either})$)(.*/)?(net_state|opt_state)/"


def keep(options: ml_collections.ConfigDict) -> checkpoint.Keep:
    """Returns the retention rules of `config.checkpoint`."""
    return checkpoint.Keep(
        last=options.keep_last,
        every_steps=options.keep_every_steps,
        best=options.keep_best,
        metric=options.best_metric,
        mode=options.best_mode,
        hours=options.get("keep_hours", 0.0),
    )


def announce(message: str) -> None:
    """Prints a line about checkpoints on stderr."""
    # The line comes from another thread at any time, so it must not mix with the run's
    # own output on stdout. An error of printing says nothing about the checkpoint, so
    # it is ignored.
    with contextlib.suppress(OSError, ValueError):
        print(message, file=sys.stderr, flush=True)


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
