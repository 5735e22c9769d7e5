"""Configs are what they are: what a run, a sweep or low-rank matrices were given is
what everything has that comes later, or it is refused by name.
"""

import collections
import copy
import datetime
import decimal
import enum
import functools
import json
import math
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest
from ml_collections import config_dict

import xshard
from launch import engine, sweep
from tests import rows, toy
from tests.launch import harness
from xshard import checkpoint, cli, config_values, errors, export, loop, trained
from xshard import config as config_lib
from xshard.files import identity, workdir
from xshard.replay import replayer
from xshard.run import saving

CONFIG_BIG = 2**80


class ConfigColour(enum.Enum):
    RED = 1


class ConfigLevel(enum.IntEnum):
    LOW = 1


class ConfigWord(enum.StrEnum):
    A = "a"


class ConfigPair(collections.namedtuple("ConfigPair", "a b")):
    """A tuple with names."""


class ConfigText(str):
    """A text of a type of its own."""


def config_triple(x):
    """A function that a config holds."""
    return 3 * x


config_thrice = functools.partial(config_triple)


def _config_accepted():
    """Returns a value of each kind that a config can hold."""
    return {
        "no": False,
        "count": 3,
        "big": CONFIG_BIG,
        "rate": 0.1,
        "tiny": 5e-324,
        "negative_zero": -0.0,
        "infinite": -math.inf,
        "undefined": math.nan,
        "text": "größe\u2028",
        "surrogate": "\udc80",
        "nothing": None,
        "list": [1, [2, (3,)]],
        "tuple": ((1, 2.0), (None, True, "a"), ()),
        "empty": {},
        "inner": {"deep": {"sizes": (4, 5)}},
        "placeholder": config_dict.placeholder(int),
        "function": jax.nn.relu,
        "own_function": config_triple,
        "ufunc": np.tanh,
        "builtin": math.sqrt,
        "class": optax.MultiSteps,
        "dtype": jnp.bfloat16,
        "functions": (jax.nn.gelu, len),
    }


def _config_frozen(values):
    """Returns values as an experiment gets them."""
    return config_lib.ReadConfig(ml_collections.ConfigDict(values))


def _config_is_same(one, other):
    """Returns whether two values of a config are the same, down to their types."""
    if isinstance(one, ml_collections.FrozenConfigDict):
        keys = list(one) == list(other)
        return keys and all(_config_is_same(one[key], other[key]) for key in one)
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple | list):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_config_is_same(*pair) for pair in pairs)
    if isinstance(one, float):
        return repr(one) == repr(other)
    return one is other or (not callable(one) and one == other)


class ConfigNetwork(toy.Wide):
    """Builds its network from each value, and another one if a value is not right."""

    def forward(self, batch, *, is_training):
        own = self.config.own
        right = _config_frozen(_config_accepted())
        scale = 1.0
        for key in right:
            scale *= 1.0 if _config_is_same(own[key], right[key]) else 100.0
        x = own.function(batch["x"]) + own.own_function(batch["x"])
        outputs = super().forward({"x": x}, is_training=is_training)
        return outputs.astype(own.dtype).astype(jnp.float32) * scale


def _config_of(experiment="", **changes):
    config = toy.get_config()
    config.experiment = experiment or f"{__name__}.ConfigNetwork"
    config.steps = 4
    config.own = _config_accepted()
    config.log_every_steps = 2
    config.checkpoint.every_steps = 2
    config.update_from_flattened_dict(changes)
    return config


def _config_file(tmp_path):
    """Writes a config file, as a run of the command line takes it."""
    path = tmp_path / "config.py"
    path.write_text(
        f"import importlib\n"
        f"def get_config():\n"
        f"    return importlib.import_module({__name__!r})._config_of()\n"
    )
    return path


def _config_check_loaded(directory):
    """Checks that a run's model is the same when it is loaded."""
    loaded = xshard.load(directory)
    own = loaded.experiment.config.own
    assert _config_is_same(own, _config_frozen(_config_accepted()))
    data = loaded.experiment.eval_data()
    error = np.mean((np.asarray(loaded.predict(data)) - data["y"]) ** 2)
    # The mean is taken in another order.
    expected = rows.results(directory)["eval"]["error"]
    np.testing.assert_allclose(error, expected, rtol=1e-4)
    return loaded


def test_37_a_run_a_load_an_export_a_replay_and_a_resume_build_the_same(tmp_path):
    config = _config_of().lock()
    assert loop.run(config, str(tmp_path / "run"), "") == 0
    loaded = _config_check_loaded(tmp_path / "run")
    # The program has the network within, as the export built it.
    file = tmp_path / "model.stablehlo"
    data = loaded.experiment.eval_data()
    export.write(loaded, file, batch_size=10)
    exported = jax.export.deserialize(bytearray(file.read_bytes()))
    # It is compiled by itself, and rounds otherwise.
    np.testing.assert_allclose(
        exported.call({"x": data["x"]}), loaded.predict(data), rtol=2e-2
    )
    again = replayer.Replayer(str(tmp_path / "run"))
    assert _config_is_same(again.experiment.config.own, loaded.experiment.config.own)
    assert again.rows

    whole = _config_of(steps=6).lock()
    assert loop.run(whole, str(tmp_path / "run"), "") == 0
    assert loop.run(whole, str(tmp_path / "whole"), "") == 0
    states = [rows.final_state(tmp_path / name, whole) for name in ("run", "whole")]
    leaves = [jax.device_get(jax.tree.leaves(x.experiment)) for x in states]
    for one, other in zip(*leaves, strict=True):
        np.testing.assert_array_equal(one, other)


def test_37_a_pod_in_a_sweep_builds_the_same(tmp_path):
    points = tmp_path / "sweep.py"
    points.write_text("def get_sweep():\n    return [{'own.rate': 0.1, 'seed': 1}]\n")
    command = [*harness.TOY, f"--workdir={tmp_path / 'runs'}"]
    command[3] = f"--config={_config_file(tmp_path)}"
    flags = [f"--sweep={points}", "--num_processes=2", "--cpu_devices=1"]
    process = harness.launch(*flags, "--max_failures=1", command=command)
    code, output = harness.finish(process)
    assert code == 0, output
    _config_check_loaded(tmp_path / "runs" / "000")


@pytest.mark.parametrize("sign", [1, -1])
def test_37_what_a_config_holds_comes_back(sign):
    values = {**_config_accepted(), "n": sign * CONFIG_BIG, "f": sign * math.inf}
    config = ml_collections.ConfigDict(values)
    content = json.loads(json.dumps(config_values.to_json(config)))
    back = config_values.from_json(content)
    assert _config_is_same(_config_frozen(back), _config_frozen(values))
    # Not even the config that was frozen tells them apart.
    views = [config_lib.ReadConfig(x).as_configdict() for x in (back, config)]
    assert views[0].list == views[1].list == (1, (2, (3,)))
    assert config.list == [1, [2, (3,)]]
    # The function is found where its library promises it, not where it happens to be.
    assert content["function"] == "$import jax.nn:relu"
    assert "function = jax.nn:relu\n" in config_lib.describe(config)


CONFIG_REFUSED = {
    "enum": (ConfigColour.RED, "its name 'RED'"),
    "int_enum": (ConfigLevel.LOW, "its name 'LOW'"),
    "str_enum": (ConfigWord.A, "its name 'A'"),
    "str_subclass": (ConfigText("a"), "str(...) of it"),
    "numpy_bool": (np.bool_(False), "Write False,"),
    "numpy_float": (np.float64(0.5), "Write 0.5,"),
    "numpy_int": (np.int64(3), "Write 3,"),
    "numpy_array": (np.arange(2000), ".tolist()"),
    "numpy_0d": (np.array(3), "Write 3,"),
    "dtype": (np.dtype("int8"), "its name 'int8'"),
    "set": ({1, 2}, "a tuple of its items"),
    "frozenset": (frozenset("ab"), "a tuple of its items"),
    "bytes": (b"ab", "decode()"),
    "path": (pathlib.PurePosixPath("/a"), "the text '/a'"),
    "slice": (slice(0, 3), "(0, 3, None)"),
    "range": (range(3), "(0, 3, 1)"),
    "complex": (1j, "(0.0, 1.0)"),
    "decimal": (decimal.Decimal("0.1"), "'0.1'"),
    "date": (datetime.date(2020, 1, 2), "'2020-01-02'"),
    "module": (math, "its name 'math'"),
    "partial": (
        functools.partial(config_triple, 1),
        "arguments of a functools.partial",
    ),
    "renamed": (lambda x: x, "a lambda has none"),
    "made": (optax.constant_schedule(0.5), "a lambda has none"),
    "method": (collections.OrderedDict().keys, "the object of a method"),
    "instance": (object(), "make it in the experiment"),
    "named_tuple": (ConfigPair(1, 2), "a plain tuple"),
    "halves": ("\ud83d\ude00", "halves of one character"),
    "reserved_text": ("$import a:b", "another text"),
    "description": ("unserializable object: /a", "another text"),
    "class_description": ("<class 'int'>", "another text"),
    "long": (10**5000, "bits"),
    "in_list": ([1, {2}], "own.v.1={2}"),
    "dict_in_list": ([{"a": 1}], "own.v.0={'a': 1}"),
    "int_key": ({1: "a"}, "so write '1'"),
    "mixed_keys": ({1: "a", "b": 2}, "so write '1'"),
    "enum_key": ({ConfigWord.A: 1}, "so write 'a'"),
    "required": (config_dict.required_placeholder(int), "own.v is required"),
}


@pytest.mark.parametrize("kind", CONFIG_REFUSED)
def test_37_what_it_cannot_hold_is_refused_before_anything_is_written(tmp_path, kind):
    value, instead = CONFIG_REFUSED[kind]
    config = _config_of("tests.toy.Toy")
    config.own.v = value
    with pytest.raises(errors.UserError, match=r"own\.v") as raised:
        loop.run(config, str(tmp_path / "run"), "")
    assert instead in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_37_a_jax_array_a_cycle_and_the_key_of_the_identity_are_refused():
    config = ml_collections.ConfigDict({"a": jnp.ones(2)})
    with pytest.raises(errors.UserError, match=r"^a=.*\.tolist\(\)"):
        config_values.to_json(config)
    cycle = [1]
    cycle.append(cycle)
    with pytest.raises(errors.UserError, match=r"^a\.1\.1.* nested more than"):
        config_values.to_json(ml_collections.ConfigDict({"a": cycle}))
    with pytest.raises(errors.UserError, match="'_run', under which config.json"):
        config_values.to_json(ml_collections.ConfigDict({"_run": 1}))
    keys = ml_collections.ConfigDict()
    keys["__doc__"] = 1
    with pytest.raises(errors.UserError, match="'__doc__', an attribute"):
        config_values.to_json(keys)
    large = ml_collections.ConfigDict({"small": 1, "large": (0.123456789,) * 3_000_000})
    with pytest.raises(errors.UserError, match=r"^large has 45 MB .* to a file"):
        config_values.check(large)
    dotted = ml_collections.ConfigDict({"a.b": 1}, allow_dotted_keys=True)
    with pytest.raises(errors.UserError, match="'a.b': a dot separates"):
        config_values.to_json(dotted)


def test_37_a_function_that_no_other_program_can_import_is_refused(
    tmp_path, monkeypatch
):
    module = types.ModuleType("found_by_path_only")
    module.__file__ = str(tmp_path / "config.py")
    exec("def act(x): return x", module.__dict__)
    # As ml_collections loads a config file.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    config = ml_collections.ConfigDict({"act": module.act})
    with pytest.raises(errors.UserError, match=r"cannot import .*config.py by its"):
        config_values.to_json(config)
    # Another object has the name of this one.
    other = copy.copy(types.FunctionType(config_triple.__code__, globals()))
    other.__module__ = __name__
    with pytest.raises(errors.UserError, match=":config_triple is another object"):
        config_values.to_json(ml_collections.ConfigDict({"act": other}))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (jax.nn.relu, jax.nn.gelu),
        (tuple(range(2000)), (*range(1999), -1)),
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("$", "$ "),
        (None, 0),
        (None, {}),
        ((1, 2), (1, (2,))),
    ],
)
def test_37_a_changed_value_is_another_run(tmp_path, before, after):
    def config(value):
        made = _config_of("tests.toy.Toy")
        with made.own.ignore_type():
            made.own.v = value
        return made.lock()

    run = workdir.Workdir(tmp_path / "run")
    with run.opened(config(before)):
        pass
    assert run.check(config(before)) == []
    with pytest.raises(errors.UserError, match=r"another config \(own\.v: ") as raised:
        run.check(config(after))
    assert len(str(raised.value)) < 600
    lacks = _config_of("tests.toy.Toy")
    with pytest.raises(errors.UserError, match=r"another config \(own\.v: "):
        run.check(lacks.lock())


@pytest.mark.parametrize(
    ("value", "before", "change"),
    [
        # What an earlier version wrote, and whether the run may resume with it.
        (config_triple, "function config_triple", "unchecked"),
        (ConfigText, str(ConfigText), None),
        (math.sqrt, "unserializable object: <built-in function sqrt>", None),
        (
            jax.nn.relu,
            {"__name__": "relu", "__module__": jax.nn.relu.__module__, "__doc__": "?"},
            None,
        ),
        ((config_triple, 1), ["function config_triple", 1], "unchecked"),
        (jnp.bfloat16, "<class 'jax.numpy.bfloat16'>", None),
        ((1, 2), [1, 2], None),
        (0.5, 0.5, None),
        ("/a", "unserializable object: /a", "unchecked"),
        ("RED", {"_name_": "RED", "_value_": 1}, "unchecked"),
        (config_triple, "function other", "refused"),
        (math.sqrt, "unserializable object: <built-in function sin>", "refused"),
    ],
)
def test_37_a_run_of_an_earlier_version_resumes(
    tmp_path, caplog, value, before, change
):
    config = _config_of("tests.toy.Toy")
    config.own = {"v": value}
    config.lock()
    run = workdir.Workdir(tmp_path / "run")
    with run.opened(config):
        pass
    content = json.loads(run.config.read_text())
    content["own"]["v"] = before
    run.config.write_text(json.dumps(content))
    # A load and an export still read it, and find what is named with its module.
    read = trained.config_of(run)
    assert read.batch_size == config.batch_size
    if change is None:
        is_named = "unserializable object" not in str(before)
        values = [_config_frozen(x.own).v for x in (read, config)]
        assert _config_is_same(*values) == is_named
        assert ("own.v are texts as earlier versions" in caplog.text) != is_named
    if change == "refused":
        with pytest.raises(errors.UserError, match="another config"):
            run.check(config)
        return
    changes = run.check(config)
    assert [change in text for text in changes] == [True] * (change is not None)
    with run.opened(config):
        assert run.check(config) == []


def test_37_the_fingerprint_of_a_plain_config_stays():
    values = {
        "a": (1, [2.0, True]),
        "b": None,
        "c": math.nan,
        "d": -math.inf,
        "e": {},
        "f": "größe\u2028",
        "g": CONFIG_BIG,
        "h": -0.0,
    }
    config = ml_collections.ConfigDict({"own": values})
    # As the first runs with these values had it.
    assert identity.fingerprint(config) == "419a884f9f3e660f"
    config.own.a = [1, (2.0, True)]
    assert identity.fingerprint(config) == "419a884f9f3e660f"


def _config_job(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(
        "import ml_collections\n"
        "from ml_collections import config_dict\n"
        "from tests import toy\n"
        "def get_config():\n"
        "    config = toy.get_config()\n"
        "    config.t = (1, 2)\n"
        "    config.s = 'x'\n"
        "    config.b = True\n"
        "    config.n = None\n"
        "    config.l = [1]\n"
        "    config.h = config_dict.placeholder(float)\n"
        "    config.d = {'width': 8, 'rate': 0.5}\n"
        "    return config\n"
    )
    command = (sys.executable, "-m", "xshard.main", f"--config={path}")
    return engine.Job("job", (*command, f"--workdir={tmp_path / 'runs'}"))


def _config_points(tmp_path, monkeypatch, *points):
    """Returns points as the file of a sweep gives them."""
    (tmp_path / "sweep.py").touch()
    run_path = lambda path: {"get_sweep": lambda: list(points)}
    monkeypatch.setattr(sweep.runpy, "run_path", run_path)
    return sweep.read(tmp_path / "sweep.py")


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.parametrize(
    ("key", "value", "arrives"),
    [
        ("optimizer.learning_rate", np.float32(0.5), 0.5),
        ("optimizer.learning_rate", 1, 1.0),
        ("optimizer.learning_rate", math.inf, math.inf),
        ("optimizer.learning_rate", "-inf", -math.inf),
        ("seed", np.int64(3), 3),
        ("b", "False", False),
        ("b", np.bool_(False), False),
        ("s", "null", "null"),
        ("s", "a,b 'c'\n", "a,b 'c'\n"),
        ("t", (1, None, True, "a", -math.inf, (2,)), None),
        ("t", [np.int32(4)], (4,)),
        ("t", (), ()),
        ("t", "((0, 3),)", ((0, 3),)),
        ("n", None, None),
        ("h", None, None),
        ("h", 2, 2.0),
        ("d", {"width": 4, "rate": None}, None),
        ("d.width", 4, 4),
    ],
)
def test_43_what_arrives_in_a_run_is_what_the_table_shows(
    tmp_path, monkeypatch, key, value, arrives
):
    points = _config_points(tmp_path, monkeypatch, {key: value})
    (job,) = sweep.jobs(_config_job(tmp_path), points)
    requested = config_lib.flatten({"value": sweep.requested_config(job)})
    flat = {name.removeprefix("value."): x for name, x in requested.items()}
    expected = arrives
    if arrives is None:
        expected = points[0][key]
    wanted = ml_collections.ConfigDict({key.replace(".", "_"): expected})
    for name, item in config_lib.flatten(config_values.to_json(wanted)).items():
        name = name.replace("d_width", "d.width").replace("optimizer_l", "optimizer.l")
        assert identity.is_equal(flat[name], item)
    # The same sweep again is no other sweep.
    for _ in range(2):
        sweep.claim(tmp_path / "runs", points, [])


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("s", None, "s=None of point 0: no flag gives None"),
        ("t", None, "t=None of point 0: no flag gives None"),
        ("seed", None, "no flag gives None"),
        ("s", 1, "would arrive as '1'"),
        ("b", 0, "would arrive as False"),
        ("t", 7, r"would arrive as \(7,\)"),
        ("t", "abc", r"would arrive as \('abc',\)"),
        ("t", (math.nan,), "not within another value"),
        ("t", ({"a": 1},), "t of point 0: .*cannot hold a dictionary"),
        ("seed", 0.5, "must be an integer"),
        ("l", [2], "is not supported"),
        ("n", 3, "sets this key to None"),
        ("absent", 3, "has no such key"),
        ("t", np.arange(3), "of type ndarray"),
        ("s", "\0", "of type str"),
        ("s", ConfigColour.RED, "of type ConfigColour"),
        ("s", len, "of type builtin_function_or_method"),
    ],
)
def test_43_what_would_not_arrive_is_refused(
    tmp_path, monkeypatch, key, value, message
):
    with pytest.raises(engine.LaunchError, match=message):
        points = _config_points(tmp_path, monkeypatch, {key: value})
        sweep.jobs(_config_job(tmp_path), points)
    # Without the config, None has no text of which the program is known to make None.
    blind = engine.Job("job", ("program", f"--workdir={tmp_path / 'runs'}"))
    with pytest.raises(engine.LaunchError, match="no flag gives None"):
        sweep.jobs(blind, [{"x": None}])


def test_43_the_table_shows_the_points_in_full(tmp_path):
    points = [{"rate": 0.123456, "loss": 1}, {"rate": 0.123457, "loss": None}]
    sweep.claim(tmp_path, points, [])
    for index in range(2):
        folder = tmp_path / f"{index:03}"
        folder.mkdir()
        (folder / "results.json").write_text('{"eval": {"loss": 0.25}, "step": 3}')
    shown = [line.split() for line in sweep.table(sweep.rows(tmp_path)).splitlines()]
    assert shown[0][:3] == ["run", "rate", "loss"] and shown[0][-1] == "eval/loss"
    assert shown[1][:3] == ["000", "0.123456", "1"] and shown[1][-1] == "0.25"
    assert shown[2][:3] == ["001", "0.123457", "None"]


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.parametrize(
    "text", ["[1, null]", "((1, true),)", "None", "null", "(nan,)"]
)
def test_43_a_flag_that_is_no_tuple_is_refused(tmp_path, monkeypatch, text):
    job = _config_job(tmp_path)
    values = cli.flags.FlagValues()
    holder = sweep.config_flags.DEFINE_config_file("config", flag_values=values)
    config_flag = job.arguments[-2]
    monkeypatch.setattr(sys, "argv", ["program", config_flag, f"--config.t={text}"])
    with pytest.raises(errors.UserError, match=r"--config\.t=.* must be a tuple"):
        cli.parse(holder, values)


class ConfigLora(toy.Wide):
    """Adapts a network by an alpha that is not in its config."""

    factors = types.SimpleNamespace(rank=2, alpha=4)

    def lora(self):
        factors = self.factors
        return xshard.lora(factors.rank, factors.alpha, "linear_0/")


def _config_lora(tmp_path, name, init="", **changes):
    config = _config_of(f"{__name__}.ConfigLora", **changes).lock()
    source = checkpoint.Source(str(init)) if init else None
    return loop.run(config, str(tmp_path / name), "", init=source)


def test_40_another_alpha_is_refused(tmp_path, monkeypatch):
    set_factors = lambda **x: monkeypatch.setattr(
        ConfigLora, "factors", types.SimpleNamespace(**x)
    )
    assert _config_lora(tmp_path, "run") == 0
    run = tmp_path / "run"
    separate = tmp_path / "separate.safetensors"
    export.write(xshard.load(run), separate, merge_lora=False)
    # The same alpha, of another type.
    set_factors(rank=2, alpha=np.float32(4))
    assert _config_lora(tmp_path, "run", steps=6) == 0
    for index, source in enumerate((run, separate)):
        assert _config_lora(tmp_path, f"same_{index}", source, steps=1) == 0

    set_factors(rank=2, alpha=40)
    named = r"lora\(rank=2, alpha=4\.0\).*lora\(rank=2, alpha=40\.0\)"
    with pytest.raises(errors.UserError, match=named):
        _config_lora(tmp_path, "run", steps=8)
    with pytest.raises(errors.UserError, match=named):
        xshard.load(run)
    for source in (run, separate):
        with pytest.raises(errors.UserError, match=named):
            _config_lora(tmp_path, "other", source, steps=1)
        assert not (tmp_path / "other").exists()
    set_factors(rank=3, alpha=6)
    for source in (run, separate):
        with pytest.raises(errors.UserError, match="_lora_a"):
            _config_lora(tmp_path, "other", source, steps=1)


def test_40_a_checkpoint_of_an_earlier_version_is_taken_with_a_note(
    tmp_path, monkeypatch, capfd
):
    original = saving.Checkpoints.__init__

    def without(self, *args, **kwargs):
        original(self, *args, **kwargs)
        del self._metadata["lora"]

    with monkeypatch.context() as patched:
        patched.setattr(saving.Checkpoints, "__init__", without)
        assert _config_lora(tmp_path, "run") == 0
    capfd.readouterr()
    assert _config_lora(tmp_path, "run", steps=6) == 0
    resumed = "".join(capfd.readouterr())
    assert "did not save the alpha" in resumed
    assert "lora(rank=2, alpha=4.0)" in resumed
    # Step 4 is of the earlier version, and step 6 is not.
    assert _config_lora(tmp_path, "old", f"{tmp_path / 'run'}@4", steps=1) == 0
    assert "does not say by which alpha" in "".join(capfd.readouterr())
    assert _config_lora(tmp_path, "new", tmp_path / "run", steps=1) == 0
    assert "alpha" not in "".join(capfd.readouterr())
