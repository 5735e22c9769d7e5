"""An experiment for tests: two learners that train in turn, and a moving average of
one. Its config: `tests.toy`.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import optax

import xshard
from tests import toy


class Turns(xshard.Experiment):
    """One network learns the labels. A second learns to predict the first one's errors,
    which the first keeps small.
    """

    def __init__(self, config):
        super().__init__(config)
        self.guess = xshard.Learner(self._guess, self._optimizer, self.config)
        self.doubt = xshard.Learner(self._doubt, self._optimizer, self.config)
        self._toy = toy.Toy(config)

    def train_data(self):
        return self._toy.train_data()

    def train_batches(self, part):
        return self._toy.train_batches(part)

    def eval_data(self):
        return self._toy.eval_data()

    def _guess(self, x, *, is_training):
        hidden = jnp.tanh(hk.Linear(self.config.hidden, name="hidden")(x))
        mean = hk.get_state("mean", hidden.shape[1:], hidden.dtype, jnp.zeros)
        if is_training:
            # The mean is over all replicas.
            now = jax.lax.pmean(jnp.mean(hidden, axis=0), ("slice", "replica"))
            hk.set_state("mean", 0.9 * mean + 0.1 * now)
            mean = now
        return hk.Linear(1, name="outputs")(hidden - mean)[:, 0]

    def _doubt(self, x, y):
        inputs = jnp.concatenate([x, y[:, None]], axis=-1)
        return hk.nets.MLP([self.config.hidden, 1], activation=jnp.tanh)(inputs)[:, 0]

    def _optimizer(self):
        opt = xshard.OptaxOptimizer(optax.sgd(1e-4, momentum=0.9), name="sgd")
        opt = xshard.CrossShardOptimizer(
            opt, slice_axis_name="slice", **self.config.reduction
        )
        return xshard.MixedPrecisionLossScaleOptimizer(
            opt, xshard.DynamicLossScale(increment_period=5)
        )

    def init(self, key, batch):
        first, second = jax.random.split(key)
        guess = self.guess.init(first, batch["x"], is_training=True)
        doubt = self.doubt.init(second, batch["x"], batch["y"])
        return {"guess": guess, "doubt": doubt, "average": guess.params}

    def train_step(self, state, batch, key):
        loss = lambda *args: self._guess_loss(state["doubt"], *args)
        guess, guessed = self.guess.update(state["guess"], loss, batch, key)
        loss = lambda *args: self._doubt_loss(guess, *args)
        doubt, doubted = self.doubt.update(state["doubt"], loss, batch, key)
        move = lambda old, new: 0.5 * old + 0.5 * new
        average = jax.tree.map(move, state["average"], guess.params)
        new = {"guess": guess, "doubt": doubt, "average": average}
        return new, {"guess": guessed, "doubt": doubted}

    def _guess_loss(self, doubt, state, batch, key):
        y, net_state = self.guess.apply(state, key, batch["x"], is_training=True)
        doubts, _ = self.doubt.apply(doubt, None, batch["x"], y)
        # The loss of some batches is infinite, which lowers the loss scale of this
        # learner and not the other's.
        bad = jnp.max(batch["x"]) > self.config.overflow_above
        error = jnp.where(bad, jnp.inf, 1.0) * jnp.mean((y - batch["y"]) ** 2)
        return error + 0.1 * jnp.mean(doubts), net_state, {"error": error}

    def _doubt_loss(self, guess, state, batch, key):
        y, _ = self.guess.apply(guess, key, batch["x"], is_training=True)

        def doubts(y):
            return self.doubt.apply(state, None, batch["x"], y)[0]

        error = jnp.mean((doubts(y) - jnp.abs(y - batch["y"])) ** 2)
        # The loss also penalizes the slope, so its gradient is a derivative of a
        # derivative.
        slope = jax.grad(lambda y: jnp.sum(doubts(y)))(y)
        return error + 0.1 * jnp.mean(slope**2), state.net_state, {}

    def eval_step(self, state, batch, key):
        averaged = state["guess"].replace(params=state["average"])
        return {"error": (self._guessed(averaged, batch) - batch["y"]) ** 2}

    def predict(self, state, batch):
        return jnp.mean(
            jax.lax.all_gather(self._guessed(state["guess"], batch), "group"), axis=0
        )

    def _guessed(self, guess, batch):
        return self.guess.apply(guess, None, batch["x"], is_training=False)[0]


class Divided(Turns):
    """Adds a layer, so that a square layer and its average are sharded over the model
    axis.
    """

    def _guess(self, x, *, is_training):
        wide = jnp.tanh(hk.Linear(self.config.hidden, name="wide")(x))
        return super()._guess(wide, is_training=is_training)

    def sharding_rules(self):
        return (
            ("hidden/w$", jax.P(None, "model")),
            ("outputs/w$", jax.P("model", None)),
        )
