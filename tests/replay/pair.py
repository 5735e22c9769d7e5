"""An experiment with two learners, the second of which takes the logarithm of a negative number."""

import haiku as hk
import jax.numpy as jnp
import optax

import xshard
from tests import toy


class Pair(xshard.Experiment):
    """Fits two lines, one for each learner."""

    def __init__(self, config):
        super().__init__(config)
        rule = lambda: xshard.CrossShardOptimizer(optax.sgd(0.1), slice_axis_name="slice")
        network = lambda x: hk.Linear(1)(x)[:, 0]
        names = ("first", "second")
        self.learners = {name: xshard.Learner(network, rule, self.config) for name in names}

    def train_data(self):
        return toy.Toy(self.config).train_data()

    def eval_data(self):
        return self.train_data()

    def init(self, key, batch):
        return {name: learner.init(key, batch["x"]) for name, learner in self.learners.items()}

    def train_step(self, state, batch, key):
        losses = {"first": self._error, "second": self._logarithm}
        updated = {}
        for name, learner in self.learners.items():
            updated[name] = learner.update(state[name], losses[name], batch, key)
        return tuple({name: x[i] for name, x in updated.items()} for i in range(2))

    def _error(self, state, batch, key):
        outputs, net_state = self.learners["first"].apply(state, key, batch["x"])
        return jnp.mean((outputs - batch["y"]) ** 2), net_state, {}

    def _logarithm(self, state, batch, key):
        outputs, net_state = self.learners["second"].apply(state, key, batch["x"])
        return jnp.mean(jnp.log(-1 - outputs**2)), net_state, {}

    def eval_step(self, state, batch, key):
        return {"first": batch["y"]}
