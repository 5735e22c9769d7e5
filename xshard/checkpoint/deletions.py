"""Deletions in a thread of their own.

No save, no step and no stop waits for a store that deletes slowly.
"""

import collections
import threading
import time
from collections.abc import Callable

# How long one may wait for the deletions under way, all waits together.
_PATIENCE_SECONDS = 2.0


class Deletions:
    """Runs deletions one after the other.

    Their thread exists only while there are any, and does not keep the process from
    ending. What is left then, the next run in the store deletes.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()
        self._is_running = False
        # The end of the patience with the present thread, from the first wait for it
        # on.
        self._patient_until: float | None = None

    def add(self, action: Callable[[], None]) -> None:
        """Adds a deletion, which must not raise.

        One that is waiting already is not added again.
        """
        with self._changed:
            if action not in self._waiting:
                self._waiting.append(action)
            if not self._is_running:
                self._is_running = True
                threading.Thread(
                    target=self._run, name="checkpoint deletions", daemon=True
                ).start()

    def wait(self) -> None:
        """Waits until all deletions have ended, but only a moment.

        Where deletions are slow, several waits take no longer than one.
        """
        with self._changed:
            now = time.monotonic()
            if not self._is_running:
                return
            if self._patient_until is None:
                self._patient_until = now + _PATIENCE_SECONDS
            remaining = max(self._patient_until - now, 0.0)
            self._changed.wait_for(lambda: not self._is_running, timeout=remaining)

    def cancel(self) -> None:
        """Removes the deletions that have not begun."""
        with self._changed:
            self._waiting.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._is_running = False
                    self._patient_until = None
                    self._changed.notify_all()
                    return
                action = self._waiting.popleft()
            action()
