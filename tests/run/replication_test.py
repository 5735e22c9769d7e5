"""Tests that replicas are compared in each step and before each save."""

import os
import subprocess
import sys

import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest

import xshard
from tests import flips, forks, rows, toy, winged
from xshard import errors
from xshard import experiment as experiment_lib
from xshard.checkpoint import manager as manager_lib
from xshard.optimizers import trees
from xshard.pod import request
from xshard.run import replication

HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))
VARIANTS = [
    {},
    {"group_assignment": HALVES, "reduction.shard_update": True, "hidden": 20},
    {"slices": 2},
    {"model_parallel": 2},
]

LOGICAL = {
    "logical_replicas": 16,
    "reduction.arithmetic": "exact",
    "eval_batch_size": 16,
}


class Believed(toy.Wide):
    """Declares equal what is not: a value of its state, or one that its rule adds."""

    def init(self, key, batch):
        return {"line": super().init(key, batch), "seen": jnp.zeros(3)}

    def train_step(self, state, batch, key):
        line, outcome = super().train_step(state["line"], batch, key)
        seen = state["seen"].at[1].add(jnp.sum(batch["x"]))
        if self.config.lies != "state":
            seen = jax.lax.pmean(seen, ("slice", "replica"))
        seen = xshard.equal_on_replicas(seen)
        return {"line": line, "seen": seen}, {"line": outcome}

    def eval_step(self, state, batch, key):
        return super().eval_step(state["line"], batch, key)

    def predict(self, state, batch):
        return super().predict(state["line"], batch)

    def optimizer(self):
        def add_index(updates, params):
            del params
            if hk.running_init():
                return updates
            index = xshard.equal_on_replicas(jax.lax.axis_index(("slice", "replica")))
            return jax.tree.map(lambda x: x + index.astype(x.dtype), updates)

        rule = (
            optax.stateless(add_index)
            if self.config.lies == "rule"
            else optax.identity()
        )
        return xshard.CrossShardOptimizer(
            optax.chain(rule, optax.trace(0.9), optax.scale(-0.01)),
            slice_axis_name="slice",
            **self.config.reduction,
        )


def config(**changes):
    new_config = toy.get_config()
    new_config.experiment = "tests.run.replication_test.Believed"
    new_config.lies = ""
    new_config.checkpoint.best_metric = "error"
    new_config.update_from_flattened_dict({"steps": 3, "hidden": 16, **changes})
    return new_config.lock()


@pytest.mark.sample(2)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(
    ("lies", "part"),
    [
        ("state", "different bits of 'seen', which Believed.train_step"),
        ("rule", "line/opt_state/"),
    ],
)
def test_parted_state_is_named_after_the_first_step(tmp_path, variant, lies, part):
    with pytest.raises(errors.UserError) as e:
        winged.run(config(lies=lies, **variant), str(tmp_path), "")
    assert "After step 1 the replicas" in str(e.value) and part in str(e.value)
    assert not list(tmp_path.glob("checkpoints/step_*"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_run_with_equal_replicas_continues(tmp_path, variant):
    assert winged.run(config(**variant), str(tmp_path), "") == 0


@pytest.mark.parametrize("every", [0, 2])
def test_parted_replicas_are_not_saved_even_if_steps_are_rarely_compared(
    tmp_path, every
):
    changes = {"fingerprint_every_steps": every, "checkpoint.every_steps": 1}
    with pytest.raises(
        replication.ReplicaDivergenceError,
        match="After step 1 the replicas .* of 'seen', which",
    ):
        winged.run(config(lies="state", **changes), str(tmp_path), "")
    assert not list(tmp_path.glob("checkpoints/step_*"))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "kind", "variant"),
    [
        ("params/linear/w", "params", {}),
        ("params/linear/w", "params", {"group_assignment": HALVES}),
        ("params/linear/w", "params", {"slices": 2, "reduction.shard_update": True}),
        ("opt_state/adam/0/mu/linear/w", "slots", {}),
        ("net_state/~/mean", "net_state", {}),
        ("params/linear/w", "params", {"fingerprint_every_steps": 4}),
        ("params/linear/w", "params", LOGICAL),
    ],
)
def test_a_flipped_bit_is_named_within_two_steps(
    tmp_path, monkeypatch, name, kind, variant
):
    new_config = toy.get_config()
    new_config.update_from_flattened_dict(
        {**variant, "checkpoint.every_steps": 100, "log_every_steps": 1}
    )
    flips.after(monkeypatch, [4], name, 5)
    run = winged.Run(new_config.lock(), str(tmp_path))
    with run.opened(), pytest.raises(replication.ReplicaDivergenceError) as e:
        run.train()
    of_group = " of group 1" if "group_assignment" in variant else ""
    number = 1 if of_group else 5
    message = f"{kind}: replica {number}{of_group} (device 5 of process 0) differs from"
    # The number of the first step after the flip that compares the state it begins
    # with.
    compared = (
        -(-5 // new_config.fingerprint_every_steps) * new_config.fingerprint_every_steps
    )
    assert f"After step {compared - 1} the replicas" in str(e.value)
    assert message in str(e.value)
    # At most two later steps may have been made by then. No row of a step after them is
    # written.
    assert run.step <= compared + 2


@pytest.mark.sample(0.4)
@pytest.mark.wing("roll_backs")
def test_processes_compare_their_replicas(tmp_path):
    (tmp_path / "config.py").write_text(
        "from tests.run import replication_test\ndef get_config():\n    changes = "
        "{'on_divergence': 'roll_back', 'roll_back.limit': 1}\n    return "
        "replication_test.config(lies='state', "
        "**changes).copy_and_resolve_references()\n"
    )
    command = [
        sys.executable,
        "-m",
        "launch",
        "--num_processes=2",
        "--cpu_devices=2",
        "--",
        sys.executable,
        "-m",
        "xshard.main",
        f"--config={tmp_path}/config.py",
        f"--workdir={tmp_path}/run",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": forks.python_path(),
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode, done.stdout
    # Both processes roll back to the first state, and their replicas diverge again.
    message = done.stdout + done.stderr
    assert "'seen', which" in message
    assert "with the same data (roll-back 1 of at most 1)" in message
    assert (
        "The run has rolled back 1 time, the most that roll_back.limit allows: (1) "
        "After step 1 the" in message
    )


def saved_at_5(directory, **changes):
    """Trains until a stop at step 5, which saves the state; returns the config."""
    new_config = toy.get_config()
    new_config.update_from_flattened_dict(
        {"hidden": 15, "log_every_steps": 1, "steps_per_dispatch": 1, **changes}
    )
    watch = rows.ScriptedWatch(5, request.STOP)
    assert winged.run(new_config.lock(), str(directory), "", None, watch) == 42
    return new_config.copy_and_resolve_references()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The directory and the config of a run that a stop ended at step 5."""
    directory = tmp_path_factory.mktemp("stopped")
    return directory, saved_at_5(directory).lock()


def change_restored(monkeypatch, name, change):
    """Changes an array of the state that each later restore returns."""
    restore = manager_lib.Manager.restore

    def restored(self, *args, **kwargs):
        read = restore(self, *args, **kwargs)
        leaf = lambda path, x: change(x) if trees.path_name(path) == name else x
        return read._replace(state=jax.tree_util.tree_map_with_path(leaf, read.state))

    monkeypatch.setattr(manager_lib.Manager, "restore", restored)


@pytest.mark.parametrize(
    ("name", "message", "change"),
    [
        (
            "params/linear/w",
            "the parameters (fingerprint/params is ",
            lambda x: x.at[2, 0].add(1e-6),
        ),
        (
            "opt_state/adam/0/nu/linear/w",
            "the optimizer slots, with",
            lambda x: x.at[1, 0].add(1),
        ),
        (
            "opt_state/dynamic_loss_scale/current_loss_scale",
            "counts and loss scale",
            lambda x: 2 * x,
        ),
        (
            "net_state/~/mean",
            "the state of the networks (fingerprint/net_state",
            lambda x: -x,
        ),
        (
            "rng",
            "the step, the key and",
            lambda x: jax.random.clone(jax.random.fold_in(x, 1)),
        ),
    ],
)
def test_a_restored_state_that_differs_is_named_and_not_trained(
    stopped, monkeypatch, name, message, change
):
    directory, new_config = stopped
    before = rows.read(directory)
    change_restored(monkeypatch, name, change)
    with pytest.raises(errors.UserError) as e:
        winged.run(new_config, str(directory), "")
    assert message in str(e.value) and str(e.value).count("fingerprint/") == 1
    assert f"verify {directory}/checkpoints 5'" in str(e.value)
    assert rows.read(directory) == before


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "changes",
    [{"slices": 2}, {"reduction.shard_update": True}, {"devices": 2}],
    ids=str,
)
def test_a_state_restored_to_another_layout_equals_the_saved_one(
    tmp_path, monkeypatch, changes
):
    new_config = saved_at_5(tmp_path, **{"reduction.shard_update": "slices" in changes})
    devices = jax.devices()[: changes.pop("devices", 8)]
    mesh_of = experiment_lib.mesh_of
    monkeypatch.setattr(
        experiment_lib, "mesh_of", lambda config: mesh_of(config, devices)
    )
    new_config.update_from_flattened_dict(changes)
    run = winged.Run(new_config.lock(), str(tmp_path))
    seen = []
    fingerprints_of = run._replica_check.fingerprints_of
    monkeypatch.setattr(
        run._replica_check,
        "fingerprints_of",
        lambda state: seen.append(state) or fingerprints_of(state),
    )
    with run.opened():
        state = run._begin()
    assert run.mesh.size == len(devices) and seen == [state]
