"""The identity of a new run, and which changes of its config make it another run."""

import hashlib
import json
import secrets
from collections.abc import Mapping
from typing import Any

import ml_collections

from xshard import config as config_lib
from xshard import config_values, errors
from xshard.files import provenance as provenance_lib

_ID_LENGTH = 16
# The most characters of a change that a message shows in full.
_SHOWN = 300
# The name under which a run notes the program that makes its steps, and the programs:
# one for several steps, a loop; and one for a single step.
STEP_PROGRAM = "step_program"
LOOP = "loop"
STEP = "step"


def new(config: ml_collections.ConfigDict) -> provenance_lib.Identity:
    """Creates the identity of a new run."""
    return provenance_lib.Identity(
        id=secrets.token_hex(_ID_LENGTH // 2), fingerprint=fingerprint(config)
    )


def step_program(noted: Mapping[str, Any]) -> str:
    """Returns the program that makes a run's steps, `LOOP` or `STEP`.

    Args:
      noted: what the run has noted. Runs that began before there was a choice have
        noted nothing.
    """
    return str(noted.get(STEP_PROGRAM, STEP))


def fingerprint(config: ml_collections.ConfigDict) -> str:
    """Returns a checksum of the config values that may not change during a run."""
    fixed = _fixed(config_lib.flatten(plain(config)))
    # Empty dictionaries have never counted.
    fixed = {key: value for key, value in fixed.items() if value != {}}
    content = json.dumps(fixed, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:_ID_LENGTH]


def plain(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Converts a config to plain JSON values; raises UserError if they cannot hold it
    exactly.
    """
    return config_values.to_json(config)


def compare(old: dict[str, Any], new: dict[str, Any], whose: str) -> list[str]:
    """Checks whether a run may resume with another config than it was started with.

    Args:
      old: the run's config, as plain JSON values.
      new: the config to resume with, likewise.
      whose: the beginning of the message, such as '--workdir=DIR holds'.

    Returns:
      The changes, one text for each key.

    Raises:
      UserError: if a change would make it another run.
    """
    old = config_lib.with_defaults(config_lib.flatten(old))
    new = config_lib.with_defaults(config_lib.flatten(new))
    if old.get("experiment") != new.get("experiment"):
        raise errors.UserError(
            f"{whose} a run of experiment={old.get('experiment')!r}, not of "
            f"{new.get('experiment')!r}; give another directory."
        )
    old_fixed = _fixed(old)
    new_fixed = _fixed(new)
    changes = []
    fatal = []
    for key in sorted(old.keys() | new.keys()):
        before = old.get(key, _ABSENT)
        after = new.get(key, _ABSENT)
        if is_equal(before, after):
            continue
        change = f"{key}: {_difference(before, after)}"
        changes.append(change)
        if not is_equal(old_fixed.get(key, _ABSENT), new_fixed.get(key, _ABSENT)):
            fatal.append(change)
    _check_order(old.get("group_assignment"), new.get("group_assignment"), whose)
    if fatal:
        raise errors.UserError(
            f"{whose} a run with another config ({'; '.join(fatal)}). A run cannot "
            "continue with these changes: give its old values, or a new directory; "
            "--init_from takes its parameters, and with --init_select its slots."
        )
    return changes


class _Absent:
    """Stands for the value of a key that a config lacks, which is not None."""

    def __repr__(self) -> str:
        return "(absent)"


_ABSENT = _Absent()


def is_equal(old: Any, new: Any) -> bool:
    """Returns whether two values of config.json are the same."""
    if old is _ABSENT or new is _ABSENT:
        return old is new
    if config_values.is_import(old) and config_values.is_import(new):
        return config_values.is_same_import(old, new)
    # NaN is not equal to itself, and 1 is equal to True and 1.0, so the values are
    # compared as config.json has them.
    return _text(old) == _text(new)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _difference(old: Any, new: Any) -> str:
    """Returns a text of two different values; of long lists, the first difference."""
    text = f"{old!r} -> {new!r}"
    if len(text) <= _SHOWN:
        return text
    if isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            return f"a list of {len(old)} values -> one of {len(new)}"
        for i, (before, after) in enumerate(zip(old, new, strict=True)):
            if not is_equal(before, after):
                return f"at {i}, {_difference(before, after)}"
    shown = []
    for value in (old, new):
        one = repr(value)
        if len(one) > _SHOWN:
            one = f"{one[:_SHOWN]}... ({len(one)} characters)"
        shown.append(one)
    return " -> ".join(shown)


def _check_order(old: Any, new: Any, whose: str) -> None:
    """Raises UserError if the same groups come in another order.

    The models of a checkpoint are in the order of its groups, so each group would go on
    with another one's model.
    """
    if not isinstance(old, list) or not isinstance(new, list):
        return
    old_groups = [sorted(group) for group in old]
    new_groups = [sorted(group) for group in new]
    if old_groups != new_groups and sorted(old_groups) == sorted(new_groups):
        raise errors.UserError(
            f"{whose} a run with group_assignment={old!r}; {new!r} has the same groups "
            "in another order, so that each would go on with the model and the data of "
            "another one. Give them in the run's order."
        )


def _fixed(flat: dict[str, Any]) -> dict[str, Any]:
    """Selects the config values that may not change during a run."""
    fixed = {
        key: value for key, value in flat.items() if not config_lib.may_change(key)
    }
    # The number of groups may not change, but the number of replicas in each group may.
    groups = fixed.get("group_assignment")
    if isinstance(groups, list):
        fixed["group_assignment"] = max(len(groups), 1)
    return fixed
