"""Sees to it that the replicas of a group hold the same bits of what is equal on all of them, by their fingerprints.

That a step leaves equal what is declared to be so, by a learner or by `xshard.equal_on_replicas`, no program shows; nor
that a device computes what it should. Of such a state a checkpoint has one copy, and replicas that have parted train
something that no run goes on with.
"""

import collections
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from xshard import contract, errors, logical
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard.metrics import deferred
from xshard.pod import processes
from xshard.stored import fingerprint, hashing

_PATHS = 8
_ADVICE = (
    "Nothing was saved of this step. If one device alone differs, and in another step when the run is repeated, suspect that "
    "device; on_parted='roll_back' makes such steps again. Else make it equal with a collective, such as jax.lax.pmean(x, "
    "('slice', 'replica')), draw keys that are equal on all replicas, or wrap it in xshard.PerReplica; look at each "
    "xshard.equal_on_replicas, and at rules of your own."
)
_KINDS = {
    fingerprint.PARAMS: "the parameters",
    fingerprint.SLOTS: "the slots of the rules, with their counts and loss scale",
    fingerprint.NET_STATE: "the state of the networks",
    fingerprint.OTHER: "the step, the key and the experiment's own state",
}


class PartedError(errors.UserError):
    """The replicas of a group hold different copies of what is equal on all of them.

    It is raised on all processes after the same step: a run whose config says so rolls back.

    Attributes:
      what: which arrays, and where, without the advice.
      step: the last step that the state with them comes after.
    """

    def __init__(self, what: str, step: int):
        super().__init__(f"{what}. {_ADVICE}")
        self.what = what
        self.step = step


class Watch:
    """Compares what the replicas hold, without holding the steps up: it looks at each step a little later.

    All processes see the same numbers of a step, after the same number of later ones, so that all decide alike.
    """

    def __init__(self, experiment: experiment_lib.Experiment, mesh: jax.sharding.Mesh):
        """Begins, for a run's experiment on its mesh."""
        self._experiment = experiment
        self._mesh = mesh
        self._replicas = logical.of_config(experiment.config, mesh)
        self._every = experiment.config.fingerprint_every_steps
        self._pending: collections.deque[tuple[int, fingerprint.Fingerprints]] = collections.deque()
        self._newest: state_lib.TrainState | None = None
        self._program = jax.jit(fingerprint.program(experiment, mesh))
        self._fingerprints = processes.compiled_by_all(
            self._program, "the fingerprint of the state"
        )
        self._compiling: threading.Thread | None = None

    def forget(self) -> None:
        """Lets go of all states so far, whose steps will be made again."""
        self._pending.clear()
        self._newest = None

    def push(
        self, step: int, begun: fingerprint.Fingerprints | None, state: state_lib.TrainState
    ) -> dict[str, Any]:
        """Takes the fingerprints of the state that a step began with, and looks at earlier ones.

        Args:
          step: the number of the step.
          begun: the fingerprints; None where steps make none.
          state: the state that the step has left.

        Returns:
          What the step logs of them: two uint32 by each name.

        Raises:
          PartedError: if replicas hold different bits, on all processes.
        """
        self._newest = state
        logged = {}
        if begun is not None and step % self._every == 0:
            parted = mesh_lib.replicate(self._mesh, begun.parted)
            parted.copy_to_host_async()
            self._pending.append((step - 1, begun._replace(parted=parted)))
            logged = begun.logged()
        self._look(step - deferred.IN_FLIGHT)
        return logged

    def flush(self) -> None:
        """Looks at all that has been taken; PartedError as for `push`."""
        if self._pending:
            self._look(self._pending[-1][0])

    def of_state(self, state: state_lib.TrainState) -> dict[str, Any]:
        """The fingerprints of a state by kind, as text, once it has been looked at; PartedError as for `push`."""
        self._newest = state
        if self._compiling is not None:
            self._compiling.join()
        fingerprints = mesh_lib.replicate(self._mesh, self._fingerprints(state))
        self._pending.append((int(state.step), fingerprints))
        self.flush()
        return {kind: hashing.text(value) for kind, value in fingerprints.values.items()}

    def begin(self, state: state_lib.TrainState, saved: dict[str, Any] | None, store: str) -> None:
        """Compares the fingerprints of a restored state with those that it had when it was saved, on whatever devices.

        What makes them is compiled for it. Where there is nothing to compare it is compiled meanwhile, for the first save.

        Args:
          state: the state that the run begins with.
          saved: its fingerprints by kind, as `of_state` returned them; None if they are not known.
          store: where its checkpoint is.

        Raises:
          PartedError: as for `push`.
          UserError: on all processes, if they differ.
        """
        if saved is None:
            self._compile_ahead(state)
            return
        now, where = self.of_state(state), f"{store} {int(state.step)}"
        texts = []
        for kind, words in _KINDS.items():
            here, there = now.get(kind), saved.get(kind)
            if here != there:
                texts.append(f"{words} ({fingerprint.PREFIX}{kind} is {here}, and was {there})")
        if texts:
            raise errors.UserError(
                f"The checkpoint of step {int(state.step)} has come back as another state than was saved: {'; '.join(texts)}. "
                "A state comes back to the bits, on any devices, and nothing was trained or written. See what 'python -m "
                f"xshard.checkpoint verify {where}' says. If it is damaged there, 'python -m xshard.checkpoint rm {where}', and "
                "the run goes on from the one before; if it is whole, suspect this machine's memory or a device, and start again "
                "on another."
            )

    def _compile_ahead(self, state: state_lib.TrainState) -> None:
        """Begins to compile what the first save calls, beside the step."""
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        shapes = jax.tree.map(shape, state)
        # JAX keeps it for the call.
        compile_it = lambda: self._program.lower(shapes).compile()
        self._compiling = threading.Thread(target=compile_it, name="fingerprint of the state")
        self._compiling.start()

    def _look(self, last: int) -> None:
        while self._pending and self._pending[0][0] <= last:
            step, fingerprints = self._pending.popleft()
            if np.any(np.asarray(fingerprints.parted)):
                raise PartedError(self._describe(step, fingerprints), step)

    def _describe(self, step: int, fingerprints: fingerprint.Fingerprints) -> str:
        """Says what has parted, and where; on all processes alike."""
        state = self._newest
        assert state is not None
        parted = self._parted(state, fingerprints.table)
        listed = "; ".join(f"{name}: {text}" for name, texts in parted.items() for text in texts)
        return (
            f"After step {step} the replicas hold different bits of {self._paths(state)} "
            f"{contract.described(self._experiment.train_step)} leaves as equal on all of them, and of which a checkpoint "
            f"keeps one copy ({listed})"
        )

    def _paths(self, state: state_lib.TrainState) -> str:
        """The arrays that differ in the newest state: by then a step may have made them equal again."""
        program = jax.jit(fingerprint.program(self._experiment, self._mesh, each=True))
        compiled = processes.compiled_by_all(program, "the fingerprint of each array")
        names = list(self._parted(state, compiled(state).table, each=True))
        if not names:
            return "what"
        more = f" and {len(names) - _PATHS} more" if len(names) > _PATHS else ""
        return f"{', '.join(map(repr, names[:_PATHS]))}{more}, which"

    def _parted(
        self, state: state_lib.TrainState, table: Any, *, each: bool = False
    ) -> dict[str, list[str]]:
        """The arrays that have parted, by name, and where."""
        cells = fingerprint.cells(self._experiment, self._mesh, state, each=each)
        held = np.asarray(mesh_lib.replicate(self._mesh, table))
        if self._replicas is not None and held.shape[-4:-2] != self._mesh.devices.shape[1:3]:
            # As the step has found it, of logical replicas.
            held = self._replicas.of_devices(held.reshape(-1, *held.shape[-4:]))
        held = held.reshape(*self._mesh.devices.shape[:3], len(cells), 2)
        parted: dict[str, list[str]] = {}
        for index, cell in enumerate(cells):
            texts = list(_partings(self._mesh, cell, held[:, :, :, index]))
            if texts:
                parted.setdefault(cell.name, []).extend(texts)
        return parted


def _partings(mesh: jax.sharding.Mesh, cell: fingerprint.Cell, held: np.ndarray) -> Iterator[str]:
    """Says of each set of replicas that are to hold the same which of them do not.

    Args:
      mesh: of the run.
      cell: what they hold.
      held: the fingerprints, uint32 of shape (groups, slices, replicas, 2).
    """
    groups, slices, replicas = held.shape[:3]
    places = list(np.ndindex(slices, replicas))
    is_own = [axis in cell.own for axis in mesh_lib.REPLICAS]
    for group in range(groups):
        alike: dict[Any, list[tuple[int, ...]]] = {}
        for place in places:
            alike.setdefault(tuple(np.compress(is_own, place).tolist()), []).append(place)
        for copies in alike.values():
            yield from _minority(mesh, group, {x: tuple(held[group][x].tolist()) for x in copies})


def _minority(
    mesh: jax.sharding.Mesh, group: int, held: dict[tuple[int, ...], tuple[int, ...]]
) -> Iterator[str]:
    """Says which of some replicas of a group hold another fingerprint than most of them."""
    counts = collections.Counter(held.values())
    most, count = counts.most_common(1)[0]
    of_group = f" of group {group}" if mesh_lib.num_groups(mesh) > 1 else ""
    if 2 * count <= len(held):
        yield f"{len(held)} replicas{of_group} hold {len(counts)} different copies, none of them most"
        return
    for place, value in held.items():
        if value != most:
            number = np.ravel_multi_index(place, mesh.devices.shape[1:3])
            devices = [
                f"device {x.id} of process {x.process_index}" for x in mesh.devices[group][place]
            ]
            where = f"replica {number}{of_group} ({', '.join(devices)})"
            yield f"{where} holds another copy than {count} of {len(held)}"
