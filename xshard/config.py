"""Every key that the config of a run has: its default, what it means, what it may be, and whether it may change."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jmp
import ml_collections

from xshard import errors

# What a run does about a loss or gradients that are not finite.
ON_NONFINITE = STOP, SKIP, WARN, ROLL_BACK = ("stop", "skip", "warn", "roll_back")
# What it does about replicas that hold different copies of what is equal on them.
ON_PARTED = (STOP, ROLL_BACK)


def default() -> ml_collections.ConfigDict:
    """Returns a config with every key at its default, for an experiment's own to change and add to.

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


def check(config: ml_collections.ConfigDict) -> None:
    """Raises UserError unless a config has every key of a run, with values that make sense alone."""
    values = flatten(config.to_dict())
    missing = [key.name for key in KEYS if key.name not in values and not _is_optional(key.name)]
    if missing:
        raise errors.UserError(
            f"The config lacks {', '.join(missing)}: begin with `xshard.config.default()`, which has every key."
        )
    for key in KEYS:
        if key.name in values and key.check is not None:
            key.check(key.name, values[key.name])


def may_change(name: str) -> bool:
    """Returns whether the value of a key, such as 'checkpoint.keep_last', may change when a run goes on."""
    return name.startswith("checkpoint.") or name in _MAY_CHANGE


def describe(config: ml_collections.ConfigDict) -> str:
    """Returns each key of a config with its value, and with what it means if every run has it."""
    values = flatten(config.to_dict())
    lines = []
    for key in KEYS:
        if key.name in values:
            lines += [f"# {key.meaning}", f"{key.name} = {values.pop(key.name)!r}"]
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
    """Returns the values by path, with what a config may do without at its default."""
    optional = {key.name: key.default for key in KEYS if _is_optional(key.name)}
    return {**optional, **flat}


def _must_be(is_good: Callable[[Any], bool], rule: str) -> Callable[[str, Any], None]:
    """The check that raises UserError, with the rule, unless a value is good."""

    def check(name: str, value: Any) -> None:
        if not is_good(value):
            raise errors.UserError(f"{name}={value!r} must be {rule}.")

    return check


_is_int = lambda x: isinstance(x, int) and not isinstance(x, bool)
_is_number = lambda x: _is_int(x) or isinstance(x, float)
_count = _must_be(lambda x: _is_int(x) and x >= 1, "an integer of at least 1")
_count_or_never = _must_be(lambda x: _is_int(x) and x >= 0, "an integer from 0, which is never")
_seed = _must_be(lambda x: _is_int(x) and 0 <= x < 2**32, "an integer from 0 to 2**32 - 1")
_text = _must_be(lambda x: isinstance(x, str), "a string")
_minutes = _must_be(lambda x: _is_number(x) and x >= 0, "a number from 0, which is never")
_gigabytes = _must_be(lambda x: _is_number(x) and 0 < x < math.inf, "a number above 0")
_factor_to_lower = _must_be(lambda x: _is_number(x) and 0 < x <= 1, "a number above 0, at most 1")
_factor_or_never = _must_be(
    lambda x: _is_number(x) and (x == 0 or 1 < x < math.inf),
    "a number above 1, or 0, which is never",
)
_on_nonfinite = _must_be(
    ON_NONFINITE.__contains__,
    "'stop', 'skip', which leaves out steps whose gradients are not finite, 'roll_back', which goes back to a checkpoint "
    "and past the data, or 'warn', which says so and goes on",
)
_on_parted = _must_be(ON_PARTED.__contains__, "'stop' or 'roll_back', which makes steps again")
_on_failure = _must_be(
    ("stop", "go_on").__contains__, "'stop' or 'go_on', which trains on without the checkpoint"
)


def _precision(name: str, value: Any) -> None:
    try:
        jmp.get_policy(value)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise errors.UserError(
            f"{name}={value!r} is no policy of jmp ({e}); an example: "
            "'params=float32,compute=float16,output=float32'."
        ) from e


class Key(NamedTuple):
    """A key of every run.

    Attributes:
      name: its path, such as 'checkpoint.keep_last'.
      default: its value where a config does not say.
      meaning: for people.
      check: raises UserError, given the name and a value that makes no sense; None leaves that to what reads the key.
      may_change: whether a run may go on with another value; if not, it would be another run.
    """

    name: str
    default: Any
    meaning: str
    check: Callable[[str, Any], None] | None = None
    may_change: bool = False


KEYS = (
    Key("experiment", "", "The dotted path of the experiment's class."),
    Key("seed", 0, "The seed of all randomness.", _seed),
    Key("steps", 1000, "The steps that the run makes.", _count, may_change=True),
    Key("batch_size", 128, "The examples of a step on all replicas of a group together.", _count),
    Key("eval_batch_size", 128, "The examples that are evaluated at a time.", _count, True),
    Key(
        "micro_batches",
        1,
        "Parts of a batch that a replica computes one after the other, where memory is short.",
        _count,
        may_change=True,
    ),
    Key(
        "gather_once",
        False,
        "Whether parameters in shards are gathered once for all of them, and kept meanwhile.",
        may_change=True,
    ),
    Key(
        "aggregation_method",
        "EXPERIMENTAL_ACCUMULATE_N",
        "How their gradients are summed: in a running sum, or 'EXPERIMENTAL_TREE', in pairs.",
        may_change=True,
    ),
    Key(
        "precision",
        "params=float32,compute=float32,output=float32",
        "A policy of jmp; compute=float16 needs a loss scale, compute=bfloat16 none.",
        _precision,
    ),
    Key(
        "on_nonfinite",
        "stop",
        "At a loss or gradients that are not finite: 'stop'; 'skip', which leaves out steps with such gradients, "
        "whatever the rule; 'roll_back', to a checkpoint, and past the data; or 'warn', which says so and goes on.",
        _on_nonfinite,
        may_change=True,
    ),
    Key(
        "on_parted",
        "stop",
        "Where replicas hold different copies of what is equal on them: 'stop'; or 'roll_back', and the same steps again.",
        _on_parted,
        may_change=True,
    ),
    Key(
        "max_skips_in_a_row",
        100,
        "So many steps skipped in a row, with no loss scale left to be lowered, end the run.",
        _count,
        may_change=True,
    ),
    Key(
        "roll_back.limit", 3, "So many roll-backs at most; the next one ends the run.", _count, True
    ),
    Key(
        "roll_back.loss_factor",
        0.0,
        "Rolls back also at a loss above so many times the median of the last ones; 0: never.",
        _factor_or_never,
        may_change=True,
    ),
    Key(
        "roll_back.loss_steps",
        100,
        "The median is of so many steps, and nothing is said before these have been made.",
        _count,
        may_change=True,
    ),
    Key(
        "roll_back.learning_rate_factor",
        1.0,
        "Each roll-back past data multiplies the updates by so much from there on, where the rule has `backs_off`; 1: none.",
        _factor_to_lower,
        may_change=True,
    ),
    Key(
        "group_assignment",
        (),
        "The replicas of each group, as [[0, 1, 2, 3], [4, 5, 6, 7]], to train a model each; empty: all in one.",
    ),
    Key("slices", 1, "Pods, or machines, that a slower network joins.", _count, may_change=True),
    Key(
        "model_parallel",
        1,
        "The devices that hold one replica's parameters together.",
        _count,
        may_change=True,
    ),
    Key(
        "logical_replicas",
        0,
        "The replicas of a group, shared out among whatever devices there are: what the run computes depends on them, "
        "and not on the devices. 0: each device is one.",
        _count_or_never,
    ),
    Key("reduction.reduction", "mean", "How CrossShardOptimizer combines gradients; or 'sum'."),
    Key(
        "reduction.reduce_dtype",
        "float32",
        "The type in which it sums over replicas; 'bfloat16' halves the bytes.",
        may_change=True,
    ),
    Key(
        "reduction.slice_dtype",
        "float32",
        "The same between slices; also 'int8', which keeps what rounding loses for the next step.",
        may_change=True,
    ),
    Key(
        "reduction.shard_update",
        False,
        "Whether each replica updates its shard of each array, and holds the slots of that alone.",
        may_change=True,
    ),
    Key(
        "reduction.arithmetic",
        "float",
        "How logical replicas add up: 'float'; 'exact', which gives the same bits on any number of devices; or 'exact_wide', "
        "which keeps small numbers beside large ones, and sends twice the bytes.",
        may_change=True,
    ),
    Key("reduction.shard_params", False, "The same of the parameters themselves.", may_change=True),
    Key(
        "writers",
        ("jsonl", "csv", "tensorboard"),
        "Where rows go: 'jsonl' always, 'csv', 'tensorboard', 'wandb', or the dotted path of a class of one's own.",
        may_change=True,
    ),
    Key("log_every_steps", 50, "The steps from one logged row to the next.", _count, True),
    Key(
        "fingerprint_every_steps",
        10,
        "The steps from one fingerprint of the state to the next, which shows replicas that part; 0: never.",
        _count_or_never,
        may_change=True,
    ),
    Key("eval_every_steps", 500, "The steps from one evaluation to the next.", _count, True),
    Key(
        "samples_every_steps",
        0,
        "The steps from one call of `Experiment.samples` to the next; 0: after the last step alone.",
        _count_or_never,
        may_change=True,
    ),
    Key(
        "checkpoint.directory",
        "",
        "Where checkpoints are: a path, gs://BUCKET/FOLDER, s3://BUCKET/FOLDER; empty: in the work directory.",
        _text,
    ),
    Key("checkpoint.every_steps", 500, "The steps from one checkpoint to the next.", _count),
    Key("checkpoint.every_minutes", 0.0, "The same in minutes; 0: never.", _minutes),
    Key("checkpoint.keep_last", 3, "So many of the newest are kept."),
    Key("checkpoint.keep_every_steps", 0, "Those of steps that this divides are kept; 0: none."),
    Key("checkpoint.keep_best", 0, "So many of the best are kept, by `best_metric`."),
    Key("checkpoint.best_metric", "loss", "A metric of the evaluation.", _text),
    Key("checkpoint.best_mode", "min", "Whether its least or its largest, 'max', is the best."),
    Key(
        "checkpoint.on_failure",
        "stop",
        "When a save fails: 'stop', or 'go_on' without it.",
        _on_failure,
    ),
    Key(
        "checkpoint.budget_gb",
        4.0,
        "Host memory for what is being saved or read, beside the state.",
        _gigabytes,
    ),
)
_MAY_CHANGE = {key.name for key in KEYS if key.may_change}


def _is_optional(name: str) -> bool:
    """Returns whether a config may do without a key: what CrossShardOptimizer is given is the experiment's."""
    return name.startswith("reduction.")
