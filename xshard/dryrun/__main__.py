"""The program: `python -m xshard.dryrun --config=configs/digits.py --topology=v5e:16x16 [--slices=4]`.

Compiles an experiment's training step for TPUs that are not there, by the compiler that would compile it there,
and says what a chip would hold, send and compute, and how fast a step can be at best. What is compiled is the
step of `xshard.main`; nothing runs. See docs/dry_run.md.

Exit codes: 0 it fits; 1 it does not, or could not be compiled; 130 interrupted.
"""

import concurrent.futures
import dataclasses
import importlib.util
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags, logging
from jax.experimental import topologies
from ml_collections import config_flags

from xshard import cli, errors, logical
from xshard import config as config_lib
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard.data import batches
from xshard.dryrun import described, estimate, plan, summary
from xshard.files import jsonfile
from xshard.learners.state import is_learner
from xshard.metrics import chips
from xshard.pod import notice
from xshard.run import preflight

# Its own, since the flags of `xshard.main` have the same names.
_FLAGS = flags.FlagValues()
_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "The run's config file; --config.key=value changes a value.",
    lock_config=True, flag_values=_FLAGS,
)  # fmt: skip
_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "The chip and the shape of a slice: v5e:16x16, v5p:4x4x8.", flag_values=_FLAGS
)
_SLICES = flags.DEFINE_integer(
    "slices", None, "The number of slices, in place of config.slices.", 1, flag_values=_FLAGS
)
_PLAN = flags.DEFINE_bool(
    "plan",
    False,
    "Search how the run fits best: model axis, micro-batches and others.",
    flag_values=_FLAGS,
)
_PLAN_COMPILES = flags.DEFINE_integer(
    "plan_compiles", 30, "With --plan: so many steps are compiled at most.", 1, flag_values=_FLAGS
)
_JSON = flags.DEFINE_bool("json", False, "One JSON object, for machines.", flag_values=_FLAGS)
_DEBUG = flags.DEFINE_bool("debug", False, "Show the traceback of an error.", flag_values=_FLAGS)

# What libtpu would ask the machine for, and complain that it has no answer; it is no TPU's. Several processes
# may compile at a time, since none of them holds a TPU.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-256",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}
# With more libtpu ends the process.
_MOST_SLICES = 511
_OUT_OF_MEMORY = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)")


def dry_run(config: Any, topology: str) -> dict[str, Any]:
    """Compiles a config's step for a topology, of `config.slices` slices.

    Returns:
      What `--json` prints: names, numbers, lists and dictionaries of them. Sizes are in bytes, of one chip;
      times in seconds.

    Raises:
      DoesNotFitError: if it needs more memory than a chip has.
      UnreadableError: if JAX cannot read the program.
      ValueError: if the topology does not exist, or the config does not fit it; if there is no libtpu, or it
        cannot compile the step.
    """
    chip, mesh, experiment, state, batch, result = prepare(config, topology)
    begin = time.monotonic()
    try:
        compiled = preflight.jitted_step(experiment, mesh).lower(state, batch).compile()
    except jax.errors.JaxRuntimeError as e:
        raise _compiler_error(e, result, state) from e
    result["compile_seconds"] = time.monotonic() - begin
    if isinstance(compiled, jax.stages.Compiled):
        # Of logical replicas it is several.
        compiled = [logical.Stage(compiled, 1, (state, batch))]
    result = described.describe(result, compiled, chip, mesh)
    if result["memory"]["peak"] > chip.hbm:
        raise _does_not_fit(result["memory"]["peak"], chip.hbm, result, state)
    return result


def prepare(config: Any, topology: str) -> estimate.Prepared:
    """Prepares a config's step as far as it is known before it is compiled; raises ValueError as `dry_run` does."""
    chip = chips.parse_topology(topology)
    _check(config)
    mesh = experiment_lib.mesh_of(config, _devices(topology, chip, config.slices))
    replicas, seen = logical.of_config(config, mesh), logical.mesh_of(config, mesh)
    batches.check_train_batch(config.batch_size, seen, config.micro_batches)
    experiment = experiment_lib.load(config.experiment)(config)
    example = experiment_lib.example(experiment)
    state = state_lib.abstract_state(experiment, mesh, config.seed, example)
    learners = state_lib.learners(state).values()
    batch = batches.train_shapes(example, mesh, config.batch_size, replicas)
    result = {
        "topology": topology,
        "slices": config.slices,
        "chips": mesh.devices.size,
        "mesh": dict(mesh.shape),
        "examples": config.batch_size * mesh_lib.num_groups(mesh),
        "chip": dataclasses.asdict(chip),
        "memory": {
            "parameters": estimate.shard_bytes([x.params for x in learners]),
            "network_state": estimate.shard_bytes([x.net_state for x in learners]),
            "optimizer_state": estimate.shard_bytes([x.opt_state for x in learners]),
            "other_state": estimate.shard_bytes(_other(state)),
            "batch": estimate.shard_bytes(batch),
        },
    }
    return estimate.Prepared(chip, mesh, experiment, state, batch, result)


def _other(state: state_lib.TrainState) -> Any:
    """The experiment's state that is no learner's."""
    leaves = jax.tree.leaves(state.experiment, is_leaf=is_learner)
    return [x for x in leaves if not is_learner(x)]


def _check(config: Any) -> None:
    config_lib.check(config)
    if config.slices > _MOST_SLICES:
        raise errors.UserError(
            f"--slices={config.slices}: libtpu compiles for at most {_MOST_SLICES} slices; give fewer."
        )
    if importlib.util.find_spec("libtpu") is None:
        raise errors.UserError(
            "libtpu is not installed, which holds the TPU's compiler: pip install '.[dryrun]', or "
            "'xshard[dryrun]', about 200 MB to download. It needs no TPU, but Linux on x86-64."
        )


def _devices(topology: str, chip: chips.Chip, slices: int) -> list[jax.Device]:
    """The devices of a topology, each a chip."""
    os.environ.update(_ENVIRONMENT)
    # What this machine has is of no interest, and a TPU of its own would be taken from whoever uses it.
    jax.config.update("jax_platforms", "cpu")
    # What is compiled for devices that are not there can be written to a cache, but not read from it.
    jax.config.update("jax_enable_compilation_cache", False)
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if chip.name == "v4":
        # Its two cores as the one device that JAX sees on a TPU.
        options["chip_config_name"] = "megacore"
    if topology.endswith(":1x1"):
        # Some versions of libtpu ask for a host of four.
        options["chips_per_host_bounds"] = [1, 1, 1]
    try:
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=topology, **options
        )
    except jax.errors.JaxRuntimeError as e:
        raise errors.UserError(
            f"--topology={topology}, --slices={slices}: libtpu cannot be loaded, or knows no such topology ({cli.message(e)})."
        ) from e
    return list(description.devices)


def _compiler_error(e: Exception, result: dict[str, Any], state: Any) -> errors.UserError:
    """The error for what the compiler refuses."""
    sizes = _OUT_OF_MEMORY.search(str(e))
    if sizes:
        needed, available = _bytes(*sizes.group(1, 2)), _bytes(*sizes.group(3, 4))
        return _does_not_fit(needed, available, result, state)
    return errors.UserError(
        f"libtpu {described.libtpu_version()} cannot compile the step for {result['topology']}, slices={result['slices']}: "
        f"{cli.message(e)} Another topology, other reduction.* or slices may do; so may the libtpu that jax "
        f"{jax.__version__} is made for: pip install '.[dryrun]'."
    )


def _bytes(number: str, unit: str) -> int:
    """The size that the compiler writes as 15.75G."""
    return int(float(number) * 1024 ** " KMGT".index(unit or " "))


def _does_not_fit(
    needed: int, available: int, result: dict[str, Any], state: Any
) -> described.DoesNotFitError:
    """The error for a step that needs more memory than there is."""
    memory = result["memory"]
    memory |= {"needed": needed, "available": available, "fits": False}
    held = {name: memory[name] for name in ("parameters", "optimizer_state", "batch")}
    rest = max(0, needed - sum(held.values()))
    held["gradients, activations and workspace"] = rest
    parts = ", ".join(
        f"{name.replace('_', ' ')} {summary.size(size)}" for name, size in held.items()
    )
    largest = estimate.largest(state.experiment, 3)
    arrays = ", ".join(f"{path} {summary.size(size)}" for path, size in largest)
    mends = [
        "have replicas hold shards of the parameters and the optimizer's state, with config.reduction.shard_params, or split "
        "the parameters with config.model_parallel, along what the experiment's sharding_rules say",
        "make activations smaller with more config.micro_batches, a smaller config.batch_size or hk.remat",
    ]
    if rest >= needed / 2:
        mends.reverse()
    first, second = mends
    return described.DoesNotFitError(
        f"The step does not fit on {result['topology']}: it needs {summary.size(needed)} a chip of the "
        f"{summary.size(available)} that the compiler may use, {summary.size(needed - available)} too much. About: {parts}. "
        f"The largest arrays: {arrays}. {first[0].upper()}{first[1:]}; or {second}; or choose chips with "
        "more memory.",
        result,
    )


def main(argv: Sequence[str]) -> int:
    """Does what the flags say; returns the exit code."""
    if argv[1:]:
        raise errors.UserError(f"{' '.join(argv[1:])}: arguments begin with '--'.")
    config = _CONFIG.value
    if config is None or not _TOPOLOGY.value:
        raise errors.UserError(
            "--config and --topology are needed, as in --config=configs/digits.py --topology=v5e:16x16."
        )
    if _SLICES.value is not None:
        with config.unlocked():
            config.update(slices=_SLICES.value)
    if _PLAN.value:
        most, as_json = _PLAN_COMPILES.value, _JSON.value
        return plan.run(config, _TOPOLOGY.value, prepare, sys.argv[1:], most, as_json=as_json)
    show_result = jsonfile.dumps if _JSON.value else summary.show
    # In a thread, since the compiler does not return for a signal and this thread does.
    work = concurrent.futures.ThreadPoolExecutor(1).submit(dry_run, config, _TOPOLOGY.value)
    try:
        print(show_result(work.result()))
    except described.IncompleteError as e:
        print(show_result(e.result))
        raise
    return notice.DONE


def run() -> int:
    """Parses the flags and runs; an error of the user's becomes one message."""
    logging.set_verbosity(logging.WARNING)
    code = cli.run(_run, has_debug_flag=True)
    if code == notice.INTERRUPTED:
        # The compiler is still at work in its thread, and is not waited for.
        os._exit(code)
    return code


def _run() -> int:
    if "--help" in sys.argv[1:]:
        print(f"{__doc__}\n{_FLAGS.module_help(sys.modules[__name__])}")
        return notice.DONE
    return main(cli.parse(_CONFIG, _FLAGS))


if __name__ == "__main__":
    sys.exit(run())
