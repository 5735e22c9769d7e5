"""Proves that a wing can be deleted: `python -m tests.without_wing NAME [--all]`.

It copies the repository, deletes the wing's lines in xshard/wings/installed.py, its
folder and its tests, and runs tests of the rest there, or with --all every test. Tests
that are marked with the wing's name are deselected.
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIST = "xshard/wings/installed.py"
GUIDE = "CONTRIBUTING.md"
# What imports and checks all of the package, and runs most of the core.
FAST = (
    "tests/architecture_test.py",
    "tests/config_test.py",
    "tests/hooks_test.py",
    "tests/run/roll_backs_test.py",
    "tests/samples_test.py",
    "tests/wings/installed_test.py",
)


def without(text: str, name: str) -> str:
    """Returns a text without the lines that have a name."""
    kept = []
    for line in text.splitlines(keepends=True):
        if not re.search(rf"\b{name}\b", line):
            kept.append(line)
    return "".join(kept)


def copy(name: str, folder: pathlib.Path) -> None:
    """Copies the repository without a wing."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    gone = (f"xshard/wings/{name}/", f"tests/wings/{name}/")
    for path in listed.stdout.splitlines():
        if path.startswith(gone) or not (ROOT / path).is_file():
            continue
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path)
    text = (ROOT / LIST).read_text()
    (folder / LIST).write_text(without(text, name))
    # Its long tests are listed for whoever changes the code.
    text = (ROOT / GUIDE).read_text()
    (folder / GUIDE).write_text(without(text, f"tests/wings/{name}"))


def main() -> int:
    """Runs the tests without the wing; returns pytest's exit code."""
    wings = sorted(path.parent.name for path in ROOT.glob("xshard/wings/*/wing.py"))
    parser = argparse.ArgumentParser(
        prog="python -m tests.without_wing", description=__doc__
    )
    parser.add_argument("name", choices=wings)
    parser.add_argument("--all", action="store_true", help="run every test")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy(options.name, pathlib.Path(folder))
        tests = ["tests", "--all"] if options.all else FAST
        command = [sys.executable, "-m", "pytest", "-q", *tests]
        return subprocess.run(command, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
