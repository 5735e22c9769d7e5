"""The identity of a run, and which changes of its config make it another run."""

import hashlib
import json
import secrets
from typing import Any, NamedTuple

import ml_collections

from xshard import config as config_lib
from xshard import errors

_ID_LENGTH = 16


class Identity(NamedTuple):
    """The identity of a run, which is part of everything that the run writes.

    Attributes:
      id: a random ID, created when the run began.
      fingerprint: a checksum of the config values that may not change during the run.
    """

    id: str
    fingerprint: str


def new(config: ml_collections.ConfigDict) -> Identity:
    """Creates the identity of a new run."""
    return Identity(
        id=secrets.token_hex(_ID_LENGTH // 2), fingerprint=fingerprint(config)
    )


def fingerprint(config: ml_collections.ConfigDict) -> str:
    """Returns a checksum of the config values that may not change during a run."""
    fixed = _fixed(config_lib.flatten(plain(config)))
    content = json.dumps(fixed, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:_ID_LENGTH]


def plain(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Converts a config to plain JSON values."""
    return json.loads(config.to_json_best_effort())


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
        if _is_equal(old.get(key), new.get(key)):
            continue
        change = f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        changes.append(change)
        if old_fixed.get(key) != new_fixed.get(key):
            fatal.append(change)
    if fatal:
        raise errors.UserError(
            f"{whose} a run with another config ({'; '.join(fatal)}). A run cannot "
            "continue with these changes: give its old values, or a new directory; "
            "--init_from takes its parameters."
        )
    return changes


def _is_equal(old: Any, new: Any) -> bool:
    # NaN is not equal to itself, so the values are compared as texts, too.
    return old == new or repr(old) == repr(new)


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
