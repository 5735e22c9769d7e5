"""Tests of traces that a user asks a run for."""

import gzip
import json
import types

import jax
import pytest

from tests import rows, toy, winged
from xshard.files import workdir
from xshard.pod import members, request
from xshard.wings.profiles import tracer as tracer_lib

pytestmark = pytest.mark.usefixtures("shared_programs")


class Asking(rows.ScriptedWatch):
    """Asks for traces, and for other things, after the steps of given numbers.

    A number asks for a trace of so many steps.
    """

    def __init__(self, asked):
        super().__init__(0, "")
        self._asked = dict(asked)
        self._step = 0

    def set_phase(self, phase, step=0, **more):
        self._step = step or self._step

    def poll(self):
        kind = self._asked.pop(self._step, None)
        if isinstance(kind, int):
            return request.Request(request.PROFILE, "scripted", steps=kind)
        return kind and request.Request(kind, "scripted")


def make_config(**changes):
    config = toy.get_config()
    # Each step polls once.
    config.steps_per_dispatch = 1
    config.update({"log_every_steps": 1, "writers": ("jsonl",), **changes})
    return config.lock()


def make_tracer(directory, said):
    """Returns a tracer of a run that has a directory and a terminal, and no steps."""
    run = types.SimpleNamespace(
        watch=None,
        workdir=workdir.Workdir(directory),
        terminal=types.SimpleNamespace(say=said.append),
        members=members.Members(),
        set_phase=lambda phase: None,
    )
    return tracer_lib.Tracer(run)


def traced(directory):
    """Returns the numbers of the traced steps, by the name of the trace's folder."""
    steps = {}
    for path in directory.rglob("process_0.trace.json.gz"):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        numbers = {
            int(event["args"]["step_num"])
            for event in events
            if event.get("name") == "train" and "args" in event
        }
        assert path.with_name("process_0.xplane.pb").stat().st_size
        steps[path.parent.name] = sorted(numbers)
    return steps


@pytest.fixture(scope="module")
def untraced(tmp_path_factory):
    directory = tmp_path_factory.mktemp("untraced")
    assert winged.run(make_config(), str(directory), "") == 0
    return directory


def test_a_run_traces_the_next_steps_and_ends_in_the_same_bits(
    tmp_path, untraced, capsys
):
    # A second request during a trace is ignored, and one after it is not.
    watch = Asking({2: 3, 3: 3, 8: 1})
    assert winged.run(make_config(), str(tmp_path), "", watch=watch) == 0
    assert traced(tmp_path) == {"steps_3_to_5": [3, 4, 5], "steps_9_to_9": [9]}
    assert not list(tmp_path.glob("profile/.*"))
    out = capsys.readouterr().out
    assert "traced steps 3 to 5 on 1 process: " in out
    assert f"xprof --logdir {tmp_path / 'profile'} " in out
    assert rows.same_bits(tmp_path) == rows.same_bits(untraced)
    assert rows.results(tmp_path) == rows.results(untraced)


def test_a_trace_that_a_stop_or_the_end_of_the_run_interrupts_is_kept(
    tmp_path, untraced, capsys
):
    watch = Asking({2: 50, 4: request.STOP})
    assert winged.run(make_config(), str(tmp_path), "", watch=watch) == 42
    assert traced(tmp_path) == {"steps_3_to_4": [3, 4]}
    assert "traced steps 3 to 4 on 1 process" in capsys.readouterr().out
    watch = Asking({10: 50})
    assert winged.run(make_config(), str(tmp_path), "", watch=watch) == 0
    assert traced(tmp_path)["steps_11_to_12"] == [11, 12]
    assert rows.same_bits(tmp_path) == rows.same_bits(untraced)
    assert rows.results(tmp_path) == rows.results(untraced)


def test_a_request_at_the_last_step_is_answered(tmp_path, capsys):
    watch = Asking({12: 3})
    assert winged.run(make_config(), str(tmp_path), "", watch=watch) == 0
    assert traced(tmp_path) == {}
    assert "no step is left to trace" in capsys.readouterr().out


@pytest.mark.wing("roll_backs")
def test_a_roll_back_ends_a_trace_and_the_next_one_works(tmp_path, capsys):
    config = make_config(
        experiment="tests.toy.Poisoned",
        poisoned=((0, 7),),
        on_nonfinite="roll_back",
    )
    watch = Asking({5: 50, 11: 1})
    assert winged.run(config, str(tmp_path), "", watch=watch) == 0
    assert "the trace was cut short: it has steps 6 to" in capsys.readouterr().out
    first, second = sorted(traced(tmp_path).values())
    assert first[:2] == [6, 7] and second == [12]


def test_a_trace_has_exactly_its_steps_whatever_is_dispatched_at_once(tmp_path, capsys):
    # Five steps are dispatched at once, up to a save.
    watch = Asking({5: 3})
    config = make_config(steps_per_dispatch=8)
    assert winged.run(config, str(tmp_path), "", watch=watch) == 0
    assert traced(tmp_path) == {"steps_6_to_8": [6, 7]}
    # A dispatch ends at the evaluation of step 6.
    assert "traced steps 6 to 8 in 2 dispatches on 1 proc" in capsys.readouterr().out


def fails(*args, **kwargs):
    raise RuntimeError("RESOURCE_EXHAUSTED: No space left on device")


def test_a_trace_that_cannot_be_made_does_not_end_the_run(
    tmp_path_factory, untraced, monkeypatch, capsys
):
    def full(folder):
        return usage(folder)._replace(free=1 << 20)

    def empties():
        stop_trace()
        empty(directory)

    usage = tracer_lib.shutil.disk_usage
    stop_trace = jax.profiler.stop_trace
    for module, name, fault in (
        (tracer_lib.shutil, "disk_usage", full),
        (jax.profiler, "start_trace", fails),
        (jax.profiler, "stop_trace", fails),
        (jax.profiler, "stop_trace", empties),
    ):
        directory = tmp_path_factory.mktemp("run")
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fault)
            watch = Asking({2: 2})
            assert winged.run(make_config(), str(directory), "", watch=watch) == 0
        out = capsys.readouterr().out
        assert "the trace failed: " in out and "traced steps" not in out
        assert traced(directory) == {} and not list(directory.glob("profile/.*"))
        assert rows.same_bits(directory) == rows.same_bits(untraced)
    # JAX can trace again.
    directory = tmp_path_factory.mktemp("run")
    assert winged.run(make_config(), str(directory), "", watch=Asking({2: 2})) == 0
    assert traced(directory) == {"steps_3_to_4": [3, 4]}


def empty(directory):
    """Empties the files of a trace, as a full disk does."""
    for path in directory.rglob("*.xplane.pb"):
        path.write_bytes(b"")


@pytest.mark.parametrize(
    "content, steps",
    [
        ("", tracer_lib.STEPS),
        ("20\n", 20),
        (" 1 ", 1),
        ("100", 100),
        ("0", None),
        ("101", None),
        ("-3", None),
        ("three", None),
        ("3 4", None),
        ("9" * 5000, None),
        ("\x00\xff", None),
    ],
)
def test_the_file_of_a_request(tmp_path, content, steps):
    said = []
    asked = []
    tracer = make_tracer(tmp_path, said)
    tracer._look(asked.append)
    assert asked == said == []
    file = tmp_path / "PROFILE"
    file.write_text(content, errors="surrogateescape")
    for _ in range(4):
        tracer._look(asked.append)
    if steps is None:
        assert asked == [] and not file.exists()
        (line,) = said
        assert line.startswith(f"{file} holds ") and "1 to 100" in line
        assert len(line) < 1000
        return
    (one,) = asked
    assert (one.kind, one.steps, said) == (request.PROFILE, steps, [])
    # The file goes when the trace begins, so that the next start finds it if this one
    # does not get that far.
    assert file.exists()
    tracer.receive(1, one)
    tracer.before_step(1, None)
    assert not file.exists()
    file.write_text("4")
    tracer._look(asked.append)
    assert len(asked) == 1
    tracer.close()
    tracer._look(asked.append)
    assert asked[1].steps == 4


def test_a_file_that_is_only_being_written_is_not_taken_as_empty(tmp_path):
    asked = []
    tracer = make_tracer(tmp_path, asked)
    (tmp_path / "PROFILE").touch()
    tracer._look(asked.append)
    (tmp_path / "PROFILE").write_text("7")
    tracer._look(asked.append)
    assert [one.steps for one in asked] == [7]
