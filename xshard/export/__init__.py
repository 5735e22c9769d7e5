"""A trained model for other programs: its arrays as .safetensors, its prediction as StableHLO.

Both need the extra `export`. `python -m xshard.export RUN --to=FILE` is the same from a shell.
"""

from xshard.export.files import write

__all__ = ["write"]
