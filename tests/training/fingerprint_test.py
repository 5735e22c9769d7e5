"""Tests that fingerprints of the state are equal on all layouts and differ after every
change.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xshard
from tests import rows, toy
from xshard import errors, loop
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard.base import hashing
from xshard.checkpoint import __main__ as tool
from xshard.checkpoint import array_reader
from xshard.checkpoint import arrays as arrays_lib
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import store as store_lib
from xshard.optimizers import trees
from xshard.run import preflight
from xshard.training import fingerprint
from xshard.training import state as state_lib

HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))


class Everything(toy.Wide):
    """An experiment whose state has all kinds of arrays."""

    def init(self, key, batch):
        return {
            "line": super().init(key, batch),
            "half": jnp.arange(7, dtype=jnp.bfloat16),
            "keys": jax.random.split(jax.random.key(3), 3),
            "truth": jnp.array([True, False]),
            "waves": jnp.arange(3, dtype=jnp.complex64),
            "small": jnp.arange(4, dtype=jnp.int4),
            "large": jnp.arange(1500, dtype=jnp.float32).reshape(30, 50),
            "games": xshard.PerExample(jnp.arange(2 * len(batch["x"])).reshape(-1, 2)),
        }


def fingerprints(
    devices, name="tests.training.fingerprint_test.Everything", mesh=None, **changes
):
    """Returns the fingerprints of an initial state by kind, and the fingerprint of the
    same state on the host.
    """
    config = toy.get_config()
    # 15 is not divisible by 2, 4 or 8 devices, so a sharded update pads the arrays.
    config.update_from_flattened_dict({"experiment": name, "hidden": 15, **changes})
    the_mesh = mesh_lib.make_mesh(devices=jax.devices()[:devices], **mesh or {})
    experiment = experiment_lib.load(name)(config)
    state = state_lib.init(experiment, the_mesh, 0, experiment.train_data())
    actual = jax.jit(fingerprint.program(experiment, the_mesh))(state)
    assert not np.any(actual.diverged)
    arrays = {}
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        arrays[trees.path_name(path)] = np.asarray(
            jax.random.key_data(x) if is_key else x
        )
    values = {kind: hashing.text(value) for kind, value in actual.values.items()}
    return values, hashing.of_arrays(arrays.items())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("devices", "changes", "mesh"),
    [
        (2, {}, {}),
        (8, {}, {}),
        (4, {"reduction.shard_update": True}, {}),
        (8, {"reduction.shard_update": True}, {"slices": 2}),
        (8, {}, {"model": 2}),
    ],
    ids=str,
)
def test_the_fingerprint_does_not_depend_on_the_layout(devices, changes, mesh):
    alone, host_total = fingerprints(1)
    assert hashing.total(list(alone.values())) == host_total
    assert list(alone) == ["other", "params", "slots"]
    # `games` counts from 0 on each device, so `other` differs between numbers of
    # devices and is not compared.
    assert (
        fingerprints(devices, mesh=mesh, **changes)[0].items()
        >= {kind: alone[kind] for kind in ("params", "slots")}.items()
    )
    plain = "tests.toy.Toy"
    assert fingerprints(devices, plain, mesh, **changes) == fingerprints(1, plain)


def test_the_host_computes_the_same_fingerprint_on_any_layout():
    for mesh in ({}, {"slices": 2}):
        values, host_total = fingerprints(
            8, mesh=mesh, **{"reduction.shard_update": True}
        )
        assert hashing.total(list(values.values())) == host_total


def test_a_group_has_its_own_fingerprint_on_any_number_of_devices():
    values, _ = fingerprints(8, mesh={"group_assignment": HALVES})
    pairs, _ = fingerprints(2, mesh={"group_assignment": ((0,), (1,))})
    assert (
        values["params"] == pairs["params"]
        and values["params"][0] != values["params"][1]
    )
    assert values["slots"][0] == values["slots"][1] == fingerprints(1)[0]["slots"]


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        "float16",
        "bfloat16",
        "int4",
        "float8_e4m3fn",
        "bool",
        "uint8",
        "complex64",
    ],
)
def test_every_change_changes_the_fingerprint(dtype):
    x = np.asarray(jnp.asarray(np.arange(60).reshape(3, 4, 5) % 7).astype(dtype))
    sums = [hashing.of_arrays([("x", x)])]
    for place in np.ndindex(x.shape):
        other = x.copy()
        other[place] = np.logical_not(x[place].astype(bool)).astype(x.dtype)
        sums.append(hashing.of_arrays([("x", other)]))
    assert sums.count(sums[0]) == 1
    # The order of the elements and the name of the array change the fingerprint, too.
    assert hashing.of_arrays([("x", x[:, ::-1])]) != sums[0]
    assert hashing.of_arrays([("y", x)]) != sums[0]


def test_the_signs_of_two_zeros_change_the_fingerprint():
    x = np.zeros(4, np.float32)
    y = np.array([0.0, -0.0, 0.0, -0.0], np.float32)
    assert hashing.of_arrays([("x", x)]) != hashing.of_arrays([("x", y)])
    assert hashing.of_arrays([("x", np.zeros((0, 3)))]) == "0" * 16


@pytest.mark.sample(1)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("experiment_class", [toy.Wide, toy.Poisoned])
def test_fingerprints_do_not_copy_the_state(devices, experiment_class):
    sizes = {}
    for every in (0, 1, 10):
        config = toy.get_config()
        config.update({"hidden": 50_000, "fingerprint_every_steps": every})
        mesh = mesh_lib.make_mesh(devices=jax.devices()[:devices])
        experiment = experiment_class(config)
        batches = preflight.train_batches(experiment, mesh)
        state = state_lib.init(experiment, mesh, 0, batches.example)
        program = (
            preflight.jitted_step(experiment, mesh)
            .lower(state, next(batches))
            .compile()
        )
        sizes[every] = program.memory_analysis().temp_size_in_bytes
    parameters = state_lib.learners(state)[""].params
    largest_array = max(x.nbytes for x in jax.tree.leaves(parameters))
    assert max(sizes[1], sizes[10]) < sizes[0] + largest_array, sizes


def config_of_a_run(**changes):
    config = toy.get_config()
    config.update_from_flattened_dict({"log_every_steps": 2, "steps": 8, **changes})
    return config.lock()


def logged(directory):
    """Returns the fingerprints in the training rows of a run, by step."""
    names = [fingerprint.PREFIX + kind for kind in fingerprint.KINDS]
    return {
        row["step"]: {name: row[name] for name in names if name in row}
        for row in rows.read(directory)
        if "loss" in row
    }


@pytest.mark.parametrize("groups", [(), HALVES])
def test_a_row_has_the_fingerprint_of_the_state_before_its_step(tmp_path, groups):
    config = config_of_a_run(group_assignment=groups, **{"checkpoint.every_steps": 1})
    config = config.copy_and_resolve_references()
    config.checkpoint.keep_last = 8
    assert loop.run(config.lock(), str(tmp_path), "") == 0
    actual = logged(tmp_path)
    assert list(actual) == [2, 4, 6, 8] and len({str(x) for x in actual.values()}) == 4
    assert list(actual[2]) == [fingerprint.PREFIX + kind for kind in fingerprint.KINDS]
    run = loop.Run(config.lock(), str(tmp_path))
    for step, values in actual.items():
        saved = run.checkpoints.manager.restore(run.target, step - 1).metadata[
            "fingerprint"
        ]
        assert {
            fingerprint.PREFIX + kind: value for kind, value in saved.items()
        } == values


def test_a_resumed_run_logs_the_same_fingerprints(tmp_path):
    for name, stops in (("whole", [8]), ("parts", [3, 6, 8])):
        for steps in stops:
            assert loop.run(config_of_a_run(steps=steps), str(tmp_path / name), "") == 0
    assert logged(tmp_path / "parts")[8] == logged(tmp_path / "whole")[8]


@pytest.mark.parametrize(("every", "steps"), [(0, []), (4, [4, 8])])
def test_fingerprint_every_steps_selects_the_rows(tmp_path, every, steps):
    config = config_of_a_run(fingerprint_every_steps=every)
    assert loop.run(config, str(tmp_path / "some"), "") == 0
    actual = logged(tmp_path / "some")
    assert [step for step, values in actual.items() if values] == steps
    assert loop.run(config_of_a_run(), str(tmp_path / "all"), "") == 0
    assert all(actual[step] == logged(tmp_path / "all")[step] for step in steps)
    states = [rows.final_state(tmp_path / name, config) for name in ("some", "all")]
    (of_some, of_all) = (
        [np.asarray(x) for x in jax.tree.leaves(x.experiment)] for x in states
    )
    np.testing.assert_equal(of_some, of_all)


def test_verify_checks_the_fingerprint_of_a_checkpoint(tmp_path, capsys):
    assert loop.run(config_of_a_run(), str(tmp_path), "") == 0
    command = ["verify", str(tmp_path / "checkpoints")]
    assert tool.main(command) == 0
    # A wrong fingerprint under correct checksums, as if the saved state had not been
    # the state on the devices.
    (attempt, *_) = format_lib.attempts(store_lib.Store(str(tmp_path / "checkpoints")))
    folder = tmp_path / "checkpoints" / attempt.folder
    meta = json.loads((folder / "meta.json").read_text())
    meta["metadata"]["fingerprint"]["params"] = "0" * 16
    content = json.dumps(meta, indent=1, sort_keys=True).encode() + b"\n"
    commit = format_lib.unseal((folder / "COMMIT").read_bytes())
    old = format_lib.checksum((folder / "meta.json").read_bytes())
    assert old in json.dumps(commit)
    commit = json.loads(json.dumps(commit).replace(old, format_lib.checksum(content)))
    (folder / "meta.json").write_bytes(content)
    (folder / "COMMIT").write_bytes(format_lib.seal(commit))
    assert tool.main(command) == 1
    assert "the fingerprint of its arrays is" in capsys.readouterr().out


@pytest.mark.parametrize("groups", [(), HALVES])
def test_chunks_in_each_others_places_are_detected(tmp_path, capsys, groups):
    config = config_of_a_run(
        experiment="tests.toy.Wide", hidden=300, group_assignment=groups
    )
    assert loop.run(config, str(tmp_path), "") == 0
    command = ["verify", str(tmp_path)]
    assert tool.main(command) == 0
    # Each chunk is followed by its own checksum, which is right in any place. A disk
    # that loses writes may return such chunks: an earlier checkpoint's, of the same
    # layout.
    attempt = format_lib.committed(store_lib.Store(tmp_path / "checkpoints"))[-1]
    metas = format_lib.read_array_metas(attempt)
    slots = {path: metas[path] for path in metas if path.endswith("linear_0/w")}
    assert len(slots) == 3
    chunks = []
    for path, x in array_reader.read_arrays(attempt, slots):
        shape = metas[path].chunk_shape
        chunks.append(arrays_lib.encode(x[tuple(map(slice, shape))], shape))
    (file,) = (tmp_path / "checkpoints" / attempt.folder).glob("p0/d/*")
    content = file.read_bytes()
    first, second, _ = map(content.index, chunks)
    exchanged = bytearray(content)
    exchanged[first : first + len(chunks[0])] = chunks[1]
    exchanged[second : second + len(chunks[0])] = chunks[0]
    file.write_bytes(exchanged)
    assert tool.main(command) == 1
    assert "the fingerprint of its arrays is" in capsys.readouterr().out
    longer = config.copy_and_resolve_references()
    longer.steps = 12
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(errors.UserError, match="differs from the saved state"):
        loop.run(longer.lock(), str(tmp_path), "")
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
