"""Makes a page on runs: `python -m xshard.report runs/digits`.

    python -m xshard.report runs/a                           one run
    python -m xshard.report runs/a runs/b --output=ab.html   several, side by side
    python -m xshard.report runs/digits_sweep/*/             all runs of a sweep

The page needs nothing but itself: no network, no script. Its charts are also written as PNG files into a
folder beside it, ab_png/ for ab.html. Work directories are only read; runs may go on meanwhile.
"""

import argparse
import importlib.util
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence

from xshard import cli, errors
from xshard.files import disk
from xshard.report import runs as runs_lib


def main(argv: Sequence[str]) -> int:
    """Makes the report that the arguments ask for; returns the exit code."""
    return cli.run(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    print(make(arguments.workdir, pathlib.Path(arguments.output)))
    return 0


def make(workdirs: Sequence[str], output: pathlib.Path) -> str:
    """Writes the report on runs; returns what was written, in words.

    Raises:
      ValueError: if a directory is no run's, if the page cannot be written, or if matplotlib is missing;
        nothing has been written then, or not all of it if the disk is full.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise errors.UserError(
            "matplotlib is not installed, which draws the charts: pip install '.[report]', or "
            "'xshard[report]'."
        )
    # Here, since it needs matplotlib, which is an extra.
    from xshard.report import page

    if output.suffix != ".html" or output.is_dir():
        raise errors.UserError(
            f"--output={output} must be a file that ends in .html, as report.html."
        )
    if any(not path for path in workdirs):
        raise errors.UserError("a work directory is empty; give paths, as runs/digits.")
    runs = runs_lib.read(workdirs)
    folder = output.with_name(f"{output.stem}_png")
    report = page.build(runs, folder.name)
    try:
        _write(output, folder, report.html, report.pngs)
    except OSError as e:
        raise errors.UserError(
            f"--output={output} cannot be written: {e.strerror} ({e.filename})."
        ) from e
    of = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    return f"{output}: {of}, {len(report.pngs)} charts; as PNG files in {folder}/"


def _write(
    output: pathlib.Path, folder: pathlib.Path, html: str, pngs: Mapping[str, bytes]
) -> None:
    """Writes the page last, and takes away what only the page before it had drawn."""
    before = output.read_text(errors="replace") if output.exists() else ""
    old = set(re.findall(r'<a href="[^"/]*/([a-z0-9_-]+\.png)"', before))
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in pngs.items():
        disk.replace(folder / name, content, durably=False)
    disk.replace(output, html.encode(), durably=False)
    for name in old - pngs.keys():
        (folder / name).unlink(missing_ok=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m xshard.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workdir", nargs="+", metavar="WORKDIR", help="a run's work directory")
    parser.add_argument(
        "--output",
        default="report.html",
        metavar="FILE.html",
        help="the page; report.html by default",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
