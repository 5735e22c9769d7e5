"""The costs of a compiled program on one device: the work and memory traffic that bound
its time from below.

XLA's own `cost_analysis` counts the body of a loop once, and counts data that a TPU
keeps in vector memory as memory traffic. Here a loop counts as often as it runs, and
only data in main memory counts.

The text of a program has the operands and results of a TPU kernel, but not its
computation. The kernels of JAX's splash attention
(`jax.experimental.pallas.ops.tpu.splash_attention`) are recognized by their names. They
are counted if the name scope `causal` around them tells that only the causal half of
the scores is computed.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from xshard.dryrun import hlo
from xshard.dryrun import result as result_lib
from xshard.metrics import flops

# For a convolution, which dimension of its operands and result has which role:
# `dim_labels=b01f_01io->b01f`.
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
# The TPU compiler's estimate of the cycles of an instruction, which most instructions
# have.
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# Instructions that move nothing, or whose traffic is counted elsewhere: with their
# body, their start, or their users.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "add-dependency", "opt-barrier", "partition-id", "replica-id", "while",
    "conditional", "call", "custom-call", "async-start", "async-update", "send", "recv",
}  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")
_KERNEL = 'custom_call_target="tpu_custom_call"'
_CAUSAL = re.compile(r'op_name="[^"]*\bcausal\b[^"]*"')
_SPLASH = re.compile(r"^splash_m[hq]a_(fwd|dkv|dq)_")
# The number of matrix products over the scores in each kernel of splash attention.
_PRODUCTS = {
    # The scores, and the result.
    "fwd": 2,
    # The scores, and the gradients of values, of probabilities and of keys.
    "dkv": 4,
    # The scores, and the gradients of probabilities and of queries.
    "dq": 3,
}


class Cost(NamedTuple):
    """The work of one device in one run of a program.

    Attributes:
      flops: FLOPs of matrix products and convolutions, two for each multiply-add. Other
        operations are not counted, and kernels only if they are recognized.
      hbm_bytes: bytes read from and written to main memory: each operand of each fused
        operation once; of a sliced operand only the slice.
      cycles: TensorCore cycles, as the TPU compiler estimates them for each fused
        operation, summed. The estimate does not include collectives, custom calls and
        concurrent copies.
      host_bytes: bytes moved between the host's memory and the chip.
    """

    flops: int = 0
    hbm_bytes: int = 0
    cycles: int = 0
    host_bytes: int = 0

    def times(self, runs: int) -> "Cost":
        """Returns the cost of so many runs."""
        return Cost(*(runs * amount for amount in self))


def of(program: hlo.Program) -> Cost:
    """Returns the cost of a program in a step; conditionals count their most expensive
    branch.
    """
    return _Counter(program).computation(program.entry).times(program.runs)


def total(costs: Iterable[Cost]) -> Cost:
    """Returns the sum of some costs."""
    return Cost(*(sum(amounts) for amounts in zip(*costs, strict=True)))


class _Counter:
    """Counts the costs of a program's computations, each once."""

    def __init__(self, program: hlo.Program):
        self._program = program
        self._known: dict[str, Cost] = {}

    def computation(self, name: str) -> Cost:
        """Returns the cost of all instructions of a computation."""
        if name not in self._known:
            # A placeholder, so that a computation that calls itself does not recurse
            # forever.
            self._known[name] = Cost()
            computation = self._program.computations.get(name, hlo.Computation())
            costs = []
            for instruction in computation.instructions.values():
                costs.append(self._instruction(name, instruction))
            self._known[name] = total(costs)
        return self._known[name]

    def _instruction(self, name: str, instruction: hlo.Instruction) -> Cost:
        """Returns the cost of an instruction of the computation `name`."""
        loop = self._program.loop(name, instruction)
        if loop is not None:
            return self.computation(loop.body).times(loop.counted_rounds)
        if instruction.opcode == "conditional":
            branches = map(self.computation, instruction.bodies)
            return max(branches, default=Cost(), key=sum)
        if instruction.opcode in ("call", "async-start"):
            return total(map(self.computation, instruction.bodies))
        instructions = self._program.computations[name].instructions
        operands = [instructions.get(operand) for operand in instruction.operands]
        kernel = kernel_of(instruction, operands)
        if kernel is not None and kernel.flops is not None:
            return Cost(kernel.flops, kernel.hbm_bytes)
        estimated = _CYCLES.search(instruction.attributes)
        return Cost(
            flops=self._flops(name, instruction),
            hbm_bytes=self._traffic(name, instruction, operands),
            cycles=int(estimated[1]) if estimated else 0,
            host_bytes=instruction.host_bytes,
        )

    def _flops(self, name: str, instruction: hlo.Instruction) -> int:
        """Counts the FLOPs of an instruction; of a fusion, those inside it."""
        if instruction.opcode == "fusion":
            count = 0
            for body in instruction.bodies:
                computation = self._program.computations[body]
                for inner in computation.instructions.values():
                    count += self._flops(body, inner)
            return count
        if instruction.opcode not in ("dot", "convolution"):
            return 0
        instructions = self._program.computations[name].instructions
        left, right = (
            instructions[operand].arrays[0].shape
            for operand in instruction.operands[:2]
        )
        if instruction.opcode == "dot":
            return _dot_flops(instruction, left)
        return _convolution_flops(instruction, left, right)

    def _traffic(
        self,
        name: str,
        instruction: hlo.Instruction,
        operands: Sequence[hlo.Instruction | None],
    ) -> int:
        """Counts the bytes that an instruction reads from and writes to main memory."""
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith("-done"):
            return 0
        if opcode.endswith("-start") and opcode != "all-reduce-start":
            # The result of a start contains its operands, so it covers reads and
            # writes.
            return instruction.hbm_bytes
        count = 0
        if instruction.hbm_bytes:
            count = self._computed(name, instruction)
            if opcode == "fusion":
                # The results of a fusion may be in different memories.
                count = min(instruction.hbm_bytes, count)
        for place, operand in enumerate(operands):
            # An operand is missing in tests.
            if operand is not None and operand.hbm_bytes:
                size = operand.hbm_bytes
                count += min(size, self._read(instruction, place, size))
        return count

    def _read(self, instruction: hlo.Instruction, place: int, size: int) -> int:
        """Counts the bytes that an instruction reads of the operand at this place, of
        this size: only a slice, if it slices the operand.
        """
        if instruction.opcode == "fusion":
            return sum(self._read_inside(body, place) for body in instruction.bodies)
        if place == 0 and instruction.opcode in _SLICES:
            return instruction.bytes
        if place == 0 and instruction.opcode == "dynamic-update-slice":
            # An in-place update touches only the updated part.
            return 0
        return size

    def _read_inside(self, body: str, place: int) -> int:
        """Counts the bytes that a fused computation reads of the parameter at this
        place: those that the parameter's users read.
        """
        for instruction in self._program.computations[body].instructions.values():
            if instruction.opcode == "parameter" and instruction.literal == str(place):
                return self._bytes_used(body, instruction.name, instruction.bytes)
        return 0

    def _bytes_used(self, body: str, name: str, size: int) -> int:
        """Counts the bytes of a value of this size that its users read."""
        used = 0
        for user in self._program.computations[body].instructions.values():
            for place, operand in enumerate(user.operands):
                if operand != name:
                    continue
                if user.opcode == "bitcast":
                    used += self._bytes_used(body, user.name, size)
                else:
                    used += self._read(user, place, size)
        # Several users may read the same bytes.
        return min(size, used)

    def _computed(self, name: str, instruction: hlo.Instruction) -> int:
        """Counts the bytes of a result that are computed, in whatever memory; for an
        in-place update, only the update.
        """
        instructions = self._program.computations[name].instructions
        operands = [instructions.get(operand) for operand in instruction.operands]
        opcode = instruction.opcode
        if opcode == "fusion":
            count = 0
            for body in instruction.bodies:
                computation = self._program.computations[body]
                root = computation.instructions.get(computation.root)
                if root is not None:
                    count += self._computed(body, root)
            return count
        if opcode == "tuple":
            return sum(self._computed(name, x) for x in operands if x is not None)
        if opcode == "bitcast" and operands and operands[0] is not None:
            return self._computed(name, operands[0])
        # Its operands are the array, the update and where it goes.
        if opcode == "dynamic-update-slice" and operands[1] is not None:
            return operands[1].bytes
        return instruction.bytes


def _dot_flops(instruction: hlo.Instruction, left: tuple[int, ...]) -> int:
    """Counts two for each multiply-add of a matrix product."""
    named = _CONTRACTED.search(instruction.attributes)
    dimensions = [int(n) for n in named[1].split(",") if n] if named else []
    contracted = math.prod(left[dimension] for dimension in dimensions)
    return 2 * math.prod(instruction.arrays[0].shape) * contracted


def _convolution_flops(
    instruction: hlo.Instruction, left: tuple[int, ...], right: tuple[int, ...]
) -> int:
    """Counts two for each multiply-add, without those on padding, which need not be
    computed.
    """
    labels = _LABELS.search(instruction.attributes)
    if not labels:
        return 0
    # In these labels, b is the batch, f and o are features, i are the features that the
    # kernel contracts, and digits are the dimensions in space.
    inputs, kernel, result = labels.groups()
    shape = instruction.arrays[0].shape
    batch = shape[result.index("b")]
    features = shape[result.index("f")]
    products = batch * features * right[kernel.index("i")]
    window = _WINDOW.search(instruction.attributes)
    # For each attribute, such as 'stride', its values by dimension.
    entries = dict(entry.split("=") for entry in window[1].split()) if window else {}
    in_space = sorted(label for label in result if label.isdigit())
    for place, label in enumerate(in_space):
        values = {name: sizes.split("x")[place] for name, sizes in entries.items()}
        products *= flops.taps(
            left[inputs.index(label)],
            right[kernel.index(label)],
            shape[result.index(label)],
            before=int(values.get("pad", "0_0").split("_")[0]),
            stride=int(values.get("stride", 1)),
            apart=int(values.get("lhs_dilate", 1)),
            spread=int(values.get("rhs_dilate", 1)),
        )
    return 2 * products


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


def kernel_of(
    instruction: hlo.Instruction, operands: Sequence[hlo.Instruction | None]
) -> Kernel | None:
    """Returns the kernel that an instruction calls; None if it calls none.

    Args:
      instruction: the instruction.
      operands: the instructions that compute its operands.
    """
    if instruction.opcode != "custom-call" or _KERNEL not in instruction.attributes:
        return None
    # The compiler numbers the calls of a kernel.
    name = re.sub(r"\.\d+$", "", instruction.name)
    hbm_bytes = instruction.hbm_bytes
    floats = []
    for operand in operands:
        if operand is not None:
            hbm_bytes += operand.hbm_bytes
            floats += [x for x in operand.arrays if x.dtype in ("bf16", "f32")]
    phase = _SPLASH.match(name)
    if not phase or not floats or not _CAUSAL.search(instruction.attributes):
        return Kernel(name, None, hbm_bytes)
    # The first floating-point array is the queries; integer block numbers come before
    # it.
    *heads, length, size = floats[0].shape
    scores = math.prod(heads) * length * (length + 1) // 2
    return Kernel(name, 2 * _PRODUCTS[phase[1]] * scores * size, hbm_bytes)


def kernels(program: hlo.Program) -> list[result_lib.Kernel]:
    """Returns the kernels of a program by name: how often each runs, and its total
    cost.
    """
    rows: dict[str, Any] = {}
    for name, times in program.times().items():
        instructions = program.computations[name].instructions
        for instruction in instructions.values():
            operands = [instructions.get(operand) for operand in instruction.operands]
            kernel = kernel_of(instruction, operands)
            if kernel is None or not times:
                continue
            row = {"kernel": kernel.name, "count": 0, "flops": 0, "hbm_bytes": 0}
            row = rows.setdefault(kernel.name, row)
            row["count"] += times
            if kernel.flops is None:
                row |= {"flops": None, "hbm_bytes": None}
            elif row["flops"] is not None:
                row["flops"] += times * kernel.flops
                row["hbm_bytes"] += times * kernel.hbm_bytes
    return [rows[name] for name in sorted(rows)]
