"""Tests that docs/public.md lists what is public, and that what goes is deprecated
before.
"""

import ast
import importlib.util
import json
import pathlib
import re
import tomllib

import pytest

import xshard
from launch import __main__ as launch
from tests import toy
from xshard import checkpoint, config, loop
from xshard.files import buckets, workdir
from xshard.pod import exit_codes
from xshard.replay import __main__ as replay

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "public.md").read_text()
PROGRAMS = {
    "xshard.main": "xshard/main.py",
    "launch": "launch/__main__.py",
    **{
        f"xshard.{path.parent.name}": str(path.relative_to(ROOT))
        for path in sorted(ROOT.glob("xshard/*/__main__.py"))
    },
    "xshard.bisect": "xshard/bisect.py",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def section(title, page=PAGE):
    """Returns the text below a heading, up to the next."""
    found = re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert found, f"docs/public.md has no section {title!r}"
    return found[1]


def listed(title):
    """Returns what a section shows as code, in order."""
    return re.findall(r"`([^`\n]+)`", section(title))


def flags_of(path):
    """Returns the flags that a program defines by absl or argparse."""
    if path == PROGRAMS["launch"]:
        # It makes some of them of the engines' options.
        return {f"--{name}" for name in launch.make_flags()}
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        names = [each.value for each in node.args if isinstance(each, ast.Constant)]
        if node.func.attr.startswith("DEFINE_"):
            found.add(f"--{names[0]}")
        elif node.func.attr == "define_config":
            found |= {"--config", "--config_overrides"}
        elif node.func.attr == "add_argument" and names:
            found |= {name for name in names if str(name).startswith("--")}
    return found


def test_the_page_lists_the_names_and_no_others():
    assert listed("Names of xshard") == sorted([*xshard.__all__, "config"])
    assert listed("Names of xshard.checkpoint") == sorted(checkpoint.__all__)


def modules_imported(source):
    """Returns the modules of xshard that a source imports, or imports names of."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = (ROOT / inner.replace(".", "/")).is_dir() or (
                    ROOT / f"{inner.replace('.', '/')}.py"
                ).is_file()
                found.add(inner if is_module else node.module)
    return {name for name in found if name.startswith("xshard.")}


def test_the_page_lists_the_modules_that_the_guides_import():
    shown = listed("Modules that the guides use")
    assert shown == sorted(shown)
    for name in shown:
        assert importlib.util.find_spec(name), name
    sources = [
        block
        for page in ROOT.glob("docs/*.md")
        for block in re.findall(
            r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S
        )
    ]
    notebook = json.loads((ROOT / "docs/in_a_notebook.ipynb").read_bytes())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            sources.append("".join(cell["source"]))
    used = set().union(*map(modules_imported, sources))
    assert {"xshard.data.text", "xshard.loop"} <= used
    assert used - {"xshard.checkpoint"} <= set(shown)


def test_the_page_lists_the_keys_of_a_config_and_no_others():
    assert listed("Keys of a config") == sorted(key.name for key in config.KEYS)


def test_the_page_lists_the_options_of_urls_and_no_others():
    rows = re.findall(r"^\| `(\w+)` \|", section("Options of a bucket's URL"), re.M)
    shown = {name for _, options in buckets._SCHEMES.values() for name in options}
    assert rows == sorted(shown)
    for name in rows:
        assert buckets.parse(f"s3://bucket/folder?{name}=false")


def test_the_page_lists_the_flags_of_each_program_and_no_others():
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \|$", section("Flags"), re.M)
    shown = {program: re.findall(r"`(--\w+)`", cells) for program, cells in rows}
    assert shown == {
        program: sorted(flags_of(path)) for program, path in PROGRAMS.items()
    }


def test_the_page_lists_the_files_of_a_run_and_no_others(tmp_path):
    layout = re.findall(r"^(\.?\w\S*(?:, \S+)?)  +\S", workdir.__doc__, re.M)
    names = [name for names in layout for name in names.split(", ")]
    assert "config.json" in names and ".holder.json" in names
    assert listed("Files of a work directory") == sorted(names)
    assert loop.run(toy.get_config().lock(), str(tmp_path), "") == exit_codes.DONE
    written = {path.name + "/" * path.is_dir() for path in tmp_path.iterdir()}
    assert "config.json" in written and written <= set(names)


def test_the_page_lists_the_exit_codes_and_no_others():
    codes = {value for name, value in vars(exit_codes).items() if name.isupper()}
    shown = [int(code) for code in listed("Exit codes")]
    assert shown == sorted(codes | {replay.NOT_REPRODUCED})


def deprecations(source):
    """Returns the messages of the deprecations in a source."""
    found = []
    for node in ast.walk(ast.parse(source)):
        named = isinstance(node, ast.Name) and node.id.endswith("DeprecationWarning")
        is_call = isinstance(node, ast.Call) and any(
            isinstance(each, ast.Name) and each.id.endswith("DeprecationWarning")
            for each in [*node.args, *(keyword.value for keyword in node.keywords)]
        )
        # A class of its own would be one that this test does not know.
        assert not named or node.id == "DeprecationWarning"
        if is_call:
            found.append(ast.unparse(node.args[0]))
    return found


def overdue(message, version):
    """Returns what is wrong with the message of a deprecation, in a version."""
    found = re.search(r"deprecated since (\d+)\.(\d+).*: write \S", message)
    if not found:
        return "it does not say 'deprecated since VERSION: write ...'"
    since = (int(found[1]), int(found[2]))
    return "" if version[:2] == since else "its version is over: remove it"


def test_a_deprecation_lives_for_one_version_and_says_what_to_write():
    version = tuple(map(int, PROJECT["version"].split(".")))
    for path in sorted(ROOT.glob("xshard/**/*.py")):
        for message in deprecations(path.read_text()):
            assert not overdue(message, version), (path, message)


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        ("xshard.a is deprecated since 0.2 and goes in 0.3: write xshard.b", ""),
        ("xshard.a is deprecated since 0.1 and goes in 0.2: write xshard.b", "is over"),
        ("xshard.a is deprecated", "does not say"),
    ],
)
def test_a_deprecation_that_is_over_or_does_not_help_is_found(message, wrong):
    source = f"warnings.warn({message!r}, DeprecationWarning, stacklevel=2)"
    (found,) = deprecations(source)
    assert wrong in overdue(found, (0, 2, 5))
    assert bool(wrong) == bool(overdue(found, (0, 2, 5)))


def test_the_version_stands_once_and_the_build_files_repeat_it():
    built = re.search(r'version = "([\d.]+)"', (ROOT / "MODULE.bazel").read_text())
    assert built[1] == PROJECT["version"]
    minors = [
        entry.rpartition(" ")[2]
        for entry in PROJECT["classifiers"]
        if re.search(r":: 3\.\d+$", entry)
    ]
    # The workflow tries the versions that the package names.
    workflow = (ROOT / ".github" / "workflows" / "checks.yml").read_text()
    for minor in minors:
        assert f'"{minor}"' in workflow
