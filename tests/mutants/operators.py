"""The operators: what each makes of a node of a syntax tree, as edits of the text, so
that all other lines stay as they are.
"""

import ast
import itertools

_SIGNS = {b"+": b"-", b"-": b"+", b"+=": b"-=", b"-=": b"+="}
_COMPARISONS = {
    b"<": b"<=",
    b"<=": b"<",
    b">": b">=",
    b">=": b">",
    b"==": b"!=",
    b"!=": b"==",
}
_NARROWER = {
    "complex128": "complex64",
    "float64": "float32",
    "float32": "float16",
    "int64": "int32",
    "uint64": "uint32",
    "int32": "int16",
    "uint32": "uint16",
    "int16": "int8",
    "uint16": "uint8",
}


class Source:
    """A file.

    Attributes:
      path: its path in the repository.
      text: what it has, as bytes, which syntax trees count.
      tree: its syntax tree.
    """

    def __init__(self, path, text):
        self.path = path
        self.text = text
        self.tree = ast.parse(text)
        self._lines = [0]
        for line in text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def begin(self, node):
        """Returns the offset of a node."""
        return self._lines[node.lineno - 1] + node.col_offset

    def end(self, node):
        """Returns the offset after a node."""
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def code(self, node):
        """Returns a node's text."""
        return self.text[self.begin(node) : self.end(node)]

    def put(self, node, text):
        """Yields the edit that puts a text in a node's place: the offsets of the old
        text, and the new one.
        """
        yield self.begin(node), self.end(node), text

    def between(self, left, right, replacements):
        """Yields the edit of an operator between two nodes, if it is to be replaced."""
        begin = self.end(left)
        symbol = self.text[begin : self.begin(right)].strip(b" \n()")
        if symbol in replacements:
            begin = self.text.index(symbol, begin)
            yield begin, begin + len(symbol), replacements[symbol]


def sign(source, node):
    """A sum is a difference, and the other way round; a minus is dropped."""
    if isinstance(node, ast.BinOp):
        yield from source.between(node.left, node.right, _SIGNS)
    elif isinstance(node, ast.AugAssign):
        yield from source.between(node.target, node.value, _SIGNS)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield source.begin(node), source.begin(node) + 1, b""


def comparison(source, node):
    """An order counts equal values, or no longer does; equal is unequal."""
    if isinstance(node, ast.Compare):
        for left, right in itertools.pairwise([node.left, *node.comparators]):
            yield from source.between(left, right, _COMPARISONS)


def constant(source, node):
    """An integer is greater by one."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield from source.put(node, b"%d" % (node.value + 1))


def swap(source, node):
    """Two neighbours change places, of which one needs the other or both act."""
    for name in ("body", "orelse", "finalbody"):
        statements = getattr(node, name, None)
        # The body of a lambda is one.
        if isinstance(statements, list):
            for first, second in itertools.pairwise(statements):
                if _depend(first, second):
                    middle = source.text[source.end(first) : source.begin(second)]
                    new = source.code(second) + middle + source.code(first)
                    yield source.begin(first), source.end(second), new


def _depend(first, second):
    simple = (ast.Assign, ast.AugAssign, ast.Expr)
    if not isinstance(first, simple) or not isinstance(second, simple):
        return False
    if isinstance(first, ast.Expr) and isinstance(second, ast.Expr):
        # The other texts are docstrings.
        return isinstance(first.value, ast.Call)
    written = (_names(first, ast.Store), _names(second, ast.Store))
    named = (_names(first, ast.expr_context), _names(second, ast.expr_context))
    return bool(written[0] & named[1] | written[1] & named[0])


def _names(statement, context):
    nodes = ast.walk(statement)
    found = [x for x in nodes if isinstance(getattr(x, "ctx", None), context)]
    return set(map(ast.unparse, found))


def condition(source, node):
    """A condition is inverted."""
    tests = getattr(node, "ifs", [])
    if isinstance(node, ast.If | ast.IfExp):
        tests = [node.test]
    for test in tests:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield source.begin(test), source.begin(test) + len("not "), b""
        else:
            yield from source.put(test, b"not (%s)" % source.code(test))


def axis(source, node):
    """An axis is the next one, in a call or of a shape."""
    number = None
    if isinstance(node, ast.keyword) and node.arg == "axis":
        number = node.value
    elif isinstance(node, ast.Subscript) and source.code(node.value).endswith(
        b".shape"
    ):
        number = node.slice
    if isinstance(number, ast.Constant | ast.UnaryOp):
        value = ast.literal_eval(number)
        if type(value) is int:
            yield from source.put(number, b"%d" % (value + 1))


def dtype(source, node):
    """A dtype is one too narrow."""
    if isinstance(node, ast.Attribute) and node.attr in _NARROWER:
        module = source.code(node.value)
        if module in (b"np", b"jnp"):
            new = f".{_NARROWER[node.attr]}"
            yield from source.put(node, module + new.encode())


def mask(source, node):
    """A selection takes all; of two masks one is dropped."""
    if isinstance(node, ast.Call) and len(node.args) == 3:
        if source.code(node.func).endswith((b".where", b".select")):
            yield from source.put(node, b"(%s)" % source.code(node.args[1]))
    elif isinstance(node, ast.keyword) and node.arg in ("mask", "where"):
        yield from source.put(node.value, b"None")
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        yield from source.put(node, b"(%s)" % source.code(node.left))


def call(source, node):
    """A call whose result nobody uses is dropped."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield from source.put(node, b"pass")


def fold(source, node):
    """A number is not folded into a key."""
    is_call = isinstance(node, ast.Call)
    if is_call and source.code(node.func).endswith(b".fold_in"):
        yield from source.put(node, source.code(node.args[0]))


def check(source, node):
    """A condition that raises an error is never met."""
    if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
        yield from source.put(node.test, b"False")


OPERATORS = (
    sign,
    comparison,
    constant,
    swap,
    condition,
    axis,
    dtype,
    mask,
    call,
    fold,
    check,
)
