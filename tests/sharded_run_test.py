"""Tests of runs with a sharded update: they end like replicated runs, and can switch to
replicated and back.
"""

import dataclasses
import types

import jax
import numpy as np
import pytest

from tests import toy, turns
from tests.optimizers import harness
from xshard import checkpoint, errors, loop, mesh
from xshard.data import batches
from xshard.dryrun import collectives
from xshard.training import state as state_lib
from xshard.training import step

HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))
PAIRS = ((0, 1), (2, 3))


def config(**changes):
    made = toy.get_config()
    made.experiment = changes.pop("experiment", "tests.toy.Wide")
    made.log_every_steps = 100
    for key in ("shard_update", "shard_params", "slice_dtype", "reduce_dtype"):
        if key in changes:
            made.reduction[key] = changes.pop(key)
    made.group_assignment = changes.pop("group_assignment", ())
    made.update(changes)
    return made.lock()


def train(directory, **changes):
    """Trains a run; returns the run and its final state."""
    run = loop.Run(config(**changes), str(directory))
    with run.opened():
        state, _ = run.train()
    return run, state


# With 16 hidden units, every array but the last bias has a dimension that 8, 4 and 2
# divide. With 20, 8 divides no dimension, so each replica holds the arrays whole. With
# 1024 hidden units, all parameters but the last bias are held in shards.
DOUBLE = "params=float64,compute=float64,output=float64"
HELD = {"shard_params": True, "hidden": 1024}
DIVIDED = {"shard_params": True, "hidden": 128, "model_parallel": 2}
SHAPES = [
    {},
    {"hidden": 20},
    {"hidden": 20, "group_assignment": HALVES},
    {"slices": 2, "hidden": 20},
    {"slices": 2, "group_assignment": HALVES, "micro_batches": 2},
    {"group_assignment": PAIRS, "model_parallel": 2},
    HELD,
    {**HELD, "slices": 2},
    {**HELD, "experiment": "tests.toy.Kept", "kept": "linear_0"},
    {**DIVIDED, "experiment": "tests.toy.Divided", "group_assignment": PAIRS},
    {**DIVIDED, "experiment": "tests.turns.Divided", "overflow_above": 2.0},
]


@pytest.fixture
def in_double():
    """Allows 64 bits in all threads: a run compiles in one of its own, too."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("in_double")
def test_a_sharded_run_ends_with_the_state_of_a_replicated_run(tmp_path, shape):
    # In float32 the order of the sums over replicas, and over 'model', would show in
    # updates by gradients near 0.
    shape = {**shape, "precision": DOUBLE}
    runs = {
        "sharded": {**shape, "shard_update": True},
        "replicated": {**shape, "shard_params": False},
    }
    ends = {}
    with jax.numpy_dtype_promotion("standard"):
        for name, changes in runs.items():
            _, end = train(tmp_path / name, **changes)
            ends[name] = {"state": dataclasses.replace(end, rng=None)}
        harness.assert_close(ends["sharded"], ends["replicated"], rtol=1e-8, atol=1e-10)


def bytes_per_device(tree):
    device = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == device
    )


@pytest.mark.sample(0.4)
@pytest.mark.parametrize("hidden, parts", [(1024, 8), (1025, 1)])
def test_sharded_slots_take_an_nth_of_the_memory(hidden, parts):
    def state(shard_update):
        the_config = config(hidden=hidden, shard_update=shard_update)
        experiment = toy.Wide(the_config)
        return state_lib.init(experiment, mesh.make_mesh(), 0, experiment.train_data())

    whole = state(False)
    sharded = state(True)
    # Every device holds the slots of the last bias, the count and the loss scale whole.
    small = 2 * 4 + 4 + 2 * 4
    slots = lambda state: bytes_per_device(state.experiment.opt_state) - small
    # Of 1025 units, 8 replicas divide no dimension, so all slots stay whole.
    assert slots(sharded) == slots(whole) / parts
    assert bytes_per_device(sharded.experiment.params) == bytes_per_device(
        whole.experiment.params
    )


@pytest.mark.sample(0.4)
@pytest.mark.parametrize(
    "hidden, kind, saved_with",
    [
        (16, "Wide", {"shard_update": True}),
        (20, "Averaged", {"shard_update": True}),
        (1024, "Averaged", {"shard_params": True}),
    ],
)
def test_a_checkpoint_does_not_depend_on_the_sharding_that_saved_it(
    tmp_path, hidden, kind, saved_with
):
    of_kind = {"hidden": hidden, "experiment": f"tests.toy.{kind}"}
    run, state = train(tmp_path, **saved_with, **of_kind)
    names = lambda tree: {
        jax.tree_util.keystr(path): (x.shape, x.dtype)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
    replicated = loop.Run(config(**of_kind), str(tmp_path / "other"))
    assert names(replicated.target) == names(run.target) == names(state)
    for changes in (
        {"shard_update": False},
        {"shard_update": True},
        {"shard_update": True, "slices": 2},
        {"shard_update": True, "group_assignment": ((0, 1),), "model_parallel": 4},
        {"shard_params": True},
        {"shard_params": True, "slices": 2},
        {"shard_params": True, "group_assignment": ((0, 1),), "model_parallel": 4},
    ):
        again = loop.Run(config(**of_kind, **changes), str(tmp_path))
        restored = again.resume_or_init().state
        harness.assert_equal(restored, state)
    harness.assert_equal(run.resume_or_init().state, state)


@pytest.mark.sample(0.4)
@pytest.mark.parametrize(
    "shape",
    [
        {"hidden": 20},
        {
            "slices": 2,
            "slice_dtype": "bfloat16",
            "hidden": 18,
            "experiment": "tests.toy.Averaged",
        },
        {"aggregation_method": "EXPERIMENTAL_TREE", "micro_batches": 2},
        {
            **HELD,
            "slices": 2,
            "slice_dtype": "bfloat16",
            "experiment": "tests.toy.Averaged",
        },
    ],
    ids=str,
)
def test_a_run_that_was_stopped_ends_with_the_same_bits(tmp_path, shape):
    _, whole = train(tmp_path / "one", shard_update=True, **shape)
    train(tmp_path / "two", shard_update=True, steps=5, **shape)
    _, again = train(tmp_path / "two", shard_update=True, **shape)
    harness.assert_equal(again, whole)


# This experiment has two learners, and a moving average of the parameters of one.
TURNS = {**HELD, "experiment": "tests.turns.Turns", "overflow_above": 2.0}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "kind, between",
    [
        ({}, [{"shard_update": True}]),
        (
            {**TURNS, "shard_params": False},
            [TURNS, {**TURNS, "slices": 2}],
        ),
    ],
    ids=["Wide", "Turns"],
)
def test_a_run_resumes_with_shards_and_then_without(tmp_path, kind, between):
    _, whole = train(tmp_path / "one", **kind)
    parts = [{}, *between, {}]
    for number, changes in enumerate(parts, 1):
        steps = 12 * number // len(parts)
        _, again = train(tmp_path / "two", **{"steps": steps, **kind, **changes})
    harness.assert_close(
        dataclasses.replace(again, rng=None),
        dataclasses.replace(whole, rng=None),
        rtol=2e-4,
        atol=1e-5,
    )


def test_a_sharded_run_starts_from_a_replicated_run_s_parameters(tmp_path):
    kind = {**TURNS, "steps": 1}
    _, state = train(tmp_path, **{**kind, "shard_params": False})
    experiment = turns.Turns(config(**kind))
    fresh = state_lib.init(experiment, mesh.make_mesh(), 0, experiment.train_data())
    initialized = checkpoint.init_from(checkpoint.Source(str(tmp_path)), fresh, print)
    for name in ("average", "doubt", "guess"):
        of = lambda tree: getattr(
            tree.experiment[name], "params", tree.experiment[name]
        )
        harness.assert_equal(of(initialized), of(state))
        places = lambda tree: jax.tree.map(lambda x: x.sharding, of(tree))
        assert places(initialized) == places(fresh) != places(state)


def test_a_reduction_cannot_change_when_a_run_resumes(tmp_path):
    train(tmp_path)
    changed = config()
    with changed.unlocked():
        changed.reduction.reduction = "sum"
    with pytest.raises(ValueError, match="reduction.reduction: 'mean' -> 'sum'"):
        loop.Run(changed, str(tmp_path))


def test_an_optimizer_that_does_not_reduce_over_slices_is_refused(tmp_path):
    bad = config(slices=2, experiment="tests.toy.OneSlice")
    with pytest.raises(
        ValueError, match="does not reduce over the axis 'slice'.*slice_axis_name='sl"
    ):
        loop.Run(bad, str(tmp_path))


@pytest.mark.parametrize("slices", [-1, 3, 16, True, 2.0])
def test_slice_counts_that_do_not_fit_are_refused(tmp_path, slices):
    with pytest.raises((ValueError, TypeError), match="slices"):
        loop.Run(config(slices=slices), str(tmp_path))


def compiled(which, **changes):
    the_config = config(**changes)
    the_mesh = mesh.make_mesh(
        the_config.group_assignment or None, slices=the_config.slices
    )
    experiment = toy.Wide(the_config)
    examples = experiment.train_data()
    state = state_lib.abstract_state(experiment, the_mesh, 0, examples)
    if which == "train":
        train = batches.TrainBatches(
            experiment.train_batches, the_mesh, batch_size=16, seed=0
        )
        batch = next(train)
    else:
        batch = next(iter(batches.EvalBatches(examples, the_mesh, 8)))
    make = {"train": step.make_train_step, "eval": step.make_eval_step}[which]
    operations = collectives.of(
        jax.jit(make(experiment, the_mesh)).lower(state, batch).compile()
    )
    return the_mesh, operations


def kinds(the_mesh, operations):
    return sorted(
        {
            (operation.kind, collectives.axes(the_mesh, operation))
            for operation in operations
        }
    )


@pytest.mark.parametrize("groups", [(), HALVES])
def test_the_collectives_of_a_sharded_step(groups):
    operations = kinds(*compiled("train", shard_update=True, group_assignment=groups))
    # Parameters are gathered and gradients scattered. The rest is reduced: whole
    # arrays, the vote and the metrics.
    over = ("replica",)
    assert operations == [
        ("all-gather", over),
        ("all-reduce", over),
        ("reduce-scatter", over),
    ]


def test_a_quarter_of_the_gradients_is_sent_between_slices():
    the_mesh, operations = compiled("train", slices=2)
    between = [
        operation
        for operation in operations
        if "slice" in collectives.axes(the_mesh, operation)
    ]
    # The metrics are reduced over both axes at once. A quarter of the gradients is sent
    # between slices.
    params = 3 * 16 + 16 + 16
    gradients = sum(
        operation.bytes
        for operation in between
        if collectives.axes(the_mesh, operation) == ("slice",)
    )
    assert gradients == 4 * (params // 4 + 1)


def test_an_evaluation_does_not_gather_slots():
    the_mesh, operations = compiled("eval", shard_update=True)
    assert kinds(the_mesh, operations) == [("all-reduce", ("replica",))]


HOST = {"slots_memory": "pinned_host"}


def memories(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim > 1}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "shape",
    [
        {"experiment": "tests.toy.Averaged"},
        {"shard_update": True, "group_assignment": HALVES},
        {**HELD, "experiment": "tests.toy.Averaged", "slices": 2},
        {**DIVIDED, "experiment": "tests.toy.Divided", "group_assignment": PAIRS},
        {**TURNS, "shard_params": False},
    ],
    ids=str,
)
def test_slots_on_the_host_change_no_bits(tmp_path, shape):
    # Fingerprints, evaluations, checkpoints and averages all read such a state.
    _, whole = train(tmp_path / "device", **shape)
    train(tmp_path / "host", steps=5, **shape, **HOST)
    # A run may change where its slots lie, in both directions.
    _, state = train(tmp_path / "host", steps=8, **shape, **HOST)
    _, again = train(tmp_path / "host", **shape)
    harness.assert_equal(again, whole)
    for learner in state_lib.learners(state).values():
        assert memories(learner.opt_state) == {"pinned_host"}
        assert memories(learner.params) == {"device"}
    for learner in state_lib.learners(again).values():
        assert memories(learner.opt_state) == {"device"}


def test_a_step_reuses_the_host_memory_of_its_slots():
    the_config = config(**HOST, fingerprint_every_steps=0)
    experiment = toy.Wide(the_config)
    the_mesh, batch = mesh.make_mesh(), experiment.train_data()
    rows = {name: x[:16] for name, x in batch.items()}
    state = state_lib.init(experiment, the_mesh, 0, batch)
    train_step = jax.jit(step.make_train_step(experiment, the_mesh), donate_argnums=0)
    places = lambda state: {
        path: x.addressable_shards[0].data.unsafe_buffer_pointer()
        for path, x in jax.tree_util.tree_leaves_with_path(state.experiment.opt_state)
        if x.ndim > 1
    }
    before = places(state)
    state, _ = train_step(state, rows)
    assert places(state) == before
    train_step(state, rows)
    # The second step's state lies as the first one's, so it is compiled once.
    assert train_step._cache_size() == 1


def test_slots_on_the_host_are_refused_by_name_where_they_cannot_be(tmp_path):
    with pytest.raises(errors.UserError, match="cannot be used with logical_replicas"):
        loop.Run(config(**HOST, logical_replicas=8), str(tmp_path)).train()
    with pytest.raises(errors.UserError, match="must be 'device' or 'pinned_host'"):
        loop.Run(config(slots_memory="host"), str(tmp_path))
    device = types.SimpleNamespace(
        device_kind="abacus",
        platform="wood",
        addressable_memories=lambda: [types.SimpleNamespace(kind="beads")],
    )
    bare = types.SimpleNamespace(devices=np.array([device], object))
    with pytest.raises(errors.UserError, match=r"abacus \(wood\) has beads"):
        mesh.check_memory(bare, "pinned_host", "slots_memory='pinned_host'")
