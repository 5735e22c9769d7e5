"""The mesh: which device is which replica, and where leaves lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import pods
from xshard import errors, mesh, torus


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


PLANES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "4x4x12", "4x4x20")
PODS = [
    *((f"v5e:{shape}", 1) for shape in PLANES),
    *((f"v5p:{shape}", 1) for shape in CUBES),
    *(("v6e:4x4", 2), ("v6e:8x8", 2), ("v6e:16x16", 1), ("v6e:8x16", 4), ("v5e:16x16", 4)),
    *(("v4:2x2x1", 1), ("v4:4x4x4", 2), ("v4:8x8x8", 1), ("v5p:4x4x8", 4), ("v5p:8x8x16", 1)),
]


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


def number_off(replicas, groups):
    return np.arange(replicas).reshape(groups, -1).tolist()


def all_meshes(topology, slices):
    """Each mesh whose sizes divide, with its sizes."""
    chips = pods.make(topology, slices)
    of_slice = len(chips) // slices
    for model in divisors(of_slice):
        for groups in divisors(of_slice // model):
            assignment = number_off(len(chips) // model, groups)
            made = mesh.make_mesh(assignment, slices=slices, model=model, devices=chips)
            yield made, (groups, slices, of_slice // model // groups, model)


def coordinates(the_mesh):
    """The coordinates of a mesh's chips, in the mesh's shape."""
    found = np.array([chip.coords for chip in the_mesh.devices.flat])
    return found.reshape(*the_mesh.devices.shape, 3)


def are_boxes(places):
    """Whether the chips along all dimensions but the first fill a box without gaps, each for itself."""
    places = places.reshape(len(places), -1, 3)
    sides = places.max(axis=1) - places.min(axis=1) + 1
    return bool((sides.prod(axis=1) == places.shape[1]).all())


@pytest.mark.parametrize("topology, slices", PODS)
def test_every_mesh_that_divides_is_laid_out_with_neighbours_together(topology, slices):
    chips = pods.make(topology, slices)
    whole_axes = torus.whole_axes(pods.shape(topology))
    for made, sizes in all_meshes(topology, slices):
        assert made.devices.shape == sizes
        assert {chip.id for chip in made.devices.flat} == {chip.id for chip in chips}
        places = coordinates(made)
        # Only the axis `slice` leads from one slice to another, to the chip at the same place.
        for part in range(slices):
            assert {chip.slice_index for chip in made.devices[:, part].flat} == {part}
            assert (places[:, part] == places[:, 0]).all()
        inside = places[:, 0]
        assert are_boxes(inside), (sizes, "a group")
        groups, replicas, model, _ = inside.shape
        assert are_boxes(inside.reshape(groups * replicas, model, 3)), (sizes, "a model")
        if model in whole_axes:
            apart = np.moveaxis(inside, 2, 1).reshape(groups * model, replicas, 3)
            assert are_boxes(apart), (sizes, "the replicas of a group")


@pytest.mark.parametrize("topology", ["v4:4x4x4", "v5p:4x4x12", "v5e:8x16", "v6e:16x16"])
def test_the_layout_depends_on_the_torus_alone(topology):
    chips = pods.make(topology, 2)
    other = np.random.default_rng(0).permutation(chips).tolist()
    for model in divisors(len(chips) // 2):
        first, second = (mesh.make_mesh(slices=2, model=model, devices=d) for d in (chips, other))
        assert ids(first) == ids(second)


def hops_along(the_mesh, axis):
    """The links between the first chips along an axis of one slice."""
    chips = list(the_mesh.devices[:, 0].flat)
    places = np.arange(len(chips)).reshape(the_mesh.devices[:, :1].shape)
    group = np.moveaxis(places, mesh.AXES.index(axis), -1).reshape(-1, the_mesh.shape[axis])[0]
    return torus.hops(chips, [group])


@pytest.mark.parametrize(
    "topology, model, groups, hops",
    [
        ("v5e:16x16", 1, 1, [1] * 255),
        ("v5e:16x16", 16, 1, [1] * 15),
        # Of eight devices of a model along a ring of 16: replicas fill rings, and are joined around.
        ("v5e:16x16", 8, 1, [1] * 30 + [8]),
        ("v6e:16x16", 8, 1, [1] * 30 + [8]),
        ("v6e:16x16", 8, 2, [1] * 15),
        ("v6e:16x16", 4, 8, [1] * 7),
        ("v6e:4x4", 2, 1, [1] * 6 + [2]),
        # As v5e without rings: three rounds of 2.
        ("v6e:8x8", 32, 1, [4]),
        ("v5p:8x8x16", 16, 1, [1] * 63),
        ("v5p:8x8x16", 8, 4, [1] * 31),
        ("v4:4x4x4", 2, 16, [1]),
        ("v4:8x8x8", 8, 1, [1] * 63),
        ("v4:4x4x8", 4, 1, [1] * 31),
        ("v5p:4x4x20", 10, 1, [1] * 30 + [10]),
    ],
)
def test_how_far_replicas_are_apart(topology, model, groups, hops):
    chips = pods.make(topology)
    assignment = number_off(len(chips) // model, groups)
    made = mesh.make_mesh(assignment, model=model, devices=chips)
    assert sorted(hops_along(made, "replica")) == hops
    assert set(hops_along(made, "model")) <= {1}


@pytest.mark.parametrize(
    "topology, around",
    [("v5e:16x16", 1), ("v5e:8x16", 7), ("v6e:8x8", 7), ("v4:4x4x4", 1), ("v5p:2x4x4", 1), ("v5p:2x2x4", 1)],
)  # fmt: skip
def test_rings_are_closed_where_the_torus_is(topology, around):
    chips = pods.make(topology)
    last = pods.shape(topology)[0] - 1
    ends = [i for i, chip in enumerate(chips) if chip.coords in ((0, 0, 0), (last, 0, 0))]
    assert torus.hops(chips, [ends]) == [around]


def test_what_is_no_whole_box_stays_in_its_order():
    chips = pods.make("v5e:4x4")
    for some in (chips[:3], [chips[5], chips[0], chips[9], chips[2]], [chips[0], chips[0]]):
        made = mesh.make_mesh(devices=some)
        assert list(made.devices.flat) == some
        assert mesh.torus_steps(made) == ((), ())
    # A box of a part of the slice, which need not begin at its corner.
    part = [chip for chip in chips if chip.coords[0] >= 2]
    made = mesh.make_mesh(model=2, devices=part)
    assert are_boxes(coordinates(made)[0, 0])


def test_other_devices_stay_in_their_order():
    order = [jax.devices()[i] for i in (3, 1, 2, 0)]
    assert ids(mesh.make_mesh(model=2, devices=order)) == [[[[3, 1], [2, 0]]]]


def test_a_group_needs_replicas_in_each_slice():
    chips = pods.make("v5e:2x2", 2)
    with pytest.raises(errors.UserError, match="good values: none: each group needs as many"):
        mesh.make_mesh(number_off(8, 8), slices=2, devices=chips)


def test_the_groups_of_a_pod_do_not_fill_the_screen():
    with pytest.raises(errors.UserError, match=r"=\[\[0\], \[1\], .*255\]\] does") as e:
        mesh.make_mesh(number_off(128, 128), devices=pods.make("v5e:16x16"))
    assert len(str(e.value)) < 700


def test_slices_of_different_sizes_are_refused():
    chips = pods.make("v5e:2x2", 2)
    with pytest.raises(errors.UserError, match=r"slices of different sizes, \[4, 2\]"):
        mesh.make_mesh(slices=2, devices=chips[:6])


@pytest.mark.parametrize(
    "topology, scatter, gather",
    [
        ("v5e:16x16", (16, 16), (16, 16)),
        ("v5e:4x4", (4, 4), (4, 4)),
        ("v6e:8x16", (8, 16), (8, 16)),
        ("v5p:8x8x16", (64, 16), ()),
        ("v4:2x2x1", (2, 2), (2, 2)),
        ("v5e:1x1", (), ()),
    ],
)
@pytest.mark.parametrize("slices", [1, 2])
def test_sums_over_whole_slices_are_scattered_in_two_steps(topology, scatter, gather, slices):
    made = mesh.make_mesh(slices=slices, devices=pods.make(topology, slices))
    assert mesh.torus_steps(made) == (scatter, gather)
    # Each step is between neighbours.
    chips = list(made.devices[0, 0].flat)
    places = np.arange(len(chips)).reshape(scatter or -1)
    for axis in range(places.ndim):
        groups = np.moveaxis(places, axis, -1).reshape(-1, places.shape[axis])
        assert set(torus.hops(chips, groups)) <= {1}


def test_sums_over_a_part_of_a_slice_are_scattered_in_one_step():
    chips = pods.make("v6e:8x8")
    for made in (
        mesh.make_mesh(number_off(64, 2), devices=chips),
        mesh.make_mesh(model=2, devices=chips),
        # Slices as the config says, of one slice of the hardware.
        mesh.make_mesh(slices=2, devices=chips),
    ):
        assert mesh.torus_steps(made) == ((), ())


def test_an_order_that_is_not_the_torus_s_is_scattered_in_one_step():
    # There and back, as JAX lays out a slice of eight chips.
    chips = {chip.coords: chip for chip in pods.make("v5e:2x4")}
    ring = [(0, 0, 0), (0, 1, 0), (0, 2, 0), (0, 3, 0), (1, 3, 0), (1, 2, 0), (1, 1, 0), (1, 0, 0)]
    devices = np.array([chips[place] for place in ring]).reshape(1, 1, 8, 1)
    assert mesh.torus_steps(jax.sharding.Mesh(devices, mesh.AXES)) == ((), ())


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
