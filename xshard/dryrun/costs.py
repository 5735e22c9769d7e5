"""The costs of a compiled program on one device: the work and memory traffic that bound
its time from below.

XLA's own `cost_analysis` counts the body of a loop once, and counts data that a TPU
keeps in vector memory as memory traffic. Here a loop counts as often as it runs, and
only data in main memory counts.
"""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from xshard.dryrun import hlo, kernels
from xshard.metrics import flops

_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
# The TPU compiler's estimate of the cycles of an instruction, which most instructions
# have.
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# Instructions that move nothing, or whose traffic is counted elsewhere: with their
# body, their start, or their users.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency",
    "opt-barrier", "partition-id", "replica-id", "while", "conditional", "call", "custom-call", "async-start",
    "async-update", "send", "recv",
}  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")


class Cost(NamedTuple):
    """The work of one device in one run of a program.

    Attributes:
      flops: FLOPs of matrix products and convolutions, two for each multiply-add. Other
        operations are not counted, and custom calls only if `kernels` knows them.
      hbm_bytes: bytes read from and written to main memory: each operand of each fused
        operation once; of a sliced operand only the slice.
      cycles: TensorCore cycles, as the TPU compiler estimates them for each fused
        operation, summed. The estimate does not include collectives, custom calls and
        concurrent copies.
    """

    flops: int = 0
    hbm_bytes: int = 0
    cycles: int = 0

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
    return Cost(*map(sum, zip(*costs, strict=True)))


class _Counter:
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
            instructions = computation.instructions.values()
            self._known[name] = total(
                self._instruction(name, one) for one in instructions
            )
        return self._known[name]

    def _instruction(self, name: str, instruction: hlo.Instruction) -> Cost:
        loop = self._program.loop(name, instruction)
        if loop:
            body, rounds = loop
            return self.computation(body).times(1 if rounds is None else rounds)
        if instruction.opcode == "conditional":
            return max(
                map(self.computation, instruction.bodies), default=Cost(), key=sum
            )
        if instruction.opcode in ("call", "async-start"):
            return total(map(self.computation, instruction.bodies))
        kernel = kernels.of(
            instruction,
            [self._producer(name, operand) for operand in instruction.operands],
        )
        if kernel and kernel.flops is not None:
            return Cost(kernel.flops, kernel.hbm_bytes)
        estimated = _CYCLES.search(instruction.attributes)
        cycles = int(estimated[1]) if estimated else 0
        return Cost(
            self._flops(name, instruction), self._traffic(name, instruction), cycles
        )

    def _flops(self, name: str, instruction: hlo.Instruction) -> int:
        if instruction.opcode == "fusion":
            return sum(
                self._flops(body, inner)
                for body in instruction.bodies
                for inner in self._program.computations[body].instructions.values()
            )
        if instruction.opcode not in ("dot", "convolution"):
            return 0
        shapes = [self._shape(name, operand) for operand in instruction.operands]
        count = _dot if instruction.opcode == "dot" else _convolution
        return count(instruction, shapes[0], shapes[1])

    def _shape(self, name: str, operand: str) -> tuple[int, ...]:
        return self._program.computations[name].instructions[operand].arrays[0].shape

    def _producer(self, name: str, operand: str) -> hlo.Instruction | None:
        return self._program.computations[name].instructions.get(operand)

    def _traffic(self, name: str, instruction: hlo.Instruction) -> int:
        if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
            return 0
        if (
            instruction.opcode.endswith("-start")
            and instruction.opcode != "all-reduce-start"
        ):
            # The result of a start contains its operands, so it covers reads and
            # writes.
            return instruction.hbm_bytes
        read = sum(
            self._read(name, instruction, place)
            for place in range(len(instruction.operands))
        )
        return read + self._written(name, instruction)

    def _read(self, name: str, instruction: hlo.Instruction, place: int) -> int:
        """Counts the bytes that an instruction reads of its operand."""
        operand = self._producer(name, instruction.operands[place])
        whole = operand.hbm_bytes if operand else 0
        if not whole:
            return 0
        if instruction.opcode == "fusion":
            return min(
                whole,
                sum(self._read_inside(body, place) for body in instruction.bodies),
            )
        return min(whole, _slice(instruction, place, whole))

    def _read_inside(self, body: str, place: int) -> int:
        """Counts the bytes that a fused computation reads of a parameter: those that
        the parameter's users read.
        """
        for instruction in self._program.computations[body].instructions.values():
            if instruction.opcode == "parameter" and instruction.literal == str(place):
                return self._bytes_used(body, instruction.name, instruction.bytes)
        return 0

    def _bytes_used(self, body: str, name: str, whole: int) -> int:
        """Counts the bytes of a value that its users read, at most the whole."""
        used = 0
        for user in self._program.computations[body].users(name):
            for place, operand in enumerate(user.operands):
                if operand != name:
                    continue
                if user.opcode == "bitcast":
                    used += self._bytes_used(body, user.name, whole)
                elif user.opcode == "fusion":
                    used += sum(
                        self._read_inside(inner, place) for inner in user.bodies
                    )
                else:
                    used += _slice(user, place, whole)
        return min(whole, used)

    def _written(self, name: str, instruction: hlo.Instruction) -> int:
        """Counts the bytes of a result that are written to main memory; for an in-place
        update, only the update.
        """
        in_hbm = instruction.hbm_bytes
        if not in_hbm:
            return 0
        if instruction.opcode == "fusion":
            return min(in_hbm, self._result(name, instruction))
        return self._result(name, instruction)

    def _result(self, name: str, instruction: hlo.Instruction) -> int:
        """Counts the bytes of a result that are computed, in whatever memory; for an
        in-place update, only the update.
        """
        instructions = self._program.computations[name].instructions
        while (
            instruction.opcode == "bitcast"
            and instruction.operands
            and instruction.operands[0] in instructions
        ):
            instruction = instructions[instruction.operands[0]]
        if instruction.opcode == "fusion":
            return sum(self._root(body) for body in instruction.bodies)
        if (
            instruction.opcode == "dynamic-update-slice"
            and instruction.operands[1] in instructions
        ):
            instruction = instructions[instruction.operands[1]]
        return instruction.bytes

    def _root(self, body: str) -> int:
        """Counts the bytes of a fused computation's result that are computed, of all
        elements of a tuple.
        """
        computation = self._program.computations[body]
        root = computation.instructions.get(computation.root)
        if not root:
            return 0
        if root.opcode != "tuple":
            return self._result(body, root)
        elements = [computation.instructions.get(name) for name in root.operands]
        return sum(self._result(body, element) for element in elements if element)


def _slice(instruction: hlo.Instruction, place: int, whole: int) -> int:
    """Returns the bytes that an instruction reads of an operand: only a slice, if it
    slices the operand.
    """
    if place == 0 and instruction.opcode in _SLICES:
        return instruction.bytes
    if place == 0 and instruction.opcode == "dynamic-update-slice":
        # An in-place update touches only the updated part.
        return 0
    return whole


def _dot(
    instruction: hlo.Instruction, left: tuple[int, ...], right: tuple[int, ...]
) -> int:
    named = _CONTRACTED.search(instruction.attributes)
    contracted = [left[int(n)] for n in named[1].split(",") if n] if named else []
    return 2 * math.prod(instruction.arrays[0].shape) * math.prod(contracted)


def _convolution(
    instruction: hlo.Instruction, left: tuple[int, ...], right: tuple[int, ...]
) -> int:
    """Counts two for each multiply-add, without those on padding, which need not be
    computed.
    """
    labels = _LABELS.search(instruction.attributes)
    if not labels:
        return 0
    inputs, kernel, result = labels.groups()
    shape = instruction.arrays[0].shape
    products = (
        shape[result.index("b")] * shape[result.index("f")] * right[kernel.index("i")]
    )
    window = _window(instruction.attributes)
    for place, label in enumerate(sorted(label for label in result if label.isdigit())):
        own = {name: values[place] for name, values in window.items()}
        products *= flops.taps(
            left[inputs.index(label)],
            right[kernel.index(label)],
            shape[result.index(label)],
            before=int(own.get("pad", "0_0").split("_")[0]),
            stride=int(own.get("stride", 1)),
            apart=int(own.get("lhs_dilate", 1)),
            spread=int(own.get("rhs_dilate", 1)),
        )
    return 2 * products


def _window(attributes: str) -> dict[str, list[str]]:
    """Parses a window: for each attribute, such as 'stride', its values by dimension;
    empty if there is no window.
    """
    window = _WINDOW.search(attributes)
    values = {}
    for entry in window[1].split() if window else ():
        name, _, sizes = entry.partition("=")
        values[name] = sizes.split("x")
    return values
