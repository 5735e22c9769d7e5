"""Tests of the rules of the code base that a program can check."""

import ast
import collections
import functools
import graphlib
import importlib.metadata
import io
import pathlib
import platform
import re
import tokenize

import pytest
from packaging import requirements, utils

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The packages and top-level modules of xshard, lowest first. A file imports only from
# its own package and from earlier lines, so packages on one line do not import one
# another.
ORDER = """
errors
base config_values
callbacks config hooks mesh
files logical optimizers
data learners pod samples
cli experiment methods
checkpoint supervised training
metrics
run
loop modes trained
export replay wings
bisect dryrun main new report
"""
DEPTH = {
    layer: depth
    for depth, line in enumerate(ORDER.split("\n"))
    for layer in line.split()
}
# The template's files become the user's code, which sees the package from outside.
FILES = sorted(
    p for p in (ROOT / "xshard").rglob("*.py") if p.parent.name != "template"
)
ALL_FILES = [
    p
    for d in ("benchmarks", "configs", "experiments", "launch", "tests", "xshard")
    for p in (ROOT / d).rglob("*.py")
]


def name_of(path):
    return path.relative_to(ROOT / "xshard").with_suffix("").as_posix()


def imports(path):
    """Yields the dotted names that a file imports, also under `if TYPE_CHECKING` and in
    functions.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def file_of(dotted):
    """Returns the file of xshard that defines a dotted name, as `name_of` does."""
    parts = dotted.split(".")[1:]
    for length in range(len(parts), 0, -1):
        path = "/".join(parts[:length])
        for candidate in (path, f"{path}/__init__"):
            if (ROOT / "xshard" / f"{candidate}.py").exists():
                return candidate
    return "__init__"


def imported_files(path):
    """Returns the files of xshard that a file imports, without the package's own
    `__init__`.
    """
    imported = {
        file_of(dotted) for dotted in imports(path) if dotted.split(".")[0] == "xshard"
    }
    return imported - {"__init__"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_follow_the_order(path):
    layer = name_of(path).split("/")[0]
    if layer == "__init__":
        return
    assert layer in DEPTH, f"add {layer} to ORDER"
    for dotted in imports(path):
        assert dotted.split(".")[0] not in (
            "experiments",
            "configs",
            "launch",
            "tests",
            "benchmarks",
        )
    for other in {name.split("/")[0] for name in imported_files(path)} - {layer}:
        assert DEPTH[other] < DEPTH[layer], f"{layer} imports {other}"


def test_checkpoints_know_nothing_of_what_is_trained():
    """Whoever saves a tree of arrays needs no rule, learner, step or loop."""
    reached = set()
    todo = {
        name_of(path)
        for path in (ROOT / "xshard" / "checkpoint").glob("*.py")
        if path.stem != "__main__"
    }
    while todo:
        name = todo.pop()
        reached.add(name)
        todo |= imported_files(ROOT / "xshard" / f"{name}.py") - reached
    layers = {name.split("/")[0] for name in reached}
    assert layers == {"base", "checkpoint", "errors", "files", "pod"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_wing_is_imported_only_by_the_list_of_wings(path):
    name = name_of(path)
    for other in imported_files(path):
        if other.startswith("wings/"):
            own = name.split("/")[:2] == other.split("/")[:2]
            chosen = other == "wings/installed" and name == "main"
            assert own or chosen or name == "wings/installed", other


def test_there_are_no_import_cycles():
    graphlib.TopologicalSorter(
        {name_of(path): imported_files(path) for path in FILES}
    ).prepare()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_some_imports_and_calls_are_confined_to_their_files(path):
    name, imported_names = name_of(path), set(imports(path))
    tops = {dotted.split(".")[0] for dotted in imported_names}
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
        assert not any(
            dotted in ("absl.flags", "absl.app", "argparse")
            for dotted in imported_names
        )
    # What reads data from a bucket lies below the checkpoints, which use it too.
    if not name.startswith("checkpoint/") and name != "files/inputs":
        assert "tensorstore" not in tops
    if not name.startswith(("optimizers/", "learners/")) and name != "main":
        assert "haiku" not in tops
    if name != "base/places":
        assert not set(calls(path)) & {"jax.process_index", "jax.process_count"}
    if name != "mesh":
        makers = ("Mesh", "make_mesh", "create_device_mesh")
        mesh_calls = {
            called for called in calls(path) if called.split(".")[-1] in makers
        }
        assert mesh_calls <= {"mesh_lib.make_mesh", "mesh.make_mesh"}
    # Some files use the environment. Object stores and gRPC keep settings there that
    # all programs share. The dry run can tell libtpu, the TPU's compiler, only there
    # that the machine has no TPU. The processes of a launch read their token there,
    # because other users can read command lines. And XLA's flags are recorded with the
    # run.
    if name not in (
        "dryrun/analysis",
        "files/buckets",
        "main",
        "pod/origin",
        "pod/startup",
    ):
        assert not re.search(r"\bos\.(environ|getenv)", path.read_text())


def calls(path):
    """Yields the functions that a file calls, as written there: `jax.jit`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def packed(tree):
    """Yields the lines that assign several values at once, or pack arguments.

    `a, b = x, y` is two assignments, unless it swaps. And a tuple that is built only to
    be starred in a call hides which arguments the call has.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                is_pair = isinstance(target, ast.Tuple) and isinstance(
                    node.value, ast.Tuple
                )
                if is_pair and not swaps(target, node.value):
                    yield node.lineno
        if isinstance(node, ast.FunctionDef):
            yield from tuples_that_are_only_starred(node)


def swaps(targets, values):
    names = lambda node: sorted(ast.unparse(item) for item in node.elts)
    return names(targets) == names(values)


def tuples_that_are_only_starred(function):
    lines = {}
    loads = collections.Counter()
    starred = collections.Counter()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            lines[ast.unparse(node.targets[0])] = node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            loads[node.id] += 1
        elif isinstance(node, ast.Call):
            starred.update(
                ast.unparse(argument.value)
                for argument in node.args
                if isinstance(argument, ast.Starred)
            )
    for name, line in lines.items():
        if 0 < loads[name] == starred[name]:
            yield line


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_an_assignment_is_one(path):
    lines = sorted(packed(ast.parse(path.read_text())))
    assert not lines, f"{path}: one assignment a line, arguments at the call: {lines}"


# Other files import these from what JAX does not promise to keep.
UNSTABLE_IMPORTS = {
    # Kernels can be written only with Pallas, which JAX documents as experimental.
    "experiments/lm/attention.py": "jax.experimental.pallas",
    "tests/metrics/flops_test.py": "jax.experimental.pallas",
    "tests/replay/planted.py": "jax.experimental.pallas",
    # The version of cuDNN, which JAX asks a GPU for when a program is lowered for one.
    "tests/attention_test.py": "jax._src.cudnn",
    # XLA's flags differ by the version of jaxlib, and are needed before JAX is
    # imported.
    "tests/__init__.py": "jaxlib.version",
}


@pytest.mark.parametrize(
    "path", ALL_FILES, ids=lambda path: str(path.relative_to(ROOT))
)
def test_one_folder_uses_what_jax_does_not_promise_to_keep(path):
    name = path.relative_to(ROOT).as_posix()
    if name.startswith("xshard/base/jax_internals/"):
        return
    tree = ast.walk(ast.parse(path.read_text()))
    used = {ast.unparse(node) for node in tree if isinstance(node, ast.Attribute)}
    used |= set(imports(path))
    unstable = re.compile(r"(jax\.(_src|experimental|extend|interpreters)|jaxlib)\b")
    found = {x for x in used if unstable.match(x)}
    if name in UNSTABLE_IMPORTS:
        found = {x for x in found if not x.startswith(UNSTABLE_IMPORTS[name])}
    assert not found, (
        f"{name} uses {found}: add what it needs to xshard/base/jax_internals/"
    )


def test_no_file_is_a_collection_of_leftovers():
    assert not [
        p for p in ALL_FILES if p.stem in ("utils", "util", "helpers", "common", "misc")
    ]


def test_the_lock_names_no_index_host_or_folder():
    # An index, a host or a folder would belong to the machine that wrote the lock.
    # Versions and hashes hold everywhere.
    lock = (ROOT / "requirements/lock.txt").read_text()
    assert not re.search(r"://|--(extra-)?index-url|--find-links| @ ", lock)
    assert "--hash=sha256:" in lock


def test_the_lock_has_the_extras_that_its_packages_require():
    # For an extra that is not locked, pip 23.0 tries newer versions, and refuses them
    # because they have no hash.
    lines = (ROOT / "requirements/lock.txt").read_text().splitlines()
    locked = [
        requirements.Requirement(line.removesuffix(" \\"))
        for line in lines
        if line[:1].isalpha()
    ]
    extras = {
        utils.canonicalize_name(package.name): package.extras for package in locked
    }
    for package in importlib.metadata.distributions():
        if utils.canonicalize_name(package.name) not in extras:
            continue
        for required in map(requirements.Requirement, package.requires or ()):
            if required.marker is None or required.marker.evaluate({"extra": ""}):
                assert (
                    required.extras <= extras[utils.canonicalize_name(required.name)]
                ), required


def locked_versions(name, python):
    """Returns the versions that a lock has for a version of Python, on the machines
    that TPUs' hosts are.
    """
    environment = {
        "extra": "",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }
    versions = {}
    for line in (ROOT / name).read_text().splitlines():
        if line[:1].isalpha():
            package = requirements.Requirement(line.removesuffix(" \\"))
            if package.marker is None or package.marker.evaluate(environment):
                (version,) = (specifier.version for specifier in package.specifier)
                assert package.name not in versions, f"{package.name} has two versions"
                versions[package.name] = version
    return versions


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_the_lock_of_the_dry_run_adds_libtpu_to_the_same_versions(python):
    run = locked_versions("requirements/lock.txt", python)
    dry_run = locked_versions("requirements/dryrun_lock.txt", python)
    added = {
        name: version for name, version in dry_run.items() if run.get(name) != version
    }
    assert "jax" in run and added.keys() == {"libtpu"}


def test_the_locked_libtpu_is_the_one_that_jax_requires():
    (required,) = (
        line for line in importlib.metadata.requires("jax") if line.startswith("libtpu")
    )
    python = ".".join(platform.python_version_tuple()[:2])
    version = locked_versions("requirements/dryrun_lock.txt", python)["libtpu"]
    assert requirements.Requirement(required).specifier.contains(version)


def test_no_test_file_imports_another():
    """Bazel's sandbox contains the one test file that runs and the shared files that
    are not tests.
    """
    for path in ALL_FILES:
        if path.is_relative_to(ROOT / "tests"):
            imported = [
                name for name in imports(path) if re.match(r"tests\..*_test\b", name)
            ]
            assert not imported, f"{path}: {imported}"


# How large the code base may be, since somebody has to read it.
#
# Each file counts, but for what programs write, BUILD files among it. Python counts by
# its tokens, without comments and docstrings, and a string of over 20 words by its
# words; another language by its words. A closure is what comes with files of the
# package: what they import, within functions too, or name in a string, and what is
# listed in the stub of a package whose names are lazy. Imports for types alone do not
# come with it.
#
# The commit that makes something smaller lowers its budget: where that is due, a test
# fails, and `python -m tests.architecture_test` writes it. Whoever raises one writes
# above it, in a sentence, what for.
BUDGETS = {
    "tokens of xshard": 257_300,
    "tokens of launch": 18_000,
    # Planted faults with their table, benchmarks in a form of seconds, and what the
    # doors refuse.
    "tokens of tests": 441_400,
    "tokens of benchmarks": 17_000,
    # The conversion of GPT-2 is two functions, where a table of rules was.
    "tokens of experiments": 15_900,
    "tokens of configs": 1_400,
    # What each test took is listed after each run, and kept by CI.
    "tokens of what builds and checks": 4_500,
    # A file gives values of a config with their types, in place of texts of a launcher.
    "tokens of xshard/*.py": 23_400,
    # Arrays that enter are checked by one function, and printed commands can be pasted,
    # whatever stdout can show.
    "tokens of xshard/base": 8_300,
    # The weights of others are converted here, in place of rules read from a file.
    "tokens of xshard/checkpoint": 30_400,
    "tokens of xshard/data": 10_500,
    "tokens of xshard/dryrun": 9_700,
    "tokens of xshard/export": 2_900,
    "tokens of xshard/files": 11_600,
    "tokens of xshard/learners": 18_500,
    "tokens of xshard/logical": 12_300,
    "tokens of xshard/metrics": 11_000,
    "tokens of xshard/modes": 1_600,
    "tokens of xshard/new": 1_200,
    "tokens of xshard/optimizers": 34_700,
    "tokens of xshard/pod": 26_000,
    "tokens of xshard/replay": 12_800,
    "tokens of xshard/report": 9_600,
    # A run leaves who asked for its end.
    "tokens of xshard/run": 17_200,
    "tokens of xshard/training": 10_200,
    "tokens of xshard/wings": 7_800,
    "files of the two rules": 21,
    "tokens of the two rules": 20_300,
    "files of a learner": 44,
    "tokens of a learner": 49_900,
    # A save checks its arguments and arrays by the functions that all others use. What
    # an array is stands in a file of its own, since the launcher imports no JAX.
    "files of a checkpoint": 38,
    "tokens of a checkpoint": 30_000,
    "files of the loop": 161,
    "tokens of the loop": 187_700,
    "files of a run": 195,
    "tokens of a run": 212_200,
    "floors": 12,
    "classes": 365,
    "words of docstrings and comments": 113_300,
    "words of documents": 34_400,
}
# The files that each closure begins with.
CLOSURES = {
    "the two rules": (
        "optimizers/cross_shard",
        "optimizers/loss_scale",
        "optimizers/optax",
    ),
    "a learner": ("learners/learner",),
    "a checkpoint": ("checkpoint/manager",),
    "the loop": ("loop",),
    "a run": ("main",),
}
DOCUMENTS = re.compile(r"(docs/)?[^/]+\.md|benchmarks/README\.md")
UNCOUNTED = re.compile(
    r"LICENSE|user\.bazelrc|requirements/|docs/api/|benchmarks/results/"
    r"|tests/checkpoint/written/|(.*/)?(BUILD|__pycache__)\b|.*\.(npz|png)"
)
LAYOUT = ("NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")


def counted_files():
    """Yields the files that count."""
    paths = [path for path in ROOT.iterdir() if path.is_file()]
    for top in (
        ".ci",
        ".github",
        "benchmarks",
        "configs",
        "docs",
        "experiments",
        "launch",
        "tests",
        "third_party",
        "xshard",
    ):
        paths += [path for path in (ROOT / top).rglob("*") if path.is_file()]
    for path in paths:
        if not UNCOUNTED.match(path.relative_to(ROOT).as_posix()):
            yield path


def tokens(text):
    """Yields the kind, text and start of each token of Python.

    An f-string is one, as to Python 3.11. Later versions have a token for each part.
    """
    lines = text.splitlines(keepends=True)
    begun = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            begun.append(token.start)
        elif kind == "FSTRING_END":
            row, column = begun.pop()
            if not begun:
                last, end = token.end
                whole = "".join(lines[row - 1 : last])
                whole = whole[column : len(whole) - len(lines[last - 1]) + end]
                yield "STRING", whole, (row, column)
        elif not begun:
            yield kind, token.string, token.start


@functools.cache
def size(path):
    """Returns a file's tokens, the words of its docstrings and comments, and its
    classes.
    """
    text = path.read_text()
    sizes = collections.Counter()
    if path.suffix not in (".py", ".pyi"):
        sizes["tokens"] = len(re.findall(r"\w+", text))
        return sizes
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        sizes["classes"] += isinstance(node, ast.ClassDef)
        is_documented = ast.Module | ast.ClassDef | ast.FunctionDef
        if isinstance(node, is_documented | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                sizes["prose"] += len(docstring.split())
                docstrings.add((node.body[0].lineno, node.body[0].col_offset))
    for kind, string, start in tokens(text):
        words = len(string.split())
        if kind == "COMMENT":
            sizes["prose"] += words - 1
        elif kind not in LAYOUT and start not in docstrings:
            sizes["tokens"] += words if kind == "STRING" and words > 20 else 1
    return sizes


@functools.cache
def brought(path):
    """Returns the files of the package that come with one of them."""
    names = []
    for_types = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for_types.update(ast.walk(node))
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # Relative names occur in stubs only.
            parents = path.relative_to(ROOT).parent.parts if node.level else ()
            module = ".".join([*parents, *filter(None, [node.module])])
            names += [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names += re.findall(r"^xshard(?:\.\w+)+$", node.value)
    files = set()
    for name in names:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            base = ROOT.joinpath(*parts[:length])
            candidates = [base.with_suffix(".py"), base / "__init__.py"]
            # Files within the folder have no use for its list of names, and nor has the
            # package for its own.
            if length > 1 and path.parent != base:
                candidates.append(base / "__init__.pyi")
            if parts[0] == "xshard":
                files |= {file for file in candidates if file.exists()}
    return files


def closure(starts):
    """Returns the files of the package that come with some of them."""
    found = set()
    todo = {ROOT / "xshard" / f"{name}.py" for name in starts}
    while todo:
        path = todo.pop()
        found.add(path)
        todo |= brought(path) - found
    return found


@functools.cache
def counts():
    """Returns what BUDGETS limits, by its names there."""
    counted = collections.Counter()
    for path in counted_files():
        name = path.relative_to(ROOT).as_posix()
        top, *rest = name.split("/")
        if DOCUMENTS.fullmatch(name):
            counted["words of documents"] += len(path.read_text().split())
            continue
        sizes = size(path)
        if top == "xshard":
            room = rest[0] if len(rest) > 1 else "*.py"
            counted[f"tokens of xshard/{room}"] += sizes["tokens"]
            counted["words of docstrings and comments"] += sizes["prose"]
            counted["classes"] += sizes["classes"]
        elif not rest or top in (".ci", ".github", "docs", "third_party"):
            top = "what builds and checks"
        counted[f"tokens of {top}"] += sizes["tokens"]
    for title, starts in CLOSURES.items():
        files = closure(starts)
        counted[f"files of {title}"] = len(files)
        counted[f"tokens of {title}"] = sum(size(path)["tokens"] for path in files)
    counted["floors"] = len(ORDER.strip().splitlines())
    return dict(counted)


def step(name):
    """Returns of what a budget is a multiple, so that not each commit changes it."""
    return 100 if name.startswith(("tokens", "words")) else 1


def rounded(name):
    """Returns the budget that what is counted needs."""
    return -(-counts()[name] // step(name)) * step(name)


def due():
    """Returns the names of the budgets that something has become too small for."""
    names = []
    for name, budget in BUDGETS.items():
        if counts().get(name, budget) <= budget - budget // 50 - step(name):
            names.append(name)
    return names


def test_nothing_is_larger_than_its_budget():
    problems = []
    for name, counted in counts().items():
        budget = BUDGETS.get(name, 0)
        if counted > budget:
            problems.append(
                f"{name}: {counted:,} counted, budget {budget:,}: make it smaller, or "
                f'write "{name}": {rounded(name):_}, and above it, in a sentence, why'
            )
    for name in BUDGETS.keys() - counts().keys():
        problems.append(f"{name}: nothing counted: delete its budget")
    assert not problems, "\n".join(problems)


def test_what_became_smaller_has_a_lower_budget():
    problems = []
    for name in due():
        problems.append(
            f"{name}: {counts()[name]:,} counted, budget {BUDGETS[name]:,}: in this "
            f'commit, write "{name}": {rounded(name):_}'
        )
    advice = "`python -m tests.architecture_test` writes them"
    assert not problems, "\n".join([*problems, advice])


def test_how_python_is_counted(tmp_path):
    path = tmp_path / "some.py"
    short = " ".join(["word"] * 20)
    path.write_text(
        '"""Three words here."""\n'
        f'class C:\n    x = "{short}"\n    y = "{short} word"\n'
        'z = f"{x:{y}} {f(1)}"  # Why not.\n'
    )
    # Of the class, x, y with its words, and z.
    assert size(path) == {"tokens": 3 + 3 + 2 + 21 + 3, "prose": 5, "classes": 1}


def test_what_a_closure_follows(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    loop = (
        "from typing import TYPE_CHECKING\n"
        "from xshard.lazy import Name\n"
        "if TYPE_CHECKING:\n    from xshard import typed\n"
        "def f():\n    from xshard import inner\n    return find('xshard.named')\n"
    )
    texts = {
        "loop.py": loop,
        "inner.py": "'xshard.typed is only mentioned'",
        "named.py": "",
        "typed.py": "",
        "lazy/__init__.py": "",
        "lazy/__init__.pyi": "from .deep import Name",
        "lazy/deep.py": "from xshard.lazy import name",
    }
    (tmp_path / "xshard/lazy").mkdir(parents=True)
    for name, text in texts.items():
        (tmp_path / "xshard" / name).write_text(text)
    package = tmp_path / "xshard"
    assert closure(["loop"]) == {package / x for x in texts if x != "typed.py"}
    within = ("lazy/__init__.py", "lazy/deep.py")
    assert closure(["lazy/deep"]) == {package / name for name in within}


def main():
    """Lowers the budgets that are due."""
    path = pathlib.Path(__file__)
    text = path.read_text()
    for name in due():
        line = rf'^(    "{re.escape(name)}": )[\d_]+'
        text = re.sub(line, rf"\g<1>{rounded(name):_}", text, flags=re.MULTILINE)
    path.write_text(text)


if __name__ == "__main__":
    main()
