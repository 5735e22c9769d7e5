"""Tests that a run that misses files, or cannot read them, loses nothing by mistake.

It neither starts over nor deletes anything.
"""

import errno
import json
import os
import shutil

import msgspec
import numpy as np
import pytest

from tests import rows, toy
from tests.checkpoint import harness
from xshard import checkpoint, errors, loop
from xshard.checkpoint import __main__ as tool
from xshard.checkpoint import array_reader, arrays, lock
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import store as store_lib
from xshard.files import disk, sources, workdir
from xshard.modes import continuous_eval

pytestmark = pytest.mark.usefixtures("shared_programs")


def make_config(directory="", **changes):
    config = toy.get_config()
    config.update(changes)
    config.checkpoint.directory = str(directory)
    return config.lock()


def files(folder):
    """Returns the content of all files below a folder, without status and lock."""
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("status.json", ".lock")
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The work directory of a run of 12 steps, for tests that copy it."""
    folder = tmp_path_factory.mktemp("finished")
    assert loop.run(make_config(), str(folder), "") == 0
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the finished run's work directory."""
    return shutil.copytree(finished, tmp_path / "run")


def resume(folder, steps=24, **options):
    return loop.run(make_config(steps=steps, **options), str(folder), "")


def test_every_file_of_a_run_names_the_run(run):
    config = json.loads((run / "config.json").read_bytes())
    identity = workdir.Workdir(run).identity()
    assert len(identity.id) == 16
    saved = msgspec.structs.asdict(identity)
    noted = {**saved, "step_program": "loop"}
    noted |= sources.of_experiment(config["experiment"])
    assert config[workdir.IDENTITY] == noted and noted["file"].endswith("/toy.py")
    assert json.loads((run / "results.json").read_bytes())["run"] == identity.id
    store = store_lib.Store(run / "checkpoints")
    owner = checkpoint.read_owner(store)
    assert (owner.id, owner.fingerprint) == (identity.id, identity.fingerprint)
    (commit, *_) = sorted((run / "checkpoints").glob("step_*/COMMIT"))
    assert json.loads(commit.read_bytes())["content"]["run"] == saved
    reached = json.loads((run / "reached.json").read_bytes())
    assert reached.pop("checkpoints").endswith("/checkpoints")
    assert reached == {"step": 12, "folder": format_lib.committed(store)[-1].folder}


@pytest.mark.parametrize("name", ["COMMIT", "meta.json"])
def test_a_run_goes_back_behind_a_damaged_checkpoint(run, capsys, name):
    (folder,) = (run / "checkpoints").glob("step_00000012.*")
    (folder / name).write_bytes((folder / name).read_bytes()[:10])
    assert resume(run) == 0
    assert "goes back from step 12 to 10" in capsys.readouterr().err
    assert (folder / "DAMAGED").exists()


@pytest.mark.parametrize("missing", ["all", "newest"])
def test_a_run_with_missing_checkpoints_does_not_resume_from_older_ones(run, missing):
    moved = run / "checkpoints"
    if missing == "newest":
        (moved,) = moved.glob("step_00000012.*")
    moved.rename(run.parent / "away")
    before = files(run)
    found = "no checkpoint is" if missing == "all" else "step 10 is the newest"
    with pytest.raises(
        errors.UserError, match=f"reached step 12, but {found} in .*--restart_from"
    ):
        resume(run)
    assert files(run) == before
    (run.parent / "away").rename(moved)
    assert resume(run) == 0


def test_checkpoints_on_a_disk_that_is_not_mounted(tmp_path):
    store_folder = tmp_path / "disk"
    run = tmp_path / "run"
    assert loop.run(make_config(store_folder), str(run), "") == 0
    logged = rows.read(run)
    store_folder.rename(tmp_path / "unmounted")
    store_folder.mkdir()
    with pytest.raises(
        errors.UserError, match=r"reached step 12, but no checkpoint is in .*disk\."
    ):
        loop.run(make_config(store_folder, steps=24), str(run), "")
    assert rows.read(run) == logged
    shutil.rmtree(store_folder)
    (tmp_path / "unmounted").rename(store_folder)
    assert loop.run(make_config(store_folder, steps=24), str(run), "") == 0


def test_a_run_is_set_aside_as_a_whole_if_its_id_is_given(run):
    # The ID of another run has no effect.
    assert loop.run(make_config(), str(run), "", set_aside="0" * 16) == 0
    identity = workdir.Workdir(run).identity()
    before = files(run)
    other = make_config(seed=1)
    assert loop.run(other, str(run), "", set_aside=identity.id) == 0
    assert workdir.Workdir(run).identity().id != identity.id
    kept = files(run / "set_aside" / identity.id)
    assert {name: before[name] for name in kept} == kept
    assert rows.read(run / "set_aside" / identity.id) and rows.read(run)[0]["step"] == 4
    # The same command again resumes the new run.
    new = workdir.Workdir(run).identity()
    assert loop.run(other, str(run), "", set_aside=identity.id) == 0
    assert workdir.Workdir(run).identity() == new != identity


def test_a_run_goes_back_if_a_person_deleted_the_newest_step(run, capsys):
    assert tool.main(["rm", str(run / "checkpoints"), "12"]) == 0
    assert resume(run) == 0
    assert "goes back from step 12 to 10" in capsys.readouterr().err
    assert workdir.Workdir(run).reached().step == 24


@pytest.mark.parametrize("whose", ["another's", "a copy's", "the same"])
def test_checkpoints_that_two_directories_share(tmp_path, whose, capsys):
    store_folder = tmp_path / "shared"
    assert loop.run(make_config(store_folder), str(tmp_path / "one"), "") == 0
    if whose == "another's":
        with pytest.raises(
            errors.UserError,
            match=r"holds the checkpoints of run .*one on .*seed: 0 -> 1",
        ):
            loop.run(make_config(store_folder, seed=1), str(tmp_path / "two"), "")
        assert not (tmp_path / "two").exists()
    elif whose == "a copy's":
        assert loop.run(make_config(tmp_path / "own"), str(tmp_path / "two"), "") == 0
        with pytest.raises(
            errors.UserError, match=r"checkpoints of run .*one on .*two holds run"
        ):
            loop.run(make_config(store_folder, steps=24), str(tmp_path / "two"), "")
        with pytest.raises(
            errors.UserError, match="give the run's own checkpoint.directory"
        ):
            continuous_eval.ContinuousEvaluator(
                make_config(store_folder), str(tmp_path / "two")
            ).follow()
    else:
        # This happens when the hosts of a pod lose their disks while the checkpoints
        # are in a bucket.
        longer = make_config(store_folder, steps=24)
        assert loop.run(longer, str(tmp_path / "two"), "") == 0
        assert "the work directory of run" in capsys.readouterr().out
        first = workdir.Workdir(tmp_path / "one").identity()
        assert workdir.Workdir(tmp_path / "two").identity() == first


def test_a_checkpoint_moved_here_from_another_run_is_refused(run, tmp_path):
    other = tmp_path / "other"
    assert loop.run(make_config(seed=1, steps=20), str(other), "") == 0
    (newest,) = (other / "checkpoints").glob("step_00000020.*")
    newest.rename(run / "checkpoints" / newest.name)
    with pytest.raises(
        errors.UserError, match="step_00000020.* belongs to run .*, but this is run"
    ):
        resume(run)


def test_a_config_that_no_run_has_written_is_refused(run):
    config = json.loads((run / "config.json").read_bytes())
    del config[workdir.IDENTITY]
    (run / "config.json").write_text(json.dumps(config))
    before = files(run)
    with pytest.raises(errors.UserError, match="not a valid config of a run"):
        resume(run)
    assert files(run) == before


def fail_once(monkeypatch, name, path, code):
    """Makes the first call of a function of `os` for a path fail.

    Returns:
      a list, to which the path is added when that call fails.
    """
    real = getattr(os, name)
    failed = []

    def call(first, *args, **kwargs):
        if str(first) == str(path) and not failed:
            failed.append(path)
            raise OSError(code, os.strerror(code), str(path))
        return real(first, *args, **kwargs)

    monkeypatch.setattr(os, name, call)
    return failed


def test_a_config_may_hold_numbers_that_are_not_finite(tmp_path):
    values = {"bound": np.inf, "bounds": (np.nan, -np.inf, 1.0)}
    place = workdir.Workdir(tmp_path / "run")
    with place.opened(make_config(**values)):
        pass
    assert place.check(make_config(**values)) == []
    with pytest.raises(errors.UserError, match=r"another config \(bound: inf -> 1.0\)"):
        place.check(make_config(**{**values, "bound": 1.0}))


@pytest.mark.parametrize(
    "code", [errno.EIO, errno.ESTALE, errno.ENOENT, errno.EACCES, errno.ENOMEM]
)
@pytest.mark.parametrize("folder", ["checkpoints", "step_00000012.*"])
def test_a_failed_listing_does_not_count_as_an_empty_one(
    run, monkeypatch, folder, code
):
    (path,) = (
        [run / folder]
        if folder == "checkpoints"
        else (run / "checkpoints").glob(folder)
    )
    before = files(run)
    failed = fail_once(monkeypatch, "scandir", path, code)
    try:
        assert resume(run) == 0
    except (errors.UserError, OSError) as e:
        assert code in (errno.EACCES, errno.ENOMEM) and str(path) in str(e)
        assert files(run) == before
        assert resume(run) == 0
    assert failed and rows.read(run)[0]["step"] == 4
    assert not list((run / "checkpoints").glob("*/DAMAGED"))


def test_a_folder_without_read_permission_is_named(run, monkeypatch):
    (path,) = (run / "checkpoints").glob("step_00000012.*")
    real = os.scandir

    def scandir(folder):
        if str(folder) == str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return real(folder)

    before = files(run)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        with pytest.raises(errors.UserError, match=f"Permission denied .{path}"):
            resume(run)
    assert files(run) == before


@pytest.mark.parametrize("kind", ["pinned", "kept", "to nothing", "a file"])
def test_links_and_files_that_a_person_added_are_not_deleted(run, tmp_path, kind):
    store_folder = run / "checkpoints"
    (oldest,) = store_folder.glob("step_00000010.*")
    if kind in ("pinned", "kept"):
        if kind == "pinned":
            assert tool.main(["pin", str(store_folder), "10"]) == 0
        oldest.rename(tmp_path / "elsewhere")
        oldest.symlink_to(tmp_path / "elsewhere")
    elif kind == "to nothing":
        (store_folder / "step_00000011.0123abcd").symlink_to(tmp_path / "nothing")
    else:
        (store_folder / "step_00000011.0123abcd").write_text("mine")
    assert resume(run) == 0
    if kind in ("pinned", "kept"):
        assert (tmp_path / "elsewhere" / "COMMIT").exists() and oldest.is_symlink()
        assert checkpoint.read_catalog(store_folder).entries[0].state == "complete"
        assert tool.main(["rm", str(store_folder), "10"]) == 1
        assert (tmp_path / "elsewhere" / "COMMIT").exists()
    else:
        assert os.path.lexists(store_folder / "step_00000011.0123abcd")
    assert len(list(store_folder.glob("step_*"))) == 3


def test_an_interrupted_deletion_is_completed_at_the_next_start(run):
    store_folder = run / "checkpoints"
    (older,) = store_folder.glob("step_00000010.*")
    (older / "COMMIT").unlink()
    assert loop.run(make_config(), str(run), "") == 0
    assert [path.name[:13] for path in store_folder.glob("step_*")] == ["step_00000012"]


def test_a_checkpoint_not_yet_listed_as_complete_is_not_deleted(run, monkeypatch):
    """The listing of an object store may be outdated."""
    real = store_lib.Disk.folders

    def folders(store, wanted):
        found = real(store, wanted)
        return {
            name: folder._replace(names=folder.names - {"COMMIT"})
            if "00000010" in name
            else folder
            for name, folder in found.items()
        }

    monkeypatch.setattr(store_lib.Disk, "folders", folders)
    assert resume(run, steps=13) == 0
    assert list((run / "checkpoints").glob("step_00000010.*/COMMIT"))


@pytest.mark.parametrize("passes", [True, False])
def test_a_failed_read_does_not_count_as_damage(run, monkeypatch, passes):
    real = disk.read
    failed = []

    def read(path):
        if (
            str(path).endswith("meta.json")
            and "00000012" in str(path)
            and not (failed and passes)
        ):
            failed.append(path)
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path)

    monkeypatch.setattr(disk, "read", read)
    if passes:
        assert resume(run) == 0
    else:
        with pytest.raises(
            errors.UserError, match=r"meta.json.*Input/output error.*may be whole"
        ):
            resume(run)
    assert failed and not list((run / "checkpoints").glob("*/DAMAGED"))


def test_a_mark_of_damage_is_removed_from_a_whole_checkpoint(run, capsys):
    store_folder = run / "checkpoints"
    (newest,) = store_folder.glob("step_00000012.*")
    (newest / "DAMAGED").write_text("{}")
    assert tool.main(["heal", str(store_folder), "12"]) == 0
    assert "counts again" in capsys.readouterr().out
    assert not (newest / "DAMAGED").exists()
    assert tool.main(["heal", str(store_folder), "12"]) == 1
    (newest / "DAMAGED").write_text("{}")
    harness.damage("flipped", newest / "meta.json")
    assert tool.main(["heal", str(store_folder), "12"]) == 1
    assert (newest / "DAMAGED").exists()


# The larger array is read by tensorstore's driver, the other one as bytes.
@pytest.mark.parametrize("hidden", [300, 100_000])
def test_the_bytes_of_another_checkpoint_fail_verification(tmp_path, hidden, capsys):
    config = {"experiment": "tests.toy.Wide", "hidden": hidden}
    assert resume(tmp_path, steps=10, **config) == 0
    assert tool.main(["verify", str(tmp_path)]) == 0
    store = store_lib.Store(tmp_path / "checkpoints")
    older, newest = format_lib.committed(store)
    # These are the bytes that the checkpoints store, each with its own checksum. A disk
    # that loses a write may return the older ones.
    old, new = (stored_chunk(attempt) for attempt in (older, newest))
    changed = 0
    for path in (tmp_path / "checkpoints" / newest.folder).glob("p0/d/*"):
        content = path.read_bytes()
        changed += content.count(new)
        path.write_bytes(content.replace(new, old))
    assert changed == 1
    assert tool.main(["verify", str(tmp_path)]) == 1
    capsys.readouterr()
    checkpoints = tmp_path / "checkpoints"
    before = files(checkpoints), (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(errors.UserError, match="differs from the saved state") as e:
        resume(tmp_path, steps=12, **config)
    assert f"checkpoint rm {checkpoints} {newest.step}" in str(e.value)
    after = files(checkpoints), (tmp_path / "metrics.jsonl").read_bytes()
    assert after == before
    # After what the message advises, the run goes on from the checkpoint before.
    assert tool.main(["rm", str(tmp_path), str(newest.step)]) == 0
    assert resume(tmp_path, steps=12, **config) == 0
    assert (
        f"resumed from the checkpoint of step {older.step}" in capsys.readouterr().out
    )


def stored_chunk(attempt):
    """Returns the bytes of the first layer's weights in a checkpoint."""
    metas = format_lib.read_array_metas(attempt)
    name = "params/mlp/~/linear_0/w"
    ((_, value),) = array_reader.read_arrays(attempt, {name: metas[name]})
    assert metas[name].chunk_shape == value.shape
    return arrays.encode(value, value.shape)


def test_rows_are_on_the_disk_before_their_checkpoint_counts(tmp_path, monkeypatch):
    order = []
    real_sync = disk.sync
    real_create = lock.Lock.create

    def sync(path):
        real_sync(path)
        order.append(os.path.basename(path))

    def create(held, name, content):
        real_create(held, name, content)
        order.append(os.path.basename(name))

    monkeypatch.setattr(disk, "sync", sync)
    monkeypatch.setattr(lock.Lock, "create", create)
    assert loop.run(make_config(steps=5), str(tmp_path / "run"), "") == 0
    commit = order.index("COMMIT")
    for name in ("metrics.jsonl", "metrics.csv", "run"):
        assert name in order[:commit]
    assert "reached.json" not in order[:commit]


def test_missing_rows_are_reported(run, capsys):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:1]))
    assert resume(run) == 0
    assert f"holds 1 of the {len(lines)} rows" in capsys.readouterr().out


def test_the_row_of_an_evaluation_is_not_written_twice(tmp_path):
    folder = tmp_path / "run"
    assert loop.run(make_config(steps=6), str(folder), "") == 0
    once = rows.same_bits(folder)
    # The directory of a run that was stopped during the evaluation of step 6, and whose
    # next start was killed right after it had written the evaluation's row.
    (commit,) = (folder / "checkpoints").glob("step_00000006.*/COMMIT")
    meta = commit.with_name("meta.json")
    description = json.loads(meta.read_bytes())
    description["metadata"]["evaluated"] = False
    meta.write_bytes(format_lib.to_json(description))
    content = format_lib.unseal(commit.read_bytes())
    content["sha256"]["meta.json"] = format_lib.checksum(meta.read_bytes())
    content["metrics"] = {}
    commit.write_bytes(format_lib.seal(content))
    assert loop.run(make_config(steps=6), str(folder), "") == 0
    assert rows.same_bits(folder) == once
    (metrics_file,) = (folder / "checkpoints").glob("step_00000006.*/METRICS")
    assert "error" in format_lib.unseal(metrics_file.read_bytes())


def test_missing_results_are_written_again(run):
    before = (run / "results.json").read_bytes()
    (run / "results.json").unlink()
    assert loop.run(make_config(), str(run), "") == 0
    assert (run / "results.json").read_bytes() == before
