"""Tests of the protocol of generations in simulated runs, and of the simulation: it
finds what is wrong with a protocol that leaves something out.
"""

import types
import unittest.mock

import pytest

from tests.pod import simulation
from xshard.pod import generations


class WithoutLastResult(generations.Member):
    """A leader does not send the last result to members that lack it."""

    def _joined(self, sender, exchange):
        if exchange == self._first:
            super()._joined(sender, exchange)


class WithoutReceipts(generations.Member):
    """A leader's call returns before all members have the result."""

    def _return_if_settled(self):
        self._lacking = set()
        super()._return_if_settled()


class WithoutClaims(generations.Member):
    """A member does not say which units of work it has done."""

    def _prepare(self, generation):
        held, self._held = self._held, ()
        super()._prepare(generation)
        self._held = held


class WithoutForgetting(generations.Member):
    """A leader keeps the sums of an earlier generation."""

    def _forget(self):
        if self._begun == self.prepared:
            super()._forget()


class WithoutFreezing(generations.Member):
    """A member goes on in its generation after it was asked to prepare another."""

    @property
    def _is_frozen(self):
        return not self._begun

    def _prepare(self, generation):
        prepared = generations.Prepared(generation, self.exchange, self._held)
        self._port.send(generations.MEETING, prepared)
        self.prepared = generation


class WithoutWaitingForEnds(generations.Meeting):
    """A generation begins before the process that is put out has ended."""

    def put_out(self, number, why):
        super().put_out(number, why)
        self.ended(number)


class WithoutWaitingForAnswers(generations.Meeting):
    """A generation begins after the first member has prepared it."""

    def _note_prepared(self, number, message):
        self._awaited = {number}
        super()._note_prepared(number, message)


class WithAnyLeader(generations.Meeting):
    """The leader is any member, not one that has come furthest."""

    def _begin(self):
        self.members.reverse()
        furthest = {p.exchange for p in self._processes.values()}
        for process in self._processes.values():
            process.exchange = max(furthest)
        super()._begin()


class WithoutRepairs(generations.Meeting):
    """Broken links between members that live on are not noticed."""

    def _judge_links(self):
        pass


class WithoutHeartbeats(generations.Meeting):
    """Silent processes are not noticed."""

    def tick(self, now):
        for process in self._processes.values():
            if process.connected:
                process.heard = self._now + 1.0
        super().tick(now)


class WithoutEndForTheLate(generations.Meeting):
    """A process that is started after the end of the run is not put out."""

    def started(self, number, *, joins):
        self._processes[number] = generations._Process(self._now, joins)


def test_runs_that_lose_members_end_as_they_should():
    for seed in range(400):
        simulation.run(seed)


def begun_meeting(count, port, newcomers=0):
    """Returns the meeting of a run that has begun with so many members, and for which
    newcomers wait.
    """
    meeting = generations.Meeting(
        count, simulation.START, simulation.SILENCE, simulation.SHUTDOWN, port
    )
    for number in range(count + newcomers):
        meeting.started(number, joins=number >= count)
        meeting.connected(number)
        meeting.receive(number, generations.Ready("there"))
    for number in range(count):
        meeting.receive(number, generations.Prepared(1, 0))
    return meeting


def test_a_process_that_does_not_end_after_the_run_is_put_out():
    port = unittest.mock.Mock()
    meeting = begun_meeting(1, port)
    meeting.receive(0, generations.Leaving())
    meeting.disconnected(0)
    assert meeting.is_done
    for now in range(int(simulation.SHUTDOWN) + 1):
        meeting.tick(now)
    port.kill.assert_not_called()
    meeting.tick(now + 1)
    port.kill.assert_called_once_with(0, "it did not end within 20 s after the run")


def test_a_newcomer_that_restores_during_a_change_comes_with_the_next():
    port = unittest.mock.Mock()
    meeting = begun_meeting(3, port, newcomers=1)
    meeting.ended(2)
    for number in (0, 1):
        meeting.receive(number, generations.Prepared(2, 5))
    meeting.receive(0, generations.Admit(5, "the state"))
    meeting.ended(1)
    meeting.receive(3, generations.Restored(5))
    meeting.receive(0, generations.Prepared(3, 5))
    assert meeting.members == [0]
    meeting.receive(0, generations.Admit(5, "the state"))
    for number in (0, 3):
        meeting.receive(number, generations.Prepared(4, 5))
    assert meeting.members == [0, 3]
    port.kill.assert_not_called()


def test_a_newcomer_that_cannot_be_ended_does_not_keep_the_others():
    port = unittest.mock.Mock()
    meeting = begun_meeting(2, port, newcomers=1)
    meeting.ended(1)
    meeting.receive(0, generations.Prepared(2, 5))
    meeting.receive(0, generations.Admit(5, "the state"))
    port.send.reset_mock()
    meeting.put_out(2, "it is stuck")
    port.send.assert_called_with(0, generations.Admitted(5))


def test_nobody_is_let_in_while_a_member_lacks_the_last_result():
    port = unittest.mock.Mock()
    member = generations.Member(0, simulation.SILENCE, port)
    members = (generations.Peer(0, "there"), generations.Peer(1, "there"))
    member.enter("there")
    member.receive(simulation.MEETING, generations.Prepare(1))
    member.receive(simulation.MEETING, generations.Begin(1, 0, members, 0))
    admission = unittest.mock.call(simulation.MEETING, generations.Admit(0, "state"))
    member.call(simulation.Words("0 admit", 0, "word", admits="state"))
    assert admission not in port.send.mock_calls
    member.receive(1, generations.Joined(1, 1, 0))
    assert admission in port.send.mock_calls


def test_a_seed_always_gives_the_same_schedule():
    first, second = simulation.run(11), simulation.run(11)
    assert first.num_events == second.num_events
    assert (first.lines, first.file) == (second.lines, second.file)


@pytest.mark.parametrize(
    "broken",
    [
        WithoutLastResult,
        WithoutReceipts,
        WithoutClaims,
        WithoutForgetting,
        WithoutFreezing,
        WithoutWaitingForEnds,
        WithoutWaitingForAnswers,
        WithAnyLeader,
        WithoutRepairs,
        WithoutHeartbeats,
        WithoutEndForTheLate,
    ],
)
def test_the_simulation_finds_a_protocol_without(broken):
    side = "member" if issubclass(broken, generations.Member) else "meeting"
    with pytest.raises(simulation.ViolationError):
        for seed in range(1000):
            simulation.run(seed, **{side: broken})


@pytest.mark.parametrize(
    ("broken", "lost"),
    [
        # Who broke with whom, of members 0 to 3, which 0 leads.
        ({1: 0}, [1]),
        ({1: 2}, [2]),
        ({0: 1}, [1]),
        ({1: 0, 2: 0}, [0]),
    ],
)
def test_of_a_link_that_breaks_twice_the_likelier_end_is_put_out(broken, lost):
    out = []
    meeting = types.SimpleNamespace(
        _broken={number: (peer, 0.0) for number, peer in broken.items()},
        _is_changing=False,
        is_done=False,
        _now=generations.LINK_SECONDS,
        _present=lambda: [0],
        _processes=[types.SimpleNamespace(exchange=5)],
        _repaired=5,
        members=[0, 1, 2, 3],
        put_out=lambda number, why: out.append(number),
    )
    generations.Meeting._judge_links(meeting)
    assert out == lost and not meeting._broken
