"""Runs the parts one after the other. Each prints its measurements beside its peers,
and the targets; last comes a description of the machine.

    JAX_PLATFORMS=cpu python -m benchmarks.run [--quick] [--only=step,loop]

Each part runs in processes of its own. Exit code 1: a part failed.
`benchmarks.accelerator` is the command for accelerators.
"""

import os
import signal
import tempfile
from collections.abc import Sequence

from absl import app, flags

from benchmarks import processes
from xshard.base import formatting as formatting_lib

# The commands: a module and its flags.
COMMANDS = [
    ["step", "--devices=1"],
    ["step", "--devices=8"],
    ["keys", "--devices=1"],
    ["keys", "--devices=8"],
    ["loop"],
    ["start"],
    ["checkpoint"],
]
# The flags that --quick adds, by module.
PARTS = {
    "step": ["--rounds=3", "--size=1 ms"],
    "keys": ["--rounds=3", "--size=1 ms"],
    "loop": ["--rounds=1", "--steps=300", "--size=1 ms"],
    "start": ["--rounds=1"],
    "checkpoint": ["--rounds=1", "--megabytes=64", "--arrays=24"],
}

_QUICK = flags.DEFINE_bool(
    "quick", False, "Fewer rounds and smaller sizes: about three minutes."
)
_ONLY = flags.DEFINE_list("only", list(PARTS), f"The parts, of {', '.join(PARTS)}.")


def run(command: Sequence[str]) -> bool:
    """Runs a command and prints its tables; returns whether it failed."""
    name, *arguments = command
    print(f"== {' '.join(command)}", flush=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            module = [f"benchmarks.{name}", *arguments]
            output = processes.output_of(module, folder, processes.LIMIT_SECONDS)
    except RuntimeError as e:
        print(f"FAILED: {e}\n", flush=True)
        return True
    print(output, flush=True)
    return False


def main(argv: list[str]) -> int:
    """Runs the parts; returns the exit code."""
    if argv[1:]:
        raise app.UsageError(f"{' '.join(argv[1:])}: arguments begin with '--'.")
    # SIGTERM is handled as Ctrl-C, so that the processes that are being measured end
    # too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    load = os.getloadavg()[0]
    has_failed = False
    for name, *arguments in COMMANDS:
        if name in _ONLY.value:
            more = PARTS[name] if _QUICK.value else []
            has_failed |= run([name, *arguments, *more])
    with tempfile.TemporaryDirectory() as folder:
        machine = processes.described(folder, processes.LIMIT_SECONDS)
    machine["load before, after"] = f"{load:.2f}, {os.getloadavg()[0]:.2f}"
    lines = [{"machine": name, "": value} for name, value in machine.items()]
    print(formatting_lib.table(lines))
    return int(has_failed)


@flags.validator("only", message=f"there are {', '.join(PARTS)}")
def _are_parts(names: list[str]) -> bool:
    return set(names) <= PARTS.keys()


if __name__ == "__main__":
    app.run(main)
