"""Tries what a run promises of its work directory on many kinds of disks.

    python -m tests.disks [--only=TEXT]

It prints a row for each disk and action: PASS, FAIL with the reason, or why it was
skipped, and what it counted; the exit code is 1 after a FAIL. It mounts file systems in
a mount namespace of its own, so root is needed, and nothing stays mounted.
A disk whose programs are not installed, or that the kernel does not know, is skipped.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import os
import pathlib
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable

import pytest

from tests import forks, pace
from tests.checkpoint import harness as checkpoint_harness
from tests.faults import lacking_disk
from tests.launch import harness
from xshard.checkpoint import __main__ as tool
from xshard.files import claim

STEPS = 12
# A checkpoint of 1 MB, for which no file system finds room once it is full.
_LARGE = ("--config.experiment=tests.toy.Wide", "--config.hidden=20000")
_NEW_NAMESPACE = 0x00020000
# Another user than root; a number is enough for the kernel.
_USER = 4242
# Of linux/capability.h and linux/prctl.h.
_CAPABILITY_VERSION = 0x20080522
_MAY_READ = 1 << 2
_KEEP_CAPABILITIES = 8
# The file server of OpenSSH has no other word for it.
_FULL = r"No space left on device|Disk quota exceeded|Input/output error"


_GLUSTER_SERVER = """\
volume posix
type storage/posix
option directory {folder}
option reserve 0
end-volume
volume locks
type features/locks
subvolumes posix
end-volume
volume server
type protocol/server
option transport-type tcp
option transport.socket.listen-port {port}
option auth.addr.locks.allow *
subvolumes locks
end-volume
"""
_GLUSTER_CLIENT = """\
volume client
type protocol/client
option transport-type tcp
option remote-host 127.0.0.1
option remote-port {port}
option remote-subvolume locks
end-volume
"""


@dataclasses.dataclass(frozen=True)
class Disk:
    """A disk that is mounted.

    Attributes:
      folder: the folder for work directories.
      user: the number of the user whose runs write there.
      umask: the umask of these runs.
      leave: makes the disk go away while a run writes there; None if it cannot.
      come_back: brings it back after that.
    """

    folder: pathlib.Path
    user: int = 0
    umask: int = 0o022
    leave: Callable[[], None] | None = None
    come_back: Callable[[], None] | None = None


def call(*command, **options):
    """Runs a program; skips the test with what it said if it fails or is missing."""
    words = list(map(str, command))
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system")
    if not shutil.which(words[0]):
        pytest.skip(f"needs {words[0]}")
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        pytest.skip(f"{' '.join(words)}: {(done.stderr or done.stdout).strip()}")


@contextlib.contextmanager
def mounted(folder, *arguments, **options):
    """Mounts a file system at a new folder; yields the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    call("mount", *arguments, folder, **options)
    try:
        yield folder
    finally:
        # Detached at once, whatever a failed test has left open there.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def _limited(folder):
    """Mounts a disk in memory that is small enough to be filled."""
    with mounted(folder, "-t", "tmpfs", "-o", "size=32m", "tmpfs"):
        yield folder


@contextlib.contextmanager
def automounted(root):
    """Yields a folder that an automounter has mounted below `root`.

    This process is the automounter: the kernel gives it the pipe, and lets its process
    group create folders below the root.
    """
    read, write = os.pipe()
    options = f"fd={write},pgrp={os.getpgrp()},minproto=5,maxproto=5,indirect"
    try:
        arguments = ("-t", "autofs", "-o", options, "autofs")
        with (
            mounted(root, *arguments, pass_fds=[write]),
            _limited(root / "user") as user,
        ):
            yield user
    finally:
        os.close(read)
        os.close(write)


@contextlib.contextmanager
def _plain(scratch):
    folder = scratch / "plain"
    folder.mkdir()
    yield Disk(folder)


@contextlib.contextmanager
def _tmpfs(scratch):
    with _limited(scratch / "tmpfs") as at:
        yield Disk(at)


def _formatted(kind, megabytes, *format_options, mount_options="loop"):
    """Returns the maker of a disk with a file system on a loop device."""

    @contextlib.contextmanager
    def disk(scratch):
        image = scratch / "image"
        with image.open("wb") as file:
            file.truncate(megabytes << 20)
        call(f"mkfs.{kind}", "-q", *format_options, image)
        at = scratch / "mounted"
        arguments = ("-t", kind, "-o", mount_options, image)
        with mounted(at, *arguments):
            yield Disk(
                at,
                leave=lambda: call("umount", "--lazy", at),
                come_back=lambda: call("mount", *arguments, at),
            )

    return disk


@contextlib.contextmanager
def _automounted(scratch):
    with automounted(scratch / "home") as user:
        yield Disk(user)


@contextlib.contextmanager
def _overlay(scratch):
    """An overlay, as a container's root is. Its work directory's parent is in the
    lower layer.
    """
    with mounted(
        scratch / "layers", "-t", "tmpfs", "-o", "size=32m", "tmpfs"
    ) as layers:
        for name in ("lower/runs", "upper", "work"):
            (layers / name).mkdir(parents=True)
        folders = f"lowerdir={layers}/lower,upperdir={layers}/upper"
        options = f"{folders},workdir={layers}/work"
        arguments = ("-t", "overlay", "-o", options, "overlay")
        with mounted(scratch / "merged", *arguments) as merged:
            yield Disk(merged / "runs")


@contextlib.contextmanager
def _lacking(scratch):
    if lacking_disk.missing():
        pytest.skip(lacking_disk.missing())
    with (
        _limited(scratch / "base") as base,
        lacking_disk.Server(base / "disk") as disk,
    ):
        yield Disk(disk.folder, leave=disk.leave, come_back=disk.come_back)


@contextlib.contextmanager
def _squashfs(scratch):
    """A read-only root with a folder that is another disk, as a container has."""
    root = scratch / "root"
    (root / "data").mkdir(parents=True)
    image = scratch / "image"
    call("mksquashfs", root, image, "-quiet")
    outside = scratch / "outside"
    with (
        _limited(outside),
        mounted(root, "-t", "squashfs", "-o", "loop,ro", image),
        mounted(root / "data", "--bind", outside) as data,
    ):
        yield Disk(data)


@contextlib.contextmanager
def _quota(scratch):
    """A folder that may hold less than its disk has room for."""
    with _formatted("btrfs", 128)(scratch) as disk:
        folder = disk.folder / "limited"
        call("btrfs", "subvolume", "create", folder)
        call("btrfs", "quota", "enable", disk.folder)
        call("btrfs", "qgroup", "limit", "8M", folder)
        yield Disk(folder)


def _project_quota(kind, *format_options):
    """Returns the maker of a folder with a quota of ext4 or XFS, which root has not."""

    @contextlib.contextmanager
    def disk(scratch):
        made = _formatted(kind, 320, *format_options, mount_options="loop,prjquota")
        with made(scratch) as whole:
            folder = whole.folder / "limited"
            folder.mkdir()
            if kind == "xfs":
                project = f"project -s -p {folder} 7"
                limit = "limit -p bhard=8m 7"
                call("xfs_quota", "-x", "-c", project, "-c", limit, whole.folder)
            else:
                call("chattr", "-p", 7, "+P", folder)
                call("setquota", "-P", 7, 0, 8192, 0, 0, whole.folder)
            os.chown(folder, _USER, _USER)
            yield Disk(folder, user=_USER)

    return disk


@contextlib.contextmanager
def _other_owner(scratch):
    """A folder of another user, whose umask lets nobody else read his files."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    folder = scratch / "runs"
    folder.mkdir()
    os.chown(folder, _USER, _USER)
    yield Disk(folder, user=_USER, umask=0o077)


@contextlib.contextmanager
def _odd_names(scratch):
    folder = scratch / "a b" / "läufe 実験 'quoted' $HOME %s #1"
    folder.mkdir(parents=True)
    yield Disk(folder)


@contextlib.contextmanager
def _server(*command):
    """Runs a server in the foreground; yields functions that kill and start it."""
    if not shutil.which(command[0]):
        pytest.skip(f"needs {command[0]}")
    processes = []

    def begin():
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        processes.append(subprocess.Popen([*map(str, command)], **quiet))

    def end():
        processes[-1].kill()
        processes[-1].wait()

    begin()
    try:
        yield end, begin
    finally:
        end()


@contextlib.contextmanager
def _called(at, *command):
    """Mounts a file system in user space by its program, at a new folder."""
    at.mkdir()
    call(*command, at)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


@contextlib.contextmanager
def _glusterfs(scratch):
    """A server of GlusterFS, which its client finds again when it was away."""
    port = harness.free_port()
    served = scratch / "server.vol"
    served.write_text(_GLUSTER_SERVER.format(folder=scratch / "brick", port=port))
    used = scratch / "client.vol"
    used.write_text(_GLUSTER_CLIENT.format(port=port))
    log = f"--log-file={scratch}/log"
    command = ("glusterfsd", "-N", "-f", served, log, "-p", scratch / "pid")
    at = scratch / "at"
    with (
        _limited(scratch / "brick"),
        _server(*command) as (leave, begin),
        _called(at, "glusterfs", "-f", used, log),
    ):
        _wait_for(at)

        def come_back():
            begin()
            _wait_for(at)

        yield Disk(at, leave=leave, come_back=come_back)


@contextlib.contextmanager
def _sshfs(scratch):
    """A folder through the file server of OpenSSH, without its network."""
    shell = scratch / "shell"
    shell.write_text("#!/bin/sh\nexec /usr/lib/openssh/sftp-server\n")
    shell.chmod(0o755)
    at = scratch / "at"
    with (
        _limited(scratch / "served") as served,
        _called(at, "sshfs", "-o", f"ssh_command={shell}", f"host:{served}"),
    ):
        yield Disk(at)


def _nfs(options):
    """Returns the maker of an NFS disk, whose server is Ganesha."""

    @contextlib.contextmanager
    def disk(scratch):
        port = harness.free_port()
        config = scratch / "config"
        config.write_text(
            # By default it also serves what needs rpcbind, and ends where that does not
            # run.
            f"NFS_CORE_PARAM {{ Protocols = 4; NFS_Port = {port}; Enable_UDP = false;\n"
            "Enable_RQUOTA = false; Enable_NLM = false; }\n"
            f"EXPORT {{ Export_Id = 1; Path = {scratch}/served; Pseudo = /runs;\n"
            "Access_Type = RW; Squash = No_Root_Squash; FSAL { Name = VFS; } }\n"
            f"NFSv4 {{ RecoveryRoot = {scratch}; Grace_Period = 5; }}\n"
        )
        log, number = scratch / "log", scratch / "pid"
        command = ("ganesha.nfsd", "-F", "-f", config, "-L", log, "-p", number)
        arguments = ("-t", "nfs4", "-o", f"port={port},{options}", "127.0.0.1:/runs")
        with (
            _limited(scratch / "served"),
            _server(*command) as (leave, come_back),
        ):
            _wait_for_port(port)
            with mounted(scratch / "at", *arguments) as at:
                yield Disk(at, leave=leave, come_back=come_back)

    return disk


def _wait_for_port(port):
    def is_open():
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port)),
        ):
            return True
        return False

    harness.wait_until(is_open)


def _wait_for(folder):
    harness.wait_until(lambda: os.path.isdir(folder))


def _train(user, umask, arguments):
    """Is `python -m xshard.main` as a user, with short watches of leases."""
    claim.RENEW_SECONDS = 0.2
    claim.WATCH_SECONDS = 4.0
    os.umask(umask)
    if user != os.geteuid():
        _become(user)
    sys.argv = ["xshard.main", *arguments]
    runpy.run_module("xshard.main", run_name="__main__", alter_sys=True)


def _become(user):
    """Makes this process another user's, who may read all files: the interpreter may
    lie where only root can. What he may write is his own.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_KEEP_CAPABILITIES, 1, 0, 0, 0) == 0
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    bits = (ctypes.c_uint32 * 6)(_MAY_READ, _MAY_READ)
    assert libc.capset(header, bits) == 0, os.strerror(ctypes.get_errno())


def start(disk, workdir, env=None):
    """Starts a run of the small experiment on a disk."""
    arguments = ["--config=tests/toy.py", f"--workdir={workdir}", *_LARGE]
    return forks.Process(
        _train,
        disk.user,
        disk.umask,
        arguments,
        env=env or checkpoint_harness.environment(),
        start_new_session=True,
    )


def _finish(disk, workdir):
    """Runs to the end; returns the output."""
    code, output = harness.finish(start(disk, workdir))
    assert code == 0, output
    return output


@contextlib.contextmanager
def _begun(disk, scratch, workdir):
    """Yields a run that has saved step 5 and waits for the context `pace.slow` to end,
    and a function that ends it.
    """
    with contextlib.ExitStack() as stack:
        variables = stack.enter_context(pace.slow(scratch / "slow", 6))
        environment = checkpoint_harness.environment(**variables)
        process = stack.enter_context(
            harness.running(start(disk, workdir, environment))
        )
        saved = workdir / "checkpoints"
        harness.wait_until(
            lambda: process.poll() is not None or list(saved.glob("*5.*/COMMIT"))
        )
        assert process.poll() is None, process.communicate()[0]
        yield process, (scratch / "slow").unlink
        # For the end of `pace.slow`.
        (scratch / "slow").touch()


def kill_and_resume(disk, scratch, reference):
    """A run that is killed resumes to the same bits."""
    workdir = disk.folder / "killed"
    with _begun(disk, scratch, workdir) as (process, _):
        os.killpg(process.pid, signal.SIGKILL)
    output = _finish(disk, workdir)
    assert "resum" in output, output
    harness.assert_same_end(workdir, reference, STEPS)


def two_at_once(disk, scratch, reference):
    """A second run in a work directory is refused, and harms nothing."""
    workdir = disk.folder / "twice"
    with _begun(disk, scratch, workdir) as (first, go_on):
        code, said = harness.finish(start(disk, workdir))
        assert code == 1 and "is in use by" in said, said
        assert "Traceback" not in said, said
        go_on()
        code, output = harness.finish(first)
        assert code == 0, output
    harness.assert_same_end(workdir, reference, STEPS)


def full(disk, scratch, reference):
    """A save on a full disk fails by name; what was saved stays, and resumes."""
    workdir = disk.folder / "full"
    filler = disk.folder / "filler"
    with _begun(disk, scratch, workdir) as (process, go_on):
        _fill(disk, filler)
        go_on()
        code, said = harness.finish(process)
    _check_refusal(code, said, _FULL)
    code, said = harness.finish(start(disk, workdir))
    _check_refusal(code, said, _FULL)
    _verify(workdir)
    shutil.rmtree(filler)
    _finish(disk, workdir)
    harness.assert_same_end(workdir, reference, STEPS)


def goes_away(disk, scratch, reference):
    """A run whose disk goes away stops by name, and resumes when it is back."""
    workdir = disk.folder / "gone"
    with _begun(disk, scratch, workdir) as (process, go_on):
        disk.leave()
        go_on()
        code, said = harness.finish(process)
    _check_refusal(code, said, re.escape(str(disk.folder)))
    # Where only the empty folder below a mounted disk is left, a run may begin.
    if not os.path.isdir(disk.folder):
        code, said = harness.finish(start(disk, workdir))
        _check_refusal(code, said, re.escape(str(disk.folder)))
    disk.come_back()
    _verify(workdir)
    _finish(disk, workdir)
    harness.assert_same_end(workdir, reference, STEPS)


# Each disk with what is tried on it. A disk without bounds is this machine's own, which
# is not filled; and not every disk can be taken away.
_ALWAYS = (kill_and_resume, two_at_once)
_BOUNDED = (*_ALWAYS, full)
_ALL = (*_BOUNDED, goes_away)
DISKS = {
    "plain": (_plain, _ALWAYS),
    "tmpfs": (_tmpfs, _BOUNDED),
    "ext4": (_formatted("ext4", 48, "-F"), _ALL),
    # By default it keeps room for what a file may grow by, and frees that late.
    "xfs": (_formatted("xfs", 320, mount_options="loop,allocsize=4k"), _ALL),
    "btrfs": (_formatted("btrfs", 128), _ALL),
    "autofs": (_automounted, _BOUNDED),
    "overlay": (_overlay, _BOUNDED),
    "FUSE without locks and fsync of folders": (_lacking, _ALL),
    "read-only squashfs with a bind mount": (_squashfs, _BOUNDED),
    "quota": (_quota, _BOUNDED),
    "quota of ext4": (_project_quota("ext4", "-F", "-O", "quota,project"), _BOUNDED),
    "quota of XFS": (_project_quota("xfs"), _BOUNDED),
    "GlusterFS": (_glusterfs, _ALL),
    "sshfs": (_sshfs, _BOUNDED),
    "NFS": (_nfs("vers=4.1,soft"), _ALL),
    "NFS without locks": (_nfs("vers=4.1,soft,local_lock=all"), _ALL),
    "spaces and unicode": (_odd_names, _ALWAYS),
    "another owner and umask": (_other_owner, _ALWAYS),
}


def cases():
    """Lists each name of a disk with each name of what is tried on it."""
    listed = []
    for name, (_, actions) in DISKS.items():
        for act in actions:
            listed.append((name, act.__name__))
    return listed


def attempt(name, action, reference):
    """Tries an action on a new disk, by their names.

    Args:
      name: the name of the disk.
      action: the name of the action.
      reference: the work directory of an undisturbed run.
    """
    make, actions = DISKS[name]
    (act,) = (act for act in actions if act.__name__ == action)
    with _scratch() as scratch, make(scratch) as disk:
        act(disk, scratch, reference)


def make_reference(folder):
    """Trains an undisturbed run below a folder; returns its work directory."""
    _finish(Disk(folder), folder / "reference")
    return folder / "reference"


def _fill(disk, filler):
    """Fills a disk to its last byte, as the user whose runs write there."""
    options = {"user": disk.user} if disk.user else {}
    # Some file systems find more room after they have written what they had.
    program = """
import contextlib, os, sys
os.mkdir(sys.argv[1])
for number in range(100):
    size = 1 << 20
    written = 0
    with contextlib.suppress(OSError):
        file = os.open(f"{sys.argv[1]}/{number}", os.O_WRONLY | os.O_CREAT)
        while size:
            try:
                os.write(file, bytes(size))
                os.fsync(file)
                written += size
            except OSError:
                size //= 2
        os.close(file)
    if not written:
        break
    os.sync()
"""
    command = [sys.executable, "-c", program, str(filler)]
    subprocess.run(command, check=True, **options)


def _check_refusal(code, said, pattern):
    assert code == 1, (code, said)
    assert re.search(pattern, said), said
    assert "Traceback" not in said, said


def _verify(workdir):
    """Asserts that the checkpoints of a work directory are whole."""
    with contextlib.redirect_stdout(sys.stderr):
        assert tool.main(["verify", str(workdir / "checkpoints")]) == 0


@contextlib.contextmanager
def _scratch():
    """Yields a new folder that other users may search."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        yield pathlib.Path(folder)


def main(argv):
    """Tries each action on each disk; returns 1 if one fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="part of a disk's or action's name")
    options = parser.parse_args(argv)
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_NEW_NAMESPACE) == 0:
            subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    counts = {"PASS": 0, "FAIL": 0, "skipped": 0}
    with _scratch() as outside:
        reference = make_reference(outside)
        for name, action in cases():
            if options.only not in f"{name}: {action}":
                continue
            verdict, reason = _tried(name, action, reference)
            counts[verdict] += 1
            print(f"{name:<40} {action:<16} {verdict:<8} {reason}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(counts["FAIL"] > 0)


def _tried(name, action, reference):
    """Tries an action on a disk; returns the verdict and its reason."""
    try:
        attempt(name, action, reference)
    except pytest.skip.Exception as e:
        return "skipped", " ".join(str(e).split())
    except Exception:
        return "FAIL", traceback.format_exc()
    return "PASS", ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
