"""Experiments that callbacks end."""

import xshard
from tests import toy


class Stopping(toy.Toy):
    """Ends when its error is no longer halved from one evaluation to the next."""

    def callbacks(self):
        metric = self.config.get("metric", "error")
        return [self.see, xshard.early_stopping(metric, patience=2, min_delta=0.5)]

    seen: list = []  # noqa: RUF012

    def see(self, history):
        self.seen.append([dict(row) for row in history])


class Showing(Stopping):
    """Shows what it has learnt, too."""

    def samples(self, predict, key):
        return toy.Talking.samples(self, predict, key)
