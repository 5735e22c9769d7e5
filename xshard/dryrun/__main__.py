"""The program: `python -m xshard.dryrun --config=configs/digits.py --topology=v5e:16x16
[--slices=4]`.

Compiles an experiment's training step for TPUs that this machine does not have, with
the TPU compiler. It reports a chip's memory, communication and computation, and a lower
bound on a step's time. The step is the one of `xshard.main`; nothing runs. See
docs/dry_run.md.

Exit codes: 0 it fits; 1 it does not fit, or cannot be compiled; 130 interrupted.
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
from ml_collections import config_flags

from xshard import cli, errors, jax_internals, logical
from xshard import config as config_lib
from xshard import experiment as experiment_lib
from xshard import mesh as mesh_lib
from xshard import state as state_lib
from xshard.data import batches
from xshard.dryrun import analysis, estimate, plan_search, summary
from xshard.files import jsonfile
from xshard.learners.state import is_learner
from xshard.metrics import chips
from xshard.pod import notice
from xshard.run import preflight

# A separate set of flags, since `xshard.main` has flags with the same names.
_FLAGS = flags.FlagValues()
_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "The run's config file; --config.key=value overrides a value.",
    lock_config=True, flag_values=_FLAGS,
)  # fmt: skip
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "The chip and slice shape, such as v5e:16x16, v5p:4x4x8.",
    flag_values=_FLAGS,
)
_SLICES = flags.DEFINE_integer(
    "slices",
    None,
    "The number of slices; overrides config.slices.",
    1,
    flag_values=_FLAGS,
)
_PLAN = flags.DEFINE_bool(
    "plan",
    False,
    "Search for the best layout: the model axis, micro-batches and other keys.",
    flag_values=_FLAGS,
)
_PLAN_COMPILES = flags.DEFINE_integer(
    "plan_compiles",
    30,
    "With --plan: the most steps to compile.",
    1,
    flag_values=_FLAGS,
)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object.", flag_values=_FLAGS)
_DEBUG = flags.DEFINE_bool(
    "debug", False, "Print the traceback of an error.", flag_values=_FLAGS
)

# Values that libtpu would otherwise query from a TPU machine, with warnings when there
# is none. The last one lets several processes compile at the same time, since none of
# them uses a TPU.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-256",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}
# With more slices libtpu ends the process.
_MOST_SLICES = 511
_OUT_OF_MEMORY = re.compile(
    r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"
)


def dry_run(config: Any, topology: str) -> dict[str, Any]:
    """Compiles a config's step for a topology, of `config.slices` slices.

    Returns:
      The contents of the `--json` output: names, numbers, and lists and dictionaries of
      them. Sizes are in bytes per chip, times in seconds.

    Raises:
      DoesNotFitError: if the step needs more memory than a chip has.
      UnreadableError: if JAX cannot read the compiled program.
      ValueError: if the topology does not exist, the config does not fit it, libtpu is
        not installed, or libtpu cannot compile the step.
    """
    chip, mesh, experiment, state, batch, result = prepare(config, topology)
    begin = time.monotonic()
    try:
        compiled = preflight.jitted_step(experiment, mesh).lower(state, batch).compile()
    except jax.errors.JaxRuntimeError as e:
        raise _compiler_error(e, result, state) from e
    result["compile_seconds"] = time.monotonic() - begin
    if isinstance(compiled, jax.stages.Compiled):
        # With logical replicas the step is several programs.
        compiled = [logical.Stage(compiled, 1, (state, batch))]
    result = analysis.analyze(result, compiled, chip, mesh)
    if result["memory"]["peak"] > chip.hbm:
        raise _does_not_fit(result["memory"]["peak"], chip.hbm, result, state)
    return result


def prepare(config: Any, topology: str) -> estimate.Prepared:
    """Prepares a config's step up to its compilation; raises ValueError as `dry_run`
    does.
    """
    chip = chips.parse_topology(topology)
    _check(config)
    mesh = experiment_lib.mesh_of(config, _devices(topology, chip, config.slices))
    replicas, seen = logical.of_config(config, mesh), logical.mesh_of(config, mesh)
    batches.check_train_batch(config.batch_size, seen, config.micro_batches)
    experiment = experiment_lib.load(config.experiment)(config)
    example = experiment_lib.example(experiment)
    state = state_lib.abstract_state(experiment, mesh, config.seed, example)
    parts = jax.tree.leaves(state.experiment, is_leaf=is_learner)
    learners = [x for x in parts if is_learner(x)]
    others = [x for x in parts if not is_learner(x)]
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
            "other_state": estimate.shard_bytes(others),
            "batch": estimate.shard_bytes(batch),
        },
    }
    return estimate.Prepared(chip, mesh, experiment, state, batch, result)


def _check(config: Any) -> None:
    config_lib.check(config)
    if config.slices > _MOST_SLICES:
        raise errors.UserError(
            f"--slices={config.slices}: libtpu compiles for at most {_MOST_SLICES} slices; give fewer."
        )
    if importlib.util.find_spec("libtpu") is None:
        raise errors.UserError(
            "libtpu is not installed. It contains the TPU compiler: pip install '.[dryrun]', or "
            "'xshard[dryrun]', about 200 MB to download. It runs on Linux on x86-64, and needs no TPU."
        )


def _devices(topology: str, chip: chips.Chip, slices: int) -> list[jax.Device]:
    """Returns the devices of a topology, one per chip."""
    os.environ.update(_ENVIRONMENT)
    # A dry run needs no local accelerator. It would also block a local TPU for other
    # processes.
    jax.config.update("jax_platforms", "cpu")
    # Programs for devices that do not exist here can be written to the cache, but not
    # read from it.
    jax.config.update("jax_enable_compilation_cache", False)
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if chip.name == "v4":
        # On a real v4, JAX sees a chip's two cores as one device.
        options["chip_config_name"] = "megacore"
    if topology.endswith(":1x1"):
        # Without this, some versions of libtpu assume a host of four chips.
        options["chips_per_host_bounds"] = [1, 1, 1]
    try:
        return jax_internals.topology_devices(topology, **options)
    except jax.errors.JaxRuntimeError as e:
        raise errors.UserError(
            f"--topology={topology}, --slices={slices}: libtpu cannot be loaded, or does not know this topology ({cli.message(e)})."
        ) from e


def _compiler_error(
    e: Exception, result: dict[str, Any], state: Any
) -> errors.UserError:
    """Returns the error for a step that the compiler rejects."""
    sizes = _OUT_OF_MEMORY.search(str(e))
    if sizes:
        needed, available = _bytes(*sizes.group(1, 2)), _bytes(*sizes.group(3, 4))
        return _does_not_fit(needed, available, result, state)
    return errors.UserError(
        f"libtpu {analysis.libtpu_version()} cannot compile the step for {result['topology']}, slices={result['slices']}: "
        f"{cli.message(e)} Try another topology, other values of reduction.* or slices, or the libtpu that jax "
        f"{jax.__version__} is made for: pip install '.[dryrun]'."
    )


def _bytes(number: str, unit: str) -> int:
    """Parses a size that the compiler prints, such as 15.75G."""
    return int(float(number) * 1024 ** " KMGT".index(unit or " "))


def _does_not_fit(
    needed: int, available: int, result: dict[str, Any], state: Any
) -> analysis.DoesNotFitError:
    """Returns the error for a step that needs more memory than a chip has, with its
    largest arrays and remedies.
    """
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
    remedies = [
        "hold parameters and optimizer state in shards with config.reduction.shard_params, or split the parameters with "
        "config.model_parallel and the experiment's sharding_rules",
        "make activations smaller with more config.micro_batches, a smaller config.batch_size or hk.remat",
    ]
    if rest >= needed / 2:
        remedies.reverse()
    first, second = remedies
    return analysis.DoesNotFitError(
        f"The step does not fit on {result['topology']}: it needs {summary.size(needed)} a chip of the "
        f"{summary.size(available)} that the compiler may use, {summary.size(needed - available)} too much. About: {parts}. "
        f"The largest arrays: {arrays}. {first[0].upper()}{first[1:]}; or {second}; or choose chips with "
        "more memory.",
        result,
    )


def main(argv: Sequence[str]) -> int:
    """Runs a dry run, or with --plan a search, according to the flags; returns the exit
    code.
    """
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
        return plan_search.run(
            config, _TOPOLOGY.value, prepare, sys.argv[1:], most, as_json=as_json
        )
    show_result = jsonfile.dumps if _JSON.value else summary.show
    # The compiler ignores signals, so it runs in a thread and this one can be
    # interrupted.
    work = concurrent.futures.ThreadPoolExecutor(1).submit(
        dry_run, config, _TOPOLOGY.value
    )
    try:
        print(show_result(work.result()))
    except analysis.IncompleteError as e:
        print(show_result(e.result))
        raise
    return notice.DONE


def run() -> int:
    """Parses the flags and runs; a UserError prints one message."""
    logging.set_verbosity(logging.WARNING)
    code = cli.run(_run, has_debug_flag=True)
    if code == notice.INTERRUPTED:
        # The compiler is still running in its thread. Exit without waiting for it.
        os._exit(code)
    return code


def _run() -> int:
    if "--help" in sys.argv[1:]:
        print(f"{__doc__}\n{_FLAGS.module_help(sys.modules[__name__])}")
        return notice.DONE
    return main(cli.parse(_CONFIG, _FLAGS))


if __name__ == "__main__":
    sys.exit(run())
