"""A small experiment, its variants and its config, for tests of the loop and the
program.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

import xshard
from tests import pace


class Toy(xshard.Supervised):
    """Linear regression on synthetic data. Noise in training makes the result depend on
    the random keys.
    """

    def train_data(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(self.config.examples, 3)).astype(np.float32)
        return {"x": x, "y": x @ np.array([1.0, -2.0, 0.5], np.float32)}

    def train_batches(self, part):
        return pace.batches(super().train_batches(part))

    def eval_data(self):
        return {name: array[:10] for name, array in self.train_data().items()}

    def forward(self, batch, *, is_training):
        x = batch["x"]
        count = hk.get_state("count", [], jnp.int32, jnp.zeros)
        mean = hk.get_state("mean", [], jnp.float32, jnp.zeros)
        if is_training:
            hk.set_state("count", count + 1)
            hk.set_state("mean", mean + 0.1 * (jnp.mean(x).astype(mean.dtype) - mean))
            x = x + 0.1 * jax.random.normal(hk.next_rng_key(), x.shape, x.dtype)
        return hk.Linear(1, name="linear")(x)[:, 0]

    def loss(self, outputs, batch):
        error = jnp.mean((outputs - batch["y"]) ** 2)
        # The loss of some batches is infinite, so that a dynamic loss scale skips the
        # step.
        bad = jnp.max(batch["x"]) > self.config.overflow_above
        return jnp.where(bad, jnp.inf, 1.0) * error, {"error": error}

    def optimizer(self):
        opt = xshard.OptaxOptimizer(
            optax.adam(self.config.optimizer.learning_rate), name="adam"
        )
        opt = xshard.CrossShardOptimizer(
            opt, slice_axis_name="slice", **self.config.reduction
        )
        return xshard.MixedPrecisionLossScaleOptimizer(
            opt, xshard.DynamicLossScale(increment_period=5)
        )

    def evaluate(self, outputs, batch):
        return {"error": (outputs - batch["y"]) ** 2}


class Wide(Toy):
    """Adds a hidden layer, whose arrays can be sharded."""

    def forward(self, batch, *, is_training):
        x = batch["x"]
        if is_training:
            x = x + 0.1 * jax.random.normal(hk.next_rng_key(), x.shape, x.dtype)
        return hk.nets.MLP([self.config.hidden, 1], name="mlp")(x)[:, 0]


class Divided(Wide):
    """Adds a square layer that is sharded over the model axis."""

    def forward(self, batch, *, is_training):
        del is_training
        sizes = [self.config.hidden, self.config.hidden, 1]
        return hk.nets.MLP(sizes, name="mlp")(batch["x"])[:, 0]

    def sharding_rules(self):
        return (
            ("/linear_1/w$", jax.P(None, "model")),
            ("/linear_1/b$", jax.P("model")),
            ("/linear_2/w$", jax.P("model", None)),
        )


class Poisoned(Wide):
    """Puts NaN into one example of the batches of some steps; in float32, with or
    without a loss scale.
    """

    def train_batches(self, part):
        return _Poisoned(super().train_batches(part), part, self.config.poisoned)

    def optimizer(self):
        scaled = super().optimizer()
        if self.config.loss_scale.kind == "dynamic":
            return scaled
        if self.config.loss_scale.kind == "fixed":
            return xshard.MixedPrecisionLossScaleOptimizer(scaled.opt, 128.0)
        return scaled.opt


class Lowered(Poisoned):
    """Scales its updates down after a roll-back, and averages its parameters."""

    def optimizer(self):
        rule = xshard.OptaxOptimizer(optax.adam(0.1), backs_off=True)
        reduced = xshard.CrossShardOptimizer(rule, **self.config.reduction)
        return xshard.MovingAverageOptimizer(reduced, 0.5)


class _Poisoned:
    """Batches in which the label of a group's first example is NaN at some steps."""

    state_is_shared = True

    def __init__(self, batches, part, poisoned):
        self._batches = batches
        self._part = part
        self._poisoned = {tuple(entry) for entry in poisoned}

    def __next__(self):
        step = self._batches.get_state()["batches"] + 1
        batch = dict(next(self._batches))
        batch["y"] = np.array(batch["y"])
        begin = 0
        for group, rows in enumerate(self._part.rows):
            if (group, step) in self._poisoned:
                batch["y"][begin : begin + len(rows)][rows == 0] = np.nan
            begin += len(rows)
        return batch

    def get_state(self):
        return self._batches.get_state()

    def set_state(self, state):
        self._batches.set_state(state)


class Overflowing(Toy):
    """Makes the parameters nonfinite in update `overflow_at`, by default the last; its
    gradients are finite.
    """

    def optimizer(self):
        rate = lambda count: jnp.where(
            count == self.config.overflow_at - 1, jnp.inf, 0.0
        )
        return xshard.CrossShardOptimizer(optax.scale_by_schedule(rate))


class Talking(Toy):
    """Shows predictions as a text sample."""

    def samples(self, predict, key):
        x = jax.device_get(jax.random.normal(key, (2, 3)))
        first, second = predict({"x": x, "y": np.zeros(2, np.float32)})
        return f"predicted {first:.6f} and {second:.6f}"


class Averaged(Wide):
    """Keeps averages of its parameters."""

    def optimizer(self):
        return xshard.MovingAverageOptimizer(super().optimizer(), 0.5)


class Normalized(Averaged):
    """Keeps averages of its parameters, and has a batch norm."""

    def forward(self, batch, *, is_training):
        x = hk.Linear(8, name="first")(batch["x"])
        norm = hk.BatchNorm(True, True, 0.5, name="norm")
        # Haiku's averages mix integers with floats.
        with jax.numpy_dtype_promotion("standard"):
            x = norm(x, is_training)
        return hk.Linear(1, name="last")(jax.nn.relu(x))[:, 0]


class Frozen(Averaged):
    """Trains its last layer only: it returns no gradients for the first layer."""

    def clip_gradients(self, grads):
        first = "mlp/~/linear_0"
        return {**grads, first: dict.fromkeys(grads[first])}


class Kept(Averaged):
    """Freezes the parameters whose paths match the config's `kept`."""

    def frozen(self):
        return self.config.kept


class OneSlice(Toy):
    """Reduces within each slice only."""

    def optimizer(self):
        return xshard.CrossShardOptimizer(optax.sgd(0.1))


class Drifting(Toy):
    """Lacks the reduction of gradients, which is a mistake."""

    def optimizer(self):
        return xshard.OptaxOptimizer(optax.sgd(0.1))


class FailsOnOne(Toy):
    """Has no data on process 1."""

    def train_data(self):
        if jax.process_index() == 1:
            raise ValueError("no data on process 1")
        return super().train_data()


class Uneven(Toy):
    """Has fewer evaluation examples on process 1."""

    def eval_data(self):
        count = 9 if jax.process_index() == 1 else 10
        return {name: array[:count] for name, array in self.train_data().items()}


def get_config() -> ml_collections.ConfigDict:
    """Returns the config of a short run."""
    config = xshard.config.default()
    config.experiment = "tests.toy.Toy"
    config.steps = 12
    config.batch_size = 16
    config.eval_batch_size = 8
    config.examples = 50
    config.hidden = 16
    config.overflow_above = 1e9
    config.poisoned = ()
    config.overflow_at = 12
    config.optimizer = {"learning_rate": 0.1}
    config.log_every_steps = 4
    config.fingerprint_every_steps = 1
    config.writers = ("jsonl", "csv")
    config.eval_every_steps = 6
    config.checkpoint.update({"every_steps": 5, "keep_last": 2, "best_metric": "error"})
    return config
