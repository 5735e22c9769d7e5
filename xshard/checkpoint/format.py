"""The format of a checkpoint.

    step_00001200.3f9a11c2/     a folder for each attempt to save, so that nothing is ever overwritten
        p0/, p1/, ...           what each process wrote: an OCDBT database each, and sums.json, its chunks' checksums
        manifest.ocdbt, d/      all processes' databases, merged: its entries refer to p0/, p1/, ...
        meta.json               the tree: paths, shapes, types; the run's metadata; versions
        COMMIT                  created last and only if absent: with it the checkpoint counts
        PINNED, DAMAGED         marks: never deleted by a rule; set aside, with the reason
        METRICS                 those of an evaluation that was made after the save
    removed/step_...            a note for each attempt that a person has deleted
    RUN                         whose checkpoints these are (see `Owner`)

Each array of the tree is a zarr3 array under its path (see arrays.py). COMMIT holds its own checksum and
those of meta.json and of the manifest, the number of keys, and the metrics that the best checkpoint is
chosen by; and where the parameters have been looked at, the names of those that are not finite.
"""

import dataclasses
import hashlib
import json
import math
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from xshard.checkpoint import store as store_lib
from xshard.files import jsonfile

VERSION = 2
COMMIT, META, MANIFEST, SUMS = "COMMIT", "meta.json", "manifest.ocdbt", "sums.json"
PINNED, DAMAGED, METRICS = "PINNED", "DAMAGED", "METRICS"
RUN, REMOVED = "RUN", "removed/"
# In COMMIT, but not in those that older versions have written.
NONFINITE, OWNER = "nonfinite", "run"
# JSON has no such number: {"not finite": "nan"} stands for it.
_NOT_FINITE = "not finite"
_MARKS = {COMMIT, PINNED, DAMAGED, METRICS}
_NAME = re.compile(r"step_(\d{8,})\.([0-9a-f]{8})")

CheckpointError = store_lib.CheckpointError


class Owner(NamedTuple):
    """The run whose checkpoints are in a folder, as it says of itself in RUN.

    Attributes:
      id: what tells it from any other run.
      fingerprint: of all in its config that may not change.
      workdir: its work directory, and the host where that was.
      config: its config, as JSON can hold it.
    """

    id: str
    fingerprint: str
    workdir: str
    config: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The folder of one attempt to save a step, as it was when it was looked at.

    Attributes:
      store: where it is.
      step: the step's number.
      nonce: what tells it from other attempts.
      marks: which of COMMIT, PINNED, DAMAGED and METRICS are in it.
      is_link: whether it is a link that somebody has made by hand: it is read, and never deleted.
    """

    store: store_lib.Store
    step: int
    nonce: str
    marks: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)
    is_link: bool = dataclasses.field(default=False, compare=False)

    @property
    def folder(self) -> str:
        """Its name in the store."""
        return f"step_{self.step:08d}.{self.nonce}"

    @property
    def prefix(self) -> str:
        """The prefix of the names of its objects."""
        return f"{self.folder}/"

    @property
    def counts(self) -> bool:
        """Returns whether it is a checkpoint that may be restored."""
        return COMMIT in self.marks and DAMAGED not in self.marks

    def __str__(self) -> str:
        return f"{self.store}/{self.folder}"

    def part(self, process: int) -> str:
        """The prefix of what a process writes."""
        return f"{self.prefix}p{process}/"


def attempts(store: store_lib.Store) -> list[Attempt]:
    """All attempts in a store, the oldest step first."""
    listed = []
    for name, folder in store.folders(_NAME).items():
        listed.append(attempt_in(store, name, folder.names & _MARKS, folder.is_link))
    return sorted(listed, key=lambda attempt: (attempt.step, attempt.nonce))


def attempt_in(
    store: store_lib.Store, folder: str, marks: frozenset[str] = frozenset(), is_link: bool = False
) -> Attempt:
    """The attempt whose folder has a name such as 'step_00001200.3f9a11c2'."""
    step, nonce = folder.removeprefix("step_").split(".")
    return Attempt(store, int(step), nonce, marks, is_link)


def committed(store: store_lib.Store) -> list[Attempt]:
    """The attempts that count, the oldest step first."""
    return [attempt for attempt in attempts(store) if attempt.counts]


def find(store: store_lib.Store, step: int) -> Attempt:
    """The checkpoint of a step.

    Raises:
      CheckpointError: if there is none that counts.
    """
    return choose(store, committed(store), step)[0]


def choose(store: store_lib.Store, there: list[Attempt], step: int | None) -> list[Attempt]:
    """Selects, of the attempts that count, those of a step, or all; the newest first.

    Raises:
      CheckpointError: if there is none.
    """
    chosen = [attempt for attempt in reversed(there) if step in (None, attempt.step)]
    if not chosen:
        wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
        steps = sorted({attempt.step for attempt in there})
        raise CheckpointError(f"There is no {wanted} in {store}; steps there: {steps or 'none'}.")
    return chosen


def pin(attempt: Attempt) -> bool:
    """Keeps a checkpoint from every rule; False if it was kept so already."""
    if PINNED in attempt.marks:
        return False
    attempt.store.create(attempt.prefix + PINNED, b"")
    return True


def unpin(attempt: Attempt) -> None:
    """Leaves a checkpoint to the rules again."""
    attempt.store.delete(attempt.prefix + PINNED)


def note_removed(attempt: Attempt) -> None:
    """Notes that a person deletes a checkpoint: the run it is of may then go on from an earlier one."""
    note = {"removed": time.strftime("%Y-%m-%d %H:%M:%S")}
    if attempt.store.read(REMOVED + attempt.folder) is None:
        attempt.store.create(REMOVED + attempt.folder, to_json(note))


def is_removed(store: store_lib.Store, folder: str) -> bool:
    """Returns whether a person has deleted the attempt of this name, or begun to."""
    # Asked for by its name: what is not listed is no evidence.
    return store.read(REMOVED + folder) is not None


def is_given_up(store: store_lib.Store, folder: str) -> bool:
    """Returns whether an attempt of this name is known to be gone: deleted by hand, or damaged."""
    return is_removed(store, folder) or store.read(f"{folder}/{DAMAGED}") is not None


def read_owner(store: store_lib.Store) -> Owner | None:
    """The run whose checkpoints are in a store; None if it does not say, as none of before did.

    Raises:
      CheckpointError: if it cannot be read, or is not what was written.
    """
    content = store.read(RUN)
    if content is None:
        return None
    try:
        owner = Owner(**unseal(content))
        if not isinstance(owner.config, dict):
            raise ValueError("its config is no object")
        return owner
    except (ValueError, TypeError) as e:
        raise CheckpointError(
            f"{store}/{RUN} is not what a run has written ({e}), so that it cannot be told whose these "
            "checkpoints are: give another checkpoint.directory."
        ) from e


def claim(store: store_lib.Store, owner: Owner) -> None:
    """Makes the checkpoints in a store a run's; CheckpointError if they are another's."""
    other = read_owner(store)
    if other is None:
        store.create(RUN, seal(owner._asdict()))
    elif other.id != owner.id:
        raise CheckpointError(
            f"{store} holds the checkpoints of run {other.id} ({other.workdir}), and this is run {owner.id} "
            f"({owner.workdir}): give another checkpoint.directory; --init_from takes their parameters."
        )


def add_metrics(attempt: Attempt, metrics: dict[str, float]) -> None:
    """Gives a checkpoint metrics that it was saved without, in the place of those it has been given before."""
    attempt.store.delete(attempt.prefix + METRICS)
    attempt.store.create(attempt.prefix + METRICS, seal(metrics))


def checksum(content: bytes) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(content).hexdigest()


def to_json(value: Any) -> bytes:
    """Readable JSON, the same for the same value."""
    return _dump(_without_nonfinite(value))


def from_json(content: bytes) -> dict[str, Any]:
    """The object that `to_json` has written; ValueError if it is none."""
    return _with_nonfinite(jsonfile.loads(content))


def seal(value: dict[str, Any]) -> bytes:
    """JSON with a checksum of its own."""
    return _seal(_without_nonfinite(value))


def unseal(content: bytes) -> dict[str, Any]:
    """Returns the content that was sealed; raises ValueError if it has changed."""
    value = jsonfile.loads(content).get("content")
    # As it stands there: what was written of old may hold a bare NaN.
    if not isinstance(value, dict) or content != _seal(value):
        raise ValueError("its checksum differs")
    return _with_nonfinite(value)


def _seal(value: dict[str, Any]) -> bytes:
    return _dump({"content": value, "sha256": checksum(_dump(value))})


def _dump(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def _without_nonfinite(value: Any) -> Any:
    """A value with what stands for each number that is not finite."""
    if isinstance(value, Mapping):
        return {key: _without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_NOT_FINITE: str(float(value))}
    return value


def _with_nonfinite(value: Any) -> Any:
    """A value with the numbers that are not finite in the place of what stands for them."""
    if isinstance(value, list):
        return [_with_nonfinite(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_NOT_FINITE} and value[_NOT_FINITE] in ("nan", "inf", "-inf"):
        return float(value[_NOT_FINITE])
    return {key: _with_nonfinite(item) for key, item in value.items()}
