"""The keys of a config's `loss_scale`: how a run scales losses under a plain optax
transformation.

They stand apart from the table of all keys, because a learner reads only these.
"""

from collections.abc import Mapping
from typing import Any

NONE = "none"
DYNAMIC = "dynamic"
FIXED = "fixed"
# The arguments of each kind of loss scale, which are keys too, with their defaults.
ARGUMENTS: dict[str, dict[str, Any]] = {
    NONE: {},
    DYNAMIC: {
        "initial_loss_scale": 2.0**15,
        "increment_period": 2000,
        "multiplier": 2.0,
    },
    FIXED: {"loss_scale_value": 2.0**15},
}
KINDS = tuple(ARGUMENTS)


def kind(config: Any) -> str:
    """Returns the kind of loss scale that a run's config asks for."""
    return str(config.get("loss_scale", {}).get("kind", NONE))


def arguments(config: Any) -> Mapping[str, Any]:
    """Returns the arguments of the kind that a run's config asks for."""
    given = config.get("loss_scale", {})
    defaults = ARGUMENTS[kind(config)]
    return {name: given.get(name, default) for name, default in defaults.items()}
