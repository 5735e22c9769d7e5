"""Writes the work directories in written/, and resumes them with two checkouts.

`python -m tests.checkpoint.write_runs write NAME ...` trains runs of the table RUNS to
step 10 of 20, keeps their work directories in written/, and beside each what the same
code logs when it resumes a copy. Names that begin with the same letters are one
argument: 'outer*'. --code=CHECKOUT writes them with the package of another checkout.

`python -m tests.checkpoint.write_runs compare --old=CHECKOUT` resumes a copy of each
directory with the package of another checkout and with that of this one, on this
machine, and compares all that they log, and the last state, bit by bit. XLA compiles
for the processor at hand, so only bits of one machine can be compared, and those in
written/ are those of the machine that wrote them.

`compare --old=CHECKOUT --anew` needs no kept directory, and so no file format that both
know: each checkout trains the runs of this one's table from step 0, is stopped at step
10, resumes, and reads its rows and its last state, all with its own files. A run that
one of them cannot know, for a key, a config or an experiment that it lacks, is left out
and named.
"""

import argparse
import fnmatch
import hashlib
import importlib
import importlib.util
import json
import os
import pathlib
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

WRITTEN = pathlib.Path(__file__).with_name("written")
ROOT = pathlib.Path(__file__).parents[2]
# The texts that the language models read, in the folder that a run begins in.
TEXT = "text"
STEPS = 20
SAVED = 10
DEVICES = 8
# The files of rows that are compared, without the values that depend on time, and
# without the kind of a row, which earlier versions did not write.
_LOGS = ("metrics.jsonl", "norms.jsonl")
_PERFORMANCE = "perf/"
_KIND = "kind"
# In `origin.json`, what may change the bits that a machine computes.
MACHINE = ("libraries", "devices", "flags", "chip")
# What a run writes and a resume does not need, or what names a place or a process.
_DROPPED = (
    ".lock",
    "checkpoints/.lock",
    "compiled",
    "reached.json",
    "spans",
    "status.json",
)
_EXPERIMENTS = "tests.checkpoint.written_experiments"
# What a line begins with about a run that is not compared.
_LACKS = "left out, since "


class Run(NamedTuple):
    """A run of the table.

    Attributes:
      config: the module of its config.
      changes: values by key.
    """

    config: str
    changes: dict[str, Any]


_COMMON = {
    "steps": STEPS,
    "batch_size": 16,
    "eval_batch_size": 96,
    "log_every_steps": 1,
    "fingerprint_every_steps": 1,
    "eval_every_steps": 7,
    "samples_every_steps": 0,
    "writers": ("jsonl",),
    "checkpoint.every_steps": 5,
    "checkpoint.keep_last": 1,
}
_HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))
_DIGITS = {"model.channels": 2, "model.hidden": 8}
_GAN = {"model.noise": 4, "model.generator": (4,), "model.discriminator": (4,)}
_LM = {
    "text.files": ("text/*.txt",),
    "text.held_out": 0.3,
    "text.length": 16,
    "text.eval_windows": 16,
    "model.width": 8,
    "model.heads": 2,
    "model.feed_forward": 8,
    "model.layers": 2,
    "sample.length": 4,
    "sample.prompts": ("The ",),
}
_WORDS = _LM | {"text.vocabulary": 270}
_RL = {"model.hidden": (4,), "eval_games": 16}
_FLOAT16 = "params=float32,compute=float16,output=float32"
_BFLOAT16 = "params=float32,compute=bfloat16,output=float32"


def _digits(**changes: Any) -> Run:
    return Run("configs.digits", _DIGITS | _with_dots(changes))


def _curve(experiment: str = "Curve", **changes: Any) -> Run:
    name = {"experiment": f"{_EXPERIMENTS}.{experiment}"}
    return Run(_EXPERIMENTS, name | _with_dots(changes))


def _with_dots(changes: dict[str, Any]) -> dict[str, Any]:
    """Returns changes by key, of arguments that have '__' for the dots."""
    return {name.replace("__", "."): value for name, value in changes.items()}


# Each config of configs/, and each key that changes what a step computes. Keys that act
# on each other share a run. A kept directory needs its row unchanged.
RUNS = {
    # The configs.
    "digits": _digits(
        loss_scale__initial_loss_scale=2.0**18,
        loss_scale__increment_period=3,
        optimizer__average_decay=0.9,
    ),
    "digits_groups": Run("configs.digits_groups", _DIGITS),
    # One of its points.
    "digits_sweep": _digits(optimizer__learning_rate=8e-3, seed=1),
    "gan": Run("configs.gan", _GAN),
    "lm": Run(
        "configs.lm", _LM | {"model.remat": "dots_saveable", "model.attention": "xla"}
    ),
    "lm_gpt2": Run(
        "configs.lm_gpt2", _WORDS | {"model.positions": 16, "text.tokenizer": ""}
    ),
    "lm_lora": Run(
        "configs.lm_lora",
        _WORDS
        | {
            "text.base_files": ("text/*.txt",),
            "text.base_held_out": 0.3,
            "lora.rank": 2,
            "lora.train": "norm",
        },
    ),
    "lm_pod": Run("configs.lm_pod", _LM | {"model_parallel": 2, "micro_batches": 2}),
    "lm_tiny": Run("configs.lm_tiny", _LM),
    "lm_words": Run(
        "configs.lm_words",
        _WORDS
        | {
            "text.files": ("text/[c-g]*.txt", "text/s*.txt"),
            "text.streams": 2,
            "text.weights": (3, 1),
            "micro_batches": 2,
        },
    ),
    "rl": Run("configs.rl", _RL),
    "rl_host": Run("configs.rl_host", _RL),
    "ssl": Run(
        "configs.ssl",
        {
            "model.channels": 2,
            "model.features": 4,
            "model.hidden": 8,
            "model.projection": 4,
        },
    ),
    # Reductions.
    "reduce_bfloat16_sum_clipped": _curve(
        "Clipped",
        reduction__reduce_dtype="bfloat16",
        reduction__reduction="sum",
        slices=2,
        reduction__slice_dtype="bfloat16",
    ),
    "shard_update": _curve(
        reduction__shard_update=True,
        average="inside",
        log_norms_every_steps=3,
        slots_memory="pinned_host",
    ),
    "shard_params": _curve(
        reduction__shard_params=True,
        gather_once=True,
        micro_batches=2,
        log_norms_every_steps=3,
        average="outside",
    ),
    "shard_params_model": _curve(
        reduction__shard_params=True, model_parallel=2, rule="clipped"
    ),
    "shard_params_pure": _curve(
        "Pure", reduction__shard_params=True, precision=_BFLOAT16, uncast="/x$"
    ),
    "model": _curve(model_parallel=4, log_norms_every_steps=3),
    "tree": _curve("Weighted", micro_batches=2, aggregation_method="EXPERIMENTAL_TREE"),
    # Sums in any order.
    "exact": _curve(
        logical_replicas=8,
        reduction__arithmetic="exact",
        loss_scale__kind="dynamic",
        outliers=((0, 7, float("inf")), (0, 14, float("inf"))),
    ),
    "exact_norm": _curve(
        logical_replicas=16,
        reduction__arithmetic="exact",
        batch_size=32,
        micro_batches=2,
        norm=True,
        average="outside",
        estimate_statistics=True,
    ),
    "exact_sum": _curve(
        logical_replicas=8,
        reduction__arithmetic="exact",
        reduction__reduction="sum",
        group_assignment=((0, 1, 2, 3), (4, 5, 6, 7)),
        noise_scale_steps=5,
    ),
    "logical": _curve(logical_replicas=16, log_norms_every_steps=3),
    # What is not finite.
    "groups_skip": _curve(
        group_assignment=_HALVES,
        on_nonfinite="skip",
        loss_scale__kind="fixed",
        reduction__shard_update=True,
        outliers=((0, 4, float("nan")), (1, 13, float("nan"))),
    ),
    "shards_skip": _curve(
        on_nonfinite="skip",
        reduction__shard_params=True,
        outliers=((0, 4, float("nan")), (0, 13, float("nan"))),
    ),
    "roll_back": _curve(
        on_nonfinite="roll_back",
        roll_back__learning_rate_factor=0.5,
        backs_off=True,
        average="outside",
        outliers=((0, 7, float("nan")), (0, 14, float("nan"))),
    ),
    "roll_back_jump": _curve(
        on_nonfinite="roll_back",
        roll_back__loss_factor=5.0,
        roll_back__loss_steps=4,
        reduction__shard_update=True,
        rule="momentum",
        outliers=((0, 7, 1000.0), (0, 14, 1000.0)),
    ),
    "warn": _curve(on_nonfinite="warn", outliers=((0, 15, float("nan")),)),
    # Batches.
    "windows": _curve(data="windows", backs_off=True, reduction__shard_update=True),
    "mix": _curve(data="mix", micro_batches=2, aggregation_method="ADD_N"),
    "noise_scale_slices": _curve(
        slices=2, noise_scale_steps=5, micro_batches=2, reduction__shard_update=True
    ),
    "float8": _curve(
        fp8__dots=True, fp8__edges=True, fp8__gradient_format="float8_e4m3fn"
    ),
    # Averages, and other parameters for evaluation.
    "statistics": _curve(norm=True, average="outside", estimate_statistics=True),
    "schedule_free": _curve(
        norm=True,
        rule="schedule_free",
        estimate_statistics=True,
        reduction__shard_update=True,
    ),
    # Rules.
    "by_hand": _curve("ByHand", reduction__shard_update=True),
    "every_other": _curve(
        rule="every_other", loss_scale__kind="dynamic", precision=_FLOAT16
    ),
    "factored": _curve(rule="factored", reduction__shard_params=True),
    "injected": _curve(rule="injected", kept="^first/b"),
    "muon": _curve(rule="muon", reduction__shard_update=True),
    "plateau": _curve(rule="plateau", reduction__shard_params=True),
    "plain": _curve(
        "Plain",
        rule="muon",
        loss_scale__kind="dynamic",
        loss_scale__initial_loss_scale=2.0**10,
        loss_scale__increment_period=3,
        loss_scale__multiplier=4.0,
        outliers=((0, 6, float("inf")), (0, 13, float("inf"))),
        precision=_FLOAT16,
        reduction__shard_update=True,
    ),
    "plain_fixed": _curve(
        "Plain",
        loss_scale__kind="fixed",
        loss_scale__loss_scale_value=64.0,
        micro_batches=2,
        precision=_FLOAT16,
    ),
    # Types.
    "half": _curve(
        precision="params=float16,compute=float16,output=float16",
        loss_scale__kind="dynamic",
        average="inside",
    ),
    "bfloat16_lora": _curve(
        "Adapted",
        precision="params=bfloat16,compute=bfloat16,output=float32",
        reduction__shard_params=True,
    ),
    # Slices that train apart.
    "outer": _curve(slices=2, outer__every_steps=4),
    "outer_int8": _curve(
        slices=2,
        outer__every_steps=4,
        outer__dtype="int8",
        outer__fragments=2,
        outer__delay_steps=1,
        outer__learning_rate=0.5,
        outer__momentum=0.8,
        reduction__shard_update=True,
        on_nonfinite="skip",
        outliers=((0, 6, float("nan")), (0, 13, float("nan"))),
    ),
    "outer_own": _curve(
        "Outer",
        slices=2,
        outer__every_steps=4,
        outer__dtype="bfloat16",
        loss_scale__kind="dynamic",
        precision=_FLOAT16,
    ),
    "outer_exact": _curve(
        slices=2,
        logical_replicas=4,
        reduction__arithmetic="exact",
        outer__every_steps=4,
        noise_scale_steps=5,
    ),
    "outer_gan": Run(
        "configs.gan",
        _GAN | {"slices": 2, "outer.every_steps": 4, "reduction.shard_params": True},
    ),
    # State beside the learners.
    "recurrent": _curve("Recurrent", reduction__shard_update=True, micro_batches=2),
    "rl_slices": Run(
        "configs.rl",
        _RL
        | {
            "slices": 2,
            "noise_scale_steps": 5,
            "precision": _FLOAT16,
        },
    ),
}


class _StopAt:
    """Asks a run to stop after a step."""

    def __init__(self, step: int):
        self._at = step
        self._step = -1

    def set_phase(self, phase: str, step: int = -1, **more: Any) -> None:
        self._step = step

    def poll(self) -> Any:
        from xshard.pod import request

        if self._step == self._at:
            return request.Request(request.STOP, f"step {self._at}")
        return None

    def publish(self) -> None:
        pass

    def in_each_tick(self, action: Any) -> None:
        pass


def config_of(name: str) -> Any:
    """Returns the config of a run."""
    run = RUNS[name]
    config = importlib.import_module(run.config).get_config()
    changes = _COMMON | run.changes
    if isinstance(config.get("loss_scale"), str):
        # With the package of an earlier checkout.
        changes["loss_scale"] = changes.pop("loss_scale.kind", "none")
    config.update_from_flattened_dict(changes)
    return config.lock()


def begin(name: str, directory: pathlib.Path) -> None:
    """Trains a run to step SAVED in a new work directory."""
    code = _train(name, directory, watch=_StopAt(SAVED))
    assert code == 42, f"exit code {code}"
    for dropped in _DROPPED:
        path = directory / dropped
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    # Later versions resume it from other folders, with other experiments.
    config = directory / "config.json"
    content = json.loads(config.read_text())
    for noted in ("file", "source"):
        content["_run"].pop(noted, None)
    config.write_text(json.dumps(content, indent=2) + "\n")
    (checkpoint,) = directory.glob("checkpoints/step_*")
    assert checkpoint.name.startswith(f"step_{SAVED:08d}."), checkpoint.name


def _is_ignored(key: str) -> bool:
    """Returns whether a value of a row is not compared."""
    return key == _KIND or key.startswith(_PERFORMANCE)


def resume(name: str, directory: pathlib.Path) -> list[dict[str, Any]]:
    """Resumes a run to its end, in its work directory.

    Returns:
      What the run logged from there on, in its order, without what depends on time; and
      last the checksums of its samples and of each array of its last state.
    """
    before = {name: _lines(directory / name) for name in _LOGS}
    code = _train(name, directory)
    assert code in (0, 3), f"exit code {code}"
    logged = []
    for file, lines in before.items():
        after = _lines(directory / file)
        assert after[: len(lines)] == lines, f"{file} was changed before step {SAVED}"
        for line in after[len(lines) :]:
            row = json.loads(line)
            logged.append({key: x for key, x in row.items() if not _is_ignored(key)})
    end: dict[str, Any] = {"step": STEPS, "code": code}
    samples = b"".join(_lines(directory / "samples.jsonl"))
    # Their kind, too.
    samples = samples.replace(b'"kind": "samples", ', b"")
    end["samples"] = f"{zlib.crc32(samples):08x}"
    for path, array in _arrays(directory).items():
        end[f"state/{path}"] = f"{zlib.crc32(array.tobytes()):08x}"
    return [*logged, end]


def _train(name: str, directory: pathlib.Path, watch: Any = None) -> int:
    import jax

    from xshard import loop

    wings: dict[str, Any] = {}
    # The package of an earlier checkout may have none.
    if importlib.util.find_spec("xshard.wings"):
        from xshard.wings import installed

        wings["wings"] = installed.WINGS
    with jax.numpy_dtype_promotion("standard"):
        return loop.run(config_of(name), str(directory), "", watch=watch, **wings)


def _lines(path: pathlib.Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


def _arrays(directory: pathlib.Path) -> dict[str, Any]:
    """Returns the arrays of the last checkpoint, by path."""
    from xshard.checkpoint import array_reader, place
    from xshard.checkpoint import format as format_lib

    attempt = place.find(f"{directory}@{STEPS}")
    metas = format_lib.read_array_metas(attempt)
    found = {}
    for path, array in array_reader.read_arrays(attempt, metas):
        # What is kept in written/ has other types in this form.
        if array.dtype.kind not in "biufc" or not array.dtype.isbuiltin:
            array = array.astype("f4")
        found[path] = array
    return found


def lacking(run: Run) -> str:
    """Returns what a run is made of that the package at hand lacks; '' if it has all.

    Args:
      run: a run of the table of any checkout.
    """
    if not importlib.util.find_spec(run.config):
        return f"config {run.config}"
    config = importlib.import_module(run.config).get_config()
    changes = _COMMON | run.changes
    for key in changes:
        value = config
        for part in key.split("."):
            if part not in value:
                return f"key {key}"
            value = value[part]
    experiment = changes.get("experiment", config.experiment)
    module, _, name = experiment.rpartition(".")
    if not importlib.util.find_spec(module):
        return f"experiment {experiment}"
    if not hasattr(importlib.import_module(module), name):
        return f"experiment {experiment}"
    return ""


def anew(code: Any, name: str, directory: pathlib.Path) -> list[dict[str, Any]]:
    """Trains a run from step 0, stopped and resumed, in a new work directory.

    Args:
      code: this module of the checkout at hand, which knows how its package is called
        and what it writes. It has `begin`, `resume`, `_LOGS`, `_lines`, `_is_ignored`
        and `_arrays` as they are here.
      name: the name of the run.
      directory: the work directory.

    Returns:
      What the run logged, a row for each step, in which a value is the list of all that
      it logged under that name: so it does not matter in which files and rows they lie.
      And last the samples' checksum and each array's dtype, shape and hash.
    """
    code.begin(name, directory)
    begun = []
    for file in code._LOGS:
        for line in code._lines(directory / file):
            begun.append(json.loads(line))
    *resumed, end = code.resume(name, directory)
    rows: list[dict[str, Any]] = [{"step": step} for step in range(STEPS + 1)]
    for row in [*begun, *resumed]:
        for key, value in row.items():
            if key != "step" and not code._is_ignored(key):
                rows[row["step"]].setdefault(key, []).append(value)
    assert all(len(row) > 1 for row in rows[1:]), "a step without a row"
    end = {"step": STEPS, "code": end["code"], "samples": end["samples"]}
    for path, array in code._arrays(directory).items():
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        end[f"state/{path}"] = f"{array.dtype} {array.shape} {digest}"
    return [*rows, end]


def is_exact(name: str) -> bool:
    """Returns whether a run has sums that do not depend on their order, and so resumes
    only on the machine that it began on.
    """
    arithmetic = RUNS[name].changes.get("reduction.arithmetic", "float")
    return arithmetic.startswith("exact")


def machine_changes(directory: pathlib.Path) -> dict[str, str]:
    """Returns what of this machine differs from that which a run began on, of MACHINE,
    by name.
    """
    from xshard.pod import origin

    here = origin.find_provenance(__name__, "", "")._asdict()
    before = json.loads((directory / "origin.json").read_text())
    return {name: here[name] for name in MACHINE if here[name] != before[name]}


def move_here(directory: pathlib.Path) -> None:
    """Makes a run take this machine for the one that it began on."""
    path = directory / "origin.json"
    content = json.loads(path.read_text()) | machine_changes(directory)
    path.write_text(json.dumps(content, indent=2) + "\n")


# The runs whose last bits a later version changed on purpose, and why. They are
# compared within a tolerance.
_EQUAL_STATE = (
    "network state that all replicas hold alike stays as it is: a mean of equal "
    "numbers moved it by the last bit, on the eight replicas of these runs"
)
CHANGED = dict.fromkeys(
    (
        "ssl",
        "shard_params",
        "statistics",
        "schedule_free",
        "recurrent",
    ),
    _EQUAL_STATE,
)


def differences(
    old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]
) -> Iterator[tuple[int, str]]:
    """Yields the step and the name of each value that differs between two resumes."""
    for left, right in zip(old, new, strict=False):
        for name in {**left, **right}:
            # As text, so that NaN equals itself and -0.0 is not 0.0.
            if json.dumps(left.get(name)) != json.dumps(right.get(name)):
                yield left["step"], name
    if len(old) != len(new):
        longer = max(old, new, key=len)
        yield longer[min(len(old), len(new))]["step"], "the number of rows"


def copy(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Copies a work directory of written/, and the texts beside it, into a folder."""
    shutil.copytree(WRITTEN / TEXT, folder / TEXT, dirs_exist_ok=True)
    return pathlib.Path(shutil.copytree(WRITTEN / name, folder / name))


def recorded(name: str) -> list[dict[str, Any]]:
    """Returns what `resume` returned to the code that wrote a work directory."""
    return [json.loads(line) for line in _lines(WRITTEN / f"{name}.jsonl")]


def _write(code: pathlib.Path, names: Sequence[str]) -> int:
    """Writes work directories with the package of a checkout."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        shutil.copytree(WRITTEN / TEXT, folder / TEXT)
        begun = _in_child(code, "begin", folder, names)
        for name in names:
            if begun[name]["error"]:
                print(f"{name:30} {begun[name]['error']}")
                continue
            shutil.rmtree(WRITTEN / name, ignore_errors=True)
            shutil.copytree(folder / name, WRITTEN / name)
        whole = [name for name in names if not begun[name]["error"]]
        resumed = _in_child(code, "resume", folder, whole)
    for name in whole:
        error = resumed[name]["error"]
        if not error:
            text = "".join(json.dumps(row) + "\n" for row in resumed[name]["logged"])
            (WRITTEN / f"{name}.jsonl").write_text(text)
        files = [path for path in (WRITTEN / name).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        print(f"{name:30} {error or f'written, {size:,} bytes'}")
    failed = [name for name in names if name not in whole or resumed[name]["error"]]
    return 1 if failed else 0


def _compare(
    old: pathlib.Path,
    names: Sequence[str],
    gone: Sequence[str],
    is_anew: bool,
    ignored: Sequence[str],
) -> int:
    """Resumes work directories with two checkouts, or trains anew, and prints what
    differs.

    Args:
      old: the other checkout.
      names: the runs.
      gone: those of its table that this one lacks.
      is_anew: whether to train anew.
      ignored: patterns of the names of values and arrays that may differ.

    Returns:
      The exit code.
    """
    began = time.monotonic()
    outcomes = []
    for root in (old.resolve(), ROOT):
        with tempfile.TemporaryDirectory() as temporary:
            folder = pathlib.Path(temporary)
            if is_anew:
                shutil.copytree(WRITTEN / TEXT, folder / TEXT)
            else:
                for name in names:
                    copy(name, folder)
            action = "anew" if is_anew else "resume"
            outcomes.append(_in_child(root, action, folder, names))
    equal = 0
    left_out = list(gone)
    for name in gone:
        print(f"{name:30} {_LACKS}the new checkout has no such row")
    for name in names:
        before, after = (outcome[name] for outcome in outcomes)
        verdict = _verdict(before, after, ignored)
        equal += verdict == "equal"
        if verdict.startswith(_LACKS):
            left_out.append(name)
        rows = f"{len(after['logged']):4} rows"
        print(f"{name:30} {rows}  {verdict}")
    if ignored:
        print(f"not compared: what is called {', '.join(ignored)}")
    verdict = f"{equal} of {len(names) + len(gone)} are equal bit by bit"
    if left_out:
        verdict += f", {len(left_out)} left out: {', '.join(left_out)}"
    print(f"{verdict}; {time.monotonic() - began:.0f} s")
    return 0 if 0 < equal == len(names) + len(gone) - len(left_out) else 1


def _verdict(
    before: dict[str, Any], after: dict[str, Any], ignored: Sequence[str] = ()
) -> str:
    """Returns in words how two outcomes of a run compare."""
    errors = []
    for which, outcome in (("old", before), ("new", after)):
        if outcome["lacks"]:
            return f"{_LACKS}the {which} checkout has no {outcome['lacks']}"
        if outcome["error"]:
            errors.append(f"{which}: {outcome['error']}")
    if errors:
        return "; ".join(errors)
    different = []
    for step, name in differences(before["logged"], after["logged"]):
        if not _matching([name], ignored):
            different.append((step, name))
    if not different:
        return "equal"
    step, name = different[0]
    verdict = f"differs at step {step}: {name}, and {len(different) - 1} more values"
    known = [set().union(*outcome["logged"]) for outcome in (before, after)]
    for which, names in (("old", known[0] - known[1]), ("new", known[1] - known[0])):
        alone = sorted(names & {name for _, name in different})
        if alone:
            verdict += f"; only the {which} one has {', '.join(alone)}"
    return verdict


def _in_child(
    root: pathlib.Path, action: str, folder: pathlib.Path, names: Sequence[str]
) -> dict[str, Any]:
    """Begins or resumes runs, or both, in a process that imports the package of a
    checkout.

    Returns:
      By name: 'logged', what `resume` or `anew` returns; and 'error' and 'lacks', each
      empty without one.
    """
    import tests

    # -P, since this file's own folder must not come before the checkout.
    command = [sys.executable, "-P", __file__, f"_{action}", str(root), str(folder)]
    environment = {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(root),
        "XLA_FLAGS": tests.XLA_FLAGS,
    }
    log = folder / "log"
    with log.open("w") as output:
        subprocess.run(
            [*command, *names],
            cwd=folder,
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    outcomes = {}
    for name in names:
        file = folder / f"{name}.json"
        if file.exists():
            outcomes[name] = json.loads(file.read_text())
            file.unlink()
        else:
            last = [*log.read_text().splitlines(), "no output"][-1]
            outcomes[name] = {
                "logged": [],
                "error": f"the process ended: {last}",
                "lacks": "",
            }
    return outcomes


def _child(arguments: Sequence[str]) -> int:
    """Does what `_in_child` says in this process, which it has started."""
    action, root, folder, *names = arguments
    import haiku as hk
    import jax

    import xshard

    of_package = pathlib.Path(xshard.__file__).resolve().parents[1]
    assert of_package == pathlib.Path(root).resolve(), f"imported {of_package}"
    if action == "_anew":
        code = importlib.import_module("tests.checkpoint.write_runs")
        assert pathlib.Path(code.__file__ or "").is_relative_to(of_package)
        code.RUNS = RUNS
        code._COMMON = _COMMON
    else:
        # The other checkout may not have these experiments.
        path = pathlib.Path(__file__).with_name("written_experiments.py")
        spec = importlib.util.spec_from_file_location(_EXPERIMENTS, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[_EXPERIMENTS] = module
        spec.loader.exec_module(module)
    jax.config.update("jax_num_cpu_devices", DEVICES)
    hk.config.set(check_jax_usage=True)
    for name in names:
        outcome: dict[str, Any] = {"logged": [], "error": "", "lacks": ""}
        directory = pathlib.Path(folder) / name
        print(f"== {name}", flush=True)
        try:
            if action == "_begin":
                begin(name, directory)
            elif action == "_anew":
                outcome["lacks"] = lacking(RUNS[name])
                if not outcome["lacks"]:
                    outcome["logged"] = anew(code, name, directory)
            else:
                if is_exact(name):
                    move_here(directory)
                outcome["logged"] = resume(name, directory)
        except Exception as e:
            lines = [*str(e).splitlines(), ""]
            outcome["error"] = f"{type(e).__name__}: {lines[0]}"
        (pathlib.Path(folder) / f"{name}.json").write_text(json.dumps(outcome))
    return 0


def main(arguments: Sequence[str]) -> int:
    """Runs a command; returns the exit code."""
    if arguments and arguments[0] in ("_begin", "_resume", "_anew"):
        return _child(arguments)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="write work directories")
    write.add_argument("only", nargs="+", metavar="NAME")
    write.add_argument(
        "--code",
        type=pathlib.Path,
        default=ROOT,
        metavar="CHECKOUT",
        help="whose package to write them with; by default this one's",
    )
    compare = commands.add_parser("compare", help="resume them with two checkouts")
    compare.add_argument("--old", type=pathlib.Path, required=True, metavar="CHECKOUT")
    compare.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="by default all"
    )
    compare.add_argument(
        "--anew", action="store_true", help="train them from step 0, in new directories"
    )
    compare.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="NAME",
        help="a value of the rows, or an array as state/NAME, that may differ",
    )
    given = parser.parse_args(arguments)
    patterns = given.only or ["*"]
    names = _matching(RUNS, patterns)
    if not names:
        parser.error(f"no run is called {', '.join(patterns)}: {', '.join(RUNS)}")
    if given.command == "write":
        return _write(given.code.resolve(), names)
    gone = []
    if given.anew:
        table = given.old / pathlib.Path(__file__).relative_to(ROOT)
        of_old = runpy.run_path(str(table))["RUNS"]
        gone = _matching(sorted(of_old.keys() - RUNS.keys()), patterns)
    return _compare(given.old, names, gone, given.anew, given.ignore)


def _matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Returns the names that match one of the patterns."""
    found = []
    for name in names:
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            found.append(name)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
