"""Tests that nothing waits for a store that deletes slowly."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.checkpoint import harness
from tests.launch import harness as launch_harness
from xshard.checkpoint import janitor


@pytest.fixture
def slow(monkeypatch):
    """Lets deletions of checkpoints wait; returns the event that releases them."""
    release = threading.Event()
    original = janitor.remove

    def remove(attempt, **options):
        release.wait()
        original(attempt, **options)

    monkeypatch.setattr(janitor, "remove", remove)
    monkeypatch.setattr(janitor, "_PATIENCE_SECONDS", 0.01)
    yield release
    release.set()


def test_saves_and_the_end_of_a_run_do_not_wait_for_deletions(tmp_path, slow):
    manager = harness.make_manager(tmp_path, 1)
    for step in range(1, 5):
        manager.save(step, {"x": np.arange(3.0)}, {})
        manager.wait()
    assert manager.all_steps() == [1, 2, 3, 4]
    manager.clean()
    # The lock is free, although deletions are under way.
    manager.close()
    harness.make_manager(tmp_path).acquire()


def test_what_no_rule_keeps_is_deleted_in_the_end(tmp_path, slow):
    manager = harness.make_manager(tmp_path, 1)
    for step in range(1, 4):
        manager.save(step, {"x": np.arange(3.0)}, {})
        manager.wait()
    slow.set()
    assert launch_harness.wait_until(lambda: manager.all_steps() == [3])
    manager.close()


def test_a_process_may_end_during_a_deletion():
    # Only a process that ends shows what becomes of the thread.
    program = """
import threading
from xshard.checkpoint import janitor
begun = threading.Event()
class Future:
    def done(self):
        begun.set()
        return False
from xshard.checkpoint import store
slow = janitor.Deletions()
slow.add(lambda: store.Store("never written")._when_done(Future()))
begun.wait()
slow.wait()
print("ended")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, env=harness.environment()
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


def test_a_deletion_that_waits_already_is_not_added_again():
    release, made = threading.Event(), []
    deletions = janitor.Deletions()

    def first():
        release.wait()

    def second():
        made.append("second")

    deletions.add(first)
    for _ in range(3):
        deletions.add(second)
    release.set()
    while not made:
        deletions.wait()
    deletions.wait()
    assert made == ["second"]
