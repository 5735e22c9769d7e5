"""Tests that a restart loads the programs that an earlier attempt of the run compiled."""

import os

import jax
import jax.numpy as jnp
import pytest

from tests import toy
from xshard import jax_internals, loop
from xshard.files import compile_cache


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    """Turns off the cache that tests share, and caches programs however fast they
    compile.
    """
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(compile_cache, "_LEAST_SECONDS", 0)
    # The cache is used on one device only; the tests have eight.
    monkeypatch.setattr(compile_cache, "_may_deadlock", lambda: False)
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    jax_internals.reset_compilation_cache()


@pytest.fixture(scope="module")
def hits():
    """A list that collects JAX's events of programs loaded from the cache."""
    events = []

    def listen(name, **_):
        if name == "/jax/compilation_cache/cache_hits":
            events.append(name)

    jax.monitoring.register_event_listener(listen)
    yield events
    jax.monitoring.unregister_event_listener(listen)


def compute(constant):
    """Compiles and runs a program, after clearing the programs that JAX has in memory."""
    jax.clear_caches()
    return jax.jit(lambda x: jnp.sin(x) + constant)(1.0)


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.sample(0.4)
def test_an_attempt_loads_what_the_previous_one_compiled(tmp_path, hits):
    folder = tmp_path / compile_cache.FOLDER
    with compile_cache.enabled(tmp_path, print):
        compute(1)
        assert [name for name in names(folder) if not name.startswith("attempt-")] == []
    first = names(folder)
    assert any("lambda" in name for name in first)
    hits.clear()
    with compile_cache.enabled(tmp_path, print):
        compute(1)
        assert hits
        compute(2)
    assert names(folder) > first
    assert not any(name.startswith("attempt-") for name in names(folder))
    assert jax.config.jax_compilation_cache_dir is None


def test_complete_entries_of_a_killed_attempt_are_taken(tmp_path):
    left = tmp_path / compile_cache.FOLDER / "attempt-killed"
    left.mkdir(parents=True)
    for seconds, name in enumerate(("first-cache", "second-cache", "cut_off-cache")):
        (left / name).write_bytes(b"entry")
        os.utime(left / name, (seconds, seconds))
    with compile_cache.enabled(tmp_path, print):
        pass
    assert names(tmp_path / compile_cache.FOLDER) == {"first-cache", "second-cache"}


def test_a_cache_that_cannot_be_used_does_not_end_the_run(tmp_path):
    lines = []
    (tmp_path / compile_cache.FOLDER).write_text("a file")
    with compile_cache.enabled(tmp_path, lines.append):
        assert compute(3)
    assert (
        len(lines) == 1 and "compiled programs are not cached for a restart" in lines[0]
    )


def test_a_folder_that_the_user_configured_is_used(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    with compile_cache.enabled(tmp_path, print):
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    assert not (tmp_path / compile_cache.FOLDER).exists()


def test_a_run_caches_what_it_compiles(tmp_path):
    config = toy.get_config()
    config.steps = 2
    assert loop.run(config.lock(), str(tmp_path), "") == 0
    assert any("train_step" in name for name in names(tmp_path / compile_cache.FOLDER))


def test_nothing_is_cached_with_several_cpu_devices(tmp_path, monkeypatch):
    monkeypatch.undo()
    assert jax.device_count() == 8
    with compile_cache.enabled(tmp_path, print):
        assert jax.config.jax_compilation_cache_dir is None
    assert not (tmp_path / compile_cache.FOLDER).exists()
