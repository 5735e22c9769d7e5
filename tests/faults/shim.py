"""Injection of disk faults into the calls of a process: the Python side of shim.c."""

import ctypes
import errno
import os
import pathlib
import re
import shutil
import subprocess

KINDS = (
    *("open", "opendir", "readdir", "stat", "read", "write", "fsync", "rename"),
    *("unlink", "mkdir", "link", "truncate", "lock"),
)
# In place of a kind: any call that changes something.
CHANGES = "change"
_CHANGES = 100
# In place of an errno: a read or write that is cut short, SIGKILL before the call,
# SIGKILL in the middle of a write, and a power cut before the call.
SHORT, KILL, TORN, CUT = "short", "kill", "torn", "cut"
_ACTIONS = {SHORT: -1, KILL: -2, TORN: -3, CUT: -4}
_LENGTH = 240
_CALLS = 1 << 15
_RANDOM_NAMES = (
    (re.compile(r"(step_\d+)\.[0-9a-f]{8}"), r"\1.*"),
    (re.compile(r"/d/[0-9a-f]{32}"), "/d/*"),
    (re.compile(r"tfevents\.\d+\.[^/]*\.(\d+)"), r"tfevents.*.\1"),
)


class _Call(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int),
        ("changes", ctypes.c_int),
        ("path", ctypes.c_char * _LENGTH),
    )


class _Page(ctypes.Structure):
    _fields_ = (
        ("folder", ctypes.c_char * _LENGTH),
        ("kind", ctypes.c_int),
        ("at", ctypes.c_int),
        ("action", ctypes.c_int),
        ("counted", ctypes.c_int),
        ("calls", ctypes.c_int),
        ("hit", ctypes.c_int),
        ("call", _Call * _CALLS),
    )


class Shim:
    """The page of memory that this process shares with the processes that it forks."""

    def __init__(self, folder):
        """Selects the folder below which calls are counted.

        Raises:
          RuntimeError: if this process was not started with the shim.
        """
        library = ctypes.CDLL(None)
        if not hasattr(library, "faults_page"):
            raise RuntimeError("start this process with `preloaded`")
        library.faults_page.restype = ctypes.POINTER(_Page)
        self._page = library.faults_page().contents
        self._page.folder = os.fsencode(folder)
        self._folder = str(folder)
        # A forked process calls this function; its calls are counted from then on.
        self.watch = library.faults_watch

    def plan(self, kind=None, at=0, action=None):
        """Plans a fault for the `at`-th call of a kind, from 1; by default there is
        none. Resets the counts.
        """
        page = self._page
        page.counted = page.calls = page.hit = 0
        page.kind = _CHANGES if kind in (None, CHANGES) else KINDS.index(kind)
        page.action = (
            _ACTIONS[action] if action in _ACTIONS else getattr(errno, action or "EIO")
        )
        page.at = at

    def hit(self):
        """Returns the kind and the path of the call that met the fault; None if no call
        did.
        """
        if not self._page.hit:
            return None
        call = self._page.call[min(self._page.hit, _CALLS) - 1]
        return KINDS[call.kind], self._folder + os.fsdecode(call.path)

    def calls(self):
        """Lists the calls since `plan`: the kind, whether it changes something, and the
        path of each.
        """
        count = self._page.calls
        assert count <= _CALLS, f"{count} calls exceed the capacity of the shim"
        return [
            (KINDS[call.kind], bool(call.changes), os.fsdecode(call.path))
            for call in self._page.call[:count]
        ]


def mask_random_names(path):
    """Replaces the parts of a path that differ from run to run with `*`."""
    for pattern, name in _RANDOM_NAMES:
        path = pattern.sub(name, path)
    return path


def compiler():
    """Returns the path of the C compiler; None if there is none."""
    return shutil.which("cc") or shutil.which("gcc")


def preloaded(folder):
    """Compiles the shim into a folder; returns the environment variables that load it
    into a process.
    """
    library = pathlib.Path(folder) / "faults.so"
    source = pathlib.Path(__file__).with_name("shim.c")
    command = [
        compiler(),
        "-shared",
        "-fPIC",
        "-O1",
        "-o",
        str(library),
        str(source),
        "-ldl",
    ]
    subprocess.run(command, check=True)
    return {"LD_PRELOAD": str(library)}
