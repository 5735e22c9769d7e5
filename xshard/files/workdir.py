"""A run's directory: whose it is, and what is in it.

config.json      the config that the run was started with, and the run's identity
origin.json      a checksum of the data, the commit of the experiment's code, libraries, devices, XLA's flags
reached.json     the newest checkpoint that has counted: below it the run never begins again by itself
roll_backs.json  to which checkpoints it has gone back, and past what data; see `xshard.run.roll_backs`
checkpoints/     see `xshard.checkpoint`
metrics.jsonl    a row for each logged step and each evaluation
metrics.csv      the same as a table, and
tensorboard/     as event files, and
wandb/           as Weights & Biases keeps them, if config.writers has them; see `xshard.metrics.writers`
samples.jsonl    a row for each step after which the experiment has shown samples; see `xshard.samples`
results.json     the final evaluation, and whether the run has ended finite
status.json      what each process is doing; see `xshard.pod.watch`
attempts.jsonl   what the first process of each earlier start has said last; see `xshard.pod.attempts`
eval/            what `--mode=eval` writes; see `xshard.modes.follow`
logs/            what the processes but the first print, a file each
set_aside/       what --restart_from_scratch has put away, in a folder for each run
STOP             made by a person: the run saves and leaves until it is removed
"""

import contextlib
import fcntl
import hashlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_collections

from xshard import errors
from xshard.files import disk, jsonfile
from xshard.files import identity as identity_lib

RESULTS, REACHED = "results.json", "reached.json"
# In config.json, beside the config's own keys.
IDENTITY = "_run"
SET_ASIDE = "set_aside"
# What stays where it is when a run is set aside; config.json, which names the run, goes last.
_STAYS = {SET_ASIDE, ".lock", "logs", "launch.log", "STOP"}


class Reached(NamedTuple):
    """The newest checkpoint that a run has come to.

    Attributes:
      step: of the newest checkpoint that has counted.
      folder: the checkpoint's.
      checkpoints: where it was.
    """

    step: int
    folder: str
    checkpoints: str


class Origin(NamedTuple):
    """The origin of a run beside its config; empty texts where that is not known.

    Attributes:
      training: the training data, as `xshard.data.summary` has it.
      evaluation: the data that it is judged on.
      commit: the git commit of the experiment's code.
      libraries: their versions.
      devices: how many of which kind, on how many processes, and of CPUs on how many cores of the first.
      flags: those of XLA, from the environment.
      chip: the kind of the devices, as far as their arithmetic shows it.
    """

    training: str
    evaluation: str
    commit: str
    libraries: str = ""
    devices: str = ""
    flags: str = ""
    chip: str = ""


class Workdir:
    """The directory of one run."""

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path).absolute()
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.results = self.path / RESULTS
        self.config = self.path / "config.json"
        self.origin = self.path / "origin.json"
        self.roll_backs = self.path / "roll_backs.json"
        self._reached = self.path / REACHED

    def check(self, config: ml_collections.ConfigDict) -> list[str]:
        """Sees whether a config may run here; writes nothing.

        Returns:
          What has changed since the run was started, one text for each key.

        Raises:
          ValueError: if the directory is another run's, or a change would make it another run.
        """
        existing = self.path
        while not disk.exists(existing):
            existing = existing.parent
        if not existing.is_dir():
            where = "" if existing == self.path else f" is below {existing}, which"
            raise errors.UserError(f"--workdir={self.path}{where} is a file; give a directory.")
        if disk.exists(self.checkpoints) and not self.checkpoints.is_dir():
            raise errors.UserError(
                f"{self.checkpoints} is a file; move it away, or give a new --workdir."
            )
        old = _read(self.config, "config")
        if old is None:
            of_runs = (self.checkpoints, self.metrics, self.results, self._reached)
            names = [path.name for path in of_runs if disk.exists(path)]
            if names:
                raise errors.UserError(
                    f"--workdir={self.path} holds {', '.join(names)} but no {self.config.name}, so that "
                    "it cannot be told whose they are; give a new directory."
                )
            return []
        old.pop(IDENTITY, None)
        return identity_lib.compare(old, identity_lib.plain(config), f"--workdir={self.path} holds")

    def identity(self) -> identity_lib.Identity | None:
        """The identity of the run that is here; None if there is none, or one of a version that had no such."""
        config = _read(self.config, "config") or {}
        content = config.get(IDENTITY)
        if content is None:
            return None
        try:
            return identity_lib.Identity(str(content["id"]), str(content["fingerprint"]))
        except (TypeError, KeyError) as e:
            raise errors.UserError(
                f"{self.config} is not what a run has written: '{IDENTITY}' is {content!r}; give a new --workdir."
            ) from e

    def reached(self) -> Reached | None:
        """Returns how far the run here has come, as far as it is known."""
        content = _read(self._reached, "high-water mark")
        if content is None:
            return None
        try:
            step, folder = int(content["step"]), str(content["folder"])
            return Reached(step, folder, str(content["checkpoints"]))
        except (TypeError, KeyError, ValueError) as e:
            raise errors.UserError(
                f"{self._reached} is not what a run has written: {content!r}. Delete it if you know that the newest "
                "checkpoint is there."
            ) from e

    def note_reached(self, reached: Reached) -> None:
        """Notes how far the run has come, durably."""
        jsonfile.write(self._reached, reached._asdict())

    def has_history(self) -> bool:
        """Returns whether rows or results are here, which a run from the start would write anew."""
        return any(disk.read(path) for path in (self.metrics, self.results))

    def check_origin(self, origin: Origin, *, exact: bool = False) -> list[str]:
        """Sees whether a run of this data may go on here; writes nothing.

        Args:
          origin: what there is now.
          exact: whether the run is to go on in the same bits.

        Returns:
          What else has changed since the run was started, one text for each.

        Raises:
          UserError: if the run here was trained on other data; or, if exact, by what computes other bits.
        """
        content = _read(self.origin, "origin")
        # A directory of a version that kept none gets it.
        if content is None:
            return []
        old = Origin(*(str(content.get(name, "")) for name in Origin._fields))
        if old.training and origin.training and old.training != origin.training:
            raise errors.UserError(
                f"--workdir={self.path} holds a run with other training data: {old.training}; now there are "
                f"{origin.training}. Going on would make it neither the one nor the other: give it its data back, "
                "or begin a new run in a new directory, with the parameters of this one by "
                f"--init_from={self.path}."
            )
        for name in ("chip", "libraries", "flags") if exact and old.chip else ():
            was, now = getattr(old, name), getattr(origin, name)
            if was != now:
                raise errors.UserError(
                    f"--workdir={self.path} holds a run with reduction.arithmetic='exact', which goes on in the same bits, and "
                    f"its {name} was {was or 'none'}; now it is {now or 'none'}, which may compute others. Go on where it was, "
                    "or without the promise: --config.reduction.arithmetic=float."
                )
        changes = []
        if old.evaluation and old.evaluation != origin.evaluation:
            changes.append(f"evaluation data: {old.evaluation} -> {origin.evaluation}")
        if old.commit and old.commit != origin.commit:
            changes.append(f"commit: {old.commit} -> {origin.commit or 'none'}")
        return changes

    @contextlib.contextmanager
    def opened(
        self,
        config: ml_collections.ConfigDict,
        identity: identity_lib.Identity | None = None,
        origin: Origin | None = None,
        set_aside: str = "",
    ) -> Iterator[None]:
        """Makes the directory this run's, and nobody else's meanwhile.

        Args:
          config: the run's config.
          identity: the run's; by default that of the run that is here, or a new one.
          origin: what it is trained on, if it is.
          set_aside: the ID of a run that is put away first, if it is the one that is here.

        Raises:
          ValueError: if it cannot be written, or another process runs in it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = disk.retried(lambda: (self.path / ".lock").open("w"))
        except OSError as e:
            raise errors.UserError(
                f"--workdir={self.path} cannot be written: {e.strerror} ({e.filename})."
            ) from e
        # The kernel drops the lock when the process ends, however it ends.
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as e:
                raise errors.UserError(
                    f"--workdir={self.path} is in use by another process."
                ) from e
            except OSError as e:
                raise errors.UserError(
                    f"{self.path / '.lock'} cannot be locked: {e.strerror}."
                ) from e
            # Again: another process may have made it its own since the first check.
            if set_aside and set_aside == self.id_to_set_aside():
                self._set_aside(set_aside, config.checkpoint.directory)
            self.check(config)
            if origin is not None:
                self.check_origin(origin)
            whose = identity or self.identity() or identity_lib.new(config)
            jsonfile.write(self.config, {IDENTITY: whose._asdict(), **identity_lib.plain(config)})
            if origin is not None:
                jsonfile.write(self.origin, origin._asdict())
            yield

    def open_log(self, index: int) -> int:
        """A file descriptor, to append to, for what a process prints.

        Raises:
          ValueError: if it cannot be written.
        """
        path = self.path / "logs" / f"process_{index}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as e:
            raise errors.UserError(f"{path} cannot be written: {e.strerror}.") from e

    def write_results(self, results: dict[str, Any]) -> None:
        """Writes how the run has ended, and which run it is."""
        identity = self.identity()
        if identity is not None:
            results = {**results, "run": identity.id}
        jsonfile.write(self.results, results)

    def failure(self, goes_on: bool) -> str:
        """Returns why the run has not ended finite before; of one that goes on it is forgotten, as is an early end."""
        why = not_finite(self.path)
        if goes_on and (why or ended(self.path) is not None):
            self.results.unlink()
        return "" if goes_on else why

    def id_to_set_aside(self) -> str:
        """Returns what --restart_from_scratch must name to put away the run that is here; empty if there is none."""
        content = disk.read(self.config)
        if content is None:
            return ""
        identity = self.identity()
        if identity is not None:
            return identity.id
        # A run of a version that had no identity is named by its config.
        return hashlib.sha256(content).hexdigest()[: identity_lib.ID_LENGTH]

    def _set_aside(self, run: str, elsewhere: str) -> None:
        """Moves all that a run has written to a folder of its own; what was begun before is gone on with.

        Args:
          run: its ID.
          elsewhere: where its checkpoints are, if they are not in the directory; they stay on their disk.
        """
        if elsewhere and disk.exists(elsewhere):
            with disk.writing(pathlib.Path(elsewhere)):
                os.rename(elsewhere, f"{elsewhere.rstrip('/')}.{run}")
        folder = self.path / SET_ASIDE / run
        names = [entry.name for entry in disk.entries(self.path) or () if entry.name not in _STAYS]
        # The config names the run: while it is here, a command that was cut off can be repeated.
        names.sort(key=lambda name: name == self.config.name)
        with disk.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name in names:
                os.rename(self.path / name, folder / name)
            disk.sync(folder)
            disk.sync(self.path)


def _read(path: pathlib.Path, what: str) -> dict[str, Any] | None:
    """A file of the directory that holds a dictionary; None if there is none."""
    try:
        return jsonfile.read_if_exists(path)
    except errors.UserError as e:
        raise errors.UserError(
            f"{e} It is to be the run's {what}: give it back, or give a new --workdir."
        ) from e


def ended(directory: pathlib.Path) -> tuple[int, str] | None:
    """The step at which a callback has ended the run in a work directory, and why; None if none has.

    Raises:
      UserError: if the run has ended, and what it has said is damaged.
    """
    results = jsonfile.read_if_exists(directory / RESULTS) or {}
    why, step = results.get("ended"), results.get("step")
    return (step, str(why)) if why and type(step) is int else None


def not_finite(directory: pathlib.Path) -> str:
    """Returns why the run in a work directory has not ended finite; empty if it has, or has not ended.

    Raises:
      UserError: if it has ended, and what it has said is damaged.
    """
    results = jsonfile.read_if_exists(directory / RESULTS) or {}
    if results.get("finite") is not False:
        return ""
    return str(results.get("why", "not finite"))
