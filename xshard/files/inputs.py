"""Files to read, on a disk or in a bucket, by their path or URL.

books/a.txt                 a local or mounted disk
gs://bucket/books/a.txt     a bucket; see `xshard.files.buckets`
"""

import collections
import errno
import fnmatch
import functools
import glob
import json
import os
import re
from collections.abc import Hashable, Sequence
from typing import Any

from xshard import errors
from xshard.files import buckets, disk

# Listing begins a run, where nothing is lost yet: some seconds, after which a wrong
# endpoint is reported.
_LIST_RETRIES = {"max_retries": 6, "initial_delay": "200ms", "max_delay": "8s"}
# Up to so many paths of a folder are looked up one by one.
_FEW_PATHS = 8


def find(pattern: str | os.PathLike[str]) -> list[str]:
    """Returns the sorted paths of all files that match a pattern, hidden ones too.

    Args:
      pattern: a path or URL, with `*` for any part of a name, `[ab]` for one of some
        characters, and `**` for any folders, as in `gs://bucket/books/**/*.txt`. On a
        disk, `?` stands for one character; in a URL it begins the options.

    Raises:
      UserError: if no file matches, or the bucket cannot be listed.
    """
    pattern = disk.expanded(pattern)
    if buckets.is_url(pattern):
        found = _find_objects(pattern)
    else:
        matches = glob.glob(pattern, recursive=True, include_hidden=True)
        found = sorted(path for path in matches if os.path.isfile(path))
    if not found:
        raise errors.UserError(
            f"No file matches {pattern!r}. All files below a folder are FOLDER/**; "
            "those directly in it are FOLDER/*."
        )
    return found


def missing(paths: Sequence[str]) -> list[str]:
    """Returns those paths under which there is no file.

    In a bucket, each path is asked for, or a folder of many is listed from the first
    of them on, by one request for about 1000 files.

    Raises:
      UserError: if a URL is malformed, or a bucket cannot be listed.
    """
    absent: list[str] = []
    # The names of objects and their URLs, by bucket and folder.
    folders: dict[tuple[str, str], dict[str, str]] = collections.defaultdict(dict)
    for path in map(disk.expanded, paths):
        if buckets.is_url(path):
            bucket, name = _split(path)
            folder = name.rpartition("/")[0]
            folders[bucket, folder][name] = path
        elif not os.path.isfile(path):
            absent.append(path)
    for (bucket, folder), urls in folders.items():
        # A range ends before its end.
        ranges = [(name, f"{name}\0") for name in urls]
        if len(urls) > _FEW_PATHS:
            # Not to the last of the paths: from "a/1" to below "a/2x", for instance,
            # tensorstore's driver for S3 lists only what begins with "a/1".
            ranges = [(min(urls), _after(folder))]
        found: set[str] = set()
        for begin, end in ranges:
            found.update(_list(urls[begin], bucket, begin, end))
        absent += [url for name, url in urls.items() if name not in found]
    return absent


def read(path: str, begin: int = 0, end: int | None = None) -> tuple[bytes, Hashable]:
    """Reads a file, or its bytes from `begin` to below `end`.

    A request that fails is repeated for a quarter of an hour.

    Returns:
      The bytes, and the version of the file, which differs after the file has changed.

    Raises:
      OSError: if it does not exist or cannot be read.
    """
    if not buckets.is_url(path):
        with open(disk.expanded(path), "rb") as file:
            status = os.fstat(file.fileno())
            file.seek(begin)
            size = -1 if end is None else end - begin
            return file.read(size), (status.st_size, status.st_mtime_ns)
    bucket, name = _split(path)
    part = slice(begin, end)
    try:
        entry = buckets.wait(_opened(bucket, reads=True).read(name, byte_range=part))
    except (ValueError, RuntimeError) as e:
        raise OSError(buckets.reason(e)) from e
    if entry.state != "value":
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return entry.value, entry.stamp.generation


def _find_objects(pattern: str) -> list[str]:
    """Returns the URLs of the objects that match a pattern."""
    bucket, path = _split(pattern)
    top, question, options = pattern.partition("?")
    place = top.removesuffix(path)
    wanted = path.split("/")
    # Only the folder before the first wildcard is listed.
    fixed = re.split(r"[*\[]", path, maxsplit=1)[0]
    folder = fixed.rpartition("/")[0]
    begin = f"{folder}/" if folder else ""
    found = []
    # Sorted by their names alone, so that copies on a disk have the same order.
    for name in sorted(_list(pattern, bucket, begin, _after(folder))):
        # Some programs create an empty object of such a name for a folder.
        if not name.endswith("/") and _matches(name.split("/"), wanted):
            found.append(f"{place}{name}{question}{options}")
    return found


def _matches(names: Sequence[str], wanted: Sequence[str]) -> bool:
    """Returns whether the parts of a path match those of a pattern."""
    if not wanted:
        return not names
    if wanted[0] == "**":
        # As in glob, the last ** stands for files as well.
        if len(wanted) == 1:
            return bool(names)
        return any(_matches(names[i:], wanted[1:]) for i in range(len(names)))
    if not names or not fnmatch.fnmatchcase(names[0], wanted[0]):
        return False
    return _matches(names[1:], wanted[1:])


def _after(folder: str) -> str:
    """Returns the first text after all names in a folder; '' for the whole bucket."""
    # The character after a slash.
    return f"{folder}0" if folder else ""


def _split(url: str) -> tuple[str, str]:
    """Returns the spec of a URL's bucket, as JSON, and the name of its object."""
    spec = buckets.parse(url)
    if spec is None or not spec["path"]:
        raise errors.UserError(
            f"{url!r} is not the URL of a file: give gs://BUCKET/FILE or "
            "s3://BUCKET/FILE[?endpoint=URL&region=REGION]. FILE has no question mark."
        )
    name = spec.pop("path")
    return json.dumps({**spec, "path": ""}), name


def _list(url: str, bucket: str, begin: str, end: str) -> list[str]:
    """Returns the names of a bucket's objects from `begin` to below `end`.

    An empty text is no bound.
    """
    try:
        opened = _opened(bucket, reads=False)
        keys = buckets.wait(opened.list(_tensorstore().KvStore.KeyRange(begin, end)))
    except (ValueError, OSError, RuntimeError) as e:
        raise errors.UserError(
            f"{url}: the bucket cannot be listed: {buckets.reason(e)}."
        ) from e
    return [key.decode() for key in keys]


def _opened(bucket: str, *, reads: bool) -> Any:
    """Returns a bucket, to read or to list."""
    if _process() != os.getpid():
        # Tensorstore's threads are not in the child, and it would abort.
        raise RuntimeError(
            "this process was forked from one that uses buckets, whose connections it "
            'lacks: start it by multiprocessing.get_context("spawn")'
        )
    return _open(bucket, reads)


@functools.cache
def _process() -> int:
    """Returns the process that used a bucket first, of this one and its parents."""
    return os.getpid()


@functools.cache
def _open(bucket: str, reads: bool) -> Any:
    """Opens a bucket once in a process, with its connections."""
    retries = buckets.RETRIES if reads else _LIST_RETRIES
    context = _tensorstore().Context(
        {"gcs_request_retries": retries, "s3_request_retries": retries}
    )
    return _tensorstore().KvStore.open(json.loads(bucket), context=context).result()


def _tensorstore() -> Any:
    """Imports the library when the first bucket is used: most programs use none."""
    import tensorstore

    return tensorstore
