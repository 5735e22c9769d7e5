"""Tests that the clock counts each second in the phase that the devices wait for."""

import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import pytest

from tests.base import timed
from xshard.base import clock, spans


class Now:
    """The time, which a test advances.

    Attributes:
      seconds: the time.
      was_read_by_thread: is set when another thread than the main one reads the time.
    """

    def __init__(self, stopped):
        self._stopped = stopped
        self.was_read_by_thread = threading.Event()
        stopped.monotonic = self

    def __call__(self):
        seconds = self._stopped.now
        if threading.current_thread() is not threading.main_thread():
            self.was_read_by_thread.set()
        return seconds

    def pass_(self, seconds):
        self._stopped.now += seconds


class Step:
    """Stands in for an array that the devices compute until a test calls `end`."""

    def __init__(self, now):
        self._now = now
        self._done = threading.Event()
        self.waited_for = False

    def end(self):
        self._done.set()

    def is_ready(self):
        return self._done.is_set()

    def block_until_ready(self):
        self.waited_for = True
        self._done.wait()


@pytest.fixture
def now(monkeypatch):
    monkeypatch.setattr(clock, "age", lambda: 10.0)
    return Now(timed.stand_in(monkeypatch))


def started():
    timer = clock.Clock()
    timer.started()
    return timer


def test_each_second_is_in_one_phase(now):
    begin = now()
    timer = clock.Clock()
    now.pass_(5)
    timer.started()
    now.pass_(10)
    with spans.Span(spans.EVALUATION):
        now.pass_(2)
        with spans.Span(spans.CHECKPOINT):
            now.pass_(3)
        now.pass_(4)
    now.pass_(1)
    expected = {
        "start": 15,
        "training": 11,
        "evaluation": 6,
        "checkpoint": 3,
        "trace": 0,
        "data": 0,
    }
    assert timer.seconds() == expected
    # Reading the seconds does not change them.
    assert timer.seconds() == expected
    now.pass_(1)
    assert sum(timer.seconds().values()) == now() - begin + 10


def test_a_phase_ends_when_an_error_leaves_it(now):
    timer = started()
    with pytest.raises(ValueError), spans.Span(spans.EVALUATION):
        now.pass_(2)
        raise ValueError
    now.pass_(1)
    assert timer.seconds()["evaluation"] == 2 and timer.seconds()["training"] == 1


def test_an_evaluation_before_the_first_step_is_not_counted_as_start(now):
    timer = clock.Clock()
    with spans.Span(spans.EVALUATION):
        now.pass_(2)
    with timer.waiting(None):
        now.pass_(1)
    assert timer.seconds() == {
        "start": 11,
        "evaluation": 2,
        "training": 0,
        "data": 0,
        "checkpoint": 0,
        "trace": 0,
    }


@pytest.mark.parametrize("ends,counted", [("before", 4), ("after", 0)])
def test_a_wait_for_data_counts_while_the_devices_are_idle(now, ends, counted):
    timer = started()
    step = Step(now)
    if ends == "before":
        step.end()
    # The first wait does not count: it only shows that the devices were idle when it
    # ended.
    for _ in range(3):
        with timer.waiting(step):
            now.pass_(2)
    assert timer.seconds()["data"] == counted
    assert timer.seconds()["training"] == 6 - counted
    assert not step.waited_for


def test_a_wait_that_outlasts_the_step_counts_from_the_end_of_the_step(now):
    timer = started()
    for number in range(4):
        step = Step(now)
        with timer.waiting(step):
            now.pass_(3)
            step.end()
            # The first wait is not measured, so nobody knows when its step ended.
            if number:
                now.was_read_by_thread.wait()
                now.was_read_by_thread.clear()
            now.pass_(2)
        assert step.waited_for == bool(number)
    assert timer.seconds()["data"] == 3 * 2
    assert timer.seconds()["training"] == 5 + 3 * 3
    # After a wait during which the devices stayed busy, no thread waits for the step.
    for is_measured in (True, False):
        step = Step(now)
        with timer.waiting(step):
            now.pass_(1)
        step.end()
        if is_measured:
            now.was_read_by_thread.wait()
        assert step.waited_for == is_measured
    assert timer.seconds()["data"] == 6


def test_the_clock_can_wait_for_arrays(now):
    timer = started()
    array = jnp.ones(3).block_until_ready()
    for _ in range(2):
        with timer.waiting(array):
            now.pass_(2)
    assert timer.seconds()["data"] == 2


def test_the_process_start_time_comes_from_the_system():
    code = (
        "import time; time.sleep(0.3)\n"
        "from xshard.base import clock\n"
        "print(clock.Clock().seconds()['start'])"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], stdout=-1, check=True)
    start_seconds = float(done.stdout)
    # A tick of the system's clock is a hundredth of a second.
    assert 0.25 < start_seconds < time.monotonic() - begin + 0.05


def test_without_support_by_the_system_the_start_is_the_import(monkeypatch):
    monkeypatch.delattr(clock.time, "clock_gettime")
    begin = clock._IMPORTED
    before = time.monotonic() - begin
    assert before <= clock.Clock().seconds()["start"] <= time.monotonic() - begin


def test_an_interval_passes_every_so_many_seconds():
    now = [0.0]
    interval = clock.Every(10, clock=lambda: now[0])
    passed = []
    for now[0] in (3, 9, 10, 12, 19, 20, 55):
        passed.append(interval.has_passed())
    assert passed == [False, False, True, False, False, True, True]
    assert not clock.Every(0).has_passed()
