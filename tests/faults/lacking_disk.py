"""A disk without locks and without fsync of folders: a file system in user space (FUSE)
that passes all else through to a folder.

    python -m tests.faults.lacking_disk FOLDER MOUNTED

It mounts the file system, prints a line, and serves it until it is unmounted. It needs
root and /dev/fuse. The protocol is that of the kernel: linux/fuse.h.
"""

import contextlib
import ctypes
import errno
import os
import stat
import struct
import subprocess
import sys

from tests.checkpoint import harness

_REQUEST = struct.Struct("<IIQQIIII")
_REPLY = struct.Struct("<IiQ")
_ATTRIBUTES = struct.Struct("<6Q10I")
_WRITE_BYTES = 1 << 17
_BUFFER_BYTES = _WRITE_BYTES + (1 << 16)
# The kernel asks this file system for both kinds of locks.
_POSIX_LOCKS = 1 << 1
_BIG_WRITES = 1 << 5
_FLOCK_LOCKS = 1 << 10
_NO_REPLY = object()
# Seconds for which the kernel may keep names and attributes.
_VALID = 0


def missing():
    """Returns the requirements that are missing on this machine, in words; empty if
    none.
    """
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        return "needs root and /dev/fuse, to mount a file system without locks"
    return ""


@contextlib.contextmanager
def mounted(folder):
    """Mounts the file system; yields the folder where it is."""
    with Server(folder) as server:
        yield server.folder


class Server:
    """The file system's server, which has mounted it within a `with` statement.

    Attributes:
      folder: where it is mounted.
    """

    def __init__(self, folder):
        self._below = folder / "below"
        self.folder = folder / "mounted"
        self._below.mkdir(parents=True)
        self.folder.mkdir()
        self._process = None

    def __enter__(self):
        self.come_back()
        return self

    def __exit__(self, *error):
        # Detached at once, whatever a failed test has left open there.
        subprocess.run(["umount", "--lazy", str(self.folder)], check=False)
        self.leave()

    def leave(self):
        """Kills the server: each operation then fails."""
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def come_back(self):
        """Mounts the file system, in the place of what a killed server has left."""
        if self._process is not None:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)
        module = "tests.faults.lacking_disk"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(self._below), str(self.folder)],
            stdout=subprocess.PIPE,
            text=True,
            env=harness.environment(),
        )
        assert self._process.stdout.readline() == "mounted\n"


class _FileSystem:
    """The answers to the kernel's requests."""

    def __init__(self, folder):
        self._paths = {1: folder}
        self._nodes = {folder: 1}

    def answer(self, code, node, body):
        """Returns the bytes of the reply to a request; raises OSError for an error."""
        action = self._ACTIONS.get(code)
        if action is None:
            raise OSError(errno.ENOSYS, "")
        return action(self, node, body)

    def _child(self, node, name):
        return os.path.join(self._paths[node], os.fsdecode(name))

    def _attributes(self, path):
        found = os.lstat(path)
        times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
        return _ATTRIBUTES.pack(
            found.st_ino,
            found.st_size,
            found.st_blocks,
            *(time // 10**9 for time in times),
            *(time % 10**9 for time in times),
            found.st_mode,
            found.st_nlink,
            found.st_uid,
            found.st_gid,
            0,
            4096,
            0,
        )

    def _entry(self, path):
        attributes = self._attributes(path)
        if path not in self._nodes:
            node = max(self._paths) + 1
            self._nodes[path] = node
            self._paths[node] = path
        head = struct.pack("<4Q2I", self._nodes[path], 0, _VALID, _VALID, 0, 0)
        return head + attributes

    def _move(self, old, new):
        """Gives the nodes at a path, and below it, their new paths; None: no path."""
        for path, node in list(self._nodes.items()):
            if path == old or path.startswith(f"{old}/"):
                del self._nodes[path]
                if new is not None:
                    self._nodes[new + path.removeprefix(old)] = node
                    self._paths[node] = new + path.removeprefix(old)

    def _init(self, node, body):
        del node
        major, minor, ahead, _ = struct.unpack_from("<4I", body)
        flags = _POSIX_LOCKS | _BIG_WRITES | _FLOCK_LOCKS
        sizes = (12, 12, _WRITE_BYTES, 1, 0, 0, 0)
        head = struct.pack("<4I2H2I2HI", major, min(minor, 31), ahead, flags, *sizes)
        return head.ljust(64, b"\0")

    def _lookup(self, node, body):
        return self._entry(self._child(node, body[:-1]))

    def _forget(self, node, body):
        del node, body
        return _NO_REPLY

    def _getattr(self, node, body):
        del body
        return struct.pack("<Q2I", _VALID, 0, 0) + self._attributes(self._paths[node])

    def _setattr(self, node, body):
        valid, _, _, size = struct.unpack_from("<2I2Q", body)
        (mode,) = struct.unpack_from("<I", body, 68)
        if valid & 1:
            os.chmod(self._paths[node], stat.S_IMODE(mode))
        if valid & 8:
            os.truncate(self._paths[node], size)
        return self._getattr(node, body)

    def _mkdir(self, node, body):
        mode, umask = struct.unpack_from("<2I", body)
        path = self._child(node, body[8:-1])
        os.mkdir(path, mode & ~umask)
        return self._entry(path)

    def _unlink(self, node, body):
        path = self._child(node, body[:-1])
        os.unlink(path)
        self._move(path, None)
        return b""

    def _rmdir(self, node, body):
        path = self._child(node, body[:-1])
        os.rmdir(path)
        self._move(path, None)
        return b""

    def _rename(self, node, body, begin=8):
        (parent,) = struct.unpack_from("<Q", body)
        old, new, _ = body[begin:].split(b"\0")
        source = self._child(node, old)
        target = self._child(parent, new)
        os.rename(source, target)
        self._move(target, None)
        self._move(source, target)
        return b""

    def _rename2(self, node, body):
        (flags,) = struct.unpack_from("<I", body, 8)
        if flags:
            raise OSError(errno.EINVAL, "")
        return self._rename(node, body, begin=16)

    def _link(self, node, body):
        (old,) = struct.unpack_from("<Q", body)
        path = self._child(node, body[8:-1])
        os.link(self._paths[old], path)
        return self._entry(path)

    def _open(self, node, body):
        (flags,) = struct.unpack_from("<I", body)
        kept = flags & (os.O_ACCMODE | os.O_TRUNC | os.O_APPEND | os.O_DIRECTORY)
        return struct.pack("<Q2I", os.open(self._paths[node], kept), 0, 0)

    def _create(self, node, body):
        flags, mode, umask, _ = struct.unpack_from("<4I", body)
        path = self._child(node, body[16:-1])
        kept = flags & (os.O_ACCMODE | os.O_EXCL | os.O_TRUNC) | os.O_CREAT
        opened = os.open(path, kept, mode & ~umask)
        return self._entry(path) + struct.pack("<Q2I", opened, 0, 0)

    def _read(self, node, body):
        del node
        opened, offset, size = struct.unpack_from("<2QI", body)
        return os.pread(opened, size, offset)

    def _write(self, node, body):
        del node
        opened, offset, size = struct.unpack_from("<2QI", body)
        return struct.pack("<2I", os.pwrite(opened, body[40 : 40 + size], offset), 0)

    def _release(self, node, body):
        del node
        (opened,) = struct.unpack_from("<Q", body)
        os.close(opened)
        return b""

    def _fsync(self, node, body):
        del node
        (opened,) = struct.unpack_from("<Q", body)
        os.fsync(opened)
        return b""

    def _fsyncdir(self, node, body):
        del node, body
        # Not ENOSYS, for which the kernel returns that it succeeded.
        raise OSError(errno.EINVAL, "")

    def _readdir(self, node, body):
        _, offset, size = struct.unpack_from("<2QI", body)
        entries = []
        length = 0
        names = sorted(os.listdir(self._paths[node]))
        for number, name in enumerate(names[offset:], offset + 1):
            encoded = os.fsencode(name)
            found = os.lstat(os.path.join(self._paths[node], name))
            kind = stat.S_IFMT(found.st_mode) >> 12
            head = struct.pack("<2Q2I", found.st_ino, number, len(encoded), kind)
            entry = (head + encoded).ljust(-(-(24 + len(encoded)) // 8) * 8, b"\0")
            length += len(entry)
            if length > size:
                break
            entries.append(entry)
        return b"".join(entries)

    def _statfs(self, node, body):
        del body
        found = os.statvfs(self._paths[node])
        counts = (found.f_blocks, found.f_bfree, found.f_bavail)
        files = (found.f_files, found.f_ffree)
        sizes = (found.f_bsize, found.f_namemax, found.f_frsize, 0)
        return struct.pack("<5Q4I", *counts, *files, *sizes).ljust(80, b"\0")

    _ACTIONS = {  # noqa: RUF012
        1: _lookup, 2: _forget, 3: _getattr, 4: _setattr, 9: _mkdir, 10: _unlink,
        11: _rmdir, 12: _rename, 13: _link, 14: _open, 15: _read, 16: _write,
        17: _statfs, 18: _release, 20: _fsync, 26: _init, 27: _open, 28: _readdir,
        29: _release, 30: _fsyncdir, 35: _create, 36: _forget, 42: _forget,
        45: _rename2,
    }  # fmt: skip


def _serve(device, folder):
    system = _FileSystem(folder)
    while True:
        try:
            request = os.read(device, _BUFFER_BYTES)
        except OSError as e:
            if e.errno == errno.ENODEV:
                return
            # A request that was interrupted before it was read.
            continue
        _, code, unique, node, *_ = _REQUEST.unpack_from(request)
        error = 0
        content = b""
        try:
            content = system.answer(code, node, request[_REQUEST.size :])
        except OSError as e:
            error = e.errno
        if content is not _NO_REPLY:
            head = _REPLY.pack(_REPLY.size + len(content), -error, unique)
            with contextlib.suppress(OSError):
                os.write(device, head + content)


def _main(folder, at):
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,default_permissions"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"lacking", os.fsencode(at), b"fuse", 0, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), at)
    print("mounted", flush=True)
    _serve(device, folder)


if __name__ == "__main__":
    _main(*sys.argv[1:])
