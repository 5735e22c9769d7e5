"""Compiles an experiment's training step for TPUs that this machine does not have, and
finds what a chip needs for it: memory, communication and computation.

The bounds on a step's time follow from what a chip needs and from its peak rates.
"""

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from xshard import cli, errors, logical
from xshard import config as config_lib
from xshard import experiment as experiment_lib
from xshard.base.jax_internals import runtime
from xshard.data import batches
from xshard.dryrun import collectives, costs, hlo, summary
from xshard.dryrun import result as result_lib
from xshard.learners.state import is_learner
from xshard.metrics import chips
from xshard.run import preflight
from xshard.training import state as state_lib

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


class IncompleteError(errors.UserError):
    """A dry run with a partial result.

    Attributes:
      result: the partial result.
    """

    def __init__(self, message: str, result: result_lib.Result):
        super().__init__(message)
        self.result = result


class DoesNotFitError(IncompleteError):
    """A step that needs more memory than a chip has."""


class UnreadableError(IncompleteError):
    """A step whose compiled program this version of JAX cannot read."""


class Prepared(NamedTuple):
    """A step, prepared up to its compilation.

    Attributes:
      chip: the chip.
      mesh: the run's mesh.
      experiment: the run's experiment.
      state: the shapes of its state, with shardings.
      batch: the shapes of a batch.
      result: the result of the dry run so far.
    """

    chip: chips.Chip
    mesh: jax.sharding.Mesh
    experiment: Any
    state: Any
    batch: Any
    result: result_lib.Result


def dry_run(config: Any, topology: str) -> result_lib.Result:
    """Compiles a config's step for a topology, of `config.slices` slices.

    Raises:
      DoesNotFitError: if the step needs more memory than a chip has.
      UnreadableError: if JAX cannot read the compiled program.
      ValueError: if the topology does not exist, the config does not fit it, libtpu is
        not installed, or libtpu cannot compile the step.
    """
    step = prepare(config, topology)
    program = preflight.jitted_step(step.experiment, step.mesh)
    begin = time.monotonic()
    try:
        compiled = program.lower(step.state, step.batch).compile()
    except jax.errors.JaxRuntimeError as e:
        raise _compiler_error(e, step.result, step.state) from e
    result: result_lib.Result = {
        **step.result,
        "compile_seconds": time.monotonic() - begin,
    }
    # With logical replicas the step is several programs.
    stages = compiled
    if isinstance(compiled, jax.stages.Compiled):
        live = (step.state, step.batch)
        stages = [logical.Stage(compiled, times=1, live=live)]
    result = analyze(result, stages, step.chip, step.mesh)
    peak = result["memory"]["peak"]
    if peak > step.chip.hbm:
        raise _does_not_fit(peak, step.chip.hbm, result, step.state)
    return result


def prepare(config: Any, topology: str) -> Prepared:
    """Prepares a config's step up to its compilation; raises ValueError as `dry_run`
    does.
    """
    chip = chips.parse_topology(topology)
    _check(config)
    mesh = experiment_lib.mesh_of(config, _devices(topology, chip, config.slices))
    replicas = logical.of_config(config, mesh)
    separate_slices = config_lib.separates_slices(config)
    batches.check_train_batch(
        config.batch_size,
        logical.mesh_of(config, mesh),
        config.micro_batches,
        separate_slices=separate_slices,
    )
    experiment = experiment_lib.of_config(config)
    example = experiment_lib.example(experiment)
    state = state_lib.abstract_state(experiment, mesh, config.seed, example)
    batch = batches.train_shapes(
        example,
        mesh,
        config.batch_size,
        replicas,
        separate_slices=separate_slices,
    )
    learners = []
    others = []
    for part in jax.tree.leaves(state.experiment, is_leaf=is_learner):
        if is_learner(part):
            learners.append(part)
        else:
            others.append(part)
    result: result_lib.Result = {
        "topology": topology,
        "slices": config.slices,
        "chips": mesh.devices.size,
        "mesh": dict(mesh.shape),
        "examples": experiment_lib.examples_per_step(config, mesh),
        "exchange_every_steps": config.outer.every_steps if separate_slices else 0,
        "chip": dataclasses.asdict(chip),
        "memory": {
            "parameters": shard_bytes([learner.params for learner in learners]),
            "network_state": shard_bytes([learner.net_state for learner in learners]),
            "optimizer_state": shard_bytes([learner.opt_state for learner in learners]),
            "other_state": shard_bytes(others),
            "batch": shard_bytes(batch),
        },
    }
    return Prepared(chip, mesh, experiment, state, batch, result)


def _check(config: Any) -> None:
    """Raises UserError if a config is invalid, or there is no compiler for it."""
    config_lib.check(config)
    if not config.slices:
        raise errors.UserError(
            "slices=0 is one slice for each process, and a dry run has one process: "
            "give the number of slices, such as --slices=2."
        )
    if config.slices > _MOST_SLICES:
        raise errors.UserError(
            f"--slices={config.slices}: libtpu compiles for at most {_MOST_SLICES} "
            "slices; give fewer."
        )
    if importlib.util.find_spec("libtpu") is None:
        raise errors.UserError(
            "libtpu is not installed. It contains the TPU compiler: pip install "
            "'.[dryrun]', or 'xshard[dryrun]', about 200 MB to download. It runs on "
            "Linux on x86-64, and needs no TPU."
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
    options: dict[str, Any] = {}
    if slices > 1:
        options["num_slices"] = slices
    if chip.name == "v4":
        # On a real v4, JAX sees a chip's two cores as one device.
        options["chip_config_name"] = "megacore"
    if topology.endswith(":1x1"):
        # Without this, some versions of libtpu assume a host of four chips.
        options["chips_per_host_bounds"] = [1, 1, 1]
    try:
        return runtime.topology_devices(topology, **options)
    except jax.errors.JaxRuntimeError as e:
        raise errors.UserError(
            f"--topology={topology}, --slices={slices}: libtpu cannot be loaded, or "
            f"does not know this topology ({cli.message(e)})."
        ) from e


def analyze(
    result: result_lib.Result,
    stages: Sequence[logical.Stage],
    chip: chips.Chip,
    mesh: jax.sharding.Mesh,
) -> result_lib.Result:
    """Returns a result with the memory, communication and computation of a compiled
    step added.

    Args:
      result: the result so far.
      stages: the step's compiled programs.
      chip: the chip.
      mesh: the run's mesh.

    Raises:
      UnreadableError: if JAX cannot read one of the programs.
    """
    result = {**result, "memory": {**result["memory"], **_memory(stages)}}
    programs = []
    for stage in stages:
        try:
            text = stage.program.as_text()
        except jax.errors.JaxRuntimeError as e:
            # The TPU compiler wrote it in a newer format than JAX supports.
            raise UnreadableError(
                f"The step compiles and fits on {result['topology']}, but jax "
                f"{jax.__version__} cannot read the program that libtpu "
                f"{_libtpu_version()} makes of it ({cli.message(e).splitlines()[0]}), "
                "so its communication and computation are unknown. Install the libtpu "
                "that this jax is made for: pip install '.[dryrun]'.",
                result,
            ) from e
        programs.append(hlo.parse(text or "", stage.times))
    found = []
    kernels = []
    for program in programs:
        found += collectives.in_program(program)
        kernels += costs.kernels(program)
    rows = collectives.rows(mesh, found)
    # What a chip sends within its slice, and to other slices, in a step on average.
    every = result.get("exchange_every_steps") or 1
    ici = 0
    dcn = 0
    for row in rows:
        amount = round(row["sent"] / every) if row["is_conditional"] else row["sent"]
        if row["between_slices"]:
            dcn += amount
        else:
            ici += amount
    cost = costs.total(costs.of(program) for program in programs)
    limits = bounds(chip, cost, ici, dcn)
    bound = max(limits, key=lambda limit: limit["seconds"] or 0.0)
    seconds = bound["seconds"] or 0.0
    # For comparison only: XLA counts loops once, and vector memory as main memory.
    accessed_by_xla = 0.0
    for stage in stages:
        by_xla: Any = stage.program.cost_analysis()
        accessed_by_xla += stage.times * by_xla.get("bytes accessed", 0.0)
    return {
        **result,
        "collectives": rows,
        "warnings": summary.warnings(rows, result["topology"]),
        "kernels": kernels,
        "bounds": limits,
        "estimated_cycles": cost.cycles,
        "unknown_loops": sum(program.unknown_loops() for program in programs),
        "xla_bytes_accessed": accessed_by_xla,
        "seconds": seconds,
        "dominated_by": bound["name"],
        "examples_per_second": result["examples"] / seconds if seconds else None,
    }


def _memory(stages: Sequence[logical.Stage]) -> dict[str, int]:
    """Returns the memory of the stage that needs most, including arrays that the chip
    holds but the stage does not use.
    """
    workspace = 0
    peak = 0
    code = 0
    host = 0
    for stage in stages:
        memory: Any = stage.program.memory_analysis()
        # The compiler's peak includes the program's arguments, but not other live
        # arrays.
        besides = max(0, shard_bytes(stage.live) - memory.argument_size_in_bytes)
        # What it calls peak, and temporary, includes what lies on the host.
        on_host = memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes
        stage_peak = besides + memory.peak_memory_in_bytes - on_host
        if stage_peak > peak:
            workspace = memory.temp_size_in_bytes - memory.host_temp_size_in_bytes
            peak = stage_peak
        host = max(host, on_host)
        code += memory.generated_code_size_in_bytes
    sizes = {"workspace": workspace, "program": code, "peak": peak}
    if host:
        sizes["host"] = host
    return {**sizes, "fits": True}


def bounds(
    chip: chips.Chip, cost: costs.Cost, ici: int, dcn: int
) -> list[result_lib.Bound]:
    """Returns the bounds on a step's time. The largest one counts, since at best all
    resources are used at once.

    Args:
      chip: the chip.
      cost: the chip's work and memory traffic in a step.
      ici: the bytes that it sends to other chips of its slice.
      dcn: the bytes that it sends to other slices.
    """
    amounts = {
        "compute": (cost.flops, chip.flops),
        "memory": (cost.hbm_bytes, chip.hbm_rate),
        "ICI": (ici, chip.ici_rate),
        "DCN": (dcn, chip.dcn_rate),
    }
    if cost.host_bytes:
        # The rates of the bus between the chips and their host are not published.
        amounts["host"] = (cost.host_bytes, None)
    limits = []
    for name, (amount, rate) in amounts.items():
        seconds = amount / rate if rate else None
        if not amount:
            seconds = 0.0
        limit: result_lib.Bound = {
            "name": name,
            "amount": amount,
            "rate": rate,
            "seconds": seconds,
        }
        limits.append(limit)
    return limits


def shard_bytes(tree: Any) -> int:
    """Returns the bytes that one device holds of a tree of shapes with shardings.

    Arrays in the host's memory do not count.
    """
    total = 0
    for leaf in jax.tree.leaves(tree):
        if leaf.sharding.memory_kind != config_lib.PINNED_HOST:
            total += _leaf_bytes(leaf)
    return total


def largest(tree: Any, count: int) -> list[tuple[str, int]]:
    """Returns the paths and bytes of the arrays that take most memory on a device."""
    sizes = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        sizes.append((name, _leaf_bytes(leaf)))
    return sorted(sizes, key=lambda pair: -pair[1])[:count]


def _leaf_bytes(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _compiler_error(
    e: Exception, result: result_lib.Result, state: Any
) -> errors.UserError:
    """Returns the error for a step that the compiler rejects."""
    found = _OUT_OF_MEMORY.search(str(e))
    if found:
        sizes = []
        for number, unit in (found.group(1, 2), found.group(3, 4)):
            sizes.append(int(float(number) * 1024 ** " KMGT".index(unit or " ")))
        return _does_not_fit(sizes[0], sizes[1], result, state)
    return errors.UserError(
        f"libtpu {_libtpu_version()} cannot compile the step for {result['topology']}, "
        f"slices={result['slices']}: {cli.message(e).rstrip('.')}. Try another "
        "topology, other values of reduction.* or slices, or the libtpu that jax "
        f"{jax.__version__} is made for: pip install '.[dryrun]'."
    )


def _does_not_fit(
    needed: int, available: int, result: result_lib.Result, state: Any
) -> DoesNotFitError:
    """Returns the error for a step that needs more memory than a chip has, with its
    largest arrays and remedies.
    """
    memory = result["memory"]
    parts = {name: memory[name] for name in ("parameters", "optimizer_state", "batch")}
    rest = max(0, needed - sum(parts.values()))
    parts["gradients, activations and workspace"] = rest
    listed = []
    for name, size in parts.items():
        listed.append(f"{name.replace('_', ' ')} {summary.size(size)}")
    arrays = []
    for path, size in largest(state.experiment, 3):
        arrays.append(f"{path} {summary.size(size)}")
    state_remedy = (
        "hold parameters and optimizer state in shards with "
        "config.reduction.shard_params, or split the parameters with "
        "config.model_parallel and the experiment's sharding_rules"
    )
    activations_remedy = (
        "make activations smaller with more config.micro_batches, a smaller "
        "config.batch_size or hk.remat"
    )
    # What needs most is to be changed first.
    if rest >= needed / 2:
        first = activations_remedy
        second = state_remedy
    else:
        first = state_remedy
        second = activations_remedy
    message = (
        f"The step does not fit on {result['topology']}: it needs "
        f"{summary.size(needed)} a chip of the {summary.size(available)} that the "
        f"compiler may use, {summary.size(needed - available)} too much. About: "
        f"{', '.join(listed)}. The largest arrays: {', '.join(arrays)}. "
        f"{first[0].upper()}{first[1:]}; or {second}; or choose chips with more memory."
    )
    sizes = {"needed": needed, "available": available, "fits": False}
    return DoesNotFitError(message, {**result, "memory": {**memory, **sizes}})


def _libtpu_version() -> str:
    """Returns the version of the TPU compiler."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return "of another name"
