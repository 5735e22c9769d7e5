"""The names of `xshard.checkpoint`, and the modules that define them."""

from .catalog import Catalog, Entry, newest_entry, read_catalog
from .conversion import Conversion
from .finite import is_finite
from .format import Owner, read_owner
from .leaves import flatten
from .listing import Listing
from .lock import LostError
from .manager import Manager, NonfiniteError
from .reader import UNGROUPED, Groups, Restored, num_groups
from .retention import Keep, Saved
from .saver import Committed
from .store import CheckpointError, Store
from .warm_start import (
    BY_DEFAULT,
    GROUPS,
    PARAMS,
    Meaning,
    Offer,
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
    "UNGROUPED",
    "Catalog",
    "CheckpointError",
    "Committed",
    "Conversion",
    "Entry",
    "Groups",
    "Keep",
    "Listing",
    "LostError",
    "Manager",
    "Meaning",
    "NonfiniteError",
    "Offer",
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
    "num_groups",
    "read_catalog",
    "read_owner",
    "renames",
    "selected",
]
