"""Tests of checkpoints on a disk, a stand-in for GCS and S3 (moto), with their locks,
leases and faults.
"""

import os
import re
import subprocess
import sys

import pytest

from tests.checkpoint import harness, torture
from tests.optimizers.harness import assert_equal
from xshard import checkpoint
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import lock
from xshard.checkpoint import store as store_lib
from xshard.files import claim


@pytest.fixture(params=["disk", "gcs", "s3"])
def folder(request, tmp_path):
    """Returns a new folder on each store in turn."""
    if request.param == "disk":
        return str(tmp_path / "new" / "folder")
    place = request.getfixturevalue(request.param)
    return place % tmp_path.name if "%" in place else f"{place}{tmp_path.name}"


@pytest.fixture(autouse=True)
def short_leases(monkeypatch):
    """Shortens the times of leases, since tests wait for leases to expire."""
    monkeypatch.setattr(claim, "RENEW_SECONDS", 0.1)
    monkeypatch.setattr(claim, "WATCH_SECONDS", 1.0)


def test_objects_are_created_replaced_listed_and_deleted(folder):
    store = store_lib.Store(folder)
    assert store.names() == [] and store.read("a/b") is None
    store.create("a/b", b"1")
    store.create("a/b", b"1")
    with pytest.raises(
        checkpoint.CheckpointError, match="a/b already exists with other"
    ):
        store.create("a/b", b"2")
    generation, content = store.stat("a/b")
    assert content == b"1"
    newer = store.replace("a/b", b"3", generation)
    assert (
        newer
        and store.replace("a/b", b"4", generation) is None
        and store.read("a/b") == b"3"
    )
    store.write("a/b", b"5, longer")
    store.write("a/b", b"6")
    assert store.read("a/b") == b"6"
    store.create("a/c/d", b"")
    store.create("ab", b"")
    assert store.names() == ["a/b", "a/c/d", "ab"]
    assert store.names("a/") == ["a/b", "a/c/d"]
    (name, group), *others = store.folders(re.compile("[ab]+")).items()
    assert (name, sorted(group.names), group.is_link, others) == (
        "a",
        ["b", "c"],
        False,
        [],
    )
    store.delete("ab")
    store.delete("ab")
    store.delete_folder("a/")
    assert store.names() == []


def test_lock_files_of_a_killed_run_do_not_block_the_next_run(tmp_path):
    (tmp_path / "RUN.__lock").write_text("of another run, with a longer config. " * 100)
    (tmp_path / "step_00000001.01234567").mkdir()
    (tmp_path / "step_00000001.01234567" / "COMMIT.__lock").write_text("half")
    owner = format_lib.Owner("a" * 16, "b" * 16, "host:/runs/a", {"seed": 0})
    for step in (2, 3):
        manager = harness.make_manager(tmp_path, owner=owner)
        harness.save(manager, step, harness.make_tree())
        manager.close()
    assert (
        manager.all_steps() == [2, 3] and format_lib.read_owner(manager.store) == owner
    )
    assert not list(tmp_path.rglob("*__lock"))


def test_a_checkpoint_is_saved_and_restored_on_every_store(folder):
    tree = harness.make_tree()
    manager = harness.make_manager(folder, keep_last=2)
    for step in (1, 2, 3):
        harness.save(manager, step, tree, {"note": step}, data={"at": step})
    assert manager.all_steps() == [2, 3]
    restored = harness.make_manager(folder).restore(tree)
    assert_equal(restored.state, tree)
    assert (restored.step, restored.metadata, restored.data) == (
        3,
        {"note": 3},
        [{"at": 3}],
    )
    manager.close()
    assert {name.split("/")[0][:13] for name in manager.store.names()} - {".lock"} == {
        "step_00000002",
        "step_00000003",
    }


def test_a_second_run_in_the_same_folder_is_refused(folder, monkeypatch):
    # The second run must not take over the lease, however late the first run renews it.
    monkeypatch.setattr(claim, "WATCH_SECONDS", harness.FOREVER)
    first, second = harness.make_manager(folder), harness.make_manager(folder)
    first.acquire()
    with pytest.raises(
        checkpoint.CheckpointError, match="is in use by .*two runs cannot write"
    ):
        second.acquire()
    with pytest.raises(
        checkpoint.CheckpointError, match="Step 1 could not be saved .*in use by"
    ):
        harness.save(second, 1, harness.make_tree())
    harness.save(first, 1, harness.make_tree())
    first.close()
    harness.save(second, 2, harness.make_tree())
    assert second.all_steps() == [1, 2]
    second.close()


def test_a_stale_lease_is_taken_over_and_its_former_holder_notices(gcs, tmp_path):
    folder = f"{gcs}{tmp_path.name}"
    messages = []
    slow, other = (
        harness.make_manager(folder),
        harness.make_manager(folder, log=messages.append),
    )
    slow.acquire()
    # The first run no longer renews its lease, as if its process had been suspended.
    lease = slow._janitor.locked()._lease
    lease._ended.set()
    lease._thread.join()
    other.acquire()
    assert "watching for 1 s whether that process is alive" in messages[0]
    with pytest.raises(checkpoint.CheckpointError, match="no longer holds .*End one"):
        harness.save(slow, 1, harness.make_tree())
    assert other.all_steps() == []
    harness.save(other, 1, harness.make_tree())
    slow.close()
    other.close()
    assert lock.NAME not in other.store.names()


@pytest.mark.parametrize("ignored", ["nothing", "absent", "unchanged"])
def test_a_service_that_ignores_conditions_is_named(
    gcs, tmp_path, monkeypatch, ignored
):
    replace = store_lib.Store.replace
    first = []

    def unconditional(self, name, content, generation):
        first.append(generation)
        is_absent = generation == first[0]
        if ignored == ("absent" if is_absent else "unchanged"):
            generation, _ = self.stat(name)
        return replace(self, name, content, generation)

    monkeypatch.setattr(store_lib.Store, "replace", unconditional)
    messages = []
    manager = harness.make_manager(f"{gcs}{tmp_path.name}", log=messages.append)
    manager.acquire()
    harness.save(manager, 1, harness.saved_state(1))
    manager.close()
    warned = [text for text in messages if "ignores the conditions of writes" in text]
    assert len(warned) == (ignored != "nothing")


def test_a_service_that_refuses_conditions_that_hold_is_named(
    gcs, tmp_path, monkeypatch
):
    replace = store_lib.Store.replace

    def refused(self, name, content, generation):
        _, existing = self.stat(name)
        return replace(self, name, content, generation) if existing is None else None

    place = f"{gcs}{tmp_path.name}"
    with monkeypatch.context() as patched:
        patched.setattr(store_lib.Store, "replace", refused)
        with pytest.raises(
            checkpoint.CheckpointError, match="although it is.*conditional_writes=false"
        ):
            harness.make_manager(place).acquire()
    # It has left no lease, which the next run would watch.
    assert store_lib.Store(place).names() == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", ["forget", "refuse", "throttle"])
def test_saves_succeed_although_30_percent_of_the_requests_fail(tmp_path, fault):
    report = torture.save_with_faults(tmp_path, 20, 0.3, fault)
    assert report["steps"] == [18, 19] and report["bad"] == {} and report["dead"] == 0


@pytest.mark.parametrize(
    "url", ["", "gs://bucket", "gs:///folder", "s3://bucket/", "ftp://host/folder",
            "s3://bucket/folder?endpiont=http://host", "gs://bucket/folder?endpoint=http://host",
            "s3://bucket/folder?conditional_writes=no"],
)  # fmt: skip
def test_an_invalid_place_for_checkpoints_is_refused(url):
    if not url:
        # An empty path is a relative path: the working directory.
        assert store_lib.Store(url).url == os.getcwd()
        return
    with pytest.raises(
        checkpoint.CheckpointError,
        match=r"is not a valid place for checkpoints: give a path, gs://",
    ):
        store_lib.Store(url)


def test_the_endpoint_of_the_environment_is_used(s3, monkeypatch):
    place, _, options = s3.partition("?")
    given = dict(option.split("=", 1) for option in options.split("&"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", given["endpoint"])
    store = store_lib.Store(f"{place % 'by_environment'}?region={given['region']}")
    store.create("a", b"1")
    assert store_lib.Store(s3 % "by_environment").read("a") == b"1"
    # The variable for S3 alone precedes the other, and the URL precedes both.
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    assert store_lib.Store("s3://bucket/x").spec()["endpoint"] == "http://127.0.0.1:9"
    assert store_lib.Store(s3 % "by_environment").read("a") == b"1"


def test_a_bucket_that_cannot_exist_is_named(s3):
    store = store_lib.Store((s3 % "x").replace("bucket", "b"))
    with pytest.raises(checkpoint.CheckpointError, match="s3://b/x: .*bucket name"):
        store.read("a")
    with pytest.raises(
        checkpoint.CheckpointError, match=r"requests went to http://.*/b/\.\.\.; an"
    ):
        store.database("prefix")


def test_an_unreachable_store_is_not_reported_as_damage():
    program = """
import sys
from tests.checkpoint import harness
from xshard import checkpoint
from xshard.checkpoint import format as format_lib, store
from xshard.files import buckets
buckets.RETRIES.update(max_retries=2, initial_delay="1ms", max_delay="2ms")
place = store.Store("gs://bucket/run")
attempt = format_lib.SaveAttempt(place, 1, "01234567", frozenset({"COMMIT"}))
try:
    format_lib.read_meta(attempt)
except format_lib.DamagedError:
    print("damaged")
except checkpoint.CheckpointError as e:
    print("error:", e)
"""
    environment = harness.environment(TENSORSTORE_GCS_HTTP_URL="http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.stdout.startswith(
        "error: gs://bucket/run/step_00000001.01234567/COMMIT cannot be read: "
        "gs://bucket/run: "
    )
