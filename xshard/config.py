"""The keys of every run's config: defaults, descriptions, valid values, and whether a
resumed run may change them.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_collections

from xshard import errors

# The reactions to a loss or gradients that are not finite.
ON_NONFINITE = STOP, SKIP, WARN, ROLL_BACK = ("stop", "skip", "warn", "roll_back")
# The reactions to replicas that hold different copies of an array that must be equal on
# all of them.
ON_PARTED = (STOP, ROLL_BACK)


def default() -> ml_collections.ConfigDict:
    """Returns a config with every key at its default. An experiment's config changes
    values and adds keys.

    >>> config = default()
    >>> config.experiment = 'experiment.Spirals'
    >>> config.checkpoint.keep_best = 1
    >>> config.optimizer = {'learning_rate': 1e-2}
    """
    values: dict[str, Any] = {}
    for key in KEYS:
        folder, _, name = key.name.rpartition(".")
        if folder:
            values.setdefault(folder, {})[name] = key.default
        else:
            values[name] = key.default
    return ml_collections.ConfigDict(values)


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
        # ml_collections reads items while it copies. The attribute is no item, which a
        # frozen config could not set.
        object.__setattr__(self, "_read", {})
        super().__init__(config)
        object.__setattr__(self, "_read", {})

    def __getitem__(self, key: Any) -> Any:
        """Returns a value and records that. All other ways to read a value come here."""
        value = super().__getitem__(key)
        if isinstance(key, str) and "." in key:
            # Each part of the key has been read in turn.
            return value
        if isinstance(value, ml_collections.FrozenConfigDict) and key not in self._read:
            self._read[key] = ReadConfig(value)
        return self._read.setdefault(key, value)

    def unread(self) -> list[str]:
        """Lists the keys of values that have not been read, with the keys that lead to
        them: 'model.depth'.
        """
        names = []
        for key in self.keys():
            inner = self._read.get(key, super().__getitem__(key))
            if isinstance(inner, ml_collections.FrozenConfigDict):
                inner = inner if isinstance(inner, ReadConfig) else ReadConfig(inner)
                names += [f"{key}.{name}" for name in inner.unread()]
            elif key not in self._read:
                names.append(key)
        return names


def unread(read: ReadConfig, config: ml_collections.ConfigDict) -> list[str]:
    """Lists the user's own keys of a config that have not been read, and from which no
    other key takes its value.

    Args:
      read: the copy of the config that the run reads.
      config: the config.
    """
    known = {key.name for key in KEYS}
    own = [name for name in read.unread() if name not in known]
    return [name for name in own if not _is_reference(config, name)]


def _is_reference(config: ml_collections.ConfigDict, name: str) -> bool:
    folder, _, key = name.rpartition(".")
    inside = config[folder] if folder else config
    fields = dict(inside.items(preserve_field_references=True))
    return isinstance(fields[key], ml_collections.FieldReference)


def check(config: ml_collections.ConfigDict) -> None:
    """Raises UserError unless a config has every required key and each value is valid
    by itself.
    """
    values = flatten(config.to_dict())
    missing = [
        key.name
        for key in KEYS
        if key.name not in values and not _is_optional(key.name)
    ]
    if missing:
        raise errors.UserError(
            f"The config lacks {', '.join(missing)}: begin with `xshard.config.default()`, which has every key."
        )
    # Code that reads several values together, or the devices, checks how they fit.
    for key in KEYS:
        if key.name in values and key.check is not None:
            key.check(key.name, values[key.name])


def may_change(name: str) -> bool:
    """Returns whether a resumed run may have another value of a key, such as
    'checkpoint.keep_last'.
    """
    return name.startswith("checkpoint.") or name in _MAY_CHANGE


def describe(config: ml_collections.ConfigDict) -> str:
    """Returns a text with each key of a config and its value; keys of `KEYS` have their
    description.
    """
    values = flatten(config.to_dict())
    lines = []
    for key in KEYS:
        if key.name in values:
            lines += [f"# {key.meaning}", f"{key.name} = {values.pop(key.name)!r}"]
    # The remaining keys belong to the experiment and have no description.
    if values:
        lines.append("# The experiment's own.")
        lines += [f"{name} = {value!r}" for name, value in values.items()]
    return "\n".join(lines)


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values by path, such as 'optimizer.learning_rate'."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def with_defaults(flat: dict[str, Any]) -> dict[str, Any]:
    """Returns the values by path, with optional keys that are missing at their default."""
    optional = {key.name: key.default for key in KEYS if _is_optional(key.name)}
    return {**optional, **flat}


def _must_be(is_good: Callable[[Any], bool], rule: str) -> Callable[[str, Any], None]:
    """Returns a check that raises UserError, with the rule, unless `is_good` accepts
    the value.
    """

    def check(name: str, value: Any) -> None:
        if not is_good(value):
            raise errors.UserError(f"{name}={value!r} must be {rule}.")

    return check


# Python counts bool as an int, but True is not a valid number of steps.
_is_int = lambda x: isinstance(x, int) and not isinstance(x, bool)
_is_number = lambda x: _is_int(x) or isinstance(x, float)
_count = _must_be(lambda x: _is_int(x) and x >= 1, "an integer of at least 1")
_count_or_never = _must_be(
    lambda x: _is_int(x) and x >= 0, "an integer of at least 0; 0 is never"
)
_seed = _must_be(
    lambda x: _is_int(x) and 0 <= x < 2**32, "an integer from 0 to 2**32 - 1"
)
_text = _must_be(lambda x: isinstance(x, str), "a string")
_minutes = _must_be(
    lambda x: _is_number(x) and x >= 0, "a number of at least 0; 0 is never"
)
_gigabytes = _must_be(lambda x: _is_number(x) and 0 < x < math.inf, "a number above 0")
_factor_to_lower = _must_be(
    lambda x: _is_number(x) and 0 < x <= 1, "a number above 0, at most 1"
)
_factor_or_never = _must_be(
    lambda x: _is_number(x) and (x == 0 or 1 < x < math.inf),
    "a number above 1, or 0, which is never",
)
_on_nonfinite = _must_be(
    ON_NONFINITE.__contains__,
    "'stop'; 'skip', which does not apply steps whose gradients are not finite; 'roll_back', which restores a checkpoint "
    "and skips the data since; or 'warn', which logs a warning and continues",
)
_on_parted = _must_be(
    ON_PARTED.__contains__, "'stop' or 'roll_back', which repeats steps"
)
_on_failure = _must_be(
    ("stop", "go_on").__contains__,
    "'stop' or 'go_on', which continues without the checkpoint",
)


def _precision(name: str, value: Any) -> None:
    import jmp  # Imported here, since it imports JAX, which the launcher does without.

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
    """

    name: str
    default: Any
    meaning: str
    check: Callable[[str, Any], None] | None = None
    may_change: bool = False


# In the order in which --show_config prints them.
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
    Key("eval_batch_size", 128, "The examples per evaluation batch.", _count, True),
    Key(
        "micro_batches",
        1,
        "The parts that each replica splits its batch into and computes one after the other, to save memory.",
        _count,
        may_change=True,
    ),
    Key(
        "gather_once",
        False,
        "With shard_params: whether to gather parameters once per step, for all micro-batches, and hold them meanwhile.",
        may_change=True,
    ),
    Key(
        "aggregation_method",
        "EXPERIMENTAL_ACCUMULATE_N",
        "How the gradients of micro-batches are summed: as a running sum, or in pairs with 'EXPERIMENTAL_TREE'.",
        may_change=True,
    ),
    Key(
        "precision",
        "params=float32,compute=float32,output=float32",
        "A jmp policy. compute=float16 needs a loss scale; compute=bfloat16 does not.",
        _precision,
    ),
    Key(
        "on_nonfinite",
        "stop",
        "The reaction to a loss or gradients that are not finite: 'stop'; 'skip', which does not apply steps with "
        "such gradients, whatever the update rule; 'roll_back', which restores a checkpoint and skips the data since; or "
        "'warn', which logs a warning and continues.",
        _on_nonfinite,
        may_change=True,
    ),
    Key(
        "on_parted",
        "stop",
        "The reaction to replicas that hold different copies of state that must be equal: 'stop'; or 'roll_back', which "
        "restores a checkpoint and repeats the same steps.",
        _on_parted,
        may_change=True,
    ),
    Key(
        "max_skips_in_a_row",
        100,
        "The number of consecutive skipped steps, with no loss scale left to lower, that ends the run.",
        _count,
        may_change=True,
    ),
    Key(
        "roll_back.limit",
        3,
        "The most roll-backs of a run; the next one ends it.",
        _count,
        True,
    ),
    Key(
        "roll_back.loss_factor",
        0.0,
        "With on_nonfinite='roll_back': also roll back at a loss above this multiple of the recent median; 0: never.",
        _factor_or_never,
        may_change=True,
    ),
    Key(
        "roll_back.loss_steps",
        100,
        "The number of steps in that median. No loss is judged before the run has made that many.",
        _count,
        may_change=True,
    ),
    Key(
        "roll_back.learning_rate_factor",
        1.0,
        "The factor by which each roll-back that skips data scales all later updates of rules with `backs_off`; 1: none.",
        _factor_to_lower,
        may_change=True,
    ),
    Key(
        "group_assignment",
        (),
        "The replica numbers of each group, such as [[0, 1, 2, 3], [4, 5, 6, 7]]; each group trains its own model. "
        "Empty: one group of all replicas.",
    ),
    Key(
        "slices",
        1,
        "Slices (or machines) connected by a slower network.",
        _count,
        may_change=True,
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
        "The number of logical replicas of a group, distributed over the available devices. Results depend on this "
        "number and not on the number of devices. 0: each device is one replica.",
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
        "The dtype in which gradients are summed over replicas; 'bfloat16' sends half the bytes.",
        may_change=True,
    ),
    Key(
        "reduction.slice_dtype",
        "float32",
        "The dtype of that sum between slices; also 'int8', which carries the rounding error to the next step.",
        may_change=True,
    ),
    Key(
        "reduction.shard_update",
        False,
        "Whether each replica updates only its shard of each parameter, and holds only the slots of that shard.",
        may_change=True,
    ),
    Key(
        "reduction.arithmetic",
        "float",
        "How gradients of logical replicas are summed: 'float'; 'exact', which gives the same bits on any number of "
        "devices; or 'exact_wide', which also keeps small numbers beside large ones, and sends twice the bytes.",
        may_change=True,
    ),
    Key(
        "reduction.shard_params",
        False,
        "Whether each replica also holds only its shard of the parameters between steps.",
        may_change=True,
    ),
    Key(
        "writers",
        ("jsonl", "csv", "tensorboard"),
        "The writers of metrics: 'jsonl' (required), 'csv', 'tensorboard', 'wandb', or the dotted path of your own class.",
        may_change=True,
    ),
    Key(
        "log_every_steps", 50, "The number of steps between logged rows.", _count, True
    ),
    Key(
        "fingerprint_every_steps",
        10,
        "The number of steps between fingerprints of the state, which detect replicas that diverge; 0: never.",
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
        "The number of steps between calls of `Experiment.samples`; 0: only after the last step.",
        _count_or_never,
        may_change=True,
    ),
    Key(
        "checkpoint.directory",
        "",
        "The directory of checkpoints: a path, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER; empty: in the work directory.",
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
        "The host memory, in GB, for data that is being saved or restored, in addition to the state.",
        _gigabytes,
    ),
)
_MAY_CHANGE = {key.name for key in KEYS if key.may_change}


def _is_optional(name: str) -> bool:
    """Returns whether a config may lack a key: the experiment decides which arguments
    CrossShardOptimizer gets.
    """
    return name.startswith("reduction.")
