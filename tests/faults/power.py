"""A disk that loses power: ext4 on a loop device, which comes back with what its journal has."""

import os
import pathlib
import shutil
import subprocess
import tempfile

_BYTES = 64 << 20


def missing():
    """What there would have to be for it, in words; empty if it is there."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        return "needs root and mkfs.ext4 (Debian: e2fsprogs)"
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with Disk(pathlib.Path(scratch)):
                return ""
        except subprocess.CalledProcessError as e:
            return f"needs to mount a loop device: {e.stderr.decode().strip()}"


class Disk:
    """A file system of its own, mounted until the end of a `with`."""

    def __init__(self, scratch):
        """Makes it; `folder` in it is not there yet."""
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
        """Takes everything to the disk."""
        _call("sync", "--file-system", self._mounted)

    def power_up(self):
        """Mounts it again, as after a loss of power: the shim has cut it off."""
        _call("umount", self._mounted)
        # A mount namespace that another process has made meanwhile would keep what was cut off.
        found = self._image.with_name("found")
        _call("cp", "--sparse=always", self._image, found)
        self._image.unlink()
        found.rename(self._image)
        self.__enter__()


def _call(*command):
    subprocess.run(command, check=True, capture_output=True)
