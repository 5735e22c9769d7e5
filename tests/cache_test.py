"""What a run has compiled, and a restart need not compile again."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import compilation_cache

from tests import toy
from xshard import loop
from xshard.files import cache


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    """Without the folder that tests share; each program is worth a file."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(cache, "_LEAST_SECONDS", 0)
    # As on one device.
    monkeypatch.setattr(cache, "_may_stand_still", lambda: False)
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def hits():
    """The events of programs that were found, one after the other."""
    events = []

    def listen(name, **_):
        if name == "/jax/compilation_cache/cache_hits":
            events.append(name)

    jax.monitoring.register_event_listener(listen)
    yield events
    jax.monitoring.unregister_event_listener(listen)


def compute(constant):
    """Compiles a program, which no function of JAX has in memory."""
    jax.clear_caches()
    return jax.jit(lambda x: jnp.sin(x) + constant)(1.0)


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_an_attempt_finds_what_the_one_before_has_compiled(tmp_path, hits):
    folder = tmp_path / cache.FOLDER
    with cache.kept(tmp_path, print):
        compute(1)
        assert [name for name in names(folder) if not name.startswith("attempt-")] == []
    first = names(folder)
    assert any("lambda" in name for name in first)
    hits.clear()
    with cache.kept(tmp_path, print):
        compute(1)
        assert hits
        compute(2)
    assert names(folder) > first
    assert not any(name.startswith("attempt-") for name in names(folder))
    assert jax.config.jax_compilation_cache_dir is None


def test_of_an_attempt_that_was_killed_all_is_taken_that_is_whole(tmp_path):
    left = tmp_path / cache.FOLDER / "attempt-killed"
    left.mkdir(parents=True)
    for seconds, name in enumerate(("first-cache", "second-cache", "cut_off-cache")):
        (left / name).write_bytes(b"entry")
        os.utime(left / name, (seconds, seconds))
    with cache.kept(tmp_path, print):
        pass
    assert names(tmp_path / cache.FOLDER) == {"first-cache", "second-cache"}


def test_no_run_ends_for_it(tmp_path):
    lines = []
    (tmp_path / cache.FOLDER).write_text("a file")
    with cache.kept(tmp_path, lines.append):
        assert compute(3)
    assert len(lines) == 1 and "compiled programs are not cached for a restart" in lines[0]


def test_a_folder_that_the_user_has_named_is_used(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    with cache.kept(tmp_path, print):
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    assert not (tmp_path / cache.FOLDER).exists()


def test_a_run_keeps_what_it_compiles(tmp_path):
    config = toy.get_config()
    config.steps = 2
    assert loop.run(config.lock(), str(tmp_path), "") == 0
    assert any("train_step" in name for name in names(tmp_path / cache.FOLDER))


def test_of_several_devices_of_a_cpu_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.undo()
    assert jax.device_count() == 8
    with cache.kept(tmp_path, print):
        assert jax.config.jax_compilation_cache_dir is None
    assert not (tmp_path / cache.FOLDER).exists()
