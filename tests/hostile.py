"""Hypothesis strategies for damaged or forged content of files and network messages."""

import contextlib
import copy
import json
import os
import tracemalloc

import hypothesis
from hypothesis import strategies as st

# The number of random examples of each test; XSHARD_FUZZ=10000 tries many, different
# ones each time. By default the examples are few, and always the same.
EXAMPLES = int(os.environ.get("XSHARD_FUZZ", "0"))
# The most memory that reading a document of a few kB may take. Its values themselves
# take far less.
PEAK_BYTES = 20 << 20
NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63, -(2**63), 10**400, 1 << 42, 1e300, 5e-324, 0.5]),
    st.floats(),
)
TEXTS = st.one_of(
    st.sampled_from(
        [
            "",
            "..",
            "/",
            "../../x",
            "nan",
            "done",
            "failed",
            "\ud800",
            "\x1b[2J",
            "a" * 300,
        ]
    ),
    # Only a few characters: hypothesis needs half a minute to build its tables of all
    # characters.
    st.text('ab/\\"\0\n\u00e9\u65e5', max_size=5),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=3)
    ),
    max_leaves=8,
)
DEEP = st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b"[" * 500 + b"]" * 500])


def settings(slow=False):
    """Returns the settings of a test; `slow` reduces the number of examples, for tests
    whose examples take long.
    """
    return hypothesis.settings(
        derandomize=not EXAMPLES,
        max_examples=(EXAMPLES or 200) // (3 if slow else 1) or 1,
        database=None,
        # The machine may be busy with other work.
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


@st.composite
def forged(draw, document):
    """Returns a document in which one or two values, at any depth, are replaced or
    removed.
    """
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 2))):
        place, key, inner = [document], 0, document
        # Four times out of five, descend further: most of a document's content is deep
        # inside.
        while isinstance(inner, dict | list) and inner and draw(st.integers(0, 4)):
            place = inner
            keys = sorted(inner) if isinstance(inner, dict) else range(len(inner))
            key = draw(st.sampled_from(keys))
            inner = place[key]
        if place[key] is document:
            return draw(VALUES)
        if draw(st.integers(0, 3)):
            place[key] = draw(
                st.one_of(NUMBERS, VALUES, VALUES.map(lambda value: [value]))
            )
        else:
            del place[key]
    return document


@st.composite
def damaged(draw, content):
    """Returns the bytes of a file, cut off at some place, or with some bytes replaced,
    added or removed.
    """
    place = draw(st.integers(0, len(content)))
    if draw(st.booleans()):
        return content[:place]
    return (
        content[:place]
        + draw(st.binary(max_size=20))
        + content[place + draw(st.integers(0, 20)) :]
    )


def contents(document, dump=lambda value: json.dumps(value).encode()):
    """Returns a strategy for the damaged or forged bytes of a file that should contain
    a document.
    """
    changed = forged(document).map(dump)
    broken = st.one_of(
        damaged(dump(document)), DEEP, VALUES.map(dump), st.binary(max_size=50)
    )
    return st.one_of(changed, changed, changed, broken)


@contextlib.contextmanager
def little_memory():
    """Asserts that the code inside the context allocates little memory, whatever sizes
    its input claims.
    """
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES
    finally:
        tracemalloc.stop()
