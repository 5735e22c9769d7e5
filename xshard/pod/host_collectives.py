"""Collectives of the host: values that the processes of a run gather beside the
devices' collectives, from any thread and with a deadline.

They use the key-value store of JAX's coordinator, which runs in process 0. What they
carry is short, because each process receives the values of all.
"""

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from xshard import errors
from xshard.base import places, spans
from xshard.base.jax_internals import runtime

_SERIES = itertools.count()
_POLL_SECONDS = 0.05
# Longer than any compilation takes. The watchdog, not this limit, detects a peer that
# is gone.
_COMPILE_SECONDS = 7200.0
# Longer than any reading of data before a run takes.
_WAIT_SECONDS = 3600.0


class LostError(OSError):
    """A process is gone, or did not reach a gather in time. The message names it."""


class Channel:
    """Gathers values of all processes, again and again.

    All processes must create their channels in the same order, so only the main thread
    creates them, and call the methods of a channel in the same order, which any one
    thread may do. A process on which something failed must report that in the gather
    instead of skipping it, or the others would wait for it.
    """

    def __init__(self, what: str, seconds: float):
        """Creates a channel; no process waits yet.

        Args:
          what: the purpose of the gathers, for the error message.
          seconds: how long the processes wait for one another.
        """
        place = places.own()
        self.index = place.index
        self.count = place.count
        self._what = what
        self._seconds = seconds
        self._series = next(_SERIES)
        self._num_gathers = 0

    def gather(self, value: Any = None) -> list[Any]:
        """Gives this process's value and returns those of all processes.

        Args:
          value: a short JSON value.

        Returns:
          The value of each process, by process index, as JSON has it: a tuple arrives
          as a list, also with a single process.

        Raises:
          LostError: if a process does not come in time, or if the coordinator cannot be
            reached.
        """
        text = json.dumps(value)
        return [json.loads(each) for each in self._gather_texts(text)]

    def on_process_0(
        self,
        action: Callable[[], Any],
        kind: type[errors.UserError] = errors.UserError,
    ) -> Any:
        """Runs an action on process 0, and returns its result on all processes.

        Args:
          action: returns a short JSON value.
          kind: the type of the error that the other processes raise.

        Returns:
          The result, as JSON has it.

        Raises:
          UserError: of that type, on the other processes, with the message of whatever
            exception the action raised; process 0 raises that exception itself.
          LostError: if a process does not come in time, or if the coordinator cannot be
            reached.
        """
        outcome: dict[str, Any] = {}
        failure = None
        if self.index == 0:
            outcome, failure = attempted(action)
        return value_of(self.gather(outcome)[0], failure, kind)

    def _gather_texts(self, text: str) -> list[str]:
        if self.count == 1:
            return [text]
        client = runtime.coordination_client()
        if client is None:
            raise LostError(
                f"{self._what}: call jax.distributed.initialize before anything else"
            )
        name = f"xshard/{self._series}/{self._num_gathers}"
        try:
            with spans.Span(spans.AGREE):
                client.key_value_set(f"{name}/{self.index}", text)
                client.wait_at_barrier(name, round(1000 * self._seconds))
                texts = _values(client, name)
        except jax.errors.JaxRuntimeError as e:
            raise LostError(self._missing_message(client, name, e)) from e
        if self.index == 0 and self._num_gathers:
            # A process that reached this gather has read the values of the previous
            # one, so they can be deleted.
            previous = self._num_gathers - 1
            client.key_value_delete(f"xshard/{self._series}/{previous}/")
        self._num_gathers += 1
        return [texts[i] for i in range(self.count)]

    def _missing_message(self, client: Any, name: str, e: Exception) -> str:
        reason = str(e).splitlines()[0]
        try:
            texts = _values(client, name)
        except jax.errors.JaxRuntimeError:
            return (
                f"{self._what}: process 0, which coordinates, cannot be reached "
                f"({reason})"
            )
        missing = [str(i) for i in range(self.count) if i not in texts]
        names = ", ".join(missing) or "?"
        return (
            f"{self._what}: process {names} of {self.count} did not respond within "
            f"{self._seconds:g} s ({reason})"
        )


def attempted(
    action: Callable[[], Any],
) -> tuple[dict[str, Any], Exception | None]:
    """Runs an action; returns its outcome for other processes, and its error."""
    try:
        return {"value": action()}, None
    except Exception as e:
        # The other processes wait for the outcome, so every error must reach them.
        text = str(e)
        if not isinstance(e, errors.UserError):
            text = f"process 0: {type(e).__name__}: {e}"
        return {"error": text}, e


def value_of(
    outcome: Mapping[str, Any],
    failure: Exception | None,
    kind: type[errors.UserError],
) -> Any:
    """Returns the result of an action that some process has run.

    Args:
      outcome: the outcome, as `attempted` returns it.
      failure: the error, if this process has run the action and it raised.
      kind: the type of the error that is raised if another process has run it.

    Raises:
      UserError: of that type, with the error's message, if another process has run it.
    """
    if failure is not None:
        raise failure
    if "error" in outcome:
        raise kind(outcome["error"])
    return outcome["value"]


class Board:
    """A board on which processes leave texts for one another at any time.

    Process 0 holds the board. Its methods raise JaxRuntimeError if process 0 cannot be
    reached. With one process the board stays empty.
    """

    def __init__(self, index: int, count: int):
        self._index = index
        self._count = count
        self._client = runtime.coordination_client() if count > 1 else None

    def write(self, topic: str, text: str) -> None:
        """Writes this process's text on a topic, and replaces its earlier one."""
        if self._client is not None:
            self._client.key_value_set(
                f"board/{topic}/{self._index}", text, allow_overwrite=True
            )

    def read(self, topic: str) -> dict[int, str]:
        """Returns the texts on a topic, by process index, or by position if they were
        appended.
        """
        if self._client is None:
            return {}
        return _values(self._client, f"board/{topic}")

    def append(self, topic: str, text: str) -> None:
        """Appends a text to a topic that is shared by all processes."""
        if self._client is not None:
            place = self._client.key_value_increment(f"board/{topic} count", 1)
            self._client.key_value_set(f"board/{topic}/{place}", text)

    def gather(self, topic: str, text: str, meanwhile: Callable[[], None]) -> list[str]:
        """Writes on a topic, and waits until all processes have written on it.

        Args:
          topic: the topic.
          text: this process's text.
          meanwhile: called repeatedly during the wait; raises, or ends the process, to
            give up the wait.

        Returns:
          The texts, by process index.
        """
        if self._client is None:
            return [text]
        self.write(topic, text)
        texts = self.read(topic)
        while len(texts) < self._count:
            meanwhile()
            time.sleep(_POLL_SECONDS)
            texts = self.read(topic)
        return [texts[i] for i in range(self._count)]


def check_equal_data(
    summaries: Mapping[str, Callable[[], str]], channel: Channel | None = None
) -> None:
    """Raises UserError, on all processes, unless all have the same data.

    Args:
      summaries: functions by name that return summaries of data; with one process they
        are not called.
      channel: connects the processes; by default those that JAX has joined.
    """
    channel = channel or Channel("comparing the data", _WAIT_SECONDS)
    if channel.count == 1:
        return
    local = {name: summarize() for name, summarize in summaries.items()}
    first, *others = channel.gather(local)
    for name, value in first.items():
        differing = []
        for i, other in enumerate(others, 1):
            if other[name] != value:
                differing.append(f"process {i}: {other[name]}")
        if differing:
            raise errors.UserError(
                f"the data: {name} differs between the processes, which must train one "
                f"model. Process 0: {value}; {'; '.join(differing)}. Give all hosts "
                "the same files."
            )


def compiled_by_all(function: Any, what: str) -> Callable[..., Any]:
    """Returns a jitted function that no process runs before all processes have compiled
    it for its arguments' shapes.

    The processes may finish compiling at very different times, for example if one of
    them finds the program in a cache. In a collective, gloo, which CPUs use, waits only
    30 s for a peer before it fails.

    Args:
      function: a result of `jax.jit`. Its first argument has the same shapes in all
        calls.
      what: the name of the function, for the error messages.

    Raises:
      UserError: if processes meet with other shapes, such as batches padded to
        different lengths.
    """
    if places.own().count == 1:
        return function
    channel = Channel(f"compiling {what}", _COMPILE_SECONDS)
    compiled_shapes: set[str] = set()

    def call(*args: Any) -> Any:
        shapes = str(jax.tree.map(np.shape, args[1:]))
        if shapes not in compiled_shapes:
            # JAX caches the compiled program, so the call below finds it.
            function.lower(*args).compile()
            all_shapes = channel.gather(shapes)
            if set(all_shapes) != {shapes}:
                raise errors.UserError(
                    f"{what} has other shapes on some processes: "
                    f"{'; '.join(all_shapes)}, from process 0 on. Give the batches of "
                    "a step the same shapes on all processes."
                )
            compiled_shapes.add(shapes)
        return function(*args)

    return call


def with_timeout(action: Callable[[], Any], seconds: float) -> Any:
    """Runs an action that may hang if a peer is gone; returns its result, or None if it
    fails or takes too long.
    """
    returned: list[Any] = [None]

    def run() -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            returned[0] = action()

    # A daemon thread, because one that hangs must not keep the process from ending.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return returned[0]


def _values(client: Any, name: str) -> dict[int, str]:
    """Returns the values below a name, by the number at the end of their keys."""
    values = {}
    for key, value in client.key_value_dir_get(f"{name}/"):
        index = int(key.rpartition("/")[2])
        # JAX rejects empty values, so a space stands for the empty text.
        values[index] = value.removeprefix(" ")
    return values
