"""What may stand in a file, or come over a network, that is damaged or forged: strategies of hypothesis."""

import contextlib
import copy
import json
import os
import tracemalloc

import hypothesis
from hypothesis import strategies as st

# Many more, and other ones each time: XSHARD_FUZZ=10000.
EXAMPLES = int(os.environ.get("XSHARD_FUZZ", "0"))
# Of a value of some kB; what the values themselves take is far less.
PEAK_BYTES = 20 << 20
NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63, -(2**63), 10**400, 1 << 42, 1e300, 5e-324, 0.5]),
    st.floats(),
)
TEXTS = st.one_of(
    st.sampled_from(
        ["", "..", "/", "../../x", "nan", "done", "failed", "\ud800", "\x1b[2J", "a" * 300]
    ),
    # Of a few characters: tables of all of them take half a minute to make.
    st.text('ab/\\"\0\n\u00e9\u65e5', max_size=5),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=8,
)
DEEP = st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b"[" * 500 + b"]" * 500])


def settings(slow=False):
    """The settings of a test; `slow` is of one whose examples take long."""
    return hypothesis.settings(
        derandomize=not EXAMPLES,
        max_examples=(EXAMPLES or 200) // (3 if slow else 1) or 1,
        database=None,
        # The machine may have other work.
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


@st.composite
def forged(draw, document):
    """A document in which a value, at any depth, is another one, or is gone."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 2))):
        place, key, inner = [document], 0, document
        # Deep more often than not: most of what is said is there.
        while isinstance(inner, dict | list) and inner and draw(st.integers(0, 4)):
            place = inner
            keys = sorted(inner) if isinstance(inner, dict) else range(len(inner))
            key = draw(st.sampled_from(keys))
            inner = place[key]
        if place[key] is document:
            return draw(VALUES)
        if draw(st.integers(0, 3)):
            place[key] = draw(st.one_of(NUMBERS, VALUES, VALUES.map(lambda value: [value])))
        else:
            del place[key]
    return document


@st.composite
def damaged(draw, content):
    """The bytes of a file, of which some are cut off, others, or more."""
    place = draw(st.integers(0, len(content)))
    if draw(st.booleans()):
        return content[:place]
    return (
        content[:place] + draw(st.binary(max_size=20)) + content[place + draw(st.integers(0, 20)) :]
    )


def contents(document, dump=lambda value: json.dumps(value).encode()):
    """What may stand in a file that is to hold a document."""
    changed = forged(document).map(dump)
    broken = st.one_of(damaged(dump(document)), DEEP, VALUES.map(dump), st.binary(max_size=50))
    return st.one_of(changed, changed, changed, broken)


@contextlib.contextmanager
def little_memory():
    """Sees that no more is asked for than what is given could need."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES
    finally:
        tracemalloc.stop()
