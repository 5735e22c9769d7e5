"""Reads what a work directory says of its run. Nothing is written there, and no device is touched."""

import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from xshard import checkpoint, errors
from xshard import config as config_lib
from xshard.files import jsonfile, workdir
from xshard.metrics import show
from xshard.pod import attempts as attempts_lib
from xshard.pod import status
from xshard.report import rows as rows_lib

_CHECKPOINT_SECONDS = 30.0
# A page of more would be too large to be looked at.
_SAMPLES = 10


class Checkpoints(NamedTuple):
    """The checkpoints of a run, what the newest was written with, and why nothing is known of them, if so."""

    place: str
    entries: list[checkpoint.Entry]
    written_with: dict[str, Any]
    problem: str


class Run(NamedTuple):
    """One run.

    Attributes:
      path: its work directory.
      name: the end of that path which no other run has.
      separate: columns of the evaluation job; those of the run's own evaluations are `evaluation`.
      attempts: one after the other; none of a run of a version that did not record them.
      state: 'done', 'running', 'stopped', 'failed', 'silent' or 'unknown'; `doing` is the same in words.
      results: the final evaluation; empty if it has not been made.
      samples: the newest rows of samples, as `xshard.samples` has them, by ascending steps.
    """

    path: pathlib.Path
    name: str
    config: dict[str, Any]
    training: rows_lib.Columns
    evaluation: rows_lib.Columns
    separate: rows_lib.Columns
    attempts: list[attempts_lib.Attempt]
    state: str
    doing: str
    step: float | None
    results: dict[str, list[float]]
    checkpoints: Checkpoints
    samples: list[dict[str, Any]]
    notes: list[str]


def read(paths: Sequence[str], checkpoint_seconds: float = _CHECKPOINT_SECONDS) -> list[Run]:
    """Reads runs.

    Args:
      paths: their work directories; one that is given twice counts once.
      checkpoint_seconds: how long all places of checkpoints have to answer.

    Raises:
      UserError: if any of them is no run's directory; all such are named.
    """
    unique: dict[pathlib.Path, pathlib.Path] = {}
    for path in map(pathlib.Path, paths):
        unique.setdefault(path.resolve(), path.absolute())
    directories = list(unique.values())
    configs, problems = [], []
    for directory in directories:
        try:
            configs.append(_config(directory))
        except (errors.UserError, OSError) as e:
            problems.append(str(e))
    if problems:
        raise errors.UserError("\n".join(problems))
    deadline = time.monotonic() + checkpoint_seconds
    # All places are asked before the first answer is waited for.
    readers = [
        _CheckpointReader(directory, config.get("checkpoint.directory"))
        for directory, config in zip(directories, configs, strict=True)
    ]
    parts = zip(directories, _names(directories), configs, readers, strict=True)
    return [
        _run(directory, name, config, reader.wait(deadline))
        for directory, name, config, reader in parts
    ]


class _CheckpointReader:
    """Looks at a run's checkpoints in a thread of its own: an object store may not answer for long."""

    def __init__(self, directory: pathlib.Path, elsewhere: str | None):
        self._place = str(elsewhere or directory / "checkpoints")
        # A run that has not begun to save has no such directory, and that is no error.
        self._may_lack = not elsewhere
        self._result = Checkpoints(self._place, [], {}, "it has not answered in time")
        # The program does not wait for it when it ends.
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait(self, deadline: float) -> Checkpoints:
        """The checkpoints, or why they are not known, at a time of the monotonic clock."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return self._result

    def _read(self) -> None:
        try:
            if self._may_lack and not pathlib.Path(self._place).is_dir():
                self._result = Checkpoints(self._place, [], {}, "")
            else:
                self._result = Checkpoints(self._place, *checkpoint.read_catalog(self._place), "")
        except Exception as e:
            # Whatever it is, the rest of the page does not depend on it.
            self._result = Checkpoints(self._place, [], {}, str(e) or type(e).__name__)


def _run(path: pathlib.Path, name: str, config: dict[str, Any], checkpoints: Checkpoints) -> Run:
    rows = rows_lib.read(path / "metrics.jsonl")
    separate = rows_lib.read(path / "eval" / "metrics.jsonl")
    notes = [*rows.notes, *(f"eval/: {note}" for note in separate.notes)]
    results = _noted(notes, lambda: jsonfile.read_if_exists(path / workdir.RESULTS), {})
    processes = _noted(notes, lambda: status.read_if_exists(path), [])
    attempts = _noted(notes, lambda: attempts_lib.read(path), [])
    columns = [*rows.training.values(), *rows.evaluation.values()]
    if not columns:
        notes.append("no metrics yet.")
    # Rows may be older than what the process said last, or a result than a run that goes on.
    steps = [int(column.steps[-1]) for column in columns]
    steps += [row["step"] for row in processes[:1] if row["step"] is not None]
    if not steps and jsonfile.is_number(results.get("step")):
        steps = [results["step"]]
    step = max(steps, default=None)
    state, doing = _state(processes, results, step)
    samples = rows_lib.newest_samples(path / "samples.jsonl", _SAMPLES, notes)
    return Run(
        path=path,
        name=name,
        config=config,
        training=rows.training,
        evaluation=rows.evaluation,
        separate=separate.evaluation,
        attempts=attempts,
        state=state,
        doing=doing,
        step=step,
        results=rows_lib.numbers_of(results.get("eval")),
        checkpoints=checkpoints,
        samples=samples,
        notes=notes,
    )


def _noted(notes: list[str], read: Callable[[], Any], otherwise: Any) -> Any:
    """Reads something of a run, or takes what is to be taken if there is nothing; why it cannot be read is noted."""
    try:
        return read() or otherwise
    except errors.UserError as e:
        # Two may read one file.
        if str(e) not in notes:
            notes.append(str(e))
        return otherwise


def _config(path: pathlib.Path) -> dict[str, Any]:
    """A run's config, flat; UserError if there is no run."""
    if not path.exists():
        raise errors.UserError(f"{path}: there is no such directory.")
    if not path.is_dir():
        raise errors.UserError(
            f"{path} is a file; give the work directories of runs, as in runs/sweep/*/."
        )
    file = path / "config.json"
    if not file.exists():
        below = ", ".join(p.parent.name for p in sorted(path.glob("*/config.json")))
        hint = f" Those below it are: give {path}/*/, or some of {below}." if below else ""
        raise errors.UserError(f"{path} is no run's work directory: it has no {file.name}.{hint}")
    config = jsonfile.read(file)
    config.pop(workdir.IDENTITY, None)
    return config_lib.flatten(config)


def _state(
    processes: list[dict[str, Any]], results: dict[str, Any], step: float | None
) -> tuple[str, str]:
    """A run's state, and the same in words."""
    # If a process has failed it speaks for all, else the first one does.
    failed = [row for row in processes if row["doing"].startswith("failed")]
    speaker = next(iter([*failed, *processes]), None)
    doing = show.printable(speaker["doing"]) if speaker else ""
    has_ended = speaker is None or doing.startswith(status.ENDS)
    is_stopped = doing.startswith("stopped")
    if has_ended and not is_stopped and results.get("finite") is False:
        return "failed", show.printable(f"not finite: {results.get('why')}")
    done = f"done: {show.printable(str(results['ended']))}" if results.get("ended") else "done"
    if speaker is None:
        if results:
            return "done", done
        return "unknown", f"not known: there is no {status.FILE}"
    if is_stopped:
        return "stopped", f"stopped at step {step}"
    if has_ended:
        return ("failed", doing) if failed else ("done", done)
    age = time.time() - speaker["time"]
    if age > status.SILENT_SECONDS:
        return "silent", f"gone, or silent for {show.age(age)}; was {doing}"
    if doing == "training":
        return "running", doing
    return "running", f"running: {doing}"


def _names(paths: Sequence[pathlib.Path]) -> list[str]:
    """The end of each path, as long as it takes to tell it from the others."""
    longest = max((len(path.parts) for path in paths), default=0)
    for length in range(1, longest + 1):
        names = [str(pathlib.PurePath(*path.parts[-length:])) for path in paths]
        if len(set(names)) == len(names):
            break
    return [show.printable(name) for name in names]
