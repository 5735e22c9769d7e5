"""Tests of the mutants: what each operator does, how mutants are kept and drawn, and
which tests are chosen for them.
"""

import ast
import json

import pytest

from tests.mutants import __main__ as program
from tests.mutants import operators, places, trials

TABLE = places.ROOT / "tests/mutants/table.json"
# The operator, a line, and what it makes of it.
EDITS = (
    ("sign", "x = (a + b) - (c)", ["x = (a - b) - (c)", "x = (a + b) + (c)"]),
    ("sign", "x -= -y", ["x += -y", "x -= y"]),
    ("comparison", "x = a < b >= c", ["x = a <= b >= c", "x = a < b > c"]),
    ("comparison", "x = (a) == b", ["x = (a) != b"]),
    ("constant", "x = f(1, True, 0.5)", ["x = f(2, True, 0.5)"]),
    ("swap", "f()\n# Why.\ng(1)", ["g(1)\n# Why.\nf()"]),
    ("swap", "x = 1\ny = x", ["y = x\nx = 1"]),
    ("swap", "x = 1\ny = 2", []),
    ("condition", "x = a if not (b) else c", ["x = a if (b) else c"]),
    (
        "condition",
        "x = [y for y in z if y or a]",
        ["x = [y for y in z if not (y or a)]"],
    ),
    ("axis", "x = f(y, axis=-1)", ["x = f(y, axis=0)"]),
    ("axis", "x = y.shape[0], z[0]", ["x = y.shape[1], z[0]"]),
    (
        "dtype",
        "x = np.float32(jnp.int64)",
        ["x = np.float32(jnp.int32)", "x = np.float16(jnp.int64)"],
    ),
    ("mask", "x = jnp.where(m, a, b)", ["x = (a)"]),
    ("mask", "x = f(y, where=m)", ["x = f(y, where=None)"]),
    ("mask", "x = (a == 1) & b", ["x = (a == 1)"]),
    ("call", "os.fsync(file)", ["pass"]),
    ("fold", "key = jax.random.fold_in(key, step)", ["key = key"]),
    ("check", "if a:\n    raise b", ["if False:\n    raise b"]),
    ("check", "if a:\n    b()", []),
)
CODE = """
class A:
    def f(self, x: int = 1):
        '''Describes f.'''
        if x:
            return x + 1
        elif x + 1:
            raise ValueError(f"{x + 1}")
        return x + 1
"""


def source(text, path="xshard/a/b.py"):
    return operators.Source(path, text.encode())


def in_order(mutants):
    return [(x.function, x.old, x.repeat) for x in mutants if x.operator == "sign"]


@pytest.mark.parametrize("name, line, expected", EDITS)
def test_an_operator_edits_a_line(name, line, expected):
    read = source(f"{line}\n")
    found = []
    for mutant, edit in places.mutants(read).items():
        if mutant.operator == name:
            found.append(places.changed(read, edit).decode())
            ast.parse(found[-1])
    assert sorted(found) == sorted(f"{text}\n" for text in expected)


def test_each_operator_has_an_example():
    assert {name for name, *_ in EDITS} == {x.__name__ for x in operators.OPERATORS}


def test_a_mutant_is_kept_by_its_function_and_lines():
    before = source(CODE)
    wanted = list(places.mutants(before))
    # Neither an error's text nor an annotation has any, and equal lines are counted.
    expected = [
        ("A.f", "return x + 1", 0),
        ("A.f", "elif x + 1:", 0),
        ("A.f", "return x + 1", 1),
    ]
    assert sorted(in_order(wanted)) == sorted(expected)

    moved = source(
        "y = 1\n"
        + CODE.replace("\n", "\n    ").replace("\n    class", "\nif y:\n    class"),
        "xshard/c.py",
    )
    found = places.find(wanted, [source("y = 1\n"), moved])
    assert found.keys() == set(wanted)
    last = next(x for x in wanted if x.old == "return x + 1" and x.repeat == 1)
    lines = places.changed(*found[last]).decode().splitlines()
    assert lines[-2:] == ["            return x - 1", "    "]

    without = source(CODE.removesuffix("        return x + 1\n"))
    assert last not in places.find(wanted, [without])


def test_a_note_stands_before_the_statement_of_a_mutant():
    read = source(CODE.replace("def", "@property\n    def"))
    lines = {}
    for mutant, edit in places.mutants(read).items():
        line = trials._line_before(read, edit)
        lines.setdefault(mutant.old, set()).add(read.text.splitlines()[line].strip())
    assert lines == {
        "def f(self, x: int = 1):": {b"@property"},
        "if x:": {b"if x:"},
        "elif x + 1:": {b"if x:"},
        "return x + 1": {b"return x + 1"},
    }


def test_a_draw_is_the_seed_s_and_unmoved_by_other_code():
    files = [source(CODE), source("x = y + 1\n", "xshard/a/c.py")]
    drawn = list(places.draw(files, "a", 1))
    assert sorted(in_order(drawn)) == sorted(
        [*in_order(places.mutants(files[0])), *in_order(places.mutants(files[1]))]
    )
    assert drawn != list(places.draw(files, "a", 2))
    assert not list(places.draw(files, "b", 1))
    # Each operator comes once before one comes again.
    kinds = [mutant.operator for mutant in drawn]
    assert len(set(kinds[: len(set(kinds))])) == len(set(kinds))
    for kind in set(kinds):
        of_kind = [mutant for mutant in drawn if mutant.operator == kind]
        fewer = [x for x in places.draw(files[:1], "a", 1) if x.operator == kind]
        assert fewer == [x for x in of_kind if x.path == "xshard/a/b.py"]


def test_a_room_s_share_is_that_of_its_nodes():
    # Of 5, 9 and 17 nodes: 1.6, 2.9 and 5.5 of ten.
    files = [source("x = 1\n" * size, f"xshard/{size}/a.py") for size in (1, 2, 4)]
    assert places.shares(files, 10) == {"1": 2, "2": 3, "4": 5}


def test_the_nearest_and_shortest_tests_that_reach_a_mutant_come_first(tmp_path):
    ran = (
        ("tests/a/b_test.py::slow", "passed", 9),
        ("tests/a/b_test.py::fast", "passed", 1),
        ("tests/a/c_test.py::c", "passed", 2),
        ("tests/d_test.py::d", "passed", 3),
        ("tests/d_test.py::not_reaching", "passed", 1),
        ("tests/d_test.py::failed", "failed", 1),
        ("tests/d_test.py::long", "passed", 90),
    )
    lines = [json.dumps(row) for row in ran]
    (tmp_path / "ran").write_text("\n".join(lines))
    reached = [[5, row[0]] for row in ran if "not" not in row[0]]
    reached += [[6, "import"], [6, "tests/d_test.py::d"]]
    lines = [json.dumps(row) for row in reached]
    (tmp_path / "reached").write_text("\n".join(lines))
    probe = trials.Probe(tmp_path)

    def chosen(number, seconds):
        tests, count = probe.choose(number, "xshard/a/b.py", seconds)
        return [test.rpartition(":")[2] for test in tests], count

    assert chosen(5, 20) == (["fast", "slow", "c", "d"], 5)
    assert chosen(5, 0.5) == (["fast"], 5)
    assert chosen(6, 100) == (["fast", "slow", "c", "d", "not_reaching"], 6)
    assert chosen(7, 100) == ([], 0)


def test_each_mutant_of_the_table_changes_the_code_or_is_gone():
    table = program.read(TABLE, 0)
    mutants = program.mutants_of(table)
    files = sorted({mutant.path for mutant in mutants})
    present = [places.ROOT / path for path in files if (places.ROOT / path).exists()]
    read = []
    for path in present:
        read.append(source(path.read_text(), path.relative_to(places.ROOT).as_posix()))
    for place, edit in places.find(mutants, read).values():
        ast.parse(places.changed(place, edit))
        assert places.changed(place, edit) != place.text
    for row in table["rows"]:
        assert row["verdict"] in program.VERDICTS
        # A reader learns why nothing notices it.
        assert bool(row.get("reason")) >= (row["verdict"] == "equivalent")
