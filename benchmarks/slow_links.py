"""Measures what a step of slices that train apart sends over slow links, and how long
it takes.

    python -m benchmarks.slow_links [--hosts=3] [--rates=1gbit,100mbit,10mbit]
      [--side=NAME]

Each host is a network namespace with one process and one device, and trains
`configs/lm_tiny.py` as one slice. tc limits the rate at which a host sends, which needs
root and Debian's iproute2; it is lowered while the run goes on, for 50 steps each. The
bytes at the interface include the overhead of packets and of the pod itself, and are
compared with the count from the compiled step's collectives.
"""

import contextlib
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from absl import app, flags

from benchmarks import measure, models
from configs import lm_tiny
from tests.launch import harness, network

_HOSTS = flags.DEFINE_integer("hosts", 3, "The number of hosts.", 2)
_RATES = flags.DEFINE_list(
    "rates", "1gbit,100mbit,10mbit", "What a host sends at most, in words of tc."
)
_SIDE = flags.DEFINE_string("side", "", "The only side to measure.")
_JSON = flags.DEFINE_bool("json", False, "Print the rows as JSON.")

# The steps between exchanges, and at each rate.
_STEPS = 50
_APART = {"slices": 0, "outer.every_steps": _STEPS}
_STREAMED = {**_APART, "outer.fragments": 5, "outer.delay_steps": 1}
# The changes of the config of each side.
_SIDES: dict[str, dict[str, Any]] = {
    "sums in each step": {},
    "every 50 steps": _APART,
    "every 50 steps, int8": {**_APART, "outer.dtype": "int8"},
    "streamed": _STREAMED,
    "streamed, int4": {**_STREAMED, "outer.dtype": "int4"},
}


class Leg(NamedTuple):
    """What was measured at one rate.

    Attributes:
      rate: the rate.
      seconds: the time of a step, on average.
      nbytes: the bytes that a host has sent in a step, on average.
    """

    rate: str
    seconds: float
    nbytes: float


def main(argv: list[str]) -> None:
    """Prints the rows."""
    del argv
    if not network.is_allowed():
        sys.exit(f"error: {network.NEEDED}")
    measure.emit(compare(), _JSON.value)


def compare() -> Iterator[measure.Row]:
    """Yields the rows."""
    jax.config.update("jax_num_cpu_devices", _HOSTS.value)
    for name, changes in _SIDES.items():
        if _SIDE.value not in ("", name):
            continue
        counted = models.bytes_sent(config_of(changes))
        for leg in legs(changes):
            what = f"{name}, {leg.rate}"
            print(f"{what}: {counted:.0f} counted, {leg}", file=sys.stderr, flush=True)
            sent = [leg.nbytes]
            yield measure.ratio(f"{what}: sent", "the count", sent, [counted])
            yield measure.figure(f"{what}: counted a step", [counted / 1e3], "kB")
            yield measure.figure(f"{what}: a step", [1e3 * leg.seconds], "ms")


def config_of(changes: dict[str, Any]) -> Any:
    """Returns the config of a side, in which one process has all devices."""
    config = lm_tiny.get_config()
    config.batch_size = batch_size()
    config.update_from_flattened_dict(changes)
    if not config.slices:
        config.slices = _HOSTS.value
    return config


def batch_size() -> int:
    """Returns a number of examples that the hosts divide, near that of lm_tiny."""
    return -(-16 // _HOSTS.value) * _HOSTS.value


def legs(changes: dict[str, Any]) -> Iterator[Leg]:
    """Trains a pod, and yields what was measured at each rate."""
    rates = _RATES.value
    with contextlib.ExitStack() as stack:
        scratch = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = network.Hosts(stack, scratch, _HOSTS.value)
        set_rate(hosts, rates[0])
        rows = scratch / "run" / "metrics.jsonl"
        steps = _STEPS * (len(rates) + 1)
        command = command_of(scratch / "run", steps, changes)
        processes = []
        for index in range(_HOSTS.value):
            process = hosts.start(index, *command, f"--process_id={index}")
            stack.enter_context(harness.running(process))
            processes.append(process)
        # The first 50 steps compile, and warm up.
        wait_for(rows, _STEPS, processes)
        for number, rate in enumerate(rates, 1):
            set_rate(hosts, rate)
            begin = time.monotonic()
            before = hosts.bytes_sent(0)
            wait_for(rows, _STEPS * (number + 1), processes)
            yield Leg(
                rate=rate,
                seconds=(time.monotonic() - begin) / _STEPS,
                nbytes=(hosts.bytes_sent(0) - before) / _STEPS,
            )
        for process in processes:
            code, output = harness.finish(process)
            assert code == 0, output


def set_rate(hosts: network.Hosts, rate: str) -> None:
    """Limits the rate at which each host sends."""
    for index in range(_HOSTS.value):
        hosts.limit(index, rate)


def wait_for(rows: pathlib.Path, step: int, processes: list[Any]) -> None:
    """Waits until the row of a step is written."""
    while True:
        if rows.exists():
            for line in rows.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    if json.loads(line)["step"] >= step:
                        return
        for process in processes:
            if process.poll():
                sys.exit(process.communicate()[0])
        time.sleep(0.02)


def command_of(
    directory: pathlib.Path, steps: int, changes: dict[str, Any]
) -> list[str]:
    """Returns the command of a process of the pod."""
    keys = [f"--config.{key}={value}" for key, value in changes.items()]
    return [
        sys.executable,
        "-m",
        "xshard.main",
        "--config=configs/lm_tiny.py",
        f"--workdir={directory}",
        "--cpu_devices=1",
        f"--num_processes={_HOSTS.value}",
        "--coordinator_address=h0:8476",
        f"--config.steps={steps}",
        # A row at the last step of each round, which the host reads once later steps
        # have been dispatched.
        "--config.log_every_steps=10",
        "--config.eval_every_steps=100000",
        "--config.checkpoint.every_steps=100000",
        "--config.sample.length=0",
        f"--config.batch_size={batch_size()}",
        f"--config.eval_batch_size={4 * batch_size()}",
        *keys,
        *harness.PATIENT,
    ]


if __name__ == "__main__":
    app.run(main)
