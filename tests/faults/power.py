"""A disk that loses power: ext4 on a loop device. After a power cut it holds what its
journal recovers.
"""

import os
import pathlib
import shutil
import subprocess
import tempfile

_BYTES = 64 << 20


def missing():
    """Returns the requirements of a `Disk` that are missing on this machine, in words;
    empty if none.
    """
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        return "needs root and mkfs.ext4 (Debian: e2fsprogs)"
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with Disk(pathlib.Path(scratch)):
                return ""
        except subprocess.CalledProcessError as e:
            return f"needs to mount a loop device: {e.stderr.decode().strip()}"


class Disk:
    """A file system on a loop device, mounted within a `with` statement."""

    def __init__(self, scratch):
        """Creates the file system. The caller creates `folder` in it."""
        self._image = scratch / "image"
        self._mounted = scratch / "mounted"
        self.folder = self._mounted / "disk"
        self._mounted.mkdir()
        with self._image.open("wb") as file:
            file.truncate(_BYTES)
        _call("mkfs.ext4", "-q", "-F", self._image)

    def __enter__(self):
        _call("mount", "-o", "loop", self._image, self._mounted)
        return self

    def __exit__(self, *error):
        _call("umount", self._mounted)

    def settle(self):
        """Flushes all writes to the disk."""
        _call("sync", "--file-system", self._mounted)

    def power_up(self):
        """Mounts the disk again after the shim has cut its power."""
        _call("umount", self._mounted)
        # A copy of the image is mounted. If another process has created a mount
        # namespace meanwhile, that namespace keeps the original mounted in its cut-off
        # state.
        copy = self._image.with_name("found")
        _call("cp", "--sparse=always", self._image, copy)
        self._image.unlink()
        copy.rename(self._image)
        self.__enter__()


def _call(*command):
    subprocess.run(command, check=True, capture_output=True)
