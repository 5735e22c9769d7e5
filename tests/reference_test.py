"""Tests that every public name has a docstring that fits it, and that the reference is
built from these.
"""

import ast
import importlib.util
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import xshard
from tests.checkpoint import harness

ROOT = pathlib.Path(__file__).resolve().parent.parent
SPEC = importlib.util.spec_from_file_location(
    "reference", ROOT / "docs" / "reference.py"
)
reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reference)
MODULES = reference.modules()


def source(module):
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def public(node, prefix):
    """Yields `(name, node)` for the public classes, functions, methods and properties
    below a node, and `__init__`.
    """
    for child in node.body:
        if not isinstance(child, ast.ClassDef | ast.FunctionDef):
            continue
        if child.name.startswith("_") and child.name != "__init__":
            continue
        yield f"{prefix}.{child.name}", child
        if isinstance(child, ast.ClassDef):
            yield from public(child, f"{prefix}.{child.name}")


def section(docstring, title):
    """Returns the names that a section of a docstring describes; None if there is no
    such section.
    """
    lines = inspect.cleandoc(docstring).splitlines()
    if f"{title}:" not in lines:
        return None
    names = []
    for line in lines[lines.index(f"{title}:") + 1 :]:
        if line and not line.startswith(" "):
            break
        found = re.match(r"  \*{0,2}(\w+): ", line)
        names += [found[1]] if found else []
    return names


def arguments(function):
    args = function.args
    parameters = [
        *args.posonlyargs,
        *args.args,
        args.vararg,
        *args.kwonlyargs,
        args.kwarg,
    ]
    return [arg.arg for arg in parameters if arg and arg.arg not in ("self", "cls")]


def problems(module):
    tree = ast.parse(source(module).read_text())
    if not ast.get_docstring(tree):
        yield f"{module} has no docstring"
    for name, node in public(tree, module):
        docstring = ast.get_docstring(node)
        if not docstring:
            # If a constructor's arguments need no explanation, the docstring of the
            # class is enough.
            if node.name != "__init__":
                yield f"{name} has no docstring"
            continue
        if isinstance(node, ast.ClassDef):
            described = section(docstring, "Attributes") or []
            used = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
            used |= {
                name.attr for name in ast.walk(node) if isinstance(name, ast.Attribute)
            }
            yield from (
                f"{name}: no attribute {word}" for word in described if word not in used
            )
            continue
        described = section(docstring, "Args")
        if described is not None and described != arguments(node):
            yield f"{name}: describes {described} of {arguments(node)}"


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_documented(module):
    assert not list(problems(module))


def test_every_exported_name_is_documented():
    assert len(xshard.__all__) <= 38
    for name in xshard.__all__:
        exported = getattr(xshard, name)
        assert inspect.getdoc(exported), name
        for member, value in inspect.getmembers(exported, inspect.isfunction):
            assert member.startswith("_") or inspect.getdoc(value), f"{name}.{member}"


def test_the_reference_has_every_module_and_exported_name(tmp_path):
    # In another process, because the programs of the package define flags that launch
    # defines too.
    command = [sys.executable, str(ROOT / "docs" / "reference.py"), str(tmp_path)]
    # In an empty folder, because pdoc warns of a folder that has the package's name.
    subprocess.run(command, check=True, env=harness.environment(), cwd=tmp_path)
    index = (tmp_path / "index.html").read_text()
    for module in MODULES:
        page = f"{module.replace('.', '/')}.html"
        assert page in index and (tmp_path / page).exists()
    exported = (tmp_path / "xshard.html").read_text()
    for name in xshard.__all__:
        assert f'id="{name}"' in exported
    assert (
        "Scales the loss that" in exported and "Source: <code>tf.compat.v1" in exported
    )
