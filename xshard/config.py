"""The keys of every run's config.

`KEYS` gives each key's default, description and valid values, and whether a resumed run
may change it.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import ml_collections

from xshard import config_values, errors
from xshard.base import loss_scale_keys

STOP = "stop"
SKIP = "skip"
WARN = "warn"
ROLL_BACK = "roll_back"
DEVICE = "device"
PINNED_HOST = "pinned_host"
# Where slots lie between steps, by JAX's kinds of memory.
SLOTS_MEMORY = (DEVICE, PINNED_HOST)
# The reactions to a loss or gradients that are not finite.
ON_NONFINITE = (STOP, SKIP, WARN, ROLL_BACK)
# The reactions to replicas that hold different copies of an array that must be equal on
# all of them.
ON_DIVERGENCE = (STOP, ROLL_BACK)


class Config(ml_collections.ConfigDict):
    """A config whose loss scale is a dictionary."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if key == "loss_scale" and key in self:
            _check_is_dictionary(value)
        super().__setitem__(key, value)


def default() -> Config:
    """Returns a config with every key at its default.

    An experiment's config changes values and adds keys.

    >>> config = default()
    >>> config.experiment = 'experiment.Spirals'
    >>> config.checkpoint.keep_best = 1
    >>> config.optimizer = {'learning_rate': 1e-2}
    """
    values: dict[str, Any] = {}
    for key in KEYS:
        values[key.name] = key.default
        if key.has_types:
            reference = ml_collections.FieldReference(key.default, field_type=object)
            values[key.name] = reference
    return Config(nested(values))


class ReadConfig(ml_collections.FrozenConfigDict):
    """A frozen config that records which of its keys have been read.

    >>> config = ReadConfig({'rate': 0.1, 'model': {'width': 8, 'depth': 2}})
    >>> config.model.width
    8
    >>> config.unread()
    ['model.depth', 'rate']
    """

    def __init__(self, config: Any):
        """Freezes a copy of a config, of which nothing has been read."""
        # The values that were read, by key. This is an attribute of the object and no
        # item of the config, which is frozen.
        object.__setattr__(self, "_read", {})
        if isinstance(config, ml_collections.FrozenConfigDict):
            config = config.as_configdict()
        super().__init__(config_values.from_json(config))
        # ml_collections has read every item while it copied them.
        object.__setattr__(self, "_read", {})

    def __getitem__(self, key: Any) -> Any:
        """Returns a value, and records that it was read."""
        # Attributes, `get` and `items` all end up here.
        value = super().__getitem__(key)
        if isinstance(key, str) and "." in key:
            # Each part of the key has been read in turn.
            return value
        if key not in self._read:
            if isinstance(value, ml_collections.FrozenConfigDict):
                value = ReadConfig(value)
            self._read[key] = value
        return self._read[key]

    def unread(self) -> list[str]:
        """Lists the paths of values that have not been read, such as 'model.depth'."""
        names = []
        for key in self.keys():
            inner = self._read.get(key, super().__getitem__(key))
            if isinstance(inner, ml_collections.FrozenConfigDict):
                if not isinstance(inner, ReadConfig):
                    # Nothing of it has been read, or it would be in `_read`.
                    inner = ReadConfig(inner)
                names += [f"{key}.{name}" for name in inner.unread()]
            elif key not in self._read:
                names.append(key)
        return names


def unread(read: ReadConfig, config: ml_collections.ConfigDict) -> list[str]:
    """Lists the keys of a config that the experiment has not read, but should.

    These are its own keys, and those of the reduction, the loss scale and the outer
    rule that are set. A key from which another one takes its value counts as read.

    Args:
      read: the copy of the config that the run reads.
      config: the config.
    """
    known = {key.name for key in KEYS}
    values = flatten(config.to_dict())
    if _has_own_loss_scale(values):
        known.difference_update(_OF_LOSS_SCALE)
    for key in KEYS:
        # A rule of the experiment's own may leave them unused.
        is_of_rule = key.name in ("outer.learning_rate", "outer.momentum")
        is_of_rule |= key.name.startswith(("loss_scale.", "reduction."))
        if is_of_rule and values.get(key.name, key.default) != key.default:
            known.discard(key.name)
    names = []
    for name in read.unread():
        if name not in known and not _is_reference(config, name):
            names.append(name)
    return names


def _is_reference(config: ml_collections.ConfigDict, name: str) -> bool:
    """Returns whether a value is a reference, which other keys may share."""
    folder, _, key = name.rpartition(".")
    inside = config
    if folder:
        inside = config[folder]
    fields = dict(inside.items(preserve_field_references=True))
    return isinstance(fields[key], ml_collections.FieldReference)


def check(config: ml_collections.ConfigDict) -> None:
    """Checks that a config has every required key and that each value is valid.

    Code that reads several values together, or the devices, checks how they fit.

    Raises:
      UserError: with the key, its value and the rule.
    """
    config_values.to_json(config)
    values = flatten(config.to_dict())
    missing = []
    for key in KEYS:
        if key.name not in values and not _is_optional(key.name):
            missing.append(key.name)
    if missing:
        raise errors.UserError(
            f"The config lacks {', '.join(missing)}: begin with "
            "`xshard.config.default()`, which has every key."
        )
    for key in KEYS:
        if key.name in values and key.check is not None:
            key.check(key.name, values[key.name])
    _check_loss_scale(values)
    _check_outer(config, values)


def _check_loss_scale(values: Mapping[str, Any]) -> None:
    """Raises UserError if `loss_scale` is no dictionary, or has keys beside a kind that
    are not known.
    """
    _check_is_dictionary(values.get("loss_scale"))
    if _has_own_loss_scale(values):
        return
    for name, value in values.items():
        if name.startswith("loss_scale.") and name not in _OF_LOSS_SCALE:
            raise errors.UserError(
                f"{name}={value!r} is no key of a loss scale with a kind, which are "
                f"{', '.join(_OF_LOSS_SCALE)}: leave it out, or keep it elsewhere."
            )


def _check_is_dictionary(value: Any) -> None:
    if isinstance(value, bool | int | float | str):
        raise errors.UserError(
            f"loss_scale={value!r} must be a dictionary: set loss_scale.kind to one of "
            f"{', '.join(loss_scale_keys.KINDS)}, or give a key of your own another "
            "name."
        )


def _has_own_loss_scale(values: Mapping[str, Any]) -> bool:
    """Returns whether `loss_scale`, without a kind, is the experiment's own."""
    has_keys = any(name.partition(".")[0] == "loss_scale" for name in values)
    return has_keys and "loss_scale.kind" not in values


def check_wings(config: ml_collections.ConfigDict, names: Collection[str]) -> None:
    """Raises UserError if a value needs a wing that is not among those named."""
    values = flatten(config.to_dict())
    for key in KEYS:
        value = values.get(key.name, key.default)
        is_of_core = value == key.default or value in key.of_core
        if key.wing and key.wing not in names and not is_of_core:
            raise lacks_wing(f"{key.name}={value!r}", key.wing)


def lacks_wing(what: str, wing: str) -> errors.UserError:
    """Returns the error that refuses what needs a wing that there is not."""
    return errors.UserError(
        f"{what} needs the wing {wing}, which this installation lacks: see "
        "xshard/wings/installed.py, and for a measure xshard/learners/learner.py."
    )


def _check_outer(config: ml_collections.ConfigDict, values: Mapping[str, Any]) -> None:
    """Raises UserError if keys of the outer rule have no effect, or do not fit."""
    if not separates_slices(config):
        for key in KEYS:
            is_set = values.get(key.name, key.default) != key.default
            if key.name.startswith("outer.") and is_set:
                raise errors.UserError(
                    f"{key.name}={values[key.name]!r} has no effect without "
                    "outer.every_steps: set that to the number of steps between "
                    "exchanges, such as 50."
                )
        return
    if values["group_assignment"]:
        raise errors.UserError(
            f"outer.every_steps={values['outer.every_steps']} cannot be used with "
            "group_assignment: each group is a model of its own, and an outer rule "
            "makes one model of all. Leave group_assignment empty, and set slices."
        )
    dtype = values.get("reduction.slice_dtype", "float32")
    if dtype != "float32":
        raise errors.UserError(
            f"reduction.slice_dtype={dtype!r} has no effect with outer.every_steps: "
            "no gradients are sent between slices. Set outer.dtype instead."
        )


def separates_slices(config: ml_collections.ConfigDict) -> bool:
    """Returns whether each slice of a run trains on its own between exchanges."""
    outer = config.get("outer", {})
    return bool(outer.get("every_steps", 0))


def may_change(name: str) -> bool:
    """Returns whether a resumed run may have another value of a key.

    Args:
      name: the key's path, such as 'checkpoint.keep_last'.
    """
    # How checkpoints are stored and kept has no effect on what is trained.
    return name.startswith("checkpoint.") or name in _MAY_CHANGE


def describe(config: ml_collections.ConfigDict) -> str:
    """Returns a text with each key of a config, its description and its value.

    The keys of the experiment come last, and have no description.
    """
    values = flatten(config.to_dict())
    shown = config_values.described
    lines = []
    for key in KEYS:
        if key.name in values:
            value = values.pop(key.name)
            lines += [f"# {key.meaning}", f"{key.name} = {shown(value)}"]
    if values:
        lines.append("# The experiment's own.")
        lines += [f"{name} = {shown(value)}" for name, value in values.items()]
    return "\n".join(lines)


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values by path, such as 'optimizer.learning_rate'.

    An empty dictionary is a value.
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if value and isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns dictionaries within one another, of values by path."""
    values: dict[str, Any] = {}
    for path, value in flat.items():
        *folders, name = path.split(".")
        folder = values
        for each in folders:
            folder = folder.setdefault(each, {})
        if value == {}:
            folder.setdefault(name, {})
        else:
            folder[name] = value
    return values


def with_defaults(flat: dict[str, Any]) -> dict[str, Any]:
    """Returns values by path in the form that a new config has them.

    Keys that a config may lack are added with their defaults. A kind that an experiment
    kept as `loss_scale` itself, while that was a key of its own, is `loss_scale.kind`.
    """
    if flat.get("loss_scale") in loss_scale_keys.KINDS:
        flat = {**flat, "loss_scale.kind": flat["loss_scale"]}
        del flat["loss_scale"]
    has_own = _has_own_loss_scale(flat)
    optional = {}
    for key in KEYS:
        if _is_optional(key.name) and not (has_own and key.name in _OF_LOSS_SCALE):
            # JSON, from which the other values come, has lists only.
            is_tuple = isinstance(key.default, tuple)
            optional[key.name] = list(key.default) if is_tuple else key.default
    return {**optional, **flat}


def _must_be(is_good: Callable[[Any], bool], rule: str) -> Callable[[str, Any], None]:
    """Returns a check that raises UserError with the rule if a value is not good."""

    def check(name: str, value: Any) -> None:
        if not is_good(value):
            raise errors.UserError(f"{name}={value!r} must be {rule}.")

    return check


def _are_texts(value: Any) -> bool:
    """Returns whether a value is a tuple of strings, at least one."""
    is_list = isinstance(value, (tuple, list)) and len(value) > 0
    return is_list and all(isinstance(text, str) for text in value)


# Python counts bool as an int, but True is not a valid number of steps.
_is_int = lambda x: isinstance(x, int) and not isinstance(x, bool)
_is_number = lambda x: _is_int(x) or isinstance(x, float)
_count = _must_be(lambda x: _is_int(x) and x >= 1, "an integer of at least 1")
_count_or_zero = _must_be(lambda x: _is_int(x) and x >= 0, "an integer of at least 0")
_count_or_never = _must_be(
    lambda x: _is_int(x) and x >= 0, "an integer of at least 0; 0 is never"
)
_port = _must_be(
    lambda x: _is_int(x) and 1 <= x < 2**16, "a port, an integer from 1 to 65535"
)
_seed = _must_be(
    lambda x: _is_int(x) and 0 <= x < 2**32, "an integer from 0 to 2**32 - 1"
)
_text = _must_be(lambda x: isinstance(x, str), "a string")
_minutes = _must_be(
    lambda x: _is_number(x) and x >= 0, "a number of at least 0; 0 is never"
)
_positive = _must_be(lambda x: _is_number(x) and 0 < x < math.inf, "a number above 0")
_fraction = _must_be(
    lambda x: _is_number(x) and 0 <= x < 1, "a number of at least 0 and below 1"
)
_factor_to_lower = _must_be(
    lambda x: _is_number(x) and 0 < x <= 1, "a number above 0, at most 1"
)
_factor_or_never = _must_be(
    lambda x: _is_number(x) and (x == 0 or 1 < x < math.inf),
    "a number above 1, or 0, which is never",
)
_loss_scale = _must_be(
    lambda x: x in loss_scale_keys.KINDS, "'none', 'dynamic' or 'fixed'"
)
_on_nonfinite = _must_be(
    lambda x: x in ON_NONFINITE,
    "'stop'; 'skip', which does not apply steps whose gradients are not finite; "
    "'roll_back', which restores a checkpoint and skips the data since; or 'warn', "
    "which logs a warning and continues",
)
_slots_memory = _must_be(
    lambda x: x in SLOTS_MEMORY,
    "'device' or 'pinned_host', the host's memory",
)
_on_divergence = _must_be(
    lambda x: x in ON_DIVERGENCE,
    "'stop' or 'roll_back', which repeats steps",
)
_dots = _must_be(
    lambda x: isinstance(x, bool) or _are_texts(x),
    "False, True, or paths of hk.Linear modules, as ('mlp/~/linear_1',)",
)
_gradient_format = _must_be(
    lambda x: x in ("float8_e5m2", "float8_e4m3fn"),
    "'float8_e5m2', or 'float8_e4m3fn', which is finer and has a smaller range",
)
_on_failure = _must_be(
    lambda x: x in ("stop", "go_on"),
    "'stop' or 'go_on', which continues without the checkpoint",
)


def _precision(name: str, value: Any) -> None:
    # Imported here, since it imports JAX, which the launcher does without.
    import jmp

    try:
        jmp.get_policy(value)
    # jmp raises a different type for each kind of mistake.
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise errors.UserError(
            f"{name}={value!r} is not a jmp policy ({e}); an example: "
            "'params=float32,compute=float16,output=float32'."
        ) from e


class Key(NamedTuple):
    """A key of every run.

    Attributes:
      name: its path, such as 'checkpoint.keep_last'.
      default: its value in `default()`.
      meaning: the description that --show_config prints.
      check: takes the name and a value, and raises UserError if the value is invalid;
        None: the code that reads the key checks it.
      may_change: whether a run may resume with another value; otherwise another value
        makes it another run.
      is_optional: whether a config may lack the key and then has its default, as in
        runs that began before there was this key.
      wing: the wing that acts on it (`xshard.hooks.Wing`, or a learner's `Measure`);
        empty: the core does.
      of_core: the values besides the default that need no wing.
      has_types: whether its values are of several types, which a flag may give, too.
    """

    name: str
    default: Any
    meaning: str
    check: Callable[[str, Any], None] | None = None
    may_change: bool = False
    is_optional: bool = False
    wing: str = ""
    of_core: tuple[Any, ...] = ()
    has_types: bool = False


_DYNAMIC = loss_scale_keys.ARGUMENTS[loss_scale_keys.DYNAMIC]
_FIXED = loss_scale_keys.ARGUMENTS[loss_scale_keys.FIXED]
# In the order in which --show_config prints them. A key without `may_change` is part of
# what a run is: with another value it would be another run. That holds for a new key,
# too: runs that began without it do not resume, unless it has `is_optional`. All keys
# of `checkpoint` may change, see `may_change`.
KEYS = (
    Key("experiment", "", "The dotted path of the experiment's class."),
    Key("seed", 0, "The seed of all randomness.", _seed),
    Key("steps", 1000, "The number of steps to train.", _count, may_change=True),
    Key(
        "batch_size",
        128,
        "The examples per step, over all replicas of a group.",
        _count,
    ),
    Key(
        "eval_batch_size",
        128,
        "The examples per evaluation batch.",
        _count,
        may_change=True,
    ),
    Key(
        "micro_batches",
        1,
        "The parts that each replica splits its batch into and computes one after the "
        "other, to save memory.",
        _count,
        may_change=True,
    ),
    Key(
        "estimate_statistics",
        False,
        "Whether each step also estimates the network's floating-point state, such as "
        "the statistics of a batch norm, for the parameters that the run evaluates if "
        "these are not those that train, by another forward pass.",
        is_optional=True,
    ),
    Key(
        "gather_once",
        False,
        "With shard_params: whether to gather parameters once per step, for all "
        "micro-batches, and hold them meanwhile.",
        may_change=True,
    ),
    Key(
        "aggregation_method",
        "EXPERIMENTAL_ACCUMULATE_N",
        "How the gradients of micro-batches are summed: as a running sum, or in pairs "
        "with 'EXPERIMENTAL_TREE'.",
        may_change=True,
    ),
    Key(
        "precision",
        "params=float32,compute=float32,output=float32",
        "A jmp policy. compute=float16 needs a loss scale; compute=bfloat16 does not.",
        _precision,
    ),
    Key(
        "fp8.dots",
        False,
        "Which products are computed in float8: True, those of the network's hk.Linear "
        "modules; or the paths of some of them, as ('mlp/~/linear_1',).",
        _dots,
        is_optional=True,
        has_types=True,
    ),
    Key(
        "fp8.edges",
        False,
        "With fp8.dots=True: whether also the first and the last of these modules.",
        is_optional=True,
    ),
    Key(
        "fp8.gradient_format",
        "float8_e5m2",
        "With fp8.dots: the format of gradients, 'float8_e5m2' or 'float8_e4m3fn'.",
        _gradient_format,
        is_optional=True,
    ),
    Key(
        "loss_scale.kind",
        loss_scale_keys.NONE,
        "How the loss is scaled if the update rule is a plain optax transformation: "
        "'none', 'dynamic' or 'fixed'.",
        _loss_scale,
        is_optional=True,
    ),
    Key(
        "loss_scale.initial_loss_scale",
        _DYNAMIC["initial_loss_scale"],
        "With the kind 'dynamic': the first scale.",
        is_optional=True,
    ),
    Key(
        "loss_scale.increment_period",
        _DYNAMIC["increment_period"],
        "With 'dynamic': the number of finite steps in a row that raises the scale.",
        is_optional=True,
    ),
    Key(
        "loss_scale.multiplier",
        _DYNAMIC["multiplier"],
        "With 'dynamic': the factor by which the scale is raised and lowered.",
        is_optional=True,
    ),
    Key(
        "loss_scale.loss_scale_value",
        _FIXED["loss_scale_value"],
        "With the kind 'fixed': the scale.",
        is_optional=True,
    ),
    Key(
        "on_nonfinite",
        "stop",
        "The reaction to a loss or gradients that are not finite: 'stop'; 'skip', "
        "which does not apply steps with such gradients, whatever the update rule; "
        "'roll_back', which restores a checkpoint and skips the data since; or 'warn', "
        "which logs a warning and continues.",
        _on_nonfinite,
        may_change=True,
        wing="roll_backs",
        of_core=(SKIP, WARN),
    ),
    Key(
        "on_divergence",
        "stop",
        "The reaction to replicas that hold different copies of state that must be "
        "equal: 'stop'; or 'roll_back', which restores a checkpoint and repeats the "
        "same steps.",
        _on_divergence,
        may_change=True,
        wing="roll_backs",
    ),
    Key(
        "max_skips_in_a_row",
        100,
        "The number of consecutive skipped steps, with no loss scale left to lower, "
        "that ends the run.",
        _count,
        may_change=True,
    ),
    Key(
        "roll_back.limit",
        3,
        "The most roll-backs of a run; the next one ends it.",
        _count,
        may_change=True,
        wing="roll_backs",
    ),
    Key(
        "roll_back.loss_factor",
        0.0,
        "With on_nonfinite='roll_back': also roll back at a loss above this multiple "
        "of the recent median; 0: never.",
        _factor_or_never,
        may_change=True,
        wing="loss_jumps",
    ),
    Key(
        "roll_back.loss_steps",
        100,
        "The number of steps in that median. No loss is judged before the run has made "
        "that many.",
        _count,
        may_change=True,
        wing="loss_jumps",
    ),
    Key(
        "roll_back.learning_rate_factor",
        1.0,
        "The factor by which each roll-back that skips data scales all later updates "
        "of rules with `backs_off`; 1: none.",
        _factor_to_lower,
        may_change=True,
        wing="roll_backs",
    ),
    Key(
        "group_assignment",
        (),
        "The replica numbers of each group, such as [[0, 1, 2, 3], [4, 5, 6, 7]]; each "
        "group trains its own model. Empty: one group of all replicas.",
    ),
    Key(
        "slices",
        1,
        "Slices (or machines) connected by a slower network, such as DCN; 0: one for "
        "each process.",
        _count_or_zero,
        may_change=True,
    ),
    Key(
        "steps_per_dispatch",
        0,
        "The most steps that the host dispatches at once, as one program; 0: chosen. "
        "The bits are the same.",
        _count_or_zero,
        may_change=True,
        is_optional=True,
    ),
    Key(
        "model_parallel",
        1,
        "The number of devices that share one replica's parameters.",
        _count,
        may_change=True,
    ),
    Key(
        "logical_replicas",
        0,
        "The number of logical replicas of a group, distributed over the available "
        "devices. Results depend on this number and not on the number of devices. 0: "
        "each device is one replica.",
        _count_or_never,
    ),
    Key(
        "reduction.reduction",
        "mean",
        "How CrossShardOptimizer combines gradients: 'mean' or 'sum'.",
    ),
    Key(
        "reduction.reduce_dtype",
        "float32",
        "The dtype in which gradients are summed over replicas; 'bfloat16' sends half "
        "the bytes.",
        may_change=True,
    ),
    Key(
        "reduction.slice_dtype",
        "float32",
        "The dtype of that sum between slices.",
        may_change=True,
    ),
    Key(
        "reduction.shard_update",
        False,
        "Whether each replica updates only its shard of each parameter, and holds only "
        "the slots of that shard (ZeRO-1).",
        may_change=True,
    ),
    Key(
        "reduction.arithmetic",
        "float",
        "How gradients of logical replicas are summed: 'float', or 'exact', which "
        "gives the same bits on any number of devices.",
        may_change=True,
    ),
    Key(
        "reduction.shard_params",
        False,
        "Whether each replica also holds only its shard of the parameters between "
        "steps (FSDP, ZeRO-3).",
        may_change=True,
    ),
    Key(
        "slots_memory",
        DEVICE,
        "Where the slots of the update rule lie between updates: 'device', or "
        "'pinned_host', the host's memory.",
        _slots_memory,
        may_change=True,
        is_optional=True,
    ),
    Key(
        "outer.every_steps",
        0,
        "The number of steps for which each slice trains on its own, before they all "
        "exchange parameters (`OuterOptimizer`); 0: they reduce gradients each step.",
        _count_or_never,
        is_optional=True,
    ),
    Key(
        "outer.learning_rate",
        0.7,
        "The learning rate of the outer rule, SGD with Nesterov's momentum.",
        _positive,
        is_optional=True,
    ),
    Key(
        "outer.momentum",
        0.9,
        "The momentum of the outer rule.",
        _fraction,
        is_optional=True,
    ),
    Key(
        "outer.dtype",
        "float32",
        "The dtype that slices send: 'float32', 'bfloat16', or 'int8', which carries "
        "the rounding error to the next exchange.",
        is_optional=True,
    ),
    Key(
        "outer.fragments",
        1,
        "The number of parts of the parameters, which are exchanged in turn.",
        _count,
        is_optional=True,
    ),
    Key(
        "outer.delay_steps",
        0,
        "The number of steps that slices train on before they take over the result of "
        "an exchange.",
        _count_or_never,
        is_optional=True,
    ),
    Key(
        "writers",
        ("jsonl", "csv", "tensorboard"),
        "The writers of metrics: 'jsonl' (required), 'csv', 'tensorboard', 'wandb', "
        "'mlflow', 'prometheus', or the dotted path of your own class.",
        may_change=True,
    ),
    Key(
        "prometheus.port",
        9464,
        "With the writer 'prometheus': the port on process 0's host that is scraped.",
        _port,
        may_change=True,
        is_optional=True,
        wing="prometheus",
    ),
    Key(
        "log_every_steps", 50, "The number of steps between logged rows.", _count, True
    ),
    Key(
        "log_norms_every_steps",
        0,
        "The number of steps between rows of the norms of each parameter, its gradient "
        "and its update; 0: never.",
        _count_or_never,
        may_change=True,
        is_optional=True,
        wing="norms_by_array",
    ),
    Key(
        "noise_scale_steps",
        0,
        "The number of steps over which the noise scale of the gradients is averaged, "
        "which says how large a batch is useful; 0: it is not computed.",
        _count_or_never,
        is_optional=True,
        wing="noise_scale",
    ),
    Key(
        "fingerprint_every_steps",
        10,
        "The number of steps between fingerprints of the state, which detect replicas "
        "that diverge; 0: never.",
        _count_or_never,
        may_change=True,
    ),
    Key(
        "eval_every_steps",
        500,
        "The number of steps between evaluations; 0: only after the last step.",
        _count_or_never,
        may_change=True,
    ),
    Key(
        "samples_every_steps",
        0,
        "The number of steps between calls of `Experiment.samples`; 0: only after the "
        "last step.",
        _count_or_never,
        may_change=True,
        wing="samples",
    ),
    Key(
        "compiled.directory",
        "",
        "The directory of compiled programs, which all processes see: a path, "
        "gs://BUCKET/FOLDER or s3://BUCKET/FOLDER. Empty: the work directory, if all "
        "see it.",
        _text,
        may_change=True,
        is_optional=True,
    ),
    Key(
        "checkpoint.directory",
        "",
        "The directory of checkpoints: a path, gs://BUCKET/FOLDER or "
        "s3://BUCKET/FOLDER; empty: in the work directory.",
        _text,
    ),
    Key(
        "checkpoint.every_steps",
        500,
        "The number of steps between checkpoints.",
        _count,
    ),
    Key(
        "checkpoint.every_minutes",
        0.0,
        "The same interval in minutes; 0: none.",
        _minutes,
    ),
    Key("checkpoint.keep_last", 3, "The number of newest checkpoints to keep."),
    Key(
        "checkpoint.keep_every_steps",
        0,
        "Keep every checkpoint at a step that is a multiple of this; 0: none.",
    ),
    Key(
        "checkpoint.keep_hours",
        0.0,
        "Keep the first checkpoint, and one of each so many hours after it; 0: none.",
        is_optional=True,
    ),
    Key(
        "checkpoint.keep_best",
        0,
        "The number of best checkpoints to keep, by `best_metric`.",
    ),
    Key(
        "checkpoint.best_metric",
        "loss",
        "The evaluation metric that ranks checkpoints.",
        _text,
    ),
    Key(
        "checkpoint.best_mode",
        "min",
        "Whether the smallest ('min') or the largest ('max') is best.",
    ),
    Key(
        "checkpoint.on_failure",
        "stop",
        "The reaction to a failed save: 'stop', or 'go_on' without that checkpoint.",
        _on_failure,
    ),
    Key(
        "checkpoint.budget_gb",
        4.0,
        "The host memory, in GB, for data that is being saved or restored, in addition "
        "to the state.",
        _positive,
    ),
)
_MAY_CHANGE = {key.name for key in KEYS if key.may_change}
_OPTIONAL = {key.name for key in KEYS if key.is_optional}
_OF_LOSS_SCALE = [key.name for key in KEYS if key.name.startswith("loss_scale.")]


def _is_optional(name: str) -> bool:
    """Returns whether a config may lack a key."""
    # An experiment passes `reduction` on to CrossShardOptimizer, and so decides which
    # arguments that gets.
    return name.startswith("reduction.") or name in _OPTIONAL
