"""A run's work directory: its layout, the run that it belongs to, and its lock.

config.json      the run's config, its identity, and its experiment's file and source
origin.json      a checksum of the data, the commit of the experiment's code,
                 libraries, devices, XLA's flags; see `xshard.files.provenance`
reached.json     the newest checkpoint that has counted; the run never resumes from
                 an earlier one by itself
roll_backs.json  the checkpoints to which the run rolled back, and the data it
                 skipped; see `xshard.run.roll_backs`
checkpoints/     see `xshard.checkpoint`
metrics.jsonl    a row for each logged step and each evaluation; see
                 `xshard.metrics.rows`
metrics.csv      the same rows as a table, if config.writers lists it; see
                 `xshard.metrics.writers`
tensorboard/     the same rows as event files, likewise
wandb/           the same rows as Weights & Biases stores them, likewise
mlflow/          which rows MLflow has, likewise
samples.jsonl    a row for each step after which the experiment logged samples; see
                 `xshard.samples`
norms.jsonl      the norms of all parameters after some steps, if the run logs them; see
                 `xshard.metrics.norms`
results.json     the final evaluation, and whether the run ended with finite values;
                 see `xshard.files.results`
status.json      the current activity of each process; see `xshard.pod.status`
spans/           what each process spends its time with; see `xshard.base.spans`
attempts.jsonl   the last status of the first process, for each earlier start; see
                 `xshard.pod.attempts`
compiled/        compiled programs; see `xshard.files.compile_cache`
eval/            the output of `--mode=eval`; see `xshard.modes.continuous_eval`
profile/         traces of steps, and the memory of the devices when it ran out; see
                 `xshard.wings.profiles`
logs/            the printed output of all processes except the first, one file each
set_aside/       the files that --restart_from_scratch moved away, in one folder per run
STOP             created by a person; the run saves and stops, and does not start until
                 the file is removed
PROFILE          created by a person, with a number of steps or empty; the run traces
                 its next steps, and removes the file
.lock, .holder.json  the lock of the directory, and who holds it; see
                 `xshard.files.claim`
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_collections
import msgspec

from xshard import config_values, errors
from xshard.files import claim as claim_lib
from xshard.files import disk, jsonfile, sources
from xshard.files import identity as identity_lib
from xshard.files import provenance as provenance_lib

RESULTS = "results.json"
REACHED = "reached.json"
# The key of the identity in config.json, beside the config's own keys.
IDENTITY = "_run"
SET_ASIDE = "set_aside"
# A user creates this file: the run saves and stops, and does not train until it is
# removed.
STOP_FILE = "STOP"
# A user creates this file: the run traces its next steps and removes it.
PROFILE_FILE = "PROFILE"
PROFILES = "profile"
# The entries that stay in place when a run is set aside.
_STAYS = {
    SET_ASIDE,
    claim_lib.LOCK,
    claim_lib.HOLDER,
    "logs",
    "launch.log",
    STOP_FILE,
    PROFILE_FILE,
}


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


class Workdir:
    """The directory of one run.

    Attributes:
      path: the absolute path of the directory, which need not exist.
      checkpoints: where its checkpoints are unless the config names another place.
      metrics, results, config, origin, roll_backs: the paths of its files, as listed
        above.
      claim: the claim to the directory, while this process holds it; else None.
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(disk.expanded(path)).absolute()
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.results = self.path / RESULTS
        self.config = self.path / "config.json"
        self.origin = self.path / "origin.json"
        self.roll_backs = self.path / "roll_backs.json"
        self._reached = self.path / REACHED
        self.claim: claim_lib.Claim | None = None

    def identity(self) -> provenance_lib.Identity | None:
        """Returns the identity of the run in this directory; None if there is no run.

        Raises:
          UserError: if config.json is damaged, or no run has written it.
        """
        config = _read(self.config, "config")
        if config is None:
            return None
        try:
            return jsonfile.parse(config.get(IDENTITY), provenance_lib.Identity)
        except ValueError as e:
            raise errors.UserError(
                f"{self.config} is not a valid config of a run: in '{IDENTITY}', "
                f"{e}; give a new --workdir."
            ) from e

    def run_id(self) -> str:
        """Returns the ID of the run in this directory; empty if there is no run."""
        identity = self.identity()
        return "" if identity is None else identity.id

    def step_program(self) -> str | None:
        """Returns the program that makes the steps of the run in this directory.

        Returns:
          `identity.LOOP` or `identity.STEP`; None if there is no run.
        """
        config = _read(self.config, "config")
        if config is None:
            return None
        return identity_lib.step_program(config[IDENTITY])

    def check_source(self, experiment: str) -> list[str]:
        """Checks that an experiment that was imported is that of the run here.

        Args:
          experiment: the dotted path of its class.

        Returns:
          A line if its source was edited.

        Raises:
          UserError: if it is other code, from another file.
        """
        noted = (_read(self.config, "config") or {}).get(IDENTITY)
        return sources.compare(noted, experiment, f"{self.path} holds")

    def check(self, config: ml_collections.ConfigDict) -> list[str]:
        """Checks whether a config may run in this directory; writes nothing.

        Returns:
          The changes of the config since the run was started, one text for each key,
          and of the experiment's source.

        Raises:
          UserError: if the directory belongs to another run, or a change would make it
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
            self._check_holds_no_run()
            return []
        noted = old.pop(IDENTITY, None)
        new = identity_lib.plain(config)
        whose = f"--workdir={self.path} holds"
        changes = identity_lib.compare(old, new, whose)
        experiment = str(new.get("experiment"))
        return changes + sources.compare(noted, experiment, whose)

    def _check_holds_no_run(self) -> None:
        """Raises UserError if a directory without a config has files of a run."""
        written_by_runs = (self.checkpoints, self.metrics, self.results, self._reached)
        names = [path.name for path in written_by_runs if disk.exists(path)]
        if names:
            raise errors.UserError(
                f"--workdir={self.path} holds {', '.join(names)} but no "
                f"{self.config.name}, so the run that wrote them is unknown; give a "
                "new directory."
            )

    def check_provenance(
        self, provenance: provenance_lib.Provenance, *, exact: bool = False
    ) -> list[str]:
        """Checks whether the run in this directory may resume with a provenance.

        It writes nothing.

        Args:
          provenance: the present provenance.
          exact: whether the run must continue bit for bit.

        Returns:
          The changes since the run was started, one text for each.

        Raises:
          UserError: if the run was trained on other data; or, if exact, with what may
            compute other bits.
        """
        content = _read(self.origin, "origin")
        if content is None:
            # There is no run, or its first start was killed before it wrote the file.
            return []
        old = provenance_lib.from_json(content)
        return provenance_lib.compare(old, provenance, self.path, exact=exact)

    def reached(self) -> NewestCheckpoint | None:
        """Returns the newest checkpoint that this run reached; None if it has none.

        Raises:
          UserError: if the file that records it is damaged.
        """
        content = _read(self._reached, "high-water mark")
        if content is None:
            return None
        try:
            return NewestCheckpoint(
                step=int(content["step"]),
                folder=str(content["folder"]),
                checkpoints=str(content["checkpoints"]),
            )
        except (TypeError, KeyError, ValueError) as e:
            raise errors.UserError(
                f"{self._reached} is not valid: {content!r}. Delete it if you know "
                "that the newest checkpoint is in its place."
            ) from e

    def record_newest(self, reached: NewestCheckpoint) -> None:
        """Records the newest checkpoint that the run reached, durably."""
        self.write(self._reached, reached._asdict())

    def write(
        self, path: pathlib.Path, value: Any, *, keep_nonfinite: bool = False
    ) -> None:
        """Replaces a file of the directory as `jsonfile.write` does.

        Raises:
          UserError: if it cannot be written, or another process has taken the directory
            over. Then the file is that process's, and stays as it is.
        """
        self._check(path)
        jsonfile.write(path, value, keep_nonfinite=keep_nonfinite)

    def delete(self, path: pathlib.Path) -> None:
        """Deletes a file of the directory; raises UserError as `write` does."""
        self._check(path)
        with disk.writing(path):
            path.unlink(missing_ok=True)
            disk.sync(path.parent)

    def _check(self, path: pathlib.Path) -> None:
        """Raises UserError if another process has taken the directory over, before a
        change of one of its files.
        """
        if self.claim is not None:
            with disk.writing(path):
                self.claim.check()

    @contextlib.contextmanager
    def opened(
        self,
        config: ml_collections.ConfigDict,
        identity: provenance_lib.Identity | None = None,
        provenance: provenance_lib.Provenance | None = None,
        set_aside: str = "",
        step_program: str | None = None,
    ) -> Iterator[None]:
        """Holds the lock of the directory, with the run's config and provenance in it.

        Args:
          config: the run's config.
          identity: the run's identity; by default that of the run in the directory, or
            a new one.
          provenance: the run's provenance; None: it is not checked and not written.
          set_aside: the ID of a run to move away first, if that run is in the
            directory.
          step_program: the program that makes the run's steps; by default that of the
            run in the directory.

        Raises:
          UserError: if the directory cannot be written, another process runs in it, or
            it belongs to another run.
        """
        with self._locked():
            # The caller has checked the directory, but before it held the lock. Another
            # process may have used the directory since then.
            if set_aside and set_aside == self.run_id():
                self._set_aside(set_aside, config.checkpoint.directory)
            self.check(config)
            if provenance is not None:
                self.check_provenance(provenance)
            if identity is None:
                identity = self.identity() or identity_lib.new(config)
            step_program = step_program or self.step_program() or identity_lib.STEP
            run = {
                **msgspec.structs.asdict(identity),
                identity_lib.STEP_PROGRAM: step_program,
                **sources.of_experiment(str(config.get("experiment"))),
            }
            content = {IDENTITY: run, **identity_lib.plain(config)}
            self.write(self.config, content, keep_nonfinite=True)
            if provenance is not None:
                self.write(self.origin, provenance._asdict())
            yield

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Creates the directory if necessary, and holds its lock.

        Raises:
          UserError: if the directory cannot be written, or another process holds the
            lock.
        """
        try:
            claim = claim_lib.Claim(self.path)
        except errors.UserError as e:
            raise errors.UserError(f"--workdir={e}") from e
        self.claim = claim
        try:
            yield
        finally:
            self.claim = None
            claim.release()

    def check_noticed(self) -> None:
        """Raises UserError if it is known that another process has taken the directory
        over; asks no disk.
        """
        if self.claim is not None:
            self.claim.check_noticed()

    def _set_aside(self, run: str, elsewhere: str) -> None:
        """Moves everything that a run has written to a folder of its own.

        A repeated call completes an interrupted one.

        Args:
          run: the run's ID.
          elsewhere: the folder of the run's checkpoints if it is not in the work
            directory; it is renamed in place, so that the checkpoints stay on their
            disk. Empty: there is none.
        """
        elsewhere = disk.expanded(elsewhere)
        if elsewhere and disk.exists(elsewhere):
            with disk.writing(pathlib.Path(elsewhere)):
                os.rename(elsewhere, f"{elsewhere.rstrip('/')}.{run}")
        folder = self.path / SET_ASIDE / run
        entries = disk.entries(self.path) or ()
        names = [entry.name for entry in entries if entry.name not in _STAYS]
        # config.json names the run. It moves last, so that an interrupted command can
        # be repeated.
        names.sort(key=lambda name: name == self.config.name)
        with disk.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name in names:
                # Another process that has taken the directory over may have done this,
                # and begun a new run.
                self._check(folder)
                os.rename(self.path / name, folder / name)
            disk.sync(folder)
            disk.sync(self.path)

    def open_log(self, index: int) -> int:
        """Opens the log of a process for appending; returns its file descriptor.

        Raises:
          UserError: if the log cannot be written.
        """
        path = self.path / "logs" / f"process_{index}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as e:
            raise errors.UserError(f"{path} cannot be written: {e.strerror}.") from e


def config_in(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a run's config, as its experiment gets them.

    Args:
      content: the content of config.json.

    Raises:
      UserError: if a function or a class of the config cannot be imported.
    """
    values = {key: value for key, value in content.items() if key != IDENTITY}
    return config_values.from_json(values)


def _read(path: pathlib.Path, what: str) -> dict[str, Any] | None:
    """Reads the JSON object in a file of the directory; None if there is no file."""
    try:
        return jsonfile.read_if_exists(path)
    except errors.UserError as e:
        raise errors.UserError(
            f"{e} It must hold the run's {what}: restore it, or give a new --workdir."
        ) from e
