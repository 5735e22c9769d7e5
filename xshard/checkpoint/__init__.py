"""Checkpoints of everything that a run needs to go on, on tensorstore."""

from xshard.checkpoint.format import CheckpointError
from xshard.checkpoint.manager import Manager

__all__ = ["CheckpointError", "Manager"]
