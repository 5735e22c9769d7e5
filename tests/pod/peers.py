"""Members of a run and their meeting, for tests. Sockets are real, and processes are
threads.
"""

import queue
import threading

from launch import meeting
from tests.launch import harness
from xshard.pod import exchange

FACTS = {"config.steps": "12"}
TOKEN = "5e" * 32


class Peers:
    """A run whose members call a function each.

    Attributes:
      meeting: the launcher's side.
      logged: what the launcher logs.
      put_out: the processes that the meeting has ended, with the reason.
    """

    def __init__(self, count):
        self.count = count
        self.put_out = {}
        self.logged = []
        self.meeting = meeting.Meeting(
            count,
            TOKEN,
            self._put_out,
            self.logged.append,
            start_seconds=harness.FOREVER,
            silence_seconds=harness.FOREVER,
        )
        self._exchanges = {}
        self._threads = []
        self._outcomes = queue.SimpleQueue()
        self._lock = threading.Lock()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for number in list(self._exchanges):
            self.kill(number)
        self.meeting.close()
        for thread in self._threads:
            thread.join()

    def make(self, number, facts=FACTS, token=TOKEN):
        """Returns the exchange of a process, which is started."""
        self.meeting.started(number, joins=number >= self.count)
        made = exchange.Exchange(
            self.meeting.address,
            number,
            token,
            facts,
            heartbeat_seconds=harness.FOREVER,
        )
        with self._lock:
            self._exchanges[number] = made
        return made

    def start(self, number, function):
        """Starts a process, which calls a function with its exchange."""

        def run():
            made = self.make(number)
            try:
                outcome = function(made)
            except Exception as e:
                outcome = e
            if number in self._exchanges:
                self._outcomes.put((number, outcome))
            # Its connections end with it.
            self.kill(number)

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def run(self, count, function):
        """Starts processes, and returns what the function returns for each."""
        for number in range(count):
            self.start(number, function)
        return self.outcomes(count)

    def outcomes(self, count):
        """Returns what the function has returned or raised, for as many processes."""
        return dict(self._outcomes.get() for _ in range(count))

    def kill(self, number):
        """Ends a process, as SIGKILL does."""
        with self._lock:
            killed = self._exchanges.pop(number, None)
        if killed is not None:
            killed._loop.end()
            # Its program must end, too.
            killed.fail("it was killed")
            self.meeting.ended(number)

    def end(self, number):
        """Ends the calling process, whose number this is."""
        self.kill(number)
        raise RuntimeError("it was killed")

    def _put_out(self, number, why):
        self.put_out[number] = why
        threading.Thread(target=self.kill, args=(number,), daemon=True).start()
