"""Tests of what processes gather; tests/launch tests their meeting with real
host_collectives.
"""

import jax
import jax.numpy as jnp
import pytest

from tests.optimizers import harness
from xshard import errors
from xshard.pod import host_collectives


class Jitted:
    """A jitted function that records its compilation and its calls."""

    def __init__(self, events):
        self._function = jax.jit(lambda x: x + 1)
        self._events = events

    def __call__(self, state, x):
        self._events.append("called")
        return self._function(x)

    def lower(self, state, x):
        return self

    def compile(self):
        self._events.append("compiled")


@pytest.fixture
def meetings(monkeypatch):
    """The events of a run of two processes, in which the other process always brings
    the same value.
    """
    events = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def meet(self, value):
        events.append(self._what)
        return [value, value]

    monkeypatch.setattr(host_collectives.Channel, "gather", meet)
    return events


def test_no_process_runs_a_program_before_all_have_compiled_it(meetings):
    step = host_collectives.compiled_by_all(Jitted(meetings), "the step")
    assert not meetings and [float(step(0, jnp.float32(x))) for x in (1, 2)] == [
        2.0,
        3.0,
    ]
    assert meetings == ["compiled", "compiling the step", "called", "called"]


def test_all_processes_compile_a_program_again_for_other_shapes(meetings):
    step = host_collectives.compiled_by_all(Jitted(meetings), "the step")
    for shape in (2, 3, 2):
        step(0, jnp.ones(shape))
    assert meetings == [*["compiled", "compiling the step", "called"] * 2, "called"]


def test_other_shapes_on_another_process_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    meet = lambda self, value: [value, "({'x': (8, 9)},)"]
    monkeypatch.setattr(host_collectives.Channel, "gather", meet)
    step = host_collectives.compiled_by_all(
        jax.jit(lambda state, batch: batch["x"]), "the step"
    )
    with pytest.raises(
        errors.UserError, match=r"'x': \(8, 5\).*'x': \(8, 9\).*same shapes on all"
    ):
        step(0, {"x": jnp.ones((8, 5))})


def test_a_process_that_does_not_respond_is_reported(monkeypatch):
    events = []

    def raise_lost(self, value):
        raise host_collectives.LostError(
            f"{self._what}: process 1 of 2 did not respond within 7200 s"
        )

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(host_collectives.Channel, "gather", raise_lost)
    step = host_collectives.compiled_by_all(Jitted(events), "the step")
    with pytest.raises(
        host_collectives.LostError, match="compiling the step: process 1"
    ):
        step(0, jnp.float32(1))
    assert events == ["compiled"]


def test_a_program_is_compiled_once(meetings):
    x = jnp.float32(1)
    step = host_collectives.compiled_by_all(
        jax.jit(lambda x: jnp.sin(x) + 41), "the step"
    )
    count = harness.compile_count()
    assert [float(step(x)) for _ in range(2)] and harness.compile_count() == count + 1


@pytest.mark.parametrize(
    "others, difference",
    [(["10 rows", "9 rows"], "process 2: 9 rows"), (["10 rows"] * 2, "")],
)
def test_different_data_on_the_processes_is_refused(monkeypatch, others, difference):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    gather = lambda _, mine: [mine, *({"held-out": other} for other in others)]
    monkeypatch.setattr(host_collectives.Channel, "gather", gather)
    facts = {"held-out": lambda: "10 rows"}
    if not difference:
        host_collectives.check_equal_data(facts)
        return
    with pytest.raises(
        ValueError, match=f"held-out differs .* Process 0: 10 rows; {difference}. Give"
    ):
        host_collectives.check_equal_data(facts)


def test_a_single_process_compares_nothing():
    host_collectives.check_equal_data(
        {"held-out": lambda: pytest.fail("not to be called")}
    )


def on_process_0(action):
    return host_collectives.Channel("which run", 1.0).on_process_0(action)


def raise_error(error):
    raise error


@pytest.mark.parametrize(
    "error, text",
    [
        (None, ""),
        (errors.UserError("the run is another"), "^the run is another$"),
        (OSError("no such disk"), "^process 0: OSError: no such disk$"),
        (TypeError("a bug"), "^process 0: TypeError: a bug$"),
    ],
    ids=repr,
)
def test_the_result_of_process_0_is_that_of_all(monkeypatch, error, text):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    outcomes = []

    def gather(self, value):
        outcomes.append(value)
        return [outcomes[0], value]

    monkeypatch.setattr(host_collectives.Channel, "gather", gather)
    if error is None:
        action = lambda: [3, "ids"]
        assert on_process_0(action) == [3, "ids"]
    else:
        # Process 0 raises the error itself, whose traceback shows where it happened.
        with pytest.raises(type(error)) as raised:
            on_process_0(lambda: raise_error(error))
        assert raised.value is error
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    action = lambda: pytest.fail("not to be called")
    if error is None:
        assert on_process_0(action) == [3, "ids"]
    else:
        with pytest.raises(errors.UserError, match=text):
            on_process_0(action)


def test_a_single_process_receives_its_result_as_others_would():
    assert on_process_0(lambda: (3, "ids")) == [3, "ids"]
