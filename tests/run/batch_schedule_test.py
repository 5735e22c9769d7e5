"""Tests of batches that grow while a run trains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xshard
from tests import rows, toy, winged
from tests.optimizers import harness
from xshard import data, errors, logical, mesh
from xshard.data import batch_sizes, batches
from xshard.pod import request
from xshard.replay import replayer

pytestmark = pytest.mark.usefixtures("shared_programs")

TABLE = ((5, 16), (8, 32))


def make_config(**changes):
    """Returns a config of twelve steps, of 8 examples at first."""
    config = toy.get_config()
    config.update({"batch_size": 8, "log_every_steps": 1, "writers": ("jsonl",)})
    # Each step then polls once.
    config.update({"eval_every_steps": 0, "steps_per_dispatch": 1})
    config.checkpoint.update({"every_steps": 4})
    with config.unlocked():
        config.update({"batch_schedule": TABLE, **changes})
    return config.lock()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    assert winged.run(make_config(), str(directory), "") == 0
    return directory


def test_each_step_has_the_examples_that_follow_those_before(uninterrupted):
    trained = [row for row in rows.read(uninterrupted) if "loss" in row]
    assert [row["batch_size"] for row in trained] == 5 * [8] + 3 * [16] + 4 * [32]
    examples = np.cumsum([row["batch_size"] for row in trained])
    # The toy has 50 examples.
    np.testing.assert_allclose([row["epoch"] for row in trained], examples / 50)


@pytest.mark.parametrize("stopped", [5, 6, 8, 9])
def test_a_run_that_is_stopped_at_a_change_ends_in_the_same_bits(
    uninterrupted, tmp_path, stopped
):
    watch = rows.ScriptedWatch(stopped, request.STOP)
    config = make_config()
    assert winged.run(config, str(tmp_path), "", watch=watch) == 42
    assert winged.run(config, str(tmp_path), "") == 0
    left = rows.final_state(uninterrupted, config)
    harness.assert_equal(left, rows.final_state(tmp_path, config))
    assert rows.same_bits(uninterrupted) == rows.same_bits(tmp_path)


def test_a_replayed_step_has_its_batch(uninterrupted):
    repeated = replayer.Replayer(str(uninterrupted))
    for step in repeated.steps(range(9, 11)):
        if step.number not in (9, 10):
            continue
        assert len(step.batch["x"]) == 32
        assert repeated.difference(step) is None
        numbers = repeated.examples(step.number, step.batch, list(range(32)))
        taken = data.take(repeated.experiment.train_data(), np.array(numbers))
        np.testing.assert_array_equal(taken["x"], step.batch["x"])


def test_all_replicas_and_groups_read_each_example_once():
    halves = mesh.make_mesh([[0, 1, 2, 3], [4, 5, 6, 7]])
    for the_mesh in (mesh.make_mesh(), halves):
        sizes = batch_sizes.BatchSizes(8, ((1, 16), (2, 32)))
        source = {"x": np.arange(56)}
        train = batches.TrainBatches(
            lambda part, source=source: data.iterate(source, part),
            the_mesh,
            batch_size=sizes,
            seed=0,
        )
        groups = mesh.num_groups(the_mesh)
        read = []
        for step in (1, 2, 3):
            batch = train.batch_for_step(step, None, None)
            read.append(np.asarray(batch["x"]).reshape(groups, -1))
            assert read[-1].shape == (groups, sizes.at(step))
            assert batch["x"].sharding.is_equivalent_to(train._sharding, 1)
        for group in np.concatenate(read, axis=1):
            assert sorted(group) == list(range(56))


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_the_rows_of_a_logical_replica_do_not_depend_on_the_devices(devices):
    # On two devices one holds two of three replicas, and the other an empty slot too.
    the_mesh = mesh.make_mesh(devices=jax.devices()[:devices])
    replicas = logical.Replicas(3, the_mesh, num_words=1)
    train = batches.TrainBatches(
        lambda part: data.iterate({"x": np.arange(36)}, part),
        the_mesh,
        replicas,
        batch_size=batch_sizes.BatchSizes(6, ((1, 12), (2, 18))),
        seed=0,
    )
    parts = []
    for step, count in ((1, 1), (2, 2), (3, 3)):
        joined = np.asarray(train.batch_for_step(step, None, None)["x"])
        of_replicas = joined.reshape(replicas.places, -1)[:3]
        numbers, rows_of_batch = train.origins(step)
        numbers = numbers.reshape(replicas.places, -1)[:3] - numbers.min()
        rows_of_batch = rows_of_batch.reshape(replicas.places, -1)[:3]
        for replica in range(3):
            # Two rows of each batch, in their order.
            wanted = np.repeat(np.arange(count), 2)
            np.testing.assert_array_equal(numbers[replica], wanted)
            wanted = np.tile([2 * replica, 2 * replica + 1], count)
            np.testing.assert_array_equal(rows_of_batch[replica], wanted)
        parts.append(of_replicas)
    assert sorted(np.concatenate(parts, axis=None)) == list(range(36))
    alone = mesh.make_mesh(devices=jax.devices()[:3])
    single = batches.TrainBatches(
        lambda part: data.iterate({"x": np.arange(36)}, part),
        alone,
        batch_size=batch_sizes.BatchSizes(6, ((1, 12), (2, 18))),
        seed=0,
    )
    for step, of_replicas in enumerate(parts, 1):
        wanted = np.asarray(single.batch_for_step(step, None, None)["x"])
        np.testing.assert_array_equal(np.ravel(of_replicas), wanted)


class Counting(toy.Toy):
    """Keeps a number for each example of a batch."""

    def init(self, key, batch):
        rows_of_batch = jnp.zeros(len(batch["x"]))
        return super().init(key, batch), xshard.PerExample(rows_of_batch)

    def train_step(self, state, batch, key):
        learner, outcome = super().train_step(state[0], batch, key)
        return (learner, state[1]), {"0": outcome}

    def eval_step(self, state, batch, key):
        return super().eval_step(state[0], batch, key)

    def predict(self, state, batch, key=None):
        return super().predict(state[0], batch, key)


class Overwriting:
    """Reads each batch into the same array."""

    def __init__(self, part):
        self._array = np.zeros(sum(map(len, part.rows)), np.float32)
        self._count = 0

    def __next__(self):
        self._array += 1
        self._count += 1
        return {"x": self._array}

    def get_state(self):
        return self._count

    def set_state(self, state):
        self._count = state
        self._array[:] = state


def test_batches_that_are_read_into_one_array_are_joined():
    sizes = batch_sizes.BatchSizes(8, ((1, 16),))
    train = batches.TrainBatches(
        Overwriting, mesh.make_mesh(devices=jax.devices()[:2]), batch_size=sizes, seed=0
    )
    train.batch_for_step(1, None, None)
    joined = np.asarray(train.batch_for_step(2, None, None)["x"])
    np.testing.assert_array_equal(joined, 2 * [*4 * [2.0], *4 * [3.0]])


def test_the_learning_rate_follows_the_batch(tmp_path):
    config = make_config(
        experiment="tests.toy.Lowered", batch_learning_rate="sqrt", log_every_steps=4
    )
    assert winged.run(config, str(tmp_path), "") == 0
    scales = [row["update_scale"] for row in rows.read(tmp_path) if "loss" in row]
    # The factor is a float32.
    np.testing.assert_array_equal(scales, np.float32([1, np.sqrt(2), 2]))


@pytest.mark.wing("roll_backs")
def test_the_learning_rate_falls_again_by_a_roll_back(tmp_path):
    config = make_config(
        experiment="tests.toy.Lowered",
        batch_learning_rate="linear",
        on_nonfinite="roll_back",
        # Step 9 reads the batches 12 to 15 of 8 examples.
        poisoned=((0, 13),),
    )
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.roll_back.learning_rate_factor = 0.5
    assert winged.run(config.lock(), str(tmp_path), "") == 0
    trained = [row for row in rows.read(tmp_path) if "loss" in row]
    scales = [row["update_scale"] for row in trained]
    np.testing.assert_array_equal(scales, 5 * [1] + 3 * [2] + 4 * [2])
    rolled = [row for row in rows.read(tmp_path) if "roll_back/number" in row]
    assert rolled[0]["roll_back/first_batch"] == 12
    assert rolled[0]["roll_back/last_batch"] == 15


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch_schedule": ((5, 12),)}, "multiples of batch_size=8.*8 or 16"),
        ({"batch_schedule": ((5, 16), (5, 32))}, "with rising steps"),
        ({"batch_schedule": ((0, 16),)}, "integers of at least 1"),
        ({"batch_schedule": (5, 16)}, "rows .steps, size."),
        ({"batch_learning_rate": "cubic"}, "'none', 'linear' or 'sqrt'"),
        ({"batch_learning_rate": "linear"}, "backs_off=True"),
        (
            {"experiment": "tests.run.batch_schedule_test.Counting"},
            "a row for each example",
        ),
        ({"batch_size": 4}, "batch_size=4 must be a positive multiple of replicas"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_run(tmp_path, changes, message):
    with pytest.raises(errors.UserError, match=message):
        winged.run(make_config(**changes), str(tmp_path), "")
    assert not list(tmp_path.iterdir())
