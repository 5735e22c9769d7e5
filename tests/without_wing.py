"""Proves that a wing can be deleted: `python -m tests.without_wing NAME [--all]`.

Or a measure of a learner. It copies the repository, deletes the lines of the list that
it is in, its code and its tests, and runs tests of the rest there, or with --all every
test. Tests that are marked with its name are deselected.
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable

from xshard.learners import learner, statistics
from xshard.wings import installed

ROOT = pathlib.Path(__file__).resolve().parent.parent
# What imports and checks all of the package, and runs most of the core.
FAST = (
    "tests/architecture_test.py",
    "tests/config_test.py",
    "tests/hooks_test.py",
    "tests/learners/measures_test.py",
    "tests/run/roll_backs_test.py",
    "tests/samples_test.py",
    "tests/wings/installed_test.py",
)
# The rest is smaller, and no budget is lowered for it.
LOWER = f"{FAST[0]}::test_what_became_smaller_has_a_lower_budget"
WINGS = [wing.name for wing in installed.WINGS]
# A learner reads whether statistics are estimated, and so cannot lack this measure.
MEASURES = [kind.name for kind in learner.MEASURES if kind is not statistics.Statistics]


def place(name: str) -> tuple[str, tuple[str, ...]]:
    """Returns the file that lists a wing or a measure, and what its own paths begin
    with.
    """
    if name in MEASURES:
        own = (f"xshard/learners/{name}.py", f"tests/learners/{name}_test.py")
        return "xshard/learners/learner.py", own
    own = (f"xshard/wings/{name}/", f"tests/wings/{name}/")
    return "xshard/wings/installed.py", own


def without(text: str, name: str) -> str:
    """Returns a text without the lines that import a module or list what it has."""
    lines = rf"(from xshard\.wings\.{name} import .*|    {name}(\.\w+)?,)\n"
    return re.sub(rf"^{lines}", "", text, flags=re.MULTILINE)


def tracked() -> list[str]:
    """Lists the paths of the repository's files."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return listed.stdout.splitlines()


def copy(name: str, folder: pathlib.Path, paths: Iterable[str]) -> None:
    """Copies files of the repository without a wing or a measure."""
    listing, own = place(name)
    for path in paths:
        if path.startswith(own) or not (ROOT / path).is_file():
            continue
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path)
    text = (ROOT / listing).read_text()
    (folder / listing).write_text(without(text, name))


def main() -> int:
    """Runs the tests without the wing; returns pytest's exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.without_wing", description=__doc__
    )
    parser.add_argument("name", choices=sorted([*WINGS, *MEASURES]))
    parser.add_argument("--all", action="store_true", help="run every test")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy(options.name, pathlib.Path(folder), tracked())
        tests = ["tests", "--all"] if options.all else FAST
        command = [sys.executable, "-m", "pytest", "-q", f"--deselect={LOWER}", *tests]
        return subprocess.run(command, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
