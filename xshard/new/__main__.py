"""Writes a small experiment to start from: `python -m xshard.new DIR`.

DIR is a new or empty directory. The experiment is complete: it passes its own test and
trains in some seconds on a CPU. Comments in it tell you what to change. No file is ever
overwritten.
"""

import errno
import importlib.util
import os
import pathlib
import shlex
import sys
from collections.abc import Sequence

from xshard import cli, errors
from xshard.base import flag_words, formatting
from xshard.files import disk

TEMPLATE = pathlib.Path(__file__).parent / "template"
FILES = ("README.md", "config.py", "experiment.py", "experiment_test.py")


def write(directory: pathlib.Path) -> None:
    """Writes the files of a new experiment.

    Args:
      directory: the directory, which is created with its parents if it does not exist.

    Raises:
      UserError: if it is a file, is not empty, or cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        names = sorted(os.listdir(directory))
        if names:
            raise errors.UserError(
                f"{directory} is not empty: it holds "
                f"{formatting.listed(names, most=3)}. Nothing is overwritten; give a "
                "new directory."
            )
        for name in FILES:
            # Mode "x" fails if another program has created the file in the meantime.
            with (directory / name).open("x") as out:
                out.write((TEMPLATE / name).read_text())
    except OSError as e:
        if e.errno in (errno.EEXIST, errno.ENOTDIR):
            reason = f"{e.filename} is a file"
        else:
            reason = e.strerror or str(e)
        raise errors.UserError(
            f"{directory} cannot be made or written: {reason}. Give another directory."
        ) from e


@cli.program
def main(argv: Sequence[str]) -> int:
    """Writes an experiment, and prints the next commands; returns the exit code."""
    parser = cli.parser("new", __doc__)
    parser.add_argument("directory", metavar="DIR")
    directory = pathlib.Path(disk.expanded(parser.parse_args(argv).directory))
    write(directory)
    print(f"{directory} holds an experiment: {', '.join(FILES)}. Next:\n")
    if not os.path.samefile(directory, os.curdir):
        print(f"  {flag_words.shown(shlex.join(['cd', str(directory)]))}")
    train = "python -m xshard.main --config=config.py --workdir=runs/first"
    test = "python -m pytest"
    print(f"  {train}    # trains it")
    print(f"  {test:{len(train)}}    # tests it\n")
    if importlib.util.find_spec("pytest") is None:
        print(
            "The tests need pytest, which is not installed: python -m pip install "
            "pytest\n"
        )
    print(
        "Then make it yours: comments that begin with 'Yours' tell you what to change."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
