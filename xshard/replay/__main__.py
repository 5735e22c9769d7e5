"""Repeats a step of a run, and finds its first value that is not finite: `python -m
xshard.replay runs/digits --step=41287`.

It starts from the newest checkpoint before the step, or from the run's first state,
repeats the steps up to it, and compares their metrics with the run's rows, bit for bit.
Without --step it selects the first step that was not finite or was skipped. The run is
only read, and may still be training. With --config.key=value it repeats the steps with
this value instead of the run's: is the step finite with --config.precision=float32, or
with another loss scale?

With --verify_resume=N, and the flags of `python -m xshard.main` instead of a run, it
checks that a run of N steps that is killed and resumed ends with the same bits as an
undisturbed run: see `xshard.replay.verify`.

Exit codes: 0 reproduced, as far as there are rows; 4 not reproduced, or not the same
bits; 1 failed.
"""

import argparse
import re
import sys
from collections.abc import Sequence

from xshard import cli, errors
from xshard.base import flag_words
from xshard.files import jsonfile, workdir
from xshard.pod import exit_codes, origin

NOT_REPRODUCED = 4


def _parser() -> argparse.ArgumentParser:
    # Abbreviations are off, since a flag of xshard.main may begin like one of these.
    parser = cli.parser("replay", __doc__, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run's work directory")
    parser.add_argument("--step", type=int, help="the step to analyze")
    parser.add_argument(
        "--cpu_devices",
        type=int,
        default=0,
        help="the number of virtual devices to split the CPU into; by default as many "
        "as the run had",
    )
    parser.add_argument(
        "--verify_resume",
        type=int,
        metavar="N",
        help="check that a run of N steps ends with the same bits when interrupted; "
        "add the flags of xshard.main",
    )
    return parser


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options, and the flags of the config; with --verify_resume, those of
    `xshard.main`. It exits with 2 if the options are invalid.
    """
    parser = _parser()
    options, unknown = parser.parse_known_args(argv)
    if options.verify_resume is not None:
        # What this parser does not know, and --cpu_devices, is for the runs.
        return options, flag_words.without_flags(argv, ["verify_resume"])
    others = [word for word in unknown if not word.startswith("--config.")]
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if options.run is None:
        parser.error("give a RUN")
    return options, unknown


@cli.program
def main(argv: Sequence[str]) -> int:
    """Replays or verifies according to the arguments; returns the exit code."""
    options, flags = parse(argv)
    if options.cpu_devices < 0:
        raise errors.UserError(
            f"--cpu_devices={options.cpu_devices} must be at least 1."
        )
    if options.verify_resume is not None:
        is_reproduced = _verify(options, flags)
    else:
        is_reproduced = _replay(options, flags)
    return exit_codes.DONE if is_reproduced else NOT_REPRODUCED


def _verify(options: argparse.Namespace, flags: Sequence[str]) -> bool:
    origin.set_up_backends({}, options.cpu_devices)
    # Imported here, since its imports initialize the devices.
    from xshard.replay import verify

    return verify.verify(flags, options.verify_resume, print)


def _replay(options: argparse.Namespace, flags: Sequence[str]) -> bool:
    files = workdir.Workdir(options.run)
    config = jsonfile.read_if_exists(files.config) or {}
    origin.set_up_backends(config, options.cpu_devices or _num_devices(files))
    # Imported here, since its imports initialize the devices.
    from xshard.replay import report

    return report.replay(options.run, options.step, print, flags)


def _num_devices(files: workdir.Workdir) -> int:
    """Returns the number of devices that a run had, of any kind; 0 if unknown."""
    origin_of_run = jsonfile.read_if_exists(files.origin) or {}
    match = re.match(r"(\d+) ", str(origin_of_run.get("devices", "")))
    return int(match[1]) if match else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
