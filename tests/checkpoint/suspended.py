"""Processes that are suspended past their lock, and go on when another one has it."""

import collections
import errno
import fcntl
import json
import os
import signal
import threading
import types

import jax.numpy as jnp
import numpy as np
import pytest

from tests import forks, toy
from tests.checkpoint import harness
from tests.launch import harness as launch_harness
from xshard import cli, loop
from xshard.checkpoint import lock
from xshard.checkpoint import store as store_lib
from xshard.files import claim, workdir
from xshard.metrics import writers


def stop_before(monkeypatch, owner, name, is_act):
    """Suspends this process, as Ctrl-Z does, before the first call of a function that
    is the act in question.
    """
    original = getattr(owner, name)

    def suspended(*args, **kwargs):
        if is_act(*args):
            monkeypatch.setattr(owner, name, original)
            # To this thread, which otherwise might go on for a moment.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, suspended)


def lacks_flock(*_):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def save(folder, steps, suspended_at, has_flock):
    """Saves some steps; is suspended before one act of the last of them."""
    patch = pytest.MonkeyPatch()
    patch.setattr(claim, "RENEW_SECONDS", 0.05)
    patch.setattr(claim, "WATCH_SECONDS", 0.3)
    if not has_flock:
        patch.setattr(fcntl, "flock", lacks_flock)
    manager = harness.make_manager(folder, keep_last=1)
    for step in steps:
        if step == steps[-1]:
            is_of_commit = lambda *args: "COMMIT" in str(args)
            is_first = lambda *args: "step_00000002" in str(args)
            is_old = lambda *args: is_of_commit(*args) and is_first(*args)
            if suspended_at == "commit":
                stop_before(patch, store_lib.Disk, "write", is_of_commit)
                stop_before(patch, store_lib.Store, "create", is_of_commit)
            if suspended_at == "retention":
                stop_before(patch, store_lib.Store, "delete", is_old)
            if suspended_at == "what is dead":
                # It was begun by a process that was killed.
                dead = store_lib.Store(folder)
                dead.create("step_00000001.01234567/p0/x", b"")
                stop_before(patch, type(dead), "delete_folder", lambda *_: True)
            if suspended_at == "before it looks":
                stop_before(patch, type(manager.store), "folders", lambda *_: True)
        manager.save(step, {"x": np.full(1000, step, np.float32)}, {})
        manager.wait()
    manager.close()
    print("saved", manager.all_steps(), flush=True)


def is_suspended(process):
    assert process.poll() is None, process.communicate()[0]
    return launch_harness.process_state(process.pid) == "T"


def check_store(request, tmp_path, place, instant):
    """Suspends a process that saves before an act, lets another one take its lock over
    and save, and then lets the first one go on.

    Args:
      request: pytest's, for the stores.
      tmp_path: a new folder.
      place: 'disk', without flock; 'lock lost', where it was dropped; 'gcs' or 's3'.
      instant: 'commit', 'retention', 'what is dead' or 'before it looks'.
    """
    folder = str(tmp_path / "run")
    if place == "gcs":
        folder = f"{request.getfixturevalue('gcs')}{tmp_path.name}"
    if place == "s3":
        folder = request.getfixturevalue("s3") % tmp_path.name
    environment = harness.environment()

    def start(steps, suspended_at):
        has_flock = place == "lock lost"
        arguments = (folder, steps, suspended_at, has_flock)
        return forks.Process(save, *arguments, env=environment)

    with start([1, 2, 3], instant) as late:
        launch_harness.wait_until(lambda: is_suspended(late))
        if place == "lock lost":
            # As the server of a network disk does to a client that is silent.
            (tmp_path / "run" / lock.NAME).unlink()
        # The other one has saved, and has all of the next step there but its COMMIT.
        with start([10, 11], "commit") as other:
            launch_harness.wait_until(lambda: is_suspended(other))
            os.kill(late.pid, signal.SIGCONT)
            said, _ = late.communicate(harness.FOREVER)
            os.kill(other.pid, signal.SIGCONT)
            output, _ = other.communicate(harness.FOREVER)
    assert late.returncode == 1, said
    assert "no longer holds" in said, said
    assert other.returncode == 0 and "saved [11]" in output, output
    manager = harness.make_manager(folder)
    assert manager.all_steps() == [11]
    restored = manager.restore({"x": jnp.zeros(1000)})
    assert np.all(restored.state["x"] == 11)
    # The next run finds nothing that is in its way.
    harness.save(manager, 12, {"x": np.full(1000, 12, np.float32)})
    assert manager.all_steps() == [11, 12]
    manager.close()


def train(folder, suspended_at):
    """Trains the toy; is suspended before an act: of a row, after it has asked whether
    it holds the claim.
    """
    patch = pytest.MonkeyPatch()
    patch.setattr(fcntl, "flock", lacks_flock)
    patch.setattr(claim, "RENEW_SECONDS", 0.05)
    patch.setattr(claim, "WATCH_SECONDS", 0.5)
    if suspended_at == "a row":
        append = writers.JsonLines._append
        counts = collections.Counter()

        def appended(self, line):
            counts["rows"] += 1
            # The evaluation of step 6.
            if counts["rows"] == 2:
                patch.setattr(self, "_claim", types.SimpleNamespace(check=checked))
            append(self, line)

        def checked():
            current.workdir.claim.check()
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

        patch.setattr(writers.JsonLines, "_append", appended)
    if suspended_at in ("reached.json", "results.json"):
        is_it = lambda _, path, *values: path.name == suspended_at
        stop_before(patch, workdir.Workdir, "write", is_it)
    current = loop.Run(toy.get_config().lock(), folder)

    def program():
        with current.opened():
            current.complete()
        return 0

    return cli.run(program)


def files(folder):
    """Returns what a run promises of its directory, without times."""
    files = {}
    for name in ("metrics.jsonl", "metrics.csv", "results.json", "reached.json"):
        files[name] = (folder / name).read_text()
    for path in folder.glob("checkpoints/*/COMMIT"):
        files[path.parent.name] = path.read_text()
    return files


def check_run(tmp_path, instant):
    """Suspends a run, lets another one end in its directory, and then lets the first
    one go on.

    Args:
      tmp_path: a new folder.
      instant: 'a row', 'reached.json' or 'results.json'.
    """
    environment = harness.environment()
    folder = tmp_path / "run"

    def start(suspended_at):
        return forks.Process(train, str(folder), suspended_at, env=environment)

    with start(instant) as late:
        launch_harness.wait_until(lambda: is_suspended(late))
        with start("") as other:
            output, _ = other.communicate(harness.FOREVER)
        assert other.returncode == 0, output
        before = files(folder)
        os.kill(late.pid, signal.SIGCONT)
        said, _ = late.communicate(harness.FOREVER)
    assert late.returncode == 1, said
    assert "no longer holds" in said and "Traceback" not in said, said
    assert files(folder) == before
    # No row is missing, and none is there twice.
    lines = before["metrics.jsonl"].splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == [4, 6, 8, 12, 12]
