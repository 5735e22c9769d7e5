"""Tests that mistakes in an experiment are named with their place and a fix.

They are found before the run creates anything.
"""

import itertools
import sys

import jax
import pytest

from tests import winged
from xshard import cli, errors
from xshard.new import __main__ as new

FORWARD = '        return network(batch["point"])'
LOSS = '        return jnp.mean(_cross_entropy(outputs, batch)), {"accuracy": accuracy}'
EVALUATE = '        return {"loss": loss, "accuracy": hits}'
TRAIN = "        return _spirals(np.arange(97))"
EVAL = "        return _spirals(np.arange(96) + 0.5)"
RETURN = "        return optax.adam(rate)"


def before(line, text):
    """Returns the edit that puts text before a line."""
    return (line, f"{text}\n{line}")


def train(text):
    """Returns the edit that makes `train_data` return `text`, where `d` is the data."""
    return (TRAIN, f"        d = _spirals(np.arange(97))\n        return {text}")


def in_loss(old, text):
    return (LOSS, LOSS.replace(old, text))


def in_evaluate(text):
    return (EVALUATE, EVALUATE.replace("hits}", f"{text}}}"))


NORM = (
    "        hk.BatchNorm(True, True, 0.9{})(batch['point'], is_training=is_training)"
)
STATE = "        x = hk.get_state('x', {}, init=jnp.zeros); hk.set_state('x', {})"
# Each case: an edit of the experiment that `python -m xshard.new` writes, and parts of
# the message.
MISTAKES = {
    "loss alone": (
        in_loss(', {"accuracy": accuracy}', ""),
        ["Spirals.loss (experiment_", "must return two things", "return loss, {}"],
    ),
    "loss for each example": (
        in_loss(
            "jnp.mean(_cross_entropy(outputs, batch))", "_cross_entropy(outputs, batch)"
        ),
        ["a loss of shape (24,)", "return jnp.mean(loss)"],
    ),
    "a Python number as the loss": (
        (LOSS, "        return 1.0, {}"),
        ["1.0 as the loss", "computed from"],
    ),
    "loss of an integer": (
        (LOSS, '        return jnp.sum(batch["label"]), {}'),
        ["a int32 array of shape () as the loss", "floating-point"],
    ),
    "no scalars": (
        in_loss('{"accuracy": accuracy}', "None"),
        ["None beside the loss", "{} for"],
    ),
    "nested scalars": (
        in_loss('{"accuracy": accuracy}', '{"a": {"b": accuracy}}'),
        ["a dictionary called 'a'", "call it 'a/b'"],
    ),
    "a scalar for each example": (
        in_loss("accuracy}", "_hits(outputs, batch)}"),
        ["'accuracy' of shape (24,)", "jnp.mean(accuracy)"],
    ),
    "a scalar of text": (
        in_loss("accuracy}", "'high'}"),
        ["'high' called 'accuracy'", "numbers"],
    ),
    "a complex scalar": (
        in_loss("accuracy}", "accuracy * 1j}"),
        ["'accuracy' as complex64", "jnp.abs(accuracy)"],
    ),
    "a scalar called loss": (
        in_loss('"accuracy"', '"loss"'),
        ["'loss', which every run logs"],
    ),
    "a name that is no string": (
        in_loss('"accuracy"', "1"),
        ["under 1; names must be strings"],
    ),
    "parameters in loss": (
        before(LOSS, "        hk.get_parameter('w', (), init=jnp.ones)"),
        [
            "in Spirals.loss: Unable to retrieve parameter 'w'",
            "Only the network, such as forward, may create parameters",
        ],
    ),
    "evaluation that returns nothing": (
        (EVALUATE, "        pass"),
        ["Spirals.evaluate (experiment_", "returned None", "{'accuracy': hits}"],
    ),
    "evaluation of means": (
        in_evaluate("jnp.mean(_hits(outputs, batch))"),
        ["'accuracy' of shape ()", "last batch is not full", "without jnp.mean"],
    ),
    "evaluation of logits": (
        in_evaluate("outputs"),
        ["'accuracy' of shape (24, 2)", "jnp.mean(accuracy, axis=(1,))"],
    ),
    "evaluation of a part": (
        in_evaluate("_hits(outputs, batch)[:3]"),
        ["of shape (3,)", "has 24 examples"],
    ),
    "evaluation that counts": (
        in_evaluate("_hits(outputs, batch), 'count': 1"),
        ["'count', which"],
    ),
    "evaluation that returns text": (
        in_evaluate("'high'"),
        ["'high' as 'accuracy'", "a value for each"],
    ),
    "a layer in evaluation alone": (
        before(
            FORWARD, "        is_training or hk.Linear(2, name='more')(batch['point'])"
        ),
        [
            "in Spirals.forward: Unable to retrieve parameter 'w' for module 'more'",
            "whether",
        ],
    ),
    "nothing from the network": (
        (FORWARD, "        network(batch['point'])"),
        ["Spirals.forward (experiment_", "returned None", "return outputs"],
    ),
    "no parameters": (
        (FORWARD, "        return batch['point'] @ jnp.ones((2, 2))"),
        ["made no parameters", "hk.Linear"],
    ),
    "a rule of optax that is not made": (
        (RETURN, "        return optax.adam"),
        [
            "Spirals.optimizer (experiment_",
            "returned a function",
            "must return an optax transformation, such as optax.adam(rate)",
            "xshard.CrossShardOptimizer(",
        ],
    ),
    "no rule": ((RETURN, ""), ["returned None", "return opt?"]),
    "a rule that does not reduce": (
        (RETURN, "        return xshard.OptaxOptimizer(optax.adam(rate))"),
        ["Spirals.optimizer (experiment_", "does not reduce over the axis 'replica'"],
    ),
    "a tuple of arrays": (
        train("(d['point'], d['label'])"),
        ["What Spirals.train_data (experiment_", "is a tuple of 2", "{'image': images"],
    ),
    "lists": (
        train("{k: v.tolist() for k, v in d.items()}"),
        ["a list under 'point'", "np.asarray"],
    ),
    "text": (
        train("d | {'name': np.array(['x'] * 194)}"),
        ["type <U1 under 'name'", "indices of"],
    ),
    "a scalar among arrays": (
        train("d | {'t': 0.5}"),
        ["the scalar 0.5 under 't'", "np.full"],
    ),
    "a generator": (
        train("iter([d])"),
        ["list_iterator, without __len__", "define train_batches"],
    ),
    "a list of tuples": (
        train("[(1, 2)] * 200"),
        ["and its first example is of type tuple"],
    ),
    "no arrays": (train("{}"), ["is an empty dict"]),
    "other lengths": (
        train("d | {'label': d['label'][:-1]}"),
        [
            "Spirals.train_data (experiment_",
            "{'point': 194, 'label': 193}",
            "one row for each",
        ],
    ),
    "no examples": (
        train("{k: v[:0] for k, v in d.items()}"),
        ["different numbers of rows, or of"],
    ),
    "a split among arrays": (
        (
            EVAL,
            "        return {'point': np.ones((9, 2)), 'test': _spirals(np.arange(9))}",
        ),
        [
            "What Spirals.eval_data (experiment_",
            "a dictionary under 'test'",
            "several splits",
        ],
    ),
    "an empty split": (
        (
            EVAL,
            "        return {'valid': _spirals(np.arange(96)), 'test': "
            "_spirals(np.arange(0))}",
        ),
        ["returned as 'test' has arrays of different numbers of rows, or of none"],
    ),
    "loss misspelt": (
        ("    def loss(", "    def losss("),
        ["lacks loss(self, outputs, batch) (is it 'losss'"],
    ),
    "optimizer misspelt": (
        ("    def optimizer(", "    def optimiser("),
        ["is it 'optimiser'"],
    ),
    "no training data": (
        ("    def train_data(", "    def training_data("),
        ["lacks train_data(self) (is it 'training_data', misspelt?)"],
    ),
    "a network over another axis": (
        before(FORWARD, NORM.format(", cross_replica_axis='i'")),
        ["there is no axis 'i'", "group, slice, replica"],
    ),
    "state of the batch's shape": (
        before(FORWARD, STATE.format("batch['point'].shape", "x + batch['point']")),
        [
            "state 'x' of '~' to shape (24, 2)",
            "created with (1, 2)",
            "Network state has one shape",
        ],
    ),
    "state of a replica's examples": (
        before(FORWARD, STATE.format("(), jnp.int32", "x + jnp.sum(batch['label'])")),
        [
            "A network keeps the state 'net_state/~/x', of type int32, which differs "
            "between"
        ],
    ),
    "state of a replica's keys": (
        before(
            FORWARD,
            "        if is_training:\n    "
            + STATE.format(
                "(), jnp.int32", "x + jax.random.randint(hk.next_rng_key(), (), 0, 9)"
            ),
        ),
        ["of type int32, which differs between the replicas"],
    ),
}
# Bugs in the user's code: an edit, and parts of the message. {FORWARD} stands for the
# number of that line.
BUGS = {
    "a shape": (
        (FORWARD, '        return network(batch["point"].reshape(-1))'),
        [", in Spirals.forward: ValueError: 'mlp/~/linear_0/w' with retrieved shape"],
    ),
    "a name in a batch": (
        (FORWARD, '        return network(batch["points"])'),
        [":{FORWARD}, in Spirals.forward: KeyError: 'points'"],
    ),
    "a name in the config": (
        ("optimizer.learning_rate", "optimizer.lr"),
        ["in Spirals.optimizer: AttributeError"],
    ),
    "data that is not there": (
        before(TRAIN, "        open('/nowhere/x.npz')"),
        [
            ":{TRAIN}, in Spirals.train_data: FileNotFoundError: [Errno 2]",
            "'/nowhere/x.npz'",
        ],
    ),
    "labels of another type": (
        ("dtype=np.int32", "dtype=np.float32"),
        ["in _cross_entropy, called by Spirals.loss: TypeError: Expected"],
    ),
    "a branch on an array": (
        before(FORWARD, "        if batch['point'].sum() > 0: pass"),
        [":{FORWARD}, in Spirals.forward: TracerBoolConversionError"],
    ),
    "a number of an array": (
        in_evaluate("float(jnp.mean(_hits(outputs, batch)))"),
        [":{EVALUATE}, in Spirals.evaluate: ConcretizationTypeError"],
    ),
    "no labels in the evaluation": (
        (
            EVAL,
            f"{EVAL}.copy() | {{'label': None}}".replace("return", "d =")
            + "\n        del d['label']\n        return d",
        ),
        ["in _cross_entropy, called by Spirals.evaluate: KeyError: 'label'"],
    ),
    "a config that is changed": (
        before(FORWARD, "        self.config.model.hidden = (1,)"),
        ["in Spirals.forward: AttributeError", "immutable"],
    ),
    "samples before they predict": (
        (
            "    def evaluate(",
            "    def samples(self, predict, key):\n        return 1 / 0\n\n    def "
            "evaluate(",
        ),
        ["in Spirals.samples: ZeroDivisionError"],
    ),
    "samples' batch": (
        (
            "    def evaluate(",
            "    def samples(self, predict, key):\n        return predict({'x': "
            "1})\n\n    def evaluate(",
        ),
        ["in Spirals.forward, called by Spirals.samples: KeyError: 'point'"],
    ),
    "a file that cannot be parsed": (
        (FORWARD, f"{FORWARD})"),
        [":{FORWARD}: SyntaxError: unmatched"],
    ),
    "an import": (
        ("import optax", "import optx"),
        ["ModuleNotFoundError: No module named 'optx'"],
    ),
}
# Edits that look odd and work.
WORKS = {
    "a print": before(FORWARD, "        print('in forward')"),
    "keys in loss": before(LOSS, "        hk.next_rng_key()"),
    "a norm": before(FORWARD, NORM.format("")),
    "a count of steps": before(FORWARD, STATE.format("(), jnp.int32", "x + 1")),
    "a Python number as a scalar": in_loss("accuracy}", "1}"),
    "numbers of double precision": (".astype(np.float32)", ""),
    "hits as they are compared": in_evaluate("outputs[:, 0] > 0"),
    "samples that predict": (
        "    def evaluate(",
        "    def samples(self, predict, key):\n        return "
        "str(predict(self.eval_data()))\n\n    def evaluate(",
    ),
}
_NUMBERS = itertools.count()


def marked(case):
    """Returns the row of a case, which may need the wing that calls `samples`."""
    needed = [pytest.mark.wing("samples")] if case.startswith("samples") else []
    return pytest.param(case, marks=needed)


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Returns a function that creates a run of the edited experiment."""
    name = f"experiment_{next(_NUMBERS)}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def create(edit, **config_values):
        old, new_text = edit
        text = (new.TEMPLATE / "experiment.py").read_text()
        assert old in text
        (tmp_path / f"{name}.py").write_text(text.replace(old, new_text))
        namespace = {}
        exec((new.TEMPLATE / "config.py").read_text(), namespace)
        config = namespace["get_config"]()
        config.update(experiment=f"{name}.Spirals", **config_values)
        # Outside of these tests, JAX promotes types in its standard way.
        with jax.numpy_dtype_promotion("standard"):
            return winged.Run(config.lock(), str(tmp_path / "run"))

    yield create
    sys.modules.pop(name, None)
    # The checks come before the run's directory is created.
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("case", [*map(marked, MISTAKES)])
def test_a_mistake_is_named(check, case):
    edit, parts = MISTAKES[case]
    with pytest.raises(errors.UserError) as caught:
        check(edit)
    assert not cli.is_bug(caught.value)
    for part in parts:
        assert part in cli.summary(caught.value), cli.summary(caught.value)


def line_of(text):
    lines = (new.TEMPLATE / "experiment.py").read_text().splitlines()
    return lines.index(text) + 1


@pytest.mark.parametrize("case", BUGS)
def test_a_bug_is_reported_with_its_place(check, case, capsys):
    edit, parts = BUGS[case]
    with pytest.raises(Exception) as caught:
        check(edit)
    assert cli.is_bug(caught.value)
    for part in parts:
        for name, text in (
            ("FORWARD", FORWARD),
            ("TRAIN", TRAIN),
            ("EVALUATE", EVALUATE),
        ):
            part = part.replace(f"{{{name}}}", str(line_of(text)))
        assert part in cli.summary(caught.value), cli.summary(caught.value)
    cli.print_error(caught.value, has_debug_flag=True)
    # The traceback hides the framework's frames; only the failed import of optx may
    # show them.
    printed = capsys.readouterr().err
    assert "xshard/loop.py" not in printed or "optx" in printed
    assert printed.endswith(f"error: {cli.summary(caught.value)}\n")


@pytest.mark.parametrize("case", WORKS)
def test_odd_code_that_works_is_accepted(check, case):
    check(WORKS[case])


def test_an_unknown_best_metric_is_refused(check):
    checkpoint = {"keep_best": 1, "best_metric": "acc"}
    with pytest.raises(
        errors.UserError, match="best_metric='acc' must be a metric .* accuracy, l"
    ):
        check((FORWARD, FORWARD), checkpoint=checkpoint)
