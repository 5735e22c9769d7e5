"""What the training step sends, and that it sends no more."""

import collections
import functools
import types

import jax
import numpy as np
import pytest

from configs import digits, lm_tiny
from tests import pods, toy
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard import step
from xshard.data import batches
from xshard.dryrun import collectives
from xshard.metrics import show

HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))


def compile_step(config, mesh):
    experiment = experiment_lib.load(config.experiment)(config)
    train = batches.TrainBatches(
        experiment.train_batches,
        mesh,
        batch_size=config.batch_size,
        seed=0,
        micro_batches=config.micro_batches,
    )
    state = state_lib.abstract_state(experiment, mesh, 0, train.example)
    # As a run has it, which also looks at whether the step is finite.
    return jax.jit(step.make_watched_step(experiment, mesh)).lower(state, next(train)).compile()


def fingerprints(mesh, kinds):
    """How many numbers: for each replica of a group, and each kind of arrays, the halves of two words."""
    return mesh_lib.num_replicas(mesh) * kinds * 2 * 2


def compile_map(f, mesh, in_spec, out_spec, shape, dtype=np.float32):
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_spec, out_specs=out_spec, check_vma=False)
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct(shape, dtype)).compile()


@pytest.mark.parametrize("groups, micro_batches", [(None, 1), (None, 2), (HALVES, 1), (HALVES, 2)])
def test_the_step_reduces_once_and_within_a_group(groups, micro_batches):
    config = toy.get_config()
    config.micro_batches = micro_batches
    config.group_assignment = groups or ()
    mesh = mesh_lib.make_mesh(groups)
    (found,) = collectives.of(compile_step(config, mesh))
    # However many micro-batches: gradients, state of the network and metrics in one. The vote needs none,
    # since all replicas of a group see the same sums.
    assert (found.kind, found.dtypes) == ("all-reduce", ("f32",))
    assert collectives.axes(mesh, found) == ("replica",)
    params, net_state, metrics = 4, 1, 2
    assert found.bytes == 4 * (params + net_state + metrics + fingerprints(mesh, kinds=4))


@pytest.mark.parametrize("groups, micro_batches", [((), 1), ((), 4), (HALVES, 2)])
def test_the_budget_of_the_digits_step(groups, micro_batches):
    config = digits.get_config()
    config.micro_batches = micro_batches
    config.group_assignment = groups
    mesh = mesh_lib.make_mesh(groups or None)
    # The experiment is a user's, who need not be as strict as these tests are.
    with jax.numpy_dtype_promotion("standard"):
        (found,) = collectives.of(compile_step(config, mesh))
    assert (found.kind, collectives.axes(mesh, found)) == ("all-reduce", ("replica",))
    params, metrics_of_a_replica = 85_450, 2
    numbers = params + metrics_of_a_replica + fingerprints(mesh, kinds=3)
    assert found.bytes == 4 * numbers and found.times == 1


def test_the_norms_of_a_sharded_step_go_with_its_metrics():
    config = digits.get_config()
    config.reduction.shard_update = True
    mesh = mesh_lib.make_mesh()
    with jax.numpy_dtype_promotion("standard"):
        found = collectives.of(compile_step(config, mesh))
    reduced = {one.dtypes: one for one in found if one.kind == "all-reduce"}
    # The vote, of integers; and two metrics with two shares of norms, and for each gradient how much of it is not
    # finite. Nothing is left that is not cut.
    assert reduced.keys() == {("s32",), ("f32",)} and reduced["s32",].bytes == 4
    # The slots that are not cut have a fingerprint beside those that are.
    assert reduced["f32",].bytes == 4 * (2 + 2 + 8 + fingerprints(mesh, kinds=4))
    assert len(reduced) == sum(one.kind == "all-reduce" for one in found)


def test_the_budget_of_parameters_in_shards():
    """Of digits, whose two large arrays are gathered; and of lm, a layer at a time, forward and backward."""
    budgets = {}
    for config in (digits.get_config(), lm_tiny.get_config()):
        config.reduction.shard_params = True
        config.batch_size = 16
        mesh = mesh_lib.make_mesh()
        counts = collections.Counter()
        with jax.numpy_dtype_promotion("standard"):
            for one in collectives.of(compile_step(config, mesh)):
                assert collectives.axes(mesh, one) == ("replica",)
                counts[one.kind, *one.dtypes] += one.times
        budgets[config.experiment.rpartition(".")[2]] = counts
    # The CPU's compiler leaves out the second gather of an array outside of loops. Six small arrays are updated in
    # shards, and gathered after it. The vote is one of integers.
    assert budgets["Digits"] == {
        ("all-gather", "f16"): 2,
        ("all-gather", "f32"): 6,
        ("reduce-scatter", "f32"): 8,
        ("all-reduce", "s32"): 1,
        ("all-reduce", "f32"): 1,
    }
    layers, arrays, norms = 2, 4, 3
    assert budgets["LanguageModel"] == {
        ("all-gather", "f16"): 2 * layers * arrays + 2,
        ("all-gather", "f32"): norms,
        ("reduce-scatter", "f32"): layers * arrays + 2 + norms,
        ("all-reduce", "s32"): 1,
        # The clip's norm is known before the metrics, which are with that of the parameters.
        ("all-reduce", "f32"): 2,
    }


@pytest.mark.parametrize("axes", [("group",), ("replica",), ("model",), ("group", "replica")])
def test_axes_are_told_apart(axes):
    mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (2, 1, 2, 2)), mesh_lib.AXES)
    spec = jax.P(mesh_lib.AXES)
    psum = functools.partial(jax.lax.psum, axis_name=axes)
    (one,) = collectives.of(compile_map(psum, mesh, spec, spec, (8, 3)))
    assert collectives.axes(mesh, one) == axes and (one.arrays, one.bytes) == (1, 12)


@pytest.mark.parametrize(
    "f, out_spec, kind, nbytes",
    [
        (lambda x: jax.lax.all_gather(x, "r"), jax.P(), "all-gather", 8 * 16 * 4),
        (lambda x: jax.lax.psum_scatter(x, "r", tiled=True), jax.P("r"), "reduce-scatter", 2 * 4),
        (lambda x: jax.lax.all_to_all(x, "r", 0, 0, tiled=True), jax.P("r"), "all-to-all", 16 * 4),
        (
            lambda x: jax.lax.ppermute(x, "r", [(0, 1), (1, 0)]),
            jax.P("r"),
            "collective-permute",
            16 * 4,
        ),
    ],
)
def test_each_kind(f, out_spec, kind, nbytes):
    mesh = jax.sharding.Mesh(jax.devices(), ("r",))
    (one,) = collectives.of(compile_map(f, mesh, jax.P("r"), out_spec, (128,)))
    assert (one.kind, one.bytes, one.dtypes) == (kind, nbytes, ("f32",))
    if kind == "collective-permute":
        assert one.groups == ((0, 1), (1, 0)) and collectives.axes(mesh, one) == ("?",)


class Text:
    """Stands in for a program that was compiled for devices that are not here."""

    def __init__(self, line):
        self._line = line

    def as_text(self):
        return self._line


@pytest.mark.parametrize(
    "line, groups",
    [
        (
            "%a = f32[4]{0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%r",
            ((0, 1, 2, 3), (4, 5, 6, 7)),
        ),
        (
            "%a = f32[4]{0} all-reduce(%x), replica_groups=[4,2]<=[2,4]T(1,0)",
            ((0, 4), (1, 5), (2, 6), (3, 7)),
        ),
        ("%a = f32[4]{0} all-reduce(%x), replica_groups={}", ()),
        (
            "%a = f32[4]{0} all-reduce(%x), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}",
            ((0, 4), (1, 5), (2, 6), (3, 7)),
        ),
    ],
)
def test_groups_as_the_compiler_writes_them(line, groups):
    (one,) = collectives.of(Text(line))
    assert one.groups == groups and one.bytes == 16


@pytest.mark.parametrize(
    "line, arrays, nbytes",
    [
        ("%s = (f32[2]{0}, f32[16]{0}) all-gather-start(%x), replica_groups=[1,8]<=[8]", 1, 64),
        (
            "%s = (bf16[8]{0}, bf16[8]{0}) all-reduce-start(%x, %y), replica_groups=[1,8]<=[8]",
            2,
            32,
        ),
        (
            "%s = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1}}",
            1,
            32,
        ),
        ("%s = ((f32[8]{0}, f32[4]{0}), (f32[1]{0}, s8[3]{0})) reduce-scatter-start(%x, %y)", 2, 7),
    ],
)
def test_the_start_of_an_asynchronous_one_counts_and_its_end_does_not(line, arrays, nbytes):
    end = "%d = f32[16]{0} all-gather-done(%s)"
    (one,) = collectives.of(Text(f"{line}\n{end}"))
    assert (one.arrays, one.bytes) == (arrays, nbytes)


def test_a_table():
    mesh = mesh_lib.make_mesh(HALVES)
    config = toy.get_config()
    config.group_assignment = HALVES
    shown = show.table(collectives.rows(mesh, collectives.of(compile_step(config, mesh))))
    assert shown.splitlines()[0].split()[:6] == [
        "kind",
        "over",
        "types",
        "count",
        "arrays",
        "bytes",
    ]
    assert shown.splitlines()[1].split()[:4] == ["all-reduce", "replica", "f32", "1"]
    names = shown.splitlines()[0].split()[6:]
    assert names == ["sent", "between_slices", "hops", "mean_hops"]


def test_one_in_a_loop_counts_as_often_as_it_is_done():
    mesh = jax.sharding.Mesh(jax.devices(), ("r",))
    layer = lambda x, w: (jax.lax.psum(x * w, "r"), None)
    loop = lambda x: jax.lax.scan(layer, x, np.arange(5, dtype=np.float32))[0]
    found = collectives.of(compile_map(loop, mesh, jax.P("r"), jax.P(), (16,)))
    assert [(one.kind, one.bytes, one.times) for one in found] == [("all-reduce", 8, 5)]
    (row,) = collectives.rows(mesh, found)
    assert (row["count"], row["bytes"], row["sent"]) == (5, 5 * 8, 5 * 2 * 7 * 8 // 8)


def test_a_reduce_scatter_that_a_tpu_spells_as_an_all_reduce():
    text = """
%all-reduce-scatter.1 (input: f32[2048,8]) -> f32[528,8] {
  %input = f32[2048,8]{1,0} parameter(0)
  %pad = f32[2112,8]{1,0} pad(%input, %zero), padding=0_64x0_0
  %all-reduce.1 = f32[2112,8]{1,0} all-reduce(%pad), replica_groups={{0,2},{1,3}}, to_apply=%sum
  ROOT %dynamic-slice.3 = f32[528,8]{1,0:S(1)} dynamic-slice(%all-reduce.1, %i, %j), dynamic_slice_sizes={528,8}
}

ENTRY %main (x: f32[2048,8]) -> f32[528,8] {
  %x = f32[2048,8]{1,0} parameter(0)
  ROOT %fusion = f32[528,8]{1,0:S(1)} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
}
"""
    (one,) = collectives.of(Text(text))
    assert (one.kind, one.bytes, one.groups) == ("reduce-scatter", 4 * 528 * 8, ((0, 2), (1, 3)))


def test_one_that_goes_on_beside_a_tpu_s_computation_counts_once():
    gather = "= f32[16]{0} all-gather(%x), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
    call = 'custom-call(%g), custom_call_target="AsyncCollective'
    text = f"""
%start (x: f32[2]) -> f32[16] {{
  %g {gather}
  ROOT %c = (f32[2]{{0}}, f32[16]{{0}}) {call}Start"
}}

%async_collective_fusion.1 (x: f32[2]) -> f32[16] {{
  %g {gather}
}}

%done (x: f32[2]) -> f32[16] {{
  %g {gather}
  ROOT %c = f32[16]{{0}} {call}Done"
}}

ENTRY %main (x: f32[2]) -> f32[16] {{
  %a = (f32[2]{{0}}, f32[16]{{0}}) fusion(%x), kind=kCustom, calls=%start
  %b = (f32[2]{{0}}, f32[16]{{0}}) fusion(%a), kind=kOutput, calls=%async_collective_fusion.1
  ROOT %c = f32[16]{{0}} fusion(%b), kind=kCustom, calls=%done
}}
"""
    (one,) = collectives.of(Text(text))
    assert (one.kind, one.bytes) == ("all-gather", 64)


class Slices:
    """Stands in for a mesh of devices in two slices."""

    axis_names = ("slice", "replica", "model")
    devices = np.array(
        [types.SimpleNamespace(slice_index=i // 4) for i in range(8)], dtype=object
    ).reshape(2, 2, 2)


BETWEEN = """
  %send = (f32[1,8,16]{2,1,0}, u32[], token[]) send(%x, %t), frontend_attributes={_xla_megascale_transfer_type="KIND"}
  %recv = (f32[1,8,16]{2,1,0}, u32[], token[]) recv(%t), frontend_attributes={_xla_megascale_transfer_type="KIND"}
  %recv-done = (f32[1,8,16]{2,1,0}, token[]) recv-done(%recv), frontend_attributes={}
"""


@pytest.mark.parametrize(
    "kind, sent",
    [("ALL_REDUCE", 512), ("ALL_GATHER", 256), ("REDUCE_SCATTER", 512), ("ONE_TO_ONE", 512)],
)
def test_what_goes_between_slices(kind, sent):
    (one,) = collectives.of(Text(BETWEEN.replace("KIND", kind)))
    assert one.between_slices and one.bytes == 512
    assert collectives.axes(Slices, one) == ("slice",)
    assert collectives.sent(Slices, one) == sent


@pytest.mark.parametrize(
    "groups, axes",
    [
        ("{{0,1},{2,3}}", ("model",)),
        ("{{0,2},{1,3}}", ("replica",)),
        ("{{0,1,2,3}}", ("replica", "model")),
    ],
)
def test_within_slices_devices_have_the_numbers_of_one_slice(groups, axes):
    (one,) = collectives.of(Text(f"%a = f32[4]{{0}} all-reduce(%x), replica_groups={groups}"))
    assert not one.between_slices and collectives.axes(Slices, one) == axes
    size = len(one.groups[0])
    assert collectives.sent(Slices, one) == 2 * (size - 1) * 16 // size


@pytest.mark.parametrize(
    "groups, over",
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", "model"),
        ("{{0,4},{1,5}}", "within replica"),
        ("{{0,3},{1,2}}", "within replica x model"),
    ],
)
def test_a_row_says_what_the_groups_are_part_of(groups, over):
    mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (4, 2)), ("replica", "model"))
    (row,) = collectives.rows(
        mesh, collectives.of(Text(f"%a = f32[4]{{0}} all-reduce(%x), replica_groups={groups}"))
    )
    assert row["over"] == over


@pytest.mark.parametrize(
    "kind, sent",
    [
        ("all-reduce", 2 * 7 * 32 // 8),
        ("all-gather", 7 * 32 // 8),
        ("reduce-scatter", 7 * 32),
        ("all-to-all", 7 * 32 // 8),
        ("collective-permute", 32),
    ],
)
def test_what_a_device_must_send(kind, sent):
    mesh = jax.sharding.Mesh(jax.devices(), ("r",))
    (one,) = collectives.of(Text(f"%a = f32[8]{{0}} {kind}(%x)"))
    assert collectives.sent(mesh, one) == sent


@pytest.mark.parametrize(
    "groups, hops, mean",
    [
        # Of eight chips as 2x4, numbered along the longer side: rows, columns, every second of a row.
        ("{{0,1,2,3},{4,5,6,7}}", 1, 1.0),
        ("{{0,4},{1,5},{2,6},{3,7}}", 1, 1.0),
        ("{{0,2},{1,3},{4,6},{5,7}}", 2, 2.0),
        # In whatever order, since the compiler orders them.
        ("{{3,0,2,1},{4,7,5,6}}", 1, 1.0),
        ("{{0,1,3},{4,5,7}}", 2, 1.5),
        ("{{0,7}}", 4, 4.0),
        ("{}", 1, 1.0),
    ],
)
def test_how_many_links_apart_the_chips_of_a_group_are(groups, hops, mean):
    line = f"%a = f32[4]{{0}} all-reduce(%x), replica_groups={groups}"
    for slices in (1, 2):
        mesh = mesh_lib.make_mesh(slices=slices, devices=pods.make("v5e:2x4", slices))
        (row,) = collectives.rows(mesh, collectives.of(Text(line)))
        assert (row["hops"], row["mean_hops"]) == (hops, mean)


def test_where_links_are_not_known_none_are_told():
    between = Text(BETWEEN.replace("KIND", "ALL_REDUCE"))
    slices = mesh_lib.make_mesh(slices=2, devices=pods.make("v5e:2x4", 2))
    everywhere = Text("%a = f32[4]{0} all-reduce(%x), replica_groups={}")
    for mesh, program in ((slices, between), (mesh_lib.make_mesh(), everywhere)):
        (row,) = collectives.rows(mesh, collectives.of(program))
        assert row["hops"] is None and row["mean_hops"] is None
