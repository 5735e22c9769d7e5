"""Copies of the repository in which the tests run: one that notes which tests reach
which mutant, and others that have one mutant each.
"""

import ast
import collections
import json
import shutil
import subprocess
import sys
import time

from tests.mutants import places

# What runs before the first test.
IMPORT = "import"
# Ends what a test started with it. The shell reaps processes that lost their parent.
_ALONE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
_SHELL = ["bash", "-c", '"$@"; exit $?', "bash"]
# These share Slurm's and MPI's daemons, of which a machine has one each.
_LEFT_OUT = ("tests/launch/cluster_test.py", "tests/launch/nodes_test.py")
# How many seconds pytest may take beside the tests, and by how much these may be slower
# than before, until they count as some that do not end.
_SECONDS_OF_START = 180
_SLOWER = 5


class Copy:
    """A copy of the repository.

    Attributes:
      folder: where it is.
    """

    def __init__(self, folder):
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        ignored = shutil.ignore_patterns(".git", ".venv", "bazel-*", "__pycache__")
        shutil.copytree(places.ROOT, folder, symlinks=True, ignore=ignored)
        shutil.copy2(folder / "tests/mutants/reached.py", folder)

    def pytest(self, arguments, timeout=None):
        """Runs pytest; returns the test that failed first, or did not end. Empty: none
        did.
        """
        (self.folder / "ran").unlink(missing_ok=True)
        files = f"--basetemp={self.folder}_files"
        program = [sys.executable, "-m", "pytest", "-q", "-p", "reached", files]
        with open(f"{self.folder}.log", "ab") as log:
            try:
                ended = subprocess.run(
                    [*_ALONE, *_SHELL, *program, *arguments],
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    timeout=timeout,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return f"{self._last()} (did not end)"
        return self._last() if ended.returncode else ""

    def attempt(self, path, text, tests, seconds):
        """Runs tests, which take some seconds otherwise, with another text of a file;
        returns the one that fails, also by itself, if any does, and after how many
        seconds.
        """
        file = self.folder / path
        kept = file.read_bytes()
        file.write_bytes(text)
        limit = _SECONDS_OF_START + _SLOWER * seconds
        begin = time.monotonic()
        try:
            test = self.pytest(["-x", *tests], limit)
            while test in tests and not self.pytest([test], limit):
                # Load made it fail, and the others have not run.
                tests = tests[tests.index(test) + 1 :]
                test = self.pytest(["-x", *tests], limit) if tests else ""
        finally:
            file.write_bytes(kept)
        return test, time.monotonic() - begin

    def _last(self):
        last = IMPORT
        for test, outcome, _ in _rows(self.folder / "ran"):
            last = test
            if outcome == "failed":
                break
        return last


def _rows(path):
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


class Probe:
    """What a run of all tests noted, with a note at the place of each mutant.

    Attributes:
      durations: the seconds of each test that passed.
      reaching: the tests that reach each mutant, by its number.
    """

    def __init__(self, folder):
        self.durations = collections.Counter()
        self.reaching = collections.defaultdict(set)
        others = set()
        for test, outcome, seconds in _rows(folder / "ran"):
            self.durations[test] += seconds
            if outcome in ("failed", "skipped"):
                others.add(test)
        for test in others:
            del self.durations[test]
        for number, test in _rows(folder / "reached"):
            self.reaching[number].add(test)

    def choose(self, number, path, seconds):
        """Returns the tests of a mutant, the likeliest first, as far as they fit into
        the seconds, and how many there are.
        """
        reaching = self.reaching[number]
        tests = self.durations.keys()
        if IMPORT not in reaching:
            tests = tests & reaching
        mirror = path.replace("xshard/", "tests/", 1).replace(".py", "_test.py")
        room = f"tests/{places.room_of(path)}/"

        def rank(test):
            nearness = test.startswith(room) + 2 * test.startswith(mirror)
            return -nearness, test not in reaching, self.durations[test]

        chosen = []
        for test in sorted(tests, key=rank):
            seconds -= self.durations[test]
            if chosen and seconds < 0:
                break
            chosen.append(test)
        return chosen, len(tests)


def probe(folder, mutants):
    """Runs all tests in a copy with a note at the place of each mutant."""
    copy = Copy(folder)
    notes = collections.defaultdict(list)
    found = places.find(mutants, places.sources())
    for number, mutant in enumerate(mutants):
        if mutant in found:
            source, edit = found[mutant]
            notes[source].append((_line_before(source, edit), number))
    for source, of_file in notes.items():
        text = source.text.splitlines(keepends=True)
        for line, number in sorted(of_file, reverse=True):
            indent = text[line][: -len(text[line].lstrip())]
            text.insert(line, b"%s__import__('reached').at(%d)\n" % (indent, number))
        (folder / source.path).write_bytes(b"".join(text))
    left_out = [f"--ignore={name}" for name in _LEFT_OUT]
    copy.pytest(["-n", "2", "--dist=loadfile", "tests", *left_out])


def _line_before(source, edit):
    """Returns the index of the line before which a note can stand: that of the
    innermost statement that has the beginning of an edit.
    """
    begin, _, _ = edit
    line = 0
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.stmt) or source.end(node) <= begin:
            continue
        offset = source.begin(node)
        if offset <= begin and not source.text[offset:].startswith(b"elif "):
            decorated = getattr(node, "decorator_list", [])
            line = max(line, min(x.lineno for x in [*decorated, node]))
    return line - 1
