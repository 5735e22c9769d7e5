"""Exports a trained model: its arrays as .safetensors, its prediction as StableHLO.

Both need the extra `export`. On the command line, use `python -m xshard.export RUN
--to=FILE`.
"""

from xshard.export.files import write

__all__ = ["write"]
