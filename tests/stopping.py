"""Experiments whose callbacks end the run."""

import xshard
from tests import toy


class Stopping(toy.Toy):
    """Ends after two consecutive evaluations that do not lower the best error by more
    than 0.5.
    """

    def callbacks(self):
        metric = self.config.get("metric", "error")
        return [self.see, xshard.early_stopping(metric, patience=2, min_delta=0.5)]

    seen: list = []  # noqa: RUF012

    def see(self, history):
        self.seen.append([dict(row) for row in history])


class Showing(Stopping):
    """Also shows samples."""

    def samples(self, predict, key):
        return toy.Talking.samples(self, predict, key)
