"""Streams: the same batches on any number of processes and after a stop at any step;
packed text.
"""

import dataclasses
import json

import grain
import jax
import numpy as np
import pytest

from xshard import data, errors, mesh
from xshard.data import batches, pipelines, text

LENGTH = 8
NO_THREADS = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
# Documents of 1 to 23 tokens, all tokens different.
DOCUMENTS = np.split(np.arange(300), np.cumsum([1 + 7 * i % 23 for i in range(24)]))


def parts(processes, groups=1, batch_size=8):
    """Returns the part of the rows that each process reads. The rows of a group are
    contiguous.
    """
    whole = np.arange(groups * batch_size).reshape(processes, -1)
    return [
        data.Part(
            batch_size,
            tuple(
                rows[rows // batch_size == g] - g * batch_size for g in range(groups)
            ),
            seed=5,
        )
        for rows in whole
    ]


def packed(stream):
    documents = stream.part(grain.MapDataset.source(DOCUMENTS))
    return text.pack(documents, as_tokens, LENGTH, NO_THREADS)


def as_tokens(tokens):
    return np.asarray(tokens, np.int32)


def threaded(stream):
    """Packs as a run does, with documents read ahead."""
    return text.pack(stream.part(grain.MapDataset.source(DOCUMENTS)), as_tokens, LENGTH)


def mixed(stream):
    """Mixes three rows of a first source with one of a second, and shuffles them within
    windows.
    """
    sources = [
        packed(stream),
        packed(dataclasses.replace(stream, seed=1)).map(negative),
    ]
    rows = grain.IterDataset.mix(sources, [3, 1])
    return grain.experimental.WindowShuffleIterDataset(
        rows, window_size=3, seed=stream.seed
    )


def negative(row):
    return {**row, "text": -row["text"]}


def start(processes, make=packed, count=4, **kwargs):
    return [pipelines.Streams(make, count, part) for part in parts(processes, **kwargs)]


def read(pod, steps):
    """Returns the batches of all processes, with the rows of each process after those
    of the previous one.
    """
    result = []
    for _ in range(steps):
        process_batches = [next(process) for process in pod]
        result.append(
            {
                k: np.concatenate([batch[k] for batch in process_batches])
                for k in process_batches[0]
            }
        )
    return result


def saved(pod):
    """Returns the states of all processes, in the form in which a checkpoint restores
    them.
    """
    return json.loads(
        json.dumps([batches._to_json(process.get_state()) for process in pod])
    )


def restored(states, processes, **kwargs):
    pod = start(processes, **kwargs)
    for process in pod:
        process.set_state(
            process.join_states([batches._from_json(state) for state in states])
        )
    return pod


def assert_same(first, second):
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [packed, mixed])
@pytest.mark.parametrize("groups", [1, 2])
def test_batches_are_the_same_on_any_number_of_processes(make, groups):
    whole = read(start(1, make=make, groups=groups), 6)
    # With more processes than streams, every process that shares a stream runs it.
    for processes in (2, 4, 8 * groups):
        assert_same(read(start(processes, make=make, groups=groups), 6), whole)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("make", "counts"),
    [
        (packed, (1, 4, 2)),
        (packed, (2, 2, 8)),
        (mixed, (2, 1, 4)),
        (threaded, (4, 1, 2)),
    ],
)
def test_a_run_resumes_from_any_step_on_other_numbers_of_processes(make, counts):
    whole = read(start(1, make=make), 7)
    for first in range(7):
        pod = start(counts[0], make=make)
        seen = read(pod, first)
        states = saved(pod)
        # Batches that are read after the save make no difference.
        read(pod, 1)
        pod = restored(states, counts[1], make=make)
        seen += read(pod, (7 - first) // 2)
        pod = restored(saved(pod), counts[2], make=make)
        assert_same(seen + read(pod, 7 - len(seen)), whole)


def test_groups_have_their_own_orders_and_the_first_matches_a_single_run():
    (both,), (alone,) = read(start(1, groups=2), 1), read(start(1), 1)
    first, second = np.split(both["text"], 2)
    np.testing.assert_array_equal(first, alone["text"])
    assert not np.array_equal(first, second)


def test_an_epoch_has_each_document_in_one_stream():
    source = grain.MapDataset.range(24)
    for seed in (0, 2**32 - 1):
        streams = [pipelines.Stream(index, 4, seed).part(source) for index in range(4)]
        epochs = [
            [x[6 * epoch + i] for x in streams for i in range(6)] for epoch in range(2)
        ]
        assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(24))
        assert epochs[0] != epochs[1]


def test_packing_loses_no_token_and_joins_no_documents():
    rows = list(text.pack(grain.MapDataset.source(DOCUMENTS), as_tokens, LENGTH))
    seen = []
    for row in rows:
        tokens, segments, positions = (
            row[f"text{end}"] for end in ("", "_segment_ids", "_positions")
        )
        assert all(x.dtype == np.int32 and x.shape == (LENGTH,) for x in row.values())
        seen += tokens[segments > 0].tolist()
        for segment in range(1, segments.max() + 1):
            inside = segments == segment
            # A segment has tokens of a single document. All tokens are different, so
            # each identifies its document.
            homes = {
                next(i for i, d in enumerate(DOCUMENTS) if t in d)
                for t in tokens[inside]
            }
            assert len(homes) == 1
            assert np.array_equal(positions[inside], np.arange(inside.sum()))
    assert seen == list(range(300))
    # Only the last row is padded.
    assert all((row["text_segment_ids"] > 0).all() for row in rows[:-1])


def test_mixing_keeps_its_weights_and_separates_the_sources():
    rows = np.concatenate([batch["text"] for batch in read(start(1, make=mixed), 12)])
    of_second = (rows.sum(axis=-1) < 0).sum()
    # In each stream, one row in four is from the second source, shuffled within windows
    # of three rows. The tolerance is one of a stream's 24 rows.
    assert abs(of_second / len(rows) - 1 / 4) <= 1 / 24
    # No row has values of both sources.
    assert ((rows > 0).any(axis=-1) != (rows < 0).any(axis=-1)).all()


def test_streams_that_do_not_fit_are_refused():
    (part,) = parts(1)
    for count in (0, 3, 16):
        with pytest.raises(
            ValueError, match=f"{count} streams do not fit batch_size=8"
        ):
            pipelines.Streams(packed, count, part)
    few = lambda stream: stream.part(grain.MapDataset.range(3)).to_iter_dataset()
    with pytest.raises(ValueError, match="3 examples for 4 streams"):
        pipelines.Streams(few, 4, part)
    empty = lambda stream: grain.MapDataset.range(0).to_iter_dataset()
    with pytest.raises(ValueError, match="Stream 0 of 1, or a dataset .* has no rows"):
        pipelines.Streams(empty, 1, part).summary()
    with pytest.raises(
        ValueError, match="of type list_iterator, which has no get_state"
    ):
        pipelines.Streams(lambda stream: [1, 2], 4, part)


@pytest.mark.parametrize(
    "kwargs, match",
    [
        ({"count": 2}, "4 streams of 2 rows .* the run now has 2 streams of 4 rows"),
        (
            {"batch_size": 16},
            "4 streams of 2 rows .* the run now has 4 streams of 4 rows",
        ),
        (
            {"make": mixed},
            "CRC-32 .* the run now has 4 streams of 2 rows of a batch, CRC-32",
        ),
        ({"groups": 2}, "lacks the streams 1/0, 1/1, 1/2, 1/3 of this process"),
    ],
)
def test_a_state_of_other_streams_is_refused(kwargs, match):
    states = saved(start(1))
    with pytest.raises(ValueError, match=match):
        restored(states, 1, **kwargs)


def more(stream):
    """Packs one document more than `packed`, so that the order may begin as there."""
    documents = grain.MapDataset.source([*DOCUMENTS, [300]])
    return text.pack(stream.part(documents), as_tokens, LENGTH, NO_THREADS)


def test_a_state_of_other_examples_is_refused(monkeypatch):
    # The first rows are equal in some orders.
    monkeypatch.setattr(pipelines.Streams, "_data", "the same first rows")
    states = saved(start(1))
    with pytest.raises(ValueError, match="rows, 25 examples; .* rows, 26 examples"):
        restored(states, 1, make=more)
    # Earlier versions did not store the number.
    assert states[0].pop("examples") == [25]
    restored(states, 1, make=more)


def test_a_state_of_another_iterator_is_refused():
    with pytest.raises(
        ValueError, match="a different iterator wrote; this one has streams"
    ):
        restored([{"batches": 3, "examples": 20}], 1)


def test_a_checkpoint_restores_the_streams_of_other_processes():
    """One process restores the streams of four through the position in their
    checkpoint.
    """
    the_mesh = mesh.make_mesh(devices=jax.devices()[:4])
    make = lambda part: pipelines.Streams(packed, 4, part)
    train = batches.TrainBatches(make, the_mesh, batch_size=8, seed=5)
    assert train.summary().startswith("4 streams, CRC-32 ")
    whole = read(start(1), 5)
    pod = start(4)
    read(pod, 3)
    train.restore([{"step": 3, "iterator": state} for state in saved(pod)])
    np.testing.assert_array_equal(next(train)["text"], whole[3]["text"])
    # The state of a single process lacks the streams of the others.
    lacking = [{"step": 3, "iterator": saved(pod)[0]}]
    with pytest.raises(ValueError, match="lacks the streams 0/1, 0/2, 0/3"):
        train.restore(lacking)


TABLE = [(0, [3, 1]), (5, [0, 1]), (9, [1, 1])]


def scheduled(stream):
    """Mixes rows of two sources by a table."""
    sources = [
        packed(stream),
        packed(dataclasses.replace(stream, seed=1)).map(negative),
    ]
    return pipelines.Mix(sources, TABLE, stream)


def is_second(batch):
    """Returns which rows of a batch come from the second source."""
    # Token 0 is neither positive nor negative.
    return np.any(batch["text"] < 0, axis=1)


@pytest.mark.parametrize("count", [1, 4, 8])
def test_each_batch_has_the_proportions_of_the_table(count):
    found = [is_second(batch) for batch in read(start(1, scheduled, count), 13)]
    shares = np.mean(found, axis=1)
    assert set(shares[5:9]) == {1.0}
    for begin, end, share in ((0, 5, 1 / 4), (9, 13, 1 / 2)):
        # A batch has eight rows, of which at most one too few or too many.
        np.testing.assert_allclose(shares[begin:end], share, atol=1 / 8)
        # And all of them together hardly more.
        np.testing.assert_allclose(np.mean(shares[begin:end]), share, atol=1 / 20)


@pytest.mark.parametrize("stop", [4, 5, 9, 10])
def test_a_mix_resumes_at_any_row_on_other_processes(stop):
    expected = read(start(1, scheduled), 12)
    pod = start(2, scheduled)
    begun = read(pod, stop)
    resumed = restored(saved(pod), 4, make=scheduled)
    for batch, other in zip(begun + read(resumed, 12 - stop), expected, strict=True):
        np.testing.assert_equal(batch, other)


@pytest.mark.parametrize(
    "table",
    [
        [],
        5,
        [(1, [1, 1])],
        [(0, [1, 1]), (0, [1, 1])],
        [(0, [1, 1, 1])],
        [(0, [0, 0])],
        [(0, [-1, 2])],
        [(0, [float("nan"), 1])],
        [(0, [1, 1]), (2.5, [1, 1])],
        [(0, 1)],
    ],
    ids=str,
)
def test_a_table_that_is_none_is_refused(table):
    stream = pipelines.Stream(0, 1, 0)
    with pytest.raises(errors.UserError, match="The table .* must be rows"):
        pipelines.Mix([[], []], table, stream)


def test_a_mix_refuses_the_state_of_another_iterator():
    stream = pipelines.Stream(0, 1, 0)
    rows = iter(scheduled(stream))
    state = rows.get_state()
    with pytest.raises(errors.UserError, match="no pipelines.Mix wrote"):
        rows.set_state({"next": 3})
    with pytest.raises(errors.UserError, match="a mix of 3 datasets"):
        rows.set_state({**state, "datasets": [*state["datasets"], {}]})


def test_a_mix_refuses_another_table(monkeypatch):
    begun = start(1, scheduled)
    read(begun, 4)
    states = saved(begun)
    # The first rows, which identify the data, come from the same datasets.
    monkeypatch.setitem(globals(), "TABLE", [*TABLE[:2], (9, [1, 2])])
    with pytest.raises(errors.UserError, match=r"\[9, \[1.0, 1.0\]\].*now has"):
        restored(states, 1, make=scheduled)
