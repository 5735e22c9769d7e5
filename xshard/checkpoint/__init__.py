"""Checkpoints of everything that a run needs to go on, on tensorstore."""

from xshard.checkpoint.catalog import Catalog, Entry, read_catalog
from xshard.checkpoint.manager import Manager, Restored
from xshard.checkpoint.retention import Keep, Saved
from xshard.checkpoint.saver import Committed, NonfiniteError
from xshard.checkpoint.store import CheckpointError
from xshard.checkpoint.transfer import BY_DEFAULT, PARAMS, Source, check_init, init_from

__all__ = [
    "BY_DEFAULT",
    "PARAMS",
    "Catalog",
    "CheckpointError",
    "Committed",
    "Entry",
    "Keep",
    "Manager",
    "NonfiniteError",
    "Restored",
    "Saved",
    "Source",
    "check_init",
    "init_from",
    "read_catalog",
]
