"""The check that the replicas of a group hold equal copies of state that must be equal.

No analysis of the program can prove this for state that a learner or
`xshard.equal_on_replicas` declares as equal, and none can prove that a device computes
correctly. A checkpoint holds one copy of such state, so a resumed run would not
continue what replicas that have diverged were training. Fingerprints of the state are
compared instead of the state itself.
"""

import collections
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from xshard import errors, hooks, logical
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard.base import formatting, hashing
from xshard.learners import validation
from xshard.metrics import deferred
from xshard.pod import host_collectives
from xshard.training import fingerprint
from xshard.training import state as state_lib
from xshard.training import step as step_lib

_ADVICE = (
    "This step was not saved. If only one device differs, and at another step when the "
    "run is repeated, suspect that device; on_divergence='roll_back' repeats the "
    "steps. Otherwise make the state equal with a collective, such as "
    "jax.lax.pmean(x, ('slice', 'replica')), draw keys that are equal on all replicas, "
    "or wrap the state in xshard.PerReplica; check each xshard.equal_on_replicas, and "
    "custom optimizer rules."
)
# What messages call each kind of arrays.
_WORDS = {
    fingerprint.PARAMS: "the parameters",
    fingerprint.SLOTS: "the optimizer slots, with their counts and loss scale",
    fingerprint.NET_STATE: "the state of the networks",
    fingerprint.OTHER: "the step, the key and the experiment's own state",
}


class ReplicaDivergenceError(errors.UserError):
    """Replicas of a group hold different copies of state that must be equal on them.

    It is raised on all processes after the same step. A run with
    on_divergence='roll_back' catches it and rolls back.

    Attributes:
      what: the message without the advice: the arrays that differ, and the replicas.
      step: the step after which the state differed.
    """

    def __init__(self, what: str, step: int):
        super().__init__(f"{what}. {_ADVICE}")
        self.what = what
        self.step = step


class ReplicaCheck(hooks.Hook):
    """Compares the copies of the replicas by their fingerprints.

    A step computes the fingerprints of the state that it receives, so those of the
    state after a step come from the next one. All processes check the same fingerprints
    at the same later step, so they all make the same decision.
    """

    def __init__(self, experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh):
        """Prepares the fingerprint program of a run's experiment on its mesh."""
        self._experiment = experiment
        self._mesh = mesh
        self._logical_replicas = logical.of_config(experiment.config, mesh)
        # Read from the config once, because each look-up takes microseconds.
        self._every = experiment.config.fingerprint_every_steps
        self._program = jax.jit(fingerprint.program(experiment, mesh))
        self._fingerprints = host_collectives.compiled_by_all(
            self._program, "the fingerprint of the state"
        )
        # Whether the program is compiled, or is being compiled by the thread.
        self._is_compiled = False
        self._compiling: threading.Thread | None = None

    def check_restored(
        self, state: state_lib.TrainState, saved: dict[str, Any], store: str
    ) -> None:
        """Compares the fingerprints of a restored state with those saved with it.

        They are equal on any number of devices.

        Args:
          state: the restored state.
          saved: its fingerprints by kind, as `fingerprints_of` returned them.
          store: where the checkpoint is.

        Raises:
          ReplicaDivergenceError: if replicas hold different bits, as in `check`.
          UserError: on all processes, if the fingerprints differ from the saved ones.
        """
        step = int(state.step)
        restored = self.fingerprints_of(state)
        texts = []
        for kind, words in _WORDS.items():
            now = restored.get(kind)
            before = saved.get(kind)
            if now != before:
                name = f"{fingerprint.PREFIX}{kind}"
                texts.append(f"{words} ({name} is {now}, but was {before} when saved)")
        if texts:
            where = f"{store} {step}"
            raise errors.UserError(
                f"The state restored from the checkpoint of step {step} differs from "
                f"the saved state: {'; '.join(texts)}. It must have the same bits on "
                "any devices. Nothing was trained or written. Run 'python -m "
                f"xshard.checkpoint verify {where}'. If it finds damage, run 'python "
                f"-m xshard.checkpoint rm {where}': the run then resumes from the "
                "checkpoint before. If it finds none, suspect this machine's memory or "
                "a device, and start again on another machine."
            )

    def fetch(self, chunk: step_lib.Chunk) -> fingerprint.Fingerprints | None:
        """Starts to copy to the host what `check` reads of steps.

        All processes must call it.

        Args:
          chunk: steps that have just been dispatched.

        Returns:
          The fingerprints of the states before the steps; None if none are due. Where
          they are not due, the program of a step returns zeros.
        """
        fingerprints = chunk.stepped.fingerprints_before
        if fingerprints is None or not any(map(self._is_due, chunk.steps)):
            return None
        diverged = mesh_lib.replicate(self._mesh, fingerprints.diverged)
        deferred.to_host([diverged])
        return fingerprints._replace(diverged=diverged)

    def read(
        self,
        step: int,
        place: Any,
        fetched: fingerprint.Fingerprints | None,
        newest: state_lib.TrainState,
    ) -> None:
        """Checks the state before a step, if its fingerprints are due."""
        if fetched is not None and self._is_due(step):
            self.check(step - 1, fetched, newest, place)

    def _is_due(self, step: int) -> bool:
        return bool(self._every) and step % self._every == 0

    def check(
        self,
        step: int,
        fingerprints: fingerprint.Fingerprints,
        newest: state_lib.TrainState,
        place: Any = ...,
    ) -> None:
        """Checks that the replicas hold the same bits after a step.

        Args:
          step: the number of the step after which the state had the fingerprints.
          fingerprints: those of the state, as `fetch` returned them.
          newest: the state after the newest step. The one that had the fingerprints is
            gone by now, since the next step took its memory.
          place: the step's index in the arrays, if they are of several steps.

        Raises:
          ReplicaDivergenceError: on all processes, if they do not.
        """
        if np.any(np.asarray(fingerprints.diverged)[place]):
            what = self._describe(step, fingerprints, newest, place)
            raise ReplicaDivergenceError(what, step)

    def fingerprints_of(self, state: state_lib.TrainState) -> dict[str, Any]:
        """Checks a state and returns its fingerprints by kind, as text.

        It waits for the state.

        Raises:
          ReplicaDivergenceError: as `check` does.
        """
        if self._compiling is not None:
            # The thread compiles the same program.
            self._compiling.join()
        self._is_compiled = True
        fingerprints = mesh_lib.replicate(self._mesh, self._fingerprints(state))
        self.check(int(state.step), fingerprints, state)
        return {
            kind: hashing.text(value) for kind, value in fingerprints.values.items()
        }

    def compile_ahead(self, state: state_lib.TrainState) -> None:
        """Compiles the program of `fingerprints_of` in a thread, while steps run.

        Otherwise the first save would wait for it. Nothing happens if it is compiled
        already.
        """
        if self._is_compiled:
            return
        self._is_compiled = True
        # The thread gets shapes instead of arrays, because the next step donates the
        # state.
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        shapes = jax.tree.map(shape, state)
        # JAX caches the compiled program, so the first call finds it.
        self._compiling = threading.Thread(
            target=lambda: self._program.lower(shapes).compile(),
            name="fingerprint of the state",
        )
        self._compiling.start()

    def _describe(
        self,
        step: int,
        fingerprints: fingerprint.Fingerprints,
        newest: state_lib.TrainState,
        place: Any,
    ) -> str:
        """Describes which arrays differ, and on which replicas.

        All processes must call it.
        """
        texts = []
        differing = self._differing(newest, fingerprints.table, place=place)
        for name, differences in differing.items():
            texts += [f"{name}: {difference}" for difference in differences]
        method = validation.describe_method(self._experiment.train_step)
        return (
            f"After step {step} the replicas hold different bits of "
            f"{self._differing_paths(newest)}, which {method} must leave equal on all "
            "of them, because a checkpoint keeps only one copy "
            f"({'; '.join(texts)})"
        )

    def _differing_paths(self, newest: state_lib.TrainState) -> str:
        """Names the arrays that differ in the newest state."""
        program = jax.jit(fingerprint.program(self._experiment, self._mesh, each=True))
        compiled = host_collectives.compiled_by_all(
            program, "the fingerprint of each array"
        )
        table = compiled(newest).table
        paths = [repr(path) for path in self._differing(newest, table, each=True)]
        if not paths:
            # A later step has made them equal again.
            return "some state"
        return formatting.listed(paths)

    def _differing(
        self,
        state: state_lib.TrainState,
        table: Any,
        *,
        each: bool = False,
        place: Any = ...,
    ) -> dict[str, list[str]]:
        """Finds the cells of which replicas hold different copies.

        Args:
          state: a state; only its shapes are used.
          table: the sums of each replica, as in `Fingerprints`.
          each: whether the table has a cell for each array.
          place: the index of the step in the table, if that is of several steps.

        Returns:
          Descriptions of the replicas that differ, by the name of the cell.
        """
        cells = fingerprint.cells(self._experiment, self._mesh, state, each=each)
        sums = np.asarray(mesh_lib.replicate(self._mesh, table))[place]
        groups, slices, replicas = self._mesh.devices.shape[:3]
        if self._logical_replicas is not None and sums.shape[-4:-2] != (
            slices,
            replicas,
        ):
            # The step computed this table for logical replicas.
            sums = self._logical_replicas.of_devices(sums.reshape(-1, *sums.shape[-4:]))
        sums = sums.reshape(groups, slices, replicas, len(cells), 2)
        differing: dict[str, list[str]] = {}
        for index, cell in enumerate(cells):
            texts = list(_differences(self._mesh, cell, sums[:, :, :, index]))
            if texts:
                differing.setdefault(cell.name, []).extend(texts)
        return differing


def _differences(
    mesh: jax.sharding.Mesh, cell: fingerprint.Cell, sums: np.ndarray
) -> Iterator[str]:
    """Yields descriptions of the replicas that hold another copy than they must.

    Args:
      mesh: the run's mesh.
      cell: the part of the state that the sums are of.
      sums: uint32 of shape (groups, slices, replicas, 2).
    """
    groups, slices, replicas = sums.shape[:3]
    is_per_replica = [axis in cell.differing_axes for axis in mesh_lib.REPLICAS]
    for group in range(groups):
        # Replicas must hold equal copies if they have the same place along the axes
        # along which the cell differs.
        sets: dict[Any, dict[tuple[int, ...], tuple[int, ...]]] = {}
        for place in np.ndindex(slices, replicas):
            key = tuple(np.compress(is_per_replica, place).tolist())
            copies = sets.setdefault(key, {})
            copies[place] = tuple(sums[group][place].tolist())
        for copies in sets.values():
            yield from _minority(mesh, group, copies)


def _minority(
    mesh: jax.sharding.Mesh,
    group: int,
    copies: dict[tuple[int, ...], tuple[int, ...]],
) -> Iterator[str]:
    """Yields a description of each replica that differs from the majority.

    Args:
      mesh: the run's mesh.
      group: the number of the replicas' group.
      copies: the sums of each replica, by its slice and its number there.
    """
    counts = collections.Counter(copies.values())
    most, count = counts.most_common(1)[0]
    of_group = ""
    if mesh_lib.num_groups(mesh) > 1:
        of_group = f" of group {group}"
    # Without a majority there is no telling which copy is right.
    if 2 * count <= len(copies):
        yield (
            f"{len(copies)} replicas{of_group} hold {len(counts)} different copies, "
            "without a majority"
        )
        return
    for place, value in copies.items():
        if value == most:
            continue
        number = np.ravel_multi_index(place, mesh.devices.shape[1:3])
        devices = [
            f"device {device.id} of process {device.process_index}"
            for device in mesh.devices[group][place]
        ]
        yield (
            f"replica {number}{of_group} ({', '.join(devices)}) differs from {count} "
            f"of {len(copies)} replicas"
        )
