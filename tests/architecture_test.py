"""The house rules that a machine can check."""

import ast
import importlib.metadata
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
# A file imports from layers below its own, or from its own package where that is one layer.
LAYERS = [
    ["errors", "torus"],
    ["disk"],
    ["jsonfile"],
    [
        "optimizers/int8",
        "optimizers/skips",
        "optimizers/trees",
        "chips",
        "data",
        "hlo",
        "mesh",
        "metrics",
        "handshake",
        "notice",
        "processes",
        "streams",
        "checkpoint/store",
        "clock",
    ],
    [
        "optimizers/axes",
        "optimizers/dependence",
        "optimizers/layouts",
        "optimizers/slots",
        "collectives",
        "dryrun/costs",
        "dryrun/summary",
        "hooks",
        "identity",
        "nonfinite",
        "signals",
        "batches",
        "event_files",
        "overview",
        "status",
        "terminal",
        "wandb_run",
        "checkpoint/budget",
        "checkpoint/retention",
        "report/curves",
        "report/rows",
        "report/style",
    ],
    [
        "optimizers/gradients",
        "optimizers/shards",
        "cli",
        "ends",
        "places",
        "dryrun/estimate",
        "writers",
        "workdir",
        "checkpoint/arrays",
        "checkpoint/format",
        "checkpoint/lock",
    ],
    ["optimizers/base", "optimizers/elementwise", "fingerprint", "reception"],
    [
        "optimizers/optax",
        "experiment",
        "meeting",
        "checkpoint/ownership",
        "checkpoint/schema",
    ],
    [
        "optimizers/cross_shard",
        "optimizers/loss_scale",
        "optimizers/moving_average",
        "contract",
        "rendezvous",
        "checkpoint/finite",
        "checkpoint/source",
        "checkpoint/writer",
    ],
    [
        "model",
        "watch",
        "checkpoint/agreement",
        "checkpoint/catalog",
        "checkpoint/orbax",
        "checkpoint/reader",
        "checkpoint/saver",
    ],
    ["state", "flops", "checkpoint/manager", "checkpoint/transfer"],
    ["step", "checkpoint/__init__", "checkpoint/__main__"],
    ["log", "preflight", "resuming"],
    ["evaluation", "saving", "report/runs"],
    ["config"],
    ["loop", "report/figures"],
    ["follow", "profiling", "report/words"],
    ["main", "dryrun/__main__", "new", "report/draw", "report/tables"],
    ["report/page"],
    ["report/__main__"],
]
DEPTH = {name: depth for depth, names in enumerate(LAYERS) for name in names}
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
    """The file of the project's own that a dotted name is in, as in DEPTH."""
    parts = dotted.split(".")[1:]
    for length in range(len(parts), 0, -1):
        path = "/".join(parts[:length])
        for candidate in (path, f"{path}/__init__"):
            if (ROOT / "xshard" / f"{candidate}.py").exists():
                return candidate
    return "__init__"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_down(path):
    name = name_of(path)
    if name in ("__init__", "dryrun/__init__", "optimizers/__init__", "report/__init__"):
        return
    assert name in DEPTH, f"give {name} its place in LAYERS"
    for dotted in imports(path):
        top = dotted.split(".")[0]
        assert top not in ("experiments", "configs", "launch", "tests", "benchmarks")
        if top == "xshard":
            assert DEPTH[inner(dotted)] < DEPTH[name], f"{name} imports {inner(dotted)}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_each_thing_has_one_place(path):
    name, used = name_of(path), set(imports(path))
    tops = {dotted.split(".")[0] for dotted in used}
    programs = (
        "main",
        "dryrun/__main__",
        "cli",
        "checkpoint/__main__",
        "new",
        "report/__main__",
    )
    if name not in programs:
        assert not any(dotted in ("absl.flags", "absl.app", "argparse") for dotted in used)
    if not name.startswith("checkpoint/"):
        assert "tensorstore" not in tops
    if not name.startswith("optimizers/") and name not in ("model", "main"):
        assert "haiku" not in tops
    if name != "mesh":
        makers = ("Mesh", "make_mesh", "create_device_mesh")
        made = {called for called in calls(path) if called.split(".")[-1] in makers}
        assert made <= {"mesh_lib.make_mesh", "mesh.make_mesh"}
    # libtpu, the TPU's compiler, is told by the environment only that there is no TPU; and what a launch's
    # processes know one another by is on no command line, which others can read.
    if name not in ("dryrun/__main__", "main"):
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
