"""Tests of the mesh: the replica that each device belongs to, and the sharding of
leaves.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import pods
from xshard import errors, mesh
from xshard.base import torus_layout
from xshard.dryrun import collectives


def ids(the_mesh):
    return np.vectorize(lambda device: device.id)(the_mesh.devices).tolist()


def test_devices_are_laid_out_by_group_slice_replica_and_model():
    assert ids(mesh.make_mesh()) == [[[[i] for i in range(8)]]]
    groups = mesh.make_mesh([[0, 2, 4, 6], [1, 3, 5, 7]])
    assert ids(groups) == [[[[0], [2], [4], [6]]], [[[1], [3], [5], [7]]]]
    assert (mesh.num_groups(groups), mesh.num_replicas(groups)) == (2, 4)
    two = mesh.make_mesh([[1, 0], [3, 2]], model=2)
    assert ids(two) == [[[[2, 3], [0, 1]]], [[[6, 7], [4, 5]]]]
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
            r"model_parallel=3 must divide the number of devices, 8; good values: "
            r"\[1, 2, 4, 8\]",
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
def test_sizes_and_groups_that_do_not_fit_are_refused(groups, model, match):
    with pytest.raises(ValueError, match=match):
        mesh.make_mesh(groups, model=model)


PLANES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES = (
    "2x2x1",
    "2x2x2",
    "2x2x4",
    "2x4x4",
    "4x4x4",
    "4x4x8",
    "4x8x8",
    "8x8x8",
    "4x4x12",
    "4x4x20",
)
PODS = [
    *((f"v5e:{shape}", 1) for shape in PLANES),
    *((f"v5p:{shape}", 1) for shape in CUBES),
    *(
        ("v6e:4x4", 2),
        ("v6e:8x8", 2),
        ("v6e:16x16", 1),
        ("v6e:8x16", 4),
        ("v5e:16x16", 4),
    ),
    *(
        ("v4:2x2x1", 1),
        ("v4:4x4x4", 2),
        ("v4:8x8x8", 1),
        ("v5p:4x4x8", 4),
        ("v5p:8x8x16", 1),
    ),
]


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


def consecutive_groups(replicas, groups):
    return np.arange(replicas).reshape(groups, -1).tolist()


def all_meshes(topology, slices):
    """Yields each mesh whose sizes divide the slice, and the sizes."""
    chips = pods.make(topology, slices)
    chips_per_slice = len(chips) // slices
    for model in divisors(chips_per_slice):
        for groups in divisors(chips_per_slice // model):
            assignment = consecutive_groups(len(chips) // model, groups)
            new_mesh = mesh.make_mesh(
                assignment, slices=slices, model=model, devices=chips
            )
            yield new_mesh, (groups, slices, chips_per_slice // model // groups, model)


def coordinates(the_mesh):
    """Returns the coordinates of a mesh's chips, in the mesh's shape."""
    result = np.array([chip.coords for chip in the_mesh.devices.flat])
    return result.reshape(*the_mesh.devices.shape, 3)


def are_boxes(places):
    """Returns whether, for each index of the first dimension, the chips fill a box
    without gaps.
    """
    places = places.reshape(len(places), -1, 3)
    sides = places.max(axis=1) - places.min(axis=1) + 1
    return bool((sides.prod(axis=1) == places.shape[1]).all())


@pytest.mark.parametrize("topology, slices", PODS)
def test_every_mesh_that_divides_keeps_neighbors_together(topology, slices):
    chips = pods.make(topology, slices)
    whole_axes = torus_layout.whole_axes(pods.shape(topology))
    for new_mesh, sizes in all_meshes(topology, slices):
        assert new_mesh.devices.shape == sizes
        assert {chip.id for chip in new_mesh.devices.flat} == {
            chip.id for chip in chips
        }
        places = coordinates(new_mesh)
        # Only the axis `slice` crosses slices, and it connects chips with the same
        # coordinates.
        for part in range(slices):
            assert {chip.slice_index for chip in new_mesh.devices[:, part].flat} == {
                part
            }
            assert (places[:, part] == places[:, 0]).all()
        within_slice = places[:, 0]
        assert are_boxes(within_slice), (sizes, "a group")
        groups, replicas, model, _ = within_slice.shape
        assert are_boxes(within_slice.reshape(groups * replicas, model, 3)), (
            sizes,
            "a model",
        )
        if model in whole_axes:
            by_replica = np.moveaxis(within_slice, 2, 1).reshape(
                groups * model, replicas, 3
            )
            assert are_boxes(by_replica), (sizes, "the replicas of a group")


@pytest.mark.parametrize(
    "topology", ["v4:4x4x4", "v5p:4x4x12", "v5e:8x16", "v6e:16x16"]
)
def test_the_layout_does_not_depend_on_the_order_of_the_devices(topology):
    chips = pods.make(topology, 2)
    shuffled = np.random.default_rng(0).permutation(chips).tolist()
    for model in divisors(len(chips) // 2):
        first, second = (
            mesh.make_mesh(slices=2, model=model, devices=d) for d in (chips, shuffled)
        )
        assert ids(first) == ids(second)


def hops_along(the_mesh, axis):
    """Returns the distances between the first chips along a mesh axis, within the first
    slice.
    """
    chips = list(the_mesh.devices[:, 0].flat)
    places = np.arange(len(chips)).reshape(the_mesh.devices[:, :1].shape)
    group = np.moveaxis(places, mesh.AXES.index(axis), -1).reshape(
        -1, the_mesh.shape[axis]
    )[0]
    return collectives.distances(chips, [group])


@pytest.mark.parametrize(
    "topology, model, groups, hops",
    [
        ("v5e:16x16", 1, 1, [1] * 255),
        ("v5e:16x16", 16, 1, [1] * 15),
        # A model takes half a ring of 16. The replicas fill two rings of the other
        # axis, 8 links apart.
        ("v5e:16x16", 8, 1, [1] * 30 + [8]),
        ("v6e:16x16", 8, 1, [1] * 30 + [8]),
        ("v6e:16x16", 8, 2, [1] * 15),
        ("v6e:16x16", 4, 8, [1] * 7),
        ("v6e:4x4", 2, 1, [1] * 6 + [2]),
        # No axis of this slice is a ring. A model takes an 8x4 box, so the two replicas
        # are 4 links apart.
        ("v6e:8x8", 32, 1, [4]),
        ("v5p:8x8x16", 16, 1, [1] * 63),
        ("v5p:8x8x16", 8, 4, [1] * 31),
        ("v4:4x4x4", 2, 16, [1]),
        ("v4:8x8x8", 8, 1, [1] * 63),
        ("v4:4x4x8", 4, 1, [1] * 31),
        ("v5p:4x4x20", 10, 1, [1] * 30 + [10]),
    ],
)
def test_distances_between_the_replicas_of_a_group(topology, model, groups, hops):
    chips = pods.make(topology)
    assignment = consecutive_groups(len(chips) // model, groups)
    new_mesh = mesh.make_mesh(assignment, model=model, devices=chips)
    assert sorted(hops_along(new_mesh, "replica")) == hops
    assert set(hops_along(new_mesh, "model")) <= {1}


@pytest.mark.parametrize(
    "topology, end_hops",
    [
        ("v5e:16x16", 1),
        ("v5e:8x16", 7),
        ("v6e:8x8", 7),
        ("v4:4x4x4", 1),
        ("v5p:2x4x4", 1),
        ("v5p:2x2x4", 1),
    ],
)
def test_an_axis_is_a_ring_only_where_the_torus_closes(topology, end_hops):
    chips = pods.make(topology)
    last = pods.shape(topology)[0] - 1
    ends = [
        i for i, chip in enumerate(chips) if chip.coords in ((0, 0, 0), (last, 0, 0))
    ]
    assert collectives.distances(chips, [ends]) == [end_hops]


def test_chips_that_fill_no_box_stay_in_their_order():
    chips = pods.make("v5e:4x4")
    for subset in (
        chips[:3],
        [chips[5], chips[0], chips[9], chips[2]],
        [chips[0], chips[0]],
    ):
        new_mesh = mesh.make_mesh(devices=subset)
        assert list(new_mesh.devices.flat) == subset
        assert mesh.torus_steps(new_mesh) == ((), ())
    # A part of the slice may be a box too, and need not begin at the slice's corner.
    part = [chip for chip in chips if chip.coords[0] >= 2]
    new_mesh = mesh.make_mesh(model=2, devices=part)
    assert are_boxes(coordinates(new_mesh)[0, 0])


def test_devices_that_are_not_tpus_stay_in_their_order():
    order = [jax.devices()[i] for i in (3, 1, 2, 0)]
    assert ids(mesh.make_mesh(model=2, devices=order)) == [[[[3, 1], [2, 0]]]]


def test_a_group_needs_replicas_in_each_slice():
    chips = pods.make("v5e:2x2", 2)
    with pytest.raises(
        errors.UserError, match="good values: none: each group needs as many"
    ):
        mesh.make_mesh(consecutive_groups(8, 8), slices=2, devices=chips)


def test_a_message_shortens_the_groups_of_a_pod():
    with pytest.raises(errors.UserError, match=r"=\[\[0\], \[1\], .*255\]\] does") as e:
        mesh.make_mesh(consecutive_groups(128, 128), devices=pods.make("v5e:16x16"))
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
def test_sums_over_whole_slices_take_two_steps(topology, scatter, gather, slices):
    new_mesh = mesh.make_mesh(slices=slices, devices=pods.make(topology, slices))
    assert mesh.torus_steps(new_mesh) == (scatter, gather)
    # Each step communicates between neighbors only.
    chips = list(new_mesh.devices[0, 0].flat)
    places = np.arange(len(chips)).reshape(scatter or -1)
    for axis in range(places.ndim):
        groups = np.moveaxis(places, axis, -1).reshape(-1, places.shape[axis])
        assert set(collectives.distances(chips, groups)) <= {1}


def test_sums_over_a_part_of_a_slice_take_one_step():
    chips = pods.make("v6e:8x8")
    for new_mesh in (
        mesh.make_mesh(consecutive_groups(64, 2), devices=chips),
        mesh.make_mesh(model=2, devices=chips),
        # The config divides one hardware slice into two.
        mesh.make_mesh(slices=2, devices=chips),
    ):
        assert mesh.torus_steps(new_mesh) == ((), ())


def test_sums_in_another_order_than_the_torus_s_take_one_step():
    # Up one row and down the other, as JAX orders a slice of eight chips.
    chips = {chip.coords: chip for chip in pods.make("v5e:2x4")}
    ring = [
        (0, 0, 0),
        (0, 1, 0),
        (0, 2, 0),
        (0, 3, 0),
        (1, 3, 0),
        (1, 2, 0),
        (1, 1, 0),
        (1, 0, 0),
    ]
    devices = np.array([chips[place] for place in ring]).reshape(1, 1, 8, 1)
    assert mesh.torus_steps(jax.sharding.Mesh(devices, mesh.AXES)) == ((), ())


def test_sums_on_devices_that_are_not_tpus_take_one_step():
    assert mesh.torus_steps(mesh.make_mesh()) == ((), ())


def test_rules_decide_the_shardings():
    the_mesh = mesh.make_mesh(model=2)
    rules = ((r"attention/w$", jax.P(None, "model")), ("w$", jax.P("model")))
    tree = {
        "attention": {"w": jnp.ones((4, 6)), "b": jnp.ones(3)},
        "mlp": {"w": jnp.ones((2, 3))},
    }
    result = jax.tree.map(lambda s: s.spec, mesh.tree_shardings(the_mesh, tree, rules))
    assert result == {
        "attention": {"w": jax.P(None, "model"), "b": jax.P()},
        "mlp": {"w": jax.P("model")},
    }
    slots = {"0/mu/attention/w": jnp.ones((4, 6)), "0/v_row/attention/w": jnp.ones(4)}
    result = mesh.tree_shardings(the_mesh, slots, rules, slots=True)
    assert [s.spec for s in result.values()] == [jax.P(None, "model"), jax.P()]
    grouped = mesh.make_mesh([[0, 1], [2, 3]], model=2)
    (place,) = mesh.tree_shardings(
        grouped, [jnp.ones((2, 4, 6))], (("", jax.P(None, "model")),)
    )
    assert place.spec == jax.P("group", None, "model")


@pytest.mark.parametrize(
    "shape,spec,match",
    [
        ((3,), jax.P("model"), "'w' splits a dimension of 3 over model_parallel=2"),
        (
            (4,),
            jax.P(None, "model"),
            r"'w' of shape \(4,\) must have at most one entry",
        ),
        ((4,), jax.P("replica"), "None or 'model'"),
    ],
)
def test_rules_that_do_not_fit_are_refused(shape, spec, match):
    with pytest.raises(ValueError, match=match):
        mesh.tree_shardings(
            mesh.make_mesh(model=2), {"w": jnp.ones(shape)}, (("w", spec),)
        )
