"""The low-rank adaptations of a state, which are saved with its matrices.

With another alpha, or another rank, the same matrices add another product to the
parameters (see `xshard.lora`).
"""

from collections.abc import Mapping
from typing import Any

from xshard import errors
from xshard import state as state_lib
from xshard.learners import lora as lora_lib


def of(state: state_lib.TrainState) -> dict[str, dict[str, float]]:
    """Returns the rank and the alpha of each adapted learner, by its path."""
    found = {}
    for name, learner in state_lib.learners(state).items():
        if learner.meta.lora is not None:
            found[name] = learner.meta.lora.factors
    return found


def check(metadata: Mapping[str, Any], state: state_lib.TrainState, where: str) -> str:
    """Checks that a state is adapted as it was when a checkpoint of it was saved.

    Args:
      metadata: the metadata of the checkpoint.
      state: the state that it was restored to.
      where: names the checkpoint in messages.

    Returns:
      A note on what the matrices mean if the checkpoint does not say it; else empty.

    Raises:
      UserError: if the adaptation differs.
    """
    now = of(state)
    saved = metadata.get(lora_lib.METADATA)
    if not isinstance(saved, dict):
        if not now:
            return ""
        shown = [lora_lib.described(factors) for factors in now.values()]
        return (
            f"{where} is of an earlier version, which did not save the alpha of "
            f"low-rank matrices: they are taken with {', '.join(shown)}, as the "
            "experiment has it now"
        )
    for name, factors in now.items():
        before = saved.get(name)
        if isinstance(before, dict) and before != factors:
            whose = f"'{name}' of {where}" if name else where
            raise errors.UserError(
                f"{whose} was trained with {lora_lib.described(before)}, and the "
                f"experiment now has {lora_lib.described(factors)}, with which its "
                "low-rank matrices make another model: give the old values. For other "
                "values, export this run with the old ones, which merges the "
                "matrices: python -m xshard.export RUN --to=FILE.safetensors."
            )
    return ""
