"""Batches on the mesh: each process supplies the rows that its devices hold.

A run reads its training data through one iterator per process. Checkpoints contain the
iterators' states.
"""

import base64
import contextlib
import functools
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from xshard import data, errors, logical
from xshard import mesh as mesh_lib
from xshard.base import array_types, places
from xshard.data import examples as examples_lib

# The keys that mark bytes, arrays and tuples in the JSON of a state.
_BYTES = "base64"
_ARRAY = "npy"
_TUPLE = "tuple"
_MARKERS = (_BYTES, _ARRAY, _TUPLE)


class TrainBatches:
    """The batches of a training run, in order.

    Attributes:
      example: one row of a batch.
      epoch_examples: the number of examples of an epoch, of one group; None if
        unknown.
      batch_size: the number of examples of a step, of one group.
    """

    def __init__(
        self,
        make: Callable[[data.Part], data.BatchIterator],
        mesh: jax.sharding.Mesh,
        replicas: logical.Replicas | None = None,
        *,
        batch_size: int,
        seed: int,
        micro_batches: int = 1,
        separate_slices: bool = False,
    ):
        """Checks the sizes and creates the iterator.

        Args:
          make: creates the iterator, such as `functools.partial(xshard.data.iterate,
            examples)`.
          mesh: the run's mesh.
          replicas: the logical replicas on it, if there are any.
          batch_size: the number of examples per step of one model, over all its
            replicas.
          seed: the seed of the order.
          micro_batches: the number of parts that each replica computes one after the
            other.
          separate_slices: whether the groups of the mesh are slices that train one
            model apart. They divide each batch.

        Raises:
          ValueError: if the replicas and micro-batches do not divide the batch, or the
            iterator is invalid.
        """
        replica_mesh = mesh if replicas is None else replicas.mesh
        self.batch_size = batch_size
        groups = mesh_lib.num_groups(mesh)
        check_train_batch(
            batch_size, replica_mesh, micro_batches, separate_slices=separate_slices
        )
        group_size = size_of_group(batch_size, mesh, separate_slices)
        self._sharding = mesh_lib.sharding(mesh, mesh_lib.BATCH)
        self._rows = _Rows(group_size, self._sharding, replicas, groups)
        self._skips: Mapping[int, int] = {}
        self._first: dict[str, np.ndarray] | None = None
        # What drawing the next step's batch has given, if it was drawn with those of
        # steps before: the batch, or the iterator's error.
        self._ahead: data.Arrays | Exception | None = None
        # The names, shapes and dtypes of the last batch that passed the checks.
        self._checked_kind: list[Any] | None = None

        local_rows = self._rows.local_rows
        rows_of_groups = []
        # The rows of slices that divide a batch are numbered through.
        models = 1 if separate_slices else groups
        for group in range(models):
            rows_of_group = local_rows[local_rows // batch_size == group]
            rows_of_groups.append(rows_of_group - group * batch_size)
        part = data.Part(batch_size, rows=tuple(rows_of_groups), seed=seed)
        self._iterator: Any = make(part)
        _check_iterator(self._iterator)
        self._acts_every_steps = getattr(self._iterator, "acts_every_steps", None)
        if self._acts_every_steps is not None:
            _check_acts(self._iterator, self._acts_every_steps)
        self.epoch_examples: int | None = getattr(
            self._iterator, "epoch_examples", None
        )
        # The first batch is read for its shapes, and then put back for the first step.
        with self._restoring_iterator():
            first = self._take_next()
        # Compared with what the iterator gives after that.
        self._first = {name: np.array(array) for name, array in first.items()}
        # One row is enough for names, dtypes and shapes.
        self.example = {name: np.array(array[:1]) for name, array in first.items()}

    def first_example(self) -> data.Arrays:
        """Returns the first row of the first batch, on all processes, which call it
        together.

        `example` is a row of this process's own. A network may create state from the
        values of an example, as the averages of `hk.BatchNorm` are.
        """
        if places.own().count == 1:
            return self.example
        # A batch in which each process has copies of its own example.
        local = {}
        for name, row in self.example.items():
            shape = (len(self._rows.local_rows), *row.shape[1:])
            local[name] = np.broadcast_to(row, shape)
        take_first = jax.jit(
            lambda batch: {name: x[:1] for name, x in batch.items()},
            out_shardings=jax.NamedSharding(self._sharding.mesh, jax.P()),
        )
        first = take_first(self._rows.to_devices(local))
        return {name: np.asarray(x.addressable_data(0)) for name, x in first.items()}

    def summary(self) -> str:
        """Returns a summary of the data, which the processes compare.

        It is empty if the iterator has none.
        """
        if hasattr(self._iterator, "summary"):
            return str(self._iterator.summary())
        return ""

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes, dtypes and shardings of a batch."""
        return shapes(self.example, self._rows.count, self._sharding)

    @property
    def rows(self) -> np.ndarray:
        """For each row on the devices, the row of the batch that it holds.

        Those of a group g begin at g * batch_size.
        """
        return self._rows.rows

    def __next__(self) -> dict[str, jax.Array]:
        """Returns the iterator's next batch.

        It has (groups * batch_size) rows along ('group', 'slice', 'replica').
        """
        return self._rows.to_devices(self._take_next(), copy=self._may_overwrite)

    @property
    def _may_overwrite(self) -> bool:
        """Whether the iterator may read each batch into the same arrays."""
        return not getattr(self._iterator, "arrays_are_new", False)

    def batch_for_step(
        self, step: int, predict: Callable[[Any, Mapping[str, Any]], Any], state: Any
    ) -> dict[str, jax.Array]:
        """Returns the batch of a step, after the iterator has acted if that is due.

        Only the step decides whether it is due. A position that was saved after the
        previous step is from before the iterator acts, so a run that resumes there
        acts, and passes over batches, as the original run did.

        Args:
          step: the number of the next step, from 1.
          predict: takes a state of the run and a batch on the host to outputs on the
            host.
          state: the run's state.
        """
        self._prepare(step, predict, state)
        return next(self)

    def _prepare(
        self, step: int, predict: Callable[[Any, Mapping[str, Any]], Any], state: Any
    ) -> None:
        """Lets the iterator act and passes over batches, where a step begins so."""
        every = self._acts_every_steps
        if every is not None and (step - 1) % every == 0:
            self._first = None
            self._iterator.act(step, functools.partial(predict, state))
        for _ in range(self._skips.get(step, 0)):
            self._take_next()

    def next_boundary(self, step: int) -> int:
        """Returns the last step, from a step on, whose batch may be drawn with its own.

        The iterator acts before the one after it.

        Args:
          step: the number of the next step, from 1.
        """
        every = self._acts_every_steps
        if every is None:
            return sys.maxsize
        return (step - 1) // every * every + every

    def batches_for_steps(
        self,
        steps: range,
        most: int,
        predict: Callable[[Any, Mapping[str, Any]], Any],
        state: Any,
    ) -> tuple[dict[str, jax.Array], int]:
        """Returns the batches of several steps, stacked.

        Args:
          steps: the numbers of the steps, at most up to `next_boundary` of the first,
            and to the last one before batches that `set_skips` passes over.
          most: the number of batches in each array; those that are not asked for are
            zeros.
          predict: as for `batch_for_step`.
          state: the run's state.

        Returns:
          Arrays by name, of shape (most, rows, ...); and for how many of the steps they
          are. A batch whose names, shapes or dtypes differ from the first one's is the
          first of the next call. So is an error of the iterator: the steps before it
          are made and logged first.
        """
        self._prepare(steps.start, predict, state)
        if self.draws_many:
            stacked = self._take_many(len(steps), most)
            return self._rows.stack_on_devices(stacked), len(steps)
        if self._ahead is not None:
            # A position can be saved after this step, also if the one after it differs.
            steps = steps[:1]
        stacked = {}
        kind = None
        for place in range(len(steps)):
            try:
                batch = self._take_next()
            except Exception as e:
                if not place:
                    raise
                self._ahead = e
                return self._rows.stack_on_devices(stacked), place
            kind_of_step = examples_lib.kinds(batch)
            if not place:
                kind = kind_of_step
                for name, array in batch.items():
                    stacked[name] = np.zeros((most, *array.shape), array.dtype)
            elif kind is None or kind_of_step != kind:
                # The iterator may write into its arrays for the next batch.
                self._ahead = {name: np.array(array) for name, array in batch.items()}
                return self._rows.stack_on_devices(stacked), place
            for name, array in batch.items():
                stacked[name][place] = array
        return self._rows.stack_on_devices(stacked), len(steps)

    @property
    def holds_batch(self) -> bool:
        """Whether the next step's batch has been drawn, or could not be, so that no
        position can be saved.
        """
        return self._ahead is not None

    @property
    def draws_many(self) -> bool:
        """Whether the iterator defines `next_batches` for its own batches.

        A wrapper or a subclass that changes `__next__` alone has that method from the
        iterator within, or from its base class. Its batches would be the unchanged
        ones.
        """
        for cls in type(self._iterator).__mro__:
            if "next_batches" in vars(cls):
                return True
            if "__next__" in vars(cls):
                return False
        return False

    def set_skips(self, passes: Mapping[int, int]) -> None:
        """Sets how many batches to draw and discard before certain steps, by step."""
        self._skips = passes

    def rehearsal(self) -> Callable[[Callable[..., Any]], None] | None:
        """Returns a function that lets the iterator act, and then restores it.

        The function takes the `predict` that the iterator gets. None if the iterator
        does not act.
        """
        if self._acts_every_steps is None:
            return None

        def rehearse(predict: Callable[..., Any]) -> None:
            with self._restoring_iterator():
                self._iterator.act(1, predict)

        return rehearse

    @contextlib.contextmanager
    def _restoring_iterator(self) -> Iterator[None]:
        """Restores the iterator's state at the end of the context."""
        # The state is copied, through the form that checkpoints use: the iterator may
        # write into its arrays.
        state = _from_json(_to_json(self._iterator.get_state()))
        try:
            yield
        finally:
            self._iterator.set_state(state)

    def position(self, step: int) -> dict[str, Any]:
        """Returns this process's position in its data after a step, as JSON values."""
        return {"step": step, "iterator": _to_json(self._iterator.get_state())}

    def restore(self, positions: Sequence[Mapping[str, Any]]) -> None:
        """Restores the position from a checkpoint.

        Args:
          positions: the positions of all processes that saved it.

        Raises:
          ValueError: if they are not positions in this data, or do not fit the number
            of processes.
        """
        self._ahead = None
        step = positions[0]["step"]
        if any("iterator" not in position for position in positions):
            raise errors.UserError(
                "A version of xshard with a different order of examples wrote the "
                f"checkpoint of step {step}. A resume would repeat some examples and "
                "omit others. Start a new run in another directory with --init_from."
            )
        self._first = None
        states = [position["iterator"] for position in positions]
        joins = hasattr(self._iterator, "join_states")
        if not joins:
            states = [self._own(states, step)]
        try:
            states = [_from_json(state) for state in states]
        except (ValueError, TypeError, EOFError) as e:
            raise errors.UserError(
                f"The checkpoint of step {step} has a position in the training data "
                f"that cannot be read: {e}. Resume from another checkpoint, or start a "
                "new run in another directory with --init_from."
            ) from e
        state = self._iterator.join_states(states) if joins else states[0]
        self._iterator.set_state(state)

    def _own(self, states: Sequence[Any], step: int) -> Any:
        """Returns this process's state of those of all processes, as JSON values."""
        place = places.own()
        # Equal states are not enough: processes that read different files may have
        # reached the same position in each.
        are_equal = all(state == states[0] for state in states)
        if are_equal and getattr(self._iterator, "state_is_shared", False):
            return states[0]
        if len(states) != place.count:
            raise errors.UserError(
                f"The checkpoint of step {step} has one state of the experiment's "
                f"iterator for each of {len(states)} processes, but there are now "
                f"{place.count} processes. Resume with {len(states)}; or give "
                "the iterator a state that all processes share, such as a number of "
                "batches, and set its attribute state_is_shared = True; or define its "
                "method join_states, as xshard.data.pipelines.Streams does."
            )
        return states[place.index]

    def _take_many(self, count: int, most: int) -> dict[str, np.ndarray]:
        """Draws the iterator's next batches at once, checks them, and adds zeros."""
        with _naming_the_end():
            many = self._iterator.next_batches(count)
        what = f"{type(self._iterator).__name__}.next_batches({count})"
        if not isinstance(many, Mapping):
            raise errors.UserError(
                f"{what} returned a {type(many).__name__}. It must return a dictionary "
                "of arrays by name."
            )
        first = {}
        padded = {}
        for name, array in many.items():
            # Fewer batches would be filled up with zeros.
            if not array_types.is_array(array) or array.shape[:1] != (count,):
                shape = getattr(array, "shape", "none")
                found = f"a {type(array).__name__} of shape {shape}"
                raise errors.UserError(
                    f"{what} returned {found} under {name!r}. It must return arrays "
                    f"of NumPy's own, or JAX's, of shape ({count}, rows, ...): {count} "
                    "batches, one after the other."
                )
            array = np.asarray(array)
            first[name] = array[0]
            padded[name] = array
            if count < most:
                padded[name] = np.zeros((most, *array.shape[1:]), array.dtype)
                padded[name][:count] = array
        self._check(first)
        dtypes = {name: array.dtype for name, array in first.items()}
        expected = {name: array.dtype for name, array in self.example.items()}
        if dtypes != expected:
            raise errors.UserError(
                f"{what} returned {_listed(dtypes)}, and the iterator's first "
                f"batch has {_listed(expected)}. Return the batches that as many "
                "calls of next() would, stacked."
            )
        return padded

    def _take_next(self) -> data.Arrays:
        ahead = self._ahead
        self._ahead = None
        if isinstance(ahead, Exception):
            raise ahead
        if ahead is not None:
            return ahead
        with _naming_the_end():
            batch = next(self._iterator)
        self._check(batch)
        return batch

    def _check(self, batch: data.Arrays) -> None:
        """Checks a batch that the iterator has returned."""
        # A batch that is like the one before it passes the checks that that one passed.
        kind = examples_lib.kinds(batch)
        if kind is None or kind != self._checked_kind:
            data.check_batch(batch, len(self._rows.local_rows))
            self._checked_kind = kind
        if self._first is not None:
            _warn_unless_equal(self._iterator, self._first, batch)
            self._first = None


class EvalBatches:
    """Batches of all examples, once and in order.

    They lie along ('slice', 'replica'), and are equal for all groups. The last batch is
    padded; '_mask' is False for padding.
    """

    def __init__(
        self,
        examples: data.Examples,
        mesh: jax.sharding.Mesh,
        batch_size: int,
        replicas: logical.Replicas | None = None,
    ):
        """Checks the batch size.

        Args:
          examples: the examples.
          mesh: the run's mesh.
          batch_size: the number of examples per batch.
          replicas: the logical replicas on it, if there are any.

        Raises:
          ValueError: if the replicas do not divide the batch.
        """
        parts = replicas.count if replicas else mesh_lib.num_replicas(mesh)
        check_batch_size("eval_batch_size", batch_size, parts, f"replicas = {parts}")
        self._examples = examples
        self._sharding = mesh_lib.sharding(mesh, mesh_lib.REPLICAS)
        self._rows = _Rows(batch_size, self._sharding, replicas)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes, dtypes and shardings of a batch."""
        example = {**data.take(self._examples, np.arange(1)), "_mask": np.ones(1, bool)}
        return shapes(example, self._rows.count, self._sharding)

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        size = data.num_examples(self._examples)
        for start in range(0, size, self._rows.batch_size):
            local_rows = start + self._rows.local_rows
            # Padding repeats the last example, so that it has the right shape and type.
            batch = data.take(self._examples, np.minimum(local_rows, size - 1))
            yield self._rows.to_devices({**batch, "_mask": local_rows < size})


class _Rows:
    """The placement of a batch's rows along the replicas of a mesh.

    It is the same for every batch.

    Attributes:
      batch_size: the number of rows of one group's batch.
      count: the number of rows on all devices, including padding.
      rows: for each row on the devices, the row of the batch that it holds; those of
        a group g begin at g * batch_size.
      local_rows: the rows on this process's devices, ascending, without duplicates.
    """

    def __init__(
        self,
        batch_size: int,
        sharding: jax.sharding.NamedSharding,
        replicas: logical.Replicas | None,
        groups: int = 1,
    ):
        """Computes the rows that each device holds.

        Args:
          batch_size: the number of rows of one group's batch.
          sharding: the sharding of a batch's arrays.
          replicas: the logical replicas, if there are any. Their padding repeats the
            last row.
          groups: the number of groups with different rows.
        """
        padded_size = batch_size
        if replicas is not None:
            padded_size = replicas.rows(batch_size)
        rows_of_group = np.minimum(np.arange(padded_size), batch_size - 1)
        rows = np.concatenate(
            [group * batch_size + rows_of_group for group in range(groups)]
        )
        local_rows = []
        for index in sharding.addressable_devices_indices_map(rows.shape).values():
            # JAX has no index for a device on which the array does not lie.
            if index:
                local_rows.append(rows[index])
        self.batch_size = batch_size
        self.rows = rows
        self.count = len(rows)
        self.local_rows = np.unique(np.concatenate(local_rows))
        self._sharding = sharding
        # Of the batches of several steps, one after the other.
        self._stacked_sharding = jax.NamedSharding(
            sharding.mesh, jax.P(None, *sharding.spec)
        )
        # For each row on the devices, its index in `local_rows`.
        self._local_index = np.searchsorted(self.local_rows, rows)
        # Whether the process's rows are those of the devices, in their order, so that
        # JAX can divide them by itself, which is faster.
        are_in_order = np.array_equal(self._local_index, np.arange(len(rows)))
        self._are_whole = are_in_order and sharding.is_fully_addressable

    def to_devices(
        self, arrays: data.Arrays, *, copy: bool = False
    ) -> dict[str, jax.Array]:
        """Puts this process's rows of arrays on its devices.

        Args:
          arrays: the arrays by name.
          copy: whether the caller may write into the arrays again. JAX may read them
            later, or keep them as they are.
        """

        def put(array: np.ndarray) -> jax.Array:
            if copy and isinstance(array, np.ndarray):
                array = np.array(array)
            shape = (self.count, *array.shape[1:])

            def rows_of_device(index: Any) -> np.ndarray:
                return array[self._local(index[0])]

            return jax.make_array_from_callback(shape, self._sharding, rows_of_device)

        return {name: put(array) for name, array in arrays.items()}

    def stack_on_devices(self, arrays: data.Arrays) -> dict[str, jax.Array]:
        """Puts this process's rows of the batches of several steps on its devices.

        Args:
          arrays: the arrays by name, of shape (steps, rows, ...). The caller does not
            write into them again.

        Returns:
          Arrays of shape (steps, rows on all devices, ...).
        """
        if self._are_whole:
            return jax.device_put(dict(arrays), self._stacked_sharding)

        def put(array: np.ndarray) -> jax.Array:
            shape = (len(array), self.count, *array.shape[2:])

            def rows_of_device(index: Any) -> np.ndarray:
                return array[:, self._local(index[1])]

            return jax.make_array_from_callback(
                shape, self._stacked_sharding, rows_of_device
            )

        return {name: put(array) for name, array in arrays.items()}

    def _local(self, part: slice) -> Any:
        """Returns the index of some rows on the devices among the process's rows."""
        rows = self._local_index[part]
        # Contiguous rows, as without padding, are a view.
        if rows[-1] - rows[0] == len(rows) - 1:
            return slice(rows[0], rows[-1] + 1)
        return rows


def size_of_group(
    batch_size: int, mesh: mesh_lib.AnyMesh, separate_slices: bool
) -> int:
    """Returns the number of rows of a training batch that a group of the mesh computes.

    Args:
      batch_size: the number of examples of one model's batch.
      mesh: the run's mesh.
      separate_slices: as for `TrainBatches`.
    """
    if not separate_slices:
        return batch_size
    return batch_size // mesh_lib.num_groups(mesh)


def train_shapes(
    example: data.Arrays,
    mesh: jax.sharding.Mesh,
    batch_size: int,
    replicas: logical.Replicas | None = None,
    *,
    separate_slices: bool = False,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes, dtypes and shardings of a batch of `TrainBatches`.

    Args:
      example: a batch of any size with such rows.
      mesh: the run's mesh.
      batch_size: the number of examples of one model's batch.
      replicas: the logical replicas, if there are any.
      separate_slices: as for `TrainBatches`.
    """
    rows = size_of_group(batch_size, mesh, separate_slices)
    if replicas is not None:
        rows = replicas.rows(rows)
    sharding = mesh_lib.sharding(mesh, mesh_lib.BATCH)
    return shapes(example, rows * mesh_lib.num_groups(mesh), sharding)


def shapes(
    example: Mapping[str, Any], rows: Any, sharding: jax.sharding.Sharding | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes, dtypes and shardings of `rows` rows like an example's."""
    described = {}
    for name, array in example.items():
        shape = (rows, *array.shape[1:])
        # JAX converts 64-bit arrays to 32 bits unless x64 is enabled.
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        described[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return described


def shapes_of(
    batch: Mapping[str, Any], sharding: jax.sharding.Sharding | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes, dtypes and shardings of a batch.

    Args:
      batch: arrays, or values that NumPy converts to arrays.
      sharding: the sharding of all of them.
    """
    described = {}
    for name, x in batch.items():
        dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
        dtype = jax.dtypes.canonicalize_dtype(dtype)
        described[name] = jax.ShapeDtypeStruct(np.shape(x), dtype, sharding=sharding)
    return described


def check_train_batch(
    batch_size: int,
    mesh: mesh_lib.AnyMesh,
    micro_batches: int,
    *,
    separate_slices: bool = False,
) -> None:
    """Raises ValueError unless replicas x micro_batches divides a batch.

    The replicas of slices that train one model apart are those of all slices.
    """
    parts = mesh_lib.num_replicas(mesh) * micro_batches
    what = "replicas x micro_batches"
    if separate_slices:
        parts *= mesh_lib.num_groups(mesh)
        what = f"slices x {what}"
    check_batch_size("batch_size", batch_size, parts, f"{what} = {parts}")


def check_batch_size(key: str, value: int, parts: int, what: str) -> None:
    """Raises UserError, with the nearest good values, if `parts` does not divide it.

    Args:
      key: the name of the config's key.
      value: its value.
      parts: the number that must divide it.
      what: the meaning of that number, for the message.
    """
    if value >= 1 and value % parts == 0:
        return
    below = max(value // parts, 1) * parts
    above = (max(value, 0) // parts + 1) * parts
    nearest = " or ".join(str(good) for good in sorted({below, above}))
    raise errors.UserError(
        f"{key}={value} must be a positive multiple of {what}; the nearest: {nearest}."
    )


def _warn_unless_equal(iterator: Any, first: data.Arrays, again: data.Arrays) -> None:
    """Warns if an iterator gives another batch after it was put back."""
    are_equal = first.keys() == again.keys()
    for name in first.keys() & again.keys():
        before = first[name]
        after = np.asarray(again[name])
        if before.shape != after.shape:
            are_equal = False
            continue
        # NaN equals itself here.
        is_same = (before == after) | ((before != before) & (after != after))
        are_equal = are_equal and bool(np.all(is_same))
    if not are_equal:
        logging.warning(
            "%s gave another batch after set_state(get_state()) than before, so a run "
            "that resumes will not go on with the same examples. If it wraps a data "
            "set that shuffles anew each time it is iterated, make that data set anew, "
            "with its seed.",
            type(iterator).__name__,
        )


@contextlib.contextmanager
def _naming_the_end() -> Iterator[None]:
    """Raises UserError instead of StopIteration."""
    try:
        yield
    except StopIteration as e:
        raise errors.UserError(
            "The training data ended before the run did. Use an iterator that starts "
            "over, as grain's repeat() does, or set fewer steps."
        ) from e


def _listed(dtypes: Mapping[str, np.dtype]) -> str:
    return ", ".join(f"{dtype} {name!r}" for name, dtype in dtypes.items())


def _check_iterator(iterator: Any) -> None:
    """Checks an iterator's methods and its first state.

    Raises:
      UserError: if it is no iterator of training data.
    """
    methods = ("__next__", "get_state", "set_state")
    lacking = [x for x in methods if not callable(getattr(iterator, x, None))]
    if lacking:
        raise errors.UserError(
            f"train_batches returned {type(iterator).__name__}, which has no "
            f"{', '.join(lacking)}; an iterator of training data has __next__, "
            "get_state and set_state, as iter() of a grain.IterDataset has."
        )
    state = iterator.get_state()
    try:
        json.dumps(_to_json(state))
    except TypeError as e:
        raise errors.UserError(
            f"get_state of {type(iterator).__name__} returned a value that "
            f"JSON cannot hold ({e}). It may contain numbers, texts, lists, "
            "tuples, dictionaries with texts as keys, bytes, and NumPy arrays."
        ) from e


def _check_acts(iterator: Any, every: Any) -> None:
    kind = type(iterator).__name__
    if type(every) is not int or every < 1:
        raise errors.UserError(
            f"{kind}.acts_every_steps={every!r} must be a number of steps, at least 1. "
            "If the iterator does not act, remove the attribute."
        )
    if not callable(getattr(iterator, "act", None)):
        raise errors.UserError(
            f"{kind} has acts_every_steps={every}, but no method act(step, predict): "
            "define it, or leave acts_every_steps out."
        )


def _to_json(state: Any) -> Any:
    """Converts a state to JSON values.

    Bytes, arrays and tuples become dictionaries with a marker key. Tuples must be
    restored as tuples, because grain's iterators distinguish them from lists.

    Raises:
      TypeError: for any other type.
    """
    if isinstance(state, bytes):
        return {_BYTES: base64.b64encode(state).decode()}
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, np.ndarray) and array_types.is_array(state):
        # NumPy's format keeps no other types, such as bfloat16.
        kept = np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(state.dtype))
        if state.dtype.hasobject or kept != state.dtype:
            raise TypeError(f"an array of type {state.dtype}")
        file = io.BytesIO()
        np.save(file, state, allow_pickle=False)
        return {_ARRAY: base64.b64encode(file.getbuffer()).decode()}
    if isinstance(state, tuple):
        return {_TUPLE: [_to_json(item) for item in state]}
    if isinstance(state, list):
        return [_to_json(item) for item in state]
    if isinstance(state, Mapping):
        for name in state:
            # JSON would make a string of another key.
            is_marker = name in _MARKERS and len(state) == 1
            if not isinstance(name, str) or is_marker:
                raise TypeError(f"a dictionary with the key {name!r}")
        return {name: _to_json(item) for name, item in state.items()}
    return state


def _from_json(state: Any) -> Any:
    """Converts JSON values to a state: the inverse of `_to_json`.

    Raises:
      ValueError, TypeError, EOFError: if an array or bytes are damaged.
    """
    if isinstance(state, list):
        return [_from_json(item) for item in state]
    if not isinstance(state, dict):
        return state
    if state.keys() == {_BYTES}:
        return base64.b64decode(state[_BYTES])
    if state.keys() == {_ARRAY}:
        content = base64.b64decode(state[_ARRAY])
        return np.load(io.BytesIO(content), allow_pickle=False)
    if state.keys() == {_TUPLE}:
        return tuple(_from_json(item) for item in state[_TUPLE])
    return {name: _from_json(item) for name, item in state.items()}
