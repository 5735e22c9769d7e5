"""Tests of how a run ends that goes on without processes, however these end and in
whichever order. The launcher and the protocol are real; processes and time are
simulated.
"""

import collections
import io
import itertools
import signal
import types
import unittest.mock

import pytest

from launch import engine, local
from xshard.pod import generations

_COUNT = 2
# A run that has not ended after so many looks of the launcher hangs.
_MOST_LOOKS = 12_000
# In so many looks each process gives a sign of life.
_LOOKS_A_SIGN = 10
# The exit codes of processes that end as they should.
_ENDS = (0, 42, 130, 3)


class _HangsError(Exception):
    """The launcher waits for ever."""


class _Process:
    """What `processes.Process` is for the launcher.

    Attributes:
      code: the exit code; None while it runs.
      leaves: the exit code with which it ends when all members may; None if it has not
        asked for that.
    """

    error = ""

    def __init__(self, run, number):
        self.code = None
        self.leaves = None
        self._run = run
        self._number = number

    def poll(self):
        return self.code

    def read_to_end(self):
        pass

    def send_signal(self, number):
        if self.code is None:
            self._run.signal(self._number, number)


class _Run:
    """A run, in which time passes when the launcher sleeps. It is also the launcher's
    clock and meeting, and the port of that.
    """

    address = "a:1"

    def __init__(self, script, begins, delay):
        """Starts nothing.

        Args:
          script: the ends of processes: when, of which, the exit code, and whether the
            process asks all others to end, too.
          begins: when processes are ready that begin the run.
          delay: how much later than the launcher the meeting learns of an end.
        """
        self.former = set()
        self.processes = {}
        self._script = list(script)
        self._begins = begins
        self._delay = delay
        self._looks = 0
        self._later = collections.deque()
        self._machine = generations.Meeting(_COUNT, 300.0, 30.0, 60.0, self)

    # As the clock.

    def monotonic(self):
        return self._looks * local._STEP_SECONDS

    def sleep(self, seconds):
        self._looks += 1
        if self._looks > _MOST_LOOKS:
            raise _HangsError
        for event in list(self._script):
            when, number, code, asks = event
            if self._looks >= when and number in self.processes:
                self._script.remove(event)
                if asks:
                    self._leave(number, code)
                else:
                    self._end(number, code)
        self._act()
        if self._looks % _LOOKS_A_SIGN == 0:
            for number, process in self.processes.items():
                if process.code is None:
                    self._machine.receive(number, generations.Alive(0))
        self._machine.tick(self.monotonic())
        self._act()

    # As the launcher's meeting.

    @property
    def members(self):
        return list(self._machine.members)

    @property
    def generation(self):
        return self._machine.generation

    @property
    def is_done(self):
        return self._machine.is_done

    def started(self, number, *, joins):
        self._machine.started(number, joins=joins)
        self._after(1 if joins else self._begins, lambda: self._connect(number))

    def ended(self, number):
        pass

    def forsake(self, number):
        pass

    def close(self):
        pass

    # As the meeting's port.

    def send(self, number, message):
        if isinstance(message, generations.Prepare):
            prepared = generations.Prepared(message.generation, 5)
            self._after(0, lambda: self._machine.receive(number, prepared))
        if isinstance(message, generations.Bye):
            self._end(number, self.processes[number].leaves)

    def kill(self, number, why):
        self.pod._put_out(number, why)

    def begun(self, generation, members):
        self.former = self.former | set(members)

    # As the processes.

    def start(self, number, command, token):
        self.processes[number] = _Process(self, number)
        return self.processes[number]

    def signal(self, number, what):
        """Lets a process receive a signal. Those that wait to join act on none."""
        if what == signal.SIGKILL:
            self._after(1, lambda: self._end(number, -signal.SIGKILL))
            return
        code = 130 if what == signal.SIGINT else 42
        if number in self.members and self.generation:
            for member in self.members:
                self._after(3, lambda member=member: self._leave(member, code))
        elif number < _COUNT:
            self._after(1, lambda: self._end(number, code))

    def _connect(self, number):
        if self.processes[number].code is None:
            self._machine.connected(number)
            self._machine.receive(number, generations.Ready("there"))

    def _leave(self, number, code):
        process = self.processes[number]
        if process.code is None and process.leaves is None:
            process.leaves = code
            self._machine.receive(number, generations.Leaving())

    def _end(self, number, code):
        if self.processes[number].code is not None:
            return
        self.processes[number].code = code

        def notice():
            self._machine.disconnected(number)
            self._machine.ended(number)

        self._after(self._delay, notice)

    def _after(self, looks, action):
        self._later.append((self._looks + looks, action))

    def _act(self):
        """Does what is due, and what that makes due."""
        while due := [event for event in self._later if event[0] <= self._looks]:
            for event in due:
                self._later.remove(event)
                event[1]()


@pytest.fixture
def exit_code(monkeypatch):
    """Returns a function that runs a schedule, and returns the exit code."""

    def run(script, *, spares, begins, delay, told=()):
        simulated = _Run(script, begins, delay)
        threading = types.SimpleNamespace(Thread=unittest.mock.Mock())
        monkeypatch.setattr(local, "time", simulated)
        monkeypatch.setattr(local, "threading", threading)
        monkeypatch.setattr(local.meeting, "Meeting", lambda *_, **__: simulated)
        monkeypatch.setattr(
            local._Lasting, "_make_process", lambda _, *given: simulated.start(*given)
        )
        command = ("program", "--workdir=/nowhere")
        job = engine.Job("job", command, _COUNT, spares=spares)
        pod = local._Lasting(job, io.StringIO(), local.Local(3), lambda number: None)
        simulated.pod = pod
        return pod.wait(collections.deque(told))

    return run


_ENDINGS = [
    *[(code, asks) for code in _ENDS for asks in (True, False)],
    (1, False),
    (-9, False),
    (-11, False),
]
_TIMES = [(20, 20), (20, 21), (21, 20), (20, 60), (60, 20)]
# When the run begins: before processes end, in between, and never.
_BEGINS = [1, 22, 1 << 40]


@pytest.mark.parametrize("begins", _BEGINS)
def test_every_run_ends_with_a_code_of_its_processes(exit_code, begins):
    for first, second in itertools.product(_ENDINGS, repeat=2):
        if begins > 1 and (first[1] or second[1]):
            # Before the run has begun there is nobody to ask.
            continue
        for times, spares, delay in itertools.product(_TIMES, (0, 1), (0, 2)):
            script = []
            for number, (code, asks) in enumerate((first, second)):
                script.append((times[number], number, code, asks))
            code = exit_code(script, spares=spares, begins=begins, delay=delay)
            codes = [first[0], second[0]]
            failures = [each for each in codes if each not in _ENDS]
            expected = {engine.shell_code(each) for each in codes}
            if (0, False) in (first, second) and len(failures) == 1:
                (failure,) = failures
                if times[codes.index(failure)] > min(times):
                    # The other one had left by itself, and this one was alone.
                    expected = {engine.shell_code(failure)}
            assert code in expected, (script, spares, delay)


@pytest.mark.parametrize("begins", _BEGINS)
@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 42), (signal.SIGINT, 130)])
def test_a_run_that_is_told_to_stop_ends_as_told(
    exit_code, begins, spares, number, code
):
    told = exit_code([], spares=spares, begins=begins, delay=0, told=[number])
    assert told == code


@pytest.mark.parametrize("when", [10, 20, 23, 40])
@pytest.mark.parametrize("end", [0, 42, 1, -9])
@pytest.mark.parametrize("begins", [1, 15])
def test_the_end_of_a_spare_is_not_the_end_of_the_run(exit_code, begins, end, when):
    script = [(50, 0, 0, True), (50, 1, 0, True), (when, _COUNT, end, False)]
    assert exit_code(script, spares=1, begins=begins, delay=0) == 0
