"""Parses the text of a compiled program: its computations, their instructions, and how
often each computation runs.

The text is from `compiled.as_text()`, for a CPU or a TPU. The semantics are described
at https://openxla.org/xla/operation_semantics. This module parses the syntax, and only
the parts that `xshard.dryrun.collectives` and `xshard.dryrun.costs` need.
"""

import dataclasses
import math
import re
from typing import NamedTuple

# The bits per element of HLO's dtypes. Types that are not listed, such as tokens, count
# as empty.
_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32,
    "u32": 32, "s64": 64, "u64": 64, "f8e4m3fn": 8, "f8e5m2": 8, "f16": 16, "bf16": 16,
    "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
# The first line of a computation: `ENTRY %name (parameters) -> result {`.
_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\) -> .* \{\s*$")
# An instruction, up to the bracket of its operands: `ROOT %name = result opcode(`.
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([^\s=]+) = (.+?) ([a-z][\w-]*)\((.*)$")
# An array's dtype, sizes and layout: `f32[8,3]{1,0:T(8,128)S(1)}`.
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_NAME = re.compile(r"%([^\s,(){}]+)")
_BODIES = re.compile(
    r"(?:calls|to_apply|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%[^\s,]+)"
)
_WHILE = re.compile(r"condition=%([^\s,]+), body=%([^\s,]+)")
_KNOWN_ROUNDS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# The attributes of a kernel, which span several lines.
_OVER_LINES = re.compile(r'=\{\n(?:"[^\n]*\n)+\}')
# The memory space of the host, and that of synchronization flags.
_HOST_SPACE = 5
_FLAG_SPACE = 2
# Instructions that pass a number on unchanged.
_SAME = ("copy", "bitcast", "convert", "copy-start", "copy-done")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array in the result of an instruction.

    Attributes:
      dtype: its dtype in HLO's name.
      shape: its shape on one device.
      space: the memory space: 0 is the device's main memory (HBM); a TPU's other spaces
        are on the chip, or on the host.
    """

    dtype: str
    shape: tuple[int, ...]
    space: int

    @property
    def bytes(self) -> int:
        """Its size in bytes, without the padding of tiles."""
        return _BITS.get(self.dtype, 0) * math.prod(self.shape) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: `name = result opcode(operands), attributes`.

    Attributes:
      name: its name.
      opcode: its operation, such as 'fusion'.
      result: the text of its result's type.
      operands: the names of the instructions that compute its operands.
      literal: the text between its brackets: the operands, or a constant's value.
      attributes: the text after them.
    """

    name: str
    opcode: str
    result: str
    operands: tuple[str, ...]
    literal: str
    attributes: str

    @property
    def arrays(self) -> list[Array]:
        """The arrays of its result, all elements of a tuple."""
        arrays = []
        for dtype, sizes, layout in _ARRAY.findall(self.result):
            # The list of sizes of a scalar is empty.
            shape = tuple(int(size) for size in sizes.split(",") if size)
            space = _SPACE.search(layout)
            arrays.append(Array(dtype, shape, int(space[1]) if space else 0))
        return arrays

    @property
    def bytes(self) -> int:
        """The total size of its arrays in bytes."""
        return sum(array.bytes for array in self.arrays)

    @property
    def hbm_bytes(self) -> int:
        """The total size of its arrays in the device's main memory, in bytes."""
        return sum(array.bytes for array in self.arrays if array.space == 0)

    @property
    def host_bytes(self) -> int:
        """The bytes that an asynchronous copy moves to or from the host's memory.

        The result of its start has the array on the host, whole even if it is sliced,
        and the part of it that is on the device.
        """
        if not self.opcode.endswith("-start"):
            return 0
        arrays = [array for array in self.arrays if array.shape]
        if all(array.space != _HOST_SPACE for array in arrays):
            return 0
        on_device = []
        for array in arrays:
            if array.space not in (_HOST_SPACE, _FLAG_SPACE):
                on_device.append(array.bytes)
        return sum(on_device)

    @property
    def bodies(self) -> list[str]:
        """The computations that it calls, except the condition and body of a loop."""
        return _NAME.findall(" ".join(_BODIES.findall(self.attributes)))


@dataclasses.dataclass
class Computation:
    """Instructions by name, in order, and the name of the one that is the result."""

    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
    root: str = ""


class Loop(NamedTuple):
    """A loop.

    Attributes:
      body: the name of its body.
      rounds: how often the body runs; None if unknown.
    """

    body: str
    rounds: int | None

    @property
    def counted_rounds(self) -> int:
        """How often the body counts: once if it is unknown how often it runs."""
        return 1 if self.rounds is None else self.rounds


@dataclasses.dataclass
class Program:
    """A program.

    Attributes:
      computations: its computations by name. Lines outside of any computation, as in
        tests, are in the one called ''.
      entry: the name of the computation that runs first.
      runs: how often the program runs in a step.
    """

    computations: dict[str, Computation]
    entry: str
    runs: int

    def loop(self, name: str, instruction: Instruction) -> Loop | None:
        """Returns the loop that an instruction of the computation `name` runs; None if
        it runs none.

        The CPU compiler writes how often a loop runs. The TPU compiler does not: there
        it follows from the start, the step and the bound of the loop's counter, as
        `lax.scan` and `lax.fori_loop` create it.
        """
        if instruction.opcode != "while":
            return None
        named = _WHILE.search(instruction.attributes)
        if not named:
            return None
        condition, body = named.groups()
        known = _KNOWN_ROUNDS.search(instruction.attributes)
        if known:
            return Loop(body, int(known[1]))
        return Loop(body, self._rounds(name, instruction, condition, body))

    def times(self, *, takes_branches: bool = True) -> dict[str, int]:
        """Counts how often each computation runs in a step.

        A loop of unknown length counts as one round.

        Args:
          takes_branches: whether each branch of a conditional counts as taken; else
            none does.
        """
        times = dict.fromkeys(self.computations, 0)

        def run(name: str, count: int) -> None:
            if name not in self.computations:
                return
            times[name] += count
            for instruction in self.computations[name].instructions.values():
                loop = self.loop(name, instruction)
                if loop is not None:
                    run(loop.body, count * loop.counted_rounds)
                if takes_branches or instruction.opcode != "conditional":
                    for called in instruction.bodies:
                        run(called, count)

        run(self.entry, self.runs)
        return times

    def unknown_loops(self) -> int:
        """Returns the number of loops of unknown length."""
        count = 0
        for name, computation in self.computations.items():
            for instruction in computation.instructions.values():
                loop = self.loop(name, instruction)
                if loop is not None and loop.rounds is None:
                    count += 1
        return count

    def _rounds(
        self, name: str, loop: Instruction, condition: str, body: str
    ) -> int | None:
        """Returns the number of rounds of a loop that counts up to a constant; None for
        other loops.

        Args:
          name: the computation that has the loop.
          loop: the loop.
          condition: the computation that decides whether it goes on.
          body: the computation of a round.
        """
        test = self.computations.get(condition, Computation())
        compared = test.instructions.get(test.root)
        if compared is None or compared.opcode != "compare":
            return None
        if "direction=LT" not in compared.attributes:
            return None
        counter = self._origin(condition, compared.operands[0])
        if counter is None or counter.opcode != "get-tuple-element":
            return None
        # The counter's place in the tuple of loop-carried values.
        place = int(counter.attributes.partition("index=")[2].partition(",")[0])
        start = self._number(name, self._element(name, loop.operands[0], place))
        end = self._number(condition, compared.operands[1])
        step = self._step(body, place)
        if start is None or end is None or step is None or step <= 0:
            return None
        # Ceiling division.
        return max(0, -((start - end) // step))

    def _step(self, body: str, place: int) -> int | None:
        """Returns the constant that a round adds to the counter; None if unknown."""
        if body not in self.computations:
            return None
        root = self.computations[body].root
        last = self._origin(body, self._element(body, root, place))
        if last is None or last.opcode != "add":
            return None
        for operand in last.operands:
            number = self._number(body, operand)
            if number is not None:
                return number
        return None

    def _element(self, name: str, operand: str, place: int) -> str:
        """Returns the name of a tuple's element; empty if unknown."""
        made = self.computations[name].instructions.get(operand)
        if made and made.opcode == "tuple" and place < len(made.operands):
            return made.operands[place]
        return ""

    def _number(self, name: str, operand: str) -> int | None:
        """Returns the value of an integer constant; None if the operand is not one."""
        origin = self._origin(name, operand)
        # The text between a parameter's brackets is an integer, too: its position.
        if origin is None or origin.opcode != "constant":
            return None
        if not origin.literal.lstrip("-").isdigit():
            return None
        return int(origin.literal)

    def _origin(self, name: str, operand: str) -> Instruction | None:
        """Returns the instruction that computes an operand, before copies and
        conversions.
        """
        instructions = self.computations[name].instructions
        origin = instructions.get(operand)
        while origin and origin.opcode in _SAME and origin.operands:
            origin = instructions.get(origin.operands[0])
        return origin


def parse(text: str, runs: int = 1) -> Program:
    """Parses the text of a program.

    Args:
      text: the text.
      runs: how often the program runs in a step.
    """
    entry = ""
    current = Computation()
    computations = {"": current}
    text = _OVER_LINES.sub(lambda found: found[0].replace("\n", ""), text)
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            is_entry, name = header.groups()
            current = computations.setdefault(name, Computation())
            if is_entry:
                entry = name
            continue
        instruction = _INSTRUCTION.match(line)
        if instruction:
            is_root, name, result, opcode, rest = instruction.groups()
            end = _closing(rest)
            literal = rest[:end]
            parsed = Instruction(
                name=name,
                opcode=opcode,
                result=result,
                operands=tuple(_NAME.findall(literal)),
                literal=literal,
                attributes=rest[end:],
            )
            current.instructions[name] = parsed
            if is_root:
                current.root = name
    return Program(computations, entry, runs)


def _closing(text: str) -> int:
    """Returns the position of the bracket that closes one opened before the text."""
    depth = 1
    for bracket in re.finditer(r"[()]", text):
        depth += 1 if bracket[0] == "(" else -1
        if depth == 0:
            return bracket.start()
    return len(text)
