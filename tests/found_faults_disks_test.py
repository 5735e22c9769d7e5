"""Tests of what a run does on disks that lack something, in folders that others may
write to, and after its lock has passed to another process.
"""

import contextlib
import errno
import fcntl
import os
import pathlib
import signal
import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from tests import forks
from tests.checkpoint import harness
from tests.launch import harness as launch_harness
from xshard.checkpoint import lock
from xshard.checkpoint import store as store_lib

_DISKS_SAVES = """
import sys
from tests.checkpoint import harness
manager = harness.make_manager(sys.argv[1])
for step in (1, 2):
    harness.save(manager, step, harness.make_tree())
print(manager.all_steps())
manager.close()
"""


def _disks_run(program, *arguments, **environment):
    """Runs a program in a process and a process group of its own; returns its end."""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=harness.environment(**environment),
        capture_output=True,
        text=True,
        start_new_session=True,
        check=False,
    )


def _disks_mount(*arguments, **options):
    """Mounts a file system; skips the test with the reason if that is not possible."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system")
    done = subprocess.run(
        ["mount", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )
    if done.returncode:
        pytest.skip(f"needs to mount a file system: {done.stderr.strip()}")


@contextlib.contextmanager
def _disks_mounted(folder, *arguments, **options):
    folder.mkdir(parents=True)
    _disks_mount(*arguments, folder, **options)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextlib.contextmanager
def _disks_automounted(root):
    """Yields a folder that an automounter has mounted below `root`.

    This process is the automounter: the kernel gives it the pipe, and lets its process
    group create folders below the root.
    """
    read, write = os.pipe()
    options = f"fd={write},pgrp={os.getpgrp()},minproto=5,maxproto=5,indirect"
    try:
        arguments = ("-t", "autofs", "-o", options, "autofs")
        with (
            _disks_mounted(root, *arguments, pass_fds=[write]),
            _disks_mounted(root / "user", "-t", "tmpfs", "tmpfs") as user,
        ):
            yield user
    finally:
        os.close(read)
        os.close(write)


def test_13_a_run_saves_below_an_automounted_folder(tmp_path):
    with _disks_automounted(tmp_path / "home") as user:
        # The kind of disk that is meant: its root cannot be synced.
        with pytest.raises(OSError, match="Invalid argument"):
            descriptor = os.open(user.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        for folder in (user, user / "runs" / "digits"):
            done = _disks_run(_DISKS_SAVES, folder)
            assert (done.stdout, done.stderr) == ("[1, 2]\n", "")


_DISKS_SYNCED = """
import os, sys
from xshard.files import disk
synced = []
fsync = os.fsync
def note(descriptor):
    synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    fsync(descriptor)
os.fsync = note
"""


def test_13_only_folders_that_the_run_created_are_synced(tmp_path):
    theirs = tmp_path / "theirs" / "user"
    theirs.mkdir(parents=True)
    (theirs / "file").touch()
    program = f"{_DISKS_SYNCED}\n{_DISKS_SAVES}\nprint(*synced, sep='\\n')"
    done = _disks_run(program, theirs / "runs" / "digits")
    assert done.returncode == 0, done.stderr
    steps, *synced = done.stdout.splitlines()
    assert steps == "[1, 2]"
    # The parent of the first new folder has a new entry; what is above it has not.
    assert {str(theirs), str(theirs / "runs"), str(theirs / "runs/digits")} < set(
        synced
    )
    assert all(path.startswith(str(theirs)) for path in synced)


def _disks_stop_before(monkeypatch, owner, name, is_act):
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


def _disks_lacks_flock(*_):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def _disks_save(folder, steps, suspended_at, has_flock):
    """Saves some steps; is suspended before one act of the last of them."""
    patch = pytest.MonkeyPatch()
    patch.setattr(lock, "RENEW_SECONDS", 0.1)
    patch.setattr(lock, "WATCH_SECONDS", 1.0)
    if not has_flock:
        patch.setattr(fcntl, "flock", _disks_lacks_flock)
    manager = harness.make_manager(folder, keep_last=1)
    for step in steps:
        if step == steps[-1]:
            # On a disk, the acts are operations of the system; on a bucket, requests.
            is_commit = lambda *args: str(args[-1]).endswith("COMMIT")
            is_of_commit = lambda *args: "COMMIT" in str(args)
            is_first = lambda *args: "step_00000002" in str(args)
            is_old = lambda *args: is_of_commit(*args) and is_first(*args)
            if suspended_at == "commit":
                _disks_stop_before(patch, os, "link", is_commit)
                _disks_stop_before(patch, store_lib.Store, "create", is_of_commit)
            if suspended_at == "retention":
                _disks_stop_before(patch, pathlib.Path, "replace", is_old)
                _disks_stop_before(patch, store_lib.Store, "delete", is_old)
            if suspended_at == "what is dead":
                # It was begun by a process that was killed.
                dead = store_lib.Store(folder)
                dead.create("step_00000001.01234567/p0/x", b"")
                _disks_stop_before(
                    patch, store_lib.Store, "delete_folder", lambda *_: True
                )
            if suspended_at == "before it looks":
                _disks_stop_before(patch, store_lib.Store, "folders", lambda *_: True)
        manager.save(step, {"x": np.full(1000, step, np.float32)}, {})
        manager.wait()
    manager.close()
    print("saved", manager.all_steps(), flush=True)


def _disks_is_suspended(process):
    assert process.poll() is None, process.communicate()[0]
    stat = pathlib.Path(f"/proc/{process.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


@pytest.fixture(scope="module")
def disks_s3():
    with harness.s3() as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "x")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        yield f"s3://bucket/%s?endpoint={url}&region=us-east-1"


@pytest.mark.parametrize(
    "instant", ["commit", "retention", "what is dead", "before it looks"]
)
@pytest.mark.parametrize("place", ["disk", "lock lost", "gcs", "s3"])
def test_14_a_process_suspended_past_its_lock_stops_and_harms_nothing(
    request, tmp_path, place, instant
):
    folder = str(tmp_path / "run")
    if place == "gcs":
        folder = f"{request.getfixturevalue('gcs')}{tmp_path.name}"
    if place == "s3":
        folder = request.getfixturevalue("disks_s3") % tmp_path.name
    environment = harness.environment()

    def start(steps, suspended_at):
        has_flock = place == "lock lost"
        arguments = (folder, steps, suspended_at, has_flock)
        return forks.Process(_disks_save, *arguments, env=environment)

    with start([1, 2, 3], instant) as late:
        launch_harness.wait_until(lambda: _disks_is_suspended(late))
        if place == "lock lost":
            # As the server of a network disk does to a client that is silent.
            (tmp_path / "run" / lock.NAME).unlink()
        # The other one has saved, and has all of the next step there but its COMMIT.
        with start([10, 11], "commit") as other:
            launch_harness.wait_until(lambda: _disks_is_suspended(other))
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
