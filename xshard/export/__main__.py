"""Exports a trained model to other programs: `python -m xshard.export RUN --to=FILE`.

    python -m xshard.export runs/digits@1000 --to=digits.safetensors
        the arrays, by path
    python -m xshard.export runs/digits --to=digits.stablehlo
        the prediction, for jax.export.deserialize

The run is only read, and may still be training.
"""

import argparse
import sys
from collections.abc import Sequence

from xshard import checkpoint, cli, errors, export
from xshard import trained as trained_lib
from xshard.checkpoint import conversion


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser("export", __doc__)
    parser.add_argument("run", metavar="RUN[@STEP]", help="a run's work directory")
    parser.add_argument(
        "--to",
        required=True,
        metavar="FILE",
        help="the output, ending in .safetensors or .stablehlo",
    )
    parser.add_argument(
        "--batch_size",
        type=int,
        help="the number of rows of the prediction's batch; by default any number",
    )
    parser.add_argument(
        "--arguments",
        action="store_true",
        help=(
            "make the arrays of the .safetensors the prediction's first argument, "
            "instead of including them"
        ),
    )
    parser.add_argument(
        "--select",
        default=checkpoint.BY_DEFAULT,
        metavar="REGEX",
        help=(
            "the paths of the arrays; by default the parameters and network state of "
            "each learner"
        ),
    )
    parser.add_argument(
        "--convert",
        default="",
        metavar="PATH",
        help="the dotted path of a checkpoint.Conversion to another program's arrays",
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help=(
            "use the parameters that train, also if the run evaluates others, such as "
            "averages"
        ),
    )
    parser.add_argument(
        "--separate_lora",
        action="store_true",
        help=(
            "keep the low-rank matrices of xshard.lora as arrays of their own, instead "
            "of adding their products to the arrays"
        ),
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace FILE if it exists"
    )
    return parser


@cli.program
def main(argv: Sequence[str]) -> int:
    """Exports a model according to the arguments; returns the exit code."""
    options = _parser().parse_args(argv)
    if options.batch_size is not None and options.batch_size < 1:
        raise errors.UserError(f"--batch_size={options.batch_size} must be at least 1.")
    description = export.write(
        trained_lib.load(options.run),
        options.to,
        batch_size=options.batch_size,
        arguments=options.arguments,
        select=options.select,
        merge_lora=not options.separate_lora,
        overwrite=options.overwrite,
        raw=options.raw,
        convert=conversion.load(options.convert, "--convert"),
    )
    print(description)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
