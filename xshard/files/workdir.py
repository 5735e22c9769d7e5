"""A run's work directory: its owner and its content.

config.json      the run's config and its identity origin.json      a checksum of the
data, the commit of the experiment's code, libraries, devices, XLA's flags reached.json
the newest checkpoint that has counted; the run never resumes from an earlier one by
itself roll_backs.json  the checkpoints to which the run rolled back, and the data it
skipped; see `xshard.run.roll_backs` checkpoints/     see `xshard.checkpoint`
metrics.jsonl    a row for each logged step and each evaluation metrics.csv      the
same rows as a table, if config.writers lists it; see `xshard.metrics.writers`
tensorboard/     the same rows as event files, likewise wandb/           the same rows
as Weights & Biases stores them, likewise samples.jsonl    a row for each step after
which the experiment logged samples; see `xshard.samples` results.json     the final
evaluation, and whether the run ended with finite values status.json      the current
activity of each process; see `xshard.pod.watchdog` attempts.jsonl   the last status of
the first process, for each earlier start; see `xshard.pod.attempts` eval/
the output of `--mode=eval`; see `xshard.modes.continuous_eval` logs/            the
printed output of all processes except the first, one file each set_aside/       the
files that --restart_from_scratch moved away, in one folder per run STOP
created by a person; the run saves and stops, and does not start until the file is
removed
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
from xshard.files import disk, forks, jsonfile
from xshard.files import identity as identity_lib

RESULTS, REACHED = "results.json", "reached.json"
# The key of the identity in config.json, beside the config's own keys.
IDENTITY = "_run"
SET_ASIDE = "set_aside"
# The entries that stay in place when a run is set aside.
_STAYS = {SET_ASIDE, ".lock", "logs", "launch.log", "STOP"}


class NewestCheckpoint(NamedTuple):
    """The newest checkpoint of a run that has counted.

    Attributes:
      step: the checkpoint's step.
      folder: the name of the checkpoint's folder.
      checkpoints: the store that held it.
    """

    step: int
    folder: str
    checkpoints: str


class Origin(NamedTuple):
    """The origin of a run beside its config. An unknown value is an empty text.

    Attributes:
      training: the training data, as `xshard.data.summary` describes it.
      evaluation: the evaluation data, described likewise.
      commit: the git commit of the experiment's code.
      libraries: the versions of the libraries.
      devices: the number and kind of the devices, the number of processes, and for CPUs
        the cores of the first.
      flags: XLA's flags, from the environment.
      chip: the kind of the devices, as far as it affects their arithmetic.
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
        """Checks whether a config may run in this directory; writes nothing.

        Returns:
          The changes of the config since the run was started, one text for each key.

        Raises:
          ValueError: if the directory belongs to another run, or a change would make it
            another run.
        """
        # The directory need not exist, but its nearest existing ancestor must be a
        # directory.
        existing = self.path
        while not disk.exists(existing):
            existing = existing.parent
        if not existing.is_dir():
            where = "" if existing == self.path else f" is below {existing}, which"
            raise errors.UserError(
                f"--workdir={self.path}{where} is a file; give a directory."
            )
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
                    f"--workdir={self.path} holds {', '.join(names)} but no {self.config.name}, so "
                    "the run that wrote them is unknown; give a new directory."
                )
            return []
        old.pop(IDENTITY, None)
        return identity_lib.compare(
            old, identity_lib.plain(config), f"--workdir={self.path} holds"
        )

    def identity(self) -> identity_lib.Identity | None:
        """Returns the identity of the run in this directory; None if there is no run,
        or an older version wrote it.
        """
        config = _read(self.config, "config") or {}
        content = config.get(IDENTITY)
        if content is None:
            return None
        try:
            return identity_lib.Identity(
                str(content["id"]), str(content["fingerprint"])
            )
        except (TypeError, KeyError) as e:
            raise errors.UserError(
                f"{self.config} is not a valid config of a run: '{IDENTITY}' is {content!r}; give a new --workdir."
            ) from e

    def reached(self) -> NewestCheckpoint | None:
        """Returns the newest checkpoint that this run reached; None if none is
        recorded.
        """
        content = _read(self._reached, "high-water mark")
        if content is None:
            return None
        try:
            step, folder = int(content["step"]), str(content["folder"])
            return NewestCheckpoint(step, folder, str(content["checkpoints"]))
        except (TypeError, KeyError, ValueError) as e:
            raise errors.UserError(
                f"{self._reached} is not valid: {content!r}. Delete it if you know that the newest checkpoint is "
                "in its place."
            ) from e

    def record_newest(self, reached: NewestCheckpoint) -> None:
        """Records the newest checkpoint that the run reached, durably."""
        jsonfile.write(self._reached, reached._asdict())

    def has_history(self) -> bool:
        """Returns whether the directory has rows or results, which a run that starts
        from step 0 would write again.
        """
        return any(disk.read(path) for path in (self.metrics, self.results))

    def check_origin(self, origin: Origin, *, exact: bool = False) -> list[str]:
        """Checks whether the run in this directory may resume with an origin; writes
        nothing.

        Args:
          origin: the current origin.
          exact: whether the run must continue bit for bit.

        Returns:
          Other changes since the run was started, one text for each.

        Raises:
          UserError: if the run was trained on other data; or, if exact, with what may
            compute other bits.
        """
        content = _read(self.origin, "origin")
        # Older versions wrote no origin; `opened` adds it.
        if content is None:
            return []
        old = Origin(*(str(content.get(name, "")) for name in Origin._fields))
        if old.training and origin.training and old.training != origin.training:
            raise errors.UserError(
                f"--workdir={self.path} holds a run with other training data: {old.training}; now there are "
                f"{origin.training}. A run cannot continue with other data: restore that data, "
                "or start a new run in a new directory, with the parameters of this one by "
                f"--init_from={self.path}."
            )
        for name in ("chip", "libraries", "flags") if exact and old.chip else ():
            was, now = getattr(old, name), getattr(origin, name)
            if was != now:
                raise errors.UserError(
                    f"--workdir={self.path} holds a run with reduction.arithmetic='exact', which continues bit for bit. "
                    f"Its {name} changed from {was or 'none'} to {now or 'none'}, so the bits may differ. Restore the "
                    f"former {name}, or give up equal bits with --config.reduction.arithmetic=float."
                )
        changes = []
        if old.evaluation and old.evaluation != origin.evaluation:
            changes.append(f"evaluation data: {old.evaluation} -> {origin.evaluation}")
        if old.commit and old.commit != origin.commit:
            changes.append(f"commit: {old.commit} -> {origin.commit or 'none'}")
        if old.libraries and old.libraries != origin.libraries:
            was, now = (x.libraries.split(", ") for x in (old, origin))
            before = ", ".join(x for x in was if x not in now)
            after = ", ".join(x for x in now if x not in was)
            changes.append(f"libraries: {before} -> {after}")
        return changes

    @contextlib.contextmanager
    def opened(
        self,
        config: ml_collections.ConfigDict,
        identity: identity_lib.Identity | None = None,
        origin: Origin | None = None,
        set_aside: str = "",
    ) -> Iterator[None]:
        """Locks the directory for this run, and writes the run's config and origin.

        Args:
          config: the run's config.
          identity: the run's identity; by default that of the run in the directory, or
            a new one.
          origin: the run's origin; None: it is not checked and not written.
          set_aside: the ID of a run to move away first, if that run is in the
            directory.

        Raises:
          ValueError: if the directory cannot be written, or another process runs in it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = disk.retried(lambda: (self.path / ".lock").open("w"))
        except OSError as e:
            raise errors.UserError(
                f"--workdir={self.path} cannot be written: {e.strerror} ({e.filename})."
            ) from e
        # The kernel drops the lock when the process ends, however it ends, and no
        # forked child has the file open.
        with lock, contextlib.ExitStack() as stack:
            stack.callback(forks.undo_in_children(lock.close))
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
            # The checks run again under the lock: another process may have used the
            # directory since the caller's.
            if set_aside and set_aside == self.id_to_set_aside():
                self._set_aside(set_aside, config.checkpoint.directory)
            self.check(config)
            if origin is not None:
                self.check_origin(origin)
            whose = identity or self.identity() or identity_lib.new(config)
            values = {IDENTITY: whose._asdict(), **identity_lib.plain(config)}
            jsonfile.write(self.config, values, keep_nonfinite=True)
            if origin is not None:
                jsonfile.write(self.origin, origin._asdict())
            yield

    def open_log(self, index: int) -> int:
        """Opens the log of a process for appending; returns its file descriptor.

        Raises:
          ValueError: if the log cannot be written.
        """
        path = self.path / "logs" / f"process_{index}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as e:
            raise errors.UserError(f"{path} cannot be written: {e.strerror}.") from e

    def write_results(self, results: dict[str, Any]) -> None:
        """Writes the results of the run, with the run's ID."""
        identity = self.identity()
        if identity is not None:
            results = {**results, "run": identity.id}
        jsonfile.write(self.results, results)

    def failure(self, goes_on: bool) -> str:
        """Returns the reason if the run previously ended with nonfinite values; empty
        if it did not.

        If the run goes on, the result is empty, and results.json is deleted if the run
        ended that way or ended early.

        Args:
          goes_on: whether the run goes on.
        """
        why = nonfinite_reason(self.path)
        if goes_on and (why or callback_stop(self.path) is not None):
            self.results.unlink()
        return "" if goes_on else why

    def id_to_set_aside(self) -> str:
        """Returns the ID by which --restart_from_scratch names the run in this
        directory; empty if there is none.
        """
        content = disk.read(self.config)
        if content is None:
            return ""
        identity = self.identity()
        if identity is not None:
            return identity.id
        # Older versions wrote no identity, so their runs are named by a checksum of the
        # config.
        return hashlib.sha256(content).hexdigest()[: identity_lib.ID_LENGTH]

    def _set_aside(self, run: str, elsewhere: str) -> None:
        """Moves everything that a run has written to its own folder. A repeated call
        completes an interrupted one.

        Args:
          run: the run's ID.
          elsewhere: the folder of the run's checkpoints if it is not in the work
            directory; it is renamed in place, so that the checkpoints stay on their
            disk. Empty: there is none.
        """
        if elsewhere and disk.exists(elsewhere):
            with disk.writing(pathlib.Path(elsewhere)):
                os.rename(elsewhere, f"{elsewhere.rstrip('/')}.{run}")
        folder = self.path / SET_ASIDE / run
        names = [
            entry.name
            for entry in disk.entries(self.path) or ()
            if entry.name not in _STAYS
        ]
        # config.json names the run. It moves last, so that an interrupted command can
        # be repeated.
        names.sort(key=lambda name: name == self.config.name)
        with disk.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name in names:
                os.rename(self.path / name, folder / name)
            disk.sync(folder)
            disk.sync(self.path)


def _read(path: pathlib.Path, what: str) -> dict[str, Any] | None:
    """Reads a file of the directory that holds an object; returns None if the file does
    not exist.
    """
    try:
        return jsonfile.read_if_exists(path)
    except errors.UserError as e:
        raise errors.UserError(
            f"{e} It must hold the run's {what}: restore it, or give a new --workdir."
        ) from e


def callback_stop(directory: pathlib.Path) -> tuple[int, str] | None:
    """Returns the step at which a callback ended the run in a work directory, and the
    reason; None if none did.

    Raises:
      UserError: if the run's results.json is damaged.
    """
    results = jsonfile.read_if_exists(directory / RESULTS) or {}
    why, step = results.get("ended"), results.get("step")
    return (step, str(why)) if why and type(step) is int else None


def nonfinite_reason(directory: pathlib.Path) -> str:
    """Returns the reason if the run in a work directory ended with nonfinite values;
    empty otherwise.

    Raises:
      UserError: if the run's results.json is damaged.
    """
    results = jsonfile.read_if_exists(directory / RESULTS) or {}
    if results.get("finite") is not False:
        return ""
    return str(results.get("why", "not finite"))
