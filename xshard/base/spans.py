"""The time of a process, as a tree of spans: what its threads do, and what they wait
for.

A span has a part of the time, and the spans inside it have parts of that. Views of the
tree are the phases and the parts of `xshard.base.clock.Clock`, and the file that
`xshard.base.clock.SpanFile` writes. The parts are:

data        waits for a batch
step        dispatches a step to the devices, or waits for them. The devices of a step
            wait for one another, so this contains the wait for slower processes
checkpoint  saves: copies the state to the host
save        waits until the save before has been written, in the background
evaluation  evaluates
trace       begins or writes a profile of some steps
agree       waits for values of the other processes
write       writes a checkpoint in the background, beside the parts above
other       none of these
"""

import collections
import threading
import time

DATA = "data"
STEP = "step"
CHECKPOINT = "checkpoint"
SAVE = "save"
EVALUATION = "evaluation"
TRACE = "trace"
AGREE = "agree"
WRITE = "write"
OTHER = "other"
# The thread that writes checkpoints has this name.
BACKGROUND = "checkpoint"

# Shorter spans are in no file, only in the shares. A step of some milliseconds
# would otherwise fill the file in minutes.
_SHORT_SECONDS = 0.02
_PARTS = (DATA, STEP, CHECKPOINT, SAVE, EVALUATION, TRACE, AGREE, WRITE, OTHER)

# The parts of a span and of those that it is in, the outermost first; empty outside of
# all spans.
Path = tuple[str, ...]


class Tree:
    """What the threads of one name have spent their time with, one thread at a time.

    One thread changes it, and any thread may read it.
    """

    def __init__(self, thread: str):
        """Begins outside of all spans.

        Args:
          thread: the name.
        """
        self.thread = thread
        # The path of the present span, since when, and the seconds of each path until
        # then. It is always replaced as a whole, because another thread may read it.
        self.counted: tuple[Path, float, dict[Path, float]] = (
            (),
            time.monotonic(),
            {},
        )

    def go_to(self, path: Path, now: float) -> None:
        """Counts the time until now, and goes on with another path."""
        self.counted = (path, now, self.seconds(now))

    def seconds(self, now: float) -> dict[Path, float]:
        """Returns the seconds of each path until now, without those of spans inside."""
        path, since, seconds = self.counted
        return {**seconds, path: seconds.get(path, 0.0) + now - since}

    def parts(self, now: float) -> dict[str, float]:
        """Returns the seconds of each part until now, without those of parts inside."""
        parts = dict.fromkeys(_PARTS, 0.0)
        for path, seconds in self.seconds(now).items():
            parts[path[-1] if path else OTHER] += seconds
        return parts


# The tree of the threads of each name.
_TREES: dict[str, Tree] = {}
# The long spans that are not in a file yet: the name of the thread, the part, and its
# begin and end, by the monotonic clock.
LONG: collections.deque[tuple[str, str, float, float]] = collections.deque(
    maxlen=10_000
)


def tree(thread: str) -> Tree:
    """Returns the tree of the threads of a name."""
    if thread not in _TREES:
        _TREES.setdefault(thread, Tree(thread))
    return _TREES[thread]


def begin_anew() -> Tree:
    """Forgets the time of the calling thread so far; returns its tree."""
    LONG.clear()
    thread = threading.current_thread().name
    _TREES[thread] = Tree(thread)
    return _TREES[thread]


class Span:
    """A context whose time counts as a part. It costs a microsecond or two.

    >>> with Span(CHECKPOINT):
    ...     with Span(SAVE):
    ...         pass
    """

    __slots__ = ("_begin", "_name", "_outer", "_tree")

    def __init__(self, name: str):
        """Names the part, one of those that the module lists."""
        self._name = name

    def __enter__(self) -> None:
        self._tree = tree(threading.current_thread().name)
        self._begin = time.monotonic()
        self._outer = self._tree.counted[0]
        self._tree.go_to((*self._outer, self._name), self._begin)

    def __exit__(self, *exc: object) -> None:
        end = time.monotonic()
        self._tree.go_to(self._outer, end)
        if end > self._begin + _SHORT_SECONDS:
            LONG.append((self._tree.thread, self._name, self._begin, end))
