"""Update rules as stateful Haiku modules. `base` defines how they compose."""
