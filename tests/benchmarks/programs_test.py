"""Tests that each benchmark runs, in a form of seconds, with every value that its flags
offer. What it measures then means nothing.
"""

import importlib
import json
import re

import pytest
from absl import flags

from benchmarks import processes, sides
from tests import forks
from tests.checkpoint import harness

STEP = ("step", "--rounds=1", "--devices=2")
KEYS = ("keys", "--rounds=1", "--devices=2")
LOOP = ("loop", "--rounds=1", "--steps=200", "--save_every=5")
TORTURE = ("checkpoint_torture", "--trials=1")
FAULTS = ("faults", "--sample=1", "--cuts=1", "--jobs=1", "--results={folder}")
UNKILLABLE = (
    "unkillable",
    "--kills=1",
    "--members=2",
    "--spares=0",
    "--steps=10",
    "--hidden=",
)
# Programs with their flags, and what they print if they have run.
ROWS = [
    (("machine",), '"backend": "cpu"'),
    (("checks", "skips", "--devices=2"), "2 devices hold the same bits"),
    ((*STEP, "--size=1 ms"), "step: rules, 1 ms model, 2 devices"),
    ((*KEYS, "--size=1 ms"), "a step with exact sums of 8 replicas, 1 ms model"),
    ((*LOOP, "--size=1 ms"), "a 1 ms step in the loop"),
    # Of its parts, `start` has no other row.
    (("run", "--quick", "--only=start"), "until the first step is made"),
    (
        ("checkpoint", "--rounds=1", "--megabytes=1", "--arrays=2"),
        "restore 1 MiB in 2 arrays",
    ),
    (("accelerator", "--only=skips", "--output={folder}"), "| PASS |"),
    (("pod", "--trials=0", "--counts=1"), "1 processes: first step after"),
    ((*TORTURE, "--store=disk"), "done: 1 trials"),
    ((*FAULTS, "--where=disk"), "1 points: 1 "),
    (UNKILLABLE, "any in the first step"),
]
# Further forms.
DRAWN = [
    ((*STEP, "--size=20 ms", "--precision=bfloat16"), "20 ms model, bfloat16"),
    ((*KEYS, "--size=20 ms"), "a step with exact sums of 8 replicas, 20 ms model"),
    ((*LOOP, "--size=20 ms"), "a 20 ms step in the loop"),
    ((*LOOP, "--size=lm_tiny"), "a lm_tiny step in the loop"),
    ((*LOOP, "--size=digits"), "a digits step in the loop"),
    (
        ("pod", "--trials=1", "--processes=2", "--counts="),
        "SIGKILL: 1 of 1 ended in the bits of the undisturbed run",
    ),
    ((*TORTURE, "--store=gcs"), "done: 1 trials"),
    ((*TORTURE, "--store=s3"), "done: 1 trials"),
    (("checkpoint_torture", "--trials=0", "--saves=3"), "'throttle': none failed"),
    ((*FAULTS, "--where=power"), "1 points: 1 "),
    ((*FAULTS, "--where=gcs"), "1 points: 1 "),
    ((*FAULTS, "--where=s3"), "1 points: 1 "),
    ((*UNKILLABLE, "--hosts"), "any in the first step"),
]
for side in sides.SIDES:
    peak = (*STEP, "--size=1 ms", "--precision=float16", f"--memory={side}")
    DRAWN.append((peak, "the cpu backend does not say"))
WHOLE = ("run", "--quick")


def name_of(value):
    """Returns the name of a row, from its words alone."""
    return " ".join(value) if isinstance(value, tuple) else ""


@pytest.mark.parametrize(("words", "said"), ROWS, ids=name_of)
def test_each_benchmark_runs(words, said, tmp_path):
    assert_runs(words, said, tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("words", "said"), DRAWN, ids=name_of)
def test_each_value_of_a_flag_runs(words, said, tmp_path):
    assert_runs(words, said, tmp_path)


@pytest.mark.long
def test_all_parts_run(tmp_path):
    assert_runs(WHOLE, "restore 64 MiB in 24 arrays", tmp_path)


def assert_runs(words, said, folder):
    """Runs a benchmark as a program; skips the test if the machine lacks what it needs,
    which it says.
    """
    module, *arguments = [word.format(folder=folder) for word in words]
    program = forks.program(
        f"benchmarks.{module}",
        *arguments,
        env=harness.environment(TMPDIR=str(folder)),
        cwd=str(processes.ROOT),
    )
    output, _ = program.communicate()
    lacking = re.search(r"not tried, (.*)", output)
    if lacking:
        pytest.skip(lacking[1])
    assert program.returncode == 0, output
    assert said in output


def test_each_program_and_each_value_of_a_flag_has_a_row():
    given = {}
    for (module, *arguments), _ in [*ROWS, *DRAWN]:
        values = dict(word[2:].split("=", 1) for word in arguments if "=" in word)
        given.setdefault(module, []).append(values)
        if module == "run":
            # Its parts are programs, too.
            given[values["only"]] = [{}]
    programs = []
    for path in (processes.ROOT / "benchmarks").glob("*.py"):
        if "app.run(main)" in path.read_text():
            programs.append(path.stem)
    assert given.keys() == set(programs)
    process = forks.Process(print_offered, programs, env=harness.environment())
    output, _ = process.communicate()
    assert process.returncode == 0, output
    for module, flag, offered, default in json.loads(output.splitlines()[-1]):
        tried = set()
        for values in given[module]:
            tried |= {values[flag]} if flag in values else set(default)
        assert tried == set(offered), f"{module} --{flag}"


def print_offered(modules):
    """Prints each flag that offers values: its module, its name, the values and the
    default ones.

    It runs in a process of its own, since some modules define flags of one name.
    """
    found = []
    for module in modules:
        importlib.import_module(f"benchmarks.{module}")
        for flag in flags.FLAGS.get_flags_for_module(f"benchmarks.{module}"):
            offered = getattr(flag.parser, "enum_values", None)
            if offered:
                default = flag.default or []
                if isinstance(default, str):
                    default = [default]
                found.append((module, flag.name, list(offered), default))
            # The next module may define it, too.
            delattr(flags.FLAGS, flag.name)
    print(json.dumps(found))
