"""The keys that the config of every run has: what they may be, and what it means that one is missing."""

from typing import NamedTuple

import jmp
import ml_collections

from xshard import errors, nonfinite, saving
from xshard.files import identity as identity_lib
from xshard.metrics import writers as writers_lib

_COUNTS = (
    "steps", "batch_size", "eval_batch_size", "micro_batches", "slices", "model_parallel",
    "log_every_steps", "eval_every_steps", "checkpoint.every_steps", "max_skips_in_a_row",
)  # fmt: skip
_OTHER_KEYS = (
    "experiment",
    "seed",
    "precision",
    "group_assignment",
    "aggregation_method",
    "writers",
    "on_nonfinite",
    *(f"checkpoint.{key}" for key in saving.CHECKPOINT_KEYS),
)


class Due(NamedTuple):
    """The steps at which a run evaluates and saves.

    Attributes:
      last: the last step, at which it does both.
      evaluation_every: so many steps lie between evaluations.
      save_every: the same of saves.
      saves_evaluated: whether each state that is evaluated is saved, too, since one of them may be the best.
    """

    last: int
    evaluation_every: int
    save_every: int
    saves_evaluated: bool

    @classmethod
    def of(cls, config: ml_collections.ConfigDict) -> "Due":
        """Those of a run's config."""
        options = config.checkpoint
        return cls(
            config.steps, config.eval_every_steps, options.every_steps, options.keep_best > 0
        )

    def evaluation(self, step: int) -> bool:
        """Returns whether the state after a step is to be evaluated."""
        return step == self.last or step % self.evaluation_every == 0

    def save(self, step: int) -> bool:
        """Returns whether it is to be saved."""
        is_due = step == self.last or step % self.save_every == 0
        return is_due or (self.saves_evaluated and self.evaluation(step))


def check(config: ml_collections.ConfigDict) -> None:
    """Raises ValueError unless the config has the keys of a run, with numbers that make sense."""
    values = identity_lib.flatten(identity_lib.plain(config))
    missing = [key for key in (*_COUNTS, *_OTHER_KEYS) if key not in values]
    if missing:
        raise errors.UserError(
            f"The config lacks {', '.join(missing)}; configs/digits.py, and the config that `python -m "
            "xshard.new` writes, show every key."
        )
    for key in _COUNTS:
        value = values[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise errors.UserError(f"{key}={value!r} must be an integer of at least 1.")
    if not isinstance(config.seed, int) or not 0 <= config.seed < 2**32:
        raise errors.UserError(f"seed={config.seed!r} must be an integer from 0 to 2**32 - 1.")
    if config.on_nonfinite not in nonfinite.POLICIES:
        raise errors.UserError(
            f"on_nonfinite={config.on_nonfinite!r} must be 'stop', 'skip', which leaves out steps whose gradients "
            "are not finite, or 'warn', which says so and goes on."
        )
    writers_lib.check(config.writers)
    try:
        jmp.get_policy(config.precision)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise errors.UserError(
            f"precision={config.precision!r} is no policy of jmp ({e}); an example: "
            "'params=float32,compute=float16,output=float32'."
        ) from e
