"""The earlier name of `host_collectives`, for callers that have not switched yet."""

from xshard.pod.host_collectives import (
    Board,
    Exchange,
    LostError,
    check_equal_data,
    compiled_by_all,
    with_timeout,
)
from xshard.pod.host_collectives import on_process_0 as from_first

__all__ = [
    "Board",
    "Exchange",
    "LostError",
    "check_equal_data",
    "compiled_by_all",
    "from_first",
    "with_timeout",
]
