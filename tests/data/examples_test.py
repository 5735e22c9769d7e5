"""Examples: their order in each epoch, and the rows that each process reads."""

import grain
import jax.numpy as jnp
import numpy as np
import pytest

from xshard import data
from xshard.data import examples

DATA = {"x": np.arange(20), "y": np.arange(40).reshape(20, 2)}


class Files:
    """A source that reads one example at a time."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        assert 0 <= index < 20
        return {name: array[index] for name, array in DATA.items()}


def part(rows=range(8), groups=1, seed=0):
    return data.Part(8, (np.asarray(rows),) * groups, seed)


def read(examples, the_part, batches, state=None):
    iterator = data.iterate(examples, the_part)
    if state is not None:
        iterator.set_state(state)
    result = [next(iterator) for _ in range(batches)]
    return np.stack([batch["x"] for batch in result]), iterator.get_state()


@pytest.mark.parametrize("examples", [DATA, Files()], ids=["arrays", "source"])
def test_each_epoch_has_each_example_once_in_its_own_order(examples):
    seen, _ = read(examples, part(), 5)
    # Five batches of 8 are two epochs of 20: no example is left out at an epoch's end.
    epochs = seen.reshape(2, 20)
    assert [sorted(epoch) for epoch in epochs.tolist()] == [list(range(20))] * 2
    assert not np.array_equal(*epochs)
    again, _ = read(examples, part(), 5)
    np.testing.assert_array_equal(seen, again)
    assert not np.array_equal(seen, read(examples, part(seed=1), 5)[0])
    np.testing.assert_array_equal(seen, read(DATA, part(), 5)[0])


def test_the_arrays_of_an_example_stay_together():
    batch = next(data.iterate(Files(), part()))
    np.testing.assert_array_equal(batch["y"], DATA["y"][batch["x"]])


@pytest.mark.parametrize("examples", [DATA, Files()], ids=["arrays", "source"])
@pytest.mark.parametrize("before, after", [(1, 4), (4, 1), (2, 4), (4, 2)])
def test_another_number_of_processes_resumes_at_the_next_example(
    examples, before, after
):
    whole, _ = read(examples, part(), 6)
    first = [read(examples, part(rows), 3) for rows in np.arange(8).reshape(before, -1)]
    states = [state for _, state in first]
    # Batches that were read ahead do not count.
    assert states == [{"batches": 3, "examples": 20}] * before
    second = [
        read(examples, part(rows), 3, states[0])
        for rows in np.arange(8).reshape(after, -1)
    ]
    parts = [
        np.concatenate([seen for seen, _ in one], axis=1) for one in (first, second)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_groups_have_their_own_orders_and_the_first_matches_a_single_run():
    both, _ = read(DATA, part(groups=2), 1)
    first, second = both.reshape(2, 8)
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first, read(DATA, part(), 1)[0][0])


def test_random_grain_transformations_differ_by_epoch_and_are_restored():
    noisy = (
        grain.MapDataset.range(20)
        .seed(3)
        .random_map(lambda index, rng: {"x": np.float64(index), "noise": rng.random()})
    )
    iterator = data.iterate(noisy, part())
    seen = [next(iterator) for _ in range(5)]
    x, noise = (
        np.concatenate([batch[name] for batch in seen]) for name in ("x", "noise")
    )
    assert sorted(x[:20]) == sorted(x[20:]) == list(range(20))
    assert len(set(noise)) == 40
    iterator.set_state({"batches": 3, "examples": 20})
    np.testing.assert_array_equal(next(iterator)["noise"], seen[3]["noise"])


def test_data_that_differs_from_the_checkpoints_is_refused():
    iterator = data.iterate(DATA, part())
    with pytest.raises(
        ValueError, match="written with 21 training examples, but there are now 20"
    ):
        iterator.set_state({"batches": 3, "examples": 21})


class Random(Files):
    """A source whose examples differ from one reading to the next."""

    def __init__(self, seed):
        self._random = np.random.default_rng(seed)

    def __getitem__(self, index):
        return {"x": self._random.normal(size=3)}


def test_a_summary_covers_every_byte_of_arrays():
    x = np.arange(100_000, dtype=np.float32).reshape(50_000, 2)
    before = data.summary({"x": x})
    assert (
        before
        == data.summary({"x": x.copy()})
        == data.summary({"x": np.asfortranarray(x)})
    )
    for place in ((0, 0), (31_337, 1), (-1, 1)):
        changed = x.copy()
        changed[place] += 1
        assert data.summary({"x": changed}) != before


def test_a_summary_of_large_arrays_covers_some_rows(monkeypatch):
    monkeypatch.setattr(examples, "_SUMMED_BYTES", 1000)
    x = np.arange(100_000, dtype=np.float32).reshape(50_000, 2)
    assert data.summary({"x": x}).endswith(" of 4096 of them")
    assert data.summary({"x": x}) != data.summary({"x": x + 1})


def test_a_summary_of_a_source_covers_some_examples_or_their_types():
    assert data.summary(Files()) == data.summary(Files())
    assert data.summary(Files()).endswith(" of 16 of them")
    assert data.summary(Random(0)) == data.summary(Random(1))
    assert data.summary(Random(0)).endswith(" of their types")


class Labels:
    """Rows under labels, which `[]` takes: an array's attributes, not its meaning."""

    def __init__(self, values):
        self._values = values
        self.ndim, self.shape, self.dtype = values.ndim, values.shape, values.dtype

    def __len__(self):
        return len(self._values)

    def __getitem__(self, labels):
        return self._values[::-1][labels]


@pytest.mark.parametrize(
    "x",
    [
        Labels(np.zeros(20)),
        np.ma.array(np.zeros(20), mask=np.ones(20)),
        np.zeros(20, [("a", "f4")]).view(np.recarray).a.view(np.recarray),
        np.zeros((20, 1)).view(np.matrix),
        [0.0] * 20,
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_only_looks_like_an_array_is_refused(x):
    kind = type(x).__name__
    with pytest.raises(ValueError, match=rf"a {kind} under 'x'.*np.asarray\("):
        data.check({"x": x, "y": np.zeros(20)})

    class Source(Files):
        def __getitem__(self, index):
            return {"x": x if index == 3 else np.zeros(np.shape(x))}

    with pytest.raises(ValueError, match=rf"Example 3 has a {kind} under 'x'"):
        data.take(Source(), np.arange(5))


@pytest.mark.parametrize("kind", ["array", "memmap", "jax"])
def test_arrays_of_numpy_and_of_jax_are_taken(tmp_path, kind):
    x = np.arange(20, dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    kinds = {
        "array": x,
        "memmap": np.load(tmp_path / "x.npy", mmap_mode="r"),
        "jax": jnp.asarray(x),
    }
    data.check({"x": kinds[kind]})
    taken = data.take({"x": kinds[kind]}, np.array([3, 1]))["x"]
    assert np.asarray(taken).tolist() == [3.0, 1.0]


class Uneven(Files):
    """A source in which an example, or all, differ from the others."""

    def __init__(self, change):
        self._change = change

    def __getitem__(self, index):
        return super().__getitem__(index) | self._change(index)


@pytest.mark.parametrize(
    "examples, match",
    [
        ({"x": np.ones(7)}, "batch_size=8 exceeds the 7 examples"),
        ({"x": np.ones(20), "y": np.ones(3)}, "one row for each example"),
        ({"x": np.ones(0)}, "different numbers of rows, or of none"),
        ({}, "is an empty dict"),
        ([], "of type list, without any example"),
        (iter([1]), "of type list_iterator, without __len__ and __getitem__"),
    ],
)
def test_invalid_data_is_refused(examples, match):
    with pytest.raises(ValueError, match=match):
        data.iterate(examples, part())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda i: {"x": np.zeros(i)}, r"Example \d+ .*\(shapes by name\)"),
        (lambda i: {"z": 1.0} if i == 13 else {}, "xample 13 has .*'z'"),
        (lambda i: {} if i == 13 else {"z": 1.0}, r"xample 13 has .*\(2,\)}"),
        (lambda i: {"z": "a" if i == 13 else 1.0}, "Example 13 has a str under 'z'"),
    ],
)
def test_examples_that_cannot_be_stacked_are_refused(change, match):
    iterator = data.iterate(Uneven(change), part())
    with pytest.raises(ValueError, match=match):
        for _ in range(3):
            next(iterator)


def test_a_batch_of_one_has_the_names_of_the_first_example():
    source = Uneven(lambda i: {} if i == 13 else {"z": 1.0})
    iterator = data.iterate(source, data.Part(1, (np.arange(1),), seed=0))
    with pytest.raises(ValueError, match=r"Example 13 has .*\['x', 'y'\], .*'z'"):
        for _ in range(20):
            next(iterator)


def test_numbers_of_an_example_become_an_array():
    source = Uneven(lambda i: {"z": float(i), "w": i, "is_even": i % 2 == 0})
    taken = data.take(source, np.array([3, 1]))
    assert taken["z"].tolist() == [3.0, 1.0] and taken["w"].dtype == np.int64
    assert taken["is_even"].tolist() == [False, False]


class Broken(Files):
    def __getitem__(self, index):
        return super().__getitem__(index) if index != 13 else 1 / 0


def test_an_example_that_cannot_be_read_is_named_with_its_number():
    iterator = data.iterate(Broken(), part())
    with pytest.raises(ZeroDivisionError) as caught:
        for _ in range(3):
            next(iterator)
    assert "This is example 13 of Broken." in caught.value.__notes__
