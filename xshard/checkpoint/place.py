"""The forms in which a user names checkpoints: a folder of checkpoints or a work
directory, with @STEP for one of them.
"""

import os

from xshard.checkpoint import format as format_lib
from xshard.checkpoint import store as store_lib
from xshard.files import disk, jsonfile


def split(place: str) -> tuple[str, int | None]:
    """Splits 'DIR' or 'DIR@STEP' into the directory and the step; the step is None if
    there is none.
    """
    place = disk.expanded(place)
    directory, at, step = place.rpartition("@")
    # A directory's own name may end like this.
    if at and step.isdecimal() and not os.path.isdir(place):
        return directory, int(step)
    return place, None


def open_store(directory: str | os.PathLike[str]) -> store_lib.Store:
    """Opens a folder of checkpoints, or the one of the run in a work directory. It need
    not exist.

    Raises:
      CheckpointError: if it is a file, or not a valid place for checkpoints, or the
        run's config.json is not valid.
    """
    store = store_lib.Store(directory)
    if not isinstance(store, store_lib.Disk):
        return store
    if store.path.is_file():
        raise format_lib.CheckpointError(
            f"{store} is a file: give a run's work directory, or a folder of "
            "checkpoints."
        )
    if format_lib.attempts(store):
        return store
    # A work directory holds no checkpoints itself. Its config names their folder, and
    # one that names none keeps them beside the config.
    config_file = store.path / "config.json"
    config = jsonfile.read_if_exists(config_file) or {}
    options = config.get("checkpoint", {})
    elsewhere = options.get("directory", "") if isinstance(options, dict) else options
    if not isinstance(elsewhere, str):
        raise format_lib.CheckpointError(
            f"{config_file} is not a run's config: its checkpoint.directory is "
            f"{elsewhere!r}, not text."
        )
    of_run = store_lib.Store(elsewhere or store.path / "checkpoints")
    if isinstance(of_run, store_lib.Disk) and not of_run.path.is_dir():
        return store
    return of_run


def find(place: str) -> format_lib.SaveAttempt:
    """Returns the checkpoint that 'DIR' or 'DIR@STEP' names, by default the newest.

    Raises:
      CheckpointError: if there is none.
    """
    directory, step = split(place)
    return format_lib.find(open_store(directory), step)
