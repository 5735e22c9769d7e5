"""Checkpoints of several processes: real ones, on a disk and on object stores."""

import pytest

from tests.checkpoint import harness, pod, torture

COUNTS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def pods(tmp_path_factory):
    with pod.pods(tmp_path_factory.mktemp("reports")) as running:
        yield running


def check_restored(reports, step, count):
    for report in reports:
        assert report["differences"] == [] and report["step"] == report["note"] == step
        # The position of each process that has saved, for each that restores.
        assert report["data"] == [{"at": [step, index]} for index in range(count)]


@pytest.mark.parametrize("save_on", COUNTS)
def test_saved_by_some_processes_and_restored_by_others(pods, tmp_path, save_on):
    saved = pods.run("save", tmp_path, save_on, step=7)
    # Each byte once, and about as many by each process that holds it.
    loads = saved[0]["loads"]
    assert [report["own"] for report in saved] == loads == saved[-1]["loads"]
    assert max(loads) < 1.3 * min(loads)
    for restore_on in COUNTS:
        for model in (1, restore_on) if restore_on < 3 else (1,):
            reports = pods.run("restore", tmp_path, restore_on, model=model)
            check_restored(reports, 7, save_on)


def test_damage_that_one_process_sees_makes_all_take_the_one_before(pods, tmp_path):
    pods.run("save", tmp_path, 3, step=5, saves=2)
    # The newest's largest file: chunks that some processes read and others do not.
    files = [p for p in tmp_path.glob("step_00000006.*/p1/d/*") if p.is_file()]
    harness.damage("flipped", max(files, key=lambda p: p.stat().st_size))
    for count in (1, 3, 4):
        check_restored(pods.run("restore", tmp_path, count), 5, 3)
        assert "DAMAGED CHECKPOINT" in pods.logs() and "step_00000006" in pods.logs()


def test_damage_that_not_all_processes_see_is_all_processes_damage(pods, tmp_path):
    pods.run("save", tmp_path, 3, step=5, saves=2)
    # The first of two groups, whose devices are the first two processes'.
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


def test_what_is_wrong_on_one_process_is_said_on_all(pods, tmp_path):
    (tmp_path / "file").write_text("")
    pods.start("save", tmp_path / "file", 3)
    assert pods.wait() == [1, 1, 1]
    assert pods.logs().count("CheckpointError: Step 0 could not be saved") == 3
    assert pods.logs().count("cannot be written: File exists") >= 3


@pytest.mark.parametrize("store", torture.STORES)
def test_kill_9_at_any_instant_leaves_nothing_that_counts_and_is_wrong(tmp_path, store):
    counts = torture.run(tmp_path, 10, seed=0, names=(store,))
    # Of ten pods some have saved at least once before they were killed: what they have left is read whole.
    assert counts.trials == 10 and counts.verified >= 5 and counts.bad == {}
