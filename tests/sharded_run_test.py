"""Runs whose update is sharded: they end where replicated ones end, and go on as these and back."""

import dataclasses

import jax
import pytest

from tests import toy, turns
from tests.optimizers import harness
from xshard import checkpoint, loop, mesh, step
from xshard import state as state_lib
from xshard.data import batches
from xshard.dryrun import collectives

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
    """The run, and its state as a checkpoint has it."""
    run = loop.Run(config(**changes), str(directory))
    with run.opened():
        state, _ = run.train()
    return run, state, run.checkpoints.states.storage.to_whole(state)


# 16 hidden units: every array but the last bias has a dimension that 8, 4 or 2 divide; with 20 there are
# none for 8, and the arrays are flattened and filled up.
# With so many all but the last bias are held in shards.
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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sharded_run_ends_where_a_replicated_one_does(tmp_path, shape):
    replicated = {**shape, "shard_params": False}
    runs = {"sharded": {**shape, "shard_update": True}, "replicated": replicated}
    ends = [train(tmp_path / name, **changes)[2] for name, changes in runs.items()]
    (sharded, replicated) = ({"state": dataclasses.replace(end, rng=None)} for end in ends)
    # The norm of nothing is taken here: only sums over replicas are in another order.
    harness.assert_close(sharded, replicated, rtol=2e-4, atol=1e-5)


def bytes_a_device(tree):
    device = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == device
    )


@pytest.mark.parametrize("hidden, filling", [(1024, 0), (1025, 6)])
def test_slots_take_an_nth_of_the_memory(hidden, filling):
    def state(shard_update):
        the_config = config(hidden=hidden, shard_update=shard_update)
        experiment = toy.Wide(the_config)
        return state_lib.init(experiment, mesh.make_mesh(), 0, experiment.train_data())

    whole, cut = state(False), state(True)
    # The last bias, the count and the loss scale are whole on each.
    small = 2 * 4 + 4 + 2 * 4
    slots = lambda state: bytes_a_device(state.experiment.opt_state) - small
    # Of the six slots that are cut each is filled up by less than an element on each replica.
    assert slots(cut) <= slots(whole) / 8 + 4 * filling
    assert bytes_a_device(cut.experiment.params) == bytes_a_device(whole.experiment.params)


@pytest.mark.parametrize(
    "hidden, kind, made_with",
    [
        (16, "Wide", {"shard_update": True}),
        (20, "Averaged", {"shard_update": True}),
        (1024, "Averaged", {"shard_params": True}),
    ],
)
def test_a_checkpoint_does_not_show_who_has_made_it(tmp_path, hidden, kind, made_with):
    of_kind = {"hidden": hidden, "experiment": f"tests.toy.{kind}"}
    run, state, whole = train(tmp_path, **made_with, **of_kind)
    names = lambda tree: {
        jax.tree_util.keystr(path): (x.shape, x.dtype)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
    replicated = loop.Run(config(**of_kind), str(tmp_path / "other"))
    assert names(replicated._target) == names(run._target) == names(whole)
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
        harness.assert_equal(again.checkpoints.states.storage.to_whole(restored), whole)
    harness.assert_equal(run.resume_or_init().state, state)


@pytest.mark.parametrize(
    "shape", [{"hidden": 20}, {"slices": 2, "slice_dtype": "int8", "hidden": 18, "experiment": "tests.toy.Averaged"}, {"aggregation_method": "EXPERIMENTAL_TREE", "micro_batches": 2}, {**HELD, "slices": 2, "slice_dtype": "int8", "experiment": "tests.toy.Averaged"}],
    ids=str,
)  # fmt: skip
def test_a_run_that_was_stopped_ends_in_the_same_bits(tmp_path, shape):
    _, _, whole = train(tmp_path / "one", shard_update=True, **shape)
    train(tmp_path / "two", shard_update=True, steps=5, **shape)
    _, _, again = train(tmp_path / "two", shard_update=True, **shape)
    harness.assert_equal(again, whole)


# Of two learners, with a moving average of the parameters of one.
TURNS = {**HELD, "experiment": "tests.turns.Turns", "overflow_above": 2.0}


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
def test_a_run_goes_on_sharded_and_back(tmp_path, kind, between):
    _, _, whole = train(tmp_path / "one", **kind)
    parts = [{}, *between, {}]
    for number, changes in enumerate(parts, 1):
        steps = 12 * number // len(parts)
        _, _, again = train(tmp_path / "two", **{"steps": steps, **kind, **changes})
    harness.assert_close(
        dataclasses.replace(again, rng=None),
        dataclasses.replace(whole, rng=None),
        rtol=2e-4,
        atol=1e-5,
    )


def test_a_run_begins_with_shards_of_what_another_has_trained_whole(tmp_path):
    kind = {**TURNS, "steps": 1}
    _, state, _ = train(tmp_path, **{**kind, "shard_params": False})
    experiment = turns.Turns(config(**kind))
    fresh = state_lib.init(experiment, mesh.make_mesh(), 0, experiment.train_data())
    taken = checkpoint.init_from(checkpoint.Source(str(tmp_path)), fresh, print)
    for name in ("average", "doubt", "guess"):
        of = lambda tree: getattr(tree.experiment[name], "params", tree.experiment[name])
        harness.assert_equal(of(taken), of(state))
        places = lambda tree: jax.tree.map(lambda x: x.sharding, of(tree))
        assert places(taken) == places(fresh) != places(state)


def test_what_int8_has_kept_is_of_so_many_slices(tmp_path):
    train(tmp_path, slices=2, slice_dtype="int8")
    with pytest.raises(
        ValueError, match=r"error/mlp.* is float32\[2, .*\[4, .* Restore it with the config"
    ):
        loop.Run(config(slices=4, slice_dtype="int8"), str(tmp_path)).resume_or_init()


def test_a_reduction_may_not_change_on_the_way(tmp_path):
    train(tmp_path)
    changed = config()
    with changed.unlocked():
        changed.reduction.reduction = "sum"
    with pytest.raises(ValueError, match="reduction.reduction: 'mean' -> 'sum'"):
        loop.Run(changed, str(tmp_path))


def test_int8_without_slices_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="slice_dtype='int8' with one slice"):
        loop.Run(config(slice_dtype="int8"), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_state_is_reshaped_by_one_program(tmp_path):
    run, state, whole = train(tmp_path, shard_update=True, hidden=20)
    run.checkpoints.states.storage.from_whole(whole)
    count = harness.compile_count()
    for _ in range(3):
        harness.assert_equal(
            run.checkpoints.states.storage.from_whole(
                run.checkpoints.states.storage.to_whole(state)
            ),
            state,
        )
    assert harness.compile_count() == count
    assert run.checkpoints.states.storage.from_whole(state) is state


def test_slices_that_the_rule_does_not_reduce_over_are_refused(tmp_path):
    bad = config(slices=2, experiment="tests.toy.OneSlice")
    with pytest.raises(
        ValueError, match="does not reduce over the axis 'slice'.*slice_axis_name='sl"
    ):
        loop.Run(bad, str(tmp_path))


@pytest.mark.parametrize("slices", [0, 3, 16, True, 2.0])
def test_slices_that_do_not_fit_are_refused(tmp_path, slices):
    with pytest.raises((ValueError, TypeError), match="slices"):
        loop.Run(config(slices=slices), str(tmp_path))


def compiled(which, **changes):
    the_config = config(**changes)
    the_mesh = mesh.make_mesh(the_config.group_assignment or None, slices=the_config.slices)
    experiment = toy.Wide(the_config)
    examples = experiment.train_data()
    state = state_lib.abstract_state(experiment, the_mesh, 0, examples)
    if which == "train":
        train = batches.TrainBatches(experiment.train_batches, the_mesh, batch_size=16, seed=0)
        batch = next(train)
    else:
        batch = next(iter(batches.EvalBatches(examples, the_mesh, 8)))
    make = {"train": step.make_train_step, "eval": step.make_eval_step}[which]
    found = collectives.of(jax.jit(make(experiment, the_mesh)).lower(state, batch).compile())
    return the_mesh, found


def kinds(the_mesh, found):
    return sorted({(one.kind, collectives.axes(the_mesh, one)) for one in found})


@pytest.mark.parametrize("groups", [(), HALVES])
def test_the_budget_of_a_sharded_step(groups):
    found = kinds(*compiled("train", shard_update=True, group_assignment=groups))
    # Gradients, parameters; what is whole, the vote and the metrics.
    over = ("replica",)
    assert found == [("all-gather", over), ("all-reduce", over), ("reduce-scatter", over)]


def test_the_budget_over_slices():
    the_mesh, found = compiled("train", slices=2)
    between = [one for one in found if "slice" in collectives.axes(the_mesh, one)]
    # The metrics go over both axes at once; of the gradients a quarter goes between slices.
    params = 3 * 16 + 16 + 16
    gradients = sum(one.bytes for one in between if collectives.axes(the_mesh, one) == ("slice",))
    assert gradients == 4 * (params // 4 + 1)


def test_an_evaluation_does_not_gather_slots():
    the_mesh, found = compiled("eval", shard_update=True)
    assert kinds(the_mesh, found) == [("all-reduce", ("replica",))]
