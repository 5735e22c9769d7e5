"""The program: `python -m xshard.dryrun --config=configs/digits.py --topology=v5e:16x16
[--slices=4]`.

Compiles an experiment's training step for TPUs that this machine does not have, with
the TPU compiler. It reports a chip's memory, communication and computation, and a lower
bound on a step's time. The step is the one of `xshard.main`; nothing runs. See
docs/dry_run.md.

Exit codes: 0 it fits; 1 it does not fit, or cannot be compiled; 130 interrupted.
"""

import concurrent.futures
import os
import sys
from collections.abc import Sequence

from absl import flags, logging

from xshard import cli, errors
from xshard.dryrun import analysis, summary
from xshard.files import jsonfile
from xshard.pod import exit_codes

# A separate set of flags, since `xshard.main` has flags with the same names.
_FLAGS = flags.FlagValues()
_CONFIG = cli.define_config(_FLAGS)
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "The chip and slice shape, such as v5e:16x16, v5p:4x4x8.",
    flag_values=_FLAGS,
)
_SLICES = flags.DEFINE_integer(
    "slices",
    None,
    "The number of slices; overrides config.slices.",
    1,
    flag_values=_FLAGS,
)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object.", flag_values=_FLAGS)
_DEBUG = flags.DEFINE_bool(
    "debug", False, "Print the traceback of an error.", flag_values=_FLAGS
)


def main(argv: Sequence[str]) -> int:
    """Runs a dry run according to the flags; returns the exit code."""
    if argv[1:]:
        raise errors.UserError(f"{' '.join(argv[1:])}: arguments begin with '--'.")
    config = _CONFIG.value
    topology = _TOPOLOGY.value
    if config is None or not topology:
        raise errors.UserError(
            "--config and --topology are needed, as in --config=configs/digits.py "
            "--topology=v5e:16x16."
        )
    if _SLICES.value is not None:
        with config.unlocked():
            config.update(slices=_SLICES.value)
    show = jsonfile.dumps if _JSON.value else summary.show
    # The compiler ignores signals, so it runs in a thread and this one can be
    # interrupted.
    pool = concurrent.futures.ThreadPoolExecutor(1)
    work = pool.submit(analysis.dry_run, config, topology)
    try:
        print(show(work.result()))
    except analysis.IncompleteError as e:
        print(show(e.result))
        raise
    return exit_codes.DONE


def run() -> int:
    """Parses the flags and runs; a UserError prints one message."""
    logging.set_verbosity(logging.WARNING)
    code = cli.run(_run, has_debug_flag=True)
    if code == exit_codes.INTERRUPTED:
        # The compiler is still running in its thread. Exit without waiting for it.
        os._exit(code)
    return code


def _run() -> int:
    if "--help" in sys.argv[1:]:
        print(f"{__doc__}\n{_FLAGS.module_help(sys.modules[__name__])}")
        return exit_codes.DONE
    return main(cli.parse(_FLAGS))


if __name__ == "__main__":
    sys.exit(run())
