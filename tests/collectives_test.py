"""What the training step sends, and that it sends no more."""

import functools

import jax
import numpy as np
import pytest

from tests import toy
from xshard import collectives, data, metrics, step
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib

HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))


def compile_step(config, mesh):
    experiment = experiment_lib.load(config.experiment)(config)
    examples = experiment.train_data()
    batches = data.TrainBatches(
        examples, mesh, batch_size=config.batch_size, seed=0, micro_batches=config.micro_batches
    )
    state = step.abstract_state(experiment, mesh, 0, examples)
    return jax.jit(step.make_train_step(experiment, mesh)).lower(state, batches(0)).compile()


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
    assert found.bytes == 4 * (params + net_state + metrics)


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
    shown = metrics.table(collectives.rows(mesh, collectives.of(compile_step(config, mesh))))
    assert shown.splitlines()[0].split()[:6] == ["kind", "over", "types", "count", "arrays", "bytes"]
    assert shown.splitlines()[1].split()[:4] == ["all-reduce", "replica", "f32", "1"]
