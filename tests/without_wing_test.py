"""Tests of the copy of the repository that lacks a wing or a measure."""

import ast

import pytest

from tests import without_wing


@pytest.mark.parametrize("name", [*without_wing.WINGS, *without_wing.MEASURES])
def test_a_copy_lacks_one_thing_and_its_lines(tmp_path, name):
    listing, own = without_wing.place(name)
    left = ("xshard/loop.py", listing)
    gone = []
    for path in own:
        found = without_wing.ROOT / path
        gone += [found] if found.is_file() else found.glob("*.py")
    assert gone
    gone = [path.relative_to(without_wing.ROOT).as_posix() for path in gone]

    without_wing.copy(name, tmp_path, [*left, *gone])
    copied = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.relative_to(tmp_path).as_posix() for path in copied} == set(left)
    before = (without_wing.ROOT / listing).read_text()
    after = (tmp_path / listing).read_text()
    removed = set(before.splitlines()) - set(after.splitlines())
    assert len(before.splitlines()) - len(after.splitlines()) == 2
    assert all(name in line for line in removed)
    # Nothing names it any more.
    names = {x.id for x in ast.walk(ast.parse(after)) if isinstance(x, ast.Name)}
    assert name not in names
