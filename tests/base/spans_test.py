"""Tests of the parts of a process's time."""

import pytest

from tests.base import timed
from xshard.base import clock, spans


@pytest.fixture
def now(monkeypatch):
    return timed.stand_in(monkeypatch)


def spent(now):
    parts = spans.tree("MainThread").parts(now.now)
    return {name: seconds for name, seconds in parts.items() if seconds}


def test_a_part_does_not_contain_the_parts_inside_it(now):
    with spans.Span(spans.CHECKPOINT):
        now.now += 1
        with spans.Span(spans.SAVE):
            now.now += 2
            timed.spend(now, spans.AGREE, 4)
        now.now += 8
    now.now += 16
    assert spent(now) == {"checkpoint": 9, "save": 2, "agree": 4, "other": 16}


def test_a_part_counts_while_it_lasts(now):
    with spans.Span(spans.EVALUATION):
        now.now += 1
        assert spent(now) == {"evaluation": 1}
        with spans.Span(spans.STEP):
            now.now += 2
            assert spent(now) == {"evaluation": 1, "step": 2}


def test_an_error_ends_a_part(now):
    with pytest.raises(KeyError), spans.Span(spans.EVALUATION):
        now.now += 1
        raise KeyError
    timed.spend(now, spans.STEP, 2)
    assert spent(now) == {"evaluation": 1, "step": 2}


class Result:
    """A stand-in for an array that is ready at a time."""

    def __init__(self, time, ready):
        self._time, self._ready = time, ready

    def is_ready(self):
        return self._time.now >= self._ready

    def block_until_ready(self):
        self._time.now = max(self._time.now, self._ready)


def run(now, steps, *, data=0.0, other=0.0, device=0.0):
    """Makes steps whose parts take the given seconds; returns the parts of the time."""
    counted = clock.Clock()
    counted.started()
    first = counted.parts()
    newest = None
    for _ in range(steps):
        with counted.waiting(newest):
            now.now += data
        # A step begins when the one before has ended.
        begin = now.now
        if newest is not None:
            begin = max(begin, newest._ready)
        before = newest
        newest = Result(now, begin + device)
        now.now += other
        if before is not None:
            with spans.Span(spans.STEP):
                before.block_until_ready()
    return {name: seconds - first[name] for name, seconds in counted.parts().items()}


@pytest.mark.parametrize(
    "seconds, share",
    [
        # What the devices compute meanwhile delays nothing.
        ({"data": 0.001, "device": 0.1}, {"step": 1.0}),
        ({"data": 0.9, "other": 0.1, "device": 0.01}, {"data": 0.9, "other": 0.1}),
        ({"other": 0.05, "device": 0.1}, {"step": 1.0}),
        ({"other": 0.9, "device": 0.1}, {"other": 1.0}),
    ],
)
def test_only_what_delays_the_devices_is_a_process_s_own(now, seconds, share):
    begin = now.now
    parts = run(now, 200, **seconds)
    spent = now.now - begin
    assert sum(parts.values()) == pytest.approx(spent)
    shares = {name: parts.get(name, 0.0) / spent for name in ("step", "data", "other")}
    expected = {"step": 0.0, "data": 0.0, "other": 0.0, **share}
    # The first steps find the devices idle, and nothing to compare with.
    assert shares == pytest.approx(expected, abs=0.03)


def test_there_are_no_parts_before_the_first_step(now):
    assert clock.Clock().parts() == {}
