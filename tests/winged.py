"""Runs with all wings, as `xshard.main` makes them, in the process of a test."""

import functools

from xshard import loop
from xshard.metrics import writers
from xshard.wings import installed

run = functools.partial(loop.run, wings=installed.WINGS)
Run = functools.partial(loop.Run, wings=installed.WINGS)
SERVICES = writers.services(installed.WINGS)
