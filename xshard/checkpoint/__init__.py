"""Checkpoints of everything that a run needs to resume, stored with tensorstore."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
