"""Tests that a restart loads the programs that an earlier start compiled."""

import os
import pathlib

import jax
import jax.numpy as jnp
import pytest

import tests
from tests import toy
from tests.checkpoint import harness as stores
from tests.launch import harness
from xshard import checkpoint, loop
from xshard.base.jax_internals import runtime
from xshard.files import compile_cache
from xshard.replay import report


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    """Turns off the cache that tests share, and caches programs that compile fast."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(compile_cache, "_LEAST_SECONDS", 0)
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    runtime.reset_compilation_cache()


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
    """Compiles and runs a program, after clearing those that JAX has in memory."""
    jax.clear_caches()
    return jax.jit(lambda x: jnp.sin(x) + constant)(1.0)


def names(folder):
    return {path.name for path in folder.iterdir()}


def enabled(directory, say=print, **options):
    """Returns the context with the cache that a run has in its work directory."""
    store = checkpoint.Store(directory / compile_cache.FOLDER)
    return cache(store, say, **options)


def cache(store, say=print, *, flags=tests.XLA_FLAGS, is_shared=False, is_seen=True):
    """Returns the context with a cache in a store."""
    return compile_cache.enabled(
        store, say, flags=flags, chip="cpu", is_shared=is_shared, is_seen=is_seen
    )


@pytest.mark.sample(0.4)
def test_a_start_loads_what_the_previous_one_compiled(tmp_path, hits):
    folder = tmp_path / compile_cache.FOLDER
    with enabled(tmp_path):
        compute(1)
    first = names(folder)
    assert any("lambda" in name for name in first)
    hits.clear()
    with enabled(tmp_path):
        compute(1)
        assert hits
        compute(2)
    assert names(folder) > first
    assert jax.config.jax_compilation_cache_dir is None


def test_a_program_that_another_process_stores_first_serves_as_well(
    tmp_path, monkeypatch
):
    create = checkpoint.Store.create

    def late(store, name, content):
        """Creates an object after another process has."""
        create(store, name, b"another's")
        create(store, name, content)

    monkeypatch.setattr(checkpoint.Store, "create", late)
    with enabled(tmp_path):
        compute(1)
    (entry,) = (tmp_path / compile_cache.FOLDER).glob("*lambda*-cache")
    assert entry.read_bytes() == b"another's"


def test_an_entry_that_a_kill_cut_off_is_compiled_with_a_warning(tmp_path):
    with enabled(tmp_path):
        expected = compute(4)
    (entry,) = (tmp_path / compile_cache.FOLDER).glob("*lambda*-cache")
    content = entry.read_bytes()
    for length in (0, len(content) // 2, len(content) - 1):
        entry.write_bytes(content[:length])
        is_told = pytest.warns(UserWarning, match="Error reading persistent compil")
        with enabled(tmp_path), is_told:
            assert compute(4) == expected


def test_a_cache_that_cannot_be_used_does_not_end_the_run(tmp_path):
    lines = []
    (tmp_path / compile_cache.FOLDER).write_text("a file")
    with enabled(tmp_path, lines.append):
        assert compute(3)
    (line,) = lines
    assert "compiled programs are not cached for a restart" in line


def test_a_folder_that_the_user_configured_is_used(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    with enabled(tmp_path):
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    assert not (tmp_path / compile_cache.FOLDER).exists()


def test_a_run_caches_what_it_compiles(tmp_path):
    config = toy.get_config()
    config.steps = 2
    assert loop.run(config.lock(), str(tmp_path), "") == 0
    assert any("train_step" in name for name in names(tmp_path / compile_cache.FOLDER))


def test_a_replay_loads_what_the_run_compiled_and_adds_nothing(tmp_path, hits):
    config = toy.get_config()
    config.steps = 2
    assert loop.run(config.lock(), str(tmp_path), "") == 0
    folder = tmp_path / compile_cache.FOLDER
    before = names(folder)
    (program,) = folder.glob("*train_step*")
    times = program.stat()
    jax.clear_caches()
    hits.clear()
    lines = []
    assert report.replay(str(tmp_path), 2, lines.append)
    assert "step 2" in lines[0] and hits
    assert names(folder) == before and program.stat() == times
    # Without what the run compiled, the replay compiles it, and keeps nothing.
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    jax.clear_caches()
    hits.clear()
    assert report.replay(str(tmp_path), 2, lines.append)
    assert not hits and not folder.exists()


def test_a_shared_cache_may_be_in_a_bucket(hits, monkeypatch):
    with stores.gcs() as url:
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", url)
        store = checkpoint.Store("gs://bucket/compiled/")
        for is_second in (False, True):
            hits.clear()
            with cache(store, is_shared=True):
                compute(5)
            assert bool(hits) == is_second
        assert any("lambda" in name for name in store.names())


def test_a_bucket_that_does_not_answer_does_not_hold_up_a_run(
    tmp_path, monkeypatch, capsys
):
    # Nothing listens there. The retries of a checkpoint take a quarter of an hour.
    url = f"http://127.0.0.1:{harness.free_port()}"
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", url)
    config = toy.get_config()
    config.steps = 2
    config.compiled.directory = "gs://bucket/compiled"
    assert loop.run(config.lock(), str(tmp_path), "") == 0
    said = "compiled programs are not cached for a restart: gs://bucket/compiled"
    assert said in capsys.readouterr().out


def test_several_cpu_devices_need_programs_in_order(tmp_path):
    lines = []
    name, value = compile_cache.IN_ORDER_FLAG
    with enabled(tmp_path, lines.append, flags="", is_shared=True):
        assert jax.config.jax_compilation_cache_dir is None
    (line,) = lines
    assert f"needs XLA_FLAGS=--{name}={value}" in line


class Listening(toy.Toy):
    """Writes JAX's events of compiled and of loaded programs to a file. Caches programs
    that compile fast.
    """

    def __init__(self, config):
        super().__init__(config)
        compile_cache._LEAST_SECONDS = 0
        directory = pathlib.Path(os.environ["XSHARD_TEST_EVENTS"])
        self._file = directory / f"{jax.process_index()}"
        jax.monitoring.register_event_listener(self._listen)
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, name, *_, **__):
        with self._file.open("a") as file:
            file.write(f"{name}\n")


def run_pod(events, *flags):
    """Runs a pod of two processes to its end; it writes its events to a folder."""
    experiment = "--config.experiment=tests.files.compile_cache_test.Listening"
    environment = harness.environment(XSHARD_TEST_EVENTS=str(events))
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    process = harness.launch(
        "--num_processes=2",
        "--cpu_devices=2",
        command=[*harness.TOY, experiment, *flags],
        env=environment,
    )
    code, output = harness.finish(process)
    assert code == 0, output


def programs(events, index):
    """Returns how many programs a process compiled or loaded, and how many it loaded.
    JAX counts a program that it loads as compiled, too.
    """
    names = (events / str(index)).read_text().split()
    compiled = names.count("/jax/core/compile/backend_compile_duration")
    return compiled, names.count("/jax/compilation_cache/cache_hits")


def assert_compiled(first, second):
    """Asserts that two processes found no program that neither of them compiled.

    A process that is late loads what the other has just written.
    """
    assert first[0] == second[0]
    assert first[1] + second[1] <= first[0]


@pytest.mark.sample(0.3)
def test_a_pod_that_resumes_loads_its_programs_from_the_work_directory(tmp_path):
    loaded = {}
    for steps in (4, 8, 12):
        directory = tmp_path / str(steps)
        directory.mkdir()
        run_pod(directory, f"--workdir={tmp_path / 'run'}", f"--config.steps={steps}")
        for index in (0, 1):
            loaded[steps, index] = programs(directory, index)
    assert_compiled(loaded[4, 0], loaded[4, 1])
    for index in (0, 1):
        assert loaded[8, index][1] > 0
        # Nothing is new in another resume.
        assert len(set(loaded[12, index])) == 1


@pytest.mark.sample(0.3)
def test_a_second_start_of_a_pod_loads_all_programs(tmp_path):
    """Needs processes, whose keys of a program JAX may let differ."""
    counts = {}
    for start in (1, 2):
        directory = tmp_path / str(start)
        directory.mkdir()
        run_pod(
            directory,
            f"--workdir={directory / 'run'}",
            f"--config.compiled.directory={tmp_path / 'shared'}",
        )
        for index in (0, 1):
            counts[start, index] = programs(directory, index)
    assert_compiled(counts[1, 0], counts[1, 1])
    for index in (0, 1):
        compiled, loaded = counts[2, index]
        assert compiled == loaded > 0
