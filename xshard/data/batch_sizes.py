"""The sizes of a run's batches, when they grow while it trains."""

import bisect
import math
import sys
from collections.abc import Sequence

import ml_collections

from xshard import config as config_lib
from xshard import errors

# The powers of a batch's size that multiply the learning rate.
_POWERS = {config_lib.NONE: 0.0, config_lib.LINEAR: 1.0, config_lib.SQRT: 0.5}


class BatchSizes:
    """The number of examples of each step of one group.

    The data's iterator yields batches of one size, the first. A larger one consists of
    several of these, so that whatever the iterator is, its state is the position in the
    data, and a run resumes in the middle of any table.

    Attributes:
      first: the number of examples of the first step.
      largest: that of the largest step.

    >>> sizes = BatchSizes(32, ((100, 64), (200, 128)), learning_rate='sqrt')
    >>> sizes.at(100), sizes.at(101), sizes.at(201)
    (32, 64, 128)
    >>> sizes.examples(102)
    3328
    >>> sizes.factor(201)
    2.0
    """

    def __init__(
        self,
        first: int,
        table: Sequence[Sequence[int]] = (),
        learning_rate: str = config_lib.NONE,
    ):
        """Checks the table.

        Args:
          first: the number of examples of the first step.
          table: rows `(steps, size)`: after that many steps, a step takes that many
            examples.
          learning_rate: how the updates grow with the size relative to the first one:
            not ('none'), in proportion ('linear'), or with its square root ('sqrt').

        Raises:
          UserError: unless each size is a multiple of the first.
        """
        self._ends = [steps for steps, _ in table]
        larger = [size for _, size in table]
        self._sizes = [first, *larger]
        self._power = _POWERS[learning_rate]
        for size in larger:
            if size % first:
                raise errors.UserError(
                    f"batch_schedule has batches of {size}, which must be multiples of "
                    f"batch_size={first}: a larger batch consists of several such. "
                    f"The nearest: {_nearest(size, first)}."
                )
        self.first = first
        self.largest = max(self._sizes)

    @classmethod
    def of(cls, config: ml_collections.ConfigDict) -> "BatchSizes":
        """Returns the sizes that a run's config describes."""
        return cls(
            config.batch_size,
            config.get("batch_schedule", ()),
            config.get("batch_learning_rate", config_lib.NONE),
        )

    @property
    def others(self) -> list[int]:
        """The sizes other than the first, each once, in the order of the steps."""
        return [size for size in dict.fromkeys(self._sizes) if size != self.first]

    def at(self, step: int) -> int:
        """Returns the number of examples of a step; steps count from 1."""
        return self._sizes[bisect.bisect_left(self._ends, step)]

    def last_of_size(self, step: int) -> int:
        """Returns the last step, from a step on, of the size of its batch."""
        place = bisect.bisect_left(self._ends, step)
        while place < len(self._ends) and self._sizes[place + 1] == self._sizes[place]:
            place += 1
        if place == len(self._ends):
            return sys.maxsize
        return self._ends[place]

    def drawn_at(self, step: int) -> int:
        """Returns the number of the iterator's batches that a step consists of."""
        # Each step of a run asks, and most runs have no table.
        if not self._ends:
            return 1
        return self.at(step) // self.first

    def drawn(self, step: int) -> int:
        """Returns the number of the iterator's batches in all steps up to this one."""
        count = 0
        begins = [0, *self._ends]
        ends = [*self._ends, math.inf]
        for begin, end, size in zip(begins, ends, self._sizes, strict=True):
            steps = max(min(step, end) - begin, 0)
            count += int(steps) * (size // self.first)
        return count

    def examples(self, step: int) -> int:
        """Returns the number of examples of all steps up to this one."""
        return self.drawn(step) * self.first

    def factor(self, step: int) -> float:
        """Returns the factor that multiplies the updates of a step."""
        return float((self.at(step) / self.first) ** self._power)

    def changes_at(self, step: int) -> bool:
        """Returns whether a step takes another number of examples than the previous."""
        if not self._ends:
            return False
        return step > 1 and self.at(step) != self.at(step - 1)


def _nearest(size: int, first: int) -> str:
    below = max(size // first, 1) * first
    return " or ".join(str(good) for good in sorted({below, below + first}))
