"""Makes the API reference from the docstrings: `python docs/reference.py [FOLDER]`, by
default docs/api.

Every public module is in it, that is every file of `xshard` without a leading
underscore. It needs pdoc.
"""

import importlib
import pathlib
import sys
import warnings
from collections.abc import Sequence

import pdoc

ROOT = pathlib.Path(__file__).resolve().parent.parent


def modules() -> list[str]:
    """The public modules, the package first."""
    files = sorted(ROOT.joinpath("xshard").rglob("*.py"))
    names = [path.relative_to(ROOT).with_suffix("").parts for path in files]
    shown = [
        parts for parts in names if "template" not in parts and parts[-1] != "__main__"
    ]
    return sorted(".".join(parts).removesuffix(".__init__") for parts in shown)


def build(folder: pathlib.Path) -> None:
    """Writes the pages; raises what pdoc only warns of, such as an annotation that it
    cannot read.
    """
    pdoc.render.configure(
        docformat="google",
        show_source=False,
        template_directory=ROOT / "docs" / "templates",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # pdoc looks into some packages by itself, and not into those that say what they
        # export.
        warnings.filterwarnings("ignore", "The module specification")
        for name in modules():
            importlib.import_module(name)
        pdoc.pdoc(*modules(), output_directory=folder)


def main(argv: Sequence[str]) -> int:
    """Builds, and says where."""
    folder = pathlib.Path(argv[0]) if argv else ROOT / "docs" / "api"
    sys.path.insert(0, str(ROOT))
    build(folder)
    print(f"{folder}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
