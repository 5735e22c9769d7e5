"""Tests of the watch over a run, in one process; tests/launch/pod_test.py tests it
between processes.
"""

import concurrent.futures
import contextlib
import ctypes
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import types
import unittest.mock

import jax
import pytest

from tests import standstill
from tests.launch import harness
from xshard.files import claim
from xshard.pod import exit_codes, heartbeat, members, signals, status, watchdog
from xshard.pod import request as request_lib


def poll(watching):
    """Polls as the steps of a run do, until there is a request; returns it."""
    return harness.wait_until(watching.poll)


def calls_of(monkeypatch, watching, name):
    """Returns a list that grows each time a method of the watch has returned."""
    ended = []
    original = getattr(watching, name)

    def call(*args):
        original(*args)
        ended.append(args)

    monkeypatch.setattr(watching, name, call)
    return ended


@pytest.mark.parametrize(
    "number, code",
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 42),
        (signal.SIGHUP, 42),
        (signal.SIGUSR1, 42),
        (signal.SIGUSR2, 42),
        (signal.SIGXCPU, 42),
    ],
)
def test_repeated_signals_become_one_request(
    tmp_path, capfd, monkeypatch, number, code
):
    watching = watchdog.Watchdog(tmp_path)
    signalled = calls_of(monkeypatch, watching, "_handle_signal")
    with watching:
        assert watching.poll() is None
        os.kill(os.getpid(), number)
        request = poll(watching)
        why = signal.Signals(number).name
        assert request == request_lib.Request(request_lib.STOP, why, code)
        if number != signal.SIGINT:
            # The signals that stop a job on many hosts, or at the limit of CPU time,
            # come several times.
            os.kill(os.getpid(), number)
            harness.wait_until(lambda: len(signalled) == 2)
            assert not watching._sync_point._requested and watching.poll() is None
    said = f"{signal.Signals(number).name}: saving after this step"
    assert capfd.readouterr().err.count(said) == 1


@pytest.mark.parametrize(
    "standing", [{}, {"generation": 3, "members": 2, "takeovers": 1}]
)
def test_the_status_says_how_the_members_stand(tmp_path, standing):
    of_run = members.Members()
    with (
        unittest.mock.patch.object(members.Members, "standing", standing),
        watchdog.Watchdog(tmp_path, members=of_run) as watching,
    ):
        watching.publish()
        watching.end(status.DONE)
    (row,) = status.read(tmp_path)
    names = ("generation", "members", "takeovers")
    assert {name: row[name] for name in names if name in row} == standing


def test_a_signal_from_before_the_watch_is_handled(tmp_path):
    with signals.SignalReceiver() as signal_receiver:
        os.kill(os.getpid(), signal.SIGTERM)
        watching = watchdog.Watchdog(tmp_path, signal_receiver=signal_receiver)
        # This poll comes before the watch reads the signal, because a stop before the
        # first poll ends the process.
        watching.poll()
        with watching:
            assert poll(watching).why == "SIGTERM"


def test_a_signal_is_handled_while_python_is_blocked(tmp_path):
    # The main thread waits at this barrier in C, as in a compilation, so no Python
    # handler can run.
    libc, barrier = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    assert libc.pthread_barrier_init(barrier, None, 2) == 0

    def stop():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            harness.wait_until(lambda: watching._sync_point.stop_reason)
        finally:
            libc.pthread_barrier_wait(barrier)

    with (
        watchdog.Watchdog(tmp_path) as watching,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        watching.poll()
        stopping = pool.submit(stop)
        libc.pthread_barrier_wait(barrier)
        stopping.result()
        assert poll(watching).why == "SIGTERM"


def test_the_signal_handlers_are_restored(tmp_path):
    numbers = (signal.SIGINT, signal.SIGTERM)
    received = []
    # The test sets its own handlers, because a program that a shell starts in the
    # background ignores SIGINT.
    handlers = {number: lambda got, _: received.append(got) for number in numbers}
    before = {
        number: signal.signal(number, handler) for number, handler in handlers.items()
    }
    try:
        with watchdog.Watchdog(tmp_path):
            pass
        assert {number: signal.getsignal(number) for number in numbers} == handlers
        assert signal.set_wakeup_fd(-1) == -1
        for number in numbers:
            os.kill(os.getpid(), number)
        harness.wait_until(lambda: received == list(numbers))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


FORK = """
import os, signal, sys
from xshard.pod import signals
with signals.SignalReceiver() as receiver:
    begin, ready = os.pipe()
    child = os.fork()
    if not child:
        os.write(ready, b"x")
        signal.pause()
        signal.pause()
        os._exit(0)
    os.read(begin, 1)
    os.kill(child, signal.SIGINT)
    os.kill(child, signal.SIGUSR1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), receiver.read())
    # Also a signal that comes before the child has run.
    for _ in range(100):
        if not (child := os.fork()):
            signal.pause()
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
    print(receiver.read())
    os.kill(os.getpid(), signal.SIGINT)
    print(receiver.read())
"""


def test_a_signal_to_a_forked_child_is_not_the_run_s():
    done = subprocess.run(
        [sys.executable, "-c", FORK],
        env=harness.environment(),
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert lines == [f"{-signal.SIGTERM} []", "[]", f"[{signal.SIGINT!r}]"], done.stderr


LOCKS = """
import os, signal, sys
from tests import toy
from xshard import checkpoint
from xshard.checkpoint import lock
from xshard.files import workdir
directory = workdir.Workdir(sys.argv[1])
config = toy.get_config().lock()
begin, ready = os.pipe()
with directory.opened(config):
    held = lock.Lock(checkpoint.Store(directory.path / "checkpoints"), print)
    if not (child := os.fork()):
        os.write(ready, b"x")
        signal.pause()
    os.read(begin, 1)
    held.release()
try:
    with directory.opened(config):
        lock.Lock(checkpoint.Store(directory.path / "checkpoints"), print).release()
    print("taken again")
finally:
    os.kill(child, signal.SIGKILL)
"""


def test_a_forked_child_does_not_hold_the_locks_of_its_run(tmp_path):
    """A worker of a pool may outlive a run that was killed, and the run is started
    again at once.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOCKS, str(tmp_path / "run")],
        env=harness.environment(),
        capture_output=True,
        text=True,
    )
    assert done.stdout == "taken again\n", done.stderr


def test_a_stop_file_stops_the_run(tmp_path):
    with watchdog.Watchdog(tmp_path) as watching:
        assert watching.poll() is None
        (tmp_path / "STOP").touch()
        assert poll(watching) == request_lib.Request(
            request_lib.STOP, f"there is a file {tmp_path / 'STOP'}", 42
        )


def test_stop_after_stops_the_run_after_its_time(tmp_path, monkeypatch):
    passed = 0.0
    now = types.SimpleNamespace(monotonic=lambda: time.monotonic() + passed)
    monkeypatch.setattr(watchdog, "time", now)
    with watchdog.Watchdog(tmp_path, stop_after_seconds=5000) as watching:
        assert watching.poll() is None
        passed = 5000.0
        assert poll(watching) == request_lib.Request(
            request_lib.STOP, "the time of --stop_after has passed", 42
        )
        assert watching.stop_reason == "the time of --stop_after has passed"


def test_a_save_is_announced_and_a_stop_overrides_it(tmp_path):
    with watchdog.Watchdog(tmp_path) as watching:
        watching.poll()
        watching.ask(request_lib.Request(request_lib.SAVE, "it is time"))
        assert poll(watching).kind == request_lib.SAVE
        with watching._sync_point._changed:
            watching.ask(request_lib.Request(request_lib.SAVE, "it is time"))
            watching.ask(request_lib.Request(request_lib.STOP, "enough"))
        assert poll(watching).why == "enough"


def test_requests_of_several_kinds_are_all_delivered(tmp_path):
    kinds = [request_lib.PROFILE, request_lib.SAVE]
    with watchdog.Watchdog(tmp_path) as watching:
        watching.poll()
        for rounds, kind in enumerate(kinds, 1):
            watching.ask(request_lib.Request(kind, "it is time"))
            harness.wait_until(lambda n=rounds: watching._sync_point._round == n)
        # Both rounds have agreed on the next poll, which delivers one request.
        assert [watching.poll().kind for _ in kinds] == kinds
        with watching._sync_point._changed:
            for kind in kinds:
                watching.ask(request_lib.Request(kind, "it is time"))
        assert [poll(watching).kind for _ in kinds] == kinds[::-1]


def test_a_save_at_the_same_step_does_not_undo_a_stop(tmp_path):
    with watchdog.Watchdog(tmp_path) as watching:
        watching.poll()
        for rounds, kind in enumerate((request_lib.STOP, request_lib.SAVE), 1):
            watching.ask(request_lib.Request(kind, "it is time"))
            harness.wait_until(lambda n=rounds: watching._sync_point._round == n)
        assert watching.poll().kind == request_lib.STOP


def test_the_status_is_written_while_the_run_goes_on(tmp_path, monkeypatch):
    def read():
        rows = json.loads((tmp_path / "status.json").read_bytes())
        return rows if rows[0]["rate"] else None

    watching = watchdog.Watchdog(tmp_path)
    written = calls_of(monkeypatch, watching, "_write_status")
    with watching:
        watching.set_phase("compiling", step=0, steps=100)
        # The watch writes nothing before it is told that the directory belongs to this
        # run.
        harness.wait_until(lambda: len(written) > 1)
        assert not (tmp_path / "status.json").exists()
        watching.publish()
        harness.wait_until((tmp_path / "status.json").exists)
        watching.set_phase("training", step=10)
        (row,) = harness.wait_until(read)
        assert (row["doing"], row["step"], row["steps"], row["pid"]) == (
            "training",
            10,
            100,
            os.getpid(),
        )
        watching.end("done")
        assert json.loads((tmp_path / "status.json").read_bytes())[0]["doing"] == "done"


def test_a_successor_replaces_the_status_of_its_predecessor_at_once(tmp_path):
    predecessor = status.Status("another host")
    status.write_texts(tmp_path, [json.dumps(predecessor.row())])
    held = claim.Claim(tmp_path)
    of_run = members.Members()
    of_run.has_succeeded = True
    watching = watchdog.Watchdog(tmp_path, members=of_run)
    # Its context is not entered, so that no thread writes the status later.
    watching.publish()
    held.release()
    watching.end("done")
    (row,) = status.read(tmp_path)
    assert (row["doing"], row["pid"]) == ("done", os.getpid())
    assert row["host"] != "another host"


def test_a_disk_that_is_away_does_not_end_the_watch(tmp_path, monkeypatch):
    # The system answers a question for a name that is too long by an error, as for all
    # names on a disk whose server is away.
    watching = watchdog.Watchdog(tmp_path)
    asked = calls_of(monkeypatch, watching, "_may_write")
    with watching:
        watching.publish()
        monkeypatch.setattr(claim, "HOLDER", "x" * 300)
        harness.wait_until(lambda: len(asked) > 2)
        (tmp_path / "STOP").touch()
        assert poll(watching).kind == request_lib.STOP


def test_a_full_disk_does_not_end_the_watch(tmp_path, monkeypatch):
    def write(*args, **kwargs):
        tried.append(args)
        raise OSError(28, "No space left on device")

    tried = []
    monkeypatch.setattr(watchdog.status.disk, "replace", write)
    with watchdog.Watchdog(tmp_path) as watching:
        watching.publish()
        watching.poll()
        harness.wait_until(lambda: len(tried) > 1)
        watching.ask(request_lib.Request(request_lib.STOP, "enough"))
        assert poll(watching).why == "enough"


@pytest.mark.parametrize(
    "action, code",
    [("lambda: exits.exit_now(7)", 7), ("lambda: print('heard')", -signal.SIGABRT)],
)
def test_an_abort_in_any_thread_calls_the_handler(action, code):
    # The main thread is blocked meanwhile, as it is in a computation.
    program = f"""
import ctypes, threading
from xshard.pod import exits
abort = ctypes.CDLL(None).abort
with exits.before_abort({action}):
    thread = threading.Thread(target=abort)
    thread.start()
    thread.join()
"""
    ended = subprocess.run([sys.executable, "-c", program], env=harness.environment())
    assert ended.returncode == code


def test_a_process_that_hangs_after_a_failure_is_ended_with_its_stacks():
    program = """
import threading, time
from xshard.pod import exits
def hangs():
    time.sleep(600)
with exits.ended_within(1):
    threading.Thread(target=hangs).start()
    raise ValueError("it has failed")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=harness.environment(),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "it has failed" in ended.stderr and "in hangs" in ended.stderr


def test_the_abort_handler_is_removed_at_the_end():
    program = """
import ctypes
from xshard.pod import exits
with exits.before_abort(lambda: exits.exit_now(7)):
    pass
ctypes.CDLL(None).abort()
"""
    ended = subprocess.run([sys.executable, "-c", program], env=harness.environment())
    assert ended.returncode == -signal.SIGABRT


@pytest.mark.parametrize(
    "failure, code, said",
    [
        ("process 1 on b: no progress for 9 s", 1, "The stack of each thread:"),
        ("process 1 on b: ValueError: too wide", 1, "error: process 1 on b: Value"),
        ("", -signal.SIGABRT, ""),
    ],
)
def test_an_abort_after_a_failure_elsewhere_reports_the_failure(
    tmp_path, failure, code, said
):
    # When a process that has failed is gone, gloo may abort the others before they
    # have read why.
    program = f"""
import ctypes
from xshard.pod import watchdog

class Board:
    def read(self, topic):
        return {{1: {failure!r}}} if topic == "failed" else {{1: "gone"}}

    def write(self, topic, text):
        pass

watching = watchdog.Watchdog({str(tmp_path)!r}, ["a", "b"])
watching._board = Board()
with watching._exit_stack:
    watching._exit_stack.enter_context(
        watchdog.exits.before_abort(watching._before_abort)
    )
    ctypes.CDLL(None).abort()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=harness.environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert ended.returncode == code
    assert said in ended.stderr and failure in ended.stderr


def test_process_0_is_the_last_to_end(monkeypatch):
    monkeypatch.setattr(watchdog, "_LEAVE_SECONDS", 0)
    # Process 3 is lost; the others end one after the other.
    gone = iter([{}, {2: ""}, {1: "", 2: ""}, {1: "", 2: "", 3: ""}])
    watching = types.SimpleNamespace(
        _post_status=lambda: None,
        _index=0,
        _count=4,
        _heartbeat=types.SimpleNamespace(lost={3}),
        _board=types.SimpleNamespace(read=lambda _: next(gone)),
    )
    watchdog.Watchdog._announce_exit(watching)
    assert len(list(gone)) == 1


@pytest.mark.parametrize("is_early", [False, True])
def test_a_signal_ends_the_wait_for_a_cause(tmp_path, is_early):
    program = f"""
import os, signal
from tests.launch import harness
from xshard.files import claim
from xshard.pod import rendezvous, watchdog

timeouts = rendezvous.Timeouts(heartbeat=harness.FOREVER)
with watchdog.Watchdog({str(tmp_path)!r}, timeouts=timeouts) as watching:
    # Later than the first step, before which a stop ends a run.
    watching.poll()
    watching.poll()
    if {is_early}:
        os.kill(os.getpid(), signal.SIGTERM)
        harness.wait_until(lambda: watching._sync_point.stop_reason)
    else:
        watching._log = lambda message: print(message, flush=True)
        wait = watching._is_told_to_stop.wait

        def wait_after_the_signal(seconds):
            os.kill(os.getpid(), signal.SIGTERM)
            return wait(seconds)

        watching._is_told_to_stop.wait = wait_after_the_signal
    watching.await_cause()
    print("waited in vain")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=harness.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stdout
    assert "not waiting for the cause" in ended.stdout
    # It can no longer save.
    assert ("saving after this step" in ended.stdout) == is_early


class LossyBoard:
    """A stand-in for the board that several processes share; it loses some calls, and
    only the reply of others.
    """

    def __init__(self, index, shared, choose):
        self._index, self._shared, self._choose = index, shared, choose

    def _call(self, action):
        fate = self._choose.random()
        if fate < 0.1:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: lost")
        result = action()
        if fate < 0.2:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: its reply was lost")
        return result

    def write(self, topic, text):
        self._call(
            lambda: self._shared.setdefault(topic, {}).__setitem__(self._index, text)
        )

    def read(self, topic):
        return self._call(lambda: dict(self._shared.get(topic, {})))

    def gather(self, topic, text, meanwhile):
        self.write(topic, text)
        while len(said := self.read(topic)) < 2:
            meanwhile()
            time.sleep(0.005)
        return [said[i] for i in range(2)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(4))
def test_two_processes_agree_over_a_network_that_loses_calls(
    tmp_path, monkeypatch, seed
):
    def train(watching, asks):
        """Makes steps at a random pace; returns the steps and kinds of requests."""
        choose = random.Random(seed * 2 + asks)
        requests = []
        for step in itertools.count(1):
            time.sleep(choose.random() * 0.002)
            if asks and step in (20, 60, 110):
                watching.ask(request_lib.Request(request_lib.SAVE, f"at {step}"))
            if asks and step == 60:
                watching.ask(request_lib.Request(request_lib.PROFILE, "why", steps=2))
            request = watching.poll()
            if request is not None:
                requests.append((step, request.kind))
                if request.kind == request_lib.STOP:
                    return requests
            if asks and len(requests) >= 2 and step > 150:
                watching.ask(request_lib.Request(request_lib.STOP, "enough"))

    monkeypatch.setattr(watchdog, "_TICK_SECONDS", 0.01)
    shared, watches = {}, []
    with contextlib.ExitStack() as stack:
        for index in range(2):
            watching = watchdog.Watchdog(tmp_path, ["h0", "h0"])
            watching._index = index
            watching._board = LossyBoard(
                index, shared, random.Random(100 * seed + index)
            )
            watching._sync_point._board = watching._board
            watches.append(watching)
        for watching in watches:
            stack.enter_context(watching)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            left, right = pool.map(train, watches, (True, False))
    assert left == right and left[-1][1] == request_lib.STOP and len(left) >= 3
    # It is asked for together with a save, and neither gets lost.
    assert [kind for _, kind in left].count(request_lib.PROFILE) == 1


def test_only_training_and_evaluation_can_stall():
    progress = heartbeat.StallDetector(seconds=2.0, tick_seconds=0.5)
    assert not any(progress.stalled(status.TRAINING) for _ in range(4))
    progress.note_progress()
    # A compilation may take any time, and the time limit starts again after it.
    assert not any(progress.stalled("compiling") for _ in range(100))
    progress.note_progress()
    assert [progress.stalled(status.EVALUATING) for _ in range(5)] == [0, 0, 0, 0, 2.5]
    never = heartbeat.StallDetector(seconds=0, tick_seconds=0.5)
    assert not any(never.stalled(status.TRAINING) for _ in range(100))


@pytest.mark.sample(0.4)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_that_never_ends_makes_the_launcher_restart_the_run(tmp_path, processes):
    options = (
        "--config.experiment=tests.standstill.Standstill",
        "--config.steps_per_dispatch=1",
        "--step_timeout_seconds=15",
    )
    process = harness.launch(
        f"--num_processes={processes}",
        "--cpu_devices=2",
        command=[*harness.TOY, f"--workdir={tmp_path}/run", *options],
        env=harness.environment(**{standstill.VARIABLE: str(tmp_path / "file")}),
    )
    code, output = harness.finish(process)
    assert code == 0, output
    said = next(line for line in output.splitlines() if "no progress for" in line)
    # The host is some steps ahead of the step that never ends.
    assert re.search(r"since \d\d:\d\d:\d\d, in training at step [789]: a device", said)
    assert (
        "--step_timeout_seconds=15" in said
        and "resumes from the last checkpoint" in said
    )
    # Each process prints the stacks of its threads: the main thread is in the loop, and
    # the host function hangs in one of the processes. Processes other than 0 print to
    # their logs.
    logs = [path.read_text() for path in (tmp_path / "run").glob("logs/*.log")]
    for name in ("loop.py", "standstill.py"):
        assert any(name in text for text in (output, *logs))
    assert (
        sum(text.count("The stack of each thread:") for text in (output, *logs))
        >= processes
    ), (output, logs)
    assert output.count("failure 1 of") == 1
    assert "resumed from the checkpoint of step 5" in output


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "experiment, yields, where",
    [
        ("Silent", 0, "reading training data"),
        ("Silent", 1, "reading training data"),
        ("SilentEvaluation", 0, "reading evaluation data"),
    ],
)
def test_a_stream_that_yields_nothing_ends_the_run(tmp_path, experiment, yields, where):
    # Only a process can be ended while its main thread waits.
    config = tmp_path / "config.py"
    config.write_text(
        "from tests import toy\n\n\ndef get_config():\n    config = toy.get_config()\n"
        f"    config.experiment = 'tests.standstill.{experiment}'\n"
        f"    config.yields = {yields}\n    return config\n"
    )
    command = [sys.executable, "-m", "xshard.main", f"--config={config}"]
    options = (f"--workdir={tmp_path}/run", "--step_timeout_seconds=2")
    code, output = harness.finish(harness.start([*command, *options]))
    assert code == exit_codes.FAILED, output
    assert re.search(
        rf"no progress for \d s, since \S+, in {where}( at step 0)?: the stream", output
    )
    assert "standstill.py" in output and "Traceback" not in output
