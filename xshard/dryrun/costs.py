"""Costs of a compiled program on one device: what must be computed and moved, to bound its time from below.

XLA's own `cost_analysis` counts what stands in a loop once, and counts as memory traffic what a TPU keeps
in the chip's vector memory. Here loops count as often as they run, and only what is in main memory counts.
"""

import math
import re
from typing import NamedTuple

from xshard.dryrun import hlo

_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
# What moves nothing, or what it moves is counted elsewhere: with its body, its start, or its users.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency",
    "opt-barrier", "partition-id", "replica-id", "while", "conditional", "call", "custom-call", "async-start",
    "async-update", "send", "recv",
}  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")


class Cost(NamedTuple):
    """The work of one device in one run.

    Attributes:
      flops: floating-point operations of matrix products and convolutions, two for each multiplication
        and addition. Others are not counted, nor what a custom call, such as a Pallas kernel, computes.
      hbm_bytes: what is read from and written to main memory, each operand of each fused operation once,
        of what is sliced the slice only.
    """

    flops: int = 0
    hbm_bytes: int = 0


def of(program: hlo.Program) -> Cost:
    """The cost of a run, in which conditionals take their more expensive branch."""
    return _Counter(program).computation(program.entry)


class _Counter:
    def __init__(self, program: hlo.Program):
        self._program = program
        self._known: dict[str, Cost] = {}

    def computation(self, name: str) -> Cost:
        """The cost of all instructions of a computation that runs on its own."""
        if name not in self._known:
            self._known[name] = Cost()
            if name in self._program.computations:
                instructions = self._program.computations[name].instructions.values()
                costs = [self._instruction(name, one) for one in instructions]
                self._known[name] = Cost(
                    *(sum(column) for column in zip(Cost(), *costs, strict=True))
                )
        return self._known[name]

    def _instruction(self, name: str, one: hlo.Instruction) -> Cost:
        loop = self._program.loop(name, one)
        if loop:
            times = 1 if loop[1] is None else loop[1]
            return Cost(*(times * value for value in self.computation(loop[0])))
        if one.opcode == "conditional":
            return max((self.computation(body) for body in one.bodies), default=Cost(), key=sum)
        if one.opcode in ("call", "async-start"):
            return Cost(*map(sum, zip(Cost(), *map(self.computation, one.bodies), strict=True)))
        return Cost(self._flops(name, one), self._traffic(name, one))

    def _flops(self, name: str, one: hlo.Instruction) -> int:
        if one.opcode == "fusion":
            return sum(
                self._flops(body, inner)
                for body in one.bodies
                for inner in self._program.computations[body].instructions.values()
            )
        if one.opcode not in ("dot", "convolution"):
            return 0
        shapes = [self._shape(name, operand) for operand in one.operands]
        count = _dot if one.opcode == "dot" else _convolution
        return count(one, shapes[0], shapes[1])

    def _shape(self, name: str, operand: str) -> tuple[int, ...]:
        return self._program.computations[name].instructions[operand].arrays[0].shape

    def _traffic(self, name: str, one: hlo.Instruction) -> int:
        if one.opcode in _FREE or one.opcode.endswith("-done"):
            return 0
        if one.opcode.endswith("-start") and one.opcode != "all-reduce-start":
            return _in_hbm(one)  # Its result holds its operands, too.
        read = sum(self._read(name, one, place) for place in range(len(one.operands)))
        return read + (self._written(name, one) if _in_hbm(one) else 0)

    def _read(self, name: str, one: hlo.Instruction, place: int) -> int:
        """Counts the bytes that an instruction reads of its operand."""
        operand = self._program.computations[name].instructions.get(one.operands[place])
        whole = _in_hbm(operand) if operand else 0
        if not whole:
            return 0
        if one.opcode == "fusion":
            return min(whole, sum(self._read_inside(body, place) for body in one.bodies))
        return min(whole, _slice(one, place, whole))

    def _read_inside(self, body: str, place: int) -> int:
        """Counts the bytes that a fused computation reads of its parameter: those which its users take."""
        instructions = self._program.computations[body].instructions.values()
        for one in instructions:
            if one.opcode == "parameter" and one.literal == str(place):
                return self._taken(body, one.name, sum(array.bytes for array in one.arrays))
        return 0

    def _taken(self, body: str, name: str, whole: int) -> int:
        total = 0
        for user in self._program.computations[body].users(name):
            for place in (i for i, operand in enumerate(user.operands) if operand == name):
                if user.opcode == "bitcast":
                    total += self._taken(body, user.name, whole)
                elif user.opcode == "fusion":
                    total += sum(self._read_inside(inner, place) for inner in user.bodies)
                else:
                    total += _slice(user, place, whole)
        return min(whole, total)

    def _written(self, name: str, one: hlo.Instruction) -> int:
        """Counts the bytes of a result that are written to main memory; of an update in place, the update's."""
        if one.opcode == "fusion":
            return min(_in_hbm(one), sum(self._root(body) for body in one.bodies))
        return self._result(name, one)

    def _root(self, body: str) -> int:
        computation = self._program.computations[body]
        root = computation.instructions.get(computation.root)
        names = root.operands if root and root.opcode == "tuple" else (computation.root,)
        found = (computation.instructions.get(name) for name in names)
        return sum(self._result(body, one) for one in found if one)

    def _result(self, name: str, one: hlo.Instruction) -> int:
        instructions = self._program.computations[name].instructions
        while one.opcode == "bitcast" and one.operands and one.operands[0] in instructions:
            one = instructions[one.operands[0]]
        if one.opcode == "fusion":
            return sum(self._root(body) for body in one.bodies)
        if one.opcode == "dynamic-update-slice" and one.operands[1] in instructions:
            one = instructions[one.operands[1]]
        return sum(array.bytes for array in one.arrays)


def _slice(one: hlo.Instruction, place: int, whole: int) -> int:
    """Returns the slice that an instruction takes of an operand."""
    if one.opcode in _SLICES and place == 0:
        return sum(array.bytes for array in one.arrays)
    # What is updated in place is neither read nor written but for the update.
    return 0 if one.opcode == "dynamic-update-slice" and place == 0 else whole


def _in_hbm(one: hlo.Instruction) -> int:
    return sum(array.bytes for array in one.arrays if not array.space)


def _dot(one: hlo.Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> int:
    found = _CONTRACTED.search(one.attributes)
    contracted = [int(n) for n in found[1].split(",") if n] if found else []
    return 2 * math.prod(one.arrays[0].shape) * math.prod(left[n] for n in contracted)


def _convolution(one: hlo.Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Two for each product that is not one with padding: padding is no work that must be done."""
    labels = _LABELS.search(one.attributes)
    if not labels:
        return 0
    inputs, kernel, result = labels.groups()
    shape = one.arrays[0].shape
    total = 2 * shape[result.index("b")] * shape[result.index("f")] * right[kernel.index("i")]
    window = _window(one.attributes)
    for place, label in enumerate(sorted(label for label in result if label.isdigit())):
        sizes = (left[inputs.index(label)], right[kernel.index(label)], shape[result.index(label)])
        total *= _taps(*sizes, {key: values[place] for key, values in window.items()})
    return total


def _window(attributes: str) -> dict[str, list[str]]:
    found = _WINDOW.search(attributes)
    pairs = (entry.split("=") for entry in found[1].split()) if found else ()
    return {key: value.split("x") for key, value in pairs}


def _taps(size: int, kernel: int, result: int, window: dict[str, str]) -> int:
    """The pairs of a place in the kernel and one in the result that meet an element of the input."""
    stride, spread = int(window.get("stride", 1)), int(window.get("rhs_dilate", 1))
    apart = int(window.get("lhs_dilate", 1))
    before = int(window.get("pad", "0_0").split("_")[0])
    end = (size - 1) * apart
    taps = 0
    for tap in range(kernel):
        first = tap * spread - before
        # first + i * stride for i in range(result), within [0, end]: the multiples of `apart`.
        low = max(0, -(first // stride))
        high = min(result - 1, (end - first) // stride)
        if apart == 1:
            taps += max(0, high - low + 1)
        else:
            taps += sum((first + i * stride) % apart == 0 for i in range(low, high + 1))
    return taps
