"""A clock that stands still, for tests of what threads spend their time with."""

import types

from xshard.base import spans


def stand_in(monkeypatch):
    """Returns the time in seconds, which only tests move."""
    time = types.SimpleNamespace(now=1000.0)
    time.monotonic = lambda: time.now
    monkeypatch.setattr(spans, "time", time)
    monkeypatch.setattr(spans, "_TRACKS", {})
    monkeypatch.setattr(spans, "_THREAD", spans._Thread())
    spans.LONG.clear()
    return time


def spend(time, name, seconds):
    with spans.Span(name):
        time.now += seconds
