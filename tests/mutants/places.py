"""The places of the package at which a mutant can be, and the draw of some of them."""

import ast
import collections
import dataclasses
import hashlib
import itertools
import pathlib
import textwrap

from tests.mutants import operators

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Texts of errors and annotations compute nothing, and imports only bind names.
_SKIPPED_NODES = (ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Raise)
_SKIPPED_FIELDS = ("annotation", "decorator_list", "returns")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A small fault, by what survives moves of the code.

    Attributes:
      path: the file that has the code.
      function: the name of the function, with those around it; empty for a module.
      operator: the name of the operator.
      old: the lines that it changes, without their indentation.
      new: what it makes of them.
      repeat: how many equal ones of the function come before it.
    """

    path: str
    function: str
    operator: str
    old: str
    new: str
    repeat: int

    @property
    def content(self):
        """What stays the same when the code moves to another file."""
        return self.function, self.operator, self.old, self.new, self.repeat


def room_of(path):
    """Returns the folder of the package that has a file; '.' for those beside them."""
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else "."


def sources():
    """Reads the files of the package; those that it copies for users are theirs."""
    found = []
    for path in sorted((ROOT / "xshard").rglob("*.py")):
        if "template" not in path.parts:
            name = path.relative_to(ROOT).as_posix()
            found.append(operators.Source(name, path.read_bytes()))
    return found


def mutants(source, only=None):
    """Returns the mutants of a file, each with its edit; with `only` those of some
    pairs of a function and an operator.
    """
    found = {}
    repeats = collections.Counter()
    for node, function in _nodes(source.tree, ""):
        for operator in operators.OPERATORS:
            name = operator.__name__
            if only is not None and (function, name) not in only:
                continue
            for edit in operator(source, node):
                content = (function, name, *_lines(source.text, edit))
                found[Mutant(source.path, *content, repeats[content])] = edit
                repeats[content] += 1
    return found


def _nodes(node, function):
    yield node, function
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if field in _SKIPPED_FIELDS or isinstance(child, _SKIPPED_NODES):
                continue
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                yield from _nodes(child, f"{function}.{child.name}".lstrip("."))
            elif isinstance(child, ast.AST):
                yield from _nodes(child, function)


def _lines(text, edit):
    """Returns the lines that an edit touches, before and after."""
    begin, end, new = edit
    first = text.rfind(b"\n", 0, begin) + 1
    last = text.index(b"\n", end)
    lines = (text[first:last], text[first:begin] + new + text[end:last])
    return [textwrap.dedent(x.decode()).strip() for x in lines]


def changed(source, edit):
    """Returns the text of a file after an edit."""
    begin, end, new = edit
    return source.text[:begin] + new + source.text[end:]


def find(wanted, among):
    """Returns the file and the edit of mutants, in their files or in others; those
    whose code is gone are absent.
    """
    only = {(mutant.function, mutant.operator) for mutant in wanted}
    places = collections.defaultdict(dict)
    for source in among:
        for mutant, edit in mutants(source, only).items():
            places[mutant.content][source.path] = (source, edit)
    found = {}
    for mutant in wanted:
        candidates = places[mutant.content]
        if candidates:
            path = mutant.path if mutant.path in candidates else min(candidates)
            found[mutant] = candidates[path]
    return found


def shares(among, count):
    """Returns how many of a number of mutants each room gets: in proportion to its
    nodes, the rest to the largest remainders.
    """
    sizes = collections.Counter()
    for source in among:
        sizes[room_of(source.path)] += sum(1 for _ in ast.walk(source.tree))
    exact = {room: count * size / sizes.total() for room, size in sizes.items()}
    numbers = {room: int(share) for room, share in exact.items()}
    rest = count - sum(numbers.values())
    for room in sorted(exact, key=lambda room: numbers[room] - exact[room])[:rest]:
        numbers[room] += 1
    return numbers


def draw(among, room, seed):
    """Yields all mutants of a room in the order of a seed: the operators in turn, and
    the places of each by a number that is the place's own, so that other changes of the
    code do not move it.
    """
    by_operator = collections.defaultdict(list)
    for source in among:
        if room_of(source.path) == room:
            for mutant in mutants(source):
                by_operator[mutant.operator].append(mutant)
    for found in by_operator.values():
        found.sort(key=lambda mutant: _number(seed, *mutant.content))
    order = sorted(by_operator, key=lambda name: _number(seed, room, name))
    turns = itertools.zip_longest(*(by_operator[name] for name in order))
    yield from filter(None, itertools.chain.from_iterable(turns))


def _number(*content):
    return hashlib.sha256(repr(content).encode()).digest()
