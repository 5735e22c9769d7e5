"""Tests of exchanges over real sockets, with threads as processes. The protocol in all
circumstances is tested by generations_test.py, in simulated runs.
"""

import socket

import numpy as np
import pytest

from tests.launch import harness
from tests.pod import peers
from xshard.pod import exchange, links, rendezvous

# One array takes several parts, and some have no element or no dimension.
LIKE = [
    np.empty((3, links.PART_BYTES // 8), np.int32),
    np.empty((), np.int64),
    np.empty((0, 4), np.float32),
    np.empty(7, np.uint8),
    np.empty((5, 2), np.float32),
]
OPERATIONS = [np.add, np.add, np.add, np.maximum, np.minimum]


def arrays_of(units):
    """Returns what some units of work contribute."""
    totals = []
    for like, operation in zip(LIKE, OPERATIONS, strict=True):
        of_units = []
        for unit in units:
            values = np.random.default_rng(unit).integers(0, 100, like.shape)
            of_units.append(np.asarray(values, like.dtype))
        totals.append(operation.reduce(of_units, 0, like.dtype))
    return totals


def assert_is_whole(combined, units):
    for array, expected in zip(combined, arrays_of(range(units)), strict=True):
        assert array.dtype == expected.dtype and not array.flags.writeable
        np.testing.assert_array_equal(array, expected)


def combine(made, units, contribute=arrays_of):
    return made.combine("step 1", LIKE, units, contribute, OPERATIONS)


@pytest.mark.parametrize(("count", "units"), [(1, 3), (2, 2), (3, 7), (4, 2)])
def test_arrays_are_combined_over_all_units(count, units):
    def function(made):
        made.enter()
        combined = combine(made, units)
        made.close()
        return combined, made.place.count

    with peers.Peers(count) as run:
        for combined, size in run.run(count, function).values():
            assert_is_whole(combined, units)
            assert size == count


def test_a_part_of_another_type_is_refused():
    # NumPy would round it to the result's.
    sums = exchange._Sums("step 1", [np.empty(2, np.float32)], 2, [np.add])
    with pytest.raises(ValueError, match="float32 and float64 are not float32"):
        sums.add(0, [np.ones(2, np.float32)], [np.ones(2)])


def test_each_unit_is_computed_once():
    computed = []

    def contribute(units):
        computed.extend(units)
        return arrays_of(units)

    def function(made):
        made.enter()
        combine(made, 7, contribute)
        made.close()

    with peers.Peers(3) as run:
        run.run(3, function)
    assert sorted(computed) == list(range(7))


def test_words_come_in_the_order_of_places():
    def function(made):
        made.enter()
        words = made.gather("first", [made._number, {"none": None}])
        made.close()
        return made.place.index, words

    with peers.Peers(3) as run:
        outcomes = run.run(3, function)
    places = {index: number for number, (index, _) in outcomes.items()}
    expected = [[places[index], {"none": None}] for index in range(3)]
    assert [words for _, words in outcomes.values()] == [expected] * 3


@pytest.mark.parametrize("is_leader", [True, False])
def test_others_take_over_what_a_lost_member_computes(is_leader):
    computed = []

    def function(made):
        made.enter()
        # Before all meet: once the victim has ended, another has its place.
        is_victim = (made.place.index == 0) == is_leader and made.place.index < 2
        made.gather("places", None)
        own = []

        def contribute(units):
            if is_victim:
                run.end(made._number)
            own.extend(units)
            return arrays_of(units)

        combined = combine(made, 7, contribute)
        computed.extend(own)
        made.close()
        return combined, made.place

    with peers.Peers(3) as run:
        for number in range(3):
            run.start(number, function)
        outcomes = run.outcomes(2)
    for combined, place in outcomes.values():
        assert_is_whole(combined, 7)
        assert place.count == 2
    assert sorted(place.index for _, place in outcomes.values()) == [0, 1]
    # What the survivors had computed is kept.
    assert sorted(computed) == list(range(7))


def test_a_newcomer_goes_on_where_the_members_are():
    def newcomer(made):
        word = made.enter()
        assert word == {"step": 5}
        made.restored()
        made.admit("after step 5", word)
        combined = combine(made, 7)
        made.close()
        return combined, made.place

    def member(made):
        made.enter()
        made.gather("places", None)
        if made.place.index == 1:
            run.start(3, newcomer)
            run.end(made._number)
        num_polls = 0
        while not any(made.gather(f"poll {num_polls}", made.arrivals)):
            num_polls += 1
        made.admit("after step 5", {"step": 5})
        combined = combine(made, 7)
        made.close()
        return combined, made.place

    with peers.Peers(3) as run:
        for number in range(3):
            run.start(number, member)
        outcomes = run.outcomes(3)
    assert len(outcomes) == 3 and 3 in outcomes
    for combined, place in outcomes.values():
        assert_is_whole(combined, 7)
        assert place.count == 3


def test_a_member_that_is_elsewhere_is_put_out_by_name():
    def function(made):
        made.enter()
        made.gather("places", None)
        is_odd = made.place.index == 1
        words = made.gather("step 9" if is_odd else "step 1", made.place.index)
        made.close()
        return words

    with peers.Peers(3) as run:
        for number in range(3):
            run.start(number, function)
        outcomes = run.outcomes(2)
    assert list(outcomes.values()) == [[0, 2]] * 2
    assert list(run.put_out.values()) == ["it is at step 9, the leader at step 1"]


def test_what_does_not_fit_is_refused_where_it_is_computed():
    def function(made):
        made.enter()
        with pytest.raises(ValueError, match=r"step 1 .*\(7,\) float64 was computed"):
            made.combine(
                "step 1",
                [np.empty(7, np.float32)],
                1,
                lambda units: [np.zeros(7)],
                [np.add],
            )

    with peers.Peers(1) as run:
        assert run.run(1, function) == {0: None}


def test_a_process_with_another_config_is_refused_and_the_run_goes_on():
    def function(made):
        made.enter()
        for number, facts, token, message in [
            (7, {"config.steps": "13"}, peers.TOKEN, "config.steps: 13 there, 12 on"),
            (8, peers.FACTS, "other", "it has another launch token"),
        ]:
            with pytest.raises(rendezvous.StartError, match=message):
                run.make(number, facts, token)
        with pytest.raises(rendezvous.StartError, match="has started no process 9"):
            exchange.Exchange(run.meeting.address, 9, peers.TOKEN, peers.FACTS)
        words = made.gather("words", 1)
        made.close()
        return words

    with peers.Peers(1) as run:
        assert run.run(1, function) == {0: [1]}


def test_members_go_on_without_the_launcher_until_one_is_lost():
    def function(made):
        made.enter()
        made.gather("places", None)
        if made.place.index == 0:
            run.meeting.close()
        words = made.gather("without the launcher", made.place.index)
        assert words == [0, 1, 2]
        with pytest.raises(exchange.LostError, match="the launcher has ended.*resumes"):
            made.gather("again", None)
            if made.place.index == 1:
                run.end(made._number)
            made.gather("without a member", None)

    with peers.Peers(3) as run:
        for number in range(3):
            run.start(number, function)
        assert list(run.outcomes(2).values()) == [None, None]


def test_the_waits_for_the_meeting_and_for_a_place_can_be_ended():
    class ToldError(Exception):
        pass

    looks = []

    def look():
        looks.append(None)
        if len(looks) > 2:
            raise ToldError

    with peers.Peers(2) as run:
        waiting = run.make(0)
        with pytest.raises(ToldError):
            waiting.enter(look)
    looks.clear()
    nowhere = f"127.0.0.1:{harness.free_port()}"
    with pytest.raises(ToldError):
        exchange.Exchange(nowhere, 0, peers.TOKEN, peers.FACTS, look=look)


def test_strangers_do_not_disturb_a_run():
    def function(made):
        made.enter()
        for address in (run.meeting.address, made._address):
            host, port = address.split(":")
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(b"\xff" * 100)
        words = made.gather("words", made._number)
        made.close()
        return sorted(words)

    with peers.Peers(2) as run:
        assert run.run(2, function) == {0: [0, 1], 1: [0, 1]}
