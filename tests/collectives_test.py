"""Tests of the collectives of the training step, and of how they are read from a
compiled program.
"""

import collections
import functools
import math
import types

import jax
import numpy as np
import pytest

from configs import digits, lm_tiny
from tests import pods, toy
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard.base import formatting
from xshard.data import batches
from xshard.dryrun import collectives
from xshard.training import state as state_lib
from xshard.training import step

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
    # The run compiles the watched step, which also checks whether the step is finite.
    return (
        jax.jit(step.make_watched_step(experiment, mesh))
        .lower(state, next(train))
        .compile()
    )


def fingerprints(mesh, kinds):
    """Returns the count of numbers in fingerprints: two words in halves, per replica of
    a group and kind of array.
    """
    return mesh_lib.num_replicas(mesh) * kinds * 2 * 2


def hashes(mesh, arrays):
    """Returns the count of numbers by which replicas compare arrays of a network's
    state: of two words, pieces small enough that their squares add up exactly.
    """
    bits = (24 - math.ceil(math.log2(mesh_lib.num_replicas(mesh)))) // 2
    return arrays * 2 * math.ceil(32 / bits) * 2


def compile_map(f, mesh, in_spec, out_spec, shape, dtype=np.float32):
    mapped = jax.shard_map(
        f, mesh=mesh, in_specs=in_spec, out_specs=out_spec, check_vma=False
    )
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct(shape, dtype)).compile()


@pytest.mark.parametrize(
    "groups, micro_batches", [(None, 1), (None, 2), (HALVES, 1), (HALVES, 2)]
)
def test_the_step_reduces_once_and_within_a_group(groups, micro_batches):
    config = toy.get_config()
    config.micro_batches = micro_batches
    config.group_assignment = groups or ()
    mesh = mesh_lib.make_mesh(groups)
    (found,) = collectives.of(compile_step(config, mesh))
    # Whatever the number of micro-batches, one collective reduces gradients, network
    # state and metrics. The vote on finiteness needs none, since all replicas of a
    # group see the same sums.
    assert (found.kind, found.dtypes) == ("all-reduce", ("f32",))
    assert collectives.axes(mesh, found) == ("replica",)
    params = 4
    net_state = 1
    metrics = 2
    assert found.bytes == 4 * (
        params
        + net_state
        + metrics
        + hashes(mesh, arrays=1)
        + fingerprints(mesh, kinds=4)
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("groups, micro_batches", [((), 1), ((), 4), (HALVES, 2)])
def test_the_collectives_of_the_digits_step(groups, micro_batches):
    config = digits.get_config()
    config.micro_batches = micro_batches
    config.group_assignment = groups
    mesh = mesh_lib.make_mesh(groups or None)
    # Experiments are user code, which need not satisfy the strict promotion of these
    # tests.
    with jax.numpy_dtype_promotion("standard"):
        (found,) = collectives.of(compile_step(config, mesh))
    assert (found.kind, collectives.axes(mesh, found)) == ("all-reduce", ("replica",))
    params = 85_450
    metrics_of_a_replica = 2
    numbers = params + metrics_of_a_replica + fingerprints(mesh, kinds=3)
    assert found.bytes == 4 * numbers and found.times == 1


def test_a_sharded_step_reduces_its_norms_with_its_metrics():
    config = digits.get_config()
    config.reduction.shard_update = True
    mesh = mesh_lib.make_mesh()
    with jax.numpy_dtype_promotion("standard"):
        found = collectives.of(compile_step(config, mesh))
    reduced = [collective for collective in found if collective.kind == "all-reduce"]
    assert [collective.dtypes for collective in reduced] == [
        ("s32",),
        ("f32",),
        ("f32",),
    ]
    vote, first, last = reduced
    # The last bias has ten numbers, which eight replicas do not divide: its gradient is
    # summed whole, with the metrics.
    assert first.bytes == 4 * (10 + 2 + 1)
    assert vote.bytes == 4
    # Two partial sums of norms, less one that is reduced before, and for each of the
    # seven gradients the number of its elements that are not finite; slots that are not
    # cut have a fingerprint of their own.
    assert last.bytes == 4 * (1 + 7 + fingerprints(mesh, kinds=4))


def barriers_hold(mesh):
    """Returns whether XLA keeps equal gathers on both sides of a barrier, as
    `jax.checkpoint` has in its backward pass.

    XLA for CPUs in jaxlib 0.11.0 and earlier drops the barriers first, and then one of
    the gathers; in 0.11.2 it does not.
    """

    def gather_twice(x):
        first = jax.lax.all_gather(x, "replica")
        x, first = jax.lax.optimization_barrier((x, first))
        return jax.numpy.sin(first) + jax.numpy.cos(jax.lax.all_gather(x, "replica"))

    compiled = compile_map(gather_twice, mesh, jax.P("replica"), jax.P(), (8, 3))
    return sum(collective.times for collective in collectives.of(compiled)) == 2


@pytest.mark.sample(0.4)
def test_the_collectives_of_a_step_with_parameters_in_shards():
    """Digits gathers its two large arrays. The language model gathers one layer at a
    time, forward and backward.
    """
    budgets = {}
    for config in (digits.get_config(), lm_tiny.get_config()):
        config.reduction.shard_params = True
        config.batch_size = 16
        mesh = mesh_lib.make_mesh()
        counts = collections.Counter()
        with jax.numpy_dtype_promotion("standard"):
            for collective in collectives.of(compile_step(config, mesh)):
                assert collectives.axes(mesh, collective) == ("replica",)
                counts[collective.kind, *collective.dtypes] += collective.times
        budgets[config.experiment.rpartition(".")[2]] = counts
    # Outside of loops too an array is gathered forward and backward, unless the CPU
    # compiler removes the second gather. Five small arrays are updated in shards and
    # gathered after the update; the last bias, which 8 does not divide, is whole. The
    # all-reduce of integers is the vote.
    outside = 2 if barriers_hold(mesh) else 1
    assert budgets["Digits"] == {
        ("all-gather", "f16"): 2 * outside,
        ("all-gather", "f32"): 5,
        ("reduce-scatter", "f32"): 7,
        ("all-reduce", "s32"): 1,
        ("all-reduce", "f32"): 2,
    }
    layers = 2
    arrays = 4
    norms = 3
    assert budgets["LanguageModel"] == {
        # Of the two outside, the backward pass reads the head, but not the embedding,
        # which is a table.
        ("all-gather", "f16"): 2 * layers * arrays + 1 + outside,
        ("all-gather", "f32"): norms,
        ("reduce-scatter", "f32"): layers * arrays + 2 + norms,
        ("all-reduce", "s32"): 1,
        # Clipping needs the norm of the gradients early. The metrics are reduced later,
        # with the parameters' norm.
        ("all-reduce", "f32"): 2,
    }


@pytest.mark.parametrize(
    "axes", [("group",), ("replica",), ("model",), ("group", "replica")]
)
def test_the_axes_of_a_collective_are_recognized(axes):
    mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (2, 1, 2, 2)), mesh_lib.AXES)
    spec = jax.P(mesh_lib.AXES)
    psum = functools.partial(jax.lax.psum, axis_name=axes)
    (collective,) = collectives.of(compile_map(psum, mesh, spec, spec, (8, 3)))
    assert collectives.axes(mesh, collective) == axes and (
        collective.arrays,
        collective.bytes,
    ) == (
        1,
        12,
    )


@pytest.mark.parametrize(
    "f, out_spec, kind, nbytes",
    [
        (lambda x: jax.lax.all_gather(x, "r"), jax.P(), "all-gather", 8 * 16 * 4),
        (
            lambda x: jax.lax.psum_scatter(x, "r", tiled=True),
            jax.P("r"),
            "reduce-scatter",
            2 * 4,
        ),
        (
            lambda x: jax.lax.all_to_all(x, "r", 0, 0, tiled=True),
            jax.P("r"),
            "all-to-all",
            16 * 4,
        ),
        (
            lambda x: jax.lax.ppermute(x, "r", [(0, 1), (1, 0)]),
            jax.P("r"),
            "collective-permute",
            16 * 4,
        ),
    ],
)
def test_each_kind_of_collective_is_read(f, out_spec, kind, nbytes):
    mesh = jax.sharding.Mesh(jax.devices(), ("r",))
    (collective,) = collectives.of(compile_map(f, mesh, jax.P("r"), out_spec, (128,)))
    assert (collective.kind, collective.bytes, collective.dtypes) == (
        kind,
        nbytes,
        ("f32",),
    )
    if kind == "collective-permute":
        assert collective.groups == ((0, 1), (1, 0)) and collectives.axes(
            mesh, collective
        ) == ("?",)


class Text:
    """Stands in for a program compiled for devices that the machine does not have."""

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
            "%a = f32[4]{0} all-reduce(%x), "
            "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}",
            ((0, 4), (1, 5), (2, 6), (3, 7)),
        ),
    ],
)
def test_the_compiler_s_formats_of_groups_are_read(line, groups):
    (collective,) = collectives.of(Text(line))
    assert collective.groups == groups and collective.bytes == 16


@pytest.mark.parametrize(
    "line, arrays, nbytes",
    [
        (
            "%s = (f32[2]{0}, f32[16]{0}) all-gather-start(%x), "
            "replica_groups=[1,8]<=[8]",
            1,
            64,
        ),
        (
            "%s = (bf16[8]{0}, bf16[8]{0}) all-reduce-start(%x, %y), "
            "replica_groups=[1,8]<=[8]",
            2,
            32,
        ),
        (
            "%s = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x), "
            "source_target_pairs={{0,1}}",
            1,
            32,
        ),
        (
            "%s = ((f32[8]{0}, f32[4]{0}), (f32[1]{0}, s8[3]{0})) "
            "reduce-scatter-start(%x, %y)",
            2,
            7,
        ),
    ],
)
def test_an_asynchronous_collective_counts_at_its_start_only(line, arrays, nbytes):
    end = "%d = f32[16]{0} all-gather-done(%s)"
    (collective,) = collectives.of(Text(f"{line}\n{end}"))
    assert (collective.arrays, collective.bytes) == (arrays, nbytes)


def test_the_table_of_a_step_s_collectives():
    mesh = mesh_lib.make_mesh(HALVES)
    config = toy.get_config()
    config.group_assignment = HALVES
    shown = formatting.table(
        collectives.rows(mesh, collectives.of(compile_step(config, mesh)))
    )
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
    assert names == ["sent", "between_slices", "is_conditional", "hops", "mean_hops"]


def test_a_collective_is_conditional_in_a_branch_alone():
    mesh = jax.sharding.Mesh(jax.devices(), ("r",))

    def f(x):
        total = jax.lax.psum(x, "r")
        again = lambda: jax.lax.pmax(total * x, "r")
        return jax.lax.cond(total[0] > 0, again, lambda: total)

    found = collectives.of(compile_map(f, mesh, jax.P("r"), jax.P(), (16,)))
    assert sorted(each.is_conditional for each in found) == [False, True]


def test_a_collective_in_a_loop_counts_once_per_iteration():
    mesh = jax.sharding.Mesh(jax.devices(), ("r",))
    layer = lambda x, w: (jax.lax.psum(x * w, "r"), None)
    loop = lambda x: jax.lax.scan(layer, x, np.arange(5, dtype=np.float32))[0]
    found = collectives.of(compile_map(loop, mesh, jax.P("r"), jax.P(), (16,)))
    assert [
        (collective.kind, collective.bytes, collective.times) for collective in found
    ] == [("all-reduce", 8, 5)]
    (row,) = collectives.rows(mesh, found)
    assert (row["count"], row["bytes"], row["sent"]) == (5, 5 * 8, 5 * 2 * 7 * 8 // 8)


def test_a_reduce_scatter_that_a_tpu_writes_as_an_all_reduce():
    text = """
%all-reduce-scatter.1 (input: f32[2048,8]) -> f32[528,8] {
  %input = f32[2048,8]{1,0} parameter(0)
  %pad = f32[2112,8]{1,0} pad(%input, %zero), padding=0_64x0_0
  %all-reduce.1 = f32[2112,8]{1,0} all-reduce(%pad), \
replica_groups={{0,2},{1,3}}, to_apply=%sum
  ROOT %dynamic-slice.3 = f32[528,8]{1,0:S(1)} dynamic-slice(%all-reduce.1, %i, %j), \
dynamic_slice_sizes={528,8}
}

ENTRY %main (x: f32[2048,8]) -> f32[528,8] {
  %x = f32[2048,8]{1,0} parameter(0)
  ROOT %fusion = f32[528,8]{1,0:S(1)} fusion(%x), kind=kCustom, \
calls=%all-reduce-scatter.1
}
"""
    (collective,) = collectives.of(Text(text))
    assert (collective.kind, collective.bytes, collective.groups) == (
        "reduce-scatter",
        4 * 528 * 8,
        ((0, 2), (1, 3)),
    )


def test_a_collective_that_overlaps_a_tpu_s_computation_counts_once():
    gather = (
        "= f32[16]{0} all-gather(%x), replica_groups={{0,1,2,3,4,5,6,7}}, "
        "dimensions={0}"
    )
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
  %b = (f32[2]{{0}}, f32[16]{{0}}) fusion(%a), kind=kOutput, \
calls=%async_collective_fusion.1
  ROOT %c = f32[16]{{0}} fusion(%b), kind=kCustom, calls=%done
}}
"""
    (collective,) = collectives.of(Text(text))
    assert (collective.kind, collective.bytes) == ("all-gather", 64)


class Slices:
    """Stands in for a mesh of devices in two slices."""

    axis_names = ("slice", "replica", "model")
    devices = np.array(
        [types.SimpleNamespace(slice_index=i // 4) for i in range(8)], dtype=object
    ).reshape(2, 2, 2)


BETWEEN = """
  %send = (f32[1,8,16]{2,1,0}, u32[], token[]) send(%x, %t), \
frontend_attributes={_xla_megascale_transfer_type="KIND"}
  %recv = (f32[1,8,16]{2,1,0}, u32[], token[]) recv(%t), \
frontend_attributes={_xla_megascale_transfer_type="KIND"}
  %recv-done = (f32[1,8,16]{2,1,0}, token[]) recv-done(%recv), frontend_attributes={}
"""


@pytest.mark.parametrize(
    "kind, sent",
    [
        ("ALL_REDUCE", 512),
        ("ALL_GATHER", 256),
        ("REDUCE_SCATTER", 512),
        ("ONE_TO_ONE", 512),
    ],
)
def test_transfers_between_slices(kind, sent):
    (collective,) = collectives.of(Text(BETWEEN.replace("KIND", kind)))
    assert collective.between_slices and collective.bytes == 512
    assert collectives.axes(Slices, collective) == ("slice",)
    assert collectives.sent(Slices, collective) == sent


@pytest.mark.parametrize(
    "groups, axes",
    [
        ("{{0,1},{2,3}}", ("model",)),
        ("{{0,2},{1,3}}", ("replica",)),
        ("{{0,1,2,3}}", ("replica", "model")),
    ],
)
def test_groups_within_a_slice_use_the_device_numbers_of_one_slice(groups, axes):
    (collective,) = collectives.of(
        Text(f"%a = f32[4]{{0}} all-reduce(%x), replica_groups={groups}")
    )
    assert (
        not collective.between_slices and collectives.axes(Slices, collective) == axes
    )
    size = len(collective.groups[0])
    assert collectives.sent(Slices, collective) == 2 * (size - 1) * 16 // size


@pytest.mark.parametrize(
    "groups, over",
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", "model"),
        ("{{0,4},{1,5}}", "within replica"),
        ("{{0,3},{1,2}}", "within replica x model"),
    ],
)
def test_a_row_names_the_axes_that_the_groups_lie_within(groups, over):
    mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (4, 2)), ("replica", "model"))
    (row,) = collectives.rows(
        mesh,
        collectives.of(
            Text(f"%a = f32[4]{{0}} all-reduce(%x), replica_groups={groups}")
        ),
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
def test_the_bytes_that_a_device_must_send(kind, sent):
    mesh = jax.sharding.Mesh(jax.devices(), ("r",))
    (collective,) = collectives.of(Text(f"%a = f32[8]{{0}} {kind}(%x)"))
    assert collectives.sent(mesh, collective) == sent


@pytest.mark.parametrize(
    "groups, hops, mean",
    [
        # Of eight chips as 2x4, numbered along the longer side: rows, columns, every
        # second of a row.
        ("{{0,1,2,3},{4,5,6,7}}", 1, 1.0),
        ("{{0,4},{1,5},{2,6},{3,7}}", 1, 1.0),
        ("{{0,2},{1,3},{4,6},{5,7}}", 2, 2.0),
        # The compiler chooses the order in a group, which must not matter.
        ("{{3,0,2,1},{4,7,5,6}}", 1, 1.0),
        ("{{0,1,3},{4,5,7}}", 2, 1.5),
        ("{{0,7}}", 4, 4.0),
        ("{}", 1, 1.0),
    ],
)
def test_the_number_of_links_between_the_chips_of_a_group(groups, hops, mean):
    line = f"%a = f32[4]{{0}} all-reduce(%x), replica_groups={groups}"
    for slices in (1, 2):
        mesh = mesh_lib.make_mesh(slices=slices, devices=pods.make("v5e:2x4", slices))
        (row,) = collectives.rows(mesh, collectives.of(Text(line)))
        assert (row["hops"], row["mean_hops"]) == (hops, mean)


def test_hops_are_none_where_the_links_are_unknown():
    between = Text(BETWEEN.replace("KIND", "ALL_REDUCE"))
    slices = mesh_lib.make_mesh(slices=2, devices=pods.make("v5e:2x4", 2))
    everywhere = Text("%a = f32[4]{0} all-reduce(%x), replica_groups={}")
    for mesh, program in ((slices, between), (mesh_lib.make_mesh(), everywhere)):
        (row,) = collectives.rows(mesh, collectives.of(program))
        assert row["hops"] is None and row["mean_hops"] is None
