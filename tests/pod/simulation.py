r"""Simulates runs that lose members, with the protocol of `xshard.pod.generations`.

    python -m tests.pod.simulation --schedules=1000 --seed=0
    python -m tests.pod.simulation --hours=1 --processes=2

A schedule is drawn from a seed: the processes, the network between them, and what goes
wrong. Time is virtual, so a schedule takes some milliseconds, and the same seed gives
the same schedule. What must hold is checked at every event. A schedule in which it does
not is printed with the command that repeats it, and ends the program with 1.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import heapq
import itertools
import random
import sys
import time
import zlib

from xshard.pod import generations

# In virtual seconds. Nothing may take longer than LIMIT.
START = 60.0
SILENCE = 8.0
SHUTDOWN = 20.0
ANSWER = 6.0
KEEP_ALIVE = 30.0
LIMIT = 600.0
MEETING = generations.MEETING
# Why processes are put out that are as they should be.
_CALM = ("restore", "all members are lost", "the run has ended")
# How many schedules a process of the pool runs at a time.
_CHUNK = 200


class ViolationError(Exception):
    """What must hold does not. The message says what."""


class KilledError(Exception):
    """Ends a process in the middle of an event."""


class Link:
    """A connection between two processes, which delivers in order, late, or not at all.

    Attributes:
      open: by process, whether its end is open.
      lost: by process, whether what it has sent is lost, if it has not arrived.
    """

    def __init__(self, simulation, one, other):
        self.simulation = simulation
        self.open = {one: True, other: True}
        self.lost = {one: False, other: False}
        self._last = {one: 0.0, other: 0.0}
        self._ends = (one, other)

    def other(self, number):
        """Returns the process at the other end."""
        return self._ends[0] if self._ends[1] == number else self._ends[1]

    def send(self, sender, message, payload):
        """Sends a message."""
        simulation = self.simulation
        receiver = self.other(sender)
        if not self.open[sender]:
            return
        at, is_answered = simulation.arrival(sender, receiver)
        if not is_answered:
            # The system ends a connection on which nothing is acknowledged.
            simulation.after(SILENCE, sender, lambda: self.end(sender))
        if at is None:
            return
        self._last[sender] = max(self._last[sender], at)

        if not isinstance(message, generations.Alive):
            simulation.note(sender, (f"to {receiver} at {at:.3f}", message))

        def deliver():
            if self.open[receiver] and not self.lost[sender]:
                simulation.hosts[receiver].receive(sender, self, message, payload)

        simulation.at(self._last[sender], receiver, deliver)

    def close(self, number):
        """Closes an end; the other end notices, if it can be reached."""
        if not self.open[number]:
            return
        self.open[number] = False
        other = self.other(number)
        at, _ = self.simulation.arrival(number, other, patient=True)
        # The other end's system asks now and then, and hears nothing.
        at = min(max(at, self._last[number]), self.simulation.now + KEEP_ALIVE)
        self.simulation.at(at, other, lambda: self.end(other))

    def end(self, number):
        """Lets a process notice that its connection has ended."""
        if self.open[number]:
            self.close(number)
            self.simulation.hosts[number].lost(self)


class Host:
    """Something that is scheduled: a process, or the launcher."""

    def __init__(self, simulation, number):
        self.simulation = simulation
        self.number = number
        self.is_alive = True
        self.is_stopped = False
        self.end = ""
        self.deferred = []
        self.links = []

    def die(self):
        """Ends it, with all that it would still have done."""
        if self.is_alive:
            self.is_alive = False
            for link in self.links:
                # Some of what it has sent may still be in its system.
                if self.simulation.chance(0.3):
                    link.lost[self.number] = True
                link.close(self.number)
            self.simulation.note(self.number, f"ends: {self.end}")
            self.simulation.noticed(self.number)


class Words:
    """The exchange of a word of each member."""

    units = 0
    parts = 1

    def __init__(self, label, number, word, admits=None):
        self.label = label
        self.admits = admits
        self._own = ((number, word),)
        self.value = None

    def contribution(self, part):
        return self._own

    def add(self, part, total, more):
        return total + more

    def conclude(self, part, total, members):
        self.value = tuple(sorted(total, key=lambda each: members.index(each[0])))

    def store(self, part, payload):
        self.value = payload

    def result(self, part):
        return self.value


class Sums:
    """The exchange of sums over units of work, in parts."""

    admits = None

    def __init__(self, label, units, parts):
        self.label = label
        self.units = units
        self.parts = parts
        self._own = 0
        self._results = {}

    def take(self, units):
        self._own += sum(amount(self.label, unit) for unit in units)

    def contribution(self, part):
        return self._own + part

    def add(self, part, total, more):
        if isinstance(total, tuple) or isinstance(more, tuple):
            raise ValueError("words are no sums")
        return total + more - part

    def conclude(self, part, total, members):
        self._results[part] = total

    def store(self, part, payload):
        self._results[part] = payload

    def result(self, part):
        return self._results[part]

    @property
    def value(self):
        return tuple(self._results[part] - part for part in range(self.parts))


def amount(label, unit):
    """Returns what a unit of work contributes."""
    return zlib.crc32(f"{label} {unit}".encode())


def mixed(*values):
    """Returns a number that depends on all values."""
    return zlib.crc32(repr(values).encode())


class Process(Host):
    """A process of the run: a program, and its side of the protocol."""

    def __init__(self, simulation, number, member):
        super().__init__(simulation, number)
        self.member = member(number, SILENCE, self)
        self.peers = {}
        self.num_cuts = 0
        self.is_leading = False
        self.meeting = None
        self._program = self._run()
        self._work = None

    # What the protocol makes happen.

    def send(self, number, message, payload=None):
        link = self.meeting if number == MEETING else self.peers.get(number)
        if link is not None:
            self.simulation.step(self)
            link.send(self.number, message, payload)

    def connect(self, leader):
        simulation = self.simulation
        num_cuts = self.num_cuts

        def made(link):
            if link is None or num_cuts != self.num_cuts:
                if link is not None:
                    link.close(self.number)
                if num_cuts == self.num_cuts:
                    self.member.broken(leader.number)
                return
            self.peers[leader.number] = link
            self.member.connected()

        simulation.connect(self, leader.number, made)

    def cut(self):
        self.num_cuts += 1
        for link in self.peers.values():
            link.close(self.number)
        self.peers = {}

    def compute(self, units):
        assert isinstance(self._work, Sums), "units of what has none"
        seconds = self.simulation.seconds(0.3 * len(units))
        work = self._work

        def done():
            work.take(units)
            self.member.computed(units)

        self.simulation.after(seconds, self.number, done)

    def finish(self, word=None):
        # In a program, another thread returns.
        self.simulation.after(0.0, self.number, lambda: self._resume(word))

    def fail(self, why):
        def fail():
            self.end = f"failed: {why}"
            self.die()

        self.simulation.after(0.0, self.number, fail)

    def receive(self, sender, link, message, payload):
        if isinstance(message, generations.Joined):
            if message.generation < self.member.prepared:
                link.close(self.number)
                return
            self.peers[sender] = link
        elif sender != MEETING and self.peers.get(sender) is not link:
            return
        self.member.receive(sender, message, payload)

    def lost(self, link):
        other = link.other(self.number)
        if other == MEETING:
            self.member.meeting_lost()
        elif self.peers.get(other) is link:
            del self.peers[other]
            self.member.broken(other)

    def tick(self):
        self.member.tick(self.simulation.now)
        self.send(MEETING, generations.Alive(self.member.exchange))
        self.simulation.after(1.0, self.number, self.tick)

    # The program.

    def begin(self):
        """Starts the program, which imports and compiles first."""

        def met(link):
            if link is None and self.simulation.now < LIMIT / 2:
                self.simulation.after(0.2, self.number, connect)
                return
            if link is None:
                self.end = "failed: the launcher cannot be reached"
                self.die()
                return
            self.meeting = link
            self.tick()
            self.simulation.after(
                self.simulation.seconds(4.0), self.number, self._resume
            )

        def connect():
            self.simulation.connect(self, MEETING, met)

        self.simulation.after(self.simulation.seconds(2.0), self.number, connect)

    def _resume(self, word=None):
        work, self._work = self._work, None
        if work is not None:
            self.simulation.returned(self, work)
            word = work.value
            self.is_leading = self.member.place == 0
        try:
            request = self._program.send(word)
        except StopIteration:
            self.end = "done"
            self.die()
            return
        match request:
            case float():
                self.simulation.after(request, self.number, self._resume)
            case Words() | Sums():
                self._work = request
                self.member.call(request)
            case "enter":
                self.member.enter("there")
            case "leave":
                self.member.leave()

    def _run(self):
        """The program: yields exchanges, or how long it takes."""
        simulation = self.simulation
        seconds = simulation.seconds
        number = 0
        state = 0
        rows = 0
        known = {}
        word = yield "enter"
        is_new = word is not None
        if is_new:
            yield seconds(2.0)
            if word not in simulation.saved:
                raise ViolationError(f"there is no checkpoint {word}")
            number, state, rows = simulation.saved[word]
            self.member.restored()
        while rows < simulation.rows:
            if not is_new:
                heard = (self.member.arrivals, simulation.draw())
                words = yield Words(f"{number} poll", self.number, heard)
                number += 1
                state = mixed(state, words)
                yield from self._write(known)
                yield seconds(0.3)
                if self.is_leading:
                    simulation.act(self, number - 1)
                if any(arrivals for _, (arrivals, _) in words):
                    has_saved = self.is_leading
                    # The state before the exchange of newcomers, which comes after the
                    # one in which the members learn that the save is complete.
                    if has_saved:
                        yield seconds(0.5)
                        simulation.save(self, (number + 1, state, rows))
                    words = yield Words(f"{number} saved", self.number, has_saved)
                    number += 1
                    if any(saved for _, saved in words):
                        is_new = True
            if is_new:
                is_new = False
                words = yield Words(f"{number} admit", self.number, 0, admits=number)
                number += 1
            units = 1 + mixed(rows, simulation.salt) % 7
            parts = 1 + mixed(rows, simulation.salt, 1) % 3
            sums = Sums(f"{number} {state}", units, parts)
            total = yield sums
            number += 1
            expected = sum(amount(sums.label, unit) for unit in range(units))
            if total != (expected,) * parts:
                raise ViolationError(f"exchange {number - 1} is {total}")
            state = mixed(state, total)
            known[rows] = state
            rows += 1
            yield seconds(0.1)
            yield from self._write(known)
        while True:
            has_written = self.is_leading
            words = yield Words(f"{number} end", self.number, has_written)
            number += 1
            if any(written for _, written in words):
                break
            yield from self._write(known)
        yield "leave"

    def _write(self, known):
        """Writes what a leader has to."""
        if self.is_leading:
            simulation = self.simulation
            for row in range(len(simulation.file), 1 + max(known, default=-1)):
                yield simulation.seconds(0.1)
                simulation.write(self, row, known[row])


class Launcher(Host):
    """The launcher: the meeting, and the processes that it starts and ends."""

    def __init__(self, simulation, count, meeting):
        super().__init__(simulation, MEETING)
        self.count = count
        self.meeting = meeting(count, START, SILENCE, SHUTDOWN, self)
        self.former = set()
        self.takeovers = {}
        self.peers = {}
        self.put_out = {}

    def send(self, number, message):
        if number in self.peers:
            self.simulation.step(self)
            self.peers[number].send(MEETING, message, None)

    def kill(self, number, why):
        self.put_out[number] = why
        self.simulation.note(MEETING, f"puts out {number}: {why}")
        process = self.simulation.hosts[number]
        # One that waits for a disk ends late.
        seconds = self.simulation.random.choice([0.0, 0.1, 2.0, 30.0])
        self.simulation.after(seconds, MEETING, process.die)

    def begun(self, generation, members):
        self.former |= set(members)
        self.takeovers[generation] = len(self.former) - len(members)
        self.simulation.note(MEETING, f"generation {generation}: {members}")

    def receive(self, sender, link, message, payload):
        if self.peers[sender] is link:
            self.meeting.receive(sender, message)

    def lost(self, link):
        number = link.other(MEETING)
        if self.peers.get(number) is link:
            self.meeting.disconnected(number)

    def tick(self):
        self.meeting.tick(self.simulation.now)
        self.simulation.after(0.25, MEETING, self.tick)

    def ended(self, number):
        """Notes that a process has ended, and starts another."""
        simulation = self.simulation
        self.meeting.ended(number)
        if self.meeting.is_done:
            return
        alive = [p.number for p in simulation.processes() if p.is_alive]
        is_lost = not set(alive) & set(self.meeting.members)
        if not self.meeting.generation:
            known = self.meeting._processes
            beginning = [n for n in alive if n in known and not known[n].joins]
            is_lost = len(beginning) < self.count and not simulation.restarts
        if is_lost:
            # A total loss: a launcher starts all anew, which is another run here.
            for other in alive:
                simulation.hosts[other].end = "a total loss"
                simulation.hosts[other].die()
        elif simulation.restarts:
            simulation.restarts -= 1
            simulation.after(simulation.seconds(0.5), MEETING, simulation.start_process)


class Simulation:
    """One schedule."""

    def __init__(self, seed, member=generations.Member, meeting=generations.Meeting):
        """Draws a schedule.

        Args:
          seed: the seed.
          member: the member's side of the protocol.
          meeting: the meeting's side.
        """
        self.random = random.Random(seed)
        self.member = member
        self.now = 0.0
        self.lines = collections.deque(maxlen=400)
        self.hosts = {}
        self.saved = {}
        self.file = []
        self.results = {}
        self.writers = {}
        self.last_writer = 0
        self.num_events = 0
        self._events = []
        self._order = itertools.count()
        self._numbers = itertools.count()
        self._victim = None

        choose = self.random.choice
        count = choose([1, 2, 2, 3, 3, 3, 4, 5])
        self.salt = self.random.randrange(1 << 30)
        self.rows = choose([2, 4, 6, 10])
        self.restarts = choose([0, 0, 1, 2, 4])
        self.scale = choose([0.02, 0.3, 1.0])
        self.latency = self.scale * choose([0.005, 0.02, 0.3])
        self.blocked = []
        self.kills = []
        self.resets = []
        self.stops = []
        self.death = None
        # Where the events of the exchanges are, about.
        span = choose([50, 150, 400])
        spares = choose([0, 0, 0, 1, 2])
        # Mostly after the run has begun.
        first = choose([0, 8, 8, 8]) * (count + spares)
        if self.chance(0.7):
            self.kills = [
                first + self.random.randrange(span)
                for _ in range(choose([1, 1, 2, 3, 5]))
            ]
            if self.chance(0.5):
                # Several within a takeover.
                self.kills += [kill + choose([1, 3, 10, 30]) for kill in self.kills]
        if self.chance(0.25):
            self.resets = [
                first + self.random.randrange(span) for _ in range(choose([1, 2]))
            ]
        if self.chance(0.3):
            for _ in range(choose([1, 2])):
                # Some are ended, and some wake, about when they are put out.
                late = SILENCE + 1.0 + self.random.random()
                seconds = choose([0.5, 4.0, late, late, 3 * SILENCE, 2 * LIMIT])
                self.stops.append((first + self.random.randrange(span), seconds))
        if self.chance(0.15) and not self.stops:
            self.death = first + self.random.randrange(span)
        self.launcher = Launcher(self, count, meeting)
        self.hosts[MEETING] = self.launcher
        if self.chance(0.25):
            for _ in range(choose([1, 2])):
                self._block(count + spares, choose([1.0, 5.0, 20.0, LIMIT]))
        self.at(0.0, MEETING, self.launcher.tick)
        for number in range(count + spares):
            self.start_process(joins=number >= count)

    def _block(self, count, seconds):
        """Lets the network lose everything between two processes, both ways or one."""
        one = self.random.randrange(-1, count)
        other = self.random.randrange(-1, count)
        begin = self.random.uniform(0.0, 15.0)
        interval = (begin, begin + seconds)
        if one != other:
            self.blocked.append((one, other, interval))
            if self.chance(0.5):
                self.blocked.append((other, one, interval))

    # Chance and time.

    def chance(self, probability):
        """Returns whether something happens."""
        return self.random.random() < probability

    def draw(self):
        """Returns any number."""
        return self.random.randrange(1 << 30)

    def seconds(self, mean):
        """Returns how long something takes: mostly short, sometimes long."""
        if self.chance(0.05):
            mean *= 10
        return self.scale * mean * self.random.random()

    def at(self, when, number, action):
        """Lets a process act at a time."""
        item = (max(when, self.now), next(self._order), number, action)
        heapq.heappush(self._events, item)

    def after(self, seconds, number, action):
        """Lets a process act after some time."""
        self.at(self.now + seconds, number, action)

    def note(self, number, what):
        """Adds a line to the log."""
        self.lines.append((self.now, number, what))

    # The network.

    def _free_at(self, sender, receiver, when):
        """Returns when a message gets through."""
        for one, other, (begin, end) in self.blocked:
            if (one, other) == (sender, receiver) and begin <= when < end:
                return self._free_at(sender, receiver, end)
        return when

    def arrival(self, sender, receiver, *, patient=False):
        """Returns when a message arrives, None for never, and whether it is answered
        in time.
        """
        delay = self.random.expovariate(1.0) * self.latency
        sent = self._free_at(sender, receiver, self.now)
        if patient:
            return sent + delay, True
        answered = self._free_at(receiver, sender, sent + delay)
        in_time = answered - self.now < SILENCE
        if sent - self.now >= SILENCE:
            return None, in_time
        return sent + delay, in_time

    def connect(self, process, number, made):
        """Connects two processes; calls `made` with the link, or with None."""
        other = self.hosts[number]
        there, in_time = self.arrival(process.number, number)
        ends = []

        def end(link):
            if not ends:
                ends.append(link)
                made(link)
            elif link is not None:
                link.close(process.number)

        self.after(ANSWER, process.number, lambda: end(None))
        if there is None or not in_time:
            return

        def arrive():
            if not other.is_alive:
                self.after(0.001, process.number, lambda: end(None))
                return
            if not process.is_alive:
                return
            link = Link(self, process.number, number)
            process.links.append(link)
            other.links.append(link)
            if number == MEETING:
                other.peers[process.number] = link
                other.meeting.connected(process.number)
            back = self._free_at(number, process.number, self.now)

            def answered():
                end(link if link.open[process.number] else None)

            self.at(back + 0.001 * self.scale, process.number, answered)

        def wait_for_process():
            # The system of a stopped process accepts, but the handshake waits.
            if other.is_stopped:
                other.deferred.append(arrive)
            else:
                arrive()

        self.at(there, None, wait_for_process)

    # Processes.

    def processes(self):
        """Returns all processes."""
        return [host for number, host in self.hosts.items() if number != MEETING]

    def start_process(self, *, joins=False):
        """Starts a process, also if the run has ended since that was decided."""
        number = next(self._numbers)
        self.hosts[number] = Process(self, number, self.member)
        meeting = self.launcher.meeting
        meeting.started(number, joins=joins or bool(meeting.generation))
        self.hosts[number].begin()

    def noticed(self, number):
        """Lets the launcher see that a process has ended."""
        if number != MEETING:
            seconds = self.random.choice([0.0, 0.1]) * self.scale
            self.after(seconds, MEETING, lambda: self.launcher.ended(number))

    def step(self, host):
        """Ends a process in the middle of an event, if that is drawn."""
        if self._victim is host and self.chance(0.5):
            raise KilledError

    # What must hold.

    def returned(self, process, work):
        """Checks what an exchange returns."""
        number = int(work.label.split()[0])
        if process.member.exchange != number + 1:
            raise ViolationError(
                f"{process.number} returns from {number} at {process.member.exchange}"
            )
        takeovers = self.launcher.takeovers[process.member.generation]
        if process.member.takeovers != takeovers:
            raise ViolationError(
                f"{process.number} knows of {process.member.takeovers} takeovers; "
                f"there were {takeovers}"
            )
        value = (work.label, work.value)
        known, seen_by = self.results.get(number, (value, []))
        # What only non-leaders have seen that are dead counts for nothing.
        if known != value:
            for other, has_acted in seen_by:
                if has_acted or other.is_alive:
                    raise ViolationError(
                        f"exchange {number} is {value} for {process.number}, and was "
                        f"{known} for {other.number}"
                    )
            seen_by = []
        self.results[number] = (value, [*seen_by, (process, False)])

    def _check_writer(self, process):
        generation = process.member.generation
        writer = self.writers.setdefault(generation, process.number)
        if writer != process.number:
            raise ViolationError(
                f"{writer} and {process.number} write in generation {generation}"
            )
        if generation < self.last_writer:
            raise ViolationError(
                f"{process.number} writes in generation {generation}, after "
                f"{self.last_writer}"
            )
        self.last_writer = generation

    def act(self, process, number):
        """Notes that a leader has done something that follows from a result."""
        self._check_writer(process)
        value, seen_by = self.results[number]
        self.results[number] = (value, [*seen_by, (process, True)])

    def save(self, process, state):
        """Checks and keeps a checkpoint."""
        self._check_writer(process)
        number, *_ = state
        if self.saved.setdefault(number, state) != state:
            raise ViolationError(f"checkpoint {number} differs")

    def write(self, process, row, state):
        """Checks and writes a row."""
        self._check_writer(process)
        if row != len(self.file):
            raise ViolationError(f"row {row} follows {len(self.file)} rows")
        self.file.append(state)

    # The schedule.

    def run(self):
        """Runs the schedule; raises ViolationError if what must hold does not."""
        while self._events:
            if not any(host.is_alive for host in self.processes()):
                break
            self.now, _, number, action = heapq.heappop(self._events)
            if self.now > LIMIT:
                break
            if number is None:
                action()
                continue
            host = self.hosts[number]
            if not host.is_alive:
                continue
            if host.is_stopped:
                host.deferred.append(action)
                continue
            if action.__name__ != "tick":
                self.num_events += 1
                self._disturb(host)
            if not host.is_alive or host.is_stopped:
                if host.is_stopped:
                    host.deferred.append(action)
                continue
            with contextlib.suppress(KilledError):
                action()
            if self._victim is host:
                self._end(host)
        self._check_end()

    def _end(self, host):
        self._victim = None
        host.end = "killed"
        host.die()

    def _disturb(self, host):
        """Does what was drawn for this event."""
        number = self.num_events
        if number in self.kills and host is not self.launcher:
            # At any of the messages that it sends now, or after all of them.
            self._victim = host
            if self.chance(0.3):
                self._end(host)
        elif number in self.kills:
            self.kills.append(number + 1)
        if number in self.resets and host.links:
            link = self.random.choice(host.links)
            for end in list(link.open):
                self.after(0.0, end, lambda end=end: link.end(end))
        for at, seconds in self.stops:
            if at == number:
                if host is self.launcher:
                    seconds = min(seconds, 3 * SILENCE)
                self.note(host.number, f"stops for {seconds} s")
                host.is_stopped = True
                # Whoever is stopped does not wake itself.
                self._wake_later(host, seconds)
        if self.death == number and self.launcher.is_alive:
            self.launcher.die()

    def _wake_later(self, host, seconds):
        def wake():
            host.is_stopped = False
            actions, host.deferred = host.deferred, []
            for action in actions:
                self.after(0.0, host.number, action)

        self.after(seconds, None, wake)

    def _check_end(self):
        ends = collections.Counter()
        for process in self.processes():
            if process.is_alive:
                raise ViolationError(
                    f"process {process.number} hangs at exchange "
                    f"{process.member.exchange}"
                )
            if not process.end and process.number not in self.launcher.put_out:
                raise ViolationError(f"process {process.number} ended without why")
            ends[process.end or "put out"] += 1
        is_done = ends["done"]
        if is_done and len(self.file) != self.rows:
            raise ViolationError(f"{len(self.file)} of {self.rows} rows are written")
        is_calm = not (self.stops or self.blocked or self.resets)
        for number, why in self.launcher.put_out.items():
            if is_calm and not any(words in why for words in _CALM):
                raise ViolationError(f"{number} is put out: {why}")
        has_launcher = self.launcher.is_alive
        failed = [end for end in ends if end.startswith("failed")]
        if has_launcher and not (self.blocked or self.resets) and failed:
            raise ViolationError(f"{failed} though the launcher lives")
        if (
            has_launcher
            and not is_done
            and not (ends["killed"] or ends["put out"] or failed)
        ):
            raise ViolationError(f"nobody was killed, and nobody is done: {ends}")
        self.ends = ends


def run(seed, **sides):
    """Runs the schedule of a seed; returns what happened in it."""
    simulation = Simulation(seed, **sides)
    try:
        simulation.run()
    except Exception as e:
        for when, number, what in simulation.lines:
            e.add_note(f"{when:9.3f} {number}: {what}")
        e.add_note(f"seed {seed}, {simulation.num_events} events")
        raise
    return simulation


def _run_some(first, count):
    """Runs schedules; returns how they ended, and the first that failed."""
    ends = collections.Counter()
    num_events = 0
    for seed in range(first, first + count):
        try:
            simulation = run(seed)
        except Exception as e:
            notes = "\n".join(getattr(e, "__notes__", []))
            return ends, num_events, f"{notes}\n{type(e).__name__}: {e}", seed
        num_events += simulation.num_events
        ends += simulation.ends
        ends["schedules"] += 1
        ends["generations"] += simulation.launcher.meeting.generation
    return ends, num_events, "", None


def main():
    """Runs schedules, and prints the first that fails; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--hours", type=float, default=0.0, help="instead of a number")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    begun = time.monotonic()
    firsts = itertools.count(options.seed, _CHUNK)
    if not options.hours:
        last = options.seed + options.schedules
        firsts = iter(range(options.seed, last, _CHUNK))
    ends = collections.Counter()
    with concurrent.futures.ProcessPoolExecutor(options.processes) as pool:
        running = collections.deque()
        while True:
            is_late = options.hours and time.monotonic() - begun > 3600 * options.hours
            first = None if is_late else next(firsts, None)
            if first is not None:
                count = _CHUNK
                if not options.hours:
                    count = min(count, last - first)
                running.append(pool.submit(_run_some, first, count))
            if not running:
                break
            if first is None or len(running) > 2 * options.processes:
                some, num_events, failure, seed = running.popleft().result()
                ends += some
                ends["events"] += num_events
                if failure:
                    print(failure)
                    print(
                        "repeat: python -m tests.pod.simulation --schedules=1 "
                        f"--seed={seed}",
                        flush=True,
                    )
                    pool.shutdown(cancel_futures=True)
                    return 1
    seconds = time.monotonic() - begun
    for name, count in sorted(ends.items()):
        print(f"{count:10d} {name}")
    print(f"{ends['schedules'] / seconds:.1f} schedules a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
