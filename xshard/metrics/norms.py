"""The norms of each parameter, its gradient and its update, as rows of norms.jsonl.

A row is `{'step': 500, 'kind': 'norms', 'norms': {learner: {'paths': [...],
'gradient': [...], 'parameter': [...], 'update': [...]}}}`, in which the lists have an
element for each parameter that is trained. With several groups, the elements of the
last three are lists of one number per group. A learner that is the whole of an
experiment's state has the name ''. Paths stand once in a row, since a model may have
thousands of parameters.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from xshard import errors
from xshard.files import jsonfile
from xshard.learners import state as learner_state
from xshard.metrics import rows

KINDS = learner_state.NORMS_BY_ARRAY
# The norm of an update by that of its parameter. No row stores it.
RATIO = "ratio"
_NORMS = "norms"
_PATHS = "paths"


class Norms(NamedTuple):
    """The norms of one parameter in a row.

    Attributes:
      learner: the name of its learner.
      path: its path.
      values: the numbers of all groups for each of `KINDS` and for `RATIO`; nan if not
        finite, or for the ratio to a parameter of zeros.
    """

    learner: str
    path: str
    values: dict[str, list[float]]


def row(step: int, norms: Mapping[str, Any]) -> rows.Row:
    """Returns the row of a step.

    Args:
      step: the number of completed steps.
      norms: the `ArrayNorms` of each learner, by its name.

    Raises:
      UserError: if the row is larger than a line may be.
    """
    by_learner = {}
    for learner, of_learner in norms.items():
        # The dimensions of kinds and of parameters come first, then that of groups.
        values = np.moveaxis(np.asarray(of_learner.values), (-2, -1), (0, 1))
        lists: dict[str, Any] = {_PATHS: list(of_learner.paths)}
        for kind, of_kind in zip(KINDS, values, strict=True):
            lists[kind] = [_rounded(value) for value in of_kind.tolist()]
        by_learner[learner] = lists
    new = {"step": step, rows.KIND: rows.NORMS, _NORMS: by_learner}
    size = len(jsonfile.dumps(new))
    if size >= jsonfile.LINE_BYTES:
        raise errors.UserError(
            f"The norms of all parameters take {size:,} bytes in a row, which must be "
            f"below {jsonfile.LINE_BYTES:,}: set log_norms_every_steps to 0."
        )
    return new


def parameters(norms_row: Mapping[str, Any]) -> Iterator[Norms]:
    """Yields the norms of each parameter of a row.

    The file may have been edited by hand, so invalid entries are left out.
    """
    by_learner = norms_row.get(_NORMS)
    if not isinstance(by_learner, Mapping):
        return
    for learner, lists in by_learner.items():
        if not isinstance(lists, Mapping):
            continue
        columns = [lists.get(name) for name in (_PATHS, *KINDS)]
        if not all(isinstance(column, list) for column in columns):
            continue
        for path, *of_kinds in zip(*columns, strict=False):
            values = {}
            for kind, value in zip(KINDS, of_kinds, strict=True):
                values[kind] = rows.of_groups(value)
            groups = {len(numbers) for numbers in values.values()}
            if isinstance(path, str) and len(groups) == 1 and 0 not in groups:
                pairs = zip(values["update"], values["parameter"], strict=True)
                values[RATIO] = [x / y if y else math.nan for x, y in pairs]
                yield Norms(learner, path, values)


def by_name(norms_row: Mapping[str, Any]) -> rows.Row:
    """Returns the numbers of a row by names such as 'norms/update/mlp/w', with 'step'.

    >>> norms = {'gradient': [3.], 'parameter': [2.], 'update': [1.]}
    >>> row = {'step': 5, 'norms': {'': {'paths': ['mlp/w'], **norms}}}
    >>> for name, value in by_name(row).items():
    ...     print(name, value)
    step 5
    norms/gradient/mlp/w 3.0
    norms/parameter/mlp/w 2.0
    norms/update/mlp/w 1.0
    norms/ratio/mlp/w 0.5
    """
    numbers: rows.Row = {"step": norms_row["step"]}
    for norms in parameters(norms_row):
        name = norms.path
        if norms.learner:
            name = f"{norms.learner}/{name}"
        for kind, values in norms.values.items():
            value: Any = values
            if len(values) == 1:
                (value,) = values
            numbers[f"{_NORMS}/{kind}/{name}"] = value
    return numbers


def _rounded(value: Any) -> Any:
    """Returns a number, or a list of them, with as many digits as a reader needs."""
    if isinstance(value, list):
        return [_rounded(number) for number in value]
    return float(f"{value:.6g}")
