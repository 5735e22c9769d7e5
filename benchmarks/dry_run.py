"""Compares a sharded update with the replicated one on pods, without the hardware: as
compiled for them.

    python -m benchmarks.dry_run [--topology=v5e:16x16] [--topology=v5p:8x8x16]

`xshard.dryrun` compiles the step of benchmarks/layers.py with libtpu. There are two
counts of the bytes that a chip moves: XLA's own "bytes accessed", and the dry run's,
which leaves out data that stays in the chip's vector memory.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from absl import app, flags

from benchmarks import measure

_TOPOLOGIES = flags.DEFINE_multi_string(
    "topology", ["v5e:16x16", "v5p:8x8x16"], "A slice; again for each."
)
_LOSS_SCALES = flags.DEFINE_multi_enum(
    "loss_scale", ["no", "dynamic"], ["no", "dynamic"], "The step's; again for each."
)
_JSON = flags.DEFINE_bool("json", False, "Print the rows as JSON.")


def result(topology: str, shard_update: bool, kind: str) -> dict[str, Any]:
    """Returns the JSON output of a dry run."""
    command = [
        *(
            sys.executable,
            "-m",
            "xshard.dryrun",
            "--config=benchmarks/layers.py",
            "--json",
        ),
        f"--topology={topology}",
        f"--config.reduction.shard_update={shard_update}",
        f"--config.loss_scale.kind={kind}",
    ]
    return json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    )


def compare(topology: str, scale: str) -> Iterator[measure.Row]:
    """Yields the rows of a topology, with a dynamic loss scale or without."""
    kind = "none" if scale == "no" else scale
    sharded, replicated = (result(topology, on, kind) for on in (True, False))
    memory = lambda name: lambda found: found["memory"][name]
    ici = lambda found: next(
        each["amount"] for each in found["bounds"] if each["name"] == "ICI"
    )
    hbm = lambda found: next(
        each["amount"] for each in found["bounds"] if each["name"] == "memory"
    )
    where = f", {topology}, {scale} loss scale"
    for what, of, at_most in (
        # Slightly above 1/chips, because every chip holds the counters and the scale in
        # full, which are a few bytes.
        (
            "optimizer state a chip",
            memory("optimizer_state"),
            1.001 / replicated["chips"],
        ),
        ("XLA's bytes accessed a step", lambda found: found["xla_bytes_accessed"], 0.5),
        ("bytes of HBM a step", hbm, None),
        ("bytes sent a step", ici, None),
        ("peak memory", memory("peak"), None),
    ):
        pair = [float(of(found)) for found in (sharded, replicated)]
        yield measure.ratio(
            f"{what}, sharded{where}", "replicated", pair[:1], pair[1:], at_most
        )


def main(argv: list[str]) -> None:
    """Prints the rows."""
    del argv
    if importlib.util.find_spec("libtpu") is None:
        missing = "libtpu is not installed: pip install '.[dryrun]'"
        rows = [measure.Row("a sharded update", "replicated", missing=missing)]
    else:
        rows = [
            row
            for topology in _TOPOLOGIES.value
            for scale in _LOSS_SCALES.value
            for row in compare(topology, scale)
        ]
    measure.emit(rows, _JSON.value)


if __name__ == "__main__":
    app.run(main)
