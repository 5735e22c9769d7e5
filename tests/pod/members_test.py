"""Tests of what the members of a run agree on when the one that leads is lost."""

import contextlib
import threading

import pytest

from launch import meeting
from xshard import errors
from xshard.pod import exchange as exchange_lib
from xshard.pod import exchanging, host_collectives, members, request, sync_point

_SECONDS = 60
_TOKEN = "a token of a launch"


class Lost(BaseException):
    """Ends a member as if its process were killed."""


class Crew:
    """Members of a run as threads of this process."""

    def __init__(self, count):
        self._meeting = meeting.Meeting(count, _TOKEN, lambda *_: None, lambda _: None)
        self._count = count
        self._exchanges = {}

    def lose(self, number):
        """Ends a member, which calls it itself."""
        self._exchanges[number]._loop.end()
        self._meeting.ended(number)
        raise Lost

    def run(self, program):
        """Returns what a program returns on each member, by number; an exception that
        it raises stands for that.
        """
        returned = {}

        def run_member(number):
            exchange = exchange_lib.Exchange(self._meeting.address, number, _TOKEN, {})
            self._exchanges[number] = exchange
            exchange.enter()
            member = exchanging.Exchanging(number, exchange, is_outside=False)
            try:
                returned[number] = program(member)
                member.close()
            except BaseException as e:
                returned[number] = e
                if not isinstance(e, Lost):
                    exchange._loop.end()
                    self._meeting.ended(number)

        threads = []
        for number in range(self._count):
            self._meeting.started(number, joins=False)
            threads.append(threading.Thread(target=run_member, args=(number,)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_SECONDS)
            assert not thread.is_alive()
        self._meeting.close()
        return returned


def test_a_lost_leader_s_action_is_run_by_its_successor():
    crew = Crew(3)
    ran = []

    def program(member):
        def act():
            ran.append(member.number)
            if member.number < 2:
                crew.lose(member.number)
            return {"by": member.number}

        return member.by_leader("an action", act), member.leads

    returned = crew.run(program)
    assert ran == [0, 1, 2]
    assert returned[2] == ({"by": 2}, True)
    assert isinstance(returned[0], Lost) and isinstance(returned[1], Lost)


def test_who_comes_to_lead_opens_what_a_leader_has_open_in_the_same_order():
    crew = Crew(2)
    events = []

    def program(member):
        @contextlib.contextmanager
        def opened(name):
            events.append((member.number, f"open {name}"))
            yield
            events.append((member.number, f"close {name}"))

        with member.while_leading(lambda: opened("claim")):
            with member.while_leading(lambda: opened("early")):
                member.gather("first", None)
            with member.while_leading(lambda: opened("log")):
                if member.number == 0:
                    crew.lose(0)
                member.gather("second", None)
                assert member.leads
            member.gather("third", None)

    assert crew.run(program)[1] is None
    assert [event for number, event in events if number == 1] == [
        "open claim",
        "open log",
        "close log",
        "close claim",
    ]


def test_each_member_knows_how_many_were_taken_over_from():
    crew = Crew(3)

    def program(member):
        stood = [dict(member.standing)]
        for number in (1, 0):
            member.gather(f"before {number}", None)
            stood.append(dict(member.standing))
            # No member is lost before all of them have looked.
            member.gather(f"noted {number}", None)
            if member.number == number:
                crew.lose(number)
        member.gather("last", None)
        return [*stood, dict(member.standing)]

    def standing(generation, count, takeovers):
        return {"generation": generation, "members": count, "takeovers": takeovers}

    assert crew.run(program)[2] == [
        {},
        standing(1, 3, 0),
        standing(2, 2, 1),
        standing(3, 1, 2),
    ]


def test_an_error_of_the_leader_reaches_all():
    crew = Crew(2)

    def program(member):
        def fail():
            raise OSError("the disk is full")

        with pytest.raises(Exception, match="the disk is full") as caught:
            member.channel("saving", 1.0).on_process_0(fail)
        return caught.type

    assert crew.run(program) == {0: OSError, 1: errors.UserError}


def test_all_act_on_the_most_urgent_request_at_the_same_poll():
    crew = Crew(3)
    stop = request.Request(request.STOP, "SIGTERM on process 2")

    def program(member):
        point = sync_point.Polled(member)
        assert point.poll() is None
        if member.number == 1:
            point.ask(request.BY_CLOCK)
        if member.number == 2:
            point.ask(stop)
        first = point.poll()
        return first, point.stop_reason, point.poll()

    for first, stop_reason, later in crew.run(program).values():
        # A stop saves, so a save that was asked for before it may be made as well.
        assert first == stop and stop_reason == stop.why
        assert later in (None, request.BY_CLOCK)


def test_a_member_that_has_noted_other_values_ends_and_the_others_go_on():
    crew = Crew(3)

    def program(member):
        point = sync_point.Polled(member)
        member.note(b"a row")
        point.poll()
        member.note(b"another" if member.number == 0 else b"the next row")
        point.poll()
        point.poll()
        return member.leads

    returned = crew.run(program)
    assert isinstance(returned.pop(0), host_collectives.LostError)
    assert sorted(returned.values()) == [False, True]


def test_processes_that_jax_has_joined_act_by_themselves():
    alone = members.Members()
    assert alone.leads and alone.may_lead and not alone.is_outside
    assert not alone.standing
    assert alone.by_leader("the rows", lambda: 3) == 3
    opened = []
    with alone.while_leading(lambda: contextlib.nullcontext(opened.append(1))):
        assert opened == [1]
