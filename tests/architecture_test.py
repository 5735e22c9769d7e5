"""The house rules that a machine can check."""

import ast
import graphlib
import importlib.metadata
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
# A file imports from its own folder, and from what comes before it here: a folder, or a file of the top level.
ORDER = """
errors torus
config
files
callbacks mesh samples
logical
data
optimizers
contract
learners
experiment
supervised
state
held
stored
step
metrics
pod
cli
checkpoint
evaluation
run
loop
modes new trained
export main
dryrun replay report
bisect
"""
DEPTH = {room: depth for depth, line in enumerate(ORDER.split("\n")) for room in line.split()}
# Those of the template are a user's, who sees the package from outside.
FILES = sorted(p for p in (ROOT / "xshard").rglob("*.py") if p.parent.name != "template")
ALL_FILES = [
    p
    for d in ("benchmarks", "configs", "experiments", "launch", "tests", "xshard")
    for p in (ROOT / d).rglob("*.py")
]


def name_of(path):
    return path.relative_to(ROOT / "xshard").with_suffix("").as_posix()


def imports(path):
    """The dotted names that a file imports, those under `if TYPE_CHECKING` and in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inner(dotted):
    """The file of the project's own that a dotted name is in, as `name_of` names it."""
    parts = dotted.split(".")[1:]
    for length in range(len(parts), 0, -1):
        path = "/".join(parts[:length])
        for candidate in (path, f"{path}/__init__"):
            if (ROOT / "xshard" / f"{candidate}.py").exists():
                return candidate
    return "__init__"


def own_imports(path):
    """The project's own files that a file imports; not the package, which a user imports."""
    found = {inner(dotted) for dotted in imports(path) if dotted.split(".")[0] == "xshard"}
    return found - {"__init__"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_down(path):
    room = name_of(path).split("/")[0]
    if room == "__init__":
        return
    assert room in DEPTH, f"give {room} its place in ORDER"
    for dotted in imports(path):
        assert dotted.split(".")[0] not in (
            "experiments",
            "configs",
            "launch",
            "tests",
            "benchmarks",
        )
    for other in {name.split("/")[0] for name in own_imports(path)} - {room}:
        assert DEPTH[other] < DEPTH[room], f"{room} imports {other}"


def test_imports_go_round_nowhere():
    graphlib.TopologicalSorter({name_of(path): own_imports(path) for path in FILES}).prepare()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_each_thing_has_one_place(path):
    name, used = name_of(path), set(imports(path))
    tops = {dotted.split(".")[0] for dotted in used}
    programs = (
        "main",
        "dryrun/__main__",
        "cli",
        "checkpoint/__main__",
        "new/__main__",
        "report/__main__",
        "export/__main__",
        "replay/__main__",
        "bisect",
    )
    if name not in programs:
        assert not any(dotted in ("absl.flags", "absl.app", "argparse") for dotted in used)
    if not name.startswith("checkpoint/"):
        assert "tensorstore" not in tops
    if not name.startswith("optimizers/") and name not in ("learners/learner", "main"):
        assert "haiku" not in tops
    if name != "mesh":
        makers = ("Mesh", "make_mesh", "create_device_mesh")
        made = {called for called in calls(path) if called.split(".")[-1] in makers}
        assert made <= {"mesh_lib.make_mesh", "mesh.make_mesh"}
    # libtpu, the TPU's compiler, is told by the environment only that there is no TPU; what a launch's
    # processes know one another by is on no command line, which others can read; and XLA's flags are recorded.
    if name not in ("dryrun/__main__", "main", "pod/origin"):
        assert not re.search(r"\bos\.(environ|getenv)", path.read_text())


def calls(path):
    """What a file calls, as it is written there: `jax.jit`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_sizes(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 350
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            docstring = ast.get_docstring(node) or ""
            length = node.end_lineno - node.lineno + 1 - len(docstring.splitlines())
            assert length <= 45, f"{path}: {node.name} has {length} lines"


def test_there_is_no_attic():
    assert not [p for p in ALL_FILES if p.stem in ("utils", "util", "helpers", "common", "misc")]


def test_the_lock_is_anyones():
    # An index, a host or a folder is the machine's where the lock was made; hashes and versions are not.
    lock = (ROOT / "requirements_lock.txt").read_text()
    assert not re.search(r"://|--(extra-)?index-url|--find-links| @ ", lock)
    assert "--hash=sha256:" in lock


def test_the_compiler_is_the_one_that_jax_is_made_for():
    (named,) = (line for line in importlib.metadata.requires("jax") if line.startswith("libtpu"))
    wanted = named.split(";")[0].strip()
    assert (ROOT / "requirements_dryrun.in").read_text().startswith(f"{wanted} ;")
    locked = (ROOT / "requirements_dryrun_lock.txt").read_text()
    assert locked.startswith(wanted.removesuffix("*"))
    assert "linux" in locked.splitlines()[0] and locked.count("--hash=sha256:") >= 3


def test_tests_share_by_files_that_are_no_tests():
    """Bazel lays out the file of one test, and those that are none."""
    for path in ALL_FILES:
        if path.is_relative_to(ROOT / "tests"):
            found = [name for name in imports(path) if re.match(r"tests\..*_test\b", name)]
            assert not found, f"{path}: {found}"
