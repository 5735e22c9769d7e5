"""Tests of the supervisor, with small programs in place of a run."""

import io
import json
import re
import signal
import sys
import threading

import pytest

from launch import engine, local, processes
from tests.launch import harness

# Each start ends as the next item of the second argument specifies: an exit code,
# 'killed', or 'saves' or 'stubborn', which wait for a signal. 'stubborn' ignores
# SIGTERM and SIGINT. The last item repeats. A file counts the starts.
PROGRAM = """
import json, os, signal, sys, time
place, ends = sys.argv[1], sys.argv[2].split(",")
workdir = sys.argv[3].partition("=")[2]
index = next((a[-1] for a in sys.argv if a.startswith("--process_id=")), "0")
starts = os.path.join(place, "starts" + index)
with open(starts, "a") as file:
    file.write("x")
with open(os.path.join(place, "pid" + index), "w") as file:
    file.write(str(os.getpid()))
end = ends[min(os.path.getsize(starts), len(ends)) - 1]
if "STEP" in os.environ:
    with open(os.path.join(workdir, "status.json"), "w") as file:
        row = {"doing": os.environ.get("DOING", "training"), "steps": None}
        row |= {"rate": None, "time": 0}
        row |= {"host": "here", "pid": 1, "begun": 0, "first": None, "trained": 0}
        row["seconds"] = {}
        json.dump([{**row, "step": os.path.getsize(starts)}], file)
if end == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if end == "saves":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
print("start", os.path.getsize(starts), end, flush=True)
while end in ("stubborn", "saves"):
    time.sleep(600)
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if int(end) == 1:
    print("error: something is wrong", file=sys.stderr)
sys.exit(int(end))
"""


@pytest.fixture
def supervise(tmp_path, monkeypatch):
    """Returns a function that creates a supervisor of such a program and records its
    back-offs.
    """
    (tmp_path / "program.py").write_text(PROGRAM)
    out = io.StringIO()

    def make_supervisor(
        *ends,
        processes=1,
        max_failures=3,
        grace=harness.FOREVER,
        settle=harness.FOREVER,
    ):
        monkeypatch.setattr(local, "_SIGTERM_SECONDS", settle)
        monkeypatch.setattr(local, "_EXIT_SECONDS", settle)
        command = (
            sys.executable,
            str(tmp_path / "program.py"),
            str(tmp_path),
            ",".join(ends),
        )
        job = engine.Job("job", (*command, f"--workdir={tmp_path}"), processes)
        supervisor = local.Supervisor(job, local.Local(max_failures, grace), out)
        supervisor.out = out
        supervisor.back_offs = []
        monkeypatch.setattr(
            supervisor,
            "_back_off",
            lambda failures, cause: supervisor.back_offs.append(failures),
        )
        return supervisor

    return make_supervisor


def test_a_job_is_restarted_until_it_is_done(supervise, monkeypatch):
    monkeypatch.setenv("STEP", "1")
    supervisor = supervise("42", "42", "1", "0", processes=2)
    assert supervisor.run() == 0
    assert supervisor.out.getvalue().count("starting it again") == 2
    assert supervisor.back_offs == [1]
    assert "[1] start 4 0" in supervisor.out.getvalue()


def test_each_start_has_a_new_token_that_its_processes_share(
    supervise, tmp_path, monkeypatch
):
    monkeypatch.setenv("STEP", "1")
    program = tmp_path / "program.py"
    show = (
        'token = os.environ["XSHARD_LAUNCH_TOKEN"]; '
        'print("token", token, " ".join(sys.argv).count(token))'
    )
    supervisor = supervise("42", "0", processes=2)
    program.write_text(
        PROGRAM.replace(
            "import json", "import json, os, sys\n" + show + "\nimport json", 1
        )
    )
    assert supervisor.run() == 0
    printed = re.findall("token ([0-9a-f]{64}) 0", supervisor.out.getvalue())
    assert (
        len(printed) == 4
        and len(set(printed[:2])) == len(set(printed[2:])) == 1
        and printed[0] != printed[2]
    )


class Full(io.StringIO):
    """A log on a full disk."""

    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_log_that_cannot_be_written_blocks_no_process(tmp_path):
    # The output is larger than a pipe, so the program blocks unless the supervisor
    # continues to read.
    command = (
        sys.executable,
        "-c",
        "print('x' * 200 + chr(10), end='') or [print('x' * 100) for _ in range(5000)]",
    )
    job = engine.Job("job", (*command, f"--workdir={tmp_path}"))
    assert local.Supervisor(job, local.Local(), Full()).run() == 0


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM])
def test_the_signals_that_stop_a_run_are_passed_on(number):
    received = []
    with local.forwarding_signals(received.append):
        signal.raise_signal(number)
    assert received == [number]


def test_a_signal_that_was_ignored_at_the_start_is_not_passed_on():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        received = []
        with local.forwarding_signals(received.append):
            signal.raise_signal(signal.SIGHUP)
        assert received == [] and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_early_stop_without_a_new_step_is_a_failure(supervise):
    supervisor = supervise("42", max_failures=4)
    assert supervisor.run() == 42 and supervisor.back_offs == [1, 2, 3]


def test_a_run_whose_time_is_over_is_not_started_again(supervise, monkeypatch):
    monkeypatch.setenv("STEP", "1")
    monkeypatch.setenv("DOING", "stopped: the time of --stop_after has passed")
    supervisor = supervise("42", "0", processes=2)
    assert supervisor.run() == 42
    out = supervisor.out.getvalue()
    assert "launch: not started again: the time of --stop_after has passed" in out
    # The next one is stopped before it has a status of its own.
    monkeypatch.delenv("STEP")
    supervisor = supervise("42", "42", "0", processes=2)
    assert supervisor.run() == 0 and supervisor.back_offs == [1]
    # And one that was told by someone else is started again.
    monkeypatch.setenv("STEP", "1")
    monkeypatch.setenv("DOING", "stopped: SIGTERM on process 0")
    supervisor = supervise("42", "42", "42", "42", "0", processes=2)
    assert supervisor.run() == 0 and supervisor.back_offs == []


def test_failures_without_progress_are_limited_and_the_cause_comes_last(supervise):
    supervisor = supervise("1")
    assert supervisor.run() == 1
    last = supervisor.out.getvalue().strip().splitlines()[-1]
    assert last == (
        "launch: giving up after failure 3 without a new step: it ended with exit code "
        "1: error: something is wrong"
    )
    assert supervisor.back_offs == [1, 2]


def test_a_run_that_is_not_finite_is_not_restarted(supervise, monkeypatch):
    monkeypatch.setenv("STEP", "1")
    supervisor = supervise("42", "3", "0", processes=2)
    assert supervisor.run() == 3 and supervisor.back_offs == []
    last = supervisor.out.getvalue().strip().splitlines()[-1]
    assert (
        last.startswith("launch: not started again")
        and "ended with exit code 3" in last
    )


def test_new_steps_reset_the_count_of_failures(supervise, monkeypatch):
    monkeypatch.setenv("STEP", "1")
    assert supervise("1", "1", "1", "1", "1", "0").run() == 0


def test_the_back_off_doubles_up_to_a_limit(tmp_path, monkeypatch):
    job = engine.Job("job", ("true", f"--workdir={tmp_path}"))
    out = io.StringIO()
    supervisor = local.Supervisor(job, local.Local(9), out)
    monkeypatch.setattr(
        local.time, "sleep", lambda seconds: supervisor.signal(signal.SIGTERM)
    )
    for failures in (1, 2, 3, 20):
        supervisor._back_off(failures, "it failed")
    printed = [line.rsplit(" in ", 1)[1] for line in out.getvalue().splitlines()]
    assert printed == ["1 s", "2 s", "4 s", "60 s"]


def test_a_killed_process_is_a_failure(supervise):
    assert supervise("killed", "0").run() == 0
    supervisor = supervise("killed", max_failures=1)
    assert (
        supervisor.run() == 137
        and "it was ended by SIGKILL" in supervisor.out.getvalue()
    )


def test_the_first_kill_is_followed_by_a_start_at_once(supervise):
    supervisor = supervise("killed", "killed", "0")
    assert supervisor.run() == 0 and supervisor.back_offs == [2]
    assert supervisor.out.getvalue().count("starting again at once") == 1


def test_a_kill_is_the_cause_of_what_ends_at_the_same_time(supervise, monkeypatch):
    ended = []

    def codes(pod):
        # The launcher looks only when both have ended.
        codes = {i: process.wait() for i, process in pod._processes.items()}
        ended.append(list(codes.values()))
        pod.num_lost = ended[-1].count(-signal.SIGKILL)
        return codes

    monkeypatch.setattr(local._Pod, "_codes", codes)
    monkeypatch.setattr(
        local,
        "commands",
        lambda job, port: [
            [*job.command, "--process_id=0"],
            [*job.command[:3], "killed", "--process_id=1"],
        ],
    )
    supervisor = supervise("1", processes=2, max_failures=1)
    assert supervisor.run() == 137
    assert ended == [[1, -signal.SIGKILL]]
    assert "process 1 of 2 was ended by SIGKILL" in supervisor.out.getvalue()


def test_a_kill_after_a_crash_is_followed_by_a_back_off(supervise):
    supervisor = supervise("1", "killed", "0")
    assert supervisor.run() == 0 and supervisor.back_offs == [1, 2]


def test_no_back_off_precedes_the_start_after_a_kill_that_followed_new_steps(
    supervise, monkeypatch
):
    monkeypatch.setenv("STEP", "1")
    supervisor = supervise("killed", "killed", "killed", "killed", "0")
    assert supervisor.run() == 0 and supervisor.back_offs == []


def test_the_survivors_of_a_kill_are_told_to_leave_without_a_wait(
    supervise, monkeypatch
):
    monkeypatch.setattr(
        local,
        "commands",
        lambda job, port: [
            [*job.command, "--process_id=0"],
            [*job.command[:3], "killed", "--process_id=1"],
        ],
    )
    # The times to wait are as long as a test may take, so a wait fails it.
    supervisor = supervise("saves", processes=2, max_failures=1)
    assert supervisor.run() == 137
    assert "process 1 of 2 was ended by SIGKILL" in supervisor.out.getvalue()


@pytest.mark.parametrize(
    "end, codes, grace",
    [("saves", (42, 130), harness.FOREVER), ("stubborn", (137, 137), 0.1)],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_all_processes_and_prevents_a_restart(
    supervise, end, codes, grace, number
):
    supervisor = supervise(end, processes=3, grace=grace, settle=0.1)
    exit_codes = []
    thread = threading.Thread(target=lambda: exit_codes.append(supervisor.run()))
    thread.start()
    harness.wait_until(lambda: supervisor.out.getvalue().count("start 1") == 3)
    supervisor.signal(number)
    thread.join(harness.FOREVER)
    assert exit_codes == [codes[number == signal.SIGINT]]
    assert "start 2" not in supervisor.out.getvalue()


def test_the_survivors_of_a_failed_process_are_ended(supervise, monkeypatch):
    monkeypatch.setattr(
        local,
        "commands",
        lambda job, port: [
            [*job.command, "--process_id=0"],
            [*job.command[:3], "1", "--process_id=1"],
        ],
    )
    supervisor = supervise("stubborn", processes=2, max_failures=1, settle=0.1)
    assert supervisor.run() == 1
    assert "process 1 of 2 ended with exit code 1: error" in supervisor.out.getvalue()


def test_the_pod_does_not_outlive_its_launcher(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [
        sys.executable,
        tmp_path / "program.py",
        tmp_path,
        "saves",
        f"--workdir={tmp_path}",
    ]
    process = harness.launch("--num_processes=2", command=command)
    with harness.running(process):
        harness.read_until(process, "[0] start 1 saves")
        harness.wait_until((tmp_path / "pid1").exists)
    pids = [(tmp_path / f"pid{index}").read_text() for index in range(2)]
    harness.wait_until(lambda: {harness.process_state(pid) for pid in pids} == {"Z"})


def test_a_signal_during_the_back_off_prevents_a_restart(supervise, monkeypatch):
    supervisor = supervise("1")
    monkeypatch.setattr(
        supervisor,
        "_back_off",
        lambda failures, cause: supervisor.signal(signal.SIGTERM),
    )
    assert supervisor.run() == 1 and "start 2" not in supervisor.out.getvalue()


def test_a_missing_program_is_reported(tmp_path):
    process = harness.launch(command=["no-such-program", f"--workdir={tmp_path}"])
    code, output = harness.finish(process)
    assert (
        code == 1
        and "error: no-such-program cannot be started: there is no such program"
        in output
    )


# Runs that go on without the processes that they lose.

# Each process waits for a place, and then makes exchanges until the file END exists. A
# process whose number is among the keys of the second argument ends as the value says,
# after the first exchange that it makes as a member; "early", before the run begins;
# "later", after the launcher has gone on without another; "never", as a newcomer.
MEMBER = """
import json, os, pathlib, signal, sys, time
from xshard.pod import exchange
flags = dict(a[2:].split("=", 1) for a in sys.argv[3:])
place, ends = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
number = int(flags["process_id"])
# As a process that waits to join, it acts on no signal.
signal.signal(
    signal.SIGTERM, signal.SIG_IGN if "joins" in flags else lambda *_: sys.exit(42)
)
end, _, when = ends.get(str(number), "").partition(" ")
if when == "never":
    sys.exit(int(end))
if when == "early":
    (place / "early").touch()
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(end))
early = [key for key, end in ends.items() if end.endswith(" early")]
# The launcher goes on without a spare, which is process 2.
awaited = place / ("dropped" if early == ["2"] else "early")
while early and not awaited.exists():
    time.sleep(0.01)
made = exchange.Exchange(
    flags["meeting_address"],
    number,
    os.environ["XSHARD_LAUNCH_TOKEN"],
    {},
    heartbeat_seconds=600,
)
step = made.enter()
is_new = step is not None
step = step or 0
if is_new:
    made.restored()
print("enters at", step, "of", "joins" in flags, flush=True)
while True:
    if not is_new:
        is_last = (place / "END").exists()
        words = made.gather(f"poll {step}", [is_last, made.arrivals, number])
        if all(last for last, _, _ in words):
            break
    if is_new or any(arrivals for _, arrivals, _ in words):
        is_new = False
        words = made.admit(f"admit {step}", step)
        print("has", len(words), "members", flush=True)
    end = ends.get(str(number), "")
    if end.endswith(" later"):
        end = end.removesuffix(" later") if (place / "dropped").exists() else ""
    if end:
        print("ends", flush=True)
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "orphaned":
            (place / "orphan").write_text(str(os.getpid()))
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        sys.exit(int(end))
    step += 1
    if made.place.count == int(flags["until"]) and step > int(flags["least"]):
        (place / "END").touch()
made.close()
print("done", made.place, flush=True)
last = ends.get("last", 0)
if last == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(last))
"""


@pytest.fixture
def lasting(tmp_path, monkeypatch):
    """Returns a function that runs such a program, and returns the code and output.

    If it is given a line's end, the run ends once the launcher has said such a line.
    """
    (tmp_path / "member.py").write_text(MEMBER)
    monkeypatch.setenv("PYTHONPATH", str(harness.ROOT))
    out = io.StringIO()
    drop = local._Lasting._drop

    def note_drop(pod, *args, **options):
        drop(pod, *args, **options)
        (tmp_path / "dropped").touch()

    monkeypatch.setattr(local._Lasting, "_drop", note_drop)

    def run(
        ends,
        *,
        processes=2,
        spares=0,
        until=2,
        max_failures=2,
        said="",
        least_hosts=0,
        script=(),
    ):
        if said:
            log = local._Lasting._log

            def note(pod, message):
                log(pod, message)
                if message.endswith(said):
                    (tmp_path / "END").touch()

            monkeypatch.setattr(local._Lasting, "_log", note)
        least = 1 << 60 if said else 20
        command = (
            *script,
            sys.executable,
            str(tmp_path / "member.py"),
            str(tmp_path),
            json.dumps(ends),
            f"--workdir={tmp_path}",
            f"--until={until}",
            f"--least={least}",
        )
        job = engine.Job("job", command, processes, spares=spares, least=least_hosts)
        supervisor = local.Supervisor(job, local.Local(max_failures), out)
        supervisor._back_off = lambda *args: None
        is_late = threading.Event()

        def end():
            is_late.set()
            supervisor.signal(signal.SIGTERM)

        timer = threading.Timer(harness.FOREVER, end)
        timer.start()
        code = supervisor.run()
        timer.cancel()
        assert not is_late.is_set(), f"it did not end: {out.getvalue()}"
        return code, out.getvalue()

    return run


def test_a_run_goes_on_without_a_process_and_another_joins(lasting):
    code, output = lasting({"0": "killed", "1": "1"}, processes=3, until=3)
    assert code == 0, output
    assert "process 0 was ended by SIGKILL; the run goes on without it" in output
    assert "process 1 ended with exit code 1; the run goes on without it" in output
    assert output.count("the run goes on without it") == 2
    assert "starting again" not in output
    assert output.count("of True") == 2 and output.count("done Place(") == 3


def test_a_spare_takes_the_place_of_a_lost_process(lasting):
    code, output = lasting({"1": "killed"}, spares=1)
    assert code == 0, output
    assert "[2] enters at" in output and output.count("done Place(") == 2
    # The one that was started for the spare is not needed any more.
    assert "[3] done" not in output


@pytest.mark.parametrize(
    "end, how",
    [("killed", "was ended by SIGKILL"), ("1", "ended with exit code 1")],
)
def test_a_spare_that_ends_before_the_run_begins_is_replaced(
    lasting, monkeypatch, end, how
):
    # A failure of the run would end it at once.
    monkeypatch.setattr(local, "_EXIT_SECONDS", 0.0)
    code, output = lasting({"2": f"{end} early"}, spares=1, said="without it")
    assert code == 0, output
    assert f"process 2 {how}; the run goes on without it" in output
    assert "starting again" not in output and output.count("done Place(") == 2


@pytest.mark.parametrize("has_process", [True, False])
def test_a_process_that_is_started_while_the_run_ends_is_ended(
    tmp_path, lasting, monkeypatch, has_process
):
    """The meeting puts it out once it has a process, or before."""
    replace, start = local._Lasting._replace, local._Lasting._start

    def replace_late(pod):
        (tmp_path / "END").touch()
        harness.wait_until(lambda: pod._meeting.is_done)
        replace(pod)

    def start_late(pod, index, *args):
        if not has_process:
            harness.wait_until(lambda: index < 2 or index in pod._reasons)
        start(pod, index, *args)

    monkeypatch.setattr(local._Lasting, "_replace", replace_late)
    monkeypatch.setattr(local._Lasting, "_start", start_late)
    code, output = lasting({"1": "killed"}, until=0)
    assert code == 0, output
    assert output.count("done Place(") == 1 and "[2]" not in output


def test_all_processes_lost_are_a_failure_of_the_run(lasting):
    code, output = lasting({"0": "1", "1": "1"}, max_failures=1)
    assert code == 1
    assert "giving up after failure 1 without a new step: process " in output


def test_a_run_whose_only_process_is_killed_after_its_end_has_no_exit_code(lasting):
    code, output = lasting({"last": "killed"}, processes=1, until=1, max_failures=1)
    assert code == 137
    assert "done Place(" in output and "process 0 was ended by SIGKILL" in output


def test_a_process_that_ends_before_the_run_begins_is_a_failure_of_the_run(lasting):
    code, output = lasting({"1": "1 early"}, max_failures=1)
    assert code == 1, output
    assert "giving up after failure 1 without a new step: process 1 ended" in output


@pytest.mark.parametrize("spares", [0, 1])
def test_a_process_that_is_stopped_before_the_run_begins_stops_the_others(
    lasting, spares
):
    code, output = lasting({"1": "42 early"}, max_failures=1, spares=spares)
    assert code == 42, output


def test_processes_that_leave_before_the_run_begins_have_done_their_work(lasting):
    ends = {"0": "0 early", "1": "0 early"}
    code, output = lasting(ends, max_failures=1, spares=1)
    assert code == 0, output


def test_a_failure_after_a_process_has_left_by_itself_is_a_failure(lasting):
    ends = {"0": "0", "1": "1 later"}
    code, output = lasting(ends, until=0, max_failures=1)
    assert code == 1, output
    assert "process 0 ended with exit code 0; the run goes on without it" in output


def test_hosts_that_are_lost_one_after_another_are_all_counted(lasting):
    ends = {"0": "killed", "1": "killed later"}
    code, output = lasting(ends, until=0, max_failures=1, least_hosts=1)
    assert code == 137
    assert "1 of 2 hosts are left, with which the run goes on" in output
    assert "not started again: 0 of 2 hosts are left" in output


def test_newcomers_of_a_lost_run_are_no_lost_hosts(lasting):
    ends = {"1": "1", "0": "1 later", "2": "1 later"}
    code, output = lasting(ends, processes=3, until=0, max_failures=1, least_hosts=2)
    assert code == 1, output
    assert "hosts are left" not in output


def test_the_program_of_a_script_that_is_killed_does_not_go_on(tmp_path, lasting):
    script = ("bash", "-c", '"$@"; exit $?', "bash")
    ends = {"0": "orphaned", "1": "0 later"}
    code, output = lasting(ends, until=0, script=script)
    assert code == 0, output
    assert "process 0 was ended by SIGKILL; the run goes on without it" in output
    pid = (tmp_path / "orphan").read_text()
    harness.wait_until(lambda: harness.process_state(pid) == "Z")


def test_a_program_that_is_missing_for_a_moment_does_not_end_the_run(
    tmp_path, lasting, monkeypatch
):
    start = processes._start

    def start_some(command, token, at_end):
        if "--process_id=2" in command:
            (tmp_path / "END").touch()
            raise engine.LaunchError("it cannot be started: there is no such program.")
        return start(command, token, at_end)

    monkeypatch.setattr(processes, "_start", start_some)
    code, output = lasting({"1": "killed"}, until=0)
    assert code == 0, output
    assert "launch: it cannot be started: there is no such program." in output


def test_processes_that_never_join_are_not_started_for_ever(lasting):
    never = {str(number): "1 never" for number in range(2, 9)}
    # The last member ends when no process is started any more.
    code, output = lasting({"1": "killed", **never}, until=1, said="without another")
    assert code == 0, output
    assert output.count("ended with exit code 1; the run goes on without it") == 2
    assert "; the run goes on without it, and without another" in output


def test_a_run_that_is_not_finite_ends_as_one(lasting):
    code, output = lasting({"last": "3"})
    assert code == 3 and "not started again, because it would end the same" in output
