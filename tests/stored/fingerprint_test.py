"""Fingerprints of the state: the same on all layouts, and another for each change."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xshard
from tests import rows, toy
from xshard import experiment as experiment_lib
from xshard import loop
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard.checkpoint import __main__ as tool
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import store as store_lib
from xshard.optimizers import trees
from xshard.run import preflight
from xshard.stored import fingerprint, hashing, storage

HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))


class Everything(toy.Wide):
    """A state of all kinds of arrays."""

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


def fingerprints(devices, name="tests.stored.fingerprint_test.Everything", mesh=None, **changes):
    """Those of a first state, and of the same state on the host."""
    config = toy.get_config()
    # 15 divides by no number of devices: with a sharded update its arrays are padded.
    config.update_from_flattened_dict({"experiment": name, "hidden": 15, **changes})
    the_mesh = mesh_lib.make_mesh(devices=jax.devices()[:devices], **mesh or {})
    experiment = experiment_lib.load(name)(config)
    state = state_lib.init(experiment, the_mesh, 0, experiment.train_data())
    found = jax.jit(fingerprint.program(experiment, the_mesh))(state)
    assert not np.any(found.parted)
    whole = storage.Storage(experiment, the_mesh).to_whole(state)
    arrays = {}
    for path, x in jax.tree_util.tree_leaves_with_path(whole):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        arrays[trees.path_name(path)] = np.asarray(jax.random.key_data(x) if is_key else x)
    values = {kind: hashing.text(value) for kind, value in found.values.items()}
    return values, hashing.of_arrays(arrays.items())


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
def test_no_layout_shows(devices, changes, mesh):
    alone, of_host = fingerprints(1)
    assert hashing.total(list(alone.values())) == of_host
    assert list(alone) == ["other", "params", "slots"]
    # The games of 16 examples are as many on any number of devices, but each begins at 0: another state.
    assert (
        fingerprints(devices, mesh=mesh, **changes)[0].items()
        >= {kind: alone[kind] for kind in ("params", "slots")}.items()
    )
    plain = "tests.toy.Toy"
    assert fingerprints(devices, plain, mesh, **changes) == fingerprints(1, plain)


def test_on_any_layout_that_of_the_host_is_the_same():
    for mesh in ({}, {"slices": 2}):
        values, of_host = fingerprints(8, mesh=mesh, **{"reduction.shard_update": True})
        assert hashing.total(list(values.values())) == of_host


def test_a_group_has_that_of_a_run_of_one_group_with_its_state():
    values, _ = fingerprints(8, mesh={"group_assignment": HALVES})
    pairs, _ = fingerprints(2, mesh={"group_assignment": ((0,), (1,))})
    assert values["params"] == pairs["params"] and values["params"][0] != values["params"][1]
    assert values["slots"][0] == values["slots"][1] == fingerprints(1)[0]["slots"]


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bfloat16", "int4", "float8_e4m3fn", "bool", "uint8", "complex64"]
)  # fmt: skip
def test_each_change_is_noticed(dtype):
    x = np.asarray(jnp.asarray(np.arange(60).reshape(3, 4, 5) % 7).astype(dtype))
    sums = [hashing.of_arrays([("x", x)])]
    for place in np.ndindex(x.shape):
        other = x.copy()
        other[place] = np.logical_not(x[place].astype(bool)).astype(x.dtype)
        sums.append(hashing.of_arrays([("x", other)]))
    assert sums.count(sums[0]) == 1
    # Nor does an exchange of two go unnoticed, nor another name.
    assert hashing.of_arrays([("x", x[:, ::-1])]) != sums[0]
    assert hashing.of_arrays([("y", x)]) != sums[0]


def test_signs_of_two_and_of_zero_are_noticed():
    x = np.zeros(4, np.float32)
    y = np.array([0.0, -0.0, 0.0, -0.0], np.float32)
    assert hashing.of_arrays([("x", x)]) != hashing.of_arrays([("x", y)])
    assert hashing.of_arrays([("x", np.zeros((0, 3)))]) == "0" * 16


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("made", [toy.Wide, toy.Poisoned])
def test_they_do_not_have_the_state_copied(devices, made):
    sizes = {}
    for every in (0, 1, 10):
        config = toy.get_config()
        config.update({"hidden": 50_000, "fingerprint_every_steps": every})
        mesh = mesh_lib.make_mesh(devices=jax.devices()[:devices])
        experiment = made(config)
        batches = preflight.train_batches(experiment, mesh)
        state = state_lib.init(experiment, mesh, 0, batches.example)
        program = preflight.jitted_step(experiment, mesh).lower(state, next(batches)).compile()
        sizes[every] = program.memory_analysis().temp_size_in_bytes
    parameters = state_lib.learners(state)[""].params
    of_one = max(x.nbytes for x in jax.tree.leaves(parameters))
    assert max(sizes[1], sizes[10]) < sizes[0] + of_one, sizes


def config_of_a_run(**changes):
    config = toy.get_config()
    config.update_from_flattened_dict({"log_every_steps": 2, "steps": 8, **changes})
    return config.lock()


def logged(directory):
    names = [fingerprint.PREFIX + kind for kind in fingerprint.KINDS]
    return {
        row["step"]: {name: row[name] for name in names if name in row}
        for row in rows.read(directory)
        if "loss" in row
    }


@pytest.mark.parametrize("groups", [(), HALVES])
def test_a_row_has_that_of_the_state_that_its_step_began_with(tmp_path, groups):
    config = config_of_a_run(group_assignment=groups, **{"checkpoint.every_steps": 1})
    config = config.copy_and_resolve_references()
    config.checkpoint.keep_last = 8
    assert loop.run(config.lock(), str(tmp_path), "") == 0
    found = logged(tmp_path)
    assert list(found) == [2, 4, 6, 8] and len({str(x) for x in found.values()}) == 4
    assert list(found[2]) == [fingerprint.PREFIX + kind for kind in fingerprint.KINDS]
    run = loop.Run(config.lock(), str(tmp_path))
    for step, values in found.items():
        saved = run.checkpoints.manager.restore(run._target, step - 1).metadata["fingerprint"]
        assert {fingerprint.PREFIX + kind: value for kind, value in saved.items()} == values


def test_a_run_that_goes_on_logs_the_same(tmp_path):
    for name, stops in (("whole", [8]), ("parts", [3, 6, 8])):
        for steps in stops:
            assert loop.run(config_of_a_run(steps=steps), str(tmp_path / name), "") == 0
    assert logged(tmp_path / "parts")[8] == logged(tmp_path / "whole")[8]


@pytest.mark.parametrize(("every", "steps"), [(0, []), (4, [4, 8])])
def test_some_steps_have_one(tmp_path, every, steps):
    config = config_of_a_run(fingerprint_every_steps=every)
    assert loop.run(config, str(tmp_path / "some"), "") == 0
    found = logged(tmp_path / "some")
    assert [step for step, values in found.items() if values] == steps
    assert loop.run(config_of_a_run(), str(tmp_path / "all"), "") == 0
    assert all(found[step] == logged(tmp_path / "all")[step] for step in steps)
    states = [rows.final_state(tmp_path / name, config) for name in ("some", "all")]
    (of_some, of_all) = ([np.asarray(x) for x in jax.tree.leaves(x.experiment)] for x in states)
    np.testing.assert_equal(of_some, of_all)


def test_a_checkpoint_is_verified_by_it(tmp_path, capsys):
    assert loop.run(config_of_a_run(), str(tmp_path), "") == 0
    command = ["verify", str(tmp_path / "checkpoints")]
    assert tool.main(command) == 0
    # As if what was saved had not been what the devices held.
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
