"""Tests that descriptions which no version could have written are refused by name,
although their checksums are correct.
"""

import json
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoint import harness
from tests.checkpoint.harness import make_manager
from xshard import checkpoint
from xshard.checkpoint import __main__ as tool
from xshard.checkpoint import format as format_lib

DEEP = b"[" * 100_000
STATE = {"params": {"w": jnp.arange(4.0)}, "x": jnp.ones(3), "large": jnp.ones(300_000)}


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """Returns the folder of an intact checkpoint of STATE."""
    folder = tmp_path_factory.mktemp("whole") / "checkpoints"
    manager = make_manager(folder)
    manager.save(1, STATE, {"a": 1}, metrics={"error": 1.0})
    manager.close()
    return folder


def forge(folder, intact, change_meta=None, change_commit=None):
    """Copies a checkpoint with a changed meta.json or COMMIT and correct checksums;
    returns the copy's folder.
    """
    shutil.copytree(intact, folder)
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


def changed(**values):
    """Returns a change of values in meta.json or COMMIT."""
    return lambda content: content.update(values)


def without(key):
    """Returns a change that removes a value from meta.json or COMMIT."""

    def change(content):
        del content[key]

    return change


def array(path="x", **changes):
    """Returns a change of an array's entry in meta.json."""
    return lambda meta: meta["arrays"][path].update(changes)


def renamed(path, **changes):
    """Returns a change that moves the array 'x' to another path."""

    def change(meta):
        entry = meta["arrays"].pop("x")
        meta["arrays"][path] = entry | changes

    return change


def as_infinity(meta):
    """Returns meta.json in which the metadata have the form of a number."""
    return json.dumps(meta | {"metadata": {"not finite": "inf"}}).encode()


HUGE = 1 << 42
NOT_WRITTEN = "is not what was written"
METAS = {
    "a list": (
        lambda meta: b"[1, 2]",
        f"meta.json {NOT_WRITTEN}: it is not an object",
    ),
    "deep": (lambda meta: DEEP, f"meta.json {NOT_WRITTEN}: it is nested too deeply"),
    "twice": (
        lambda meta: b'{"version": 2, "version": 2}',
        "meta.json .* it has a duplicate key: 'version'",
    ),
    "no version": (without("version"), "meta.json .* missing required field `version`"),
    "a version to come": (changed(version=7), "meta.json has format version 7"),
    "arrays": (changed(arrays=[1]), r"meta.json .* - at `\$\.arrays`: \[1\]"),
    "metadata": (changed(metadata=[1]), r"meta.json .* - at `\$\.metadata`: \[1\]"),
    "infinity": (as_infinity, r"meta.json .* got `float` - at `\$\.metadata`: inf"),
    "a text": (
        array(shape="abc"),
        r"meta.json .* `array`, got `str` - at `\$\.arrays\[\.\.\.\]\.shape`: ",
    ),
    "objects": (
        array(dtype="object"),
        r"'object' is not a type that zarr supports - at `\$\.arrays\[\.\.\.\]`",
    ),
    "dates": (
        array(dtype="datetime64[ns]"),
        r"'datetime64\[ns\]' is not a type that zarr supports",
    ),
    "key": (array(key_impl=3), r"`int` - at `\$\.arrays\[\.\.\.\]\.key_impl`: "),
    "an array": (
        lambda meta: meta["arrays"].update(x=3),
        r"`object`, got `int` - at `\$\.arrays\[\.\.\.\]`: ",
    ),
}
COMMITS = {
    "a list": (lambda commit: b"[1]", f"COMMIT {NOT_WRITTEN}: it is not an object"),
    "deep": (lambda commit: DEEP, f"COMMIT {NOT_WRITTEN}: it is nested too deeply"),
    "content": (
        lambda commit: format_lib.to_json(
            {"content": [1], "sha256": format_lib.checksum(format_lib.to_json([1]))}
        ),
        "COMMIT .* its checksum differs",
    ),
    "no step": (without("step"), "COMMIT .* missing required field `step`"),
    "metrics": (changed(metrics="x"), r"COMMIT .* - at `\$\.metrics`: 'x'"),
    "a metric": (
        changed(metrics={"a": []}),
        r"COMMIT .* got `array` - at `\$\.metrics\[\.\.\.\]`: {'a': \[\]}",
    ),
    "time": (changed(time="x"), r"COMMIT .* `float`, got `str` - at `\$\.time`: 'x'"),
    "the year": (
        changed(time=1e300),
        r"COMMIT .* <= 253402300799.0 - at `\$\.time`: 1e.300",
    ),
    "bytes": (changed(bytes="9"), r"COMMIT .* `int`, got `str` - at `\$\.bytes`: '9'"),
    "sha256": (changed(sha256=[1]), r"COMMIT .* - at `\$\.sha256`: \[1\]"),
    "nonfinite": (changed(nonfinite=3), r"COMMIT .* - at `\$\.nonfinite`: 3"),
}
CASES = [(case, None, message) for case, message in METAS.values()]
CASES += [(None, case, message) for case, message in COMMITS.values()]


@pytest.mark.parametrize(
    "meta,commit,message", CASES, ids=[*METAS, *(f"COMMIT {c}" for c in COMMITS)]
)
def test_a_forged_description_is_refused_by_name(
    tmp_path, intact, capsys, meta, commit, message
):
    folder = forge(tmp_path / "forged", intact, meta, commit)
    for command in (["verify"], ["ls"], ["show", 1], ["orbax", 1]):
        # `ls`, `show` and `orbax` may succeed, but they must not crash.
        code = tool.main([command[0], str(folder), *map(str, command[1:])])
        printed = "".join(capsys.readouterr())
        assert "Traceback" not in printed
        if command[0] == "verify":
            assert code == 1, printed
            assert printed.count("\n") <= 2 and re.search(message, printed), printed
    with pytest.raises(
        checkpoint.CheckpointError, match="not what was written|version"
    ):
        make_manager(folder).restore(STATE)


def test_what_passes_its_checksum_is_never_marked_as_damaged(tmp_path, intact):
    for number, changes in enumerate(((as_infinity, None), (None, without("step")))):
        folder = forge(tmp_path / str(number), intact, *changes)
        manager = make_manager(folder)
        manager.acquire()
        with pytest.raises(checkpoint.CheckpointError, match="not of a version"):
            manager.restore(STATE)
        manager.close()
        assert not list(folder.rglob("DAMAGED"))


def test_a_path_that_leads_out_of_the_checkpoint_is_refused(tmp_path, intact, capsys):
    folder = forge(tmp_path / "forged", intact, renamed("../../../evil"))
    assert tool.main(["verify", str(folder)]) == 1
    assert "'../../../evil' in" in capsys.readouterr().out
    assert not [path for path in tmp_path.rglob("*") if "evil" in path.name]


def test_show_does_not_read_a_loss_scale_that_is_not_a_scalar(tmp_path, intact):
    scale = renamed("a/current_loss_scale", shape=[HUGE], chunk_shape=[HUGE])
    folder = forge(tmp_path / "forged", intact, scale)
    assert tool.main(["show", str(folder), "1"]) == 0


def test_an_invalid_rule_for_the_best_step_is_ignored(tmp_path, intact):
    for number, options in enumerate(
        (
            [1],
            {"keep_best": 1},
            {"keep_best": "x", "best_metric": "error"},
            {"keep_best": 1, "best_metric": []},
        )
    ):
        change = lambda meta: meta.update(metadata={"config": {"checkpoint": options}})
        folder = forge(tmp_path / str(number), intact, change)
        (entry,) = checkpoint.read_catalog(folder).entries
        assert (entry.state, entry.best) == ("complete", None)


NAMES = (
    *("../../evil", "/abs", "a//b", "file", "allow_pickle", "a/zarr.json", "a/c/0"),
    *("a\nb", "ü/日本", ".", "..", "a" * 300, "b/" * 600 + "b", "a/", "/", "x.npy"),
    *("x", "x.npy/y", "100%", "100%25", "a\\b", "%2E%2E", "%"),
)


def test_arrays_of_any_name_are_saved_and_read(tmp_path):
    state = {name: jnp.full(2, index) for index, name in enumerate(NAMES)}
    manager = make_manager(tmp_path)
    manager.save(1, state, {})
    manager.close()
    found = harness.read_all(tmp_path, 1)
    assert found.keys() == state.keys()
    for name, value in state.items():
        np.testing.assert_array_equal(found[name], value)


def strict(content):
    """Parses JSON, and fails on NaN and infinities as strict parsers do."""
    return json.loads(content, parse_constant=pytest.fail)


def test_nan_and_infinities_are_saved_as_valid_json_and_restored(tmp_path, capsys):
    folder = tmp_path / "nan"
    manager = make_manager(folder, keep_last=2)
    values = {
        "error": float("nan"),
        "most": float("inf"),
        "least": -float("inf"),
        "half": 0.5,
    }
    metadata = {"config": {"clip": float("inf"), "rates": [1.0, float("nan")]}}
    manager.save(
        1, {"current_loss_scale": jnp.float32(jnp.nan)}, metadata, metrics=values
    )
    manager.wait()
    (entry,) = checkpoint.read_catalog(manager.store).entries
    actual = entry.metrics
    assert str({name: actual[name] for name in values}) == str(values)
    restored = manager.restore({"current_loss_scale": jnp.float32(0)})
    assert str(restored.metadata) == str(metadata)
    manager.close()
    for name in ("COMMIT", "meta.json"):
        (path,) = folder.glob(f"step_*/{name}")
        strict(path.read_bytes())
    assert tool.main(["show", str(folder), "1", "--json"]) == 0
    by_path = {row["path"]: row["value"] for row in strict(capsys.readouterr().out)}
    assert by_path["current_loss_scale"] is None and by_path["config"]["clip"] is None


def test_verify_fails_on_a_folder_without_checkpoints(tmp_path, capsys):
    assert tool.main(["verify", str(tmp_path)]) == 1
    assert (
        f"There is no checkpoint in {tmp_path}; steps there: none"
        in capsys.readouterr().err
    )


METADATA = {
    "no JSON": b"xx",
    "a list": b"[]",
    "deep": DEEP,
    "no tree": b"{}",
    "no arrays": b'{"tree_metadata": {}}',
    "no values": b'{"tree_metadata": {"x": {}}}',
    "no keys": b'{"tree_metadata": {"x": {"key_metadata": [], "value_metadata": {}}}}',
    "elsewhere": b'{"tree_metadata": {"x": {"key_metadata": [{"key": "../.."}], '
    b'"value_metadata": {}}}}',
}


@pytest.mark.parametrize("content", METADATA.values(), ids=METADATA)
def test_a_forged_orbax_checkpoint_is_refused_by_name(tmp_path, capsys, content):
    (tmp_path / "_METADATA").write_bytes(content)
    assert tool.main(["import", str(tmp_path), str(tmp_path / "new")]) == 1
    printed = capsys.readouterr().err
    assert (
        printed.count("\n") == 1
        and f"{tmp_path}/_METADATA is not a valid orbax file" in printed
    )
    assert not (tmp_path / "new").exists()


def test_an_orbax_array_that_exceeds_memory_is_refused(tmp_path, capsys):
    key = '{"key_metadata": [{"key": "x"}], "value_metadata": {}}'
    (tmp_path / "_METADATA").write_text(
        f'{{"tree_metadata": {{"x": {key}}}, "use_ocdbt": false, "use_zarr3": false}}'
    )
    (tmp_path / "x").mkdir()
    zarr = {
        "zarr_format": 2,
        "shape": [HUGE],
        "chunks": [8],
        "dtype": "<f4",
        "compressor": None,
        "fill_value": 0,
        "filters": None,
        "order": "C",
        "dimension_separator": ".",
    }
    (tmp_path / "x" / ".zarray").write_text(json.dumps(zarr))
    assert tool.main(["import", str(tmp_path), str(tmp_path / "new")]) == 1
    printed = capsys.readouterr().err
    assert "17592186044416 bytes" in printed and "holds them all in memory" in printed
