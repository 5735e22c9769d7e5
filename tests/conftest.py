"""The set-up of all tests: eight devices, strict dtype promotion, Haiku's check of JAX
usage, no ignored signals.

A test that is marked `wing(name)` needs a wing or a measure beside that of its folder,
and runs if the installation has it.

A test that is marked `long` runs only with --all. Of a test that is marked `sample(n)`,
n rows run without --all, which `tests.SAMPLE_SEED` draws; of several tests that are
marked `sample(n, of="a name")`, n of all their rows. With a fraction below 1, the seed
decides for each row by itself, so that tests in different files do not all run.
"""

import collections
import gc
import hashlib
import os
import shlex
import signal
import sys

import haiku as hk
import jax
import pytest

import tests
from tests import programs
from tests.site import sitecustomize as sitecustomize
from xshard.checkpoint import format as format_lib
from xshard.learners import learner
from xshard.wings import installed

os.environ.setdefault("XLA_FLAGS", tests.XLA_FLAGS)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
hk.config.set(check_jax_usage=True)
# Processes that tests start share the byte code of the modules that they import, also
# where the caller wants none.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Tracing creates many objects. With the default thresholds, garbage collection took a
# sixth of the tests' time.
gc.set_threshold(200_000, 50, 100)
# Damage that a test causes does not heal, so the wait before a second read is left out.
format_lib.READ_AGAIN_SECONDS = (0.0, 0.0)

# A process under nohup or in a shell's background ignores some signals, and all
# processes that it starts inherit that. A test that sends such a signal would wait
# forever for the process to end. A signal with a handler is reset by exec.
for number in signal.valid_signals():
    if (
        number not in (signal.SIGPIPE, signal.SIGXFSZ)
        and signal.getsignal(number) == signal.SIG_IGN
    ):
        signal.signal(number, lambda *_: None)


def pytest_addoption(parser):
    parser.addoption(
        "--all",
        action="store_true",
        help="Run the tests marked `long`, and every row of those marked `sample`.",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "long: takes long; runs with --all")
    config.addinivalue_line(
        "markers", "wing(name): needs this wing; runs if the installation has it"
    )
    config.addinivalue_line(
        "markers",
        "sample(n, of=name): without --all, n rows run, which a seed draws; of all "
        "tests of this name in the file. With n below 1, each row runs with this "
        "probability",
    )


def pytest_collection_modifyitems(config, items):
    _leave_out_lacking_wings(config, items)
    if config.getoption("--all"):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    rows_by_test = collections.defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("sample")
        if marker is None or item in left_out:
            continue
        (count,) = marker.args
        if count >= 1:
            test = marker.kwargs.get("of", item.originalname)
            rows_by_test[item.path, item.cls, test].append(item)
        elif _place_in_the_draw(item) >= count:
            left_out.append(item)
    for rows in rows_by_test.values():
        (count,) = rows[0].get_closest_marker("sample").args
        left_out += sorted(rows, key=_place_in_the_draw)[count:]
    config.hook.pytest_deselected(items=left_out)
    left_out = set(left_out)
    items[:] = [item for item in items if item not in left_out]


def _leave_out_lacking_wings(config, items):
    names = {wing.name for wing in (*installed.WINGS, *learner.MEASURES)}
    lacking = set()
    for item in items:
        for marker in item.iter_markers("wing"):
            if not names.issuperset(marker.args):
                lacking.add(item)
    config.hook.pytest_deselected(items=list(lacking))
    items[:] = [item for item in items if item not in lacking]


def _place_in_the_draw(item):
    """Returns a number from 0 to 1 that draws a row. It is the row's own, so that a new
    row does not move the others.
    """
    digest = hashlib.sha256(f"{tests.SAMPLE_SEED} {item.name}".encode()).digest()
    return int.from_bytes(digest[:8]) / 2**64


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--all"):
        return
    terminalreporter.write_line(
        "without long tests, and with rows of tables drawn by seed "
        f"{tests.SAMPLE_SEED}; --all runs all"
    )
    for report in terminalreporter.stats.get("failed", ()):
        terminalreporter.write_line(
            f"again: XSHARD_SAMPLE_SEED={shlex.quote(tests.SAMPLE_SEED)} python -m "
            f"pytest {shlex.quote(report.nodeid)}"
        )


@pytest.fixture(scope="module")
def shared_programs():
    """Lets runs of one config share their programs, for tests of other things;
    otherwise each run traces them again.
    """
    with programs.shared():
        yield


@pytest.fixture(scope="session")
def gcs():
    """Returns a bucket of a stand-in for GCS, which all tests of a process share, since
    tensorstore reads its address once.
    """
    from tests.checkpoint import harness

    with harness.gcs() as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", url)
        yield "gs://bucket/"


@pytest.fixture(scope="module")
def s3():
    """Returns a place in a bucket of a stand-in for S3, with %s for a folder."""
    from tests.checkpoint import harness

    with harness.s3() as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "x")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        yield f"s3://bucket/%s?endpoint={url}&region=us-east-1"
