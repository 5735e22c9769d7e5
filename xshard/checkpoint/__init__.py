"""Checkpoints of everything that a run needs to resume, stored with tensorstore."""

from xshard.checkpoint.arrays import flatten
from xshard.checkpoint.catalog import Catalog, Entry, newest_entry, newest_metadata, read_catalog
from xshard.checkpoint.finite import is_finite
from xshard.checkpoint.format import Owner, read_owner
from xshard.checkpoint.manager import Manager
from xshard.checkpoint.place import split as split_place
from xshard.checkpoint.reader import Restored
from xshard.checkpoint.retention import Keep, Saved
from xshard.checkpoint.saver import Committed, NonfiniteError
from xshard.checkpoint.store import CheckpointError, Store
from xshard.checkpoint.warm_start import (
    BY_DEFAULT,
    GROUPS,
    PARAMS,
    Source,
    check_init,
    init_from,
    renames,
    selected,
)

__all__ = [
    "BY_DEFAULT",
    "GROUPS",
    "PARAMS",
    "Catalog",
    "CheckpointError",
    "Committed",
    "Entry",
    "Keep",
    "Manager",
    "NonfiniteError",
    "Owner",
    "Restored",
    "Saved",
    "Source",
    "Store",
    "check_init",
    "flatten",
    "init_from",
    "is_finite",
    "newest_entry",
    "newest_metadata",
    "read_catalog",
    "read_owner",
    "renames",
    "selected",
    "split_place",
]
