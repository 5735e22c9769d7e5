"""A clock that stands still, for tests of what threads spend their time with."""

import time
import types

from xshard.base import clock, spans


def stand_in(monkeypatch):
    """Returns the time in seconds, which only tests move."""
    stopped = types.SimpleNamespace(**vars(time), now=1000.0)
    stopped.monotonic = lambda: stopped.now
    for module in (spans, clock):
        monkeypatch.setattr(module, "time", stopped)
    monkeypatch.setattr(spans, "_TREES", {})
    spans.LONG.clear()
    return stopped


def spend(now, name, seconds):
    with spans.Span(name):
        now.now += seconds
