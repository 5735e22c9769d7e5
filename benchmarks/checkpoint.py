"""Measures the cost of a checkpoint against orbax and against bare writes, each in a
fresh process.

    JAX_PLATFORMS=cpu python -m benchmarks.checkpoint [--rounds=5] [--megabytes=1024]
    [--arrays=24,2000]

A save includes fsync, the merge, the description and COMMIT; for orbax, its metadata
and finalization. A restore starts with a cold page cache, and ends when the arrays are
on the device. `waits` is how long a second save blocks its caller. The comparison, and
nothing else, needs orbax-checkpoint.
"""

import concurrent.futures
import functools
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import measure
from xshard import checkpoint

_ROUNDS = flags.DEFINE_integer("rounds", 5, "How often each side is timed.", 1)
_MEGABYTES = flags.DEFINE_integer("megabytes", 1024, "The size of the state.", 1)
_ARRAYS = flags.DEFINE_list("arrays", ["24", "2000"], "In how many arrays.")
_DIRECTORY = flags.DEFINE_string(
    "directory", None, "Where to write; a temporary folder by default."
)
_JSON = flags.DEFINE_bool("json", False, "Print the rows as JSON.")
_CHILD = flags.DEFINE_string("child", None, "For the processes that this one starts.")


def make_state(count: int, megabytes: int) -> dict[str, jax.Array]:
    """Returns arrays of noise, which compress as poorly as trained parameters."""
    size = (megabytes << 20) // 4 // count
    noise = np.random.default_rng(0).standard_normal(size, np.float32)
    state = {f"layer_{i:04d}": jnp.asarray(noise + i) for i in range(count)}
    return jax.block_until_ready(state)


class Xshard:
    """xshard's checkpoint manager."""

    def __init__(self, directory: pathlib.Path):
        self._manager = checkpoint.Manager(directory, checkpoint.Keep(last=9))

    def save(self, step: int, state: Any) -> Callable[[], None]:
        """Begins to save; returns what waits for the end."""
        self._manager.save(step, state, {})
        return self._manager.wait

    def restore(self, target: Any) -> Any:
        """Returns the newest state."""
        return self._manager.restore(target).state


class Orbax:
    """Orbax's StandardCheckpointer, which compresses with zstd."""

    def __init__(self, directory: pathlib.Path):
        import orbax.checkpoint as ocp

        self._directory = directory
        self._checkpointer: Any = self.make(ocp)

    def make(self, ocp: Any) -> Any:
        """Returns the checkpointer."""
        return ocp.StandardCheckpointer()

    def save(self, step: int, state: Any) -> Callable[[], None]:
        """Begins to save; returns what waits for the end."""
        self._checkpointer.save(self._directory / str(step), state)
        return self._checkpointer.wait_until_finished

    def restore(self, target: Any) -> Any:
        """Returns the state of step 0."""
        return self._checkpointer.restore(self._directory / "0", target)


class OrbaxUncompressed(Orbax):
    """Orbax's AsyncCheckpointer without compression."""

    def make(self, ocp: Any) -> Any:
        """Returns the checkpointer."""
        self._ocp = ocp
        return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))

    def restore(self, target: Any) -> Any:
        """Returns the state of step 0."""
        arguments = self._ocp.checkpoint_utils.construct_restore_args(target)
        return self._checkpointer.restore(
            self._directory / "0", item=target, restore_args=arguments
        )


class Raw:
    """One file per array, written by 8 threads with an fsync for each file."""

    def __init__(self, directory: pathlib.Path):
        self._directory = directory

    def save(self, step: int, state: Any) -> Callable[[], None]:
        """Saves; the returned function has nothing left to wait for."""
        folder = self._directory / str(step)
        folder.mkdir(parents=True)

        def write(item: tuple[str, jax.Array]) -> None:
            with (folder / item[0]).open("wb") as file:
                np.asarray(item[1]).tofile(file)
                file.flush()
                os.fsync(file.fileno())

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(write, state.items()))
        return lambda: None

    def restore(self, target: Any) -> Any:
        """Returns the state of step 0."""

        def read(item: tuple[str, Any]) -> jax.Array:
            name, like = item
            file = self._directory / "0" / name
            return jax.device_put(np.fromfile(file, like.dtype), like.sharding)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            return dict(zip(target, pool.map(read, target.items()), strict=True))


_ORBAX = "orbax StandardCheckpointer"
_RAW = "raw fsync by 8 threads"
SIDES: dict[str, Any] = {
    "xshard": Xshard,
    _ORBAX: Orbax,
    "orbax uncompressed": OrbaxUncompressed,
    _RAW: Raw,
}
# The targets: the largest ratio to a peer's time, by number of arrays. They hold for a
# gigabyte, because fixed costs dominate smaller states.
TARGETS = {
    ("save", _ORBAX, 24): 1 / 2.3,
    ("save", _ORBAX, 2000): 1 / 2.3,
    ("save", _RAW, 24): 1.4,
    ("save", _RAW, 2000): 1.4,
    ("restore", _ORBAX, 24): 1 / 1.3,
    ("restore", _ORBAX, 2000): 1 / 1.7,
}
# The figures of a side, and their units.
FIGURES = {"save": "s", "restore": "s", "waits": "ms"}
_NO_ORBAX = "orbax-checkpoint is not installed: pip install '.[dev]'"


def child(
    task: str, side: str, count: int, directory: pathlib.Path
) -> dict[str, float]:
    """Saves or restores once, in this process."""
    state = make_state(count, _MEGABYTES.value)
    peer = SIDES[side](directory)
    if task == "save":
        return _timed_saves(peer, state)
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    expected = {name: np.asarray(state[name])[::9973].copy() for name in state}
    del state
    _drop_cache(directory)
    begin = time.perf_counter()
    restored = jax.block_until_ready(peer.restore(target))
    seconds = time.perf_counter() - begin
    for name, part in expected.items():
        np.testing.assert_array_equal(np.asarray(restored[name])[::9973], part)
    return {"restore": seconds}


def _timed_saves(peer: Any, state: Any) -> dict[str, float]:
    # Pending writes of earlier work would compete with the save.
    os.sync()
    begin = time.perf_counter()
    peer.save(0, state)()
    seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    done = peer.save(1, state)
    waited = time.perf_counter() - begin
    done()
    return {"save": seconds, "waits": waited}


def _drop_cache(directory: pathlib.Path) -> None:
    # The kernel drops only clean pages.
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def compare(count: int, directory: pathlib.Path) -> Iterator[measure.Row]:
    """Yields the rows of one number of arrays."""
    # "orbax" is a namespace package that other distributions share, so its presence
    # alone proves nothing.
    found = importlib.util.find_spec("orbax") and importlib.util.find_spec(
        "orbax.checkpoint"
    )
    tried = [side for side in SIDES if found or "orbax" not in side]

    def saved_and_restored(side: str) -> dict[str, float]:
        folder = directory / side.replace(" ", "_")
        children = [
            _start_child(task, side, count, folder) for task in ("save", "restore")
        ]
        shutil.rmtree(folder)
        return children[0] | children[1]

    sides = {side: functools.partial(saved_and_restored, side) for side in tried}
    rounds = measure.in_turn(sides, _ROUNDS.value, warm_up=False)
    seen = {
        side: {key: [each[key] for each in values] for key in values[0]}
        for side, values in rounds.items()
    }
    where = f"{_MEGABYTES.value} MiB in {count} arrays"
    for task in ("save", "restore"):
        what = f"{task} {where}"
        ours = seen["xshard"][task]
        for side in list(SIDES)[1:]:
            target = None
            if _MEGABYTES.value >= 1000:
                target = TARGETS.get((task, side, count))
            if side in seen:
                yield measure.ratio(what, side, ours, seen[side][task], target)
            else:
                yield measure.Row(what, side, missing=_NO_ORBAX)
    for side, values in seen.items():
        for key, unit in FIGURES.items():
            yield measure.figure(f"{key}, {side}, {where}", values[key], unit)


def _start_child(
    task: str, side: str, count: int, folder: pathlib.Path
) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.checkpoint",
        "--verbosity=-1",
        f"--child={task},{side},{count}",
        f"--directory={folder}",
        f"--megabytes={_MEGABYTES.value}",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str]) -> None:
    """Prints the rows; with --child, measures one side in this process."""
    del argv
    if _CHILD.value:
        task, side, count = _CHILD.value.split(",")
        print(json.dumps(child(task, side, int(count), pathlib.Path(_DIRECTORY.value))))
        return
    with tempfile.TemporaryDirectory(dir=_DIRECTORY.value) as folder:
        counts = [int(count) for count in _ARRAYS.value]
        rows = [row for count in counts for row in compare(count, pathlib.Path(folder))]
    measure.emit(rows, _JSON.value)


if __name__ == "__main__":
    app.run(main)
