"""An experiment with two learners, the second of which takes the logarithm of a
negative number; and one with two updates a step.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import optax

import xshard
from tests import toy


class Pair(xshard.Experiment):
    """Fits two lines, one for each learner."""

    def __init__(self, config):
        super().__init__(config)
        self.learners = {
            "first": xshard.Learner(self._network, self._rule, self.config),
            "second": xshard.Learner(self._network, self._rule, self.config),
        }

    def _network(self, x):
        return hk.Linear(1)(x)[:, 0]

    def _rule(self):
        return xshard.CrossShardOptimizer(optax.sgd(0.1), slice_axis_name="slice")

    def train_data(self):
        return toy.Toy(self.config).train_data()

    def eval_data(self):
        return self.train_data()

    def init(self, key, batch):
        return {
            name: learner.init(key, batch["x"])
            for name, learner in self.learners.items()
        }

    def train_step(self, state, batch, key):
        losses = {"first": self._error, "second": self._logarithm}
        states = {}
        metrics = {}
        for name, learner in self.learners.items():
            states[name], metrics[name] = learner.update(
                state[name], losses[name], batch, key
            )
        return states, metrics

    def _error(self, state, batch, key):
        outputs, net_state = self.learners["first"].apply(state, key, batch["x"])
        return jnp.mean((outputs - batch["y"]) ** 2), net_state, {}

    def _logarithm(self, state, batch, key):
        outputs, net_state = self.learners["second"].apply(state, key, batch["x"])
        return jnp.mean(jnp.log(-1 - outputs**2)), net_state, {}

    def eval_step(self, state, batch, key):
        return {"first": batch["y"]}


class Twice(xshard.Experiment):
    """Updates its learner twice in each step; of the second step, the first update
    overflows and is skipped.
    """

    def __init__(self, config):
        super().__init__(config)
        network = lambda x: hk.Linear(1)(x)[:, 0]
        self.learner = xshard.Learner(network, self._rule, self.config)

    def train_data(self):
        return toy.Toy(self.config).train_data()

    def eval_data(self):
        return self.train_data()

    def _rule(self):
        opt = xshard.CrossShardOptimizer(optax.sgd(0.1), slice_axis_name="slice")
        return xshard.MixedPrecisionLossScaleOptimizer(
            opt, xshard.DynamicLossScale(2.0**4)
        )

    def init(self, key, batch):
        return self.learner.init(key, batch["x"])

    def train_step(self, state, batch, key):
        def update(state, number):
            def loss(state, batch, key):
                outputs, net_state = self.learner.apply(state, key, batch["x"])
                is_bad = (number == 0) & (state.global_step == 2)
                divisor = jnp.where(is_bad, 0.0, 1.0)
                return jnp.mean((outputs - batch["y"]) ** 2) / divisor, net_state, {}

            return self.learner.update(state, loss, batch, key)

        return jax.lax.scan(update, state, jnp.arange(2))

    def eval_step(self, state, batch, key):
        return {"loss": batch["y"]}
