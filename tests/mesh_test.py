"""The mesh: which device is which replica, and where leaves lie."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xshard import mesh


def ids(the_mesh):
    return np.vectorize(lambda device: device.id)(the_mesh.devices).tolist()


def test_layouts():
    assert ids(mesh.make_mesh()) == [[[[i] for i in range(8)]]]
    groups = mesh.make_mesh([[0, 2, 4, 6], [1, 3, 5, 7]])
    # Neighbours, whatever their numbers as replicas are.
    assert ids(groups) == [[[[0], [1], [2], [3]]], [[[4], [5], [6], [7]]]]
    assert (mesh.num_groups(groups), mesh.num_replicas(groups)) == (2, 4)
    two = mesh.make_mesh([[1, 0], [3, 2]], model=2)
    assert ids(two) == [[[[0, 1], [2, 3]]], [[[4, 5], [6, 7]]]]
    three = mesh.make_mesh(devices=jax.devices()[:3])
    assert three.shape == {"group": 1, "slice": 1, "replica": 3, "model": 1}
    sliced = mesh.make_mesh([[0, 1, 2, 3], [4, 5, 6, 7]], slices=2)
    assert ids(sliced) == [[[[0], [1]], [[2], [3]]], [[[4], [5]], [[6], [7]]]]
    assert mesh.num_replicas(sliced) == 4


@pytest.mark.parametrize(
    "groups,model,match",
    [
        (
            None,
            3,
            r"model_parallel=3 must divide the number of devices, 8; good values: \[1, 2, 4, 8\]",
        ),
        (None, 0, "model_parallel=0"),
        (
            [[0, 1], [2, 3]],
            1,
            r"group_assignment=\[\[0, 1\], \[2, 3\]\] does not fit: .* the 8 replicas",
        ),
        ([[0, 1, 2], [3]], 2, "of one size"),
        ([[0, 1], [1, 2]], 2, "once"),
        ([["0", "1"], ["2", "3"]], 2, "each replica number once"),
        ([0, 1], 1, "must be a list of lists"),
        ("0123", 1, "must be a list of lists"),
    ],
)
def test_what_does_not_fit(groups, model, match):
    with pytest.raises(ValueError, match=match):
        mesh.make_mesh(groups, model=model)


class Torus:
    """Stands in for a mesh of TPU chips, of which there are none here."""

    def __init__(self, *sizes, order=None, model=1):
        coords = [tuple(int(i) for i in index) for index in np.ndindex(*sizes)]
        chips = [types.SimpleNamespace(coords=place) for place in order or coords]
        self.devices = np.array(chips).reshape(1, 1, -1, model)
        self.size = len(chips)
        self.shape = dict(zip(mesh.AXES, self.devices.shape, strict=True))


@pytest.mark.parametrize(
    "the_mesh, scatter, gather",
    [
        (Torus(16, 16, 1), (16, 16), (16, 16)),
        (Torus(8, 8, 16), (64, 16), ()),
        # A ring that goes there and back.
        (Torus(order=[(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]), (2, 3), (2, 3)),
        (Torus(1, 8), (), ()),
        (Torus(16, 16, model=2), (), ()),
        (Torus(order=[(0, 0), (0, 0), (1, 0), (1, 0)]), (), ()),
    ],
)
def test_sums_over_a_whole_torus_are_scattered_in_two_steps(the_mesh, scatter, gather):
    assert mesh.torus_steps(the_mesh) == (scatter, gather)


def test_other_devices_need_no_steps():
    assert mesh.torus_steps(mesh.make_mesh()) == ((), ())


def test_shardings_by_rule():
    the_mesh = mesh.make_mesh(model=2)
    rules = ((r"attention/w$", jax.P(None, "model")), ("w$", jax.P("model")))
    tree = {"attention": {"w": jnp.ones((4, 6)), "b": jnp.ones(3)}, "mlp": {"w": jnp.ones((2, 3))}}
    found = jax.tree.map(lambda s: s.spec, mesh.tree_shardings(the_mesh, tree, rules))
    assert found == {
        "attention": {"w": jax.P(None, "model"), "b": jax.P()},
        "mlp": {"w": jax.P("model")},
    }
    slots = {"0/mu/attention/w": jnp.ones((4, 6)), "0/v_row/attention/w": jnp.ones(4)}
    found = mesh.tree_shardings(the_mesh, slots, rules, slots=True)
    assert [s.spec for s in found.values()] == [jax.P(None, "model"), jax.P()]
    grouped = mesh.make_mesh([[0, 1], [2, 3]], model=2)
    (place,) = mesh.tree_shardings(grouped, [jnp.ones((2, 4, 6))], (("", jax.P(None, "model")),))
    assert place.spec == jax.P("group", None, "model")


@pytest.mark.parametrize(
    "shape,spec,match",
    [
        ((3,), jax.P("model"), "'w' splits a dimension of 3 over model_parallel=2"),
        ((4,), jax.P(None, "model"), r"'w' of shape \(4,\) must have at most one entry"),
        ((4,), jax.P("replica"), "None or 'model'"),
    ],
)
def test_rules_that_do_not_fit(shape, spec, match):
    with pytest.raises(ValueError, match=match):
        mesh.tree_shardings(mesh.make_mesh(model=2), {"w": jnp.ones(shape)}, (("w", spec),))
