"""Faults of update rules, groups and configs that were found in use, and must not come
back.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xshard
from tests import toy
from xshard import experiment as experiment_lib
from xshard import loop
from xshard import state as state_lib


class RulesNoisy(toy.Toy):
    """Adds noise to its gradients, from a key of its rule or network."""

    def forward(self, batch, *, is_training):
        if self.config.noise == "network":
            hk.get_state("table", [3], init=_rules_table)
        return super().forward(batch, is_training=is_training)

    def optimizer(self):
        key = {"seed": 7, "typed": jax.random.key(7)}.get(self.config.noise, 7)
        noise = optax.add_noise(eta=0.1, gamma=0.0, key=key)
        if self.config.noise == "plain":
            noise = _rules_noise(lambda: jax.random.PRNGKey(7))
        elif self.config.noise == "constant":
            noise = _rules_noise(lambda: np.array([0, 7], np.uint32))
        elif self.config.noise == "network":
            noise = optax.identity()
        rule = optax.chain(noise, optax.sgd(0.1))
        return xshard.CrossShardOptimizer(rule, **self.config.reduction)


def _rules_table(shape, dtype):
    return jax.random.normal(jax.random.key(3), shape, dtype)


def _rules_noise(make_key):
    """Returns noise from a key that is two plain numbers."""

    def update(grads, key, params=None):
        del params
        key, draw = jax.random.split(key)
        add = lambda g: g + 0.1 * jax.random.normal(draw, g.shape, g.dtype)
        return jax.tree.map(add, grads), key

    return optax.GradientTransformation(lambda params: make_key(), update)


def _rules_config(experiment, **values):
    config = toy.get_config()
    config.experiment = f"tests.found_faults_rules_test.{experiment}"
    config.update(values)
    return config


def _rules_keys(config):
    """Returns the plain numbers of the rule's keys in a first state, by group."""
    mesh = xshard.make_mesh(config.group_assignment, devices=jax.devices()[:4])
    experiment = RulesNoisy(config)
    state = state_lib.init(experiment, mesh, 0, experiment.train_data())
    found = []
    for x in jax.tree.leaves(state.experiment.opt_state):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            found.append(np.asarray(jax.random.key_data(x)))
        elif x.dtype == jnp.uint32:
            found.append(np.asarray(x))
    (keys,) = found
    return keys


@pytest.mark.parametrize("noise", ["seed", "typed", "plain"])
def test_30_groups_do_not_share_the_keys_of_a_rule(noise):
    config = _rules_config("RulesNoisy", noise=noise, group_assignment=((0, 1), (2, 3)))
    first, second = _rules_keys(config)
    assert first.tolist() != second.tolist()


def test_30_one_group_keeps_the_key_that_a_rule_was_given():
    config = _rules_config("RulesNoisy", noise="seed", group_assignment=((0, 1, 2, 3),))
    expected = jax.random.key_data(jax.random.key(7))
    np.testing.assert_array_equal(_rules_keys(config), expected)


@pytest.mark.parametrize("noise", ["constant", "network"])
def test_30_what_groups_share_is_said(tmp_path, capsys, noise):
    config = _rules_config(
        "RulesNoisy", noise=noise, group_assignment=((0, 1), (2, 3)), steps=1
    )
    config.model_parallel = 2
    assert loop.run(config, str(tmp_path), "") == 0
    out = capsys.readouterr().out
    assert "warning: all groups begin with the same " in out
    shared = {"constant": "opt_state/", "network": "net_state/"}[noise]
    assert f"begin with the same {shared}" in out


def test_30_an_older_run_whose_groups_share_a_key_resumes_and_says_so(
    tmp_path, capsys, monkeypatch
):
    config = _rules_config(
        "RulesNoisy", noise="seed", group_assignment=((0, 1, 2, 3), (4, 5, 6, 7))
    )
    config.steps = 2
    with monkeypatch.context() as patch:
        patch.setattr(state_lib, "random_alike", lambda *_: (frozenset(), []))
        assert loop.run(config, str(tmp_path), "") == 0
    assert "hold the same random keys" not in capsys.readouterr().out
    config.steps = 4
    assert loop.run(config, str(tmp_path), "") == 0
    out = capsys.readouterr().out
    assert "warning: all groups hold the same random keys opt_state/" in out
    # A new run has nothing to say.
    assert loop.run(config, str(tmp_path / "new"), "") == 0
    assert "random key" not in capsys.readouterr().out


def test_07_groups_have_the_replicas_of_their_numbers():
    config = toy.get_config()
    config.group_assignment = [[0, 2], [1, 3]]
    devices = jax.devices()[:4]
    mesh = experiment_lib.mesh_of(config, devices)
    assert [[x.id for x in group.flat] for group in mesh.devices] == [[0, 2], [1, 3]]
    config.group_assignment = ((3, 0), (1, 2))
    mesh = experiment_lib.mesh_of(config, devices)
    assert [[x.id for x in group.flat] for group in mesh.devices] == [[3, 0], [1, 2]]
    config.model_parallel = 2
    config.group_assignment = ((1,), (0,))
    mesh = experiment_lib.mesh_of(config, devices)
    assert [[x.id for x in group.flat] for group in mesh.devices] == [[2, 3], [0, 1]]


class _RulesDevice:
    """A device of one of two hardware slices of four."""

    platform = "cpu"

    def __init__(self, number):
        self.id = number
        self.slice_index = number // 4


def test_07_groups_that_mix_hardware_slices_are_refused():
    devices = [_RulesDevice(number) for number in range(8)]
    with pytest.raises(xshard.errors.UserError, match="mixes hardware slices"):
        xshard.make_mesh([[0, 2, 4, 6], [1, 3, 5, 7]], slices=2, devices=devices)
    in_order = [[0, 1, 2, 3], [4, 5, 6, 7]]
    mesh = xshard.make_mesh(in_order, slices=2, devices=devices)
    for number in range(2):
        places = {device.slice_index for device in mesh.devices[:, number].flat}
        assert places == {number}


def test_07_a_run_goes_on_with_its_groups_in_their_order(tmp_path):
    config = toy.get_config()
    config.group_assignment = [[0, 2, 4, 6], [1, 3, 5, 7]]
    config.steps = 2
    assert loop.run(config, str(tmp_path), "") == 0
    config.steps = 3
    config.group_assignment = [[1, 3, 5, 7], [0, 2, 4, 6]]
    with pytest.raises(xshard.errors.UserError, match="in the run's order"):
        loop.run(config, str(tmp_path), "")
    config.group_assignment = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loop.run(config, str(tmp_path), "") == 0
