"""Measures the bytes that a step sends and the time that it takes over a slow link:
replicated, and in shards.

    python -m benchmarks.link [--rate=1gbit] [--rounds=3] [--width=512]

Two processes with one device each run as hosts, each in its own network namespace. tc
limits the rate at which a host sends, which needs root and Debian's iproute2. The model
is `configs/lm_tiny.py`. The bytes of a step are the difference between two runs with
different numbers of steps. They include the overhead of packets and of the pod itself,
and are compared with the count from the compiled step's collectives.
"""

import contextlib
import json
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
from absl import app, flags

from benchmarks import measure, models
from configs import lm_tiny
from tests.launch import harness, network

_RATE = flags.DEFINE_string(
    "rate", "1gbit", "What a host sends at most, in words of tc."
)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "How often each side runs.", 1)
_STEPS = flags.DEFINE_integer(
    "steps", 40, "Of the shorter run; the other makes twice as many.", 10
)
_WIDTH = flags.DEFINE_integer("width", 128, "Of the model.", 4)
_JSON = flags.DEFINE_bool("json", False, "Print the rows as JSON.")

_SIDES: dict[str, dict[str, bool]] = {
    "replicated": {},
    "sharded update": {"shard_update": True},
    "sharded parameters": {"shard_params": True},
}
_EVERY = 10


def main(argv: list[str]) -> None:
    """Prints the rows."""
    del argv
    if not network.is_allowed():
        sys.exit(f"error: {network.NEEDED}")
    measure.emit(compare(), _JSON.value)


def compare() -> Iterator[measure.Row]:
    """Yields the rows."""
    jax.config.update("jax_num_cpu_devices", 2)
    counted = {name: count(reduction) for name, reduction in _SIDES.items()}
    with contextlib.ExitStack() as stack:
        scratch = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = network.Hosts(stack, scratch, 2)
        for index in range(2):
            hosts.limit(index, _RATE.value)
        turns = {
            name: lambda name=name: turn(hosts, scratch, _SIDES[name])
            for name in _SIDES
        }
        measured = measure.in_turn(turns, _ROUNDS.value, warm_up=False)
    seconds = {
        name: [each["seconds"] for each in rounds] for name, rounds in measured.items()
    }
    for name, rounds in measured.items():
        sent = [each["bytes"] for each in rounds]
        what = f"{name}: bytes a step sends over {_RATE.value}"
        yield measure.ratio(what, "the count", sent, [counted[name]] * len(sent))
        yield measure.figure(
            f"{name}: sent a step, counted", [counted[name] / 1e6], "MB"
        )
        yield measure.figure(f"{name}: a step", [1e3 * x for x in seconds[name]], "ms")
    for name in list(_SIDES)[1:]:
        what = f"a step over {_RATE.value}, {name}"
        yield measure.ratio(what, "replicated", seconds[name], seconds["replicated"])


def count(reduction: dict[str, bool]) -> float:
    """Returns the bytes that each of two devices sends in a step."""
    config = lm_tiny.get_config()
    config.model.width = _WIDTH.value
    config.reduction.update(reduction)
    return models.bytes_sent(config)


def turn(
    hosts: network.Hosts, scratch: pathlib.Path, reduction: dict[str, bool]
) -> dict[str, Any]:
    """Returns the bytes that a host sends per additional step, and the seconds of a
    step.
    """
    keys = [f"--config.reduction.{key}={value}" for key, value in reduction.items()]
    sent = []
    seconds = []
    # The difference of two runs cancels the bytes that a run sends besides its steps,
    # such as at its start.
    for steps in (_STEPS.value, 2 * _STEPS.value):
        with tempfile.TemporaryDirectory(dir=scratch) as directory:
            before = hosts.bytes_sent(0)
            train(hosts, directory, [*keys, f"--config.steps={steps}"])
            sent.append(hosts.bytes_sent(0) - before)
            rows = (pathlib.Path(directory) / "metrics.jsonl").read_text().splitlines()
        rates = [json.loads(row).get("perf/steps_per_second") for row in rows]
        seconds += [1 / rate for rate in rates[1:] if rate]
    return {
        "bytes": (sent[1] - sent[0]) / _STEPS.value,
        "seconds": statistics.median(seconds),
    }


def train(hosts: network.Hosts, directory: str, options: list[str]) -> None:
    """Runs a pod on the two hosts to its end."""
    command = [
        sys.executable,
        "-m",
        "xshard.main",
        "--config=configs/lm_tiny.py",
        f"--workdir={directory}",
        "--cpu_devices=1",
        "--num_processes=2",
        "--coordinator_address=h0:8476",
        f"--config.log_every_steps={_EVERY}",
        "--config.eval_every_steps=100000",
        "--config.sample.length=0",
        f"--config.model.width={_WIDTH.value}",
        *options,
        *harness.PATIENT,
    ]
    processes = [
        hosts.start(index, *command, f"--process_id={index}") for index in range(2)
    ]
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.enter_context(harness.running(process))
        for process in processes:
            code, output = harness.finish(process)
            assert code == 0, output


if __name__ == "__main__":
    app.run(main)
