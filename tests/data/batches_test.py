"""Batches: the placement of their rows on devices, and the data position in a
checkpoint.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xshard import data, errors, mesh
from xshard.data import batches

DATA = {"x": np.arange(20), "y": np.arange(40).reshape(20, 2)}
GROUPS = [[0, 1, 2, 3], [4, 5, 6, 7]]
MOST = 4


class Counter:
    """A custom iterator whose state is bytes."""

    def __init__(self, part, rows=None, last=100):
        self._rows = sum(map(len, part.rows)) if rows is None else rows
        self._next, self._last = 0, last

    def __next__(self):
        if self._next == self._last:
            raise StopIteration
        self._next += 1
        return {"x": np.full(self._rows, self._next - 1)}

    def get_state(self):
        return str(self._next).encode()

    def set_state(self, state):
        self._next = int(state.decode())


iterate = functools.partial(data.iterate, DATA)


def make(the_mesh=None, iterator=iterate, **kwargs):
    the_mesh = the_mesh or mesh.make_mesh()
    return batches.TrainBatches(
        iterator, the_mesh, **{"batch_size": 8, "seed": 0, **kwargs}
    )


def stacked(iterator, the_mesh=None, **kwargs):
    """Returns the batches of steps 2 to 5, drawn together."""
    train = make(the_mesh, iterator, **kwargs)
    next(train)
    arrays, count = train.batches_for_steps(range(2, 2 + MOST), MOST, None, None)
    assert count == MOST
    return {name: np.asarray(array) for name, array in arrays.items()}


class Doubled:
    """Changes each batch, and has the other methods of what it wraps."""

    def __init__(self, iterator):
        self._iterator = iterator

    def __getattr__(self, name):
        return getattr(self._iterator, name)

    def __next__(self):
        return {name: 2 * array for name, array in next(self._iterator).items()}


def test_a_wrapper_changes_batches_that_are_drawn_together():
    drawn = stacked(lambda part: Doubled(iterate(part)))
    for name, array in stacked(iterate).items():
        np.testing.assert_array_equal(drawn[name], 2 * array)


def test_a_subclass_changes_batches_that_are_drawn_together():
    base = type(make()._iterator)

    class Replaced(base):
        def __next__(self):
            return {name: 0 * array for name, array in super().__next__().items()}

    def changed(part):
        iterator = iterate(part)
        iterator.__class__ = Replaced
        return iterator

    assert not np.any(stacked(changed)["x"])


class Many(Counter):
    """Draws several batches at once, and returns what a function makes of them."""

    def __init__(self, part, change):
        super().__init__(part, last=10)
        self._change = change

    def next_batches(self, count):
        return self._change(np.stack([next(self)["x"] for _ in range(count)]))


def test_batches_that_are_drawn_together_are_those_of_next():
    drawn = stacked(lambda part: Many(part, lambda x: {"x": x}))
    np.testing.assert_array_equal(drawn["x"], stacked(Counter)["x"])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda x: {"x": x[:-1]},
            r"ndarray of shape \(3, 8\) under 'x'.*shape \(4, rows",
        ),
        (lambda x: {"x": np.repeat(x, 2, axis=0)}, r"ndarray of shape \(8, 8\)"),
        (lambda x: {"x": list(x)}, "a list of shape none under 'x'.*NumPy's own"),
        (lambda x: {"x": np.ma.array(x)}, "a MaskedArray of shape"),
        (lambda x: {"x": x[:, :-1]}, "has 7 rows"),
        (lambda x: {"x": x.astype(np.float32)}, "float32 'x'.*first batch has int64"),
        (lambda x: {"y": x}, "int64 'y'.*first batch has int64 'x'"),
        (lambda x: x, "a ndarray. It must return a dictionary"),
        (lambda x: None, "a NoneType. It must return a dictionary"),
    ],
)
def test_batches_drawn_together_that_do_not_fit_are_refused(change, match):
    with pytest.raises(errors.UserError, match=match):
        stacked(lambda part: Many(part, change))


class Renaming(Counter):
    """Calls its array otherwise once it has been put back."""

    name = "x"

    def __next__(self):
        return {self.name: super().__next__()["x"]}

    def set_state(self, state):
        super().set_state(state)
        self.name = "y"


def test_arrays_of_other_names_after_it_was_put_back_are_another_batch(caplog):
    train = make(iterator=Renaming)
    for _ in range(2):
        next(train)
    assert caplog.text.count("Renaming gave another batch") == 1


def test_the_end_of_data_that_is_drawn_together_is_named():
    train = make(iterator=lambda part: Many(part, lambda x: {"x": x}))
    next(train)
    train.batches_for_steps(range(2, 10), 8, None, None)
    with pytest.raises(errors.UserError, match="The training data ended"):
        train.batches_for_steps(range(10, 14), MOST, None, None)


def test_arrays_without_columns_are_stacked():
    class Empty(Counter):
        def __next__(self):
            return {"x": np.zeros((len(super().__next__()["x"]), 0), np.float32)}

    train = make(iterator=Empty)
    for _ in range(4):
        next(train)
    drawn, _ = train.batches_for_steps(range(5, 7), MOST, None, None)
    assert drawn["x"].shape == (MOST, 8, 0)


def test_rows_are_split_over_the_replicas():
    batch = next(make())
    np.testing.assert_array_equal(batch["y"], DATA["y"][np.asarray(batch["x"])])
    for shard in batch["x"].addressable_shards:
        np.testing.assert_array_equal(shard.data, np.asarray(batch["x"])[shard.index])
    assert [shard.data.shape for shard in batch["y"].addressable_shards] == [(1, 2)] * 8


def test_each_group_has_its_own_rows():
    grouped = np.asarray(next(make(mesh.make_mesh(GROUPS)))["x"]).reshape(2, 8)
    assert not np.array_equal(*grouped)
    alone = next(make(mesh.make_mesh(devices=jax.devices()[:4])))["x"]
    np.testing.assert_array_equal(grouped[0], alone)


def test_reading_the_example_consumes_no_batch():
    train = make()
    assert {name: x.shape for name, x in train.example.items()} == {
        "x": (1,),
        "y": (1, 2),
    }
    np.testing.assert_array_equal(next(train)["x"], next(make())["x"])


class Shared(Counter):
    """An iterator whose state is a position in data that all processes read."""

    state_is_shared = True


@pytest.mark.parametrize("iterator, count", [(iterate, 2), (Shared, 2), (Counter, 1)])
def test_a_restored_position_continues_with_the_next_batch(iterator, count):
    train = make(iterator=iterator)
    next(train)
    position = train.position(1)
    rest = [np.asarray(next(train)["x"]) for _ in range(3)]
    again = make(iterator=iterator)
    again.restore([position] * count)
    np.testing.assert_array_equal(
        [np.asarray(next(again)["x"]) for _ in range(3)], rest
    )


def test_states_that_are_not_shared_need_the_same_number_of_processes():
    differ = [{"step": 5, "iterator": {"file": n}} for n in range(2)]
    with pytest.raises(
        ValueError, match="for each of 2 processes, but there are now 1"
    ):
        make().restore(differ)
    # The states are equal, but the iterator does not declare that they are shared.
    with pytest.raises(ValueError, match="Resume with 2; or .* state_is_shared = True"):
        make(iterator=Counter).restore(
            [{"step": 5, "iterator": {"base64": "Mg=="}}] * 2
        )


def test_a_state_of_another_iterator_is_refused():
    for state in ({"next_index": 3}, {"base64": "Mg=="}):
        with pytest.raises(
            ValueError, match="a different iterator wrote; this one counts"
        ):
            make().restore([{"step": 5, "iterator": state}])


def test_epoch_examples_is_none_if_the_number_is_unknown():
    assert make().epoch_examples == len(DATA["x"])
    assert make(iterator=Counter).epoch_examples is None


def test_summaries_of_different_data_differ():
    assert make().summary() == make(seed=1).summary() == data.summary(DATA)
    assert data.summary(DATA).startswith("20 examples, CRC-32 ")
    assert make(iterator=Counter).summary() == ""
    others = (
        {"x": DATA["x"]},
        {"x": DATA["x"], "z": DATA["y"]},
        {**DATA, "y": DATA["y"] + 1},
    )
    summaries = {data.summary(other) for other in (DATA, *others)}
    assert len(summaries) == 4


def test_a_checkpoint_with_another_order_of_examples_is_refused():
    with pytest.raises(
        ValueError, match="a different order of examples wrote the checkpoint of step 5"
    ):
        make().restore([{"step": 5, "examples": 20}])


class Tensor:
    """An array of a library whose types NumPy does not know."""

    ndim, shape, dtype = 1, (8,), "torch.float32"

    def __len__(self):
        return 8


class Odd(Counter):
    """An iterator that repeats one value in place of a batch."""

    def __init__(self, part, value):
        super().__init__(part)
        self._value = value

    def __next__(self):
        return self._value


@pytest.mark.parametrize(
    "iterator, match",
    [
        (lambda part: iter([]), "list_iterator, which has no get_state, set_state"),
        (lambda part: Counter(part, rows=3), "has 3 rows. It must have the 8 rows"),
        (
            lambda part: Odd(part, [("a", 1)]),
            "of type list. It must be a dictionary of arrays",
        ),
        (
            lambda part: Odd(part, {"x": np.array(["a"] * 8)}),
            "which cannot go to a device",
        ),
        (
            lambda part: Odd(part, {"x": np.zeros(8, ">f4")}),
            "type >f4 .*cannot go to a device",
        ),
        (lambda part: Odd(part, {0: np.zeros(8)}), "under 0. Names are strings"),
        (lambda part: Odd(part, {"x": {"y": np.zeros(8)}}), "a dictionary under 'x'"),
        (
            lambda part: Odd(part, {"x": Tensor()}),
            r"has a Tensor under 'x'.* np.asarray\(...\)",
        ),
        (
            lambda part: Odd(part, {"x": np.ma.array(np.zeros(8))}),
            r"has a MaskedArray under 'x'.* .filled\(value\)",
        ),
        (lambda part: Counter(part, last=0), "ended before the run"),
    ],
)
def test_iterators_that_do_not_fit_are_refused(iterator, match):
    with pytest.raises(ValueError, match=match):
        next(make(iterator=iterator))


class Filling(Counter):
    """An iterator that reads each batch into the same array, which starts where JAX
    could share its memory.
    """

    def __init__(self, part):
        super().__init__(part)
        memory = np.empty(1024, np.uint8)
        start = -memory.ctypes.data % 64
        self._array = memory[start : start + 512].view(np.float32).reshape(8, 16)

    def __next__(self):
        self._array[...] = super().__next__()["x"][:, None]
        return {"x": self._array}


def test_an_iterator_may_write_into_its_arrays_again():
    train = make(mesh.make_mesh(devices=jax.devices()[:1]), Filling)
    first, second = next(train), next(train)
    np.testing.assert_array_equal(first["x"], np.zeros((8, 16)))
    np.testing.assert_array_equal(second["x"], np.ones((8, 16)))


@pytest.mark.parametrize(
    "state",
    [
        {1, 2},
        [np.array([None])],
        {"epochs": {1: "done"}},
        {"position": {"tuple": [1, 2]}},
        {"buffer": np.ma.array([1, 2], mask=[True, False])},
        (jnp.ones(2, jnp.bfloat16).__array__(),),
    ],
    ids=str,
)
def test_a_state_that_json_cannot_hold_is_refused(state):
    class Holder(Counter):
        def get_state(self):
            return state

    with pytest.raises(
        ValueError, match="get_state of Holder returned a value that JSON cannot"
    ):
        make(iterator=Holder)


def test_a_state_survives_the_round_trip_through_json():
    state = {
        "tuple": (1, (2.5, None), [True, "x"]),
        "bytes": [b"", b"\xff"],
        "arrays": (
            np.arange(6, dtype=np.uint8).reshape(2, 3).T,
            np.float32(1.5),
            np.zeros((0, 2)),
        ),
        "random": np.random.default_rng(3).bit_generator.state,
        "nan": np.array([np.nan, -0.0]),
    }
    encoded = batches._to_json(state)
    decoded = batches._from_json(json.loads(json.dumps(encoded)))
    assert batches._to_json(decoded) == encoded
    assert decoded["tuple"] == state["tuple"] and decoded["bytes"] == state["bytes"]
    assert decoded["random"] == state["random"] and decoded["arrays"][1] == 1.5
    for one, other in (
        (decoded["arrays"][0], state["arrays"][0]),
        (decoded["nan"], state["nan"]),
    ):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert one.tobytes() == other.tobytes()
    # States from older checkpoints decode to the same values as before.
    assert batches._from_json({"base64": "Mg=="}) == b"2"
    assert batches._from_json({"next_index": [1, 2]}) == {"next_index": [1, 2]}


class Actor:
    """An iterator that counts its acts at each step, and changes the array of its state
    in place.
    """

    acts_every_steps = 3

    def __init__(self, part):
        self._rows = sum(map(len, part.rows))
        self.acted = np.zeros(20, np.int64)
        self.served = 0

    def act(self, step, predict):
        self.acted[step] += 1
        self.acted[0] = predict({"x": np.ones(2)})

    def __next__(self):
        self.served += 1
        return {"x": np.full(self._rows, self.acted[0])}

    def get_state(self):
        return {"acted": self.acted, "served": self.served}

    def set_state(self, state):
        self.acted, self.served = state["acted"], state["served"]


def served(train, steps):
    """Returns the values of the batches of steps; the number of each step stands in for
    its state.
    """
    predict = lambda state, batch: int(10 * state + batch["x"].sum())
    return [int(train.batch_for_step(step, predict, step)["x"][0]) for step in steps]


def test_an_iterator_acts_every_few_steps():
    train = make(iterator=Actor)
    assert served(train, range(1, 9)) == [12, 12, 12, 42, 42, 42, 72, 72]
    assert train._iterator.acted[1:].nonzero()[0].tolist() == [0, 3, 6]
    assert make().rehearsal() is None


@pytest.mark.parametrize("stop", range(8))
def test_an_iterator_that_acts_resumes_from_any_step(stop):
    whole = make(iterator=Actor)
    expected = served(whole, range(1, 9))
    stopped, again = make(iterator=Actor), make(iterator=Actor)
    seen = served(stopped, range(1, stop + 1))
    position = json.loads(json.dumps(stopped.position(stop)))
    # Batches after the save do not change the saved position.
    served(stopped, range(stop + 1, 9))
    again.restore([position])
    assert seen + served(again, range(stop + 1, 9)) == expected
    # The resumed iterator neither repeats nor omits an act.
    assert again.position(8) == whole.position(8)


def test_a_rehearsal_does_not_change_the_position():
    class Ended(BaseException):
        pass

    def end(batch):
        raise Ended

    train = make(iterator=Actor)
    before = train.position(0)
    with pytest.raises(Ended):
        train.rehearsal()(end)
    assert train.position(0) == before
    train.rehearsal()(lambda batch: 5)
    assert train.position(0) == before


@pytest.mark.parametrize("every", [0, -1, 1.0, True, "2"])
def test_an_invalid_acts_every_steps_is_refused(every):
    kind = type("Odd", (Actor,), {"acts_every_steps": every})
    with pytest.raises(
        ValueError, match=f"Odd.acts_every_steps={every!r} must be a number of"
    ):
        make(iterator=kind)


def test_an_iterator_without_an_act_method_is_refused():
    kind = type("Idle", (Counter,), {"acts_every_steps": 1})
    with pytest.raises(
        ValueError, match=r"Idle has acts_every_steps=1, but no method act\(step, p"
    ):
        make(iterator=kind)


def test_evaluation_takes_each_example_once():
    for the_mesh in (mesh.make_mesh(), mesh.make_mesh(GROUPS)):
        seen = []
        for batch in batches.EvalBatches(DATA, the_mesh, 16):
            assert batch["x"].shape == (16,)
            seen += np.asarray(batch["x"])[np.asarray(batch["_mask"])].tolist()
        assert seen == list(range(20))


@pytest.mark.parametrize(
    "kwargs,match",
    [
        (
            {"batch_size": 12},
            "batch_size=12 must be a positive multiple of .*= 8; the nearest: 8 or 16",
        ),
        ({"batch_size": 3}, "the nearest: 8"),
        ({"batch_size": 0}, "batch_size=0 .* the nearest: 8"),
        ({"batch_size": -8}, "batch_size=-8"),
        ({"batch_size": 8, "micro_batches": 2}, "= 16; the nearest: 16"),
        ({"batch_size": 24}, "batch_size=24 exceeds the 20 examples"),
    ],
)
def test_batch_sizes_that_do_not_fit_are_refused(kwargs, match):
    with pytest.raises(ValueError, match=match):
        make(**kwargs)


def test_an_eval_batch_size_that_does_not_fit_is_refused():
    with pytest.raises(
        ValueError, match="eval_batch_size=9 .* replicas = 8; the nearest: 8 or 16"
    ):
        batches.EvalBatches(DATA, mesh.make_mesh(), 9)
