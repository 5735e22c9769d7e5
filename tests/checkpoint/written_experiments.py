"""Small experiments whose config selects what a step computes: their work directories
are kept, see written/README.md.

This file imports xshard's public names alone, since it also runs with the package of
another checkout. A change of what an experiment here computes changes what its kept
directory resumes to: add another experiment instead.
"""

import grain
import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from optax import contrib

import xshard
from xshard.data import pipelines

_EXAMPLES = 96
_INPUTS = 4
# The step size and its decay, for rules that are given a schedule.
_RATE = 0.05
_SCHEDULE = optax.cosine_decay_schedule(_RATE, 40)
# The rules by name. Each keeps state of another kind.
RULES = {
    "adam": lambda: optax.adam(_SCHEDULE),
    "momentum": lambda: optax.sgd(_RATE, momentum=0.9, nesterov=True),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(_RATE)),
    "factored": lambda: optax.adafactor(_RATE, min_dim_size_to_factor=2),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=_SCHEDULE, weight_decay=0.01
    ),
    "every_other": lambda: optax.MultiSteps(optax.adam(_RATE), 2),
    "plateau": lambda: optax.chain(
        optax.adam(_RATE), contrib.reduce_on_plateau(patience=1, cooldown=0, rtol=0.2)
    ),
    "schedule_free": lambda: contrib.schedule_free_adamw(_RATE),
    "muon": lambda: contrib.muon(_RATE),
}


class Curve(xshard.Supervised):
    """Regression by a network with noise in training."""

    def train_data(self):
        return _examples(0)

    def eval_data(self):
        return _examples(1)

    def train_batches(self, part):
        kind = self.config.data
        if kind == "examples":
            return _Outliers(super().train_batches(part), part, self.config.outliers)
        return pipelines.Streams(getattr(self, f"_{kind}"), 4, part)

    def _windows(self, stream):
        """Shuffles examples within windows, which are state of the pipeline."""
        rows = _stream(stream, 0)
        return grain.experimental.WindowShuffleIterDataset(
            rows, window_size=5, seed=stream.seed
        )

    def _mix(self, stream):
        """Mixes two sources by a table."""
        sources = [_stream(stream, 0), _stream(stream, 2)]
        table = [(0, [1, 0]), (5, [3, 1]), (14, [1, 3])]
        return pipelines.Mix(sources, table, stream)

    def forward(self, batch, *, is_training):
        config = self.config
        x = batch["x"]
        if is_training:
            x = x + 0.1 * jax.random.normal(hk.next_rng_key(), x.shape, x.dtype)
        x = hk.Linear(config.hidden, name="first")(x)
        if config.norm:
            norm = hk.BatchNorm(True, True, 0.8, name="norm")
            # Haiku's averages mix integers with floats.
            with jax.numpy_dtype_promotion("standard"):
                x = norm(x, is_training)
        x = hk.Linear(config.hidden, name="middle")(jax.nn.relu(x))
        return hk.Linear(1, name="last")(jax.nn.relu(x))[:, 0]

    def loss(self, outputs, batch):
        error = jnp.mean((outputs - batch["y"]) ** 2)
        return error, {"error": error}

    def optimizer(self):
        return self._scaled(self._reduced("slice"))

    def _reduced(self, slice_axis_name):
        config = self.config
        schedules = {}
        if config.rule == "adam":
            schedules["learning_rate"] = _SCHEDULE
        rule = xshard.OptaxOptimizer(
            RULES[config.rule](),
            name="rule",
            schedules=schedules,
            backs_off=config.backs_off,
        )
        if config.average == "inside":
            rule = xshard.MovingAverageOptimizer(rule, 0.9, num_updates="count")
        return xshard.CrossShardOptimizer(
            rule, slice_axis_name=slice_axis_name, **config.reduction
        )

    def _scaled(self, rule):
        config = self.config
        kind = config.loss_scale
        if not isinstance(kind, str):
            kind = kind.kind
        if kind == "fixed":
            rule = xshard.MixedPrecisionLossScaleOptimizer(rule, 128.0)
        elif kind == "dynamic":
            scale = xshard.DynamicLossScale(increment_period=4)
            rule = xshard.MixedPrecisionLossScaleOptimizer(rule, scale)
        if config.average == "outside":
            rule = xshard.MovingAverageOptimizer(rule, 0.7)
        return rule

    def evaluate(self, outputs, batch):
        return {"error": (outputs - batch["y"]) ** 2}

    def frozen(self):
        return self.config.kept

    def uncast(self):
        return self.config.uncast

    def sharding_rules(self):
        return (
            ("first/w$", jax.P(None, "model")),
            ("first/b$", jax.P("model")),
            ("middle/w$", jax.P("model", None)),
        )

    def callbacks(self):
        metric = "ensemble/error" if self.config.group_assignment else "error"
        return [xshard.early_stopping(metric, patience=100)]


class Plain(Curve):
    """Returns a plain transformation of optax."""

    def optimizer(self):
        return RULES[self.config.rule]()


class Clipped(Curve):
    """Clips each replica's gradients, and returns none for the last layer's bias."""

    def clip_gradients(self, grads):
        clipped, _ = optax.clip_by_global_norm(0.05).update(grads, optax.EmptyState())
        return {**clipped, "last": {**clipped["last"], "b": None}}


class Weighted(Curve):
    """Averages over the examples that count, of which parts have different numbers."""

    def weight(self, batch):
        return jnp.sum(_counts(batch))

    def loss(self, outputs, batch):
        counts = _counts(batch)
        errors = counts * (outputs - batch["y"]) ** 2
        error = jnp.sum(errors) / jnp.maximum(jnp.sum(counts), 1)
        return error, {"error": error}


class Adapted(Curve):
    """Trains low-rank matrices beside the layers but the last, which trains whole."""

    def lora(self):
        return xshard.lora(2, 4.0, "(first|middle)/w$", train="^last/")


class Pure(Curve):
    """Has a network of two pure functions, of no library."""

    @property
    def forward(self):
        return self._init, self._apply

    def _init(self, key, batch, *, is_training):
        del is_training
        size = self.config.hidden
        first = jax.random.normal(key, (batch["x"].shape[1], size))
        params = {"layers": [{"w": first}, {"w": jnp.ones((size,)) / size}]}
        return params, {"seen": jnp.zeros(())}

    def _apply(self, params, state, key, batch, *, is_training):
        del key
        first, last = params["layers"]
        hidden = jax.nn.relu(batch["x"] @ first["w"])
        if is_training:
            state = {"seen": state["seen"] + jnp.mean(hidden).astype(jnp.float32)}
        return hidden @ last["w"], state


class Outer(Curve):
    """Has an outer rule of its own."""

    def optimizer(self):
        return xshard.OuterOptimizer(
            self._scaled(self._reduced(None)),
            optax.adam(0.01),
            every_steps=self.config.outer.every_steps,
            dtype=self.config.outer.dtype,
        )


class Lookahead(xshard.OptimizerWrapper):
    """Moves slow copies of the parameters every third step; a rule written by hand."""

    def __init__(self, opt):
        super().__init__(name="lookahead")
        self.opt = opt

    def update(self, grads, params):
        fast = self.opt.update(grads, params)
        count = hk.get_state("count", [], jnp.int32, jnp.zeros) + 1
        is_due = count % 3 == 0
        result = {}
        for module, arrays in params.items():
            result[module] = {}
            for name, old in arrays.items():
                new = fast[module][name]
                path = f"slow/{module}/{name}"
                copy = lambda shape, dtype, old=old: jnp.array(old, dtype, copy=True)
                slow = hk.get_state(path, old.shape, old.dtype, copy)
                if not hk.running_init():
                    slow = jnp.where(is_due, slow + 0.5 * (new - slow), slow)
                    hk.set_state(path, slow)
                    new = jnp.where(is_due, slow, new)
                result[module][name] = new
        if not hk.running_init():
            hk.set_state("count", count)
        return result


class ByHand(Curve):
    """Trains by a rule that is written by hand."""

    def optimizer(self):
        rule = Lookahead(xshard.OptaxOptimizer(optax.adam(_RATE), name="rule"))
        rule = xshard.CrossShardOptimizer(
            rule, slice_axis_name="slice", **self.config.reduction
        )
        return self._scaled(rule)


class Recurrent(xshard.Experiment):
    """Has state for each example and for each replica, updates its learner twice a
    step, and takes rows from the forward pass.
    """

    def __init__(self, config):
        super().__init__(config)
        self.learner = xshard.Learner(self._network, self._rule, self.config)

    def train_data(self):
        return _examples(0)

    def eval_data(self):
        return _examples(1)

    def _network(self, x, hidden):
        both = jnp.concatenate([x, hidden], axis=-1)
        hidden = jnp.tanh(hk.Linear(self.config.hidden, name="first")(both))
        return hk.Linear(1, name="last")(hidden)[:, 0], hidden

    def _rule(self):
        rule = xshard.OptaxOptimizer(optax.adam(_RATE), name="rule")
        return xshard.CrossShardOptimizer(
            rule, slice_axis_name="slice", **self.config.reduction
        )

    def _silence(self, batch):
        return jnp.zeros((len(batch["x"]), self.config.hidden))

    def init(self, key, batch):
        hidden = self._silence(batch)
        return {
            "learner": self.learner.init(key, batch["x"], hidden),
            "hidden": xshard.PerExample(hidden),
            "drawn": xshard.PerReplica(jnp.zeros(())),
        }

    def train_step(self, state, batch, key):
        first_key, second_key, draw_key = jax.random.split(key, 3)
        seen = {**batch, "hidden": state["hidden"].value}
        learner, first = self.learner.update(
            state["learner"], self._loss, seen, first_key
        )
        learner, second = self.learner.update(learner, self._loss, seen, second_key)
        outcomes = jax.tree.map(lambda *x: jnp.stack(x), first, second)
        new_state = {
            "learner": learner,
            "hidden": xshard.PerExample(second.aux),
            "drawn": xshard.PerReplica(
                state["drawn"].value + jax.random.uniform(draw_key)
            ),
        }
        return new_state, {"learner": outcomes, "drawn": new_state["drawn"].value}

    def _loss(self, learner, seen, key):
        noise = 0.1 * jax.random.normal(key, seen["x"].shape)
        (outputs, hidden), net_state = self.learner.apply(
            learner, None, seen["x"] + noise, seen["hidden"]
        )
        error = jnp.mean((outputs - seen["y"]) ** 2)
        return error, net_state, {"error": error}, hidden

    def eval_step(self, state, batch, key):
        del key
        (outputs, _), _ = self.learner.apply(
            state["learner"], None, batch["x"], self._silence(batch)
        )
        return {"error": (outputs - batch["y"]) ** 2}


class _Outliers:
    """Batches in which the labels of a group's first example are multiplied at some
    steps.
    """

    state_is_shared = True

    def __init__(self, batches, part, outliers):
        self._batches = batches
        self._part = part
        self._factors = {(group, step): factor for group, step, factor in outliers}

    def __next__(self):
        step = self._batches.get_state()["batches"] + 1
        batch = dict(next(self._batches))
        batch["y"] = np.array(batch["y"])
        begin = 0
        for group, rows in enumerate(self._part.rows):
            factor = self._factors.get((group, step), 1.0)
            batch["y"][begin : begin + len(rows)][rows == 0] *= np.float32(factor)
            begin += len(rows)
        return batch

    def get_state(self):
        return self._batches.get_state()

    def set_state(self, state):
        self._batches.set_state(state)


def _examples(seed):
    """Returns examples of the same bits on every machine: each of these operations is
    exact.
    """
    draw = np.random.default_rng(seed).integers(-8, 9, (_EXAMPLES, _INPUTS))
    x = draw.astype(np.float32) / 8
    return {"x": x, "y": 1 + x[:, 0] * x[:, 1] - x[:, 2]}


def _stream(stream, seed):
    arrays = _examples(seed)
    rows = [{name: array[i] for name, array in arrays.items()} for i in range(96)]
    return stream.part(grain.MapDataset.source(rows)).to_iter_dataset()


def _counts(batch):
    return (batch["x"][:, 3] > 0).astype(jnp.float32)


def get_config() -> ml_collections.ConfigDict:
    """Returns the defaults of an experiment of this file."""
    config = xshard.config.default()
    config.experiment = f"{__name__}.Curve"
    config.hidden = 8
    config.norm = False
    config.rule = "adam"
    config.backs_off = False
    # '', or 'inside' or 'outside' of the reduction.
    config.average = ""
    # 'examples', 'windows' or 'mix'.
    config.data = "examples"
    # The group, the number of the batch, and the factor of a label.
    config.outliers = ()
    if "loss_scale" not in config:
        # The package of an earlier checkout: here it is a key of the experiment.
        config.loss_scale = "none"
    config.kept = ""
    config.uncast = ""
    config.checkpoint.best_metric = "error"
    return config
