"""Runs with all wings, as `xshard.main` makes them, in the process of a test."""

import functools

import pytest

from xshard import config as config_lib
from xshard import loop
from xshard.wings import installed

run = functools.partial(loop.run, wings=installed.WINGS)
Run = functools.partial(loop.Run, wings=installed.WINGS)
WINGS = installed.WINGS


def needing(cases):
    """Returns cases as rows of a table, each marked with the wings that it needs.

    Args:
      cases: the changed values of a config by path, by the name of the case.
    """
    marked = []
    for name, values in cases.items():
        marked.append(pytest.param(name, marks=marks_of(values)))
    return marked


def marks_of(values):
    """Returns the marks of a test whose run has these values of keys, by path."""
    marks = []
    for key in config_lib.KEYS:
        value = values.get(key.name, key.default)
        if key.wing and value != key.default and value not in key.of_core:
            marks.append(pytest.mark.wing(key.wing))
    return marks
