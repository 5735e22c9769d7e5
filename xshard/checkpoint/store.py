"""The stores of checkpoints: a folder on a local or mounted disk, on GCS or on S3. One protocol for all.

    runs/digits/checkpoints                             a disk
    gs://bucket/folder                                  Google Cloud Storage
    s3://bucket/folder                                  Amazon S3
    s3://bucket/folder?endpoint=http://host:9000        what speaks its protocol

Credentials are what the machine has: Google's application default, AWS's environment or profile.
"""

import contextlib
import os
import pathlib
import re
import shutil
import urllib.parse
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorstore as ts

from xshard import errors
from xshard.files import disk

# For object stores; tensorstore waits longer and longer between tries, up to 32 s.
RETRIES = {"max_retries": 32, "initial_delay": "200ms", "max_delay": "32s"}
# By the scheme of a URL: tensorstore's driver, and its names for the options that may follow.
_SCHEMES: dict[str, tuple[str, dict[str, str]]] = {
    "gs": ("gcs", {}),
    "s3": ("s3", {"endpoint": "endpoint", "region": "aws_region"}),
}


class CheckpointError(errors.UserError):
    """A checkpoint that could not be written, or cannot be read as asked. The message says why."""


class Folder(NamedTuple):
    """A folder directly in a store.

    Attributes:
      names: of what is directly in it.
      is_link: whether it is a link, which somebody has made by hand; to nothing, if there are no names.
    """

    names: frozenset[str]
    is_link: bool


class Store:
    """A folder of objects with a name and a content each.

    Any method may raise `CheckpointError`, with the path and the reason, if the disk or the service cannot do
    what is asked. It is never taken for an absence.
    """

    def __init__(self, url: str | os.PathLike[str]):
        """Opens a folder, which need not exist.

        Raises:
          CheckpointError: if it is no folder that can be used.
        """
        self._spec, self.url = _parse(os.fspath(url))
        self.path = pathlib.Path(self.url) if self._spec["driver"] == "file" else None
        self._objects: Any = None

    def __str__(self) -> str:
        return self.url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and self._spec == other._spec

    def __hash__(self) -> int:
        return hash(self.url)

    def database(self, prefix: str, context: ts.Context | None = None, **options: Any) -> Any:
        """The OCDBT database below a prefix, by default in a context of its own.

        A context that lived long would keep what it has cached in memory.
        """
        spec = {
            "driver": "ocdbt",
            "base": {**self._spec, "path": f"{self._spec['path']}{prefix}"},
            "config": {"manifest_kind": "single", "max_inline_value_bytes": 1024},
            **options,
        }
        return self._result(ts.KvStore.open(spec, context=context or make_context()))

    def spec(self) -> dict[str, Any]:
        """Tensorstore's spec of the folder."""
        return dict(self._spec)

    def read(self, name: str) -> bytes | None:
        """The content of an object; None if there is none."""
        if self.path is None:
            return self.stat(name)[1]
        with _named():
            return disk.read(self.path / name)

    def create(self, name: str, content: bytes) -> None:
        """Makes an object, whole or not at all, and durable.

        Raises:
          CheckpointError: if there is another of that name already.
        """
        absent, existing = self.stat(name)
        if existing is None:
            if self.path is not None:
                # A process that was killed may have left a lock file, of which tensorstore would overwrite only the
                # beginning. Who deletes what is not there deletes that file, and waits for who still writes it.
                self._result(self._kv().write(name, None, if_equal=absent))
            written = self._result(self._kv().write(name, content, if_equal=absent))
            if written.generation:
                return
            # A reply that was lost makes the second try fail on what the first one wrote.
            existing = self.read(name)
        if existing != content:
            raise CheckpointError(f"{self.url}/{name} appeared while this process wrote it")

    def replace(self, name: str, content: bytes, generation: bytes) -> bytes | None:
        """Writes an object if it is still the one of a generation; the new generation, or None."""
        written = self._result(self._kv().write(name, content, if_equal=generation))
        if written.generation:
            return written.generation
        # It may be this process's own all the same, as in `create`.
        generation, existing = self.stat(name)
        return generation if existing == content else None

    def stat(self, name: str) -> tuple[bytes, bytes | None]:
        """The generation of an object, and its content or None."""
        entry = self._result(self._kv().read(name))
        content = entry.value if entry.state == "value" else None
        return entry.stamp.generation, content

    def names(self, prefix: str = "") -> list[str]:
        """The names of all objects below a prefix that ends with a slash, or of all; no link is followed."""
        if self.path is not None:
            with _named():
                return sorted(_files(self.path, prefix))
        keys = self._result(self._kv().list(_below(prefix)))
        return sorted(key.decode() for key in keys)

    def size(self, prefix: str) -> int | None:
        """The bytes of all files below a prefix; None where that is not known without a request for each."""
        if self.path is None:
            return None
        total = 0
        with _named():
            for name in _files(self.path, prefix):
                total += disk.retried((self.path / name).stat).st_size
        return total

    def folders(self, wanted: re.Pattern[str]) -> dict[str, Folder]:
        """The folders directly in it whose names match, with what is directly in each."""
        if self.path is None:
            return _grouped(self.names(), wanted)
        folders = {}
        with _named():
            for entry in disk.entries(self.path) or ():
                if not wanted.fullmatch(entry.name):
                    continue
                if not entry.is_dir() and not entry.is_symlink():
                    continue
                # A link that leads to nothing has nothing in it.
                inside = disk.entries(entry.path) if entry.is_dir() else []
                # A folder that is gone has been deleted since this one was listed.
                if inside is not None:
                    names = frozenset(file.name for file in inside)
                    folders[entry.name] = Folder(names, entry.is_symlink())
        return folders

    def delete(self, name: str) -> None:
        """Deletes one object, or nothing if there is none."""
        self._result(self._kv().write(name, None))

    def delete_folder(self, prefix: str) -> None:
        """Deletes all objects below a prefix, and on a disk the folder, if it is no link."""
        if self.path is None:
            self._result(self._kv().delete_range(_below(prefix)))
            return
        with _named(), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.path / prefix)

    def sync(self, prefix: str) -> None:
        """Makes the folders above and below a prefix durable; objects always are."""
        if self.path is None:
            return
        top = self.path / prefix
        with _named():
            if not disk.exists(top):
                return
            for folder in _folders(top):
                disk.sync(folder)
            for parent in top.parents:
                # A folder that may not be read was not made by this process.
                with contextlib.suppress(PermissionError):
                    disk.sync(parent)

    def sync_folder(self, prefix: str) -> None:
        """Makes durable which names are directly in a folder."""
        if self.path is not None:
            with _named(), contextlib.suppress(FileNotFoundError):
                disk.sync(self.path / prefix)

    def _result(self, future: Any) -> Any:
        try:
            return future.result()
        except (ValueError, OSError, RuntimeError) as e:
            raise CheckpointError(f"{self.url}: {reason(e)}") from e

    def _kv(self) -> Any:
        if self._objects is None:
            self._objects = self._result(ts.KvStore.open(self._spec, context=make_context()))
        return self._objects


def reason(e: BaseException) -> str:
    """An error's text as a user needs it: without tensorstore's list of source locations."""
    if isinstance(e, OSError) and e.errno:
        text = e.strerror or str(e)
        return f"{text} ({e.filename})" if e.filename else text
    text = re.split(r" \[(source locations|tensorstore_spec|os_error_code)", str(e))[0]
    return text.strip().rstrip(".") or type(e).__name__


def _parse(url: str) -> tuple[dict[str, Any], str]:
    """Tensorstore's spec of a folder, and its name without options."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        # Absolute, since tensorstore takes no other path.
        path = os.path.abspath(url)
        return {"driver": "file", "path": path.rstrip("/") + "/"}, path
    rest, _, query = rest.partition("?")
    bucket, _, path = rest.partition("/")
    path = path.strip("/")
    driver, known = _SCHEMES.get(scheme, ("", {}))
    options = dict(urllib.parse.parse_qsl(query))
    if not driver or not bucket or not path or options.keys() - known.keys():
        raise CheckpointError(
            f"'{url}' is no place for checkpoints: give a path, gs://BUCKET/FOLDER or "
            "s3://BUCKET/FOLDER[?endpoint=URL&region=REGION]."
        )
    spec = {"driver": driver, "bucket": bucket, "path": f"{path}/"}
    for name, value in options.items():
        spec[known[name]] = value
    return spec, f"{scheme}://{bucket}/{path}"


def open_array(database: Any, path: str, metadata: dict[str, Any], context: ts.Context) -> Any:
    """The zarr3 array under a path of a database; its zarr.json is not read."""
    spec = {
        "driver": "zarr3",
        "kvstore": {**database.spec().to_json(), "path": f"{path}/"},
        "metadata": metadata,
        # A missing chunk is damage, not zeros.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
        # Devices that hold parts of one chunk read it together.
        "cache_pool": {"total_bytes_limit": 0},
    }
    return ts.open(spec, open=True, assume_metadata=True, context=context).result()


def make_context() -> ts.Context:
    """Makes the context that databases share which are used together."""
    return ts.Context(
        {
            "file_io_concurrency": {"limit": 64},
            "gcs_request_retries": RETRIES,
            "s3_request_retries": RETRIES,
            # The nodes of a database's tree; nothing else of what is read is read twice.
            "cache_pool": {"total_bytes_limit": 100 << 20},
        }
    )


def _below(prefix: str) -> ts.KvStore.KeyRange:
    """The keys that begin with a prefix; all, if it is empty."""
    if not prefix:
        return ts.KvStore.KeyRange()
    start = prefix.encode()
    return ts.KvStore.KeyRange(start, start[:-1] + bytes([start[-1] + 1]))


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Says of an error of the disk what it was, and of which path."""
    try:
        yield
    except OSError as e:
        raise CheckpointError(reason(e)) from e


def _files(root: pathlib.Path, prefix: str) -> Iterator[str]:
    for entry in disk.entries(root / prefix) or ():
        name = prefix + entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _files(root, f"{name}/")
        else:
            yield name


def _folders(top: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder and all below it."""
    yield top
    for entry in disk.entries(top) or ():
        if entry.is_dir(follow_symlinks=False):
            yield from _folders(pathlib.Path(entry.path))


def _grouped(names: list[str], wanted: re.Pattern[str]) -> dict[str, Folder]:
    """Groups the names of objects as a disk's listing would."""
    folders: dict[str, set[str]] = {}
    for name in names:
        folder, slash, rest = name.partition("/")
        if slash and wanted.fullmatch(folder):
            first, _, _ = rest.partition("/")
            folders.setdefault(folder, set()).add(first)
    return {folder: Folder(frozenset(inside), False) for folder, inside in folders.items()}
