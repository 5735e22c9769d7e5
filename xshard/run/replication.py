"""Checks by fingerprints that the replicas of a group hold the same bits of all state
that must be equal on them.

No analysis of the program can prove this for state that a learner or
`xshard.equal_on_replicas` declares as equal, and none can prove that a device computes
correctly. A checkpoint holds one copy of such state, so a resumed run would not
continue what replicas that have diverged were training.
"""

import collections
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from xshard import errors, logical, validation
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard.metrics import deferred, formatting
from xshard.pod import processes
from xshard.stored import fingerprint, hashing

_ADVICE = (
    "This step was not saved. If only one device differs, and at another step when the run is repeated, suspect that device; "
    "on_divergence='roll_back' repeats the steps. Otherwise make the state equal with a collective, such as jax.lax.pmean(x, "
    "('slice', 'replica')), draw keys that are equal on all replicas, or wrap the state in xshard.PerReplica; check each "
    "xshard.equal_on_replicas, and custom optimizer rules."
)
_KINDS = {
    fingerprint.PARAMS: "the parameters",
    fingerprint.SLOTS: "the optimizer slots, with their counts and loss scale",
    fingerprint.NET_STATE: "the state of the networks",
    fingerprint.OTHER: "the step, the key and the experiment's own state",
}


class ReplicaDivergenceError(errors.UserError):
    """The replicas of a group hold different copies of state that must be equal on all
    of them.

    It is raised on all processes after the same step. A run with on_divergence='roll_back'
    catches it and rolls back.

    Attributes:
      what: the message without the advice: the arrays that differ, and the replicas.
      step: the step after which the state differed.
    """

    def __init__(self, what: str, step: int):
        super().__init__(f"{what}. {_ADVICE}")
        self.what = what
        self.step = step


class ReplicaCheck:
    """Compares the copies of the replicas. It looks at each step some steps later, so
    that the device never waits.

    All processes see the same numbers of a step at the same later step, so they all
    make the same decision.
    """

    def __init__(self, experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh):
        """Prepares the fingerprint program of a run's experiment on its mesh."""
        self._experiment = experiment
        self._mesh = mesh
        self._replicas = logical.of_config(experiment.config, mesh)
        self._every = experiment.config.fingerprint_every_steps
        self._pending: collections.deque[tuple[int, fingerprint.Fingerprints]] = (
            collections.deque()
        )
        self._newest: state_lib.TrainState | None = None
        self._program = jax.jit(fingerprint.program(experiment, mesh))
        self._fingerprints = processes.compiled_by_all(
            self._program, "the fingerprint of the state"
        )
        # Whether the program is still to be compiled for the first save, and the thread
        # that compiles it.
        self._is_awaited = False
        self._compiling: threading.Thread | None = None

    def forget(self) -> None:
        """Drops all pending fingerprints and states, because a roll-back makes their
        steps again.
        """
        self._pending.clear()
        self._newest = None

    def push(
        self,
        step: int,
        fingerprints_before: fingerprint.Fingerprints | None,
        state: state_lib.TrainState,
    ) -> dict[str, Any]:
        """Takes the fingerprints of the state that a step began with, and checks the
        earlier ones that are due.

        Args:
          step: the number of the step.
          fingerprints_before: the fingerprints of the state before the step; None if the step
            computes none.
          state: the state after the step.

        Returns:
          The fingerprints that the step logs: two uint32 for each name. Empty if this
            step logs none.

        Raises:
          ReplicaDivergenceError: on all processes, if replicas hold different bits.
        """
        self._newest = state
        logged = {}
        if fingerprints_before is not None and step % self._every == 0:
            diverged = mesh_lib.replicate(self._mesh, fingerprints_before.diverged)
            deferred.to_host([diverged])
            self._pending.append(
                (step - 1, fingerprints_before._replace(diverged=diverged))
            )
            logged = fingerprints_before.logged()
        # The fingerprints after a step come from the program of the next one.
        self._look(step - 1 - deferred.IN_FLIGHT)
        if self._is_awaited:
            self._compile_ahead(state)
        return logged

    def flush(self) -> None:
        """Checks all pending fingerprints; raises ReplicaDivergenceError as `push`
        does.
        """
        if self._pending:
            self._look(self._pending[-1][0])

    def of_state(self, state: state_lib.TrainState) -> dict[str, Any]:
        """Checks a state, and returns its fingerprints by kind, as text; raises
        ReplicaDivergenceError as `push` does.
        """
        self._newest = state
        self._is_awaited = False
        # Waits for the compilation in the background, so that the program is not
        # compiled twice.
        if self._compiling is not None:
            self._compiling.join()
        fingerprints = mesh_lib.replicate(self._mesh, self._fingerprints(state))
        self._pending.append((int(state.step), fingerprints))
        self.flush()
        return {
            kind: hashing.text(value) for kind, value in fingerprints.values.items()
        }

    def begin(
        self, state: state_lib.TrainState, saved: dict[str, Any] | None, store: str
    ) -> None:
        """Compares the fingerprints of a restored state with those saved with it, on
        any number of devices.

        Without saved fingerprints, it has the fingerprint program compiled for the
        first save, in the background and after the first step, so that it does not
        delay the compilation of that.

        Args:
          state: the state that the run begins with.
          saved: the state's fingerprints by kind, as `of_state` returned them; None if
            they are not known.
          store: where the checkpoint is.

        Raises:
          ReplicaDivergenceError: if replicas hold different bits, as in `push`.
          UserError: on all processes, if the fingerprints differ from the saved ones.
        """
        if saved is None:
            self._is_awaited = True
            return
        now, where = self.of_state(state), f"{store} {int(state.step)}"
        texts = []
        for kind, words in _KINDS.items():
            here, there = now.get(kind), saved.get(kind)
            if here != there:
                texts.append(
                    f"{words} ({fingerprint.PREFIX}{kind} is {here}, but was {there} when saved)"
                )
        if texts:
            raise errors.UserError(
                f"The state restored from the checkpoint of step {int(state.step)} differs from the saved state: "
                f"{'; '.join(texts)}. It must have the same bits on any devices. Nothing was trained or written. Run "
                f"'python -m xshard.checkpoint verify {where}'. If it finds damage, run 'python -m xshard.checkpoint rm {where}': "
                "the run then resumes from the checkpoint before. If it finds none, suspect this machine's memory or a device, "
                "and start again on another machine."
            )

    def _compile_ahead(self, state: state_lib.TrainState) -> None:
        """Compiles the fingerprint program, which the first save calls, in a thread
        while steps run.
        """
        self._is_awaited = False
        # The thread gets shapes instead of arrays, because the next step donates the
        # state.
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        shapes = jax.tree.map(shape, state)
        # JAX caches the compiled program, so the first call finds it.
        compile_it = lambda: self._program.lower(shapes).compile()
        self._compiling = threading.Thread(
            target=compile_it, name="fingerprint of the state"
        )
        self._compiling.start()

    def _look(self, last: int) -> None:
        while self._pending and self._pending[0][0] <= last:
            step, fingerprints = self._pending.popleft()
            if np.any(np.asarray(fingerprints.diverged)):
                raise ReplicaDivergenceError(self._describe(step, fingerprints), step)

    def _describe(self, step: int, fingerprints: fingerprint.Fingerprints) -> str:
        """Describes which arrays differ, and on which replicas. It is collective: all
        processes must call it.
        """
        state = self._newest
        assert state is not None
        diverged = self._parted(state, fingerprints.table)
        listed = "; ".join(
            f"{name}: {text}" for name, texts in diverged.items() for text in texts
        )
        return (
            f"After step {step} the replicas hold different bits of {self._paths(state)}, which "
            f"{validation.describe_method(self._experiment.train_step)} must leave equal on all of them, because a checkpoint keeps "
            f"only one copy ({listed})"
        )

    def _paths(self, state: state_lib.TrainState) -> str:
        """Names the arrays that differ in the newest state; a later step may have made
        them equal again.
        """
        program = jax.jit(fingerprint.program(self._experiment, self._mesh, each=True))
        compiled = processes.compiled_by_all(program, "the fingerprint of each array")
        names = list(self._parted(state, compiled(state).table, each=True))
        if not names:
            return "some state"
        return formatting.listed([repr(name) for name in names])

    def _parted(
        self, state: state_lib.TrainState, table: Any, *, each: bool = False
    ) -> dict[str, list[str]]:
        """Returns the names of the arrays that differ, each with descriptions of the
        replicas concerned.
        """
        cells = fingerprint.cells(self._experiment, self._mesh, state, each=each)
        held = np.asarray(mesh_lib.replicate(self._mesh, table))
        if (
            self._replicas is not None
            and held.shape[-4:-2] != self._mesh.devices.shape[1:3]
        ):
            # The step computed this table for logical replicas; this converts it to a
            # table of devices.
            held = self._replicas.of_devices(held.reshape(-1, *held.shape[-4:]))
        held = held.reshape(*self._mesh.devices.shape[:3], len(cells), 2)
        diverged: dict[str, list[str]] = {}
        for index, cell in enumerate(cells):
            texts = list(_partings(self._mesh, cell, held[:, :, :, index]))
            if texts:
                diverged.setdefault(cell.name, []).extend(texts)
        return diverged


def _partings(
    mesh: jax.sharding.Mesh, cell: fingerprint.Cell, held: np.ndarray
) -> Iterator[str]:
    """Yields, for each set of replicas that must hold equal copies, a description of
    those that differ.

    Args:
      mesh: the run's mesh.
      cell: the part of the state that the fingerprints are of.
      held: the fingerprints, uint32 of shape (groups, slices, replicas, 2).
    """
    groups, slices, replicas = held.shape[:3]
    places = list(np.ndindex(slices, replicas))
    is_own = [axis in cell.own for axis in mesh_lib.REPLICAS]
    for group in range(groups):
        alike: dict[Any, list[tuple[int, ...]]] = {}
        for place in places:
            alike.setdefault(tuple(np.compress(is_own, place).tolist()), []).append(
                place
            )
        for copies in alike.values():
            yield from _minority(
                mesh, group, {x: tuple(held[group][x].tolist()) for x in copies}
            )


def _minority(
    mesh: jax.sharding.Mesh, group: int, held: dict[tuple[int, ...], tuple[int, ...]]
) -> Iterator[str]:
    """Yields a description of each replica whose fingerprint differs from the
    majority's, if there is a majority.
    """
    counts = collections.Counter(held.values())
    most, count = counts.most_common(1)[0]
    of_group = f" of group {group}" if mesh_lib.num_groups(mesh) > 1 else ""
    # Without a majority there is no telling which copy is right.
    if 2 * count <= len(held):
        yield f"{len(held)} replicas{of_group} hold {len(counts)} different copies, without a majority"
        return
    for place, value in held.items():
        if value != most:
            number = np.ravel_multi_index(place, mesh.devices.shape[1:3])
            devices = [
                f"device {x.id} of process {x.process_index}"
                for x in mesh.devices[group][place]
            ]
            where = f"replica {number}{of_group} ({', '.join(devices)})"
            yield f"{where} differs from {count} of {len(held)} replicas"
