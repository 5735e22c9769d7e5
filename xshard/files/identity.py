"""The identity of a run, and which changes of its config leave it the same run."""

import hashlib
import json
import secrets
from typing import Any, NamedTuple

import ml_collections

from xshard import config as config_lib
from xshard import errors

ID_LENGTH = 16


class Identity(NamedTuple):
    """The identity of a run, in all that it writes.

    Attributes:
      id: made when it began.
      fingerprint: a checksum of all in its config that may not change.
    """

    id: str
    fingerprint: str


def new(config: ml_collections.ConfigDict) -> Identity:
    """An identity for a run that begins."""
    return Identity(secrets.token_hex(ID_LENGTH // 2), fingerprint(config))


def fingerprint(config: ml_collections.ConfigDict) -> str:
    """A checksum of all in a config that may not change in a run."""
    content = json.dumps(_fixed(config_lib.flatten(plain(config))), sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:ID_LENGTH]


def compare(old: dict[str, Any], new: dict[str, Any], whose: str) -> list[str]:
    """Sees whether a run may go on with another config than it was started with.

    Args:
      old: its config, as JSON can hold it.
      new: the one that is asked for.
      whose: for the message, such as '--workdir=DIR holds'.

    Returns:
      What has changed, one text for each key.

    Raises:
      UserError: if a change would make it another run.
    """
    old = config_lib.with_defaults(config_lib.flatten(old))
    new = config_lib.with_defaults(config_lib.flatten(new))
    if old.get("experiment") != new.get("experiment"):
        raise errors.UserError(
            f"{whose} a run of experiment={old.get('experiment')!r}, not of {new.get('experiment')!r}; give "
            "another directory."
        )
    old_fixed, new_fixed = _fixed(old), _fixed(new)
    texts, fatal = [], []
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) == new.get(key):
            continue
        text = f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        texts.append(text)
        if old_fixed.get(key) != new_fixed.get(key):
            fatal.append(text)
    if fatal:
        raise errors.UserError(
            f"{whose} a run with another config ({'; '.join(fatal)}). Going on would make it neither the one nor "
            "the other: give its own values, or a new directory; --init_from takes its parameters."
        )
    return texts


def _fixed(flat: dict[str, Any]) -> dict[str, Any]:
    """Selects what of a config may not change; of the groups how many they are, of however many replicas each."""
    fixed = {key: value for key, value in flat.items() if not config_lib.may_change(key)}
    groups = fixed.get("group_assignment")
    if isinstance(groups, list):
        fixed["group_assignment"] = max(len(groups), 1)
    return fixed


def plain(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """A config as plain JSON values."""
    return json.loads(config.to_json_best_effort())
