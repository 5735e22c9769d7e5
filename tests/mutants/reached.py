"""Notes in a copy of the repository which tests reach which mutant, and how each test
ends. The copy has this file at its root, where it is a module without packages, which
would import JAX, and a plugin of pytest.
"""

import inspect
import json
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_noted = set()
# Tests replace some of these.
_open, _write, _close, _environ = os.open, os.write, os.close, os.environ
# The test that began last, as pytest writes it into the environment.
_last = ["import ("]


def at(mutant):
    """Notes that the code of a mutant is about to run, and for which test.

    Processes that a test starts have its name in their environment, and threads may
    outlive it. What runs as a module is imported is there for all tests.
    """
    test = _environ.get("PYTEST_CURRENT_TEST", _last[0])
    if not sys._getframe(1).f_code.co_flags & inspect.CO_OPTIMIZED:
        test = "import ("
    test = test.rpartition(" (")[0]
    if (mutant, test) not in _noted:
        _noted.add((mutant, test))
        _append("reached", [mutant, test])


def pytest_runtest_logstart(nodeid):
    _last[0] = f"{nodeid} ("
    _append("ran", [nodeid, "started", 0])


def pytest_runtest_logreport(report):
    _append("ran", [report.nodeid, report.outcome, report.duration])


def _append(name, row):
    # The process that collects for the others notes what they report.
    if name == "ran" and "PYTEST_XDIST_WORKER" in _environ:
        return
    line = json.dumps(row) + "\n"
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    try:
        file = _open(os.path.join(_FOLDER, name), flags, 0o666)
        _write(file, line.encode())
        _close(file)
    except OSError:
        # A test has taken all descriptors; it will not get far.
        return
