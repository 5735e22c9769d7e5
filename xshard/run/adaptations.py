"""The low-rank adaptations of a state, which are saved with its matrices.

With another alpha, or another rank, the same matrices add another product to the
parameters (see `xshard.lora`).
"""

import functools
import re
from collections.abc import Collection, Mapping
from typing import Any

from xshard import checkpoint, errors
from xshard.files import jsonfile
from xshard.learners import lora as lora_lib
from xshard.run import slices
from xshard.training import state as state_lib


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


def meaning(state: state_lib.TrainState) -> checkpoint.Meaning:
    """Returns what a state that begins with other arrays knows of them."""
    return checkpoint.Meaning(
        stand_ins=slices.exchanged_names,
        # Low-rank matrices are new where the network is adapted for the first time.
        may_lack=lora_lib.PATHS,
        check=functools.partial(_check_taken, of(state)),
    )


def _check_taken(
    adapted: Mapping[str, Any],
    offer: checkpoint.Offer,
    taken: Mapping[str, str],
    paths: Collection[str],
) -> str:
    """Checks that low-rank matrices are taken for the adaptation they were trained in,
    and arrays with the product that is added to them.

    Args:
      adapted: the adaptation of each learner of the state.
      offer: what is offered.
      taken: the stored names of the arrays that are taken, by path.
      paths: the paths of the state.

    Returns:
      A note if it is not known what they were trained in; else empty.

    Raises:
      CheckpointError: if it is another adaptation, or the product would be lost.
    """
    for path in offer.metas:
        base = re.sub(lora_lib.PATHS, "", path)
        if base != path and base in taken and path not in paths:
            raise checkpoint.CheckpointError(
                f"{offer.where} has low-rank matrices for '{base}', such as '{path}', "
                "which this run has no place for, so what they were trained for would "
                "be lost. Export the run, which merges them, and give the file: python "
                "-m xshard.export RUN --to=FILE.safetensors."
            )
    note = ""
    saved = _saved(offer.metadata)
    for path, name in taken.items():
        is_matrix = re.search(lora_lib.PATHS, path)
        if not is_matrix or not re.search(checkpoint.PARAMS, path):
            continue
        now = adapted.get(_learner_of(path))
        if now is None:
            continue
        before = saved.get(_learner_of(name))
        if before is None:
            note = (
                "it does not say by which alpha its low-rank matrices were trained: "
                f"they are taken with {lora_lib.described(now)}"
            )
        elif before != now:
            raise checkpoint.CheckpointError(
                f"{offer.where}: '{name}' was trained with "
                f"{lora_lib.described(before)}, and this run has "
                f"{lora_lib.described(now)}, with which it makes another model: give "
                "those values, leave the matrices out by --init_select, or begin from "
                "an export that merges them: python -m xshard.export RUN "
                "--to=FILE.safetensors."
            )
    return note


def _saved(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the adaptations in the metadata of a checkpoint or a file, by learner.

    They are empty if it has none, as that of an earlier version.
    """
    content = metadata.get(lora_lib.METADATA)
    try:
        if isinstance(content, str):
            # The metadata of a file are texts.
            content = jsonfile.loads(content.encode())
        return jsonfile.parse(content, dict[str, dict[str, Any]])
    except ValueError:
        return {}


def _learner_of(path: str) -> str:
    """Returns the path of the learner that a parameter belongs to.

    It is empty if there is only one.
    """
    learner, _, _ = f"/{path}".partition("/params/")
    return learner.removeprefix("/")
