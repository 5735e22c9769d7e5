"""Tries on any store what checkpoints ask of one.

    python -m tests.checkpoint.protocol gs://BUCKET/FOLDER
    python -m tests.checkpoint.protocol 's3://BUCKET/FOLDER?endpoint=http://HOST:9000'

The folder must not exist; it is deleted at the end. For a store that speaks GCS's
protocol elsewhere, set TENSORSTORE_GCS_HTTP_URL. It prints PASS or FAIL for each
promise, and its exit code is 1 after a FAIL. It takes a minute on a store that is near.
"""

import argparse
import contextlib
import re
import sys
import traceback
import warnings
from concurrent import futures

import jax
import numpy as np

from tests import forks
from tests.checkpoint import harness
from xshard import checkpoint
from xshard.checkpoint import store as store_lib
from xshard.files import claim

# More than a page of a listing has.
_MANY = 1100


def objects(folder):
    """Objects are created, read, replaced and deleted."""
    store = store_lib.Store(folder)
    _expect(store.names(), [])
    _expect(store.read("a/b"), None)
    store.create("a/b", b"1")
    # The reply to the first request may have been lost.
    store.create("a/b", b"1")
    _expect(store.read("a/b"), b"1")
    store.create("a/c/d e%f#", b"")
    _expect(store.names(), ["a/b", "a/c/d e%f#"])
    _expect(store.read("a/c/d e%f#"), b"")
    store.delete("a/b")
    store.delete("a/b")
    _expect(store.names("a/"), ["a/c/d e%f#"])
    store.delete_folder("a/")
    _expect(store.names(), [])


def create_if_absent(folder):
    """Of several processes that create an object at once, one succeeds."""

    def create(writer):
        try:
            store_lib.Store(folder).create("one", b"%d" % writer)
        except checkpoint.CheckpointError as e:
            assert "already exists with other content" in str(e), e
            return 0
        return 1

    with futures.ThreadPoolExecutor(8) as pool:
        _expect(sum(pool.map(create, range(8))), 1)


def replace_if_unchanged(folder):
    """An object that another process has replaced is neither replaced nor deleted."""
    store = store_lib.Store(folder)
    store.create("lease", b"1")
    first, _ = store.stat("lease")
    second = store.replace("lease", b"2", first)
    assert second
    _expect(store.replace("lease", b"3", first), None)
    _expect(store.read("lease"), b"2")
    store.delete("lease", first)
    _expect(store.read("lease"), b"2")
    store.delete("lease", second)
    _expect(store.read("lease"), None)


def long_listings(folder):
    """A listing is complete however long it is."""
    store = store_lib.Store(folder)
    names = [f"long/{number:05d}" for number in range(_MANY)]
    with futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.create(name, b""), names))
    _expect(store.names("long/"), names)
    group = store.folders(re.compile("long"))["long"]
    _expect(len(group.names), _MANY)


def saves(folder):
    """A checkpoint is saved, restored bit for bit, and deleted."""
    tree = harness.make_tree()
    with contextlib.closing(harness.make_manager(folder, keep_last=2)) as manager:
        for step in (1, 2, 3):
            harness.save(manager, step, tree, {"note": step}, data={"at": step})
        _expect(manager.all_steps(), [2, 3])
        restored = harness.make_manager(folder).restore(tree)
    for saved, found in zip(
        jax.tree.leaves(tree), jax.tree.leaves(restored.state), strict=True
    ):
        _expect(harness.bits(found), harness.bits(saved))


def second_run(folder):
    """A second run in the same folder is refused while the first one lives."""
    first = harness.make_manager(folder)
    second = harness.make_manager(folder)
    first.acquire()
    try:
        second.acquire()
    except checkpoint.CheckpointError as e:
        assert "is in use by" in str(e), e
    else:
        raise AssertionError("the second run was not refused")
    harness.save(first, 1, harness.saved_state(1))
    first.close()
    harness.save(second, 2, harness.saved_state(2))
    _expect(second.all_steps(), [1, 2])
    second.close()


def taken_over(folder):
    """A run that gives no sign of life loses the folder, notices it, and stops."""
    late = harness.make_manager(folder)
    late.acquire()
    lease = late._janitor.locked()._lease
    lease._ended.set()
    lease._thread.join()
    other = harness.make_manager(folder)
    other.acquire()
    try:
        harness.save(late, 1, harness.saved_state(1))
    except checkpoint.CheckpointError as e:
        assert "no longer holds" in str(e), e
    else:
        raise AssertionError("the late run saved a step")
    harness.save(other, 2, harness.saved_state(2))
    _expect(other.all_steps(), [2])
    late.close()
    other.close()


def kills(folder):
    """What a killed run has saved is whole, and the next run goes on from there."""
    environment = harness.environment()
    with forks.Process(harness.save_until_killed, folder, env=environment) as process:
        manager = harness.make_manager(folder)
        while not manager.all_steps():
            assert process.poll() is None, process.communicate()[0]
        process.kill()
    step = manager.latest_step()
    restored = manager.restore(harness.saved_state(0))
    for name, array in harness.saved_state(restored.step).items():
        _expect(np.asarray(restored.state[name]).tobytes(), array.tobytes())
    harness.save(manager, step + 1, harness.saved_state(step + 1))
    _expect(manager.latest_step(), step + 1)
    manager.close()


PROMISES = (
    objects,
    create_if_absent,
    replace_if_unchanged,
    long_listings,
    saves,
    second_run,
    taken_over,
    kills,
)


def _expect(found, wanted):
    if found != wanted:
        raise AssertionError(f"found {found!r:.300}, expected {wanted!r:.300}")


def main(argv):
    """Tries each promise in a folder of its own; returns 1 if one is broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--watch_seconds", type=float, default=claim.WATCH_SECONDS)
    options = parser.parse_args(argv)
    claim.RENEW_SECONDS *= options.watch_seconds / claim.WATCH_SECONDS
    claim.WATCH_SECONDS = options.watch_seconds
    place, mark, query = options.url.partition("?")
    code = 0
    for promise in PROMISES:
        folder = f"{place}/{promise.__name__}{mark}{query}"
        verdict = "PASS"
        try:
            promise(folder)
        except Exception as e:
            traceback.print_exc()
            verdict = f"FAIL: {type(e).__name__}: {e}"
            code = 1
        print(f"{promise.__name__:<22} {verdict}", flush=True)
    try:
        store_lib.Store(options.url).delete_folder("")
    except checkpoint.CheckpointError as e:
        warnings.warn(f"the folder stays: {e}", stacklevel=1)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
