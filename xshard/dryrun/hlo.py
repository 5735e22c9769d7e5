"""A compiled program as XLA writes it down: computations of instructions, and how often each runs.

The text is that of `compiled.as_text()`, of a CPU or a TPU. The language is described at
https://openxla.org/xla/operation_semantics; what is read here is its spelling, and no more of it than
`xshard.dryrun.collectives` and `xshard.dryrun.costs` ask for.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

# HLO's names of types, by the bits of an element; what is not here is of no size.
_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64,
    "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "f8e4m3fn": 8, "f8e5m2": 8,
}  # fmt: skip
_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\) -> .* \{\s*$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([^\s=]+) = (.+?) ([a-z][\w-]*)\((.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_NAME = re.compile(r"%([^\s,(){}]+)")
_BODIES = re.compile(
    r"(?:calls|to_apply|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%[^\s,]+)"
)
_WHILE = re.compile(r"condition=%([^\s,]+), body=%([^\s,]+)")
_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# What a kernel says of itself, on lines of its own.
_OVER_LINES = re.compile(r'=\{\n(?:"[^\n]*\n)+\}')
# What hands a number on as it is.
_SAME = ("copy", "bitcast", "convert", "copy-start", "copy-done")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array that an instruction gives: its type, its dimensions, and the memory that it is in.

    Attributes:
      dtype: as HLO names it.
      shape: its dimensions on one device.
      space: 0 for the device's main memory (HBM); a TPU's others are on the chip, or the host's.
    """

    dtype: str
    shape: tuple[int, ...]
    space: int

    @property
    def bytes(self) -> int:
        """Its size, without what tiles add."""
        return _BITS.get(self.dtype, 0) * math.prod(self.shape) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: `name = result opcode(operands), attributes`."""

    name: str
    opcode: str
    result: str
    operands: tuple[str, ...]
    literal: str
    attributes: str

    @property
    def arrays(self) -> list[Array]:
        """The arrays that it gives, of a tuple all."""
        arrays = []
        for dtype, sizes, layout in _ARRAY.findall(self.result):
            # A scalar has no sizes.
            shape = tuple(int(size) for size in sizes.split(",") if size)
            arrays.append(Array(dtype, shape, _space(layout)))
        return arrays

    @property
    def bytes(self) -> int:
        """The size of all of its arrays together."""
        return sum(array.bytes for array in self.arrays)

    @property
    def hbm_bytes(self) -> int:
        """The size of those that are in the device's main memory."""
        return sum(array.bytes for array in self.arrays if not array.space)

    @property
    def bodies(self) -> list[str]:
        """The computations that it calls, without those of a loop."""
        return [name for group in _BODIES.findall(self.attributes) for name in _NAME.findall(group)]


@dataclasses.dataclass
class Computation:
    """Instructions by name, in order, and the name of the one that is the result."""

    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
    root: str = ""

    def users(self, name: str) -> Iterator[Instruction]:
        """The instructions that read another one's result."""
        return (user for user in self.instructions.values() if name in user.operands)


@dataclasses.dataclass
class Program:
    """Computations by name. What stands outside of all, as a line for a test does, is in the entry's."""

    computations: dict[str, Computation]
    entry: str

    def loop(self, name: str, instruction: Instruction) -> tuple[str, int | None] | None:
        """The body of a loop that stands in the computation `name`, and how often it runs.

        A CPU's compiler says how often. A TPU's does not: there the counter is read, as `lax.scan` and
        `lax.fori_loop` make it, from its start, its step and the bound that it is compared with.

        Returns:
          None for what is no loop; the count is None where it cannot be told.
        """
        if instruction.opcode != "while":
            return None
        named = _WHILE.search(instruction.attributes)
        if not named:
            return None
        condition, body = named.groups()
        known = _KNOWN.search(instruction.attributes)
        if known:
            return body, int(known[1])
        return body, self._count(name, instruction, condition, body)

    def times(self) -> dict[str, int]:
        """Counts how often each computation runs in one run of the program.

        Each branch of a conditional counts as taken, and a loop of unknown count as one round.
        """
        times = dict.fromkeys(self.computations, 0)

        def run(name: str, count: int) -> None:
            if name not in self.computations:
                return
            times[name] += count
            for instruction in self.computations[name].instructions.values():
                loop = self.loop(name, instruction)
                if loop:
                    body, rounds = loop
                    run(body, count * (1 if rounds is None else rounds))
                for called in instruction.bodies:
                    run(called, count)

        run(self.entry, 1)
        return times

    def unknown_loops(self) -> int:
        """The number of loops of which it cannot be told how often they run."""
        count = 0
        for name, computation in self.computations.items():
            for instruction in computation.instructions.values():
                loop = self.loop(name, instruction)
                if loop and loop[1] is None:
                    count += 1
        return count

    def _count(self, name: str, loop: Instruction, condition: str, body: str) -> int | None:
        """The rounds of a loop that counts up to a constant; None if it is of another kind."""
        test = self.computations.get(condition, Computation())
        compared = test.instructions.get(test.root)
        if not compared or compared.opcode != "compare":
            return None
        if "direction=LT" not in compared.attributes:
            return None
        counter = self._origin(condition, compared.operands[0])
        if not counter or counter.opcode != "get-tuple-element":
            return None
        # The counter's place in the tuple that goes from round to round.
        place = int(counter.attributes.partition("index=")[2].partition(",")[0])
        start = self._number(name, self._element(name, loop.operands[0], place))
        end = self._number(condition, compared.operands[1])
        step = self._step(body, place)
        if start is None or end is None or not step or step < 0:
            return None
        # Rounded up, in integers.
        return max(0, -((start - end) // step))

    def _step(self, body: str, place: int) -> int | None:
        """Returns what a round adds to the counter."""
        if body not in self.computations:
            return None
        last = self._origin(body, self._element(body, self.computations[body].root, place))
        if not last or last.opcode != "add":
            return None
        for operand in last.operands:
            number = self._number(body, operand)
            if number is not None:
                return number
        return None

    def _element(self, name: str, operand: str, place: int) -> str:
        """The name of what is at a place of a tuple; empty if it cannot be told."""
        made = self.computations[name].instructions.get(operand)
        if made and made.opcode == "tuple" and place < len(made.operands):
            return made.operands[place]
        return ""

    def _number(self, name: str, operand: str) -> int | None:
        """The integer that an operand is; None if it is no constant."""
        origin = self._origin(name, operand)
        if origin and origin.opcode == "constant" and origin.literal.lstrip("-").isdigit():
            return int(origin.literal)
        return None

    def _origin(self, name: str, operand: str) -> Instruction | None:
        """The instruction whose result an operand is, before copies and conversions."""
        instructions = self.computations[name].instructions
        origin = instructions.get(operand)
        while origin and origin.opcode in _SAME and origin.operands:
            origin = instructions.get(origin.operands[0])
        return origin


def parse(text: str) -> Program:
    """Reads a program."""
    program = Program({"": Computation()}, "")
    current = program.computations[""]
    text = _OVER_LINES.sub(lambda found: found[0].replace("\n", ""), text)
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            is_entry, name = header.groups()
            current = program.computations.setdefault(name, Computation())
            if is_entry:
                program.entry = name
            continue
        instruction = _INSTRUCTION.match(line)
        if instruction:
            is_root, name, result, opcode, rest = instruction.groups()
            end = _closing(rest)
            literal, attributes = rest[:end], rest[end:]
            operands = tuple(_NAME.findall(literal))
            current.instructions[name] = Instruction(
                name, opcode, result, operands, literal, attributes
            )
            if is_root:
                current.root = name
    return program


def _closing(text: str) -> int:
    """Finds where the bracket is closed that was opened before the text."""
    depth = 1
    for bracket in re.finditer(r"[()]", text):
        depth += 1 if bracket[0] == "(" else -1
        if not depth:
            return bracket.start()
    return len(text)


def _space(layout: str) -> int:
    named = _SPACE.search(layout)
    return int(named[1]) if named else 0
