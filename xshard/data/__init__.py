"""Examples, and their batches."""

from xshard.data.examples import (
    Arrays,
    BatchIterator,
    Examples,
    Part,
    Source,
    check,
    iterate,
    num_examples,
    order,
    splits,
    stack,
    summary,
    take,
)

__all__ = [
    "Arrays",
    "BatchIterator",
    "Examples",
    "Part",
    "Source",
    "check",
    "iterate",
    "num_examples",
    "order",
    "splits",
    "stack",
    "summary",
    "take",
]
