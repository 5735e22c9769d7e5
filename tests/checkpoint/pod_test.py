"""Tests of checkpoints by several real processes, on a disk and on object stores."""

import re

import pytest

from tests.checkpoint import harness, pod, torture

COUNTS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def pods(tmp_path_factory):
    return pod.Pods(tmp_path_factory.mktemp("reports"))


def check_restored(reports, step, count):
    for report in reports:
        assert report["differences"] == [] and report["step"] == report["note"] == step
        # Each process that restores receives the data of every process that saved.
        assert report["data"] == [{"at": [step, index]} for index in range(count)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("save_on", COUNTS)
def test_any_number_of_processes_restores_what_any_number_saved(
    pods, tmp_path, save_on
):
    saved = pods.run("save", tmp_path, save_on, step=7)
    # Each process writes its part of the common plan, and the parts are about equally
    # large.
    loads = saved[0]["loads"]
    assert [report["written"] for report in saved] == loads == saved[-1]["loads"]
    assert max(loads) < 1.3 * min(loads)
    for restore_on in COUNTS:
        for model in (1, restore_on) if restore_on < 3 else (1,):
            reports = pods.run("restore", tmp_path, restore_on, model=model)
            check_restored(reports, 7, save_on)


def test_all_processes_restore_the_step_before_a_damaged_one(pods, tmp_path):
    pods.run("save", tmp_path, 3, step=5, saves=2)
    # The largest file of the newest step. It holds chunks that only some of the
    # processes read.
    files = [p for p in tmp_path.glob("step_00000006.*/p1/d/*") if p.is_file()]
    harness.damage("flipped", max(files, key=lambda p: p.stat().st_size))
    for count in (1, 3, 4):
        check_restored(pods.run("restore", tmp_path, count), 5, 3)
        assert "DAMAGED CHECKPOINT" in pods.logs() and "step_00000006" in pods.logs()


def test_damage_that_some_processes_do_not_read_is_damage_for_all(pods, tmp_path):
    pods.run("save", tmp_path, 3, step=5, saves=2)
    # A block of the first of two groups: only the first two processes have it on their
    # devices.
    block = pod.host_state(6)["params"]["grouped/w"][0][0].tobytes()
    (file,) = [
        path
        for path in tmp_path.glob("step_00000006.*/p*/d/*")
        if path.is_file() and block in path.read_bytes()
    ]
    content = bytearray(file.read_bytes())
    content[content.index(block)] ^= 1
    file.write_bytes(content)
    reports = pods.run("restore", tmp_path, 3)
    assert "'params/grouped/w' in" in pods.logs()
    check_restored(reports, 5, 3)


def test_a_host_without_the_disk_is_named_by_every_process(pods, tmp_path):
    pods.run("save", tmp_path, 2, step=7)
    pods.start("restore without a disk", tmp_path, 2)
    assert pods.wait() == [1, 1]
    # Process 0 sees the checkpoint, and must not restore it alone.
    named = r"process 1 on .* does not see .*/step_00000007\..*, but process 0 does"
    assert len(re.findall(f"CheckpointError: {named}", pods.logs())) == 2


def test_copies_of_each_process_are_saved_once_and_restored_to_each(pods, tmp_path):
    for report in pods.run("save copies", tmp_path, 3):
        assert all(report["equal"].values()) and len(report["equal"]) == 4
    # One process restores what several have saved.
    assert pods.run("save copies", tmp_path, 1)[0]["equal"]["numpy"]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (
            "save unequal copies",
            "process 1 has other values than process 0 of 'numpy', 'on a device'",
        ),
        ("save other shapes", "process 1 saves another tree than process 0"),
    ],
)
def test_copies_that_differ_are_refused_by_every_process(
    pods, tmp_path, action, message
):
    pods.start(action, tmp_path, 2)
    assert pods.wait() == [1, 1]
    # Each process raises it, and says so again when it ends.
    assert len(re.findall(f"CheckpointError: .*{message}", pods.logs())) >= 2
    assert not list(tmp_path.glob("step_*/COMMIT"))


def test_a_failed_save_is_reported_by_every_process(pods, tmp_path):
    (tmp_path / "file").write_text("")
    pods.start("save", tmp_path / "file", 3)
    assert pods.wait() == [1, 1, 1]
    assert pods.logs().count("CheckpointError: Step 0 could not be saved") == 3
    assert pods.logs().count("cannot be written: File exists") >= 3


@pytest.mark.sample(0.4)
@pytest.mark.parametrize("store", torture.STORES)
def test_a_kill_of_a_pod_leaves_no_bad_checkpoint_that_counts(tmp_path, store):
    counts = torture.run(tmp_path, 10, seed=0, names=(store,))
    # Some of the ten pods saved at least once before the kill. Their checkpoints are
    # read in full.
    assert counts.trials == 10 and counts.verified >= 5 and counts.bad == {}
