"""What a program says of an error: one message, of what was received, the rule and the mend."""

import difflib
import itertools
import os
import re
import runpy
import sys
import traceback

from absl import flags

from xshard import notice, workdir


def fail(text: str) -> int:
    """Says an error of the user's; returns the exit code."""
    print_error(text)
    return notice.FAILED


def print_error(text: str, *, show_traceback: bool = False) -> None:
    """Prints a message, and the traceback of the current exception where --debug asks for it."""
    # From the arguments themselves: the flags may be what could not be parsed.
    debug = show_traceback or "--debug" in sys.argv or "--debug=true" in sys.argv
    if debug:
        traceback.print_exc()
    hint = "" if debug else "\n(--debug shows where)"
    print(f"error: {text}{hint}", file=sys.stderr, flush=True)


def message(e: Exception) -> str:
    """An exception's own words."""
    # JAX adds a line about its own tracebacks.
    return str(e).split("\n-----")[0] or type(e).__name__


def flag_error(e: Exception) -> str:
    """The message for what parsing the flags, or loading the config that they name, has raised."""
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
