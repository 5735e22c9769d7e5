"""Tests of learners, of the analysis of values that differ between replicas, and of the
lower tier's contract.
"""

import contextlib
import dataclasses
import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xshard
from tests import toy
from xshard import errors, loop, mesh
from xshard.base import torus
from xshard.data import batches
from xshard.learners import state as state_of_learner
from xshard.optimizers import varying
from xshard.run import evaluation, preflight
from xshard.training import state as state_lib
from xshard.training import step

G = frozenset(["group"])
R = frozenset(["replica"])
S = frozenset(["slice"])


def axes_of(f, *args, inputs=(R | S,)):
    """Returns the axes along which each result of `f` differs, for arguments that
    differ along `inputs`.
    """
    the_mesh = mesh.make_mesh(slices=2)
    mapped = jax.shard_map(
        f, mesh=the_mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
    )
    (eqn,) = jax.make_jaxpr(mapped)(*args).jaxpr.eqns
    variations = [varying.Variation(axes) for axes in inputs]
    results = varying.outputs(eqn.params["jaxpr"], variations)
    return [result.axes for result in results]


psum = functools.partial(jax.lax.psum, axis_name=("slice", "replica"))
GROUPS = [[0, 1], [2, 3]]
TABLE = np.arange(3, dtype=np.float32)


def _written(x):
    """Writes a value into a mutable reference, and returns what is read from there."""
    kept = jax.new_ref(jnp.zeros(()))
    kept[...] = x
    return kept[...]


def _from_the_host(x):
    return jax.pure_callback(
        lambda: np.float32(0), jax.ShapeDtypeStruct((), np.float32)
    )


def _carried_late(x):
    """Carries a value that is equal at first, and differs after a few iterations."""
    shift = lambda carry, _: ((carry[1], carry[2], x), None)
    (first, *_), _ = jax.lax.scan(shift, (0.0, 0.0, 0.0), None, 4)
    return first


def _sum_of_scanned(x):
    total, _ = jax.lax.scan(lambda total, y: (total + psum(y), None), 0.0, x[None])
    return total


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda x: x + 1, R | S),
        (lambda x: jnp.ones_like(x), frozenset()),
        (psum, frozenset()),
        (lambda x: jax.lax.psum(x, "replica"), S),
        (lambda x: jax.lax.pmax(x, "slice"), R),
        (lambda x: jax.lax.all_gather(x, "replica")[0], S),
        # The sum makes only some of the replicas along an axis equal.
        (lambda x: jax.lax.psum(x, "replica", axis_index_groups=GROUPS), R | S),
        (lambda x: jax.lax.ppermute(psum(x), "replica", [(0, 1)]), R),
        (lambda x: jax.lax.psum_scatter(jnp.ones(4) * psum(x), "replica"), R),
        (lambda x: xshard.equal_on_replicas(x, given=x), R | S),
        (lambda x: xshard.equal_on_replicas(x, given=psum(x)), frozenset()),
        (_from_the_host, G | R | S),
        (_written, R | S),
        (lambda x: psum(x) + jnp.float32(jax.lax.axis_index("replica")), R),
        (lambda x: psum(x) + jnp.float32(jax.lax.axis_index("group")), G),
        (lambda x: jax.lax.psum(jax.lax.axis_index("group"), "group"), frozenset()),
        (lambda x: jax.jit(psum)(x), frozenset()),
        (lambda x: jax.jit(jnp.sin)(x), R | S),
        (jax.checkpoint(lambda x: jnp.sin(psum(x))), frozenset()),
        (lambda x: xshard.equal_on_replicas(x), frozenset()),
        (_carried_late, R | S),
        (_sum_of_scanned, frozenset()),
        # The number of iterations differs, so the result does.
        (lambda x: jax.lax.while_loop(lambda c: c < x, lambda c: c + 1, 0.0), R | S),
        (lambda x: jax.lax.fori_loop(0, 3, lambda _, c: c + 1.0, psum(x)), frozenset()),
        (lambda x: jax.lax.cond(x > 0, lambda: 1.0, lambda: 2.0), R | S),
        (lambda x: jax.lax.cond(psum(x) > 0, lambda: 1.0, lambda: 2.0), frozenset()),
        (lambda x: jax.lax.cond(psum(x) > 0, lambda: x, lambda: 2.0), R | S),
    ],
)
def test_the_axes_along_which_a_result_differs(f, expected):
    (axes,) = axes_of(f, jnp.float32(1))
    assert axes == expected


def test_the_analysis_looks_into_custom_derivatives():
    @jax.custom_vjp
    def same(x):
        return psum(x)

    same.defvjp(lambda x: (psum(x), None), lambda _, g: (g,))
    assert axes_of(same, jnp.float32(1)) == [frozenset()]


class Line(xshard.Experiment):
    """Fits a line on the lower tier. Tests derive from it and add to its state."""

    def __init__(self, config):
        super().__init__(config)
        self.learner = xshard.Learner(self._network, self._rule, self.config)

    def train_data(self):
        return toy.Toy(self.config).train_data()

    def eval_data(self):
        data = self.train_data()
        return {
            name: {k: x[rows] for k, x in data.items()} for name, rows in SPLITS.items()
        }

    def _network(self, x):
        return hk.Linear(1)(x)[:, 0]

    def _rule(self):
        return xshard.CrossShardOptimizer(optax.sgd(0.1), slice_axis_name="slice")

    def init(self, key, batch):
        return {"line": self.learner.init(key, batch["x"])}

    def train_step(self, state, batch, key):
        line, outcome = self.learner.update(state["line"], self.loss, batch, key)
        return {"line": line}, {"line": outcome}

    def loss(self, state, batch, key):
        outputs, net_state = self.learner.apply(state, key, batch["x"])
        return jnp.mean((outputs - batch["y"]) ** 2), net_state, {}

    def eval_step(self, state, batch, key):
        outputs, _ = self.learner.apply(state["line"], None, batch["x"])
        pair = jnp.stack([outputs, batch["y"]], axis=-1)
        return {
            "pair": pair,
            "product": outputs * batch["y"],
            "noise": jax.random.normal(key, outputs.shape),
        }

    def summarize(self, sums, count):
        return {
            "ratio": sums["product"] / count,
            "noise": sums["noise"] / count,
            "mean": sums["pair"][1] / count,
        }


SPLITS = {"first": slice(0, 13), "rest": slice(13, 50)}


def make(kind, *, replicas=None, **changes):
    config = toy.get_config()
    config.reduction.shard_params = changes.pop("shard_params", False)
    config.update(changes)
    devices = jax.devices()[:replicas]
    the_mesh = mesh.make_mesh(config.group_assignment or None, devices=devices)
    experiment = kind(config)
    train = batches.TrainBatches(
        experiment.train_batches, the_mesh, batch_size=16, seed=0
    )
    return experiment, the_mesh, train


def check(kind, **changes_of_config):
    """Makes the checks that a run makes before its first step: the step traces, and no
    unmarked value differs.
    """
    experiment, the_mesh, train = make(kind, **changes_of_config)
    state = state_lib.abstract_state(experiment, the_mesh, 0, train.example)
    asks = [lambda predict: experiment.samples(predict, None)]
    preflight.programs(experiment, the_mesh, state, train.shapes(), asks=asks)


def test_splits_and_metrics_that_are_not_means():
    experiment, the_mesh, train = make(Line)
    state = state_lib.init(experiment, the_mesh, 0, train.example)
    judge = evaluation.Evaluation(experiment, the_mesh, 8)
    values = judge(state)
    assert values == judge(state), "evaluations of one state must use the same keys"
    data = experiment.train_data()
    params = state.experiment["line"].params["linear"]
    outputs = (data["x"] @ np.asarray(params["w"]) + np.asarray(params["b"]))[:, 0]
    for name, rows in SPLITS.items():
        y = data["y"][rows]
        # The float32 sums are computed in another order.
        np.testing.assert_allclose(
            values[f"{name}/ratio"], np.mean(outputs[rows] * y), rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(
            values[f"{name}/mean"], np.mean(y), rtol=1e-5, atol=1e-6
        )
    assert values["first/noise"] != values["rest/noise"]


class Ratio(Line):
    """Divides by a sum, which is zero while tracing without examples; its second split
    may lack an array.
    """

    def eval_data(self):
        first, rest = super().eval_data().values()
        return {"first": first, "rest": {"x": rest["x"]} if self.config.lacks else rest}

    def eval_step(self, state, batch, key):
        return {"x": batch["x"][:, 0], "y": batch["y"]}

    def summarize(self, sums, count):
        return {"ratio": float(sums["x"]) / float(sums["y"])}


def test_all_splits_are_traced_even_if_summarize_fails():
    for lacks in (False, True):
        experiment, the_mesh, train = make(Ratio, lacks=lacks)
        state = state_lib.abstract_state(experiment, the_mesh, 0, train.example)
        judge = evaluation.Evaluation(experiment, the_mesh, 8)
        with pytest.raises(KeyError, match="y") if lacks else contextlib.nullcontext():
            judge.check(state, experiment.config.checkpoint)


class Counting(Line):
    """Keeps a sum of the inputs: one for all replicas, or one for each replica."""

    def init(self, key, batch):
        count = jnp.float32(0)
        if self.config.marked:
            count = xshard.PerReplica(count)
        return {**super().init(key, batch), "count": count}

    def train_step(self, state, batch, key):
        new, metrics = super().train_step({"line": state["line"]}, batch, key)
        seen = jnp.sum(batch["x"])
        if self.config.marked:
            return {
                **new,
                "count": xshard.PerReplica(state["count"].value + seen),
            }, metrics
        if self.config.summed:
            seen = psum(seen)
        return {**new, "count": state["count"] + seen}, metrics


def test_unmarked_state_that_differs_is_refused():
    check(Counting, marked=False, summed=True)
    check(Counting, marked=True, summed=False)
    with pytest.raises(errors.UserError) as e:
        check(Counting, marked=False, summed=False)
    text = str(e.value)
    for part in (
        "Counting.train_step (",
        "'count', of type float32",
        "xshard.PerReplica",
        "pmean",
    ):
        assert part in text


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_network_state_is_equal_on_all_replicas_for_each_policy(policy, replicas):
    """This includes one replica, where an optimizer has nothing to reduce and its vote
    is not a collective.
    """
    check(toy.Toy, replicas=replicas, on_nonfinite=policy)


def test_one_replica_refuses_state_that_would_differ_on_several():
    check(Counting, marked=False, summed=True, replicas=1)
    with pytest.raises(errors.UserError, match="'count', of type float32"):
        check(Counting, marked=False, summed=False, replicas=1)


class Predicting(Counting):
    """Predicts in the way that the config selects from PREDICTIONS."""

    def predict(self, state, batch):
        outputs, _ = self.learner.apply(state["line"], None, batch["x"])
        return {"y": PREDICTIONS[self.config.way](outputs, state)}

    def samples(self, predict, key):
        return str(predict({"x": np.ones((3, 3))})) if self.config.samples else ""


PREDICTIONS = {
    "plain": lambda x, state: x,
    "gathered": lambda x, state: jnp.mean(jax.lax.all_gather(x, "group"), axis=0),
    "own": lambda x, state: x + state["count"].value,
    "own mean": lambda x, state: (
        x + jax.lax.pmean(state["count"].value, ("slice", "replica"))
    ),
    "number": lambda x, state: x + jnp.float32(jax.lax.axis_index("replica")),
    "other batch": lambda x, state: x[state["nothing"]],
}


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("groups", [(), ((0, 1, 2, 3), (4, 5, 6, 7))])
def test_a_prediction_must_be_equal_on_all_devices(groups, samples):
    predicts = functools.partial(
        check, Predicting, group_assignment=groups, marked=True, samples=samples
    )
    predicts(way="gathered")
    replicas = "groups" if groups else "replicas"
    for way in ("own", "number"):
        message = (
            "Predicting.predict .* returns 'y', float32 of shape .* between the "
            f"{replicas}"
        )
        with pytest.raises(errors.UserError, match=message):
            predicts(way=way)
    # These are equal within a group, but not between groups.
    for way in ("plain", "own mean"):
        refused = pytest.raises(
            errors.UserError, match=r"all_gather\(outputs, 'group'\)"
        )
        with refused if groups else contextlib.nullcontext():
            predicts(way=way)
    # A prediction that fails is detected before the run only if the run will call it.
    with pytest.raises(KeyError) if samples else contextlib.nullcontext():
        predicts(way="other batch")


class Constants(Line):
    """Uses the constant TABLE, which JAX passes to the program before its arguments."""

    def init(self, key, batch):
        own = xshard.PerReplica(jnp.zeros(3))
        return {**super().init(key, batch), "alike": jnp.zeros(3), "own": own}

    def train_step(self, state, batch, key):
        new, metrics = super().train_step({"line": state["line"]}, batch, key)
        own = state["own"].value + jnp.sum(batch["x"]) * TABLE
        alike = own if self.config.mixes else state["alike"] + TABLE
        return {**new, "own": xshard.PerReplica(own), "alike": alike}, metrics


def test_constants_do_not_hide_state_that_differs():
    check(Constants, mixes=False)
    with pytest.raises(errors.UserError, match="'alike', of type float32"):
        check(Constants, mixes=True)


class Shaken(Line):
    """Adds a value that differs between replicas to the parameters, then updates."""

    def train_step(self, state, batch, key):
        line = state["line"]
        params = jax.tree.map(lambda w: w + jnp.mean(batch["x"]), line.params)
        return super().train_step({"line": line.replace(params=params)}, batch, key)


def test_an_update_does_not_hide_parameters_that_differed_before():
    with pytest.raises(errors.UserError, match="'line/params/linear/b'"):
        check(Shaken)


class Remembering(Line):
    """Keeps the network's output for each example of the last batch."""

    def init(self, key, batch):
        return {**super().init(key, batch), "last": xshard.PerExample(batch["y"])}

    def train_step(self, state, batch, key):
        line, outcome = self.learner.update(state["line"], self.loss, batch, key)
        return {"line": line, "last": xshard.PerExample(outcome.aux)}, {"line": outcome}

    def loss(self, state, batch, key):
        outputs, net_state = self.learner.apply(state, key, batch["x"])
        return jnp.mean((outputs - batch["y"]) ** 2), net_state, {}, outputs


@pytest.mark.parametrize("parts", [1, 2])
def test_the_aux_of_a_loss_has_a_row_for_each_example(parts):
    experiment, the_mesh, train = make(Remembering, micro_batches=parts)
    state = state_lib.init(experiment, the_mesh, 0, train.example)
    batch = next(train)
    linear = state.experiment["line"].params["linear"]
    expected = (
        np.asarray(batch["x"]) @ np.asarray(linear["w"]) + np.asarray(linear["b"])
    )[:, 0]
    state, *_ = jax.jit(step.make_watched_step(experiment, the_mesh))(state, batch)
    # The float32 sums are computed in another order.
    np.testing.assert_allclose(
        state.experiment["last"].value, expected, rtol=1e-5, atol=1e-6
    )


class Odd(Line):
    """Has a teacher that is never updated, several updates in a step, and Python
    numbers in its state.
    """

    def init(self, key, batch):
        line = super().init(key, batch)
        return {**line, "teacher": line["line"], "half": 0.5}

    def train_step(self, state, batch, key):
        def update(line, key):
            return self.learner.update(line, self.loss, batch, key)

        line, outcomes = jax.lax.scan(update, state["line"], jax.random.split(key, 3))
        outcome = (
            outcomes if self.config.all else jax.tree.map(lambda x: x[-1], outcomes)
        )
        new = {"line": line, "teacher": state["teacher"], "half": state["half"] * 1.0}
        return new, {"line": outcome}


def test_a_teacher_and_several_updates_in_a_step():
    check(Odd, all=False)
    experiment, the_mesh, train = make(Odd, all=False)
    state = state_lib.init(experiment, the_mesh, 0, train.example)
    assert not state.experiment["half"].weak_type
    after, _ = jax.jit(step.make_train_step(experiment, the_mesh))(state, next(train))
    assert not after.experiment["half"].weak_type
    assert int(after.experiment["line"].global_step) == 3


@pytest.mark.parametrize("bad", [0, 2, None])
def test_a_step_watches_all_updates_whose_outcomes_it_returns(bad):
    class Failing(Odd):
        def loss(self, state, batch, key):
            value, *rest = super().loss(state, batch, key)
            return jnp.where(state.global_step == bad, jnp.nan, 1.0) * value, *rest

    experiment, the_mesh, train = make(Failing if bad is not None else Odd, all=True)
    state = state_lib.init(experiment, the_mesh, 0, train.example)
    stepped = jax.jit(step.make_watched_step(experiment, the_mesh))(state, next(train))
    assert int(stepped.metrics["line/updates_per_step"]) == 3
    assert stepped.metrics["line/global_step"].shape == ()
    observed = stepped.observed["line"]
    assert int(observed.verdict) == (
        state_of_learner.FINE if bad is None else state_of_learner.NONFINITE
    )
    assert np.isfinite(observed.loss) == (bad is None)


@pytest.mark.parametrize("groups", [(), ((0, 1, 2, 3), (4, 5, 6, 7))])
def test_each_replica_has_its_own_marked_state(groups):
    experiment, the_mesh, train = make(Counting, marked=True, group_assignment=groups)
    state = state_lib.init(experiment, the_mesh, 0, train.example)
    replicas = (2, 4) if groups else (8,)
    assert state.experiment["count"].value.shape == replicas
    batch = next(train)
    state, _ = jax.jit(step.make_train_step(experiment, the_mesh))(state, batch)
    expected = np.asarray(batch["x"]).reshape(*replicas, -1).sum(-1)
    # The float32 sums of six numbers are computed in another order.
    np.testing.assert_allclose(
        state.experiment["count"].value, expected, rtol=1e-5, atol=1e-6
    )


class ReturnsStateAlone(Line):
    def train_step(self, state, batch, key):
        new, _ = super().train_step(state, batch, key)
        return new


class ReturnsNoOutcome(Line):
    def train_step(self, state, batch, key):
        new, _ = super().train_step(state, batch, key)
        return new, {}


class ReturnsNoState(Line):
    def train_step(self, state, batch, key):
        return {}, {}


class ReturnsMoreState(Line):
    def train_step(self, state, batch, key):
        new, _ = super().train_step(state, batch, key)
        return {**new, "more": 0}, {}


class LogsAnArray(Line):
    def train_step(self, state, batch, key):
        return state, {"x": jnp.ones(3)}


class LosesTwoThings(Line):
    def loss(self, state, batch, key):
        return jnp.float32(0), {}


class LosesAScalarAsAux(Line):
    def loss(self, state, batch, key):
        return jnp.sum(batch["x"]), {}, {}, jnp.float32(0)


class LosesOtherNetworkState(Line):
    def loss(self, state, batch, key):
        return jnp.sum(batch["x"]), {"m": {"w": 0}}, {}


class MarksAnotherNumberOfRows(Line):
    def init(self, key, batch):
        return {**super().init(key, batch), "x": xshard.PerExample(jnp.ones(5))}


class MarksNoOwnState(Line):
    def init(self, key, batch):
        number = jax.lax.axis_index("replica")
        return {**super().init(key, batch), "number": number}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ReturnsStateAlone, "must return two things"),
        (ReturnsNoOutcome, "metrics without those of the learner 'line'"),
        (ReturnsNoState, "a state without 'line/"),
        (ReturnsMoreState, "a state with 'more', which init did not create"),
        (LogsAnArray, "'x' of shape (3,)"),
        (LosesTwoThings, "must return three things"),
        (LosesAScalarAsAux, "a scalar as its fourth value"),
        (MarksAnotherNumberOfRows, "'x' with an array of shape (5,)"),
        (LosesOtherNetworkState, "as the network's state"),
        (MarksNoOwnState, "a state that depends on the replica's number"),
    ],
)
def test_mistakes_are_named(kind, message):
    with pytest.raises(errors.UserError) as e:
        check(kind)
    assert message in str(e.value)


def test_a_learner_outside_a_run_explains_the_alternative():
    experiment, *_ = make(Line)
    with pytest.raises(
        errors.UserError, match="Elsewhere: with xshard.learners.run_context.run_on"
    ):
        experiment.init(jax.random.key(0), {"x": jnp.ones((2, 3))})


class Held(Line):
    """Keeps its parameters in shards, and a copy of them in the state."""

    def _network(self, x):
        return hk.nets.MLP([512, 1], activation=jnp.tanh)(x)[:, 0]

    def _rule(self):
        return xshard.CrossShardOptimizer(
            optax.sgd(0.1), slice_axis_name="slice", **self.config.reduction
        )

    def init(self, key, batch):
        state = super().init(key, batch)
        return {**state, "copy": state["line"].params}

    def train_step(self, state, batch, key):
        new, metrics = super().train_step({"line": state["line"]}, batch, key)
        return {**new, "copy": state["copy"]}, metrics

    def outputs(self, params, state, batch):
        return self.learner.apply(
            state["line"].replace(params=params), None, batch["x"]
        )[0]


class Foretelling(Held):
    """Has predictions, which its samples use."""

    def predict(self, state, batch):
        return self.learner.apply(state["line"], None, batch["x"])[0]

    def samples(self, predict, key):
        return str(predict({"x": np.ones((3, 3), np.float32)}))


def keeping(make):
    """Returns an experiment whose step replaces the copy by `make(experiment, params,
    copy, batch)`.
    """

    def train_step(self, state, batch, key):
        new, metrics = Held.train_step(self, state, batch, key)
        return {
            **new,
            "copy": make(self, new["line"].params, state["copy"], batch),
        }, metrics

    return type("Keeping", (Held,), {"train_step": train_step})


def updating(change):
    """Returns an experiment whose step returns `change(experiment, state, batch,
    update)`.
    """

    def train_step(self, state, batch, key):
        update = lambda line: self.learner.update(line, self.loss, batch, key)
        return change(self, state, batch, update)

    return type("Updating", (Held,), {"train_step": train_step})


def logging(make):
    """Returns an experiment that also logs `make(experiment, state, batch)`."""

    def train_step(self, state, batch, key):
        new, metrics = Held.train_step(self, state, batch, key)
        return new, {**metrics, "more": make(self, state, batch)}

    return type("Logging", (Held,), {"train_step": train_step})


def check_held(kind, **changes):
    experiment, the_mesh, train = make(kind, shard_params=True, **changes)
    state = state_lib.abstract_state(experiment, the_mesh, 0, train.example)
    copy = state.experiment["copy"]["mlp/~/linear_0"]["w"]
    assert copy.sharding.spec == jax.P(None, "replica")
    asks = [lambda predict: experiment.samples(predict, None)]
    preflight.programs(experiment, the_mesh, state, train.shapes(), asks=asks)
    evaluation.Evaluation(experiment, the_mesh, 8).check(
        state, experiment.config.checkpoint
    )


def penalised(self, state, batch, key):
    value, *rest = Line.loss(self, state, batch, key)
    return value + sum(jnp.sum(w**2) for w in jax.tree.leaves(state.params)), *rest


def many_updates(self, state, batch, update):
    """Makes three updates in a loop, and one more under a condition that is equal on
    all replicas.
    """
    line, outcomes = jax.lax.scan(lambda line, _: update(line), state["line"], length=3)
    line, _ = jax.lax.cond(
        line.global_step % 2 == 0, update, lambda x: (x, last(outcomes)), line
    )
    return {**state, "line": line}, {"line": last(outcomes)}


def last(outcomes):
    return jax.tree.map(lambda x: x[-1], outcomes)


def drawn(w):
    return jax.random.normal(jax.random.key(0), w.shape)


def noisy(w):
    return w + drawn(w)


over = lambda f: lambda self, params, copy, batch: jax.tree.map(f, copy, params)
PREDICATE = lambda batch: jnp.sum(batch["x"]) > 0


def update_of(change, state, update):
    line = state["line"]
    line, outcome = update(line.replace(params=jax.tree.map(change, line.params)))
    return {**state, "line": line}, {"line": outcome}


def outputs_if(self, state, batch):
    """Returns outputs of the network, applied on some replicas only."""
    apply = lambda: self.outputs(state["copy"], state, batch)[0]
    return jax.lax.cond(PREDICATE(batch), apply, lambda: 0.0)


def outputs_while(self, state, batch):
    """Returns outputs of the network, applied more often on some replicas."""
    rounds = jnp.int32(PREDICATE(batch)) + 1
    apply = lambda i, total: total + self.outputs(state["copy"], state, batch)[0]
    return jax.lax.fori_loop(0, rounds, apply, 0.0)


def derivative(self, state, batch):
    return jax.grad(lambda p: jnp.sum(self.outputs(p, state, batch)))(state["copy"])


def checkpointed(self, state, batch, key):
    """A loss that recomputes the network's intermediate values."""
    loss = jax.checkpoint(lambda state: Line.loss(self, state, batch, key))
    return loss(state)


def within(self, state, batch, key):
    """A loss that applies the network in a branch and in a loop, and differentiates it
    once more.
    """
    value, *rest = Line.loss(self, state, batch, key)
    again = lambda _: Line.loss(self, state, batch, key)[0]
    value += jax.lax.cond(PREDICATE(batch), again, lambda _: 0.0, None)
    value += jnp.sum(jax.lax.map(again, jnp.arange(2)))
    inner = lambda p: Line.loss(self, state.replace(params=p), batch, key)[0]
    return value + 1e-4 * optax.tree.norm(jax.grad(inner)(state.params)) ** 2, *rest


class Evaluated(Held):
    """Evaluates by a norm of parameters; applies the network on some replicas only."""

    def eval_step(self, state, batch, key):
        del key
        row = outputs_if(self, state, batch)
        return {"x": batch["x"][:, 0] * optax.tree.norm(state["copy"]) + row}

    summarize = xshard.Experiment.summarize


class Foretold(Foretelling):
    """Predicts by a norm of parameters, too."""

    def predict(self, state, batch):
        return super().predict(state, batch) * optax.tree.norm(state["copy"])


USES = {
    "average": keeping(over(lambda old, new: 0.9 * old + 0.1 * new)),
    "clip": keeping(
        over(lambda old, new: jnp.where(new > 0, jnp.clip(old, -1, 1), 0 * new))
    ),
    "constant": keeping(over(lambda old, new: jnp.zeros_like(old))),
    "largest": keeping(over(lambda old, new: new / (1 + jnp.max(jnp.abs(new))))),
    "noise": keeping(over(lambda old, new: noisy(new))),
    "order": keeping(over(lambda old, new: new[::-1])),
    "loop": keeping(
        over(lambda old, new: jax.lax.fori_loop(0, 3, lambda _, x: x + old, new))
    ),
    "several updates": updating(many_updates),
    "changed before": updating(
        lambda self, state, batch, update: update_of(noisy, state, update)
    ),
    "drawn before": updating(
        lambda self, state, batch, update: update_of(drawn, state, update)
    ),
    "outputs": logging(
        lambda self, s, batch: jnp.mean(self.outputs(s["copy"], s, batch))
    ),
    "norm": logging(lambda self, state, batch: optax.tree.norm(state["line"].params)),
    "branch": logging(outputs_if),
    "rounds": logging(outputs_while),
    "derivative": logging(
        lambda self, s, batch: optax.tree.norm(derivative(self, s, batch))
    ),
    "penalty": type("Penalised", (Held,), {"loss": penalised}),
    "checkpoint": type("Checkpointed", (Held,), {"loss": checkpointed}),
    "within a loss": type("Within", (Held,), {"loss": within}),
    "evaluation": Evaluated,
    "prediction": Foretold,
}


@pytest.mark.parametrize("use", USES)
def test_any_use_of_parameters_in_shards_is_right(use):
    ends = []
    for shard_params in (False, True):
        experiment, the_mesh, train = make(USES[use], shard_params=shard_params)
        state = state_lib.init(experiment, the_mesh, 0, train.example)
        copy = state.experiment["copy"]["mlp/~/linear_0"]["w"]
        assert ("replica" in copy.sharding.spec) == shard_params
        shapes = state_lib.abstract_state(experiment, the_mesh, 0, train.example)
        preflight.programs(experiment, the_mesh, shapes, train.shapes())
        apply = jax.jit(step.make_train_step(experiment, the_mesh), donate_argnums=0)
        for _ in range(2):
            state, metrics = apply(state, next(train))
        rows = {name: x[:16] for name, x in experiment.train_data().items()}
        made = []
        if use == "evaluation":
            evaluate = jax.jit(step.make_eval_step(experiment, the_mesh))
            made.append(evaluate(state, {**rows, "_mask": np.arange(16) < 13}))
        if use == "prediction":
            made.append(jax.jit(step.make_predict(experiment, the_mesh))(state, rows))
        ends.append(
            jax.device_get((dataclasses.replace(state, rng=None), metrics, made))
        )
    # Sums are in another order. The structure of a state records how its parameters
    # lie.
    for whole, held in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(held, whole, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("steps", [(), (4, 2)])
def test_a_prediction_from_shards_gathered_in_steps_is_equal(monkeypatch, steps):
    """A TPU's torus gathers in such steps."""
    monkeypatch.setattr(torus, "steps", lambda _: (steps, steps))
    check_held(Foretelling)


class Timed(toy.Toy):
    """A network whose output is a field of its batch, and that keeps the type of
    another.
    """

    def train_data(self):
        examples = super().train_data()
        return {**examples, "time": np.full(len(examples["x"]), 1001.0, np.float32)}

    def forward(self, batch, *, is_training):
        assert batch["x"].dtype == jnp.bfloat16
        kept = "time" in self.config.uncast
        assert batch["time"].dtype == (jnp.float32 if kept else jnp.bfloat16)
        return super().forward({"x": batch["x"]}, is_training=is_training)

    def uncast(self):
        return self.config.uncast


@pytest.mark.parametrize("uncast", ["", "/time$"])
def test_a_field_that_is_not_cast_keeps_its_type(uncast):
    config = toy.get_config()
    config.precision = "params=float32,compute=bfloat16,output=float32"
    config.uncast = uncast
    experiment = Timed(config)
    batch = experiment.train_data()
    # The initialization casts to the type of parameters, which is float32.
    state = state_lib.init(toy.Toy(config), mesh.make_mesh(), 0, batch).experiment
    key = jax.random.key(0)
    outputs, _ = experiment.learner.apply(state, key, batch, is_training=True)
    assert outputs.dtype == jnp.float32


class Followed(toy.Poisoned):
    """Counts the applied steps beside its learner."""

    def init(self, key, batch):
        return {"line": super().init(key, batch), "moves": jnp.zeros(())}

    def train_step(self, state, batch, key):
        line, outcome = super().train_step(state["line"], batch, key)
        moves = jnp.where(outcome.applied, state["moves"] + 1, state["moves"])
        return {"line": line, "moves": moves}, {"line": outcome}

    def eval_step(self, state, batch, key):
        return super().eval_step(state["line"], batch, key)


def test_state_beside_a_learner_sees_whether_the_update_was_applied(tmp_path):
    config = toy.get_config()
    config.update({"experiment": "tests.learners_test.Followed", "poisoned": ((0, 3),)})
    config.update({"steps": 5, "on_nonfinite": "skip"})
    run = loop.Run(config.lock(), str(tmp_path))
    with run.opened():
        state, *_ = run.complete()
    assert float(state.experiment["moves"]) == 4
    assert int(state.experiment["line"].global_step) == 4


class Masked(toy.Wide):
    """Has a loss that is a mean over some examples of a batch, of which its parts have
    different numbers.
    """

    def train_data(self):
        examples = super().train_data()
        # The first parts of a batch have most of the examples that count.
        return {
            **examples,
            "counts": (np.arange(len(examples["y"])) % 16 < 5).astype(np.float32),
        }

    def forward(self, batch, *, is_training):
        # Without keys, which would differ between the parts.
        return hk.nets.MLP([16, 1])(batch["x"])[:, 0]

    def loss(self, outputs, batch):
        errors = batch["counts"] * jnp.abs(outputs - batch["y"])
        count = jnp.maximum(jnp.sum(batch["counts"]), 1)
        return jnp.sum(errors**2) / count, {"error": jnp.sum(errors) / count}


class Weighted(Masked):
    """Says how much a part of a batch counts."""

    def weight(self, batch):
        return jnp.sum(batch["counts"])


def step_of(experiment, replicas, parts):
    """Returns the loss, the gradient norm and the logged error of a first step on 16
    examples in order.
    """
    config = toy.get_config()
    config.micro_batches = parts
    made = experiment(config)
    the_mesh = mesh.make_mesh(devices=jax.devices()[:replicas])
    batch = {name: x[:16] for name, x in made.train_data().items()}
    state = state_lib.init(made, the_mesh, 0, batch)
    _, metrics = jax.jit(step.make_train_step(made, the_mesh))(state, batch)
    return tuple(float(metrics[name]) for name in ("loss", "gradient_norm", "error"))


def test_a_weight_makes_the_mean_over_a_step_independent_of_its_parts():
    whole = step_of(Weighted, 1, 1)
    # Without a weight it is a mean of means.
    assert step_of(Masked, 1, 1) == whole
    assert abs(step_of(Masked, 4, 2)[1] / whole[1] - 1) > 0.01
    for replicas, parts in ((1, 4), (4, 1), (4, 2)):
        # float32 sums in another order.
        np.testing.assert_allclose(step_of(Weighted, replicas, parts), whole, rtol=1e-5)


class Undefined(Weighted):
    """Divides by the number that counts, also where that is 0."""

    def loss(self, outputs, batch):
        count = jnp.sum(batch["counts"])
        errors = batch["counts"] * jnp.abs(outputs - batch["y"])
        return jnp.sum(errors**2) / count, {"error": jnp.sum(errors) / count}


def test_a_loss_that_a_part_does_not_have_is_nan_as_its_gradients_are():
    whole = step_of(Weighted, 1, 1)
    # Of 16 examples the first five count, so the second half has none.
    np.testing.assert_allclose(step_of(Undefined, 1, 1), whole, rtol=1e-6)
    for replicas, parts in ((1, 2), (2, 1), (4, 2)):
        loss, gradient_norm, error = step_of(Undefined, replicas, parts)
        assert np.isnan(loss) and np.isnan(gradient_norm)
        # What is logged beside the loss does not count there.
        np.testing.assert_allclose(error, whole[2], rtol=1e-5)


def test_a_weight_for_each_example_is_refused():
    class Each(Masked):
        def weight(self, batch):
            return batch["counts"]

    with pytest.raises(
        errors.UserError, match=r"weight .*returned an array of shape \(16,\)"
    ):
        step_of(Each, 1, 1)
