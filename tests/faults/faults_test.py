"""Tests of a sample of the points of `benchmarks.faults`: failed file operations,
killed processes, power cuts.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.checkpoint import harness
from tests.faults import campaign, power, shim

# Any seed will do. The variable repeats a sample that failed.
SEED = os.environ.get("XSHARD_FAULTS_SEED", "0")


def run(tmp_path, where, sample, *options):
    """Tries a sample of points; none of them may be bad."""
    needs_compiler(where)
    options = [f"--sample={sample}", f"--seed={SEED}", *options]
    # One process tries all points, since each process first runs the undisturbed parts
    # for the comparison.
    results = campaign.tried(where, tmp_path, 1, options)
    bad = [row for row in results if row["outcome"] == campaign.BAD]
    assert not bad, f"with XSHARD_FAULTS_SEED={SEED}: {json.dumps(bad, indent=1)}"
    # Calls that depend on the clock may not occur again, such as reads of a node that
    # several threads want at once, but most calls do. Of three, one may be such a call.
    reached = [row for row in results if row["outcome"] != campaign.NOT_MET]
    assert len(results) == sample and len(reached) > sample / 2


def needs_compiler(where):
    """Skips a test with a reason if Debian's packages for a compiler are not installed;
    .ci/run installs them.
    """
    if where in ("disk", "power") and not shim.compiler():
        pytest.skip("needs a C compiler (Debian: gcc, libc6-dev)")


def test_a_failed_file_operation_has_a_good_outcome(tmp_path, pytestconfig):
    run(tmp_path, "disk", 26 if pytestconfig.getoption("--all") else 5)


def test_a_power_cut_has_a_good_outcome(tmp_path, pytestconfig):
    if power.missing():
        pytest.skip(power.missing())
    count = 20 if pytestconfig.getoption("--all") else 4
    run(tmp_path, "power", count, "--parts=new,resume")


@pytest.mark.sample(1)
@pytest.mark.parametrize("where", ["gcs", "s3"])
def test_a_failed_request_to_an_object_store_has_a_good_outcome(
    tmp_path, pytestconfig, where
):
    run(tmp_path, where, 6 if pytestconfig.getoption("--all") else 3, "--parts=resume")


WRITES = """
import os, pathlib, sys
from tests.faults import power, shim
with power.Disk(pathlib.Path(sys.argv[1])) as disk:
    disk.folder.mkdir()
    disk.settle()
    seam = shim.Shim(disk.folder)
    seam.plan(shim.CHANGES, 6, shim.CUT)
    if os.fork() == 0:
        seam.watch()
        (disk.folder / "open").write_text("never there")
        with (disk.folder / "synced").open("w") as file:
            file.write("there")
            file.flush()
            os.fsync(file)
        (disk.folder / "cut").write_text("never there")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]), seam.hit()[0])
    disk.power_up()
    print({path.name: path.read_text() for path in sorted(disk.folder.iterdir())})
"""


def test_a_power_cut_loses_what_was_not_synced(tmp_path):
    needs_compiler("power")
    if power.missing():
        pytest.skip(power.missing())
    environment = {**harness.environment(), **shim.preloaded(tmp_path)}
    command = [sys.executable, "-c", WRITES, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["-9 open", "{'open': '', 'synced': 'there'}"]


CALLS = """
import fcntl, os, pathlib, sys
from tests.faults import shim
folder = pathlib.Path(sys.argv[1])
(folder / "a").write_text("content")
fd = os.open(folder / "a", os.O_RDWR)
actions = {
    "open": lambda: os.open(folder / "a", os.O_RDONLY),
    "opendir": lambda: os.listdir(folder),
    "readdir": lambda: os.listdir(folder),
    "stat": lambda: os.stat(folder / "a"),
    "read": lambda: os.pread(fd, 6, 0),
    "write": lambda: os.pwrite(fd, b"written", 0),
    "fsync": lambda: os.fsync(fd),
    "rename": lambda: os.rename(folder / "a", folder / "b"),
    "unlink": lambda: os.unlink(folder / "a"),
    "mkdir": lambda: os.mkdir(folder / "c"),
    "link": lambda: os.link(folder / "a", folder / "d"),
    "truncate": lambda: os.truncate(folder / "a", 1),
    "lock": lambda: fcntl.flock(fd, fcntl.LOCK_EX),
}
assert tuple(actions) == shim.KINDS
seam = shim.Shim(folder)
seam.watch()
def outcome(kind, fault):
    seam.plan(kind, 1, fault)
    try:
        return actions[kind]()
    except OSError as e:
        assert seam.hit()[0] == kind
        return e.strerror
print({outcome(kind, "ESTALE") for kind in actions}, os.listdir(folder))
read, written = outcome("read", shim.SHORT), outcome("write", shim.SHORT)
print(read, written, (folder / "a").read_text())
seam.plan("write", 1, shim.TORN)
if os.fork() == 0:
    actions["write"]()
print(os.waitstatus_to_exitcode(os.wait()[1]), (folder / "a").read_text())
"""


def printed_under_the_shim(tmp_path, program):
    """Runs a program with the shim on a new folder; returns the lines it prints."""
    needs_compiler("disk")
    (tmp_path / "folder").mkdir()
    environment = {**harness.environment(), **shim.preloaded(tmp_path)}
    command = [sys.executable, "-c", program, str(tmp_path / "folder")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_each_kind_of_call_meets_its_planned_fault(tmp_path):
    assert printed_under_the_shim(tmp_path, CALLS) == [
        "{'Stale file handle'} ['a']",
        "b'con' 3 writent",
        "-9 writent",
    ]


KILLED = """
import os, pathlib, sys
from tests.faults import shim
from xshard.checkpoint import store
folder = pathlib.Path(sys.argv[1])
seam = shim.Shim(folder)
def do(action, kind=None, at=0):
    seam.plan(kind, at, shim.KILL)
    if os.fork() == 0:
        seam.watch()
        # The store is opened after the fork, which would lose tensorstore's threads.
        action(store.Store(folder))
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    print(code, {path.name: path.read_text() for path in sorted(folder.iterdir())})
do(lambda store: store.create("RUN", b"a long content"), "rename", 1)
do(lambda store: store.create("RUN", b"short"))
# The object is deleted before its lock file, so the second `unlink` is for the lock
# file.
do(lambda store: store.delete("RUN"), "unlink", 2)
do(lambda store: store.create("RUN", b"again"))
do(lambda store: store.delete("RUN"), "unlink", 1)
do(lambda store: store.delete("RUN"))
"""


def test_leftovers_of_a_killed_process_do_not_enter_the_next_object(tmp_path):
    assert printed_under_the_shim(tmp_path, KILLED) == [
        "-9 {'RUN.__lock': 'a long content'}",
        "0 {'RUN': 'short'}",
        "-9 {'RUN.__lock': ''}",
        "0 {'RUN': 'again'}",
        "-9 {'RUN': 'again', 'RUN.__lock': ''}",
        "0 {}",
    ]
