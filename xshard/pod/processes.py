"""Agreement of the processes of a run: on the host, so that any thread may, and with a deadline."""

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax._src import distributed

from xshard import errors

_SERIES = itertools.count()
_POLL_SECONDS = 0.05
# Beyond all compiling: whether a peer is still there, the watch finds out.
_COMPILE_SECONDS = 7200.0
# Beyond all reading of data before a run.
_COMPARE_SECONDS = 3600.0


class LostError(OSError):
    """Some process is gone, or did not come in time. The message says which."""


class Exchange:
    """A series of meetings at which every process learns what every other has to say.

    All processes make their series in the same order, and meet equally often in each: what went wrong in
    one of them is said at the meeting, not by staying away.
    """

    def __init__(self, what: str, seconds: float):
        """Begins a series.

        Args:
          what: what the processes meet for, for the message.
          seconds: how long they wait for one another.
        """
        self.index = jax.process_index()
        self.count = jax.process_count()
        self._what = what
        self._seconds = seconds
        self._series = next(_SERIES)
        self._meeting = 0

    def __call__(self, value: str = "") -> list[str]:
        """Meets.

        Args:
          value: what this process has to say; short, since each process receives all of them.

        Returns:
          What each has said, in the order of their indices.

        Raises:
          LostError: if some process did not come, or the one that coordinates cannot be reached.
        """
        if self.count == 1:
            return [value]
        client = _client()
        if client is None:
            raise LostError(f"{self._what}: call jax.distributed.initialize before anything else")
        name = f"xshard/{self._series}/{self._meeting}"
        try:
            client.key_value_set(f"{name}/{self.index}", value or " ")
            client.wait_at_barrier(name, round(1000 * self._seconds))
            values = _values(client, name)
        except jax.errors.JaxRuntimeError as e:
            raise LostError(self._missing(client, name, e)) from e
        if self.index == 0 and self._meeting:
            # Whoever has come to this meeting has read the values of the one before.
            client.key_value_delete(f"xshard/{self._series}/{self._meeting - 1}/")
        self._meeting += 1
        return [values[i] for i in range(self.count)]

    def _missing(self, client: Any, name: str, e: Exception) -> str:
        text = str(e).splitlines()[0]
        try:
            values = _values(client, name)
        except jax.errors.JaxRuntimeError:
            return f"{self._what}: process 0, which coordinates, cannot be reached ({text})"
        missing = [str(i) for i in range(self.count) if i not in values]
        return (
            f"{self._what}: process {', '.join(missing) or '?'} of {self.count} did not come within "
            f"{self._seconds:g} s ({text})"
        )


class Board:
    """A board on which processes write for one another, at any time; raises JaxRuntimeError if it is out of reach.

    Process 0's process holds it. With one process there is no other to write for.
    """

    def __init__(self, index: int, count: int):
        self._index = index
        self._count = count
        self._client = _client() if count > 1 else None

    def write(self, topic: str, text: str) -> None:
        """Writes this process's text on a topic, in the place of what it wrote there before."""
        if self._client is not None:
            self._client.key_value_set(f"board/{topic}/{self._index}", text, allow_overwrite=True)

    def read(self, topic: str) -> dict[int, str]:
        """The texts on a topic, by process."""
        if self._client is None:
            return {}
        return _values(self._client, f"board/{topic}")

    def append(self, topic: str, text: str) -> None:
        """Adds a text to those of any process."""
        if self._client is not None:
            place = self._client.key_value_increment(f"board/{topic} count", 1)
            self._client.key_value_set(f"board/{topic}/{place}", text)

    def gather(self, topic: str, text: str, meanwhile: Callable[[], None]) -> list[str]:
        """Writes on a topic and waits until all have.

        Args:
          topic: the topic.
          text: this process's text.
          meanwhile: called again and again; raises, or ends the process, if it need not be waited for.

        Returns:
          The texts in the order of the processes.
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


def from_first(what: str, action: Callable[[], Any]) -> Any:
    """Returns, on all processes, what process 0's action returns, as JSON can hold it.

    Args:
      what: what they meet for, for the message if one does not come.
      action: called on process 0.

    Raises:
      UserError: on all processes, if the action raises one.
    """
    if jax.process_count() == 1:
        return action()
    meet = Exchange(what, _COMPARE_SECONDS)
    outcome: dict[str, Any] = {}
    if meet.index == 0:
        try:
            outcome = {"value": action()}
        except errors.UserError as e:
            outcome = {"error": str(e)}
    answer = json.loads(meet(json.dumps(outcome))[0])
    if "error" in answer:
        raise errors.UserError(answer["error"])
    return answer["value"]


def check_equal_data(summaries: Mapping[str, Callable[[], str]]) -> None:
    """Raises UserError, on all processes, unless all have the same data.

    Args:
      summaries: functions by name, each of which summarizes data; not called where there is but one process.
    """
    if jax.process_count() == 1:
        return
    meet = Exchange("comparing the data", _COMPARE_SECONDS)
    own = {name: summarize() for name, summarize in summaries.items()}
    first, *others = map(json.loads, meet(json.dumps(own)))
    for name, value in first.items():
        differing = []
        for i, other in enumerate(others, 1):
            if other[name] != value:
                differing.append(f"process {i}: {other[name]}")
        if differing:
            raise errors.UserError(
                f"the data: {name} differs between the processes, which would not train one model. Process 0: "
                f"{value}; {'; '.join(differing)}. Give all hosts the same files."
            )


def compiled_by_all(function: Any, what: str) -> Callable[..., Any]:
    """A jitted function that no process runs before all have compiled it.

    They may be far apart: where one finds its program in a cache, or has other work to do. But gloo, by which
    CPUs reduce, waits 30 s for a peer in a collective, and then fails.

    Args:
      function: of `jax.jit`; called with arguments of the same shapes on all processes.
      what: what it is, for the message if one does not come.
    """
    if jax.process_count() == 1:
        return function
    meet = Exchange(f"compiling {what}", _COMPILE_SECONDS)
    met = False

    def call(*args: Any) -> Any:
        nonlocal met
        if not met:
            # JAX keeps it for the call.
            function.lower(*args).compile()
            meet()
            met = True
        return function(*args)

    return call


def bounded(action: Callable[[], Any], seconds: float) -> Any:
    """Runs what may hang when a peer is gone; what it returns, or None if it has not in time."""
    returned: list[Any] = [None]

    def run() -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            returned[0] = action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return returned[0]


def _client() -> Any:
    # Private in JAX, but the only thing of it that works beside a computation on the devices.
    return distributed.global_state.client


def _values(client: Any, name: str) -> dict[int, str]:
    """The values below a name, by process."""
    values = {}
    for key, value in client.key_value_dir_get(f"{name}/"):
        index = int(key.rpartition("/")[2])
        # JAX takes no empty value: a space stands for it.
        values[index] = value.removeprefix(" ")
    return values
