"""The on-disk format of a checkpoint.

    step_00001200.3f9a11c2/   one folder per attempt to save a step, so that nothing is
                              ever overwritten
        p0/, p1/, ...         what each process wrote: an OCDBT database of its chunks
        manifest.ocdbt, d/    the databases of all processes, merged into one that
                              refers to their data in place
        meta.json             the arrays (see `arrays.ArrayMeta`), the run's metadata,
                              and the versions of the libraries
        COMMIT                created last, and only if absent: its existence makes the
                              checkpoint count
        PINNED                a mark: no retention rule deletes this checkpoint
        DAMAGED               a mark with the reason: the checkpoint no longer counts
        METRICS               the metrics of an evaluation that ran after the save
        ABANDONED             a mark: the run had not committed the attempt when another
                              process took its lock over, and it never counts; see
                              `xshard.checkpoint.lock`
    removed/step_...          a note for each attempt that a person deleted
    RUN                       the run that owns these checkpoints (see `Owner`)

An attempt counts if it may be restored: it has COMMIT and is not marked DAMAGED or
ABANDONED.

What makes a restored state the saved one, from the inside out: each chunk is followed
by its CRC-32C, and so is each node of the databases' trees. COMMIT has the SHA-256 of
meta.json and of the manifest, from which the trees hang, and its own. The run's
metadata have the fingerprint of the state, which was computed on the devices.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import re
import time
from collections.abc import Callable
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from xshard.base import arguments, formatting
from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import store as store_lib
from xshard.files import disk, jsonfile
from xshard.files import provenance as provenance_lib

VERSION = 2
COMMIT = "COMMIT"
META = "meta.json"
MANIFEST = "manifest.ocdbt"
PINNED = "PINNED"
DAMAGED = "DAMAGED"
METRICS = "METRICS"
ABANDONED = "ABANDONED"
RUN = "RUN"
REMOVED = "removed/"
_MARKS = {COMMIT, PINNED, DAMAGED, METRICS, ABANDONED}
_NAME = re.compile(r"step_(\d{8,})\.([0-9a-f]{8})")
# JSON cannot represent NaN or infinities; they are written as {"not finite": "nan"}.
_NOT_FINITE = "not finite"
_MOST_STEPS = 1 << 63
# The most names that a message has.
_SHOWN = 5
# The deepest nesting, low enough for recursive functions on the value.
_DEPTH = 200
# The last second of the year 9999, the largest date that Python can represent.
_LAST_SECOND = 253402300799
# The delays before a failed or damaged read is repeated: a network disk or an object
# store may recover.
READ_AGAIN_SECONDS = (0.2, 1.0)

CheckpointError = store_lib.CheckpointError
_T = TypeVar("_T")
_Time = Annotated[float, msgspec.Meta(ge=0, le=_LAST_SECOND)]


class DamagedError(CheckpointError):
    """A checkpoint counts but does not hold what was written."""


class UnreadableError(CheckpointError):
    """The disk or the service failed to read a checkpoint, which may be whole."""


class Changes(Protocol):
    """What changes the objects of a store: a store, or a run's lock on it."""

    def create(self, name: str, content: bytes) -> None:
        """Creates an object as `Store.create` does."""

    def delete(self, name: str) -> None:
        """Deletes an object as `Store.delete` does."""


class Commit(msgspec.Struct, frozen=True):
    """The content of COMMIT.

    Attributes:
      step: the step.
      attempt: the nonce of the attempt. Without it, COMMIT of one attempt would pass
        for that of another.
      keys: the number of keys in the database.
      bytes: the size of the arrays.
      time: when the checkpoint was committed, in seconds since 1970.
      sha256: the checksums of meta.json and of the manifest, by name.
      metrics: the metrics by which the best checkpoint is chosen.
      nonfinite: the paths of checked arrays that are not finite, possibly incomplete;
        None if the save checked no arrays.
      run: the run that saved the checkpoint; None if no run did.
    """

    step: jsonfile.Count
    attempt: str
    keys: jsonfile.Count
    bytes: jsonfile.Count
    time: _Time
    sha256: dict[str, str]
    metrics: dict[str, float]
    nonfinite: list[str] | None = None
    run: provenance_lib.Identity | None = None


class Meta(msgspec.Struct, frozen=True):
    """The content of meta.json.

    Attributes:
      version: the version of the format.
      step: the step.
      arrays: how each array is stored, by path.
      metadata: the metadata that the caller of the save gave, such as a run's config
        and the fingerprint of the state.
      data: the position in the data of each process, in the order of the processes.
      written_with: the numbers of processes and devices, and the libraries' versions.
    """

    version: jsonfile.Count
    step: jsonfile.Count
    arrays: arrays_lib.ArrayMetas
    metadata: dict[str, Any]
    data: list[Any]
    written_with: dict[str, Any]


class Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The run that owns the checkpoints in a folder, as recorded in RUN.

    Attributes:
      id: the run's unique ID.
      fingerprint: a checksum of the config values that may not change during a run.
      workdir: the run's work directory and the host it was on.
      config: the run's config, as JSON-serializable values.
    """

    id: str
    fingerprint: str
    workdir: str
    config: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class SaveAttempt:
    """The folder of one attempt to save a step, as it was when the store was listed.

    Two attempts are equal if they are the same folder, whatever its marks.

    Attributes:
      store: the store that holds the folder.
      step: the step.
      nonce: a random string that distinguishes attempts to save the same step.
      marks: which of COMMIT, PINNED, DAMAGED, METRICS and ABANDONED exist in the
        folder.
      is_link: whether the folder is a symbolic link, which only a person creates. Links
        are read, never deleted.
    """

    store: store_lib.Store
    step: int
    nonce: str
    marks: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)
    is_link: bool = dataclasses.field(default=False, compare=False)

    @property
    def folder(self) -> str:
        """The folder's name in the store."""
        return f"step_{self.step:08d}.{self.nonce}"

    @property
    def prefix(self) -> str:
        """The prefix of the names of the attempt's objects."""
        return f"{self.folder}/"

    @property
    def counts(self) -> bool:
        """Whether the attempt is a checkpoint that may be restored."""
        return COMMIT in self.marks and not self.marks & {DAMAGED, ABANDONED}

    def __str__(self) -> str:
        return f"{self.store}/{self.folder}"

    def part(self, process: int) -> str:
        """Returns the prefix of the objects that a process writes."""
        return f"{self.prefix}p{process}/"


def attempts(store: store_lib.Store) -> list[SaveAttempt]:
    """Lists all attempts in a store, oldest step first, without abandoned ones of which
    nothing is left but the mark.
    """
    listed = []
    for name, folder in store.folders(_NAME).items():
        if folder.names == {ABANDONED}:
            continue
        listed.append(attempt_in(store, name, folder.names & _MARKS, folder.is_link))
    return sorted(listed, key=lambda attempt: (attempt.step, attempt.nonce))


def attempt_in(
    store: store_lib.Store,
    folder: str,
    marks: frozenset[str] = frozenset(),
    is_link: bool = False,
) -> SaveAttempt:
    """Returns the attempt for a folder name such as 'step_00001200.3f9a11c2'."""
    step, nonce = folder.removeprefix("step_").split(".")
    return SaveAttempt(store, int(step), nonce, marks, is_link)


def committed(store: store_lib.Store) -> list[SaveAttempt]:
    """Lists the attempts that count, oldest step first."""
    return [attempt for attempt in attempts(store) if attempt.counts]


def find(store: store_lib.Store, step: int | None) -> SaveAttempt:
    """Returns the checkpoint of a step, or the newest one.

    Raises:
      CheckpointError: if no attempt to save the step counts.
    """
    return choose(store, committed(store), step)[0]


def choose(
    store: store_lib.Store, there: list[SaveAttempt], step: int | None
) -> list[SaveAttempt]:
    """Selects the attempts of one step, newest first.

    Args:
      store: the store, for the message.
      there: the attempts that count, oldest step first.
      step: the step to select; None selects all attempts.

    Raises:
      CheckpointError: if no attempt is selected.
    """
    chosen = [attempt for attempt in reversed(there) if step in (None, attempt.step)]
    if chosen:
        return chosen
    wanted = "checkpoint"
    if step is not None:
        wanted += f" of step {step}"
    steps = {attempt.step for attempt in there}
    message = f"There is no {wanted} in {store}; steps there: {sorted(steps) or 'none'}"
    others = {attempt.step for attempt in attempts(store)} - steps
    if others:
        message += f"; incomplete or marked as damaged: {sorted(others)}"
    elif not steps and store.path is not None:
        names = [entry.name for entry in disk.entries(store.path) or ()]
        if names:
            message += f"; it holds {formatting.listed(names, _SHOWN)}"
        elif store.path.is_dir():
            message += "; it is empty"
        else:
            message += "; there is no such folder"
    raise CheckpointError(f"{message}.")


def is_removed(store: store_lib.Store, folder: str) -> bool:
    """Returns whether a person deleted the attempt of this name, or began to."""
    # The note is read by name because a listing may lag behind.
    return store.read(REMOVED + folder) is not None


def read_owner(store: store_lib.Store) -> Owner | None:
    """Returns the run that owns the checkpoints in a store; None if no run does.

    Raises:
      CheckpointError: if RUN cannot be read, or its content is not what a run wrote.
    """
    content = store.read(RUN)
    if content is None:
        return None
    try:
        return jsonfile.parse(unseal(content), Owner)
    except ValueError as e:
        raise CheckpointError(
            f"{store}/{RUN} is not a valid record of a run ({e}), so the owner of "
            "these checkpoints is unknown: give another checkpoint.directory."
        ) from e


def claim(store: store_lib.Store, owner: Owner) -> None:
    """Records a run as the owner of a store; raises CheckpointError if another run owns
    it.
    """
    other = read_owner(store)
    if other is None:
        # `create` does not overwrite: if two runs claim the store at the same time, one
        # of them fails.
        store.create(RUN, seal(msgspec.structs.asdict(owner)))
    elif other.id != owner.id:
        raise CheckpointError(
            f"{store} holds the checkpoints of run {other.id} ({other.workdir}), but "
            f"this is run {owner.id} ({owner.workdir}): give another "
            "checkpoint.directory; --init_from takes their parameters."
        )


def add_metrics(attempt: SaveAttempt, metrics: dict[str, float]) -> None:
    """Adds metrics to a checkpoint that was saved without them, replacing any that were
    added before.

    The run and a job that evaluates its checkpoints may do so at once: the metrics are
    of the same state, and either's stay, whole.
    """
    attempt.store.write(attempt.prefix + METRICS, seal(metrics))


def serialize_commit(commit: Commit) -> bytes:
    """Returns the content of COMMIT."""
    value = msgspec.structs.asdict(commit)
    if commit.run is not None:
        value["run"] = msgspec.structs.asdict(commit.run)
    # What is not known is left out.
    return seal({key: item for key, item in value.items() if item is not None})


def parse_commit(content: bytes) -> Commit:
    """Parses COMMIT, which may have further keys.

    Raises:
      ValueError: if it is not what was written.
      CheckpointError: if this code could not have written it.
    """
    return _parsed(unseal(content), Commit)


def _parsed(value: Any, kind: Any) -> Any:
    """Parses what has passed its checksum, so nothing that is wrong in it is damage."""
    try:
        return jsonfile.parse(value, kind)
    except ValueError as e:
        raise CheckpointError(f"is not of a version that this code reads: {e}.") from e


def parse_metrics(content: bytes) -> dict[str, float]:
    """Parses METRICS; raises ValueError if it is not what was written."""
    return jsonfile.parse(unseal(content), dict[str, float])


def serialize_meta(meta: Meta) -> bytes:
    """Returns the content of meta.json."""
    arrays = {path: dataclasses.asdict(entry) for path, entry in meta.arrays.items()}
    return to_json(msgspec.structs.asdict(meta) | {"arrays": arrays})


def parse_meta(content: bytes) -> Meta:
    """Parses meta.json, which may have further keys.

    Raises:
      CheckpointError: if it has another format version, or its values could not have
        been written.
      ValueError: if it is not what was written.
    """
    value = from_json(content)
    version = value.get("version")
    # Of another version, nothing else is known.
    if type(version) is int and version != VERSION:
        raise CheckpointError(
            f"has format version {version}; this code reads version {VERSION}."
        )
    return _parsed(value, Meta)


def retry_on_damage(read: Callable[[], _T]) -> _T:
    """Calls a read, again after damage, and returns its result.

    Raises:
      DamagedError: if every try finds damage.
    """
    for seconds in READ_AGAIN_SECONDS:
        try:
            return read()
        except DamagedError:
            time.sleep(seconds)
    return read()


def read_commit(attempt: SaveAttempt) -> Commit:
    """Reads COMMIT, which has no metrics that were added later.

    Raises:
      DamagedError: if COMMIT is missing, not what was written, or of another attempt.
      UnreadableError: if it cannot be read.
    """
    commit = _read(attempt, COMMIT, parse_commit)
    # COMMIT of a copied folder is valid, but not for the folder's name.
    if (commit.step, commit.attempt) != (attempt.step, attempt.nonce):
        raise DamagedError(f"{attempt}/{COMMIT} belongs to another checkpoint.")
    return commit


def read_meta(attempt: SaveAttempt) -> Meta:
    """Reads meta.json; raises the errors of `read_commit_meta`."""
    _, meta = read_commit_meta(attempt)
    return meta


def read_array_metas(attempt: SaveAttempt) -> arrays_lib.ArrayMetas:
    """Reads how each array of a checkpoint is stored, by path; raises the errors of
    `read_commit_meta`.
    """
    return read_meta(attempt).arrays


def read_commit_meta(attempt: SaveAttempt) -> tuple[Commit, Meta]:
    """Reads COMMIT and meta.json, each once.

    Raises:
      DamagedError: if one of these files or the manifest is missing or not what was
        written.
      UnreadableError: if one cannot be read.
      CheckpointError: if the checkpoint has an unknown format version.
    """
    commit = read_commit(attempt)

    def unchanged(name: str, content: bytes) -> bytes:
        if checksum(content) != commit.sha256.get(name):
            raise ValueError("its checksum differs")
        return content

    # The manifest is the root of the database, whose nodes have checksums of their own.
    # Without the checksum in COMMIT, the manifest of an earlier merge would pass.
    _read(attempt, MANIFEST, lambda content: unchanged(MANIFEST, content))
    meta = _read(attempt, META, lambda content: parse_meta(unchanged(META, content)))
    return commit, meta


def metrics_of(attempt: SaveAttempt, commit: Commit) -> dict[str, float]:
    """Returns the metrics of a checkpoint, those that were added last."""
    # The state does not depend on METRICS, so a damaged METRICS is treated as absent.
    with contextlib.suppress(DamagedError):
        return commit.metrics | retry_on_damage(lambda: added_metrics(attempt))
    return commit.metrics


def added_metrics(attempt: SaveAttempt) -> dict[str, float]:
    """Reads METRICS; returns no metrics if there is no such file.

    Raises:
      DamagedError: if it is not what was written.
      UnreadableError: if it cannot be read.
    """
    if METRICS not in attempt.marks:
        return {}
    return _read(attempt, METRICS, parse_metrics)


def _read(attempt: SaveAttempt, name: str, parse: Callable[[bytes], _T]) -> _T:
    """Reads a file of an attempt, and tells damage from errors of the disk."""
    try:
        content = attempt.store.read(attempt.prefix + name)
    except CheckpointError as e:
        raise UnreadableError(f"{attempt}/{name} cannot be read: {e}.") from e
    if content is None:
        raise DamagedError(f"{attempt}/{name} is missing.")
    try:
        return parse(content)
    except CheckpointError as e:
        raise CheckpointError(f"{attempt}/{name} {e}") from e
    except ValueError as e:
        raise DamagedError(f"{attempt}/{name} is not what was written: {e}.") from e


def checksum(content: bytes) -> str:
    """Returns the SHA-256 of a file's content, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def check(what: str, value: Any, kind: Any = Any) -> None:
    """Raises CheckpointError unless a checkpoint can hold a value, and gives it back.

    Args:
      what: names the value, for the message.
      value: the value.
      kind: its type, as for `jsonfile.parse`.
    """
    try:
        # As deep as a checkpoint has the data of each process.
        [[back]] = _with_nonfinite(json.loads(_dump(_encoded([[value]]))))
        jsonfile.parse(back, kind)
    except (TypeError, ValueError) as e:
        raise CheckpointError(
            f"The {what} must be JSON-serializable: {str(e).rstrip('.')}. It may have "
            "texts, numbers, True, False, None, lists, and dictionaries with texts as "
            "keys; metrics are numbers by name."
        ) from e


def check_step(step: Any) -> int:
    """Returns the number of a step; raises CheckpointError if it is none."""
    if not arguments.is_integer(step) or not 0 <= step < _MOST_STEPS:
        raise CheckpointError(
            f"The step {step!r}, of type {type(step).__name__}, must be an integer "
            "from 0 to 2**63 - 1, such as int(state.step)."
        )
    return int(step)


def to_json(value: Any) -> bytes:
    """Serializes a value to indented JSON with sorted keys, so that equal values have
    equal bytes.

    Raises:
      ValueError: if `from_json` would give another value, other than a list for a
        tuple; the message shows what is wrong.
    """
    return _dump(_encoded(value))


def from_json(content: bytes) -> dict[str, Any]:
    """Parses an object that `to_json` wrote.

    Raises:
      ValueError: if the content is not a JSON object.
    """
    return _with_nonfinite(jsonfile.loads(content))


def seal(value: dict[str, Any]) -> bytes:
    """Serializes an object to JSON together with its checksum."""
    return _seal(_encoded(value))


def unseal(content: bytes) -> dict[str, Any]:
    """Returns the object that `seal` wrote.

    Raises:
      ValueError: if the content is not what was written.
    """
    value = jsonfile.loads(content).get("content")
    # Every byte is compared, so that even a change that JSON ignores is found. The same
    # value has the same bytes again, since keys are sorted, and floats do not change on
    # their way through text.
    if not isinstance(value, dict) or content != _seal(value):
        raise ValueError("its checksum differs")
    return _with_nonfinite(value)


def _seal(value: dict[str, Any]) -> bytes:
    return _dump({"content": value, "sha256": checksum(_dump(value))})


def _dump(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def _encoded(value: Any, depth: int = 0) -> Any:
    """Returns the JSON values of a value; raises ValueError if it has none that
    `_with_nonfinite` turns back.
    """
    if isinstance(value, str):
        if not value.isascii() and json.loads(json.dumps(value)) != value:
            raise ValueError(f"{value!r} has halves of a character, which JSON joins")
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return {_NOT_FINITE: str(float(value))}
    if value is None or isinstance(value, float):
        return value
    if isinstance(value, int):
        # Python refuses to write, and to read, more than some thousand digits.
        str(value)
        return value
    if depth == _DEPTH:
        raise ValueError("it is nested too deeply")
    if isinstance(value, list | tuple):
        return [_encoded(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is of type {type(value).__name__}")
    for key in value:
        if not isinstance(key, str):
            raise ValueError(f"the key {key!r} of {value!r} is no text")
    if value.keys() == {_NOT_FINITE}:
        raise ValueError(f"{value!r} has the form of a number that is not finite")
    return {_encoded(key): _encoded(item, depth + 1) for key, item in value.items()}


def _with_nonfinite(value: Any) -> Any:
    """Replaces each JSON substitute with the number that it stands for."""
    if isinstance(value, list):
        return [_with_nonfinite(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_NOT_FINITE} and value[_NOT_FINITE] in ("nan", "inf", "-inf"):
        return float(value[_NOT_FINITE])
    return {key: _with_nonfinite(item) for key, item in value.items()}
