"""Tests that a restart loads the programs that an earlier attempt of the run compiled."""

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
    first = names(folder)
    assert any("lambda" in name for name in first)
    hits.clear()
    with compile_cache.enabled(tmp_path, print):
        compute(1)
        assert hits
        compute(2)
    assert names(folder) > first
    assert jax.config.jax_compilation_cache_dir is None


def test_an_entry_that_a_kill_cut_off_is_compiled_with_a_warning(tmp_path):
    with compile_cache.enabled(tmp_path, print):
        expected = compute(4)
    (entry,) = (tmp_path / compile_cache.FOLDER).glob("*lambda*-cache")
    content = entry.read_bytes()
    for length in (0, len(content) // 2, len(content) - 1):
        entry.write_bytes(content[:length])
        is_told = pytest.warns(UserWarning, match="Error reading persistent compil")
        with compile_cache.enabled(tmp_path, print), is_told:
            assert compute(4) == expected


def test_a_cache_that_cannot_be_used_does_not_end_the_run(tmp_path):
    lines = []
    (tmp_path / compile_cache.FOLDER).write_text("a file")
    with compile_cache.enabled(tmp_path, lines.append):
        assert compute(3)
    (line,) = lines
    assert "compiled programs are not cached for a restart" in line


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
