"""The stores of checkpoints: folders on a local or mounted disk, on GCS or on S3,
behind one interface.

    runs/digits/checkpoints                        a disk
    gs://bucket/folder                             Google Cloud Storage
    s3://bucket/folder                             Amazon S3
    s3://bucket/folder?endpoint=http://host:9000   a service that speaks S3's protocol
    ...&conditional_writes=false                   one that refuses If-Match

Credentials come from the machine: Google's application default, or AWS's environment or
profile.

All stores promise the same: an object is created as a whole, and only if it is absent;
after `sync` it survives a power loss; and an error is never reported as an absence.
"""

import contextlib
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import tensorstore as ts

from xshard import errors
from xshard.files import buckets, disk

# For objects that a run can do without, which must not hold it up.
_FEW_RETRIES = {"max_retries": 4, "initial_delay": "200ms", "max_delay": "1s"}
# A database stores values smaller than this, with their checksum, in its nodes next to
# their keys.
_INLINE_BYTES = 1024
# The name of the lock of a store; see `xshard.checkpoint.lock`.
LOCK = ".lock"

# The text of an error for users.
reason = buckets.reason


class CheckpointError(errors.UserError):
    """A checkpoint could not be written, or cannot be read as requested. The message
    gives the reason.
    """


class Folder(NamedTuple):
    """A folder directly in a store.

    Attributes:
      names: the names of the files and folders directly in it.
      is_link: whether it is a symbolic link, which only a person creates. A broken link
        has no names.
    """

    names: frozenset[str]
    is_link: bool


class Store:
    """A folder of objects, each with a name and content: a `Disk` or a `Bucket`.

    Any method may raise `CheckpointError`, with the path and the reason, if the disk or
    the service fails. A failure is never reported as an absent object.

    Attributes:
      url: the path or the URL, without options.
      path: the path of a folder on a disk; None for one in a bucket.
    """

    path: pathlib.Path | None = None

    def __new__(cls, url: str | os.PathLike[str], **options: Any) -> "Store":
        """Creates the kind of store that a URL names, as `pathlib.Path` does."""
        del options
        kind: type[Store] = cls
        if cls is Store:
            kind = Bucket if buckets.is_url(os.fspath(url)) else Disk
        return super().__new__(kind)

    def __init__(self, url: str | os.PathLike[str], *, is_optional: bool = False):
        """Opens a folder, which need not exist.

        Args:
          url: the folder.
          is_optional: whether a run can do without its objects. A failing service is
            then asked again for some seconds only, instead of a quarter of an hour.

        Raises:
          CheckpointError: if the URL does not name a supported store.
        """
        self._retries = _FEW_RETRIES if is_optional else buckets.RETRIES
        self._spec, self.url = self._parse(os.fspath(url))
        self._objects: Any = None

    def __str__(self) -> str:
        return self.url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and self._spec == other._spec

    def __hash__(self) -> int:
        return hash(self.url)

    def database(
        self,
        prefix: str,
        context: ts.Context | None = None,
        *,
        is_written: bool = False,
        **options: Any,
    ) -> Any:
        """Opens the OCDBT database below a prefix, by default in a new context.

        Contexts are not shared for the life of the store, because a context keeps its
        cache in memory.
        """
        base = {**self._spec, "path": f"{self._spec['path']}{prefix}"}
        if is_written:
            base |= self._lacking()
        spec = {
            "driver": "ocdbt",
            "base": base,
            "config": {
                "manifest_kind": "single",
                "max_inline_value_bytes": _INLINE_BYTES,
            },
            **options,
        }
        return self._opened(spec, context or make_context())

    def spec(self) -> dict[str, Any]:
        """Returns tensorstore's spec of the folder."""
        return dict(self._spec)

    def read(self, name: str) -> bytes | None:
        """Reads an object; returns None if it does not exist."""
        return self.stat(name)[1]

    def create(self, name: str, content: bytes) -> None:
        """Creates an object atomically and durably. Creating it again with the same
        content does nothing.

        Raises:
          CheckpointError: if an object of that name with other content exists.
        """
        absent, existing = self.stat(name)
        if existing is None:
            self._clear(name, absent)
            # Atomic: of two processes that create the object, one succeeds. On a disk,
            # tensorstore writes and syncs a file beside it, renames that, and syncs the
            # folder.
            written = self._result(self._kv().write(name, content, if_equal=absent))
            if written.generation:
                return
            # If the reply to a successful write was lost, the retry fails because the
            # object now exists.
            existing = self.read(name)
        if existing != content:
            raise exists(self, name)

    def write(self, name: str, content: bytes) -> None:
        """Writes an object atomically and durably, whether it exists or not."""
        self._result(self._kv().write(name, content))

    def replace(self, name: str, content: bytes, generation: bytes) -> bytes | None:
        """Replaces an object if it still has a given generation.

        Returns:
          Its new generation; None if it had another one.
        """
        written = self._result(self._kv().write(name, content, if_equal=generation))
        if written.generation:
            return written.generation
        # The write may have succeeded and its reply been lost, as in `create`.
        generation, existing = self.stat(name)
        return generation if existing == content else None

    def stat(self, name: str) -> tuple[bytes, bytes | None]:
        """Returns the generation of an object, and its content; None as content if it
        does not exist.
        """
        entry = self._result(self._kv().read(name))
        content = entry.value if entry.state == "value" else None
        return entry.stamp.generation, content

    def names(self, prefix: str = "") -> list[str]:
        """Lists the names of all objects below a prefix, empty or ending with a slash.
        Links are not followed.
        """
        raise NotImplementedError

    def folders(self, wanted: re.Pattern[str]) -> dict[str, Folder]:
        """Lists the folders directly in the store whose names match, each with the
        names directly in it.
        """
        raise NotImplementedError

    def delete(self, name: str, generation: bytes | None = None) -> None:
        """Deletes one object, if it exists.

        Args:
          name: the object.
          generation: the one that it must have to be deleted; None: any.
        """
        if generation is None:
            self._when_done(self._kv().write(name, None))
        else:
            self._when_done(self._kv().write(name, None, if_equal=generation))

    def delete_folder(self, prefix: str) -> None:
        """Deletes all objects below a prefix, and the folder itself on a disk. The
        folder must not be a link.
        """
        raise NotImplementedError

    def sync(self, prefix: str) -> None:
        """Makes the folders below a prefix durable, and those above it up to the
        store's own. In a bucket everything already is.
        """

    def sync_folder(self, prefix: str) -> None:
        """Makes the list of names directly in a folder durable, such as a deletion."""

    @staticmethod
    def _parse(url: str) -> tuple[dict[str, Any], str]:
        """Parses a path or URL into tensorstore's spec and the name without options."""
        raise NotImplementedError

    def _clear(self, name: str, absent: bytes) -> None:
        """Removes what would stand in the way of an object that is to be created.

        Args:
          name: the object, which does not exist.
          absent: its generation.
        """

    def _result(self, future: Any) -> Any:
        with self._raising():
            return future.result()

    @contextlib.contextmanager
    def _raising(self) -> Iterator[None]:
        """Raises errors of tensorstore as CheckpointError, with the place."""
        try:
            yield
        except (ValueError, OSError, RuntimeError) as e:
            message = f"{self.url}: {reason(e)}"
            endpoint = self._spec.get("endpoint")
            if endpoint:
                message += (
                    f". The requests went to {endpoint}/{self._spec['bucket']}/...; an "
                    "endpoint must accept buckets in the path"
                )
            raise CheckpointError(message) from e

    def _when_done(self, future: Any) -> None:
        """Waits for a deletion, during which a process may end."""
        with self._raising():
            buckets.wait(future)

    def _kv(self) -> Any:
        if self._objects is None:
            spec = {**self._spec, **self._lacking()}
            self._objects = self._opened(spec, make_context(self._retries))
        return self._objects

    def _lacking(self) -> dict[str, Any]:
        """Returns options of tensorstore for what the store does not have."""
        return {}

    def _opened(self, spec: Mapping[str, Any], context: ts.Context) -> Any:
        # Tensorstore raises an error in the spec, such as an invalid name of a bucket,
        # before there is a future.
        with self._raising():
            return ts.KvStore.open(spec, context=context).result()


class Bucket(Store):
    """A folder in a bucket of an object store."""

    def names(self, prefix: str = "") -> list[str]:
        """Lists the names of all objects below a prefix."""
        keys = self._result(self._kv().list(_below(prefix)))
        return sorted(key.decode() for key in keys)

    def folders(self, wanted: re.Pattern[str]) -> dict[str, Folder]:
        """Groups the names of objects into folders, as a disk would list them."""
        folders: dict[str, set[str]] = {}
        for name in self.names():
            folder, slash, rest = name.partition("/")
            if slash and wanted.fullmatch(folder):
                first, _, _ = rest.partition("/")
                folders.setdefault(folder, set()).add(first)
        listed = {}
        for folder, inside in folders.items():
            # An object store has no links.
            listed[folder] = Folder(frozenset(inside), is_link=False)
        return listed

    def delete_folder(self, prefix: str) -> None:
        """Deletes all objects below a prefix."""
        self._when_done(self._kv().delete_range(_below(prefix)))

    @staticmethod
    def _parse(url: str) -> tuple[dict[str, Any], str]:
        spec = buckets.parse(url)
        path = spec["path"].strip("/") if spec else ""
        if spec is None or not path:
            raise CheckpointError(
                f"'{url}' is not a valid place for checkpoints: give a path, "
                "gs://BUCKET/FOLDER or s3://BUCKET/FOLDER[?endpoint=URL&region=REGION]."
            )
        scheme, _, _ = url.partition("://")
        place = f"{scheme}://{spec['bucket']}/{path}"
        return {**spec, "path": f"{path}/"}, place


class Disk(Store):
    """A folder on a local or mounted disk."""

    path: pathlib.Path

    def __init__(self, url: str | os.PathLike[str], *, is_optional: bool = False):
        """Opens a folder as any store."""
        super().__init__(url, is_optional=is_optional)
        self.path = pathlib.Path(self.url)
        # What `_lacking` returns, once it is known.
        self._lacks: dict[str, Any] | None = None

    def read(self, name: str) -> bytes | None:
        """Reads a file; returns None if it does not exist."""
        with _named():
            return disk.read(self.path / name)

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, whether it exists or not; its folder must exist."""
        with _named():
            disk.replace(self.path / name, content)

    def names(self, prefix: str = "") -> list[str]:
        """Lists the names of all files below a prefix. Links are not followed."""
        with _named():
            return sorted(_files(self.path, prefix))

    def folders(self, wanted: re.Pattern[str]) -> dict[str, Folder]:
        """Lists the folders directly in the store whose names match."""
        folders = {}
        with _named():
            for entry in disk.entries(self.path) or ():
                if not wanted.fullmatch(entry.name):
                    continue
                if not entry.is_dir() and not entry.is_symlink():
                    continue
                # A broken link is listed without names.
                inside = disk.entries(entry.path) if entry.is_dir() else []
                # None: the folder was deleted after the store was listed.
                if inside is not None:
                    names = frozenset(file.name for file in inside)
                    folders[entry.name] = Folder(names, entry.is_symlink())
        return folders

    def delete_folder(self, prefix: str) -> None:
        """Deletes a folder, which must not be a link."""
        with _named(), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.path / prefix)

    def sync(self, prefix: str) -> None:
        """Makes the folders below a prefix durable, and those above it up to the
        store's own.

        The folders above the store are durable from their creation; see
        `disk.make_folder`. Those that somebody else created are not the run's.
        """
        top = self.path / prefix
        with _named():
            if not disk.exists(top):
                return
            # A file is synced by whoever writes it, but its name survives a power loss
            # only when its folder is synced, and so on up to the store.
            if "file_io_sync" in self._lacking():
                for name in _files(self.path, prefix):
                    disk.sync(self.path / name)
            for folder in _folders(top):
                disk.sync(folder)
            while top != self.path:
                top = top.parent
                disk.sync(top)

    def sync_folder(self, prefix: str) -> None:
        """Makes the list of names directly in a folder durable, such as a deletion."""
        with _named(), contextlib.suppress(FileNotFoundError):
            disk.sync(self.path / prefix)

    @staticmethod
    def _parse(url: str) -> tuple[dict[str, Any], str]:
        # Tensorstore accepts absolute paths only.
        path = os.path.abspath(disk.expanded(url))
        try:
            # Tensorstore takes UTF-8. In another locale, Python may have decoded the
            # path otherwise.
            name = os.fsencode(path).decode()
        except UnicodeDecodeError as e:
            raise CheckpointError(
                f"'{path}' is not a valid place for checkpoints: its name must be "
                "UTF-8."
            ) from e
        return {"driver": "file", "path": name.rstrip("/") + "/"}, path

    def _clear(self, name: str, absent: bytes) -> None:
        # A process that was killed may have left tensorstore's lock file, and
        # tensorstore would overwrite only its beginning. Deleting the absent object
        # removes that file, after waiting for a live writer.
        self._result(self._kv().write(name, None, if_equal=absent))

    def _lacking(self) -> dict[str, Any]:
        """Returns options of tensorstore for what the disk does not have.

        Without them tensorstore fails there. It syncs the file and the folder of each
        object, and locks a file while it writes it. What it does not sync, `sync` does
        as far as the disk allows; and a store is written by one run at a time, which
        has its own lock, in which no two processes write one object.
        """
        lock = self.path / LOCK
        # A process that may not read the lock writes only the marks of a person.
        if self._lacks is None and os.access(lock, os.R_OK):
            lacks: dict[str, Any] = {}
            with _named():
                if not disk.can_sync(self.path) or not disk.can_sync(lock):
                    lacks["file_io_sync"] = False
                if not disk.can_lock(lock):
                    lacks["file_io_locking"] = {"mode": "none"}
            self._lacks = lacks
        return self._lacks or {}


def exists(store: Store, name: str) -> CheckpointError:
    """Returns the error that an object which is to be created has other content."""
    return CheckpointError(f"{store.url}/{name} already exists with other content")


class Database:
    """An OCDBT database of arrays. It keeps the last array open, since the chunks of an
    array are used one after another.

    Attributes:
      context: the context of the database and its arrays.
      keys: the database as keys and values.
    """

    def __init__(self, store: Store, prefix: str, **options: Any):
        """Opens the database below a prefix."""
        self.context = make_context()
        self.keys = store.database(prefix, self.context, **options)
        self._path: str | None = None
        self._array: Any = None

    def array(self, path: str, metadata: dict[str, Any]) -> Any:
        """Opens the zarr3 array under a path, with known metadata instead of its
        zarr.json.
        """
        if path != self._path:
            spec = {
                "driver": "zarr3",
                "kvstore": {**self.keys.spec().to_json(), "path": f"{path}/"},
                "metadata": metadata,
                # Chunks of zeros are stored, too, so that a missing chunk is damage and
                # is not read as zeros.
                "store_data_equal_to_fill_value": True,
                "fill_missing_data_reads": False,
                # No cache is needed, since devices that hold parts of one chunk read it
                # at the same time.
                "cache_pool": {"total_bytes_limit": 0},
            }
            opening = ts.open(
                spec, open=True, assume_metadata=True, context=self.context
            )
            self._array = opening.result()
            self._path = path
        return self._array


def make_context(retries: Mapping[str, Any] = buckets.RETRIES) -> ts.Context:
    """Creates a tensorstore context, for databases that are used together."""
    return ts.Context(
        {
            "file_io_concurrency": {"limit": 64},
            "gcs_request_retries": dict(retries),
            "s3_request_retries": dict(retries),
            # This cache holds the nodes of the databases' trees, the only data that is
            # read more than once.
            "cache_pool": {"total_bytes_limit": 100 << 20},
        }
    )


def _below(prefix: str) -> ts.KvStore.KeyRange:
    """Returns the range of keys that begin with a prefix; all keys if it is empty."""
    if not prefix:
        return ts.KvStore.KeyRange()
    start = prefix.encode()
    # The least string that is greater than all that begin with the prefix.
    end = start[:-1] + bytes([start[-1] + 1])
    return ts.KvStore.KeyRange(start, end)


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Converts an OSError to a CheckpointError with the reason and the path."""
    try:
        yield
    except OSError as e:
        raise CheckpointError(reason(e)) from e


def _files(root: pathlib.Path, prefix: str) -> Iterator[str]:
    """Yields the names of the files below a prefix; links are not followed."""
    for entry in disk.entries(root / prefix) or ():
        name = prefix + entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _files(root, f"{name}/")
        else:
            yield name


def _folders(top: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a folder and all folders below it; links are not followed."""
    yield top
    for entry in disk.entries(top) or ():
        if entry.is_dir(follow_symlinks=False):
            yield from _folders(pathlib.Path(entry.path))
