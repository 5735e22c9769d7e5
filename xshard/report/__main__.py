"""Writes a report page on runs: `python -m xshard.report runs/digits`.

    python -m xshard.report runs/a                           one run
    python -m xshard.report runs/a runs/b --output=ab.html   several, side by side
    python -m xshard.report runs/digits_sweep/*/             all runs of a sweep

The page is one file and needs only a browser, no network. Work directories are only
read; the runs may continue.
"""

import importlib.util
import pathlib
import sys
from collections.abc import Sequence

from xshard import cli, errors
from xshard.files import disk


@cli.program
def main(argv: Sequence[str]) -> int:
    """Writes the report that the arguments ask for; returns the exit code."""
    parser = cli.parser("report", __doc__)
    parser.add_argument(
        "workdir", nargs="+", metavar="WORKDIR", help="a run's work directory"
    )
    page_help = "the page; report.html by default"
    parser.add_argument(
        "--output", default="report.html", metavar="FILE.html", help=page_help
    )
    arguments = parser.parse_args(argv)
    print(make(arguments.workdir, pathlib.Path(disk.expanded(arguments.output))))
    return 0


def make(workdirs: Sequence[str], output: pathlib.Path) -> str:
    """Writes the report on runs; returns a description of what was written.

    Raises:
      UserError: if a directory holds no run, the page cannot be written, or a library
        is missing.
    """
    for library in ("pandas", "plotly"):
        if importlib.util.find_spec(library) is None:
            raise errors.UserError(
                f"{library} is not installed, which a report needs: pip install "
                "'.[report]', or 'xshard[report]'."
            )
    # Imported here, since they need these libraries, which are an extra.
    from xshard.report import page
    from xshard.report import runs as runs_lib

    if output.suffix != ".html" or output.is_dir():
        raise errors.UserError(
            f"--output={output} must be a file that ends in .html, as report.html."
        )
    if any(not path for path in workdirs):
        raise errors.UserError("a work directory is empty; give paths, as runs/digits.")
    runs = runs_lib.read(workdirs)
    content = page.build(runs).encode()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        disk.replace(output, content, durably=False)
    except OSError as e:
        raise errors.UserError(
            f"--output={output} cannot be written: {e.strerror} ({e.filename})."
        ) from e
    return f"{output}: {'1 run' if len(runs) == 1 else f'{len(runs)} runs'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
