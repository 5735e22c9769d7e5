"""A run's directory: whose it is, and what is in it.

config.json      the config that the run was started with
origin.json      a checksum of the data, and the commit of the experiment's code
checkpoints/     see `xshard.checkpoint`
metrics.jsonl    a row for each logged step and each evaluation
metrics.csv      the same as a table, and
tensorboard/     as event files, and
wandb/           as Weights & Biases keeps them, if config.writers has them; see `xshard.writers`
results.json     the final evaluation, and whether the run has ended finite
status.json      what each process is doing; see `xshard.watch`
eval/            what `--mode=eval` writes; see `xshard.follow`
logs/            what the processes but the first print, a file each
STOP             made by a person: the run saves and leaves until it is removed
"""

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_collections

from xshard import errors, jsonfile, metrics

RESULTS = "results.json"
# What may change between two parts of a run: how long it is, what it shows, and what it runs on. Anything
# else would make it another run.
_MAY_CHANGE = (
    "steps", "log_every_steps", "eval_every_steps", "eval_batch_size", "writers", "model_parallel", "slices",
    "micro_batches", "aggregation_method", "reduction.reduce_dtype", "reduction.slice_dtype",
    "reduction.shard_update", "on_nonfinite", "max_skips_in_a_row",
)  # fmt: skip
_MAY_CHANGE_BELOW = ("checkpoint.",)


class Origin(NamedTuple):
    """What a run comes from beside its config; empty texts where that is not known.

    Attributes:
      training: the training data, as `xshard.data.summary` has it.
      evaluation: the data that it is judged on.
      commit: the git commit of the experiment's code.
    """

    training: str
    evaluation: str
    commit: str


class Workdir:
    """The directory of one run."""

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path).absolute()
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.results = self.path / RESULTS
        self.config = self.path / "config.json"
        self.origin = self.path / "origin.json"

    def check(self, config: ml_collections.ConfigDict) -> list[str]:
        """Sees whether a config may run here; writes nothing.

        Returns:
          What has changed since the run was started, one text for each key.

        Raises:
          ValueError: if the directory is another run's, or a change would make it another run.
        """
        if self.path.exists() and not self.path.is_dir():
            raise errors.UserError(f"--workdir={self.path} is a file; give a directory.")
        if self.checkpoints.exists() and not self.checkpoints.is_dir():
            raise errors.UserError(
                f"{self.checkpoints} is a file; move it away, or give a new --workdir."
            )
        if not self.config.exists():
            found = [p.name for p in (self.checkpoints, self.metrics, self.results) if p.exists()]
            if found:
                raise errors.UserError(
                    f"--workdir={self.path} holds {', '.join(found)} but no {self.config.name}, so that "
                    "it cannot be told whose they are; give a new directory."
                )
            return []
        old = _read(self.config, "config")
        return self._compare(flatten(old), flatten(plain(config)))

    def check_origin(self, origin: Origin) -> list[str]:
        """Sees whether a run of this data may go on here; writes nothing.

        Returns:
          What else has changed since the run was started, one text for each.

        Raises:
          UserError: if the run here was trained on other data.
        """
        # A directory of a version that kept none gets it.
        if not self.origin.exists():
            return []
        content = _read(self.origin, "origin")
        old = Origin(*(str(content.get(name, "")) for name in Origin._fields))
        if old.training and origin.training and old.training != origin.training:
            raise errors.UserError(
                f"--workdir={self.path} holds a run with other training data: {old.training}; now there are "
                f"{origin.training}. Going on would make it neither the one nor the other: give it its data back, "
                "or begin a new run in a new directory, with the parameters of this one by "
                f"--init_from={self.path}."
            )
        changes = []
        if old.evaluation and old.evaluation != origin.evaluation:
            changes.append(f"evaluation data: {old.evaluation} -> {origin.evaluation}")
        if old.commit and old.commit != origin.commit:
            changes.append(f"commit: {old.commit} -> {origin.commit or 'none'}")
        return changes

    @contextlib.contextmanager
    def opened(
        self, config: ml_collections.ConfigDict, origin: Origin | None = None
    ) -> Iterator[None]:
        """Makes the directory this run's, and nobody else's meanwhile.

        Args:
          config: the run's config.
          origin: what it is trained on, if it is.

        Raises:
          ValueError: if it cannot be written, or another process runs in it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("w")
        except OSError as e:
            raise errors.UserError(f"--workdir={self.path} cannot be written: {e.strerror}.") from e
        # The kernel drops the lock when the process ends, however it ends.
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as e:
                raise errors.UserError(
                    f"--workdir={self.path} is in use by another process."
                ) from e
            # Again: another process may have made it its own since the first check.
            self.check(config)
            if origin is not None:
                self.check_origin(origin)
            with metrics.writing(self.config):
                metrics.write_atomically(self.config, to_json(plain(config)))
                if origin is not None:
                    metrics.write_atomically(self.origin, to_json(origin._asdict()))
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
        """Writes how the run has ended."""
        with metrics.writing(self.results):
            metrics.write_atomically(self.results, to_json(results))

    def failure(self, goes_on: bool) -> str:
        """Why the run has not ended finite before; of one that goes on it is forgotten."""
        why = not_finite(self.path)
        if why and goes_on:
            self.results.unlink()
        return "" if goes_on else why

    def _compare(self, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
        if old.get("experiment") != new.get("experiment"):
            raise errors.UserError(
                f"--workdir={self.path} holds a run of experiment={old.get('experiment')!r}, not of "
                f"{new.get('experiment')!r}; give another directory."
            )
        changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
        texts = [f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in changed]
        fatal = [
            text
            for key, text in zip(changed, texts, strict=True)
            if key not in _MAY_CHANGE
            and not key.startswith(_MAY_CHANGE_BELOW)
            and not (key == "group_assignment" and _same_count(old.get(key), new.get(key)))
        ]
        if fatal:
            raise errors.UserError(
                f"--workdir={self.path} holds a run with another config ({'; '.join(fatal)}). Going on "
                "would make it neither the one nor the other: give its own values, or a new directory."
            )
        return texts


def _read(path: pathlib.Path, what: str) -> dict[str, Any]:
    """A file of the directory that holds a dictionary."""
    try:
        return jsonfile.read(path)
    except errors.UserError as e:
        raise errors.UserError(
            f"{e} It is to be the run's {what}: give it back, or give a new --workdir."
        ) from e


def _same_count(old: Any, new: Any) -> bool:
    """Whether two group assignments are of as many groups: of more or fewer replicas each."""
    return isinstance(old, list) and isinstance(new, list) and len(old or [1]) == len(new or [1])


def not_finite(directory: pathlib.Path) -> str:
    """Why the run in a work directory has not ended finite; empty if it has, or has not ended.

    Raises:
      UserError: if it has ended, and what it has said is damaged.
    """
    results = jsonfile.read_if_exists(directory / RESULTS) or {}
    if results.get("finite") is not False:
        return ""
    return str(results.get("why", "not finite"))


def plain(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """A config as plain JSON values."""
    return json.loads(config.to_json_best_effort())


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config as one level of dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def to_json(value: Any) -> bytes:
    """Readable JSON."""
    return (metrics.to_json(value, indent=2) + "\n").encode()
