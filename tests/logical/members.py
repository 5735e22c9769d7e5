"""Members of a run in one process, for tests of what they combine."""


class Members:
    """A stand-in for the exchange of several members: one process makes the part of
    each of them, the last one's first.

    Attributes:
      calls: the label of each call.
    """

    def __init__(self, count):
        self._count = count
        self.calls = []

    def combine(self, label, like, units, contribute, operations):
        self.calls.append(label)
        divided = [range(units)[i :: self._count] for i in range(self._count)]
        # A member without a unit has no part.
        total, *others = [contribute(part) for part in reversed(divided) if part]
        for part in others:
            pairs = zip(operations, total, part, strict=True)
            total = [operation(x, y) for operation, x, y in pairs]
        for shape, x in zip(like, total, strict=True):
            assert (x.shape, x.dtype) == (shape.shape, shape.dtype)
        return total
