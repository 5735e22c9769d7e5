"""Tests of the checks before a run that concern its config and its rules together."""

import contextlib

import jax
import jax.numpy as jnp
import optax
import pytest

import xshard
from tests import rows, toy
from xshard import errors, loop


class Deaf(toy.Wide):
    """Passes none of `config.reduction` on to its rule."""

    def optimizer(self):
        return xshard.CrossShardOptimizer(optax.adam(1e-3), slice_axis_name="slice")


def make_config(experiment, **reduction):
    config = toy.get_config()
    config.experiment = experiment
    config.reduction.update(reduction)
    return config


@pytest.mark.parametrize(
    "key, value",
    [
        ("reduction", "sum"),
        ("reduction", "summ"),
        ("reduce_dtype", "bfloat16"),
        ("shard_update", True),
        ("shard_params", True),
    ],
)
def test_a_key_that_reaches_no_rule_is_refused(tmp_path, key, value):
    config = make_config("tests.run.preflight_test.Deaf", **{key: value})
    match = (
        rf"config.reduction.{key}='?{value}'? reaches no rule of "
        r".*\*\*self.config.reduction"
    )
    with pytest.raises(errors.UserError, match=match):
        loop.Run(config.lock(), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_run_without_compiled_programs_is_refused(tmp_path):
    config = make_config("tests.toy.Wide").lock()
    jax.config.update("jax_disable_jit", True)
    try:
        with pytest.raises(errors.UserError, match="JAX_DISABLE_JIT is set"):
            loop.Run(config, str(tmp_path / "run"))
    finally:
        jax.config.update("jax_disable_jit", False)
    assert not (tmp_path / "run").exists()


class Fixed(Deaf):
    """Scales the loss by a number."""

    def optimizer(self):
        return xshard.MixedPrecisionLossScaleOptimizer(super().optimizer(), 8.0)


class Own(Deaf):
    """Scales the loss by a scale of its own."""

    def optimizer(self):
        return xshard.MixedPrecisionLossScaleOptimizer(super().optimizer(), _OwnScale())


class _OwnScale(xshard.LossScale):
    def __call__(self):
        return jnp.float32(8)

    def update(self, grads):
        return True


class Plain(toy.Wide):
    """Returns a plain transformation of optax."""

    def optimizer(self):
        return optax.adam(1e-3)


@pytest.mark.parametrize(
    "experiment, kind, is_refused",
    [
        ("tests.run.preflight_test.Deaf", "dynamic", True),
        ("tests.run.preflight_test.Deaf", "fixed", True),
        ("tests.run.preflight_test.Deaf", "none", False),
        ("tests.run.preflight_test.Fixed", "dynamic", True),
        ("tests.run.preflight_test.Fixed", "fixed", False),
        ("tests.toy.Wide", "fixed", True),
        ("tests.toy.Wide", "dynamic", False),
        ("tests.run.preflight_test.Own", "dynamic", True),
        ("tests.run.preflight_test.Own", "none", False),
        ("tests.run.preflight_test.Plain", "fixed", False),
    ],
)
def test_a_loss_scale_that_reaches_no_rule_is_refused(
    tmp_path, experiment, kind, is_refused
):
    config = make_config(experiment)
    config.loss_scale.kind = kind
    match = (
        f"config.loss_scale.kind='{kind}' reaches no rule of .*"
        rf"LossScaleOptimizer\(rule, {kind.capitalize()}LossScale\(...\)\); or "
        "return the plain optax transformation"
    )
    raises = pytest.raises(errors.UserError, match=match)
    with raises if is_refused else contextlib.nullcontext():
        loop.Run(config.lock(), str(tmp_path / "run"))
    if is_refused:
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["none", "dynamic"])
def test_what_a_loss_scale_leaves_unused_is_named(tmp_path, capsys, kind):
    config = make_config("tests.run.preflight_test.Plain")
    config.precision = "params=float32,compute=float16,output=float32"
    config.loss_scale.update({"kind": kind, "increment_period": 3})
    config.loss_scale.loss_scale_value = 8.0
    config.steps = 1
    assert loop.run(config.lock(), str(tmp_path), "") == 0
    said = capsys.readouterr().out
    assert ("Set loss_scale.kind='dynamic'" in said) == (kind == "none")
    (unread,) = [line for line in said.splitlines() if "no code has read" in line]
    assert "loss_scale.loss_scale_value" in unread
    assert ("loss_scale.increment_period" in unread) == (kind == "none")
    assert "loss_scale.kind" not in unread and "multiplier" not in unread


class Bare(xshard.Experiment):
    """Counts its steps, without a learner and a rule."""

    def train_data(self):
        return {"x": jnp.arange(32.0)}

    def eval_data(self):
        return self.train_data()

    def init(self, key, batch):
        return {"count": jnp.int32(0)}

    def train_step(self, state, batch, key):
        return {"count": state["count"] + 1}, {}

    def eval_step(self, state, batch, key):
        return {"error": batch["x"]}


def test_a_run_without_a_rule_names_the_keys_of_rules(tmp_path, capsys):
    config = make_config("tests.run.preflight_test.Bare", reduce_dtype="bfloat16")
    config.steps = 1
    assert loop.run(config.lock(), str(tmp_path), "") == 0
    unread = capsys.readouterr().out.partition("no code has read")[2]
    assert "reduction.reduce_dtype" in unread


def test_a_key_that_reaches_a_rule_is_accepted(tmp_path):
    config = make_config("tests.toy.Wide", reduction="sum", reduce_dtype="bfloat16")
    loop.Run(config.lock(), str(tmp_path / "run"))


def test_gathers_of_whole_parameters_are_refused(tmp_path):
    config = make_config("tests.toy.Wide")
    config.gather_once = True
    with pytest.raises(
        errors.UserError, match="gather_once=True has no effect without"
    ):
        loop.Run(config.lock(), str(tmp_path / "run"))


class Averaged(toy.Toy):
    """Keeps averages of its parameters, and state of its network."""

    def optimizer(self):
        return xshard.MovingAverageOptimizer(super().optimizer(), 0.5)


class Free(toy.Toy):
    """Evaluates other parameters than those that train, and has state of its network.

    The state fits the latter only.
    """

    def optimizer(self):
        return xshard.CrossShardOptimizer(optax.contrib.schedule_free_sgd(0.1))


@pytest.mark.parametrize(
    "experiment, says, warns",
    [
        ("tests.run.preflight_test.Free", True, True),
        ("tests.run.preflight_test.Averaged", True, False),
        ("tests.toy.Toy", False, False),
    ],
)
def test_a_run_says_which_parameters_it_evaluates_and_if_state_does_not_fit(
    tmp_path, capsys, experiment, says, warns
):
    config = make_config(experiment)
    config.steps = 1
    assert loop.run(config.lock(), str(tmp_path), "") == 0
    said = capsys.readouterr().out
    assert ("evaluation_params; 'raw/...' are those that train" in said) == says
    assert ("warning: they are evaluated with the network's state" in said) == warns


class Counting(toy.Wide):
    """Logs integers: a large one, and a replica's own, as it is or reduced."""

    def train_step(self, state, batch, key):
        state, outcome = super().train_step(state, batch, key)
        count = jnp.sum(batch["y"] > 1, dtype=jnp.int32)
        own = {
            "own": count,
            "sum": jax.lax.psum(count, ("slice", "replica")),
            "mean": count.astype(jnp.float32),
        }[self.config.count]
        return state, {
            "": outcome,
            "large": 2**24 + 1,
            "too_large": float(2**40),
            "count": own,
        }


def test_integers_are_logged_as_they_are(tmp_path):
    config = make_config("tests.run.preflight_test.Counting")
    config.steps = 3
    config.count = "sum"
    assert loop.run(config.lock(), str(tmp_path / "run"), "") == 0
    row = [row for row in rows.read(tmp_path / "run") if "count" in row][-1]
    assert row["large"] == 2**24 + 1 and row["too_large"] == 2**40
    assert isinstance(row["count"], int) and 0 < row["count"] < config.batch_size


def test_an_integer_that_differs_between_replicas_is_refused(tmp_path):
    for count, refused in (("own", True), ("mean", False)):
        config = make_config("tests.run.preflight_test.Counting")
        config.count = count
        raises = pytest.raises(
            errors.UserError, match="returns the integer 'count', which differs"
        )
        with raises if refused else contextlib.nullcontext():
            loop.Run(config.lock(), str(tmp_path / count))


class ReadsEarly(toy.Wide):
    """Reads a key of the config that its constructor receives."""

    def __init__(self, config):
        super().__init__(config)
        self.early = config.early.rate


def test_keys_that_nothing_reads_are_named(tmp_path, capsys):
    config = make_config("tests.run.preflight_test.ReadsEarly")
    config.early = {"rate": 0.1, "late": 0.2}
    config.steps = 1
    config.optimizer.warmup = 100
    config.rates = {"first": 0.1, "second": 0.2}
    # A key that gives another its value has its effect there.
    config.width = 8
    config.hidden = config.get_ref("width")
    assert loop.run(config.lock(), str(tmp_path / "run"), "") == 0
    said = capsys.readouterr().out
    # The config of the small experiment has keys of its variants too.
    names = said.partition("no code has read these keys of the config so far: ")[2]
    names = set(names.partition(". If")[0].split(", "))
    assert names >= {"optimizer.warmup", "rates.first", "rates.second", "early.late"}
    assert names.isdisjoint(
        {"early.rate", "optimizer.learning_rate", "width", "hidden", "batch_size"}
    )


@pytest.mark.parametrize(
    "hidden, groups", [(16, ()), (20, ()), (18, ((0, 1, 2, 3), (4, 5, 6, 7)))]
)
def test_arrays_that_no_dimension_divides_are_named(tmp_path, capsys, hidden, groups):
    config = make_config("tests.toy.Wide", shard_update=True)
    config.update({"hidden": hidden, "steps": 1, "group_assignment": groups})
    assert loop.run(config.lock(), str(tmp_path / "run"), "") == 0
    said = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "are updated whole" in line
    ]
    # The last bias is one number, which needs no mention.
    all_others = 5 * hidden
    if hidden == 16:
        assert not said
        return
    (line,) = said
    assert (
        f"note: of {all_others + 1} parameters, {all_others} are updated whole" in line
    )
    assert (
        f"arrays: mlp/~/linear_0/w (3, {hidden}), mlp/~/linear_0/b ({hidden},)" in line
    )
