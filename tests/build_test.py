"""Tests that the BUILD files have the dependencies that the files' imports need, and no
others. This program writes them: `python -m tests.build_test`.
"""

import ast
import functools
import graphlib
import importlib.metadata
import pathlib
import re
import sys
import types

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOPS = ("benchmarks", "configs", "experiments", "launch", "tests", "xshard")
# What each module has anyway: the package that it is in, and each test its set-up.
IMPLIED = re.compile(r"//.*:__init__|//tests:conftest|//experiments:experiments")
# Programs, modules and files that a test or a config names in a text.
NAMED = re.compile(rf"\b(?:{'|'.join(TOPS)})(?:[./]\w+)+")


class Target:
    """A library or a test of a BUILD file.

    Attributes:
      label: its label, such as '//xshard/run:run'.
      build: the folder of its BUILD file.
      sources: its files.
      all_deps: the labels of its dependencies.
      deps: those of them that its BUILD file lists.
      is_external: whether it reads the whole source tree.
    """

    def __init__(self, build, name, srcs, deps, data, tags):
        self.label = f"//{build.relative_to(ROOT).as_posix()}:{name}"
        self.name = name
        self.build = build
        # A list of public names stands for what it imports.
        listed = srcs or [path for path in data if path.endswith(".pyi")]
        self.sources = [build / path for path in listed if not path.startswith("//")]
        self.all_deps = {full(label, build) for label in deps}
        self.deps = {label for label in self.all_deps if not IMPLIED.fullmatch(label)}
        self.is_external = "external" in tags


def full(label, build):
    """Returns a label with its package and its name."""
    if label.startswith(":"):
        return f"//{build.relative_to(ROOT).as_posix()}{label}"
    if ":" in label or label.startswith("@"):
        return label
    return f"{label}:{label.rpartition('/')[2]}"


def short(label, build):
    """Returns a label as a BUILD file has it."""
    package, _, name = label.partition(":")
    if package == f"//{build.relative_to(ROOT).as_posix()}":
        return f":{name}"
    return package if package.endswith(f"/{name}") else label


def read(build):
    """Yields the targets of a folder's BUILD file, which Python can run."""
    targets = []

    def rule(name, srcs=(), deps=(), data=(), tags=(), **_):
        targets.append(Target(build, name, srcs, deps, data, tags))

    def glob(include, exclude=()):
        found = {path for pattern in include for path in build.glob(pattern)}
        found -= {path for pattern in exclude for path in build.glob(pattern)}
        return sorted(path.relative_to(build).as_posix() for path in found)

    names = {
        "glob": glob,
        "native": types.SimpleNamespace(
            glob=glob, package_name=lambda: build.relative_to(ROOT).as_posix()
        ),
        "py_library": rule,
        "py_test": rule,
    }
    for ignored in ("exports_files", "load", "package", "py_binary", "test_suite"):
        names[ignored] = lambda *_, **__: None
    exec((ROOT / "third_party/bazel/defs.bzl").read_text(), names)
    exec((build / "BUILD").read_text(), names)
    yield from targets


def read_all():
    """Returns the targets of all BUILD files by label."""
    targets = {}
    for top in TOPS:
        for path in sorted((ROOT / top).rglob("BUILD")):
            for target in read(path.parent):
                targets[target.label] = target
    return targets


def module_file(parts):
    """Returns the file of a module or package; None if it is neither."""
    path = ROOT.joinpath(*parts)
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.exists():
            return candidate
    return None


def imported(path):
    """Yields the full names that a file imports, also within functions; for a test, a
    benchmark or a config also what it names in texts.
    """
    tree = ast.parse(path.read_text())
    docstrings = set()
    # The server of forks imports early what is there, and does without the rest.
    has_texts = path.relative_to(ROOT).parts[0] not in ("launch", "xshard")
    has_texts &= path != ROOT / "tests/forks.py"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            # Relative names occur in the lists of names only.
            parents = path.relative_to(ROOT).parent.parts if node.level else ()
            module = ".".join([*parents, *filter(None, [node.module])])
            for alias in node.names:
                yield f"{module}.{alias.name}"
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            if ast.get_docstring(node):
                docstrings.add(node.body[0].value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node in docstrings or not has_texts:
                continue
            for found in NAMED.findall(node.value):
                # A program that runs tests is no dependency of theirs.
                if not found.endswith("_test.py"):
                    yield found.removesuffix(".py").replace("/", ".")
            # As the name of a program.
            if node.value == "launch":
                yield "launch.__main__"


@functools.cache
def packages():
    """Returns the labels of locked packages by the names of their modules."""
    required = set()
    for name in ("run.in", "dev.in"):
        for line in (ROOT / "requirements" / name).read_text().split():
            required.add(re.match("[A-Za-z0-9-]+", line)[0].lower().replace("-", "_"))
    labels = {}
    for module, names in importlib.metadata.packages_distributions().items():
        for name in names:
            normal = re.sub("[-.]", "_", name.lower())
            if normal in required:
                labels[module] = f"@pypi//{normal}"
    return labels


def owners(targets):
    """Returns the label of the library that has a file, by file."""
    return {
        path: target.label
        for target in targets.values()
        for path in target.sources
        if path.suffix == ".py"
    }


def needs(path, owned):
    """Returns the labels of what a file imports."""
    labels = set()
    for name in imported(path):
        parts = name.split(".")
        if parts[0] not in TOPS:
            labels |= {packages()[parts[0]]} if parts[0] in packages() else set()
            continue
        # The end of a name may be an attribute's.
        while module_file(parts) is None:
            parts.pop()
        if parts == ["xshard"]:
            labels.add("//xshard:xshard")
        elif module_file(parts) in owned:
            labels.add(owned[module_file(parts)])
    return {label for label in labels if not IMPLIED.fullmatch(label)}


def wanted(target, targets, owned):
    """Returns the dependencies that a target must have, and what imports each."""
    labels = {}
    # What packages need without an import, as a server of a test.
    for label in target.deps:
        if label.startswith("@pypi"):
            labels[label] = ""
    if target.is_external:
        for label, other in targets.items():
            modules = f"{label.partition(':')[0]}:modules"
            if IMPLIED.fullmatch(label) or is_test(other):
                continue
            # A folder's libraries all at once, where it has several.
            if label == modules or modules not in targets:
                labels[label] = "what reads the source tree"
        return labels
    if not target.sources:
        # A name for others.
        return dict.fromkeys(target.deps, "")
    for path in target.sources:
        for label in needs(path, owned):
            labels.setdefault(label, path.relative_to(ROOT))
    labels.pop(target.label, None)
    return labels


def is_test(target):
    """Returns whether pytest runs the target."""
    return any(path.name.endswith("_test.py") for path in target.sources)


def closure(target, targets):
    """Returns the labels of all that a target depends on, itself included."""
    found, todo = set(), [target.label]
    while todo:
        label = todo.pop()
        if label not in found and label in targets:
            found.add(label)
            todo += targets[label].all_deps
    return found


def test_each_target_has_the_dependencies_that_its_files_import():
    """If this fails, `python -m tests.build_test` writes the BUILD files anew."""
    targets = read_all()
    owned = owners(targets)
    problems = []
    for target in targets.values():
        labels = wanted(target, targets, owned)
        where = f"{target.build.relative_to(ROOT)}/BUILD, {target.name!r}"
        for label in labels.keys() - target.deps:
            line = short(label, target.build)
            problems.append(f'{where}: add "{line}", for {labels[label]}')
        for label in target.deps - labels.keys():
            problems.append(f'{where}: remove "{short(label, target.build)}"')
    assert not problems, "\n".join(problems)


def test_each_file_has_a_target():
    """If this fails, a folder has no BUILD file: copy xshard/modes/BUILD, or
    tests/modes/BUILD for tests, change its names, and run `python -m tests.build_test`.
    """
    owned = owners(read_all())
    files = {path for top in TOPS for path in (ROOT / top).rglob("*.py")}
    left = {path for path in files - owned.keys() if "template" not in path.parts}
    assert left == set()


def test_no_targets_depend_on_each_other():
    targets = read_all()
    graph = {label: target.all_deps for label, target in targets.items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_a_rule_is_tested_without_the_report():
    targets = read_all()
    tested = [name for name in targets if name.startswith("//tests/optimizers:")]
    assert "//tests/optimizers:rules_test" in tested
    for label in tested:
        assert "//xshard/report:report" not in closure(targets[label], targets)


def literal(labels, build, indent):
    """Returns the text of a list of labels."""
    lines = sorted((short(label, build) for label in labels), key=order)
    if len(lines) < 2:
        return f"[{''.join(map(quoted, lines))}]"
    text = "".join(f"{indent}    {quoted(line)},\n" for line in lines)
    return f"[\n{text}{indent}]"


def order(label):
    """Returns the key by which buildifier sorts labels."""
    rank = 1
    if label.startswith(":"):
        rank = 0
    elif label.startswith("@"):
        rank = 2
    return rank, label.replace(":", "!")


def quoted(text):
    return f'"{text}"'


def write(build, targets, owned):
    """Writes the dependencies of the targets of a folder's BUILD file."""
    path = build / "BUILD"
    text = path.read_text()
    own = {target.name: target for target in targets.values() if target.build == build}

    def of(name, indent):
        return literal(wanted(own[name], targets, owned), build, indent)

    edits = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "DEPS":
            lines = ["{\n"]
            for name in sorted(own):
                labels = of(name, "    ")
                if own[name].sources and labels != "[]":
                    lines.append(f'    "{name}": {labels},\n')
            edits.append((node.value, "".join([*lines, "}"])))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            arguments = {word.arg: word.value for word in node.value.keywords}
            if isinstance(arguments.get("deps"), ast.List):
                is_experiment = node.value.func.id == "experiment"
                name = "experiment" if is_experiment else arguments["name"].value
                edits.append((arguments["deps"], of(name, "    ")))
    lines = text.splitlines(keepends=True)
    for node, new in reversed(edits):
        begin, end = node.lineno - 1, node.end_lineno
        before = lines[begin][: node.col_offset]
        after = lines[end - 1][node.end_col_offset :]
        lines[begin:end] = [before + new + after]
    path.write_text("".join(lines))


def main():
    """Writes the dependencies in all BUILD files."""
    targets = read_all()
    owned = owners(targets)
    for build in {target.build for target in targets.values()}:
        write(build, targets, owned)


if __name__ == "__main__":
    sys.exit(main())
