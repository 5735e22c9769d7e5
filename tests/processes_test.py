"""What processes do together, but for the meeting itself: that is done by real ones in tests/launch."""

import json

import jax
import jax.numpy as jnp
import pytest

from tests.optimizers import harness
from xshard.pod import processes


class Jitted:
    """A jitted function that says what is done with it."""

    def __init__(self, said):
        self._function = jax.jit(lambda x: x + 1)
        self._said = said

    def __call__(self, x):
        self._said.append("called")
        return self._function(x)

    def lower(self, x):
        return self

    def compile(self):
        self._said.append("compiled")


def test_no_process_runs_a_program_before_all_have_compiled_it(monkeypatch):
    said = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes.Exchange, "__call__", lambda self: said.append(self._what))
    step = processes.compiled_by_all(Jitted(said), "the step")
    assert not said and [float(step(jnp.float32(x))) for x in (1, 2)] == [2.0, 3.0]
    assert said == ["compiled", "compiling the step", "called", "called"]


def test_one_that_does_not_come_is_missed(monkeypatch):
    said = []

    def missing(self):
        raise processes.LostError(f"{self._what}: process 1 of 2 did not respond within 7200 s")

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes.Exchange, "__call__", missing)
    step = processes.compiled_by_all(Jitted(said), "the step")
    with pytest.raises(processes.LostError, match="compiling the step: process 1"):
        step(jnp.float32(1))
    assert said == ["compiled"]


def test_a_program_is_compiled_once(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes.Exchange, "__call__", lambda self: None)
    x = jnp.float32(1)
    step = processes.compiled_by_all(jax.jit(lambda x: jnp.sin(x) + 41), "the step")
    count = harness.compile_count()
    assert [float(step(x)) for _ in range(2)] and harness.compile_count() == count + 1


@pytest.mark.parametrize(
    "others, rule", [(["10 rows", "9 rows"], "process 2: 9 rows"), (["10 rows"] * 2, "")]
)
def test_all_processes_have_the_same_data(monkeypatch, others, rule):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    heard = lambda _, mine: [mine, *(json.dumps({"held-out": other}) for other in others)]
    monkeypatch.setattr(processes.Exchange, "__call__", heard)
    facts = {"held-out": lambda: "10 rows"}
    if not rule:
        processes.check_equal_data(facts)
        return
    with pytest.raises(ValueError, match=f"held-out differs .* Process 0: 10 rows; {rule}. Give"):
        processes.check_equal_data(facts)


def test_one_process_has_nothing_to_compare():
    processes.check_equal_data({"held-out": lambda: pytest.fail("not to be called")})
