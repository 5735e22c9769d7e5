"""Tests of what a run does on disks that lack something, in folders that others may
write to, and after its lock has passed to another process.
"""

import contextlib
import ctypes
import errno
import os
import pathlib
import subprocess
import sys
import threading

import pytest

from launch import engine
from tests import forks
from tests.checkpoint import harness
from tests.faults import faults_test, shim
from xshard.files import disk

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
        with _disks_mounted(root, *arguments, pass_fds=[write]):
            with _disks_mounted(root / "user", "-t", "tmpfs", "tmpfs"):
                yield root / "user"
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
