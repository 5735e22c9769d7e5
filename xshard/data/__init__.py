"""Examples, and their batches."""

from xshard.data.examples import (
    Arrays,
    Examples,
    Source,
    check,
    check_batch,
    num_examples,
    splits,
    stack,
    summary,
    take,
)
from xshard.data.iteration import BatchIterator, Part, iterate, order

__all__ = [
    "Arrays",
    "BatchIterator",
    "Examples",
    "Part",
    "Source",
    "check",
    "check_batch",
    "iterate",
    "num_examples",
    "order",
    "splits",
    "stack",
    "summary",
    "take",
]
