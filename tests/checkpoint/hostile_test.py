"""Checkpoints that somebody has forged, all checksums made right: refused by name, before memory is taken."""

import json
import re
import shutil
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoint.harness import make_manager
from xshard import checkpoint
from xshard.checkpoint import __main__ as tool
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import parts

DEEP = b"[" * 100_000
STATE = {"params": {"w": jnp.arange(4.0)}, "x": jnp.ones(3), "large": jnp.ones(300_000)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "checkpoints"
    manager = make_manager(folder)
    manager.save(1, STATE, {"a": 1}, metrics={"error": 1.0})
    manager.close()
    return folder


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """The bytes of all memory that is taken for arrays."""
    allocate, taken = parts._aligned, []

    def count(shape, dtype):
        taken.append(int(np.prod(shape, dtype=object)) * dtype.itemsize)
        assert taken[-1] <= 2 << 20, "more than is stored"
        return allocate(shape, dtype)

    monkeypatch.setattr(parts, "_aligned", count)
    return taken


def forge(folder, whole, change_meta=None, change_commit=None):
    """A copy in which meta.json or COMMIT says something else, with the right checksums."""
    shutil.copytree(whole, folder)
    (step,) = folder.glob("step_*")
    meta = json.loads((step / "meta.json").read_bytes())
    commit = format_lib.unseal((step / "COMMIT").read_bytes())
    raw = (step / "meta.json").read_bytes()
    if change_meta:
        changed = change_meta(meta)
        raw = changed if isinstance(changed, bytes) else format_lib.to_json(meta)
    (step / "meta.json").write_bytes(raw)
    commit["sha256"]["meta.json"] = format_lib.checksum(raw)
    changed = change_commit(commit) if change_commit else None
    content = changed if isinstance(changed, bytes) else format_lib.seal(commit)
    (step / "COMMIT").write_bytes(content)
    return folder


def array(path="x", **changes):
    """Changes what is said of an array, whose checksums would not be as many any more."""
    return lambda meta: meta["arrays"][path].update({"sums": None} | changes)


def renamed(path, **changes):
    """Gives an array another path."""

    def change(meta):
        entry = meta["arrays"].pop("x")
        meta["arrays"][path] = entry | {"sums": None} | changes

    return change


HUGE = 1 << 42
METAS = {
    "a list": (lambda meta: b"[1, 2]", "meta.json is not what was written: it is not an object"),
    "deep": (lambda meta: DEEP, "meta.json is not what was written: it is nested too deeply"),
    "twice": (lambda meta: b'{"version": 2, "version": 2}', "meta.json .* it has a duplicate key"),
    "no version": (lambda meta: meta.pop("version") and None, "meta.json .* version is missing"),
    "a version to come": (lambda meta: meta.update(version=7), "meta.json has format version 7"),
    "arrays": (lambda meta: meta.update(arrays=[1]), r"meta.json .* arrays is \[1\], not an object"),
    "metadata": (lambda meta: meta.update(metadata=[1]), "meta.json .* metadata is .1., not an"),
    "a text": (array(shape="abc"), "meta.json .* arrays/x/shape is 'abc', not a shape"),
    "negative": (array(shape=[-3]), r"arrays/x/shape is \[-3\], not a shape"),
    "no shape": (array(shape=[HUGE, HUGE, 0]), "arrays/x/shape is .*, not a shape"),
    "terabytes": (array(shape=[HUGE], chunk_shape=[HUGE]), "'x', float32.*is not what was written"),
    "chunks": (array(shape=[1 << 40], chunk_shape=[1]), "'x', .*: 1 of its 1099511627776 chunks"),
    "large": (
        array("large", shape=[1 << 30], chunk_shape=[300_000]),
        "'large', .*: 1 of its 3580 chunks are there",
    ),
    "wider": (array("large", dtype="complex128"), "'large', complex128.*: 1200004 bytes instead"),
    "checksums": (array(sums=[1, 2]), "arrays/x/sums has 2 checksums for 1 chunks"),
    "no checksums": (array(sums=["a"]), "arrays/x/sums is .*, not a list of checksums"),
    "chunks of 0": (array(chunk_shape=[0]), r"arrays/x/chunk_shape is \[0\], not a chunk of \[3\]"),
    "rank": (array(chunk_shape=[1, 1]), r"arrays/x/chunk_shape is \[1, 1\], not a chunk of \[3\]"),
    "objects": (array(dtype="object"), "arrays/x/dtype is 'object', not a type that zarr supports"),
    "dates": (array(dtype="datetime64[ns]"), "arrays/x/dtype is .*, not a type that zarr supports"),
    "key": (array(key_impl=3), "arrays/x/key_impl is 3, not a string"),
    "an array": (lambda meta: meta["arrays"].update(x=3), "arrays/x is 3, not an object"),
}  # fmt: skip
COMMITS = {
    "a list": (lambda commit: b"[1]", "COMMIT is not what was written: it is not an object"),
    "deep": (lambda commit: DEEP, "COMMIT is not what was written: it is nested too deeply"),
    "content": (
        lambda commit: format_lib.to_json(
            {"content": [1], "sha256": format_lib.checksum(format_lib.to_json([1]))}
        ),
        "COMMIT .* its checksum differs",
    ),
    "no step": (lambda commit: commit.pop("step") and None, "COMMIT .* step is missing"),
    "metrics": (lambda commit: commit.update(metrics="x"), "COMMIT .* metrics is 'x', not an"),
    "a metric": (lambda commit: commit.update(metrics={"a": []}), "COMMIT .* metrics is"),
    "time": (lambda commit: commit.update(time="x"), "COMMIT .* time is 'x', not a time"),
    "the year": (lambda commit: commit.update(time=1e300), "COMMIT .* time is 1e.300, not a time"),
    "bytes": (lambda commit: commit.update(bytes="9"), "COMMIT .* bytes is '9', not an integer"),
    "sha256": (lambda commit: commit.update(sha256=[1]), "COMMIT .* sha256 is .1., not an object"),
    "nonfinite": (lambda commit: commit.update(nonfinite=3), "COMMIT .* nonfinite is 3, not a list"),
}  # fmt: skip
CASES = [(case, None, message) for case, message in METAS.values()]
CASES += [(None, case, message) for case, message in COMMITS.values()]


@pytest.mark.parametrize(
    "meta,commit,message", CASES, ids=[*METAS, *(f"COMMIT {c}" for c in COMMITS)]
)
def test_what_is_forged_is_refused_by_name(tmp_path, whole, capsys, meta, commit, message):
    folder = forge(tmp_path / "forged", whole, meta, commit)
    file = tmp_path / "out.npz"
    for command in (["verify"], ["export", 1, file], ["ls"], ["show", 1], ["orbax", 1]):
        code = tool.main([command[0], str(folder), *map(str, command[1:])])
        said = "".join(capsys.readouterr())
        assert "Traceback" not in said
        if command[0] in ("verify", "export"):
            assert code == 1, said
            assert said.count("\n") <= 2 and re.search(message, said), said
    assert not file.exists()
    with pytest.raises(checkpoint.CheckpointError, match="float32|not what was written|version"):
        make_manager(folder).restore(STATE)


def test_names_that_lead_elsewhere(tmp_path, whole, capsys):
    folder = forge(tmp_path / "forged", whole, renamed("../../../evil"))
    assert tool.main(["export", str(folder), "1", str(tmp_path / "out.npz")]) == 1
    assert "'../../../evil' in" in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if "evil" in path.name]


@pytest.mark.parametrize("shape", [[HUGE], [1 << 20]])
def test_a_loss_scale_that_is_not_one_is_not_read(tmp_path, whole, capsys, asked, shape):
    scale = renamed("a/current_loss_scale", shape=shape, chunk_shape=[1])
    folder = forge(tmp_path / "forged", whole, scale)
    assert tool.main(["show", str(folder), "1"]) == 0 and not asked


def test_a_rule_for_the_best_that_is_none(tmp_path, whole):
    for number, options in enumerate(
        (
            [1],
            {"keep_best": 1},
            {"keep_best": "x", "best_metric": "error"},
            {"keep_best": 1, "best_metric": []},
        )
    ):
        change = lambda meta: meta.update(metadata={"config": {"checkpoint": options}})
        folder = forge(tmp_path / str(number), whole, change)
        (entry,) = checkpoint.read_catalog(folder).entries
        assert (entry.state, entry.best) == ("complete", None)


NAMES = [
    "../../evil", "/abs", "a//b", "file", "allow_pickle", "a/zarr.json", "a/c/0", "a\nb", "ü/日本", ".", "..",
    "a" * 300, "b/" * 600 + "b", "a/", "/", "x.npy", "x", "x.npy/y", "100%", "100%25", "a\\b", "%2E%2E", "%",
]  # fmt: skip


def test_arrays_of_any_name_are_exported_under_names_that_an_archive_can_have(tmp_path, capsys):
    state = {name: jnp.full(2, index) for index, name in enumerate(NAMES)}
    manager = make_manager(tmp_path / "in")
    manager.save(1, state, {})
    manager.close()
    file = tmp_path / "out" / "arrays.npz"
    file.parent.mkdir()
    assert tool.main(["export", str(tmp_path / "in"), "1", str(file), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["arrays"] == len(NAMES) and row["renamed"]["../../evil"] == "%2E%2E/%2E%2E/evil"
    assert not row["renamed"].keys() & {"file", "allow_pickle", "ü/日本", "x"}
    with np.load(file) as loaded:
        assert len(loaded.files) == len(NAMES)
        for name, value in state.items():
            np.testing.assert_array_equal(loaded[row["renamed"].get(name, name)], value)
    unpacked = tmp_path / "out" / "unpacked"
    with zipfile.ZipFile(file) as archive:
        archive.extractall(unpacked)
        names = archive.namelist()
    found = {
        path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*.npy") if path.is_file()
    }
    assert found == set(names) and len(names) == len(set(names))
    assert sorted(path.name for path in file.parent.iterdir()) == ["arrays.npz", "unpacked"]


def test_an_export_that_fails_leaves_no_part_of_itself(tmp_path, whole, capsys):
    folder = tmp_path / "damaged"
    shutil.copytree(whole, folder)
    largest = max(folder.rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    assert tool.main(["export", str(folder), "1", str(tmp_path / "out.npz")]) == 1
    assert (
        "is not what was written" in capsys.readouterr().err and not (tmp_path / "out.npz").exists()
    )


def strict(content):
    """JSON as others read it."""
    return json.loads(content, parse_constant=pytest.fail)


def test_numbers_that_json_has_not_are_saved_and_restored(tmp_path, capsys):
    folder = tmp_path / "nan"
    manager = make_manager(folder, keep_last=2)
    values = {"error": float("nan"), "most": float("inf"), "least": -float("inf"), "half": 0.5}
    metadata = {"config": {"clip": float("inf"), "rates": [1.0, float("nan")]}}
    manager.save(1, {"current_loss_scale": jnp.float32(jnp.nan)}, metadata, metrics=values)
    manager.wait()
    found = manager.metrics(1)
    assert str({name: found[name] for name in values}) == str(values)
    restored = manager.restore({"current_loss_scale": jnp.float32(0)})
    assert str(restored.metadata) == str(metadata)
    manager.close()
    for name in ("COMMIT", "meta.json"):
        (path,) = folder.glob(f"step_*/{name}")
        strict(path.read_bytes())
    assert tool.main(["show", str(folder), "1", "--json"]) == 0
    by_path = {row["path"]: row["value"] for row in strict(capsys.readouterr().out)}
    assert by_path["current_loss_scale"] is None and by_path["config"]["clip"] is None


def test_a_commit_of_before_with_a_bare_nan_is_read(tmp_path):
    folder = tmp_path / "old"
    manager = make_manager(folder)
    manager.save(1, {"x": jnp.ones(1)}, {}, metrics={"error": 0.5})
    manager.close()
    (path,) = folder.glob("step_*/COMMIT")
    content = format_lib.unseal(path.read_bytes()) | {"metrics": {"error": float("nan")}}
    dump = lambda value: (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
    old = dump({"content": content, "sha256": format_lib.checksum(dump(content))})
    assert b"NaN" in old
    path.write_bytes(old)
    manager = make_manager(folder)
    assert str(manager.metrics(1)) == "{'error': nan}"
    assert manager.restore({"x": jnp.zeros(1)}).step == 1


def test_verify_of_a_folder_without_checkpoints(tmp_path, capsys):
    assert tool.main(["verify", str(tmp_path)]) == 1
    assert f"There is no checkpoint in {tmp_path}; steps there: none" in capsys.readouterr().err


METADATA = {
    "no JSON": b"xx",
    "a list": b"[]",
    "deep": DEEP,
    "no tree": b"{}",
    "no arrays": b'{"tree_metadata": {}}',
    "no values": b'{"tree_metadata": {"x": {}}}',
    "no keys": b'{"tree_metadata": {"x": {"key_metadata": [], "value_metadata": {}}}}',
    "elsewhere": b'{"tree_metadata": {"x": {"key_metadata": [{"key": "../.."}], "value_metadata": {}}}}',
}


@pytest.mark.parametrize("content", METADATA.values(), ids=METADATA)
def test_a_forged_checkpoint_of_orbaxs(tmp_path, capsys, content):
    (tmp_path / "_METADATA").write_bytes(content)
    assert tool.main(["import", str(tmp_path), str(tmp_path / "new")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{tmp_path}/_METADATA is not a valid orbax file" in said
    assert not (tmp_path / "new").exists()


def test_an_array_of_orbaxs_that_memory_cannot_hold(tmp_path, capsys):
    key = '{"key_metadata": [{"key": "x"}], "value_metadata": {}}'
    (tmp_path / "_METADATA").write_text(
        f'{{"tree_metadata": {{"x": {key}}}, "use_ocdbt": false, "use_zarr3": false}}'
    )
    (tmp_path / "x").mkdir()
    zarr = {"zarr_format": 2, "shape": [HUGE], "chunks": [8], "dtype": "<f4", "compressor": None,
            "fill_value": 0, "filters": None, "order": "C", "dimension_separator": "."}  # fmt: skip
    (tmp_path / "x" / ".zarray").write_text(json.dumps(zarr))
    assert tool.main(["import", str(tmp_path), str(tmp_path / "new")]) == 1
    said = capsys.readouterr().err
    assert "17592186044416 bytes" in said and "holds them all in memory" in said
