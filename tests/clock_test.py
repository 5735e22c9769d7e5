"""Seconds go to the phase that devices wait for, and each of them to one."""

import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import pytest

from xshard.metrics import clock


class Now:
    """A time that passes when it is told to."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds

    def pass_(self, seconds):
        self.seconds += seconds


class Step:
    """A step that devices compute until it is told that they have."""

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
def now():
    return Now()


def started(now):
    made = clock.Clock(now(), now)
    made.started()
    return made


def test_each_second_is_in_one_phase(now):
    made = clock.Clock(90.0, now)
    now.pass_(5)
    made.started()
    now.pass_(10)
    with made.phase(clock.EVALUATION):
        now.pass_(2)
        with made.phase(clock.CHECKPOINT):
            now.pass_(3)
        now.pass_(4)
    now.pass_(1)
    expected = {"start": 15, "training": 11, "evaluation": 6, "checkpoint": 3, "data": 0}
    assert made.seconds() == expected
    # And once more: asking changes nothing.
    assert made.seconds() == expected
    now.pass_(1)
    assert sum(made.seconds().values()) == now() - 90.0


def test_a_phase_ends_with_what_fails_in_it(now):
    made = started(now)
    with pytest.raises(ValueError), made.phase(clock.EVALUATION):
        now.pass_(2)
        raise ValueError
    now.pass_(1)
    assert made.seconds()["evaluation"] == 2 and made.seconds()["training"] == 1


def test_an_evaluation_before_the_first_step_is_no_part_of_the_start(now):
    made = clock.Clock(now(), now)
    with made.phase(clock.EVALUATION):
        now.pass_(2)
    with made.waiting(None):
        now.pass_(1)
    assert made.seconds() == {
        "start": 1, "evaluation": 2, "training": 0, "data": 0, "checkpoint": 0
    }  # fmt: skip


@pytest.mark.parametrize("ends,counted", [("before", 4), ("after", 0)])
def test_a_wait_for_data_counts_where_devices_have_nothing_to_do(now, ends, counted):
    made, step = started(now), Step(now)
    if ends == "before":
        step.end()
    # The first of several only shows that they had nothing to do when it ended.
    for _ in range(3):
        with made.waiting(step):
            now.pass_(2)
    assert made.seconds()["data"] == counted and made.seconds()["training"] == 6 - counted
    assert not step.waited_for


def test_a_wait_that_outlasts_the_step_counts_from_the_step_s_end(now):
    made = started(now)
    for number in range(4):
        step = Step(now)
        with made.waiting(step):
            now.pass_(3)
            step.end()
            # Whoever waits for the step sees its end now.
            if number:
                made._waiting._ended.result()
            now.pass_(2)
    # When the first ended is not known.
    assert made.seconds()["data"] == 3 * 2 and made.seconds()["training"] == 5 + 3 * 3
    # When data is there at once again, nobody waits beside.
    for expected in (True, False):
        step = Step(now)
        with made.waiting(step):
            now.pass_(1)
        step.end()
        assert (made._waiting._ended is not None) == expected
    assert made.seconds()["data"] == 6


def test_of_short_waits_that_outlast_the_step_half_counts(now):
    made = started(now)
    for _ in range(4):
        step = Step(now)
        with made.waiting(step):
            now.pass_(2**-11)
            step.end()
        assert made._waiting._ended is None and not step.waited_for
    # When the first ended is not known.
    assert made.seconds()["data"] == 3 * 2**-12


def test_arrays_are_what_can_be_waited_for(now):
    made = started(now)
    array = jnp.ones(3).block_until_ready()
    for _ in range(2):
        with made.waiting(array):
            now.pass_(2)
    assert made.seconds()["data"] == 2


def test_the_process_s_begin_is_the_system_s():
    code = "import time; time.sleep(0.3)\nfrom xshard.metrics import clock; print(clock.Clock().seconds()['start'])"
    begin = time.monotonic()
    told = float(subprocess.run([sys.executable, "-c", code], stdout=-1, check=True).stdout)
    # A tick of the system's clock is a hundredth of a second.
    assert 0.25 < told < time.monotonic() - begin + 0.05


def test_where_the_system_does_not_say_it_is_the_import(monkeypatch):
    monkeypatch.delattr(clock.time, "clock_gettime")
    begin = clock._IMPORTED
    before = time.monotonic() - begin
    assert before <= clock.Clock().seconds()["start"] <= time.monotonic() - begin


def test_every_so_many_seconds():
    now = [0.0]
    every = clock.Every(10, clock=lambda: now[0])
    passed = []
    for now[0] in (3, 9, 10, 12, 19, 20, 55):
        passed.append(every.has_passed())
    assert passed == [False, False, True, False, False, True, True]
    assert not clock.Every(0).has_passed()
