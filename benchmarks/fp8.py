"""Trains a language model in each precision, and compares losses and times of a step.

    python -m benchmarks.fp8 [--config=lm_words] [--steps=300] [--seeds=3] [--width=64]

Each precision begins with the same parameters and sees the same batches. A CPU
multiplies float8 by converting it, so its times show only that all of them run.
"""

import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from absl import app, flags

from benchmarks import measure
from configs import lm_tiny, lm_words
from xshard import experiment as experiment_lib
from xshard.run import evaluation, preflight
from xshard.training import state as state_lib

_CONFIGS = {"lm_tiny": lm_tiny, "lm_words": lm_words}
_CONFIG = flags.DEFINE_enum("config", "lm_tiny", sorted(_CONFIGS), "The model.")
_STEPS = flags.DEFINE_integer("steps", 300, "The steps of each run.", 10)
_SEEDS = flags.DEFINE_integer("seeds", 3, "The runs of each precision.", 1)
_WIDTH = flags.DEFINE_integer("width", 64, "The width; 0: the config's shape.", 0)
_JSON = flags.DEFINE_bool("json", False, "Print the rows as JSON.")

_HALF = "params=float32,compute=bfloat16,output=float32"
# The changes of the config, by side.
_SIDES: dict[str, dict[str, Any]] = {
    "float32": {"precision": "params=float32,compute=float32,output=float32"},
    "bfloat16": {"precision": _HALF},
    "fp8, delayed": {"precision": _HALF, "fp8.dots": True},
    "fp8, current": {
        "precision": _HALF,
        "fp8.dots": True,
        "fp8.scaling": "current",
    },
}
# Losses are means over so large a part of the steps, the last.
_LAST = 0.1


def _config(changes: Mapping[str, Any]) -> Any:
    config = _CONFIGS[_CONFIG.value].get_config()
    values = {"steps": _STEPS.value, "loss_scale.kind": "none", **changes}
    if _WIDTH.value:
        values |= {
            "batch_size": 8,
            "text.length": 64,
            "text.eval_windows": 64,
            "model.width": _WIDTH.value,
            "model.heads": 2,
            "model.feed_forward": 3 * _WIDTH.value,
        }
    config.update_from_flattened_dict(values)
    return config.lock()


def _train(name: str) -> dict[str, list[float]]:
    """Returns the figures of the runs of one side, by their names."""
    config = _config(_SIDES[name])
    experiment = experiment_lib.load(config.experiment)(config)
    mesh = experiment_lib.mesh_of(config, jax.devices())
    step = preflight.jitted_step(experiment, mesh)
    evaluate = evaluation.Evaluation(experiment, mesh, config.eval_batch_size)
    found: dict[str, list[float]] = {"last": [], "held out": [], "ms": [], "cut": []}
    for seed in range(_SEEDS.value):
        batches = preflight.train_batches(experiment, mesh)
        state = state_lib.init(experiment, mesh, seed, batches.example)
        metrics = []
        times = []
        for _ in range(_STEPS.value):
            batch = next(batches)
            begin = time.perf_counter()
            stepped = step(state, batch)
            state = stepped.state
            metrics.append(jax.device_get(stepped.metrics))
            times.append(1e3 * (time.perf_counter() - begin))
        last = metrics[-max(1, int(_LAST * _STEPS.value)) :]
        found["last"].append(float(np.mean([each["loss"] for each in last])))
        found["held out"].append(float(evaluate(state)["loss"]))
        found["ms"].append(float(np.median(times)))
        cut = [float(each.get("fp8/saturated", 0)) for each in metrics]
        found["cut"].append(float(np.mean(cut)))
    return found


def main(argv: list[str]) -> None:
    """Prints the rows."""
    del argv
    results = {name: _train(name) for name in _SIDES}
    where = f"{_CONFIG.value}, {jax.device_count()} {jax.devices()[0].platform}"
    rows = []
    half = results["bfloat16"]
    for name, found in results.items():
        rows.append(measure.figure(f"last loss in {name}, {where}", found["last"], ""))
        held_out = f"held-out loss in {name}, {where}"
        rows.append(measure.figure(held_out, found["held out"], ""))
        rows.append(measure.figure(f"step in {name}, {where}", found["ms"], "ms"))
        if name.startswith("fp8"):
            for what in ("last", "held out", "ms"):
                row = f"{what}, {name}, {where}"
                target = 1.02 if what == "last" else None
                rows.append(
                    measure.ratio(row, "bfloat16", found[what], half[what], target)
                )
            what = f"saturated elements of a step, {name}, {where}"
            rows.append(measure.figure(what, found["cut"], ""))
    measure.emit(rows, _JSON.value)


if __name__ == "__main__":
    app.run(main)
