"""Arrays of other programs under the names and in the forms that they have here.

A map is a JSON file of rules, each of which holds in both directions:

    {"prefix": "transformer.", "rules": [
      {"theirs": "wte.weight", "ours": "params/gpt2/wte"},
      {"theirs": "h.{layer}.attn.c_attn.weight", "split": 1, "stack": "layer",
       "ours": ["params/gpt2/q/w", "params/gpt2/k/w", "params/gpt2/v/w"]},
      {"theirs": "lm_head.weight", "ignore": "the embedding", "equals": "wte.weight"}
    ]}

A `{name}` in a pattern stands for a part of a name without dots and slashes. From their
array to ours, a rule splits it into equal parts along a dimension (`split`), each for
one of several paths; then gives it another shape (`reshape`, a pair of theirs and
ours); permutes its dimensions (`transpose`); and stacks the arrays of all values of one
`{name}`, which are 0, 1, 2 and so on, along a new first dimension (`stack`).

In each direction the first rule that matches holds. Both directions must agree on it,
so that what is read is written back under the same names: what they would not agree on
is refused. An array that is left out (`ignore`) is reported, and if it is only a copy
of another one (`equals`), it is compared with that one.

Names of theirs are without the `prefix`, which some programs write before them.
"""

import functools
import math
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from xshard import errors
from xshard.files import disk, jsonfile

# The number of elements that are compared at a time.
_COMPARED = 4 << 20


class Rule(NamedTuple):
    """A rule of a map, as its file has it.

    Attributes:
      theirs: the pattern of their names.
      ours: our path, or several paths of the parts of a split array.
      split: the dimension along which their array is split.
      reshape: the shape of a part, and our shape before it is transposed.
      transpose: for each of our dimensions, that of the reshaped part.
      stack: the name in `theirs` whose arrays are stacked.
      ignore: why these arrays of theirs are left out.
      equals: the array of theirs that a left-out one must be a copy of.
    """

    theirs: str
    ours: str | list[str] = ""
    split: int | None = None
    reshape: tuple[list[int], list[int]] | None = None
    transpose: list[int] | None = None
    stack: str = ""
    ignore: str = ""
    equals: str = ""


class Map(NamedTuple):
    """The rules of a file.

    Attributes:
      rules: the rules. The first that matches an array or a path holds for it.
      prefix: what may precede their names, and is not written.
    """

    rules: list[Rule]
    prefix: str = ""


class Arrays(Protocol):
    """Named arrays that can be read in part, such as `xshard.files.tensors.File`."""

    path: str
    metadata: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of an array."""


def read(path: str) -> Map:
    """Reads a map.

    Raises:
      UserError: if there is no such file, or a rule is none.
    """
    file = pathlib.Path(disk.expanded(path))
    content = jsonfile.read_if_exists(file)
    if content is None:
        raise errors.UserError(f"There is no map {path}.")
    try:
        found = jsonfile.parse(content, Map)
        for number, rule in enumerate(found.rules, 1):
            _check_rule(f"rule {number}, of {rule.theirs!r},", rule)
    except ValueError as e:
        raise errors.UserError(f"{path} is not a map of arrays: {e}.") from e
    return found


def _check_rule(what: str, rule: Rule) -> None:
    """Raises ValueError unless a rule can hold in both directions."""
    if bool(rule.ours) == bool(rule.ignore):
        raise ValueError(f"{what} needs either 'ours' or 'ignore'")
    fields = _fields(rule.theirs)
    if rule.equals and not rule.ignore:
        raise ValueError(f"{what} has 'equals', which is for 'ignore'")
    if not _fields(rule.equals) <= fields:
        names = ", ".join(sorted(fields)) or "none"
        raise ValueError(
            f"{what} may have only its own {{names}} in {rule.equals!r}: {names}"
        )
    if rule.ignore:
        return
    paths = _paths(rule)
    if len(set(paths)) < len(paths):
        raise ValueError(f"{what} has one path twice in 'ours'")
    if (rule.split is None) != (len(paths) == 1):
        raise ValueError(f"{what} has 'split' exactly if 'ours' lists several paths")
    if rule.split is not None and rule.split < 0:
        raise ValueError(f"{what} splits dimension {rule.split}, which is below 0")
    if rule.stack and rule.stack not in fields:
        raise ValueError(f"{what} stacks {rule.stack!r}, which is no {{name}} in it")
    wanted = fields - {rule.stack}
    for path in paths:
        if _fields(path) != wanted:
            names = ", ".join(sorted(wanted)) or "none"
            raise ValueError(f"{what} must have these {{names}} in {path!r}: {names}")
    order = rule.transpose or []
    if sorted(order) != list(range(len(order))):
        raise ValueError(f"{what} transposes by {order}, no permutation")
    if rule.reshape is not None:
        theirs, ours = rule.reshape
        if min([*theirs, *ours], default=0) < 0:
            raise ValueError(f"{what} reshapes {theirs} to {ours}, with sizes below 0")
        if math.prod(theirs) != math.prod(ours):
            raise ValueError(f"{what} reshapes {theirs} to {ours}, of another size")


class _Source(NamedTuple):
    """Where an array of ours comes from.

    Attributes:
      rule: the rule.
      part: the number of the part of a split array.
      names: the names of their arrays: several if they are stacked.
    """

    rule: Rule
    part: int
    names: list[str]


class Mapped:
    """Arrays of theirs, as ours: the same interface as `tensors.File`.

    Attributes:
      path: where the arrays are.
      metadata: the writer's notes.
      shapes: the shapes of our arrays, by path.
      dtypes: the names of their types, by path.
      ignored: descriptions of the arrays of theirs that the rules leave out.
    """

    def __init__(self, arrays: Arrays, weight_map: Map, map_path: str):
        """Finds the rule of each array. It reads only what `equals` compares.

        Args:
          arrays: their arrays.
          weight_map: the map.
          map_path: the file of the rules, for messages.

        Raises:
          UserError: with each array that no rule matches, that does not fit its rule,
            or that is not the copy that its rule says.
        """
        self.path = arrays.path
        self.metadata = arrays.metadata
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._arrays = arrays
        self._sources, ignored = _sources(
            arrays.shapes, weight_map, arrays.path, map_path
        )
        self.ignored = _descriptions(arrays, ignored)
        problems = []
        for path, source in self._sources.items():
            shapes = {arrays.shapes[name] for name in source.names}
            types = {arrays.dtypes[name] for name in source.names}
            try:
                if len(shapes) > 1 or len(types) > 1:
                    raise ValueError(f"the arrays to stack differ: {shapes}, {types}")
                self.shapes[path] = _shape(source, shapes.pop())
            except ValueError as e:
                problems.append(f"'{source.names[0]}' for '{path}': {e}")
            self.dtypes[path] = arrays.dtypes[source.names[0]]
        if problems:
            raise errors.UserError(
                f"Arrays of {arrays.path} do not fit the rules of {map_path}: "
                f"{'; '.join(problems)}."
            )
        _check_copies(arrays, ignored, weight_map.prefix, map_path)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of an array of ours.

        Args:
          name: its path.
          index: a slice for each dimension.
        """
        source = self._sources[name]
        if not source.rule.stack:
            return self._read_one(source, source.names[0], index)
        layers = source.names[index[0]]
        first = self._read_one(source, layers[0], index[1:])
        # Filled layer by layer, so that only one layer is in memory twice.
        stacked = np.empty((len(layers), *first.shape), first.dtype)
        stacked[0] = first
        for number, layer in enumerate(layers[1:], 1):
            stacked[number] = self._read_one(source, layer, index[1:])
        return stacked

    def _read_one(
        self, source: _Source, name: str, index: tuple[slice, ...]
    ) -> np.ndarray:
        """Reads a part of ours from one array of theirs."""
        rule = source.rule
        sizes = list(self._arrays.shapes[name])
        if rule.split is not None:
            sizes[rule.split] //= len(_paths(rule))
        wanted = [slice(0, size) for size in sizes]
        if rule.reshape is None:
            order = rule.transpose or range(len(sizes))
            for dim, part in zip(order, index, strict=True):
                start, stop, _ = part.indices(sizes[dim])
                wanted[dim] = slice(start, stop)
        if rule.split is not None:
            before = source.part * sizes[rule.split]
            part = wanted[rule.split]
            wanted[rule.split] = slice(before + part.start, before + part.stop)
        array = self._arrays.read(name, tuple(wanted))
        if rule.reshape is None:
            return array.transpose(rule.transpose) if rule.transpose else array
        # A part of another shape is none of theirs, so it is read whole.
        return _to_ours(rule, array)[index]


def to_theirs(
    arrays: Mapping[str, np.ndarray], weight_map: Map, map_path: str
) -> dict[str, np.ndarray]:
    """Returns arrays of ours as theirs, by name: the inverse of `Mapped`.

    Raises:
      UserError: with each array that no rule matches or that does not fit its rule.
    """
    # The parts of each array of theirs, by its name, and the rule.
    parts: dict[str, dict[int, np.ndarray]] = {}
    rule_of: dict[str, Rule] = {}
    unmatched = []
    problems = []
    for path, array in arrays.items():
        found = _find(path, weight_map.rules)
        if found is None:
            unmatched.append(path)
            continue
        number, part, values = found
        rule = weight_map.rules[number]
        try:
            layers: list[Any] = [array]
            if rule.stack:
                layers = list(array)
                if not layers:
                    raise ValueError(f"it stacks no {rule.stack}, so no array holds it")
            for layer, ours in enumerate(layers):
                if rule.stack:
                    values = {**values, rule.stack: str(layer)}
                name = _fill(rule.theirs, values)
                _check_is_read_back(name, path, weight_map)
                of_name = parts.setdefault(name, {})
                if part in of_name or rule_of.get(name, rule) is not rule:
                    raise ValueError(f"'{name}' is that of another array, too")
                rule_of[name] = rule
                of_name[part] = _to_form_of_theirs(rule, ours)
        except (ValueError, TypeError) as e:
            problems.append(f"'{path}' of shape {array.shape}: {e}")
    theirs = {}
    for name, of_name in parts.items():
        rule = rule_of[name]
        count = len(_paths(rule))
        if len(of_name) < count:
            problems.append(f"'{name}' lacks {count - len(of_name)} of its parts")
        elif rule.split is None:
            theirs[name] = of_name[0]
        else:
            in_order = [of_name[part] for part in range(count)]
            forms = {(x.shape, x.dtype.name) for x in in_order}
            if len(forms) > 1:
                problems.append(f"the parts of '{name}' differ: {sorted(forms)}")
                continue
            if rule.split >= in_order[0].ndim:
                problems.append(
                    f"'{name}' is split along dimension {rule.split}, which its parts "
                    f"of shape {in_order[0].shape} do not have"
                )
                continue
            theirs[name] = np.concatenate(in_order, axis=rule.split)
    if unmatched:
        problems.append(f"no rule has 'ours' for {', '.join(unmatched)}")
    if problems:
        raise errors.UserError(
            f"The arrays cannot be written by {map_path}: {'; '.join(problems)}. "
            "Add rules, or leave arrays out by --select."
        )
    return theirs


class _Ignored(NamedTuple):
    """An array of theirs that a rule leaves out.

    Attributes:
      name: its name.
      rule: the rule.
      values: the values of the rule's {names}.
    """

    name: str
    rule: Rule
    values: dict[str, str]


def _sources(
    names: Iterable[str], weight_map: Map, where: str, map_path: str
) -> tuple[dict[str, _Source], list[_Ignored]]:
    """Returns where each array of ours comes from, by path, and what is left out.

    Raises:
      UserError: with each array that no rule matches, or on which the two directions of
        the map do not agree.
    """
    unmatched = []
    # For each of our paths: the rule, the part, and their names by number of a layer.
    found: dict[str, tuple[Rule, int, dict[int, str]]] = {}
    ignored = []
    problems = []
    used: set[int] = set()
    for name in names:
        matched = _find_theirs(name.removeprefix(weight_map.prefix), weight_map.rules)
        if matched is None:
            unmatched.append(name)
            continue
        number, values = matched
        rule = weight_map.rules[number]
        used.add(number)
        if rule.ignore:
            ignored.append(_Ignored(name, rule, values))
            continue
        layer = 0
        if rule.stack:
            # Another form of a number, such as 00, would be written back as this one.
            if not re.fullmatch("0|[1-9][0-9]{0,8}", values[rule.stack]):
                problems.append(f"'{name}' has no number for {{{rule.stack}}}")
                continue
            layer = int(values[rule.stack])
        for part, pattern in enumerate(_paths(rule)):
            path = _fill(pattern, values)
            problem = _not_written_back(name, path, values, weight_map)
            if problem:
                problems.append(problem)
                continue
            _, _, layers = found.setdefault(path, (rule, part, {}))
            if layer in layers:
                problems.append(f"'{layers[layer]}' and '{name}' both are '{path}'")
            layers[layer] = name
    sources = {}
    for path, (rule, part, layers) in found.items():
        if sorted(layers) != list(range(len(layers))):
            problems.append(f"'{path}' stacks {sorted(layers)}, which has gaps")
        in_order = [layers[layer] for layer in sorted(layers)]
        sources[path] = _Source(rule, part, in_order)
    for number, rule in enumerate(weight_map.rules):
        if number not in used and not rule.ignore:
            problems.append(f"rule {number + 1} matches none: '{rule.theirs}'")
    if unmatched:
        problems.append(f"no rule matches {', '.join(unmatched)}")
    if problems:
        raise errors.UserError(
            f"{where} cannot be read by {map_path}: {'; '.join(problems)}. Correct "
            "the rules, or add rules with 'ignore' for what is to be left out."
        )
    return sources, ignored


def _not_written_back(
    name: str, path: str, values: Mapping[str, str], weight_map: Map
) -> str:
    """Explains why an array of theirs would not be written back under its name.

    Args:
      name: its name.
      path: our path, to which its rule leads.
      values: the values of the rule's {names}.
      weight_map: the map.

    Returns:
      The reason; empty if it would be.
    """
    found = _find(path, weight_map.rules)
    # The rule that leads to a path matches it, so there is one.
    assert found is not None
    number, _, backwards = found
    rule = weight_map.rules[number]
    if rule.stack:
        backwards = {**backwards, rule.stack: values.get(rule.stack, "0")}
    written = _fill(rule.theirs, backwards)
    if written == name.removeprefix(weight_map.prefix):
        return ""
    return (
        f"'{name}' is '{path}', which rule {number + 1} writes back as '{written}': "
        "each path needs one rule, which holds in both directions"
    )


def _check_is_read_back(name: str, path: str, weight_map: Map) -> None:
    """Raises ValueError unless an array of theirs would be read as a path of ours."""
    found = _find_theirs(name.removeprefix(weight_map.prefix), weight_map.rules)
    if found is None:
        raise ValueError(
            f"'{name}' begins with the prefix {weight_map.prefix!r}, so no rule would "
            "read it"
        )
    number, values = found
    rule = weight_map.rules[number]
    if rule.ignore:
        raise ValueError(f"'{name}' is read by rule {number + 1}, which ignores it")
    paths = [_fill(pattern, values) for pattern in _paths(rule)]
    if path not in paths:
        raise ValueError(
            f"'{name}' is that of another array, too: rule {number + 1} reads it as "
            f"{', '.join(paths)}"
        )


def _descriptions(arrays: Arrays, ignored: Iterable[_Ignored]) -> list[str]:
    """Describes the arrays that are left out, those that are alike together."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, rule, _ in ignored:
        sizes = ",".join(map(str, arrays.shapes[name]))
        form = f"{arrays.dtypes[name]}[{sizes}]"
        alike.setdefault((rule.theirs, form, rule.ignore), []).append(name)
    described = []
    for (pattern, form, reason), names in alike.items():
        count = ""
        if len(names) > 1:
            count = f" and {len(names) - 1} more of '{pattern}'"
        described.append(f"{names[0]} {form}{count} ({reason})")
    return described


def _check_copies(
    arrays: Arrays, ignored: Iterable[_Ignored], prefix: str, map_path: str
) -> None:
    """Raises UserError if an array that is left out is not the copy that it must be."""
    names = {name.removeprefix(prefix): name for name in arrays.shapes}
    problems = []
    for name, rule, values in ignored:
        if not rule.equals:
            continue
        original = names.get(_fill(rule.equals, values))
        if original is None:
            wanted = _fill(rule.equals, values)
            problems.append(f"'{name}' is to equal '{wanted}', which is not there")
        elif not _are_equal(arrays, name, original):
            problems.append(
                f"'{name}' {arrays.shapes[name]} does not equal '{original}' "
                f"{arrays.shapes[original]}, so it is more than {rule.ignore}"
            )
    if problems:
        raise errors.UserError(
            f"{arrays.path} has what {map_path} would lose: {'; '.join(problems)}. "
            "Train a model with a parameter for it, by a map that has 'ours' for it. "
            "To leave it out all the same, give a map whose rule has no 'equals'."
        )


def _are_equal(arrays: Arrays, name: str, other: str) -> bool:
    """Returns whether two arrays of theirs have the same shape and values."""
    shape = arrays.shapes[name]
    if arrays.shapes[other] != shape:
        return False
    whole = tuple(slice(0, size) for size in shape)
    if math.prod(shape) == 0:
        return True
    if not shape:
        return _have_equal_values(arrays.read(name, ()), arrays.read(other, ()))
    # In parts, so that little is in memory at a time.
    rows = max(_COMPARED // math.prod(shape[1:]), 1)
    for start in range(0, shape[0], rows):
        part = (slice(start, min(start + rows, shape[0])), *whole[1:])
        if not _have_equal_values(arrays.read(name, part), arrays.read(other, part)):
            return False
    return True


def _have_equal_values(x: np.ndarray, y: np.ndarray) -> bool:
    # NaN equals itself here.
    return bool(np.all((x == y) | ((x != x) & (y != y))))


def _shape(source: _Source, theirs: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of an array of ours, or raises ValueError."""
    rule = source.rule
    shape = theirs
    if rule.split is not None:
        count = len(_paths(rule))
        if rule.split >= len(shape) or shape[rule.split] % count:
            raise ValueError(
                f"{shape} has no dimension {rule.split} of {count} equal parts"
            )
        sizes = list(shape)
        sizes[rule.split] //= count
        shape = tuple(sizes)
    # An array of no memory shows what becomes of the shape.
    ours = _to_ours(rule, np.broadcast_to(np.float32(0), shape)).shape
    if rule.stack:
        return (len(source.names), *ours)
    return tuple(ours)


def _to_ours(rule: Rule, array: np.ndarray) -> np.ndarray:
    if rule.reshape is not None:
        theirs, ours = rule.reshape
        if list(array.shape) != theirs:
            raise ValueError(f"{array.shape} is not {theirs}, which is reshaped")
        array = array.reshape(ours)
    if rule.transpose is not None:
        if len(rule.transpose) != array.ndim:
            raise ValueError(f"{array.shape} is not transposed by {rule.transpose}")
        array = array.transpose(rule.transpose)
    return array


def _to_form_of_theirs(rule: Rule, array: np.ndarray) -> np.ndarray:
    """Inverts `_to_ours`."""
    if rule.transpose is not None:
        if len(rule.transpose) != array.ndim:
            raise ValueError(f"{array.shape} is not transposed by {rule.transpose}")
        array = array.transpose(np.argsort(rule.transpose))
    if rule.reshape is not None:
        theirs, ours = rule.reshape
        if list(array.shape) != ours:
            raise ValueError(f"{array.shape} is not {ours}, which is reshaped")
        array = array.reshape(theirs)
    return array


def _find(path: str, rules: list[Rule]) -> tuple[int, int, dict[str, str]] | None:
    """Returns the first rule of a path of ours.

    Returns:
      The number of the rule from 0, that of the part, and the values of the {names}.
    """
    for number, rule in enumerate(rules):
        if rule.ignore:
            continue
        for part, pattern in enumerate(_paths(rule)):
            values = _match(pattern, path)
            if values is not None:
                return number, part, values
    return None


def _find_theirs(name: str, rules: list[Rule]) -> tuple[int, dict[str, str]] | None:
    """Returns the first rule of a name of theirs: its number, and the {names}."""
    for number, rule in enumerate(rules):
        values = _match(rule.theirs, name)
        if values is not None:
            return number, values
    return None


def _paths(rule: Rule) -> list[str]:
    return [rule.ours] if isinstance(rule.ours, str) else rule.ours


def _fields(pattern: str) -> set[str]:
    return set(re.findall(r"{([A-Za-z_]\w*)}", pattern))


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"{([A-Za-z_]\w*)}", pattern)
    expression = re.escape(parts[0])
    seen: set[str] = set()
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        if name in seen:
            expression += f"(?P={name})"
        else:
            expression += f"(?P<{name}>[^./]+)"
        seen.add(name)
        expression += re.escape(text)
    return re.compile(expression)


def _match(pattern: str, name: str) -> dict[str, str] | None:
    """Returns the values of a pattern's {names} in a name, if it matches."""
    matched = _compiled(pattern).fullmatch(name)
    return matched.groupdict() if matched else None


def _fill(pattern: str, values: Mapping[str, str]) -> str:
    return re.sub(r"{([A-Za-z_]\w*)}", lambda field: values[field[1]], pattern)
