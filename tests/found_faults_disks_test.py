"""Tests of what a run does on disks that lack something, in folders that others may
write to, and after its lock has passed to another process.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from launch import engine
from tests import toy
from tests.checkpoint import harness, suspended
from tests.faults import lacking_disk
from xshard import errors
from xshard.checkpoint import lock
from xshard.checkpoint import store as store_lib
from xshard.files import claim, disk, workdir
from xshard.metrics import clock
from xshard.pod import attempts, status

_DISKS_SAVES = """
import sys
from tests.checkpoint import harness, suspended
from tests.faults import lacking_disk
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
        done = _disks_run(_DISKS_SAVES, user / "runs" / "digits")
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


@pytest.mark.parametrize(
    ("place", "instant"),
    [("disk", "commit"), ("gcs", "retention"), ("s3", "before it looks")],
)
def test_14_a_process_suspended_past_its_lock_stops_and_harms_nothing(
    request, tmp_path, place, instant
):
    suspended.check_store(request, tmp_path, place, instant)


def test_14_a_run_that_was_suspended_changes_no_file_of_the_next(tmp_path):
    suspended.check_run(tmp_path, "a row")


_DISKS_TRAINS = """
import sys
from tests import toy
from xshard import loop
config = toy.get_config()
for steps in (7, 12):
    config.steps = steps
    print("code", loop.run(config, sys.argv[1], ""))
"""


def test_15_a_run_trains_and_resumes_on_a_disk_without_locks(tmp_path):
    if lacking_disk.missing():
        pytest.skip(lacking_disk.missing())
    with lacking_disk.mounted(tmp_path / "disk") as mounted:
        with (mounted / "file").open("w") as file, pytest.raises(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        done = _disks_run(_DISKS_TRAINS, mounted / "run")
        assert done.stdout.count("code 0") == 2, done.stderr
        for lacks in ("has no fsync", "has no locks (flock: Function not implemented)"):
            assert done.stderr.count(lacks) == 1
        lines = (mounted / "run" / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        assert steps == [4, 6, 7, 7, 8, 12, 12]
        left = {path.name for path in (mounted / "run").rglob(".*")}
        assert left == {".lock"}


_DISKS_WITHOUT = """
import errno, fcntl, os, sys
def lacks(*_):
    raise OSError(getattr(errno, sys.argv[2]), os.strerror(getattr(errno, sys.argv[2])))
fcntl.flock = lacks
"""


def test_15_a_lease_takes_the_place_of_flock(tmp_path):
    # As a network disk answers whose lock server is not there.
    done = _disks_run(f"{_DISKS_WITHOUT}\n{_DISKS_SAVES}", tmp_path / "run", "ENOLCK")
    assert done.stdout == "[1, 2]\n", done.stderr
    assert done.stderr.count("has no locks (flock: ") == 1
    assert "A lease takes their place" in done.stderr
    # What its end leaves is in nobody's way.
    assert sorted(path.name[:13] for path in (tmp_path / "run").iterdir()) == [
        ".lock",
        "step_00000001",
        "step_00000002",
    ]


@pytest.fixture
def disks_without_flock(monkeypatch):
    monkeypatch.setattr(fcntl, "flock", suspended.lacks_flock)
    monkeypatch.setattr(claim, "RENEW_SECONDS", 0.05)


def _disks_claim(folder, **options):
    return claim.Claim(folder, renew_seconds=0.05, watch_seconds=0.5, **options)


def test_15_a_lease_is_refused_to_a_second_run_and_passes_on_after_a_kill(
    tmp_path, disks_without_flock
):
    said = []
    first = _disks_claim(tmp_path)
    with pytest.raises(claim.InUseError, match=r"in use by another process \(process "):
        # Far longer than the first one needs to show that it lives.
        claim.Claim(tmp_path, renew_seconds=0.05, watch_seconds=harness.FOREVER)
    first.check()
    # As if it had been killed, or suspended.
    first._held.ended.set()
    second = _disks_claim(tmp_path, say=said.append)
    assert len(said) == 1 and "watching for 0.5 s whether that process" in said[0]
    with pytest.raises(claim.LostError, match="no longer holds .* holds it"):
        first.check()
    late = tmp_path / "late"
    for act in (first.create, first.replace):
        with pytest.raises(claim.LostError):
            act(late, b"late")
    second.create(late, b"in time")
    second.create(tmp_path / "removed" / "note", b"")
    second.delete(tmp_path / "removed" / "note")
    (tmp_path / "removed").rmdir()
    with pytest.raises(claim.LostError):
        first.delete(late)
    assert late.read_bytes() == b"in time"
    # The end of the first one takes nothing from the second.
    first.release()
    second.check()
    second.delete(late)
    second.release()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_15_of_several_that_take_a_claim_over_one_succeeds(
    tmp_path, disks_without_flock
):
    last = _disks_claim(tmp_path)
    last._held.ended.set()
    outcomes = []

    def take():
        try:
            outcomes.append(_disks_claim(tmp_path))
        except claim.InUseError as e:
            outcomes.append(e)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (holder,) = [outcome for outcome in outcomes if isinstance(outcome, claim.Claim)]
    assert len(outcomes) == 8
    holder.check()
    holder.release()


def _disks_make(kind, path):
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        (path.parent.parent / "somebody's").write_text("content")
        path.symlink_to(path.parent.parent / "somebody's")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(kind)


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_17_what_is_no_lock_on_a_disk_is_named(tmp_path, kind):
    folder = tmp_path / "run"
    folder.mkdir()
    _disks_make(kind, folder / ".lock")
    message = r"run/\.lock is .*, not the lock of a run: .* move it away"
    with pytest.raises(store_lib.CheckpointError, match=message):
        harness.make_manager(folder).acquire()
    with (
        pytest.raises(errors.UserError, match=f"--workdir={folder}.*{message}"),
        workdir.Workdir(folder).opened(toy.get_config()),
    ):
        pass
    if kind == "link":
        assert (tmp_path / "somebody's").read_text() == "content"


_DISKS_CONTENTS = (
    b"",
    b"{}",
    b"[]",
    b"7",
    b"null",
    b'{"owner": 7}',
    b'{"owner": "a"}',
    b'{"owner": "a", "beats": "many"}',
    b'{"owner": "a", "beats": 1, "deleting": "all"}',
    b"\xff\x00\xfe",
    b'{"owner": "a", "beats": ' + b"1" * 5000 + b"}",
    b"[" * 100_000,
    b" " * (2 << 20),
)


def test_17_what_is_no_lease_on_a_bucket_is_named(gcs, tmp_path):
    for number, content in enumerate(_DISKS_CONTENTS):
        folder = f"{gcs}{tmp_path.name}/{number}"
        store_lib.Store(folder).create(".lock", content)
        message = r"/\.lock is not the lease of a run: .*Make sure .* then delete it"
        with pytest.raises(store_lib.CheckpointError, match=message):
            harness.make_manager(folder).acquire()
        # On a disk the kernel holds the lock, whatever is in the file.
        disk_folder = tmp_path / str(number)
        disk_folder.mkdir()
        (disk_folder / ".lock").write_bytes(content)
        manager = harness.make_manager(disk_folder)
        manager.acquire()
        manager.close()


def test_17_the_lease_of_an_earlier_version_is_read(gcs, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(lock, "WATCH_SECONDS", 0.5)
    folder = f"{gcs}{tmp_path.name}"
    store_lib.Store(folder).create(".lock", b'{"owner": "host/0123", "beats": 3}')
    manager = harness.make_manager(folder)
    manager.acquire()
    manager.close()


def test_17_what_is_no_holder_of_a_folder_is_named(tmp_path):
    (tmp_path / ".holder" / "mine").mkdir(parents=True)
    with pytest.raises(
        store_lib.CheckpointError, match="mine was not written by a run"
    ):
        harness.make_manager(tmp_path).acquire()
    assert (tmp_path / ".holder" / "mine").is_dir()


def test_23_files_that_several_write_at_a_time_are_whole(tmp_path):
    path = tmp_path / "report.html"
    contents = [str(number).encode() * 100_000 for number in range(8)]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(disk.replacing(path)) for _ in contents]
        for part in (slice(None, 50_000), slice(50_000, None)):
            for file, content in zip(files, contents, strict=True):
                file.write(content[part])
    # The contexts end in reverse, so the first one replaced the others' result.
    assert path.read_bytes() == contents[0]
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_23_a_killed_writer_leaves_nothing_in_the_way(tmp_path):
    path = tmp_path / "report.html"
    program = """
import os, pathlib, signal, sys
from xshard.files import disk
with disk.replacing(pathlib.Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert _disks_run(program, path).returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".report.html.new"]
    disk.replace(path, b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("name", [".report.html.new", "report.html"])
def test_23_a_link_that_somebody_put_there_is_not_followed(tmp_path, name):
    theirs = tmp_path / "theirs"
    theirs.write_text("content")
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / name).symlink_to(theirs)
    disk.replace(folder / "report.html", b"mine")
    assert theirs.read_text() == "content"
    assert (folder / "report.html").read_bytes() == b"mine"


def test_23_a_token_is_written_to_a_file_of_its_own(tmp_path, monkeypatch):
    theirs = tmp_path / "theirs"
    theirs.write_text("content")
    path = tmp_path / "job.token"
    path.symlink_to(theirs)
    show = f"import os, stat; s = os.lstat({str(path)!r}); print(oct(s.st_mode))"
    plan = engine.Plan(
        [[sys.executable, "-c", f"{show}; open({str(tmp_path / 'ran')!r}, 'w')"]],
        private={path: engine.TOKEN},
    )
    assert plan.run() == 0
    assert (tmp_path / "ran").exists() and not os.path.lexists(path)
    assert theirs.read_text() == "content"

    # Somebody is faster than the launcher.
    unlink = pathlib.Path.unlink

    def unlinked(self, **options):
        unlink(self, **options)
        if self == path:
            path.symlink_to(theirs)

    monkeypatch.setattr(pathlib.Path, "unlink", unlinked)
    with pytest.raises(engine.LaunchError, match=r"job\.token cannot be written"):
        plan.run()
    assert theirs.read_text() == "content"


def test_44_goodput_does_not_depend_on_the_wall_clock(tmp_path, monkeypatch):
    day = 86400.0
    now = [time.time()]
    up = [1000.0]
    age = [0.0]
    monkeypatch.setattr(status.time, "time", lambda: now[0])
    monkeypatch.setattr(clock, "boot", lambda: ("one boot", up[0]))
    monkeypatch.setattr(clock, "age", lambda: age[0])

    def run(begin, jump):
        age[0] = 0.0
        of_process = status.Status("host")
        for step in (begin + 1, begin + 10):
            of_process.set_phase(
                status.TRAINING, step=step, seconds=lambda: {"training": age[0]}
            )
        for clocks in (now, up, age):
            clocks[0] += 100.0
        now[0] += jump
        row = of_process.row() | {"first": begin, "trained": 10, "step": begin + 10}
        status.write(tmp_path, [row])

    run(0, day)
    attempts.preserve_previous(tmp_path)
    # The clock is set right, and then a day ahead again, between two starts.
    for seconds in (-day, day):
        now[0] += 10.0 + seconds
        up[0] += 10.0
        run(10, 0.0)
        attempts.preserve_previous(tmp_path)
    first, second, third = attempts.read(tmp_path)
    assert [attempt.down for attempt in (first, second, third)] == [10.0, 10.0, 0.0]
    goodput = attempts.goodput([first, second, third])
    assert goodput.seconds == pytest.approx(320.0)
    # The second start's steps were made again by the third.
    assert goodput.share == pytest.approx(200.0 / 320.0)
