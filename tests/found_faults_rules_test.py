"""Faults of update rules, groups and configs that were found in use, and must not come
back.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import xshard
from tests import rows, toy
from xshard import config as config_lib
from xshard import experiment as experiment_lib
from xshard import loop
from xshard import state as state_lib
from xshard import step as step_lib
from xshard.run import preflight


class RulesNoisy(toy.Toy):
    """Adds noise to its gradients, from a key of its rule or network."""

    def forward(self, batch, *, is_training):
        if self.config.noise == "network":
            hk.get_state("table", [3], init=_rules_table)
        return super().forward(batch, is_training=is_training)

    def optimizer(self):
        key = {"seed": 7, "typed": jax.random.key(7)}.get(self.config.noise, 7)
        noise = optax.add_noise(eta=0.1, gamma=0.0, key=key)
        if self.config.noise == "plain":
            noise = _rules_noise(lambda: jax.random.PRNGKey(7))
        elif self.config.noise == "constant":
            noise = _rules_noise(lambda: np.array([0, 7], np.uint32))
        elif self.config.noise == "network":
            noise = optax.identity()
        rule = optax.chain(noise, optax.sgd(0.1))
        return xshard.CrossShardOptimizer(rule, **self.config.reduction)


def _rules_table(shape, dtype):
    return jax.random.normal(jax.random.key(3), shape, dtype)


def _rules_noise(make_key):
    """Returns noise from a key that is two plain numbers."""

    def update(grads, key, params=None):
        del params
        key, draw = jax.random.split(key)
        add = lambda g: g + 0.1 * jax.random.normal(draw, g.shape, g.dtype)
        return jax.tree.map(add, grads), key

    return optax.GradientTransformation(lambda params: make_key(), update)


def _rules_config(experiment, **values):
    config = toy.get_config()
    config.experiment = f"tests.found_faults_rules_test.{experiment}"
    config.update(values)
    return config


def _rules_keys(config):
    """Returns the plain numbers of the rule's keys in a first state, by group."""
    mesh = xshard.make_mesh(config.group_assignment, devices=jax.devices()[:4])
    experiment = RulesNoisy(config)
    state = state_lib.init(experiment, mesh, 0, experiment.train_data())
    found = []
    for x in jax.tree.leaves(state.experiment.opt_state):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            found.append(np.asarray(jax.random.key_data(x)))
        elif x.dtype == jnp.uint32:
            found.append(np.asarray(x))
    (keys,) = found
    return keys


@pytest.mark.parametrize("noise", ["seed", "typed", "plain"])
def test_30_groups_do_not_share_the_keys_of_a_rule(noise):
    config = _rules_config("RulesNoisy", noise=noise, group_assignment=((0, 1), (2, 3)))
    first, second = _rules_keys(config)
    assert first.tolist() != second.tolist()


def test_30_one_group_keeps_the_key_that_a_rule_was_given():
    config = _rules_config("RulesNoisy", noise="seed", group_assignment=((0, 1, 2, 3),))
    expected = jax.random.key_data(jax.random.key(7))
    np.testing.assert_array_equal(_rules_keys(config), expected)


@pytest.mark.parametrize("noise", ["constant", "network"])
def test_30_what_groups_share_is_said(tmp_path, capsys, noise):
    config = _rules_config(
        "RulesNoisy", noise=noise, group_assignment=((0, 1), (2, 3)), steps=1
    )
    config.model_parallel = 2
    assert loop.run(config, str(tmp_path), "") == 0
    out = capsys.readouterr().out
    assert "warning: all groups begin with the same " in out
    shared = {"constant": "opt_state/", "network": "net_state/"}[noise]
    assert f"begin with the same {shared}" in out


def test_30_an_older_run_whose_groups_share_a_key_resumes_and_says_so(
    tmp_path, capsys, monkeypatch
):
    config = _rules_config(
        "RulesNoisy", noise="seed", group_assignment=((0, 1, 2, 3), (4, 5, 6, 7))
    )
    config.steps = 2
    with monkeypatch.context() as patch:
        patch.setattr(state_lib, "random_alike", lambda *_: (frozenset(), []))
        assert loop.run(config, str(tmp_path), "") == 0
    assert "hold the same random keys" not in capsys.readouterr().out
    config.steps = 4
    assert loop.run(config, str(tmp_path), "") == 0
    out = capsys.readouterr().out
    assert "warning: all groups hold the same random keys opt_state/" in out
    # A new run has nothing to say.
    assert loop.run(config, str(tmp_path / "new"), "") == 0
    assert "random key" not in capsys.readouterr().out


def test_07_groups_have_the_replicas_of_their_numbers():
    config = toy.get_config()
    config.group_assignment = [[0, 2], [1, 3]]
    devices = jax.devices()[:4]
    mesh = experiment_lib.mesh_of(config, devices)
    assert [[x.id for x in group.flat] for group in mesh.devices] == [[0, 2], [1, 3]]
    config.group_assignment = ((3, 0), (1, 2))
    mesh = experiment_lib.mesh_of(config, devices)
    assert [[x.id for x in group.flat] for group in mesh.devices] == [[3, 0], [1, 2]]
    config.model_parallel = 2
    config.group_assignment = ((1,), (0,))
    mesh = experiment_lib.mesh_of(config, devices)
    assert [[x.id for x in group.flat] for group in mesh.devices] == [[2, 3], [0, 1]]


class _RulesDevice:
    """A device of one of two hardware slices of four."""

    platform = "cpu"

    def __init__(self, number):
        self.id = number
        self.slice_index = number // 4


def test_07_groups_that_mix_hardware_slices_are_refused():
    devices = [_RulesDevice(number) for number in range(8)]
    with pytest.raises(xshard.errors.UserError, match="mixes hardware slices"):
        xshard.make_mesh([[0, 2, 4, 6], [1, 3, 5, 7]], slices=2, devices=devices)
    in_order = [[0, 1, 2, 3], [4, 5, 6, 7]]
    mesh = xshard.make_mesh(in_order, slices=2, devices=devices)
    for number in range(2):
        places = {device.slice_index for device in mesh.devices[:, number].flat}
        assert places == {number}


def test_07_a_run_goes_on_with_its_groups_in_their_order(tmp_path):
    config = toy.get_config()
    config.group_assignment = [[0, 2, 4, 6], [1, 3, 5, 7]]
    config.steps = 2
    assert loop.run(config, str(tmp_path), "") == 0
    config.steps = 3
    config.group_assignment = [[1, 3, 5, 7], [0, 2, 4, 6]]
    with pytest.raises(xshard.errors.UserError, match="in the run's order"):
        loop.run(config, str(tmp_path), "")
    config.group_assignment = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loop.run(config, str(tmp_path), "") == 0


class RulesDivided(toy.Toy):
    """Sums within parts of the replicas, in the place that the config names."""

    def optimizer(self):
        halves = [[0, 1, 2, 3], [4, 5, 6, 7]]
        sgd = optax.sgd(0.1)
        if self.config.place == "all":
            return xshard.CrossShardOptimizer(sgd, group_assignment=[list(range(8))])
        if self.config.place == "by hand":
            return xshard.CrossShardOptimizer(_RulesGroupLoss(sgd, halves))
        rule = xshard.CrossShardOptimizer(sgd, group_assignment=halves)
        if self.config.place == "loss scale":
            return xshard.MixedPrecisionLossScaleOptimizer(rule, 2.0)
        if self.config.place == "within slices":
            return xshard.CrossShardOptimizer(rule, axis_name="slice")
        return rule


class _RulesGroupLoss(xshard.OptimizerWrapper):
    """Multiplies the update by the loss of a part of the replicas."""

    def __init__(self, opt, groups):
        super().__init__()
        self.opt = xshard.OptaxOptimizer(opt)
        self._groups = groups
        self._sum = jnp.float32(0)

    def compute_gradients(self, loss, params, **kwargs):
        value, grads = self.opt.compute_gradients(loss, params, **kwargs)
        if not hk.running_init():
            total = value[0] if isinstance(value, tuple) else value
            self._sum = jax.lax.psum(total, "replica", axis_index_groups=self._groups)
        return value, grads

    def update(self, grads, params):
        return self.opt.update(jax.tree.map(lambda g: g * self._sum, grads), params)


@pytest.mark.parametrize("place", ["outermost", "loss scale", "within slices"])
def test_08_a_rule_that_divides_a_run_s_group_is_refused(tmp_path, place):
    config = _rules_config("RulesDivided", place=place, fingerprint_every_steps=0)
    with pytest.raises(
        xshard.errors.UserError, match=r"group_assignment=.* would drift apart"
    ):
        loop.Run(config, str(tmp_path))


def test_08_a_value_of_parts_of_the_replicas_is_no_equal_one(tmp_path):
    config = _rules_config("RulesDivided", place="by hand", fingerprint_every_steps=0)
    with pytest.raises(xshard.errors.UserError, match="a value of a replica's own"):
        loop.Run(config, str(tmp_path))


def test_08_one_group_of_all_replicas_trains(tmp_path):
    config = _rules_config("RulesDivided", place="all", steps=1)
    assert loop.run(config, str(tmp_path), "") == 0


class RulesScheduleFree(toy.Toy):
    """Trains with other parameters than it evaluates."""

    def optimizer(self):
        rule = optax.contrib.schedule_free(optax.sgd(0.1), 0.1)
        return xshard.CrossShardOptimizer(rule, **self.config.reduction)


def test_06_a_jitted_function_tells_states_apart_by_their_rules():
    experiment = RulesScheduleFree(toy.get_config())
    mesh = xshard.make_mesh(devices=jax.devices()[:2])
    state = state_lib.init(experiment, mesh, 0, experiment.train_data())
    batch = {name: x[:16] for name, x in experiment.train_data().items()}
    train_step = jax.jit(step_lib.make_train_step(experiment, mesh))
    state, _ = train_step(state, batch)
    for _ in range(3):
        state, _ = train_step(state, batch)
        # The state of a step is no new one to the next.
        cached = train_step._cache_size()
    assert cached == 2
    evaluated = jax.jit(step_lib.make_for_evaluation(experiment, mesh))(state)
    examples = {**experiment.eval_data(), "_mask": np.ones(10, bool)}
    eval_step = jax.jit(step_lib.make_eval_step(experiment, mesh))
    expected = eval_step(state, examples)["error"]
    assert eval_step(evaluated, examples)["error"] == expected
    assert jax.jit(eval_step)(evaluated, examples)["error"] == expected
    assert jax.tree.structure(state) != jax.tree.structure(evaluated)


@pytest.mark.parametrize("table", [(), ((2, 32), (4, 16)), ((2, 32), (50, 64))])
def test_04_a_rate_that_follows_the_batch_needs_a_rule_that_follows(tmp_path, table):
    config = toy.get_config()
    config.batch_schedule = table
    config.batch_learning_rate = "linear"
    with pytest.raises(xshard.errors.UserError, match="backs_off=True"):
        loop.Run(config, str(tmp_path))


def test_04_the_rate_returns_with_the_batch(tmp_path):
    config = toy.get_config()
    config.experiment = "tests.toy.Lowered"
    config.update(steps=6, log_every_steps=1, batch_schedule=((2, 32), (4, 16)))
    config.batch_learning_rate = "linear"
    assert loop.run(config, str(tmp_path), "") == 0
    logged = rows.read(tmp_path)
    scales = [row["update_scale"] for row in logged if "update_scale" in row]
    assert scales == [1, 1, 2, 2, 1, 1]


def _rules_by_layer(params):
    """Labels the weights and the biases of a network, whose modules it looks up."""
    return {"linear": {"w": "weights", "b": "biases"} if params["linear"] else {}}


_RULES_WITH_LOSS = {
    "a plateau of some layers": lambda: optax.partition(
        {
            "weights": optax.chain(optax.adam(0.1), contrib.reduce_on_plateau()),
            "biases": optax.sgd(0.1),
        },
        _rules_by_layer,
    ),
    "a rule for each layer": lambda: optax.partition(
        {"weights": optax.polyak_sgd(0.1), "biases": contrib.momo(0.1)},
        _rules_by_layer,
    ),
    "masked": lambda: optax.masked(
        optax.polyak_sgd(0.1), {"linear": {"w": True, "b": False}}
    ),
    "if finite": lambda: optax.apply_if_finite(optax.polyak_sgd(0.1), 3),
    "in several steps": lambda: optax.MultiSteps(optax.polyak_sgd(0.1), 2),
    "by hand": lambda: optax.GradientTransformation(
        lambda params: (),
        lambda grads, state, params=None, *, value: (
            jax.tree.map(lambda g: -0.1 * value * g, grads),
            state,
        ),
    ),
}


@pytest.mark.parametrize(
    "name, backs_off",
    [
        *((name, True) for name in _RULES_WITH_LOSS),
        ("a rule for each layer", False),
        ("by hand", False),
    ],
)
def test_24_the_loss_reaches_every_rule_within_a_rule(name, backs_off):
    make = _RULES_WITH_LOSS[name]
    x = jnp.arange(6.0).reshape(2, 3)

    def loss(params):
        return jnp.mean((x @ params["linear"]["w"] + params["linear"]["b"] - 1) ** 2)

    def step(params):
        rule = xshard.OptaxOptimizer(make(), name="opt", backs_off=backs_off)
        return rule.minimize(loss, params)[1]

    first = {"linear": {"w": jnp.ones([3]), "b": jnp.zeros([])}}
    step = hk.transform_with_state(step)
    params = first
    _, state = step.init(None, params)
    expected = first
    transformation = make()
    with jax.numpy_dtype_promotion("standard"):
        optax_state = transformation.init(expected)
        for _ in range(4):
            value, grads = jax.value_and_grad(loss)(expected)
            updates, optax_state = transformation.update(
                grads, optax_state, expected, value=value
            )
            expected = optax.apply_updates(expected, updates)
    for _ in range(4):
        params, state = step.apply({}, state, None, params)
    # The same operations, which XLA may fuse in another way.
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        params,
        expected,
    )
    assert np.all(params["linear"]["w"] != first["linear"]["w"])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: optax.lbfgs(), "update needs 'grad' and 'value_fn'"),
        (lambda: contrib.sophia(0.1), "update needs 'obj_fn'"),
        (
            lambda: optax.chain(
                optax.MultiSteps(optax.polyak_sgd(), 2).gradient_transformation()
            ),
            "'value', the loss, and what it is nested in does not pass that on",
        ),
    ],
)
def test_24_what_a_rule_cannot_be_given_is_named(make, message):
    params = {"linear": {"w": jnp.ones([3])}}
    create = hk.transform_with_state(lambda: xshard.OptaxOptimizer(make()).init(params))
    with pytest.raises(ValueError, match=message):
        create.init(None)


def test_28_an_experiment_reads_a_key_by_its_earlier_name():
    config = xshard.config.default()
    config.on_parted = "roll_back"
    config.model = {"on_parted": 3, "width": 8}
    read = config_lib.ReadConfig(config)
    assert "on_divergence" in read.unread()
    assert read.on_parted == read["on_parted"] == read.get("on_parted") == "roll_back"
    assert "on_divergence" not in read.unread()
    assert "on_parted" not in read
    assert hasattr(read, "on_parted")
    # Only keys of the outermost level were renamed.
    assert read.model.on_parted == 3
    with pytest.raises(AttributeError):
        read.checkpoint.on_parted  # noqa: B018
    with pytest.raises(AttributeError):
        read.model.on_divergence  # noqa: B018


class RulesAveraged(xshard.Experiment):
    """Averages its parameters on the lower tier, and names its values itself."""

    def __init__(self, config):
        super().__init__(config)
        self.learner = xshard.Learner(self._network, self._rule, config)

    def train_data(self):
        return toy.Toy(self.config).train_data()

    def eval_data(self):
        return self.train_data()

    def _network(self, x):
        return hk.Linear(1)(x)[:, 0]

    def _rule(self):
        rule = xshard.CrossShardOptimizer(optax.sgd(0.1))
        return xshard.MovingAverageOptimizer(rule, 0.5)

    def init(self, key, batch):
        return self.learner.init(key, batch["x"])

    def train_step(self, state, batch, key):
        return self.learner.update(state, self._loss, batch, key)

    def _loss(self, state, batch, key):
        outputs, net_state = self.learner.apply(state, key, batch["x"])
        return jnp.mean((outputs - batch["y"]) ** 2), net_state, {}

    def for_evaluation(self, state):
        return self.learner.for_evaluation(state)

    def eval_step(self, state, batch, key):
        values = {"error": self._error(self.for_evaluation(state), batch)}
        if self.config.names_raw:
            values["raw/error"] = self._error(state, batch)
        return values

    def _error(self, state, batch):
        outputs, _ = self.learner.apply(state, None, batch["x"])
        return (outputs - batch["y"]) ** 2


@pytest.mark.parametrize("names_raw", [False, True])
def test_34_raw_values_are_announced_where_there_are_some(tmp_path, capsys, names_raw):
    config = _rules_config("RulesAveraged", names_raw=names_raw, steps=1)
    assert loop.run(config, str(tmp_path), "") == 0
    out = capsys.readouterr().out
    assert "of MovingAverageOptimizer.evaluation_params" in out
    assert ("'raw/...' are those that train" in out) == names_raw
    assert ("raw/error" in rows.results(tmp_path)["eval"]) == names_raw


@pytest.mark.parametrize(
    "experiment, precision, warns",
    [
        ("RulesAveraged", "params=float32,compute=float16,output=float32", True),
        ("RulesAveraged", "params=half,compute=float32,output=float32", True),
        ("RulesAveraged", "params=float32,compute=bfloat16,output=float32", False),
        ("RulesScaled", "params=float32,compute=float16,output=float32", False),
    ],
)
def test_35_float16_without_a_loss_scale_is_said_once(experiment, precision, warns):
    config = _rules_config(experiment, precision=precision)
    made = experiment_lib.load(config.experiment)(config_lib.ReadConfig(config))
    mesh = xshard.make_mesh(devices=jax.devices()[:2])
    state = state_lib.abstract_state(made, mesh, 0, made.train_data())
    said = list(preflight.warnings(made, config, state, None))
    assert "\n".join(said).count("warning: float16 without a loss scale") == warns


def test_35_a_run_says_so_when_it_begins(tmp_path, capsys):
    config = _rules_config("RulesAveraged", names_raw=False, steps=1)
    config.precision = "params=float32,compute=float16,output=float32"
    loop.run(config, str(tmp_path), "")
    out = capsys.readouterr().out
    assert out.count("warning: float16 without a loss scale") == 1


class RulesScaled(RulesAveraged):
    """Scales the loss by a number that is fixed."""

    def _rule(self):
        return xshard.MixedPrecisionLossScaleOptimizer(super()._rule(), 128.0)


class _RulesKeepsLoss(xshard.Optimizer):
    """Keeps its loss where it must not."""

    def compute_gradients(self, loss, params, **kwargs):
        value, grads = super().compute_gradients(loss, params, **kwargs)
        hk.set_state("loss", value)
        return value, grads

    def update(self, grads, params):
        return params


class _RulesKeepsAround(xshard.OptimizerWrapper):
    """Keeps its loss, after the rule within has returned it."""

    def __init__(self, opt):
        super().__init__()
        self.opt = opt

    def compute_gradients(self, loss, params, **kwargs):
        value, grads = self.opt.compute_gradients(loss, params, **kwargs)
        hk.set_state("loss", value)
        return value, grads


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda: xshard.CrossShardOptimizer(_RulesKeepsLoss()), "_RulesKeepsLoss"),
        (
            lambda: xshard.MixedPrecisionLossScaleOptimizer(
                xshard.CrossShardOptimizer(_RulesKeepsLoss()), 2.0
            ),
            "_RulesKeepsLoss",
        ),
        (
            lambda: xshard.CrossShardOptimizer(
                _RulesKeepsAround(xshard.OptaxOptimizer(optax.sgd(0.1)))
            ),
            "_RulesKeepsAround",
        ),
    ],
)
def test_27_the_rule_that_keeps_state_in_compute_gradients_is_named(make, name):
    params = {"m": {"w": jnp.ones([])}}
    step = hk.transform_with_state(
        lambda: make().minimize(lambda params: params["m"]["w"], params)
    )
    message = f"^{name}.compute_gradients keeps the state 'loss'"
    with pytest.raises(xshard.errors.UserError, match=message):
        step.init(None)


def _rules_mapped(f, shape=(2, 4)):
    """Returns a function of each replica's rows, mapped as for sharded updates."""
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, ("slice", "replica"))
    rows_of_all = jax.P(("slice", "replica"))
    mapped = xshard.vmap_replicas(
        lambda w, x: jax.tree.map(lambda y: y[None], f(w, x)),
        mesh,
        in_specs=(jax.P(), rows_of_all),
        out_specs=rows_of_all,
    )
    return jax.jit(mapped)


_RULES_WHERE = ("update", "vote", "aggregate", "exchange", "given")


class _RulesOwn(xshard.OptimizerWrapper):
    """Adds its replica's index in a phase."""

    def __init__(self, opt, where):
        super().__init__()
        self.opt = opt
        self._where = where

    def _own(self, where, tree):
        if where != self._where or hk.running_init():
            return tree
        index = jax.lax.axis_index("replica")
        return jax.tree.map(lambda x: x + index.astype(x.dtype), tree)

    def aggregate(self, grads):
        return self._own("aggregate", self.opt.aggregate(grads))

    def vote(self, grads):
        return self._own("vote", jnp.int32(0)) < 9

    def update(self, grads, params):
        return self._own("update", self.opt.update(grads, params))

    def exchange(self, before, after, applied):
        return self._own("exchange", after)


@pytest.mark.parametrize("shard_update", [True, False])
@pytest.mark.parametrize("where", _RULES_WHERE)
def test_25_a_replica_s_index_in_a_rule_is_named_in_a_step_of_one_s_own(
    where, shard_update
):
    def make():
        rule = xshard.OptaxOptimizer(optax.sgd(0.1))
        reduced = xshard.CrossShardOptimizer(rule, shard_update=shard_update)
        return _RulesOwn(reduced, where)

    def step(params, x):
        if where == "given":
            index = jax.lax.axis_index("replica").astype(x.dtype)
            params = jax.tree.map(lambda p: p + index, params)
        return make().minimize(lambda p: jnp.mean(x @ p["m"]["w"]), params)[1]

    params = {"m": {"w": jnp.ones((16, 2))}}
    create = hk.transform_with_state(lambda params: make().init(params))
    _, state = create.init(None, params)
    apply = hk.transform_with_state(step).apply
    mapped = xshard.vmap_replicas(
        lambda params, x: apply({}, state, None, params, x)[0],
        jax.sharding.Mesh(jax.devices(), "replica"),
        in_specs=(jax.P(), jax.P("replica")),
        out_specs=jax.P(),
    )
    message = "from a value of a replica's own"
    if where == "given" and shard_update:
        message = "is given the parameter 'm/w' with other values on each replica"
    with pytest.raises(xshard.errors.UserError, match=message):
        jax.eval_shape(mapped, params, jnp.ones((16, 16)))


def _rules_wave(w, x):
    return jnp.sum(jnp.sin(w * x))


def _rules_wave_of_all(w, x):
    return jax.lax.psum(_rules_wave(w, x), ("slice", "replica"))


_RULES_CALLS = {
    "a gradient": lambda f, w, x: jax.grad(f)(w, x),
    "a gradient of what it closes over": lambda f, w, x: jax.grad(
        lambda w: f(w, x) ** 2
    )(w),
    "a gradient of a scan": lambda f, w, x: jax.grad(
        lambda w: jax.lax.scan(lambda c, _: (c + f(w, x) * c, None), 1.0, None, 3)[0]
    )(w),
    "a map as long as the replicas": lambda f, w, x: jax.vmap(
        lambda scale: f(scale * w, x)
    )(jnp.arange(4.0)),
    "a map of gradients": lambda f, w, x: jax.vmap(
        lambda scale: jax.grad(f)(scale * w, x)
    )(jnp.arange(3.0)),
}


@pytest.mark.parametrize("f", [_rules_wave, _rules_wave_of_all])
@pytest.mark.parametrize("name", _RULES_CALLS)
def test_26_what_each_replica_calls_is_differentiated_and_mapped(name, f):
    use = _RULES_CALLS[name]
    w = jnp.array([2.0, 3.0])
    x = jnp.arange(16.0).reshape(8, 2) + 1
    got = _rules_mapped(lambda w, x: use(xshard.per_replica(f), w, x[0]))(w, x)
    expected = _rules_mapped(lambda w, x: use(f, w, x[0]))(w, x)
    # Sums in float32, in another order.
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_26_python_s_values_stay_what_they_are():
    @xshard.per_replica
    def scaled(x, count, *, flip, name=None):
        assert name is None
        return -x * count if flip else x[:count]

    f = _rules_mapped(lambda w, x: (scaled(w, 1, flip=False), scaled(w, 3, flip=True)))
    first, second = f(jnp.array([2.0, 3.0]), jnp.zeros(8))
    np.testing.assert_array_equal(first[0], [2.0])
    np.testing.assert_array_equal(second[0], [-6.0, -9.0])


def _rules_draw(w):
    return w + jax.random.normal(hk.next_rng_key(), w.shape)


def _rules_count(w):
    hk.set_state("count", hk.get_state("count") + 1)
    return w


@pytest.mark.parametrize(
    "f, message",
    [
        (_rules_draw, "_rules_draw, .* draws a random key of Haiku's: give it"),
        (_rules_count, "_rules_count, .* writes Haiku's state '~/count'"),
    ],
)
def test_26_keys_and_state_of_haiku_are_refused_by_name(f, message):
    transformed = hk.transform_with_state(xshard.per_replica(f))
    state = {"~": {"count": jnp.int32(0)}}

    def step(w, x):
        return transformed.apply({}, state, jax.random.key(0), w)[0]

    with pytest.raises(xshard.errors.UserError, match=message):
        jax.eval_shape(_rules_mapped(step), jnp.ones(2), jnp.zeros(8))


def test_26_haiku_s_parameters_and_state_are_read():
    read = lambda: hk.get_parameter("p", [2]) + hk.get_state("count")
    transformed = hk.transform_with_state(xshard.per_replica(read))
    state = {"~": {"count": jnp.float32(3)}}
    step = lambda w, x: transformed.apply({"~": {"p": w}}, state, None)[0]
    np.testing.assert_array_equal(_rules_mapped(step)(jnp.ones(2), jnp.zeros(8)), 4.0)


def test_26_gradients_that_cannot_be_are_refused_by_name():
    w = jnp.ones(2)
    own = xshard.per_replica(_rules_wave)
    twice = lambda w, x: jax.grad(lambda w: jnp.sum(jax.grad(own)(w, x[0])))(w)
    with pytest.raises(xshard.errors.UserError, match="_rules_wave.*twice"):
        jax.eval_shape(_rules_mapped(twice), w, jnp.ones((8, 2)))
    specs = (jax.P("slice"), jax.P())
    sharded = xshard.per_replica(lambda w, x: jnp.sum(w), in_specs=specs)
    in_shards = lambda w, x: jax.grad(sharded)(w, x)
    with pytest.raises(xshard.errors.UserError, match="with in_specs or out_specs"):
        jax.eval_shape(_rules_mapped(in_shards), w, jnp.ones(8))


class RulesTogether(toy.Wide):
    """Trains by rules that do not go together, with the reason."""

    def optimizer(self):
        sgd = optax.sgd(0.1)
        if self.config.rule == "an average of schedule-free":
            sgd = optax.contrib.schedule_free(sgd, 0.1)
        rule = xshard.CrossShardOptimizer(
            sgd, slice_axis_name="slice", **self.config.reduction
        )
        if "average" in self.config.rule:
            return xshard.MovingAverageOptimizer(rule, 0.5)
        return rule


class RulesClipped(RulesTogether):
    """Clips the gradients of each replica."""

    def clip_gradients(self, grads):
        return grads


@pytest.mark.parametrize(
    "experiment, rule, changes, message",
    [
        (
            "RulesClipped",
            "plain",
            {"reduction": {"shard_update": True, "shard_params": True}},
            "shard_params=True cannot be used with clip_gradients: no replica has its "
            "own gradients",
        ),
        (
            "RulesTogether",
            "plain",
            {
                "reduction": {"shard_update": True, "shard_params": True},
                "noise_scale_steps": 5,
            },
            "noise_scale_steps cannot be used with .* no replica has its own",
        ),
        (
            "RulesTogether",
            "an average",
            {"outer": {"every_steps": 2}, "slices": 2},
            "cannot be used with outer.every_steps=2: each slice would keep another",
        ),
        (
            "RulesTogether",
            "an average of schedule-free",
            {},
            "rules that each have parameters of their own for evaluation",
        ),
    ],
)
def test_29_what_does_not_go_together_is_refused_with_the_reason(
    tmp_path, experiment, rule, changes, message
):
    config = _rules_config(experiment, rule=rule)
    config.update(changes)
    with pytest.raises(xshard.errors.UserError, match=message):
        loop.Run(config, str(tmp_path))
