"""Update rules as stateful Haiku modules; `base` says how they meet."""
