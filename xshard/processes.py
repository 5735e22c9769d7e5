"""How the processes of a run agree: on the host, so that any thread may, and with a deadline."""

import itertools
from typing import Any

import jax
from jax._src import distributed

_SERIES = itertools.count()


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
        # Private in JAX, but the only thing of it that works beside a computation on the devices.
        client: Any = distributed.global_state.client
        if client is None:
            raise LostError(f"{self._what}: call jax.distributed.initialize before anything else")
        name = f"xshard/{self._series}/{self._meeting}"
        try:
            client.key_value_set(f"{name}/{self.index}", value or " ")
            client.wait_at_barrier(name, round(1000 * self._seconds))
            said = _said(client, name)
        except jax.errors.JaxRuntimeError as e:
            raise LostError(self._missing(client, name, e)) from e
        if self.index == 0 and self._meeting:
            # Who is here has read what was said at the meeting before.
            client.key_value_delete(f"xshard/{self._series}/{self._meeting - 1}/")
        self._meeting += 1
        return [said[i] for i in range(self.count)]

    def _missing(self, client: Any, name: str, e: Exception) -> str:
        text = str(e).splitlines()[0]
        try:
            came = _said(client, name)
        except jax.errors.JaxRuntimeError:
            return f"{self._what}: process 0, which coordinates, cannot be reached ({text})"
        missing = [str(i) for i in range(self.count) if i not in came]
        return (
            f"{self._what}: process {', '.join(missing) or '?'} of {self.count} did not come within "
            f"{self._seconds:g} s ({text})"
        )


def _said(client: Any, name: str) -> dict[int, str]:
    entries = client.key_value_dir_get(f"{name}/")
    return {int(key.rsplit("/", 1)[1]): value.removeprefix(" ") for key, value in entries}
