"""The program: `python -m xshard.main --config=configs/digits.py --workdir=runs/digits`.

Exit codes: 0 done; 42 stopped on request with the state saved, run the same command again to go on;
1 failed.
"""

import difflib
import itertools
import os
import re
import runpy
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import haiku as hk
import jax
from absl import flags, logging
from ml_collections import config_flags

from xshard import checkpoint, loop, workdir

FAILED, INTERRUPTED = 1, 130

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "The run's config file; --config.key=value changes a value.", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "The run's directory: the same one again resumes.")
_INIT_FROM = flags.DEFINE_string(
    "init_from", None, "A new run begins with parameters of this checkpoint: DIR or DIR@STEP."
)
_INIT_SELECT = flags.DEFINE_string(
    "init_select", checkpoint.PARAMS, "What it takes: a regular expression of paths."
)
_INIT_GROUP = flags.DEFINE_integer("init_group", 0, "Of which group, if it has several.", 0)
_DEBUG = flags.DEFINE_bool("debug", False, "Show the traceback of an error.")
_CPU_DEVICES = flags.DEFINE_integer(
    "cpu_devices", 0, "The virtual devices that the CPU is split into; 0: as JAX has it.", 0
)


def main(argv: Sequence[str], config: Any) -> int:
    """Runs a config as the flags say; returns the exit code."""
    if argv[1:]:
        raise ValueError(f"{' '.join(argv[1:])}: arguments begin with '--'.")
    if config is None or _WORKDIR.value is None:
        raise ValueError(
            "--config and --workdir are needed, as in --config=configs/digits.py --workdir=runs/digits."
        )
    if not _WORKDIR.value:
        raise ValueError("--workdir= is empty; give a directory (--workdir=. for this one).")
    if _CPU_DEVICES.value:
        jax.config.update("jax_num_cpu_devices", _CPU_DEVICES.value)
    # Haiku then refuses what would leak tracers into its state.
    hk.config.set(check_jax_usage=True)
    init = None
    if _INIT_FROM.value is not None:
        init = checkpoint.Source(_INIT_FROM.value, _INIT_SELECT.value, _INIT_GROUP.value)
    return loop.run(config, _WORKDIR.value, _command(), init)


def run() -> int:
    """Parses the flags and runs; an error of the user's becomes one message."""
    logging.set_verbosity(logging.WARNING)
    # From where it is started configs may import one another, and experiments are found.
    sys.path.insert(0, os.getcwd())
    if "--help" in sys.argv[1:]:
        print(f"{__doc__}\n{flags.FLAGS.module_help(sys.modules[__name__])}")
        return loop.DONE
    try:
        argv = flags.FLAGS(sys.argv)
        config = _CONFIG.value
        # A file that is not there shows only when the config is used.
        _ = config and config.is_locked
    except Exception as e:
        return _fail(_flag_error(e))
    try:
        return main(argv, config)
    except (ValueError, OSError) as e:
        return _fail(str(e))
    except KeyboardInterrupt:
        print("interrupted; what was saved before is in the work directory", file=sys.stderr)
        return INTERRUPTED


def _fail(message: str) -> int:
    # From the arguments themselves: the flags may be what could not be parsed.
    debug = "--debug" in sys.argv or "--debug=true" in sys.argv
    if debug:
        traceback.print_exc()
    hint = "" if debug else "\n(--debug shows where)"
    # JAX adds a line about its own tracebacks.
    print(f"error: {message.split(chr(10) + '-----')[0]}{hint}", file=sys.stderr)
    return FAILED


def _flag_error(e: Exception) -> str:
    path = _config_path()
    if isinstance(e, AttributeError | KeyError):
        return _unknown_key(path) or f"--config={path} raised {type(e).__name__}: {e}."
    if isinstance(e, flags.Error):
        return (
            f"{e}. --help lists the flags."
            if isinstance(e, flags.UnrecognizedFlagError)
            else f"{e}."
        )
    if isinstance(e, OSError) and not os.path.isfile(path):
        return f"--config={path}: there is no such file (seen from {os.getcwd()})."
    return f"--config={path} raised {type(e).__name__}: {e}."


def _config_path() -> str:
    """The config file, from the arguments themselves: --config=PATH or --config PATH."""
    path = ""
    for argument, following in itertools.pairwise([*sys.argv[1:], ""]):
        name, equals, value = argument.partition("=")
        if name == "--config":
            path = value if equals else following
    return path


def _unknown_key(path: str) -> str | None:
    """The message for an override of a key that the config does not have."""
    try:
        keys = list(workdir.flatten(workdir.plain(runpy.run_path(path)["get_config"]())))
    except Exception:
        return None
    for arg in sys.argv[1:]:
        match = re.match(r"--config\.([^=]+)", arg)
        if match and not any(key == match[1] or key.startswith(f"{match[1]}.") for key in keys):
            near = difflib.get_close_matches(match[1], keys, cutoff=0.4)
            meant = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(keys)}."
            return f"--config.{match[1]}: {path} has no such key; {meant}"
    return None


def _command() -> str:
    python = sys.executable
    if python.startswith(f"{os.getcwd()}/"):
        python = os.path.relpath(python)
    return shlex.join([python, "-m", "xshard.main", *sys.argv[1:]])


def _exit(code: int) -> NoReturn:
    if code == INTERRUPTED:
        # Who asks twice does not want to wait for a save that is under way.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    _exit(run())
