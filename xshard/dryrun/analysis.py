"""Extracts the results of a dry run from a compiled step."""

import importlib.metadata
from collections.abc import Sequence
from typing import Any

import jax

from xshard import cli, errors, logical
from xshard.dryrun import collectives, costs, estimate, hlo, kernels, summary
from xshard.metrics import chips


class IncompleteError(errors.UserError):
    """A dry run with a partial result.

    Attributes:
      result: the partial result, in the form of `dry_run`.
    """

    def __init__(self, message: str, result: dict[str, Any]):
        super().__init__(message)
        self.result = result


class DoesNotFitError(IncompleteError):
    """A step that needs more memory than a chip has."""


class UnreadableError(IncompleteError):
    """A step whose compiled program this version of JAX cannot read."""


def analyze(
    result: dict[str, Any],
    stages: Sequence[logical.Stage],
    chip: chips.Chip,
    mesh: jax.sharding.Mesh,
) -> dict[str, Any]:
    """Returns a result with the communication and computation of a compiled step added.

    Args:
      result: the result so far.
      stages: the step's compiled programs.
      chip: the chip.
      mesh: the run's mesh.

    Raises:
      UnreadableError: if JAX cannot read one of the programs.
    """
    result["memory"] |= _memory(stages)
    try:
        programs = [
            hlo.parse(stage.program.as_text() or "", stage.times) for stage in stages
        ]
    except jax.errors.JaxRuntimeError as e:
        raise _unreadable(e, result) from e
    found: list[collectives.Collective] = []
    called: list[dict[str, Any]] = []
    for program in programs:
        found += collectives.in_program(program)
        called += kernels.rows(program)
    rows = collectives.rows(mesh, found)
    ici = dcn = 0
    for row in rows:
        if row["between_slices"]:
            dcn += row["sent"]
        else:
            ici += row["sent"]
    cost = costs.total(map(costs.of, programs))
    limits = estimate.bounds(chip, cost, ici, dcn)
    bound = max(limits, key=lambda limit: limit.seconds or 0.0)
    seconds = bound.seconds or 0.0
    return {
        **result,
        "collectives": rows,
        "warnings": summary.warnings(rows, result["topology"]),
        "kernels": called,
        "bounds": [limit._asdict() for limit in limits],
        "estimated_cycles": cost.cycles,
        "unknown_loops": sum(program.unknown_loops() for program in programs),
        # For comparison only: XLA counts loops once, and vector memory as main memory.
        "xla_bytes_accessed": sum(map(_accessed, stages)),
        "seconds": seconds,
        "dominated_by": bound.name,
        "examples_per_second": result["examples"] / seconds if seconds else None,
    }


def _memory(stages: Sequence[logical.Stage]) -> dict[str, Any]:
    """Returns the memory of the stage that needs most, including arrays that the chip
    holds but the stage does not use.
    """
    analyses: list[Any] = [stage.program.memory_analysis() for stage in stages]
    most = {"workspace": 0, "program": 0, "peak": 0, "fits": True}
    for stage, analysis in zip(stages, analyses, strict=True):
        # The compiler's peak includes the program's arguments, but not other live
        # arrays.
        besides = max(
            0, estimate.shard_bytes(stage.live) - analysis.argument_size_in_bytes
        )
        peak = besides + analysis.peak_memory_in_bytes
        if peak > most["peak"]:
            most |= {"workspace": analysis.temp_size_in_bytes, "peak": peak}
    code = sum(analysis.generated_code_size_in_bytes for analysis in analyses)
    return {**most, "program": code}


def _accessed(stage: logical.Stage) -> float:
    by_xla: Any = stage.program.cost_analysis()
    return stage.times * by_xla.get("bytes accessed", 0.0)


def _unreadable(e: Exception, result: dict[str, Any]) -> UnreadableError:
    """Returns the error for a program that the TPU compiler wrote in a newer format
    than JAX supports.
    """
    return UnreadableError(
        f"The step compiles and fits on {result['topology']}, but jax {jax.__version__} cannot read the program "
        f"that libtpu {libtpu_version()} makes of it ({cli.message(e).splitlines()[0]}), so its communication and "
        "computation are unknown. Install the libtpu that this jax is made for: pip install '.[dryrun]'.",
        result,
    )


def libtpu_version() -> str:
    """Returns the version of the TPU compiler."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return "of another name"
