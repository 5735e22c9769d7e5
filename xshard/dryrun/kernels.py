"""The cost of TPU kernels in a compiled program, whose text has a kernel's operands and
results but not its computation.

The kernels of JAX's splash attention
(`jax.experimental.pallas.ops.tpu.splash_attention`) are recognized by their names. They
are counted if the name scope `causal` around them tells that only the causal half of
the scores is computed.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from xshard.dryrun import hlo

_TARGET = 'custom_call_target="tpu_custom_call"'
_SCOPE = re.compile(r'op_name="[^"]*\bcausal\b[^"]*"')
_SPLASH = re.compile(r"^splash_m[hq]a_(fwd|dkv|dq)_")
# The number of matrix products over the scores. fwd: scores and result. dkv: scores,
# and the gradients of values, of probabilities and of keys. dq: scores, and the
# gradients of probabilities and of queries.
_PRODUCTS = {"fwd": 2, "dkv": 4, "dq": 3}


class Kernel(NamedTuple):
    """A kernel that a program calls.

    Attributes:
      name: the kernel's name.
      flops: the FLOPs of its matrix products; None if unknown.
      hbm_bytes: the bytes that it reads and writes in main memory, each array once.
    """

    name: str
    flops: int | None
    hbm_bytes: int


def of(
    instruction: hlo.Instruction, operands: Sequence[hlo.Instruction | None]
) -> Kernel | None:
    """Returns the kernel that an instruction calls; None if it calls none.

    Args:
      instruction: the instruction.
      operands: the instructions that compute its operands.
    """
    if instruction.opcode != "custom-call" or _TARGET not in instruction.attributes:
        return None
    name = re.sub(r"\.\d+$", "", instruction.name)
    made = [operand for operand in operands if operand]
    hbm_bytes = instruction.hbm_bytes + sum(operand.hbm_bytes for operand in made)
    phase = _SPLASH.match(name)
    # The first floating-point array is the queries; integer block numbers come before
    # it.
    arrays = [
        x for operand in made for x in operand.arrays if x.dtype in ("bf16", "f32")
    ]
    if not phase or not arrays or not _SCOPE.search(instruction.attributes):
        return Kernel(name, None, hbm_bytes)
    *heads, length, size = arrays[0].shape
    scores = math.prod(heads) * length * (length + 1) // 2
    return Kernel(name, 2 * _PRODUCTS[phase[1]] * scores * size, hbm_bytes)


def rows(program: hlo.Program) -> list[dict[str, Any]]:
    """Returns the kernels of a program by name: how often each runs, and its total
    cost.

    Returns:
      Dictionaries of `kernel`, `count`, `flops` and `hbm_bytes`; the last two are None
      for a kernel of unknown cost.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, times in program.times().items():
        instructions = program.computations[name].instructions
        for instruction in instructions.values():
            kernel = of(
                instruction,
                [instructions.get(operand) for operand in instruction.operands],
            )
            if not kernel or not times:
                continue
            begin: dict[str, Any] = {
                "kernel": kernel.name,
                "count": 0,
                "flops": 0,
                "hbm_bytes": 0,
            }
            row = found.setdefault(kernel.name, begin)
            row["count"] += times
            if kernel.flops is None or row["flops"] is None:
                row |= {"flops": None, "hbm_bytes": None}
            else:
                row["flops"] += times * kernel.flops
                row["hbm_bytes"] += times * kernel.hbm_bytes
    return [found[name] for name in sorted(found)]
